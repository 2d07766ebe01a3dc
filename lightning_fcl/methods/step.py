"""What a method sees of a step, and where it runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import lightning.pytorch as L
from torch import Tensor

from lightning_fcl.data.batches import Batch
from lightning_fcl.methods.functional import LossOf, OutputOf

if TYPE_CHECKING:
    from lightning_fcl.simulation.federation import Federation


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
        predict: ``predict(state, x)`` is the output of the same module with another state, in evaluation mode and
            without gradient: a teacher.
        outputs: ``outputs(x)`` is the student's output on other samples, ``features(x)`` what the module's `embed`
            makes of them; both are part of the graph.
        features: See ``outputs``.
        loss_of: ``loss_of(x, y)`` is the mean task loss on other samples, in the module's present mode; it changes no
            buffer or state of a random number generator.
        weight: Share of every sample in the batch's mean, shape (batch,), adding up to 1; None means equal shares.
        y: The batch's targets, shape (batch, ...); None where the batch is no pair.
        recalled: Remembered samples that were drawn for this step, as `Declaration.recall` names them, each of shape
            (recall_size, ...); empty where nothing is remembered yet. ``recalled_weight`` is then 0.
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
        """The same step without ``x`` and ``output``; who asks for them all the same gets a RuntimeError.

        Args:
            why: Its message.

        Example:
            >>> step = Step({}, {}, None, Tensor(), _elsewhere).without_batch("Call `self(x)`.")
            >>> step.output
            Traceback (most recent call last):
            RuntimeError: Call `self(x)`.
        """
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


@dataclass(frozen=True)
class Part:
    """Some of a module's entries, by a shell-style pattern, or all others.

    Example:
        >>> "head.weight" in Part("head.*"), "head.weight" in Part("head.*", inverse=True)
        (True, False)
    """

    pattern: str
    inverse: bool = False

    def __contains__(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern) != self.inverse


@dataclass
class Running:
    """Where a method runs, while a Trainer does.

    Args:
        module: The module that the Trainer trains.
        federation: The federation; None in a plain Trainer.
        active: Whether the client that trains now uses the method.
        batch: The batch at hand.
    """

    module: L.LightningModule
    federation: Federation | None
    active: bool = True
    batch: Batch = None


def is_labelled(batch: Batch) -> bool:
    """Whether a batch is a pair of inputs and a tensor of targets."""
    return isinstance(batch, list | tuple) and len(batch) == 2 and isinstance(batch[1], Tensor)
