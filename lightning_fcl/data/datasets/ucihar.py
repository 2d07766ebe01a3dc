"""UCI HAR: six activities of 30 people with a phone at the waist, as windows of 128 steps at 50 Hz.

Anguita et al. 2013, "A public domain dataset for human activity recognition using smartphones", ESANN. Windows last
2.56 s and overlap by half, so neighbouring windows of one person share samples. Three layouts are read, in this order:
``inertial.npz``, the folder ``UCI HAR Dataset``, and the official zip (also inside the outer zip that UCI serves
today).
"""

import io
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets import SOURCES
from lightning_fcl.data.datasets.arrays import Arrays, Measurement, moments, scaled
from lightning_fcl.data.datasets.files import TEXT, check_subset, read_npz
from lightning_fcl.hub.reading import check_members, check_size, ensure, reading

_FOLDER = "UCI HAR Dataset"
_INNER = "UCI HAR Dataset.zip"

SOURCE = SOURCES["ucihar"]

# In the order of inertial.npz: the prefix of the original files, and the unit and range of such phones.
SENSORS = {
    "body_acc": ("body_acc", "g", 4.0),
    "gyro": ("body_gyro", "rad/s", 35.0),
    "total_acc": ("total_acc", "g", 4.0),
}
_CLASSES = ("walking", "walking_upstairs", "walking_downstairs", "sitting", "standing", "laying")
_STEPS, _RATE = 128, 50.0


def load(
    root: str | Path | None = None,
    sensors: Sequence[str] = ("total_acc", "gyro"),
    standardize: Literal["sensor", "channel"] | None = "sensor",
    time_first: bool = False,
) -> Arrays:
    """Load all windows, the training part of the publishers first, then their test part.

    The z-score takes mean and standard deviation over *all* samples, those of the test set included, which is
    how this project reads the setting of Usmanova et al. 2021 (their paper does not state its scaling). For a strict
    split pass ``standardize=None`` and scale with the training clients' own values. A sensor or channel that is
    constant is only centred.

    Args:
        sensors: Which sensors, in this order, xyz each: ``"total_acc"`` (with gravity) and ``"body_acc"`` (without) in
            standard gravity units, ``"gyro"`` in rad/s.
        standardize: ``"sensor"`` subtracts one mean and divides by one standard deviation for the three axes of a
            sensor, ``"channel"`` does so for each axis, None leaves the units.
        time_first: Whether a window is of shape (128, channels), as recurrent networks take it; else (channels, 128).
    """
    check_subset("sensors", sensors, SENSORS)
    layout, path = SOURCE.find(root)
    if layout == "npz file":
        raw = _from_npz(path, sensors)
    else:
        raw = _from_text(path if layout == "folder" else _inside(path), sensors)
    x, channels = raw.x, 3 * len(sensors)
    mean, std = np.zeros(channels), np.ones(channels)
    if standardize is not None:
        axes = 3 if standardize == "sensor" else 1
        blocks = x.reshape(len(x), -1, axes, _STEPS)
        mean, std = (np.repeat(part.ravel(), axes) for part in moments(blocks, (0, 2, 3)))
        x = scaled(x, mean[:, None], std[:, None])
    measured = [
        (f"{name} {axis}", unit, -most, most) for name in sensors for _, unit, most in [SENSORS[name]] for axis in "xyz"
    ]
    shape, order = (channels, _STEPS), ("channel", "time")
    if time_first:
        x, shape, order = np.ascontiguousarray(x.transpose(0, 2, 1)), shape[::-1], order[::-1]
    measurement = Measurement.of_sensors(measured, shape, order, _RATE, mean=mean.tolist(), std=std.tolist())
    return replace(raw, x=x, measurement=measurement)


def _from_npz(path: Path, sensors: Sequence[str]) -> Arrays:
    columns = dict.fromkeys(("y", "subject", "official_test"), ("biu", ("n",)))
    arrays = read_npz(path, {"X": ("f", ("n", 3 * len(SENSORS), _STEPS)), **columns}, SOURCE.remedy)
    channels = [3 * list(SENSORS).index(name) + axis for name in sensors for axis in range(3)]
    x = arrays["X"][:, channels].astype(np.float32)
    y, subject = (arrays[name].astype(np.int64) for name in ("y", "subject"))
    with reading(path, "to hold windows of the six activities", SOURCE.remedy):
        return Arrays(x, y, subject, _CLASSES, official_test=arrays["official_test"].astype(np.bool_))


def _inside(path: Path) -> Path:
    """The folder inside the zip, or inside the zip in it."""
    with reading(path, "to be a sound zip file", SOURCE.remedy):
        check_size(size := path.stat().st_size)
        archive = zipfile.ZipFile(path)
        check_members(archive, size)
        for name in archive.namelist():
            if PurePosixPath(name).name == _INNER:
                archive = zipfile.ZipFile(io.BytesIO(archive.read(name)))
                archive.filename = f"{path}/{name}"  # which messages name
                check_members(archive, size)
                break
        return cast(Path, zipfile.Path(archive, f"{_FOLDER}/"))


def _from_text(folder: Path, sensors: Sequence[str]) -> Arrays:
    names = _rows(folder / "activity_labels.txt", 2, dtype=str)[:, 1].tolist()
    with reading(folder / "activity_labels.txt", "to name WALKING to LAYING", SOURCE.remedy):
        ensure(names == [name.upper() for name in _CLASSES], ", ".join(names))
    x, y, subject, test = [], [], [], []
    for part in ("train", "test"):
        labels = _rows(folder / part / f"y_{part}.txt", 1, among=range(1, len(_CLASSES) + 1))
        axes = [f"{SENSORS[name][0]}_{axis}" for name in sensors for axis in "xyz"]
        places = [folder / part / "Inertial Signals" / f"{axis}_{part}.txt" for axis in axes]
        x.append(np.stack([_rows(place, _STEPS, len(labels)) for place in places], axis=1))
        y.append(labels[:, 0].astype(np.int64) - 1)
        subject.append(_rows(folder / part / f"subject_{part}.txt", 1, len(labels))[:, 0].astype(np.int64))
        test.append(np.full(len(labels), part == "test"))
    return Arrays(
        np.concatenate(x), np.concatenate(y), np.concatenate(subject), _CLASSES, official_test=np.concatenate(test)
    )


def _rows(
    path: Path, columns: int, number: int | None = None, among: range | None = None, dtype: type = np.float32
) -> NDArray[Any]:
    """The rows of a text file, if they are as many, as long, and of such values as they should be."""
    lines = f"to have {columns} {among or 'values'} in each of {number or 'its'} lines"
    with reading(path, lines, SOURCE.remedy):
        content = path.read_bytes()
        check_size(TEXT * len(content))
        ensure(content.strip(), "nothing")
        rows: NDArray[Any] = np.loadtxt(io.BytesIO(content), dtype, ndmin=2)
        fits = rows.shape == (len(rows) if number is None else number, columns)
        ensure(fits, f"{len(rows)} lines of {rows.shape[1]}")
        ensure(among is None or np.isin(rows, among).all(), "others")
        return rows
