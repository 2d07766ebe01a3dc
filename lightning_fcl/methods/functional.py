"""Functions that compute a module's outputs, losses and gradients for given samples, states and losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.protocols import HasFeatures, HasNumClasses, HasSampleLoss
from lightning_fcl.methods.keyed_dropout import preserve_rng_state
from lightning_fcl.methods.projection import flatten, unflatten

# Maximum number of samples per forward pass.
_CHUNK = 256

SampleLoss = Callable[[Tensor, Any], Tensor]
"""``loss(output, y)``: the loss of each sample, shape (batch,)."""

GradientFn = Callable[..., Tensor]
"""``gradient_fn(x, y, state=None, loss=None)``: the gradient of the mean loss on samples, as one vector.

The gradient is taken with respect to the trained parameters. The module has the tensors in ``state``, or its current
tensors if ``state`` is None. ``loss`` is a `SampleLoss`. Default: the module's `sample_loss`.
"""

LossFn = Callable[..., Tensor]
"""``loss_fn(x, y, params=None, loss=None)``: the mean loss on samples, a scalar that is part of the autograd graph.

``params`` replaces tensors of the module by name. ``loss`` is a `SampleLoss`. Default: the module's `sample_loss`.
"""

OutputFn = Callable[[Any], Tensor]
"""A function from inputs to a module's output or features, shape (batch, ...), as part of the autograd graph."""


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Temporarily set a module to evaluation mode. Afterwards the mode of each submodule is restored."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for submodule, mode in modes:
            submodule.training = mode


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's trainable parameters by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def scalar_dtype(params: Mapping[str, Tensor]) -> torch.dtype:
    """Return the dtype for numbers that scale parameters: double precision if a parameter has it, otherwise single."""
    return reduce(torch.promote_types, (p.dtype for p in params.values()), torch.float32)


def select_tensors(state: Mapping[str, Tensor], module: nn.Module) -> State:
    """Return the tensors of a state that belong to a module, without the server state of methods."""
    module_keys = module.state_dict(keep_vars=True).keys()
    return {name: value for name, value in state.items() if name in module_keys}


def make_teacher_fn(module: nn.Module) -> Callable[[Mapping[str, Tensor], Any], Tensor]:
    """Return a function ``teacher_forward(state, x)`` that returns the module's output with another state.

    The function runs the module in evaluation mode and computes no gradient.
    """

    def predict(state: Mapping[str, Tensor], x: Any) -> Tensor:
        with torch.no_grad(), evaluation_mode(module):
            output: Tensor = functional_call(module, select_tensors(state, module), (x,))
        return output

    return predict


def predictions(module: nn.Module, state: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return a module's outputs for many samples, with the given state and in evaluation mode.

    No gradient is computed.
    """
    predict = make_teacher_fn(module)
    return torch.cat([predict(state, to_input(module, part)) for part in torch.split(x, _CHUNK)])


def embeddings(module: nn.Module, state: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return a module's features of many samples, with the given state and in evaluation mode.

    No gradient is computed.
    """
    return predictions(Embedding(module), {f"{Embedding.prefix}{name}": value for name, value in state.items()}, x)


def make_gradient_fn(module: L.LightningModule, params: Mapping[str, nn.Parameter]) -> GradientFn:
    """Return a `GradientFn` that computes gradients with respect to ``params``. See `Method.project_gradient`."""

    def gradient(x: Any, y: Any, state: Mapping[str, Tensor] | None = None, loss: SampleLoss | None = None) -> Tensor:
        leaves: Mapping[str, Tensor] = params
        other_tensors: State = {}
        if state is not None:
            leaves = {name: state[name].detach().requires_grad_() for name in params}
            other_tensors = {name: value.detach().clone() for name, value in state.items() if name not in params}
        with torch.enable_grad():
            value = make_loss_fn(module)(x, y, {**other_tensors, **leaves}, loss)
        pieces = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
        return flatten({str(i): piece for i, piece in enumerate(pieces)})

    return gradient


def step_along(
    module: L.LightningModule, optimizer: Optimizer, params: Mapping[str, nn.Parameter], gradient: Tensor
) -> None:
    """Take an optimizer step with the given gradient, after gradient clipping with the Trainer's settings.

    Args:
        module: The module that the Trainer trains.
        optimizer: The optimizer. Parameters of the optimizer that are not in ``params`` get no gradient.
        params: Parameters by name, in the order of ``gradient``.
        gradient: Gradient of all ``params`` as one vector.
    """
    optimizer.zero_grad(set_to_none=True)
    for name, piece in unflatten(gradient, params).items():
        params[name].grad = piece
    trainer = module.trainer
    module.configure_gradient_clipping(optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
    optimizer.step()


def make_loss_fn(module: L.LightningModule) -> LossFn:
    """Return a `LossFn` that computes the mean loss on samples. The default loss is the module's ``sample_loss``."""

    def mean_loss(x: Any, y: Any, params: Mapping[str, Tensor] | None = None, loss: SampleLoss | None = None) -> Tensor:
        precision = module.trainer.precision_plugin
        x, y = precision.convert_input(x.to(module.device)), y.to(module.device)
        state = {name: value.clone() for name, value in module.named_buffers()} | dict(params or {})
        with isolate_rng(), preserve_rng_state(), precision.train_step_context():
            output = functional_call(module, state, (x,))
            return (loss or require_sample_loss(module).sample_loss)(output, y).mean()

    return mean_loss


def make_output_fn(module: L.LightningModule, network: nn.Module | None = None, prefix: str = "") -> OutputFn:
    """Return a function that computes the module's output for given samples, as part of the autograd graph.

    Args:
        module: The module that the Trainer trains.
        network: A network that contains the module, to call instead of the module. Default: the module.
        prefix: Prefix of the module's tensor names in ``network``.
    """

    def output(x: Any) -> Tensor:
        buffers = {f"{prefix}{name}": value.clone() for name, value in module.named_buffers()}
        precision = module.trainer.precision_plugin
        with isolate_rng(), preserve_rng_state(), precision.train_step_context():
            result: Tensor = functional_call(
                network or module, buffers, (precision.convert_input(x.to(module.device)),)
            )
        return result

    return output


def make_embed_fn(module: L.LightningModule) -> OutputFn:
    """Return a function that computes the module's features of samples, as part of the autograd graph. See `Step`."""
    return make_output_fn(module, Embedding(module), Embedding.prefix)


class Embedding(nn.Module):
    """A module whose output is the features of another module, for use with `torch.func.functional_call`."""

    prefix = "module."
    """Prefix of the other module's tensor names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """Return the features, shape (batch, features)."""
        if not isinstance(self.module, HasFeatures):
            raise InvalidValueError(
                f"Expected a module with `embed(x)` and `features`, but got a `{type(self.module).__name__}`.",
                hint="Use a `Classifier`, or define `embed`, `features` and `lightning_fcl_protocols = True` in the "
                "module's class.",
            )
        return self.module.embed(x)


def head_of(module: nn.Module) -> nn.Linear | None:
    """Return the last linear layer with a bias that maps a module's features to its classes, or None."""
    if isinstance(module, HasNumClasses) and isinstance(module, HasFeatures):
        shape = (module.num_classes, module.features)
        for layer in reversed([*module.modules()]):
            if isinstance(layer, nn.Linear) and layer.bias is not None and tuple(layer.weight.shape) == shape:
                return layer
    return None


def require_sample_loss(module: nn.Module, reason: str = "") -> HasSampleLoss:
    """Return the module if it has a `sample_loss`, otherwise raise ValueError."""
    if not isinstance(module, HasSampleLoss):
        raise InvalidValueError(
            f"Expected a module with a method `sample_loss(output, y)`{reason}, as in `Classifier`, but got a "
            f"`{type(module).__name__}`.",
            hint="Use a `Classifier`, or define `sample_loss` and `lightning_fcl_protocols = True` in the module's "
            "class.",
            argument="sample_loss",
        )
    return module


def to_input(module: nn.Module, x: Tensor) -> Tensor:
    """Return samples on the device of the module's first parameter.

    Floating-point samples also get the dtype of this parameter.
    """
    first = next(module.parameters(), x)
    return x.to(first.device, first.dtype if x.is_floating_point() else None)


def optimized_parameters(optimizer: Optimizer, module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module that an optimizer's next step changes, by name."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {name: p for name, p in trainable_parameters(module).items() if p.grad is not None and id(p) in stepped}
