"""HHAR: six activities of nine people, recorded by phones and watches of six models.

The dataset is from Stisen et al. 2015, "Smart devices are different: assessing and mitigating mobile sensing
heterogeneities for activity recognition", SenSys. Two layouts are supported. The loader first looks for the publishers'
folder ``Activity recognition exp`` with four CSV files, and then for ``hhar_phone/windows.npz``. The npz file is a
subset with the accelerometer of one phone in windows of 128 steps.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets.arrays import ArrayDataset, Sensor
from lightning_fcl.data.datasets.readers import SOURCES, check_int_range, check_subset
from lightning_fcl.data.datasets.time_series import (
    Recording,
    Scale,
    chunk_recordings,
    label_ranges,
    read_windows,
    series_measurement,
)
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.io.reading import as_file_error, check_size, open_file
from lightning_fcl.validation import at_least, require_package

if TYPE_CHECKING:
    import pandas as pd

_SENSORS = ("accelerometer", "gyroscope")

_HHAR = SOURCES["hhar"]

# Device models in De Caro et al. 2023, in the order of the experiences of that paper.
DEVICES = ("nexus4", "s3", "s3mini", "lgwatch")

_MODELS = {"nexus4": "Phones", "s3": "Phones", "s3mini": "Phones", "samsungold": "Phones"}
_MODELS |= {"gear": "Watch", "lgwatch": "Watch"}
_CLASSES = ("bike", "sit", "stairsdown", "stairsup", "stand", "walk")
_USERS = tuple("abcdefghi")
_COLUMNS = {"Creation_Time": "int64", "x": "float32", "y": "float32", "z": "float32"}
_COLUMNS |= {"User": "category", "Model": "category", "Device": "category", "gt": "category"}
_MEASURED: dict[str, list[Sensor]] = {
    name: [(f"{name} {axis}", unit, -most, most) for axis in "xyz"]
    for name, unit, most in (("accelerometer", "m/s^2", 160.0), ("gyroscope", "rad/s", 35.0))
}
_WINDOW = 128
_SLIDING = 200
_RATE = 100.0
_GAP = 0.5

# Time in ns, xyz values and label of each sample of one sensor, for one device and one user.
_Series = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]
_Owner = tuple[str, str, str]


def load_hhar(
    root: str | Path | None = None,
    chunk: int | None = None,
    devices: Sequence[str] | None = None,
    features: Literal["raw", "statistics"] = "raw",
    normalize: Scale = "user",
) -> ArrayDataset:
    """Load the labeled motion data of the devices as chunks that do not overlap.

    From the CSV files, accelerometer and gyroscope of a device are resampled to a common regular grid of 100 Hz, by
    linear interpolation over ``Creation_Time``. Values are not interpolated across gaps of more than 0.5 s or between
    two activities. No chunk contains such a gap. Chunks are ordered by user, then by device, then by time.

    The file ``windows.npz`` contains the accelerometer of one phone, in windows that are already scaled. For this file,
    `devices`, `features` and `normalize` must have their default values.

    Args:
        root: Folder that contains the datasets. For the default, see `data_root`.
        chunk: Number of time steps per chunk. De Caro et al. 2023 use 200, and Bacciu et al. 2021 use 500. For
            ``windows.npz``, it must divide 128. Default: 200, or 128 for ``windows.npz``.
        devices: Device models, from nexus4, s3, s3mini, samsungold, gear and lgwatch. Their order is the order of the
            groups. Default: nexus4, s3, s3mini and lgwatch, as in De Caro et al. 2023.
        features: ``"raw"`` returns accelerometer xyz, then gyroscope xyz (only accelerometer xyz for ``windows.npz``).
            ``"statistics"`` returns the 32 features of `window_statistics`.
        normalize: Scaling for each device of a user. See
            `lightning_fcl.data.datasets.time_series.chunk_recordings`. De Caro et al. 2023 use ``"user"``.

    Returns:
        A dataset with `x` of shape (n, chunk, features). `client_ids` are the users, "a" to "i". `group` is the index
        of the model in `devices`, and None for ``windows.npz``.
    """
    at_least(1, chunk=_WINDOW if chunk is None else chunk)
    models = DEVICES if devices is None else devices
    check_subset("devices", models, _MODELS)
    layout, path = _HHAR.find(root)
    if layout == "phone windows":
        options = {"devices": (devices, None), "features": (features, "raw"), "normalize": (normalize, "user")}
        for name, (value, default) in options.items():
            if value != default:
                raise InvalidValueError(
                    f"Expected `{name}` to be {default!r}, but got {value!r}. {path} contains windows of one phone's "
                    "accelerometer that are already scaled per user.",
                    hint=f"Remove `{name}`, or use the publishers' CSV files.",
                    argument=name,
                    value=value,
                )
        chunk = _WINDOW if chunk is None else chunk
        arrays, chunks = read_windows(path, chunk, (3, _WINDOW), {"user": "iu"}, _HHAR.remedy), _WINDOW // chunk
        user = check_int_range(arrays["user"], len(_USERS) - 1, f"`user` of {path}", _HHAR.remedy)
        with as_file_error(path, "to contain windows of the six activities", _HHAR.remedy):
            return ArrayDataset(
                x=arrays["X"].reshape(-1, chunk, 3),
                y=arrays["y"].astype(np.int64).repeat(chunks),
                client_ids=np.array(_USERS)[user].repeat(chunks),
                classes=_CLASSES,
                measurement=series_measurement(chunk, "user", _MEASURED["accelerometer"], None),
            )
    chunk = 200 if chunk is None else chunk
    length_note = f", minus {_SLIDING - 1} before the first statistics," if features == "statistics" else ""
    remedy = f"Pass a smaller `chunk`, or check that the files contain {', '.join(models)}."
    recordings = _recordings(path, models, features)
    data = chunk_recordings(
        recordings, chunk, normalize, _CLASSES, path, f"stretch of one activity{length_note}", remedy
    )
    sensors = [axis for name in _SENSORS for axis in _MEASURED[name]] if features == "raw" else []
    return replace(data, measurement=series_measurement(chunk, normalize, sensors, _RATE))


def window_statistics(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return 32 features for each time step from step 199 on, without future steps (Bacciu et al. 2021, section IV.B).

    The features are the six signals, the magnitudes of accelerometer and gyroscope, and four statistics of each signal
    over a window: mean, standard deviation, minimum and maximum. Windows of 200 steps start every 100 steps. Each step
    gets the statistics of the newest window that is complete at that step. The paper does not specify the position of
    the window. A window around the step would contain future steps. The first 199 steps have no complete window and are
    dropped.

    Args:
        x: Accelerometer xyz and gyroscope xyz of a stretch without gaps, shape ``(t, 6)``.

    Returns:
        Features, shape ``(t - 199, 32)``, or ``(0, 32)`` for shorter stretches.
    """
    if len(x) < _SLIDING:
        return np.empty((0, 32), np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(x, _SLIDING, axis=0)[:: _SLIDING // 2]
    reduced = [reduce(windows, axis=2) for reduce in (np.mean, np.std, np.min, np.max)]
    newest = np.arange(len(x) - _SLIDING + 1) // (_SLIDING // 2)
    signals = x[_SLIDING - 1 :]
    magnitude = np.linalg.norm(signals.reshape(-1, 2, 3), axis=2)
    return np.concatenate([signals, magnitude, *(values[newest] for values in reduced)], axis=1).astype(np.float32)


def _recordings(folder: Path, models: Sequence[str], features: str) -> Iterator[Recording]:
    """Yield a recording for each device of each user, ordered by user and device."""
    kinds = dict.fromkeys(_MODELS[model] for model in models)
    acc, gyro = (
        {k: v for kind in kinds for k, v in _read(folder / f"{kind}_{s}.csv", models).items()} for s in _SENSORS
    )
    for owner in sorted(acc | gyro, key=lambda owner: (owner[0], models.index(owner[1]), owner[2])):
        user, model, device = owner
        sensors = acc.pop(owner, None), gyro.pop(owner, None)
        stretches = _on_one_grid(sensors[0], sensors[1]) if sensors[0] and sensors[1] else []
        if features == "statistics":
            stretches = [(window_statistics(part), label) for part, label in stretches]
        yield Recording(user, stretches, f"user {user} with {device}", models.index(model))


def _read(path: Path, models: Sequence[str]) -> dict[_Owner, _Series]:
    pd = require_package("pandas", "reads large CSV files in pieces")
    parts: dict[_Owner, list[_Series]] = {}
    with as_file_error(path, f"to contain whole rows of {', '.join(_COLUMNS)}", _HHAR.remedy), ExitStack() as stack:
        file = stack.enter_context(open_file(path))
        check_size(os.fstat(file.fileno()).st_size)
        # The files are too large to be read at once. Without `na_filter=False`, pandas would read the label `null` as
        # a missing value.
        with pd.read_csv(file, usecols=list(_COLUMNS), dtype=_COLUMNS, na_filter=False, chunksize=1_000_000) as reader:
            for table in reader:
                _gather(table, models, parts)
    series_by_owner = {}
    for owner, pieces in parts.items():
        time, xyz, label = (np.concatenate(columns) for columns in zip(*pieces, strict=True))
        # Free the memory of the pieces, which are as large as the concatenated arrays.
        pieces.clear()
        # Sort by time. If several rows have the same time, the first row is used.
        time, first = np.unique(time, return_index=True)
        series_by_owner[owner] = time, xyz[first], label[first]
    return series_by_owner


def _gather(table: "pd.DataFrame", models: Sequence[str], parts: dict[_Owner, list[_Series]]) -> None:
    """Append the labeled rows of the given models to the series of their owners."""
    # A check of categories checks each distinct value once, instead of each row.
    label_numbers = {"null": -1, **{name: label for label, name in enumerate(_CLASSES)}}
    for column, names in (("gt", label_numbers), ("User", _USERS), ("Model", _MODELS)):
        unknown = sorted(set(table[column].cat.categories) - set(names))
        if unknown:
            raise ValueError(f"{unknown[0]!r} as `{column}`, which is none of {', '.join(names)}")
    labeled_rows = table[(table["gt"] != "null") & table["Model"].isin(models)]
    for owner, rows in labeled_rows.groupby(["User", "Model", "Device"], observed=True, sort=False):
        xyz = rows[["x", "y", "z"]].to_numpy(np.float32)
        if not np.isfinite(xyz).all():
            raise ValueError(
                f"{xyz[~np.isfinite(xyz).all(axis=1)][0]} as x, y, z of user {owner[0]} with device {owner[2]}"
            )
        label = rows["gt"].astype(str).map(label_numbers).to_numpy(np.int64)
        parts.setdefault(owner, []).append((rows["Creation_Time"].to_numpy(np.int64), xyz, label))


def _on_one_grid(acc: _Series, gyro: _Series) -> list[tuple[NDArray[np.float32], int]]:
    """Return a pair (values, label) for each stretch in which both sensors have the same label.

    The values of both sensors are interpolated at the same times, at 100 Hz.
    """
    stretches = []
    acc_runs, gyro_runs = (label_ranges(label, np.diff(time) > _GAP * 1e9) for time, _, label in (acc, gyro))
    i = j = 0
    while i < len(acc_runs) and j < len(gyro_runs):
        (a, b), (c, d) = acc_runs[i], gyro_runs[j]
        start, stop = max(acc[0][a], gyro[0][c]), min(acc[0][b - 1], gyro[0][d - 1])
        if start <= stop and acc[2][a] == gyro[2][c]:
            # The grid starts at 0 because a float cannot represent nanoseconds since 1970 exactly.
            grid = np.arange(int(np.floor((stop - start) * _RATE / 1e9)) + 1) / _RATE
            columns = [
                np.interp(grid, (time[first:last] - start) / 1e9, xyz[first:last, axis])
                for (time, xyz, _), first, last in ((acc, a, b), (gyro, c, d))
                for axis in range(3)
            ]
            stretches.append((np.stack(columns, axis=1).astype(np.float32), int(acc[2][a])))
        if acc[0][b - 1] < gyro[0][d - 1]:
            i += 1
        else:
            j += 1
    return stretches
