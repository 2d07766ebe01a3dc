"""Gradients of each sample's loss, computed for a chunk of samples at once, and reductions over samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_fcl.data.batching import Batch
from lightning_fcl.errors import InvalidTypeError
from lightning_fcl.federation.aggregation import State
from lightning_fcl.methods.context import zeros_like_state
from lightning_fcl.methods.functional import evaluation_mode, require_sample_loss, to_input

Objective = Callable[[Mapping[str, Tensor], Tensor, Tensor], Tensor]

# Maximum number of samples whose gradients are computed at once.
_CHUNK = 256
# Functions that read a value from a tensor, so that the code can branch on it.
_DECIDING = {Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item, Tensor.tolist}
# Maximum number of values in the gradients of a chunk: 256 MiB in single precision.
_NUMBERS = 2**26


class OuterProduct(NamedTuple):
    """Per-sample gradients that are outer products: the gradient of sample n is ``left[n] right[n]^T``."""

    left: Tensor
    right: Tensor


def over_samples(measure: Callable[[Tensor], Tensor], gradients: Tensor | OuterProduct) -> Tensor:
    """Apply an elementwise function to per-sample gradients, and return the sum over samples.

    Args:
        measure: An elementwise function with ``measure(a * b) = measure(a) * measure(b)``, such as the absolute value.
        gradients: Per-sample gradients, shape (samples, ...), or outer products.
    """
    if isinstance(gradients, OuterProduct):
        return measure(gradients.left).T @ measure(gradients.right)
    return measure(gradients).sum(dim=0)


def squared_norms(gradients: Tensor | OuterProduct) -> Tensor:
    """Return the squared norm of each sample's gradient, shape (samples,)."""
    if isinstance(gradients, OuterProduct):
        return gradients.left.square().sum(dim=1) * gradients.right.square().sum(dim=1)
    return gradients.flatten(1).square().sum(dim=1)


class _OtherUseError(Exception):
    """Raised if a parameter is used twice, or in an operation other than a linear layer with one row per sample."""


class _LinearLayers(TorchFunctionMode):
    """A context that records inputs and outputs of linear layers. Other uses of a parameter raise `_OtherUseError`.

    The operations between the layers must not mix samples. In evaluation mode, common layers do not mix samples.
    """

    def __init__(self, params: State, samples: int) -> None:
        super().__init__()
        self.unused = {id(value): name for name, value in params.items()}
        self.params, self.samples = {*self.unused}, samples
        self.calls: list[tuple[list[str], Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A decision that depends on a whole batch can differ from the decision that depends on one sample.
        if func in _DECIDING:
            raise _OtherUseError
        output = func(*args, **(kwargs or {}))
        if param_ids := [id(one) for one in tree_leaves((args, kwargs)) if id(one) in self.params]:
            row_each = func is F.linear and len(args) > 1 and args[0].shape[:-1] == (self.samples,)
            if not (
                row_each
                and id(args[0]) not in param_ids
                and self.unused.keys() >= {*param_ids}
                and output.requires_grad
            ):
                raise _OtherUseError
            self.calls.append(([self.unused.pop(one) for one in param_ids], args[0], output))
        return output


def outer_gradients(
    objective: Objective, params: State, x: Tensor, y: Tensor
) -> dict[str, Tensor | OuterProduct] | None:
    """Compute the gradients of `per_sample_gradients` in one pass. Return None if this is not possible.

    The gradient of a weight matrix that a linear layer uses is an `OuterProduct`. One pass is not sufficient if, for
    example, a layer other than a linear layer uses a parameter.
    """
    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    layers = _LinearLayers(leaves, len(x))
    with torch.enable_grad():
        try:
            with layers:
                total = objective(leaves, x, y)
        except _OtherUseError:
            return None
        if not total.requires_grad:
            return None
        outputs = [output for _, _, output in layers.calls]
        errors = torch.autograd.grad(total, outputs, allow_unused=True, materialize_grads=True)
    gradients: dict[str, Tensor | OuterProduct] = {}
    for (names, rows, _), error in zip(layers.calls, errors, strict=True):
        gradients |= {name: OuterProduct(error, rows.detach()) if params[name].ndim == 2 else error for name in names}
    return {n: gradients[n] if n in gradients else value.new_zeros(len(x), *value.shape) for n, value in params.items()}


def per_sample_gradients(objective: Objective, params: State, x: Tensor, y: Tensor) -> State:
    """Return the gradient of each sample's loss for each parameter, by name. Each tensor has shape (samples, ...).

    The computation is vectorized with `torch.func.vmap`. If this fails, a loop computes one sample after another.

    Args:
        objective: ``objective(params, x, y)``: the loss of a batch.
        params: The parameters by name.
        x: Inputs, shape (samples, ...).
        y: Targets, shape (samples, ...).
    """

    def single(params: State, x: Tensor, y: Tensor) -> Tensor:
        return objective(params, x[None], y[None])

    try:
        stacked: State = vmap(grad(single), in_dims=(None, 0, 0))(params, x, y)
    # vmap fails for random layers, for control flow that depends on data, and for operations without a batching rule.
    except (RuntimeError, ValueError):
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        inputs = list(leaves.values())
        with torch.enable_grad():
            rows = [
                torch.autograd.grad(single(leaves, *pair), inputs, allow_unused=True, materialize_grads=True)
                for pair in zip(x, y, strict=True)
            ]
        stacked = {name: torch.stack(row) for name, row in zip(leaves, zip(*rows, strict=True), strict=True)}
    return stacked


def module_per_sample_gradients(
    module: nn.Module,
    objective: Callable[[Tensor, Tensor], Tensor],
    state: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    names: Iterable[str],
) -> Iterator[Mapping[str, Tensor | OuterProduct]]:
    """Yield, for each chunk of samples, the per-sample gradients of ``objective(output, y)`` by parameter name.

    The module runs in evaluation mode with the given state. Each gradient has the shape (samples, ...) or is an
    `OuterProduct`.

    Args:
        module: The module, whose ``forward`` returns a tensor.
        objective: The loss of a batch, a sum over samples.
        state: The module's state.
        x: Inputs, shape (n, ...).
        y: Targets, shape (n, ...).
        names: Names of the parameters.

    Raises:
        InvalidTypeError: If ``forward`` does not return a tensor.
    """
    name_set = {*names}
    params = {name: value.detach() for name, value in state.items() if name in name_set}
    rest = {name: value.detach().clone() for name, value in state.items() if name not in name_set}
    x = to_input(module, x)

    def output_objective(params: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        output = functional_call(module, {**params, **rest}, (x,))
        if not isinstance(output, Tensor):
            raise InvalidTypeError(
                f"Expected `{type(module).__name__}.forward` to return a tensor, but got {type(output).__name__}.",
                hint="Return the logits alone.",
                argument="forward",
            )
        return objective(output, y)

    chunk = max(1, min(_CHUNK, _NUMBERS // sum(value.numel() for value in params.values())))
    with evaluation_mode(module), isolate_rng():
        for inputs, targets in zip(torch.split(x, chunk), torch.split(y.to(x.device), chunk), strict=True):
            yield outer_gradients(output_objective, params, inputs, targets) or per_sample_gradients(
                output_objective, params, inputs, targets
            )


def mean_sample_measure(
    module: nn.Module,
    objective: Callable[[Tensor, Tensor], Tensor],
    measure: Callable[[Tensor], Tensor],
    state: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    names: Iterable[str],
) -> State:
    """Apply ``measure`` to per-sample gradients, and return the mean over samples, by parameter name.

    The gradients are those of ``objective(output, y)``. ``measure`` is elementwise, see `over_samples`. For the other
    arguments, see `module_per_sample_gradients`.
    """
    name_set = {*names}
    total = zeros_like_state({name: value for name, value in state.items() if name in name_set})
    for gradients in module_per_sample_gradients(module, objective, state, x, y, name_set):
        for name, value in gradients.items():
            total[name] += over_samples(measure, value)
    return {name: value / len(x) for name, value in total.items()}


def fisher_diagonal(module: nn.Module, state: Mapping[str, Tensor], data: Batch, names: Iterable[str]) -> State:
    """Return the diagonal of the empirical Fisher information, by parameter name.

    The value of a parameter is the square of the gradient of a sample's loss, averaged over the samples. The loss is
    the module's ``sample_loss`` with the true targets. The module runs in evaluation mode.

    Args:
        module: The module, which defines ``sample_loss(output, y)``.
        state: The module's state, such as ``trained_state`` of a hook.
        data: The samples, a pair of inputs and targets, each of shape (n, ...).
        names: Names of the parameters.

    Raises:
        ValueError: If the module does not define ``sample_loss``.
    """
    loss = require_sample_loss(module).sample_loss
    x, y = data
    return mean_sample_measure(module, lambda output, y: loss(output, y).sum(), torch.square, state, x, y, names)
