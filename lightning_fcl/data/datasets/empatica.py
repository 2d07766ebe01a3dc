"""Recordings of the Empatica E4 wristband: its CSV files, and its four signals at one rate."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets.files import read_lines

__all__ = ["MISSING", "RATES", "at_32_hz", "read_recording", "require_signal", "require_together"]

# Samples per second; the acceleration has three axes, in 1/64 g.
RATES = {"ACC": 32, "BVP": 64, "EDA": 4, "TEMP": 4}

MISSING = "Unpack the publishers' archive, and the zip files in it."

_REMEDY = "Delete this copy and unpack the publishers' archive again."


def at_32_hz(signals: Mapping[str, NDArray[Any]], path: Path, tolerance: float = 1.0) -> NDArray[np.float32]:
    """Bring the wristband's signals to 32 Hz: the pulse as mean of two samples, slow signals by holding the last value.

    Args:
        signals: ACC, BVP, EDA and TEMP at their own rates, shape ``(t, 3)`` or ``(t, 1)``.
        path: The file they come from, for messages.
        tolerance: By how many seconds the signals may differ in length; the longer ones are cut.

    Returns:
        Acceleration in g, pulse, skin conductance and temperature, shape ``(t, 6)``.

    Raises:
        ValueError: If a signal has another shape, or is shorter than the others.

    Example:
        >>> signals = {name: np.arange(rate)[:, np.newaxis] for name, rate in RATES.items()}
        >>> signals["ACC"] = np.full((32, 3), 64)
        >>> at_32_hz(signals, Path("S2.pkl"))[[0, 1, 7, 8]].tolist()[1:]
        [[1.0, 1.0, 1.0, 2.5, 0.0, 0.0], [1.0, 1.0, 1.0, 14.5, 0.0, 0.0], [1.0, 1.0, 1.0, 16.5, 1.0, 1.0]]
    """
    for name in RATES:
        require_signal(path, name, signals[name], 3 if name == "ACC" else 1)
    require_together(path, {name: len(signals[name]) / rate for name, rate in RATES.items()}, tolerance)
    acc, bvp, eda, temp = (signals[name].astype(np.float32) for name in RATES)
    pulse = bvp[: len(bvp) // 2 * 2].reshape(-1, 2).mean(axis=1, keepdims=True)
    columns = [acc / 64, pulse, np.repeat(eda, 8, axis=0), np.repeat(temp, 8, axis=0)]
    n = min(map(len, columns))
    return np.concatenate([column[:n] for column in columns], axis=1)


def read_recording(folder: Path) -> tuple[NDArray[np.float32], float]:
    """Read ``ACC.csv``, ``BVP.csv``, ``EDA.csv`` and ``TEMP.csv``.

    Each begins with a line of the start (seconds since 1970, UTC) and one of the rate. The recording starts with the
    last signal to start and ends with the first to end: the device does not stop them together.

    Args:
        folder: The folder of the files.

    Returns:
        The signals as `at_32_hz` gives them, and their start.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a file is damaged.

    Example:
        >>> read_recording(Path("S2_E4_Data"))
        Traceback (most recent call last):
        FileNotFoundError: Expected the file S2_E4_Data/ACC.csv but it is missing. Unpack the publishers' archive, and \
the zip files in it.
    """
    starts, signals = {}, {}
    for name, rate in RATES.items():
        path, width = folder / f"{name}.csv", 3 if name == "ACC" else 1
        try:
            table = np.loadtxt(read_lines(path, MISSING, errors="replace"), delimiter=",", ndmin=2)
        except ValueError as error:
            raise ValueError(f"Expected {path} to hold {width} numbers a line but got: {error}. {_REMEDY}") from error
        if len(table) < 3 or table.shape[1] != width or not (table[1] == rate).all() or not np.isfinite(table[0]).all():
            raise ValueError(
                f"Expected {path} to hold a start time, the rate {rate} and then samples of {width} but got "
                f"{len(table)} lines of {table.shape[1]}, first {table[:2].tolist()}. {_REMEDY}"
            )
        starts[name], signals[name] = float(table[0, 0]), table[2:]
    start = max(starts.values())
    late = {name: signal[round((start - starts[name]) * RATES[name]) :] for name, signal in signals.items()}
    return at_32_hz(late, folder, tolerance=np.inf), start


def require_signal(path: Path, name: str, signal: NDArray[Any], width: int) -> None:
    """Refuse a signal, called `name` in a file, that holds no numbers, or not `width` of them a sample.

    Raises:
        ValueError: If it does.

    Example:
        >>> require_signal(Path("S2.pkl"), "ECG", np.zeros((9, 1)), 1)
    """
    if signal.ndim != 2 or signal.shape[1] != width or signal.dtype.kind not in "iuf":
        raise ValueError(
            f"Expected `{name}` of {path} to hold {width} numbers a sample but got {signal.dtype} of shape "
            f"{signal.shape}. {_REMEDY}"
        )


def require_together(path: Path, seconds: Mapping[str, float], tolerance: float = 1.0) -> None:
    """Refuse signals of a file whose durations, in seconds, differ by more than `tolerance`.

    Raises:
        ValueError: If they do.

    Example:
        >>> require_together(Path("S2.pkl"), {"ACC": 10.0, "EDA": 10.5})
    """
    short, long = min(seconds, key=lambda name: seconds[name]), max(seconds, key=lambda name: seconds[name])
    if seconds[long] - seconds[short] > tolerance:
        raise ValueError(
            f"Expected the signals of {path} to last equally long but got {seconds[short]:.1f} s of `{short}` and "
            f"{seconds[long]:.1f} s of `{long}`: the shorter one is truncated. {_REMEDY}"
        )
