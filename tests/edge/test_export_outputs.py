"""Tests of the export and the footprint of modules that return several tensors."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from raising import raises
from torch import Tensor, nn

from lightning_fcl.edge.export import export_executorch, export_int8_onnx, export_onnx
from lightning_fcl.edge.footprint import measure_footprint
from lightning_fcl.edge.outputs import get_outputs, largest_difference
from lightning_fcl.errors import InvalidTypeError, InvalidValueError


class Pair(NamedTuple):
    logits: Tensor
    features: Tensor


@dataclass
class Detection:
    boxes: Tensor
    masks: object


class Model(nn.Module):
    """A module whose outputs are a function of the module, the input, the hidden features and the logits."""

    def __init__(self, returns=lambda model, x, hidden, logits: logits):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.returns = nn.Linear(3, 4), nn.Linear(4, 2), returns
        self.register_buffer("anchors", torch.arange(6.0).view(3, 2))

    def forward(self, x):
        hidden = self.body(x).relu()
        return self.returns(self, x, hidden, self.head(hidden))


def numbers(module, x):
    """Return the expected arrays, computed in NumPy."""
    body, head = ({n: v.detach().numpy() for n, v in part.named_parameters()} for part in (module.body, module.head))
    hidden = np.maximum(x @ body["weight"].T + body["bias"], 0)
    return hidden, hidden @ head["weight"].T + head["bias"]


CASES = {
    "tensor": (lambda model, x, hidden, logits: logits, ["output"], lambda h, y: [y]),
    "tuple": (lambda model, x, hidden, logits: (logits, hidden), ["output_0", "output_1"], lambda h, y: [y, h]),
    "list": (lambda model, x, hidden, logits: [hidden, logits], ["output_0", "output_1"], lambda h, y: [h, y]),
    "dict": (lambda model, x, hidden, logits: {"z": logits, "a": hidden}, ["z", "a"], lambda h, y: [y, h]),
    "mapping": (lambda model, x, h, y: OrderedDict(b=h, a=y), ["b", "a"], lambda h, y: [h, y]),
    "named tuple": (lambda model, x, hidden, logits: Pair(logits, hidden), ["logits", "features"], lambda h, y: [y, h]),
    "nested": (
        lambda model, x, hidden, logits: Detection(logits, {"first": hidden, "rest": [hidden * 2, None, logits]}),
        ["boxes", "masks_first", "masks_rest_0", "masks_rest_2"],
        lambda h, y: [y, h, 2 * h, y],
    ),
    "same tensor": (lambda model, x, hidden, logits: {"p": logits, "q": logits}, ["p", "q"], lambda h, y: [y, y]),
    "integers and masks": (
        lambda model, x, hidden, logits: {"label": logits.argmax(1), "mask": logits > 0},
        ["label", "mask"],
        lambda h, y: [y.argmax(1), y > 0],
    ),
    "infinite": (
        lambda model, x, hidden, logits: logits.masked_fill(torch.tensor([True, False]), -torch.inf),
        ["output"],
        lambda h, y: [np.where([True, False], -np.inf, y)],
    ),
    "other batch dimension": (lambda model, x, hidden, logits: hidden.t(), ["output"], lambda h, y: [h.T]),
    "scalar": (lambda model, x, hidden, logits: {"loss": logits.mean()}, ["loss"], lambda h, y: [y.mean()]),
    # Intermediate values of the graph have these names, too.
    "names in the graph": (
        lambda model, x, hidden, logits: {"linear": hidden, "body.weight": logits, "relu": hidden + 1},
        ["linear", "body.weight", "relu"],
        lambda h, y: [h, y, h + 1],
    ),
}


@pytest.mark.seconds
@pytest.mark.parametrize("case", CASES)
def test_export_onnx_outputs_have_names_and_equal_numpy(case, tmp_path):
    """The file returns each output, in order, for batches of other sizes than the example."""
    returns, names, expect = CASES[case]
    module, path = Model(returns), tmp_path / "net.onnx"
    assert export_onnx(module, torch.randn(2, 3), path) < 1e-5
    session = onnxruntime.InferenceSession(path)
    assert [output.name for output in session.get_outputs()] == names
    for size in (1, 2, 7):
        x = np.random.default_rng(size).normal(size=(size, 3)).astype(np.float32)
        found = session.run(None, {"input": x})
        expected = expect(*numbers(module, x))
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert np.shape(one) == np.shape(other) and np.asarray(one).dtype == np.asarray(other).dtype
            np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.seconds
def test_export_onnx_batch_dimension_is_dynamic_only_in_batched_outputs(tmp_path):
    module = Model(lambda model, x, hidden, logits: {"anchors": model.anchors, "logits": logits, "input_copy": x})
    export_onnx(module, torch.randn(2, 3), tmp_path / "net.onnx")
    shapes = {
        output.name: [size.dim_param or size.dim_value for size in output.type.tensor_type.shape.dim]
        for output in onnx.load(tmp_path / "net.onnx").graph.output
    }
    assert shapes == {"anchors": [3, 2], "logits": ["batch", 2], "input_copy": ["batch", 3]}


@pytest.mark.seconds
def test_export_onnx_given_output_names_are_used_in_order(tmp_path):
    module = Model(lambda model, x, hidden, logits: (logits, hidden))
    export_onnx(module, torch.randn(2, 3), tmp_path / "net.onnx", output_names=["scores", "linear"])
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    assert [(output.name, output.shape[1]) for output in session.get_outputs()] == [("scores", 2), ("linear", 4)]


@pytest.mark.parametrize("names", [["one"], ["a", "b", "c"], ["a", "a"], ["a", ""], ["input", "a"], "ab"], ids=str)
def test_export_onnx_invalid_output_names_raise_and_write_nothing(names, tmp_path):
    module = Model(lambda model, x, hidden, logits: (logits, hidden))
    with raises(InvalidValueError, "output_names"):
        export_onnx(module, torch.randn(2, 3), tmp_path / "new" / "net.onnx", output_names=names)
    assert not [*tmp_path.iterdir()]


UNSUPPORTED = {
    "number": lambda model, x, hidden, logits: (logits, 3),
    "text": lambda model, x, hidden, logits: {"logits": logits, "kind": "a"},
    "object": lambda model, x, hidden, logits: object(),
    "nothing": lambda model, x, hidden, logits: None,
    "empty dict": lambda model, x, hidden, logits: {},
    "complex": lambda model, x, hidden, logits: torch.complex(logits, logits),
    "bfloat16": lambda model, x, hidden, logits: logits.bfloat16(),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
@pytest.mark.parametrize("export", [export_onnx, export_executorch, "int8"])
def test_export_unsupported_output_raises_and_writes_nothing(kind, export, tmp_path):
    module, example, path = Model(UNSUPPORTED[kind]), torch.randn(2, 3), tmp_path / "new" / "net.onnx"
    with raises(InvalidTypeError, "module"):
        if export == "int8":
            export_int8_onnx(module, example, example, path)
        else:
            export(module, example, path)
    assert not [*tmp_path.iterdir()]


def test_export_outputs_with_equal_names_raise(tmp_path):
    module = Model(lambda model, x, hidden, logits: {"a": [logits], "a_0": hidden})
    with raises(InvalidValueError, "module", value="a_0"):
        export_onnx(module, torch.randn(2, 3), tmp_path / "net.onnx")


@pytest.mark.parametrize("example", [(torch.zeros(2, 3), torch.zeros(2, 3)), {"x": torch.zeros(2, 3)}, None], ids=type)
def test_export_of_several_inputs_raises(example, tmp_path):
    with raises(InvalidTypeError, "example"):
        export_onnx(Model(), example, tmp_path / "net.onnx")


class Wrong(nn.Module):
    """A module whose exported graph computes another value, shape or dtype for its second output."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        y = x * 2
        return {"right": x + 1, "wrong": self.change(y) if torch.onnx.is_in_onnx_export() else y}


@pytest.mark.seconds
@pytest.mark.parametrize(
    "change", [lambda y: y + 0.01, lambda y: y[:, :1], lambda y: y.double(), lambda y: y * torch.nan]
)
def test_export_onnx_compares_each_output(change, tmp_path):
    """A difference in the second output is found, and no file is written."""
    with raises(InvalidValueError, "tolerance") as caught:
        export_onnx(Wrong(change), torch.ones(3, 2), tmp_path / "net.onnx")
    assert caught.value.value["right"] <= 1e-6 and not caught.value.value["wrong"] <= 1e-4
    assert not [*tmp_path.iterdir()]


@pytest.mark.seconds
@pytest.mark.long
def test_export_int8_onnx_reads_predictions_of_scores(tmp_path):
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten())
            self.head = nn.Linear(128, 4)

        def forward(self, x):
            features = self.body(x)
            return {"features": features, "logits": self.head(features)}

    module, images, path = Classifier(), torch.rand(60, 3, 8, 8), tmp_path / "net.onnx"
    share = export_int8_onnx(module, images[:40], images[40:], path, 0, scores="logits")
    session = onnxruntime.InferenceSession(path)
    assert [output.name for output in session.get_outputs()] == ["features", "logits"]
    found = session.run(["logits"], {"input": images[40:].numpy()})[0]
    expected = module(images[40:])["logits"].argmax(1).numpy()
    assert share == pytest.approx((found.argmax(1) == expected).mean())
    names = ["embedding", "scores"]
    export_int8_onnx(module, images[:40], images[40:], path, 0, output_names=names, scores="scores")
    assert [output.name for output in onnxruntime.InferenceSession(path).get_outputs()] == names
    for scores in (None, "labels"):
        with raises(InvalidValueError, "scores", value=scores):
            export_int8_onnx(module, images[:40], images[40:], tmp_path / "new.onnx", 0, scores=scores)
    assert [file.name for file in tmp_path.iterdir()] == ["net.onnx"]


@pytest.mark.slow
def test_export_executorch_outputs_equal_pytorch_in_order(tmp_path):
    runtime = pytest.importorskip("executorch.runtime", reason="executorch is not installed")
    module = Model(lambda model, x, hidden, logits: {"z": logits, "a": (hidden, hidden * 2)})
    x, path = torch.randn(1, 3), tmp_path / "net.pte"
    export_executorch(module, x, path)
    found = runtime.Runtime.get().load_program(path).load_method("forward").execute([x])
    expected = [*get_outputs(module(x)).values()]
    assert len(found) == 3 and all(torch.allclose(*pair, atol=1e-4) for pair in zip(found, expected, strict=True))


def test_largest_difference_of_equal_infinities_is_zero():
    x = torch.tensor([1.0, torch.inf, -torch.inf])
    assert largest_difference(x, x) == 0 and largest_difference(x, -x) == torch.inf
    assert largest_difference(torch.zeros(0), torch.zeros(0)) == 0
    assert np.isnan(largest_difference(x, torch.tensor([torch.nan, torch.inf, -torch.inf])))


KINDS = [case for case in CASES if case in ("tuple", "dict", "named tuple", "list")] + ["nested"]


@pytest.mark.parametrize("case", KINDS)
def test_measure_footprint_of_several_outputs_equals_one_output(case):
    """Each output contains the logits and the features, so that the same layers are trained."""
    one, several = (measure_footprint(Model(returns), (3,)) for returns in (CASES["tensor"][0], CASES[case][0]))
    assert one.learning == several.learning > 0 and one.trained_forward == several.trained_forward == 3 * 4 + 4 * 2
    assert one.layers == several.layers


@pytest.mark.parametrize("kind", ["object", "nothing", "empty dict"])
def test_measure_footprint_without_outputs_raises(kind):
    with raises(InvalidTypeError, "module"):
        measure_footprint(Model(UNSUPPORTED[kind]), (3,))


def test_measure_footprint_ignores_numbers_among_outputs():
    assert measure_footprint(Model(UNSUPPORTED["number"]), (3,)).learning > 0
