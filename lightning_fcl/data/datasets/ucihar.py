"""UCI HAR: six activities of 30 people with a phone at the waist, as windows of 128 steps at 50 Hz.

Anguita et al. 2013, "A public domain dataset for human activity recognition using smartphones", ESANN. Windows last
2.56 s and overlap by half, so neighbouring windows of one person share samples. Three layouts are read, in this order:
``inertial.npz``, the folder ``UCI HAR Dataset``, and the official zip (also inside the outer zip that UCI serves
today).
"""

import io
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets import Arrays, Description, data_root
from lightning_fcl.hub.fetch import retrieve

__all__ = ["DESCRIPTION", "SENSORS", "SHA256", "URL", "fetch", "load", "locate"]

URL = "https://archive.ics.uci.edu/static/public/240/human+activity+recognition+using+smartphones.zip"
# 61,005,872 bytes. Several public repositories that pin UCI's download name this same digest.
SHA256 = "c00b803081a5c797cd5e4b83700a9810b38d53d9d84e01917e090e1fdbc81031"

DESCRIPTION = Description(
    name="ucihar",
    content="10299 windows of 2.56 s at 50 Hz, accelerometer and gyroscope at the waist, 6 activities, 30 people",
    licence="CC BY 4.0 (the authors ask for citation and research use)",
    citation="Anguita et al.: A public domain dataset for human activity recognition using smartphones. ESANN 2013",
    url=URL,
    size="61 MB",
)

# Name for the user -> prefix of the original files, in the order of the channels of inertial.npz.
SENSORS = {"body_acc": "body_acc", "gyro": "body_gyro", "total_acc": "total_acc"}

_STEPS = 128
_SUBJECTS = 30
_CLASSES = ("walking", "walking_upstairs", "walking_downstairs", "sitting", "standing", "laying")
_FOLDER = "UCI HAR Dataset"
_INNER = "UCI HAR Dataset.zip"
_OUTER = "human+activity+recognition+using+smartphones.zip"
_REMEDY = "Delete this copy and run `lightning-fcl data fetch ucihar`, or unpack the archive again."
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError, RuntimeError)

_Layout = Literal["npz file", "folder", "zip file"]


def load(
    root: str | Path | None = None,
    sensors: Sequence[str] = ("total_acc", "gyro"),
    standardize: Literal["sensor", "channel"] | None = "sensor",
) -> Arrays:
    """Load all windows, the training part of the publishers first, then their test part.

    The z-score takes mean and standard deviation over *all* samples, those of the test set included, which is
    how this project reads the setting of Usmanova et al. 2021 (their paper does not state its scaling). For a strict
    split pass ``standardize=None`` and scale with the training clients' own values. A sensor or channel that is
    constant is only centred.

    Args:
        root: Folder below which to look, see `lightning_fcl.data.datasets.data_root`.
        sensors: Which sensors, in this order, xyz each: ``"total_acc"`` (with gravity) and ``"body_acc"`` (without) in
            standard gravity units, ``"gyro"`` in rad/s.
        standardize: ``"sensor"`` subtracts one mean and divides by one standard deviation for the three axes of a
            sensor, ``"channel"`` does so for each axis, None leaves the units.

    Returns:
        `x` of shape (n, 3 x sensors, 128), `client` the subject 1..30, `official_test`. The complete set has n = 10299.

    Raises:
        FileNotFoundError: If no layout is found, or one file of it is missing.
        ValueError: If an argument is unknown, or a file is damaged; the message names the file.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> X = np.random.default_rng(0).normal(size=(2, 9, 128)).astype(np.float32)
        >>> np.savez(root / "inertial.npz", X=X, y=[0, 5], subject=[1, 30], official_test=[0, 1])
        >>> data = load(root)
        >>> data.x.shape, data.classes[5], data.client.tolist()
        ((2, 6, 128), 'laying', [1, 30])
    """
    _require_options(sensors, standardize)
    layout, path = _find(data_root(root))
    if layout == "npz file":
        raw = _load_npz(path, sensors)
    else:
        with _opened(layout, path) as folder:
            raw = _load_text(folder, path, sensors)
    if standardize is None:
        return raw
    return replace(raw, x=_z_score(raw.x, 3 if standardize == "sensor" else 1))


def locate(root: str | Path | None = None) -> str:
    """Say which layout `load` would read, without reading it.

    Args:
        root: Folder below which to look, see `lightning_fcl.data.datasets.data_root`.

    Returns:
        The layout and its path, for people.

    Raises:
        FileNotFoundError: If no layout is found.

    Example:
        >>> locate("a/folder/that/is/missing")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        FileNotFoundError: Expected the UCI HAR data below `root` but found none in a/folder/that/is/missing. ...
    """
    layout, path = _find(data_root(root))
    return f"{layout} {path}"


def fetch(root: str | Path | None = None) -> Path:
    """Download UCI's zip once, verified against its SHA-256, to ``ucihar`` below `root`.

    Args:
        root: Folder of the data sets, see `lightning_fcl.data.datasets.data_root`.

    Returns:
        The zip, which `load` reads without unpacking.

    Raises:
        ConnectionError: If the download fails.
        ValueError: If what came is not the published file; it is deleted.

    Example:
        >>> fetch()  # doctest: +SKIP
        PosixPath('~/.cache/lightning-fcl/data/ucihar/human+activity+recognition+using+smartphones.zip')
    """
    path = data_root(root) / "ucihar" / _OUTER
    retrieve(URL, SHA256, path)
    return path


def _require_options(sensors: Sequence[str], standardize: str | None) -> None:
    known = ", ".join(repr(name) for name in SENSORS)
    if isinstance(sensors, str) or not sensors or len(set(sensors)) < len(sensors) or not set(sensors) <= set(SENSORS):
        raise ValueError(
            f"Expected `sensors` to be different names among {known} but got {sensors!r}. "
            "Pass a tuple such as ('total_acc', 'gyro')."
        )
    if standardize not in ("sensor", "channel", None):
        raise ValueError(
            f"Expected `standardize` to be 'sensor', 'channel' or None but got {standardize!r}. Choose one of these."
        )


def _find(root: Path) -> tuple[_Layout, Path]:
    # The last folder is what most programs make of the outer zip when they unpack it.
    bases = (root / "ucihar", root, root / "ucihar" / _OUTER[:-4], root / _OUTER[:-4])
    for base in bases:
        if (base / "inertial.npz").is_file():
            return "npz file", base / "inertial.npz"
    for folder in (*(base / _FOLDER for base in bases), root):
        if any((folder / part / "Inertial Signals").is_dir() for part in ("train", "test")):
            return "folder", folder
    for base in bases:
        for name in (_INNER, _OUTER):
            if (base / name).is_file():
                return "zip file", base / name
    raise FileNotFoundError(
        f"Expected the UCI HAR data below `root` but found none in {root}. Run `lightning-fcl data fetch ucihar`, or "
        f"point LIGHTNING_FCL_DATA at the folder that holds `{_FOLDER}`, `{_INNER}`, `{_OUTER}` or "
        "`ucihar/inertial.npz`."
    )


def _load_npz(path: Path, sensors: Sequence[str]) -> Arrays:
    arrays: dict[str, NDArray[Any]] = {}
    try:
        with np.load(path, allow_pickle=False) as archive:
            for key in ("X", "y", "subject", "official_test"):
                if key not in archive:
                    raise KeyError(key)
                arrays[key] = archive[key]
    except KeyError as error:
        raise ValueError(f"Expected {path} to hold an array {error} but it does not. {_REMEDY}") from error
    except (*_BROKEN, TypeError, AttributeError) as error:
        raise ValueError(
            f"Expected {path} to be a sound npz file without pickles but got: {error}. {_REMEDY}"
        ) from error
    n = len(arrays["X"]) if arrays["X"].ndim else 0
    shapes = {"X": (n, 3 * len(SENSORS), _STEPS), "y": (n,), "subject": (n,), "official_test": (n,)}
    for key, shape in shapes.items():
        kinds = "f" if key == "X" else "biu"
        if arrays[key].shape != shape or arrays[key].dtype.kind not in kinds:
            raise ValueError(
                f"Expected `{key}` of {path} to hold {'floats' if key == 'X' else 'integers'} of shape {shape} "
                f"but got {arrays[key].dtype} of shape {arrays[key].shape}. {_REMEDY}"
            )
    limits = {"y": (0, len(_CLASSES) - 1), "subject": (1, _SUBJECTS), "official_test": (0, 1)}
    columns = {
        key: _in_range(arrays[key].astype(np.int64), *limit, f"`{key}` of {path}", "sample", 0)
        for key, limit in limits.items()
    }
    first = {name: 3 * place for place, name in enumerate(SENSORS)}
    channels = [first[name] + axis for name in sensors for axis in range(3)]
    return Arrays(
        x=arrays["X"][:, channels].astype(np.float32),
        y=columns["y"],
        client=columns["subject"],
        classes=_CLASSES,
        official_test=columns["official_test"].astype(np.bool_),
    )


def _load_text(folder: Path | zipfile.Path, path: Path, sensors: Sequence[str]) -> Arrays:
    def read(name: str) -> bytes:
        return _read(folder, path, name)

    _require_activities(read("activity_labels.txt"))
    x, y, subject = [], [], []
    for part in ("train", "test"):
        labels, owners = f"{part}/y_{part}.txt", f"{part}/subject_{part}.txt"
        y.append(_in_range(_integers(read(labels), labels), 1, len(_CLASSES), f"`{labels}`", "line", 1) - 1)
        subject.append(_in_range(_integers(read(owners), owners), 1, _SUBJECTS, f"`{owners}`", "line", 1))
        _require_rows(owners, len(subject[-1]), labels, len(y[-1]))
        channels = []
        for sensor in sensors:
            for axis in "xyz":
                name = f"{part}/Inertial Signals/{SENSORS[sensor]}_{axis}_{part}.txt"
                channels.append(_signal(read(name), name))
                _require_rows(name, len(channels[-1]), labels, len(y[-1]))
        x.append(np.stack(channels, axis=1))
    return Arrays(
        x=np.concatenate(x),
        y=np.concatenate(y),
        client=np.concatenate(subject),
        classes=_CLASSES,
        official_test=np.repeat([False, True], [len(y[0]), len(y[1])]),
    )


@contextmanager
def _opened(layout: _Layout, path: Path) -> Iterator[Path | zipfile.Path]:
    if layout == "folder":
        yield path
    else:
        with _open_zip(path) as archive:
            yield zipfile.Path(archive, f"{_FOLDER}/")


def _read(folder: Path | zipfile.Path, path: Path, name: str) -> bytes:
    try:
        return folder.joinpath(name).read_bytes()
    except (FileNotFoundError, KeyError) as error:
        raise FileNotFoundError(f"Expected the file `{name}` in {path} but it is missing. {_REMEDY}") from error
    except _BROKEN as error:
        raise ValueError(f"Expected `{name}` in {path} to be readable but got: {error}. {_REMEDY}") from error


def _open_zip(path: Path) -> zipfile.ZipFile:
    try:
        archive = zipfile.ZipFile(path)
        inner = [name for name in archive.namelist() if PurePosixPath(name).name == _INNER]
        if not inner:
            return archive
        with archive:
            return zipfile.ZipFile(io.BytesIO(archive.read(inner[0])))
    except _BROKEN as error:
        raise ValueError(f"Expected {path} to be a sound zip file but got: {error}. {_REMEDY}") from error


def _signal(text: bytes, name: str) -> NDArray[np.float32]:
    lines = text.rstrip().splitlines()
    # Counted line by line: two faults that cancel out in the total would shift all samples between them.
    for number, line in enumerate(lines, start=1):
        count = len(line.split())
        if count != _STEPS:
            raise ValueError(f"Expected {_STEPS} values on line {number} of `{name}` but got {count}. {_REMEDY}")
    try:
        return np.array(b" ".join(lines).split(), dtype=np.float32).reshape(-1, _STEPS)
    except ValueError as error:
        raise ValueError(f"Expected `{name}` to hold numbers only but got: {error}. {_REMEDY}") from error


def _integers(text: bytes, name: str) -> NDArray[np.int64]:
    lines = text.rstrip().splitlines() or [b""]
    for number, line in enumerate(lines, start=1):
        if not re.fullmatch(rb"\s*[+-]?\d{1,9}\s*", line):
            shown = line[:40].decode(errors="replace")
            raise ValueError(f"Expected one whole number on line {number} of `{name}` but got {shown!r}. {_REMEDY}")
    return np.array([int(line) for line in lines], dtype=np.int64)


def _in_range(values: NDArray[np.int64], low: int, high: int, name: str, unit: str, start: int) -> NDArray[np.int64]:
    wrong = np.flatnonzero((values < low) | (values > high))
    if wrong.size:
        raise ValueError(
            f"Expected {name} to be between {low} and {high} but got {values[wrong[0]]} in {unit} {wrong[0] + start}. "
            f"{_REMEDY}"
        )
    return values


def _require_rows(name: str, rows: int, other: str, expected: int) -> None:
    if rows != expected:
        raise ValueError(
            f"Expected `{name}` and `{other}` to have equally many lines but got {rows} and {expected}: "
            f"the shorter one is truncated. {_REMEDY}"
        )


def _require_activities(text: bytes) -> None:
    found = [line.split() for line in text.decode(errors="replace").lower().splitlines() if line.strip()]
    wanted = [[str(number), name] for number, name in enumerate(_CLASSES, start=1)]
    if found != wanted:
        raise ValueError(
            f"Expected `activity_labels.txt` to list 1 {_CLASSES[0].upper()} to 6 {_CLASSES[-1].upper()} "
            f"but got {found!r}. {_REMEDY}"
        )


def _z_score(x: NDArray[np.float32], channels: int) -> NDArray[np.float32]:
    blocks = x.reshape(len(x), -1, channels, x.shape[-1])
    mean = blocks.mean(axis=(0, 2, 3), dtype=np.float64, keepdims=True)
    std = blocks.std(axis=(0, 2, 3), dtype=np.float64, keepdims=True)
    # Rounding leaves a constant block a tiny deviation, and dividing by that would blow the rounding up to ones.
    constant = blocks.max(axis=(0, 2, 3), keepdims=True) == blocks.min(axis=(0, 2, 3), keepdims=True)
    scaled: NDArray[np.float32] = ((blocks - mean) / np.where(constant, 1.0, std)).astype(np.float32)
    return scaled.reshape(x.shape)
