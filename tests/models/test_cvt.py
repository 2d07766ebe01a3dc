"""Tests of CvT: the paper's number of parameters, and convolutional projections that equal plain convolutions."""

import pytest
import torch
import torch.nn.functional as F
from raising import raises
from torch import nn

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.models import CvTBody
from lightning_fcl.models.t2t_cvt import ConvolutionalBlock, ConvolutionalProjection


def shaken(module: nn.Module) -> nn.Module:
    """Return a module with random weights and running statistics instead of special initial values."""
    for value in (*module.parameters(), *module.buffers()):
        if value.is_floating_point():
            value.data += 0.1 * torch.rand_like(value)
    return module.double().eval()


def block(width):
    """Return the number of parameters of a block: norms, convolutional projections, attention and perceptron."""
    convolutions = 3 * (9 * width + 2 * width)
    attention = 4 * width * width + 4 * width
    return 4 * width + convolutions + attention + (8 * width * width + 5 * width)


def body(depths):
    count, channels = 0, 3
    for width, depth, kernel in zip((64, 192, 384), depths, (7, 3, 3), strict=True):
        count += channels * width * kernel**2 + width + 2 * width + depth * block(width)
        channels = width
    # Add the class token and the last norm. The last block has no convolution of queries.
    return count + 384 + 2 * 384 - (9 * 384 + 2 * 384)


@pytest.mark.parametrize("depths", [(1, 2, 10), (1, 4, 16)])
def test_cvt_has_the_expected_number_of_parameters(depths, parameters_of):
    with torch.device("meta"):
        model = CvTBody(224, depths=depths)
    assert parameters_of(model) == body(depths)
    if depths == (1, 2, 10):
        assert f"{parameters_of(model) + 384 * 1000 + 1000:,}" in CvTBody.__doc__


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("others", [0, 1])
def test_convolutional_projection_equals_a_convolution_of_the_map(stride, others):
    projection = shaken(ConvolutionalProjection(6, stride))
    tokens = torch.randn(2, others + 5 * 5, 6, dtype=torch.float64)
    maps = torch.zeros(2, 6, 5, 5, dtype=torch.float64)
    for row in range(5):
        for column in range(5):
            maps[:, :, row, column] = tokens[:, others + 5 * row + column]
    norm = projection.norm
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    outs = []
    for channel in range(6):  # each channel has its own filter
        out = F.conv2d(maps[:, [channel]], projection.convolution.weight[[channel]], stride=stride, padding=1)
        outs.append((out - norm.running_mean[channel]) * scale[channel] + norm.bias[channel])
    wanted = torch.cat([tokens[:, :others], torch.cat(outs, dim=1).flatten(2).transpose(1, 2)], dim=1)
    wanted = wanted @ projection.linear.weight.T + projection.linear.bias
    torch.testing.assert_close(projection(tokens, side=5), wanted)
    assert wanted.shape[1] == others + (25 if stride == 1 else 9)


def test_convolutional_block_equals_explicit_computation():
    layer = shaken(ConvolutionalBlock(8, num_heads=2))
    tokens = torch.randn(3, 1 + 16, 8, dtype=torch.float64)
    normed = F.layer_norm(tokens, (8,), layer.norm1.weight, layer.norm1.bias)
    query, key, value = (part(normed, 4) for part in (layer.query, layer.key, layer.value))
    assert query.shape == (3, 17, 8) and key.shape == value.shape == (3, 5, 8)
    heads = []
    for head in (slice(0, 4), slice(4, 8)):
        scores = torch.einsum("bqc,bkc->bqk", query[..., head], key[..., head]) / 4**0.5
        heads.append(torch.einsum("bqk,bkc->bqc", scores.softmax(dim=2), value[..., head]))
    out = tokens + layer.output(torch.cat(heads, dim=2))
    normed = F.layer_norm(out, (8,), layer.norm2.weight, layer.norm2.bias)
    first, _, second = layer.mlp
    wanted = out + second(F.gelu(first(normed)))
    torch.testing.assert_close(layer(tokens, side=4), wanted)


def test_last_block_equals_the_class_token_of_a_full_block():
    full, last = ConvolutionalBlock(8, num_heads=2), ConvolutionalBlock(8, num_heads=2, class_only=True)
    shaken(full)
    state = {name.replace("query.linear", "query"): value for name, value in full.state_dict().items()}
    last.double().eval().load_state_dict({name: state[name] for name in last.state_dict()})
    tokens = torch.randn(3, 1 + 16, 8, dtype=torch.float64)
    torch.testing.assert_close(last(tokens, side=4), full(tokens, side=4)[:, :1])


def test_cvt_stages_halve_the_map():
    seen = []
    model = CvTBody(32, widths=(8, 12, 16), depths=(1, 2, 2), num_heads=(1, 2, 4), kernels=(3, 3, 3), strides=(2, 2, 2))
    for layer in model.modules():
        if isinstance(layer, ConvolutionalBlock):
            layer.register_forward_hook(lambda _, args, out: seen.append((args[1], args[0].shape[1], out.shape[1])))
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 16)
    assert seen == [(16, 256, 256), (8, 64, 64), (8, 64, 64), (4, 17, 17), (4, 17, 1)]


def test_cvt_stage_is_shift_equivariant():
    """Away from the borders, shifting the image shifts the tokens."""
    model = CvTBody(48, widths=(8, 8), depths=(0, 1), num_heads=(1, 1), kernels=(7, 3), strides=(4, 2)).eval()
    x = torch.zeros(1, 3, 48, 48)
    x[..., 16:24, 16:24] = torch.randn(1, 3, 8, 8)
    maps, shifted = model.stages[0](x), model.stages[0](x.roll(4, dims=3))
    torch.testing.assert_close(maps.roll(1, dims=3), shifted)


WRONG = {
    "num_heads": ({"num_heads": (1, 5, 6)}, "width"),
    "stride": ({"image_size": 52}, "image_size"),
    "small": ({"image_size": 32}, "image_size"),
}


@pytest.mark.parametrize("case", WRONG)
def test_cvt_invalid_arguments_raise(case):
    changes, argument = WRONG[case]
    with raises(InvalidValueError, argument), torch.device("meta"):
        CvTBody(**changes)
