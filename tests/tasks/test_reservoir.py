"""Tests of reservoir tasks: federated solutions equal the solution on all data, computed in NumPy."""

import logging
import os
import subprocess
import sys

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from raising import raises
from torch.utils.data import DataLoader, TensorDataset

from lightning_fcl import ReservoirClassifier, ReservoirRegressor
from lightning_fcl.callbacks import ContinualMetrics, FedProx, LwF
from lightning_fcl.errors import InvalidValueError, UnknownNameError
from lightning_fcl.models import EchoStateNetwork
from lightning_fcl.tasks.reservoir import ReservoirTrainer


class Watch(Callback):
    """Records the server's readout after each round."""

    def __init__(self):
        self.weights = []

    def on_round_end(self, trainer, pl_module):
        self.weights.append(pl_module.readout.weight.clone().numpy())


def seen(stream, rounds=None, client=None):
    """Return the training samples of all clients or one client, repeated for each round that used the samples."""
    plan = stream.plan.train[:rounds]
    rows = [part for current in plan for name, part in current.items() if client in (None, name)]
    return stream.get_samples(np.concatenate(rows))


def centralized(by_numpy, task, x, y, beta=1e-2):
    a, b = by_numpy.statistics(task.reservoir, x, y, signed=task.targets.signed)
    return by_numpy.solve(a, b, beta)


def assert_weight(task, expected, tolerance=1e-9):
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(task.readout.weight.numpy(), expected, rtol=0, atol=tolerance)


def assert_logged(trainer, task, x, y, quantity, expected):
    for evaluate, stage in ((trainer.validate, "val"), (trainer.test, "test")):
        logged = evaluate(task, DataLoader(TensorDataset(x, y), batch_size=16), verbose=False)[0]
        assert logged[f"{stage}/{quantity}"] == pytest.approx(expected, rel=1e-4 if quantity == "error" else 1e-6)


@pytest.fixture
def train(quiet):
    """Return a function that fits a task with a plain Trainer, without shuffling the data."""

    def run(task, data, epochs=1, callbacks=(), validation=None, **kwargs):
        trainer = L.Trainer(max_epochs=epochs, callbacks=list(callbacks), **{**quiet, **kwargs})
        loaders = [DataLoader(TensorDataset(*part), batch_size=7) for part in (data, validation) if part is not None]
        trainer.fit(task, *loaders)
        return trainer

    return run


# Tests of IncFed.


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("max_vectorized_clients", [1, 2, 7, "auto"])
@pytest.mark.parametrize(("clients", "increments", "seed"), [(1, 1, 0), (1, 4, 1), (7, 1, 2), (5, 3, 3)])
def test_reservoir_incfed_equals_centralized_solution(
    fit, make_series_stream, make_reservoir_task, by_numpy, symmetric, max_vectorized_clients, clients, increments, seed
):
    stream, task = make_series_stream(clients, increments, seed), make_reservoir_task(symmetric=symmetric)
    fit(task, stream, max_vectorized_clients=max_vectorized_clients)
    x, y = seen(stream)
    assert stream.plan.num_rounds == increments and len(y) == len(np.unique(x[:, 0, 0])) > 70
    assert_weight(task, centralized(by_numpy, task, x, y))
    assert task.readout.n == 9 * len(y)
    pooled = make_reservoir_task(symmetric=symmetric)
    pooled.readout.reset(pooled.reservoir.weights_hash())
    pooled.accumulate_samples(pooled.readout.A[None], pooled.readout.B[None], x, y, [len(y)])
    for name in ("A", "B"):
        torch.testing.assert_close(getattr(task.readout, name), getattr(pooled.readout, name), rtol=0, atol=1e-10)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_reservoir_solution_is_independent_of_order(fit, make_series_stream, make_reservoir_task, by_numpy, order):
    stream, task, watch = make_series_stream(3, 3, domain_order=order), make_reservoir_task(), Watch()
    fit(task, stream, [watch])
    assert {order.index(g) for g in stream.plan.groups[stream.plan.train[0]["0"]]} == {0}
    # The readout after each round equals the solution on all data until this round.
    for rounds in (1, 2, 3):
        expected = centralized(by_numpy, task, *seen(stream, rounds))
        np.testing.assert_allclose(watch.weights[rounds - 1], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("options", [{"num_layers": 2, "units": 7, "washout": 4}, {"bias_scaling": 0.3}])
def test_reservoir_signed_targets_equal_centralized_solution(
    fit, make_series_stream, make_reservoir, by_numpy, options
):
    stream = make_series_stream(4, 2)
    task = ReservoirClassifier(make_reservoir(**options), 4, beta=1e-2, targets="-1/1")
    fit(task, stream)
    assert_weight(task, centralized(by_numpy, task, *seen(stream)))


def test_reservoir_same_data_in_two_rounds_count_twice(fit, make_series_stream, make_reservoir_task, by_numpy):
    stream, task = make_series_stream(3, rounds_per_experience=2), make_reservoir_task()
    fit(task, stream)
    assert len(seen(stream)[1]) == 2 * len(seen(stream, 1)[1])
    assert_weight(task, centralized(by_numpy, task, *seen(stream)))


def test_reservoir_second_fit_resets_statistics_if_changed(fit, make_series_stream, make_reservoir_task, by_numpy):
    task, first, second = make_reservoir_task(), make_series_stream(2), make_series_stream(3, seed=5, samples=60)
    fit(task, first)
    fit(task, second)
    both = [torch.cat(pair) for pair in zip(seen(first), seen(second), strict=True)]
    assert_weight(task, centralized(by_numpy, task, *both))
    with torch.no_grad():
        task.reservoir.gain *= 0.9
    fit(task, make_series_stream(2))
    assert_weight(task, centralized(by_numpy, task, *seen(first)))


# Tests of FedAvg.


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("max_vectorized_clients", [1, 2, "auto"])
@pytest.mark.parametrize("increments", [1, 3])
def test_reservoir_upload_weights_is_mean_of_client_solutions(
    fit, make_series_stream, make_reservoir_task, by_numpy, max_vectorized_clients, increments, symmetric
):
    stream, watch = make_series_stream(4, increments), Watch()
    task = make_reservoir_task(upload="weights", symmetric=symmetric)
    fit(task, stream, [watch], max_vectorized_clients=max_vectorized_clients)
    # A client keeps its statistics between rounds.
    for round_idx in range(increments):
        sizes = {client: len(rows) for client, rows in stream.plan.train[round_idx].items()}
        assert len(set(sizes.values())) > 1
        own = [centralized(by_numpy, task, *seen(stream, round_idx + 1, client)) for client in sizes]
        expected = np.average(own, axis=0, weights=list(sizes.values()))
        np.testing.assert_allclose(watch.weights[round_idx], expected, rtol=0, atol=1e-9)
    assert np.abs(expected - centralized(by_numpy, task, *seen(stream))).max() > 1e-3


def test_reservoir_client_statistics_reset_if_reservoir_changed(fit, make_series_stream, make_reservoir_task, by_numpy):
    stream, task = make_series_stream(2, 2), make_reservoir_task(upload="weights")

    class Change(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                with torch.no_grad():
                    pl_module.reservoir.gain *= 0.8

    fit(task, stream, [Change()])
    parts = stream.plan.train[1]
    own = [centralized(by_numpy, task, *stream.get_samples(rows)) for rows in parts.values()]
    assert_weight(task, np.average(own, axis=0, weights=[len(rows) for rows in parts.values()]))


def test_reservoir_evaluates_client_readouts_with_upload_weights(
    fit, make_series_stream, make_reservoir_task, by_numpy
):
    stream, task, metrics = make_series_stream(2), make_reservoir_task(upload="weights"), ContinualMetrics()
    fit(task, stream, [metrics])
    x, y = stream.get_samples(stream.plan.test)
    states = by_numpy.run(task.reservoir, x)[2]
    correct = metrics.record["rounds"][0]["correct"]
    for client in ("0", "1"):
        outputs = states @ centralized(by_numpy, task, *seen(stream, client=client)).T
        assert sum(correct[client]) == (outputs.argmax(-1) == y.numpy()[:, None]).sum()
    task, metrics = make_reservoir_task(), ContinualMetrics()
    fit(task, stream, [metrics])
    assert set(metrics.record["rounds"][0]["correct"]) == {"server"}


# Tests of the bytes of uploads and downloads.


@pytest.mark.parametrize(("symmetric", "b_size"), [(False, 12 * 12), (True, 12 * 13 // 2)])
def test_reservoir_upload_statistics_bytes(fit, make_series_stream, make_reservoir_task, symmetric, b_size):
    stream, metrics = make_series_stream(3, 2), ContinualMetrics()
    fit(make_reservoir_task(symmetric=symmetric), stream, [metrics])
    assert len(metrics.record["rounds"]) == 2
    for entry in metrics.record["rounds"]:
        assert entry["upload_bytes"] == dict.fromkeys("012", 8 * (b_size + 12 * 4) + 8)
        assert entry["download_bytes"] == dict.fromkeys("012", 8 * 12 * 4)


def test_reservoir_upload_weights_bytes(fit, make_series_stream, make_reservoir_task):
    metrics = ContinualMetrics()
    fit(make_reservoir_task(upload="weights"), make_series_stream(3, 2), [metrics])
    for entry in metrics.record["rounds"]:
        assert entry["upload_bytes"] == entry["download_bytes"] == dict.fromkeys("012", 8 * 12 * 4)


# Tests of the inputs and targets of the readout.


def features_by_hand(states, readout):
    return {"steps": states, "last": states[:, -1:], "mean": states.mean(axis=1, keepdims=True)}[readout]


@pytest.mark.parametrize("readout", ["steps", "last", "mean"])
@pytest.mark.parametrize("options", [{}, {"washout": 3, "num_layers": 2}])
def test_reservoir_readout_kinds_equal_solution(fit, make_series_stream, make_reservoir, by_numpy, readout, options):
    stream = make_series_stream(3, 2)
    task = ReservoirClassifier(make_reservoir(**options), 4, beta=1e-2, readout=readout)
    fit(task, stream)
    x, y = seen(stream)
    states = features_by_hand(by_numpy.run(task.reservoir, x)[2][:, task.reservoir.washout :], readout)
    targets = np.repeat(np.eye(4)[y.numpy()], states.shape[1], axis=0)
    states = states.reshape(-1, states.shape[-1])
    assert_weight(task, by_numpy.solve(targets.T @ states, states.T @ states, 1e-2))
    assert task.readout.n == len(states)
    outputs = task(x).flatten(0, -2)
    np.testing.assert_allclose(outputs.numpy(), states @ task.readout.weight.numpy().T, rtol=0, atol=1e-10)
    assert task(x).shape == ((len(y), 9 - task.reservoir.washout, 4) if readout == "steps" else (len(y), 4))


@pytest.mark.parametrize("washout", [0, 3])
@pytest.mark.parametrize("readout", ["steps", "last"])
def test_reservoir_labels_of_every_step_equal_solution(train, make_series, make_reservoir, by_numpy, washout, readout):
    x = torch.from_numpy(make_series(40)[0])
    y = torch.randint(4, (40, 9))
    task = ReservoirClassifier(make_reservoir(washout=washout), 4, beta=1e-2, readout=readout)
    trainer = train(task, (x, y))
    first = washout if readout == "steps" else 8
    states = by_numpy.run(task.reservoir, x)[2][:, first:].reshape(-1, 12)
    labels = y[:, first:].flatten().numpy()
    assert_weight(task, by_numpy.solve(np.eye(4)[labels].T @ states, states.T @ states, 1e-2))
    right = ((states @ task.readout.weight.numpy().T).argmax(-1) == labels).mean()
    assert_logged(trainer, task, x, y, "accuracy", right)


def test_reservoir_readout_mean_with_step_labels_raises(train, make_series, make_reservoir_task):
    x = torch.from_numpy(make_series(8)[0])
    message = 'Expected a target for each sequence with `readout="mean"`, but got a target for each step. '
    message += 'Use `readout="steps"`.'
    with raises(InvalidValueError, "readout"):
        train(make_reservoir_task(readout="mean"), (x, torch.zeros(8, 9, dtype=torch.long)))


@pytest.mark.parametrize("stage", ["fit", "validate", "test"])
@pytest.mark.parametrize("steps", [6, 12])
def test_reservoir_wrong_number_of_step_labels_raises(train, make_series, make_reservoir_task, quiet, stage, steps):
    x, y = torch.from_numpy(make_series(8)[0]), torch.zeros(8, steps, dtype=torch.long)
    with raises(InvalidValueError, "y"):
        getattr(L.Trainer(max_epochs=1, **quiet), stage)(make_reservoir_task(), DataLoader(TensorDataset(x, y)))


@pytest.mark.parametrize("readout", ["steps", "last", "mean"])
@pytest.mark.parametrize("epochs", [1, 3])
def test_reservoir_plain_trainer_adds_data_once(train, make_series, make_reservoir_task, by_numpy, readout, epochs):
    x, y = map(torch.from_numpy, make_series())
    task = make_reservoir_task(readout=readout)
    trainer = train(task, (x, y), epochs)
    states = features_by_hand(by_numpy.run(task.reservoir, x)[2], readout)
    targets = np.repeat(np.eye(4)[y.numpy()], states.shape[1], axis=0)
    flat = states.reshape(-1, 12)
    assert_weight(task, by_numpy.solve(targets.T @ flat, flat.T @ flat, 1e-2))
    assert task.readout.n == len(flat)
    right = ((flat @ task.readout.weight.numpy().T).argmax(-1) == targets.argmax(-1)).mean()
    assert_logged(trainer, task, x, y, "accuracy", right)


@pytest.mark.parametrize("share", ["statistics", "weights"])
def test_reservoir_plain_trainer_validates_solved_readout(train, make_series, make_reservoir_task, share):
    data, task = tuple(map(torch.from_numpy, make_series())), make_reservoir_task(upload=share)
    trainer = train(task, data, epochs=2, validation=data)
    logged = trainer.callback_metrics["val/accuracy"]
    # This is the accuracy if all weights of the readout are 0, because the predicted class is then 0.
    unsolved = float((data[1] == 0).double().mean())
    assert float(logged) != pytest.approx(unsolved) and bool(task.readout.weight.any())
    assert trainer.validate(task, DataLoader(TensorDataset(*data), 7), verbose=False)[0]["val/accuracy"] == logged


def test_reservoir_second_plain_fit_adds_data(train, make_series, make_reservoir_task, by_numpy):
    parts, task = [tuple(map(torch.from_numpy, make_series(seed=seed))) for seed in (0, 1)], make_reservoir_task()
    for part in parts:
        train(task, part, epochs=2)
    assert_weight(task, centralized(by_numpy, task, *(torch.cat(pair) for pair in zip(*parts, strict=True))))


def test_reservoir_one_client_equals_plain_trainer(fit, make_series_stream, make_reservoir_task, by_numpy):
    """With a stream, the epochs of a plain Trainer are rounds with different data."""
    federated, plain = make_reservoir_task(), make_reservoir_task()
    fit(federated, make_series_stream(1, 3))
    fit(plain, make_series_stream(1, 3), strategy="auto")
    assert_weight(plain, federated.readout.weight.numpy())
    assert int(plain.readout.n) == int(federated.readout.n)


@pytest.mark.parametrize("readout", ["steps", "last", "mean"])
@pytest.mark.parametrize("washout", [0, 3])
def test_reservoir_regressor_of_sequences_equals_solution(
    train, make_series, make_reservoir, by_numpy, readout, washout
):
    x = torch.from_numpy(make_series(50)[0])
    y = torch.stack([x.mean(dim=(1, 2)), x[:, -1, 0]], dim=1)
    task = ReservoirRegressor(make_reservoir(washout=washout), 2, beta=1e-3, readout=readout)
    trainer = train(task, (x, y))
    states = features_by_hand(by_numpy.run(task.reservoir, x)[2][:, washout:], readout)
    targets = np.repeat(y.double().numpy(), states.shape[1], axis=0)
    flat = states.reshape(-1, 12)
    expected = by_numpy.solve(targets.T @ flat, flat.T @ flat, 1e-3)
    assert_weight(task, expected)
    error = ((flat @ expected.T - targets) ** 2).mean()
    assert_logged(trainer, task, x, y, "error", error)


@pytest.mark.parametrize("washout", [0, 3])
@pytest.mark.parametrize("readout", ["steps", "last"])
def test_reservoir_regressor_of_steps_equals_solution(train, make_series, make_reservoir, by_numpy, washout, readout):
    x = torch.from_numpy(make_series(30, steps=12)[0])
    # The target is the next step.
    x, y = x[:, :-1], x[:, 1:, :2]
    task = ReservoirRegressor(make_reservoir(washout=washout), 2, beta=1e-3, readout=readout)
    trainer = train(task, (x, y))
    first = washout if readout == "steps" else 10
    flat = by_numpy.run(task.reservoir, x)[2][:, first:].reshape(-1, 12)
    targets = y[:, first:].double().numpy().reshape(-1, 2)
    expected = by_numpy.solve(targets.T @ flat, flat.T @ flat, 1e-3)
    assert_weight(task, expected)
    error = ((flat @ expected.T - targets) ** 2).mean()
    assert_logged(trainer, task, x, y, "error", error)


# Tests of several values of the regularization.


def best_beta(by_numpy, task, betas, data, validation):
    """Return the first value of ``beta`` with the most correct steps, and the readout weights for this value."""
    a, b = by_numpy.statistics(task.reservoir, *data)
    states = by_numpy.run(task.reservoir, validation[0])[2]
    solutions = [by_numpy.solve(a, b, beta) for beta in betas]
    right = [((states @ w.T).argmax(-1) == validation[1].numpy()[:, None]).sum() for w in solutions]
    assert len(set(right)) > 1
    return betas[int(np.argmax(right))], solutions[int(np.argmax(right))]


@pytest.mark.parametrize("betas", [[1e-5, 1e-2, 1.0, 100.0, 1e4], [1e4, 100.0, 1e-5]])
@pytest.mark.parametrize("symmetric", [False, True])
def test_reservoir_several_betas_selects_best_on_validation(
    fit, make_series_stream, make_reservoir_task, by_numpy, betas, symmetric
):
    stream = make_series_stream(3, 2, validation=0.3, samples=120)
    task = make_reservoir_task(beta=betas, symmetric=symmetric)
    fit(task, stream)
    beta, weight = best_beta(by_numpy, task, betas, seen(stream), stream.get_samples(stream.plan.validation))
    assert task.readout.beta == beta
    assert_weight(task, weight)


def test_reservoir_plain_trainer_selects_best_beta(train, make_series, make_reservoir_task, by_numpy):
    data, validation = ([torch.from_numpy(part) for part in make_series(seed=seed)] for seed in (0, 1))
    betas = [1e4, 1e-3, 10.0]
    task = make_reservoir_task(beta=betas)
    train(task, data, epochs=2, validation=validation)
    beta, weight = best_beta(by_numpy, task, betas, data, validation)
    assert task.readout.beta == beta
    assert_weight(task, weight)


def test_reservoir_regressor_selects_beta_with_smallest_error(train, make_series, make_reservoir, by_numpy):
    x, betas = torch.from_numpy(make_series(80)[0]), [100.0, 1e-4, 1.0]
    data, validation = ((part, part[:, -1, :1]) for part in (x[:50], x[50:]))
    task = ReservoirRegressor(make_reservoir(), 1, beta=betas)
    train(task, data, validation=validation)
    states, held = (by_numpy.run(task.reservoir, part)[2].reshape(-1, 12) for part in (data[0], validation[0]))
    targets, wanted = (np.repeat(part[1].double().numpy(), 9, axis=0) for part in (data, validation))
    solutions = [by_numpy.solve(targets.T @ states, states.T @ states, beta) for beta in betas]
    errors = [((held @ w.T - wanted) ** 2).sum() for w in solutions]
    assert task.readout.beta == betas[int(np.argmin(errors))]
    assert_weight(task, solutions[int(np.argmin(errors))])


@pytest.mark.parametrize("plain", [False, True])
def test_reservoir_several_betas_without_validation_raises(
    fit, train, make_series, make_series_stream, make_reservoir_task, plain
):
    task = make_reservoir_task(beta=[1.0, 2.0])
    with raises(InvalidValueError, "beta"):
        if plain:
            train(task, [torch.from_numpy(part) for part in make_series()])
        else:
            fit(task, make_series_stream())


# Tests of errors and warnings.


@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
def test_reservoir_client_below_min_samples_warns_once(
    fit, make_series_stream, make_reservoir_task, caplog, max_vectorized_clients
):
    stream = make_series_stream(3, 2)
    sizes = [{client: 9 * len(rows) for client, rows in current.items()} for current in stream.plan.train]
    limit = max(sizes[0]["0"], sizes[1]["0"]) + 1
    assert limit <= min(sizes[r][c] for r in (0, 1) for c in ("1", "2"))
    with caplog.at_level(logging.WARNING, "lightning_fcl"):
        fit(make_reservoir_task(min_samples=limit), stream, max_vectorized_clients=max_vectorized_clients)
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("lightning_fcl")]
    assert messages == [
        f"Client 0 uploads statistics that can reveal its data. The number of samples is {sizes[0]['0']}, below "
        f"`min_samples`={limit}. Give the client more samples, or leave the client out."
    ]
    caplog.clear()
    # With `upload="weights"`, clients upload no statistics.
    fit(make_reservoir_task(min_samples=limit, upload="weights"), stream)
    fit(make_reservoir_task(min_samples=min(sizes[r]["0"] for r in (0, 1))), make_series_stream(3, 2))
    assert not [record for record in caplog.records if record.name.startswith("lightning_fcl")]


def test_reservoir_min_samples_default_is_number_of_units():
    reservoir = EchoStateNetwork(3, 20, num_layers=2, seed=0)
    assert ReservoirClassifier(reservoir, 4).min_samples == 40
    assert ReservoirClassifier(reservoir, 4, min_samples=0).min_samples == 0


@pytest.mark.parametrize(
    ("callbacks", "options", "argument"),
    [
        ([FedProx(0.1)], {}, "callbacks"),
        ([LwF()], {}, "callbacks"),
        ([], {"local_epochs": 3, "max_vectorized_clients": 1}, "local_epochs"),
        ([], {"local_epochs": 3, "max_vectorized_clients": "auto"}, "local_epochs"),
        ([], {"reductions": {"readout.B": "mean"}}, "reductions"),
        ([], {"trainer_args": {"precision": "bf16-mixed"}}, "precision"),
    ],
)
def test_reservoir_unsupported_federation_setting_raises(
    fit, make_series_stream, make_reservoir_task, callbacks, options, argument
):
    with raises(InvalidValueError, argument):
        fit(make_reservoir_task(), make_series_stream(), callbacks, **options)


def test_reservoir_overridden_training_step_raises(fit, make_series_stream, make_reservoir):
    class Own(ReservoirClassifier):
        def training_step(self, batch, batch_idx):
            raise AssertionError("never called")

    with raises(InvalidValueError, "Own"):
        fit(Own(make_reservoir(), 4), make_series_stream())


def test_reservoir_overridden_readout_pairs_is_used(fit, make_series_stream, make_reservoir, by_numpy):
    class Doubled(ReservoirClassifier):
        def readout_pairs(self, x, y):
            return ((states, 2 * wanted) for states, wanted in super().readout_pairs(x, y))

    stream, task = make_series_stream(), Doubled(make_reservoir(), 4, beta=1e-2)
    fit(task, stream)
    assert_weight(task, 2 * centralized(by_numpy, task, *seen(stream)))


@pytest.mark.parametrize(
    ("kind", "size", "y", "argument"),
    [
        (ReservoirClassifier, 3, torch.tensor([0, 1, 2, 2, 1, 3, 0, 1]), "num_classes"),
        (ReservoirClassifier, 4, torch.tensor([0, 1, 2, 3, 1, -1, 0, 1]), "num_classes"),
        (ReservoirClassifier, 4, torch.full((8,), 0.5), "y"),
        (ReservoirRegressor, 2, torch.zeros(8, 3), "num_outputs"),
        (ReservoirRegressor, 2, torch.zeros(8), "num_outputs"),
        (ReservoirRegressor, 2, torch.full((8, 2), torch.nan), "y"),
    ],
)
def test_reservoir_invalid_targets_raise(train, make_series, make_reservoir, kind, size, y, argument):
    x = torch.from_numpy(make_series(8)[0])
    with raises(InvalidValueError, argument):
        train(kind(make_reservoir(), size), (x, y))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"readout": "first"}, (UnknownNameError, "readout")),
        ({"upload": "data"}, (UnknownNameError, "upload")),
        ({"targets": "0/2"}, (UnknownNameError, "targets")),
        ({"num_classes": 0}, (InvalidValueError, "num_classes")),
        (
            {"beta": []},
            (InvalidValueError, "beta"),
        ),
        (
            {"beta": [1.0, 2.0], "upload": "weights"},
            (InvalidValueError, "beta"),
        ),
        ({"beta": [1.0, -2.0]}, (InvalidValueError, "beta")),
    ],
)
def test_reservoir_invalid_arguments_raise(make_reservoir, options, expected):
    with raises(*expected):
        ReservoirClassifier(make_reservoir(), **{"num_classes": 4, **options})


# Tests of interrupted rounds, memory and the number of clients per vectorized step.


@pytest.mark.parametrize("share", ["statistics", "weights"])
@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
def test_reservoir_interrupted_round_is_rolled_back(
    fit, make_series_stream, make_reservoir_task, caplog, share, max_vectorized_clients
):
    class Stop(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.current_epoch == 1 and batch_idx == 1:
                raise RuntimeError("stopped")

    task, one = make_reservoir_task(upload=share), make_reservoir_task(upload=share)
    with pytest.raises(RuntimeError, match="stopped"):
        fit(task, make_series_stream(3, 2), [Stop()], max_vectorized_clients=max_vectorized_clients)
    fit(one, make_series_stream(3, 2), max_epochs=1, max_vectorized_clients=max_vectorized_clients)
    assert all(torch.equal(value, one.state_dict()[name]) for name, value in task.state_dict().items())
    assert "Rolled back an interrupted round" in caplog.text


def test_reservoir_trainer_num_vectorized_clients_fits_memory():
    for units, size in ((10, 256), (1000, 16), (6000, 1)):
        task = ReservoirClassifier(EchoStateNetwork(1, 1, seed=0), 2)
        task.readout.B = torch.empty(units, units, dtype=torch.float64, device="meta")
        assert ReservoirTrainer(task).num_vectorized_clients == size


MEMORY = """
import resource, sys, warnings
warnings.filterwarnings("ignore")
import lightning.pytorch as L, torch
from lightning_fcl import FederatedStream, FederatedStrategy, ReservoirClassifier
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.models import EchoStateNetwork
torch.set_num_threads(1)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
scenario, partition = ClassIncremental(num_experiences=1), IID(num_clients=4)
for n in map(int, sys.argv[1:]):
    x, y = torch.randn(n, 30, 1), torch.arange(n) % 2
    stream = FederatedStream.from_arrays(x, y, scenario=scenario, partition=partition, batch_size=16, seed=0)
    task = ReservoirClassifier(EchoStateNetwork(1, 200, seed=0), 2)
    trainer = L.Trainer(strategy=FederatedStrategy(), max_epochs=1, accelerator="cpu", **quiet)
    trainer.fit(task, datamodule=stream)
    assert int(task.readout.n) > n * 20
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.long
def test_reservoir_memory_is_independent_of_number_of_sequences():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEMORY, "200", "4000"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    peaks = [int(line) for line in printed.split()[-2:]]
    # All states together have 96 MB. The size is in KiB here.
    states = 4000 * 30 * 200 * 4 // 1024
    assert peaks[1] - peaks[0] < states / 4


def test_reservoir_infinite_max_epochs_raises(make_reservoir_task, quiet):
    loader = DataLoader(TensorDataset(torch.zeros(2, 5, 2), torch.zeros(2, dtype=torch.long)))
    with pytest.raises(InvalidValueError, check=lambda error: error.argument == "max_epochs"):
        L.Trainer(max_epochs=-1, **quiet).fit(make_reservoir_task(), loader)


def test_reservoir_checkpoint_of_other_task_raises(fit, make_series_stream, make_reservoir_task, tmp_path):
    stream = make_series_stream(rounds_per_experience=2)
    trainer = fit(make_reservoir_task(), stream, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    other = make_reservoir_task()
    other.betas = [0.7]
    with raises(InvalidValueError, "task", code="other-recipe"):
        fit(other, make_series_stream(rounds_per_experience=2), ckpt_path=tmp_path / "one.ckpt")
