"""The Trainer's limits within a fit: batches are counted for each client, and epochs end with the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning.pytorch as L
import numpy as np

from lightning_fcl.data.orders import Batching
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.methods.compose import methods_of
from lightning_fcl.methods.declaration import overrides

if TYPE_CHECKING:
    from lightning_fcl.simulation.federation import Federation

_UNSET = 1000  # what Lightning has made of `max_epochs=None` by now


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

    def take_over(self, trainer: L.Trainer, stream: FederatedStream | None) -> None:
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
        rounds = stream.plan.rounds if stream is not None else None
        if rounds is None or epochs is None:
            return
        if epochs == -1 or (epochs == _UNSET and rounds < _UNSET):
            loop.max_epochs = rounds
        elif epochs > rounds:
            raise ValueError(
                f"Expected `max_epochs` to be at most the stream's {rounds} rounds but got {epochs}. Set "
                f"`max_epochs={rounds}`, or leave it out."
            )

    def keep_whole(self, trainer: L.Trainer) -> None:
        """Let the round that starts be a whole one: whoever stops the fit within it stops it after it."""
        trainer.fit_loop.min_epochs = max(self._least or 0, trainer.current_epoch + 1)

    def give_back(self) -> None:
        """Let the Trainer be as it was."""
        if self._trainer is not None:
            loop = self._trainer.fit_loop
            loop.min_epochs = self._least
            self._trainer.limit_train_batches, loop.max_epochs, loop.epoch_loop.max_steps = self._ends
            self._trainer.accumulate_grad_batches = self._every
            self._trainer.reload_dataloaders_every_n_epochs = self.reloads  # type: ignore[attr-defined]
        self._trainer, self.batches, self.in_order = None, 1.0, False

    def batching(self, stream: FederatedStream) -> Batching:
        """How a client's samples become batches."""
        return Batching(stream.batch_size, stream.shuffle and not self.in_order, stream.drop_last, self.batches)


def common_batches(federation: Federation) -> int:
    """The batches of a client in a round where all clients have as many in all rounds."""
    stream, strategy = federation.stream, federation.strategy
    batching = strategy.limits.batching(stream)
    sizes = np.array([len(rows) for current in stream.plan.train for rows in current.values() if len(rows)])
    counts = np.unique(batching.limited(batching.per_epoch(sizes) * strategy.local_epochs))
    methods = methods_of(federation.module.trainer)
    vary = [method for method in methods if overrides(method, "local_epochs") or overrides(method, "rehearse")]
    if len(counts) == 1 and not vary:
        return int(counts[0])
    why = f"`{type(vary[0]).__name__}` changes it" if vary else f"they have between {counts.min()} and {counts.max()}"
    raise ValueError(
        "Expected clients that have as many batches in every round where `configure_optimizers` asks for their number, "
        f"as by `trainer.estimated_stepping_batches`, but {why}. Count rounds, `trainer.max_epochs`, in a schedule by "
        "epoch."
    )
