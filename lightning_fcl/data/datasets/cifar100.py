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

from lightning_fcl.data.datasets.arrays import Arrays
from lightning_fcl.data.datasets.files import in_range
from lightning_fcl.data.datasets.images import Scale, check_photographs, photographs, stacked
from lightning_fcl.data.datasets.pickles import read_pickle
from lightning_fcl.hub.source import Layout, Source

SOURCE = Source(
    name="cifar100",
    title="CIFAR-100",
    content="60000 photographs of 100 classes, 32 x 32; 500 of each to train, 100 to test",
    licence="none stated; the author asks for citation",
    citation="Krizhevsky: Learning multiple layers of features from tiny images. University of Toronto, 2009",
    url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
    # Of 169,001,437 bytes. Keras publishes this digest in keras/src/datasets/cifar100.py.
    digest="85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
    size="169 MB",
    archive="cifar100/cifar-100-python.tar.gz",
    folder="cifar-100-python",
    layouts=(
        Layout("pickles", ("cifar100/cifar-100-python", "cifar-100-python", "cifar100", "."), signs=("meta|train",)),
    ),
    holds="`cifar-100-python` with its files `train`, `test` and `meta`",
)

_SHAPE = (3, 32, 32)


def load(root: str | Path | None = None, size: int = 32, normalize: Scale = "imagenet") -> Arrays:
    """Load all images: the training set, then the publishers' test set.

    Args:
        root: Folder below which to look, see `lightning_fcl.data.datasets.data_root`.
        size: Height and width in pixels; other sizes than 32 are made by Pillow's antialiased bicubic filter.
        normalize: See `lightning_fcl.data.datasets.images.photographs`.

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
    check_photographs(size, normalize)
    data = read(SOURCE.find(root)[1], size)[0]
    return photographs(data.x, data.y, data.classes, normalize, data.official_test)


def read(folder: Path, size: int) -> tuple[Arrays, NDArray[np.int64], tuple[str, ...]]:
    """Read the images with their fine and coarse labels.

    Args:
        folder: The folder ``cifar-100-python``.
        size: Height and width in pixels.

    Returns:
        The images with their fine labels, from 0 to 1; their coarse labels; and the names of these.

    Raises:
        FileNotFoundError: If a file is not there.
        ValueError: If a file is damaged; the message names it.

    Example:
        >>> read(Path("cifar-100-python"), 32)[2][0]  # doctest: +SKIP
        'aquatic_mammals'
    """
    meta = _opened(folder / "meta", ("fine_label_names", "coarse_label_names"))
    fine, coarse = (_names(meta, f"{kind}_label_names", folder / "meta") for kind in ("fine", "coarse"))
    pixels, labels, superclasses = [], [], []
    for part in ("train", "test"):
        path = folder / part
        content = _opened(path, ("data", "fine_labels", "coarse_labels"))
        pixels.append(_pixels(content["data"], path))
        labels.append(_labels(content, "fine_labels", len(pixels[-1]), len(fine), path))
        superclasses.append(_labels(content, "coarse_labels", len(pixels[-1]), len(coarse), path))
    x, test = np.concatenate(pixels), np.repeat([False, True], [len(part) for part in pixels])
    if size != _SHAPE[1]:
        x = stacked((image.transpose(1, 2, 0) for image in x), len(x), size)
    return photographs(x, np.concatenate(labels), fine, "none", test), np.concatenate(superclasses), coarse


def _opened(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    content = read_pickle(path, SOURCE.remedy)
    for key in keys:
        if not isinstance(content, dict) or key not in content:
            raise ValueError(f"Expected {path} to hold {key!r} but it does not. {SOURCE.remedy}")
    return dict(content)


def _pixels(data: Any, path: Path) -> NDArray[np.uint8]:
    """Images: a row of the file holds all of red, then green, then blue."""
    size = int(np.prod(_SHAPE))
    dtype: Any = getattr(data, "dtype", type(data).__name__)
    shape: tuple[int, ...] = getattr(data, "shape", ())
    if dtype != np.uint8 or len(shape) != 2 or not shape[0] or shape[1] != size:
        raise ValueError(
            f"Expected `data` of {path} to hold rows of {size} uint8 values but got {dtype} of shape {shape}. "
            f"{SOURCE.remedy}"
        )
    pixels: NDArray[np.uint8] = data.reshape(-1, *_SHAPE)
    return pixels


def _labels(content: Mapping[str, Any], key: str, number: int, classes: int, path: Path) -> NDArray[np.int64]:
    found = content[key]
    if not isinstance(found, list) or len(found) != number or not all(type(label) is int for label in found):
        raise ValueError(
            f"Expected `{key}` of {path} to be a list of {number} whole numbers, one for each image, but it is not. "
            f"{SOURCE.remedy}"
        )
    return in_range(np.array(found), classes - 1, f"`{key}` of {path}", SOURCE.remedy)


def _names(content: Mapping[str, Any], key: str, path: Path) -> tuple[str, ...]:
    found = content[key]
    if not isinstance(found, list) or not found or not all(isinstance(name, str) for name in found):
        raise ValueError(f"Expected `{key}` of {path} to be a list of names but it is not. {SOURCE.remedy}")
    return tuple(found)
