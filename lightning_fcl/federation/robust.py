"""Robust reductions, which a few lying clients can move only a little: median, trimmed mean and Krum.

None depends on the order of the uploads: the first two sort the values, and Krum takes the first by number of equals.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_fcl.errors import at_least
from lightning_fcl.federation.exact import ExactSum, round_to
from lightning_fcl.federation.reductions import Accumulator, Gather, Reduction, State

Rows = Mapping[str, list[Tensor]]

_NUMBERS = 1 << 20  # of all uploads, that are looked at together


def median(stack: Tensor) -> Tensor:
    """Coordinate-wise median over the first dimension; the mean of the middle two for an even number."""
    values, last = stack.sort(dim=0).values, len(stack) - 1
    middle = torch.lerp(values[last // 2].double(), values[-(-last // 2)].double(), 0.5)
    return round_to(middle + 0.0, stack.dtype)  # no zero has a sign, which could be that of whoever came first


def trimmed_mean(stack: Tensor, trim: float) -> Tensor:
    """Coordinate-wise mean over the first dimension without the ``trim`` fraction of values at each end."""
    if not 0 <= trim < 0.5:
        raise ValueError(f"Expected `trim` to be at least 0 and below 0.5 but got {trim}.")
    k = int(trim * len(stack))
    rest = ExactSum(stack[0])
    rest.add(stack.double().sort(dim=0).values[k : len(stack) - k])
    return round_to(rest.total() / (len(stack) - 2 * k), stack.dtype)


def krum(uploads: Tensor, byzantine: int) -> int:
    """Index of the upload with the smallest summed squared distance to its nearest neighbours (Blanchard et al. 2017).

    Of flattened uploads, shape (clients, parameters), with ``clients - byzantine - 2`` neighbours, at least 1. The
    first of equal ones: two that are each other's nearest neighbours are equal where one neighbour counts.
    """
    return _nearest([uploads], byzantine)


def _nearest(pieces: Iterable[Tensor], byzantine: int) -> int:
    """The same for uploads some columns of which come at a time."""
    # Not by products of matrices, which would tell two equal distances apart.
    distances = sum(
        torch.cdist(piece, piece, compute_mode="donot_use_mm_for_euclid_dist") ** 2
        for piece in (piece.double() for piece in pieces)
    )
    assert isinstance(distances, Tensor)  # there are uploads
    clients = len(distances)
    if clients == 1:
        return 0
    neighbours = max(1, min(clients - byzantine - 2, clients - 1))
    nearest = distances.sort(dim=1).values[:, 1 : 1 + neighbours]
    return int(nearest.sum(dim=1).argmin())


def _pieces(rows: Sequence[Tensor]) -> Iterator[Tensor]:
    """Uploads of an entry, some of their numbers at a time, shape (clients, numbers): nowhere is a copy of all."""
    size = max(1, _NUMBERS // len(rows))
    yield from map(torch.stack, zip(*(torch.split(row.flatten(), size) for row in rows), strict=True))


def _by_coordinate(rule: Callable[[Tensor], Tensor]) -> Accumulator:
    return Gather(
        lambda rows, server: {n: torch.cat([*map(rule, _pieces(row))]).view_as(row[0]) for n, row in rows.items()}
    )


class Median(Reduction):
    """``median``."""

    name = "median"

    def accumulator(self) -> Accumulator:
        return _by_coordinate(median)


class TrimmedMean(Reduction):
    """``trimmed_mean``, of which the ``trim`` fraction of the values is cut at each end.

    Raises:
        ValueError: If ``trim`` is not at least 0 and below 0.5.
    """

    name = "trimmed_mean"

    def __init__(self, trim: float = 0.1) -> None:
        trimmed_mean(torch.zeros(1), trim)  # looks at the range
        self.trim = trim

    def accumulator(self) -> Accumulator:
        return _by_coordinate(partial(trimmed_mean, trim=self.trim))


class Krum(Reduction):
    """``krum``, of whose clients ``byzantine`` many may lie.

    Raises:
        ValueError: If ``byzantine`` is negative.
    """

    name = "krum"

    def __init__(self, byzantine: int = 0) -> None:
        at_least(0, byzantine=byzantine)
        self.byzantine = byzantine

    def accumulator(self) -> Accumulator:
        return Gather(self._choose)

    def _choose(self, rows: Rows, server: Mapping[str, Tensor]) -> State:
        chosen = _nearest(itertools.chain.from_iterable(map(_pieces, rows.values())), self.byzantine)
        return {name: row[chosen] for name, row in rows.items()}
