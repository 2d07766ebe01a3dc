"""Penalties on parameters by their importance for earlier experiences: EWC and MAS."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_fcl.data.batches import Batch
from lightning_fcl.errors import argument, at_least, between
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.methods.client import Client, remember, section
from lightning_fcl.methods.declaration import Needs
from lightning_fcl.methods.functional import as_input, evaluating
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.step import Step

Objective = Callable[[Mapping[str, Tensor], Tensor, Tensor], Tensor]

_CHUNK = 256  # samples whose gradients are taken at once, at most
_DECIDING = {Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item, Tensor.tolist}
_SCALE = "scale"  # the entry of a memory that the importance is multiplied by
_NUMBERS = 2**26  # numbers that their gradients may hold together: 256 MB


def quadratic_penalty(
    params: Mapping[str, Tensor], center: Mapping[str, Tensor], importance: Mapping[str, Tensor]
) -> Tensor:
    """``1 / 2 * sum_i F_i * (theta_i - theta*_i)^2`` over the entries of ``importance`` that are in ``params``."""
    terms = [(importance[n] * (value - center[n]).square()).sum() for n, value in params.items() if n in importance]
    return 0.5 * summed(terms, params)


def scale_of(importance: Mapping[str, Tensor]) -> Tensor:
    """What makes the greatest importance of all parameters 1; 0 where none is important."""
    greatest = torch.stack([value.max() for value in importance.values()]).max()
    tiny = torch.finfo(greatest.dtype).tiny  # below it, its inverse would be infinite
    return torch.where(greatest > 0, 1 / greatest.clamp(min=tiny), 0.0)


def summed(terms: Iterable[Tensor], params: Mapping[str, Tensor]) -> Tensor:
    """The sum of scalars, 0 where there are none, on the device of ``params``."""
    return torch.stack([*terms, torch.zeros((), device=next(iter(params.values())).device)]).sum()


class Outer(NamedTuple):
    """Gradients of samples that are outer products: that of sample n is ``left[n] right[n]^T``."""

    left: Tensor
    right: Tensor


def over_samples(measure: Callable[[Tensor], Tensor], gradients: Tensor | Outer) -> Tensor:
    """The sum over samples of a measure of each number, one with ``measure(a b) = measure(a) measure(b)``."""
    if isinstance(gradients, Outer):
        return measure(gradients.left).T @ measure(gradients.right)
    return measure(gradients).sum(dim=0)


def squared_norms(gradients: Tensor | Outer) -> Tensor:
    """The squared norm of each sample's gradient, shape (samples,)."""
    if isinstance(gradients, Outer):
        return gradients.left.square().sum(dim=1) * gradients.right.square().sum(dim=1)
    return gradients.flatten(1).square().sum(dim=1)


class _OtherUseError(Exception):
    """A parameter is used otherwise than in a linear layer that sees a row for each sample, or more than once."""


class _LinearLayers(TorchFunctionMode):
    """Notes what linear layers see and give, and ends with `_OtherUseError` where a parameter is used otherwise.

    What samples go through between them must not depend on each other, which is so in evaluation mode.
    """

    def __init__(self, params: State, samples: int) -> None:
        super().__init__()
        self.unused = {id(value): name for name, value in params.items()}
        self.params, self.samples = {*self.unused}, samples
        self.calls: list[tuple[list[str], Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DECIDING:  # of a batch, where it should be of a sample
            raise _OtherUseError
        output = func(*args, **(kwargs or {}))
        if used := [id(one) for one in tree_leaves((args, kwargs)) if id(one) in self.params]:
            row_each = func is F.linear and len(args) > 1 and args[0].shape[:-1] == (self.samples,)
            if not (row_each and id(args[0]) not in used and self.unused.keys() >= {*used} and output.requires_grad):
                raise _OtherUseError
            self.calls.append(([self.unused.pop(one) for one in used], args[0], output))
        return output


def outer_gradients(objective: Objective, params: State, x: Tensor, y: Tensor) -> dict[str, Tensor | Outer] | None:
    """`sample_gradients` in one pass, where each parameter is a linear layer's that sees a row a sample; else None."""
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
    found: dict[str, Tensor | Outer] = {}
    for (names, rows, _), error in zip(layers.calls, errors, strict=True):
        found |= {name: Outer(error, rows.detach()) if params[name].ndim == 2 else error for name in names}
    return {n: found[n] if n in found else value.new_zeros(len(x), *value.shape) for n, value in params.items()}


def sample_gradients(objective: Objective, params: State, x: Tensor, y: Tensor) -> State:
    """The gradient of each sample's own objective, by parameter: vectorised, or in a loop where that fails."""

    def single(params: State, x: Tensor, y: Tensor) -> Tensor:
        return objective(params, x[None], y[None])

    try:
        stacked: State = vmap(grad(single), in_dims=(None, 0, 0))(params, x, y)
    except (RuntimeError, ValueError):  # random layers, control flow by the data, no batching rule: as a task says it
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        inputs = list(leaves.values())
        with torch.enable_grad():
            rows = [
                torch.autograd.grad(single(leaves, *pair), inputs, allow_unused=True, materialize_grads=True)
                for pair in zip(x, y, strict=True)
            ]
        stacked = {name: torch.stack(row) for name, row in zip(leaves, zip(*rows, strict=True), strict=True)}
    return stacked


def fisher_information(
    module: nn.Module, state: Mapping[str, Tensor], x: Tensor, y: Tensor, names: Iterable[str] | None = None
) -> State:
    """Diagonal of the empirical Fisher information, ``mean_n (d log p(y_n | x_n) / d theta_i)^2``, of true labels."""
    task: Any = module
    return mean_over_samples(
        module, lambda output, y: task.sample_loss(output, y).sum(), torch.square, state, x, y, names
    )


def output_sensitivity(
    module: nn.Module, state: Mapping[str, Tensor], x: Tensor, names: Iterable[str] | None = None
) -> State:
    """How much the output depends on each parameter: ``mean_n |d ||f(x_n; theta)||_2^2 / d theta_i|``."""
    unlabelled = torch.zeros(len(x), device=x.device)
    return mean_over_samples(module, lambda output, y: output.square().sum(), torch.abs, state, x, unlabelled, names)


def gradients_of_samples(
    module: nn.Module,
    objective: Callable[[Tensor, Tensor], Tensor],
    state: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    names: Iterable[str],
) -> Iterator[Mapping[str, Tensor | Outer]]:
    """The gradients of samples' own ``objective(output, y)``, a sum over samples, by parameter, some samples at once.

    The module is in evaluation mode, with the state; gradients have the shape (samples, ...), or are outer products.
    """
    trainable = {*names}
    params = {name: value.detach() for name, value in state.items() if name in trainable}
    rest = {name: value.detach().clone() for name, value in state.items() if name not in trainable}
    x = as_input(module, x)

    def of_output(params: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        output = functional_call(module, {**params, **rest}, (x,))
        if not isinstance(output, Tensor):
            raise TypeError(
                f"Expected `{type(module).__name__}.forward` to return a tensor but got {type(output).__name__}. "
                "Return the logits alone."
            )
        return objective(output, y)

    chunk = max(1, min(_CHUNK, _NUMBERS // sum(value.numel() for value in params.values())))
    with evaluating(module), isolate_rng():
        for inputs, targets in zip(torch.split(x, chunk), torch.split(y.to(x.device), chunk), strict=True):
            yield outer_gradients(of_output, params, inputs, targets) or sample_gradients(
                of_output, params, inputs, targets
            )


def mean_over_samples(
    module: nn.Module,
    objective: Callable[[Tensor, Tensor], Tensor],
    measure: Callable[[Tensor], Tensor],
    state: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    names: Iterable[str] | None = None,
) -> State:
    """Mean over samples of a measure of the gradient of each sample's ``objective(output, y)``: see `over_samples`."""
    trainable = {name for name, p in module.named_parameters() if p.requires_grad} if names is None else {*names}
    total = {name: torch.zeros_like(value) for name, value in state.items() if name in trainable}
    for gradients in gradients_of_samples(module, objective, state, x, y, trainable):
        for name, value in gradients.items():
            total[name] += over_samples(measure, value)
    return {name: value / len(x) for name, value in total.items()}


@dataclass(eq=False)
class Consolidation(Method):
    """What EWC, MAS and SI share: the penalty, and when the importance of the parameters is taken."""

    needs: ClassVar[Needs] = Needs(samples=True)

    strength: float = argument(1.0, at_least, 0)
    decay: float = argument(1.0, between, 0, 1)
    normalize: bool = True

    def importance(self, client: Client, own: State, data: Batch, names: Iterable[str]) -> State:
        """That of some parameters for the experience that ends, by name; the arguments are those of `end_round`."""
        raise NotImplementedError

    def on_download(self, client: Client) -> Memory:
        memory = client.memory
        if self.strength == 0:
            return memory
        if not memory:
            params = {name: client.server[name] for name, p in client.module.named_parameters() if p.requires_grad}
            nothing = {name: torch.zeros_like(value) for name, value in params.items()}
            memory = remember(params, "center") | remember(nothing, "importance")
        memory = {n: value.to(client.server[n.split(".", 1)[1]].device) for n, value in memory.items() if n != _SCALE}
        return memory | ({_SCALE: scale_of(section(memory, "importance"))} if self.normalize else {})

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        memory = client.memory
        if self.strength == 0:
            return 0.0
        penalty = quadratic_penalty(step.params, section(memory, "center"), section(memory, "importance"))
        return self.strength * (memory[_SCALE] * penalty if _SCALE in memory else penalty)

    def end_round(self, client: Client, own: State, data: Batch) -> Memory:
        if self.strength == 0 or not client.part.last_round:
            return client.memory
        earlier = section(client.memory, "importance")  # not of what learns now: another method may have frozen a part
        new = self.importance(client, own, data, earlier)
        summed = {name: self.decay * value + new[name] for name, value in earlier.items()}
        return remember({name: own[name] for name in earlier}, "center") | remember(summed, "importance")


@dataclass(eq=False)
class EWC(Consolidation):
    """Every step: holds what was important in the client's earlier experiences (Kirkpatrick et al. 2017, equation 3).

    ``task loss + strength / 2 * sum_i F_i * (theta_i - theta*_i)^2`` over the trainable parameters. theta* is the
    client's own model at the end of its latest experience; F is the sum of the `fisher_information` of all its
    experiences, each taken at the experience's end from the data of its last round.

    Args:
        strength: Weight (lambda) of the penalty, at least 0; 0 is fine-tuning.
        decay: What remains of the earlier experiences' F when an experience ends, 0 to 1; 1 sums them.
        normalize: Whether F, summed as it is, is divided by the client's greatest F_i. The penalty alone then never
            blows up with plain SGD whose ``learning rate * strength`` is below 2; stay well below, as the task loss
            adds its own curvature. False: the paper's F as it is; the strengths of papers, 40,000 in Zuo et al. 2024,
            belong to it, and blow up many a small network.

    Raises:
        ValueError: If ``strength`` or ``decay`` is outside its range, or the module does not state its loss apart.
        TypeError: If the samples are no pairs.

    Example:
        >>> EWC(strength=10.0).strength
        10.0
    """

    needs: ClassVar[Needs] = Needs(loss=True, samples=True)

    def importance(self, client: Client, own: State, data: Batch, names: Iterable[str]) -> State:
        return fisher_information(client.module, own, data[0], data[1], names)


@dataclass(eq=False)
class MAS(Consolidation):
    """Every step: holds what the client's output depended on in earlier experiences (Aljundi et al. 2018).

    ``task loss + strength / 2 * sum_i Omega_i * (theta_i - theta*_i)^2``, as in `EWC`, but Omega is the
    `output_sensitivity`, without labels. The paper's equation 4 has no 1 / 2: its lambda is ``strength / 2``.

    Args:
        strength: Weight of the penalty, at least 0; 0 is fine-tuning.
        decay: What remains of the earlier experiences' Omega when an experience ends, 0 to 1; 1 sums them.
        normalize: Whether Omega is divided by its greatest entry, with what this promises: see `EWC`. Zuo et al. 2024
            have a strength of 100 without.

    Raises:
        ValueError: If ``strength`` or ``decay`` is outside its range.
        TypeError: If the module's output is no tensor, or the samples are no pairs.

    Example:
        >>> MAS(strength=2.0).strength
        2.0
    """

    strength: float = argument(0.5, at_least, 0)

    def importance(self, client: Client, own: State, data: Batch, names: Iterable[str]) -> State:
        return output_sensitivity(client.module, own, data[0], names)
