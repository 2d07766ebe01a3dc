"""Tests that test samples are never used for training.

Shared samples stay together, and overlapping splits raise an error.
"""

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from raising import raises
from torch.utils.data import ConcatDataset, DataLoader, Dataset, StackDataset, Subset, TensorDataset

from lightning_fcl import FederatedStream
from lightning_fcl.data.origins import origins_of
from lightning_fcl.data.partition import IID, ByClientId
from lightning_fcl.data.scenarios import ClassIncremental, FLwFScenario, Stationary
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidValueError

SIZE = 64
# Each of the three inputs of a sample equals the number of the sample.
X, Y = torch.arange(SIZE, dtype=torch.float32).repeat(3, 1).T.contiguous(), torch.arange(SIZE) % 3
WHOLE = TensorDataset(X, Y)
ITEMS = [(X[n].numpy(), n % 3) for n in range(SIZE)]


class Shifted(Dataset):
    """A user-defined dataset that adds 0.25 to the inputs of another dataset."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        x, y = self.inner[index]
        return x + 0.25, y


class Plain:
    """Data with a length and items. The class is not a subclass of a torch dataset."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return ITEMS[index]


PLAIN, JOINED = Plain(), ConcatDataset([Subset(WHOLE, range(40)), Subset(WHOLE, range(30, 60))])
SHARED = {
    "one dataset for two clients": [WHOLE, WHOLE],
    "no torch dataset for two clients": [PLAIN, PLAIN],
    "overlapping subsets": [Subset(WHOLE, range(50)), Subset(WHOLE, range(20, SIZE))],
    "subsets of subsets": [Subset(Subset(WHOLE, range(40)), range(5, 40)), Subset(WHOLE, range(-40, -5))],
    "joined datasets": [JOINED, Subset(JOINED, range(20, 70))],
    "repeated samples of one client": [Subset(WHOLE, [*range(30), *range(30)]), Subset(WHOLE, range(30, 64))],
    "wrapped subsets": [Shifted(Shifted(Subset(WHOLE, range(50)))), Subset(Shifted(WHOLE), range(20, SIZE))],
    "slices of one array": [TensorDataset(X[:50], Y[:50]), TensorDataset(X[20:], Y[20:].clone())],
    "slices of one NumPy array": [
        TensorDataset(*map(torch.from_numpy, (X.numpy()[rows], Y.numpy()[rows])))
        for rows in (slice(50), slice(20, None))
    ],
    "lists of the same items": [ITEMS[:50], ITEMS[20:]],
    "lists of views of one array": [[(X[n], n % 3) for n in rows] for rows in (range(50), range(20, SIZE))],
}


def numbers(stream, rows):
    """Return the numbers of the samples in some rows of a stream. The inputs of a sample contain its number."""
    return {int(x[0]) for x in stream.get_samples(np.asarray(rows))[0]} if len(rows) else set()


def roles(data, split=None, scenario=None, **kwargs):
    """Return three sets of sample numbers: training, validation and test."""
    stream = FederatedStream(data, scenario or Stationary(2), split=split, **kwargs)
    stream.setup("fit")
    trained = set().union(*(numbers(stream, rows) for current in stream.plan.train for rows in current.values()))
    return trained, numbers(stream, stream.plan.validation), numbers(stream, stream.plan.test)


@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize("seed", range(3))
def test_split_keeps_shared_samples_in_one_set(kind, seed):
    trained, validated, tested = roles(SHARED[kind], Split(0.25, 0.2), ClassIncremental(3), seed=seed)
    assert not trained & tested and not trained & validated and not validated & tested
    everything = len(trained | validated | tested)
    assert abs(len(tested) - everything / 4) <= 3 and abs(len(validated) - (everything - len(tested)) / 5) <= 3


def test_split_shared_training_samples_stay_with_each_client():
    stream = FederatedStream([Subset(WHOLE, range(50)), Subset(WHOLE, range(20, SIZE))], Stationary(1), seed=0)
    stream.setup("fit")
    tested = numbers(stream, stream.plan.test)
    found = {client: numbers(stream, rows) for client, rows in stream.plan.train[0].items()}
    assert found == {"0": {*range(50)} - tested, "1": {*range(20, SIZE)} - tested}


def test_split_without_shared_samples_equals_split_of_arrays():
    parts = [TensorDataset(X[rows].clone(), Y[rows].clone()) for rows in (slice(50), slice(50, None))]
    stream = FederatedStream.from_arrays(X, Y, ["0"] * 50 + ["1"] * 14, scenario=Stationary(1), seed=0)
    stream.setup("fit")
    rng, tested = np.random.default_rng([0, 0]), []
    for label in range(3):
        members = np.flatnonzero(Y.numpy() == label)
        tested += rng.permutation(members)[: round(0.2 * len(members))].tolist()
    assert {*tested} == numbers(stream, stream.plan.test) == roles(parts, seed=0)[2]


@pytest.mark.parametrize(
    "data",
    [
        [(X, X[n], n % 3) for n in range(9)],
        TensorDataset(X[:1].expand(SIZE, 3), X, Y),
        [0, 1, 0, 1],
        ["a", "b", "a"],
        TensorDataset(torch.empty(5, 0)),
        StackDataset(TensorDataset(X), TensorDataset(Y)),
        ConcatDataset([WHOLE, TensorDataset(X.clone(), Y)]),
    ],
)
def test_origins_of_different_samples_is_none(data):
    assert origins_of(data) is None


def test_origins_of_mutually_referring_datasets_is_none():
    one, other = Shifted(None), Shifted(None)
    one.inner, other.inner = other, one
    type(one).__len__, before = lambda self: 3, type(one).__len__
    try:
        assert origins_of(one) is None
    finally:
        type(one).__len__ = before


class Module(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Subset(WHOLE, range(40)), 4)

    def test_dataloader(self):
        return DataLoader(Shifted(Subset(WHOLE, range(35, SIZE))), 4)


TWO = {"a": Subset(WHOLE, range(40)), "b": Subset(WHOLE, range(35, SIZE))}
OVERLAPS = {
    "splits": ({"train": Subset(WHOLE, range(40)), "test": Subset(WHOLE, range(35, SIZE))}, {}),
    "data module": (Module(), {}),
    "client's test split": ({"a": {"train": TWO["a"]}, "b": {"train": TWO["b"], "test": WHOLE}}, {}),
    "owners": (TWO, {"split": Split(["b"])}),
}


@pytest.mark.parametrize("kind", OVERLAPS)
def test_overlapping_splits_raise_with_working_fix(kind):
    data, options = OVERLAPS[kind]
    with raises(InvalidValueError, "data", value=("training", "test")) as raised:
        roles(data, **options)
    assert "pass `split=Split(test=0.2)`" in str(raised.value)
    trained, _, tested = roles(data, Split(test=0.2))
    assert tested and not trained & tested


def test_scenario_that_draws_test_samples_with_copies_raises():
    scenario = FLwFScenario(2, samples_per_round=6, test_per_class=4, pretrain_per_class=1)
    with raises(InvalidValueError, "data", value=("training", "test")):
        roles(Subset(WHOLE, [*range(SIZE)] * 2), scenario=scenario)
    trained, _, tested = roles(WHOLE, scenario=scenario)
    assert tested and not trained & tested


@pytest.mark.parametrize("of", ["arrays", "datasets"])
def test_equal_training_and_test_content_warns_once(of, caplog):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 3, size=(SIZE, 3)).astype(np.float32)
    y = x.sum(1).astype(np.int64) % 2
    if of == "arrays":
        stream = FederatedStream.from_arrays(x, y, scenario=Stationary(3), partition=IID(4), seed=0)
    else:
        parts = [TensorDataset(torch.tensor(x[rows]), torch.tensor(y[rows])) for rows in (slice(30), slice(30, None))]
        stream = FederatedStream(parts, Stationary(3), ByClientId(), seed=0)
    stream.setup("fit")
    stream.setup("test")
    trained = {*map(tuple, x[np.concatenate([*stream.plan.train[0].values()])].tolist())}
    # Equal inputs have equal labels, so the comparison of inputs is enough.
    equal = sum(row in trained for row in map(tuple, x[stream.plan.test].tolist()))
    assert equal > 3
    message = f"{equal} of {len(stream.plan.test)} test samples have the inputs and targets of a training sample."
    assert [record.message.startswith(message) for record in caplog.records] == [True]


def test_different_training_and_test_content_does_not_warn(caplog):
    constant = torch.zeros(SIZE, 3)
    FederatedStream.from_arrays(X, Y, partition=IID(2), scenario=Stationary(1)).setup("fit")
    FederatedStream.from_arrays(constant, X[:, 0], partition=IID(2), scenario=Stationary(1)).setup("fit")
    assert not caplog.records
