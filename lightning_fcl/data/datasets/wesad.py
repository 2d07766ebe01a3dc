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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets import Arrays, Description, data_root, empatica
from lightning_fcl.data.datasets.archives import read_npz, read_pickle
from lightning_fcl.data.datasets.series import Normalize, cut, normalized, require_chunk, require_normalize, stretches

__all__ = ["DESCRIPTION", "fetch", "load", "locate"]

DESCRIPTION = Description(
    name="wesad",
    content="signals of the body at wrist (6, 32 Hz) and chest (8, 700 Hz) in 4 conditions, 15 people, in chunks",
    licence="CC BY 4.0 (the authors ask for citation and research use)",
    citation="Schmidt et al.: Introducing WESAD, a dataset for wearable stress and affect detection. ICMI 2018",
    url="https://archive.ics.uci.edu/dataset/465/wesad+wearable+stress+and+affect+detection",
    size="2.5 GB, 17 GB unpacked",
)

_CLASSES = ("baseline", "stress", "amusement", "meditation")
_CONDITIONS = {"Base": 0, "TSST": 1, "Fun": 2, "Medi 1": 3, "Medi 2": 3}
_CHEST = {"ACC": 3, "ECG": 1, "EMG": 1, "EDA": 1, "Temp": 1, "Resp": 1}
_WINDOW = 320
# The publishers' labels leave out the first and last seconds of every condition of the protocol.
_MARGIN = 10.0
_REMEDY = "Delete this copy and unpack the publishers' archive again."

_Layout = Literal["pickles", "wrist CSV files", "wrist streams", "wrist windows"]
_Series = tuple[NDArray[np.float32], NDArray[np.int64]]
# Subject, chunks, labels, and the time steps of the longest condition.
_Chunks = tuple[int, NDArray[np.float32], NDArray[np.int64], int]


def load(
    root: str | Path | None = None,
    device: Literal["wrist", "chest"] = "wrist",
    chunk: int = 32,
    normalize: Normalize = "user",
) -> Arrays:
    """Load the labelled signals of one device, cut into chunks that do not overlap.

    Every chunk lies inside one uninterrupted stretch of one condition; incomplete rests are dropped. Chunks are in time
    order per subject. The papers use the chest with ``chunk=700`` (De Caro et al. 2023) and ``chunk=350`` (Bacciu et
    al. 2021).

    Args:
        root: Folder below which to look, see `lightning_fcl.data.datasets.data_root`.
        device: ``"wrist"``: acceleration xyz (g), blood volume pulse, skin conductance, temperature at 32 Hz; the
            pulse is the mean of two samples, the slow signals hold their last value. ``"chest"``: acceleration xyz,
            ECG, EMG, skin conductance, temperature, respiration at 700 Hz, in the pickles only.
        chunk: Time steps per chunk. It must divide 320 for ``windows_10s.npz``.
        normalize: ``"user"`` is the papers' z-score per subject and feature over all the subject's kept samples: it
            looks into the future. ``"causal"`` takes mean and standard deviation of the chunks before a chunk; the
            first chunk of a subject has no past and is scaled with its own. ``"none"`` leaves the units. A feature
            that has not varied is only centred.

    Returns:
        `x` of shape (n, chunk, features), time first; `client` the subject's number, 2 to 17.

    Raises:
        FileNotFoundError: If no layout is found, or one file of it is missing.
        ValueError: If an argument is unknown, does not fit the layout or leaves no chunk, or if a file is damaged; the
            message names the file.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> X = np.random.default_rng(0).normal(size=(2, 6, 320)).astype(np.float32)
        >>> np.savez(root / "windows_10s.npz", X=X, y=[0, 3], subject=[2, 17], start=[5.0, 8.0])
        >>> data = load(root, chunk=160)
        >>> data.x.shape, data.client.tolist()
        ((4, 160, 6), [2, 2, 17, 17])
    """
    _require_device(device)
    require_chunk(chunk)
    require_normalize(normalize)
    layout, path = _find(data_root(root))
    if device == "chest" and layout != "pickles":
        raise ValueError(
            f"Expected `device` to be 'wrist' with the {layout} in {path} but got 'chest', which only the publishers' "
            "pickles hold (S2/S2.pkl and so on). Get these, or pass device='wrist'."
        )
    read = _from_windows(path, chunk) if layout == "wrist windows" else _from_subjects(layout, path, device, chunk)
    x, y, client, longest = [], [], [], 0
    for subject, chunks, labels, steps in read:
        x.append(normalized(chunks, normalize))
        y.append(labels)
        client.append(np.full(len(labels), subject))
        longest = max(longest, steps)
    if not sum(map(len, y)):
        raise ValueError(
            f"Expected `chunk` to be at most {longest}, the time steps of the longest condition in {path}, but got "
            f"{chunk}. Pass a smaller one."
        )
    return Arrays(x=np.concatenate(x), y=np.concatenate(y), client=np.concatenate(client), classes=_CLASSES)


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
        FileNotFoundError: Expected the WESAD data below `root` but found none in a/folder/that/is/missing. ...
    """
    layout, path = _find(data_root(root))
    return f"{layout} {path}"


def fetch(root: str | Path | None = None) -> Path:
    """Return the data that are there; they must be downloaded by hand, as no checksum of the archive is published.

    Args:
        root: Folder of the data sets, see `lightning_fcl.data.datasets.data_root`.

    Returns:
        The folder or file that `load` will read.

    Raises:
        FileNotFoundError: If nothing is there; the message says what to download and where to put it.

    Example:
        >>> fetch()  # doctest: +SKIP
        PosixPath('~/.cache/lightning-fcl/data/wesad/WESAD')
    """
    return _find(data_root(root))[1]


def _require_device(device: str) -> None:
    if device not in ("wrist", "chest"):
        raise ValueError(f"Expected `device` to be 'wrist' or 'chest' but got {device!r}. Choose one of these.")


def _find(root: Path) -> tuple[_Layout, Path]:
    bases = (root / "wesad" / "WESAD", root / "WESAD", root / "wesad", root)
    patterns: dict[_Layout, str] = {"pickles": "S*/S*.pkl", "wrist CSV files": "S*/S*_E4_Data/*.csv"}
    for layout, pattern in patterns.items():
        for base in bases:
            if any(_number(path.relative_to(base).parts[0]) for path in base.glob(pattern)):
                return layout, base
    for base in (root / "wesad_wrist", root):
        if any(_number(path.stem) for path in (base / "streams").glob("S*.npz")):
            return "wrist streams", base / "streams"
    for base in (root / "wesad_wrist", root):
        if (base / "windows_10s.npz").is_file():
            return "wrist windows", base / "windows_10s.npz"
    raise FileNotFoundError(
        f"Expected the WESAD data below `root` but found none in {root}. Download the archive by hand from "
        f"{DESCRIPTION.url} and unpack it to {root / 'wesad'}, so that {root / 'wesad' / 'WESAD' / 'S2' / 'S2.pkl'} is "
        "there, or point LIGHTNING_FCL_DATA at the folder that holds `WESAD` or `wesad_wrist`."
    )


def _number(name: str) -> int:
    """The subject's number in "S2"; 0 for any other name."""
    return int(name[1:]) if re.fullmatch(r"S\d{1,3}", name) else 0


def _from_subjects(layout: _Layout, path: Path, device: str, chunk: int) -> Iterator[_Chunks]:
    readers: dict[str, Callable[[Path], _Series]] = {
        "pickles": lambda entry: _from_pickle(entry / f"{entry.name}.pkl", device),
        "wrist CSV files": _from_csv,
        "wrist streams": _from_stream,
    }
    for entry in sorted((entry for entry in path.iterdir() if _number(entry.stem)), key=lambda e: _number(e.stem)):
        x, labels = readers[layout](entry)
        if not np.isfinite(x).all():
            step = np.flatnonzero(~np.isfinite(x).all(axis=1))[0]
            raise ValueError(f"Expected {entry} to hold finite signals but got {x[step]} at step {step}. {_REMEDY}")
        longest = max((stop - start for start, stop in stretches(labels)), default=0)
        yield _number(entry.stem), *cut(x, labels, chunk), longest


def _from_pickle(path: Path, device: str) -> _Series:
    if not path.is_file():
        raise FileNotFoundError(f"Expected the file {path} but it is missing. {_REMEDY}")
    content = read_pickle(path)
    try:
        signals, label = content["signal"][device], np.asarray(content["label"])
        columns = {name: np.asarray(signals[name]) for name in (_CHEST if device == "chest" else empatica.RATES)}
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"Expected {path} to hold the {device}'s signals but it lacks {error}. {_REMEDY}") from error
    if label.ndim != 1 or label.dtype.kind not in "iu":
        raise ValueError(
            f"Expected `label` of {path} to be a row of integers but got {label.dtype} of shape {label.shape}. "
            f"{_REMEDY}"
        )
    if device == "chest":
        for name, width in _CHEST.items():
            empatica.require_signal(path, name, columns[name], width)
            if len(columns[name]) != len(label):
                raise ValueError(
                    f"Expected `{name}` of {path} to have a row for each of the {len(label)} labels but got "
                    f"{len(columns[name])}. {_REMEDY}"
                )
        return np.concatenate([column.astype(np.float32) for column in columns.values()], axis=1), _numbered(
            label, path
        )
    # The label at the time of each wrist sample: 700 Hz against 32 Hz.
    x = empatica.at_32_hz(columns, path)
    at = np.arange(len(x)) * 175 // 8
    at = at[at < len(label)]
    empatica.require_together(path, {"label": len(label) / 700, "signals": len(x) / 32})
    return x[: len(at)], _numbered(label[at], path)


def _from_stream(path: Path) -> _Series:
    free = {"acc": ("iuf", ("a", 3)), "bvp": ("f", ("b",)), "eda": ("f", ("e",)), "temp": ("f", ("t",))}
    arrays = read_npz(path, {**free, "label32": ("iu", ("l",))})
    x = empatica.at_32_hz({name.upper(): arrays[name].reshape(len(arrays[name]), -1) for name in free}, path)
    empatica.require_together(path, {"label32": len(arrays["label32"]) / 32, "signals": len(x) / 32})
    n = min(len(x), len(arrays["label32"]))
    return x[:n], _numbered(arrays["label32"][:n], path)


def _from_csv(folder: Path) -> _Series:
    x, start = empatica.read_recording(folder / f"{folder.name}_E4_Data")
    offset = (_chest_start(folder / f"{folder.name}_respiban.txt") - start) % 3600
    labels = np.full(len(x), -1)
    for label, first, last in _protocol(folder / f"{folder.name}_quest.csv"):
        a, b = (round((offset + second) * 32) for second in (first + _MARGIN, last - _MARGIN))
        if b > len(x):
            raise ValueError(
                f"Expected the wrist signals of {folder} to last until {_CLASSES[label]!r} ends, in second "
                f"{offset + last:.0f}, but got {len(x) / 32:.0f} seconds: a file is truncated. {_REMEDY}"
            )
        labels[a:b] = label
    return x, labels


def _numbered(label: NDArray[Any], path: Path) -> NDArray[np.int64]:
    """Labels from 0, the conditions that are left out as -1."""
    wrong = np.flatnonzero((label < 0) | (label > 7))
    if wrong.size:
        raise ValueError(
            f"Expected the labels of {path} to be between 0 and 7 but got {label[wrong[0]]} at step {wrong[0]}. "
            f"{_REMEDY}"
        )
    return np.where((label >= 1) & (label <= 4), label.astype(np.int64) - 1, -1)


def _protocol(path: Path) -> list[tuple[int, float, float]]:
    """Label, start and end of each condition, in seconds since the start of the chest device."""
    rows: dict[str, list[str]] = {}
    for line in empatica.text_of(path).splitlines():
        key, *values = (field.strip() for field in line.split(";"))
        rows.setdefault(key.lstrip("# "), values)
    order, starts, ends = (rows.get(key, []) for key in ("ORDER", "START", "END"))
    named = zip(order, starts, ends, strict=False)
    found = [(_CONDITIONS[name], _seconds(a, path), _seconds(b, path)) for name, a, b in named if name in _CONDITIONS]
    if len(found) < len(_CONDITIONS) or any(last - first <= 2 * _MARGIN for _, first, last in found):
        raise ValueError(
            f"Expected {path} to give start and end of {', '.join(_CONDITIONS)} in its lines ORDER, START and END but "
            f"got {order}, {starts} and {ends}. {_REMEDY}"
        )
    return found


def _seconds(text: str, path: Path) -> float:
    # Minutes and seconds, written as if it were a decimal fraction: 50.3 is 50 min 30 s.
    match = re.fullmatch(r"(\d{1,4})(?:\.(\d{1,2}))?", text)
    seconds = int((match[2] or "").ljust(2, "0")) if match else 60
    if not match or seconds > 59:
        raise ValueError(f"Expected minutes.seconds in {path} but got {text!r}. {_REMEDY}")
    return 60.0 * int(match[1]) + seconds


def _chest_start(path: Path) -> float:
    """Start of the chest device in seconds since a full hour of its clock."""
    head = empatica.text_of(path, lines=5).splitlines()
    try:
        header = json.loads(next(line for line in head if line.startswith("# {"))[1:])
        _, minutes, seconds = next(iter(header.values()))["time"].split(":")
        return 60.0 * int(minutes) + float(seconds)
    except (StopIteration, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"Expected {path} to begin with a header that gives the start as `time` but got {head[:2]}. {_REMEDY}"
        ) from error


def _from_windows(path: Path, chunk: int) -> Iterator[_Chunks]:
    if _WINDOW % chunk:
        raise ValueError(
            f"Expected `chunk` to divide {_WINDOW}, the time steps of a window in {path}, but got {chunk}. Pass, for "
            "example, 32, or use a layout with whole recordings."
        )
    n = ("n",)
    wanted = {"X": ("f", ("n", 6, _WINDOW)), "y": ("iu", n), "subject": ("iu", n), "start": ("iuf", n)}
    arrays = read_npz(path, wanted)
    order = np.lexsort((arrays["start"], arrays["subject"]))
    x, y, subject = (arrays[name][order] for name in ("X", "y", "subject"))
    for one in np.unique(subject):
        own = x[subject == one].transpose(0, 2, 1).astype(np.float32).reshape(-1, chunk, 6)
        yield int(one), own, np.repeat(y[subject == one].astype(np.int64), _WINDOW // chunk), _WINDOW
