"""FedProx: the proximal term, and the drop-in against a hand-written loop."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision

from lightning_fcl.callbacks import FedProx
from lightning_fcl.methods.fedprox import proximal_term
from lightning_fcl.methods.step import Step


def a_step():
    params = {"body.w": torch.randn(3, 2, requires_grad=True), "head.w": torch.randn(2, requires_grad=True)}
    server = {"body.w": torch.randn(3, 2), "head.w": torch.randn(2), "head.running_mean": torch.randn(2)}
    return Step(params, server, None, torch.zeros(1, 2), None)


def test_value():
    step = a_step()
    flat = [
        torch.cat([state[n].flatten() for n in step.params]).detach().numpy() for state in (step.params, step.server)
    ]
    expected = 0.5 * ((flat[0] - flat[1]) ** 2).sum()
    assert proximal_term(step.params, step.server).item() == pytest.approx(expected, rel=1e-6)
    assert FedProx(mu=0.3).penalty({}, step).item() == pytest.approx(0.3 * expected, rel=1e-6)


def test_gradient():
    step = a_step()
    FedProx(mu=0.3).penalty({}, step).backward()
    for name, value in step.params.items():
        torch.testing.assert_close(value.grad, 0.3 * (value.detach() - step.server[name]))


def test_part():
    step = a_step()
    FedProx(mu=2.0, part="head.*").penalty({}, step).backward()
    assert step.params["body.w"].grad is None
    torch.testing.assert_close(step.params["head.w"].grad, 2 * (step.params["head.w"] - step.server["head.w"]).detach())


def test_mu_zero_is_fedavg():
    assert FedProx(mu=0.0).penalty({}, a_step()) == 0.0


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"^Expected `mu` to be at least 0 but got -0\.1\.$"):
        FedProx(mu=-0.1)
    message = "Expected `part` to match a trainable parameter but `tail.*` matches none."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        FedProx(part="tail.*").penalty({}, a_step())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("mu", [0.0, 0.8])
def test_drops_in(make_task, samples, train, by_hand, assert_same, mu, accumulate):
    task, copied, data, starts = make_task(), make_task(), samples(), []
    train(task, [FedProx(mu)], data, accumulate_grad_batches=accumulate)

    def loss(output, x, y):
        pairs = zip(copied.parameters(), starts[-1], strict=True)
        return F.cross_entropy(output, y) + mu / 2 * sum(((p - q) ** 2).sum() for p, q in pairs)

    by_hand(copied, data, loss, 2, lambda epoch: starts.append(copy.deepcopy(list(copied.parameters()))), accumulate)
    assert_same(task, copied)


def test_frozen_parameters_stay_out(make_task, samples, train):
    task = make_task()
    task.model[1].requires_grad_(False)
    before = task.model[1].weight.clone()
    train(task, [FedProx(0.5)], samples())
    assert torch.equal(task.model[1].weight, before)
    message = "Expected `part` to match a trainable parameter but `model.1.*` matches none."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        train(task, [FedProx(0.5, part="model.1.*")], samples())


def test_loss_scaling_is_refused(make_task, samples, train):
    plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]
    message = (
        'Expected a Trainer without loss scaling for `FedProx` but got `precision="16-mixed"`. Use "bf16-mixed" or '
        '"32-true".'
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        train(make_task(), [FedProx()], samples(), plugins=plugins)


def test_nothing_watches_the_model_afterwards(make_task, samples, train):
    task = make_task()
    train(task, [FedProx()], samples())
    assert len(task._forward_hooks) == 0
