"""Tests of intrinsic plasticity in federations (FedIP, FedCLIP) and plain Trainers, against loops in NumPy."""

import logging
import re

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from raising import raises

from lightning_fcl.callbacks import ContinualMetrics, IntrinsicPlasticity, Replay
from lightning_fcl.data.batching import BatchPlan, order_keys, plan_batches
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.compression import TopK

ROUGH = {"normalize_grad": False, "eta": 1e-4, "sigma": 0.5}


@pytest.fixture
def adapt(by_numpy):
    """Return a NumPy function that computes the new gain and bias after one step of plasticity on a batch."""

    def run(reservoir, x, gain, bias, method):
        net, h, _ = (part[:, reservoir.washout :] for part in by_numpy.run(reservoir, x, gain, bias))
        s2 = method.sigma**2
        db = -(-method.mu / s2 + h / s2 * (2 * s2 + 1 - h**2 + method.mu * h))
        dg = 1 / gain + db * net
        moved = []
        for value, direction in ((gain, dg), (bias, db)):
            mean = direction.sum(axis=1).mean(axis=0)
            # Directions are normalized layer by layer.
            if method.normalize_grad:
                mean = np.concatenate([part / np.linalg.norm(part) for part in np.split(mean, reservoir.num_layers)])
            moved.append(value + method.eta * mean)
        return np.maximum(moved[0], method.min_gain), moved[1]

    return run


@pytest.fixture
def fedip(adapt):
    """Return a NumPy function that runs FedIP for the given rounds and returns the adapted gain and bias."""

    def run(reservoir, stream, method, rounds, gain=None, bias=None, buffers=None):
        size = reservoir.features
        gain = np.ones(size) if gain is None else gain
        bias = np.zeros(size) if bias is None else bias
        for round_idx in rounds:
            states, weights = [], []
            for client, own_rows in stream.plan.train[round_idx].items():
                x, y = stream.get_samples(own_rows)
                remembered = (buffers or {}).get(client, x[:0])
                plan = plan_batches(
                    len(y),
                    method.epochs,
                    BatchPlan(8, stream.shuffle),
                    order_keys(0, [client], round_idx),
                    len(remembered),
                )
                own, x = (gain, bias), torch.cat([x, remembered])
                for rows in plan:
                    own = adapt(reservoir, x[rows], *own, method)
                states.append(own)
                weights.append(len(x))
            gain, bias = (np.average(values, axis=0, weights=weights) for values in zip(*states, strict=True))
        return gain, bias

    return run


class Watch(Callback):
    """A callback that records gain, bias, readout and each client's buffer after each round."""

    def __init__(self):
        self.rounds = []

    def on_round_end(self, trainer, pl_module):
        store = trainer.strategy.server.client_store
        self.rounds.append(
            {
                "gain": pl_module.reservoir.gain.detach().clone(),
                "bias": pl_module.reservoir.bias.detach().clone(),
                "weight": pl_module.readout.weight.clone(),
                "n": int(pl_module.readout.n),
                "buffers": {client: store[client].get("Replay", {}) for client in store},
            }
        )


def assert_plasticity(reservoir, expected, tolerance=1e-9):
    """Assert that gain and bias equal the expected values, and that both differ from their initial values."""
    for value, wanted, start in zip((reservoir.gain, reservoir.bias), expected, (1, 0), strict=True):
        assert np.abs(wanted - start).max() > 1e-3
        np.testing.assert_allclose(value.detach().numpy(), wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("options", [{}, {"mu": 0.2, "sigma": 0.3}, ROUGH, {"local_epochs": 3, "eta": 0.02}])
@pytest.mark.parametrize("max_vectorized_clients", [1, 2, "auto"])
@pytest.mark.parametrize("reservoir", [{}, {"num_layers": 2, "units": 7, "washout": 2, "bias_scaling": 0.3}])
def test_fedip_equals_numpy(
    fit,
    make_series_stream,
    make_reservoir,
    make_reservoir_task,
    fedip,
    by_numpy,
    options,
    max_vectorized_clients,
    reservoir,
):
    stream, method = make_series_stream(3, rounds_per_experience=3), IntrinsicPlasticity(**options)
    task, start = make_reservoir_task(make_reservoir(**reservoir)), make_reservoir(**reservoir)
    fit(task, stream, [method], max_vectorized_clients=max_vectorized_clients)
    # The last round trains the readout and does not change the reservoir.
    expected = fedip(start, stream, method, rounds=[0, 1])
    assert_plasticity(task.reservoir, expected)
    x, y = stream.get_samples(np.concatenate(list(stream.plan.train[2].values())))
    weight = by_numpy.solve(*by_numpy.statistics(start, x, y, 4, False, *expected), 1e-2)
    np.testing.assert_allclose(task.readout.weight.numpy(), weight, rtol=0, atol=1e-7)
    assert int(task.readout.n) == len(y) * (9 - start.washout)


def test_fit_without_plasticity_does_not_adapt(fit, make_series_stream, make_reservoir_task):
    task, stream = make_reservoir_task(), make_series_stream(rounds_per_experience=2)
    # The first fit ends after a round that adapts the reservoir.
    fit(task, stream, [IntrinsicPlasticity()], max_epochs=1)
    fit(task, stream, max_epochs=1)
    assert int(task.readout.n) > 0 and bool(task.readout.weight.any())


def test_server_optimizer_steps_gain_and_bias_in_adapting_rounds(fit, make_series_stream, make_reservoir_task):
    """A server learning rate of 1 equals averaging, and a rate of 0.5 applies half of the update.

    Rounds that train the readout do not change gain and bias.
    """

    def run(**kwargs):
        task, watch = make_reservoir_task(), Watch()
        fit(task, make_series_stream(rounds_per_experience=3), [IntrinsicPlasticity(), watch], **kwargs)
        return task, watch.rounds

    def sgd(lr, **kwargs):
        return lambda parameters: torch.optim.SGD(parameters, lr=lr, **kwargs)

    plain, rounds = run()
    whole, _ = run(server_optimizer=sgd(1.0))
    torch.testing.assert_close(whole.reservoir.gain, plain.reservoir.gain, rtol=0, atol=1e-9)
    _, half = run(server_optimizer=sgd(0.5))
    torch.testing.assert_close(half[0]["gain"] - 1, (rounds[0]["gain"] - 1) / 2, rtol=0, atol=1e-9)
    _, momentum = run(server_optimizer=sgd(0.5, momentum=0.9))
    assert torch.equal(momentum[2]["gain"], momentum[1]["gain"])


def test_one_client_equals_plain_trainer_and_numpy(fit, make_series_stream, make_reservoir_task, fedip):
    federated, plain, method = make_reservoir_task(), make_reservoir_task(), IntrinsicPlasticity(mu=0.1)
    stream = make_series_stream(1, rounds_per_experience=4)
    fit(federated, stream, [method])
    fit(plain, make_series_stream(1, rounds_per_experience=4), [IntrinsicPlasticity(mu=0.1)], strategy="auto")
    for task in (federated, plain):
        assert_plasticity(task.reservoir, fedip(make_reservoir_task().reservoir, stream, method, [0, 1, 2]))
    torch.testing.assert_close(plain.readout.weight, federated.readout.weight, rtol=0, atol=1e-9)
    assert int(plain.readout.n) == int(federated.readout.n)


def test_uploaded_readout_weights_average_on_adapted_reservoir(
    fit, make_series_stream, make_reservoir_task, fedip, by_numpy
):
    stream, method = make_series_stream(3, 2, rounds_per_experience=2), IntrinsicPlasticity()
    task, start, watch = make_reservoir_task(upload="weights"), make_reservoir_task().reservoir, Watch()
    fit(task, stream, [method, watch])
    gain, bias = fedip(start, stream, method, [0])
    gain, bias = fedip(start, stream, method, [2], gain, bias)
    parts = [stream.get_samples(rows) for rows in stream.plan.train[3].values()]
    # The readout uses this experience only, because earlier statistics belong to a reservoir with other gains and
    # biases.
    own = [by_numpy.solve(*by_numpy.statistics(start, x, y, 4, False, gain, bias), 1e-2) for x, y in parts]
    expected = np.average(own, axis=0, weights=[len(y) for _, y in parts])
    np.testing.assert_allclose(task.readout.weight.numpy(), expected, rtol=0, atol=1e-8)


# Tests of FedCLIP.


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
@pytest.mark.parametrize("share", [0.2, 1.0])
def test_fedclip_two_experiences_equal_numpy(
    fit, make_series_stream, make_reservoir_task, fedip, by_numpy, restart, max_vectorized_clients, share
):
    """Gain and bias continue or restart in the second experience. In both cases, clients adapt to replay samples."""
    stream = make_series_stream(3, 2, rounds_per_experience=3)
    method, watch = IntrinsicPlasticity(local_epochs=2, restart=restart), Watch()
    task, start = make_reservoir_task(), make_reservoir_task().reservoir
    replay = Replay(share, "reservoir")
    fit(
        task,
        stream,
        [method, replay, watch],
        client_weights="trained_samples",
        max_vectorized_clients=max_vectorized_clients,
    )

    buffers = [entry["buffers"] for entry in watch.rounds]
    for early, entry in zip(buffers[:2], watch.rounds, strict=False):
        assert not any(early.values()) and not entry["weight"].any()
    for adapts in (3, 4):
        assert torch.equal(watch.rounds[adapts]["weight"], watch.rounds[2]["weight"])
    for client in "012":
        # Rounds 3 and 4 are the rounds of the second experience that adapt.
        for unchanged in (3, 4):
            assert torch.equal(buffers[unchanged][client]["x"], buffers[2][client]["x"])
        for after, experiences in ((2, 1), (5, 2)):
            rows = np.concatenate([stream.plan.train[3 * e][client] for e in range(experiences)])
            x, y = stream.get_samples(rows)
            kept = buffers[after][client]
            size = round(share * stream.plan.num_client_samples(client))
            assert len(kept["y"]) == min(size, len(rows)) > 1
            for sample, label in zip(kept["x"], kept["y"], strict=True):
                assert any(torch.equal(sample, other) and label == said for other, said in zip(x, y, strict=True))

    gain, bias = fedip(start, stream, method, [0, 1])
    np.testing.assert_allclose(watch.rounds[2]["gain"], gain, rtol=0, atol=1e-9)
    remembered = {client: kept["x"] for client, kept in buffers[2].items()}
    began = (None, None) if restart else (gain, bias)
    expected = fedip(start, stream, method, [3, 4], *began, remembered)
    assert_plasticity(task.reservoir, expected)
    if not restart:
        assert np.abs(expected[0] - fedip(start, stream, method, [3, 4], None, None, remembered)[0]).max() > 1e-3

    for last, (g, b), extra in ((2, (gain, bias), {}), (5, expected, buffers[2])):
        parts = [stream.get_samples(rows) for rows in stream.plan.train[last].values()]
        parts += [[kept["x"], kept["y"]] for kept in extra.values()]
        x, y = (torch.cat(column) for column in zip(*parts, strict=True))
        assert watch.rounds[last]["n"] == 9 * len(y)
        weight = by_numpy.solve(*by_numpy.statistics(start, x, y, 4, False, g, b), 1e-2)
        np.testing.assert_allclose(watch.rounds[last]["weight"], weight, rtol=0, atol=1e-7)


@pytest.mark.seconds
@pytest.mark.parametrize("share", ["statistics", "weights"])
def test_resume_equals_uninterrupted_fit(fit, make_series_stream, make_reservoir_task, tmp_path, share):
    def run(folder=None, ckpt_path=None, seed=0):
        task = make_reservoir_task(upload=share, beta=[1e-2, 1.0] if share == "statistics" else 1e-2)
        with torch.no_grad():
            # The initial gain depends on the seed, so the test fails if a checkpoint does not restore the gain.
            task.reservoir.gain += seed
        stream = make_series_stream(4, 2, rounds_per_experience=3, validation=0.2)
        metrics = ContinualMetrics()
        callbacks = [IntrinsicPlasticity(local_epochs=2), Replay(0.3, "reservoir"), metrics]
        saving = [ModelCheckpoint(folder, "{epoch}", save_top_k=-1)] if folder else []
        trainer = fit(
            task, stream, callbacks + saving, ckpt_path=ckpt_path, participation=0.7, client_store="disk",
            trainer_args={"enable_checkpointing": folder is not None},
        )  # fmt: skip
        kept = trainer.strategy.server.client_store
        return task, [entry["correct"] for entry in metrics.record["rounds"]], {client: kept[client] for client in kept}

    whole, record, kept = run(tmp_path)
    for epoch in range(5):
        again, resumed, restored = run(ckpt_path=tmp_path / f"epoch={epoch}.ckpt", seed=7)
        torch.testing.assert_close((again.state_dict(), restored), (whole.state_dict(), kept), rtol=0, atol=0)
        assert resumed == record and again.readout.beta == whole.readout.beta


@pytest.mark.parametrize("round_idx", [1, 2, 4])
@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
def test_interrupted_round_leaves_server_unchanged(
    fit, make_series_stream, make_reservoir_task, round_idx, max_vectorized_clients
):
    class Stop(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.current_epoch == round_idx and batch_idx == 1:
                raise RuntimeError("stopped")

    def run(callbacks, **kwargs):
        task = make_reservoir_task()
        stream = make_series_stream(3, 2, rounds_per_experience=3)
        try:
            fit(
                task,
                stream,
                [IntrinsicPlasticity(), *callbacks],
                max_vectorized_clients=max_vectorized_clients,
                **kwargs,
            )
        except RuntimeError as error:
            assert str(error) == "stopped"
        return task

    cut, before = run([Stop()]), run([], max_epochs=round_idx)
    for name in ("reservoir.gain", "reservoir.bias", "readout.weight"):
        assert torch.equal(cut.state_dict()[name], before.state_dict()[name]), name
    # Round 2 trains the readout. At its start, the round discards the statistics of the previous reservoir.
    if round_idx != 2:
        assert all(torch.equal(value, before.state_dict()[name]) for name, value in cut.state_dict().items())


# Tests in a plain Trainer.


@pytest.mark.parametrize("restart", [False, True])
def test_plain_trainer_adapts_in_all_epochs_except_last(
    train, make_series, make_reservoir_task, adapt, by_numpy, restart
):
    task, start = make_reservoir_task(), make_reservoir_task().reservoir
    method = IntrinsicPlasticity(sigma=0.2, restart=restart)
    gain, bias = np.ones(12), np.zeros(12)
    for seed in (0, 1):
        data = tuple(map(torch.from_numpy, make_series(40, seed=seed)))
        train(task, [method], data, epochs=3)
        if restart:
            gain, bias = np.ones(12), np.zeros(12)
        for x in data[0].split(8) * 2:
            gain, bias = adapt(start, x, gain, bias, method)
        assert_plasticity(task.reservoir, (gain, bias))
        weight = by_numpy.solve(*by_numpy.statistics(start, *data, 4, False, gain, bias), 1e-2)
        np.testing.assert_allclose(task.readout.weight.numpy(), weight, rtol=0, atol=1e-7)


def test_plasticity_with_replay_is_independent_of_order(train, make_series, make_reservoir_task):
    """Plasticity adapts to replay samples regardless of the order of the methods."""

    def run(*methods):
        task = make_reservoir_task()
        for seed in (0, 1):
            train(task, methods, tuple(map(torch.from_numpy, make_series(40, seed=seed))), epochs=3)
        return task.state_dict()

    first, second, without = (
        run(IntrinsicPlasticity(), Replay(20, "reservoir")),
        run(Replay(20, "reservoir"), IntrinsicPlasticity()),
        run(IntrinsicPlasticity()),
    )
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert (first["reservoir.gain"] - without["reservoir.gain"]).abs().max() > 1e-4


# Tests of errors and warnings.


@pytest.mark.parametrize("federated", [False, True])
def test_gains_below_min_gain_clamped_with_one_warning(
    fit, make_series_stream, make_reservoir_task, fedip, caplog, federated
):
    method = IntrinsicPlasticity(sigma=0.02, eta=0.2, min_gain=0.4)
    task, start = make_reservoir_task(), make_reservoir_task().reservoir
    clients = 3 if federated else 1
    stream = make_series_stream(clients, rounds_per_experience=4)
    with caplog.at_level(logging.WARNING, "lightning_fcl"):
        fit(task, stream, [method], **({} if federated else {"strategy": "auto"}))
    assert_plasticity(task.reservoir, fedip(start, stream, method, range(3)))
    # The average of gains of 0.4 may be rounded.
    assert task.reservoir.gain.min().item() == pytest.approx(0.4, abs=1e-12)
    warned = [record.getMessage() for record in caplog.records if "min_gain" in record.getMessage()]
    assert len(warned) == 1
    assert re.match(
        r"Clamped \d+ of the gains to `min_gain`=0\.4, because a unit with gain 0 has a constant activation\. "
        r"Lower `eta` \(0\.2\) or raise `sigma` \(0\.02\)\.$",
        warned[0],
    )


def test_compression_residual_keeps_gains_above_min_gain(fit, make_series_stream, make_reservoir_task):
    lowest = []

    class Lowest(Callback):
        def on_round_end(self, trainer, pl_module):
            lowest.append(float(pl_module.reservoir.gain.min()))

    method = IntrinsicPlasticity(sigma=0.02, eta=0.2, min_gain=0.4)
    fit(make_reservoir_task(), make_series_stream(rounds_per_experience=8), [method, Lowest()], compression=TopK(0.1))
    assert len(lowest) == 8 and lowest[0] > 0.4 == min(lowest)


def test_diverging_gain_raises_and_leaves_server_unchanged(fit, make_series_stream, make_reservoir_task):
    for kwargs in ({}, {"strategy": "auto"}):
        task = make_reservoir_task()
        with raises(InvalidValueError, "eta"):
            fit(
                task, make_series_stream(1, rounds_per_experience=3),
                [IntrinsicPlasticity(eta=1e308, normalize_grad=False)], **kwargs,
            )  # fmt: skip
        assert torch.equal(task.reservoir.gain, torch.ones(12)) and not task.reservoir.bias.any()


def test_step_normalizes_directions_per_layer():
    dg, db = torch.randn(3, 8), torch.randn(3, 8)
    gain, bias = IntrinsicPlasticity(eta=0.5).step(torch.ones(3, 8), torch.zeros(3, 8), dg, db, layers=2)
    for moved in (gain - 1, bias):
        torch.testing.assert_close(moved.view(3, 2, 4).norm(dim=-1), torch.full((3, 2), 0.5))
    literal, _ = IntrinsicPlasticity(eta=0.5, normalize_grad=False, min_gain=1e-9).step(
        torch.full((3, 8), 9.0), torch.zeros(3, 8), dg, db, layers=2
    )
    torch.testing.assert_close(literal, 9 + 0.5 * dg)


def test_step_zero_direction_changes_nothing():
    gain, bias = IntrinsicPlasticity().step(torch.ones(1, 4), torch.zeros(1, 4), torch.zeros(1, 4), torch.zeros(1, 4))
    assert torch.equal(gain, torch.ones(1, 4)) and not bias.any()


def test_plasticity_upload_and_download_bytes_per_round(fit, make_series_stream, make_reservoir, make_reservoir_task):
    metrics, task = ContinualMetrics(), make_reservoir_task(make_reservoir().float())
    fit(task, make_series_stream(3, 2, rounds_per_experience=3), [IntrinsicPlasticity(), metrics])
    plastic, statistics, readout = 2 * 12 * 4, 8 * (12 * 12 + 12 * 4) + 8, 8 * 12 * 4
    for entry, adapts in zip(metrics.record["rounds"], [True, True, False] * 2, strict=True):
        up, down = (plastic, plastic) if adapts else (statistics, readout + plastic)
        assert entry["upload_bytes"] == dict.fromkeys("012", up)
        assert entry["download_bytes"] == dict.fromkeys("012", down)
        assert set(entry["correct"]) == (set() if adapts else {"server"})


def test_module_without_reservoir_raises(fit, make_stream, make_task):
    with raises(InvalidValueError, "module"):
        fit(make_task(), make_stream(), [IntrinsicPlasticity()])


def test_delayed_experiences_raise(fit, make_series_stream, make_reservoir_task):
    stream = make_series_stream(increments=2, rounds_per_experience=2)
    stream.setup("fit")
    first = next(iter(stream.plan.experiences))
    stream.plan.experiences[first] = (0, 1, 1, 1)
    with raises(InvalidValueError, "scenario"):
        fit(make_reservoir_task(), stream, [IntrinsicPlasticity()])


def test_stream_without_adapting_round_raises(fit, make_series_stream, make_reservoir_task):
    for experiences in (1, 2):
        with raises(InvalidValueError, "max_epochs"):
            stream = make_series_stream(increments=experiences, rounds_per_experience=1)
            fit(make_reservoir_task(), stream, [IntrinsicPlasticity()])
