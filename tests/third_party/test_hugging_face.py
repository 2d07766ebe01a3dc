"""Tests of Hugging Face data sets: `Dataset` as data, `DatasetDict` as splits, and class names from `ClassLabel`."""

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_fcl import Classifier, FederatedStream
from lightning_fcl.callbacks import ContinualMetrics
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental, Stationary
from lightning_fcl.models import MLP

NAMES = ("cat", "dog", "emu")


def table(samples, seed=0, labels=None):
    import datasets

    rng = np.random.default_rng(seed)
    y = np.arange(samples) % 3
    x = rng.normal(size=(samples, 4)).astype("float32") + 2 * np.eye(3, 4)[y]
    kind = datasets.Value("string") if labels else datasets.ClassLabel(names=list(NAMES))
    features = datasets.Features({"x": datasets.List(datasets.Value("float32")), "label": kind})
    return datasets.Dataset.from_dict({"x": x.tolist(), "label": [labels[i] for i in y] if labels else y}, features)


def as_pairs(items):
    return [torch.tensor([item["x"] for item in items]), torch.tensor([item["label"] for item in items])]


def test_hugging_face_dataset_equals_tensor_dataset(federated):
    data, states, records = table(60), [], []
    columns = TensorDataset(torch.tensor(data["x"][:]), torch.tensor(data["label"][:]))
    for given, options in ((data, {"collate_fn": as_pairs}), (columns, {})):
        stream, metrics = FederatedStream(given, ClassIncremental(3), IID(3), seed=0, **options), ContinualMetrics()
        torch.manual_seed(0)
        task = Classifier(MLP([4, 8, 3]), 3, lambda params: torch.optim.SGD(params, lr=0.1))
        federated(task, stream, callbacks=[metrics])
        states.append(task.state_dict())
        records.append([one["correct"] for one in metrics.record["rounds"]])
        assert stream.classes == (NAMES if given is data else ("0", "1", "2"))
    torch.testing.assert_close(*states, rtol=1e-5, atol=1e-6)
    assert records[0] == records[1]


def test_dataset_dict_defines_splits():
    import datasets

    data = datasets.DatasetDict({"train": table(60), "validation": table(12, 1), "test": table(30, 2)})
    stream = FederatedStream(data, ClassIncremental(3), IID(3))
    stream.setup("fit")
    assert [len(stream.plan.validation), len(stream.plan.test)] == [12, 30] and stream.classes == NAMES
    clients = FederatedStream({"a": data, "b": datasets.DatasetDict({"train": table(9)})}, Stationary())
    clients.setup("fit")
    assert clients.plan.clients == ("a", "b") and len(clients.plan.test) == 30


@pytest.mark.parametrize("form", [lambda data: data.with_format("torch"), lambda data: data.with_transform(tensors)])
def test_formats_and_transforms_are_applied(form):
    stream = FederatedStream(form(table(12)), ClassIncremental(3), IID(2), seed=0)
    stream.setup("fit")
    batch = stream.get_samples(np.arange(3))
    assert batch["x"].shape == (3, 4) and batch["label"].tolist() == [0, 1, 2] and stream.classes == NAMES


def tensors(batch):
    return {**batch, "x": [torch.tensor(row) for row in batch["x"]]}


def test_string_labels_become_class_indices():
    stream = FederatedStream(table(12, labels=["yes", "no", "maybe"]), ClassIncremental(3), IID(2), collate_fn=as_pairs)
    stream.setup("fit")
    assert stream.classes == ("maybe", "no", "yes") and stream.get_samples(np.arange(3))[1].tolist() == [2, 1, 0]


def test_iterable_dataset_raises_type_error():
    with pytest.raises(TypeError, match="map-style dataset for `data`, but got an object of type IterableDataset"):
        FederatedStream(table(12).to_iterable_dataset(), Stationary()).setup("fit")
