"""Conversion of time series to samples. Each sample is a chunk with one label, and can be scaled per recording."""

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
    """Recording of one person by one device: stretches with one label each, in time order.

    Args:
        client_id: Name or number of the person.
        stretches: Pairs (series, label) in time order. A series has shape ``(t, features)``.
        name: Name of the person and the device for messages.
        group: Index of the device's domain. None if there are no domains.
    """

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
    remedy: str = "Pass a smaller `chunk`.",
) -> ArrayDataset:
    """Return a dataset of chunks of recordings, shape ``(n, chunk, features)``. Each chunk is part of one stretch.

    The incomplete chunk at the end of a stretch is dropped.

    Args:
        recordings: The recordings. A recording without a complete chunk is left out with a warning.
        chunk: Number of time steps per chunk.
        normalize: ``"user"`` computes the z-score of each feature over all chunks of a recording. Each value then also
            depends on later values. Features that are constant are only centered. ``"none"`` does not scale.
        classes: Names of the classes, in the order of the labels.
        path: File or folder for messages.
        longest: Name of a stretch for messages.
        remedy: Hint of the error if no recording has a complete chunk.

    Raises:
        InvalidValueError: If no recording has a complete chunk.
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
            warnings.warn(
                f"Left out {recording.name} of {path}: no stretch of one label has at least {chunk} time steps.",
                stacklevel=3,
            )
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
    """Return the measurement for chunks of the given sensors, or None if there are no sensors. ``rate`` is in Hz."""
    if not sensors:
        return None
    shape, axes = (chunk, len(sensors)), ("time", "channel")
    if normalize == "user":
        return Measurement.from_sensors(sensors, shape, axes, rate, "person")
    return Measurement.from_sensors(sensors, shape, axes, rate, mean=[0.0] * len(sensors), std=[1.0] * len(sensors))


def read_windows(
    path: Path, chunk: int, shape: tuple[int, int], columns: Mapping[str, str], remedy: str
) -> dict[str, NDArray[Any]]:
    """Return the arrays of an npz file of windows, by name. ``X`` has shape (n, steps, features) and type float32.

    Args:
        path: The npz file.
        chunk: Number of time steps per chunk. It must divide the number of steps of a window.
        shape: Number of features and number of steps of a window.
        columns: Names and dtype kinds of additional arrays of shape (n,).
        remedy: Hint for errors.

    Raises:
        InvalidValueError: If ``chunk`` does not divide the number of steps, or if an array has a wrong type or shape.
    """
    if shape[1] % chunk:
        raise InvalidValueError(
            f"Expected `chunk` to divide {shape[1]}, the time steps of a window in {path}, but got {chunk}.",
            hint="Pass a divisor, for example 32, or use a layout with whole recordings.",
            argument="chunk",
            value=chunk,
        )
    column_specs = {name: (kinds, ("n",)) for name, kinds in {"y": "iu", **columns}.items()}
    arrays = read_npz(path, {"X": ("f", ("n", *shape)), **column_specs}, remedy)
    return {**arrays, "X": arrays["X"].transpose(0, 2, 1).astype(np.float32)}


def label_ranges(labels: NDArray[np.int64], gaps: NDArray[np.bool_] | None = None) -> list[tuple[int, int]]:
    """Return pairs (start, end) of indices for each stretch of one label, in time order. The end is exclusive.

    Args:
        labels: Labels in time order, shape ``(t,)``. A negative label means no label.
        gaps: Whether there is a gap between each sample and the next, shape ``(t - 1,)``. None means no gaps.
    """
    changes = np.diff(labels) != 0
    breaks = changes if gaps is None else changes | gaps
    bounds = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(labels)]
    return [(start, stop) for start, stop in itertools.pairwise(bounds) if stop > start and labels[start] >= 0]
