"""FC100 (Fewshot-CIFAR100): CIFAR-100 with its classes split by superclass, so that the parts have little in common.

Oreshkin et al. 2018, "TADAM: task dependent adaptive metric for improved few-shot learning", NeurIPS: 12 superclasses
to train on, 4 for validation, 4 for tests. The images are those of CIFAR-100, whose own files are read.
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets import Arrays, Description, cifar100
from lightning_fcl.data.datasets.photographs import Normalize, require_options

__all__ = ["DESCRIPTION", "SUPERCLASSES", "fetch", "load", "locate"]

DESCRIPTION = Description(
    name="fc100",
    content="CIFAR-100's 60000 photographs, 32 x 32, its 100 classes in the order of TADAM's split of 20 superclasses",
    licence="none stated; the authors ask for citation",
    citation="Oreshkin et al.: TADAM: task dependent adaptive metric for improved few-shot learning. NeurIPS 2018",
    url=cifar100.URL,
    size="169 MB, CIFAR-100's",
)

# The split of the authors' code, which names superclasses by their number: 1, 2, 3, 4, 5, 6, 9, 10, 15, 17, 18, 19;
# 8, 11, 13, 16; 0, 7, 12, 14.
SUPERCLASSES = {
    "train": (
        "fish",
        "flowers",
        "food_containers",
        "fruit_and_vegetables",
        "household_electrical_devices",
        "household_furniture",
        "large_man-made_outdoor_things",
        "large_natural_outdoor_scenes",
        "reptiles",
        "trees",
        "vehicles_1",
        "vehicles_2",
    ),
    "validation": (
        "large_carnivores",
        "large_omnivores_and_herbivores",
        "non-insect_invertebrates",
        "small_mammals",
    ),
    "test": ("aquatic_mammals", "insects", "medium_mammals", "people"),
}


def load(
    root: str | Path | None = None,
    size: int = 32,
    normalize: Normalize = "imagenet",
    part: Literal["all", "train", "validation", "test"] = "all",
) -> Arrays:
    """Load CIFAR-100's images with the classes in the order of the split: superclass after superclass.

    The split is one of classes, for learning to learn. For a continual stream over all 100 classes, as that of Zuo et
    al. 2024, take ``part="all"``: each class has CIFAR-100's own training and test images. Consecutive blocks of ten
    classes are then two superclasses each.

    Args:
        root: Folder below which to look, see `lightning_fcl.data.datasets.data_root`.
        size: See `lightning_fcl.data.datasets.cifar100.load`.
        normalize: See `lightning_fcl.data.datasets.cifar100.load`.
        part: ``"all"`` classes, or those of one part: 60 to ``"train"``, 20 for ``"validation"``, 20 to ``"test"``.

    Returns:
        `x` of shape (n, 3, size, size), pixels with their mean and deviation; `classes` superclass by superclass;
        `official_test` that of CIFAR-100. The complete set has n = 60000.

    Raises:
        FileNotFoundError: If CIFAR-100's folder, or one of its files, is not there.
        ValueError: If an argument is unknown or out of range, or if a file is damaged; the message names the file.

    Example:
        >>> load("a/folder/that/is/missing")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        FileNotFoundError: Expected CIFAR-100 below `root` but found nothing in a/folder/that/is/missing. ...
    """
    require_options(size, normalize)
    if part not in ("all", *SUPERCLASSES):
        raise ValueError(
            f"Expected `part` to be 'all', 'train', 'validation' or 'test' but got {part!r}. Choose one of these."
        )
    photographs, coarse, names = cifar100.read(root, size)
    wanted = [name for key, group in SUPERCLASSES.items() if part in ("all", key) for name in group]
    order = _order(photographs.y, coarse, names, wanted, cifar100.locate(root))
    place = np.full(len(photographs.classes), -1)
    place[order] = np.arange(len(order))
    y = place[photographs.y]
    assert photographs.test is not None
    kept = slice(None) if part == "all" else y >= 0
    chosen = replace(
        photographs,
        pixels=photographs.pixels[kept],
        y=y[kept],
        test=photographs.test[kept],
        classes=tuple(photographs.classes[label] for label in order),
    )
    return chosen.arrays(normalize)


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
    return cifar100.locate(root)


def fetch(root: str | Path | None = None) -> Path:
    """Download CIFAR-100, see `lightning_fcl.data.datasets.cifar100.fetch`.

    Args:
        root: Folder of the data sets, see `lightning_fcl.data.datasets.data_root`.

    Returns:
        The folder that `load` will read.

    Raises:
        ConnectionError: If the download fails.
        ValueError: If what came is not the published file, which is deleted then.
        OSError: If it cannot be unpacked.

    Example:
        >>> fetch()  # doctest: +SKIP
        PosixPath('~/.cache/lightning-fcl/data/cifar100/cifar-100-python')
    """
    return cifar100.fetch(root)


def _order(
    y: NDArray[np.int64], coarse: NDArray[np.int64], names: tuple[str, ...], wanted: list[str], where: str
) -> list[int]:
    """The fine labels of some superclasses, superclass by superclass."""
    order: list[int] = []
    for name in wanted:
        own = np.unique(y[coarse == names.index(name)]).tolist() if name in names else []
        if not own or set(own) & set(order):
            raise ValueError(
                f"Expected each superclass of CIFAR-100 to have classes of its own but {name!r} has not, in {where}. "
                "Delete this copy and run `lightning-fcl data fetch cifar100`."
            )
        order += own
    return order
