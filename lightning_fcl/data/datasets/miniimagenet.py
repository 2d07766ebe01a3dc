"""MiniImageNet: photographs of 100 classes of ImageNet, 600 of each.

Vinyals et al. 2016, "Matching networks for one shot learning", NeurIPS, with the classes and images of Ravi and
Larochelle 2017, "Optimization as a model for few-shot learning", ICLR. Their layout is read: ``train.csv``, ``val.csv``
and ``test.csv``, which name the images of 64, 16 and 20 classes, and these in ``images``, of any size.
"""

import re
from pathlib import Path
from typing import Literal

import numpy as np

from lightning_fcl.data.datasets.arrays import Arrays
from lightning_fcl.data.datasets.files import read_lines
from lightning_fcl.data.datasets.images import Scale, check_photographs, photographs, read_image, stacked
from lightning_fcl.errors import one_of
from lightning_fcl.evaluation.inside import inside
from lightning_fcl.hub.source import Layout, Source

_FILES = {"train": "train.csv", "validation": "val.csv", "test": "test.csv"}

SOURCE = Source(
    name="miniimagenet",
    title="MiniImageNet",
    content="60000 photographs of 100 classes, 32 x 32 (the originals 84 x 84, or ImageNet's own sizes); 600 of each",
    licence="non-commercial research and education, ImageNet's terms",
    citation="Vinyals et al.: Matching networks for one shot learning. NeurIPS 2016",
    url="https://github.com/yaoyao-liu/mini-imagenet-tools",
    size="about 3 GB",
    # ImageNet's terms must be agreed to.
    by_hand="Get images and lists as {url} says and put them in {root}/miniimagenet, so that "
    "{root}/miniimagenet/train.csv, `val.csv`, `test.csv` and {root}/miniimagenet/images/n0153282900000005.jpg are "
    "there",
    layouts=(
        Layout(
            "lists and images",
            ("miniimagenet", "mini-imagenet", "mini_imagenet", "miniImagenet", "."),
            signs=("images/", "|".join(_FILES.values())),
        ),
    ),
    holds="`miniimagenet`",
)

_REMEDY = "Delete this copy and get the files again."


def load(
    root: str | Path | None = None,
    size: int = 32,
    normalize: Scale = "imagenet",
    part: Literal["all", "train", "validation", "test"] = "all",
) -> Arrays:
    """Load the images of all classes, or of a part of these.

    The parts have no class in common: they are for learning to learn, and no test set of the same classes is official.
    A continual stream over all 100 classes, as that of Zuo et al. 2024 with 500 training and 100 test images of each,
    takes ``part="all"`` and sets a sixth aside: ``FederatedStream("miniimagenet", test=1 / 6)``.

    Args:
        root: Folder below which to look, see `lightning_fcl.data.datasets.data_root`.
        size: Height and width in pixels; each image is resized to it by Pillow's antialiased bicubic filter, whatever
            its aspect ratio.
        normalize: See `lightning_fcl.data.datasets.images.photographs`.
        part: ``"all"`` classes, or those of one file: 64 to ``"train"``, 16 for ``"validation"``, 20 to ``"test"``.

    Returns:
        `x` of shape (n, 3, size, size), pixels with their mean and deviation; `classes` WordNet ids, in their order, as
        the layout has no names. The complete set has n = 60000.

    Raises:
        FileNotFoundError: If no layout is found, or a file of it is missing.
        ValueError: If an argument is unknown or out of range, or if a file is damaged; the message names the file.

    Example:
        >>> load("a/folder/that/is/missing")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        FileNotFoundError: Expected MiniImageNet below `root` but found nothing in a/folder/that/is/missing. ...
    """
    check_photographs(size, normalize)
    one_of(("all", *_FILES), part=part)
    folder = SOURCE.find(root)[1]
    rows = [row for key, name in _FILES.items() if part in ("all", key) for row in _listed(folder / name)]
    classes, y = np.unique([wnid for _, wnid in rows], return_inverse=True)
    images = (read_image(inside(folder / "images", name), "JPEG", "RGB") for name, _ in rows)
    return photographs(stacked(images, len(rows), size), y, classes.tolist(), normalize)


def _listed(path: Path) -> list[tuple[str, str]]:
    """The images that a list names and their classes; its first line is the heading."""
    heading, *rest = read_lines(path, _REMEDY)
    if heading.split(",") != ["filename", "label"] or not rest:
        raise ValueError(
            f"Expected {path} to begin with the line `filename,label` and to name images but got {heading[:60]!r} and "
            f"{len(rest)} more lines. {_REMEDY}"
        )
    rows = []
    for number, line in enumerate(rest, start=2):
        name, _, wnid = line.partition(",")
        if not re.fullmatch(r"n\d{8}", wnid) or not re.fullmatch(r"[\w-]+\.jpe?g", name, re.IGNORECASE):
            raise ValueError(
                f"Expected line {number} of {path} to name an image and its class, as in "
                f"`n0153282900000005.jpg,n01532829`, but got {line[:60]!r}. {_REMEDY}"
            )
        rows.append((name, wnid))
    return rows
