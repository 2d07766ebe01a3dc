"""A Trainer's limits of batches and epochs in a federation."""

from __future__ import annotations

from dataclasses import replace

import lightning.pytorch as L

from lightning_fcl.data.batching import BatchPlan
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.errors import InvalidValueError

_UNSET = 1000  # the value of Lightning's `max_epochs` if it is not set


class TrainerLimits:
    """A Trainer's limits of batches and epochs. A federation replaces these limits during a fit.

    A train loader is one round, and Lightning's limits would skip the last clients of a round. The federation therefore
    applies `limit_train_batches`, `overfit_batches` and `fast_dev_run` to the batches of each client.
    """

    def __init__(self) -> None:
        self.batches: int | float = 1.0
        self.in_order = False  # whether samples are not shuffled, because of `overfit_batches`
        self.reloads = 0  # the user's `reload_dataloaders_every_n_epochs`, which applies to validation loaders
        self._trainer: L.Trainer | None = None

    def apply(self, trainer: L.Trainer, stream: FederatedStream | None) -> None:
        """Replace the limits of a Trainer whose data is set up.

        A `max_epochs` of -1 becomes the number of rounds. An unset `max_epochs` also becomes this number, if the stream
        has fewer than 1000 rounds.

        Raises:
            ValueError: If `max_epochs` is larger than the number of rounds.
        """
        loop = trainer.fit_loop
        self._trainer = trainer
        self._every, self.reloads = trainer.accumulate_grad_batches, trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        self._ends = self.batches, epochs, _ = trainer.limit_train_batches, loop.max_epochs, loop.epoch_loop.max_steps
        self._least = loop.min_epochs
        self.in_order = bool(trainer.overfit_batches)  # type: ignore[attr-defined]
        trainer.limit_train_batches = float(self.batches > 0)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            loop.epoch_loop.max_steps = -1
        rounds = stream.plan.num_rounds if stream is not None else None
        if rounds is None or epochs is None:
            return
        if epochs == -1 or (epochs == _UNSET and rounds < _UNSET):
            loop.max_epochs = rounds
        elif epochs > rounds:
            raise InvalidValueError(
                f"Expected `max_epochs` to be at most {rounds}, the number of rounds of the stream, but got {epochs}.",
                hint=f"Set `max_epochs={rounds}`, or remove it.",
                argument="max_epochs",
                value=epochs,
            )

    def finish_current_round(self, trainer: L.Trainer) -> None:
        """Make the Trainer complete the current round if a fit is stopped early."""
        trainer.fit_loop.min_epochs = max(self._least or 0, trainer.current_epoch + 1)

    def restore(self) -> None:
        """Restore the Trainer's limits."""
        if self._trainer is not None:
            loop = self._trainer.fit_loop
            loop.min_epochs = self._least
            self._trainer.limit_train_batches, loop.max_epochs, loop.epoch_loop.max_steps = self._ends
            self._trainer.accumulate_grad_batches = self._every
            self._trainer.reload_dataloaders_every_n_epochs = self.reloads  # type: ignore[attr-defined]
        self._trainer, self.batches, self.in_order = None, 1.0, False

    def batch_plan(self, stream: FederatedStream) -> BatchPlan:
        """Return the settings for the batches of a client's samples, with the limit of batches."""
        return replace(stream.batch_plan, shuffle=stream.shuffle and not self.in_order, limit_batches=self.batches)
