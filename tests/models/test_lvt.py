"""Tests of LVT's network: attention with learned keys."""

import pytest
import torch
from raising import raises
from torch import nn

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.models import LVT, ViT
from lightning_fcl.models._layers import attend
from lightning_fcl.models.lifelong_vit import InterTaskAttention, LVTBody, _offsets


def tiny(**kwargs):
    torch.manual_seed(0)
    return LVT(**{"num_classes": 5, "patch_size": 16, "width": 24, "depth": 2, "num_heads": 3, **kwargs})


def test_lvt_has_the_documented_number_of_parameters(parameters_of):
    model = LVT(num_classes=7)
    linear, keys = 192 * 192 + 192, 65 * 192 + 12 * 67
    assert parameters_of(model.body) == parameters_of(ViT(num_classes=7).body) + 6 * (keys - linear) == 2_549_016
    block = parameters_of(model.body.blocks[0])
    for number in (6 * block, block, 3 * linear, keys, parameters_of(model.body)):
        assert f"{number:,}" in LVT.__doc__
    assert isinstance(model.head, nn.Linear) and parameters_of(model.head) == 192 * 7 + 7
    learnt = [name for name, _ in model.named_parameters() if ".external_" in name]
    assert len(learnt) == 12


def test_inter_task_attention_with_computed_keys_is_self_attention():
    torch.manual_seed(0)
    layer, tokens, key = InterTaskAttention(24, 3, side=2), torch.randn(1, 5, 24), nn.Linear(24, 24)
    with torch.no_grad():
        layer.external_key.copy_(key(tokens)[0].unflatten(1, (3, 8)).transpose(0, 1))
    expected = layer.output(attend(layer.query(tokens), key(tokens), layer.value(tokens), num_heads=3))
    torch.testing.assert_close(layer(tokens), expected)


def test_inter_task_attention_equals_explicit_computation():
    torch.manual_seed(0)
    layer, tokens = InterTaskAttention(12, 3, side=2).double(), torch.randn(4, 5, 12).double()
    with torch.no_grad():
        layer.external_bias.normal_()
    heads = []
    for h in range(3):
        query, value = (part(tokens)[..., 4 * h : 4 * h + 4] for part in (layer.query, layer.value))
        scores = torch.einsum("bqc,kc->bqk", query, layer.external_key[h]) / 2
        for q in range(5):
            for k in range(5):
                row, column = abs((q - 1) // 2 - (k - 1) // 2), abs((q - 1) % 2 - (k - 1) % 2)
                index = (6 if k == 0 else 4) if q == 0 else (5 if k == 0 else 2 * row + column)
                scores[:, q, k] += layer.external_bias[h, index]
        heads.append(scores.softmax(dim=-1) @ value)
    torch.testing.assert_close(layer(tokens), layer.output(torch.cat(heads, dim=-1)))


def test_offsets_are_distances():
    assert _offsets(2).tolist() == [
        [6, 4, 4, 4, 4],
        [5, 0, 1, 2, 3],
        [5, 1, 0, 3, 2],
        [5, 2, 3, 0, 1],
        [5, 3, 2, 1, 0],
    ]
    table = _offsets(8)
    assert table.shape == (65, 65) and table.unique().tolist() == list(range(67))
    assert torch.equal(table[1:, 1:], table[1:, 1:].T)
    assert table[1 + 8 * 2 + 3, 1 + 8 * 5 + 1] == 3 * 8 + 2


def test_lvt_every_parameter_has_a_gradient():
    model = tiny()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    model(torch.randn(4, 3, 32, 32)).square().sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())


def test_external_keys_have_the_scale_of_computed_keys():
    torch.manual_seed(0)
    layer = InterTaskAttention(192, 12, side=8)
    assert layer.external_key.detach().std() == pytest.approx(0.02 * 192**0.5, rel=0.05)
    assert not layer.external_bias.any()


def test_lvt_accepts_other_sizes_and_one_image():
    model = tiny(image_size=48, channels=1)
    assert model(torch.zeros(1, 1, 48, 48)).shape == (1, 5)
    assert tuple(model.body.blocks[0].attention.external_key.shape) == (3, 10, 8)
    assert not [name for name in model.state_dict() if "offsets" in name]


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"num_heads": 5}, "width"),
        (
            {"image_size": 30},
            "image_size",
        ),
    ],
)
def test_lvt_invalid_arguments_raise(arguments, argument):
    with raises(InvalidValueError, argument):
        LVTBody(**arguments)
