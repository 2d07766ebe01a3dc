"""Tests that layers of the vision transformers equal plain computations."""

import math
from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from raising import raises
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.models import LVT, DyTox, ViT, create_vit
from lightning_fcl.models._layers import (
    attend,
    check_blocks,
    compute_padding,
    count_patches,
    fast_attention,
    init_weights,
    to_map,
)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_attend_equals_attention_per_head(heads):
    query, key, value = (torch.randn(3, n, 8, dtype=torch.float64) for n in (5, 7, 7))
    wanted = []
    for part in torch.arange(8).chunk(heads):
        scores = query[..., part] @ key[..., part].transpose(1, 2) / math.sqrt(8 / heads)
        wanted.append(scores.softmax(dim=2) @ value[..., part])
    torch.testing.assert_close(attend(query, key, value, heads), torch.cat(wanted, dim=2))


SMALL = {"patch_size": 16, "width": 24, "depth": 1, "num_heads": 2}
NETWORKS = {
    "ViT": lambda: ViT(10, **SMALL),
    "LVT": lambda: LVT(10, **SMALL),
    "DyTox": lambda: DyTox(5, 10, **SMALL),
    "t2t": lambda: create_vit("t2t", depth=1),
}


class Watching(TorchFunctionMode):
    """Records the data type of the inputs of attention, and whether autocast is enabled."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            self.seen.add((args[0].dtype, torch.is_autocast_enabled("cpu")))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", NETWORKS)
def test_attention_under_autocast_has_single_precision(name):
    model, x = NETWORKS[name](), torch.randn(4, 3, 32, 32)
    plain = model(x)
    with Watching() as watching, torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    assert watching.seen == {(torch.float32, False)}
    torch.testing.assert_close(output.float(), plain, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("heads", [1, 4])
def test_fast_attention_equals_bf16_attention_up_to_rounding(heads):
    tokens = [torch.randn(3, 9, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    gradient = torch.randn(3, 9, 16, dtype=torch.bfloat16)
    found = []
    for rule in (fast_attention, lambda x: nullcontext()):
        with torch.autocast("cpu", torch.bfloat16), rule(tokens[0]):
            output = attend(*tokens, heads)
        found.append([output, *torch.autograd.grad(output, tokens, gradient)])
    for ours, usual in zip(*found, strict=True):
        assert ours.dtype == usual.dtype == torch.bfloat16
        torch.testing.assert_close(ours, usual, rtol=0.05, atol=0.05)


def test_fast_attention_applies_only_to_cpu_autocast():
    assert isinstance(fast_attention(torch.zeros(1)), nullcontext)
    with torch.autocast("cpu", torch.bfloat16):
        assert not isinstance(fast_attention(torch.zeros(1)), nullcontext)
        assert isinstance(fast_attention(torch.zeros(1, device="meta")), nullcontext)


def test_to_map_arranges_tokens_row_by_row():
    tokens = torch.randn(2, 9, 4)
    maps = to_map(tokens, 3)
    assert all(torch.equal(maps[:, :, n // 3, n % 3], tokens[:, n]) for n in range(9))
    assert torch.equal(maps.flatten(2).transpose(1, 2), tokens)


def test_count_patches_is_side_by_stride_or_raises():
    fitting = 0
    for side, stride, kernel in product(range(1, 17), range(1, 6), range(1, 8)):
        if side % stride or kernel < stride or kernel > side or (stride == 1 and kernel % 2 == 0):
            with raises(InvalidValueError, "image_size", value=64):
                count_patches(side, kernel, stride, image_size=64)
            continue
        unfolded = F.unfold(
            torch.zeros(1, 1, side, side), kernel, padding=compute_padding(kernel, stride), stride=stride
        )
        assert unfolded.shape[2] == count_patches(side, kernel, stride, image_size=64) ** 2 == (side // stride) ** 2
        fitting += 1
    assert fitting > 100


def test_init_weights_initializes_only_linear_layers():
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(3, 3, bias=False), nn.LayerNorm(3))
    nn.init.ones_(model[2].bias)
    model.apply(init_weights)
    assert model[0].weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model[0].bias.abs().max() == 0 and model[2].bias.min() == 1


def test_check_blocks_invalid_sizes_raise():
    for name, value in {"width": 0, "num_heads": 0, "depth": 0, "mlp_ratio": -1.0}.items():
        options = {"width": 192, "num_heads": 12, "depth": 1, "mlp_ratio": 4.0, name: value}
        for build in (check_blocks, partial(ViT, num_classes=2), partial(LVT, num_classes=2)):
            with raises(InvalidValueError, name, value=value):
                build(**options)
    for model in (ViT, LVT):
        with raises(InvalidValueError, "patch_size"):
            model(num_classes=2, patch_size=0)
