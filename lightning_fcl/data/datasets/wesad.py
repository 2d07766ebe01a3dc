"""WESAD: baseline, stress, amusement and meditation of 15 people, with a sensor at the chest and one at the wrist.

Schmidt et al. 2018, "Introducing WESAD, a multimodal dataset for wearable stress and affect detection", ICMI. Four
layouts are read, in this order: the publishers' synchronised pickles ``S2/S2.pkl``, their wrist recordings
``S2/S2_E4_Data/*.csv``, and two of the wrist only, ``wesad_wrist/streams/S2.npz`` and ``wesad_wrist/windows_10s.npz``.

In the wrist's CSV layout nothing synchronises wrist and chest but the clocks of the two devices, which are only as good
as their setting (two seconds off for S2), and of which one tells local time: their difference is taken modulo whole
hours, the wrist device having been started first. The pickles are synchronised by the publishers; prefer them.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets.arrays import Arrays
from lightning_fcl.data.datasets.files import numbered, read_lines, read_npz
from lightning_fcl.data.datasets.pickles import read_pickle
from lightning_fcl.data.datasets.series import (
    Recording,
    Scale,
    Sensor,
    check_options,
    chunked,
    read_windows,
    stretches,
)
from lightning_fcl.errors import one_of
from lightning_fcl.hub.reading import ensure, reading
from lightning_fcl.hub.source import Layout, Source

_PLACES = ("wesad/WESAD", "WESAD", "wesad", ".")

SOURCE = Source(
    name="wesad",
    title="the WESAD data",
    content="signals of the body at wrist (6, 32 Hz) and chest (8, 700 Hz) in 4 conditions, 15 people, in chunks",
    licence="CC BY 4.0 (the authors ask for citation and research use)",
    citation="Schmidt et al.: Introducing WESAD, a dataset for wearable stress and affect detection. ICMI 2018",
    url="https://archive.ics.uci.edu/dataset/465/wesad+wearable+stress+and+affect+detection",
    size="2.5 GB, 17 GB unpacked",
    by_hand="Download the archive by hand from {url} and unpack it to {root}/wesad, so that "
    "{root}/wesad/WESAD/S2/S2.pkl is there",
    layouts=(
        Layout("pickles", _PLACES, signs=("S*/S*.pkl",), strictly=r"S\d{1,3}/.*"),
        Layout("wrist CSV files", _PLACES, signs=("S*/S*_E4_Data/*.csv",), strictly=r"S\d{1,3}/.*"),
        Layout("wrist streams", ("wesad_wrist/streams", "streams"), signs=("S*.npz",), strictly=r"S\d{1,3}\.npz"),
        Layout("wrist windows", ("wesad_wrist/windows_10s.npz", "windows_10s.npz")),
    ),
    holds="`WESAD` or `wesad_wrist`",
)

_CLASSES = ("baseline", "stress", "amusement", "meditation")
_CONDITIONS = {"Base": 0, "TSST": 1, "Fun": 2, "Medi 1": 3, "Medi 2": 3}
# Samples per second of the wristband, an Empatica E4; its acceleration has three axes, in 1/64 g.
_WRIST = {"ACC": 32, "BVP": 64, "EDA": 4, "TEMP": 4}
_WRIST_AXES = {"ACC": 3, "BVP": 1, "EDA": 1, "TEMP": 1}
_CHEST = {"ACC": 3, "ECG": 1, "EMG": 1, "EDA": 1, "Temp": 1, "Resp": 1}
# What each feature is, in which unit, and what the devices can tell.
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
_RATE = {"wrist": 32.0, "chest": 700.0}
_WINDOW = 320
# The publishers' labels leave out the first and last seconds of every condition of the protocol.
_MARGIN = 10.0

_MISSING = "Unpack the publishers' archive, and the zip files in it."

_Series = tuple[NDArray[np.float32], NDArray[np.int64]]


def load(
    root: str | Path | None = None,
    device: Literal["wrist", "chest"] = "wrist",
    chunk: int = 32,
    normalize: Scale = "user",
) -> Arrays:
    """Load the labelled signals of one device, cut into chunks that do not overlap.

    Every chunk lies inside one uninterrupted stretch of one condition; incomplete rests are dropped. Chunks are in time
    order per subject. The papers use the chest with ``chunk=700`` (De Caro et al. 2023) and ``chunk=350`` (Bacciu et
    al. 2021).

    Args:
        device: ``"wrist"``: acceleration xyz (g), blood volume pulse, skin conductance, temperature at 32 Hz; the
            pulse is the mean of two samples, the slow signals hold their last value. ``"chest"``: acceleration xyz,
            ECG, EMG, skin conductance, temperature, respiration at 700 Hz, in the pickles only.
        chunk: Time steps per chunk. It must divide 320 for ``windows_10s.npz``.
        normalize: How each subject is scaled, see `lightning_fcl.data.datasets.series.normalized`; the papers' is
            ``"user"``.

    Returns:
        `x` of shape (n, chunk, features), time first; `client` the subject's number, 2 to 17.
    """
    one_of(("wrist", "chest"), device=device)
    check_options(chunk, normalize)
    layout, path = SOURCE.find(root)
    if device == "chest" and layout != "pickles":
        raise ValueError(
            f"Expected `device` to be 'wrist' with the {layout} in {path} but got 'chest', which only the publishers' "
            "pickles hold (S2/S2.pkl and so on). Get these, or pass device='wrist'."
        )
    recordings = _windows(path, chunk) if layout == "wrist windows" else _recordings(layout, path, device)
    sensors = {"sensors": _SENSORS[device], "rate": _RATE[device]}
    return chunked(recordings, chunk, normalize, _CLASSES, path, "condition", **sensors)  # type: ignore[arg-type]


def _windows(path: Path, chunk: int) -> Iterator[Recording]:
    arrays = read_windows(path, chunk, (6, _WINDOW), {"subject": "iu", "start": "iuf"}, SOURCE.remedy)
    x, y, subject, start = (arrays[name] for name in ("X", "y", "subject", "start"))
    for one in np.unique(subject).tolist():
        own = np.flatnonzero(subject == one)
        own = own[np.argsort(start[own], kind="stable")]
        yield Recording(one, list(zip(x[own], y[own].tolist(), strict=True)), f"subject {one}")


def _recordings(layout: str, path: Path, device: str) -> Iterator[Recording]:
    readers: dict[str, Callable[[Path], _Series]] = {
        "pickles": partial(_from_pickle, device=device),
        "wrist CSV files": _from_csv,
        "wrist streams": _from_stream,
    }
    for entry in numbered(path, r"S(\d{1,3})(?:\.npz)?"):
        x, labels = readers[layout](entry)
        if not np.isfinite(x).all():
            step = np.flatnonzero(~np.isfinite(x).all(axis=1))[0]
            raise ValueError(
                f"Expected {entry} to hold finite signals but got {x[step]} at step {step}. {SOURCE.remedy}"
            )
        parts = [(x[start:stop], int(labels[start])) for start, stop in stretches(labels)]
        yield Recording(int(entry.stem[1:]), parts, f"subject {entry.stem[1:]}")


def _from_pickle(folder: Path, device: str) -> _Series:
    path = folder / f"{folder.name}.pkl"
    content = read_pickle(path, SOURCE.remedy)
    with reading(path, f"to hold the {device}'s signals with their labels", SOURCE.remedy):
        label = _numbered(np.asarray(content["label"]))
        widths = _CHEST if device == "chest" else _WRIST_AXES
        columns = {name: np.asarray(content["signal"][device][name]) for name in widths}
        if device == "chest":
            _check_signals(columns, widths)
            ensure({len(column) for column in columns.values()} == {len(label)}, "not a row for each label")
            return np.concatenate([column.astype(np.float32) for column in columns.values()], axis=1), label
        x = _at_32_hz(columns)
        # The label at the time of each wrist sample: 700 Hz against 32 Hz.
        at = np.arange(len(x)) * 175 // 8
        at = at[at < len(label)]
        _check_together({"label": len(label) / 700, "signals": len(x) / 32})
        return x[: len(at)], label[at]


def _from_stream(path: Path) -> _Series:
    free = {"acc": ("iuf", ("a", 3)), "bvp": ("f", ("b",)), "eda": ("f", ("e",)), "temp": ("f", ("t",))}
    arrays = read_npz(path, {**free, "label32": ("iu", ("l",))})
    with reading(path, "to hold the wrist's signals with their labels"):
        x = _at_32_hz({name.upper(): arrays[name].reshape(len(arrays[name]), -1) for name in free})
        label = _numbered(arrays["label32"])
        _check_together({"label32": len(label) / 32, "signals": len(x) / 32})
    n = min(len(x), len(label))
    return x[:n], label[:n]


def _from_csv(folder: Path) -> _Series:
    x, start = _read_recording(folder / f"{folder.name}_E4_Data")
    offset = (_chest_start(folder / f"{folder.name}_respiban.txt") - start) % 3600
    labels = np.full(len(x), -1)
    for label, first, last in _protocol(folder / f"{folder.name}_quest.csv"):
        a, b = (round((offset + second) * 32) for second in (first + _MARGIN, last - _MARGIN))
        if b > len(x):
            raise ValueError(
                f"Expected the wrist signals of {folder} to last until {_CLASSES[label]!r} ends, in second "
                f"{offset + last:.0f}, but got {len(x) / 32:.0f} seconds: a file is truncated. {SOURCE.remedy}"
            )
        labels[a:b] = label
    return x, labels


def _numbered(label: NDArray[Any]) -> NDArray[np.int64]:
    """Labels from 0, the conditions that are left out as -1."""
    ensure(label.ndim == 1 and label.dtype.kind in "iu", f"labels of {label.dtype} and shape {label.shape}")
    ensure(not len(label) or (label.min() >= 0 and label.max() <= 7), "labels beyond 0 to 7")
    return np.where((label >= 1) & (label <= 4), label.astype(np.int64) - 1, -1)


def _protocol(path: Path) -> list[tuple[int, float, float]]:
    """Label, start and end of each condition, in seconds since the start of the chest device."""
    lines = read_lines(path, _MISSING, errors="replace")
    with reading(path, f"to give start and end of {', '.join(_CONDITIONS)}", SOURCE.remedy):
        rows: dict[str, list[str]] = {}
        for line in lines:
            key, *values = (field.strip() for field in line.split(";"))
            rows.setdefault(key.lstrip("# "), values)
        named = zip(rows["ORDER"], rows["START"], rows["END"], strict=False)
        found = [(_CONDITIONS[name], _seconds(a), _seconds(b)) for name, a, b in named if name in _CONDITIONS]
        ensure(len(found) >= len(_CONDITIONS), f"{len(found)} of them")
        ensure(all(last - first > 2 * _MARGIN for _, first, last in found), f"{found}")
    return found


def _seconds(text: str) -> float:
    # Minutes and seconds, written as if it were a decimal fraction: 50.3 is 50 min 30 s.
    match = re.fullmatch(r"(\d{1,4})(?:\.(\d{1,2}))?", text)
    seconds = int((match[2] or "").ljust(2, "0")) if match else 60
    ensure(seconds < 60, f"{text!r}, which is no time in minutes.seconds")
    return 60.0 * int(text.partition(".")[0]) + seconds


def _chest_start(path: Path) -> float:
    """Start of the chest device in seconds since a full hour of its clock."""
    head = read_lines(path, _MISSING, at_most=5, errors="replace")
    with reading(path, "to begin with a header that gives the start as `time`", SOURCE.remedy):
        header = json.loads(next((line for line in head if line.startswith("# {")), "")[1:])
        _, minutes, seconds = next(iter(header.values()))["time"].split(":")
        return 60.0 * int(minutes) + float(seconds)


def _read_recording(folder: Path) -> tuple[NDArray[np.float32], float]:
    """The signals at 32 Hz and their start, of CSV files of a start (seconds since 1970), a rate and samples.

    It starts with the last signal to start and ends with the first to end: the device does not stop them together.
    """
    starts, signals = {}, {}
    for name, rate in _WRIST.items():
        path = folder / f"{name}.csv"
        lines = read_lines(path, _MISSING, errors="replace")
        with reading(path, f"to hold a start, the rate {rate} and samples of {_WRIST_AXES[name]}", SOURCE.remedy):
            table = np.loadtxt(lines, delimiter=",", ndmin=2)
            sound = len(table) >= 3 and (table[1] == rate).all() and np.isfinite(table[0]).all()
            ensure(sound, f"{len(table)} lines, first {table[:2].tolist()}")
            _check_signals({name: table}, _WRIST_AXES)
        starts[name], signals[name] = float(table[0, 0]), table[2:]
    start = max(starts.values())
    late = {name: signal[round((start - starts[name]) * _WRIST[name]) :] for name, signal in signals.items()}
    return _at_32_hz(late, tolerance=np.inf), start


def _at_32_hz(signals: Mapping[str, NDArray[Any]], tolerance: float = 1.0) -> NDArray[np.float32]:
    """Acceleration in g, pulse, skin conductance and temperature, shape (t, 6), cut to the shortest of them."""
    _check_signals(signals, _WRIST_AXES)
    _check_together({name: len(signals[name]) / rate for name, rate in _WRIST.items()}, tolerance)
    acc, bvp, eda, temp = (signals[name].astype(np.float32) for name in _WRIST)
    pulse = bvp[: len(bvp) // 2 * 2].reshape(-1, 2).mean(axis=1, keepdims=True)
    columns = [acc / 64, pulse, np.repeat(eda, 8, axis=0), np.repeat(temp, 8, axis=0)]
    n = min(map(len, columns))
    return np.concatenate([column[:n] for column in columns], axis=1)


def _check_signals(signals: Mapping[str, NDArray[Any]], widths: Mapping[str, int]) -> None:
    for name, signal in signals.items():
        fits = signal.dtype.kind in "iuf" and signal.shape[1:] == (widths[name],)
        ensure(fits, f"`{name}` of {signal.dtype} and shape {signal.shape}, not {widths[name]} numbers a sample")


def _check_together(seconds: Mapping[str, float], tolerance: float = 1.0) -> None:
    """Refuse signals whose durations, in seconds, differ by more than a tolerance."""
    fits = max(seconds.values()) - min(seconds.values()) <= tolerance
    ensure(fits, f"{', '.join(f'{length:.1f} s of `{name}`' for name, length in seconds.items())}, as if truncated")
