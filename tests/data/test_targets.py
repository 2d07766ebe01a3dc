"""Tests that targets come from the items of a dataset: labels become class numbers, other targets stay unchanged."""

from typing import NamedTuple

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from raising import raises
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from lightning_fcl import FederatedStream
from lightning_fcl.data.datasets import ArrayDataset
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.errors import InvalidValueError

X, Y = torch.arange(64.0)[:, None], torch.arange(64) % 4


def stream_of(data, **kwargs):
    stream = FederatedStream(data, **{"scenario": ClassIncremental(1), "partition": IID(1), "seed": 0, **kwargs})
    stream.setup("fit")
    return stream


class Two(L.LightningDataModule):
    """Data module with the first fifty samples for training and the remaining samples for testing."""

    def __init__(self, data):
        super().__init__()
        self.data = data

    def train_dataloader(self):
        return DataLoader(Subset(self.data, range(50)), batch_size=8)

    def test_dataloader(self):
        return DataLoader(Subset(self.data, range(50, 64)), batch_size=8)


@pytest.mark.may("Whole-number targets with a floating-point dtype", "The targets are not treated as classes.")
@pytest.mark.parametrize("kind", [lambda data: data, Two])
def test_whole_floating_targets_are_not_classes(kind):
    stream = stream_of(kind(TensorDataset(X, 15.0 + 5 * Y)))
    assert torch.equal(stream.get_samples(np.arange(64))[1], 15.0 + 5 * Y)
    assert stream.classes == () and stream.num_classes == 0 and len(stream.y) == 0


@pytest.mark.may(
    "`classes=[...]` or `classes=()`",
    "The stream uses these class names. With `()`, targets are not treated as classes.",
)
@pytest.mark.parametrize("kind", [lambda data: data, Two])
def test_classes_can_be_named_or_empty(kind):
    data = kind(TensorDataset(X, Y))
    assert stream_of(data).classes == ("0", "1", "2", "3")
    assert stream_of(data, classes=()).classes == stream_of(data, classes=[]).classes == ()
    assert torch.equal(stream_of(data, classes=()).get_samples(np.arange(64))[1], Y)
    assert stream_of(data, classes=["a", "b", "c", "d"]).classes == ("a", "b", "c", "d")


def test_classes_for_data_with_class_names_raise():
    with raises(InvalidValueError, "classes"):
        stream_of(ArrayDataset(X.numpy(), Y.numpy(), None, tuple("abcd")), classes=["a"])


class Named(NamedTuple):
    """A batch whose parts have names."""

    first: tuple
    second: tuple
    third: tuple


class ListOf(list, Dataset):
    """A list that is also a dataset."""


class Told(Dataset):
    """A dataset whose attribute `targets` may differ from the labels of the items. It counts reads."""

    def __init__(self, labels, told):
        self.labels, self.targets, self.read = labels, told, 0

    def __getitem__(self, index):
        self.read += 1
        return X[index % 64], self.labels[index]

    def __len__(self):
        return len(self.labels)


class Merged(Subset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x, y // 2

    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.may(
    "Datasets with a `.targets` attribute", "Labels come from the items of the dataset, not from `.targets`."
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_labels_come_from_items(wrapped):
    labels = (10 + Y * 2).tolist()
    # A `target_transform` can make labels that differ from `targets`.
    data = Told(labels, Y.tolist())
    if wrapped:
        data, labels = Merged(data, range(64)), [label // 2 for label in labels]
    stream = stream_of(data)
    stream.setup("fit")
    names = sorted(set(labels))
    assert stream.classes == tuple(map(str, names)) and [names[c] for c in stream.y] == labels
    x, y = stream.get_samples(torch.arange(64).numpy())
    assert torch.equal(x, X) and [names[c] for c in y] == labels


def test_declared_targets_are_compared_with_some_items():
    labels = [10 * (index % 4) for index in range(1000)]
    data = Told(labels, labels)
    stream = stream_of(data)
    stream.setup("fit")
    assert data.read < 110 and stream.classes == ("0", "10", "20", "30")
    data.labels = [*labels[:5], 30, *labels[6:]]
    # The labels come from the items, not from the declared `targets`.
    assert stream.get_samples(torch.arange(8).numpy())[1].tolist() == [0, 1, 2, 3, 0, 3, 2, 3]
    data.labels = [7] * 1000
    with raises(InvalidValueError, "y", value=7):
        stream.get_samples(torch.tensor([3]).numpy())


@pytest.mark.parametrize("second", [None, (torch.ones(2), None)])
def test_items_without_target_need_no_classes(second):
    items = ListOf([(torch.ones(3), second, 1.0)] * 6)
    stream = stream_of(items, collate_fn=lambda batch: Named(*zip(*batch, strict=True)))
    assert stream.classes == ()
    batch = stream.get_samples(np.arange(2))
    assert isinstance(batch, Named) and batch.second == (second, second)
