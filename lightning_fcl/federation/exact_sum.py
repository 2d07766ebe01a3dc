"""Exact sums: the same bits in any order, in any groups, on any number of processes and threads.

A sum of floating-point numbers depends on their order, since every addition rounds. Here none does. In units of a power
of two, a number is a whole number and a rest below one unit; the rest has smaller units, and so on until nothing is
left. Whole numbers are added as 64-bit integers, exactly. So the sum does not depend on what came when:

1. What an upload adds, its weight times each of its numbers, is rounded to double precision once, by itself. For
   numbers of single precision and whole weights below 2^29 even that is exact.
2. All that follows is exact, whatever the units are. They are chosen for speed alone: so that the numbers of a usual
   tensor are whole, and one integer for each number is enough.
3. The total is rounded at the end. There it stands in digits of 42 bits, which are the same for equal totals.

Nothing is cut off: small numbers beside large ones count to their last bit, and no bound must be known beforehand.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.fixed_point import (
    CHUNK_SIZE,
    NARROW,
    Digits,
    ExactChunk,
    ExactWeights,
    IntegerScale,
    common_scale,
    max_abs,
    to_float64,
)
from lightning_fcl.federation.ranks import Ranks

_WAITING = 4_000_000
"""Numbers of uploads that wait to be added together."""

_COHORT_BITS = 46
"""What is kept of a client group's sum of single precision, from an entry's largest number downwards. So one whole
number for
each holds the exact sum of client groups, where their largest numbers are at most twice the first's and at least an
8th."""

GroupSums = dict[str, tuple[Tensor, float]]
"""By entry, what some clients come to together, and a unit of it: see `weighted_sum`."""


class ExactSum:
    """The weighted sum of tensors of the shape, device and kind of one: exact, rounded only when it is asked for."""

    def __init__(self, reference: Tensor, entry: str = "value") -> None:
        self._entry = entry
        self._complex = reference.is_complex()
        self._shape = (*reference.shape, 2) if self._complex else reference.shape
        self.size = math.prod(self._shape)
        self._device = torch.device("cpu") if reference.device.type == "mps" else reference.device  # mps has no float64
        # Elsewhere than on a CPU each piece costs a wait.
        self._step = CHUNK_SIZE if self._device.type == "cpu" else max(1, self.size)
        sizes = [min(self._step, self.size - start) for start in range(0, self.size, self._step)]
        self._pieces = [ExactChunk(size, self._device) for size in sizes]

    def add(self, values: Tensor, weights: ExactWeights | None = None) -> None:
        """Add several uploads, shape (clients, ...), each times its weight."""
        weights = weights or ExactWeights([1.0] * len(values))
        rows = (torch.view_as_real(values) if self._complex else values).detach().to(self._device)
        rows = rows.reshape(len(values), self.size)
        if rows.dtype is torch.int64:  # in two halves, which fit into double precision
            self._add((rows >> 32).double().mul_(2.0**32), weights)
            rows = rows & 0xFFFFFFFF
        self._add(rows if rows.dtype in NARROW else rows.double(), weights)

    def _add(self, rows: Tensor, weights: ExactWeights) -> None:
        if len(rows) == 1:
            for piece, chunk in zip(self._pieces, _split(rows[0], self._step), strict=False):
                piece.add(chunk, weights, None, self._entry)
            return
        wide = rows.dtype is torch.float64
        num_rows = 1 << 9 if wide else max(1, min(CHUNK_SIZE // max(1, self.size), 1 << 9))
        factors = _split(weights.column.to(self._device), num_rows)
        for piece, columns in zip(self._pieces, _split(rows, self._step, dim=1), strict=False):
            for chunk, factor in zip(_split(columns, num_rows), factors, strict=True):
                piece.add(chunk, weights, factor, self._entry)

    def add_multiples(self, values: Tensor, unit: float) -> None:
        """Add numbers of double precision which are multiples of a unit, up to 2^46 of it."""
        for piece, chunk in zip(self._pieces, _split(values.to(self._device).view(-1), self._step), strict=False):
            piece.add_multiples(chunk, unit, math.ldexp(unit, _COHORT_BITS))

    def total(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """The sum, in double precision, or from there in another type; integers are exact."""
        parts = [piece.total() for piece in self._pieces] or [torch.zeros(0, dtype=torch.float64, device=self._device)]
        total = torch.cat(parts).view(self._shape)
        total = torch.view_as_complex(total) if self._complex else total
        if dtype in (total.dtype, torch.float64):
            return total
        if dtype is torch.bool:
            return total != 0
        if dtype.is_floating_point or dtype.is_complex:
            rounded = total.to(dtype)
            fits = bool(rounded.isfinite().all())
        else:
            rounded = self._whole()
            low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
            wrapped = (rounded - total).abs() > 2.0**62  # where 64 bits are not enough
            fits = not bool((wrapped | (rounded < low) | (rounded > high)).any())
        if not fits:
            raise InvalidValueError(
                f"Expected the sum of `{self._entry}` in the range of `{dtype}` but it is beyond.", argument=self._entry
            )
        return rounded.to(dtype)

    def mean(self, weight: float, reference: Tensor) -> Tensor:
        """The sum by the sum of its weights, in the type of another tensor, to whose numbers those added are near."""
        if reference.dtype is torch.int64 and bool((reference.abs() > 1 << 53).any()):
            change = copy.deepcopy(self)  # double precision has not all of such numbers, but what they differ by
            change.add(-reference[None], ExactWeights([weight]))
            return reference.to(self._device) + change._mean(weight, reference.dtype)
        return self._mean(weight, reference.dtype)

    def _mean(self, weight: float, dtype: torch.dtype) -> Tensor:
        if self._complex:
            return (self.total() / weight).to(dtype)
        mean = torch.empty(self.size, dtype=dtype, device=self._device)
        for chunk, piece in zip(_split(mean, self._step), self._pieces, strict=False):  # no copy of it all
            chunk.copy_(round_to(piece.total() / weight, dtype))
        return mean.view(self._shape)

    def _whole(self) -> Tensor:
        whole = torch.zeros(self.size, dtype=torch.int64, device=self._device)
        for exponent, digit in self.digits().items():
            whole += digit << exponent if exponent >= 0 else digit >> -exponent
        return whole.view(self._shape)

    def digits(self) -> Digits:
        """The sum as it is, in digits: equal sums have equal ones, where a missing one counts as zeros.

        Several processes' digits can be added up, exponent by exponent, and given to `add_digits`.
        """
        parts = [piece.digits() for piece in self._pieces]
        zeros = [torch.zeros(piece.size, dtype=torch.int64, device=self._device) for piece in self._pieces]
        return {
            exponent: torch.cat([part.get(exponent, nothing) for part, nothing in zip(parts, zeros, strict=True)])
            for exponent in sorted({exponent for part in parts for exponent in part})
        }

    def add_digits(self, digits: Mapping[int, Tensor]) -> None:
        """Add the sums of up to a million others, as their `digits` gives them."""
        for piece, start in zip(self._pieces, range(0, self.size, self._step), strict=True):
            piece.add_digits({exponent: digit[start : start + self._step] for exponent, digit in digits.items()})

    def scales(self) -> list[IntegerScale | None]:
        return [piece.scale() for piece in self._pieces]

    def with_scales(
        self, marks: Iterable[Sequence[IntegerScale | None]]
    ) -> list[tuple[ExactChunk, IntegerScale | None]]:
        """The pieces, each with the mark that its sum over ranks gets, from those of each rank."""
        common = map(common_scale, zip(*marks, strict=True))
        return list(zip(self._pieces, common, strict=True))

    @property
    def shape_and_type(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape, and whether real or complex, of what is added."""
        return (tuple(self._shape[:-1]), torch.complex64) if self._complex else (tuple(self._shape), torch.float32)


class ExactSums:
    """The exact sums of entries, by name."""

    def __init__(self) -> None:
        self._sums: dict[str, ExactSum] = {}
        # Single clients' uploads, which are added a stack at a time: the sums are the same, and one takes no longer.
        self._waiting: list[Mapping[str, Tensor]] = []
        self._weights: list[float] = []

    @property
    def sums(self) -> dict[str, ExactSum]:
        """Each entry's sum of all that was added."""
        self._add_waiting()
        return self._sums

    def _add_waiting(self) -> None:
        pending_uploads, self._waiting = self._waiting, []
        weights, self._weights = self._weights, []
        if pending_uploads:
            self._add(
                {name: torch.cat([upload[name] for upload in pending_uploads]) for name in pending_uploads[0]},
                ExactWeights(weights),
            )

    def add(self, values: Mapping[str, Tensor], weights: Sequence[float] | None = None) -> None:
        """Add some clients' uploads, every entry of shape (clients, ...), each client's times its weight, if any."""
        if not values:
            return
        weights = weights or [1.0] * len(next(iter(values.values())))
        size = sum(value.numel() for value in values.values())
        if self._waiting and not _alike(values, self._waiting[0]):
            self._add_waiting()
        if len(weights) > 1 or 2 * size > _WAITING:
            self._add(values, ExactWeights(weights))
            return
        self._waiting.append({name: value.detach().clone() for name, value in values.items()})
        self._weights += weights
        if len(self._waiting) * size > _WAITING:
            self._add_waiting()

    def update_group(self, sums: GroupSums) -> None:
        """Add what clients have come to together."""
        for name, (value, unit) in sums.items():
            if unit:
                self._sum(name, value).add_multiples(value, unit)
            else:
                self._sum(name, value).add(value[None])

    def _add(self, values: Mapping[str, Tensor], weights: ExactWeights) -> None:
        for name, value in values.items():
            exact = self._sum(name, value[0])
            if value.stride(0) or value[0].any():  # else nothing of several clients, which is one in memory
                exact.add(value, weights)

    def _sum(self, name: str, reference: Tensor) -> ExactSum:
        if name not in self._sums:
            self._sums[name] = ExactSum(reference, name)
        return self._sums[name]

    def sync(self, ranks: Ranks) -> None:
        """Let these become the sums over all ranks, some of which may have none."""
        sums = self.sums
        rank_scales = ranks.all_gather_object(
            {name: (exact.shape_and_type, exact.scales()) for name, exact in sums.items()}
        )
        parts: list[tuple[ExactChunk, IntegerScale | None]] = []
        for name in dict.fromkeys(name for part in rank_scales for name in part):
            entry_scales = [part[name] for part in rank_scales if name in part]
            shape, dtype = entry_scales[0][0]
            exact = sums.setdefault(name, ExactSum(torch.empty(shape, dtype=dtype, device="cpu"), name))
            parts += exact.with_scales(marks for _, marks in entry_scales)
        fitting = [(piece, mark) for piece, mark in parts if mark is not None]
        if fitting:
            numbers = torch.cat([piece.to_integers(exponent) for piece, (exponent, _) in fitting])
            ranks.all_reduce(numbers)
            wholes = torch.split(numbers, [piece.size for piece, _ in fitting])
            for (piece, mark), whole in zip(fitting, wholes, strict=True):
                piece.load_integers(mark, whole)
        rest = [piece for piece, mark in parts if mark is None]
        if rest:  # of such different sizes that one whole number for each does not hold them
            local_digits = [piece.digits() for piece in rest]
            rank_exponents = ranks.all_gather_object([list(digits) for digits in local_digits])
            for piece, digits, *exponents in zip(rest, local_digits, *rank_exponents, strict=True):
                piece.sync(ranks, digits, sorted(set().union(*exponents)))


def _alike(upload: Mapping[str, Tensor], other_upload: Mapping[str, Tensor]) -> bool:
    return upload.keys() == other_upload.keys() and all(
        value.dtype == other_upload[name].dtype for name, value in upload.items()
    )


def weighted_sum(values: Tensor, weights: Sequence[float]) -> tuple[Tensor, float]:
    """The sum of some clients' values, shape (clients, ...), each times its weight, in about double precision.

    With it comes a power of two of which its numbers are multiples, where the values are of single precision or less,
    and some are not zero; else 0.
    """
    if values.dim() == 3 and values.mT.is_contiguous() and not values.is_contiguous():
        total, unit = weighted_sum(values.mT, weights)  # without a copy of all numbers
        return total.mT.contiguous(), unit
    if values.device.type == "mps":  # which has none
        values = values.cpu()
    factors = torch.tensor(weights, dtype=torch.float64, device=values.device)
    columns = values.detach().unsqueeze(-1).flatten(1)
    total = torch.empty(columns.shape[1], dtype=torch.float64, device=values.device)
    size = max(64, CHUNK_SIZE // len(values) // 64 * 64) if values.device.type == "cpu" else max(1, values[0].numel())
    for column_chunk, total_chunk in zip(_split(columns, size, dim=1), _split(total, size), strict=True):
        torch.mv(to_float64(column_chunk).mT, factors, out=total_chunk)
    unit = 0.0
    if values.dtype in NARROW and total.numel() and (largest := max_abs(total)):
        unit = math.ldexp(1.0, math.frexp(largest)[1] - _COHORT_BITS)
        offset = unit * math.ldexp(1.5, 52)
        total.add_(offset).sub_(offset)
    return total.view(values.shape[1:]), unit


def round_to(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A value in the type of its entry: counters (`num_batches_tracked`) and other integers take the nearest."""
    return value.to(dtype) if dtype.is_floating_point or dtype.is_complex else value.round().to(dtype)


def _split(values: Tensor, size: int, dim: int = 0) -> Sequence[Tensor]:
    return (values,) if values.shape[dim] <= size else torch.split(values, size, dim)
