"""Random targets and outputs for trials. One trial checks whether a sample's result depends on other samples."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from lightning_fcl.data.scenarios import IntArray
from lightning_fcl.data.stream import FederatedStream

ROWS = 16
"""Number of samples that a trial reads."""
# The seed is fixed, because the stream's seed must not change the result of a trial.
_SEED = 5923
# Maximum number of random output values in a batch of more than `ROWS` rows. A batch contains each class if possible.
_NUMBERS = 2**17
_RELATIVE, _ABSOLUTE = 1e-5, 1e-6

RowFunction = Callable[[Tensor, Tensor], Tensor]
"""A function ``function(output, y)`` that returns a tensor with a row for each sample."""


class Composition(Enum):
    """The composition of a batch's targets. A number is the fraction of targets that are set to the first class."""

    EACH = None  # all classes in order, repeated from the first class
    DRAWN = 0.0
    UNEQUAL = 0.75  # the remaining targets are random
    SINGLE = 1.0


class Drawer:
    """Draws random batches of targets and outputs with a fixed seed.

    Args:
        y: Targets of some samples, shape (samples, ...).
        output: The module's outputs for these samples, shape (samples, ...).
        num_classes: Number of classes of a classification. 0: the targets are not classes.
    """

    def __init__(self, y: Tensor, output: Tensor, num_classes: int) -> None:
        is_class = num_classes > 0 and y.dim() == 1 and not y.is_floating_point()
        outputs = output.shape[-1] if output.dim() > 1 and output.shape[-1] > 1 else num_classes
        # The stream may have more classes than the module has outputs.
        self._pool = torch.arange(min(num_classes, outputs)).to(y) if is_class else torch.unique(y)
        self._output, self._shape = output.detach(), y.shape[1:]
        row = max(1, output[0].numel())
        self.rows = max(ROWS, min(len(self._pool), _NUMBERS // row))
        self._generator = torch.Generator().manual_seed(_SEED)
        self._in_range = False

    def targets(self, composition: Composition, rows: int | None = None) -> Tensor:
        """Return targets of a composition, shape (rows, ...)."""
        shape = (rows or self.rows, *self._shape)
        if composition.value is None:
            indices = torch.arange(int(np.prod(shape))).view(shape) % len(self._pool)
        else:
            indices = torch.randint(len(self._pool), shape, generator=self._generator)
            indices[: int(composition.value * len(indices))] = 0
        return self._pool[indices.to(self._pool.device)]

    def outputs(self, scale: float = 1.0, rows: int | None = None) -> Tensor:
        """Return outputs, shape (rows, ...): normally distributed, or uniform in the range of the module's outputs."""
        shape = (rows or self.rows, *self._output.shape[1:])
        if self._in_range:
            low, high = self._output.min(), self._output.max()
            return low + (high - low) * torch.rand(shape, generator=self._generator).to(self._output)
        return scale * torch.randn(shape, generator=self._generator).to(self._output)

    def fit_range_of(self, function: RowFunction) -> None:
        """Let later calls of `outputs` use the range of the module's outputs if ``function`` rejects other outputs."""
        try:
            function(self.outputs(), self.targets(Composition.EACH))
        except (ValueError, RuntimeError):
            self._in_range = True

    def has_independent_rows(self, function: RowFunction) -> bool:
        """Return whether a row's result stays equal if other rows are replaced or removed, or if rows are added."""
        even_rows = torch.arange(0, self.rows, 2)
        for composition in Composition:
            output, y = self.outputs(), self.targets(composition)
            whole = function(output, y)
            if not is_close(function(output[even_rows], y[even_rows]), whole[even_rows]):
                return False
            for other in Composition:
                for scale in (0.1, 10.0):
                    new, new_y = self.outputs(scale), self.targets(other)
                    longer = function(torch.cat([new, output, new]), torch.cat([new_y, y, new_y]))
                    if not is_close(longer[self.rows : -self.rows], whole):
                        return False
                    new[even_rows], new_y[even_rows] = output[even_rows], y[even_rows]
                    if not is_close(function(new, new_y)[even_rows], whole[even_rows]):
                        return False
        return True


def trial_rows(stream: FederatedStream) -> IntArray | None:
    """Return the indices of `ROWS` samples spread over the training data, or None if there is no training data.

    The choice draws no random numbers. Indices repeat if there are fewer samples.
    """
    plan, rounds = stream.plan, stream.plan.num_rounds
    if stream.trainer is not None and stream.trainer.max_epochs is not None and stream.trainer.max_epochs >= 0:
        # Classes of rounds after the last epoch may have no output.
        rounds = min(rounds, stream.trainer.max_epochs)
    parts = [rows for current in plan.train[:rounds] for rows in current.values() if len(rows)]
    if not parts:
        return None
    rows = np.unique(np.concatenate(parts))
    trial_indices: IntArray = rows[np.linspace(0, len(rows) - 1, ROWS).round().astype(np.int64)]
    return trial_indices


def has_independent_outputs(forward: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Return whether the outputs stay equal if other inputs are replaced or removed, or if inputs are appended.

    Prepended inputs are not tested, because padding and batches of other clients never change a sample's position.
    """
    whole = forward(x)
    if not isinstance(whole, Tensor) or len(whole) != len(x):
        return False
    even_rows, odd_rows, fewer = torch.arange(0, len(x), 2), torch.arange(1, len(x), 2), len(x) // 2 + 1
    for new in (torch.zeros_like(x[odd_rows]), x[odd_rows.flip(0)], x[even_rows[: len(odd_rows)]]):
        replaced_x = x.clone()
        replaced_x[odd_rows] = new
        if not is_close(forward(replaced_x)[even_rows], whole[even_rows]):
            return False
    longer = forward(torch.cat([x, x.flip(0)]))
    return is_close(forward(x[:fewer]), whole[:fewer]) and is_close(longer[: len(x)], whole)


def is_close(actual: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding: the norm of the difference is at most a tolerance."""
    if actual.shape != expected.shape:
        return False
    actual, expected = actual.detach(), expected.detach()
    finite = expected.isfinite()
    if not torch.equal(actual.isfinite(), finite):
        return False
    distance = (actual - expected).where(finite, 0.0).norm()
    return bool(distance <= _RELATIVE * expected.where(finite, 0.0).norm() + _ABSOLUTE)
