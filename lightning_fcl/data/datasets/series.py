"""Time series to samples: chunks inside stretches of one label, and z-scores per owner, with or without the future."""

import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets.arrays import Arrays
from lightning_fcl.data.datasets.files import check_whole, read_npz
from lightning_fcl.data.datasets.measurement import Measurement, Sensor, scaled, z_score
from lightning_fcl.errors import one_of

Scale = Literal["user", "causal", "none"]


@dataclass(frozen=True, eq=False)
class Recording:
    """What one device recorded of one person: series of one label each, shape ``(t, features)``, in time order."""

    client: str | int
    stretches: Sequence[tuple[NDArray[np.float32], int]]
    name: str
    group: int | None = None


def chunked(
    recordings: Iterable[Recording],
    chunk: int,
    normalize: Scale,
    classes: tuple[str, ...],
    path: Path,
    longest: str,
    remedy: str = "Pass a smaller one.",
) -> Arrays:
    """Recordings in chunks, shape ``(n, chunk, features)``, each inside one stretch; incomplete rests are dropped."""
    x: list[NDArray[np.float32]] = []
    y: list[int] = []
    owners: list[tuple[str | int, int | None]] = []
    most = 0
    for recording in recordings:
        most = max([most, *(len(part) for part, _ in recording.stretches)])
        cut = [part[: len(part) // chunk * chunk].reshape(-1, chunk, part.shape[1]) for part, _ in recording.stretches]
        if not sum(map(len, cut)):
            warnings.warn(f"There is no chunk of {chunk} steps of {recording.name} in {path}.", stacklevel=3)
            continue
        x.append(normalized(np.concatenate(cut), normalize))
        y += [label for (_, label), own in zip(recording.stretches, cut, strict=True) for _ in own]
        owners.append((recording.client, recording.group))
    if not x:
        raise ValueError(
            f"Expected `chunk` to be at most {most}, the time steps of the longest {longest} in {path}, but got "
            f"{chunk}. {remedy}"
        )
    (clients, groups), number = zip(*owners, strict=True), list(map(len, x))
    group = None if groups[0] is None else np.repeat(groups, number)
    return Arrays(np.concatenate(x), np.array(y, np.int64), np.repeat(clients, number), classes, group=group)


def measured_series(chunk: int, normalize: Scale, sensors: Sequence[Sensor], rate: float | None) -> Measurement | None:
    """What the chunks of some sensors measure; None where that cannot be told for one person's chunks alone."""
    if not sensors or normalize == "causal":
        return None
    shape, axes = (chunk, len(sensors)), ("time", "channel")
    if normalize == "user":
        return Measurement.of_sensors(sensors, shape, axes, rate, "person")
    return Measurement.of_sensors(sensors, shape, axes, rate, mean=[0.0] * len(sensors), std=[1.0] * len(sensors))


def read_windows(
    path: Path, chunk: int, shape: tuple[int, int], columns: Mapping[str, str], remedy: str
) -> dict[str, NDArray[Any]]:
    """The arrays of an npz file of windows that can be cut into chunks, ``X`` of shape (n, steps, features), float32.

    ``shape`` is the numbers of features and of steps; ``columns`` the kinds of dtype of further arrays of shape (n,).
    """
    if shape[1] % chunk:
        raise ValueError(
            f"Expected `chunk` to divide {shape[1]}, the time steps of a window in {path}, but got {chunk}. Pass, for "
            "example, 32, or use a layout with whole recordings."
        )
    wanted = {name: (kinds, ("n",)) for name, kinds in {"y": "iu", **columns}.items()}
    arrays = read_npz(path, {"X": ("f", ("n", *shape)), **wanted}, remedy)
    return {**arrays, "X": arrays["X"].transpose(0, 2, 1).astype(np.float32)}


def stretches(labels: NDArray[np.int64], gaps: NDArray[np.bool_] | None = None) -> list[tuple[int, int]]:
    """First index, and the one past the last, of every stretch of one label, in time order.

    Args:
        labels: Labels in time order, shape ``(t,)``; below 0 means none.
        gaps: Whether there is a gap between each and the next, shape ``(t - 1,)``; None: nowhere.
    """
    changes = np.diff(labels) != 0
    breaks = changes if gaps is None else changes | gaps
    bounds = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(labels)]
    return [(start, stop) for start, stop in itertools.pairwise(bounds) if stop > start and labels[start] >= 0]


def normalized(x: NDArray[np.float32], how: Scale) -> NDArray[np.float32]:
    """The chunks of one owner in time order, shape ``(n, chunk, features)``, scaled feature by feature.

    ``"user"`` is the z-score over all chunks, so every value depends on the future too. ``"causal"`` scales a chunk
    with mean and standard deviation of the chunks before it; the first chunk has no past and is scaled with its own.
    ``"none"`` leaves the units. A feature that does not vary (in ``"causal"``: that has not varied so far) is only
    centred.
    """
    if how == "none" or len(x) == 0:
        return x
    if how == "user":
        return z_score(x, (0, 1))
    steps = x.shape[1] * np.maximum(np.arange(len(x)), 1)[:, np.newaxis]
    # Around the owner's first value: sums of squares around zero lose the variance of a feature with a large mean.
    shifted = x.astype(np.float64) - x[0, 0].astype(np.float64)
    mean = _before(np.cumsum(shifted.sum(axis=1), axis=0)) / steps
    variance = _before(np.cumsum(np.square(shifted).sum(axis=1), axis=0)) / steps - np.square(mean)
    low = _before(np.minimum.accumulate(x.min(axis=1), axis=0))
    high = _before(np.maximum.accumulate(x.max(axis=1), axis=0))
    # What rounding leaves of a variance may be zero or negative though the feature varies; its range bounds it below.
    floor = (high.astype(np.float64) - low) / np.sqrt(2.0 * steps)
    std = np.where(low == high, 1.0, np.maximum(np.sqrt(np.maximum(variance, 0)), floor))
    return scaled(x, (mean + x[0, 0])[:, np.newaxis], std[:, np.newaxis])


def _before(totals: NDArray[Any]) -> NDArray[Any]:
    """Shift running totals by one chunk; the first chunk keeps its own."""
    return np.concatenate([totals[:1], totals[:-1]])


def check_options(chunk: int, normalize: str) -> None:
    check_whole("`chunk`, the time steps,", chunk, "32")
    one_of(("user", "causal", "none"), normalize=normalize)
