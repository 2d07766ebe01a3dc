"""Frozen parts of a module: freezing for methods, and evaluation mode for frozen layers with statistics."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_fcl.methods.base import Pattern, matches
from lightning_fcl.methods.functional import head_of, trainable_parameters
from lightning_fcl.validation import format_code_names

log = logging.getLogger(__name__)


class FrozenLayers:
    """Evaluation mode for frozen layers during training, so that their statistics do not change.

    Batch normalization in training mode updates its statistics even if its parameters are frozen. Without this class,
    the features of a frozen body would differ between clients, and from the features of the server's model.
    """

    def __init__(self) -> None:
        self._layers: dict[str, nn.Module] = {}

    def rest(self, module: nn.Module) -> None:
        """Put frozen layers into evaluation mode, and layers that are no longer frozen back into training mode."""
        frozen = dict(frozen_layers(module))
        for name in self._layers.keys() - frozen.keys():
            self._layers.pop(name).training = True
        resting = {name: layer for name, layer in frozen.items() if layer.training}
        for layer in resting.values():
            layer.training = False
        if new := [name for name in resting if name not in self._layers]:
            log.info("Frozen layers keep their statistics during local training: %s.", format_code_names(new))
        self._layers |= resting

    def wake(self) -> None:
        """Put all layers back into training mode that `rest` put into evaluation mode."""
        for layer in self._layers.values():
            layer.training = True
        self._layers = {}


def frozen_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and layers of a module that have buffers and are frozen.

    A layer with parameters is frozen if none of its parameters is trainable. A normalization layer without parameters
    is frozen if the smallest enclosing submodule with parameters is frozen. Parameters of the module's head do not
    count in this rule.

    Example:
        >>> body = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=False)).requires_grad_(False)
        >>> [name for name, _ in frozen_layers(nn.Sequential(body, nn.ReLU(), nn.Linear(3, 2)))]
        ['0.1']
    """
    parts = dict(module.named_modules())
    try:
        head = head_of(module)
    except ValueError:
        # The module's network has no `embed`.
        head = None
    head_parameters = {id(parameter) for parameter in head.parameters()} if head is not None else set()
    for name, layer in parts.items():
        if not name or not any(True for _ in layer.buffers(recurse=False)):
            continue
        ancestor_name, learn = name, [p.requires_grad for p in layer.parameters()]
        if not (learn or isinstance(layer, _NormBase)):
            continue
        while not learn and ancestor_name:
            ancestor_name = ancestor_name.rpartition(".")[0]
            learn = [p.requires_grad for p in parts[ancestor_name].parameters() if id(p) not in head_parameters]
        if not any(learn):
            yield name, layer


class Freezer:
    """A switch that makes one part of a module trainable and freezes all other parts.

    Frozen parameters get no gradient, and frozen layers keep their statistics.
    """

    def __init__(self) -> None:
        self._part: Pattern | None = None
        self._trainable: set[str] = set()
        # Layers that were in training mode before they were frozen.
        self._resting: list[nn.Module] = []

    def train_only(self, module: nn.Module, pattern: Pattern | None) -> None:
        """Freeze all parts of a module whose names do not match ``pattern``.

        None: make all parameters trainable again that were trainable before freezing.
        """
        if pattern == self._part:
            return
        if self._part is None:
            self._trainable = {*trainable_parameters(module)}
        self._part = pattern
        for name, parameter in module.named_parameters():
            if name in self._trainable:
                parameter.requires_grad_(pattern is None or matches(name, pattern))
        for layer in self._resting:
            layer.training = True
        self._resting = []
        for layer_name, layer in module.named_modules():
            # In training mode, a frozen layer with buffers, such as batch normalization, would update its statistics.
            buffers = [name for name, _ in layer.named_buffers(layer_name, recurse=False)]
            if (
                layer_name
                and pattern
                and layer.training
                and buffers
                and not any(matches(name, pattern) for name in buffers)
            ):
                self._resting.append(layer)
                layer.training = False
