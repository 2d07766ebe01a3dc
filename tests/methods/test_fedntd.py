"""Tests of FedNTD: distillation of all classes except the true class."""

import copy

import pytest
import torch
import torch.nn.functional as F

from lightning_fcl.callbacks import FedNTD
from lightning_fcl.methods.context import Client, Step


def divergence(student, teacher, y, temperature):
    """Return the mean KL divergence between teacher and student over all classes except the true class."""
    total = 0.0
    for own, known, label in zip(student, teacher, y.tolist(), strict=True):
        others = [c for c in range(len(own)) if c != label]
        p, q = ((logits[others] / temperature).softmax(dim=0) for logits in (known, own))
        total = total + (p * (p / q).log()).sum()
    return total / len(y)


def test_fedntd_with_two_classes_has_zero_gradient():
    student, y = torch.randn(5, 2, requires_grad=True), torch.tensor([0, 1, 1, 0, 1])
    step = Step({}, {}, None, student, lambda state, x: torch.randn(5, 2), y=y)
    assert (torch.autograd.grad(FedNTD().penalty(Client(), step), student)[0] == 0).all()


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_fedntd_in_plain_trainer_equals_hand_written_loop(make_task, samples, train, by_hand, assert_same, temperature):
    task, data, start = make_task(), samples(), {}
    hand = copy.deepcopy(task)

    def begin(epoch):
        start["model"] = copy.deepcopy(hand)

    def loss(output, x, y):
        apart = divergence(output, start["model"](x).detach(), y, temperature)
        return F.cross_entropy(output, y) + 2.0 * temperature**2 * apart

    train(task, [FedNTD(2.0, temperature)], data)
    by_hand(hand, data, loss, begin=begin)
    assert_same(task, hand, 1e-5)
