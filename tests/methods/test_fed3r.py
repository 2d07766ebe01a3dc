"""Tests of Fed3R: the classifier equals ridge regression on all clients' samples, for any partition."""

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from raising import raises

from lightning_fcl import FederatedStream, Swarm
from lightning_fcl.callbacks import Fed3R
from lightning_fcl.data.scenarios import DomainIncremental, ODFCLScenario
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.methods.head_calibration import last_layer

from .test_ccvr import still


def ridge(features, labels, classes, beta):
    """Return ridge regression weights with a bias: NumPy's least squares with sqrt(beta) I as additional rows."""
    states = np.concatenate([features, np.ones((len(features), 1))], axis=1).astype(np.float64)
    size = states.shape[1]
    rows = np.concatenate([states, np.sqrt(beta) * np.eye(size)])
    targets = np.concatenate([np.eye(classes)[labels], np.zeros((size, classes))])
    return torch.from_numpy(np.linalg.lstsq(rows, targets, rcond=None)[0].T).float()


def layer_of(task):
    weight, bias = (task.state_dict()[name] for name in last_layer(task))
    return torch.cat([weight, bias[:, None]], dim=1)


def expected_of(task, stream, rounds, beta=1.0, temperature=0.1, base=()):
    """Return the classifier of the samples of ``base`` and of the given rounds.

    It is the ridge solution, divided by the norm of each class's weights and by the temperature.
    """
    own = [np.asarray(base, dtype=np.int64), *(part for r in rounds for part in stream.plan.train[r].values())]
    x, y = stream.get_samples(np.concatenate(own))
    with torch.no_grad():
        solution = ridge(task.embed(x).numpy(), y.numpy(), task.num_classes, beta)
    norms = np.linalg.norm(solution[:, :-1].numpy(), axis=1, keepdims=True)
    return solution / torch.from_numpy(np.where(norms > 0, norms, 1.0)) / temperature


class Layers(Callback):
    """Records the server's last layer and the clients with an accepted upload after each round."""

    def __init__(self):
        self.kept, self.trained = [], []

    def on_round_end(self, trainer, pl_module):
        self.kept.append(layer_of(pl_module))
        self.trained.append([*trainer.strategy.server.record.accepted])


@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
@pytest.mark.parametrize("max_vectorized_clients", [1, 3])
def test_fed3r_layer_equals_pooled_ridge_regression(fit, make_stream, make_task, partition, max_vectorized_clients):
    task, stream, layers = make_task(still), make_stream(partition=partition, rounds_per_experience=3), Layers()
    fit(task, stream, [Fed3R(beta=0.3, temperature=0.2), layers], max_vectorized_clients=max_vectorized_clients)
    first, both = (expected_of(task, stream, rounds, 0.3, 0.2) for rounds in ([0], [0, 3]))
    for found, wanted in zip(layers.kept, [first] * 3 + [both] * 3, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("owners", ["one client", "equal", "by class"])
def test_fed3r_unequal_classes_predictions_equal_normalized_ridge(fit, make_task, owners):
    """The number of samples of class k is 480 / k^3. The predictions do not depend on the owners of the samples."""
    generator = np.random.default_rng(0)
    y = np.repeat(np.arange(4), [480, 60, 18, 8])
    x = (generator.normal(size=(len(y), 6)) + 0.8 * np.eye(6)[y]).astype(np.float32)
    owner = {"one client": 0 * y, "equal": generator.integers(0, 3, len(y)), "by class": np.minimum(y, 2)}[owners]
    words = {"scenario": DomainIncremental(rounds_per_experience=1), "split": Split(test=0.0), "seed": 0}
    stream = FederatedStream.from_arrays(x, y, owner, 0 * y, batch_size=16, **words)
    task = make_task(still)
    fit(task, stream, [Fed3R(beta=0.5)])
    trial = torch.from_numpy(generator.normal(size=(500, 6)).astype(np.float32))
    with torch.no_grad():
        features, trial_features = (task.embed(one).numpy().astype(np.float64) for one in (torch.from_numpy(x), trial))
        predictions = task(trial).argmax(dim=1).numpy()
    states = np.concatenate([features, np.ones((len(y), 1))], axis=1)
    solution = np.linalg.solve(states.T @ states + 0.5 * np.eye(states.shape[1]), states.T @ np.eye(4)[y]).T
    plain, normalized = (
        trial_features @ rows[:, :-1].T + rows[:, -1]
        for rows in (solution, solution / np.linalg.norm(solution[:, :-1], axis=1, keepdims=True))
    )
    # Outputs closer than this differ by rounding.
    gap = np.diff(np.sort(normalized, axis=1)[:, -2:], axis=1)[:, 0] > 1e-4
    assert (predictions == normalized.argmax(axis=1))[gap].all() and gap.mean() > 0.9
    assert (normalized.argmax(axis=1) > 0).sum() > (plain.argmax(axis=1) > 0).sum()


def test_fed3r_layer_is_trained_and_recomputed_per_experience(fit, make_stream, make_task):
    task, stream, layers = make_task(), make_stream(rounds_per_experience=2), Layers()
    fit(task, stream, [Fed3R(), layers])
    first, second, third, _ = layers.kept
    assert not torch.equal(first, second)
    # Samples of classes 2 and 3 are in the second experience only.
    assert first[2:].abs().max() == 0 and third[2:].abs().max() > 0


def test_fed3r_counts_client_in_its_first_round(fit, make_stream, make_task):
    task, stream, layers = make_task(still), make_stream(num_experiences=1, rounds_per_experience=8), Layers()
    fit(task, stream, [Fed3R(), layers], participation=1, seed=0)
    drawn = [client for (client,) in layers.trained]
    assert len(set(drawn)) == 3 and drawn[0] in drawn[1:]
    changes = [i for i in range(8) if i == 0 or not torch.equal(layers.kept[i], layers.kept[i - 1])]
    assert changes == [drawn.index(client) for client in dict.fromkeys(drawn)]
    torch.testing.assert_close(layers.kept[-1], expected_of(task, stream, [0]), rtol=1e-4, atol=1e-4)


def test_fed3r_missed_synchronization_is_uploaded_again(fit, make_stream, make_task):
    task, stream, layers = make_task(still), make_stream(num_experiences=1, rounds_per_experience=2), Layers()
    swarm = Swarm(missed_rounds={"0": [0]})
    fit(task, stream, [Fed3R(), layers], swarm=swarm)
    assert not torch.equal(*layers.kept)
    torch.testing.assert_close(layers.kept[1], expected_of(task, stream, [0]), rtol=1e-4, atol=1e-4)


def test_fed3r_sums_include_base_session(fit, make_task, quiet):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(80, 6, generator=generator), torch.arange(80) % 4
    scenario = ODFCLScenario(4, 2, 1, 2, train_per_class=10, test_per_class=4, rounds_per_session=1)
    task, stream = make_task(still), FederatedStream.from_arrays(x, y, scenario=scenario, batch_size=5, seed=0)
    fit(task, stream, [Fed3R()])
    assert len(stream.plan.base_samples) == 20
    wanted = expected_of(task, stream, [0], base=stream.plan.base_samples)
    torch.testing.assert_close(layer_of(task), wanted, rtol=1e-4, atol=1e-4)
    assert (layer_of(task)[:, -1] != 0).all()


def test_fed3r_uploads_sums_once_per_experience(fit, make_stream, make_task):
    sent = {}
    for name, methods in (("alone", []), ("with sums", [Fed3R()])):
        sent[name] = []

        class Bytes(Callback):
            def on_round_end(self, trainer, pl_module, to=sent[name]):
                to.append(sum(trainer.strategy.server.record.upload_bytes.values()))

        fit(make_task(), make_stream(rounds_per_experience=2), [*methods, Bytes()])
    more = [after - before for before, after in zip(*sent.values(), strict=True)]
    assert more == [3 * 8 * (4 * 6 + 21), 0] * 2


def test_fed3r_with_repeated_samples_raises(fit, make_stream, make_task):
    with raises(InvalidValueError, "history", value="seen"):
        fit(make_task(), make_stream(history="seen"), [Fed3R()])
