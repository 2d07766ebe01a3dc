"""Tests of the export to ONNX and ExecuTorch files."""

import math
import sys
from collections import Counter

import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from raising import raises
from torch import nn

from lightning_fcl.edge.export import export_executorch, export_int8_onnx, export_onnx
from lightning_fcl.errors import InvalidValueError, MissingPackageError
from lightning_fcl.models import DSICNet, EchoStateNetwork, FeatureReadout, ReservoirReadout, RidgeReadout
from lightning_fcl.models.backbone import FrozenBackbone
from lightning_fcl.models.quantization import quantize_backbone


@pytest.fixture(scope="module")
def images():
    """Return smooth random images."""
    torch.manual_seed(0)
    return nn.functional.interpolate(torch.randn(24, 1, 8, 6), (64, 48), mode="bicubic")


@pytest.fixture(scope="module")
def model(images):
    torch.manual_seed(0)
    net = DSICNet()
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None
    with torch.no_grad():
        net.train()(images)
    quantize_backbone(net, images)
    return net.eval()


@pytest.fixture(scope="module")
def files(model, images, tmp_path_factory):
    """Export the int8 backbone and the whole classifier.

    For each of the two modules, return the path, the measured difference and the module.
    """
    folder = tmp_path_factory.mktemp("onnx")
    parts = {"backbone": model.backbone, "whole": model}
    return {
        name: (folder / f"{name}.onnx", export_onnx(part, images[:3], folder / f"{name}.onnx"), part)
        for name, part in parts.items()
    }


def run(path, batch):
    options = onnxruntime.SessionOptions()
    # This option gives exact sums on processors without VNNI.
    options.add_session_config_entry("session.x64quantprecision", "1")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: batch.numpy()})[0])


@pytest.mark.seconds
def test_export_onnx_float_network_accepts_any_batch_size(images, tmp_path):
    net = DSICNet()
    assert export_onnx(net.train(), images[:2], tmp_path / "new" / "net.onnx") < 1e-4
    assert net.training
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["net.onnx"]
    for batch in (images[:1], images):
        assert torch.allclose(run(tmp_path / "new" / "net.onnx", batch), net.eval()(batch), atol=1e-4)


@pytest.mark.seconds
@pytest.mark.parametrize("part", ["backbone", "whole"])
def test_export_onnx_int8_outputs_equal_pytorch(files, part, images):
    path, difference, module = files[part]
    assert difference < 1e-4
    for batch in (images[:1], images):
        assert torch.allclose(run(path, batch), module(batch), atol=1e-4)


def test_export_onnx_int8_file_contains_int8_weights(files, model):
    path, _, backbone = files["backbone"]
    graph = onnx.load(path).graph
    onnx.checker.check_model(path, full_check=True)
    stored = [numpy_helper.to_array(value) for value in graph.initializer]
    weights = [value for value in stored if value.dtype == "int8"]
    expected = [layer.weight.numpy() for layer in backbone.layers]
    assert all((a.shape == b.shape and (a == b).all()) for a, b in zip(weights, expected, strict=True))
    assert not any(value.dtype == "float32" and value.ndim > 1 for value in stored)
    counts = Counter(node.op_type for node in graph.node)
    # Each activation has a pair of QuantizeLinear and DequantizeLinear. Each weight and bias has another
    # DequantizeLinear.
    assert counts == {"Conv": 14, "QuantizeLinear": 15, "DequantizeLinear": 15 + 2 * 14}
    in_float = 4 * sum(value.size for value in weights)
    assert 0.25 * in_float < path.stat().st_size < 0.6 * in_float


def test_export_onnx_file_contains_no_source_paths(files):
    for path, _, _ in files.values():
        assert b".py" not in path.read_bytes()


def test_export_onnx_int8_head_is_float(files):
    stored = [numpy_helper.to_array(value) for value in onnx.load(files["whole"][0]).graph.initializer]
    assert {(80, 64, 1, 1), (10, 80)} <= {value.shape for value in stored if value.dtype == "float32"}


def test_export_onnx_does_not_change_module(files, model):
    assert "backbone.zero_point" not in model.state_dict()


class Wrong(nn.Module):
    """A module that adds an error to its output during the export."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        return x + self.error if torch.compiler.is_exporting() else 1 * x


@pytest.mark.seconds
@pytest.mark.parametrize("error", [0.01, math.nan])
def test_export_onnx_outputs_differ_keeps_old_file(error, tmp_path):
    path = tmp_path / "net.onnx"
    path.write_text("older")
    with raises(InvalidValueError, "tolerance"):
        export_onnx(Wrong(error), torch.randn(3, 2), path)
    assert path.read_text() == "older"
    assert [item.name for item in tmp_path.iterdir()] == ["net.onnx"]


@pytest.mark.seconds
def test_export_onnx_returns_largest_difference(tmp_path):
    difference = export_onnx(Wrong(0.01), torch.zeros(3, 2), tmp_path / "net.onnx", tolerance=0.1)
    assert difference == pytest.approx(0.01)


@pytest.mark.parametrize("example", [torch.zeros(0, 2), torch.zeros(3)])
def test_export_onnx_invalid_example_raises(example, tmp_path):
    with pytest.raises(InvalidValueError, check=lambda error: error.argument == "example"):
        export_onnx(nn.Linear(2, 2), example, tmp_path / "net.onnx")


def test_export_onnx_missing_package_raises(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with raises(MissingPackageError, value="onnxruntime"):
        export_onnx(nn.Linear(2, 2), torch.zeros(1, 2), tmp_path / "net.onnx")


# ExecuTorch's own passes take most of the time.
@pytest.mark.slow
@pytest.mark.parametrize(("part", "size"), [("float", 1), ("backbone", 5), ("whole", 1)])
def test_export_executorch_outputs_equal_pytorch(part, size, model, images, tmp_path):
    runtime = pytest.importorskip("executorch.runtime", reason="executorch is not installed")
    module = {"float": DSICNet().eval(), "backbone": model.backbone, "whole": model}[part]
    path = tmp_path / "net.pte"
    assert export_executorch(module, images[:3], path, max_batch=size) < 1e-4
    method = runtime.Runtime.get().load_program(path).load_method("forward")
    assert torch.allclose(method.execute([images[-size:]])[0], module(images[-size:]), atol=1e-4)
    if part == "backbone":
        # In float32, the weights of the backbone would take 89.6 kB.
        assert path.stat().st_size < 0.7 * 4 * sum(layer.weight.numel() for layer in module.layers)


def test_export_executorch_invalid_batch_or_missing_package_raises(monkeypatch, tmp_path):
    with raises(InvalidValueError, "max_batch", value=0):
        export_executorch(nn.Linear(2, 2), torch.zeros(1, 2), tmp_path / "net.pte", max_batch=0)
    monkeypatch.setitem(sys.modules, "executorch.backends.xnnpack.partition.xnnpack_partitioner", None)
    with raises(MissingPackageError, value="executorch"):
        export_executorch(nn.Linear(2, 2), torch.zeros(1, 2), tmp_path / "net.pte")


@pytest.mark.seconds
@pytest.mark.parametrize("readout", ["steps", "last", "mean"])
def test_export_onnx_reservoir_steps_become_scan(tmp_path, readout):
    reservoir = EchoStateNetwork(3, units=10, num_layers=2, leaking_rate=0.4, bias_scaling=0.2, washout=5, seed=0)
    with torch.no_grad():
        reservoir.gain += 0.3 * torch.randn(20)
        reservoir.bias += 0.3 * torch.randn(20)
    network = ReservoirReadout(reservoir, 2, readout)
    network.weight += torch.randn(2, 20)
    assert export_onnx(network, torch.randn(3, 150, 3), tmp_path / "esn.onnx", tolerance=1e-5) <= 1e-5
    names = Counter(node.op_type for node in onnx.load(tmp_path / "esn.onnx").graph.node)
    assert names["Scan"] == 2 and names["Tanh"] == 0


@pytest.fixture(scope="module")
def frozen():
    """Return a ridge readout of a small frozen backbone, and noisy images of four classes."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU6(), nn.Conv2d(16, 32, 3, 2), nn.ReLU6()]
    backbone = FrozenBackbone(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten()), size=24)
    kinds = torch.rand(4, 3, 12, 12)
    images = (kinds.repeat(60, 1, 1, 1) + 0.1 * torch.randn(240, 3, 12, 12)).clamp(0, 1)
    readout = RidgeReadout(backbone.features, 4, beta=0.1)
    readout.partial_fit(backbone.embed(images), torch.eye(4).repeat(60, 1))
    readout.solve()
    network = FeatureReadout(backbone, 4)
    network.weight.copy_(readout.weight)
    assert torch.equal(network(images).argmax(dim=1), torch.arange(240) % 4)
    return network, images


@pytest.mark.seconds
def test_export_onnx_frozen_backbone_with_readout(frozen, tmp_path):
    network, images = frozen
    assert export_onnx(network, images[:3], tmp_path / "net.onnx") < 1e-4
    torch.testing.assert_close(run(tmp_path / "net.onnx", images), network(images), rtol=1e-3, atol=1e-4)


@pytest.mark.seconds
def test_export_int8_onnx_convolutions_are_int8(frozen, tmp_path):
    network, images = frozen
    assert export_int8_onnx(network, images[:120], images[120:], tmp_path / "new" / "net.onnx") > 0.95
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["net.onnx"]
    outputs = run(tmp_path / "new" / "net.onnx", images[:1])
    assert (outputs - network(images[:1])).abs().max() < 0.2
    stored = [numpy_helper.to_array(value) for value in onnx.load(tmp_path / "new" / "net.onnx").graph.initializer]
    assert {(16, 3, 3, 3), (32, 16, 3, 3)} == {
        value.shape for value in stored if value.dtype == "int8" and value.ndim == 4
    }
    assert not any(value.dtype == "float32" and value.ndim == 4 and value.shape[2] == 3 for value in stored)


@pytest.mark.seconds
@pytest.mark.long
def test_export_int8_onnx_low_agreement_raises_and_keeps_old_file(frozen, tmp_path):
    network, images = frozen
    (tmp_path / "net.onnx").write_bytes(b"older")
    with raises(InvalidValueError, "agreement") as caught:
        export_int8_onnx(network, torch.full((20, 3, 12, 12), 0.5), images, tmp_path / "net.onnx", agreement=0.9)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("net.onnx", b"older")]
    assert caught.value.hint == "Pass more inputs in `calibration`, like those of `example`, or use `export_onnx`."
    assert export_int8_onnx(network, images[:120], images, tmp_path / "more.onnx", agreement=0.9) >= 0.9
    export_onnx(network, images[:3], tmp_path / "float.onnx")
    assert (run(tmp_path / "float.onnx", images).argmax(dim=1) == network(images).argmax(dim=1)).all()
    with raises(InvalidValueError, "calibration"):
        export_int8_onnx(network, images[:0], images, tmp_path / "net.onnx")
