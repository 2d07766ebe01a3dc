"""What a method sees of a step, and which part of a module learns in it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fcl.data.batches import Batch
from lightning_fcl.methods.functional import LossOf, OutputOf, trainable


def _elsewhere(x: Any, *others: object, **more: object) -> Tensor:
    raise RuntimeError("Expected a step of a module, which has outputs on other samples, too, but got one of none.")


@dataclass
class Step:
    """One optimisation step of one client, as a method sees it.

    Args:
        params: The student's trainable parameters by name, part of the graph.
        server: The state that the client received at the start of the round.
        x: The batch's inputs, shape (batch, ...).
        output: The student's output on ``x``, shape (batch, classes).
        predict: ``predict(state, x)``: a teacher, the module with another state, in evaluation mode, without gradient.
        outputs: ``outputs(x)``: the student's output on other samples, part of the graph.
        features: ``features(x)``: what the module's `embed` makes of them, likewise.
        loss_of: ``loss_of(x, y)``: the mean task loss on other samples, in the module's present mode.
        weight: Share of every sample in the batch's mean, shape (batch,), adding up to 1; None means equal shares.
        y: The batch's targets, shape (batch, ...); None where the batch is no pair.
        recalled: Remembered samples that were drawn for this step, as `Method.recall` names them, each of shape
            (recall_size, ...); empty where nothing is remembered yet.
        recalled_weight: 1 where there are recalled samples, else 0.
    """

    params: Mapping[str, Tensor]
    server: Mapping[str, Tensor]
    x: Any
    output: Tensor
    predict: Callable[[Mapping[str, Tensor], Any], Tensor]
    outputs: OutputOf = _elsewhere
    features: OutputOf = _elsewhere
    loss_of: LossOf = _elsewhere
    weight: Tensor | None = None
    y: Tensor | None = None
    recalled: Mapping[str, Tensor] | None = None
    recalled_weight: Tensor | float = 0.0
    _why: str = field(default="", repr=False)  # there is no batch

    def without_batch(self, why: str) -> Step:
        """The same step without ``x`` and ``output``; who asks for them all the same gets a RuntimeError."""
        other = copy.copy(self)
        del other.x, other.output
        other._why = why
        return other

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor:
            if name in ("x", "output"):
                raise RuntimeError(self._why)
            raise AttributeError(name)

    def mean(self, values: Tensor) -> Tensor:
        """Mean of per-sample ``values``, shape (batch,), over the batch's real samples."""
        return values.mean() if self.weight is None else (values * self.weight).sum()


def without_call(module: nn.Module) -> str:
    """Why a step has no ``x`` and ``output``, with a place for the name of the method that asks for them."""
    return (
        f"Expected `{type(module).__name__}.training_step` to call `self(x)`, whose output `%s` needs, but it did not."
    )


Pattern = str | tuple[str, ...]
"""Some of a module's entries: shell-style patterns. One that begins with "!" is all entries but those of the rest."""


def matches(name: str, pattern: Pattern) -> bool:
    """Whether an entry is one of a pattern's.

    Example:
        >>> [matches(name, "!model.head.*") for name in ("model.body.weight", "model.head.weight")]
        [True, False]
    """
    if isinstance(pattern, tuple):
        return any(matches(name, one) for one in pattern)
    return not fnmatchcase(name, pattern[1:]) if pattern.startswith("!") else fnmatchcase(name, pattern)


class Freezer:
    """Lets a part of a module learn: the rest gets no gradient, and its layers keep their statistics."""

    def __init__(self) -> None:
        self._part: Pattern | None = None
        self._trainable: set[str] = set()
        self._resting: list[nn.Module] = []  # layers that were in training mode

    def train(self, module: nn.Module, part: Pattern | None) -> None:
        """Let a part learn, or all of what learnt before the first part did alone."""
        if part == self._part:
            return
        if self._part is None:
            self._trainable = {*trainable(module)}
        self._part = part
        for name, parameter in module.named_parameters():
            if name in self._trainable:
                parameter.requires_grad_(part is None or matches(name, part))
        for layer in self._resting:
            layer.training = True
        self._resting = []
        for place, layer in module.named_modules():
            buffers = [name for name, _ in layer.named_buffers(place, recurse=False)]  # statistics of what it sees
            if place and part and layer.training and buffers and not any(matches(name, part) for name in buffers):
                self._resting.append(layer)
                layer.training = False


def stepped_by(optimizer: Optimizer, module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module that an optimizer's next step moves, by name."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {
        name: p for name, p in module.named_parameters() if p.requires_grad and p.grad is not None and id(p) in stepped
    }


def is_labelled(batch: Batch) -> bool:
    """Whether a batch is a pair of inputs and a tensor of targets."""
    return isinstance(batch, list | tuple) and len(batch) == 2 and isinstance(batch[1], Tensor)
