"""In-memory datasets of NumPy arrays, and descriptions of the measurement and scaling of their samples."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.errors import InvalidValueError, MissingValueError
from lightning_fcl.validation import one_of

# Number of samples that are checked for non-finite values at once.
_PIECE = 4096

ScalingScope = Literal["data", "sample", "person"]
Sensor = tuple[str, str, float, float]
"""Name, unit, smallest possible value and largest possible value of a channel."""


@dataclass(frozen=True, eq=False)
class ArrayDataset:
    """A complete dataset in memory. It can also contain the owner and the domain of each sample.

    Images can be stored as pixels, with one byte per channel. The dataset then also contains `mean` and `std` for the
    normalization. `samples` normalizes only the requested images.

    Args:
        x: Samples, shape ``(n, ...)``, float32 and finite. If `mean` and `std` are passed, pixels of type uint8.
        y: Labels from 0 to C - 1, shape ``(n,)``, int64.
        client_ids: Natural owner of each sample (number or name of a subject), shape ``(n,)``. None if there are no
            owners.
        classes: Names of the C classes, in the order of the labels.
        official_test: Whether each sample is in the publishers' test set, shape ``(n,)``. None if there is no test set.
        group: Natural domain of each sample (a device, a place), shape ``(n,)``. None if there are no domains.
        mean: Mean to subtract from the pixels, float32, in gray levels from 0 to 255. The shape must broadcast to one
            sample, for example ``(channels, 1, 1)``.
        std: Standard deviation by which the centered pixels are divided, float32, above 0. The shape must broadcast to
            one sample.
        measurement: Channels, units and scaling of `x`. None if unknown.

    Raises:
        ValueError: If shapes, types or labels are inconsistent, or if `x` contains non-finite values.

    Example:
        >>> scale = {"mean": np.zeros((1, 1, 1), np.float32), "std": np.full((1, 1, 1), 255, np.float32)}
        >>> pixels = np.full((2, 3, 8, 8), 51, np.uint8)
        >>> data = ArrayDataset(x=pixels, y=np.array([0, 1]), client_ids=None, classes=("cat", "dog"), **scale)
        >>> data.x.dtype.name, data.samples([1]).dtype.name, data.samples([1]).max().item()
        ('uint8', 'float32', 0.20000000298023224)
    """

    x: NDArray[Any]
    y: NDArray[np.int64]
    client_ids: NDArray[Any] | None
    classes: tuple[str, ...]
    official_test: NDArray[np.bool_] | None = None
    group: NDArray[Any] | None = None
    mean: NDArray[np.float32] | None = None
    std: NDArray[np.float32] | None = None
    measurement: Measurement | None = None

    def __post_init__(self) -> None:
        pixels, size = self.mean is not None or self.std is not None, len(self.x) if np.ndim(self.x) else 0
        if not size:
            raise InvalidValueError(
                f"Expected `x` to contain at least one sample, but got shape {self.x.shape}.",
                hint="Pass at least one sample. For a dataset in files, check that the files contain samples.",
                argument="x",
            )
        kinds = {"x": "uint8" if pixels else "float32", "y": "int64", "official_test": "bool"}
        kinds |= {"mean": "float32", "std": "float32", "client_ids": "integers or text", "group": "integers or text"}
        for name, kind in kinds.items():
            column = vars(self)[name]
            if column is None:
                continue
            is_text = kind == "integers or text"
            fits = column.dtype.kind in "iuU" if is_text else column.dtype == kind
            length_note = "" if name in ("x", "mean", "std") else f", one entry per sample ({size} in total)"
            if not fits or (length_note and column.shape != (size,)):
                raise InvalidValueError(
                    f"Expected `{name}` to contain {kind}{length_note}, but got {column.dtype} of shape "
                    f"{column.shape}.",
                    hint="Pass one entry for each sample."
                    if fits
                    else f"Convert `{name}` with `{name}.astype({'str' if is_text else repr(kind)})`.",
                    argument=name,
                    value=column.dtype,
                )
        wrong = np.flatnonzero((self.y < 0) | (self.y >= len(self.classes)))
        if wrong.size:
            raise InvalidValueError(
                f"Expected `y` to be between 0 and {len(self.classes) - 1}, one label per entry of `classes`, but got "
                f"{self.y[wrong[0]]} in sample {wrong[0]} (invalid labels in total: {wrong.size}).",
                hint="Number the labels from 0, or name every class.",
                argument="y",
                value=self.y[wrong[0]],
            )
        if pixels:
            check_scale(self.mean, self.std, self.x.shape[1:])
        # Checking all values at once would allocate a quarter of the memory of `x`.
        elif not all(np.isfinite(self.x[n : n + _PIECE]).all() for n in range(0, len(self.x), _PIECE)):
            per_sample = (~np.isfinite(self.x)).reshape(size, -1).sum(axis=1)
            bad = np.flatnonzero(per_sample)
            raise InvalidValueError(
                f"Expected `x` to be finite, but in sample {bad[0]}, {per_sample[bad[0]]} of {self.x[0].size} values "
                f"are NaN or infinite ({bad.size} of {size} samples have non-finite values).",
                hint="Correct or drop these samples first.",
                argument="x",
                value=per_sample[bad[0]],
            )

    def samples(self, indices: Any = slice(None)) -> NDArray[np.float32]:
        """Return the samples at the given indices. Pixels are normalized. Other samples are unchanged."""
        values: NDArray[Any] = self.x[indices]
        return values if self.mean is None or self.std is None else (values - self.mean) / self.std


def check_scale(mean: NDArray[Any] | None, std: NDArray[Any] | None, shape: tuple[int, ...]) -> None:
    """Raise ValueError if ``mean`` and ``std`` cannot normalize samples of the given shape."""
    for name, values in (("mean", mean), ("std", std)):
        if values is None:
            raise MissingValueError(
                f"Expected both `mean` and `std`, but got no `{name}`.", hint="Pass both, or neither.", argument=name
            )
        broadcasts = values.ndim in (0, len(shape)) and all(
            n in (1, m) for n, m in zip(values.shape, shape, strict=False)
        )
        low = values.min() < 0 if name == "mean" else values.min() <= 0
        if not broadcasts or low or not np.isfinite(values).all():
            raise InvalidValueError(
                f"Expected `{name}` to be finite, {'at least' if name == 'mean' else 'above'} 0, and of a shape that "
                f"broadcasts to a sample of shape {shape}, but got {values.ravel().tolist()} of shape {values.shape}.",
                hint="For one value per channel of images, pass finite values of shape "
                f"({shape[0] if shape else 1}, 1, 1).",
                argument=name,
            )


@dataclass(frozen=True)
class Measurement:
    """Channels, units, sampling rate and scaling of samples that a device measures.

    Args:
        shape: Shape of one sample.
        axes: Name of each axis of `shape`. Exactly one axis is ``"channel"``.
        channels: Name of each channel, for example ``"gyro x"``.
        units: Unit of each channel.
        sampling_rate_hz: Number of time steps per second. None if there is no time axis or the rate is unknown.
        low: Smallest possible value of each channel. None if there is no limit.
        high: Largest possible value of each channel. None if there is no limit.
        scaled_over: Samples over which mean and standard deviation are computed. ``"data"`` is a whole
            dataset, with the values in `mean` and `std`. ``"sample"`` is each sample separately. ``"person"`` is all
            samples of one person.
        mean: Mean to subtract from each channel, in the unit of the channel. Required if `scaled_over` is ``"data"``.
        std: Standard deviation by which each channel is divided, above 0. Required if `scaled_over` is ``"data"``.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    channels: tuple[str, ...]
    units: tuple[str, ...]
    sampling_rate_hz: float | None = None
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    scaled_over: ScalingScope = "data"
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        one_of(("data", "sample", "person"), scaled_over=self.scaled_over)
        if len(self.axes) != len(self.shape) or self.axes.count("channel") != 1 or min(self.shape) < 1:
            raise InvalidValueError(
                f'Expected `axes` to name each axis of `shape` {self.shape} with exactly one "channel", and each axis '
                f"to have at least length 1, but got the axes {self.axes}.",
                argument="axes",
                value=self.axes,
            )
        number = self.shape[self.axes.index("channel")]
        columns = {"channels": self.channels, "units": self.units}
        columns |= {name: getattr(self, name) for name in ("low", "high", "mean", "std")}
        for name, values in columns.items():
            if values is not None and len(values) != number:
                raise InvalidValueError(
                    f"Expected `{name}` to have one value per channel ({number} in total), but got {values}."
                )
        if self.scaled_over == "data" and (self.mean is None or self.std is None or min(self.std) <= 0):
            raise InvalidValueError(
                f'Expected `mean`, and `std` above 0, with `scaled_over="data"`, but got mean={self.mean} and '
                f"std={self.std}."
            )

    @classmethod
    def from_sensors(
        cls,
        sensors: Sequence[Sensor],
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        rate: float | None = None,
        scaled_over: ScalingScope = "data",
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> Measurement:
        """Return the measurement of the given sensors, one per channel. ``rate`` is in Hz."""
        channels, units, low, high = zip(*sensors, strict=True)
        scale = (None if values is None else tuple(values) for values in (mean, std))
        return cls(shape, axes, channels, units, rate, low, high, scaled_over, *scale)

    def preprocess(
        self, x: Any, sampling_rate_hz: float | None = None, units: Sequence[str] | None = None
    ) -> NDArray[np.float32]:
        """Convert raw values of a device to model inputs, which are scaled like the training samples.

        Args:
            x: One sample of shape `shape`, or several samples, shape ``(n, *shape)``. If `scaled_over` is ``"person"``,
                pass all samples of one person.
            sampling_rate_hz: Sampling rate of ``x``, in time steps per second. If None, the rate is not checked.
            units: Unit of each channel of ``x``, or one unit for all channels. If None, the units are not checked.

        Returns:
            Scaled samples, shape ``(n, *shape)``, float32.

        Raises:
            InvalidValueError: If the type, shape, sampling rate, units or range of ``x`` do not match this measurement,
                or if ``x`` contains non-finite values.
        """
        values = np.asarray(x)
        if values.dtype.kind not in "biuf":
            raise InvalidValueError(
                f"Expected `x` to contain numbers, but got {values.dtype}.",
                hint="Convert `x` to a numeric dtype, such as `x.astype('float32')`.",
                argument="x",
                value=values.dtype,
            )
        values = values[np.newaxis] if values.shape == self.shape else values
        if values.shape[1:] != self.shape or not len(values):
            raise InvalidValueError(
                f"Expected `x` of shape {self.shape} ({', '.join(self.axes)}), or (n, ...) for several samples, but "
                f"got {values.shape}.",
                hint="Transpose or reshape `x` to this shape.",
                argument="x",
                value=values.shape,
            )
        if (
            sampling_rate_hz is not None
            and self.sampling_rate_hz is not None
            and abs(sampling_rate_hz - self.sampling_rate_hz) > 1e-3 * self.sampling_rate_hz
        ):
            raise InvalidValueError(
                f"Expected `sampling_rate_hz` to be {self.sampling_rate_hz:g} Hz, but got {sampling_rate_hz:g}.",
                hint="Resample the series.",
                argument="sampling_rate_hz",
                value=sampling_rate_hz,
            )
        channel_units = [units] * len(self.units) if isinstance(units, str) else units
        if channel_units is not None and tuple(channel_units) != self.units:
            raise InvalidValueError(
                f"Expected `units` to be {', '.join(self.units)}, but got {units}.",
                hint="Convert the values to these units.",
                argument="units",
                value=units,
            )
        if not np.isfinite(values).all():
            wrong = int((~np.isfinite(values)).sum())
            raise InvalidValueError(
                f"Expected `x` to be finite, but got NaN or infinite values ({wrong} in total).",
                hint="Correct or drop the samples with these values.",
                argument="x",
                value=wrong,
            )
        channel = self.axes.index("channel") + 1
        for number, (name, unit) in enumerate(zip(self.channels, self.units, strict=True)):
            channel_values = np.take(values, number, axis=channel)
            low, high = (bounds[number] if bounds else None for bounds in (self.low, self.high))
            ends = channel_values.min(), channel_values.max()
            if outliers := [v for v in ends if (low is not None and v < low) or (high is not None and v > high)]:
                limits = " and ".join(
                    f"{word} {bound}" for word, bound in (("at least", low), ("at most", high)) if bound is not None
                )
                raise InvalidValueError(
                    f"Expected values of {name} in `x` to be {limits}{unit and f' {unit}'}, but got {outliers[-1]}.",
                    hint=f"Convert `{name}` to {unit or 'the scale of the training data'}.",
                    argument="x",
                    value=outliers[-1],
                )
        if self.scaled_over == "data":
            scale_shape = [-1 if axis == "channel" else 1 for axis in self.axes]
            return normalize_array(
                values, np.array(self.mean).reshape(scale_shape), np.array(self.std).reshape(scale_shape)
            )
        reduced_axes = tuple(axis for axis in range(1, values.ndim) if axis != channel or self.scaled_over == "sample")
        if self.scaled_over == "sample":
            return standardize(values.astype(np.float64), reduced_axes)
        if len(values) < 2:
            raise InvalidValueError(
                "Expected `x` to contain several samples of one person, because the mean and standard deviation over "
                f"these samples scale each sample, but got {len(values)}.",
                hint="Pass all samples of the person together.",
                argument="x",
            )
        return standardize(values.astype(np.float32), (0, *reduced_axes))

    def describe(self, method: str = "predict") -> str:
        """Return a description of shape, sampling rate, channels, units and scaling, without a period at the end.

        Args:
            method: Name of the method of a published network that takes raw values: "predict" or "embed".
        """
        size = ", ".join(f"{axis} {number}" for number, axis in zip(self.shape, self.axes, strict=True))
        # "of 255" is a unit of pixels.
        units = [re.sub(r"(?:.* )?of (\d+)", r"0 to \1", unit) for unit in self.units]
        names = ", ".join(f"{name} ({unit})" if unit else name for name, unit in zip(self.channels, units, strict=True))
        scope_names = {
            "data": "its dataset (`mean` and `std` in `config.json`)",
            "sample": "each sample",
            "person": "all passed samples, which must be of one person",
        }
        rate_text = f" at {self.sampling_rate_hz:g} Hz" if self.sampling_rate_hz else ""
        scale = f"`{method}` takes raw values, and scales them to the range from 0 to 1"
        if any(self.mean or (1,)) or self.std != self.high:
            scale = f"`{method}` takes raw values, and standardizes them with the mean and standard deviation of "
            scale += scope_names[self.scaled_over]
        return f"shape ({size}){rate_text}. Channels: {names}. {scale}"


def standardize(x: NDArray[np.float32], axes: tuple[int, ...]) -> NDArray[np.float32]:
    """Subtract the mean over the axes, and divide by the standard deviation. Constant values are only centered."""
    return normalize_array(x, *mean_and_std(x, axes))


def mean_and_std(x: NDArray[Any], axes: tuple[int, ...]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return mean and standard deviation over the given axes. These axes are kept with length 1.

    For constant values, the standard deviation is replaced by 1.
    """
    mean, std = (reduce(axis=axes, dtype=np.float64, keepdims=True) for reduce in (x.mean, x.std))
    # Rounding gives a constant feature a tiny deviation. A division by it would scale rounding errors up to 1.
    constant = x.min(axis=axes, keepdims=True) == x.max(axis=axes, keepdims=True)
    return mean, np.where(constant, 1.0, std)


def normalize_array(x: NDArray[Any], mean: NDArray[Any], std: NDArray[Any]) -> NDArray[np.float32]:
    """Return ``(x - mean) / std``, computed in double precision, as float32. The shapes must broadcast to ``x``."""
    return cast(NDArray[np.float32], ((x - mean) / std).astype(np.float32))
