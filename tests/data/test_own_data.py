"""Tests of user data: classes with `__getitem__`, all number types, pandas columns, and targets of any structure."""

from typing import NamedTuple

import lightning.pytorch as L
import numpy as np
import pandas as pd
import pytest
import torch
from raising import raises
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from lightning_fcl import FederatedStream
from lightning_fcl.callbacks import ContinualMetrics, evaluator
from lightning_fcl.data.collation import concat_nested
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental, Stationary
from lightning_fcl.errors import InvalidTypeError, InvalidValueError
from lightning_fcl.models import MLP

X = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
Y, OWNER = np.arange(24) % 4, np.arange(24) % 3
# Properties of the batches that training steps have received.
SEEN = set()


@pytest.fixture(autouse=True)
def _nothing_seen():
    SEEN.clear()


class Indexed:
    """Data with a length and items. The class is not a subclass of a torch dataset."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def stream_of(data, scenario=None, **options):
    made = FederatedStream(data, scenario or ClassIncremental(2), IID(3), seed=0, **options)
    made.setup("fit")
    return made


@pytest.mark.parametrize("pairs", [True, False])
def test_object_with_length_and_items_is_a_dataset(fit, make_task, pairs):
    items = [
        (torch.from_numpy(x), int(y)) if pairs else {"x": torch.from_numpy(x), "label": int(y)}
        for x, y in zip(X, Y, strict=True)
    ]
    stream, same = stream_of(Indexed(items)), stream_of(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)))
    assert stream.classes == same.classes == ("0", "1", "2", "3")
    assert stream.plan.fingerprint == same.plan.fingerprint
    batch, like = stream.get_samples(np.arange(5)), same.get_samples(np.arange(5))
    assert all(map(torch.equal, batch if pairs else batch.values(), like))
    clients = FederatedStream({"a": Indexed(items), "b": items}, Stationary(), seed=0)
    clients.setup("fit")
    assert clients.plan.clients == ("a", "b")


def test_item_labels_that_are_names_become_numbers():
    stream = stream_of(Indexed([{"x": x, "label": ["yes", "no"][y % 2]} for x, y in zip(X, Y, strict=True)]))
    assert stream.classes == ("no", "yes")
    assert stream.get_samples(np.arange(4))["label"].tolist() == [1, 0, 1, 0]


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


class Sized(Endless):
    def __len__(self):
        return 5


@pytest.mark.parametrize("make", [FederatedStream, FederatedStream.from_arrays])
@pytest.mark.parametrize("data", [Endless(), Sized()])
def test_iterable_dataset_raises(make, data):
    with raises(InvalidTypeError, "data", value=type(data).__name__):
        make(data, scenario=Stationary()).setup("fit")


@pytest.mark.parametrize(
    "items", [list(zip(X, Y, strict=True)), [{"x": x, "label": y} for x, y in zip(X, Y, strict=True)]]
)
def test_list_of_samples_as_clients_raises_error_with_working_fix(items):
    with raises(InvalidTypeError, "data"):
        FederatedStream(items, Stationary()).setup("fit")
    stream = FederatedStream(Subset(items, range(len(items))), ClassIncremental(2), IID(2))
    stream.setup("fit")
    assert stream.classes == ("0", "1", "2", "3") and stream.plan.clients == ("0", "1")


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true"])
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float64", "grad"])
def test_any_floating_type_can_be_trained_on(fit, kind, precision):
    # All floating-point types can represent these rounded values exactly.
    whole = np.round(X * 8) / 8
    x = torch.from_numpy(whole).requires_grad_() if kind == "grad" else torch.from_numpy(whole).to(getattr(torch, kind))
    given = x if kind in ("grad", "bfloat16") else x.numpy()
    stream = FederatedStream.from_arrays(given, given[:, :1], OWNER, scenario=Stationary(2), seed=0)
    fit(Line(), stream, max_epochs=2, trainer_args={"precision": precision})
    double = precision == "64-true" and kind == "float64"
    assert stream.samples.x.dtype == (torch.float64 if double else torch.float32)
    assert {{"32-true": torch.float32, "64-true": torch.float64, "bf16-true": torch.bfloat16}[precision]} == SEEN
    assert torch.equal(stream.samples.x.float(), torch.from_numpy(whole))


class Line(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        SEEN.update(value.dtype for value in batch)
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_boolean_targets_are_labels():
    stream = FederatedStream.from_arrays(X, Y > 1, scenario=ClassIncremental(2), partition=IID(2))
    stream.setup("fit")
    assert stream.classes == ("0", "1") and stream.y.tolist() == (Y > 1).tolist()


@pytest.mark.parametrize("of", [list, np.array, pd.Series, lambda names: pd.Series(names, dtype="category")])
def test_client_ids_and_group_accept_string_columns(of):
    names = of([f"site {owner}" for owner in OWNER])
    stream = FederatedStream.from_arrays(pd.DataFrame(X), Y, client_ids=names, group=names, scenario=Stationary())
    stream.setup("fit")
    assert sorted(stream.plan.clients) == ["site 0", "site 1", "site 2"]
    assert stream.samples.group.tolist() == list(names)


def test_client_ids_missing_value_raises():
    names = pd.Series([f"site {owner}" for owner in OWNER[1:]] + [None])
    with pytest.raises(InvalidValueError, check=lambda error: error.argument == "client_ids"):
        FederatedStream.from_arrays(X, Y, client_ids=names)


def test_from_arrays_non_numeric_samples_raise():
    with pytest.raises(InvalidTypeError, check=lambda error: error.argument == "x"):
        FederatedStream.from_arrays(pd.DataFrame({"a": [1, 2], "b": ["x", "y"]}), [0, 1])


@pytest.mark.parametrize("of", [np.array, torch.tensor, list])
def test_samples_without_targets_and_classes_can_be_trained_on(fit, of):
    stream = FederatedStream.from_arrays(of(X.tolist()), client_ids=OWNER, scenario=Stationary(2), seed=0)
    fit(Coder(), stream, max_epochs=2)
    assert {1} == SEEN and stream.classes == ()


class Coder(Line):
    def training_step(self, batch, batch_idx):
        SEEN.add(len(batch))
        return self.layer(batch[0]).square().mean()


@pytest.mark.parametrize(
    "target", [None, {"boxes": torch.ones(2, 4), "labels": torch.ones(2)}, (torch.ones(2), None), [None, {"a": 1}]]
)
def test_targets_of_any_structure_can_be_trained_on(fit, target):
    items = Indexed([(torch.from_numpy(x), target) for x in X])
    fit(Coder(), stream_of(items, Stationary(2), collate_fn=as_lists), max_epochs=2)
    assert {2} == SEEN
    with raises(InvalidValueError, "y", value="ClassIncremental"):
        stream_of(items, collate_fn=as_lists)


def as_lists(items):
    return [torch.stack([x for x, _ in items]), [y for _, y in items]]


def test_empty_classes_do_not_read_targets():
    class Unread(Indexed):
        def __getitem__(self, index):
            raise AssertionError("items must not be read")

    assert stream_of(Unread(X), Stationary(), classes=()).plan.num_rounds == 1


@pytest.mark.parametrize(
    "remedy", ["pass other targets as `y`", "If the values are not targets, pass `classes=\\(\\)` without `y`"]
)
def test_targets_partly_missing_raise_with_hint(remedy):
    with pytest.raises(
        ValueError, match=f"Expected `y` to have a finite target for each sample, but got None.*{remedy}"
    ):
        stream_of(Indexed([(x, None if y else "a") for x, y in zip(X, Y, strict=True)]))


class Graph(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_named_tuple_batches_keep_their_type(fit):
    class Named(Coder):
        def training_step(self, batch, batch_idx):
            SEEN.add(type(batch))
            return (self.layer(batch.x) - batch.y).square().mean()

    fit(Named(), stream_of(Indexed([Graph(torch.from_numpy(x), x[:1]) for x in X]), Stationary(2)), max_epochs=2)
    assert {Graph} == SEEN
    both = concat_nested([Graph(torch.ones(2), torch.ones(2)), Graph(torch.zeros(1), torch.zeros(1))])
    assert isinstance(both, Graph) and both.x.tolist() == [1, 1, 0]


class Counted(Dataset):
    """Labeled samples. The `collate` method records the number of samples per batch. Reads can draw random numbers."""

    def __init__(self, draws=False):
        self.batches, self.draws = [], draws

    def __len__(self):
        return 60

    def __getitem__(self, index):
        noise = torch.rand(()) if self.draws else 0.0
        return torch.eye(4)[index % 4] + noise, index % 4

    def collate(self, items):
        self.batches.append(len(items))
        return [torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items])]


def test_evaluation_uses_batch_size_of_loader():
    data = Counted()
    stream = stream_of(data, collate_fn=data.collate, batch_size=5)
    assert [len(y) for _, y in stream.test_dataloader()] == [5, 5, 2]


@pytest.mark.parametrize("draws", [False, True])
def test_metrics_read_loader_batches_within_memory_limit(fit, make_task, monkeypatch, draws):
    def record(held):
        monkeypatch.setattr(evaluator, "_HELD_BYTES", held)
        data, metrics = Counted(draws), ContinualMetrics()
        stream = stream_of(data, ClassIncremental(2, rounds_per_experience=2), collate_fn=data.collate, batch_size=10)
        data.batches.clear()
        torch.manual_seed(0)
        fit(make_task(model=MLP([4, 5, 4])), stream, [metrics], max_epochs=4)
        sizes = [(batch["correct"], batch["round"]) for batch in metrics.record["rounds"]]
        return sizes, max(data.batches), len(data.batches)

    kept, widest, reads = record(2**30)
    anew, narrow, more = record(0)
    # The widest batch is an evaluation batch of twelve samples or a trial batch before the first round.
    assert kept == anew and max(widest, narrow) <= 16
    assert more > reads
