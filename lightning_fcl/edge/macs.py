"""Sizes and multiply-accumulate operations (MACs) of the layers of a module on one sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from lightning_fcl.edge.outputs import iter_leaves


@dataclass(frozen=True)
class Layer:
    """A layer of a module, and the sizes of its tensors for one sample.

    Args:
        name: Name of the layer.
        is_trained: Whether the layer belongs to the trained part M_T, or comes after a layer of M_T. If True, the layer
            computes in fp32, otherwise in int8.
        inputs: Number of elements of the layer's input.
        outputs: Number of elements of the layer's output.
        weights: Bytes of the layer's weights in the forward pass.
        trained: Bytes of the gradient of the weights, or of a reservoir's statistics. 0 if the layer is frozen.
        needs_input_gradient: Whether the backward pass also computes the gradient of the input.
    """

    name: str
    is_trained: bool
    inputs: int
    outputs: int
    weights: int
    trained: int = 0
    needs_input_gradient: bool = False

    @property
    def activations(self) -> int:
        """Size of the layer's input and output in bytes."""
        return (self.inputs + self.outputs) * (4 if self.is_trained else 1)

    @property
    def working(self) -> int:
        """Largest number of bytes that one pass through the layer needs.

        The forward pass needs the weights, the input and the output. The pass for the gradient of the weights needs
        this gradient, the input, and the gradient of the output. The pass for the gradient of the input needs the
        weights, the gradient of the output, and the gradient of the input.
        """
        return self.activations + max(self.weights, self.trained)

    @property
    def all_buffers(self) -> int:
        """Bytes if the buffers of all passes are allocated at the same time: `working` and all gradients."""
        gradients = 4 * (self.outputs + (self.inputs if self.needs_input_gradient else 0)) if self.is_trained else 0
        return self.working + self.trained + gradients


class LayerRecorder:
    """Recorder of a module's layers on one sample. A layer is a module without submodules.

    `run` sets these attributes:

    - ``layers``: The layers in the order of the forward pass.
    - ``folded``: The convolution or linear layer before each batch normalization, by name.
    - ``in_place``: Layers without ``kernel_size`` whose input and output have equal sizes, such as elementwise layers.
    - ``uncounted``: The layers with weight matrices whose MACs are not known.
    - ``returned``: The output of the module.
    - ``frozen`` and ``learnt``: The MACs of the forward pass of the frozen part M_F and of the trained part M_T.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.counter = flop_counter()
        self.layers: list[Layer] = []
        self.folded: dict[str, str] = {}
        self.in_place: set[str] = set()
        self.uncounted: set[str] = set()
        self.frozen = self.learnt = 0
        self.returned: object = None
        self._before = 0
        # Each output tensor, with the name and the module of the layer that returned the tensor.
        self._makers: list[tuple[Tensor, str, nn.Module]] = []

    def run(self, sample: Tensor) -> int:
        """Run the forward pass, and the backward pass if an output requires a gradient. Return the backward MACs."""
        leaves = {name: part for name, part in self.module.named_modules() if not list(part.children())}
        handles = []
        for name, leaf in leaves.items():
            handles.append(leaf.register_forward_pre_hook(self._start))
            handles.append(leaf.register_forward_hook(self._hook(name), with_kwargs=True))
        try:
            with self.counter:
                self.returned = self.module(sample)
                outputs = [output for output in _tensors(self.returned) if output.requires_grad]
                forward = self.counter.get_total_flops() // 2
                # MACs of operations outside of layers.
                rest = forward - self.frozen - self.learnt
                if outputs:
                    self.learnt += rest
                    torch.autograd.backward([output.sum() for output in outputs])
                else:
                    self.frozen += rest
            return self.counter.get_total_flops() // 2 - forward
        finally:
            for handle in handles:
                handle.remove()

    def _start(self, module: nn.Module, args: Any) -> None:
        self._before = self.counter.get_total_flops()

    def _hook(self, name: str) -> Any:
        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            inputs, outputs = list(_tensors([args, kwargs])), list(_tensors(output))
            arriving, leaving = (sum(value.numel() for value in values if value.dim()) for values in (inputs, outputs))
            macs = (self.counter.get_total_flops() - self._before) // 2
            learns = any(value.requires_grad for value in outputs)
            if learns:
                self.learnt += macs
            else:
                self.frozen += macs
            if isinstance(module, _BatchNorm) and module.running_mean is not None:
                # Use the last layer that returned the tensor, because an in-place activation returns its input.
                source = next(
                    ((maker, layer) for value, maker, layer in self._makers[::-1] if value is inputs[0]), None
                )
                if source is not None and isinstance(source[1], _ConvNd | nn.Linear):
                    self.folded[name] = source[0]
            if arriving == leaving and not hasattr(module, "kernel_size"):
                self.in_place.add(name)
            if not macs and any(p.dim() > 1 for p in module.parameters()):
                self.uncounted.add(name)
            gradient = any(value.requires_grad for value in inputs)
            self.layers.append(Layer(name, learns, arriving, leaving, weights=0, needs_input_gradient=gradient))
            self._makers += [(value, name, module) for value in outputs]

        return after


@contextmanager
def only_trained(module: nn.Module, trained: set[str]) -> Iterator[None]:
    """Temporarily let only the parameters in ``trained`` require gradients, in evaluation mode."""
    flags = [(parameter, parameter.requires_grad, parameter.grad) for parameter in module.parameters()]
    modes = [(part, part.training) for part in module.modules()]
    try:
        for name, parameter in module.named_parameters():
            parameter.grad = None
            if parameter.is_floating_point():
                parameter.requires_grad_(name in trained)
        module.eval()
        with torch.enable_grad():
            yield
    finally:
        for parameter, flag, gradient in flags:
            parameter.requires_grad_(flag)
            parameter.grad = gradient
        for submodule, mode in modes:
            submodule.training = mode


def flop_counter() -> FlopCounterMode:
    """Return PyTorch's counter of FLOPs, with corrections. A MAC counts as two FLOPs.

    PyTorch's counter omits in-place products and products with vectors. It also counts the weights' gradient of a
    grouped convolution as if the convolution had one group.
    """
    aten = torch.ops.aten

    def product(total: Any, a: Any, b: Any, *rest: Any, **kwargs: Any) -> int:
        return int(2 * prod(a) * (b[-1] if len(b) > 1 else 1))

    def product_of_two(a: Any, b: Any, *rest: Any, **kwargs: Any) -> int:
        return int(2 * prod(a))

    def convolution(grad: Any, x: Any, w: Any, *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:
        transposed, output_mask = rest[4], rest[7]
        # Each product of the forward pass occurs once in the gradient of the input and once in the weights' gradient.
        return sum(map(bool, output_mask[:2])) * int(conv_flop_count(x, w, grad, transposed=transposed))

    mapping = dict.fromkeys((aten.addmm_, aten.baddbmm_, aten.addmv, aten.addmv_), product)
    extra_formulas = {aten.mv: product_of_two, aten.dot: product_of_two, aten.convolution_backward: convolution}
    return FlopCounterMode(display=False, custom_mapping={**mapping, **extra_formulas})


def _tensors(value: Any) -> Iterator[Tensor]:
    for _, leaf in iter_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
