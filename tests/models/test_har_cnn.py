"""Tests of HARCNN: the layers follow the notation, and an invalid notation raises an error with the reason."""

import math

import pytest
import torch
import torch.nn.functional as F
from raising import raises
from torch import nn

from lightning_fcl.errors import InvalidValueError, UnknownNameError
from lightning_fcl.models.small import HARCNN

# Number of parameters: filters * channels * width + filters for a convolution, units * inputs + units for a dense
# layer, and the classifier. The comments contain the number of time steps after each convolution or pooling.
TABLE_1 = {
    # Time steps: 128 -> 119.
    "32-10C_256D_128D": (32 * 6 * 10 + 32) + (256 * 32 * 119 + 256) + (128 * 256 + 128) + (6 * 128 + 6),
    # Time steps: 128 -> 120 -> 30 -> 22 -> 11 -> 3.
    "64-9C_4M_32-9C_2M_16-9C_128D": (64 * 6 * 9 + 64)
    + (32 * 64 * 9 + 32)
    + (16 * 32 * 9 + 16)
    + (128 * 16 * 3 + 128)
    + (6 * 128 + 6),
    # Time steps: 128 -> 113 -> 28.
    "196-16C_4M_1024D": 5_645_898,
    "196-16C_4M_1024D_512D": (196 * 6 * 16 + 196) + (1024 * 196 * 28 + 1024) + (512 * 1024 + 512) + (6 * 512 + 6),
}


@pytest.mark.parametrize("notation", TABLE_1)
def test_har_cnn_has_the_documented_number_of_parameters(notation, parameters_of):
    model = HARCNN(notation)
    assert parameters_of(model) == TABLE_1[notation]
    assert f"{parameters_of(model):,}" in HARCNN.__doc__
    assert model(torch.randn(3, 6, 128)).shape == (3, 6)


def test_har_cnn_sizes_match_table_1(parameters_of):
    assert parameters_of(HARCNN()) * 12 / 1e6 == pytest.approx(67.8, abs=0.05)
    assert parameters_of(HARCNN("196-16C_4M_1024D_512D")) * 12 / 1e6 == pytest.approx(74.1, rel=0.002)
    assert parameters_of(HARCNN("32-10C_4M_256D_128D")) * 12 / 1e6 == pytest.approx(3.3, abs=0.05)


def test_har_cnn_forward_equals_explicit_layers():
    model = HARCNN("5-4C_3M_7-2C_8D_9D", in_channels=2, length=30, num_classes=4).eval()
    c1, b1, c2, b2, d1, e1, d2, e2, h, g = (parameter.detach() for parameter in model.parameters())
    x = torch.randn(6, 2, 30)
    out = F.relu(F.conv1d(x, c1, b1))
    out = out[:, :, :27].unflatten(2, (9, 3)).amax(dim=3)
    out = F.relu(F.conv1d(out, c2, b2)).reshape(6, 7 * 8)
    out = F.relu(out @ d1.T + e1)
    out = F.relu(out @ d2.T + e2)
    torch.testing.assert_close(model(x), out @ h.T + g)


def test_har_cnn_accepts_a_window_without_batch():
    model = HARCNN("4-3C_2M_8D").eval()
    x = torch.randn(2, 6, 128)
    torch.testing.assert_close(model(x[1]), model(x)[1])


def test_har_cnn_without_hidden_dense_layers(parameters_of):
    model = HARCNN("4-3C_2M", length=12)
    assert parameters_of(model) == (4 * 6 * 3 + 4) + (6 * 4 * 5 + 6)


@pytest.mark.parametrize(("notation", "wanted"), [("4-3C_2M_8D", 1), ("4-3C_8D_8D_8D", 3), ("4-3C_2M", 0)])
def test_har_cnn_dropout_follows_only_dense_layers(notation, wanted):
    layers = list(HARCNN(notation, dropout=0.3).body)
    places = [place for place, layer in enumerate(layers) if isinstance(layer, nn.Dropout)]
    assert len(places) == wanted
    assert all(isinstance(layers[place - 1], nn.ReLU) and isinstance(layers[place - 2], nn.Linear) for place in places)
    assert all(layers[place].p == 0.3 for place in places)


def test_keras_init_is_glorot_uniform_with_zero_biases():
    torch.manual_seed(0)
    model = HARCNN(init="keras")
    conv, dense = model.body[0], model.body[4]
    fans = {conv: (6 * 16, 196 * 16), dense: (28 * 196, 1024), model.head: (1024, 6)}
    for layer, (fan_in, fan_out) in fans.items():
        bound = math.sqrt(6 / (fan_in + fan_out))
        assert layer.bias.abs().max() == 0
        assert 0.99 * bound < layer.weight.abs().max() <= bound
        assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)


WRONG = {
    "": "notation",
    "196-16C__1024D": "notation",
    "196C_4M": "notation",
    "196-16C_0M": "notation",
    "196-16C 4M": "notation",
    "1024D_4M": "notation",
    "4-3C_8D_4-3C": "notation",
    "4-129C": "length",
    "4-121C_4M_4-3C": "length",
    "4-126C_4M": "length",
}


@pytest.mark.parametrize("notation", WRONG)
def test_har_cnn_invalid_notation_raises(notation):
    with raises(InvalidValueError, WRONG[notation]):
        HARCNN(notation)


ARGUMENTS = {
    "in_channels": ({"in_channels": 0}, (InvalidValueError, "in_channels")),
    "length": ({"length": -3}, (InvalidValueError, "length")),
    "num_classes": ({"num_classes": 0}, (InvalidValueError, "num_classes")),
    "dropout 1": ({"dropout": 1.0}, (InvalidValueError, "dropout")),
    "dropout -0.1": ({"dropout": -0.1}, (InvalidValueError, "dropout")),
    "init": ({"init": "jax"}, (UnknownNameError, "init")),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_har_cnn_invalid_arguments_raise(case):
    changes, expected = ARGUMENTS[case]
    with raises(*expected):
        HARCNN("4-3C", **changes)


@pytest.mark.parametrize("shape", [(2, 128, 6), (2, 6, 127), (128,), (1, 2, 6, 128)])
def test_har_cnn_windows_of_another_shape_raise(shape):
    with raises(InvalidValueError, "x"):
        HARCNN("4-3C")(torch.zeros(shape))
