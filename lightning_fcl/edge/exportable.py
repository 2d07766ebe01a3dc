"""Exportable forms of modules: chains of int8 convolutions, and reservoirs with one operation for all time steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

from lightning_fcl.models.esn import EchoStateNetwork
from lightning_fcl.models.quantization import Int8Backbone


def replace_submodules(kinds: Mapping[type[nn.Module], Callable[[Any], nn.Module]], module: nn.Module) -> nn.Module:
    """Return a copy of a module in which each submodule of a class in ``kinds`` is replaced by its exportable form."""
    whole = nn.Sequential(copy.deepcopy(module))
    for name, submodule in list(whole.named_modules()):
        if type(submodule) in kinds:
            whole.set_submodule(name, kinds[type(submodule)](submodule))
    return whole


class OnnxChain(nn.Module):
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


class OnnxReservoir(nn.Module):
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


class ExecutorchChain(nn.Module):
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
