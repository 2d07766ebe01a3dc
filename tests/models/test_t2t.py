"""Tests of T2T-ViT: the paper's number of parameters, and soft splits that equal overlapping patches."""

import math

import pytest
import torch
import torch.nn.functional as F
from raising import raises

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.models import T2TBody
from lightning_fcl.models.t2t_cvt import TokenTransformer, _sinusoids, _soft_split


def transformer(inputs, width=64):
    """Return a token transformer's number of parameters: norms, queries with keys and values, output, perceptron."""
    return 2 * inputs + inputs * 3 * width + width * width + width + 2 * width + 2 * (width * width + width)


def body(width, depth, ratio):
    hidden = int(width * ratio)
    block = 4 * width + 3 * width * width + width * width + width + 2 * width * hidden + hidden + width
    module = transformer(3 * 49) + transformer(64 * 9) + 64 * 9 * width + width
    return module + width + depth * block + 2 * width


@pytest.mark.parametrize("changes", [{}, {"width": 384, "depth": 14, "num_heads": 6, "mlp_ratio": 3.0}])
def test_t2t_has_the_expected_number_of_parameters(changes):
    with torch.device("meta"):
        model = T2TBody(224, **changes)
    count = sum(p.numel() for p in model.parameters()) + (model.features + 1) * 1000
    assert count == body(model.features, len(model.blocks), changes.get("mlp_ratio", 2.0)) + (model.features + 1) * 1000
    if not changes:
        # The authors' code also counts the positions, although they are not learned.
        fixed = (14 * 14 + 1) * 256
        assert f"{count:,}" in T2TBody.__doc__ and f"{fixed:,}" in T2TBody.__doc__


@pytest.mark.parametrize(("kernel", "stride", "around"), [(7, 4, 2), (3, 2, 1), (3, 1, 1), (4, 4, 0)])
def test_soft_split_equals_patches_in_a_loop(kernel, stride, around):
    maps = torch.randn(2, 3, 8, 8)
    padded = torch.zeros(2, 3, 8 + 2 * around, 8 + 2 * around)
    padded[:, :, around : around + 8, around : around + 8] = maps
    patches = [
        padded[:, :, row : row + kernel, column : column + kernel].reshape(2, -1)
        for row in range(0, 8, stride)
        for column in range(0, 8, stride)
    ]
    assert torch.equal(_soft_split(maps, kernel, stride), torch.stack(patches, dim=1))


def test_t2t_module_applies_all_splits():
    model = T2TBody(16, width=6, depth=1, num_heads=2, splits=((3, 2), (3, 2), (3, 1)), token_width=5).eval()
    x = torch.randn(2, 3, 16, 16)
    maps = x
    for split, layer in zip(model.splits, model.transformers, strict=False):
        tokens = layer(_soft_split(maps, *split))
        side = maps.shape[-1] // split[1]
        maps = torch.stack([tokens[:, side * row : side * (row + 1)] for row in range(side)], dim=1).permute(0, 3, 1, 2)
    wanted = _soft_split(maps, 3, 1)
    torch.testing.assert_close(model.tokens(x), wanted)
    assert wanted.shape == (2, 16, 5 * 9)
    tokens = torch.cat([model.class_token.expand(2, 1, 6), model.project(wanted)], dim=1) + _sinusoids(17, 6)
    torch.testing.assert_close(model(x), model.norm(model.blocks[0](tokens)[:, 0]))


def test_token_transformer_equals_explicit_computation():
    layer = TokenTransformer(7, 4).double()
    tokens = torch.randn(2, 9, 7, dtype=torch.float64)
    weights = layer.qkv.weight.split(4)
    query, key, value = (F.layer_norm(tokens, (7,)) @ weight.T for weight in weights)
    scores = query @ key.transpose(1, 2) / math.sqrt(4)
    out = value + layer.output(scores.softmax(dim=2) @ value)
    first, _, second = layer.mlp
    wanted = out + second(F.gelu(first(F.layer_norm(out, (4,)))))
    torch.testing.assert_close(layer(tokens), wanted)


def test_t2t_without_positions_ignores_the_order_of_patches():
    model = T2TBody(16, width=8, depth=2, num_heads=2, splits=((4, 4),)).eval()
    # The image has 4 x 4 patches of 4 x 4 pixels.
    rows = torch.randn(1, 3, 4, 4, 4, 4)

    def image(order):
        patches = rows.flatten(2, 3)[:, :, order].unflatten(2, (4, 4))
        return patches.transpose(3, 4).reshape(1, 3, 16, 16)

    torch.manual_seed(1)
    there, elsewhere = image(torch.arange(16)), image(torch.randperm(16))
    assert not torch.allclose(model(there), model(elsewhere))
    model.positions.zero_()
    torch.testing.assert_close(model(there), model(elsewhere))


def test_positions_are_sines_and_cosines():
    assert _sinusoids(2, 2)[0].tolist()[0] == [0.0, 1.0]
    table = _sinusoids(5, 6)[0]
    for place in range(5):
        for pair in range(3):
            angle = place / 10000 ** (2 * pair / 6)
            assert table[place, 2 * pair].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[place, 2 * pair + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_positions_are_not_in_the_state():
    model = T2TBody(16, width=8, depth=1, num_heads=2, splits=((4, 4),))
    assert "positions" not in model.state_dict() and "positions" in dict(model.named_buffers())
    assert model.double().positions.dtype is torch.float64


WRONG = {
    "num_heads": ({"num_heads": 3}, "width"),
    "odd": ({"width": 9, "num_heads": 3}, "width"),
    "size": ({"image_size": 40}, "image_size"),
    "small": (
        {"image_size": 4},
        "image_size",
    ),
    "gaps": ({"splits": ((2, 4),)}, "image_size"),
}


@pytest.mark.parametrize("case", WRONG)
def test_t2t_invalid_arguments_raise(case):
    changes, argument = WRONG[case]
    with raises(InvalidValueError, argument), torch.device("meta"):
        T2TBody(**changes)
