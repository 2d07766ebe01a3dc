"""Tests of DSICNet: the documented number of parameters, and inputs that are images or maps of the backbone."""

import pytest
import torch
from raising import raises
from torch import nn

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.models import DSICNet
from lightning_fcl.models.quantization import fold_batchnorm


def depthwise(channels):
    return channels * 3 * 3 + 2 * channels


def pointwise(inputs, outputs):
    return inputs * outputs + 2 * outputs


# Numbers of parameters, computed from the layers: weights, and two batch normalization parameters per output channel.
STEM = 16 * 3 * 3 + 2 * 16
PAIRS = [(16, 32), (32, 64), (64, 64), (64, 64), (64, 64), (64, 64)]
BACKBONE = STEM + sum(depthwise(i) + pointwise(i, o) for i, o in PAIRS) + depthwise(64)


def test_dsicnet_has_the_documented_number_of_parameters(parameters_of):
    net = DSICNet()
    assert parameters_of(net.backbone) == BACKBONE == 23_872
    assert parameters_of(net.head) == pointwise(64, 80) + 80 * 10 + 10
    assert parameters_of(net) == 29_962
    assert f"{parameters_of(net):,}" in DSICNet.__doc__


def test_dsicnet_folded_head_has_24_kb_and_equal_outputs(parameters_of):
    net = DSICNet().train()
    for _ in range(3):
        # The forward passes change the running statistics from their initial values 0 and 1.
        net(torch.randn(8, 1, 64, 48))
    net.eval().backbone.requires_grad_(False)
    x = torch.randn(2, 1, 64, 48)
    before = net(x)
    fold_batchnorm(net)
    assert parameters_of(net.head) == (64 * 80 + 80) + (80 * 10 + 10) == 6_010
    assert sum(p.nbytes for p in net.head.parameters()) == 24_040
    assert f"{parameters_of(net.head):,}" in DSICNet.__doc__
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in net.modules())
    assert {name for name, p in net.named_parameters() if p.requires_grad} == {
        f"head.{name}" for name, _ in net.head.named_parameters()
    }
    assert list(net.head.pointwise._modules) == ["convolution", "norm", "relu"]
    torch.testing.assert_close(net(x), before, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("image_size", "maps"), [((64, 48), (4, 3)), ((16, 16), (1, 1)), ((33, 47), (3, 3))])
@pytest.mark.parametrize("channels", [1, 3])
def test_dsicnet_output_shapes(image_size, maps, channels, parameters_of):
    net = DSICNet(num_classes=7, image_size=image_size, channels=channels).eval()
    x = torch.randn(5, channels, *image_size)
    assert net(x).shape == (5, 7) and net.latent(x).shape == (5, 64, *maps) and net.embed(x).shape == (5, 80)
    assert parameters_of(net) == BACKBONE + (channels - 1) * 16 * 9 + pointwise(64, 80) + 80 * 7 + 7
    assert net.features == 80 and net.latent_channels == 64


def test_dsicnet_accepts_maps_of_the_backbone():
    net, x = DSICNet(image_size=(32, 32)).eval(), torch.randn(3, 1, 32, 32)
    maps = net.backbone(x)
    assert torch.equal(net.latent(x), maps) and net.latent(maps) is maps
    assert torch.equal(net(maps), net(x)) and torch.equal(net.embed(maps), net.embed(x))
    assert torch.equal(net.head.classifier(net.embed(x)), net(x))


@pytest.mark.parametrize("shape", [(1, 48, 64), (3, 64, 48), (1, 64, 47)])
def test_dsicnet_images_of_another_shape_raise(shape):
    with raises(InvalidValueError, "image_size"):
        DSICNet()(torch.zeros(2, *shape))


def test_dsicnet_invalid_arguments_raise():
    with pytest.raises(InvalidValueError, check=lambda error: error.argument == "num_classes"):
        DSICNet(num_classes=0)
    with pytest.raises(InvalidValueError, check=lambda error: error.argument == "image_size"):
        DSICNet(image_size=(64, 15))
