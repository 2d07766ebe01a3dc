"""Unlearning: a client that is forgotten might never have been there."""

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
    """A federation of some of the clients, each with ``steps`` new sequences in every round."""
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
    # Every client's samples of a round are drawn from its own alone, so that the others do not depend on who is there.
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
def test_forgotten_is_never_seen(fit, after, max_vectorized_clients, symmetric):
    forgotten, _ = run(
        fit, callbacks=[Unlearning({1: after})], max_vectorized_clients=max_vectorized_clients, symmetric=symmetric
    )
    never, _ = run(fit, clients=(0, 2, 3), symmetric=symmetric)
    everybody, _ = run(fit, symmetric=symmetric)
    assert int(forgotten.readout.n) == int(never.readout.n)
    torch.testing.assert_close(forgotten.readout.weight, never.readout.weight, rtol=0, atol=1e-9)
    assert (everybody.readout.weight - never.readout.weight).abs().max() > 1e-3


def test_a_trainer_with_it_tests_too(fit, quiet):
    task, _ = run(fit, callbacks=[Unlearning({1: 0})])
    stream = FederatedStream.from_arrays(*arrays()[:2], scenario=ClassIncremental(1), client_ids=arrays()[2], seed=0)
    trainer = L.Trainer(strategy=FederatedStrategy(), callbacks=[Unlearning({1: 0})], **quiet)
    assert 0 <= trainer.test(task, datamodule=stream, verbose=False)[0]["test/accuracy"] <= 1


def test_several_leave_at_different_times(fit):
    forgotten, _ = run(fit, callbacks=[Unlearning({"0": 2, "3": 0})])
    never, _ = run(fit, clients=(1, 2))
    torch.testing.assert_close(forgotten.readout.weight, never.readout.weight, rtol=0, atol=1e-9)


def test_who_has_left_takes_no_part_and_keeps_nothing(fit):
    unlearning = Unlearning({"2": 0})
    uploads = []

    class Watch(L.Callback):
        def on_round_end(self, trainer, module):
            uploads.append(sorted(trainer.strategy.server.record.upload_bytes))

    _, trainer = run(fit, callbacks=[unlearning, Watch()])
    assert uploads == [["0", "1", "2", "3"], ["0", "1", "3"], ["0", "1", "3"]]
    assert trainer.strategy.server.client_store["2"] == {}
    assert unlearning.unlearned_clients == ["2"]


def test_statistics_of_an_earlier_reservoir_are_not_taken_away(fit):
    """After plasticity the sums begin anew: what a client added before it is not in them any more."""
    x, y, owner = arrays()
    there = (owner != 1) | (
        y != 2
    )  # client 1 has nothing of the last experience, so that its part is of the one before
    scenario = ClassIncremental(num_experiences=3, rounds_per_experience=2, class_order=[0, 1, 2])
    stream = FederatedStream.from_arrays(
        x[there], y[there], owner[there], scenario=scenario, split=Split(test=0.0), seed=0
    )
    task = ReservoirClassifier(EchoStateNetwork(2, 12, seed=0), 3).double()
    fit(task, stream, [IntrinsicPlasticity(), Unlearning({"1": 5})], seed=0)
    assert int(task.readout.n) == 8 * int((y[owner != 1] == 2).sum())


def test_continued_run_remembers_who_has_left(fit, tmp_path):
    whole, _ = run(fit, callbacks=[Unlearning({"1": 0})])
    _, trainer = run(fit, callbacks=[Unlearning({"1": 0})], max_epochs=2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    unlearning = Unlearning({"1": 0})
    continued, _ = run(fit, callbacks=[unlearning], ckpt_path=tmp_path / "two.ckpt")
    assert unlearning.unlearned_clients == ["1"]
    assert torch.equal(continued.readout.weight, whole.readout.weight)


def test_metrics_after_it_are_those_of_the_rest(fit):
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
    """Client 1 has no data in the first two rounds."""

    def on_fit_start(self, trainer, pl_module):
        for current in trainer.datamodule.plan.train[:2]:
            del current["1"]


def test_bad_requests(fit):
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
