"""CIFAR-100: photographs of 100 classes in 20 superclasses, 32 x 32 pixels.

Krizhevsky 2009, "Learning multiple layers of features from tiny images", University of Toronto. The original folder
``cifar-100-python`` is read, with its pickles ``train``, ``test`` and ``meta``: by a reader that calls nothing that
they name.
"""

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets import SOURCES
from lightning_fcl.data.datasets.arrays import Arrays
from lightning_fcl.data.datasets.files import pickled_array, read_pickle
from lightning_fcl.data.datasets.images import Scale, photographs, resize_all
from lightning_fcl.errors import at_least
from lightning_fcl.hub.reading import ensure, reading

SOURCE = SOURCES["cifar100"]

# As torchvision publishes them in torchvision/datasets/cifar.py.
MD5 = {
    "meta": "7973b15100ade9c7d40fb424638fde48",
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
}


def load(root: str | Path | None = None, size: int = 32, normalize: Scale = "imagenet") -> Arrays:
    """Load all images: the training set, then the publishers' test set.

    ``size`` is height and width in pixels; see `lightning_fcl.data.datasets.images.photographs`. The complete set has
    60000 images, shape (n, 3, size, size).
    """
    at_least(1, size=size)
    pixels, labels, names, test = read_images(SOURCE.find(root)[1], size)
    return photographs(pixels, labels["fine"], names["fine"], normalize, test)


def read_images(
    folder: Path, size: int
) -> tuple[NDArray[np.uint8], dict[str, NDArray[np.int64]], dict[str, tuple[str, ...]], NDArray[np.bool_]]:
    """The images; their fine and coarse labels; the names of these; and which are tests."""
    contents = []
    for name, digest in MD5.items():
        path = folder / name
        with reading(path, "to be the published file", SOURCE.remedy), path.open("rb") as file:
            found = hashlib.file_digest(file, "md5").hexdigest()
            ensure(found == digest, f"one of MD5 {found}")
        contents.append(read_pickle(path, SOURCE.remedy))
    meta, *parts = contents
    # A row of the file holds all of red, then green, then blue.
    pixels = np.concatenate([pickled_array(part["data"]).reshape(-1, 3, 32, 32) for part in parts])
    labels = {kind: np.concatenate([part[f"{kind}_labels"] for part in parts]) for kind in ("fine", "coarse")}
    names = {kind: tuple(meta[f"{kind}_label_names"]) for kind in ("fine", "coarse")}
    test = np.repeat([False, True], [len(part["fine_labels"]) for part in parts])
    if size != 32:
        pixels = resize_all((image.transpose(1, 2, 0) for image in pixels), len(pixels), size)
    return pixels, labels, names, test
