"""Time series to samples: chunks inside stretches of one label, scaled for each owner."""

import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets.arrays import ArrayDataset, Measurement, Sensor, standardize
from lightning_fcl.data.datasets.readers import read_npz
from lightning_fcl.errors import InvalidValueError

Scale = Literal["user", "none"]


@dataclass(frozen=True, eq=False)
class Recording:
    """What one device recorded of one person: series of one label each, shape ``(t, features)``, in time order."""

    client_id: str | int
    stretches: Sequence[tuple[NDArray[np.float32], int]]
    name: str
    group: int | None = None


def chunk_recordings(
    recordings: Iterable[Recording],
    chunk: int,
    normalize: Scale,
    classes: tuple[str, ...],
    path: Path,
    longest: str,
    remedy: str = "Pass a smaller one.",
) -> ArrayDataset:
    """Recordings in chunks, shape ``(n, chunk, features)``, each inside one stretch; incomplete rests are dropped.

    ``normalize="user"`` is the z-score of each feature over all chunks of a recording, so every value depends on what
    comes later, too; a feature that does not vary is only centred. ``"none"`` leaves the units.
    """
    x: list[NDArray[np.float32]] = []
    y: list[int] = []
    owners: list[tuple[str | int, int | None]] = []
    max_steps = 0
    for recording in recordings:
        max_steps = max([max_steps, *(len(part) for part, _ in recording.stretches)])
        stretch_chunks = [
            part[: len(part) // chunk * chunk].reshape(-1, chunk, part.shape[1]) for part, _ in recording.stretches
        ]
        if not sum(map(len, stretch_chunks)):
            warnings.warn(f"There is no chunk of {chunk} steps of {recording.name} in {path}.", stacklevel=3)
            continue
        samples = np.concatenate(stretch_chunks)
        x.append(standardize(samples, (0, 1)) if normalize == "user" else samples)
        y += [label for (_, label), chunks in zip(recording.stretches, stretch_chunks, strict=True) for _ in chunks]
        owners.append((recording.client_id, recording.group))
    if not x:
        raise InvalidValueError(
            f"Expected `chunk` to be at most {max_steps}, the time steps of the longest {longest} in {path}, but got "
            f"{chunk}. {remedy}",
            argument="chunk",
            value=chunk,
        )
    (clients, groups), number = zip(*owners, strict=True), list(map(len, x))
    group = None if groups[0] is None else np.repeat(groups, number)
    return ArrayDataset(np.concatenate(x), np.array(y, np.int64), np.repeat(clients, number), classes, group=group)


def series_measurement(
    chunk: int, normalize: Scale, sensors: Sequence[Sensor], rate: float | None
) -> Measurement | None:
    """What the chunks of some sensors measure; None where no sensors are named."""
    if not sensors:
        return None
    shape, axes = (chunk, len(sensors)), ("time", "channel")
    if normalize == "user":
        return Measurement.from_sensors(sensors, shape, axes, rate, "person")
    return Measurement.from_sensors(sensors, shape, axes, rate, mean=[0.0] * len(sensors), std=[1.0] * len(sensors))


def read_windows(
    path: Path, chunk: int, shape: tuple[int, int], columns: Mapping[str, str], remedy: str
) -> dict[str, NDArray[Any]]:
    """The arrays of an npz file of windows that can be cut into chunks, ``X`` of shape (n, steps, features), float32.

    ``shape`` is the numbers of features and of steps; ``columns`` the kinds of dtype of further arrays of shape (n,).
    """
    if shape[1] % chunk:
        raise InvalidValueError(
            f"Expected `chunk` to divide {shape[1]}, the time steps of a window in {path}, but got {chunk}.",
            hint="Use 32, for example, or a layout with whole recordings.",
            argument="chunk",
            value=chunk,
        )
    column_specs = {name: (kinds, ("n",)) for name, kinds in {"y": "iu", **columns}.items()}
    arrays = read_npz(path, {"X": ("f", ("n", *shape)), **column_specs}, remedy)
    return {**arrays, "X": arrays["X"].transpose(0, 2, 1).astype(np.float32)}


def label_ranges(labels: NDArray[np.int64], gaps: NDArray[np.bool_] | None = None) -> list[tuple[int, int]]:
    """First index, and the one past the last, of every stretch of one label, in time order.

    Args:
        labels: Labels in time order, shape ``(t,)``; below 0 means none.
        gaps: Whether there is a gap between each and the next, shape ``(t - 1,)``; None: nowhere.
    """
    changes = np.diff(labels) != 0
    breaks = changes if gaps is None else changes | gaps
    bounds = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(labels)]
    return [(start, stop) for start, stop in itertools.pairwise(bounds) if stop > start and labels[start] >= 0]
