"""Tests of the ridge readout on a frozen network, and on a network that a base session trains."""

import copy

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from raising import raises

from lightning_fcl import Classifier, DifferentialPrivacy, FederatedStream, RidgeClassifier
from lightning_fcl.callbacks import BaseSession, ContinualMetrics
from lightning_fcl.data.scenarios import ODFCLScenario
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.swarm import Swarm
from lightning_fcl.models import DSICNet

pytestmark = pytest.mark.rounding


def faces(people=8, images=10, seed=0):
    """Return images of people, and the number of the person in each image."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.repeat(np.arange(people), images))
    pattern = rng.normal(size=(people, 1, 16, 16))
    return (0.5 * rng.normal(size=(len(y), 1, 16, 16)) + pattern[y]).astype(np.float32), y


class Exact(DSICNet):
    """A network in double precision. In single precision, rounding makes a sample's features depend on the batch."""

    def latent(self, x):
        return super().latent(x.double())


def network(classes=4):
    torch.manual_seed(0)
    net = Exact(classes, (16, 16)).double()
    # Update the statistics of batch normalization.
    for _ in range(20):
        net(1.1 * torch.randn(32, 1, 16, 16))
    return net.eval()


def pooled(task, x, y, classes, beta):
    """Return the readout's sums A and B, and the ridge solution on all samples, computed in NumPy."""
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


ODFCL = {
    "num_people": 6, "num_base_people": 2, "num_sessions": 2, "num_nodes": 2, "train_per_class": 7, "test_per_class": 3,
    "rounds_per_session": 1,
}  # fmt: skip


def federated(fit, task, callbacks=(), **kwargs):
    stream = FederatedStream.from_arrays(*faces(), scenario=ODFCLScenario(**ODFCL), batch_size=4, seed=0)
    session = BaseSession(pretrain_epochs=1, epochs=2, augment=False, backbone="float")
    fit(task, stream, [session, *callbacks], seed=0, **kwargs)
    return stream


def test_base_session_with_privacy_raises(fit):
    privacy = DifferentialPrivacy(unit="sample", delta=1e-3, noise_multiplier=1.0)
    with raises(InvalidValueError, "privacy"):
        federated(fit, RidgeClassifier(network(6), 6, unit_norm=True), privacy=privacy)


@pytest.mark.seconds
@pytest.mark.parametrize(
    "swarm", [None, Swarm(), Swarm(missed_rounds={"node1": [0]}), Swarm(missed_rounds={"node1": [0], "node2": [0]})]
)
def test_ridge_base_session_and_missed_sync_count_every_sample(fit, swarm):
    task = RidgeClassifier(network(6), 6, beta=0.5)
    stream = federated(fit, task, swarm=swarm)
    used = np.concatenate(
        [stream.plan.base_samples, *(part for current in stream.plan.train for part in current.values())]
    )
    assert len(used) == 6 * 7
    assert_solves(task, *stream.get_samples(used), 6, 0.5)


@pytest.mark.seconds
@pytest.mark.parametrize(
    "options", [{"random_features": 40, "bias": True, "gamma": 1.0}, {"random_features": 40, "rank": 40}]
)
def test_ridge_base_session_with_random_features_equals_solution(fit, options):
    """The solution equals NumPy's solution, also with random features and with `bias`, `gamma` or `rank`."""
    task = RidgeClassifier(network(6), 6, beta=0.5, **options)
    stream = federated(fit, task)
    used = np.concatenate(
        [stream.plan.base_samples, *(part for current in stream.plan.train for part in current.values())]
    )
    x, y = stream.get_samples(used)
    states = task.embed(x).numpy()
    expected = np.linalg.solve(states.T @ states + 0.5 * np.eye(states.shape[1]), states.T @ np.eye(6)[y]).T
    np.testing.assert_allclose(task.readout.weight, expected, rtol=0, atol=1e-9 * np.abs(expected).max())


@pytest.mark.seconds
def test_ridge_readout_before_first_round_and_after_missed_sync(fit):
    class Readouts(ContinualMetrics):
        def __init__(self):
            super().__init__("none", evaluate_before_fit=True)
            self.after = []

        def on_train_start(self, trainer, pl_module):
            super().on_train_start(trainer, pl_module)
            self.after.append((pl_module.readout.weight.clone(), int(pl_module.readout.n)))

        def on_round_end(self, trainer, pl_module):
            super().on_round_end(trainer, pl_module)
            self.after.append((pl_module.readout.weight.clone(), int(pl_module.readout.n)))

    task, readouts = RidgeClassifier(network(6), 6), Readouts()
    stream = federated(fit, task, [readouts], swarm=Swarm(missed_rounds={"node1": [0]}))
    base, (first, second) = stream.plan.base_samples, stream.plan.train
    used = [base, np.concatenate([base, first["node2"]])]
    used.append(np.concatenate([used[1], first["node1"], *second.values()]))
    for (weight, n), indices in zip(readouts.after, used, strict=True):
        assert n == len(indices)
        expected = pooled(task, *stream.get_samples(indices), 6, 1.0)[2]
        np.testing.assert_allclose(weight, expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())
    x, y = stream.get_samples(stream.plan.test)
    with torch.no_grad():
        states = task.model.eval().embed(x).double()
    right = y[(states @ readouts.after[0][0].T).argmax(1) == y]
    assert readouts.record["start"] == torch.bincount(right, minlength=6).tolist()


def test_ridge_network_without_features_raises():
    with raises(InvalidValueError, "model"):
        RidgeClassifier(torch.nn.Linear(6, 4), 4)


# Tests of networks whose features differ between training and evaluation mode.


class Noisy(torch.nn.Sequential):
    """A network in double precision whose features differ between training and evaluation mode."""

    features = 5

    def __init__(self):
        super().__init__(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Dropout(0.5))
        torch.manual_seed(1)
        for parameter in self.double().parameters():
            torch.nn.init.normal_(parameter)

    def embed(self, x):
        return self(x.double())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [1, 3])
def test_ridge_network_is_frozen_during_fit(fit, make_stream, size, symmetric):
    stream, task = make_stream(), RidgeClassifier(Noisy(), 4, beta=0.3, symmetric=symmetric)
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    fit(task, stream, max_vectorized_clients=size)
    assert all(torch.equal(value, before[name]) for name, value in task.model.state_dict().items())
    used = [rows for current in stream.plan.train for rows in current.values()]
    assert_solves(task, *stream.get_samples(np.concatenate(used)), 4, 0.3)


def test_ridge_in_plain_trainer_equals_solution(quiet, samples):
    (x, y), task = samples(), RidgeClassifier(Noisy(), 4, beta=0.3)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=6)
    # Only the last epoch counts, because all epochs have the same samples.
    L.Trainer(max_epochs=3, **quiet).fit(task, loader)
    assert_solves(task, x, y, 4, 0.3)


@pytest.mark.seconds
def test_base_session_trains_network_of_ridge_like_classifier(fit):
    """Batch normalization uses the statistics of each batch in the base session. Afterwards the network is frozen."""
    torch.manual_seed(0)
    fresh, trained = DSICNet(6, (16, 16)), []
    for make in (lambda net: RidgeClassifier(net, 6), lambda net: Classifier(net, 6)):
        federated(fit, task := make(copy.deepcopy(fresh)))
        trained.append(dict(task.model.backbone.state_dict()))
    torch.testing.assert_close(*trained, rtol=0, atol=0)
