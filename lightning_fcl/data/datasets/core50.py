"""CORe50: fifty objects held in a hand, filmed in eleven sessions with different backgrounds.

Lomonaco and Maltoni 2017, "CORe50: a new dataset and benchmark for continuous object recognition", CoRL. The original
folder ``core50_128x128`` is read, or the smaller ``core50_32x32`` of the same layout: an image is
``s<session>/o<object>/C_<session>_<object>_<frame>.png``. Sessions 3, 7 and 10 are the publishers' test set.
"""

from itertools import product
from pathlib import Path

import numpy as np

from lightning_fcl.data.datasets import SOURCES
from lightning_fcl.data.datasets.arrays import Arrays
from lightning_fcl.data.datasets.files import numbered_paths
from lightning_fcl.data.datasets.images import Scale, photographs, read_image, resize_all
from lightning_fcl.errors import at_least

_FOLDERS = {"core50_128x128": 128, "core50_32x32": 32}

SOURCE = SOURCES["core50"]

_KINDS = (
    *("plug_adapter", "mobile_phone", "scissor", "light_bulb", "can"),
    *("glass", "ball", "marker", "cup", "remote_control"),
)
_OBJECTS = tuple(f"{kind}{number}" for kind in _KINDS for number in range(1, 6))
_SESSIONS = 11
_TEST = (3, 7, 10)


def load(
    root: str | Path | None = None, size: int = 32, normalize: Scale = "imagenet", by_session: bool = False
) -> Arrays:
    """Load all frames, session by session and object by object.

    The frames of a session and object are one video at 20 frames a second: neighbours are nearly alike, so a test set
    of single frames, drawn at random, measures little more than memory.

    Args:
        size: Height and width in pixels; all 164866 frames of 128 x 128 take 8 GB and some minutes to read.
        normalize: See `lightning_fcl.data.datasets.images.photographs`.
        by_session: Whether an object is another class in every session: 550 classes, session by session, so that
            blocks of 50 are the sessions. That is how this project reads the 11 tasks of 50 classes of Zuo et al.
            2024. There is no official test set then, as its sessions would have no training images.
    """
    at_least(1, size=size)
    folder = SOURCE.find(root)[1]
    frames = _frames(folder)
    paths = [path for own in frames.values() for path in own]
    session, thing = np.repeat(list(frames), [len(own) for own in frames.values()], axis=0).T
    side = _FOLDERS[folder.name]
    pixels = resize_all((read_image(path, "PNG", "RGB", (side, side)) for path in paths), len(paths), size)
    sessions, things = np.unique(session), np.unique(thing)
    y, names = np.searchsorted(things, thing), [_OBJECTS[number - 1] for number in things]
    if by_session:
        y = y + len(things) * np.searchsorted(sessions, session)
        names = [f"s{number} {name}" for number in sessions for name in names]
    test = None if by_session else np.isin(session, _TEST)
    return photographs(pixels, y, names, normalize, test, group=session.astype(np.int64))


def _frames(folder: Path) -> dict[tuple[int, int], list[Path]]:
    found: dict[tuple[int, int], list[Path]] = {}
    for session in range(1, _SESSIONS + 1):
        for thing in range(1, len(_OBJECTS) + 1):
            pattern = rf"C_{session:02d}_{thing:02d}_(\d{{3}})\.png"
            if frames := numbered_paths(folder / f"s{session}" / f"o{thing}", pattern):
                found[session, thing] = frames
    for session, thing in product(*(sorted(set(column)) for column in zip(*found, strict=True))) if found else [(1, 1)]:
        if (session, thing) not in found:
            raise ValueError(
                f"Expected {folder / f's{session}' / f'o{thing}'} to hold frames such as "
                f"`C_{session:02d}_{thing:02d}_000.png` but got none: the archive is not wholly unpacked. "
                f"{SOURCE.remedy}"
            )
    return found
