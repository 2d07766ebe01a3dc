"""Fixed-point arithmetic for `lightning_fcl.federation.exact_sum`: 64-bit integers that represent floats."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.ranks import Ranks

Digits = dict[int, Tensor]
"""Integers by the exponent of their unit. The dictionary represents the sum of ``2.0**exponent * digits[exponent]``."""

IntegerScale = tuple[int, int]
"""Exponent of a unit 2^exponent, and the maximum absolute value of the integers in this unit."""

CHUNK_SIZE = 1 << 17
"""Number of elements per chunk. Tensors with at most this many elements fit into a CPU's cache."""

NARROW = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Number of significand bits by dtype. Numbers of these dtypes times a 29-bit integer are exact in double precision."""

# Exponent of the smallest positive number in double precision.
_LOWEST = -1074
# Accepted numbers are below 2^900, so that their sums stay in the range of double precision.
_HIGHEST = 900
# Number of bits per digit.
_BITS = 42
# Maximum of `_Limb.bound`. If a sum could exceed this maximum, the limb is first converted to digits.
_ROOM = 1 << 62


class ExactWeights:
    """The weights of several clients, and the properties of these weights that `ExactChunk` needs."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.column = torch.tensor(weights, dtype=torch.float64)[:, None]
        self.largest = float(max(weights))
        self.whole = self.largest < 1 << 29 and all(weight % 1 == 0 for weight in weights)
        self.ones = self.whole and self.largest == 1


class _Bench(threading.local):
    """Temporary buffers of one thread. All chunks reuse these buffers, because new memory would be slower."""

    def __init__(self) -> None:
        self._halves = torch.empty(2, CHUNK_SIZE, dtype=torch.float64, device="cpu")
        self._views: dict[object, tuple[Tensor, Tensor, Tensor]] = {}

    def clear(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return three buffers with the shape of ``values``. Their content is undefined.

        The first two buffers have double precision. The third buffer has the dtype of ``values``, and can share the
        memory of the second buffer.
        """
        if values.device.type != "cpu":
            numbers, spare = (torch.empty_like(values, dtype=torch.float64) for _ in range(2))
            return numbers, spare, torch.empty_like(values)
        kind = values.shape, values.dtype
        if kind not in self._views:
            if len(self._views) == 64:
                self._views.clear()
            numbers, spare = (half[: values.numel()].view(values.shape) for half in self._halves)
            absolute = self._halves[1].view(values.dtype)[: values.numel()].view(values.shape)
            self._views[kind] = numbers, spare, absolute
        return self._views[kind]


_bench = _Bench()


def to_float64(values: Tensor) -> Tensor:
    """Return values in double precision. A later call can overwrite a result of at most ``CHUNK_SIZE`` values."""
    return values.double() if values.numel() > CHUNK_SIZE else _bench.clear(values)[0].copy_(values)


@dataclass
class _Limb:
    """A part of an exact sum: one integer for each element, in units of 2^exponent.

    ``total`` contains these sums plus ``offsets``, the sum of the offsets of all added numbers. ``bound`` is an upper
    bound of the absolute values of the sums without the offsets.
    """

    exponent: int
    total: Tensor
    offsets: int = 0
    bound: int = 0

    def value(self) -> Tensor:
        return self.total - ((self.offsets + (1 << 63)) % (1 << 64) - (1 << 63))

    def digits(self) -> Digits:
        """Return the sum as two digits. The upper digit can have more than 42 bits."""
        digit_idx, shift = divmod(self.exponent - _LOWEST, _BITS)
        value = self.value()
        low, high = (value & (1 << _BITS - shift) - 1) << shift, value >> _BITS - shift
        return {_LOWEST + digit_idx * _BITS: low, _LOWEST + (digit_idx + 1) * _BITS: high}


class ExactChunk:
    """The exact sum of the values of a chunk: at most three limbs (`_Limb`), and the digits of earlier limbs."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self._device = device
        self._limbs: list[_Limb] = []
        self._digits: Digits = {}

    def add(self, values: Tensor, weights: ExactWeights, column: Tensor | None, entry: str) -> None:
        """Add the weighted values of one client, shape (size,), or of several clients, shape (clients, size).

        ``column`` contains the weights of several clients, shape (clients, 1). It is None for one client.
        """
        if column is not None and values.dtype is torch.float64:
            for total in _sums(values, weights, column, entry):
                self._add(total, _bench.clear(total)[1], 1, max_abs(total), 0.0)
            return
        numbers, spare, absolute = _bench.clear(values)
        smallest, largest = (bound.item() for bound in torch.aminmax(torch.abs(values, out=absolute)))
        _check(largest, weights, entry)
        exact = weights.whole and values.dtype in NARROW
        # All numbers are multiples of the power of two that the last bit of the smallest number represents.
        unit = math.ldexp(1.0, math.frexp(smallest)[1] - NARROW[values.dtype]) if exact and smallest else 0.0
        numbers.copy_(values)
        times = 1
        if exact and column is None and weights.largest < 1 << 16:
            # `_add` multiplies the integers by `times`, which needs no extra time.
            times = int(weights.largest)
        elif not weights.ones:
            numbers.mul_(weights.largest if column is None else column)
            largest *= weights.largest
        self._add(numbers, spare, times, largest, unit)

    def add_multiples(self, values: Tensor, unit: float, largest: float) -> None:
        """Add multiples of ``unit`` in double precision, shape (size,), with absolute values of at most ``largest``."""
        numbers, spare, _ = _bench.clear(values)
        self._add(numbers.copy_(values), spare, 1, largest, unit)

    def _add(self, numbers: Tensor, spare: Tensor, times: int, largest: float, unit: float) -> None:
        """Add the numbers multiplied by ``times``, and overwrite ``numbers``.

        The numbers are multiples of ``unit``, and their absolute values are at most ``largest``.
        """
        clients = len(numbers) if numbers.dim() == 2 else 1
        while largest > 0:
            limb = self._limb(math.frexp(largest)[1], times, clients)
            complete = math.ldexp(1.0, limb.exponent) <= unit
            # Between 2^52 and 2^53 units, the last bit of a number is one unit. Therefore this addition rounds to whole
            # units. The bits of the result minus the bits of the offset are the number of units, as an integer.
            offset = math.ldexp(1.5, 52 + limb.exponent)
            rounded = torch.add(numbers, offset, out=numbers if complete else spare)
            bits = rounded.view(torch.int64)
            limb.total.add_(bits if bits.dim() == 1 else bits.sum(dim=0), alpha=times)
            limb.offsets += times * clients * ((1075 + limb.exponent << 52) + (1 << 51))
            if complete:
                return
            largest = max_abs(numbers.sub_(rounded.sub_(offset)))

    def _limb(self, size: int, times: int, rows: int) -> _Limb:
        """Return a limb for ``rows`` numbers below 2^size, each multiplied by ``times``.

        The bound of these numbers is added to the limb's bound. The largest number is at least 2^20 units of the limb,
        unless the limb has the smallest possible unit.
        """
        fitting = [
            limb
            for limb in self._limbs
            if size - limb.exponent <= 51
            and (size - limb.exponent >= 21 or limb.exponent == _LOWEST)
            and times * rows << size - limb.exponent <= _ROOM
        ]
        if fitting:
            limb = min(fitting, key=lambda limb: limb.exponent)
        else:
            if len(self._limbs) == 3:
                self.add_digits(self._limbs.pop(0).digits())
            # With a small unit, the remainder is small. The unit must be large enough to add many uploads.
            exponent = max(_LOWEST, size - 50 + max(0, times.bit_length() // 2 - 1))
            limb = _Limb(exponent, torch.zeros(self.size, dtype=torch.int64, device=self._device))
            self._limbs.append(limb)
        bound = times * rows << size - limb.exponent
        if limb.bound + bound > _ROOM:
            self.add_digits(limb.digits())
            limb.total.zero_()
            limb.offsets = limb.bound = 0
        limb.bound += bound
        return limb

    def add_digits(self, digits: Mapping[int, Tensor]) -> None:
        self._digits = _carry(self._digits, digits)

    def digits(self) -> Digits:
        return _carry(self._digits, *(limb.digits() for limb in self._limbs))

    def scale(self) -> IntegerScale | None:
        """Return the unit's exponent and the bound of the sum's integers, or None if the sum is not a single limb.

        For a sum without numbers, return (0, 0).
        """
        if self._digits or len(self._limbs) > 1:
            return None
        return (self._limbs[0].exponent, self._limbs[0].bound) if self._limbs else (0, 0)

    def to_integers(self, unit_exponent: int) -> Tensor:
        """Return the sum as integers on the CPU, in units of ``2^unit_exponent``.

        The sum must have at most one limb. The unit of this limb must be at least ``2^unit_exponent``.
        """
        if not self._limbs:
            return torch.zeros(self.size, dtype=torch.int64, device="cpu")
        return (self._limbs[0].value() << self._limbs[0].exponent - unit_exponent).cpu()

    def load_integers(self, mark: IntegerScale, whole: Tensor) -> None:
        """Replace the sum by the integers ``whole`` with the scale ``mark``."""
        self._limbs, self._digits = [_Limb(mark[0], whole.to(self._device), bound=mark[1])], {}

    def sync(self, ranks: Ranks, digits: Digits, exponents: Sequence[int]) -> None:
        """Replace the sum by the sum over all ranks.

        Args:
            ranks: The ranks.
            digits: The digits of this rank's sum.
            exponents: The exponents of the digits on all ranks.
        """
        zeros = torch.zeros(self.size, dtype=torch.int64, device=self._device)
        numbers = torch.cat([digits.get(exponent, zeros) for exponent in exponents])
        ranks.all_reduce(numbers)
        summed = torch.split(numbers, self.size)
        self._limbs, self._digits = [], _carry(dict(zip(exponents, summed, strict=True)))

    def total(self) -> Tensor:
        # This is faster than the general case below, and gives the same result.
        if len(self._limbs) == 1 and not self._digits:
            return self._limbs[0].value().double().mul_(math.ldexp(1.0, self._limbs[0].exponent))
        total = torch.zeros(self.size, dtype=torch.float64, device=self._device)
        left_out = torch.zeros_like(total)
        # The digits come in ascending order. The unit of each digit is above the sum of all lower digits.
        for exponent, digit in self.digits().items():
            high = digit.double().mul_(math.ldexp(1.0, exponent))
            rounded_sum = high + total
            # This difference is exactly the rounding error of the sum.
            left_out += total - (rounded_sum - high)
            total = rounded_sum
        return total + left_out


def _sums(rows: Tensor, weights: ExactWeights, column: Tensor, entry: str) -> list[Tensor]:
    """Return a few tensors whose exact sum is the weighted sum of ``rows``. ``rows`` has shape (clients, size).

    Each product of a number and its weight is split into parts with few bits. Therefore the sum of all clients' parts
    is not rounded.
    """
    bits = 52 - len(rows).bit_length()
    width = max(1, CHUNK_SIZE // len(rows)) if rows.device.type == "cpu" else rows.shape[1]
    sums: list[Tensor] = []
    for start in range(0, rows.shape[1], width):
        chunk = rows[:, start : start + width]
        rest, high, _ = _bench.clear(chunk)
        largest = max_abs(rest.copy_(chunk))
        _check(largest, weights, entry)
        if not weights.ones:
            rest.mul_(column)
            largest *= weights.largest
        level = 0
        while largest > 0:
            if level == len(sums):
                sums.append(rows.new_zeros(rows.shape[1]))
            # This addition rounds the numbers as in `ExactChunk._add`.
            offset = math.ldexp(1.5, 52 - bits + math.frexp(largest)[1])
            torch.add(rest, offset, out=high).sub_(offset)
            torch.sum(high, dim=0, out=sums[level][start : start + width])
            largest, level = max_abs(rest.sub_(high)), level + 1
    return sums


def max_abs(values: Tensor) -> float:
    """Return the largest absolute value, or NaN if a value is NaN."""
    return max(abs(bound.item()) for bound in torch.aminmax(values))


def _check(largest: float, weights: ExactWeights, entry: str) -> None:
    if not largest * weights.largest < 2.0**_HIGHEST:
        raise InvalidValueError(
            f"Expected each value of `{entry}` times its client's weight to be finite and below 8e270, but got a value "
            f"of {largest} and weights up to {weights.largest}.",
            argument=entry,
        )


def _carry(*summands: Mapping[int, Tensor]) -> Digits:
    """Return the digits of a sum in ascending order. Carries are propagated so that each digit is in [-2^41, 2^41)."""
    digits: Digits = {}
    exponents = {exponent for summand in summands for exponent in summand}
    if not exponents:
        return digits
    exponent = min(exponents)
    value = torch.zeros_like(next(summand[exponent] for summand in summands if exponent in summand))
    while exponent <= max(exponents) or bool(value.any()):
        for summand in summands:
            if exponent in summand:
                value = value + summand[exponent]
        carry = value + (1 << _BITS - 1) >> _BITS
        digits[exponent] = value - (carry << _BITS)
        exponent, value = exponent + _BITS, carry
    return digits


def common_scale(marks: Sequence[IntegerScale | None]) -> IntegerScale | None:
    """Return the exponent of the smallest unit of several scales, and the bound of the sum over all ranks in this unit.

    Return None if a scale is None, or if 62 bits are not sufficient for the sum. Scales with a bound of 0 are ignored.
    """
    nonzero_marks = [mark for mark in marks if mark is not None and mark[1]]
    exponent = min((mark[0] for mark in nonzero_marks), default=0)
    bound = sum(bound << unit - exponent for unit, bound in nonzero_marks)
    return (exponent, bound) if None not in marks and bound <= _ROOM else None
