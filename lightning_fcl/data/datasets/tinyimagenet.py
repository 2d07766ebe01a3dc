"""TinyImageNet: photographs of 200 classes of ImageNet, 64 x 64 pixels.

Le and Yang 2015, "Tiny ImageNet visual recognition challenge", Stanford CS 231N. Two layouts are read, in this order:
the original folder ``tiny-imagenet-200``, whose test set has no labels, so that the publishers' validation set stands
for it; and ``tinyimagenet32/100classes.npz``, 100 of the classes at 32 x 32 with 120 training images each.
"""

import re
from pathlib import Path
from typing import Literal

import numpy as np

from lightning_fcl.data.datasets import Arrays, Description, data_root
from lightning_fcl.data.datasets.archives import read_npz
from lightning_fcl.data.datasets.images import read_colour
from lightning_fcl.data.datasets.photographs import (
    Normalize,
    Photographs,
    lines,
    require_labels,
    require_options,
    stacked,
)
from lightning_fcl.hub.fetch import fetch_folder

__all__ = ["DESCRIPTION", "SHA256", "URL", "fetch", "load", "locate"]

URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
# 248,100,043 bytes. Several public repositories that pin Stanford's archive name this same digest.
SHA256 = "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821"

DESCRIPTION = Description(
    name="tinyimagenet",
    content="110000 photographs of 200 classes, 32 x 32 (the originals 64 x 64); 500 of each to train, 50 to test",
    licence="non-commercial research and education, ImageNet's terms",
    citation="Le and Yang: Tiny ImageNet visual recognition challenge. Stanford CS 231N, 2015",
    url=URL,
    size="248 MB",
)

_FOLDER = "tiny-imagenet-200"
_NPZ = "100classes.npz"
_SHAPE = (64, 64)
_NPZ_SHAPE = (32, 32, 3)
_REMEDY = "Delete this copy and run `lightning-fcl data fetch tinyimagenet`."

_Layout = Literal["folder of images", "npz file"]


def load(root: str | Path | None = None, size: int = 32, normalize: Normalize = "imagenet") -> Arrays:
    """Load all images that have labels: the training images class by class, then the publishers' validation set.

    Args:
        root: Folder below which to look, see `lightning_fcl.data.datasets.data_root`.
        size: Height and width in pixels, such as 32 or the original 64; other sizes than the file's are made by
            Pillow's antialiased bicubic filter.
        normalize: ``"imagenet"``: by mean and deviation of ImageNet's red, green and blue; ``"channel"``: by those of
            these training images; ``"none"``: 0..255 to 0..1.

    Returns:
        `x` of shape (n, 3, size, size), pixels with their mean and deviation; `classes` in the order of their WordNet
        ids, by their first name; `official_test` the validation set. The complete set has n = 110000, the npz file
        17000.

    Raises:
        FileNotFoundError: If no layout is found, or a file of it is missing.
        ValueError: If an argument is unknown or out of range, or if a file is damaged; the message names the file.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> X = np.random.default_rng(0).integers(256, size=(4, 32, 32, 3), dtype=np.uint8)
        >>> words = {"wnids": ["n01443537", "n01629819"], "names": ["goldfish, Carassius auratus", "salamander"]}
        >>> np.savez(root / "100classes.npz", X_train=X, y_train=[0, 0, 1, 1], X_val=X[:2], y_val=[1, 0], **words)
        >>> data = load(root)
        >>> data.samples().shape, data.classes, data.official_test.sum().item()
        ((6, 3, 32, 32), ('goldfish', 'salamander'), 2)
    """
    require_options(size, normalize)
    layout, path = _find(data_root(root))
    return (_load_npz(path, size) if layout == "npz file" else _load_folder(path, size)).arrays(normalize)


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
        FileNotFoundError: Expected TinyImageNet below `root` but found nothing in a/folder/that/is/missing. ...
    """
    layout, path = _find(data_root(root))
    return f"{layout} {path}"


def fetch(root: str | Path | None = None) -> Path:
    """Download Stanford's zip once, verified against its SHA-256, and unpack it to ``tinyimagenet`` below `root`.

    Where there is an original folder already, nothing is downloaded.

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
        PosixPath('~/.cache/lightning-fcl/data/tinyimagenet/tiny-imagenet-200')
    """
    there = _folder(data_root(root))
    if there is not None:
        return there
    archive = data_root(root) / "tinyimagenet" / f"{_FOLDER}.zip"
    return fetch_folder("tinyimagenet", URL, SHA256, archive, _FOLDER)


def _find(root: Path) -> tuple[_Layout, Path]:
    folder = _folder(root)
    if folder is not None:
        return "folder of images", folder
    for base in (root / "tinyimagenet32", root / "tinyimagenet", root):
        if (base / _NPZ).is_file():
            return "npz file", base / _NPZ
    raise FileNotFoundError(
        f"Expected TinyImageNet below `root` but found nothing in {root}. Run `lightning-fcl data fetch tinyimagenet`, "
        f"or point LIGHTNING_FCL_DATA at the folder that holds `{_FOLDER}` or `tinyimagenet32/{_NPZ}`."
    )


def _folder(root: Path) -> Path | None:
    for folder in (root / "tinyimagenet" / _FOLDER, root / _FOLDER, root / "tinyimagenet", root):
        if (folder / "wnids.txt").is_file():
            return folder
    return None


def _load_folder(folder: Path, size: int) -> Photographs:
    wnids = sorted(set(lines(folder / "wnids.txt", _REMEDY)))
    train = [_images(folder / "train" / wnid / "images") for wnid in wnids]
    most = max(len(images) for images in train)
    for wnid, images in zip(wnids, train, strict=True):
        if not images or len(images) < most:
            raise ValueError(
                f"Expected {folder / 'train' / wnid / 'images'} to hold {most or 500} images, as the other classes do, "
                f"but got {len(images)}: the archive is not wholly unpacked. {_REMEDY}"
            )
    paths = [path for images in train for path in images]
    test, labels = _annotated(folder, wnids)
    pixels = (read_colour(path, "JPEG", _SHAPE) for path in (*paths, *test))
    return Photographs(
        pixels=stacked(pixels, len(paths) + len(test), size),
        y=np.concatenate([np.repeat(np.arange(len(wnids)), most), labels]).astype(np.int64),
        test=np.repeat([False, True], [len(paths), len(test)]),
        classes=_names(wnids, _words(folder)),
    )


def _images(folder: Path) -> list[Path]:
    """The images of a class, in the order of their numbers."""
    found = [path for path in folder.glob("*.JPEG") if re.fullmatch(r"n\d+_\d+", path.stem)]
    return sorted(found, key=lambda path: int(path.stem.split("_")[1]))


def _annotated(folder: Path, wnids: list[str]) -> tuple[list[Path], list[int]]:
    """The validation images and their labels, in the order of the annotations: file, class, and the object's box."""
    path = folder / "val" / "val_annotations.txt"
    images, labels = [], []
    for number, line in enumerate(lines(path, _REMEDY), start=1):
        name, wnid, *_ = [*line.split("\t"), ""]
        if not re.fullmatch(r"val_\d+\.JPEG", name) or wnid not in wnids:
            raise ValueError(
                f"Expected line {number} of {path} to name an image such as `val_0.JPEG` and a class of `wnids.txt` "
                f"but got {line[:60]!r}. {_REMEDY}"
            )
        images.append(folder / "val" / "images" / name)
        labels.append(wnids.index(wnid))
    return images, labels


def _words(folder: Path) -> dict[str, str]:
    """Names by WordNet id, of all of WordNet's."""
    parts = (line.partition("\t") for line in lines(folder / "words.txt", _REMEDY))
    return {wnid: names for wnid, _, names in parts}


def _names(wnids: list[str], words: dict[str, str]) -> tuple[str, ...]:
    """The first name of each class; with its id where another class has the same."""
    first = [words.get(wnid, "").split(",")[0].strip() or wnid for wnid in wnids]
    return tuple(
        name if first.count(name) == 1 else f"{name} ({wnid})" for name, wnid in zip(first, wnids, strict=True)
    )


def _load_npz(path: Path, size: int) -> Photographs:
    wanted: dict[str, tuple[str, tuple[int | str, ...]]] = {"wnids": ("U", ("classes",)), "names": ("U", ("classes",))}
    for part in ("train", "val"):
        wanted |= {f"X_{part}": ("u", (f"{part} images", *_NPZ_SHAPE)), f"y_{part}": ("iu", (f"{part} images",))}
    arrays = read_npz(path, wanted)
    for name in ("X_train", "X_val"):
        if arrays[name].dtype != np.uint8 or not len(arrays[name]):
            raise ValueError(
                f"Expected `{name}` of {path} to hold uint8 images but got {len(arrays[name])} of "
                f"{arrays[name].dtype}. {_REMEDY}"
            )
    wnids = arrays["wnids"].tolist()
    labels = [require_labels(arrays[name], len(wnids), name, path, _REMEDY) for name in ("y_train", "y_val")]
    number = [len(part) for part in labels]
    images = (image for name in ("X_train", "X_val") for image in arrays[name])
    return Photographs(
        pixels=stacked(images, sum(number), size),
        y=np.concatenate(labels),
        test=np.repeat([False, True], number),
        classes=_names(wnids, dict(zip(wnids, arrays["names"].tolist(), strict=True))),
    )
