"""Tests of eight families of vision transformers: bodies and heads, trainable parameters, and states for averaging."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jsonargparse import ArgumentParser
from raising import raises
from torch import nn

from lightning_fcl import Classifier, FederatedStream
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.errors import InvalidValueError, UnknownNameError
from lightning_fcl.federation.aggregation import state_tensors
from lightning_fcl.models import SplitViT, ViT, create_vit
from lightning_fcl.models._backbones import FAMILIES, VARIANTS, LevitBody

# Small versions of each family. The number of tokens depends only on patches and strides, so it is the same as in the
# full models.
TINY = {
    "vit": {"width": 12, "depth": 2, "num_heads": 3},
    "deit": {"width": 12, "depth": 2, "num_heads": 3},
    "cait": {"embed_dim": 12, "depth": 2, "num_heads": 2, "init_values": 0.1},
    "pit": {"base_dims": (8, 8, 8), "depth": (1, 1, 1), "heads": (1, 2, 4)},
    "pvt": {"embed_dims": (8, 12, 16, 20), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 2)},
    "levit": {"embed_dim": (16, 24, 32), "key_dim": 8, "num_heads": (2, 3, 4), "depth": (1, 1, 1)},
    "swin": {"embed_dim": 8, "depths": (2, 2, 2, 1), "num_heads": (1, 2, 2, 2)},
    "cvt": {"widths": (8, 12, 16), "depths": (1, 1, 2), "num_heads": (1, 2, 2)},
    "t2t": {"width": 12, "depth": 2, "num_heads": 2, "token_width": 8},
}
each = pytest.mark.parametrize("name", TINY)


def tiny(name, image_size=32, num_classes=5, **options):
    return create_vit(name, image_size, num_classes, **{**TINY[name], **options})


def shaken(model):
    """Return a model with random weights. Some weights start at 0, which would stop the gradient."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


# Number of parameters, computed from the layers.
ATTENTION = (192 * 576 + 576) + (192 * 192 + 192)
PERCEPTRON = (192 * 768 + 768) + (768 * 192 + 192)
BLOCK = ATTENTION + PERCEPTRON + 2 * 2 * 192


def test_vit_has_the_documented_number_of_parameters(parameters_of):
    model = ViT(num_classes=7)
    assert parameters_of(model.body) == (3 * 16 * 192 + 192) + 192 + 65 * 192 + 6 * BLOCK + 2 * 192 == 2_691_648
    assert 4 * parameters_of(model.body) == 10_766_592
    assert parameters_of(model.head) == 192 * 7 + 7 and isinstance(model.head, nn.Linear)
    assert all(f"{number:,}" in ViT.__doc__ for number in (BLOCK, parameters_of(model.body)))
    assert parameters_of(ViT(num_classes=7, num_heads=3)) == parameters_of(model)
    assert len(model.body.blocks) == 6 and model.body.blocks[0].attn.num_heads == 12


def test_create_vit_by_name_equals_vit():
    torch.manual_seed(0)
    left = ViT(num_classes=7)
    torch.manual_seed(0)
    right = create_vit("vit", num_classes=7)
    state = right.state_dict()
    assert state.keys() == left.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in left.state_dict().items())


def test_vit_equals_explicit_computation():
    model = shaken(ViT(width=12, num_heads=2, depth=1)).double().eval()
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    body, block = model.body, model.body.blocks[0]
    # The order of pixels is channel by channel, then row by row.
    pixels, layer = F.unfold(x, 4, stride=4).transpose(1, 2), body.patch_embed.proj
    patches = pixels @ layer.weight.flatten(1).T + layer.bias
    tokens = torch.cat([body.cls_token.expand(3, 1, 12), patches], dim=1) + body.pos_embed
    parts = block.attn.qkv(F.layer_norm(tokens, (12,), block.norm1.weight, block.norm1.bias, 1e-6)).split(12, dim=2)
    heads = []
    for head in (slice(0, 6), slice(6, 12)):
        query, key, value = (part[..., head] for part in parts)
        heads.append((query @ key.transpose(1, 2) / 6**0.5).softmax(dim=2) @ value)
    tokens = tokens + block.attn.proj(torch.cat(heads, dim=2))
    normed = F.layer_norm(tokens, (12,), block.norm2.weight, block.norm2.bias, 1e-6)
    tokens = tokens + block.mlp.fc2(F.gelu(block.mlp.fc1(normed)))
    features = F.layer_norm(tokens, (12,), body.norm.weight, body.norm.bias, 1e-6)[:, 0]
    torch.testing.assert_close(model(x), features @ model.head.weight.T + model.head.bias)


# Millions of parameters with 1000 classes at 224 x 224, from the papers. LeViT has one classification head less than in
# the paper. The numbers of PVT are from its authors' repository.
PUBLISHED = {
    "deit_tiny": 5.7,
    "deit_small": 22.1,
    "cait_xxs24": 12.0,
    "cait_xxs36": 17.3,
    "pit_ti": 4.9,
    "pit_xs": 10.6,
    "pit_s": 23.5,
    "pvt_v2_b0": 3.7,
    "pvt_v2_b1": 14.0,
    "levit_128s": 7.8 - 0.386,
    "levit_128": 9.2 - 0.386,
    "levit_192": 10.9 - 0.386,
    "swin_tiny": 28.3,
    "swin_small": 49.6,
    "cvt_13": 20.0,
    "cvt_21": 31.6,
    "t2t_7": 4.3 - 0.050,
    "t2t_10": 5.9 - 0.050,
    "t2t_12": 6.9 - 0.050,
    "t2t_14": 21.5 - 0.076,
}


def test_every_variant_has_a_published_size():
    assert PUBLISHED.keys() == VARIANTS.keys() - {"vit"}
    assert set(FAMILIES.values()) < VARIANTS.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_variants_at_224_have_the_published_number_of_parameters(name, parameters_of):
    with torch.device("meta"):
        model = create_vit(name, image_size=224, num_classes=1000)
    assert parameters_of(model) / 1e6 == pytest.approx(PUBLISHED[name], rel=0.012)


@each
def test_create_vit_sizes_equal_the_docstring(name, parameters_of):
    columns = " ".join(create_vit.__doc__.split())
    with torch.device("meta"):
        small, large = (parameters_of(create_vit(name, image_size).body) for image_size in (32, 224))
    assert f"{name} {small:,} {large:,}" in columns


@pytest.mark.parametrize(
    ("name", "original"),
    [
        ("deit_tiny", "deit_tiny_patch16_224"),
        ("cait_xxs24", "cait_xxs24_224"),
        ("pit_ti", "pit_ti_224"),
        ("pvt_v2_b0", "pvt_v2_b0"),
        ("swin_tiny", "swin_tiny_patch4_window7_224"),
    ],
)
def test_variants_at_224_have_the_parameters_of_timm_models(name, original):
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        model, theirs = create_vit(name, 224, 1000), timm.create_model(original)
    ours = {name.removeprefix("body."): tuple(value.shape) for name, value in model.named_parameters()}
    shapes = {name.replace("head.fc.", "head."): tuple(value.shape) for name, value in theirs.named_parameters()}
    assert ours == shapes


# Number of keys in the attention of each stage at 32 x 32.
KEYS = {
    "vit": {65},
    "cait": {64},
    "pit": {1 + 15**2, 1 + 8**2, 1 + 4**2},
    "pvt": {4 * 4, 2 * 2},
    "levit": {8 * 8, 4 * 4, 2 * 2},
    "swin": {4 * 4, 2 * 2},
    "cvt": {8 * 8, 4 * 4, 1 + 2 * 2},
    "t2t": {16 * 16, 8 * 8, 1 + 8 * 8},
}


@pytest.mark.parametrize("name", KEYS)
def test_every_attention_has_several_keys_at_32(name, monkeypatch):
    seen, plain, softmax = set(), F.scaled_dot_product_attention, torch.Tensor.softmax

    def watched(query, key, value, **kwargs):
        seen.add(key.shape[2])
        return plain(query, key, value, **kwargs)

    def watched_softmax(scores, dim):
        seen.add(scores.shape[dim])
        return softmax(scores, dim)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(torch.Tensor, "softmax", watched_softmax)
    model = tiny(name)
    for module in model.modules():
        if isinstance(module, nn.Softmax):
            module.register_forward_hook(lambda _, args, out: seen.add(out.shape[-1]))
    model(torch.randn(2, 3, 32, 32))
    if name == "cait":
        # The blocks of the class token have 65 keys.
        seen.discard(65)
    assert seen == KEYS[name]


@each
def test_create_vit_shapes_at_32(name):
    model = create_vit(name, num_classes=7).eval()
    x = torch.randn(2, 3, 32, 32)
    features = model.body(x)
    assert features.shape == (2, model.features) and torch.isfinite(features).all()
    logits = model(x)
    assert logits.shape == (2, 7)
    assert torch.equal(logits, model.head(features)) and torch.equal(features, model.embed(x))


@each
def test_create_vit_shapes_at_224(name):
    model = create_vit(name, image_size=224, num_classes=7).eval()
    with torch.no_grad():
        assert model(torch.randn(1, 3, 224, 224)).shape == (1, 7)


@each
@pytest.mark.parametrize("image_size", [48, 64, 160])
def test_create_vit_accepts_other_sizes_and_channels(name, image_size):
    model = tiny(name, image_size, channels=1)
    assert model(torch.randn(2, 1, image_size, image_size)).shape == (2, 5)


@each
def test_create_vit_state_contains_body_and_head(name):
    model = tiny(name)
    parts = [{id(p) for p in part.parameters()} for part in (model.body, model.head)]
    assert not parts[0] & parts[1] and parts[0] | parts[1] == {id(p) for p in model.parameters()}
    state = state_tensors(model)
    # No tensor has two names.
    assert state.keys() == model.state_dict().keys()
    assert {key.split(".")[0] for key in state} == {"body", "head"}
    assert [key for key in state if key.startswith("head.")] == ["head.weight", "head.bias"]
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    assert all(p.requires_grad for p in model.parameters())


# Biases without effect: a constant that is added to all keys or to all scores does not change the softmax.
BLIND = ("key.linear.bias", "key.norm.bias", "attn.k.bias", "attn.proj_l.bias")


@each
def test_gradients_reach_every_row(name):
    model, x = shaken(tiny(name).double()), torch.randn(4, 3, 32, 32, dtype=torch.float64)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.momentum = 1.0
    model(x)
    # In training mode, LeViT's norms cancel a constant in their inputs.
    model.eval()
    (model(x) * torch.randn(4, 5)).sum().backward()
    for key, parameter in model.named_parameters():
        rows = parameter.grad.flatten(1) if parameter.dim() > 1 else parameter.grad[None]
        assert rows.abs().amax(dim=1).min() > 1e-9 or key.endswith(BLIND), key


@pytest.mark.seconds
@each
def test_training_separates_eight_images(name):
    """The lowest loss is below 1.1. A model that ignores the images has a loss of at least log(4), about 1.39.

    The optimizer is AdamW. For four seeds and all networks, the lowest loss is at most 0.85.
    """
    model = tiny(name, num_classes=4).train()
    x, y = torch.randn(8, 3, 32, 32), torch.arange(8) % 4
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for _ in range(30):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert min(losses) < 1.1 < math.log(4) < losses[0] + 0.1


@each
def test_create_vit_weights_depend_on_the_seed(name):
    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        states.append(tiny(name).state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert not torch.equal(states[0]["head.weight"], states[2]["head.weight"])


@each
def test_create_vit_copies_and_other_weights_after_a_forward(name):
    """Values that a model caches in the first forward pass must not hide a later change of the model's weights."""
    model, other = shaken(tiny(name)).eval(), shaken(tiny(name)).eval()
    x = torch.randn(2, 3, 32, 32)
    before, wanted = model(x), other(x)
    assert not torch.allclose(before, wanted)
    torch.testing.assert_close(copy.deepcopy(model)(x), before)
    weights = {key: value.clone() for key, value in other.state_dict().items()}
    torch.testing.assert_close(torch.func.functional_call(model, weights, (x,)), wanted)
    torch.testing.assert_close(model(x), before)
    model.load_state_dict(weights)
    torch.testing.assert_close(model(x), wanted)


@each
def test_training_one_image_is_deterministic(name):
    model, x = shaken(tiny(name)).train(), torch.randn(1, 3, 32, 32)
    first = model(x)
    assert torch.equal(model(x), first)
    first.sum().backward()


def test_levit_body_has_a_norm_before_the_pooling():
    from timm.models.levit import Levit

    model = shaken(tiny("levit")).eval()
    assert isinstance(model.body, LevitBody)
    with torch.no_grad():
        model.body.norm.running_mean.normal_()
        model.body.norm.running_var.uniform_(0.5, 2)
    x = torch.randn(2, 3, 32, 32)
    tokens = model.body.levit.forward_features(x)
    norm = model.body.norm
    pooled = (tokens.mean(dim=1) - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias
    # In evaluation mode, the order of norm and pooling does not matter.
    torch.testing.assert_close(model.body(x), pooled, rtol=1e-4, atol=1e-4)
    assert type(model.body.levit) is Levit and isinstance(model.body.levit.head, nn.Identity)


def images(samples=24, classes=4):
    rng = np.random.default_rng(0)
    return rng.normal(size=(samples, 3, 32, 32)).astype(np.float32), np.arange(samples) % classes


@pytest.mark.parametrize("name", ["vit", "t2t"])
def test_vectorized_training_equals_sequential(fit, name):
    states = []
    for cohort in (1, 2):
        torch.manual_seed(0)
        task = Classifier(tiny(name, num_classes=4), 4, lambda params: torch.optim.SGD(params, lr=0.1))
        stream = FederatedStream.from_arrays(
            *images(), scenario=ClassIncremental(1), partition=IID(2), batch_size=4, seed=0
        )
        fit(task, stream, max_epochs=1, seed=0, max_vectorized_clients=cohort)
        states.append(task.state_dict())
    for key, value in states[0].items():
        torch.testing.assert_close(value, states[1][key], rtol=0, atol=1e-5)


def test_create_vit_from_a_recipe():
    parser = ArgumentParser()
    parser.add_subclass_arguments(Classifier, "model")
    network = {
        "class_path": "lightning_fcl.models.create_vit",
        "init_args": {"name": "t2t", "num_classes": 7},
        "dict_kwargs": {"depth": 1},
    }
    arguments = {"num_classes": 7, "model": network}
    config = parser.parse_object({"model": {"class_path": "lightning_fcl.Classifier", "init_args": arguments}})
    model = parser.instantiate(config).model.model
    assert isinstance(model, SplitViT) and model.head.out_features == 7 and len(model.body.blocks) == 1


@pytest.mark.parametrize("name", ["deit-tiny", "DeiT_Tiny", "deit"])
def test_create_vit_accepts_other_spellings(name, parameters_of):
    with torch.device("meta"):
        assert parameters_of(create_vit(name, 224, 1000)) == 5_717_416


WRONG = {
    "name": (("switn",), {}, (UnknownNameError, "name")),
    "near": (("cvt13",), {}, (UnknownNameError, "name")),
    "classes": (("vit",), {"num_classes": 0}, (InvalidValueError, "num_classes")),
    "option": (("deit",), {"depht": 3}, (UnknownNameError, "depht")),
    "timm's": (("swin",), {"img_size": 3}, (UnknownNameError, "img_size")),
    "num_heads": (("vit",), {"num_heads": 7}, (InvalidValueError, "width")),
    "vit": (
        ("vit", 30),
        {},
        (InvalidValueError, "image_size"),
    ),
    "cait": (("cait", 230), {}, (InvalidValueError, "image_size")),
    "pit": (("pit", 10), {}, (InvalidValueError, "image_size")),
    "pvt": (("pvt", 28), {}, (InvalidValueError, "image_size")),
    "levit": (("levit", 16), {}, (InvalidValueError, "image_size")),
    "swin": (("swin", 16), {}, (InvalidValueError, "image_size")),
    "channels": (("t2t",), {"channels": 0}, (InvalidValueError, "channels")),
}


@pytest.mark.parametrize("case", WRONG)
def test_create_vit_invalid_arguments_raise(case):
    positional, options, expected = WRONG[case]
    with raises(*expected), torch.device("meta"):
        create_vit(*positional, **options)


@each
@pytest.mark.parametrize("shape", [(3, 64, 64), (1, 32, 32), (3, 32, 36), (32, 32)])
def test_create_vit_images_of_another_shape_raise(name, shape):
    with raises(InvalidValueError, "image_size"), torch.device("meta"):
        tiny(name)(torch.zeros(2, *shape))
