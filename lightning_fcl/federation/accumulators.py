"""Accumulators: objects that add or gather the uploads of a round for all entries with the same reduction."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_fcl.federation.exact_sum import ExactSums, GroupSums, round_to
from lightning_fcl.federation.ranks import Ranks

State = dict[str, Tensor]
"""Named tensors of a module's or a server's state. Each named tensor is an *entry*."""


class Accumulator(Protocol):
    """An object that aggregates the uploads of a round for all entries with equal reductions, a few clients at a time.

    The result must not depend on the order in which the uploads arrive. Sums of
    `lightning_fcl.federation.exact_sum.ExactSums` have this property.
    """

    def update(self, values: Mapping[str, Tensor], weights: Sequence[float]) -> None:
        """Add the uploads of some clients, each entry of shape (clients, ...).

        Do not change the tensors, and copy each tensor that the accumulator keeps.
        """

    def compute(self, server: Mapping[str, Tensor]) -> State:
        """Return the new server values. Call this function once per round, after at least one upload was added.

        Args:
            server: The server's values at the start of the round.
        """


@runtime_checkable
class AddsClientGroups(Protocol):
    """An `Accumulator` that accepts the weighted sums of vectorized clients in place of their uploads."""

    def update_group(self, values: Mapping[str, Tensor], sums: GroupSums, weights: Sequence[float]) -> None:
        """Add uploads of shape (clients, ...). For entries in ``sums``, add the weighted sums in place of uploads."""


@runtime_checkable
class Reorders(Protocol):
    """An `Accumulator` that stores each upload separately.

    Before `compute`, the `Aggregator` calls `reorder`, so that the uploads are in the order of the clients.
    """

    def reorder(self, order: Sequence[int]) -> None:
        """Sort the uploads by client. ``order[i]`` is the current position of the upload that moves to position i."""


@runtime_checkable
class Syncable(Protocol):
    """An `Accumulator` that can merge the uploads of several ranks."""

    def sync(self, ranks: Ranks) -> None:
        """Add the uploads of the other ranks. All ranks call this function and get the same result."""


class GatheringAccumulator:
    """An `Accumulator` that keeps all uploads of a round, for a rule that needs all uploads at the same time.

    Args:
        aggregate_fn: Function that returns the new server values by name. The first argument maps each entry name to
            the list of its uploads, in the order of the clients. The second argument contains the server's values.
        copy_fn: Function that copies an upload before the accumulator keeps it. Default: `torch.clone`.
    """

    def __init__(
        self,
        aggregate_fn: Callable[[Mapping[str, list[Tensor]], Mapping[str, Tensor]], State],
        copy_fn: Callable[[Tensor], Tensor] = torch.clone,
    ) -> None:
        self._rule, self._kept = aggregate_fn, copy_fn
        self._rows: dict[str, list[Tensor]] = {}

    def update(self, values: Mapping[str, Tensor], weights: Sequence[float]) -> None:
        for name, value in values.items():
            self._rows.setdefault(name, []).extend(map(self._kept, value))

    def sync(self, ranks: Ranks) -> None:
        parts = ranks.all_gather_object({name: [row.cpu() for row in rows] for name, rows in self._rows.items()})
        self._rows = {}
        for name, rows in (item for part in parts for item in part.items()):
            self._rows.setdefault(name, []).extend(rows)

    def reorder(self, order: Sequence[int]) -> None:
        """Sort the uploads by client. ``order[i]`` is the current position of the upload that moves to position i."""
        self._rows = {name: [rows[place] for place in order] for name, rows in self._rows.items()}

    def compute(self, server: Mapping[str, Tensor]) -> State:
        return self._rule({n: [row.to(server[n].device) for row in rows] for n, rows in self._rows.items()}, server)


def nonzero_rows(value: Tensor) -> Tensor:
    """Return the rows of a matrix that have at least one nonzero element."""
    return value[value.any(dim=1)]


class WeightedMean:
    """The weighted mean: the weighted sum of the uploads divided by the sum of the weights."""

    def __init__(self) -> None:
        self._sums = ExactSums()
        self._weights: list[float] = []
        # The sums of the last client group. If there is only one group, `compute` divides its sums directly.
        self._group_sums: GroupSums = {}

    def update(self, values: Mapping[str, Tensor], weights: Sequence[float]) -> None:
        self._sums.add(values, weights)
        self._weights += weights

    def update_group(self, values: Mapping[str, Tensor], sums: GroupSums, weights: Sequence[float]) -> None:
        """Add a group of vectorized clients. For the entries in ``sums``, the sums are added in place of ``values``."""
        self._add_last_cohort()
        self._group_sums = {name: sums[name] for name in values if name in sums}
        self.update({name: value for name, value in values.items() if name not in self._group_sums}, weights)

    def _add_last_cohort(self) -> None:
        self._sums.update_group(self._group_sums)
        self._group_sums = {}

    def sync(self, ranks: Ranks) -> None:
        self._add_last_cohort()
        self._sums.sync(ranks)
        self._weights = list(itertools.chain.from_iterable(ranks.all_gather_object(self._weights)))

    def compute(self, server: Mapping[str, Tensor]) -> State:
        if any(name in self._sums.sums for name in self._group_sums):
            self._add_last_cohort()
        weight, sums = math.fsum(self._weights), self._sums.sums
        means = {n: round_to(value / weight + 0.0, server[n].dtype) for n, (value, _) in self._group_sums.items()}
        # Remove each sum after its mean is computed, so that its memory can be used for the next mean.
        while sums:
            name, exact = sums.popitem()
            means[name] = exact.mean(weight, server[name])
        return {name: mean.to(server[name].device) for name, mean in means.items()}


class SparseMeans:
    """The weighted mean of each element, over the clients whose upload is not zero in this element.

    An element that is zero for all clients keeps the server's value.
    """

    def __init__(self) -> None:
        self._sums, self._weights = ExactSums(), ExactSums()

    def update(self, values: Mapping[str, Tensor], weights: Sequence[float]) -> None:
        self._sums.add(values, weights)
        self._weights.add({name: (value != 0).float() for name, value in values.items()}, weights)

    def sync(self, ranks: Ranks) -> None:
        self._sums.sync(ranks)
        self._weights.sync(ranks)

    def compute(self, server: Mapping[str, Tensor]) -> State:
        state: State = {}
        for name, exact in self._sums.sums.items():
            old, share = server[name], self._weights.sums[name].total()
            mean = round_to(exact.total() / share.masked_fill(share == 0, 1.0), old.dtype).to(old.device)
            state[name] = torch.where((share != 0).to(old.device), mean, old)
        return state


class PlainSums:
    """The sum of the server's value and all uploads."""

    def __init__(self) -> None:
        self._sums = ExactSums()

    def update(self, values: Mapping[str, Tensor], weights: Sequence[float]) -> None:
        self._sums.add(values)

    def sync(self, ranks: Ranks) -> None:
        self._sums.sync(ranks)

    def compute(self, server: Mapping[str, Tensor]) -> State:
        sums = copy.deepcopy(self._sums)
        sums.add({name: server[name][None] for name in sums.sums})
        return {name: exact.total(server[name].dtype).to(server[name].device) for name, exact in sums.sums.items()}
