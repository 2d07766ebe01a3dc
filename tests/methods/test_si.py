"""Tests of SI: the importance, which is computed along the path of training, and the penalty."""

import copy

import pytest
import torch
import torch.nn.functional as F
from kept import memory_of
from lightning.pytorch.callbacks import Callback

from lightning_fcl.callbacks import SI

from .quadratics import CURVATURES, clients, quadratic, value


def importance(memory, name="model.weight"):
    return float(memory[f"importance.{name}"])


@pytest.mark.parametrize("start", [2.5, -9.0])
def test_si_quadratic_importance_is_half_the_curvature(fit, start):
    """For curvature h and learning rate lr, the importance is h / (2 - lr * h), because a sum replaces the integral."""
    task, lr = quadratic(lr=0.05), 0.05
    torch.nn.init.constant_(task.model.weight, start)
    trainer = fit(task, clients(rounds=1), [SI(damping=1e-6)], local_epochs=300)
    for client, curvature in zip("0123", CURVATURES, strict=True):
        kept = importance(trainer.strategy.server.client_store[client]["SI"])
        assert kept == pytest.approx(curvature / (2 - lr * curvature), rel=5e-3)


def by_hand(task, tasks, strength, damping, decay, epochs, batch, lr=0.1):
    """Train by equations 4 and 5 of the paper, and return the importance. The constant c is ``strength / 2``."""
    names = [name for name, _ in task.named_parameters()]
    center, total = {n: p.detach().clone() for n, p in task.named_parameters()}, dict.fromkeys(names, 0.0)
    for x, y in tasks:
        fall, begun = dict.fromkeys(names, 0.0), {n: p.detach().clone() for n, p in task.named_parameters()}
        for _ in range(epochs):
            for inputs, targets in zip(x.split(batch), y.split(batch), strict=True):
                gradients = torch.autograd.grad(F.cross_entropy(task(inputs), targets), list(task.parameters()))
                with torch.no_grad():
                    for (n, p), g in zip(task.named_parameters(), gradients, strict=True):
                        before = p.clone()
                        p -= lr * (g + strength * total[n] * (p - center[n]))
                        fall[n] = fall[n] - g * (p - before)
        center = {n: p.detach().clone() for n, p in task.named_parameters()}
        moved = {n: center[n] - begun[n] for n in names}
        total = {n: decay * total[n] + fall[n].clamp(min=0) / (moved[n].square() + damping) for n in names}
    return total


@pytest.mark.parametrize("accumulate", [1, 2])
def test_si_equals_hand_written_loop(make_task, samples, train, assert_same, accumulate):
    task, tasks = make_task(), [samples([0, 2], 32), samples([1, 3], 32, seed=1), samples([0, 1], 32, seed=2)]
    hand, method = copy.deepcopy(task), SI(3.0, 0.9, normalize=False, damping=0.01)
    for data in tasks:
        train(task, [method], data, epochs=3, accumulate_grad_batches=accumulate)
    total = by_hand(hand, tasks, 3.0, 0.01, 0.9, epochs=3, batch=8 * accumulate)
    assert_same(task, hand, 1e-5)
    for name, expected in total.items():
        torch.testing.assert_close(memory_of(method)[f"importance.{name}"], expected, rtol=1e-3, atol=1e-4)
        assert expected.max() > 1e-2


def test_si_ignores_changes_by_server(fit):
    """The importance is 0 for a client whose loss has no gradient, although other clients change the model."""
    curvatures = CURVATURES * [1, 0, 1, 1]
    task, stream = quadratic(lr=0.05), clients(rounds=4, curvatures=curvatures)
    store = fit(task, stream, [SI()], local_epochs=2).strategy.server.client_store
    assert importance(store["1"]["SI"]) == 0 and importance(store["2"]["SI"]) > 0.01
    assert abs(value(task) - 2.0) > 0.1


def test_si_interrupted_round_restores_client_state(fit, make_stream, make_task):
    class Stops(Callback):
        def on_round_end(self, trainer, module):
            self.server = trainer.strategy.server
            self.kept = copy.deepcopy(dict(self.server.client_store["0"]["SI"]))

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.current_epoch == 1 and batch_idx == 2:
                raise KeyError("within the second round")

    stops = Stops()
    with pytest.raises(KeyError, match="second round"):
        fit(make_task(), make_stream(rounds_per_experience=3), [SI(), stops], max_vectorized_clients=1)
    torch.testing.assert_close(dict(stops.server.client_store["0"]["SI"]), stops.kept, rtol=0, atol=0)
    assert float(stops.kept["fall.model.1.weight"].abs().max()) > 0
