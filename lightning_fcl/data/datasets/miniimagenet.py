"""MiniImageNet: photographs of 100 classes of ImageNet, 600 of each.

Vinyals et al. 2016, "Matching networks for one shot learning", NeurIPS, with the classes and images of Ravi and
Larochelle 2017, "Optimization as a model for few-shot learning", ICLR. Four layouts are read, in this order:
``new_train.csv`` and ``new_val.csv`` of Zuo et al. 2024, which name 480 and 120 images of each class, those to train
and to test on; Ravi and Larochelle's ``train.csv``, ``val.csv`` and ``test.csv``, which name the images of 64, 16 and
20 classes; both with the images, of any size, in ``images``; a folder of images for each class; and
``miniimagenet64/images.npz``, all images at 64 x 64, with the 480 and 120.
"""

import importlib.util
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets import SOURCES
from lightning_fcl.data.datasets.arrays import Arrays
from lightning_fcl.data.datasets.files import in_range, read_lines, read_npz
from lightning_fcl.data.datasets.images import Scale, photographs, read_image, resize_all_once
from lightning_fcl.data.datasets.tinyimagenet import first_names, read_words
from lightning_fcl.errors import at_least
from lightning_fcl.evaluation.inside import inside
from lightning_fcl.hub.reading import ensure, reading

_LISTS = ("train.csv", "val.csv", "test.csv")
_NEW = ("new_train.csv", "new_val.csv")

SOURCE = SOURCES["miniimagenet"]

_REMEDY = "Delete this copy and get the files again."


def load(root: str | Path | None = None, size: int = 32, normalize: Scale = "imagenet") -> Arrays:
    """Load the images of all classes, which are in the order of their WordNet ids.

    ``size`` is height and width in pixels; each image is resized to it, whatever its aspect ratio, once: after that the
    pixels lie in the user's cache. See `lightning_fcl.data.datasets.images.photographs`. Where the layout tells the 480
    training and 120 test images of each class of Zuo et al. 2024, these are the official test set.
    """
    at_least(1, size=size)
    layout, place = SOURCE.find(root)
    test = None
    if layout == "npz file":
        files, (wnids, test, images) = [place], _from_npz(place)
    else:
        if layout == "new lists and images":
            train, tests = (_listed(place / name) for name in _NEW)
            rows, test = [*train, *tests], np.repeat([False, True], [len(train), len(tests)])
        elif layout == "lists and images":
            rows = [row for name in _LISTS for row in _listed(place / name)]
        else:  # for each class one, perhaps below those of the parts
            found = sorted([*place.glob("n*/*.*"), *place.glob("*/n*/*.*")])
            own = [path for path in found if re.fullmatch(r"n\d{8}", path.parent.name)]
            rows = [(path, path.parent.name) for path in own if path.suffix.lower() in (".jpg", ".jpeg")]
        files, wnids = [path for path, _ in rows], [wnid for _, wnid in rows]
        images = (read_image(path, "JPEG", "RGB") for path in files)
    pixels = resize_all_once(files, images, wnids, size)
    ids = sorted({*wnids})
    number = {wnid: i for i, wnid in enumerate(ids)}
    y = np.array([number[wnid] for wnid in wnids])
    timm = importlib.util.find_spec("timm")  # has a list of ImageNet's names; to import it would take seconds
    words = {}
    if timm and timm.origin:
        words = read_words(Path(timm.origin).parent / "data" / "_info" / "imagenet_synset_to_lemma.txt")
    return photographs(pixels, y, first_names(ids, words), normalize, test)


def _from_npz(path: Path) -> tuple[list[str], NDArray[np.bool_], Iterator[NDArray[np.uint8]]]:
    """The classes of the images, which are tests, and the images themselves."""
    wanted: dict[str, tuple[str, tuple[int | str, ...]]] = {
        "webp": ("pixels", ("bytes",)),
        "offsets": ("iu", ("bounds",)),
        "y": ("iu", ("images",)),
        "train": ("biu", ("images",)),
        "files": ("U", ("images",)),
        "wnids": ("U", ("classes",)),
    }
    arrays = read_npz(path, wanted, _REMEDY)
    webp, offsets, wnids = arrays["webp"], arrays["offsets"].astype(np.int64), arrays["wnids"]
    bounds = [0, *offsets[1:-1].tolist(), len(webp)]
    if offsets.tolist() != bounds or len(bounds) != len(arrays["y"]) + 1 or (np.diff(offsets) < 0).any():
        raise ValueError(
            f"Expected `offsets` of {path} to cut the {len(webp)} bytes of `webp` into {len(arrays['y'])} images but "
            f"got {len(offsets)} bounds from {bounds[0]} to {offsets[-1]}. {_REMEDY}"
        )
    label, files = in_range(arrays["y"], len(wnids) - 1, f"`y` of {path}", _REMEDY), arrays["files"]
    images = (
        read_image(path / f"{name}.webp", "WEBP", "RGB", content=webp[first:last].tobytes())
        for name, (first, last) in zip(files, itertools.pairwise(offsets), strict=True)
    )
    return wnids[label].tolist(), ~arrays["train"].astype(bool), images


def _listed(path: Path) -> list[tuple[Path, str]]:
    """The images that a list names, and their classes; its first line is the heading."""
    heading, *rest = read_lines(path, _REMEDY)
    rows = [line.partition(",")[::2] for line in rest]
    with reading(
        path, "to begin with `filename,label`, and to have lines as `n0153282900000005.jpg,n01532829`,", _REMEDY
    ):
        ensure(heading == "filename,label" and rest, f"{heading[:60]!r} and {len(rest)} more lines")
        for name, wnid in rows:
            fits = re.fullmatch(r"n\d{8}", wnid) and re.fullmatch(r"[\w-]+\.jpe?g", name, re.IGNORECASE)
            ensure(fits, repr(f"{name},{wnid}"[:60]))
    return [(inside(path.parent / "images", name), wnid) for name, wnid in rows]
