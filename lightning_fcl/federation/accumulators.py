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
"""Entries of a module's or server's state, by name."""


class Accumulator(Protocol):
    """Takes in the uploads of one round for all entries that have the same reduction, a few clients at a time.

    They come in no particular order: `lightning_fcl.federation.exact_sum.ExactSums` adds them up so that it makes none.
    """

    def update(self, values: Mapping[str, Tensor], weights: Sequence[float]) -> None:
        """Take in some clients' uploads, of shape (clients, ...), which are their own tensors: copy what is kept."""

    def compute(self, server: Mapping[str, Tensor]) -> State:
        """The new server values, from those at the start of the round, when all uploads have come: at least one.

        It is asked for once.
        """


@runtime_checkable
class AddsClientGroups(Protocol):
    """An `Accumulator` that accepts the sums of clients that have trained vectorized in place of their uploads."""

    def update_group(self, values: Mapping[str, Tensor], sums: GroupSums, weights: Sequence[float]) -> None:
        """Add uploads, shape (clients, ...). ``sums`` has the weighted sums of some of the entries."""


@runtime_checkable
class Reorders(Protocol):
    """An `Accumulator` whose result can depend on the order of the uploads."""

    def reorder(self, order: Sequence[int]) -> None:
        """Reorder the uploads by their present positions, so that they are in the order of the clients."""


@runtime_checkable
class Syncable(Protocol):
    """An `Accumulator` whose uploads may come to several ranks."""

    def sync(self, ranks: Ranks) -> None:
        """Take in what came to the other ranks; all of them do, and come to the same."""


class GatheringAccumulator:
    """An `Accumulator` that keeps all uploads of a round, for a rule that needs them at once.

    The rule makes the new values from the uploads of each entry, which an `Aggregator` that knows the clients' numbers
    gives in their order, and from the server's values. It is given what was ``copy_fn`` of each, a copy.
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
        """Put the uploads into this order of the places that they have."""
        self._rows = {name: [rows[place] for place in order] for name, rows in self._rows.items()}

    def compute(self, server: Mapping[str, Tensor]) -> State:
        return self._rule({n: [row.to(server[n].device) for row in rows] for n, rows in self._rows.items()}, server)


def nonzero_rows(value: Tensor) -> Tensor:
    """The rows of a matrix that are not zeros alone."""
    return value[value.any(dim=1)]


class WeightedMean:
    """The weighted mean, from a sum and the weights."""

    def __init__(self) -> None:
        self._sums = ExactSums()
        self._weights: list[float] = []
        self._group_sums: GroupSums = {}  # sums of the last client group, which may be the only one

    def update(self, values: Mapping[str, Tensor], weights: Sequence[float]) -> None:
        self._sums.add(values, weights)
        self._weights += weights

    def update_group(self, values: Mapping[str, Tensor], sums: GroupSums, weights: Sequence[float]) -> None:
        """Take in clients that have trained side by side, and the sums of some entries in place of their values."""
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
        while sums:  # each makes room for the next one's mean
            name, exact = sums.popitem()
            means[name] = exact.mean(weight, server[name])
        return {name: mean.to(server[name].device) for name, mean in means.items()}


class SparseMeans:
    """The weighted mean of each number over those who send it, from the sum of their weights."""

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
    """The server's value and all uploads together, the server's as one more upload."""

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
