"""The pipeline: the upload transforms of a federation, in order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_fcl.data.client_round import ClientRounds
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.accumulators import State
from lightning_fcl.federation.reductions import Reduction
from lightning_fcl.federation.uploads import (
    Code,
    Setting,
    Stage,
    Sums,
    UpdateCodec,
    Uploads,
    UploadTransform,
    difference,
)
from lightning_fcl.validation import format_code_names


@dataclass
class Pipeline:
    """The upload transforms of a federation, in order.

    Args:
        transforms: The transforms.

    Raises:
        InvalidValueError: If the transforms are not in the order of `Stage`, or cannot be combined.
    """

    transforms: Sequence[UploadTransform] = ()
    setting: Setting = field(init=False)

    def __post_init__(self) -> None:
        self.transforms = list(self.transforms)
        stages = [transform.stage for transform in self.transforms]
        if stages != sorted(stages):
            raise InvalidValueError(
                f"Expected `upload_transforms` in the order {', '.join(s.name.lower() for s in Stage)}, but got "
                f"{', '.join(s.name.lower() for s in stages)}.",
                hint="Change the order of the list.",
                argument="upload_transforms",
                value=[type(transform).__name__ for transform in self.transforms],
            )
        for stage in (Stage.COMPRESSION, Stage.CLIP, Stage.MASK):
            names = [type(transform).__name__ for transform in self.transforms if transform.stage is stage]
            if len(names) > 1:
                raise InvalidValueError(
                    f"Expected at most one transform of the stage {stage.name.lower()}, but got {', '.join(names)}.",
                    hint="Keep only one of these transforms.",
                    argument="upload_transforms",
                    value=names,
                )
        codec, mask = self.codec, self.mask
        if codec is not None and mask is not None and not codec.linear:
            raise InvalidValueError(
                f"Expected a `compression` with `linear = True`, because with `{type(mask).__name__}` the server can "
                f"decode only sums of encoded updates, but got `{type(codec).__name__}`.",
                hint="Remove `compression`.",
                argument="compression",
                value=type(codec).__name__,
            )

    @property
    def codec(self) -> UpdateCodec | None:
        """The transform that encodes updates, or None."""
        return next((one for one in self.transforms if isinstance(one, UpdateCodec)), None)

    @property
    def mask(self) -> UploadTransform | None:
        """The transform with ``sums_only = True``, with which the server adds encoded values, or None."""
        return next((one for one in self.transforms if one.sums_only), None)

    @property
    def needs_updates(self) -> bool:
        """Whether clients send updates in place of states."""
        return any(one.needs_updates or one.sums_only or changes_sums(one) for one in self.transforms)

    @property
    def exchanges(self) -> list[UploadTransform]:
        """The transforms that exchange messages with clients before or after the uploads."""
        return [
            one
            for one in self.transforms
            if type(one).before_upload is not UploadTransform.before_upload
            or type(one).after_upload is not UploadTransform.after_upload
        ]

    @property
    def server_entries(self) -> dict[str, tuple[Tensor, Reduction]]:
        """The entries that transforms add to the server's state: initial value and reduction by name."""
        return {name: entry for one in self.transforms for name, entry in one.server_entries.items()}

    @property
    def keeps_state(self) -> bool:
        """Whether clients keep the state of a transform between rounds."""
        return any(one.keeps_state for one in self.transforms)

    def setup(self, setting: Setting) -> None:
        """Prepare all transforms for a round. See `UploadTransform.setup`."""
        self.setting = setting
        summing = [one for one in self.transforms if one.sums_only or changes_sums(one)]
        if summing:
            for name in setting.uploaded:
                if not setting.reductions[name].additive:
                    raise InvalidValueError(
                        f"Expected a reduction that depends only on the sum of uploads, such as `mean` or `sum`, for "
                        f"`{name}` with `{_label(summing[0])}`, but got `{setting.reductions[name]}`.",
                        hint=f"Use another reduction, or remove `{_label(summing[0])}`.",
                        argument="reductions",
                        value=name,
                    )
        if self.mask is not None and setting.senders:
            raise InvalidValueError(
                f"Expected no method whose clients send messages, because with `{type(self.mask).__name__}` the "
                f"server can read only sums, but got {', '.join(setting.senders)}.",
                hint=f"Remove methods whose clients send messages, or remove `{type(self.mask).__name__}`.",
                argument="callbacks",
                value=list(setting.senders),
            )
        for transform in self.transforms:
            transform.setup(setting)

    def encoded(self) -> Collection[str]:
        """Return the names of the entries whose updates are encoded."""
        codec = self.codec
        return [n for n in self.setting.uploaded if codec.codes(n, self.setting)] if codec is not None else ()

    def received(
        self, clients: ClientRounds, weight: float, tensors: Mapping[str, Tensor], optional: Collection[str]
    ) -> Uploads:
        """Return the upload of one client from the tensors that the client sent. See `Uploads.client_tensors`.

        Args:
            clients: The client.
            weight: Weight of the client.
            tensors: The tensors by name.
            optional: Names of the entries that a client omits if they equal the server's state.

        Raises:
            InvalidValueError: If a tensor is missing or unexpected, or has a wrong dtype or shape.
        """
        setting, remaining_tensors = self.setting, dict(tensors)
        origins = {name: setting.reductions[name].empty_upload(setting.state[name]) for name in setting.uploaded}
        uploads = Uploads(clients, [weight], setting.reductions, {}, origins, self.needs_updates)
        coded, codec = self.encoded(), self.codec
        for name, origin in origins.items():
            reference = difference(origin, origin) if self.needs_updates else setting.state[name]
            if codec is not None and name in coded:
                forms = codec.forms(reference)
                code_tensors = {
                    part: _pop_tensor(remaining_tensors, f"{name}/{part}", form).to(reference.device)[None]
                    for part, form in forms.items()
                }
                uploads.codes[name] = Code(codec, code_tensors, reference)
            elif name in optional and name not in remaining_tensors:
                uploads.unchanged[0].add(name)
                uploads.values[name] = reference[None]
            else:
                reduction = setting.reductions[name]
                packed = _pop_tensor(
                    remaining_tensors,
                    name,
                    (reference.dtype, tuple(reference.shape)) if reduction.has_static_size else None,
                )
                try:
                    uploads.values[name] = reduction.unpack(packed.to(reference.device), reference)[None]
                except InvalidValueError as error:
                    raise InvalidValueError(
                        f"Expected `{name}` in the packed format of the reduction `{reduction}`. {error}", argument=name
                    ) from error
        if remaining_tensors:
            raise InvalidValueError(
                "Expected an upload with only the uploaded entries, but also got "
                f"{format_code_names(remaining_tensors)}.",
                argument=next(iter(remaining_tensors)),
            )
        return uploads

    def encode(self, uploads: Uploads) -> None:
        """Apply `UploadTransform.encode` of all transforms to the uploads of clients, first to last."""
        for transform in self.transforms:
            transform.encode(uploads)

    def decode(self, uploads: Uploads) -> None:
        """Decode uploads on the server. Afterwards, the uploads contain no codes."""
        for transform in reversed(self.transforms):
            transform.decode(uploads)

    @property
    def changes_sums(self) -> bool:
        """Whether a transform changes the sums of a round. If so, even a round without uploads can change the state."""
        return any(map(changes_sums, self.transforms))

    def on_sum(self, sums: Sums) -> None:
        """Apply all transforms to the sums of a round."""
        for transform in reversed(self.transforms):
            transform.on_sum(sums)
            if transform is self.mask and self.codec is not None:
                self.codec.decode_sums(sums, self.setting)

    def on_aggregate(self, previous_state: State, aggregate: State) -> None:
        """Apply all transforms to the new server state."""
        for transform in self.transforms:
            transform.on_aggregate(previous_state, aggregate)

    def end_round(self) -> None:
        """Save the state of all transforms."""
        for transform in self.transforms:
            transform.commit_round()

    def undo_round(self) -> None:
        """Restore the state of all transforms from before the round."""
        for transform in self.transforms:
            transform.roll_back_round()


def _label(transform: UploadTransform) -> str:
    return transform.label or type(transform).__name__


def changes_sums(transform: UploadTransform) -> bool:
    """Return whether a transform overrides `UploadTransform.on_sum`."""
    return type(transform).on_sum is not UploadTransform.on_sum


def _pop_tensor(
    tensors: dict[str, Tensor], name: str, form: tuple[torch.dtype, tuple[int, ...]] | None = None
) -> Tensor:
    """Remove a tensor from ``tensors`` and return the tensor.

    Raises:
        InvalidValueError: If the tensor is missing, or does not have the dtype and shape of ``form``.
    """
    if name not in tensors:
        raise InvalidValueError(f"Expected `{name}` in an upload, but it is missing.", argument=name)
    tensor = tensors.pop(name)
    if form is not None and (tensor.dtype, tuple(tensor.shape)) != form:
        raise InvalidValueError(
            f"Expected `{name}` to be {form[0]} of shape {form[1]}, but got {tensor.dtype} of shape "
            f"{tuple(tensor.shape)}.",
            argument=name,
        )
    return tensor
