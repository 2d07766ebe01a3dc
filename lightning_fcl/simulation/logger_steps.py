"""The step of logged values: the round for values of a whole round, and the number of batches for values of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as L


class LoggerSteps:
    """The step that a Trainer passes to its loggers, which is the x axis of charts.

    Lightning counts batches for loggers. The number of batches of all clients depends on the methods and on the number
    of vectorized clients. Therefore this class replaces the counter by the round while Lightning logs values of a whole
    round. While clients train, and in checkpoints, the counter is the number of batches of all clients.
    """

    def __init__(self) -> None:
        self._batches: int | None = None  # the number of batches while the counter is the round, otherwise None

    def show_round(self, trainer: L.Trainer, step: int) -> None:
        """Replace the counter by a round."""
        loop = trainer.fit_loop.epoch_loop
        if self._batches is None:
            self._batches = loop._batches_that_stepped
        loop._batches_that_stepped = step

    def show_batches(self, trainer: L.Trainer) -> None:
        """Set the counter to the number of batches of all clients."""
        if self._batches is not None:
            trainer.fit_loop.epoch_loop._batches_that_stepped = self._batches
        self._batches = None

    @contextmanager
    def batches(self, trainer: L.Trainer) -> Iterator[None]:
        """Temporarily set the counter to the number of batches of all clients."""
        loop, previous = trainer.fit_loop.epoch_loop, (trainer.fit_loop.epoch_loop._batches_that_stepped, self._batches)
        self.show_batches(trainer)
        try:
            yield
        finally:
            loop._batches_that_stepped, self._batches = previous
