"""How samples were measured, and what makes of a device's own values what networks take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.errors import one_of

Reach = Literal["data", "sample", "person"]
Sensor = tuple[str, str, float, float]
"""What a channel measures: its name, its unit, and the least and the largest value that it can have."""


@dataclass(frozen=True)
class Measurement:
    """What a device measures of a sample, and how it is scaled.

    Args:
        axes: What each axis of a sample's shape is: one of them ``"channel"``.
        channels: What each channel is, such as ``"gyro x"``.
        rate: Time steps per second; None where there is no time, or the data do not tell.
        low: The least value that each channel can have, as ``high`` the largest; None: any.
        scaled_over: What mean and deviation are taken over: all of the ``"data"`` (``mean`` and ``std`` tell them),
            each ``"sample"`` by itself, or all samples of a ``"person"``.
        mean: What is subtracted from each channel, in its unit, where that is the data's; ``std``: the divisor.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    channels: tuple[str, ...]
    units: tuple[str, ...]
    rate: float | None = None
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    scaled_over: Reach = "data"
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        one_of(("data", "sample", "person"), scaled_over=self.scaled_over)
        if len(self.axes) != len(self.shape) or self.axes.count("channel") != 1 or min(self.shape) < 1:
            raise ValueError(
                f'Expected `axes` to name each axis of `shape` {self.shape}, one "channel", but got {self.axes}.'
            )
        number = self.shape[self.axes.index("channel")]
        columns = {"channels": self.channels, "units": self.units}
        columns |= {name: getattr(self, name) for name in ("low", "high", "mean", "std")}
        for name, values in columns.items():
            if values is not None and len(values) != number:
                raise ValueError(f"Expected one of `{name}` for each of {number} channels but got {values}.")
        if self.scaled_over == "data" and (self.mean is None or self.std is None or min(self.std) <= 0):
            raise ValueError(
                f'Expected `mean` and `std`, above 0, with `scaled_over="data"` but got {self.mean} and {self.std}.'
            )

    @classmethod
    def of_sensors(
        cls,
        sensors: Sequence[Sensor],
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        rate: float | None = None,
        scaled_over: Reach = "data",
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> Measurement:
        channels, units, low, high = zip(*sensors, strict=True)
        scale = (None if values is None else tuple(values) for values in (mean, std))
        return cls(shape, axes, channels, units, rate, low, high, scaled_over, *scale)

    def prepare(self, x: Any, rate: float | None = None, units: Sequence[str] | None = None) -> NDArray[np.float32]:
        """Samples as networks take them, shape (n, ...), from a device's own values.

        ``x`` is one sample, of `shape`, or several, shape (n, ...); of one person where they are scaled by person. Its
        ``rate``, in time steps per second, and the ``units`` of its channels, or the one of all, are compared.
        """
        values = np.asarray(x)
        if values.dtype.kind not in "biuf":
            raise ValueError(f"Expected `x` to hold numbers but got {values.dtype}. Convert it.")
        values = values[np.newaxis] if values.shape == self.shape else values
        if values.shape[1:] != self.shape or not len(values):
            raise ValueError(
                f"Expected `x` of shape {self.shape} ({', '.join(self.axes)}), or (n, ...) of several, but got "
                f"{values.shape}. Bring its axes into that order."
            )
        if rate is not None and self.rate is not None and abs(rate - self.rate) > 1e-3 * self.rate:
            raise ValueError(f"Expected `rate` to be {self.rate:g} Hz but got {rate:g}. Resample the series.")
        given = [units] * len(self.units) if isinstance(units, str) else units
        if given is not None and tuple(given) != self.units:
            raise ValueError(f"Expected `units` to be {', '.join(self.units)} but got {units}. Convert the values.")
        self._check_values(values)
        if self.scaled_over == "data":
            mean, std = (self._along(part) for part in (self.mean, self.std))
            return scaled(values, mean, std)
        channel = self.axes.index("channel") + 1
        others = tuple(axis for axis in range(1, values.ndim) if axis != channel or self.scaled_over == "sample")
        if self.scaled_over == "sample":
            return z_score(values.astype(np.float64), others)
        if len(values) < 2:
            raise ValueError(
                f"Expected `x` to hold many samples of one person, by whose mean and deviation all are scaled, but got "
                f"{len(values)}. Pass them together."
            )
        return z_score(values.astype(np.float32), (0, *others))

    def describe(self) -> str:
        size = " x ".join(f"{number} {axis}" for number, axis in zip(self.shape, self.axes, strict=True))
        names = ", ".join(
            f"{name} ({unit})" if unit else name for name, unit in zip(self.channels, self.units, strict=True)
        )
        of = {"data": "the training data", "sample": "each sample", "person": "all samples of a person"}
        at = f" at {self.rate:g} Hz" if self.rate else ""
        whole = not any(self.mean or (1,)) and self.std == self.high
        scale = "to 0 to 1" if whole else f"by the mean and deviation of {of[self.scaled_over]}"
        return f"{size}{at}: {names}; scaled {scale}"

    def _along(self, values: Sequence[float] | None) -> NDArray[np.float64]:
        """A value of each channel, of a shape that broadcasts to a sample."""
        return np.array(values).reshape([-1 if axis == "channel" else 1 for axis in self.axes])

    def _check_values(self, values: NDArray[Any]) -> None:
        if not np.isfinite(values).all():
            wrong = int((~np.isfinite(values)).sum())
            raise ValueError(f"Expected `x` to be finite but got {wrong} NaN or infinite values. Mend or drop them.")
        for number, (name, unit) in enumerate(zip(self.channels, self.units, strict=True)):
            of = np.take(values, number, axis=1 + self.axes.index("channel"))
            low, high = (bounds[number] if bounds else None for bounds in (self.low, self.high))
            ends = of.min(), of.max()
            beyond = [v for v in ends if (low is not None and v < low) or (high is not None and v > high)]
            if beyond:
                raise ValueError(
                    f"Expected `x` to have values of {name} between {low} and {high}{unit and f' {unit}'} but got "
                    f"{beyond[-1]}. Convert it."
                )


def z_score(x: NDArray[np.float32], axes: tuple[int, ...]) -> NDArray[np.float32]:
    """Subtract the mean over some axes and divide by the standard deviation; what is constant is only centred."""
    return scaled(x, *moments(x, axes))


def moments(x: NDArray[Any], axes: tuple[int, ...]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and standard deviation over some axes, which stay with a length of 1; of what is constant, 1."""
    mean, std = (reduce(axis=axes, dtype=np.float64, keepdims=True) for reduce in (x.mean, x.std))
    # Rounding leaves a constant feature a tiny deviation, and dividing by that would blow the rounding up to ones.
    constant = x.min(axis=axes, keepdims=True) == x.max(axis=axes, keepdims=True)
    return mean, np.where(constant, 1.0, std)


def scaled(x: NDArray[Any], mean: NDArray[Any], std: NDArray[Any]) -> NDArray[np.float32]:
    """Subtract a mean and divide by a standard deviation, whose shapes broadcast, in double precision."""
    return cast(NDArray[np.float32], ((x - mean) / std).astype(np.float32))
