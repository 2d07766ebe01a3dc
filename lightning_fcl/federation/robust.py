"""Robust aggregation: median, trimmed mean, Krum, and checks for non-finite numbers and large server updates.

Median, trimmed mean and Krum do not depend on the order of the uploads. Median and trimmed mean sort the values. If
several uploads are equally near to their neighbors, Krum selects the upload with the lowest client index.
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

# Maximum number of elements, counted over all uploads, that are processed together.
_NUMBERS = 1 << 20


def median(stack: Tensor) -> Tensor:
    """Return the coordinate-wise median over the first dimension. For an even number, average the middle two values."""
    values, last = stack.sort(dim=0).values, len(stack) - 1
    middle = torch.lerp(values[last // 2].double(), values[-(-last // 2)].double(), 0.5)
    # Adding 0.0 removes the sign of zeros, which could depend on the order of the uploads.
    return round_to(middle + 0.0, stack.dtype)


def trimmed_mean(stack: Tensor, trim: float) -> Tensor:
    """Return the coordinate-wise mean over the first dimension without the ``trim`` fraction of values at each end.

    The number of values to remove at each end is rounded down.

    Raises:
        InvalidValueError: If ``trim`` is not at least 0 and below 0.5.
    """
    if not 0 <= trim < 0.5:
        raise InvalidValueError(
            f"Expected `trim` to be at least 0 and below 0.5, but got {trim}.", argument="trim", value=trim
        )
    k = int(trim * len(stack))
    rest = ExactSum(stack[0])
    rest.add(stack.double().sort(dim=0).values[k : len(stack) - k])
    return round_to(rest.total() / (len(stack) - 2 * k), stack.dtype)


def krum(uploads: Tensor, num_malicious_clients: int) -> int:
    """Return the index of the upload nearest to its neighbors (Krum; Blanchard et al., 2017).

    For each upload, the squared distances to the ``clients - num_malicious_clients - 2`` nearest other uploads (at
    least 1) are added. The upload with the smallest sum is selected. If several uploads have this sum, the first one is
    selected. For example, with one neighbor, two uploads that are each other's nearest neighbors have the same sum.

    Args:
        uploads: Flattened uploads, shape (clients, parameters).
        num_malicious_clients: Assumed number of malicious clients.
    """
    return _nearest([uploads], num_malicious_clients)


def _nearest(pieces: Iterable[Tensor], byzantine: int) -> int:
    """Return the same index as `krum`, for uploads that are split into groups of columns."""
    # Do not compute distances by matrix products, because rounding would make equal distances different.
    distances = sum(
        torch.cdist(piece, piece, compute_mode="donot_use_mm_for_euclid_dist") ** 2
        for piece in (piece.double() for piece in pieces)
    )
    # `sum` returns a tensor, because there is at least one upload.
    assert isinstance(distances, Tensor)
    clients = len(distances)
    if clients == 1:
        return 0
    neighbours = max(1, min(clients - byzantine - 2, clients - 1))
    nearest = distances.sort(dim=1).values[:, 1 : 1 + neighbours]
    return int(nearest.sum(dim=1).argmin())


def _pieces(rows: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield parts of an entry's uploads, shape (clients, elements), so that the uploads are never copied as a whole."""
    size = max(1, _NUMBERS // len(rows))
    yield from map(torch.stack, zip(*(torch.split(row.flatten(), size) for row in rows), strict=True))


def _by_coordinate(rule: Callable[[Tensor], Tensor]) -> Accumulator:
    return GatheringAccumulator(
        lambda rows, server: {n: torch.cat([*map(rule, _pieces(row))]).view_as(row[0]) for n, row in rows.items()}
    )


class Median(Reduction):
    """The coordinate-wise median of the uploads, unweighted (``median``)."""

    name = "median"
    compressible = True

    def make_accumulator(self) -> Accumulator:
        return _by_coordinate(median)


class TrimmedMean(Reduction):
    """The coordinate-wise mean of the uploads without the ``trim`` fraction of values at each end (``trimmed_mean``).

    Args:
        trim: Fraction of the values to remove at each end, at least 0 and below 0.5. The number of removed values is
            rounded down.

    Raises:
        ValueError: If ``trim`` is not at least 0 and below 0.5.
    """

    name = "trimmed_mean"
    compressible = True

    @check_arguments
    def __init__(self, trim: float = 0.1) -> None:
        # Raise an error if `trim` is out of range.
        trimmed_mean(torch.zeros(1), trim)
        self.trim = trim

    def make_accumulator(self) -> Accumulator:
        return _by_coordinate(partial(trimmed_mean, trim=self.trim))


class Krum(Reduction):
    """The upload that is nearest to its neighbors (``krum``; Blanchard et al., 2017).

    The same upload is selected for all entries with equal `Krum` reductions. See `krum` for the formula.

    Args:
        num_malicious_clients: Assumed number of malicious clients, at least 0.

    Raises:
        ValueError: If ``num_malicious_clients`` is negative.
    """

    citations = ("blanchard2017krum",)

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
    """Return the clients with non-finite numbers, and the uploaded entries that were non-finite at the start.

    Only entries that clients upload or keep are checked. Elements of a client are ignored if they were already
    non-finite at the start of the round.

    Args:
        states: The clients' states, each entry of shape (clients, ...).
        start: The state with which the clients started.
        reductions: The reduction of each entry.
        sums: Weighted sums of some entries over all clients.

    Returns:
        A dict and a list. The keys of the dict are the indices of the affected clients. The values are the names of the
        client's non-finite entries. The list contains the names of the uploaded entries that were non-finite at the
        start. If the sums of all entries are finite, both are empty.
    """
    numbers = {
        name: value
        for name, value in states.items()
        if (reductions[name].is_uploaded or reductions[name].is_local)
        and (value.is_floating_point() or value.is_complex())
    }
    # A finite sum has only finite terms, so check each number only if a sum is non-finite. Check a row only once if
    # all clients share it in memory.
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
    """Raise InvalidValueError if an entry of ``state`` in ``names`` has non-finite numbers.

    Training from this state would diverge on all clients.
    """
    wrong = [name for name in names if not torch.isfinite(state[name].sum())]
    wrong = [name for name in wrong if not torch.isfinite(state[name]).all()]
    if wrong:
        raise InvalidValueError(
            f"Expected finite numbers in the server state, but got non-finite numbers in {format_code_names(wrong)} "
            f"{situation}.",
            argument=wrong[0],
        )


def check_stays_finite(previous_state: Mapping[str, Tensor], updated_state: Mapping[str, Tensor]) -> None:
    """Raise InvalidValueError if the aggregation of a round made a finite entry of the server state non-finite."""
    suspect_names = [
        name
        for name, value in updated_state.items()
        if value is not previous_state[name] and not torch.isfinite(value.sum())
    ]
    situation = "after the aggregation of a round. Resume from the checkpoint before this round with other reductions"
    check_finite(
        updated_state, [name for name in suspect_names if torch.isfinite(previous_state[name]).all()], situation
    )


def squared_change(previous_value: Tensor, updated_value: Tensor) -> float:
    """Return the sum of the squared changes of an entry. Elements that are non-finite before or after are left out."""
    wide = torch.complex128 if updated_value.is_complex() else torch.float64
    sound = (updated_value != previous_value) & torch.isfinite(previous_value) & torch.isfinite(updated_value)
    return float((updated_value.to(wide) - previous_value.to(wide)).where(sound, 0).abs().square().sum())


def relative_update_norm(changes: Mapping[str, float], previous_state: Mapping[str, Tensor]) -> float:
    """Return the norm of the change of several entries, divided by the larger of 1 and the norm before the change.

    Args:
        changes: The `squared_change` of each entry.
        previous_state: The entries before the change.
    """
    size = sum(
        float(previous_state[n].double().where(torch.isfinite(previous_state[n]), 0).square().sum()) for n in changes
    )
    return math.sqrt(sum(changes.values())) / max(math.sqrt(size), 1.0)


def check_update_norm(
    previous_state: Mapping[str, Tensor], updated_state: Mapping[str, Tensor], names: Sequence[str], max_norm: float
) -> None:
    """Raise InvalidValueError if a round changes the server state too much.

    The limit is ``max_norm`` times the maximum of 1 and the norm of the named entries before the round.
    """
    comparable_names = [name for name in names if previous_state[name].shape == updated_state[name].shape]
    times = relative_update_norm(
        {name: squared_change(previous_state[name], updated_state[name]) for name in comparable_names}, previous_state
    )
    if not times <= max_norm:
        raise InvalidValueError(
            f"Expected a round to change the server state by at most {max_norm:g} times the larger of 1 and the norm "
            f"of the state, but the change would be {times:.3g} times this value.",
            hint="Resume from the checkpoint before this round with other reductions, a lower learning rate of "
            "`server_optimizer`, or a larger `max-update-norm` in the run's configuration.",
            argument="max-update-norm",
            value=times,
        )
