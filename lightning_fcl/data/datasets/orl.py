"""ORL (AT&T) faces: ten grey images each of 40 people, taken in a laboratory.

Samaria and Harter 1994, "Parameterisation of a stochastic model for human face identification", WACV. Two layouts are
read, in this order: the original folders ``s1/1.pgm`` to ``s40/10.pgm``, and ``orl/faces.npz``.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets import Arrays, Description, data_root
from lightning_fcl.data.datasets.images import (
    Normalize,
    batch,
    centre,
    read_grey,
    read_labelled,
    require_normalize,
    require_size,
)

__all__ = ["DESCRIPTION", "fetch", "load", "locate"]

DESCRIPTION = Description(
    name="orl",
    content="400 grey faces of 40 people, 64 x 48 (the originals 112 x 92)",
    licence="for research, with credit to AT&T Laboratories Cambridge",
    citation="Samaria and Harter: Parameterisation of a stochastic model for human face identification. WACV 1994",
    url="https://cam-orl.co.uk/facedatabase.html",
    size="4 MB",
)

_FOLDERS = ("orl_faces", "att_faces")
_SHAPE = (112, 92)
_PEOPLE = 40

_Layout = Literal["folders of images", "npz file"]


def load(
    root: str | Path | None = None,
    size: Sequence[int] | None = (64, 48),
    normalize: Normalize = "image",
) -> Arrays:
    """Load the faces of all people that are there, who are the classes.

    Args:
        root: Folder below which to look, see `lightning_fcl.data.datasets.data_root`.
        size: Height and width in pixels. The middle part of this aspect ratio (112 x 84 of 112 x 92 for 4:3) is resized
            to it with Pillow's antialiased bicubic filter. None keeps 112 x 92.
        normalize: ``"image"`` gives each image a mean of zero and a variance of one, and a constant image zeros;
            ``"none"`` scales 0..255 to 0..1.

    Returns:
        `x` of shape (n, 1, height, width), person by person; `classes` the original folders ``s1``, ``s2`` and so on.
        The complete set has n = 400 of 40 people.

    Raises:
        FileNotFoundError: If no layout is found.
        ValueError: If an argument is unknown or out of range, or if a file is damaged; the message names the file.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> X = np.random.default_rng(0).integers(256, size=(3, 112, 92), dtype=np.uint8)
        >>> np.savez(root / "faces.npz", X=X, y=[0, 0, 1])
        >>> load(root).x.shape, load(root, size=None).x.shape, load(root).classes
        ((3, 1, 64, 48), (3, 1, 112, 92), ('s1', 's2'))
    """
    if size is not None:
        require_size(size)
    require_normalize(normalize)
    layout, path = _find(data_root(root))
    pixels, number = _load_npz(path) if layout == "npz file" else _load_folders(path)
    people, y = np.unique(number, return_inverse=True)
    faces = pixels if size is None else [centre(image, size) for image in pixels]
    return Arrays(
        x=batch(faces, size, normalize),
        y=y.astype(np.int64),
        client=None,
        classes=tuple(f"s{person}" for person in people),
    )


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
        FileNotFoundError: Expected the ORL faces below `root` but found none in a/folder/that/is/missing. ...
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
        PosixPath('~/.cache/lightning-fcl/data/orl')
    """
    return _find(data_root(root))[1]


def _find(root: Path) -> tuple[_Layout, Path]:
    bases = (root / "orl", root)
    for folder in (*(base / name for base in bases for name in _FOLDERS), *bases):
        if any(_images(entry) for entry in folder.glob("s*/")):
            return "folders of images", folder
    for base in bases:
        if (base / "faces.npz").is_file():
            return "npz file", base / "faces.npz"
    raise FileNotFoundError(
        f"Expected the ORL faces below `root` but found none in {root}. Download the archive by hand from "
        f"{DESCRIPTION.url} and unpack it to {root / 'orl'}, so that {root / 'orl' / 's1' / '1.pgm'} is there, or "
        "point LIGHTNING_FCL_DATA at the folder that holds `orl`, `orl_faces` or `att_faces`."
    )


def _images(person: Path) -> list[Path]:
    """The images of a folder such as "s1" in the order of their numbers; empty for any other folder."""
    if not re.fullmatch(r"s[1-9]\d?", person.name):
        return []
    images = [path for path in person.glob("*.pgm") if re.fullmatch(r"[1-9]\d?", path.stem)]
    return sorted(images, key=lambda path: int(path.stem))


def _load_folders(folder: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    found = {int(person.name[1:]): _images(person) for person in folder.glob("s*/") if _images(person)}
    pixels = [read_grey(path, "PPM", _SHAPE) for number in sorted(found) for path in found[number]]
    return np.stack(pixels), np.repeat(sorted(found), [len(found[number]) for number in sorted(found)])


def _load_npz(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    pixels, y, _ = read_labelled(path, _SHAPE, [f"s{number}" for number in range(1, _PEOPLE + 1)])
    return pixels, y + 1
