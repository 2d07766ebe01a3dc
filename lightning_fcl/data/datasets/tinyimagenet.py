"""TinyImageNet: photographs of 200 classes of ImageNet, 64 x 64 pixels.

Le and Yang 2015, "Tiny ImageNet visual recognition challenge", Stanford CS 231N. Two layouts are read, in this order:
the original folder ``tiny-imagenet-200``, whose test set has no labels, so that the publishers' validation set stands
for it; and ``tinyimagenet32/100classes.npz``, 100 of the classes at 32 x 32 with 120 training images each.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets import SOURCES
from lightning_fcl.data.datasets.arrays import Arrays
from lightning_fcl.data.datasets.files import in_range, numbered_paths, read_lines, read_npz
from lightning_fcl.data.datasets.images import Scale, photographs, read_image, resize_all
from lightning_fcl.errors import at_least
from lightning_fcl.evaluation.inside import inside
from lightning_fcl.hub.reading import reading

SOURCE = SOURCES["tinyimagenet"]

# Pixels, labels, which of them are tests, and the names of the labels.
_Photographs = tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.bool_], tuple[str, ...]]


def load(root: str | Path | None = None, size: int = 32, normalize: Scale = "imagenet") -> Arrays:
    """Load all images that have labels: the training images class by class, then the publishers' validation set.

    ``size`` is height and width in pixels; see `lightning_fcl.data.datasets.images.photographs`. The classes are in
    the order of their WordNet ids. The complete set has 110000 images, shape (n, 3, size, size), the npz file 17000.
    """
    at_least(1, size=size)
    layout, path = SOURCE.find(root)
    pixels, y, test, classes = (_from_npz if layout == "npz file" else _from_folder)(path, size)
    return photographs(pixels, y, classes, normalize, test)


def _from_folder(folder: Path, size: int) -> _Photographs:
    wnids = sorted(set(read_lines(folder / "wnids.txt", SOURCE.remedy)))
    folders = [inside(folder / "train", wnid, "images") for wnid in wnids]
    train = [numbered_paths(one, r"n\d+_(\d+)\.JPEG") for one in folders]
    most = max(len(images) for images in train)
    for one, images in zip(folders, train, strict=True):
        if not images or len(images) < most:
            raise ValueError(
                f"Expected {one} to hold {most or 500} images, as the other classes do, but got {len(images)}: the "
                f"archive is not wholly unpacked. {SOURCE.remedy}"
            )
    path = folder / "val" / "val_annotations.txt"
    lines = read_lines(path, SOURCE.remedy)
    with reading(path, "to name images and their classes", SOURCE.remedy):
        rows = [line.split("\t") for line in lines]  # file, class, and the object's box
        test = [inside(folder / "val" / "images", name) for name, *_ in rows]
        labels = [wnids.index(row[1]) for row in rows]
    paths = [*(path for images in train for path in images), *test]
    pixels = resize_all((read_image(path, "JPEG", "RGB", (64, 64)) for path in paths), len(paths), size)
    y = np.concatenate([np.repeat(np.arange(len(wnids)), most), labels])
    return pixels, y, np.arange(len(paths)) >= most * len(wnids), first_names(wnids, read_words(folder / "words.txt"))


def read_words(path: Path) -> dict[str, str]:
    """Names by WordNet id, of all of WordNet's."""
    parts = (line.partition("\t") for line in read_lines(path, SOURCE.remedy))
    return {wnid: names for wnid, _, names in parts}


def first_names(wnids: Sequence[str], words: Mapping[str, str]) -> tuple[str, ...]:
    """The first name of each class; with its id where another class has the same."""
    first = [words.get(wnid, "").split(",")[0].strip() or wnid for wnid in wnids]
    return tuple(
        name if first.count(name) == 1 else f"{name} ({wnid})" for name, wnid in zip(first, wnids, strict=True)
    )


def _from_npz(path: Path, size: int) -> _Photographs:
    wanted: dict[str, tuple[str, tuple[int | str, ...]]] = {"wnids": ("U", ("classes",)), "names": ("U", ("classes",))}
    for part in ("train", "val"):
        wanted |= {f"X_{part}": ("pixels", (f"{part} images", 32, 32, 3)), f"y_{part}": ("iu", (f"{part} images",))}
    arrays = read_npz(path, wanted, SOURCE.remedy)
    wnids, names = arrays["wnids"].tolist(), arrays["names"].tolist()
    y = np.concatenate([arrays["y_train"], arrays["y_val"]])
    y = in_range(y, len(wnids) - 1, f"labels of {path}", SOURCE.remedy)
    pixels = resize_all((image for part in ("train", "val") for image in arrays[f"X_{part}"]), len(y), size)
    classes = first_names(wnids, dict(zip(wnids, names, strict=True)))
    return pixels, y, np.arange(len(y)) >= len(arrays["y_train"]), classes
