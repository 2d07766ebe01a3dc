"""Tests of CifarResNet: parameters, an independent forward pass, and equal results in both memory layouts."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from raising import raises
from torch import nn
from torch.func import functional_call, grad, vmap

from lightning_fcl import Classifier, FederatedStream
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import state_tensors
from lightning_fcl.models import CifarResNet


def conv(inputs, outputs):
    """Return the number of parameters of a 3x3 convolution and its batch normalization."""
    return 9 * inputs * outputs + 2 * outputs


@pytest.mark.parametrize(("blocks", "layers", "expected"), [(1, 8, 75_290), (2, 14, None), (3, 20, 269_722)])
def test_cifar_resnet_parameters_and_layers(blocks, layers, expected, parameters_of):
    net = CifarResNet(blocks=blocks)
    own = conv(3, 16) + 650
    for inputs, outputs in ((16, 16), (16, 32), (32, 64)):
        own += conv(inputs, outputs) + (2 * blocks - 1) * conv(outputs, outputs)
    assert parameters_of(net) == own and expected in (None, own)
    assert sum(isinstance(layer, nn.Conv2d | nn.Linear) for layer in net.modules()) == layers == 6 * blocks + 2
    if expected:
        assert f"{expected:,}" in CifarResNet.__doc__


def normalized(x, state, name):
    rows = [x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0), state[f"{name}.weight"], state[f"{name}.bias"]]
    mean, variance, weight, bias = (row.reshape(1, -1, 1, 1) for row in rows)
    return (x - mean) / (variance + 1e-5).sqrt() * weight + bias


def test_cifar_resnet_forward_equals_formula():
    torch.manual_seed(0)
    net, x = CifarResNet(blocks=2, width=4), torch.randn(6, 3, 32, 32)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    state = {name: value.double() for name, value in net.state_dict().items()}
    maps = normalized(F.conv2d(x.double(), state["stem.weight"], padding=1), state, "norm").clamp(min=0)
    for number, (width, stride) in enumerate([(4, 1), (4, 1), (8, 2), (8, 1), (16, 2), (16, 1)]):
        name = f"blocks.{number}"
        found = F.conv2d(maps, state[f"{name}.conv1.weight"], stride=stride, padding=1)
        found = normalized(found, state, f"{name}.norm1").clamp(min=0)
        found = normalized(F.conv2d(found, state[f"{name}.conv2.weight"], padding=1), state, f"{name}.norm2")
        shortcut = torch.zeros_like(found)
        for row in range(found.shape[2]):
            for column in range(found.shape[3]):
                shortcut[:, : maps.shape[1], row, column] = maps[:, :, stride * row, stride * column]
        assert found.shape[1] == width
        maps = (found + shortcut).clamp(min=0)
    expected = maps.sum((2, 3)) / 64 @ state["head.weight"].T + state["head.bias"]
    torch.testing.assert_close(net(x).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("channels", "image_size"), [(1, 28), (3, 64), (3, 33)])
def test_cifar_resnet_other_images(channels, image_size):
    net = CifarResNet(7, width=4, channels=channels, image_size=image_size).eval()
    x = torch.randn(2, channels, image_size, image_size)
    assert net(x).shape == (2, 7) and net.embed(x).shape == (2, 16) and net.features == 16
    with raises(InvalidValueError, "image_size"):
        net(torch.zeros(2, channels, image_size, image_size + 1))


def test_cifar_resnet_convolutions_have_he_initialization():
    torch.manual_seed(0)
    for layer in CifarResNet(width=64).modules():
        if isinstance(layer, nn.Conv2d):
            fan_in = 9 * layer.in_channels
            assert layer.weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.05)


@pytest.mark.parametrize("name", ["num_classes", "blocks", "width", "channels", "image_size"])
def test_cifar_resnet_invalid_argument_raises(name):
    with raises(InvalidValueError, name, value=0):
        CifarResNet(**{name: 0})


class Plain(CifarResNet):
    """The same network with the default memory layout, in which the pixels of a channel are next to each other."""

    def embed(self, x):
        return self.blocks(F.relu(self.norm(self.stem(x)))).mean((2, 3))


def test_cifar_resnet_round_equals_default_memory_layout(fit):
    rng = np.random.default_rng(0)
    y = np.tile(np.arange(4), 24)
    x = (rng.normal(size=(96, 3, 32, 32)) + y[:, None, None, None] / 2).astype(np.float32)
    settings = {"scenario": ClassIncremental(num_experiences=1), "batch_size": 16}
    states = []
    for make in (CifarResNet, Plain):
        torch.manual_seed(0)
        task = Classifier(make(4, width=4), num_classes=4, optimizer=lambda params: torch.optim.SGD(params, 0.05))
        before = {name: value.clone() for name, value in state_tensors(task).items()}
        fit(task, FederatedStream.from_arrays(x, y, np.arange(96) % 3, **settings))
        states.append(state_tensors(task))
        # Training has changed all parameters.
        assert all(
            not torch.equal(states[-1][f"model.{name}"], before[f"model.{name}"]) for name in task.model.state_dict()
        )
        assert all(value.is_contiguous() for value in states[-1].values())
    torch.testing.assert_close(states[0], states[1], rtol=1e-5, atol=1e-5)


def test_cifar_resnet_maps_are_channels_last():
    net, seen = CifarResNet(width=4), []
    net.blocks[1].conv2.register_forward_hook(lambda layer, args, output: seen.append((args[0], output)))
    net(torch.randn(2, 3, 32, 32))
    ((maps, output),) = seen
    assert maps.is_contiguous(memory_format=torch.channels_last) and not maps.is_contiguous()
    assert output.is_contiguous(memory_format=torch.channels_last)


def test_cifar_resnet_gradients_of_single_samples_under_vmap():
    torch.manual_seed(0)
    net, x, y = CifarResNet(5, width=4).eval(), torch.randn(3, 3, 32, 32), torch.tensor([0, 4, 2])
    params = dict(net.named_parameters())

    def loss(params, one, label):
        return F.cross_entropy(functional_call(net, params, (one[None],)), label[None])

    stacked = vmap(grad(loss), in_dims=(None, 0, 0))(params, x, y)
    for row in range(3):
        alone = torch.autograd.grad(F.cross_entropy(net(x[row : row + 1]), y[row : row + 1]), net.parameters())
        for (name, value), expected in zip(stacked.items(), alone, strict=True):
            torch.testing.assert_close(value[row], expected, rtol=1e-4, atol=1e-5, msg=name)
