"""Tests of the decomposed network: weights equal the paper's equation, and the task selects the sample's network."""

import copy

import pytest
import torch
from raising import raises
from torch import nn
from torch.func import functional_call

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.models import FedWEITNet, SplitViT, ViT, create_vit


def small(classes=6):
    torch.manual_seed(0)
    return ViT(num_classes=classes, image_size=8, patch_size=4, width=8, depth=1, num_heads=2)


def begun(tasks=3, adaptives=(0, 2, 2), threshold=1e-3):
    """Return a network with some started tasks, and the knowledge base of each task as a list of vectors.

    The weights and the knowledge bases differ from their initial values.
    """
    model = FedWEITNet(small(), 4, threshold=threshold)
    others = []
    for task in range(tasks):
        model.start_task(torch.tensor([2 * task, 2 * task + 1]), adaptives[task])
        others.append([torch.randn(model.size) * 0.1 for _ in range(adaptives[task])])
        model.set_adaptives(others[-1])
        with torch.no_grad():
            model.tasks[task].adaptive.add_(torch.randn(model.size) * 0.05)
            model.net.head.weight.normal_()
            model.net.body.norm.weight.add_(0.1)
        model.update_buffers_()
    return model, others


def by_hand(model, task, others, evaluate):
    """Return the weights theta of a task, computed in loops over layers, units and the knowledge base."""
    own, place, unit, weights = model.tasks[task], 0, 0, {}
    for layer, (name, parameter) in enumerate((n, p) for n, p in model.net.named_parameters() if n in model.names):
        size = parameter.numel()
        adaptive = own.adaptive[place : place + size].clone()
        if evaluate:
            adaptive[adaptive.abs() <= model.threshold] = 0
        mask = own.mask[unit : unit + len(parameter)]
        rows = [torch.sigmoid(m) * row for m, row in zip(mask, parameter, strict=True)]
        theta = torch.stack(rows) + adaptive.view_as(parameter)
        for j, other in enumerate(others):
            theta = theta + own.attention[layer, j] * other[place : place + size].view_as(parameter)
        weights[name], place, unit = theta, place + size, unit + len(parameter)
    return weights


@pytest.mark.seconds
@pytest.mark.parametrize("train", [True, False])
def test_fedweit_weights_equal_the_equation(train):
    model, others = begun(threshold=0.02)
    model.train(train)
    x = torch.randn(4, 3, 8, 8)
    expected = functional_call(model.net, by_hand(model, 2, others[2], not train), (x,))
    actual = model(x)
    torch.testing.assert_close(actual[:, 4:], expected[:, 4:])
    if train:
        torch.testing.assert_close(actual, expected)


def test_fedweit_past_task_keeps_its_outputs():
    model = FedWEITNet(small(), 3).eval()
    x = torch.randn(4, 3, 8, 8)
    model.start_task(torch.tensor([0, 1]), 1)
    model.set_adaptives([torch.randn(model.size) * 0.1])
    model.update_buffers_()
    before = model(x)[:, :2]
    model.start_task(torch.tensor([2, 3]), 2)
    model.set_adaptives([torch.randn(model.size), torch.randn(model.size)])
    with torch.no_grad():
        for name, parameter in model.net.named_parameters():
            if name not in model.names:
                parameter.add_(torch.randn_like(parameter))
    model.update_buffers_()
    assert torch.equal(model(x)[:, :2], before)
    assert torch.equal(model.outputs_by_task(x, torch.tensor([0, 1, 1, 0]))[:, :2], before)
    with torch.no_grad():
        model.net.body.blocks[0].mlp.fc1.weight.add_(0.1)
    assert not torch.equal(model(x)[:, :2], before)


def test_outputs_by_task_uses_the_task_of_each_sample():
    model, _ = begun()
    model.eval()
    x, y = torch.randn(7, 3, 8, 8), torch.tensor([5, 0, 2, 1, 4, 3, 0])
    mixed, everything = model.outputs_by_task(x, y), model(x)
    for row, label in enumerate(y.tolist()):
        block = slice(label // 2 * 2, label // 2 * 2 + 2)
        torch.testing.assert_close(mixed[row, block], everything[row, block])
        for other in {0, 2, 4} - {block.start}:  # the networks of other tasks have other outputs
            assert not torch.allclose(mixed[row, other : other + 2], everything[row, other : other + 2])


def test_fedweit_classes_without_a_task_use_the_current_task():
    model, others = begun(tasks=2)
    model.eval()
    x = torch.randn(2, 3, 8, 8)
    expected = functional_call(model.net, by_hand(model, 1, others[1], True), (x,))
    torch.testing.assert_close(model.outputs_by_task(x, torch.tensor([4, 5])), expected)
    torch.testing.assert_close(model(x)[:, 4:], expected[:, 4:])


def test_fedweit_without_a_task_equals_the_network():
    net = small()
    model, x = FedWEITNet(net, 2), torch.randn(2, 3, 8, 8)
    assert torch.equal(model(x), net(x)) and torch.equal(model.outputs_by_task(x, torch.zeros(2).long()), net(x))
    assert model.state_dict()["tasks.0.adaptive"].shape == (0,)


def test_start_task_initializes_the_state_of_the_task():
    model = FedWEITNet(small(), 2)
    base = model.base_vector().clone()
    model.start_task(torch.tensor([0]), 3)
    own = model.tasks[0]
    torch.testing.assert_close(own.adaptive.data, base / 3)
    assert own.mask.shape == (sum(model.units),) and own.attention.shape == (len(model.names), 3)
    assert own.knowledge.shape == base.shape


@pytest.mark.seconds
@pytest.mark.parametrize("name", ["vit", "cait", "levit", "swin", "cvt", "t2t"])
def test_fedweit_decomposes_other_transformers(name):
    options = {"cait": {"depth": 1}, "t2t": {"depth": 1}, "vit": {"depth": 1, "width": 24, "num_heads": 3}}
    torch.manual_seed(0)
    net, x = create_vit(name, num_classes=4, **options.get(name, {})), torch.randn(2, 3, 32, 32)
    net(x).sum().backward()
    learn = [name for name in FedWEITNet(net, 2).names if net.get_parameter(name).grad.any()]
    model = FedWEITNet(net, 2)
    model.start_task(torch.tensor([0, 1]))
    model(x).sum().backward()
    pieces = model.tasks[0].adaptive.grad.split(model.sizes)
    assert learn == [n for n, g in zip(model.names, pieces, strict=True) if g.any()]
    body = sum(p.numel() for p in net.body.parameters())
    assert 0.8 * body < model.size < body
    copy.deepcopy(model)


def test_fedweit_invalid_arguments_raise():
    with raises(InvalidValueError, "num_tasks"):
        FedWEITNet(small(), 0)
    with pytest.raises(InvalidValueError, check=lambda error: error.argument == "threshold"):
        FedWEITNet(small(), 1, threshold=-1)
    with raises(InvalidValueError, "layers"):
        FedWEITNet(SplitViT(nn.Flatten(), 12, image_size=2), 1)
    with raises(InvalidValueError, "layers"):
        FedWEITNet(nn.Sequential(nn.LayerNorm(3)), 1)
    model = FedWEITNet(small(), 1)
    model.start_task(torch.tensor([0]))
    with raises(InvalidValueError, "num_tasks", value=1):
        model.start_task(torch.tensor([1]))
