"""Tests that traced and replayed training steps give results that are bitwise identical to those of untraced steps."""

import copy

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from lightning_fcl import Classifier
from lightning_fcl.callbacks import FedProx
from lightning_fcl.local_training import vectorized
from lightning_fcl.local_training.vectorized import TracedStep, is_traceable


class Own(nn.Module):
    """A user-defined layer that reads an attribute that changes each round."""

    def __init__(self):
        super().__init__()
        self.layer, self.rounds = nn.Linear(6, 4), 0

    def forward(self, x):
        return self.layer(x) * (1 + self.rounds)


class Counts(Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.model.rounds += 1


MODELS = {
    "MLP": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)),
    "MLP with dropout and layer norm": lambda: nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.Dropout(0.3), nn.Linear(8, 4)
    ),
    "frozen layer": lambda: nn.Sequential(nn.Linear(6, 8).requires_grad_(False), nn.GELU(), nn.Linear(8, 4)),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4)
    ),
}
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
}


def train(fit, make_stream, monkeypatch, model, after, optimizer="sgd", callbacks=()):
    """Return the state after a fit, and the number of training steps (one per batch shape) that were traced."""
    monkeypatch.setattr(vectorized, "AFTER", after)
    task = Classifier(copy.deepcopy(model), 4, OPTIMIZERS[optimizer])
    stream = make_stream(partition="dirichlet", num_clients=7, rounds_per_experience=3)
    trainer = fit(task, stream, callbacks, max_vectorized_clients=4, local_epochs=3, seed=0)
    steps = trainer.strategy.federation.local_trainer._traced
    return task.state_dict(), sum(step.traced for step in steps.values())


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        ("convolutions", "sgd"),
        ("MLP", "adam"),
        *(pytest.param(kind, "sgd", marks=pytest.mark.long) for kind in MODELS if kind != "convolutions"),
    ],
)
def test_traced_fit_is_bitwise_identical(fit, make_stream, monkeypatch, kind, optimizer):
    torch.manual_seed(0)
    model = MODELS[kind]()
    plain, none = train(fit, make_stream, monkeypatch, model, 10**9, optimizer)
    replayed, some = train(fit, make_stream, monkeypatch, model, 2, optimizer)
    assert none == 0 < some
    assert all(torch.equal(plain[name], replayed[name]) for name in plain)


@pytest.mark.seconds
def test_user_defined_layer_is_not_traced(fit, make_stream, monkeypatch):
    assert not is_traceable(Own()) and not is_traceable(nn.Sequential(Own()))
    torch.manual_seed(0)
    model = Own()
    plain, replayed = (train(fit, make_stream, monkeypatch, model, after, callbacks=[Counts()]) for after in (10**9, 1))
    assert plain[1] == replayed[1] == 0
    assert all(torch.equal(plain[0][name], replayed[0][name]) for name in plain[0])


@pytest.mark.seconds
def test_steps_with_method_are_not_traced(fit, make_stream, monkeypatch):
    assert train(fit, make_stream, monkeypatch, MODELS["MLP"](), 1, callbacks=[FedProx(0.1)])[1] == 0


def test_traced_step_with_different_replay_is_not_replayed():
    calls = []

    def counting(params, rest, batch):
        calls.append(None)
        return [params[0] * len(calls)]

    step = TracedStep(counting, warmup_steps=2)
    # The counter skips 3, because tracing runs the step once more.
    assert [float(step([torch.ones(())], [], [])[0]) for _ in range(5)] == [1, 2, 4, 5, 6]
    assert step.traced == 0


def test_traced_step_untraceable_function_runs_untraced():
    step = TracedStep(lambda params, rest, batch: [params[0] if params[0].sum() > 0 else None], warmup_steps=1)
    assert step([torch.ones(2)], [], [])[0].tolist() == [1, 1]
    assert step([-torch.ones(2)], [], []) == [None] and step.traced == 0
