"""Exact sums: bitwise identical for any order and grouping of the terms, and any number of processes and threads.

A usual sum of floating-point numbers depends on the order of its terms, because each addition rounds. The additions in
this module do not round. Each number is an integer multiple of a unit, which is a power of two, plus a remainder below
one unit. The remainder is split again with smaller units, until nothing remains. The integers are added exactly, as
64-bit integers. Therefore the sum does not depend on the order of its terms:

1. Each term is an element of an upload multiplied by the client's weight. The product is rounded once to double
   precision. The product is exact if the element has single precision and the weights are integers below 2^29.
2. All further steps are exact for any units. The choice of units affects only the speed. With the chosen units, one
   64-bit integer per element is sufficient for a typical tensor.
3. The total is rounded at the end. Before this, the total is represented by digits of 42 bits. Equal totals have
   identical digits.

No bits are dropped, even if very small and very large numbers are added. You do not need to specify a maximum of the
numbers.
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
"""Number of collected upload elements above which the collected uploads are added together."""

_COHORT_BITS = 46
"""Number of bits to which the sum over a client group is rounded, for entries in single or half precision.

The bits are counted down from the leading bit of the largest absolute value in the sum. With this rounding, one integer
per element can contain the exact sum of several client groups. The condition is that each group's largest value is
between an eighth and twice the first group's largest value.
"""

GroupSums = dict[str, tuple[Tensor, float]]
"""A dictionary from entry name to the weighted sum over some clients and the unit of this sum (`weighted_sum`)."""


class ExactSum:
    """The weighted sum of tensors, computed with exact additions. Only `total` and `mean` round the sum.

    Args:
        reference: Tensor with the shape and the device of the summands. It must be complex if the summands are complex.
        entry: Name of the entry, for messages.
    """

    def __init__(self, reference: Tensor, entry: str = "value") -> None:
        self._entry = entry
        self._complex = reference.is_complex()
        self._shape = (*reference.shape, 2) if self._complex else reference.shape
        self.size = math.prod(self._shape)
        # MPS has no float64.
        self._device = torch.device("cpu") if reference.device.type == "mps" else reference.device
        # On a GPU, each chunk adds launch time, so use a single chunk.
        self._step = CHUNK_SIZE if self._device.type == "cpu" else max(1, self.size)
        sizes = [min(self._step, self.size - start) for start in range(0, self.size, self._step)]
        self._pieces = [ExactChunk(size, self._device) for size in sizes]

    def add(self, values: Tensor, weights: ExactWeights | None = None) -> None:
        """Add the uploads of several clients, shape (clients, ...), each multiplied by its weight (default: 1)."""
        weights = weights or ExactWeights([1.0] * len(values))
        rows = (torch.view_as_real(values) if self._complex else values).detach().to(self._device)
        rows = rows.reshape(len(values), self.size)
        # Split 64-bit integers into two halves that fit into double precision.
        if rows.dtype is torch.int64:
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
        """Add numbers in double precision that are multiples of ``unit``, with at most 2^46 units in absolute value."""
        for piece, chunk in zip(self._pieces, _split(values.to(self._device).view(-1), self._step), strict=False):
            piece.add_multiples(chunk, unit, math.ldexp(unit, _COHORT_BITS))

    def total(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return the sum converted to ``dtype``. With the default, a complex sum has the dtype ``complex128``.

        Conversion to an integer ``dtype`` is exact. Otherwise, the sum is first rounded to double precision.

        Raises:
            InvalidValueError: If a sum is outside the range of ``dtype``.
        """
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
            rounded = self._to_int64()
            low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
            # Find the sums that do not fit into 64 bits.
            wrapped = (rounded - total).abs() > 2.0**62
            fits = not bool((wrapped | (rounded < low) | (rounded > high)).any())
        if not fits:
            raise InvalidValueError(
                f"Expected the sum of `{self._entry}` to be in the range of `{dtype}`, but it is outside this range.",
                argument=self._entry,
            )
        return rounded.to(dtype)

    def mean(self, weight: float, reference: Tensor) -> Tensor:
        """Return the sum divided by the sum of the weights, in the dtype of ``reference``.

        Args:
            weight: Sum of the weights.
            reference: Tensor with the dtype of the result and with numbers near the summands, such as the server's
                value. If ``reference`` contains 64-bit integers above 2^53, the result is ``reference`` plus the mean
                difference between the summands and ``reference``.
        """
        if reference.dtype is torch.int64 and bool((reference.abs() > 1 << 53).any()):
            # Double precision cannot represent all integers of this size, but can represent the smaller differences.
            change = copy.deepcopy(self)
            change.add(-reference[None], ExactWeights([weight]))
            return reference.to(self._device) + change._mean(weight, reference.dtype)
        return self._mean(weight, reference.dtype)

    def _mean(self, weight: float, dtype: torch.dtype) -> Tensor:
        if self._complex:
            return (self.total() / weight).to(dtype)
        mean = torch.empty(self.size, dtype=dtype, device=self._device)
        # Work in chunks, so that there is no second copy of the whole sum.
        for chunk, piece in zip(_split(mean, self._step), self._pieces, strict=False):
            chunk.copy_(round_to(piece.total() / weight, dtype))
        return mean.view(self._shape)

    def _to_int64(self) -> Tensor:
        whole = torch.zeros(self.size, dtype=torch.int64, device=self._device)
        for exponent, digit in self.digits().items():
            whole += digit << exponent if exponent >= 0 else digit >> -exponent
        return whole.view(self._shape)

    def digits(self) -> Digits:
        """Return the exact sum as `Digits`. Equal sums have equal digits, and a missing digit counts as zero.

        To add the sums of several processes, add the digits with equal exponents. Pass the results to `add_digits`.
        """
        parts = [piece.digits() for piece in self._pieces]
        zeros = [torch.zeros(piece.size, dtype=torch.int64, device=self._device) for piece in self._pieces]
        return {
            exponent: torch.cat([part.get(exponent, nothing) for part, nothing in zip(parts, zeros, strict=True)])
            for exponent in sorted({exponent for part in parts for exponent in part})
        }

    def add_digits(self, digits: Mapping[int, Tensor]) -> None:
        """Add the sums of other `ExactSum` objects (at most a million), in the format that `digits` returns."""
        for piece, start in zip(self._pieces, range(0, self.size, self._step), strict=True):
            piece.add_digits({exponent: digit[start : start + self._step] for exponent, digit in digits.items()})

    def scales(self) -> list[IntegerScale | None]:
        return [piece.scale() for piece in self._pieces]

    def with_scales(
        self, marks: Iterable[Sequence[IntegerScale | None]]
    ) -> list[tuple[ExactChunk, IntegerScale | None]]:
        """Return each chunk of this sum, with the scale that all ranks can use for the chunk. None: no common scale.

        Args:
            marks: The result of `scales` on each rank.
        """
        common = map(common_scale, zip(*marks, strict=True))
        return list(zip(self._pieces, common, strict=True))

    @property
    def shape_and_type(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape of the summands, and a dtype that is complex if the summands are complex."""
        return (tuple(self._shape[:-1]), torch.complex64) if self._complex else (tuple(self._shape), torch.float32)


class ExactSums:
    """The exact weighted sums of the entries of uploads, one `ExactSum` per entry name."""

    def __init__(self) -> None:
        self._sums: dict[str, ExactSum] = {}
        # Uploads of single clients are collected and added as one stack. This is faster, and the sums are identical.
        self._waiting: list[Mapping[str, Tensor]] = []
        self._weights: list[float] = []

    @property
    def sums(self) -> dict[str, ExactSum]:
        """The sum of all added values, by entry."""
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
        """Add the uploads of some clients, each entry of shape (clients, ...). Multiply each upload by its weight.

        Without ``weights``, all weights are 1.
        """
        if not values:
            return
        weights = weights or [1.0] * len(next(iter(values.values())))
        size = sum(value.numel() for value in values.values())
        if self._waiting and not _have_same_dtypes(values, self._waiting[0]):
            self._add_waiting()
        if len(weights) > 1 or 2 * size > _WAITING:
            self._add(values, ExactWeights(weights))
            return
        self._waiting.append({name: value.detach().clone() for name, value in values.items()})
        self._weights += weights
        if len(self._waiting) * size > _WAITING:
            self._add_waiting()

    def update_group(self, sums: GroupSums) -> None:
        """Add the weighted sums of a client group, as `weighted_sum` returns them."""
        for name, (value, unit) in sums.items():
            if unit:
                self._sum(name, value).add_multiples(value, unit)
            else:
                self._sum(name, value).add(value[None])

    def _add(self, values: Mapping[str, Tensor], weights: ExactWeights) -> None:
        for name, value in values.items():
            exact = self._sum(name, value[0])
            # If all clients share one row in memory (stride 0), skip the entry if the row contains only zeros.
            if value.stride(0) or value[0].any():
                exact.add(value, weights)

    def _sum(self, name: str, reference: Tensor) -> ExactSum:
        if name not in self._sums:
            self._sums[name] = ExactSum(reference, name)
        return self._sums[name]

    def sync(self, ranks: Ranks) -> None:
        """Replace the sums by the sums over all ranks. A rank without a sum for an entry adds zero to this entry."""
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
        # In these chunks, the sizes of the numbers differ too much for one integer per number.
        if rest:
            local_digits = [piece.digits() for piece in rest]
            rank_exponents = ranks.all_gather_object([list(digits) for digits in local_digits])
            for piece, digits, *exponents in zip(rest, local_digits, *rank_exponents, strict=True):
                piece.sync(ranks, digits, sorted(set().union(*exponents)))


def _have_same_dtypes(upload: Mapping[str, Tensor], other_upload: Mapping[str, Tensor]) -> bool:
    return upload.keys() == other_upload.keys() and all(
        value.dtype == other_upload[name].dtype for name, value in upload.items()
    )


def weighted_sum(values: Tensor, weights: Sequence[float]) -> tuple[Tensor, float]:
    """Return the weighted sum over clients, and the unit of the sum. ``values`` has shape (clients, ...).

    The sum is computed in double precision. If the values have single or half precision, each element of the sum is
    rounded to a multiple of the unit, which is a power of two. For other dtypes, and for a sum of zeros, the unit is 0.
    """
    if values.dim() == 3 and values.mT.is_contiguous() and not values.is_contiguous():
        # Transpose, to avoid a copy of all numbers.
        total, unit = weighted_sum(values.mT, weights)
        return total.mT.contiguous(), unit
    # MPS has no float64.
    if values.device.type == "mps":
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
    """Return ``value`` converted to ``dtype``. For an integer dtype, first round to the nearest integer."""
    return value.to(dtype) if dtype.is_floating_point or dtype.is_complex else value.round().to(dtype)


def _split(values: Tensor, size: int, dim: int = 0) -> Sequence[Tensor]:
    return (values,) if values.shape[dim] <= size else torch.split(values, size, dim)
