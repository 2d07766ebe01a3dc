"""Export of models to ONNX and ExecuTorch files, with a comparison to PyTorch before a file is kept."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.io.atomic import atomic_path
from lightning_fcl.models.esn import EchoStateNetwork
from lightning_fcl.models.quantization import Int8Backbone, silence_warnings
from lightning_fcl.validation import at_least, require_package


def export_onnx(module: nn.Module, example: Tensor, path: str | Path, tolerance: float = 1e-4) -> float:
    """Write a module to an ONNX file for batches of any size, run the file with ONNX Runtime, and compare the outputs.

    An `Int8Backbone` in the module becomes QuantizeLinear and DequantizeLinear nodes around its convolutions. The file
    contains int8 weights and int32 biases. Runtimes convert these nodes to integer convolutions. The time steps of each
    layer of an `EchoStateNetwork` become a Scan node.

    Args:
        module: A module that maps one tensor to one tensor. The module is exported in evaluation mode, and not changed.
        example: A batch of inputs, shape (batch, ...). Outputs are compared on this batch, and on a batch with one
            input more.
        path: The file. The file is created, or replaced, only after the comparison has succeeded.
        tolerance: The largest allowed absolute difference from PyTorch's outputs.

    Returns:
        The largest absolute difference from PyTorch's outputs.

    Raises:
        ValueError: If ``example`` is empty, or the outputs differ by more than ``tolerance``.
        ModuleNotFoundError: If onnx, onnxscript or onnxruntime is not installed.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export_onnx(nn.Linear(3, 2), torch.randn(4, 3), folder + "/linear.onnx") < 1e-5
        True
    """
    _check_example(example)
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require_package(package, "writes and runs ONNX files", extra="device")
    module = copy.deepcopy(module).cpu().eval()
    example = example.detach().cpu()
    with silence_warnings(), torch.no_grad():
        program: Any = torch.onnx.export(
            _with({Int8Backbone: _OnnxChain, EchoStateNetwork: _OnnxReservoir}, module),
            # With a batch of one, the batch size would be exported as a constant.
            (torch.cat([example, example]),),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
            input_names=["input"],
            output_names=["output"],
            verbose=False,
        )
    proto = program.model_proto
    # Remove stack traces with the names of source files, and shapes that runtimes infer. They can be larger than a
    # small model.
    for message in (proto, proto.graph, *proto.graph.node, *proto.graph.input, *proto.graph.output):
        del message.metadata_props[:]
    del proto.graph.value_info[:]
    batches = [example, torch.cat([example, example[:1]])]
    return _keep_if_equal(proto.SerializeToString(), Path(path), module, batches, _run_onnx, tolerance)


def export_int8_onnx(
    module: nn.Module, calibration: Tensor, example: Tensor, path: str | Path, agreement: float = 0.8
) -> float:
    """Write a floating-point module to an ONNX file with int8 convolutions, run the file, and compare predictions.

    Uses ONNX Runtime's static quantization of convolutions, ReLU and ReLU6. Weights are int8 with one scale
    per channel. Activations are uint8 with the ranges of the calibration. All other operations stay in floating point.
    PyTorch does not implement this arithmetic, so the outputs differ from PyTorch. To keep PyTorch's outputs within
    a tolerance, use `quantize_backbone` and `export_onnx`, which support chains of convolutions.

    Args:
        module: A classifier. The classifier is exported in evaluation mode, and is not changed.
        calibration: About 100 inputs that the module was trained on.
        example: Inputs on which the predicted classes are compared, shape (batch, ...).
        path: The file. The file is created, or replaced, only after the comparison has succeeded.
        agreement: The smallest allowed share of predictions that equal PyTorch's predictions.

    Returns:
        The share of predictions that equal PyTorch's predictions.

    Raises:
        ValueError: If there are no inputs, or the share is below ``agreement``.
        ModuleNotFoundError: If onnx, onnxscript or onnxruntime is not installed.

    Example:
        >>> import tempfile
        >>> net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU6(), nn.Flatten(), nn.Linear(144, 2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     share = export_int8_onnx(net, torch.rand(20, 3, 8, 8), torch.rand(9, 3, 8, 8), folder + "/net.onnx", 0)
        >>> 0 <= share <= 1
        True
    """
    _check_example(calibration, "calibration")
    path, module = Path(path), copy.deepcopy(module).cpu().eval()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, atomic_path(path) as partial:
        plain, folded = Path(folder, "plain.onnx"), Path(folder, "folded.onnx")
        export_onnx(module, example, plain)
        ort = require_package("onnxruntime.quantization", "quantizes ONNX files", extra="device")
        batches = iter([{"input": part.numpy()} for part in torch.split(calibration.detach().cpu(), 16)])
        with silence_warnings():
            ort.shape_inference.quant_pre_process(plain, folded, skip_symbolic_shape=True)
            ort.quantize_static(
                folded,
                partial,
                SimpleNamespace(get_next=lambda: next(batches, None)),
                per_channel=True,
                activation_type=ort.QuantType.QUInt8,
                # With Clip and Relu in the list, activations are quantized after clipping. Before clipping, most of the
                # 256 levels would represent values that clipping removes.
                op_types_to_quantize=["Conv", "Clip", "Relu"],
            )
        with torch.no_grad():
            matches = module(example.cpu()).argmax(dim=1) == _run_onnx(partial, example).argmax(dim=1)
        if (share := float(matches.double().mean())) < agreement:
            raise InvalidValueError(
                f"Expected a share of at least {agreement} of the predictions to equal PyTorch's predictions, but the "
                f"share is {share:.4g} (number of predictions: {len(example)}). Nothing was written.",
                hint="Pass more inputs in `calibration`, like those of `example`, or use `export_onnx`.",
                argument="agreement",
                value=share,
            )
    return share


def _run_onnx(file: Path, batch: Tensor) -> Tensor:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # Without this option, x86 processors without VNNI limit sums of 8-bit products to 16 bits.
    options.add_session_config_entry("session.x64quantprecision", "1")
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"input": batch.detach().cpu().numpy()})[0])


def export_executorch(
    module: nn.Module, example: Tensor, path: str | Path, max_batch: int = 1, tolerance: float = 1e-4
) -> float:
    """Write a module to an ExecuTorch program (`.pte`), run the file, and compare the outputs.

    XNNPACK runs all operations that it supports. For an `Int8Backbone`, XNNPACK computes with integers. The levels of
    the backbone are shifted from 0 .. 255 to -128 .. 127, because XNNPACK requires this range. The file contains int8
    weights.

    Args:
        module: As in `export_onnx`.
        example: As in `export_onnx`. Outputs are compared on batches of 1 and of ``max_batch`` inputs.
        path: As in `export_onnx`.
        max_batch: Largest batch for which the memory of the program is planned.
        tolerance: As in `export_onnx`.

    Returns:
        The largest absolute difference from PyTorch's outputs.

    Raises:
        ValueError: If ``example`` is empty, ``max_batch`` is below 1, or the outputs differ by more than ``tolerance``.
        ModuleNotFoundError: If executorch is not installed.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +SKIP
        ...     export_executorch(nn.Linear(3, 2), torch.randn(4, 3), folder + "/linear.pte") < 1e-5
        True
    """
    _check_example(example)
    at_least(1, max_batch=max_batch)
    module = copy.deepcopy(module).cpu().eval()
    example = example.detach().cpu()
    with silence_warnings(), torch.no_grad():
        xnnpack, exir = (
            require_package(f"executorch.{package}", "writes ExecuTorch programs", extra="executorch")
            for package in ("backends.xnnpack.partition.xnnpack_partitioner", "exir")
        )
        # With a batch of one, the batch size would be exported as a constant, which is right only for `max_batch=1`.
        traced = example[torch.arange(min(max_batch, 2)) % len(example)]
        shapes = ({0: torch.export.Dim("batch", min=1, max=max_batch)},) if max_batch > 1 else None
        program = torch.export.export(_with({Int8Backbone: _ExecutorchChain}, module), (traced,), dynamic_shapes=shapes)
        lowered = exir.to_edge_transform_and_lower(program, partitioner=[xnnpack.XnnpackPartitioner()])
        content: bytes = lowered.to_executorch().buffer

    def run(file: Path, batch: Tensor) -> Tensor:
        from executorch.runtime import Runtime

        output: Tensor = Runtime.get().load_program(file).load_method("forward").execute([batch])[0]
        return output

    batches = [example[torch.arange(size) % len(example)] for size in {1, max_batch}]
    return _keep_if_equal(content, Path(path), module, batches, run, tolerance)


class WithoutTrainer(nn.Module):
    """Wrapper that calls a LightningModule's `forward` without its Trainer. A Trainer cannot be exported.

    Example:
        >>> WithoutTrainer(nn.Linear(3, 2))(torch.zeros(4, 3)).shape
        torch.Size([4, 2])
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the module."""
        outputs: Tensor = self.module(x)
        return outputs


def _check_example(example: Tensor, name: str = "example") -> None:
    if example.dim() < 2 or len(example) == 0:
        raise InvalidValueError(
            f"Expected `{name}` to be a batch of at least one input, but got the shape {tuple(example.shape)}.",
            hint="Pass inputs of shape (n, ...) with n of at least 1.",
            argument=name,
        )


def _keep_if_equal(
    content: bytes,
    path: Path,
    module: nn.Module,
    batches: list[Tensor],
    run: Callable[[Path, Tensor], Tensor],
    tolerance: float,
) -> float:
    """Write the file if its outputs equal the module's outputs within a tolerance. Return the largest difference.

    Raises:
        InvalidValueError: If a difference is above the tolerance.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as partial:
        partial.write_bytes(content)
        with torch.no_grad():
            differences = [float((module(batch) - run(partial, batch)).abs().max()) for batch in batches]
        # `max() > tolerance` would be false for NaN.
        if not all(difference <= tolerance for difference in differences):
            raise InvalidValueError(
                f"Expected the exported file to agree with PyTorch within {tolerance}, but got differences of "
                f"{differences}. Nothing was written.",
                hint="Raise `tolerance` if you accept such differences.",
                argument="tolerance",
                value=differences,
            )
    return max(differences)


def _with(kinds: Mapping[type[nn.Module], Callable[[Any], nn.Module]], module: nn.Module) -> nn.Module:
    """Return a copy of a module in which each submodule of a class in ``kinds`` is replaced by its exportable form."""
    whole = nn.Sequential(copy.deepcopy(module))
    for name, submodule in list(whole.named_modules()):
        if type(submodule) in kinds:
            whole.set_submodule(name, kinds[type(submodule)](submodule))
    return whole


class _OnnxChain(nn.Module):
    """An `Int8Backbone` as a chain of the ONNX operations QuantizeLinear, DequantizeLinear and Conv."""

    def __init__(self, backbone: Int8Backbone) -> None:
        super().__init__()
        self.backbone = backbone
        self.register_buffer("zero_point", backbone.input_zero_point.to(torch.uint8))
        scale = backbone.input_scale
        for layer in backbone.layers:
            # These buffers are computed here instead of in `forward`, so that they are constants in the file.
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


class _OnnxReservoir(nn.Module):
    """An `EchoStateNetwork` with one Scan operation for all time steps of a layer, instead of operations per step."""

    def __init__(self, reservoir: EchoStateNetwork) -> None:
        super().__init__()
        self.reservoir = reservoir.fold_plasticity()

    def forward(self, x: Tensor) -> Tensor:
        (states,) = self.iter_states(x)
        return states.transpose(0, 1)

    def iter_states(self, x: Tensor) -> Iterator[Tensor]:
        """Yield all states after the washout as one block."""
        reservoir = self.reservoir
        drive, outputs = reservoir.check_input(x).transpose(0, 1), []
        for layer, bias in enumerate(reservoir.recurrent_bias.view(reservoir.num_layers, -1)):
            inputs, recurrent = reservoir.weights(layer)

            def step(state: Tensor, step_input: Tensor, recurrent: Tensor = recurrent) -> tuple[Tensor, Tensor]:
                state = torch.lerp(state, torch.tanh(step_input + state @ recurrent.t()), reservoir.leaking_rate)
                return state, state.clone()

            start = drive.new_zeros(drive.shape[1], reservoir.units)
            _, drive = scan(step, start, drive @ inputs.t() + bias)
            outputs.append(drive)
        yield torch.cat(outputs, dim=-1)[reservoir.washout :]


class _ExecutorchChain(nn.Module):
    """An `Int8Backbone` as a chain of quantization operations and convolutions that ExecuTorch's backends support."""

    def __init__(self, backbone: Int8Backbone) -> None:
        super().__init__()
        self.backbone = backbone
        points = [(backbone.input_scale, backbone.input_zero_point)]
        points += [(layer.scale, layer.zero_point) for layer in backbone.layers]
        self.points = [(float(scale), int(zero_point) - 128) for scale, zero_point in points]
        for layer, (scale, _) in zip(backbone.layers, self.points, strict=False):
            # Backends round the bias to the original integers again.
            layer.register_buffer("real_bias", (layer.bias.double() * scale * layer.weight_scale).float())
            layer.register_buffer("zeros", torch.zeros(len(layer.bias), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        x = _shifted(x, *self.points[0])
        for layer, point in zip(self.backbone.layers, self.points[1:], strict=True):
            weight = torch.ops.quantized_decomposed.dequantize_per_channel(
                layer.weight, layer.weight_scale, layer.get_buffer("zeros"), 0, -127, 127, torch.int8
            )
            bias = layer.get_buffer("real_bias")
            x = F.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)
            x = _shifted(x, *point)
        return x


def _shifted(x: Tensor, scale: float, zero_point: int) -> Tensor:
    levels = torch.ops.quantized_decomposed.quantize_per_tensor(x, scale, zero_point, -128, 127, torch.int8)
    x = torch.ops.quantized_decomposed.dequantize_per_tensor(levels, scale, zero_point, -128, 127, torch.int8)
    return x
