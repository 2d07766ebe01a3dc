"""The ridge readout on a frozen network: whatever the split, the solution on all samples together."""

import copy
import re

import lightning.pytorch as L
import numpy as np
import pytest
import torch

from lightning_fcl import Classifier, FederatedStream, RidgeClassifier
from lightning_fcl.callbacks import BaseSession, ContinualMetrics, Unlearning
from lightning_fcl.data.partition import IID, Dirichlet, Shards
from lightning_fcl.data.scenarios import ClassIncremental, ODFCLScenario
from lightning_fcl.data.split import Split
from lightning_fcl.federation.swarm import Swarm
from lightning_fcl.models import DSICNet

pytestmark = pytest.mark.rounding


def faces(people=8, images=10, seed=0):
    """Images and people."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.repeat(np.arange(people), images))
    pattern = rng.normal(size=(people, 1, 16, 16))
    return (0.5 * rng.normal(size=(len(y), 1, 16, 16)) + pattern[y]).astype(np.float32), y


class Exact(DSICNet):
    """In double precision: in single precision a sample's features depend on its batch, by rounding."""

    def latent(self, x):
        return super().latent(x.double())


def network(classes=4):
    torch.manual_seed(0)
    net = Exact(classes, (16, 16)).double()
    for _ in range(20):  # statistics for batch normalisation
        net(1.1 * torch.randn(32, 1, 16, 16))
    return net.eval()


def pooled(task, x, y, classes, beta):
    """The solution on all samples, in NumPy."""
    with torch.no_grad():
        states = task.model.eval().embed(x).double().numpy()
    a, b = np.eye(classes)[y.numpy()].T @ states, states.T @ states
    return a, b, np.linalg.solve(b + beta * np.eye(len(b)), a.T).T


def assert_solves(task, x, y, classes, beta):
    a, b, weight = pooled(task, x, y, classes, beta)
    ours = {name: getattr(task.readout, name).numpy() for name in ("A", "B", "weight")}
    rows, columns = np.triu_indices(len(b))
    packed = b[rows, columns] if task.readout.symmetric else b
    for name, expected in (("A", a), ("B", packed), ("weight", weight)):
        np.testing.assert_allclose(ours[name], expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max(), err_msg=name)
    assert int(task.readout.n) == len(y)
    with torch.no_grad():
        np.testing.assert_allclose(task(x), task.model.embed(x).numpy() @ weight.T, rtol=0, atol=1e-5)
    assert np.abs(weight).max() > 1e-3


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("partition", "experiences", "batch_size"),
    [(IID(1), 1, 100), (IID(5), 2, 8), (Dirichlet(7), 4, 3), (Shards(3), 2, 32)],
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_any_split_is_the_pooled_solution(fit, partition, experiences, batch_size, symmetric):
    options = {"partition": partition, "scenario": ClassIncremental(experiences), "batch_size": batch_size}
    stream = FederatedStream.from_arrays(*faces(people=4, images=20), split=Split(test=0.25), seed=0, **options)
    task = RidgeClassifier(network(), 4, beta=0.7, symmetric=symmetric)
    fit(task, stream, seed=0)
    x, y = stream.take(np.setdiff1d(np.arange(80), stream.plan.test))
    assert len(y) == 60
    assert_solves(task, x, y, 4, 0.7)


@pytest.mark.seconds
def test_the_order_of_the_clients_does_not_matter(fit):
    (x, y), owner = faces(people=4, images=20), np.arange(80) % 5
    weights = []
    for names in (owner, 4 - owner, (owner * 3 + 1) % 5):
        stream = FederatedStream.from_arrays(
            x, y, scenario=ClassIncremental(1), split=Split(test=0.0), client=names, batch_size=7
        )
        fit(task := RidgeClassifier(network(), 4), stream, seed=0)
        weights.append(task.readout.weight)
    for weight in weights[1:]:
        torch.testing.assert_close(weight, weights[0], rtol=1e-9, atol=1e-9 * float(weights[0].abs().max()))


@pytest.mark.seconds
def test_nothing_else_changes(fit):
    task = RidgeClassifier(network(), 4)
    stream = FederatedStream.from_arrays(*faces(people=4), scenario=ClassIncremental(2), partition=IID(3), seed=0)
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    fit(task, stream, seed=0)
    for name, value in task.model.state_dict().items():
        assert torch.equal(value, before[name]), name


ODFCL = {
    "people": 6, "base": 2, "sessions": 2, "nodes": 2, "train_per_class": 7, "test_per_class": 3,
    "rounds_per_session": 1,
}  # fmt: skip


def federated(fit, task, callbacks=(), **kwargs):
    stream = FederatedStream.from_arrays(*faces(), scenario=ODFCLScenario(**ODFCL), batch_size=4, seed=0)
    session = BaseSession(pretrain_epochs=1, epochs=2, augment=False, backbone="float")
    fit(task, stream, [session, *callbacks], seed=0, **kwargs)
    return stream


@pytest.mark.seconds
@pytest.mark.parametrize(
    "swarm", [None, Swarm(), Swarm(missing={"node1": [0]}), Swarm(missing={"node1": [0], "node2": [0]})]
)
def test_the_base_session_counts_and_no_miss_loses_a_sample(fit, swarm):
    task = RidgeClassifier(network(6), 6, beta=0.5)
    stream = federated(fit, task, swarm=swarm)
    used = np.concatenate([stream.plan.base, *(part for current in stream.plan.train for part in current.values())])
    assert len(used) == 6 * 7
    assert_solves(task, *stream.take(used), 6, 0.5)


@pytest.mark.seconds
@pytest.mark.parametrize(
    "options", [{"random_features": 40, "bias": True, "gamma": 1.0}, {"random_features": 40, "rank": 40}]
)
def test_a_body_that_the_base_session_trains_goes_with_all_arguments(fit, options):
    """As in STSA."""
    task = RidgeClassifier(network(6), 6, beta=0.5, **options)
    stream = federated(fit, task)
    used = np.concatenate([stream.plan.base, *(part for current in stream.plan.train for part in current.values())])
    x, y = stream.take(used)
    states = task.embed(x).numpy()
    expected = np.linalg.solve(states.T @ states + 0.5 * np.eye(states.shape[1]), states.T @ np.eye(6)[y]).T
    np.testing.assert_allclose(task.readout.weight, expected, rtol=0, atol=1e-9 * np.abs(expected).max())


@pytest.mark.seconds
def test_the_readout_stands_before_the_first_round_and_after_a_miss(fit):
    class Readouts(ContinualMetrics):
        def __init__(self):
            super().__init__("none", start=True)
            self.after = []

        def on_train_start(self, trainer, pl_module):
            super().on_train_start(trainer, pl_module)
            self.after.append((pl_module.readout.weight.clone(), int(pl_module.readout.n)))

        def on_round_end(self, trainer, pl_module):
            super().on_round_end(trainer, pl_module)
            self.after.append((pl_module.readout.weight.clone(), int(pl_module.readout.n)))

    task, readouts = RidgeClassifier(network(6), 6), Readouts()
    stream = federated(fit, task, [readouts], swarm=Swarm(missing={"node1": [0]}))
    base, (first, second) = stream.plan.base, stream.plan.train
    used = [base, np.concatenate([base, first["node2"]])]
    used.append(np.concatenate([used[1], first["node1"], *second.values()]))
    for (weight, n), indices in zip(readouts.after, used, strict=True):
        assert n == len(indices)
        expected = pooled(task, *stream.take(indices), 6, 1.0)[2]
        np.testing.assert_allclose(weight, expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())
    x, y = stream.take(stream.plan.test)
    with torch.no_grad():
        states = task.model.eval().embed(x).double()
    right = y[(states @ readouts.after[0][0].T).argmax(1) == y]
    assert readouts.record["start"] == torch.bincount(right, minlength=6).tolist()


@pytest.mark.seconds
def test_a_network_without_features_is_refused():
    message = (
        "Expected a `model` with `embed(x)` and `features`, their number, but got a `Linear`. Use one of "
        "`lightning_fcl.models`, or define them."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        RidgeClassifier(torch.nn.Linear(6, 4), 4)
    with pytest.raises(ValueError, match=r"^Expected `beta` to be at least 0 and finite but got -1\.0\.$"):
        RidgeClassifier(network(), 4, beta=-1.0)


# What it shares with reservoirs.


def toy_stream(make_stream, **options):
    return make_stream(experiences=2, **options)


class Noisy(torch.nn.Sequential):
    """Features that differ in training, for a network in that mode; in double precision, as `Exact`."""

    features = 5

    def __init__(self):
        super().__init__(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Dropout(0.5))
        torch.manual_seed(1)
        for parameter in self.double().parameters():
            torch.nn.init.normal_(parameter)

    def embed(self, x):
        return self(x.double())


def all_rows(stream, without=()):
    parts = [rows for part in stream.plan.train for client, rows in part.items() if client not in without]
    return stream.take(np.concatenate(parts))


@pytest.mark.parametrize("size", [1, 3])
def test_the_network_is_the_same_in_training_and_afterwards(fit, make_stream, size):
    stream, task = toy_stream(make_stream), RidgeClassifier(Noisy(), 4, beta=0.3)
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    fit(task, stream, cohort_size=size)
    assert all(torch.equal(value, before[name]) for name, value in task.model.state_dict().items())
    assert_solves(task, *all_rows(stream), 4, 0.3)


def test_clients_that_are_forgotten_have_never_been(fit, make_stream):
    stream, task = toy_stream(make_stream, rounds_per_experience=1), RidgeClassifier(Noisy(), 4, beta=0.3)
    fit(task, stream, [Unlearning({"1": 1})])
    assert_solves(task, *all_rows(stream, without="1"), 4, 0.3)


def test_it_solves_in_a_plain_trainer(quiet, samples):
    (x, y), task = samples(), RidgeClassifier(Noisy(), 4, beta=0.3)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=6)
    L.Trainer(max_epochs=3, **quiet).fit(task, loader)  # the last epoch counts: each has the same samples
    assert_solves(task, x, y, 4, 0.3)


@pytest.mark.seconds
def test_the_base_session_trains_the_network_as_that_of_any_task(fit):
    """Its batch normalisation takes each batch's statistics, though afterwards the network stays."""
    torch.manual_seed(0)
    fresh, trained = DSICNet(6, (16, 16)), []
    for make in (lambda net: RidgeClassifier(net, 6), lambda net: Classifier(net, 6)):
        federated(fit, task := make(copy.deepcopy(fresh)))
        trained.append(dict(task.model.backbone.state_dict()))
    torch.testing.assert_close(*trained, rtol=0, atol=0)
