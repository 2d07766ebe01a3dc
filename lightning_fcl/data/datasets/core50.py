"""CORe50: fifty objects held in a hand, filmed in eleven sessions with different backgrounds.

Lomonaco and Maltoni 2017, "CORe50: a new dataset and benchmark for continuous object recognition", CoRL. The original
folder ``core50_128x128`` is read, or the smaller ``core50_32x32`` of the same layout: an image is
``s<session>/o<object>/C_<session>_<object>_<frame>.png``. Sessions 3, 7 and 10 are the publishers' test set.
"""

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets import Arrays, Description, data_root
from lightning_fcl.data.datasets.images import read_colour
from lightning_fcl.data.datasets.photographs import Normalize, Photographs, require_options, stacked
from lightning_fcl.hub.fetch import fetch_folder

__all__ = ["DESCRIPTION", "MD5", "URL", "fetch", "load", "locate"]

URL = "http://bias.csr.unibo.it/maltoni/download/core50/core50_128x128.zip"
# No SHA-256 is published; Avalanche, whose authors are the data set's, and others name this digest.
MD5 = "745f3373fed08d69343f1058ee559e13"

DESCRIPTION = Description(
    name="core50",
    content="164866 frames of videos of 50 objects in 11 sessions, 32 x 32 (the originals 128 x 128); 3 to test",
    licence="CC BY 4.0",
    citation="Lomonaco and Maltoni: CORe50: a new dataset and benchmark for continuous object recognition. CoRL 2017",
    url=URL,
    size="about 4 GB",
)

_FOLDERS = {"core50_128x128": 128, "core50_32x32": 32}
_KINDS = (
    "plug_adapter",
    "mobile_phone",
    "scissor",
    "light_bulb",
    "can",
    "glass",
    "ball",
    "marker",
    "cup",
    "remote_control",
)
_OBJECTS = tuple(f"{kind}{number}" for kind in _KINDS for number in range(1, 6))
_SESSIONS = 11
_TEST = (3, 7, 10)
_REMEDY = "Delete this copy and run `lightning-fcl data fetch core50`."


def load(
    root: str | Path | None = None, size: int = 32, normalize: Normalize = "imagenet", by_session: bool = False
) -> Arrays:
    """Load all frames, session by session and object by object.

    The frames of a session and object are one video at 20 frames a second: neighbours are nearly alike, so a test set
    of single frames, drawn at random, measures little more than memory.

    Args:
        root: Folder below which to look, see `lightning_fcl.data.datasets.data_root`.
        size: Height and width in pixels; other sizes than the files' are made by Pillow's antialiased bicubic filter.
            All 164866 frames of 128 x 128 take 8 GB and some minutes to read.
        normalize: ``"imagenet"``: by mean and deviation of ImageNet's red, green and blue; ``"channel"``: by those of
            these images, without the test set; ``"none"``: 0..255 to 0..1.
        by_session: Whether an object is another class in every session: 550 classes, session by session, so that
            blocks of 50 are the sessions. That is how this project reads the 11 tasks of 50 classes of Zuo et al.
            2024. There is no official test set then, as its sessions would have no training images.

    Returns:
        `x` of shape (n, 3, size, size), pixels with their mean and deviation; `classes` the 50 objects, or the objects
        of each session; `group` the session, 1 to 11; `official_test` sessions 3, 7 and 10.

    Raises:
        FileNotFoundError: If no folder is found.
        ValueError: If an argument is unknown or out of range, if sessions are incomplete, or if a file is damaged; the
            message names the file.

    Example:
        >>> load("a/folder/that/is/missing")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        FileNotFoundError: Expected CORe50 below `root` but found nothing in a/folder/that/is/missing. ...
    """
    require_options(size, normalize)
    if type(by_session) is not bool:
        raise ValueError(f"Expected `by_session` to be True or False but got {by_session!r}. Choose one of these.")
    folder = _find(data_root(root))
    paths, session, thing = _frames(folder)
    shape = (_side(folder), _side(folder))
    pixels = stacked((read_colour(path, "PNG", shape) for path in paths), len(paths), size)
    sessions, things = np.unique(session), np.unique(thing)
    y, names = np.searchsorted(things, thing), [_OBJECTS[number - 1] for number in things]
    if by_session:
        y = y + len(things) * np.searchsorted(sessions, session)
        names = [f"s{number} {name}" for number in sessions for name in names]
    test = None if by_session else np.isin(session, _TEST)
    return Photographs(pixels, y.astype(np.int64), test, tuple(names)).arrays(normalize, group=session)


def locate(root: str | Path | None = None) -> str:
    """Say which layout `load` would read, without reading it.

    Args:
        root: Folder below which to look, see `lightning_fcl.data.datasets.data_root`.

    Returns:
        The layout and its path, for people.

    Raises:
        FileNotFoundError: If no folder is found.

    Example:
        >>> locate("a/folder/that/is/missing")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        FileNotFoundError: Expected CORe50 below `root` but found nothing in a/folder/that/is/missing. ...
    """
    return f"folders of frames {_find(data_root(root))}"


def fetch(root: str | Path | None = None) -> Path:
    """Download Bologna's zip once, verified against its MD5, and unpack it to ``core50`` below `root`.

    Where a folder of frames is already, nothing is downloaded.

    Args:
        root: Folder of the data sets, see `lightning_fcl.data.datasets.data_root`.

    Returns:
        The folder that `load` will read. The archive is deleted after it is unpacked.

    Raises:
        ConnectionError: If the download fails.
        ValueError: If what came is not the published file, which is deleted then.
        OSError: If it cannot be unpacked, for want of space for example; nothing is left of the attempt.

    Example:
        >>> fetch()  # doctest: +SKIP
        PosixPath('~/.cache/lightning-fcl/data/core50/core50_128x128')
    """
    there = _folder(data_root(root))
    if there is not None:
        return there
    archive = data_root(root) / "core50" / "core50_128x128.zip"
    return fetch_folder("core50", URL, f"md5:{MD5}", archive, "core50_128x128")


def _folder(root: Path) -> Path | None:
    for name in _FOLDERS:
        for folder in (root / "core50" / name, root / name):
            if any(folder.glob("s*/o*/")):
                return folder
    return None


def _find(root: Path) -> Path:
    folder = _folder(root)
    if folder is None:
        raise FileNotFoundError(
            f"Expected CORe50 below `root` but found nothing in {root}. Run `lightning-fcl data fetch core50`, or "
            "point LIGHTNING_FCL_DATA at the folder that holds `core50_128x128` or `core50_32x32`, as in "
            "`core50_128x128/s1/o1/C_01_01_000.png`."
        )
    return folder


def _side(folder: Path) -> int:
    return _FOLDERS[folder.name]


def _frames(folder: Path) -> tuple[list[Path], NDArray[np.int64], NDArray[np.int64]]:
    """All frames in order, with the numbers of their sessions and objects."""
    found: dict[int, dict[int, list[Path]]] = {}
    for session in range(1, _SESSIONS + 1):
        for thing in range(1, len(_OBJECTS) + 1):
            place = folder / f"s{session}" / f"o{thing}"
            pattern = rf"C_{session:02d}_{thing:02d}_\d{{3}}\.png"
            frames = sorted(path for path in place.glob("C_*.png") if re.fullmatch(pattern, path.name))
            if frames:
                found.setdefault(session, {})[thing] = frames
    everything = sorted({thing for things in found.values() for thing in things})
    for session, things in found.items():
        missing = [thing for thing in everything if thing not in things]
        if missing:
            raise ValueError(
                f"Expected {folder / f's{session}' / f'o{missing[0]}'} to hold frames such as "
                f"`C_{session:02d}_{missing[0]:02d}_000.png`, as another session has this object, but got none: the "
                f"archive is not wholly unpacked. {_REMEDY}"
            )
    if not found:
        raise ValueError(f"Expected {folder} to hold frames such as `s1/o1/C_01_01_000.png` but got none. {_REMEDY}")
    rows = [(path, session, thing) for session, things in found.items() for thing in things for path in things[thing]]
    paths, sessions, objects = (list(column) for column in zip(*rows, strict=True))
    return paths, np.array(sessions, dtype=np.int64), np.array(objects, dtype=np.int64)
