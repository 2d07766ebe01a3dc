"""Tests that the densities of a reservoir's activations equal histograms of all its states."""

import json

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from raising import raises
from torch import nn
from torch.utils.data import Dataset

from lightning_fcl import FederatedStream, ReservoirClassifier
from lightning_fcl.callbacks import ActivationDensity, IntrinsicPlasticity
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental, DomainIncremental
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidValueError, MissingValueError
from lightning_fcl.models import EchoStateNetwork

OWNERS = np.array(["ann", "bob", "eve"])


def sequences(samples=240, steps=70, features=3, classes=4):
    """Return noisy sequences and their classes. The mean of a sequence depends on its class.

    The reservoir processes long sequences in blocks. These sequences are longer than one block.
    """
    rng = np.random.default_rng(0)
    y = np.arange(samples) % classes
    return (rng.normal(size=(samples, steps, features)) * 0.4 + y[:, None, None] - 1.5).astype(np.float32), y


@pytest.fixture
def stream():
    """Return a function that makes streams of sequences with three owners and two rounds per experience."""

    def make(**kwargs):
        x, y = sequences()
        client = OWNERS[np.arange(len(y)) // 4 % 3]
        scenario, split = ClassIncremental(2, 2), Split(**{"test": 0.7, **kwargs})
        return FederatedStream.from_arrays(x, y, client, scenario=scenario, split=split, batch_size=16, seed=0)

    return make


@pytest.fixture
def task():
    """Return a function that makes reservoir classifiers with two layers and a washout."""

    def make():
        network = EchoStateNetwork(3, units=7, num_layers=2, leaking_rate=0.6, washout=4, seed=1)
        return ReservoirClassifier(network, 4, beta=1e-2)

    return make


class AllStates(Callback):
    """Stores all reservoir states on the test samples after each round."""

    def __init__(self):
        self.rounds = []

    def on_round_end(self, trainer, pl_module):
        stream = trainer.datamodule
        self.rounds.append(pl_module.reservoir(stream.get_samples(stream.plan.test)[0]).detach().numpy())


def density(states, bins):
    counts = np.histogram(states.astype(np.float64), bins=bins, range=(-1, 1), density=True)[0]
    return pytest.approx(counts.tolist(), rel=1e-12, abs=0)


def test_activation_density_equals_histogram_of_all_states(fit, stream, task):
    bins = 100
    data, measured, states = stream(), ActivationDensity(), AllStates()
    fit(task(), data, [IntrinsicPlasticity(sigma=0.3, eta=0.1), measured, states])
    record = measured.record
    assert record["edges"] == np.linspace(-1, 1, bins + 1).tolist()
    assert [entry["experience"] for entry in record["experiences"]] == [0, 1]
    test = data.plan.test
    # The test samples fill more than one batch of 128.
    assert len(test) > 128
    for entry, after in zip(record["experiences"], (states.rounds[1], states.rounds[3]), strict=True):
        assert entry["all"] == density(after, bins)
        assert list(entry["groups"]) == list("0123") and list(entry["owners"]) == OWNERS.tolist()
        for label in range(4):
            assert entry["groups"][str(label)] == density(after[data.y[test] == label], bins)
        for owner in OWNERS:
            assert entry["owners"][owner] == density(after[data.samples.client_ids[test] == owner], bins)
        assert sum(entry["all"]) * 2 / bins == pytest.approx(1)
    assert record["experiences"][0]["all"] != record["experiences"][1]["all"]
    json.dumps(record, allow_nan=False)


def test_bin_indices_edges_equal_numpy_histogram():
    from lightning_fcl.callbacks.activation_density import bin_indices

    values = torch.tensor([-1.0, 1.0, 0.0, 0.5, -0.25, 0.04, np.nextafter(np.float32(0.5), np.float32(0))])
    for bins in (1, 4, 100, 1000):
        ours = torch.bincount(bin_indices(values, bins), minlength=bins).tolist()
        assert ours == np.histogram(values.double().numpy(), bins=bins, range=(-1, 1))[0].tolist()


def test_activation_density_contains_only_test_owners(fit, stream, task):
    data, measured = stream(test=["bob"]), ActivationDensity()
    fit(task(), data, [measured])
    last = measured.record["experiences"][-1]
    assert list(last["owners"]) == ["bob"] and last["owners"]["bob"] == pytest.approx(last["all"])
    assert list(data.plan.clients) == ["ann", "eve"]


def test_activation_density_domains_without_owners(fit, task):
    x, y = sequences()
    options = {"scenario": DomainIncremental(), "partition": IID(2), "split": Split(test=0.5), "seed": 0}
    data, measured = FederatedStream.from_arrays(x, y, group=np.arange(240) // 80, **options), ActivationDensity()
    states = AllStates()
    fit(task(), data, [measured, states])
    assert len(measured.record["experiences"]) == 3
    last = measured.record["experiences"][-1]
    assert last["owners"] == {} and list(last["groups"]) == ["0", "1", "2"]
    first = states.rounds[-1][data.plan.groups[data.plan.test] == 0]
    assert last["groups"]["0"] == density(first, 100)


def test_activation_density_omits_groups_without_test_samples(fit, task):
    x, y = sequences()
    client = np.where(y == 3, "ann", OWNERS[np.arange(240) // 4 % 3])
    data = FederatedStream.from_arrays(x, y, client, scenario=ClassIncremental(4), split=Split(test=["bob"]), seed=0)
    measured = ActivationDensity()
    fit(task(), data, [measured])
    assert list(measured.record["experiences"][-1]["groups"]) == ["0", "1", "2"]


def test_activation_density_does_not_change_fit(fit, task):
    class Noisy(Dataset):
        """A dataset that draws random numbers at each read of an item."""

        def __init__(self):
            self.x, self.targets = sequences()

        def __len__(self):
            return len(self.x)

        def __getitem__(self, item):
            return torch.from_numpy(self.x[item]) + torch.randn(()), int(self.targets[item])

    results = []
    for callbacks in ([], [ActivationDensity()]):
        torch.manual_seed(0)
        module = task()
        data = FederatedStream.from_arrays(Noisy(), scenario=ClassIncremental(2), partition=IID(2), seed=0)
        fit(module, data, callbacks)
        results.append(module.state_dict())
        assert module.training
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.seconds
def test_activation_density_resumed_fit_continues_record(fit, stream, task, tmp_path):
    whole, first, second = (ActivationDensity() for _ in range(3))
    path = tmp_path / "round.ckpt"
    fit(task(), stream(), [IntrinsicPlasticity(eta=0.1), whole])
    fit(task(), stream(), [IntrinsicPlasticity(eta=0.1), first], max_epochs=3).save_checkpoint(path)
    assert first.record["experiences"] == whole.record["experiences"][:1]
    fit(task(), stream(), [IntrinsicPlasticity(eta=0.1), second], ckpt_path=path)
    assert second.record == whole.record
    # A new fit starts a new record.
    fit(task(), stream(), [IntrinsicPlasticity(eta=0.1), whole])
    assert second.record == whole.record


def test_activation_density_unsupported_setup_raises(fit, stream, task, make_stream, make_task, quiet):
    with raises(InvalidValueError, "module", value="Classifier"):
        fit(make_task(), make_stream(), [ActivationDensity()])
    other = make_task()
    other.reservoir = nn.Linear(1, 1)
    with raises(InvalidValueError, "module"):
        fit(other, make_stream(), [ActivationDensity()])
    x, y = sequences()
    with raises(MissingValueError, "test"):
        fit(task(), stream(test=0.0), [ActivationDensity()])
    trainer = L.Trainer(max_epochs=2, callbacks=[ActivationDensity()], **quiet)
    alone = FederatedStream.from_arrays(x, y, scenario=ClassIncremental(2), partition=IID(1))
    with raises(InvalidValueError, "strategy"):
        trainer.fit(task(), datamodule=alone)
    trainer = L.Trainer(max_epochs=1, callbacks=[ActivationDensity()], **quiet)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y)))
    with raises(InvalidValueError, "datamodule"):
        trainer.fit(task(), loader)
