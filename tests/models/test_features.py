"""Tests of features: the input of a network's last layer."""

import pytest
import torch
from torch import nn

from lightning_fcl.models import HARCNN, LVT, MLP, CifarResNet, DSICNet

NETWORKS = {
    "mlp": (lambda: MLP([12, 7, 5]), (3, 4)),
    "one layer": (lambda: MLP([12, 5]), (3, 4)),
    "mlp with batch norm": (lambda: MLP([12, 7, 5], batch_norm=True), (3, 4)),
    "har_cnn": (lambda: HARCNN("4-3C_2M_8D", in_channels=3, length=10, num_classes=5), (3, 10)),
    "dsicnet": (lambda: DSICNet(5, (16, 16)), (1, 16, 16)),
    "resnet": (lambda: CifarResNet(5, width=4), (3, 32, 32)),
    "lvt": (lambda: LVT(5, patch_size=16, width=24, depth=1, num_heads=2), (3, 32, 32)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_last_layer_of_features_equals_logits(name):
    make, shape = NETWORKS[name]
    model, x = make().eval(), torch.randn(2, *shape)
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    assert model.embed(x).shape == (2, model.features)
    assert torch.equal(last(model.embed(x)), model(x)) and model(x).shape == (2, 5)


def test_mlp_batch_norm_normalizes_the_input_of_each_linear_layer():
    torch.manual_seed(0)
    net, x = MLP([3, 4, 2], batch_norm=True), 5 * torch.randn(50, 3) + 2
    first, second = net[2], net[5]

    def normalized(rows):
        return (rows - rows.mean(0)) / (rows.var(0, correction=0) + 1e-5).sqrt()

    expected = second(normalized(first(normalized(x)).relu()))
    torch.testing.assert_close(net(x), expected)
    assert list(MLP([3, 4, 2]).state_dict()) == ["1.weight", "1.bias", "3.weight", "3.bias"]
