"""Labeled Faces in the Wild: press photographs of people, cut to the face, in grey.

Huang et al. 2007, "Labeled Faces in the Wild: a database for studying face recognition in unconstrained environments",
University of Massachusetts, Amherst, TR 07-49; the funneled version: Huang, Jain and Learned-Miller 2007, "Unsupervised
joint alignment of complex images", ICCV. Two layouts are read, in this order: the original folders
``Name/Name_0001.jpg``, and ``lfw/min35_gray_64x48.npz`` with the people of 35 and more images.

Of the original images, 250 x 250 pixels, rows 70 to 194 and columns 78 to 171 are kept, as scikit-learn's
`fetch_lfw_people` does by default; how the npz file was cut is not known, so the two layouts differ in the pixels.
"""

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets import Arrays, Description, data_root
from lightning_fcl.data.datasets.images import (
    Normalize,
    batch,
    read_grey,
    read_labelled,
    require_normalize,
    require_size,
)
from lightning_fcl.hub.fetch import fetch_folder

__all__ = ["DESCRIPTION", "SHA256", "URL", "fetch", "load", "locate"]

URL = "https://ndownloader.figshare.com/files/5976015"
# Place and digest of lfw-funneled.tgz as scikit-learn publishes them in sklearn/datasets/_lfw.py.
SHA256 = "b47c8422c8cded889dc5a13418c4bc2abbda121092b3533a83306f90d900100a"

DESCRIPTION = Description(
    name="lfw",
    content="13233 grey faces of 5749 people from press photographs, 64 x 48; 2053 of the 24 with 35 and more images",
    licence="for research, with credit",
    citation="Huang et al.: Labeled Faces in the Wild. University of Massachusetts, Amherst, TR 07-49, 2007",
    url=URL,
    size="233 MB",
)

_FOLDERS = ("lfw", "lfw_funneled")
_ARCHIVE = "lfw-funneled.tgz"
_NPZ = "min35_gray_64x48.npz"
_NPZ_SHAPE = (64, 48)
_NPZ_FACES = 35
_SHAPE = (250, 250)
_FACE = (slice(70, 195), slice(78, 172))

_Layout = Literal["folders of images", "npz file"]


def load(
    root: str | Path | None = None,
    min_faces: int = 35,
    size: Sequence[int] = (64, 48),
    normalize: Normalize = "image",
) -> Arrays:
    """Load the faces of all people with enough images, who are the classes.

    Args:
        root: Folder below which to look, see `lightning_fcl.data.datasets.data_root`.
        min_faces: People with fewer images are left out. The npz file has nobody with fewer than 35.
        size: Height and width in pixels. The cut of 125 x 94, or the 64 x 48 of the npz file, is resized to it with
            Pillow's antialiased bicubic filter, so another aspect ratio than 4:3 distorts the faces.
        normalize: ``"image"`` gives each image a mean of zero and a variance of one, and a constant image zeros;
            ``"none"`` scales 0..255 to 0..1.

    Returns:
        `x` of shape (n, 1, height, width); `classes` the people's names in alphabetical order, as in ``Tony_Blair``.
        With 35 faces n = 2053 of 24 people.

    Raises:
        FileNotFoundError: If no layout is found.
        ValueError: If an argument is out of range or asks for what the layout lacks, or if a file is damaged; the
            message names the file.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> X = np.random.default_rng(0).integers(256, size=(71, 64, 48), dtype=np.uint8)
        >>> np.savez(root / "min35_gray_64x48.npz", X=X, y=[0] * 35 + [1] * 36, names=["Ann_Lee", "Bob_Ray"])
        >>> load(root).x.shape, load(root, min_faces=36).classes
        ((71, 1, 64, 48), ('Bob_Ray',))
    """
    require_size(size)
    require_normalize(normalize)
    _require_faces(min_faces)
    layout, path = _find(data_root(root))
    if layout == "npz file":
        x, y, classes = _load_npz(path, min_faces, size, normalize)
    else:
        x, y, classes = _load_folders(path, min_faces, size, normalize)
    return Arrays(x=x, y=y, client=None, classes=tuple(classes))


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
        FileNotFoundError: Expected the LFW data below `root` but found none in a/folder/that/is/missing. ...
    """
    layout, path = _find(data_root(root))
    return f"{layout} {path}"


def fetch(root: str | Path | None = None) -> Path:
    """Download the funneled images once, verified against their SHA-256, and unpack them to ``lfw`` below `root`.

    Where there is a folder of original images already, nothing is downloaded.

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
        PosixPath('~/.cache/lightning-fcl/data/lfw/lfw_funneled')
    """
    there = _folder(data_root(root))
    if there is not None:
        return there
    return fetch_folder("lfw", URL, SHA256, data_root(root) / "lfw" / _ARCHIVE, "lfw_funneled")


def _require_faces(min_faces: int) -> None:
    if not isinstance(min_faces, int) or isinstance(min_faces, bool) or min_faces < 1:
        raise ValueError(
            f"Expected `min_faces` to be a whole number of at least 1 but got {min_faces!r}. Pass, for example, "
            f"{_NPZ_FACES}."
        )


def _find(root: Path) -> tuple[_Layout, Path]:
    folder = _folder(root)
    if folder is not None:
        return "folders of images", folder
    for base in (root / "lfw", root):
        if (base / _NPZ).is_file():
            return "npz file", base / _NPZ
    raise FileNotFoundError(
        f"Expected the LFW data below `root` but found none in {root}. Run `lightning-fcl data fetch lfw`, or point "
        "LIGHTNING_FCL_DATA at the folder that holds `lfw` or `lfw_funneled` with the people's folders, as in "
        f"`lfw/Tony_Blair/Tony_Blair_0001.jpg`, or `lfw/{_NPZ}`."
    )


def _folder(root: Path) -> Path | None:
    candidates = [base / name for base in (root / "lfw", root) for name in _FOLDERS]
    for folder in (*candidates, root):
        if any(_images(entry) for entry in folder.glob("*/")):
            return folder
    return None


def _images(person: Path) -> list[Path]:
    """The person's images in order; empty for a folder that is no person's."""
    return sorted(person.glob(f"{glob.escape(person.name)}_[0-9][0-9][0-9][0-9].jpg"))


def _load_folders(
    folder: Path, min_faces: int, size: Sequence[int], normalize: Normalize
) -> tuple[NDArray[np.float32], NDArray[np.int64], list[str]]:
    found = {person.name: _images(person) for person in folder.glob("*/")}
    chosen = _chosen({name: len(paths) for name, paths in found.items()}, min_faces, folder)
    faces = (read_grey(path, "JPEG", _SHAPE)[_FACE] for name in chosen for path in found[name])
    y = np.repeat(np.arange(len(chosen)), [len(found[name]) for name in chosen])
    return batch(faces, size, normalize), y, chosen


def _load_npz(
    path: Path, min_faces: int, size: Sequence[int], normalize: Normalize
) -> tuple[NDArray[np.float32], NDArray[np.int64], list[str]]:
    if min_faces < _NPZ_FACES:
        raise ValueError(
            f"Expected `min_faces` to be at least {_NPZ_FACES}, as {path} has no people with fewer images, but got "
            f"{min_faces}. Pass {_NPZ_FACES} or more, or run `lightning-fcl data fetch lfw` for the original images."
        )
    pixels, label, names = read_labelled(path, _NPZ_SHAPE)
    counts = np.bincount(label, minlength=len(names)).tolist()
    chosen = _chosen(dict(zip(names, counts, strict=True)), min_faces, path)
    # A label's place among the chosen, -1 for people who are left out.
    place = np.array([chosen.index(name) if name in chosen else -1 for name in names])
    y = place[label]
    return batch(pixels[y >= 0], size, normalize), y[y >= 0], chosen


def _chosen(counts: dict[str, int], min_faces: int, path: Path) -> list[str]:
    names = sorted(name for name, count in counts.items() if count >= min_faces)
    if not names:
        most = max(counts, key=lambda name: counts[name])
        raise ValueError(
            f"Expected `min_faces` to be at most {counts[most]}, the images of {most}, who has most in {path}, but got "
            f"{min_faces}. Pass a smaller number."
        )
    return names
