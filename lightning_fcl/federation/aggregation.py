"""Aggregation: a module's state, the reduction of each entry, and the aggregator of a round's uploads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_fcl.data.client_round import ClientRounds
from lightning_fcl.data.plain_tensors import plain_tensor
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.accumulators import Accumulator, AddsClientGroups, Reorders, State, Syncable
from lightning_fcl.federation.exact_sum import ExactSums, GroupSums, round_to, weighted_sum
from lightning_fcl.federation.pipeline import Pipeline
from lightning_fcl.federation.ranks import Ranks
from lightning_fcl.federation.reductions import Constant, DownloadOnly, Local, Mean, Reduction, SparseMean, Sum
from lightning_fcl.federation.robust import Krum, Median, TrimmedMean, check_stays_finite
from lightning_fcl.federation.uploads import Sums, UploadTransform
from lightning_fcl.validation import did_you_mean, format_code_names

__all__ = [
    "BUILT_IN_REDUCTIONS",
    "Aggregator",
    "ClientWeights",
    "Reduction",
    "ReductionRules",
    "State",
    "assign_reductions",
    "compute_client_weights",
    "frozen_parameters",
    "get_reduction",
    "get_reductions",
    "load_state_tensors",
    "rules_fingerprint",
    "state_tensors",
]

ReductionRules = Mapping[str, str | Reduction]
"""Reductions (names or objects) by shell-style pattern of entry names, such as ``{"head.*": "local"}``."""

ClientWeights = Literal["samples", "trained_samples", "uniform"] | dict[str, float]
"""Weight of each client in means.

``"samples"``: the client's number of samples in the round. ``"trained_samples"``: the number of samples on which the
client trained, including replay samples. ``"uniform"``: 1. A dict maps each client name to the weight.
"""


def state_tensors(module: nn.Module) -> State:
    """Return a module's state tensors by name, without copies. Tied weights appear once, under their first name.

    Raises:
        InvalidValueError: If the state contains extra state or a value that is not a tensor.
    """
    state: State = {}
    seen_ids: set[int] = set()
    for name, value in module.state_dict(keep_vars=True).items():
        if name.endswith("_extra_state") or not isinstance(value, Tensor):
            description = "extra state" if name.endswith("_extra_state") else f"a value of type {type(value).__name__}"
            raise InvalidValueError(
                f"Expected a state of tensors, but `{name}` is {description}, which cannot be averaged.",
                hint="Store the value in a buffer, with `register_buffer`.",
                argument=name,
            )
        if id(value) not in seen_ids:
            seen_ids.add(id(value))
            state[name] = value
    return state


def load_state_tensors(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Write a state into a module. A tensor gets new storage if its shape changes or its elements share memory."""
    for name, tensor in state_tensors(module).items():
        # `expand` makes several elements share one memory location, so that the tensor cannot be written in place.
        shared = 0 in tensor.stride()
        if tensor.shape == state[name].shape and not shared:
            tensor.data.copy_(state[name])
        else:
            tensor.data = state[name].clone()


def check_state(module: nn.Module, state: Mapping[str, object]) -> None:
    """Raise InvalidValueError if a state does not match a module.

    Names, dtypes and shapes must match. If a tensor of the module is finite, the tensor of this name in the state must
    also be finite.
    """
    expected_state: State = module.state_dict()
    missing, unknown = (
        [name for name in expected_state if name not in state],
        [name for name in state if name not in expected_state],
    )
    if missing or unknown:
        differences = [f"without {format_code_names(missing)}"] * bool(missing) + [
            f"with {format_code_names(unknown)}"
        ] * bool(unknown)
        raise InvalidValueError(
            f"Expected a state with the entries of this {type(module).__name__}, but got a state "
            f"{' and '.join(differences)}.",
            hint="Build the module with the arguments that were used when the state was saved.",
            argument=(missing or unknown)[0],
        )
    for name, tensor in expected_state.items():
        value = state[name]
        if not isinstance(value, Tensor):
            raise InvalidValueError(
                f"Expected `{name}` to be a tensor, but got {type(value).__name__}.",
                hint="Use a state of tensors, as `module.state_dict()` returns.",
                argument=name,
            )
        if value.shape != tensor.shape or value.dtype != tensor.dtype:
            raise InvalidValueError(
                f"Expected `{name}` to be {tensor.dtype} of shape {tuple(tensor.shape)}, but got {value.dtype} of "
                f"shape {tuple(value.shape)}.",
                hint="Build the module with the arguments that were used when the state was saved.",
                argument=name,
                value=value.dtype,
            )
        wrong = int((~torch.isfinite(value)).sum())
        # Accept non-finite numbers if the module's own tensor has some, such as a mask with -inf.
        if wrong and torch.isfinite(tensor).all():
            raise InvalidValueError(
                f"Expected a state of finite numbers, but `{name}` contains non-finite numbers ({wrong} of "
                f"{value.numel()}).",
                hint="Use the state of an earlier round.",
                argument=name,
            )


_ALL = (Mean(), SparseMean(), Sum(), Local(), DownloadOnly(), Constant(), Median(), TrimmedMean(), Krum())
BUILT_IN_REDUCTIONS: dict[str, Reduction] = {reduction.name: reduction for reduction in _ALL}
"""The built-in reductions by name."""


def get_reduction(name: str, reduction: str | Reduction) -> Reduction:
    if isinstance(reduction, Reduction):
        return reduction
    if reduction not in BUILT_IN_REDUCTIONS:
        raise InvalidValueError(
            f"Expected the reduction of `{name}` to be one of {', '.join(BUILT_IN_REDUCTIONS)}, but got `{reduction}`.",
            hint=did_you_mean(reduction, BUILT_IN_REDUCTIONS),
            argument="reductions",
            value=reduction,
        )
    return BUILT_IN_REDUCTIONS[reduction]


def assign_reductions(state: Mapping[str, Tensor], *rules: ReductionRules) -> dict[str, Reduction]:
    """Return the reduction of each entry: from the last rule that matches the entry's name, or ``mean`` by default.

    Raises:
        InvalidValueError: If a pattern matches no entry, or a reduction is unknown.
    """
    reductions = dict.fromkeys(state, BUILT_IN_REDUCTIONS["mean"])
    for pattern, reduction_or_name in (item for rule in rules for item in rule.items()):
        reduction = get_reduction(pattern, reduction_or_name)
        matches = [name for name in state if fnmatchcase(name, pattern)]
        if not matches:
            raise InvalidValueError(
                f"Expected the pattern `{pattern}` in `reductions` to match an entry of the module's state, but it "
                "matches no entry.",
                hint=f"The entries are: {', '.join(state)}.",
                argument="reductions",
                value=pattern,
            )
        reductions.update(dict.fromkeys(matches, reduction))
    return reductions


def get_reductions(module: nn.Module, rules: ReductionRules | None = None) -> dict[str, Reduction]:
    """Return the reduction of each entry of a module's state. ``rules`` override the module's ``reductions``."""
    # Read the attribute in each call, because a property can return other reductions in another round.
    module_rules: object = getattr(module, "reductions", {})
    if not (
        isinstance(module_rules, Mapping) and all(isinstance(given, str | Reduction) for given in module_rules.values())
    ):
        # In this module, the attribute `reductions` has a different meaning.
        module_rules = {}
    return assign_reductions(state_tensors(module), module_rules, rules or {})


def frozen_parameters(module: nn.Module, reductions: Mapping[str, Reduction]) -> list[str]:
    """Return the names of the frozen parameters that clients both download and upload.

    An upload omits such a parameter if training has not changed the parameter. Parameters with a reduction that
    overrides ``initial_value`` are not in the result.
    """
    # The state of a module can omit some parameters.
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad and name in reductions]
    rules = {name: reductions[name] for name in frozen}
    return [
        n
        for n, of in rules.items()
        if of.is_uploaded and of.is_downloaded and type(of).initial_value is Reduction.initial_value
    ]


def rules_fingerprint(rules: ReductionRules) -> dict[str, Any]:
    return {pattern: given if isinstance(given, str) else given.fingerprint() for pattern, given in rules.items()}


def compute_client_weights(client_weights: ClientWeights, client_rounds: ClientRounds) -> list[float]:
    """Return the weight of each client in means."""
    if isinstance(client_weights, dict):
        return [client_weights[client] for client in client_rounds.client_ids]
    if client_weights == "uniform":
        return [1.0] * len(client_rounds)
    weights: list[float] = (
        (client_rounds.num_samples if client_weights == "samples" else client_rounds.num_trained_samples)
        .astype(float)
        .tolist()
    )
    return weights


class UpdateSums:
    """The sums of the clients' updates in a round, for additive reductions.

    Args:
        reductions: The reduction of each entry.
        mask: Upload transform with ``sums_only``. The server then adds the updates that this transform has encoded.
            None if there is no such transform.
    """

    def __init__(self, reductions: Mapping[str, Reduction], mask: UploadTransform | None = None) -> None:
        self.names = [name for name, reduction in reductions.items() if reduction.is_uploaded and reduction.additive]
        self._weighted = {name for name in self.names if reductions[name].weighted}
        self._encoded = mask.make_accumulator() if mask is not None else None
        self._sums, self._means = ExactSums(), ExactSums()
        self._weights: list[float] = []

    def update(self, updates: Mapping[str, Tensor], weights: Sequence[float]) -> None:
        """Add the updates of some clients, each of shape (clients, ...). With a mask, add the encoded updates."""
        self._weights += weights
        if self._encoded is not None:
            self._encoded.update(updates, weights)
            return
        self._sums.add({name: updates[name] for name in self.names if name not in self._weighted})
        self._means.add({name: updates[name] for name in self.names if name in self._weighted}, weights)

    def sync(self, ranks: Ranks) -> None:
        """Add the sums of the other ranks."""
        if self._encoded is not None:
            if not isinstance(self._encoded, Syncable):
                raise InvalidValueError(
                    f"Expected one device for the accumulator `{type(self._encoded).__name__}`, which has no `sync`, "
                    f"but got {ranks.num_ranks}.",
                    hint="Define `sync` in the accumulator, or train with `devices=1` and `num_nodes=1`.",
                    argument="devices",
                )
            self._encoded.sync(ranks)
        self._sums.sync(ranks)
        self._means.sync(ranks)
        self._weights = [weight for weights in ranks.all_gather_object(self._weights) for weight in weights]

    def compute(self, server: Mapping[str, Tensor], clients: Sequence[str], round_idx: int) -> Sums:
        """Return the sums of a round. Without uploads, all sums are zero, or ``values`` is empty if there is a mask."""
        denominators = {name: math.fsum(self._weights) if name in self._weighted else 1.0 for name in self.names}
        if self._encoded is not None:
            values = self._encoded.compute(server) if self._weights else {}
            return Sums(values, denominators, clients, round_idx)
        values = {name: torch.zeros_like(server[name], dtype=_wide(server[name])) for name in self.names}
        for exact in (self._sums, self._means):
            values |= {n: one.total(values[n].dtype).to(server[n].device) for n, one in exact.sums.items()}
        return Sums(values, denominators, clients, round_idx)


def apply_sums(server: Mapping[str, Tensor], sums: Sums) -> State:
    """Divide each sum by its denominator, and return the server's values plus the results.

    The returned state omits entries whose denominator is 0. Elements that are non-finite on the server do not change.
    """
    state: State = {}
    for name, value in sums.values.items():
        old, denominator = server[name], sums.denominators[name]
        if denominator == 0:
            continue
        change = value.to(old.device)
        if denominator != 1:
            change = (change if change.is_floating_point() or change.is_complex() else change.double()) / denominator
        wide = torch.promote_types(_wide(old), change.dtype)
        state[name] = torch.where(torch.isfinite(old), round_to(old.to(wide) + change, old.dtype), old)
    return state


def _wide(value: Tensor) -> torch.dtype:
    """Return the dtype in which updates of an entry are summed."""
    if value.is_complex():
        return torch.complex128
    return torch.float64 if value.is_floating_point() else torch.int64


class Aggregator:
    """The aggregator of one round's uploads. Each entry is combined by the reduction of the entry.

    The result does not depend on the order of the uploads. Accumulators that keep all uploads get the uploads sorted by
    client index. The other built-in accumulators compute exact sums. Entries with equal reductions share an
    accumulator.
    """

    def __init__(self, reductions: Mapping[str, Reduction], pipeline: Pipeline | None = None) -> None:
        self.reductions = dict(reductions)
        self.sums = UpdateSums(reductions, pipeline.mask) if pipeline is not None and pipeline.needs_updates else None
        self.num_uploads = 0
        self._numbers: list[int] = []
        self._shapes: dict[str, tuple[int, ...]] = {}
        # Masks of the elements that are non-finite in at least one upload. These elements keep the server's value.
        self._aside: State = {}
        groups: dict[Reduction, list[str]] = {}
        for name, reduction in reductions.items():
            if reduction.is_uploaded and (self.sums is None or name not in self.sums.names):
                groups.setdefault(reduction, []).append(name)
        self._groups: list[tuple[list[str], Accumulator]] = [
            (names, reduction.make_accumulator()) for reduction, names in groups.items()
        ]

    def accumulate(
        self,
        uploads: Mapping[str, Tensor],
        weights: Sequence[float],
        client_indices: Sequence[int],
        sums: GroupSums | None = None,
    ) -> None:
        """Add the uploads of some clients.

        Args:
            uploads: The uploads, each entry of shape (clients, ...).
            weights: Weight of each client in means.
            client_indices: Index of each client in the federation.
            sums: Weighted sums of entries over these clients, if they trained vectorized. See `weighted_sums`.
        """
        if self.sums is not None:
            self.sums.update(uploads, weights)
        for names, accumulator in self._groups:
            values = self._checked(uploads, names)
            if sums and isinstance(accumulator, AddsClientGroups):
                accumulator.update_group(values, sums, weights)
            else:
                accumulator.update(values, weights)
        self._numbers += client_indices
        self.num_uploads += len(weights)

    def weighted_sums(self, uploads: Mapping[str, Tensor], weights: Sequence[float]) -> GroupSums:
        """Return the weighted sums of floating-point entries over vectorized clients.

        The result contains only entries whose accumulator accepts weighted sums. If a sum is finite, all its terms are
        finite.
        """
        summed = [n for names, accumulator in self._groups if isinstance(accumulator, AddsClientGroups) for n in names]
        return {n: weighted_sum(uploads[n], weights) for n in summed if uploads[n].is_floating_point()}

    def _checked(self, uploads: Mapping[str, Tensor], names: Sequence[str]) -> State:
        for name in names:
            shape = tuple(uploads[name].shape[1:])
            if shape != self._shapes.setdefault(name, shape):
                raise InvalidValueError(
                    f"Expected `{name}` to have the shape {self._shapes[name]} of earlier uploads, but got {shape}.",
                    argument=name,
                    value=shape,
                )
        return {name: plain_tensor(uploads[name]) for name in names}

    def zero_non_finite(self, uploads: State, names: Sequence[str]) -> State:
        """Return the uploads with 0 in place of each non-finite element of the named entries.

        In the new server state, these elements keep the server's value.
        """
        for name in names:
            sound = torch.isfinite(uploads[name])
            self._aside[name] = ~sound.all(dim=0) | self._aside.get(name, False)
            uploads = {**uploads, name: uploads[name].where(sound, 0)}
        return uploads

    def sync(self, ranks: Ranks) -> None:
        """Add the uploads of the other ranks. All ranks call this function and get the same result."""
        if self.sums is not None:
            self.sums.sync(ranks)
        for names, accumulator in self._groups:
            if not isinstance(accumulator, Syncable):
                raise InvalidValueError(
                    f"Expected one device for the reduction `{self.reductions[names[0]]}` of `{names[0]}`, but got "
                    f"{ranks.num_ranks}. The reduction's accumulator has no `sync` to add the uploads of other ranks.",
                    hint="Define `sync` in the accumulator, or train with `devices=1` and `num_nodes=1`.",
                )
            accumulator.sync(ranks)
        rank_values = ranks.all_gather_object((self._numbers, {name: mask.cpu() for name, mask in self._aside.items()}))
        self._numbers = [number for numbers, _ in rank_values for number in numbers]
        for name, mask in [item for _, masks in rank_values for item in masks.items()]:
            self._aside[name] = mask | self._aside[name].cpu() if name in self._aside else mask
        self.num_uploads = len(self._numbers)

    def compute(self, server: Mapping[str, Tensor]) -> State:
        """Return the new server state. Entries in the attribute ``sums`` keep the old value.

        Raises:
            InvalidValueError: If an entry that was finite becomes non-finite.
        """
        state = dict(server)
        order = sorted(range(self.num_uploads), key=self._numbers.__getitem__)
        self._numbers.sort()
        for names, accumulator in self._groups if self.num_uploads else ():
            if isinstance(accumulator, Reorders):
                accumulator.reorder(order)
            state |= accumulator.compute({name: server[name] for name in names})
        for name, mask in self._aside.items():
            state[name] = torch.where(mask.to(state[name].device), server[name], state[name])
        check_stays_finite(server, state)
        return state
