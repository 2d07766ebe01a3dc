"""Tests of streams with one dataset per client."""

import lightning.pytorch as L
import pytest
import torch
from raising import raises
from torch.utils.data import DataLoader, TensorDataset, default_collate

from lightning_fcl import FederatedStream
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import Stationary
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidTypeError, InvalidValueError, MissingValueError


def site(number, samples):
    return TensorDataset(torch.full((samples, 3), float(number)), torch.rand(samples, 1))


@pytest.mark.parametrize("names", [("site-b", "site-a"), None])
def test_client_datasets_keep_their_samples(names):
    sets = site(1, 6), site(2, 9)
    data = sets if names is None else dict(zip(names, sets, strict=True))
    stream = FederatedStream(data, Stationary(num_rounds=3), split=Split(1 / 3))
    stream.setup("fit")
    assert stream.plan.num_rounds == 3 and len(stream.plan.test) == 5
    assert sorted(stream.plan.clients) == sorted(names or ("0", "1"))
    for number, client in enumerate(names or ("0", "1"), start=1):
        for round_idx in range(3):
            x, _ = stream.client_samples(client, round_idx, 0)
            assert x.unique().tolist() == [number]
    assert sum(map(len, stream.plan.train[0].values())) == 10


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"a": (torch.ones(3, 2), torch.ones(3))}, (InvalidTypeError, "data")),
        ({"a": {"x": site(1, 6)}}, (InvalidTypeError, "data")),
        ({}, (MissingValueError, "data")),
        ({"train": site(1, 6), "unsupervised": site(2, 6), "test": site(1, 3)}, (InvalidValueError, "data")),
        ({"train": site(1, 6), "val": site(1, 2), "validation": site(1, 2)}, (InvalidValueError, "data")),
    ],
)
def test_client_datasets_invalid_raise(data, expected):
    with raises(*expected):
        FederatedStream(data, Stationary()).setup("fit")


@pytest.mark.parametrize("validation", ["validation", "valid", "val"])
def test_dict_of_splits_is_not_a_dict_of_clients(validation):
    data = {"train": site(1, 20), validation: site(2, 5), "test": site(3, 4)}
    stream = FederatedStream(data, Stationary(), IID(4))
    stream.setup("fit")
    assert stream.plan.clients == ("0", "1", "2", "3") and sum(map(len, stream.plan.train[0].values())) == 20
    for part, rows, number in (("validation", stream.plan.validation, 2), ("test", stream.plan.test, 3)):
        assert len(rows) == len(data[validation if part == "validation" else part])
        assert stream.samples.get(rows, part)[0].unique().tolist() == [number]
    given = FederatedStream(data, Stationary(), IID(4), split=Split(test=0.5))
    given.setup("fit")
    assert len(given.plan.test) == 14


def module(number, samples, tests, **options):
    made = L.LightningDataModule.from_datasets(site(number, samples), test_dataset=site(number + 10, tests), **options)
    made.calls = []
    made.prepare_data = lambda: made.calls.append("prepare_data")
    made.setup = made.calls.append
    return made


def kinds():
    yield {"a": {"train": site(1, 8), "test": site(11, 2)}, "b": {"train": site(2, 12), "test": site(12, 3)}}
    yield {"a": module(1, 8, 2, batch_size=3), "b": module(2, 12, 3, batch_size=3)}


@pytest.mark.parametrize("data", kinds())
def test_client_test_sets_form_common_test_set(data):
    stream = FederatedStream(data, Stationary(num_rounds=2))
    stream.setup("fit")
    for number, client in enumerate("ab", start=1):
        assert stream.client_samples(client, 1, 0)[0].unique().tolist() == [number]
    x, _ = stream.samples.get(stream.plan.test, "test")
    assert x[:, 0].tolist() == [11] * 2 + [12] * 3
    assert stream.samples.client_ids[stream.plan.test].tolist() == ["a"] * 2 + ["b"] * 3


def test_client_data_modules_are_prepared_once_and_set_loader_options():
    data = {"a": module(1, 8, 2, batch_size=3), "b": module(2, 12, 3, batch_size=3)}
    stream = FederatedStream(data, Stationary())
    for _ in range(2):
        stream.prepare_data(), stream.setup("fit")
    assert [one.calls for one in data.values()] == [["prepare_data", "fit", "test"]] * 2
    assert stream.batch_size == 3 and stream.shuffle and stream.test_dataloader().batch_size == 3


class Scaled(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(site(1, 6))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch


@pytest.mark.parametrize(
    ("data", "options", "expected"),
    [
        (
            {"a": module(1, 8, 2, batch_size=3), "b": module(1, 8, 2, batch_size=4)},
            {"batch_size": 5},
            (InvalidValueError, "batch_size"),
        ),
        (
            {"a": module(1, 8, 2), "b": site(1, 4), "c": site(1, 4)},
            None,
            (MissingValueError, "datamodule"),
        ),
        (
            {"a": Scaled(), "b": Scaled()},
            None,
            (InvalidValueError, "on_after_batch_transfer"),
        ),
    ],
)
def test_client_data_modules_that_disagree_raise(data, options, expected):
    with raises(*expected):
        FederatedStream(data, Stationary()).setup("fit")
    if options is not None:
        stream = FederatedStream(data, Stationary(), **options)
        stream.setup("fit")
        assert stream.batch_size == 5


class Padding:
    """A collate function that is a callable object, like the data collators of Hugging Face."""

    def __call__(self, items):
        return default_collate(items)


def test_collate_fn_objects_are_compared_by_class():
    def stream(*functions):
        data = {str(n): Loaded(DataLoader(site(n, 6), collate_fn=one)) for n, one in enumerate(functions)}
        made = FederatedStream(data, Stationary())
        made.setup("fit")
        return made

    assert isinstance(stream(Padding(), Padding()).samples.collate_fn, Padding)
    with raises(InvalidValueError, "collate_fn"):
        stream(Padding(), lambda items: default_collate(items))


class Loaded(L.LightningDataModule):
    def __init__(self, loader):
        super().__init__()
        self.train_dataloader = lambda: loader


def test_client_test_sample_trained_by_other_client_raises():
    both = site(1, 8)
    with raises(InvalidValueError, "data"):
        FederatedStream({"a": {"train": both}, "b": {"train": site(2, 4), "test": both}}, Stationary()).setup("fit")


def test_client_datasets_fit_equals_fit_with_client_ids(fit):
    class Line(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)
            torch.nn.init.zeros_(self.layer.weight), torch.nn.init.zeros_(self.layer.bias)

        def training_step(self, batch, batch_idx):
            return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    sets, own, pooled, options = [site(1, 6), site(2, 9)], Line(), Line(), {"seed": 0, "split": Split(0.0)}
    fit(own, FederatedStream({"a": sets[0], "b": sets[1]}, Stationary(2), **options))
    x, y = (torch.cat(columns) for columns in zip(*(data.tensors for data in sets), strict=True))
    owner = ["a"] * 6 + ["b"] * 9
    fit(pooled, FederatedStream.from_arrays(x, y, owner, scenario=Stationary(2), **options))
    assert own.layer.weight.abs().sum() > 0
    torch.testing.assert_close(dict(own.state_dict()), dict(pooled.state_dict()))
