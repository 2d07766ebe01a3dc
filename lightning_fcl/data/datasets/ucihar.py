"""UCI HAR: six activities of 30 people with a phone at the waist, as windows of 128 steps at 50 Hz.

Anguita et al. 2013, "A public domain dataset for human activity recognition using smartphones", ESANN. Windows last
2.56 s and overlap by half, so neighbouring windows of one person share samples. Three layouts are read, in this order:
``inertial.npz``, the folder ``UCI HAR Dataset``, and the official zip (also inside the outer zip that UCI serves
today).
"""

import io
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets.arrays import Arrays
from lightning_fcl.data.datasets.files import TEXT, in_range, read_npz
from lightning_fcl.data.datasets.measurement import Measurement, moments, scaled
from lightning_fcl.errors import one_of
from lightning_fcl.hub.reading import check_members, check_size, ensure, reading
from lightning_fcl.hub.source import Layout, Source

_FOLDER = "UCI HAR Dataset"
_INNER = "UCI HAR Dataset.zip"
_OUTER = "human+activity+recognition+using+smartphones"
# The last folder is what most programs make of the outer zip when they unpack it.
_PLACES = ("ucihar", ".", f"ucihar/{_OUTER}", _OUTER)

SOURCE = Source(
    name="ucihar",
    title="the UCI HAR data",
    content="10299 windows of 2.56 s at 50 Hz, accelerometer and gyroscope at the waist, 6 activities, 30 people",
    licence="CC BY 4.0 (the authors ask for citation and research use)",
    citation="Anguita et al.: A public domain dataset for human activity recognition using smartphones. ESANN 2013",
    url=f"https://archive.ics.uci.edu/static/public/240/{_OUTER}.zip",
    # Of 61,005,872 bytes. Several public repositories that pin UCI's download name this same digest.
    digest="c00b803081a5c797cd5e4b83700a9810b38d53d9d84e01917e090e1fdbc81031",
    size="61 MB",
    archive=f"ucihar/{_OUTER}.zip",
    layouts=(
        Layout("npz file", tuple(f"{place}/inertial.npz" for place in _PLACES)),
        Layout(
            "folder",
            (*(f"{place}/{_FOLDER}" for place in _PLACES), "."),
            signs=("train/Inertial Signals/|test/Inertial Signals/",),
        ),
        Layout("zip file", tuple(f"{place}/{name}" for place in _PLACES for name in (_INNER, f"{_OUTER}.zip"))),
    ),
    holds=f"`{_FOLDER}`, `{_INNER}`, `{_OUTER}.zip` or `ucihar/inertial.npz`",
)

# Name for the user -> prefix of the original files, in the order of the channels of inertial.npz.
SENSORS = {"body_acc": "body_acc", "gyro": "body_gyro", "total_acc": "total_acc"}

# Their units, and the ranges of such phones: 4 g, and 2000 degrees per second.
_UNITS = {"body_acc": ("g", 4.0), "gyro": ("rad/s", 35.0), "total_acc": ("g", 4.0)}
_RATE = 50.0

_STEPS = 128
_SUBJECTS = 30
_CLASSES = ("walking", "walking_upstairs", "walking_downstairs", "sitting", "standing", "laying")


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
        time_first: Whether a window is of shape (128, channels), as recurrent networks take it.

    Returns:
        `x` of shape (n, 3 x sensors, 128), `client` the subject 1..30, `official_test`. The complete set has n = 10299.
    """
    known = ", ".join(repr(name) for name in SENSORS)
    if isinstance(sensors, str) or not sensors or len(set(sensors)) < len(sensors) or not set(sensors) <= set(SENSORS):
        raise ValueError(
            f"Expected `sensors` to be different names among {known} but got {sensors!r}. "
            "Pass a tuple such as ('total_acc', 'gyro')."
        )
    one_of(("sensor", "channel", None), standardize=standardize)
    if not isinstance(time_first, bool):
        raise ValueError(f"Expected `time_first` to be true or false but got {time_first!r}.")
    layout, path = SOURCE.find(root)
    if layout == "npz file":
        raw = _from_npz(path, sensors)
    else:
        raw = _from_text(path if layout == "folder" else _inside(path), path, sensors)
    channels = raw.x.shape[1]
    mean, std = np.zeros(channels), np.ones(channels)
    if standardize is not None:
        together = 3 if standardize == "sensor" else 1
        blocks = raw.x.reshape(len(raw.x), -1, together, _STEPS)
        mean, std = (np.repeat(part.ravel(), together) for part in moments(blocks, (0, 2, 3)))
    x = raw.x if standardize is None else scaled(raw.x, mean[:, None], std[:, None])
    measurement = _measurement(sensors, mean, std)
    if time_first:
        turned = replace(measurement, shape=measurement.shape[::-1], axes=measurement.axes[::-1])
        return replace(raw, x=np.ascontiguousarray(x.transpose(0, 2, 1)), measurement=turned)
    return replace(raw, x=x, measurement=measurement)


def _measurement(sensors: Sequence[str], mean: NDArray[np.float64], std: NDArray[np.float64]) -> Measurement:
    units, ends = zip(*(_UNITS[sensor] for sensor in sensors for _ in "xyz"), strict=True)
    return Measurement(
        shape=(3 * len(sensors), _STEPS),
        axes=("channel", "time"),
        channels=tuple(f"{sensor} {axis}" for sensor in sensors for axis in "xyz"),
        units=units,
        rate=_RATE,
        low=tuple(-end for end in ends),
        high=ends,
        mean=tuple(mean.tolist()),
        std=tuple(std.tolist()),
    )


def _from_npz(path: Path, sensors: Sequence[str]) -> Arrays:
    limits = {"y": (0, len(_CLASSES) - 1), "subject": (1, _SUBJECTS), "official_test": (0, 1)}
    wanted = {"X": ("f", ("n", 3 * len(SENSORS), _STEPS)), **dict.fromkeys(limits, ("biu", ("n",)))}
    arrays = read_npz(path, wanted, SOURCE.remedy)
    y, client, test = (
        in_range(arrays[name].astype(np.int64), high, f"`{name}` of {path}", SOURCE.remedy, low=low)
        for name, (low, high) in limits.items()
    )
    first = {name: 3 * place for place, name in enumerate(SENSORS)}
    channels = [first[name] + axis for name in sensors for axis in range(3)]
    x = arrays["X"][:, channels].astype(np.float32)
    return Arrays(x, y, client, _CLASSES, official_test=test.astype(np.bool_))


def _inside(path: Path) -> zipfile.Path:
    """The folder inside the zip, or inside the zip in it."""
    with reading(path, "to be a sound zip file", SOURCE.remedy):
        check_size(size := path.stat().st_size)
        archive = zipfile.ZipFile(io.BytesIO(path.read_bytes()))
        check_members(archive, size)
        for name in archive.namelist():
            if PurePosixPath(name).name == _INNER:
                archive = zipfile.ZipFile(io.BytesIO(archive.read(name)))
                check_members(archive, size)
                break
        return zipfile.Path(archive, f"{_FOLDER}/")


def _from_text(folder: Path | zipfile.Path, path: Path, sensors: Sequence[str]) -> Arrays:
    read = partial(_rows, folder, path)
    names = [[str(number), name.upper()] for number, name in enumerate(_CLASSES, start=1)]
    read("activity_labels.txt", "1 WALKING to 6 LAYING", lambda rows: rows.tolist() == names, str)
    x, y, subject = [], [], []
    for part in ("train", "test"):
        tables = {
            name: read(name, f"a whole number from 1 to {high}", partial(_are_numbers, high=high))
            for name, high in ((f"{part}/y_{part}.txt", len(_CLASSES)), (f"{part}/subject_{part}.txt", _SUBJECTS))
        }
        for name in (f"{SENSORS[sensor]}_{axis}" for sensor in sensors for axis in "xyz"):
            file = f"{part}/Inertial Signals/{name}_{part}.txt"
            tables[file] = read(file, f"{_STEPS} numbers", lambda rows: rows.shape[1] == _STEPS)
        lines = {name: len(table) for name, table in tables.items()}
        if len(set(lines.values())) > 1:
            told = ", ".join(f"`{name}`: {number}" for name, number in lines.items())
            raise ValueError(f"Expected files of equally many lines in {path} but got {told}. {SOURCE.remedy}")
        labels, owners, *channels = tables.values()
        y.append(labels[:, 0].astype(np.int64) - 1)
        subject.append(owners[:, 0].astype(np.int64))
        x.append(np.stack(channels, axis=1))
    return Arrays(
        x=np.concatenate(x),
        y=np.concatenate(y),
        client=np.concatenate(subject),
        classes=_CLASSES,
        official_test=np.repeat([False, True], [len(y[0]), len(y[1])]),
    )


def _are_numbers(rows: NDArray[Any], high: int) -> bool:
    return rows.shape[1] == 1 and bool(np.isin(rows, np.arange(1, high + 1)).all())


def _rows(
    folder: Path | zipfile.Path,
    path: Path,
    name: str,
    what: str,
    fits: Callable[[NDArray[Any]], bool],
    dtype: type = np.float32,
) -> NDArray[Any]:
    """The rows of a text file, if they are what they should be."""
    place = folder.joinpath(name)
    try:
        if isinstance(place, Path):  # of a zip file's members, the sizes are checked
            check_size(TEXT * place.stat().st_size)
        content = place.read_bytes()
        check_size(TEXT * len(content))
        ensure(content.strip(), "nothing")
        rows: NDArray[Any] = np.loadtxt(io.BytesIO(content), dtype, ndmin=2)
        ensure(fits(rows), f"{len(rows)} lines of {rows.shape[1]}, first {rows[0].tolist()}"[:100])
        return rows
    except (FileNotFoundError, KeyError) as error:
        raise FileNotFoundError(f"Expected the file `{name}` in {path} but it is missing. {SOURCE.remedy}") from error
    except Exception as error:  # whatever a damaged file makes of its reader
        reason = str(error).partition(";")[0]
        raise ValueError(f"Expected {what} a line of `{name}` in {path} but got: {reason}. {SOURCE.remedy}") from error
