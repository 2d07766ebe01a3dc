"""Tests of unlearning: the model after a client is removed equals a model trained without the client."""

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from raising import raises

from lightning_fcl import FederatedStrategy, FederatedStream
from lightning_fcl.callbacks import ContinualMetrics, IntrinsicPlasticity, Unlearning
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidValueError, UnknownNameError
from lightning_fcl.models import EchoStateNetwork
from lightning_fcl.tasks.reservoir import ReservoirClassifier

EVERYBODY = (0, 1, 2, 3)


def arrays():
    rng = np.random.default_rng(0)
    y = np.arange(96) % 3
    return (rng.normal(size=(96, 8, 2)) + y[:, None, None]).astype(np.float32), y, np.repeat(EVERYBODY, 24)


def run(fit, clients=EVERYBODY, callbacks=(), rounds=3, steps=5, share="statistics", symmetric=False, **kwargs):
    """Run a federation of the given clients, and return the task and the Trainer.

    Each client has ``steps`` new sequences in every round.
    """
    x, y, owner = arrays()
    chosen = np.isin(owner, clients)
    stream = FederatedStream.from_arrays(
        x[chosen],
        y[chosen],
        scenario=ClassIncremental(num_experiences=1, rounds_per_experience=rounds, samples_per_round=steps),
        split=Split(test=0.0),
        client_ids=owner[chosen],
        seed=0,
    )
    # Assign samples per client, so that a client's samples do not depend on the set of clients.
    stream.setup("fit")
    order = {str(c): np.flatnonzero(owner[chosen] == c) for c in clients}
    for round_idx, current in enumerate(stream.plan.train):
        current.update({c: rows[round_idx * steps : (round_idx + 1) * steps] for c, rows in order.items()})
    task = ReservoirClassifier(EchoStateNetwork(2, 12, seed=0), 3, upload=share, symmetric=symmetric).double()
    trainer = fit(task, stream, callbacks, seed=0, **kwargs)
    return task, trainer


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_unlearning_equals_training_without_client(fit, after, max_vectorized_clients, symmetric):
    forgotten, _ = run(
        fit, callbacks=[Unlearning({1: after})], max_vectorized_clients=max_vectorized_clients, symmetric=symmetric
    )
    never, _ = run(fit, clients=(0, 2, 3), symmetric=symmetric)
    everybody, _ = run(fit, symmetric=symmetric)
    assert int(forgotten.readout.n) == int(never.readout.n)
    torch.testing.assert_close(forgotten.readout.weight, never.readout.weight, rtol=0, atol=1e-9)
    assert (everybody.readout.weight - never.readout.weight).abs().max() > 1e-3


def test_unlearning_trainer_can_test(fit, quiet):
    task, _ = run(fit, callbacks=[Unlearning({1: 0})])
    stream = FederatedStream.from_arrays(*arrays()[:2], scenario=ClassIncremental(1), client_ids=arrays()[2], seed=0)
    trainer = L.Trainer(strategy=FederatedStrategy(), callbacks=[Unlearning({1: 0})], **quiet)
    assert 0 <= trainer.test(task, datamodule=stream, verbose=False)[0]["test/accuracy"] <= 1


def test_unlearning_several_clients_at_different_rounds(fit):
    forgotten, _ = run(fit, callbacks=[Unlearning({"0": 2, "3": 0})])
    never, _ = run(fit, clients=(1, 2))
    torch.testing.assert_close(forgotten.readout.weight, never.readout.weight, rtol=0, atol=1e-9)


def test_unlearning_removed_client_does_not_train_and_has_no_state(fit):
    unlearning = Unlearning({"2": 0})
    uploads = []

    class Watch(L.Callback):
        def on_round_end(self, trainer, module):
            uploads.append(sorted(trainer.strategy.server.record.upload_bytes))

    _, trainer = run(fit, callbacks=[unlearning, Watch()])
    assert uploads == [["0", "1", "2", "3"], ["0", "1", "3"], ["0", "1", "3"]]
    assert trainer.strategy.server.client_store["2"] == {}
    assert unlearning.unlearned_clients == ["2"]


def test_unlearning_ignores_statistics_of_earlier_reservoir(fit):
    """Intrinsic plasticity changes the reservoir, so the sums restart from zero without earlier contributions."""
    x, y, owner = arrays()
    # Client 1 has no samples of the last experience, so its contribution belongs to the previous experience.
    there = (owner != 1) | (y != 2)
    scenario = ClassIncremental(num_experiences=3, rounds_per_experience=2, class_order=[0, 1, 2])
    stream = FederatedStream.from_arrays(
        x[there], y[there], owner[there], scenario=scenario, split=Split(test=0.0), seed=0
    )
    task = ReservoirClassifier(EchoStateNetwork(2, 12, seed=0), 3).double()
    fit(task, stream, [IntrinsicPlasticity(), Unlearning({"1": 5})], seed=0)
    assert int(task.readout.n) == 8 * int((y[owner != 1] == 2).sum())


def test_unlearning_resumed_fit_keeps_removed_clients(fit, tmp_path):
    whole, _ = run(fit, callbacks=[Unlearning({"1": 0})])
    _, trainer = run(fit, callbacks=[Unlearning({"1": 0})], max_epochs=2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    unlearning = Unlearning({"1": 0})
    continued, _ = run(fit, callbacks=[unlearning], ckpt_path=tmp_path / "two.ckpt")
    assert unlearning.unlearned_clients == ["1"]
    assert torch.equal(continued.readout.weight, whole.readout.weight)


def test_unlearning_metrics_equal_test_accuracy_of_new_model(fit):
    x, y, owner = arrays()
    metrics = ContinualMetrics()
    stream = FederatedStream.from_arrays(x, y, scenario=ClassIncremental(1), client_ids=owner, seed=0)
    task = ReservoirClassifier(EchoStateNetwork(2, 12, seed=0), 3).double()
    fit(task, stream, [Unlearning({"0": 0}), metrics], seed=0)
    with torch.no_grad():
        tx, ty = stream.get_samples(stream.plan.test)
        right = (task(tx).argmax(dim=-1) == ty[:, None]).sum()
    assert sum(metrics.record["rounds"][-1]["correct"]["server"]) == int(right)


class Absent(L.Callback):
    """Removes the data of client 1 from the first two rounds."""

    def on_fit_start(self, trainer, pl_module):
        for current in trainer.datamodule.plan.train[:2]:
            del current["1"]


def test_unlearning_invalid_requests_raise(fit):
    with raises(UnknownNameError, "requests"):
        run(fit, callbacks=[Unlearning({"9": 0})])
    for never in (-1, 3):
        with raises(InvalidValueError, "requests"):
            run(fit, callbacks=[Unlearning({"0": 2, "1": never})])
    with raises(InvalidValueError, "requests"):
        run(fit, callbacks=[Unlearning({"1": 2})], max_epochs=2)
    with raises(InvalidValueError, "requests"):
        run(fit, callbacks=[Absent(), Unlearning({"1": 0})])
    with raises(InvalidValueError, "module"):
        run(fit, callbacks=[Unlearning({"1": 0})], share="weights")
    assert not FederatedStrategy().federation.participation.withdrawn_clients
