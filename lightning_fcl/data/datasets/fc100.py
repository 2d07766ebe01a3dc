"""FC100 (Fewshot-CIFAR100): CIFAR-100 with its classes split by superclass, so that the parts have little in common.

Oreshkin et al. 2018, "TADAM: task dependent adaptive metric for improved few-shot learning", NeurIPS: 12 superclasses
to train on, 4 for validation, 4 for tests. The images are those of CIFAR-100, whose own files are read.
"""

from pathlib import Path

import numpy as np

from lightning_fcl.data.datasets import SOURCES, cifar100
from lightning_fcl.data.datasets.arrays import Arrays
from lightning_fcl.data.datasets.images import Scale, photographs
from lightning_fcl.errors import at_least

SOURCE = SOURCES["fc100"]

# The split of the authors' code, which names superclasses by their number: 1, 2, 3, 4, 5, 6, 9, 10, 15, 17, 18, 19 to
# train on; 8, 11, 13, 16 for validation; 0, 7, 12, 14 for tests.
SUPERCLASSES = (
    *("fish", "flowers", "food_containers", "fruit_and_vegetables", "household_electrical_devices"),
    *("household_furniture", "large_man-made_outdoor_things", "large_natural_outdoor_scenes", "reptiles", "trees"),
    *("vehicles_1", "vehicles_2"),
    *("large_carnivores", "large_omnivores_and_herbivores", "non-insect_invertebrates", "small_mammals"),
    *("aquatic_mammals", "insects", "medium_mammals", "people"),
)


def load(root: str | Path | None = None, size: int = 32, normalize: Scale = "imagenet") -> Arrays:
    """Load CIFAR-100's images with the classes in the order of the split: superclass after superclass.

    The split is one of classes, for learning to learn. Here each class has CIFAR-100's own training and test images,
    as in the continual stream over all 100 classes of Zuo et al. 2024: consecutive blocks of ten classes are two
    superclasses each. ``size`` and ``normalize`` are those of `lightning_fcl.data.datasets.cifar100.load`.
    """
    at_least(1, size=size)
    pixels, labels, names, test = cifar100.read_images(SOURCE.find(root)[1], size)
    coarse = [names["coarse"].index(name) for name in SUPERCLASSES]
    order = [label for number in coarse for label in np.unique(labels["fine"][labels["coarse"] == number]).tolist()]
    classes = [names["fine"][label] for label in order]
    return photographs(pixels, np.argsort(order)[labels["fine"]], classes, normalize, test)
