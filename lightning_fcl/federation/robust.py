"""Robust reductions, which a few lying clients can move only a little: median, trimmed mean and Krum.

None depends on the order of the uploads: the first two sort the values, and Krum takes the first by number of equals.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_fcl.errors import at_least
from lightning_fcl.federation.exact import ExactSum, round_to
from lightning_fcl.federation.reductions import Accumulator, Gather, Reduction, State

Rows = Mapping[str, list[Tensor]]


def median(stack: Tensor) -> Tensor:
    """Coordinate-wise median over the first dimension; the mean of the middle two for an even number."""
    middle = torch.quantile(stack.double(), 0.5, dim=0)
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
    # Not by products of matrices, which would tell two equal distances apart.
    rows = uploads.double()
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist") ** 2
    neighbours = max(1, min(len(uploads) - byzantine - 2, len(uploads) - 1))
    if len(uploads) == 1:
        return 0
    nearest = distances.sort(dim=1).values[:, 1 : 1 + neighbours]
    return int(nearest.sum(dim=1).argmin())


class Median(Reduction):
    """``median``."""

    name = "median"

    def accumulator(self) -> Accumulator:
        return Gather(lambda rows, server: {name: median(torch.stack(row)) for name, row in rows.items()})


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
        return Gather(
            lambda rows, server: {name: trimmed_mean(torch.stack(row), self.trim) for name, row in rows.items()}
        )


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
        clients = [
            torch.cat([value.flatten().double() for value in upload]) for upload in zip(*rows.values(), strict=True)
        ]
        chosen = krum(torch.stack(clients), self.byzantine)
        return {name: row[chosen] for name, row in rows.items()}
