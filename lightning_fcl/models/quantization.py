"""Networks with a frozen backbone. Batch normalization is folded, and the backbone's weights are float or int8."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import warnings
from collections.abc import Iterator
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from lightning_fcl.errors import InvalidValueError, MissingValueError
from lightning_fcl.models.serialization import Serializable
from lightning_fcl.validation import require_package

Precision = Literal["int8", "float"]


def with_frozen_backbone(network: Serializable, backbone: Precision = "int8") -> Serializable:
    """Fold batch normalization and freeze the backbone of a network, in place, and return the network.

    The values of an int8 backbone are placeholders until you load a state dict.

    Args:
        network: A network with the submodules ``backbone`` and ``head``.
        backbone: Precision of the backbone, ``"int8"`` or ``"float"``.

    Example:
        >>> from lightning_fcl.models import DSICNet
        >>> network = with_frozen_backbone(DSICNet())
        >>> type(network.backbone).__name__, network.init_config["init_args"]["backbone"]
        ('Int8Backbone', 'int8')
    """
    freeze_backbone_(network, backbone)
    return network


def freeze_backbone_(network: nn.Module, backbone: Precision, images: Tensor | None = None) -> None:
    """Fold a network's batch normalization, and freeze its backbone, in place.

    Args:
        network: A network with the submodules ``backbone`` and ``head``.
        backbone: Precision of the backbone.
        images: Images for the calibration of an int8 backbone. If None, only the structure is built, and the values are
            placeholders.
    """
    network.eval()
    fold_batchnorm(network)
    if backbone == "int8":
        quantize_backbone(network, images)
    network.get_submodule("backbone").requires_grad_(False)
    network.frozen = True  # type: ignore[assignment]
    if isinstance(network, Serializable):
        arguments = {"network": network.init_config, "backbone": backbone}
        network.init_config = {"class_path": f"{__package__}.{with_frozen_backbone.__name__}", "init_args": arguments}
    network.train()


def fold_batchnorm(module: nn.Module) -> None:
    """Fold every `BatchNorm2d` that follows a `Conv2d` in an `nn.Sequential` into the convolution, in place.

    In evaluation mode, the outputs of the model stay equal up to rounding. An `nn.Identity` replaces the normalization,
    so that the other layers keep their names. The new convolution has a bias, and is trainable if the old convolution
    was trainable.
    """
    for sequence in module.modules():
        if not isinstance(sequence, nn.Sequential):
            continue
        layers = list(sequence.named_children())
        for (first, convolution), (second, norm) in itertools.pairwise(layers):
            if isinstance(convolution, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                training = convolution.training
                fused = fuse_conv_bn_eval(convolution.eval(), norm.eval()).train(training)
                # If the convolution had no bias, `fuse_conv_bn_eval` returns a bias without gradients.
                cast(Tensor, fused.bias).requires_grad_(convolution.weight.requires_grad)
                setattr(sequence, first, fused)
                setattr(sequence, second, nn.Identity())


class Int8Convolution(nn.Module):
    """A convolution whose inputs, weights and outputs are 8-bit levels. All of its state is in buffers.

    A real number is ``scale * (level - zero_point)``. Weights have symmetric levels in [-127, 127] and one scale per
    output channel. The bias is in units of ``input scale * weight scale``, as on integer hardware. If a ReLU follows
    the convolution, the ReLU is included: the zero point of the output is 0, so no output is negative.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor
    scale: Tensor
    zero_point: Tensor

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.stride = convolution.stride
        self.padding = convolution.padding
        self.dilation = convolution.dilation
        self.groups = convolution.groups
        self.register_buffer("weight", torch.zeros(convolution.weight.shape, dtype=torch.int8))
        self.register_buffer("weight_scale", torch.ones(convolution.out_channels))
        self.register_buffer("bias", torch.zeros(convolution.out_channels, dtype=torch.int32))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("zero_point", torch.zeros((), dtype=torch.int32))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        """Return output levels minus their zero point, shape (batch, out_channels, height, width).

        Args:
            x: Input levels minus their zero point.
            scale: Scale of the input levels.
        """
        # Levels are whole numbers in floating point. Sums below 2^24 are exact in any order of summation. Therefore,
        # the result for a sample does not depend on its batch, on vmap or on the device.
        weight, bias = self.weight.float(), self.bias.float()
        x = F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        factor = scale.float() * self.weight_scale.float() / self.scale.float()
        return _clamp(x.mul_(factor[:, None, None]).round_(), self.zero_point)


class Int8Backbone(nn.Module):
    """A frozen chain of int8 convolutions. Input and output are floating-point tensors.

    Each entry of the output has one of 256 values.

    No parameter is trainable, and training mode has no effect. To copy a quantized model, prepare the new model with
    ``quantize_backbone(model, None)`` and load the `state_dict`. The outputs are then bitwise identical.
    """

    input_scale: Tensor
    input_zero_point: Tensor

    def __init__(self, convolutions: dict[str, nn.Conv2d]) -> None:
        super().__init__()
        self.register_buffer("input_scale", torch.ones(()))
        self.register_buffer("input_zero_point", torch.zeros((), dtype=torch.int32))
        for name, convolution in convolutions.items():
            self.add_module(name, Int8Convolution(convolution))

    @property
    def layers(self) -> list[Int8Convolution]:
        """Convolutions in order."""
        return cast(list[Int8Convolution], list(self.children()))

    def forward(self, x: Tensor) -> Tensor:
        """Return maps (batch, channels, height, width) in the dtype of the images.

        Values are multiples of the scale of the last layer.
        """
        # Compute in float32 for every dtype of images: autocast would round the sums to 8 or 11 bits.
        with torch.autocast(x.device.type, enabled=False):
            scale = self.input_scale
            levels = _clamp((x.float() / scale.float()).round_(), self.input_zero_point)
            for layer in self.layers:
                levels = layer(levels, scale)
                scale = layer.scale
        return (levels * scale.float()).to(x.dtype)


def quantize_backbone(model: nn.Module, calibration: Tensor | None, batch_size: int = 64) -> None:
    """Replace ``model.backbone``, a chain of convolutions, by an `Int8Backbone`, in place.

    This is static post-training quantization. Batch normalization is folded. Weights have one symmetric scale per
    output channel. Activations are unsigned and have one scale per tensor. The ranges of activations come from
    torchao's PT2E observers on the calibration images. The output maps are quantized, too. Create the optimizer after
    this call.

    Args:
        model: Model whose ``backbone`` is replaced.
        calibration: About 100 images that are similar to the training images. If None, only the structure is built, and
            torchao is not needed. Load a state dict afterwards.
        batch_size: Number of images per calibration step.

    Raises:
        ValueError: If the backbone has unsupported layers, or if the images have a wrong shape or non-finite values.
    """
    backbone = copy.deepcopy(model.get_submodule("backbone")).cpu().float().eval()
    fold_batchnorm(backbone)
    convolutions = _chain(backbone)
    quantized = Int8Backbone({name.replace(".", "_"): layer for name, layer in convolutions.items()})
    first = next(iter(convolutions.values()))
    if calibration is not None:
        takes = tuple(getattr(model, "input_shape", (first.in_channels, *calibration.shape[2:])))
        if tuple(calibration.shape[1:]) != takes or not len(calibration) or not calibration.isfinite().all():
            raise InvalidValueError(
                f"Expected `calibration` of shape (batch, {', '.join(map(str, takes))}) with at least one image and "
                f"finite values, but got {tuple(calibration.shape)}"
                f"{'' if calibration.isfinite().all() else ' with NaN or infinite values'}.",
                hint="Pass a batch of the images that the model is trained on.",
                argument="calibration",
            )
        _fill(quantized, list(convolutions.values()), calibrated_graph(backbone, calibration, batch_size))
    model.backbone = quantized


def _chain(backbone: nn.Module) -> dict[str, nn.Conv2d]:
    """Return the convolutions of a backbone by name. The backbone must be a chain of convolutions and ReLU layers."""
    convolutions: dict[str, nn.Conv2d] = {}
    for name, layer in backbone.named_modules():
        if isinstance(layer, nn.Conv2d) and layer.padding_mode == "zeros":
            convolutions[name] = layer
        elif not (isinstance(layer, nn.Sequential | nn.Identity) or (isinstance(layer, nn.ReLU) and convolutions)):
            raise InvalidValueError(
                "Expected `model.backbone` to be an nn.Sequential of Conv2d with zero padding, and of "
                f"BatchNorm2d and ReLU after Conv2d, but got {type(layer).__name__} at `{name or 'model.backbone'}`.",
                hint="Move unsupported layers to `model.head`, which stays in floating point.",
                argument="model.backbone",
            )
    if not convolutions:
        raise MissingValueError(
            "Expected `model.backbone` to contain convolutions, but got none.",
            hint="Move the model's convolutions to `model.backbone`.",
            argument="model.backbone",
        )
    return convolutions


def _fill(quantized: Int8Backbone, convolutions: list[nn.Conv2d], graph: fx.GraphModule) -> None:
    """Copy calibrated weights, scales and zero points from a graph to a backbone with the same order of layers."""
    activations, weights = [], []
    for node in graph.graph.nodes:
        if node.target is torch.ops.quantized_decomposed.quantize_per_tensor.default:
            activations.append(node.args[1:3])
        elif node.target is torch.ops.quantized_decomposed.dequantize_per_channel.default:
            weights.append([graph.get_buffer(part.target) for part in node.args[:2]])
    scale, zero_point = activations[0]
    quantized.input_scale.fill_(scale)
    quantized.input_zero_point.fill_(zero_point)
    for layer, convolution, (levels, scales), (out_scale, out_zero_point) in zip(
        quantized.layers, convolutions, weights, activations[1:], strict=True
    ):
        layer.weight.copy_(levels)
        layer.weight_scale.copy_(scales)
        if convolution.bias is not None:
            units = (convolution.bias.detach().double() / (scales.double() * scale)).round()
            layer.bias.copy_(units.clamp(-(2**31), 2**31 - 1))
        layer.scale.fill_(out_scale)
        layer.zero_point.fill_(out_zero_point)
        scale = out_scale


def calibrated_graph(backbone: nn.Module, images: Tensor, batch_size: int) -> fx.GraphModule:
    """Calibrate a backbone with images, and return its PT2E graph. The graph dequantizes before every convolution.

    The scales of the graph are constants.
    """
    with silence_warnings():
        pt2e = require_package("torchao.quantization.pt2e.quantize_pt2e", "calibrates int8 models", extra="device")
        images = images.detach().cpu().float()
        example = images[:1].expand(2, -1, -1, -1)
        batch = {0: torch.export.Dim("batch", min=1)}
        exported = torch.export.export(backbone, (example,), dynamic_shapes=(batch,)).module()
        prepared = pt2e.prepare_pt2e(exported, _ChainQuantizer())
        with torch.no_grad():
            for image_batch in torch.split(images, batch_size):
                prepared(image_batch)
        converted: fx.GraphModule = pt2e.convert_pt2e(prepared)
    return converted


class _ChainQuantizer:
    """A PT2E quantizer that quantizes the input and weight of each convolution, and the output of the chain."""

    def transform_for_annotation(self, model: fx.GraphModule) -> fx.GraphModule:
        """Return the graph unchanged."""
        return model

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        """Mark the tensors of a graph that PT2E quantizes, and return the graph."""
        from torchao.quantization.pt2e import HistogramObserver, PerChannelMinMaxObserver
        from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec

        activation = QuantizationSpec(torch.uint8, HistogramObserver, 0, 255, torch.per_tensor_affine)
        # With the default `eps`, a channel of zeros would get a very small scale, and its bias would exceed 32 bits.
        observer = PerChannelMinMaxObserver.with_args(eps=1e-5)
        weight = QuantizationSpec(torch.int8, observer, -127, 127, torch.per_channel_symmetric, ch_axis=0)
        for node in model.graph.nodes:
            if node.target is not torch.ops.aten.conv2d.default:
                continue
            follower = next(iter(node.users))
            relu = follower.target in (torch.ops.aten.relu.default, torch.ops.aten.relu_.default)
            inputs = {node.args[0]: activation, node.args[1]: weight}
            node.meta["quantization_annotation"] = QuantizationAnnotation(
                input_qspec_map=inputs, output_qspec=None if relu else activation, _annotated=True
            )
            if relu:
                follower.meta["quantization_annotation"] = QuantizationAnnotation(
                    output_qspec=activation, _annotated=True
                )
        return model

    def validate(self, model: fx.GraphModule) -> None:
        pass

    def prepare_obs_or_fq_callback(self, model: fx.GraphModule, observers: dict[Any, Any]) -> None:
        pass


@contextlib.contextmanager
def silence_warnings() -> Iterator[None]:
    """Temporarily silence all warnings, and log messages up to the level WARNING.

    torch.export and torchao emit deprecation warnings that users cannot fix.
    """
    previous_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous_level)


def _clamp(x: Tensor, zero_point: Tensor) -> Tensor:
    """Return levels minus their zero point, clamped to the range of 8 bits. The input is overwritten."""
    # Tensors as bounds of `clamp` would be slower. vmap does not support the in-place `clamp_`.
    return x.add_(zero_point).clamp(0, 255).sub_(zero_point)
