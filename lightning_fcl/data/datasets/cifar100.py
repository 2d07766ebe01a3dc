"""CIFAR-100: photographs of 100 classes in 20 superclasses, 32 x 32 pixels.

Krizhevsky 2009, "Learning multiple layers of features from tiny images", University of Toronto. The original folder
``cifar-100-python`` is read, with its pickles ``train``, ``test`` and ``meta``: by a reader that calls nothing that
they name.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets import Arrays, Description, data_root
from lightning_fcl.data.datasets.archives import read_pickle
from lightning_fcl.data.datasets.photographs import Normalize, Photographs, require_labels, require_options, stacked
from lightning_fcl.hub.fetch import fetch_folder

__all__ = ["DESCRIPTION", "SHA256", "URL", "fetch", "load", "locate", "read"]

URL = "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"
# 169,001,437 bytes. Keras publishes this digest in keras/src/datasets/cifar100.py.
SHA256 = "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"

DESCRIPTION = Description(
    name="cifar100",
    content="60000 photographs of 100 classes, 32 x 32; 500 of each to train, 100 to test",
    licence="none stated; the author asks for citation",
    citation="Krizhevsky: Learning multiple layers of features from tiny images. University of Toronto, 2009",
    url=URL,
    size="169 MB",
)

_FOLDER = "cifar-100-python"
_SHAPE = (3, 32, 32)
_REMEDY = "Delete this copy and run `lightning-fcl data fetch cifar100`."


def load(root: str | Path | None = None, size: int = 32, normalize: Normalize = "imagenet") -> Arrays:
    """Load all images: the training set, then the publishers' test set.

    Args:
        root: Folder below which to look, see `lightning_fcl.data.datasets.data_root`.
        size: Height and width in pixels; other sizes than 32 are made by Pillow's antialiased bicubic filter.
        normalize: ``"imagenet"``: by mean and deviation of ImageNet's red, green and blue; ``"channel"``: by those of
            these training images; ``"none"``: 0..255 to 0..1.

    Returns:
        `x` of shape (n, 3, size, size), pixels with their mean and deviation; `classes` the 100 fine ones;
        `official_test`. The complete set has n = 60000.

    Raises:
        FileNotFoundError: If the folder, or one of its files, is not there.
        ValueError: If an argument is unknown or out of range, or if a file is damaged; the message names the file.

    Example:
        >>> load("a/folder/that/is/missing")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        FileNotFoundError: Expected CIFAR-100 below `root` but found nothing in a/folder/that/is/missing. ...
    """
    require_options(size, normalize)
    return read(root, size)[0].arrays(normalize)


def locate(root: str | Path | None = None) -> str:
    """Say which layout `load` would read, without reading it.

    Args:
        root: Folder below which to look, see `lightning_fcl.data.datasets.data_root`.

    Returns:
        The layout and its path, for people.

    Raises:
        FileNotFoundError: If it is not there.

    Example:
        >>> locate("a/folder/that/is/missing")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        FileNotFoundError: Expected CIFAR-100 below `root` but found nothing in a/folder/that/is/missing. ...
    """
    return f"pickles {_find(data_root(root))}"


def fetch(root: str | Path | None = None) -> Path:
    """Download Toronto's archive once, verified against its SHA-256, and unpack it to ``cifar100`` below `root`.

    Where the original folder is already, nothing is downloaded.

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
        PosixPath('~/.cache/lightning-fcl/data/cifar100/cifar-100-python')
    """
    there = _folder(data_root(root))
    if there is not None:
        return there
    archive = data_root(root) / "cifar100" / f"{_FOLDER}.tar.gz"
    return fetch_folder("cifar100", URL, SHA256, archive, _FOLDER)


def read(root: str | Path | None, size: int) -> tuple[Photographs, NDArray[np.int64], tuple[str, ...]]:
    """Read the images with their fine and coarse labels.

    Args:
        root: Folder below which to look, see `lightning_fcl.data.datasets.data_root`.
        size: Height and width in pixels.

    Returns:
        The images with their fine labels, their coarse labels, and the names of these.

    Raises:
        FileNotFoundError: If the folder, or one of its files, is not there.
        ValueError: If a file is damaged; the message names the file.

    Example:
        >>> read(None, 32)[2][0]  # doctest: +SKIP
        'aquatic_mammals'
    """
    folder = _find(data_root(root))
    meta = _opened(folder / "meta", ("fine_label_names", "coarse_label_names"))
    fine, coarse = (_names(meta, f"{kind}_label_names", folder / "meta") for kind in ("fine", "coarse"))
    pixels, labels, superclasses = [], [], []
    for part in ("train", "test"):
        path = folder / part
        content = _opened(path, ("data", "fine_labels", "coarse_labels"))
        pixels.append(_pixels(content["data"], path))
        labels.append(_labels(content, "fine_labels", len(pixels[-1]), len(fine), path))
        superclasses.append(_labels(content, "coarse_labels", len(pixels[-1]), len(coarse), path))
    number = [len(part) for part in pixels]
    images = (image.transpose(1, 2, 0) for part in pixels for image in part)
    photographs = Photographs(
        pixels=np.concatenate(pixels) if size == _SHAPE[1] else stacked(images, sum(number), size),
        y=np.concatenate(labels),
        test=np.repeat([False, True], number),
        classes=fine,
    )
    return photographs, np.concatenate(superclasses), coarse


def _folder(root: Path) -> Path | None:
    for folder in (root / "cifar100" / _FOLDER, root / _FOLDER, root / "cifar100", root):
        if (folder / "meta").is_file() or (folder / "train").is_file():
            return folder
    return None


def _find(root: Path) -> Path:
    folder = _folder(root)
    if folder is None:
        raise FileNotFoundError(
            f"Expected CIFAR-100 below `root` but found nothing in {root}. Run `lightning-fcl data fetch cifar100`, or "
            f"point LIGHTNING_FCL_DATA at the folder that holds `{_FOLDER}` with its files `train`, `test` and `meta`."
        )
    return folder


def _opened(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"Expected the file {path} but it is missing. {_REMEDY}")
    content = read_pickle(path)
    for key in keys:
        if not isinstance(content, dict) or key not in content:
            raise ValueError(f"Expected {path} to hold {key!r} but it does not. {_REMEDY}")
    return dict(content)


def _pixels(data: Any, path: Path) -> NDArray[np.uint8]:
    """Images: a row of the file holds all of red, then green, then blue."""
    size = int(np.prod(_SHAPE))
    dtype: Any = getattr(data, "dtype", type(data).__name__)
    shape: tuple[int, ...] = getattr(data, "shape", ())
    if dtype != np.uint8 or len(shape) != 2 or not shape[0] or shape[1] != size:
        raise ValueError(
            f"Expected `data` of {path} to hold rows of {size} uint8 values but got {dtype} of shape {shape}. {_REMEDY}"
        )
    pixels: NDArray[np.uint8] = data.reshape(-1, *_SHAPE)
    return pixels


def _labels(content: Mapping[str, Any], key: str, number: int, classes: int, path: Path) -> NDArray[np.int64]:
    found = content[key]
    if not isinstance(found, list) or len(found) != number or not all(type(label) is int for label in found):
        raise ValueError(
            f"Expected `{key}` of {path} to be a list of {number} whole numbers, one for each image, but it is not. "
            f"{_REMEDY}"
        )
    return require_labels(np.array(found), classes, key, path, _REMEDY)


def _names(content: Mapping[str, Any], key: str, path: Path) -> tuple[str, ...]:
    found = content[key]
    if not isinstance(found, list) or not found or not all(isinstance(name, str) for name in found):
        raise ValueError(f"Expected `{key}` of {path} to be a list of names but it is not. {_REMEDY}")
    return tuple(found)
