"""Tests that FC100 contains the images of CIFAR-100, with the classes in the order of TADAM's split."""

import numpy as np

from lightning_fcl.data.datasets import cifar as cifar_module
from lightning_fcl.data.datasets.readers import SOURCES

# Numbers of the superclasses for training, validation and test, in this order, from the code of TADAM's authors.
SPLIT = (1, 2, 3, 4, 5, 6, 9, 10, 15, 17, 18, 19, *(8, 11, 13, 16), *(0, 7, 12, 14))


def test_fc100_superclasses_equal_authors_split(cifar):
    names = list(cifar.superclasses)
    assert tuple(names.index(name) for name in cifar_module.SUPERCLASSES) == SPLIT


def test_load_fc100_orders_classes_by_superclass(tmp_path, cifar, put):
    cifar.put(tmp_path / "cifar100" / "cifar-100-python", cifar.contents)
    data, original = cifar_module.load_fc100(tmp_path), cifar_module.load_cifar100(tmp_path)
    order = [label for number in SPLIT for label in list(cifar.superclasses.values())[number]]
    assert data.classes == tuple(f"class {label}" for label in order) and len(set(data.classes)) == 100
    np.testing.assert_array_equal(data.x, original.x)
    assert [data.classes[label] for label in data.y] == [original.classes[label] for label in original.y]
    assert data.official_test.tolist() == original.official_test.tolist()
    np.testing.assert_array_equal(data.samples(), original.samples())


def test_fc100_source_finds_and_downloads_cifar100(tmp_path, cifar, put):
    folder = cifar.put(tmp_path / "cifar-100-python", cifar.contents)
    assert (
        SOURCES["fc100"].find(tmp_path) == SOURCES["cifar100"].find(tmp_path)
        and SOURCES["fc100"].download(tmp_path) == folder
    )
