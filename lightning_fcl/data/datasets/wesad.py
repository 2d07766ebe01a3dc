"""WESAD: baseline, stress, amusement and meditation of 15 people, with a sensor at the chest and one at the wrist.

Schmidt et al. 2018, "Introducing WESAD, a multimodal dataset for wearable stress and affect detection", ICMI. Three
layouts are read, in this order: the publishers' synchronised pickles ``S2/S2.pkl``, and two of the wrist only,
``wesad_wrist/streams/S2.npz`` and ``wesad_wrist/windows_10s.npz``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets import SOURCES
from lightning_fcl.data.datasets.arrays import Arrays, Sensor
from lightning_fcl.data.datasets.files import numbered_paths, pickled_array, read_npz, read_pickle
from lightning_fcl.data.datasets.series import (
    Recording,
    Scale,
    chunked,
    measured_series,
    read_windows,
    stretches,
)
from lightning_fcl.errors import at_least
from lightning_fcl.hub.reading import ensure, reading

SOURCE = SOURCES["wesad"]

_CLASSES = ("baseline", "stress", "amusement", "meditation")
# Samples per second of the wristband, an Empatica E4, and the numbers of each signal; its acceleration is in 1/64 g.
_WRIST_RATES = {"ACC": 32, "BVP": 64, "EDA": 4, "TEMP": 4}
_WRIST = {"ACC": 3, "BVP": 1, "EDA": 1, "TEMP": 1}
_CHEST = {"ACC": 3, "ECG": 1, "EMG": 1, "EDA": 1, "Temp": 1, "Resp": 1}
_RATE = {"wrist": 32, "chest": 700}
_WINDOW = 320
_STREAM = {"acc": ("iuf", ("a", 3)), "bvp": ("f", ("b",)), "eda": ("f", ("e",)), "temp": ("f", ("t",))}
_STREAM |= {"label32": ("iu", ("l",))}
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
        normalize: How each subject is scaled, see `lightning_fcl.data.datasets.series.chunked`; the papers' is
            ``"user"``.

    Returns:
        `x` of shape (n, chunk, features), time first; `client` the subject's number, 2 to 17.
    """
    at_least(1, chunk=chunk)
    layout, path = SOURCE.find(root)
    if device == "chest" and layout != "pickles":
        raise ValueError(
            f"Expected `device` to be 'wrist' with the {layout} in {path} but got 'chest', which only the publishers' "
            "pickles hold (S2/S2.pkl and so on). Get these, or pass device='wrist'."
        )
    data = chunked(_recordings(layout, path, device, chunk), chunk, normalize, _CLASSES, path, "condition")
    return replace(data, measurement=measured_series(chunk, normalize, _SENSORS[device], float(_RATE[device])))


def _recordings(layout: str, folder: Path, device: str, chunk: int) -> Iterator[Recording]:
    if layout == "wrist windows":
        arrays = read_windows(folder, chunk, (6, _WINDOW), {"subject": "iu", "start": "iuf"}, SOURCE.remedy)
        x, y, subject, start = (arrays[name] for name in ("X", "y", "subject", "start"))
        for one in np.unique(subject).tolist():
            own = np.flatnonzero(subject == one)
            own = own[np.argsort(start[own], kind="stable")]
            yield Recording(one, list(zip(x[own], y[own].tolist(), strict=True)), f"subject {one}")
        return
    widths = _CHEST if device == "chest" else _WRIST
    for entry in numbered_paths(folder, r"S(\d{1,3})(?:\.npz)?"):
        path = entry / f"{entry.name}.pkl" if layout == "pickles" else entry
        content = read_pickle(path, SOURCE.remedy) if layout == "pickles" else read_npz(path, _STREAM, SOURCE.remedy)
        with reading(path, f"to hold the {device}'s signals with their labels", SOURCE.remedy):
            if layout == "pickles":
                signals = {name: pickled_array(content["signal"][device][name]) for name in widths}
                label, rate = pickled_array(content["label"]), 700
            else:
                signals = {name: content[name.lower()].reshape(-1, width) for name, width in widths.items()}
                label, rate = content["label32"], 32
            for name, signal in signals.items():
                fits = signal.dtype.kind in "iuf" and signal.shape[1:] == (widths[name],)
                ensure(
                    fits, f"`{name}` of {signal.dtype} and shape {signal.shape}, not {widths[name]} numbers a sample"
                )
            ensure(label.ndim == 1 and label.dtype.kind in "iu", f"labels of {label.dtype} and shape {label.shape}")
            ensure(np.isin(label, range(8)).all(), "labels beyond 0 to 7")
            if device == "chest":
                ensure({len(signal) for signal in signals.values()} == {len(label)}, "not a row for each label")
                x = np.concatenate([signal.astype(np.float32) for signal in signals.values()], axis=1)
            else:
                x, label = _at_32_hz(signals, label, rate)
            ensure(np.isfinite(x).all(), "values that are not finite")
        label = np.where((label >= 1) & (label <= 4), label.astype(np.int64) - 1, -1)  # the others are left out
        parts = [(x[start:stop], int(label[start])) for start, stop in stretches(label)]
        yield Recording(int(entry.stem[1:]), parts, f"subject {entry.stem[1:]}")


def _at_32_hz(
    signals: Mapping[str, NDArray[Any]], label: NDArray[Any], rate: int
) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """Acceleration in g, pulse, skin conductance and temperature, shape (t, 6), and the label at each time."""
    seconds = {name: len(signals[name]) / own for name, own in _WRIST_RATES.items()} | {"label": len(label) / rate}
    told = ", ".join(f"{length:.1f} s of `{name}`" for name, length in seconds.items())
    ensure(max(seconds.values()) - min(seconds.values()) <= 1, f"{told}, as if truncated")
    acc, bvp, eda, temp = (signals[name].astype(np.float32) for name in _WRIST)
    pulse = bvp[: len(bvp) // 2 * 2].reshape(-1, 2).mean(axis=1, keepdims=True)
    columns = [acc / 64, pulse, np.repeat(eda, 8, axis=0), np.repeat(temp, 8, axis=0)]
    at = np.arange(min(map(len, columns))) * rate // 32
    at = at[at < len(label)]
    return np.concatenate([column[: len(at)] for column in columns], axis=1), label[at]
