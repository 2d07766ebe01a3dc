"""Clients that fail or lie: uploads not finite or far from those before, and reductions that bound a few of them.

Median, trimmed mean and Krum do not depend on the order of the uploads: the first two sort the values, and Krum takes
the first by number of equals.
"""

from __future__ import annotations

import cmath
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.accumulators import Accumulator, GatheringAccumulator, State
from lightning_fcl.federation.exact_sum import ExactSum, GroupSums, round_to
from lightning_fcl.federation.reductions import Reduction
from lightning_fcl.validation import at_least, check_arguments, format_code_names

UploadRows = Mapping[str, list[Tensor]]

_NUMBERS = 1 << 20  # of all uploads, that are looked at together


def median(stack: Tensor) -> Tensor:
    """Coordinate-wise median over the first dimension; the mean of the middle two for an even number."""
    values, last = stack.sort(dim=0).values, len(stack) - 1
    middle = torch.lerp(values[last // 2].double(), values[-(-last // 2)].double(), 0.5)
    return round_to(middle + 0.0, stack.dtype)  # no zero has a sign, which could be that of whoever came first


def trimmed_mean(stack: Tensor, trim: float) -> Tensor:
    """Coordinate-wise mean over the first dimension without the ``trim`` fraction of values at each end."""
    if not 0 <= trim < 0.5:
        raise InvalidValueError(
            f"Expected `trim` to be at least 0 and below 0.5 but got {trim}.", argument="trim", value=trim
        )
    k = int(trim * len(stack))
    rest = ExactSum(stack[0])
    rest.add(stack.double().sort(dim=0).values[k : len(stack) - k])
    return round_to(rest.total() / (len(stack) - 2 * k), stack.dtype)


def krum(uploads: Tensor, num_malicious_clients: int) -> int:
    """Index of the upload with the smallest summed squared distance to its nearest neighbours (Blanchard et al. 2017).

    Of flattened uploads, shape (clients, parameters), with ``clients - byzantine - 2`` neighbours, at least 1. The
    first of equal ones: two that are each other's nearest neighbours are equal where one neighbour counts.
    """
    return _nearest([uploads], num_malicious_clients)


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
    return GatheringAccumulator(
        lambda rows, server: {n: torch.cat([*map(rule, _pieces(row))]).view_as(row[0]) for n, row in rows.items()}
    )


class Median(Reduction):
    """``median``."""

    name = "median"
    compressible = True

    def make_accumulator(self) -> Accumulator:
        return _by_coordinate(median)


class TrimmedMean(Reduction):
    """``trimmed_mean``, of which the ``trim`` fraction of the values is cut at each end.

    Raises:
        ValueError: If ``trim`` is not at least 0 and below 0.5.
    """

    name = "trimmed_mean"
    compressible = True

    @check_arguments
    def __init__(self, trim: float = 0.1) -> None:
        trimmed_mean(torch.zeros(1), trim)  # looks at the range
        self.trim = trim

    def make_accumulator(self) -> Accumulator:
        return _by_coordinate(partial(trimmed_mean, trim=self.trim))


class Krum(Reduction):
    """``krum``, of whose clients ``num_malicious_clients`` many may lie.

    Raises:
        ValueError: If ``num_malicious_clients`` is negative.
    """

    name = "krum"
    compressible = True

    @check_arguments
    def __init__(self, num_malicious_clients: int = 0) -> None:
        at_least(0, num_malicious_clients=num_malicious_clients)
        self.num_malicious_clients = num_malicious_clients

    def make_accumulator(self) -> Accumulator:
        return GatheringAccumulator(self._choose)

    def _choose(self, rows: UploadRows, server: Mapping[str, Tensor]) -> State:
        nearest_idx = _nearest(itertools.chain.from_iterable(map(_pieces, rows.values())), self.num_malicious_clients)
        return {name: row[nearest_idx] for name, row in rows.items()}


def find_non_finite(
    states: Mapping[str, Tensor], start: State, reductions: Mapping[str, Reduction], sums: GroupSums
) -> tuple[dict[int, list[str]], list[str]]:
    """The clients, by number, with entries that are not finite among those that they send or go on from.

    Numbers that are not finite with the server are no fault of a client's: the entries that have such come second.

    Args:
        states: The clients' states, every entry of shape (clients, ...).
        start: What they began with.
        sums: What some entries of all clients come to.
    """
    numbers = {
        name: value
        for name, value in states.items()
        if (reductions[name].is_uploaded or reductions[name].is_local)
        and (value.is_floating_point() or value.is_complex())
    }
    # A sum that is finite has finite terms; only where one is not must every number be looked at. Rows that are one in
    # memory are looked at once.
    unique_values = {name: value[0] if value.stride(0) == 0 else value for name, value in numbers.items()}
    unique_values |= {name: value for name, (value, _) in sums.items()}
    if all(cmath.isfinite(value.sum().item()) for value in unique_values.values()):
        return {}, []
    start_masks = {n: torch.isfinite(start[n]) for n, v in numbers.items() if start[n].shape == v.shape[1:]}
    non_finite_entries = [
        name for name, sound in start_masks.items() if reductions[name].is_uploaded and not sound.all()
    ]
    sound = {
        n: torch.isfinite(v) | ~start_masks[n] if n in start_masks else torch.isfinite(v) for n, v in numbers.items()
    }
    finite = {name: value.view(*value.shape, 1).flatten(1).all(dim=1).tolist() for name, value in sound.items()}
    rows = range(len(next(iter(finite.values()))))
    faults = {row: [name for name, fine in finite.items() if not fine[row]] for row in rows}
    return {row: names for row, names in faults.items() if names}, non_finite_entries


def check_finite(state: Mapping[str, Tensor], names: Sequence[str], situation: str) -> None:
    """Refuse a state with which every client would diverge: one with learnt numbers that are not finite."""
    wrong = [name for name in names if not torch.isfinite(state[name].sum())]
    wrong = [name for name in wrong if not torch.isfinite(state[name]).all()]
    if wrong:
        raise InvalidValueError(
            f"Expected a server state of finite numbers but {format_code_names(wrong)} is not finite {situation}.",
            argument=wrong[0],
        )


def check_stays_finite(previous_state: Mapping[str, Tensor], updated_state: Mapping[str, Tensor]) -> None:
    """Refuse what a round's uploads come to if it is not finite where the server was: before anybody keeps it."""
    suspect_names = [
        name
        for name, value in updated_state.items()
        if value is not previous_state[name] and not torch.isfinite(value.sum())
    ]
    situation = "when a round's uploads have come together. Go on from the checkpoint before it, with other reductions"
    check_finite(
        updated_state, [name for name in suspect_names if torch.isfinite(previous_state[name]).all()], situation
    )


def squared_change(previous_value: Tensor, updated_value: Tensor) -> float:
    """The sum of the squares by which numbers have changed, where they are finite on both sides."""
    wide = torch.complex128 if updated_value.is_complex() else torch.float64
    sound = (updated_value != previous_value) & torch.isfinite(previous_value) & torch.isfinite(updated_value)
    return float((updated_value.to(wide) - previous_value.to(wide)).where(sound, 0).abs().square().sum())


def relative_update_norm(changes: Mapping[str, float], previous_state: Mapping[str, Tensor]) -> float:
    """How far entries moved together, by `squared_change` each: so many times the larger of their norm before and 1."""
    size = sum(
        float(previous_state[n].double().where(torch.isfinite(previous_state[n]), 0).square().sum()) for n in changes
    )
    return math.sqrt(sum(changes.values())) / max(math.sqrt(size), 1.0)


def check_update_norm(
    previous_state: Mapping[str, Tensor], updated_state: Mapping[str, Tensor], names: Sequence[str], max_norm: float
) -> None:
    """Refuse what a round comes to if it is further from the server than so many times the larger of its norm and 1."""
    comparable_names = [name for name in names if previous_state[name].shape == updated_state[name].shape]
    times = relative_update_norm(
        {name: squared_change(previous_state[name], updated_state[name]) for name in comparable_names}, previous_state
    )
    if not times <= max_norm:
        raise InvalidValueError(
            f"Expected a round to move the server by at most {max_norm:g} times the larger of its norm and 1 but it "
            "would "
            f"by {times:.3g} times.",
            hint="Resume from the checkpoint before this round with other reductions, a lower learning rate of "
            "`server_optimizer`, or a larger `max-update-norm` of the run's configuration.",
            argument="max-update-norm",
            value=times,
        )
