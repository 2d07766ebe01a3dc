"""What a federation does in the hooks of a Trainer: clients and rounds begin and end there.

Meanwhile Lightning's own counters mean what they say: batches are counted for each client, epochs end with the stream,
and what was counted in a round that is cut short is taken back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lightning.pytorch as L
import numpy as np
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.types import STEP_OUTPUT

from lightning_fcl.callbacks.epoch_log import RoundLog
from lightning_fcl.data.attached import callbacks_of, stream_of
from lightning_fcl.data.batches import Batch, Batching
from lightning_fcl.data.client_round import current_round
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.errors import InvalidValueError, quoted
from lightning_fcl.methods.compose import methods_of
from lightning_fcl.methods.declaration import overrides
from lightning_fcl.methods.method_round import server_entries
from lightning_fcl.methods.replay_samples import joins_batches
from lightning_fcl.randomness import start_randomness
from lightning_fcl.simulation.checkpoint import FORMAT, fingerprint_of
from lightning_fcl.simulation.checkpoint_content import check_states, leave_out_objects
from lightning_fcl.simulation.counters import note_progress
from lightning_fcl.simulation.federation import Federation, choose_min_batch_size
from lightning_fcl.simulation.limits import check_monitors, require_begun

if TYPE_CHECKING:
    from lightning_fcl.simulation.strategy import FederatedStrategy


_UNSET = 1000  # what Lightning has made of `max_epochs=None` by now
log = logging.getLogger(__name__)


class RestoredNote(str):
    """A note on an error that was raised while a checkpoint was restored."""


"""The end of the note on an error before training began; the start is the checkpoint's path."""


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
            raise InvalidValueError(
                f"Expected `max_epochs` to be at most the stream's {rounds} rounds but got {epochs}.",
                hint=f"Set `max_epochs={rounds}`, or leave it out.",
                argument="max_epochs",
                value=epochs,
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
        """Return how a client's samples become batches."""
        return replace(stream.batching, shuffle=stream.shuffle and not self.in_order, limit=self.batches)


def common_batches(federation: Federation) -> int:
    """The batches of a client in a round where all clients have as many in all rounds."""
    stream, strategy = federation.stream, federation.strategy
    choose_min_batch_size(federation, ())
    batching, least = strategy.limits.batching(stream), stream.min_batch_size
    sizes = np.array([len(rows) for current in stream.plan.train for rows in current.values() if len(rows) >= least])
    counts = np.unique(batching.limited(batching.per_epoch(sizes) * strategy.local_epochs))
    methods = methods_of(federation.module.trainer)
    vary = [method for method in methods if overrides(method, "local_epochs") or joins_batches(method)]
    if len(counts) == 1 and not vary:
        return int(counts[0])
    why = f"`{type(vary[0]).__name__}` changes it" if vary else f"they have between {counts.min()} and {counts.max()}"
    raise InvalidValueError(
        "Expected clients that have as many batches in every round where `configure_optimizers` asks for their "
        f"number, as by `trainer.estimated_stepping_batches`, but {why}.",
        hint="Count rounds, `trainer.max_epochs`, in a schedule by epoch.",
        argument="estimated_stepping_batches",
    )


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
        if trainer.checkpoint_callbacks:
            check_states(one for one in callbacks_of(trainer) if one is not self)
        extra, rules = server_entries(federation.methods, pl_module), self.strategy.rules
        federation.server.begin(pl_module, rules, extra, current_round(trainer))
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
        require_begun(self._logs, "a fit").train(batch)
        if self.federation.round.cohort is not None:
            self.federation.epoch_states.watch(self.federation.round.cohort.step)

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
        require_begun(self._logs, "a fit").meet()
        if self.federation.round.loose is not None:
            self.federation.round.loose.show_left()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let every process know what all clients keep."""
        self._undo_progress = None
        self._forget_logs()
        self._hide_left()
        if trainer.current_epoch < (trainer.max_epochs or 0):
            hosted = [client for client in self.federation.stream.plan.clients if self.federation.hosts(client)]
            self.federation.round.method_round.finish_stopped(hosted, trainer.current_epoch)
        if self.federation.placement is not None:
            self.federation.placement.complete()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Forget the round that was cut short: a checkpoint that is written now is one of the rounds before."""
        if trainer.state.fn == "fit" and trainer.ckpt_path and self.strategy.round is None:
            exception.add_note(RestoredNote(f"{trainer.ckpt_path} was being restored"))
        self._settle()
        if self._undo_progress is not None and not self.federation.round.done:
            self._undo_progress()
        self._undo_progress = None
        self._forget_logs()

    def _end_round(self, trainer: L.Trainer) -> None:
        self._settle()
        if trainer.state.stage != "sanity_check" and self.strategy.round is not None and not self.strategy.round.done:
            raise InvalidValueError(
                f"Expected `on_train_batch_start` to return None but it has ended round {trainer.current_epoch} by "
                "-1, before its last client.",
                hint="To leave out a client's batches, set `limit_train_batches`, or return a loss of zero from "
                "`training_step`.",
                argument="on_train_batch_start",
                value=-1,
            )
        if self.strategy.round is not None:
            self.federation.epoch_states.meet()

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
