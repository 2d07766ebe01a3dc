"""Parts of a module that learn while the rest is frozen to the bit."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from lightning_fcl.methods.step import Part


class Freezer:
    """Lets a part of a module learn: the rest gets no gradient, and its layers keep their statistics."""

    def __init__(self) -> None:
        self._part: Part | None = None
        self._trainable: set[str] = set()
        self._resting: list[nn.Module] = []  # layers that were in training mode

    def train(self, module: nn.Module, part: Part | None) -> None:
        """Let a part learn, or all of what learnt before the first part did alone."""
        if part == self._part:
            return
        if self._part is None:
            self._trainable = {name for name, p in module.named_parameters() if p.requires_grad}
        self._part = part
        for name, parameter in module.named_parameters():
            if name in self._trainable:
                parameter.requires_grad_(part is None or name in part)
        for layer in self._resting:
            layer.training = True
        self._resting = [] if part is None else _with_buffers(module, part)
        for layer in self._resting:
            layer.training = False


def _with_buffers(module: nn.Module, part: Part) -> list[nn.Module]:
    """The layers outside of a part that may keep statistics of what they see."""
    return [
        layer
        for place, layer in module.named_modules()
        if place
        and layer.training
        and (names := [name for name, _ in layer.named_buffers(place, recurse=False)])
        and not any(name in part for name in names)
    ]


def stepped_by(optimizer: Optimizer, module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module that an optimizer's next step moves, by name."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {
        name: p for name, p in module.named_parameters() if p.requires_grad and p.grad is not None and id(p) in stepped
    }
