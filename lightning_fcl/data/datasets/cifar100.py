"""CIFAR-100: photographs of 100 classes in 20 superclasses, 32 x 32 pixels.

Krizhevsky 2009, "Learning multiple layers of features from tiny images", University of Toronto. The original folder
``cifar-100-python`` is read, with its pickles ``train``, ``test`` and ``meta``: by a reader that calls nothing that
they name.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets.arrays import Arrays
from lightning_fcl.data.datasets.images import Scale, check_photographs, photographs, stacked
from lightning_fcl.data.datasets.pickles import read_pickle
from lightning_fcl.hub.reading import ensure, reading
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
        size: Height and width in pixels; other sizes than 32 are made by Pillow's antialiased bicubic filter.

    Returns:
        `x` of shape (n, 3, size, size), pixels with their mean and deviation; `classes` the 100 fine ones;
        `official_test`. The complete set has n = 60000.
    """
    check_photographs(size, normalize)
    data = read(SOURCE.find(root)[1], size)[0]
    return photographs(data.x, data.y, data.classes, normalize, data.official_test)


def read(folder: Path, size: int) -> tuple[Arrays, NDArray[np.int64], tuple[str, ...]]:
    """The images with their fine labels, pixels from 0 to 1; their coarse labels; and the names of these."""
    path = folder / "meta"
    meta = read_pickle(path, SOURCE.remedy)
    with reading(path, "to name the classes", SOURCE.remedy):
        fine, coarse = (tuple(meta[f"{kind}_label_names"]) for kind in ("fine", "coarse"))
        ensure(fine and coarse and all(isinstance(name, str) for name in fine + coarse), "no names")
    pixels, labels, superclasses = [], [], []
    for path in (folder / "train", folder / "test"):
        content = read_pickle(path, SOURCE.remedy)
        with reading(path, "to hold images of 32 x 32 and their labels", SOURCE.remedy):
            data = content["data"]
            ensure(data.dtype == np.uint8 and data.shape[1:] == (np.prod(_SHAPE),), f"{data.dtype} of {data.shape}")
            pixels.append(data.reshape(-1, *_SHAPE))  # a row of the file holds all of red, then green, then blue
            labels.append(_labels(content["fine_labels"], len(data), len(fine)))
            superclasses.append(_labels(content["coarse_labels"], len(data), len(coarse)))
    x, test = np.concatenate(pixels), np.repeat([False, True], [len(part) for part in pixels])
    if size != _SHAPE[1]:
        x = stacked((image.transpose(1, 2, 0) for image in x), len(x), size)
    return photographs(x, np.concatenate(labels), fine, "none", test), np.concatenate(superclasses), coarse


def _labels(found: Any, number: int, classes: int) -> NDArray[np.int64]:
    labels: NDArray[np.int64] = np.array(found)
    ensure(labels.dtype.kind == "i" and labels.shape == (number,), f"no {number} whole numbers as labels")
    ensure(labels.min() >= 0 and labels.max() < classes, f"labels beyond 0 to {classes - 1}")
    return labels
