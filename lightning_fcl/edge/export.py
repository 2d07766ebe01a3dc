"""Export of models to ONNX and ExecuTorch files, with a comparison to PyTorch before a file is kept."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fcl.edge.exportable import ExecutorchChain, OnnxChain, OnnxReservoir, replace_submodules
from lightning_fcl.edge.outputs import (
    OutputTuple,
    check_output_names,
    get_outputs,
    largest_difference,
    rename_values,
)
from lightning_fcl.errors import InvalidTypeError, InvalidValueError
from lightning_fcl.io.atomic import atomic_path
from lightning_fcl.models.esn import EchoStateNetwork
from lightning_fcl.models.quantization import Int8Backbone, silence_warnings
from lightning_fcl.validation import at_least, require_package

_INPUT = "input"
"""Name of the input in ONNX files."""


def export_onnx(
    module: nn.Module,
    example: Tensor,
    path: str | Path,
    tolerance: float = 1e-4,
    output_names: Sequence[str] | None = None,
) -> float:
    """Write a module to an ONNX file for batches of any size, run the file with ONNX Runtime, and compare the outputs.

    An `Int8Backbone` in the module becomes QuantizeLinear and DequantizeLinear nodes around its convolutions. The file
    contains int8 weights and int32 biases. Runtimes convert these nodes to integer convolutions. The time steps of each
    layer of an `EchoStateNetwork` become a Scan node.

    The file has one output for each tensor that the module returns, in the same order. The input has the name
    ``input``. A single output has the name ``output``. The names of several outputs are dict keys, field names and
    positions, such as ``logits``, ``states_0`` or ``output_1``.

    Args:
        module: A module that maps one tensor to a tensor, or to nested dicts, lists, tuples, named tuples or
            dataclasses of tensors. Values of None are left out. The module is exported in evaluation mode, and not
            changed.
        example: A batch of inputs, shape (batch, ...). Outputs are compared on this batch, and on a batch with one
            input more.
        path: The file. The file is created, or replaced, only after the comparison has succeeded.
        tolerance: The largest allowed absolute difference from PyTorch's outputs. Shapes and dtypes must be equal.
        output_names: Names of the outputs in the file, in their order. Default: the names described above.

    Returns:
        The largest absolute difference from PyTorch's outputs.

    Raises:
        ValueError: If ``example`` is empty, ``output_names`` are not one different name per output, or the outputs
            differ by more than ``tolerance``.
        TypeError: If ``example`` is not a tensor, or the module returns a value that is not a tensor.
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
    with torch.no_grad():
        names = check_output_names(output_names, get_outputs(module(example)), reserved=_INPUT)
    with silence_warnings(), torch.no_grad():
        program: Any = torch.onnx.export(
            OutputTuple(replace_submodules({Int8Backbone: OnnxChain, EchoStateNetwork: OnnxReservoir}, module)),
            # With a batch of one, the batch size would be exported as a constant.
            (torch.cat([example, example]),),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
            input_names=[_INPUT],
            # Temporary names, because an intermediate value can have the name of an output.
            output_names=[f"{_INPUT}.output_{number}" for number in range(len(names))],
            verbose=False,
        )
    proto = program.model_proto
    # Remove stack traces with the names of source files, and shapes that runtimes infer. They can be larger than a
    # small model.
    for message in (proto, proto.graph, *proto.graph.node, *proto.graph.input, *proto.graph.output):
        del message.metadata_props[:]
    del proto.graph.value_info[:]
    # The suffix ends in a character that Python names, and therefore names of intermediate values, do not contain.
    new_names = {name: f"{name}/" for name in names}
    new_names |= {output.name: name for output, name in zip(proto.graph.output, names, strict=True)}
    rename_values(proto.graph, new_names)
    batches = [example, torch.cat([example, example[:1]])]
    return _keep_if_equal(proto.SerializeToString(), Path(path), module, batches, _run_onnx, tolerance)


def export_int8_onnx(
    module: nn.Module,
    calibration: Tensor,
    example: Tensor,
    path: str | Path,
    agreement: float = 0.8,
    output_names: Sequence[str] | None = None,
    scores: str | None = None,
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
        output_names: As in `export_onnx`.
        scores: Name of the output with the class scores, shape (batch, classes). The predictions are the classes with
            the highest scores. Required if the module has several outputs.

    Returns:
        The share of predictions that equal PyTorch's predictions.

    Raises:
        ValueError: If there are no inputs, ``output_names`` or ``scores`` do not match the outputs, or the share is
            below ``agreement``.
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
    _check_example(example)
    path, module = Path(path), copy.deepcopy(module).cpu().eval()
    with torch.no_grad():
        outputs = [*get_outputs(module(example.cpu())).items()]
    names = check_output_names(output_names, dict(outputs), reserved=_INPUT)
    position = _find_scores(scores, names, [output for _, output in outputs])
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, atomic_path(path) as partial:
        plain, folded = Path(folder, "plain.onnx"), Path(folder, "folded.onnx")
        export_onnx(module, example, plain, output_names=names)
        ort = require_package("onnxruntime.quantization", "quantizes ONNX files", extra="device")
        batches = iter([{_INPUT: part.numpy()} for part in torch.split(calibration.detach().cpu(), 16)])
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
        matches = outputs[position][1].argmax(dim=1) == _run_onnx(partial, example)[position].argmax(dim=1)
        if (share := float(matches.double().mean())) < agreement:
            raise InvalidValueError(
                f"Expected a share of at least {agreement} of the predictions to equal PyTorch's predictions, but the "
                f"share is {share:.4g} (number of predictions: {len(example)}). Nothing was written.",
                hint="Pass more inputs in `calibration`, like those of `example`, or use `export_onnx`.",
                argument="agreement",
                value=share,
            )
    return share


def _find_scores(scores: str | None, names: Sequence[str], outputs: Sequence[Tensor]) -> int:
    """Return the position of the output with the class scores."""
    name = names[0] if scores is None and len(names) == 1 else scores
    position = names.index(name) if name in names else None
    if position is None or outputs[position].dim() != 2:
        shapes = ", ".join(f"`{own}` {tuple(output.shape)}" for own, output in zip(names, outputs, strict=True))
        raise InvalidValueError(
            f"Expected `scores` to be the name of an output of shape (batch, classes), but got {scores}. The outputs "
            f"are: {shapes}.",
            hint="Pass the name of the output with the class scores in `scores`, or with `--scores`.",
            argument="scores",
            value=scores,
        )
    return position


def _run_onnx(file: Path, batch: Tensor) -> list[Tensor]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # Without this option, x86 processors without VNNI limit sums of 8-bit products to 16 bits.
    options.add_session_config_entry("session.x64quantprecision", "1")
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return [torch.from_numpy(output) for output in session.run(None, {_INPUT: batch.detach().cpu().numpy()})]


def export_executorch(
    module: nn.Module, example: Tensor, path: str | Path, max_batch: int = 1, tolerance: float = 1e-4
) -> float:
    """Write a module to an ExecuTorch program (`.pte`), run the file, and compare the outputs.

    XNNPACK runs all operations that it supports. For an `Int8Backbone`, XNNPACK computes with integers. The levels of
    the backbone are shifted from 0 .. 255 to -128 .. 127, because XNNPACK requires this range. The file contains int8
    weights. The outputs of the program have the order of the module's outputs, and no names.

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
        TypeError: As in `export_onnx`.
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
    with torch.no_grad():
        get_outputs(module(example))
    with silence_warnings(), torch.no_grad():
        xnnpack, exir = (
            require_package(f"executorch.{package}", "writes ExecuTorch programs", extra="executorch")
            for package in ("backends.xnnpack.partition.xnnpack_partitioner", "exir")
        )
        # With a batch of one, the batch size would be exported as a constant, which is right only for `max_batch=1`.
        traced = example[torch.arange(min(max_batch, 2)) % len(example)]
        shapes = ({0: torch.export.Dim("batch", min=1, max=max_batch)},) if max_batch > 1 else None
        program = torch.export.export(
            OutputTuple(replace_submodules({Int8Backbone: ExecutorchChain}, module)), (traced,), dynamic_shapes=shapes
        )
        lowered = exir.to_edge_transform_and_lower(program, partitioner=[xnnpack.XnnpackPartitioner()])
        content: bytes = lowered.to_executorch().buffer

    def run(file: Path, batch: Tensor) -> Sequence[Tensor]:
        from executorch.runtime import Runtime

        outputs: Sequence[Tensor] = Runtime.get().load_program(file).load_method("forward").execute([batch])
        return outputs

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

    def forward(self, x: Tensor) -> object:
        """Return the outputs of the module."""
        return self.module(x)


def _check_example(example: Tensor, name: str = "example") -> None:
    if not isinstance(example, Tensor):
        raise InvalidTypeError(
            f"Expected `{name}` to be a tensor, because exported modules have one input, but got a "
            f"`{type(example).__name__}`.",
            hint="Wrap the module in a module that takes one tensor and splits it.",
            argument=name,
            value=type(example).__name__,
        )
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
    run: Callable[[Path, Tensor], Sequence[Tensor]],
    tolerance: float,
) -> float:
    """Write the file if its outputs equal the module's outputs within a tolerance. Return the largest difference.

    Raises:
        InvalidValueError: If a difference is above the tolerance.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as partial:
        partial.write_bytes(content)
        differences: dict[str, float] = {}
        for batch in batches:
            with torch.no_grad():
                outputs = get_outputs(module(batch))
            for (name, expected), computed in zip(outputs.items(), run(partial, batch), strict=True):
                # `max` would ignore NaN.
                differences[name] = (
                    torch.tensor(
                        [differences.get(name, 0.0), largest_difference(expected, computed)], dtype=torch.float64
                    )
                    .max()
                    .item()
                )
        # `max() > tolerance` would be false for NaN.
        if not all(difference <= tolerance for difference in differences.values()):
            values = ", ".join(f"{difference:.3g} for `{name}`" for name, difference in differences.items())
            raise InvalidValueError(
                f"Expected the exported file to agree with PyTorch within {tolerance}, but the largest differences are "
                f"{values}. Nothing was written.",
                hint="Raise `tolerance` if you accept such differences.",
                argument="tolerance",
                value=differences,
            )
    return max(differences.values())
