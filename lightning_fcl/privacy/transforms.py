"""The upload transforms of differential privacy: clipping of updates, and noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.accumulators import State
from lightning_fcl.federation.reductions import DownloadOnly, Reduction, Sum
from lightning_fcl.federation.uploads import Setting, Stage, Sums, Uploads, UploadTransform
from lightning_fcl.privacy.differential_privacy import AdaptiveClip, PrivacyAccount
from lightning_fcl.rng import derive_seed
from lightning_fcl.validation import format_code_names

CLIP = "privacy.clip"
"""Entry of the server's state with the maximum norm of `AdaptiveClip`, a number in double precision."""

UNCLIPPED = "privacy.unclipped"
"""Entry with the number of updates that are not clipped. Each client sends 1/2 or -1/2."""

_MARGIN = 2.0**-20
"""Relative margin of the factor that scales an update, so that rounding does not increase the norm above the limit."""


Scales = Mapping[str, Tensor]
"""Factors of the elements of some entries, which are multiplied before the norm is computed. Default: 1.

An element with an infinite factor is 0 in each upload, and gets no noise.
"""


def scaled_norms(uploads: Uploads, scales: Scales) -> Tensor:
    """Return the joint L2 norm of each client's updates and messages after the multiplication by factors.

    Args:
        uploads: The uploads.
        scales: Factors of some entries. Elements with an infinite factor must be 0.
    """
    squares = uploads.norms().square()
    for name, scale in scales.items():
        update = uploads.update(name)
        finite = torch.where(scale.isinf(), 1.0, scale).to(update.device)
        plain, scaled = (value.double().flatten(1).square().sum(dim=1).cpu() for value in (update, update * finite))
        squares += scaled - plain
    return squares.clamp(min=0).sqrt()


def clip_uploads(uploads: Uploads, max_norm: float, scales: Scales | None = None) -> Tensor:
    """Scale the update of each client so that its joint L2 norm is at most ``max_norm``.

    The norm is computed in double precision over all entries and messages, as the server decodes them.

    Args:
        uploads: The uploads, which are changed in place.
        max_norm: Maximum norm.
        scales: Factors of some entries in the norm. See `Scales`.

    Returns:
        Whether each client's update was at most ``max_norm`` before, shape (clients,).
    """
    scales = scales or {}
    norms, margin = scaled_norms(uploads, scales), _MARGIN
    is_unclipped = norms <= max_norm
    # With at least single precision, one pass with the margin is sufficient.
    messages = (message for client_messages in uploads.messages.values() for message in client_messages)
    values = [*uploads.values.values(), *(value for message in messages for value in message.values())]
    is_rounded = bool(uploads.codes) or any(value.dtype.itemsize < 4 for value in values)
    while bool((too_large := norms > max_norm).any()):
        uploads.scale(torch.where(too_large, max_norm / norms * (1 - margin), 1.0))
        if not is_rounded:
            break
        norms, margin = scaled_norms(uploads, scales), min(0.5, 16 * margin)
    return is_unclipped


class PrivateTransform(UploadTransform):
    """Base class of the transforms of `DifferentialPrivacy`.

    Args:
        account: The account of the federation.

    Attributes:
        find_scales: Function that returns the factors of entries in a round.
    """

    label = "privacy"
    needs_updates = True

    def __init__(self, account: PrivacyAccount) -> None:
        self.find_scales: Callable[[int], Scales] = lambda round_idx: {}
        self._account = account
        self._setting: Setting | None = None
        self._scales: Scales = {}

    @property
    def setting(self) -> Setting:
        """The properties of the federation in this round."""
        assert self._setting is not None  # `setup` is called before each round
        return self._setting

    @property
    def max_norm(self) -> float:
        """The maximum norm of a unit's contribution in this round."""
        is_adaptive = isinstance(self._account.settings.clip, AdaptiveClip)
        return float(self.setting.state[CLIP]) if is_adaptive else self._account.fixed_norm

    def setup(self, setting: Setting) -> None:
        self._setting, self._scales = setting, self.find_scales(setting.round_idx)

    def fingerprint(self) -> dict[str, Any]:
        return {"class": type(self).__name__, **self._account.settings.fingerprint()}


class ClipUpdates(PrivateTransform):
    """A transform that scales the update of each client to at most the maximum norm, with ``unit="client"``.

    Args:
        account: The account of the federation.
    """

    stage: ClassVar[Stage] = Stage.CLIP

    @property
    def server_entries(self) -> Mapping[str, tuple[Tensor, Reduction]]:
        clip = self._account.settings.clip
        if not isinstance(clip, AdaptiveClip):
            return {}
        start = torch.tensor(clip.start, dtype=torch.float64)
        return {CLIP: (start, DownloadOnly()), UNCLIPPED: (torch.zeros_like(start), Sum())}

    def setup(self, setting: Setting) -> None:
        super().setup(setting)
        for name in setting.uploaded:
            value = setting.state[name]
            if not value.is_floating_point():
                raise InvalidValueError(
                    f"Expected floating-point entries in uploads with `privacy`, but `{name}` is {value.dtype}.",
                    hint=f'Set `reductions={{"{name}": "local"}}` of the strategy.',
                    argument="reductions",
                    value=name,
                )
        if setting.senders:
            raise InvalidValueError(
                "Expected no method whose clients send messages with `privacy`, because messages get no noise, but got "
                f"{', '.join(setting.senders)}.",
                hint="Remove these methods, or remove `privacy`.",
                argument="callbacks",
                value=list(setting.senders),
            )

    def encode(self, uploads: Uploads) -> None:
        for name in self.setting.frozen:
            if any(name not in unchanged for unchanged in uploads.unchanged):
                raise InvalidValueError(
                    f"Expected training not to change the frozen parameter `{name}` with `privacy`, but it changed.",
                    hint="Set `requires_grad` to True for parameters that training changes.",
                    argument="requires_grad",
                    value=name,
                )
        for name, scale in self._scales.items():
            update = uploads.update(name)
            uploads.set_update(name, update.where(~scale.isinf().to(update.device), 0))
        if self._account.settings.unit == "sample":
            return
        is_unclipped = clip_uploads(uploads, self.max_norm, self._scales)
        if UNCLIPPED in uploads.values:
            uploads.set_update(UNCLIPPED, is_unclipped.to(uploads.values[UNCLIPPED]) - 0.5)


class AddNoise(PrivateTransform):
    """A transform that adds Gaussian noise to the sum of a round, or to the update of each client.

    With ``noise="server"``, all sums of weighted updates are divided by the expected number of clients. In a
    simulation, the noise depends only on the seed, the round, the entry, and with ``noise="client"`` on the client.

    Args:
        account: The account of the federation.
    """

    stage: ClassVar[Stage] = Stage.NOISE

    def standard_deviation(self, name: str) -> float | Tensor:
        """Return the standard deviation of the noise on an entry of a release."""
        if name == UNCLIPPED:
            return self._account.indicator_noise
        multiplier = self._account.update_noise_multiplier
        if multiplier == 0:
            return 0.0
        deviation = multiplier * self.max_norm
        return deviation / self._scales[name].to(self.setting.state[name].device) if name in self._scales else deviation

    def encode(self, uploads: Uploads) -> None:
        if self._account.settings.noise != "client":
            return
        if uploads.codes:
            raise InvalidValueError(
                'Expected no `compression` with `noise="client"`, because noised updates cannot be compressed, but '
                f"{format_code_names(uploads.codes)} is compressed.",
                hint='Remove `compression`, or use `noise="server"`.',
                argument="compression",
            )
        for name in self.setting.changing:
            update, deviation = uploads.update(name), self.standard_deviation(name)
            noise = torch.stack([self._noise(update[0], name, client) for client in uploads.clients.client_ids])
            uploads.set_update(name, (update + deviation * noise).to(update.dtype))

    def on_sum(self, sums: Sums) -> None:
        """Charge the release, add the noise, and set the denominators to the expected number of clients."""
        account = self._account
        account.charge(sums.round)
        adds_noise = account.settings.noise == "server" and account.noise_multiplier > 0
        for name in self.setting.changing if adds_noise else ():
            value = sums.values[name]
            sums.values[name] = value.double() + self.standard_deviation(name) * self._noise(value, name)
        for name, reduction in self.setting.reductions.items():
            if name in sums.denominators and reduction.weighted:
                sums.denominators[name] = account.expected_clients

    def on_aggregate(self, previous_state: State, aggregate: State) -> None:
        """Compute the maximum norm of the next round."""
        clip = self._account.settings.clip
        if isinstance(clip, AdaptiveClip):
            share = float(aggregate[UNCLIPPED]) / self._account.expected_clients + 0.5
            aggregate[CLIP] = torch.full_like(previous_state[CLIP], clip.next_clip(float(previous_state[CLIP]), share))
            aggregate[UNCLIPPED] = torch.zeros_like(previous_state[UNCLIPPED])

    def state_dict(self) -> dict[str, Any]:
        return self._account.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._account.load_state_dict(state)

    def _noise(self, value: Tensor, name: str, client: str = "") -> Tensor:
        """Return standard normal noise in double precision, with the shape and the device of a tensor."""
        seed = derive_seed(self.setting.seed, "privacy", self.setting.round_idx, name, client)
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)
