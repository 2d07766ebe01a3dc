"""Tests of frozen layers: a frozen body keeps its batch normalization statistics if a method uploads features."""

import copy

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fcl import FederatedStream, RidgeClassifier
from lightning_fcl.callbacks import CCVR, FOT, Fed3R, FedCBDR, FedProto, ICaRL, RegMean
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split
from lightning_fcl.methods.frozen_layers import FrozenLayers, frozen_layers
from lightning_fcl.models.ridge import unpack_upper

WITH_FEATURES = [Fed3R, CCVR, FedProto, ICaRL, FedCBDR, FOT, RegMean]


class Net(nn.Module):
    """A network with a body that has batch normalization, and a trainable head. The body is frozen by default."""

    features = 5

    def __init__(self, affine=True, freeze=True):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, affine=affine), nn.ReLU())
        self.head = nn.Linear(5, 4)
        self.body.requires_grad_(not freeze)

    def embed(self, x):
        return self.body(x)

    def forward(self, x):
        return self.head(self.embed(x))


class Flat(nn.Sequential):
    """A network with the layers of `Net` in one `nn.Sequential`. The batch normalization has no parameters."""

    features = 5

    def __init__(self):
        super().__init__(nn.Linear(6, 5), nn.BatchNorm1d(5, affine=False), nn.ReLU(), nn.Linear(5, 4))
        self[0].requires_grad_(False)

    def embed(self, x):
        for layer in [*self][:-1]:
            x = layer(x)
        return x


@pytest.fixture
def shifted():
    """Return a function that makes a stream of three clients. The inputs of client k are shifted by 3 k."""

    def make(test=0.2, experiences=2, rounds=2):
        generator, y, client = torch.Generator().manual_seed(0), torch.arange(120) % 4, torch.arange(120) // 40
        x = torch.randn(120, 6, generator=generator) + 2 * torch.eye(4, 6)[y] + 3.0 * client[:, None]
        options = {"scenario": ClassIncremental(experiences, rounds), "split": Split(test=test), "batch_size": 10}
        return FederatedStream.from_arrays(x, y, [str(c) for c in client.tolist()], seed=0, **options)

    return make


def statistics(task):
    return {name: value.clone() for name, value in task.named_buffers() if "running" in name or "tracked" in name}


def trained_features(task, stream, rounds=(0, 2)):
    """Return features and labels of the samples of some rounds. The server's model computes the features."""
    x, y = stream.get_samples(np.concatenate([rows for r in rounds for rows in stream.plan.train[r].values()]))
    with torch.no_grad():
        return copy.deepcopy(task).eval().embed(x).double().numpy(), y.numpy()


class Uploads(Callback):
    """A callback that records each client's batch normalization statistics after its local training."""

    def __init__(self):
        self.statistics = []

    def on_client_end(self, trainer, pl_module, client_round):
        self.statistics.append(statistics(pl_module))


def fed3r_sums(trainer):
    kept = trainer.strategy.server.get_section("Fed3R")
    return kept["A"].numpy(), unpack_upper(kept["B"], kept["A"].shape[1]).numpy()


def assert_equal_ridge_sums(trainer, task, stream):
    features, y = trained_features(task, stream)
    states = np.concatenate([features, np.ones((len(features), 1))], axis=1)
    a, b = fed3r_sums(trainer)
    np.testing.assert_allclose(a, np.eye(4)[y].T @ states, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(b, states.T @ states, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("max_vectorized_clients", [1, 3])
@pytest.mark.parametrize("network", [Net, lambda: Net(affine=False), Flat])
def test_fed3r_frozen_body_sums_features_of_server_model(fit, shifted, make_task, network, max_vectorized_clients):
    task, stream = make_task(model=network()), shifted()
    before = copy.deepcopy(task.state_dict())
    trainer = fit(task, stream, [Fed3R()], max_vectorized_clients=max_vectorized_clients)
    assert_equal_ridge_sums(trainer, task, stream)
    after = task.state_dict()
    # Only the head has changed.
    assert [n for n, value in before.items() if not torch.equal(value, after[n])] == [*after][-2:]


def test_ccvr_frozen_body_sums_features_of_server_model(fit, shifted, make_task):
    task, stream = make_task(model=Net()), shifted()
    kept = fit(task, stream, [CCVR()]).strategy.server.get_section("CCVR")
    features, y = trained_features(task, stream, (1, 3))
    for label in range(4):
        own = features[y == label]
        np.testing.assert_allclose(kept["sums"][label], [len(own), *own.sum(axis=0)], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(unpack_upper(kept["products"][label], 5), own.T @ own, rtol=1e-5, atol=1e-4)


def test_fedproto_frozen_body_sums_features_of_server_model(fit, shifted, make_task):
    task, stream = make_task(model=Net()), shifted(0.0, experiences=1)
    sums = fit(task, stream, [FedProto()]).strategy.server.get_section("FedProto")["sums"]
    features, y = trained_features(task, stream, (1,))
    wanted = [[(y == label).sum(), *features[y == label].sum(axis=0)] for label in range(4)]
    np.testing.assert_allclose(sums, wanted, rtol=1e-5, atol=1e-4)


def test_regmean_frozen_body_uploads_layer_inputs_of_server_model(fit, shifted, make_task):
    grams = []

    class Seen(RegMean):
        def upload_statistics(self, client, trained_state, data):
            sent = super().upload_statistics(client, trained_state, data)
            grams.append(next(value for name, value in sent.items() if name.startswith("gram")).clone())
            return sent

    task, stream = make_task(model=Net()), shifted(0.0, experiences=1, rounds=1)
    fit(task, stream, [Seen(alpha=1.0)])
    features, _ = trained_features(task, stream, (0,))
    states = np.concatenate([features, np.ones((len(features), 1))], axis=1)
    found = sum(gram if gram.dim() == 2 else unpack_upper(gram, 6) for gram in grams)
    np.testing.assert_allclose(found, states.T @ states, rtol=1e-5, atol=1e-4)


@pytest.mark.may(
    "Batch normalization in a frozen backbone, with a method that uploads features",
    "The backbone keeps the server's statistics. All clients compute the same features.",
)
@pytest.mark.parametrize("method", WITH_FEATURES)
def test_feature_methods_frozen_body_keeps_statistics(fit, shifted, make_task, method):
    task, uploads = make_task(model=Net()), Uploads()
    before = statistics(task)
    fit(task, shifted(), [method(), uploads])
    assert len(uploads.statistics) == 12
    for found in [*uploads.statistics, statistics(task)]:
        assert all(torch.equal(found[name], value) for name, value in before.items())
    # The training modes are the same as before the fit.
    assert all(layer.training for layer in task.modules())


def test_frozen_body_without_feature_method_equals_plain_trainer(fit, shifted, make_task, quiet):
    stream, task, plain, uploads = shifted(0.0, 1, 1), make_task(model=Net()), make_task(model=Net()), Uploads()
    fit(task, stream, [uploads])
    x, y = stream.get_samples(stream.plan.train[0]["0"])
    L.Trainer(max_epochs=1, **quiet).fit(plain, DataLoader(TensorDataset(x, y), 10))
    tracked = [int(each["model.body.1.num_batches_tracked"]) for each in (*uploads.statistics, statistics(plain))]
    assert tracked == [4] * 4


@pytest.mark.parametrize("method", WITH_FEATURES)
def test_frozen_body_equals_body_in_evaluation_mode(fit, shifted, make_task, method):
    left, put = make_task(model=Net()), make_task(model=Net())
    put.model.body.eval()
    for task in (left, put):
        fit(task, shifted(), [method()])
    assert all(torch.equal(value, put.state_dict()[name]) for name, value in left.state_dict().items())
    assert not put.model.body.training


@pytest.mark.parametrize("method", WITH_FEATURES)
@pytest.mark.parametrize("learns", [True, False])
def test_frozen_layers_guard_without_frozen_statistics_changes_nothing(
    fit, shifted, make_task, monkeypatch, method, learns
):
    """`FrozenLayers.rest` does not change the trained weights if a module has no frozen batch normalization."""
    states = []
    for rests in (True, False):
        task = make_task(model=Net(freeze=False)) if learns else make_task()
        if not rests:
            monkeypatch.setattr(FrozenLayers, "rest", lambda self, module: None)
        fit(task, shifted(), [method()])
        states.append(task.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_layer_unfrozen_in_later_round_updates_statistics(fit, shifted, make_task):
    class Unfreezes(BaseFinetuning):
        def freeze_before_training(self, pl_module):
            pass

        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch == 2:
                pl_module.model.body.requires_grad_(True)

    class Tracked(Callback):
        def __init__(self):
            self.batches = []

        def on_round_end(self, trainer, pl_module):
            self.batches.append(int(pl_module.model.body[1].num_batches_tracked))

    task, tracked = make_task(model=Net()), Tracked()
    fit(task, shifted(), [Fed3R(), Unfreezes(), tracked])
    assert tracked.batches[:2] == [0, 0] and 0 < tracked.batches[2] < tracked.batches[3]


@pytest.mark.parametrize("frozen", [True, False])
def test_fed3r_constant_body_sums_features_of_server_model(fit, shifted, make_task, frozen):
    task, stream = make_task(model=Net(freeze=frozen)), shifted()
    trainer = fit(task, stream, [Fed3R()], reductions={"model.body.*": "constant"})
    assert_equal_ridge_sums(trainer, task, stream)


def test_ridge_classifier_sums_features_of_server_model(fit, shifted):
    torch.manual_seed(0)
    task, stream = RidgeClassifier(Net(freeze=False), num_classes=4), shifted(rounds=1)
    before = statistics(task)
    fit(task, stream)
    assert all(torch.equal(value, before[name]) for name, value in statistics(task).items())
    features, y = trained_features(task, stream, (0, 1))
    np.testing.assert_allclose(task.readout.A, np.eye(4)[y].T @ features, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", [FedProto, ICaRL])
def test_plain_trainer_frozen_body_keeps_statistics(make_task, quiet, method):
    task = make_task(model=Net())
    before = statistics(task)
    data = DataLoader(TensorDataset(torch.randn(40, 6) + 3, torch.arange(40) % 4), 8)
    L.Trainer(max_epochs=2, callbacks=[method()], **quiet).fit(task, data)
    assert all(torch.equal(value, before[name]) for name, value in statistics(task).items())
    assert all(layer.training for layer in task.modules())


def names(module):
    return [name for name, _ in frozen_layers(module)]


def test_frozen_layers_partly_frozen_body_yields_frozen_blocks(make_task):
    blocks = [nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5, affine=affine)) for affine in (True, False, True, False)]
    net = nn.Sequential(*blocks, nn.Linear(5, 4))
    assert names(net) == []
    net[:2].requires_grad_(False)
    assert names(net) == ["0.1", "1.1"]
    net[2][1].requires_grad_(False)
    assert names(net) == ["0.1", "1.1", "2.1"]


def test_frozen_layers_input_norm_of_trainable_body_not_yielded(make_task):
    net = Flat()
    net.insert(0, nn.BatchNorm1d(6, affine=False))
    assert names(make_task(model=net)) == ["model.0", "model.2"]
    net[1].requires_grad_(True)
    assert names(make_task(model=net)) == []


def test_frozen_layers_buffers_without_parameters_not_yielded(make_task):
    class Noise(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(6))

        def forward(self, x):
            return x + self.scale * torch.randn_like(x) if self.training else x

    net = Flat()
    net.insert(0, Noise())
    assert names(make_task(model=net)) == ["model.2"]
