"""Datasets of wearable sensors: UCI HAR (a phone at the waist) and WESAD (devices at the chest and the wrist)."""

import io
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets.arrays import ArrayDataset, Measurement, Sensor, mean_and_std, normalize_array
from lightning_fcl.data.datasets.readers import (
    MAX_TEXT_LENGTH,
    SOURCES,
    array_from_pickle,
    check_subset,
    numbered_paths,
    read_npz,
    read_restricted_pickle,
)
from lightning_fcl.data.datasets.time_series import (
    Recording,
    Scale,
    chunk_recordings,
    label_ranges,
    read_windows,
    series_measurement,
)
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.io.reading import as_file_error, check, check_members, check_size, open_file, read_bytes
from lightning_fcl.validation import at_least

_FOLDER = "UCI HAR Dataset"
_INNER = "UCI HAR Dataset.zip"

_UCI_HAR = SOURCES["ucihar"]

# The sensors, in the order of inertial.npz. Each value contains the name prefix of the original files, the unit, and
# the largest absolute value that the sensor can measure.
SENSORS = {
    "body_acc": ("body_acc", "g", 4.0),
    "gyro": ("body_gyro", "rad/s", 35.0),
    "total_acc": ("total_acc", "g", 4.0),
}
_ACTIVITIES = ("walking", "walking_upstairs", "walking_downstairs", "sitting", "standing", "laying")
_STEPS, _HERTZ = 128, 50.0


def load_ucihar(
    root: str | Path | None = None,
    sensors: Sequence[str] = ("total_acc", "gyro"),
    standardize: Literal["sensor", "channel"] | None = "sensor",
    time_first: bool = False,
) -> ArrayDataset:
    """Load UCI HAR: six activities of 30 people with a phone at the waist, in windows of 128 steps at 50 Hz.

    The dataset is from Anguita et al. 2013, "A public domain dataset for human activity recognition using smartphones",
    ESANN. Each window lasts 2.56 s. Windows overlap by half, so neighboring windows of one person share time steps.
    Three layouts are supported. The loader first looks for ``inertial.npz``, then for the folder ``UCI HAR Dataset``,
    and then for the official zip file. The zip file can also be inside the outer zip file that UCI now provides.

    All windows are loaded: first the publishers' training set, then their test set. The z-score uses the mean and the
    standard deviation of *all* samples, including the test set. This is an interpretation of Usmanova et al. 2021,
    because that paper does not describe its scaling. For a strict split, pass ``standardize=None`` and scale with the
    statistics of the training clients. A constant sensor or channel is only centered.

    Args:
        root: Folder that contains the datasets. For the default, see `data_root`.
        sensors: Names of sensors in the order of the channels. Each sensor has the channels x, y and z.
            ``"total_acc"`` is the acceleration with gravity, and ``"body_acc"`` without gravity, both in units of
            standard gravity. ``"gyro"`` is in rad/s.
        standardize: ``"sensor"`` computes z-scores with one mean and one standard deviation for the three axes of a
            sensor. ``"channel"`` computes a z-score for each axis. None does not scale.
        time_first: Whether windows have shape (128, channels), as for recurrent networks. If False, the shape is
            (channels, 128).

    Returns:
        A dataset with `x` of shape (n, channels, 128) or (n, 128, channels). `client_ids` are the subject numbers, 1 to
        30.
    """
    check_subset("sensors", sensors, SENSORS)
    layout, path = _UCI_HAR.find(root)
    if layout == "npz file":
        raw = _from_npz(path, sensors)
    else:
        raw = _from_text(path if layout == "folder" else _inside(path), sensors)
    x, channels = raw.x, 3 * len(sensors)
    mean, std = np.zeros(channels), np.ones(channels)
    if standardize is not None:
        axes = 3 if standardize == "sensor" else 1
        blocks = x.reshape(len(x), -1, axes, _STEPS)
        mean, std = (np.repeat(part.ravel(), axes) for part in mean_and_std(blocks, (0, 2, 3)))
        x = normalize_array(x, mean[:, None], std[:, None])
    channel_specs = [
        (f"{name} {axis}", unit, -most, most) for name in sensors for _, unit, most in [SENSORS[name]] for axis in "xyz"
    ]
    shape, order = (channels, _STEPS), ("channel", "time")
    if time_first:
        x, shape, order = np.ascontiguousarray(x.transpose(0, 2, 1)), shape[::-1], order[::-1]
    measurement = Measurement.from_sensors(channel_specs, shape, order, _HERTZ, mean=mean.tolist(), std=std.tolist())
    return replace(raw, x=x, measurement=measurement)


def _from_npz(path: Path, sensors: Sequence[str]) -> ArrayDataset:
    columns = dict.fromkeys(("y", "subject", "official_test"), ("biu", ("n",)))
    arrays = read_npz(path, {"X": ("f", ("n", 3 * len(SENSORS), _STEPS)), **columns}, _UCI_HAR.remedy)
    channels = [3 * list(SENSORS).index(name) + axis for name in sensors for axis in range(3)]
    x = arrays["X"][:, channels].astype(np.float32)
    y, subject = (arrays[name].astype(np.int64) for name in ("y", "subject"))
    with as_file_error(path, "to contain windows of the six activities", _UCI_HAR.remedy):
        return ArrayDataset(x, y, subject, _ACTIVITIES, official_test=arrays["official_test"].astype(np.bool_))


def _inside(path: Path) -> Path:
    """Return the dataset's folder inside a zip file. The zip file can be inside another zip file."""
    with as_file_error(path, "to be a valid zip file", _UCI_HAR.remedy):
        file = open_file(path)
        check_size(size := os.fstat(file.fileno()).st_size)
        archive = zipfile.ZipFile(file)
        check_members(archive, size)
        for name in archive.namelist():
            if PurePosixPath(name).name == _INNER:
                archive = zipfile.ZipFile(io.BytesIO(archive.read(name)))
                # Error messages contain this path.
                archive.filename = f"{path}/{name}"
                check_members(archive, size)
                break
        return cast(Path, zipfile.Path(archive, f"{_FOLDER}/"))


def _from_text(folder: Path, sensors: Sequence[str]) -> ArrayDataset:
    names = _rows(folder / "activity_labels.txt", 2, dtype=str)[:, 1].tolist()
    with as_file_error(folder / "activity_labels.txt", "to name WALKING to LAYING", _UCI_HAR.remedy):
        check(names == [name.upper() for name in _ACTIVITIES], ", ".join(names))
    x, y, subject, test = [], [], [], []
    for split_name in ("train", "test"):
        labels = _rows(folder / split_name / f"y_{split_name}.txt", 1, allowed_values=range(1, len(_ACTIVITIES) + 1))
        axes = [f"{SENSORS[name][0]}_{axis}" for name in sensors for axis in "xyz"]
        places = [folder / split_name / "Inertial Signals" / f"{axis}_{split_name}.txt" for axis in axes]
        x.append(np.stack([_rows(place, _STEPS, len(labels)) for place in places], axis=1))
        y.append(labels[:, 0].astype(np.int64) - 1)
        subject.append(_rows(folder / split_name / f"subject_{split_name}.txt", 1, len(labels))[:, 0].astype(np.int64))
        test.append(np.full(len(labels), split_name == "test"))
    return ArrayDataset(
        np.concatenate(x), np.concatenate(y), np.concatenate(subject), _ACTIVITIES, official_test=np.concatenate(test)
    )


def _rows(
    path: Path, columns: int, number: int | None = None, allowed_values: range | None = None, dtype: type = np.float32
) -> NDArray[Any]:
    """Return the values in a text file, shape (lines, columns).

    Raises:
        DamagedFileError: If the number of lines, the length of a line, or a value is wrong.
    """
    bounds = f" from {allowed_values.start} to {allowed_values.stop - 1}" if allowed_values else ""
    lines = f"to have {columns} {'value' if columns == 1 else 'values'}{bounds} in each of {number or 'its'} lines"
    with as_file_error(path, lines, _UCI_HAR.remedy):
        # For a file in a zip file, the path is a `zipfile.Path`.
        content = read_bytes(path) if isinstance(path, Path) else path.read_bytes()
        check_size(MAX_TEXT_LENGTH * len(content))
        check(content.strip(), "an empty file")
        rows: NDArray[Any] = np.loadtxt(io.BytesIO(content), dtype, ndmin=2)
        fits = rows.shape == (len(rows) if number is None else number, columns)
        check(fits, f"{len(rows)} line(s) with {rows.shape[1]} value(s) each")
        check(allowed_values is None or np.isin(rows, allowed_values).all(), "other values")
        return rows


_WESAD = SOURCES["wesad"]

_CONDITIONS = ("baseline", "stress", "amusement", "meditation")
# Sampling rates in Hz and numbers of channels of the wristband, an Empatica E4. Acceleration is in units of 1/64 g.
_WRIST_RATES = {"ACC": 32, "BVP": 64, "EDA": 4, "TEMP": 4}
_WRIST = {"ACC": 3, "BVP": 1, "EDA": 1, "TEMP": 1}
_CHEST = {"ACC": 3, "ECG": 1, "EMG": 1, "EDA": 1, "Temp": 1, "Resp": 1}
_RATE = {"wrist": 32, "chest": 700}
_WINDOW = 320
_STREAM = {"acc": ("iuf", ("a", 3)), "bvp": ("f", ("b",)), "eda": ("f", ("e",)), "temp": ("f", ("t",))}
_STREAM |= {"label32": ("iu", ("l",))}
# Name, unit, smallest and largest possible value of each feature.
_AXES = tuple((f"acceleration {axis}", "g", -16.0, 16.0) for axis in "xyz")
_SENSORS: dict[str, tuple[Sensor, ...]] = {
    "wrist": (
        *_AXES,
        ("blood volume pulse", "as Empatica's E4 gives it", -1e4, 1e4),
        ("skin conductance", "microsiemens", 0.0, 100.0),
        ("temperature", "degrees Celsius", 0.0, 60.0),
    ),
    "chest": (
        *_AXES,
        ("electrocardiogram", "mV", -1.5, 1.5),
        ("electromyogram", "mV", -1.5, 1.5),
        ("skin conductance", "microsiemens", 0.0, 25.0),
        ("temperature", "degrees Celsius", -20.0, 60.0),
        ("respiration", "per cent", -50.0, 50.0),
    ),
}


def load_wesad(
    root: str | Path | None = None,
    device: Literal["wrist", "chest"] = "wrist",
    chunk: int = 32,
    normalize: Scale = "user",
) -> ArrayDataset:
    """Load WESAD: four conditions (baseline, stress, amusement, meditation) of 15 people, from one of two devices.

    The dataset is from Schmidt et al. 2018, "Introducing WESAD, a multimodal dataset for wearable stress and affect
    detection", ICMI. Three layouts are supported. The loader first looks for the publishers' synchronized pickles
    ``S2/S2.pkl``. Then it looks for two layouts that only have the wrist device: ``wesad_wrist/streams/S2.npz`` and
    ``wesad_wrist/windows_10s.npz``.

    The labeled signals of one device are loaded as chunks that do not overlap. Each chunk is part of one uninterrupted
    stretch of one condition. The incomplete chunk at the end of a stretch is dropped. The chunks of each subject are in
    time order. Two papers use the chest device: De Caro et al. 2023 with ``chunk=700``, and Bacciu et al. 2021 with
    ``chunk=350``.

    Args:
        root: Folder that contains the datasets. For the default, see `data_root`.
        device: ``"wrist"`` returns acceleration xyz (g), blood volume pulse, skin conductance and temperature at 32 Hz.
            Each pulse value is the mean of two samples, and values of the slower signals are repeated. ``"chest"``
            returns acceleration xyz, ECG, EMG, skin conductance, temperature and respiration at 700 Hz. The chest
            device requires the pickles.
        chunk: Number of time steps per chunk. For ``windows_10s.npz``, it must divide 320.
        normalize: Scaling for each subject. See `lightning_fcl.data.datasets.time_series.chunk_recordings`. The two
            papers use ``"user"``.

    Returns:
        A dataset with `x` of shape (n, chunk, features). `client_ids` are the subject numbers, 2 to 17.
    """
    at_least(1, chunk=chunk)
    layout, path = _WESAD.find(root)
    if device == "chest" and layout != "pickles":
        raise InvalidValueError(
            f"Expected `device` to be 'wrist' with the {layout} in {path}, but got 'chest'. Only the publishers' "
            "pickles (S2/S2.pkl and so on) contain the chest device.",
            hint='Download the pickles, or pass `device="wrist"`.',
            argument="device",
        )
    data = chunk_recordings(_recordings(layout, path, device, chunk), chunk, normalize, _CONDITIONS, path, "condition")
    return replace(data, measurement=series_measurement(chunk, normalize, _SENSORS[device], float(_RATE[device])))


def _recordings(layout: str, folder: Path, device: str, chunk: int) -> Iterator[Recording]:
    if layout == "wrist windows":
        arrays = read_windows(folder, chunk, (6, _WINDOW), {"subject": "iu", "start": "iuf"}, _WESAD.remedy)
        x, y, subject, start = (arrays[name] for name in ("X", "y", "subject", "start"))
        for subject_id in np.unique(subject).tolist():
            rows = np.flatnonzero(subject == subject_id)
            rows = rows[np.argsort(start[rows], kind="stable")]
            yield Recording(subject_id, list(zip(x[rows], y[rows].tolist(), strict=True)), f"subject {subject_id}")
        return
    widths = _CHEST if device == "chest" else _WRIST
    for entry in numbered_paths(folder, r"S(\d{1,3})(?:\.npz)?"):
        path = entry / f"{entry.name}.pkl" if layout == "pickles" else entry
        content = (
            read_restricted_pickle(path, _WESAD.remedy)
            if layout == "pickles"
            else read_npz(path, _STREAM, _WESAD.remedy)
        )
        with as_file_error(path, f"to contain the {device}'s signals with their labels", _WESAD.remedy):
            if layout == "pickles":
                signals = {name: array_from_pickle(content["signal"][device][name]) for name in widths}
                label, rate = array_from_pickle(content["label"]), 700
            else:
                signals = {name: content[name.lower()].reshape(-1, width) for name, width in widths.items()}
                label, rate = content["label32"], 32
            for name, signal in signals.items():
                fits = signal.dtype.kind in "iuf" and signal.shape[1:] == (widths[name],)
                check(
                    fits,
                    f"`{name}` of {signal.dtype} and shape {signal.shape}, not {widths[name]} numbers per sample",
                )
            check(label.ndim == 1 and label.dtype.kind in "iu", f"labels of {label.dtype} and shape {label.shape}")
            check(np.isin(label, range(8)).all(), "labels outside 0 to 7")
            if device == "chest":
                check(
                    {len(signal) for signal in signals.values()} == {len(label)}, "signals and labels of unequal length"
                )
                x = np.concatenate([signal.astype(np.float32) for signal in signals.values()], axis=1)
            else:
                x, label = _at_32_hz(signals, label, rate)
            check(np.isfinite(x).all(), "non-finite values")
        # The four conditions are labels 1 to 4. Samples with other labels are left out.
        label = np.where((label >= 1) & (label <= 4), label.astype(np.int64) - 1, -1)
        parts = [(x[start:stop], int(label[start])) for start, stop in label_ranges(label)]
        yield Recording(int(entry.stem[1:]), parts, f"subject {entry.stem[1:]}")


def _at_32_hz(
    signals: Mapping[str, NDArray[Any]], label: NDArray[Any], rate: int
) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """Return the signals, shape (t, 6), and labels, shape (t,), at 32 Hz. The signals have the order of `_SENSORS`."""
    seconds = {name: len(signals[name]) / own for name, own in _WRIST_RATES.items()} | {"label": len(label) / rate}
    durations = ", ".join(f"{length:.1f} s of `{name}`" for name, length in seconds.items())
    check(max(seconds.values()) - min(seconds.values()) <= 1, f"{durations}, as if truncated")
    acc, bvp, eda, temp = (signals[name].astype(np.float32) for name in _WRIST)
    pulse = bvp[: len(bvp) // 2 * 2].reshape(-1, 2).mean(axis=1, keepdims=True)
    columns = [acc / 64, pulse, np.repeat(eda, 8, axis=0), np.repeat(temp, 8, axis=0)]
    label_rows = np.arange(min(map(len, columns))) * rate // 32
    label_rows = label_rows[label_rows < len(label)]
    return np.concatenate([column[: len(label_rows)] for column in columns], axis=1), label[label_rows]
