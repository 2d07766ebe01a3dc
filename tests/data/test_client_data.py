"""Tests that sizes, shapes, names and targets of several clients are checked before the first round."""

import re

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from raising import raises
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, TensorDataset

from lightning_fcl import FederatedStream
from lightning_fcl.data.datasets import ArrayDataset
from lightning_fcl.data.partition import IID
from lightning_fcl.data.samples import Samples, load_public
from lightning_fcl.data.scenarios import Stationary
from lightning_fcl.deployment.messages import RejectedMessageError
from lightning_fcl.deployment.node_data import read_data
from lightning_fcl.errors import InvalidValueError, MissingValueError

X, Y = torch.arange(48.0).reshape(12, 4), torch.arange(12) % 2


class Named(Dataset):
    """Dataset whose items are dicts, without declared targets."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"image": self.x[index], "label": self.y[index]}


def of_modules(x, y):
    return L.LightningDataModule.from_datasets(TensorDataset(x, y), batch_size=4)


KINDS = {
    "tensors": TensorDataset,
    "dicts": Named,
    "modules": of_modules,
    "lists": lambda x, y: [*zip(x, y, strict=True)],
}


def set_up(data, **options):
    stream = FederatedStream(data, scenario=Stationary(1), **options)
    stream.setup("fit")
    return stream


def rejected(data, argument, kind=InvalidValueError, **options):
    with raises(kind, argument):
        set_up(data, **options)


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_client_data_different_shapes_raises(make):
    rejected({"a": make(X, Y), "b": make(torch.ones(12, 5), Y)}, "data")
    rejected({"a": make(X, Y), "b": make(X + 1, Y[:, None])}, "data")


def test_client_data_different_shapes_with_collate_fn_works():
    def pad(items):
        return [pad_sequence([x for x, _ in items], batch_first=True), torch.stack([y for _, y in items])]

    stream = set_up({"a": TensorDataset(X, Y), "b": TensorDataset(torch.ones(12, 5), Y)}, collate_fn=pad)
    assert stream.get_samples(np.array([0, 12]))[0].shape == (2, 5)


@pytest.mark.parametrize("make", [TensorDataset, Named, KINDS["lists"]])
def test_client_data_empty_client_raises(make):
    rejected({"a": make(X, Y), "b": make(X[:0], Y[:0])}, "data", MissingValueError)
    assert set_up({"a": make(X, Y)}).plan.clients == ("a",)


@pytest.mark.parametrize("name", ["", " "])
def test_client_data_empty_client_name_raises(name):
    rejected({name: TensorDataset(X, Y), "b": TensorDataset(X + 100, Y)}, "client")
    stream = FederatedStream.from_arrays(X, Y, client_ids=np.array([name, "b"] * 6), scenario=Stationary(1))
    with raises(InvalidValueError, "client"):
        stream.setup("fit")
    arrays = ArrayDataset(X.numpy(), Y.numpy(), np.array([name, "b"] * 6), ("0", "1"))
    rejected(arrays, "client", partition="by-client-id")
    # The partition `IID` does not use owners, so their names are not checked.
    assert set_up(arrays, partition=IID(2)).plan.clients == ("0", "1")


COLUMNS = {"integers": Y[:, None], "booleans": (Y > 0)[:, None], "text": np.array(["a", "b"] * 6)[:, None]}


@pytest.mark.parametrize("y", COLUMNS.values(), ids=COLUMNS)
def test_labels_of_shape_n_1_raise_with_working_fix(y):
    with raises(InvalidValueError, "y"):
        FederatedStream.from_arrays(X, y)
    assert FederatedStream.from_arrays(X, y.squeeze(-1), scenario=Stationary(1)).num_classes == 2
    if isinstance(y, torch.Tensor):
        for data in (TensorDataset(X, y), Named(X, y), {"a": Named(X, y), "b": Named(X + 1, y)}):
            with raises(InvalidValueError, "y"):
                FederatedStream(data).setup("fit")
        assert FederatedStream.from_arrays(X, y, classes=(), scenario=Stationary(1)).classes == ()
        assert set_up(TensorDataset(X, y), classes=()).classes == ()
    assert FederatedStream.from_arrays(X, torch.rand(12, 1), scenario=Stationary(1)).classes == ()


def wrong_targets(value):
    y = torch.linspace(0, 1, 12)
    y[7] = value
    return y


# Ways to pass data to a stream, to `Samples` or to a node. The targets of the samples are not classes.
WAYS = {
    "from_arrays": lambda y, folder: FederatedStream.from_arrays(X, y),
    "dataset": lambda y, folder: set_up(TensorDataset(X, y)),
    "dicts": lambda y, folder: set_up(Named(X, y)),
    "clients": lambda y, folder: set_up({"a": TensorDataset(X + 50, Y / 2), "b": TensorDataset(X, y)}),
    "modules of clients": lambda y, folder: set_up([of_modules(X + 50, Y / 2), of_modules(X, y)]),
    "splits": lambda y, folder: set_up({"train": TensorDataset(X + 50, Y / 2), "test": TensorDataset(X, y)}),
    "samples": lambda y, folder: Samples(X, y.numpy()),
    "file of a node": lambda y, folder: read_file(folder, x=X.numpy(), y=y.numpy()),
}


def read_file(folder, **columns):
    np.savez(folder / "own.npz", **columns)
    return read_data(folder / "own.npz")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("way", WAYS)
def test_targets_non_finite_raise_with_sample_name(tmp_path, way, value):
    named = {
        "clients": "train sample 7 of client b",
        "modules of clients": "train sample 7 of client 1",
        "splits": "test sample 7",
    }
    message = (
        f"Expected `y` to have a finite target for each sample, but got {float(value)} for "
        f"{named.get(way, 'sample 7')} (1 of "
        f"{24 if way in named else 12} samples have such values). Correct or remove these samples"
    )
    with pytest.raises((ValueError, RejectedMessageError), match=re.escape(message)):
        WAYS[way](wrong_targets(value), tmp_path)
    WAYS[way](wrong_targets(0.5), tmp_path)


def test_targets_multidimensional_non_finite_raise():
    y = torch.zeros(12, 3)
    y[5, 1:] = torch.nan
    with raises(InvalidValueError, "y"):
        FederatedStream.from_arrays(X, y)


PIXELS = np.zeros((12, 3, 4, 4), np.uint8)
SCALES = {"mean": [np.nan, np.inf, -0.1], "std": [np.nan, np.inf, 0.0, -0.1]}


def scale(**values):
    return {name: np.full((3, 1, 1), values.get(name, 0.5), np.float32) for name in ("mean", "std")}


def of_arrays(folder, mean, std):
    return load_public(ArrayDataset(PIXELS, Y.numpy(), None, ("0", "1"), mean=mean, std=std))


def of_changed_arrays(folder, mean, std):
    arrays = ArrayDataset(PIXELS, Y.numpy(), None, ("0", "1"), **scale())
    arrays.mean[:], arrays.std[:] = mean, std
    return load_public(arrays)


SCALED = {
    "Arrays": of_arrays,
    "Arrays that change": of_changed_arrays,
    "from_arrays": lambda folder, mean, std: FederatedStream.from_arrays(PIXELS, Y, mean=mean.ravel(), std=std.ravel()),
    "file of a node": lambda folder, **pair: read_file(folder, x=PIXELS, y=np.array(["a", "b"] * 6), **pair),
}


@pytest.mark.parametrize("way", SCALED)
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in SCALES.items() for value in values])
def test_mean_and_std_invalid_raise(tmp_path, way, name, value):
    with pytest.raises(
        (ValueError, RejectedMessageError), match=rf"Expected `{name}` to be .*but got .*\w.* ([Pp]ass|Use) "
    ):
        SCALED[way](tmp_path, **scale(**{name: value}))
    SCALED[way](tmp_path, **scale(mean=0.0))


def test_node_file_with_mean_but_no_std_raises(tmp_path):
    pair = scale()
    del pair["std"]
    with raises(RejectedMessageError, "std"):
        read_file(tmp_path, x=PIXELS, y=np.array(["a", "b"] * 6), **pair)


def test_from_arrays_list_of_different_shapes_raises():
    with pytest.raises(InvalidValueError, check=lambda error: error.argument == "x"):
        FederatedStream.from_arrays([[1.0, 2.0], [1.0]], [0, 1])
