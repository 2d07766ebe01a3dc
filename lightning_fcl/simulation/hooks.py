"""What a federation does in the hooks of a Trainer: clients and rounds begin and end there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.types import STEP_OUTPUT

from lightning_fcl.callbacks.epoch_log import RoundLog
from lightning_fcl.data.attached import stream_of
from lightning_fcl.data.batches import Batch
from lightning_fcl.errors import quoted
from lightning_fcl.randomness import start_randomness
from lightning_fcl.simulation.checkpoint import FORMAT, fingerprint_of, leave_out_objects
from lightning_fcl.simulation.federation import Federation, extra_of
from lightning_fcl.simulation.limits import check_monitors, there
from lightning_fcl.simulation.progress import note_progress

if TYPE_CHECKING:
    from lightning_fcl.simulation.strategy import FederatedStrategy

log = logging.getLogger(__name__)

RESTORED = "was being restored"
"""The end of the note on an error before training began; the start is the checkpoint's path."""


class FitHooks(Callback):
    """First of a federation's callbacks: goes on with the round at hand, and keeps the clients' state in checkpoints.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: FederatedStrategy) -> None:
        self.strategy = strategy
        self.began = False  # whether this fit has
        self._logs: RoundLog | None = None
        self._undo_progress: Callable[[], None] | None = None  # of the round at hand
        self._left_out: list[str] = []  # of checkpoints
        self.settings: dict[str, list[dict[str, Any]]] = {}  # of optimizers and schedules, as they were made

    @property
    def federation(self) -> Federation:
        """The federation."""
        return self.strategy.federation

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Before all others, who may ask for the number of rounds."""
        if stage == "fit":
            self.strategy.limits.take_over(trainer, stream_of(trainer))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the module's state as the server's."""
        self.began = True
        federation = self.federation
        federation.server.begin(pl_module, self.strategy.rules, extra_of(federation))
        self._logs = RoundLog(pl_module, self.strategy.ranks)

    def state_dict(self) -> dict[str, Any]:
        federation = self.federation
        between_rounds = self.strategy.round is None or self.strategy.round.settled
        if between_rounds:
            self._hide_left()
        place = {
            "format": FORMAT,
            "fingerprint": fingerprint_of(federation),
            "between_rounds": between_rounds,
            "settings": self.settings,
        }
        kept = federation.placement.everything() if federation.placement is not None else None
        return {**place, **federation.server.state_dict(kept)}

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Let a checkpoint be one that can be read."""
        left = leave_out_objects(checkpoint)
        if left and left != self._left_out:
            self._left_out = left
            log.warning(
                "Checkpoints leave out the hyperparameters %s, which are objects: nothing could be read of a file with "
                "them. Give them again when you load it, or leave them out by `save_hyperparameters(ignore=...)`.",
                quoted(left),
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.federation.server.load_state_dict(state_dict)
        self.federation.placement = None

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin a round, whose loader is there already; within it other loaders are made anew as the user says."""
        self._hide_left()
        self._undo_progress = note_progress(trainer)
        self.strategy.limits.keep_whole(trainer)
        trainer.reload_dataloaders_every_n_epochs = self.strategy.limits.reloads  # type: ignore[attr-defined]
        start_randomness(self.federation.seed, "server", trainer.current_epoch)
        check_monitors(trainer)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Perhaps other clients have begun; only before the first batch of a group does Lightning zero gradients."""
        self.strategy.use_optimizer()
        if not self.strategy.local_steps.first:
            trainer.accumulate_grad_batches = batch_idx + 1  # no divisor of this batch's number; back to 1 in its step
        there(self._logs, "a fit").train(batch)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: Batch, batch_idx: int
    ) -> None:
        """Perhaps clients are done, or the round."""
        self.federation.round.resume()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure the server's model."""
        self._end_round(trainer)
        if self._logs is not None:
            self._logs.train(None)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End the round, and have a loader made for the next; other hooks see what its last client has left."""
        self._end_round(trainer)
        trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]
        there(self._logs, "a fit").meet()
        if self.federation.round.loose is not None:
            self.federation.round.loose.show_left()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let every process know what all clients keep."""
        self._undo_progress = None
        self._forget_logs()
        self._hide_left()
        if self.federation.placement is not None:
            self.federation.placement.complete()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Forget the round that was cut short: a checkpoint that is written now is one of the rounds before."""
        if trainer.state.fn == "fit" and trainer.ckpt_path and self.strategy.round is None:
            exception.add_note(f"{trainer.ckpt_path} {RESTORED}")
        self._settle()
        if self._undo_progress is not None and not self.federation.round.done:
            self._undo_progress()
        self._undo_progress = None
        self._forget_logs()

    def _end_round(self, trainer: L.Trainer) -> None:
        self._settle()
        if trainer.state.stage != "sanity_check" and self.strategy.round is not None and not self.strategy.round.done:
            raise ValueError(
                "Expected `on_train_batch_start` to return None but it has ended round "
                f"{trainer.current_epoch} by -1, before its last client. To leave out a client's batches, set "
                "`limit_train_batches`, or return a loss of zero from `training_step`."
            )

    def _forget_logs(self) -> None:
        if self._logs is not None:
            self._logs.remove()
        self._logs = None
        self._hide_left()

    def _hide_left(self) -> None:
        if self.strategy.round is not None and self.strategy.round.loose is not None:
            self.strategy.round.loose.hide_left()

    def _settle(self) -> None:
        if self.strategy.round is not None:
            self.strategy.round.settle()
