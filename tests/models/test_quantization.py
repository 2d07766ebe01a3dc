import copy
import itertools
import sys

import numpy as np
import pytest
import torch
from raising import raises
from sklearn.datasets import load_digits
from torch import nn
from torch.func import functional_call, vmap

from lightning_fcl import Classifier, FederatedStream
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.errors import InvalidValueError, MissingPackageError, MissingValueError
from lightning_fcl.local_training.vmap_check import find_padding_obstacle
from lightning_fcl.models import DSICNet, quantization
from lightning_fcl.models.quantization import Int8Backbone, fold_batchnorm, quantize_backbone


def standard(images):
    return (images - images.mean()) / images.std()


def digits():
    """Return scikit-learn's digits as standardized images of 64 x 48 pixels."""
    images = torch.from_numpy(load_digits().images[:320]).float()[:, None]
    return standard(nn.functional.interpolate(images, (64, 48), mode="bilinear"))


@pytest.fixture(scope="module")
def pair():
    """Return a float network trained on digits, and its int8 copy, both in evaluation mode."""
    torch.manual_seed(0)
    x, y = digits(), torch.from_numpy(load_digits().target[:320])
    model = DSICNet()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(60):
        rows = torch.randint(0, 320, (32,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    model.eval().backbone.requires_grad_(False)
    int8 = copy.deepcopy(model)
    quantize_backbone(int8, x[:128])
    return model, int8


def relative(a, b):
    return float(((a - b).norm() / a.norm()).detach())


def conv_by_hand(x, weight, bias, stride, padding, groups):
    """Return a convolution of integers, computed in int64 in loops over the kernel."""
    x = np.pad(x.astype(np.int64), ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    outputs, inputs, height, width = weight.shape
    h, w = (x.shape[2] - height) // stride + 1, (x.shape[3] - width) // stride + 1
    out = np.tile(bias.astype(np.int64)[:, None, None], (len(x), 1, h, w))
    for o, i in itertools.product(range(outputs), range(inputs)):
        channel = (o // (outputs // groups)) * inputs + i
        for a, b in itertools.product(range(height), range(width)):
            part = x[:, channel, a : a + stride * (h - 1) + 1 : stride, b : b + stride * (w - 1) + 1 : stride]
            out[:, o] += int(weight[o, i, a, b]) * part
    return out


def float_backbone(model):
    backbone = copy.deepcopy(model.backbone).eval()
    fold_batchnorm(backbone)
    return backbone


# Tests of folding batch normalization into convolutions.


def test_fold_batchnorm_follows_the_formula_and_keeps_other_norms():
    convolution, norm = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)
    for value in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        nn.init.uniform_(value, 0.5, 2)
    block = nn.Sequential(convolution, norm, nn.ReLU(), nn.BatchNorm2d(3)).train()
    fold_batchnorm(block)
    factor = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    assert torch.allclose(block[0].weight, convolution.weight * factor[:, None, None, None])
    assert torch.allclose(block[0].bias, (convolution.bias - norm.running_mean) * factor + norm.bias)
    assert isinstance(block[3], nn.BatchNorm2d)
    assert block[0].training and block.training


# Tests of the int8 network against independent computations.


@pytest.mark.parametrize(("groups", "stride", "padding", "relu"), [(1, 2, 1, True), (4, 1, 1, True), (2, 1, 0, False)])
def test_int8_convolution_equals_integer_arithmetic(groups, stride, padding, relu):
    torch.manual_seed(1)
    layers = [nn.Conv2d(4, 8, 3, stride, padding, groups=groups, bias=False), nn.BatchNorm2d(8)]
    model = nn.Module()
    model.backbone = nn.Sequential(*layers, *([nn.ReLU()] if relu else [])).eval()
    for value in (layers[1].running_mean, layers[1].running_var):
        nn.init.uniform_(value, 0.1, 1)
    images = torch.rand(20, 4, 10, 9) * 3 - 1
    reference = copy.deepcopy(model.backbone).requires_grad_(False)
    fold_batchnorm(reference)
    quantize_backbone(model, images)
    (layer,) = model.backbone.layers

    weight, bias = reference[0].weight.numpy(), reference[0].bias.numpy()
    weight_scale = np.abs(weight).max(axis=(1, 2, 3)) / 127
    assert np.allclose(layer.weight_scale, weight_scale, rtol=1e-5)
    levels = weight / weight_scale[:, None, None, None]
    assert np.abs(layer.weight.numpy() - levels).max() <= 0.5 + 1e-3
    assert layer.weight.abs().amax(dim=(1, 2, 3)).tolist() == [127] * 8

    scale, zero = float(model.backbone.input_scale), int(model.backbone.input_zero_point)
    # The 256 levels cover the range -1 to 2.
    assert scale == pytest.approx(3 / 255, rel=0.05)
    assert zero == pytest.approx(255 / 3, rel=0.05)
    assert np.abs(layer.bias.numpy() * scale * weight_scale - bias).max() <= 0.51 * scale * weight_scale.max()

    x = np.clip(np.rint(images.numpy() / np.float32(scale)) + zero, 0, 255) - zero
    sums = conv_by_hand(x, layer.weight.numpy(), layer.bias.numpy(), stride, padding, groups)
    factor = np.float32(scale) * layer.weight_scale.numpy() / layer.scale.numpy()
    out_zero = int(layer.zero_point)
    assert (out_zero == 0) == relu
    expected = np.clip(np.rint(sums.astype(np.float32) * factor[:, None, None]) + out_zero, 0, 255).astype(np.uint8)
    assert np.array_equal(model.backbone(images), (expected.astype(np.float32) - out_zero) * layer.scale.numpy())
    assert relative(reference(images), model.backbone(images)) < 0.02


@pytest.mark.seconds
def test_int8_backbone_error_equals_the_torchao_graph(pair):
    model, int8 = pair
    with torch.no_grad():
        maps = model.backbone(digits())
        graph = quantization.calibrated_graph(float_backbone(model), digits()[:128], 64)(digits())
    # The graph adds biases in floating point. A few numbers are therefore rounded to another level, which changes other
    # numbers in later layers.
    error = relative(maps, graph)
    assert relative(maps, int8.backbone(digits())) == pytest.approx(error, rel=0.05)
    assert relative(graph, int8.backbone(digits())) < error / 2


def test_int8_network_is_near_float_on_digits(pair):
    model, int8 = pair
    unseen = digits()[128:]
    assert 0.001 < relative(model.backbone(unseen), int8.backbone(unseen)) < 0.12
    assert 0.001 < relative(model(unseen), int8(unseen)) < 0.06
    assert float((model(unseen).argmax(1) == int8(unseen).argmax(1)).float().mean()) > 0.97


def test_int8_channel_of_zeros_keeps_its_bias():
    model = nn.Module()
    model.backbone = nn.Sequential(nn.Conv2d(1, 2, 1))
    nn.init.zeros_(model.backbone[0].weight[0])
    nn.init.constant_(model.backbone[0].bias, 3.0)
    quantize_backbone(model, torch.rand(8, 1, 4, 4) / 10)
    assert torch.allclose(model.backbone(torch.rand(2, 1, 4, 4))[:, 0], torch.tensor(3.0), rtol=0.02)


# Tests of the state.


def test_int8_state_has_only_buffers_and_int8_weights(pair):
    backbone = pair[1].backbone
    state = backbone.state_dict()
    assert all(type(value) is torch.Tensor for value in state.values())
    assert list(backbone.parameters()) == []
    assert {name for name, value in state.items() if value.dtype == torch.int8} == {
        f"{name}_convolution.weight"
        for name in ["stem", *(f"{kind}{i}" for i in range(1, 7) for kind in ("depthwise", "pointwise")), "depthwise7"]
    }


@pytest.mark.seconds
def test_int8_loaded_state_is_bitwise_identical(pair, tmp_path):
    int8 = pair[1]
    torch.save(int8.state_dict(), tmp_path / "state.pt")
    fresh = DSICNet()
    quantize_backbone(fresh, None)
    assert not torch.equal(fresh.eval()(digits()), int8(digits()))
    fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(fresh.eval()(digits()), int8(digits()))


def test_quantize_backbone_without_images_needs_no_torchao(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization.pt2e.quantize_pt2e", None)
    quantize_backbone(DSICNet(), None)
    with raises(MissingPackageError, value="torchao"):
        quantize_backbone(DSICNet(), digits()[:2])


# Tests of the behavior as a module.


@pytest.mark.seconds
def test_int8_outputs_do_not_depend_on_mode_dtype_or_batch(pair):
    int8 = copy.deepcopy(pair[1])
    maps = int8.backbone(digits())
    assert torch.equal(int8.train().backbone(digits()), maps)
    assert torch.equal(int8.backbone.eval()(digits()), maps)
    assert torch.equal(torch.cat([int8.backbone(part) for part in digits().split(1)]), maps)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(int8.backbone(digits()), maps)
    assert torch.equal(int8.double().backbone(digits().double()), maps.double())
    assert torch.equal(int8.float().backbone(digits().half()), int8.backbone(digits().half().float()).half())
    state = {name: value.clone() for name, value in int8.backbone.state_dict().items()}
    state["depthwise7_convolution.scale"] *= 2
    assert not torch.equal(functional_call(int8.backbone, state, (digits(),)), maps)
    assert torch.equal(int8.backbone(digits()), maps)


@pytest.mark.filterwarnings("error")
def test_int8_backbone_vmap_over_inputs_and_states(pair):
    backbone = pair[1].backbone
    x = digits()[:12].view(3, 4, 1, 64, 48)
    maps = backbone(digits()[:12]).view(3, 4, 64, 4, 3)
    assert torch.equal(vmap(backbone, randomness="error")(x), maps)
    states = {name: torch.stack([value] * 3) for name, value in backbone.state_dict().items()}
    states["stem_convolution.bias"][1] += 50
    called = vmap(lambda state, part: functional_call(backbone, state, (part,)), randomness="error")(states, x)
    assert torch.equal(called[0], maps[0]) and torch.equal(called[2], maps[2])
    assert not torch.equal(called[1], maps[1])


def small_stream(**kwargs):
    rng = np.random.default_rng(0)
    y = np.arange(48) % 4
    x = rng.normal(size=(48, 1, 16, 16)).astype(np.float32) + y[:, None, None, None]
    options = {"scenario": ClassIncremental(2), "partition": IID(3), "batch_size": 4, "seed": 0}
    return FederatedStream.from_arrays(x.astype(np.float32), y, **options, **kwargs)


@pytest.mark.seconds
def test_int8_head_vectorized_equals_sequential(fit):
    images = torch.randn(16, 1, 16, 16)
    results = []
    for size in (1, 3):
        torch.manual_seed(0)
        model = DSICNet(4, (16, 16))
        quantize_backbone(model, images)
        fold_batchnorm(model)
        task = Classifier(model, 4, lambda params: torch.optim.SGD(params, lr=0.05))
        before = copy.deepcopy(task.state_dict())
        stream = small_stream()
        trainer = fit(task, stream, max_vectorized_clients=size)
        assert find_padding_obstacle(task, [], trainer.strategy.federation.optimizers[0], stream) is None
        results.append(task.state_dict())
        for name, value in task.state_dict().items():
            assert torch.equal(value, before[name]) == ("backbone" in name)
    for name, value in results[0].items():
        assert torch.allclose(value, results[1][name], atol=1e-6)


# Tests of errors.


@pytest.mark.parametrize(
    "images",
    [
        torch.zeros(4, 1, 48, 64),
        torch.zeros(0, 1, 64, 48),
        torch.zeros(1, 64, 48),
        torch.full((2, 1, 64, 48), float("nan")),
    ],
)
def test_quantize_backbone_invalid_images_raise_without_change(images):
    model = DSICNet()
    with raises(InvalidValueError, "calibration"):
        quantize_backbone(model, images)
    assert not isinstance(model.backbone, Int8Backbone)


def with_backbone(*layers):
    model = nn.Module()
    model.backbone = nn.Sequential(*layers)
    return model


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (with_backbone(nn.Conv2d(1, 1, 1), nn.Sigmoid()), (InvalidValueError, "model.backbone")),
        (with_backbone(nn.ReLU(), nn.Conv2d(1, 1, 1)), (InvalidValueError, "model.backbone")),
        (with_backbone(nn.BatchNorm2d(1), nn.Conv2d(1, 1, 1)), (InvalidValueError, "model.backbone")),
        (with_backbone(nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect")), (InvalidValueError, "model.backbone")),
        (with_backbone(), (MissingValueError, "model.backbone")),
    ],
)
def test_quantize_backbone_unsupported_layers_raise(model, expected):
    with raises(*expected):
        quantize_backbone(model, None)


@pytest.mark.seconds
def test_quantize_backbone_quantized_model_raises(pair):
    with raises(InvalidValueError, "model.backbone"):
        quantize_backbone(pair[1], None)
