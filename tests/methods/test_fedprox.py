"""Tests of FedProx: the proximal term, and training compared with a hand-written loop."""

import copy

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from raising import raises

from lightning_fcl import Classifier
from lightning_fcl.callbacks import AGEM, EWC, FedProx
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.methods.context import Client, Step
from lightning_fcl.models import MLP


def test_fedprox_pattern_limits_proximal_term():
    params = {"body.w": torch.randn(3, 2, requires_grad=True), "head.w": torch.randn(2, requires_grad=True)}
    server = {"body.w": torch.randn(3, 2), "head.w": torch.randn(2), "head.running_mean": torch.randn(2)}
    step = Step(params, server, None, torch.zeros(1, 2), None)
    FedProx(mu=2.0, pattern="head.*").penalty(Client(), step).backward()
    assert step.params["body.w"].grad is None
    torch.testing.assert_close(
        step.params["head.w"].grad, 2 * (step.params["head.w"] - step.received_state["head.w"]).detach()
    )


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("mu", [0.0, 0.8])
def test_fedprox_in_plain_trainer_equals_hand_written_loop(
    make_task, samples, train, by_hand, assert_same, mu, accumulate
):
    task, copied, data, starts = make_task(), make_task(), samples(), []
    train(task, [FedProx(mu)], data, accumulate_grad_batches=accumulate)

    def loss(output, x, y):
        pairs = zip(copied.parameters(), starts[-1], strict=True)
        return F.cross_entropy(output, y) + mu / 2 * sum(((p - q) ** 2).sum() for p, q in pairs)

    by_hand(copied, data, loss, 2, lambda epoch: starts.append(copy.deepcopy(list(copied.parameters()))), accumulate)
    assert_same(task, copied)


def test_fedprox_skips_frozen_parameters(make_task, samples, train):
    task = make_task()
    task.model[1].requires_grad_(False)
    before = task.model[1].weight.clone()
    train(task, [FedProx(0.5)], samples())
    assert torch.equal(task.model[1].weight, before)
    with raises(InvalidValueError, "pattern"):
        train(task, [FedProx(0.5, pattern="model.1.*")], samples())


def test_method_with_loss_scaling_raises(make_task, samples, train):
    plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]
    with raises(InvalidValueError, "precision"):
        train(make_task(), [FedProx()], samples(), plugins=plugins)


class Detour(Classifier):
    """A module whose training step calls `self.model` instead of the module itself."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.model(x), y)


@pytest.mark.parametrize("make", [lambda: FedProx(0.5), lambda: EWC(5.0), lambda: AGEM(5)])
@pytest.mark.parametrize("federated", [False, True])
def test_methods_without_output_support_any_training_step(make_stream, samples, train, fit, federated, make):
    tasks = []
    for kind in (Classifier, Detour):
        torch.manual_seed(0)
        tasks.append(kind(MLP([6, 5, 4]), 4, lambda params: torch.optim.SGD(params, lr=0.1)))
    plain = copy.deepcopy(tasks[0])
    for task, methods in (*((task, [make()]) for task in tasks), (plain, [])):
        if federated:
            fit(task, make_stream(), methods, max_vectorized_clients=1, seed=0)
        else:
            for part in (samples([0, 2]), samples([1, 3], seed=1)):
                train(task, methods, part)
    for left, right in zip(*(task.parameters() for task in tasks), strict=True):
        torch.testing.assert_close(left, right)
    # The method changed the training.
    assert not torch.allclose(plain.model[1].weight, tasks[1].model[1].weight, atol=1e-4)
