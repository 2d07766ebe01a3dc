"""Tests of the generator of samples, and of the distance to a network's running statistics."""

import pytest
import torch
from raising import raises
from torch import nn
from torch.distributions import Normal, kl_divergence

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.models import Generator
from lightning_fcl.models.generator import gaussian_divergence, with_statistics_distance

pytestmark = pytest.mark.rounding


@pytest.mark.parametrize("size", [(1, 8, 8), (3, 32, 32), (2, 9, 14), (1, 1, 1), (7,), (1,)])
def test_generator_samples_have_the_given_size(size):
    assert Generator(size, noise_dim=5, width=2)(torch.randn(3, 5)).shape == (3, *size)


def two_layers():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(72, 3), nn.BatchNorm1d(3)
    )
    for _ in range(20):
        net(torch.randn(30, 1, 8, 8))
    return net.eval()


def test_statistics_distance_equals_explicit_computation():
    net, x = two_layers(), 2 * torch.randn(30, 1, 8, 8) + 1
    first = net[0](x)
    second = net[:5](x)
    wanted = 0.0
    for rows, norm in ((first.permute(0, 2, 3, 1).reshape(-1, 2), net[1]), (second, net[5])):
        wanted += (rows.mean(0) - norm.running_mean).norm() + (rows.var(0, correction=0) - norm.running_var).norm()
    output, found = with_statistics_distance(net, x)
    torch.testing.assert_close(found, wanted)
    assert torch.equal(output, net(x)) and not net[1]._forward_pre_hooks


def test_gaussian_divergence_equals_kl_of_torch_distributions():
    torch.manual_seed(0)
    mean, running_mean = torch.randn(2, 5, dtype=torch.float64)
    variance, running_variance = torch.rand(2, 5, dtype=torch.float64) + 0.1
    running, batch = Normal(running_mean, running_variance.sqrt()), Normal(mean, variance.sqrt())
    actual = gaussian_divergence(mean, variance, running_mean, running_variance)
    torch.testing.assert_close(actual, kl_divergence(running, batch).mean(), atol=1e-6, rtol=1e-6)
    net, x = two_layers(), torch.randn(30, 1, 8, 8)
    terms = []
    for rows, norm in ((net[0](x).permute(0, 2, 3, 1).reshape(-1, 2), net[1]), (net[:5](x), net[5])):
        running = Normal(norm.running_mean, norm.running_var.sqrt())
        terms.append(kl_divergence(running, Normal(rows.mean(0), rows.std(0, correction=0))).mean())
    torch.testing.assert_close(with_statistics_distance(net, x, gaussian_divergence)[1], sum(terms), rtol=1e-4, atol=0)


def test_statistics_distance_is_smaller_for_training_data():
    net = two_layers()
    near, far = (with_statistics_distance(net, x)[1] for x in (torch.randn(500, 1, 8, 8), torch.rand(500, 1, 8, 8)))
    assert near < 0.5 * far


def test_generator_invalid_arguments_raise():
    with pytest.raises(InvalidValueError, check=lambda error: error.argument == "width"):
        Generator((1, 8, 8), width=0)
    with raises(InvalidValueError, "size", value=(4, 9)):
        Generator((4, 9))
    with raises(InvalidValueError, "network"):
        with_statistics_distance(nn.Linear(2, 2), torch.zeros(1, 2))
