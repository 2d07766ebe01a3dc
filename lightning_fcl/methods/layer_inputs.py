"""Inputs of a network's layers as rows of a matrix, and weights as the matrix that multiplies these rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import State
from lightning_fcl.methods.drift_correction import active_reductions
from lightning_fcl.methods.functional import evaluation_mode, select_tensors, to_input, trainable_parameters

# Maximum number of samples per forward pass. A convolution has one row per output position of each image.
_PIECE = 32


def averaged_layers(module: L.LightningModule) -> list[str]:
    """Return the names of the layers that are trainable and averaged. Raise ValueError if there is no such layer.

    Supported layers are `nn.Linear`, and `nn.Conv2d` with ``groups=1``, ``padding_mode="zeros"`` and a ``padding`` that
    is not a string.
    """
    reductions = active_reductions(module)
    places = [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
        or (
            (isinstance(layer, nn.Conv2d) and (layer.groups, layer.padding_mode) == (1, "zeros"))
            and not isinstance(layer.padding, str)
        )
    ]
    learning = {name for name in trainable_parameters(module) if reductions[name].averages}
    parameter_names = {
        name: {f"{name}.{key}" for key, _ in module.get_submodule(name).named_parameters()} for name in places
    }
    layer_names = [name for name in places if parameter_names[name] <= learning]
    if not layer_names:
        raise InvalidValueError(
            "Expected a module with trainable linear or convolutional layers whose reduction is `mean`, but this "
            f"`{type(module).__name__}` has no such layer.",
            hint="Add a trainable `nn.Linear` with the reduction `mean`, or use another method.",
            argument="module",
            value=type(module).__name__,
        )
    return layer_names


def weight_matrix(state: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a layer's weights in double precision, shape (outputs, d). A bias is appended as the last column.

    d is the number of weights of one output, plus 1 if the layer has a bias.
    """
    weight, bias = state[f"{name}.weight"].detach().double().flatten(1), state.get(f"{name}.bias")
    return weight if bias is None else torch.cat([weight, bias.detach().double()[:, None]], dim=1)


def to_weight_state(state: Mapping[str, Tensor], name: str, matrix: Tensor) -> State:
    """Return a `weight_matrix` as tensors by name, with the shapes and dtypes of the layer's tensors in ``state``."""
    weight, bias = state[f"{name}.weight"], state.get(f"{name}.bias")
    weight_state = {f"{name}.weight": matrix[:, : weight[0].numel()].view_as(weight).to(weight)}
    return weight_state if bias is None else {**weight_state, f"{name}.bias": matrix[:, -1].to(bias)}


@torch.no_grad()
def layer_inputs(
    module: L.LightningModule, names: Iterable[str], state: State, x: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield the inputs of layers for samples, as pairs (layer name, rows). The module is in evaluation mode.

    The rows of a layer have shape (rows, d), in double precision. There is one row per input vector of a linear layer,
    or per output position of a convolution, so that ``rows @ weight_matrix.T`` is the layer's output. If the layer has
    a bias, the last column is 1. Samples are processed in chunks. Each call of a layer in a chunk yields one pair.

    Args:
        module: The module.
        names: Names of the layers.
        state: The module's state for the forward pass. Tensors that the module does not have are ignored.
        x: Samples, shape (n, ...).
    """
    named_rows: list[tuple[str, Tensor]] = []
    handles = [
        module.get_submodule(name).register_forward_pre_hook(
            lambda layer, args, name=name: named_rows.append((name, input_rows(layer, args[0])))
        )
        for name in names
    ]
    module_state = select_tensors(state, module)
    try:
        with evaluation_mode(module):
            for piece in torch.split(x, _PIECE):
                functional_call(module, module_state, (to_input(module, piece),))
                yield from named_rows
                named_rows.clear()
    finally:
        for handle in handles:
            handle.remove()


def input_rows(layer: nn.Module, x: Tensor) -> Tensor:
    """Return a layer's input as rows, shape (rows, d). See `layer_inputs`."""
    if isinstance(layer, nn.Conv2d) and not isinstance(layer.padding, str):
        x = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride).transpose(1, 2)
    rows = x.flatten(0, -2).double()
    return rows if layer.bias is None else F.pad(rows, (0, 1), value=1.0)
