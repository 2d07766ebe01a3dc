"""Models as files for devices, compared with PyTorch before they take their name."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fcl.quantization import Int8Backbone, quietly


def export_onnx(module: nn.Module, example: Tensor, path: str | Path, tolerance: float = 1e-4) -> float:
    """Write a module as an ONNX file for batches of any size, run the file with ONNX Runtime, and compare.

    An `Int8Backbone` in it becomes QuantizeLinear and DequantizeLinear nodes around its convolutions, with weights of
    int8 and biases of int32 in the file; runtimes make integer convolutions of them.

    Args:
        module: A module from one tensor to one tensor; it is exported in evaluation mode and stays as it is.
        example: A batch of inputs, shape (batch, ...), on which the outputs are compared, at its own size and another.
        path: The file; it appears when it is whole and compared, and replaces an older one only then.
        tolerance: The largest difference from PyTorch's outputs that is allowed.

    Returns:
        The largest difference from PyTorch's outputs.

    Raises:
        ValueError: If ``example`` is empty, or the outputs differ by more than ``tolerance``.
        ModuleNotFoundError: If onnx, onnxscript or onnxruntime is not installed.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export_onnx(nn.Linear(3, 2), torch.randn(4, 3), folder + "/linear.onnx") < 1e-5
        True
    """
    if example.dim() < 2 or len(example) == 0:
        raise ValueError(
            f"Expected `example` to be a batch of at least one input but got the shape {tuple(example.shape)}. "
            "Pass some of the inputs that the module will see."
        )
    _require_onnx()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    module = copy.deepcopy(module).cpu().eval()
    example = example.detach().cpu()
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(_onnx_bytes(module, example))
        differences = [_difference(module, partial, batch) for batch in (example, torch.cat([example, example[:1]]))]
        # Not `max() > tolerance`: that is false for NaN.
        if not all(difference <= tolerance for difference in differences):
            raise ValueError(
                f"Expected ONNX Runtime to agree with PyTorch within {tolerance} but got differences of {differences} "
                "for two sizes of batch. Nothing was written; raise `tolerance` if they are acceptable."
            )
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return max(differences)


def _require_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"Expected `{error.name}`, which writes and runs ONNX files, but it is not installed. "
            'Run `pip install "lightning-fcl[device]"`.'
        ) from error


def _onnx_bytes(module: nn.Module, example: Tensor) -> bytes:
    """The ONNX file of a module in evaluation mode."""
    # A batch of one would be taken for a constant.
    example = torch.cat([example, example])
    with quietly(), torch.no_grad():
        program: Any = torch.onnx.export(
            _with_nodes(module),
            (example,),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
            input_names=["input"],
            output_names=["output"],
            verbose=False,
        )
    proto = program.model_proto
    # Stack traces with the names of source files, and shapes that runtimes infer: larger than a small model.
    for part in (proto, proto.graph, *proto.graph.node, *proto.graph.input, *proto.graph.output):
        del part.metadata_props[:]
    del proto.graph.value_info[:]
    whole: bytes = proto.SerializeToString()
    return whole


def _difference(module: nn.Module, path: Path, batch: Tensor) -> float:
    """The largest difference of a file's outputs from those of its module."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # Without it, x86 processors that lack VNNI cut sums of products of 8 bits at 16 bits.
    options.add_session_config_entry("session.x64quantprecision", "1")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {"input": batch.numpy()})
    with torch.no_grad():
        return float((module(batch) - torch.from_numpy(output)).abs().max())


def _with_nodes(module: nn.Module) -> nn.Module:
    """A copy of a module whose int8 parts are written as ONNX nodes."""
    whole = nn.Sequential(copy.deepcopy(module))
    for name, part in list(whole.named_modules()):
        if isinstance(part, Int8Backbone):
            whole.set_submodule(name, _Nodes(part))
    return whole


class _Nodes(nn.Module):
    """An `Int8Backbone` as a chain of ONNX's QuantizeLinear, DequantizeLinear and Conv."""

    def __init__(self, backbone: Int8Backbone) -> None:
        super().__init__()
        self.backbone = backbone
        self.register_buffer("zero_point", backbone.input_zero_point.to(torch.uint8))
        scale = backbone.input_scale
        for layer in backbone.layers:
            # Here and not in `forward`, so that they are constants in the file.
            layer.register_buffer("bias_scale", scale * layer.weight_scale)
            layer.register_buffer("zero_level", layer.zero_point.to(torch.uint8))
            scale = layer.scale

    def forward(self, x: Tensor) -> Tensor:
        x = _rounded(x, self.backbone.input_scale, self.get_buffer("zero_point"))
        for layer in self.backbone.layers:
            weight = _dequantized(layer.weight, layer.weight_scale, axis=0)
            bias = _dequantized(layer.bias, layer.get_buffer("bias_scale"), axis=0)
            x = F.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)
            x = _rounded(x, layer.scale, layer.get_buffer("zero_level"))
        return x


def _rounded(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    levels = torch.onnx.ops.symbolic("QuantizeLinear", (x, scale, zero_point), dtype=torch.uint8, shape=x.shape)
    return _dequantized(levels, scale, zero_point)


def _dequantized(levels: Tensor, scale: Tensor, zero_point: Tensor | None = None, axis: int = 1) -> Tensor:
    inputs = (levels, scale) if zero_point is None else (levels, scale, zero_point)
    return torch.onnx.ops.symbolic("DequantizeLinear", inputs, {"axis": axis}, dtype=torch.float32, shape=levels.shape)
