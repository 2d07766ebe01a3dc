"""Tests of fits with differential privacy: hand loops, budgets, resuming, and settings that are not covered."""

import inspect
import logging

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from raising import raises
from torch import nn

import lightning_fcl.callbacks
from lightning_fcl import (
    AdaptiveClip,
    Classifier,
    ClientSpeeds,
    Deadline,
    DifferentialPrivacy,
    FederatedStrategy,
    Poisson,
    Swarm,
)
from lightning_fcl.callbacks import (
    SCAFFOLD,
    ContinualMetrics,
    Fed3R,
    FedCBDR,
    FedDyn,
    FedNova,
    FedProx,
    ICaRL,
    LwF,
    Replay,
)
from lightning_fcl.errors import InvalidStateError, InvalidValueError
from lightning_fcl.federation.uploads import Stage, UploadTransform
from lightning_fcl.methods.base import MethodBase, overrides_hook
from lightning_fcl.methods.method import Method
from lightning_fcl.privacy.accounting import Release, compute_epsilon
from lightning_fcl.privacy.ledger import PrivacyLedger


class Updates(UploadTransform):
    """A transform with which clients send updates instead of states, and which changes nothing."""

    stage = Stage.CLIP
    needs_updates = True


def private(**changes):
    return DifferentialPrivacy(**{"unit": "client", "delta": 1e-2, "clip": 1.0, "noise_multiplier": 1.0, **changes})


def state(task):
    return {name: value.clone() for name, value in task.state_dict().items()}


def equal(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("max_vectorized_clients", ["auto", 1])
def test_without_clip_and_noise_the_fit_equals_a_plain_fit(fit, make_task, make_stream, max_vectorized_clients):
    """All clients have data in all rounds, so the expected number of clients is the number of uploads."""

    def run(**kwargs):
        task = make_task()
        fit(task, make_stream(num_clients=4), max_vectorized_clients=max_vectorized_clients, **kwargs)
        return state(task)

    nothing = run(privacy=private(clip=float("inf"), noise_multiplier=0.0))
    assert equal(nothing, run(client_weights="uniform", upload_transforms=[Updates()]))
    plain = run(client_weights="uniform")
    for name, value in plain.items():
        torch.testing.assert_close(nothing[name], value, rtol=1e-5, atol=1e-6)


def test_poisson_rounds_equal_a_hand_loop_with_the_fixed_denominator(fit, make_stream):
    """A client takes one full-batch step of SGD. The update is the gradient times the learning rate."""
    torch.manual_seed(0)
    clip, prob, rate, num_clients = 0.05, 0.4, 0.1, 8
    stream = make_stream(num_clients=num_clients, num_experiences=1, rounds_per_experience=6, batch_size=1000)
    task = Classifier(nn.Linear(6, 4), 4, lambda params: torch.optim.SGD(params, lr=rate))
    weight, bias = (value.detach().double().numpy().copy() for value in task.model.parameters())
    fit(task, stream, privacy=private(clip=clip, noise_multiplier=0.0), participation=Poisson(prob), seed=3)
    sampled = []
    for round_idx in range(stream.plan.num_rounds):
        drawn = Poisson(prob).draw(stream.plan, round_idx, 3)
        sampled.append(len(drawn))
        total_weight, total_bias = np.zeros_like(weight), np.zeros_like(bias)
        for client in drawn:
            x, y = stream.get_samples(stream.plan.train[round_idx][client])
            x, y = x.double().numpy(), y.numpy()
            z = x @ weight.T + bias
            p = np.exp(z - z.max(axis=1, keepdims=True))
            error = (p / p.sum(axis=1, keepdims=True) - np.eye(4)[y]) / len(x)
            step_weight, step_bias = -rate * error.T @ x, -rate * error.sum(axis=0)
            norm = np.sqrt((step_weight**2).sum() + (step_bias**2).sum())
            factor = min(1, clip / norm)
            total_weight += factor * step_weight
            total_bias += factor * step_bias
        weight += total_weight / (prob * num_clients)
        bias += total_bias / (prob * num_clients)
    assert len(set(sampled)) > 1
    found = dict(task.model.named_parameters())
    np.testing.assert_allclose(found["weight"].detach().numpy(), weight, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["bias"].detach().numpy(), bias, rtol=1e-4, atol=1e-6)


def test_rounds_without_clients_are_completed_and_recorded(fit, make_task, make_stream):
    metrics, task = ContinualMetrics(), make_task()
    before = state(task)
    stream = make_stream(num_clients=3, rounds_per_experience=3)
    fit(task, stream, [metrics, SCAFFOLD()], privacy=private(), participation=Poisson(1e-9))
    assert [entry["upload_bytes"] for entry in metrics.record["rounds"]] == [{}] * 6
    assert not equal(before, state(task))
    assert [entry["epsilon"] for entry in metrics.record["rounds"]] == sorted(
        entry["epsilon"] for entry in metrics.record["rounds"]
    )


@pytest.mark.parametrize("participation", [1.0, Poisson(0.5)])
@pytest.mark.parametrize("noise", ["server", "client"])
def test_epsilon_of_the_whole_stream_is_within_the_budget(fit, make_task, make_stream, participation, noise):
    settings = private(epsilon=3.0, noise_multiplier=None, noise=noise)
    metrics = ContinualMetrics()
    trainer = fit(make_task(), make_stream(num_clients=4), [metrics], privacy=settings, participation=participation)
    entries = metrics.record["rounds"]
    account = trainer.strategy.federation.privacy
    # The noise of clients has no amplification by sampling.
    prob = 0.5 if isinstance(participation, Poisson) and noise == "server" else 1.0
    for number, entry in enumerate(entries, start=1):
        expected = compute_epsilon([Release(account.noise_multiplier, prob)] * number, 1e-2)
        assert entry["epsilon"] == pytest.approx(expected)
    assert 2.99 < entries[-1]["epsilon"] <= 3.0


def test_budget_ends_the_fit_before_it_is_overspent(fit, make_task, make_stream, caplog):
    settings = private(epsilon=2.5, noise_multiplier=2.0)
    stream = make_stream(num_clients=4, rounds_per_experience=5)
    with caplog.at_level(logging.WARNING):
        trainer = fit(make_task(), stream, [metrics := ContinualMetrics()], privacy=settings)
    number = len(metrics.record["rounds"])
    assert 0 < number < 10 and "The privacy budget allows" in caplog.text
    assert compute_epsilon([Release(2.0)] * number, 1e-2) <= 2.5
    assert compute_epsilon([Release(2.0)] * (number + 1), 1e-2) > 2.5
    assert trainer.current_epoch == number


@pytest.mark.parametrize("clip", [0.3, AdaptiveClip(start=0.3)])
@pytest.mark.parametrize("has_file", [False, True])
def test_resumed_fit_has_the_same_bits_and_is_charged_once(fit, make_task, make_stream, tmp_path, clip, has_file):
    def settings(name):
        return private(clip=clip, ledger=str(tmp_path / name) if has_file else None)

    def run(max_epochs, name, folder, ckpt_path=None):
        task = make_task()
        saving = ModelCheckpoint(tmp_path / folder, "last", enable_version_counter=False)
        trainer = fit(
            task,
            make_stream(num_clients=4, rounds_per_experience=3),
            [SCAFFOLD(), saving],
            FederatedStrategy(privacy=settings(name), participation=Poisson(0.6)),
            max_epochs,
            ckpt_path,
            {"enable_checkpointing": True},
        )
        return state(task), trainer.strategy.federation.privacy

    whole, account = run(6, "whole", "a")
    assert len(account.ledger) == 6
    run(3, "part", "b")
    resumed, again = run(6, "part", "c", tmp_path / "b" / "last.ckpt")
    assert equal(whole, resumed) and len(again.ledger) == 6 and again.epsilon() == account.epsilon()
    if has_file:
        assert len(PrivacyLedger(tmp_path / "part")) == 6
        # A repeated round of the same run is charged once, and a run with other settings is charged in addition.
        repeated, _ = run(6, "part", "d", tmp_path / "b" / "last.ckpt")
        assert equal(whole, repeated) and len(PrivacyLedger(tmp_path / "part")) == 6


def test_second_fit_with_the_same_strategy_is_charged_in_addition(quiet, make_task, make_stream):
    trainer = L.Trainer(strategy=FederatedStrategy(privacy=private()), max_epochs=2, **quiet)
    task = make_task()
    trainer.fit(task, datamodule=make_stream())
    trainer.fit_loop.epoch_progress.reset()
    trainer.fit(task, datamodule=make_stream())
    account = trainer.strategy.federation.privacy
    assert account.epsilon() == compute_epsilon([Release(1.0)] * 4, 1e-2)


def test_ledger_counts_runs_with_other_settings(fit, make_task, make_stream, tmp_path):
    def run(seed, max_epochs=None, **changes):
        settings = private(ledger=str(tmp_path / "ledger"), **changes)
        return fit(make_task(seed=seed), make_stream(num_clients=4), max_epochs=max_epochs, privacy=settings)

    run(0)
    run(0)
    assert len(PrivacyLedger(tmp_path / "ledger")) == 2
    run(1)
    charges = PrivacyLedger(tmp_path / "ledger").charges
    assert len(charges) == 4
    spent = compute_epsilon([charge.release for charge in charges], 1e-2)
    with raises(InvalidStateError, "epsilon"):
        run(2, epsilon=spent)
    run(2, epsilon=1.3 * spent, max_epochs=1)
    assert len(PrivacyLedger(tmp_path / "ledger")) == 5


def test_fit_with_another_gradient_clip_is_charged_in_addition(fit, make_task, make_stream, tmp_path):
    for gradient_clip_val in (None, 0.1, 0.1):
        settings = private(ledger=str(tmp_path / "ledger"))
        options = {"gradient_clip_val": gradient_clip_val}
        fit(make_task(), make_stream(num_clients=4), privacy=settings, trainer_args=options)
    assert len(PrivacyLedger(tmp_path / "ledger")) == 4


def test_checkpoint_without_its_ledger_raises(fit, make_task, make_stream, tmp_path):
    def run(max_epochs, name, ckpt_path=None):
        saving = ModelCheckpoint(tmp_path, "last", enable_version_counter=False)
        strategy = FederatedStrategy(privacy=private(ledger=str(tmp_path / name)))
        fit(make_task(), make_stream(), [saving], strategy, max_epochs, ckpt_path, {"enable_checkpointing": True})

    run(1, "ledger")
    with raises(InvalidStateError, "ledger"):
        run(2, "lost", tmp_path / "last.ckpt")


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"participation": 0.5}, "participation"),
        ({"participation": 1}, "participation"),
        ({"client_weights": "samples"}, "client_weights"),
        ({"client_weights": {"0": 1.0}}, "client_weights"),
        ({"swarm": Swarm()}, "swarm"),
        ({"synchronization": Deadline(ClientSpeeds(0.01))}, "synchronization"),
    ],
)
def test_strategy_rejects_settings_that_are_not_covered(options, argument):
    with raises(InvalidValueError, argument):
        FederatedStrategy(privacy=private(), **options)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"callbacks": [EarlyStopping("server/accuracy")]}, "monitor"),
        ({"callbacks": [ModelCheckpoint(monitor="server/accuracy")]}, "monitor"),
        ({"callbacks": [FedNova()]}, "callbacks"),
        ({"callbacks": [FedCBDR(5)]}, "callbacks"),
        ({"reductions": {"*": "median"}}, "reductions"),
    ],
)
def test_fit_rejects_what_is_not_covered(fit, make_task, make_stream, options, argument):
    saves = any(isinstance(callback, ModelCheckpoint) for callback in options.get("callbacks", ()))
    with raises(InvalidValueError, argument):
        fit(make_task(), make_stream(), privacy=private(), trainer_args={"enable_checkpointing": saves}, **options)


def test_fit_rejects_buffers_and_accepts_local_and_constant_buffers(fit, make_task, make_stream):
    def make():
        return make_task(model=nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)))

    with raises(InvalidValueError, "reductions"):
        fit(make(), make_stream(), privacy=private())
    fit(make(), make_stream(), privacy=private(), reductions={"*running*": "local", "*num_batches*": "local"})


class Sends(Method):
    """A method whose clients send a message in addition to the entries."""

    def message(self, client, trained_state):
        return {"count": torch.ones(1)}


def test_fit_rejects_messages_of_methods(fit, make_task, make_stream):
    with raises(InvalidValueError, "callbacks", value=["Sends"]):
        fit(make_task(), make_stream(), [Sends()], privacy=private())


def test_delta_that_is_too_large_raises(fit, make_task, make_stream):
    with raises(InvalidValueError, "delta"):
        fit(make_task(), make_stream(num_clients=3), privacy=private(delta=0.5))


def test_frozen_parameters_get_no_noise(fit, make_task, make_stream):
    task = make_task(model=nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)))
    task.model[0].requires_grad_(False)
    before = state(task)
    fit(task, make_stream(), privacy=private())
    assert torch.equal(task.model[0].weight, before["model.0.weight"])
    assert not torch.equal(task.model[1].weight, before["model.1.weight"])


METHODS = {
    name: getattr(lightning_fcl.callbacks, name)
    for name in lightning_fcl.callbacks.__all__
    if inspect.isclass(getattr(lightning_fcl.callbacks, name))
    and issubclass(getattr(lightning_fcl.callbacks, name), MethodBase)
}


@pytest.mark.parametrize(
    "method", [FedProx(0.1), LwF(), Replay(5), FedDyn(0.1), SCAFFOLD()], ids=lambda method: type(method).__name__
)
def test_norm_of_everything_that_leaves_a_client_is_at_most_clip(fit, make_task, make_stream, method):
    class Norms(UploadTransform):
        stage = Stage.COUNT
        needs_updates = True
        norms, names = [], set()

        def encode(self, uploads):
            self.norms += uploads.norms().tolist()
            self.names |= {*uploads.names}

    probe = Norms()
    probe.norms, probe.names = [], set()
    fit(
        make_task(),
        make_stream(num_clients=4, rounds_per_experience=2),
        [method],
        privacy=private(clip=0.01, noise_multiplier=0.0),
        upload_transforms=[probe],
    )
    assert len(probe.norms) == 16 and 0.0099 < max(probe.norms) <= 0.01
    assert any("SCAFFOLD" in name for name in probe.names) == isinstance(method, SCAFFOLD)


def test_every_method_that_uploads_declares_private_entries_or_is_rejected():
    """All other tensors leave a client only as updates of the module, which are clipped and noised."""
    uploading = {
        name
        for name, kind in METHODS.items()
        if any(overrides_hook(kind, hook) for hook in ("upload_statistics", "contribute_experience", "message"))
    }
    assert {"SCAFFOLD", "Fed3R", "FedWEIT", "GLFC", "CCVR"} <= uploading
    assert {name for name, kind in METHODS.items() if kind.private_entries} == {"SCAFFOLD"}


@pytest.mark.parametrize("method", [Fed3R(0.1), ICaRL(5)], ids=lambda method: type(method).__name__)
def test_methods_with_undeclared_uploads_are_rejected(fit, make_task, make_stream, method):
    with raises(InvalidValueError, "callbacks", value=type(method).__name__):
        fit(make_task(), make_stream(), [method], privacy=private())
