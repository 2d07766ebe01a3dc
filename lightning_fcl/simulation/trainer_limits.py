"""The limits of batches and epochs of a Trainer, within a federation."""

from __future__ import annotations

from dataclasses import replace

import lightning.pytorch as L

from lightning_fcl.data.batching import BatchPlan
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.errors import InvalidValueError

_UNSET = 1000  # Lightning's `max_epochs` if none was given


class TrainerLimits:
    """What a Trainer says of batches and epochs: taken over when a fit begins, and given back when it ends.

    A loader is a round, of which Lightning would cut off the last clients: `limit_train_batches`, `overfit_batches` and
    `fast_dev_run` hold for the batches of each client instead.
    """

    def __init__(self) -> None:
        self.batches: int | float = 1.0
        self.in_order = False  # whether samples stay unshuffled, as under `overfit_batches`
        self.reloads = 0  # `reload_dataloaders_every_n_epochs`, which holds for other loaders than a round
        self._trainer: L.Trainer | None = None

    def apply(self, trainer: L.Trainer, stream: FederatedStream | None) -> None:
        """Take the limits from a Trainer whose data are set up; a fit without a number of rounds has the stream's.

        Raises:
            ValueError: If there are more epochs than rounds.
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
                f"Expected `max_epochs` to be at most the stream's {rounds} rounds but got {epochs}.",
                hint=f"Set `max_epochs={rounds}`, or leave it out.",
                argument="max_epochs",
                value=epochs,
            )

    def finish_current_round(self, trainer: L.Trainer) -> None:
        """Let the round that starts be a whole one: whoever stops the fit within it stops it after it."""
        trainer.fit_loop.min_epochs = max(self._least or 0, trainer.current_epoch + 1)

    def restore(self) -> None:
        """Let the Trainer be as it was."""
        if self._trainer is not None:
            loop = self._trainer.fit_loop
            loop.min_epochs = self._least
            self._trainer.limit_train_batches, loop.max_epochs, loop.epoch_loop.max_steps = self._ends
            self._trainer.accumulate_grad_batches = self._every
            self._trainer.reload_dataloaders_every_n_epochs = self.reloads  # type: ignore[attr-defined]
        self._trainer, self.batches, self.in_order = None, 1.0, False

    def batch_plan(self, stream: FederatedStream) -> BatchPlan:
        """Return how a client's samples become batches."""
        return replace(stream.batch_plan, shuffle=stream.shuffle and not self.in_order, limit_batches=self.batches)
