"""The callback that runs the rounds of a federation in the hooks of a Trainer.

Lightning's counters count the batches of all clients. If a round is interrupted, the counters from before the round
are restored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import numpy as np
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.types import STEP_OUTPUT

from lightning_fcl.callbacks.round_log import RoundLog
from lightning_fcl.data.batching import Batch
from lightning_fcl.data.client_round import current_round
from lightning_fcl.data.trainer_access import find_stream, get_callbacks
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.methods.base import overrides_hook
from lightning_fcl.methods.compose import get_methods
from lightning_fcl.methods.method_round import server_entries
from lightning_fcl.methods.replay_samples import joins_batches
from lightning_fcl.rng import seed_all
from lightning_fcl.simulation.checkpoint import FORMAT, federation_fingerprint
from lightning_fcl.simulation.checkpoint_content import check_states, drop_objects
from lightning_fcl.simulation.counters import snapshot_progress
from lightning_fcl.simulation.federation import Federation, require_started
from lightning_fcl.simulation.fit import choose_min_batch_size
from lightning_fcl.simulation.logger_steps import LoggerSteps
from lightning_fcl.simulation.round import Round
from lightning_fcl.simulation.setup_checks import check_monitors
from lightning_fcl.validation import format_code_names

log = logging.getLogger(__name__)


class RestoredNote(str):
    """A note on an error that was raised while a checkpoint was restored."""


def common_batches(federation: Federation) -> int:
    """Return the number of batches per client and round.

    Raises:
        ValueError: If the number differs between clients or rounds, or if a method can change the number.
    """
    stream = federation.stream
    choose_min_batch_size(federation, ())
    batching, min_batch_size = federation.limits.batch_plan(stream), stream.min_batch_size
    sizes = np.array(
        [len(rows) for current in stream.plan.train for rows in current.values() if len(rows) >= min_batch_size]
    )
    counts = np.unique(batching.limit_steps(batching.batches_per_epoch(sizes) * federation.settings.local_epochs))
    methods = get_methods(federation.module.trainer)
    vary = [method for method in methods if overrides_hook(method, "local_epochs") or joins_batches(method)]
    if len(counts) == 1 and not vary:
        return int(counts[0])
    reason = f"`{type(vary[0]).__name__}` can change it" if vary else f"it is between {counts.min()} and {counts.max()}"
    raise InvalidValueError(
        "Expected the number of batches to be the same for all clients and rounds, because `configure_optimizers` uses "
        f"this number (for example `trainer.estimated_stepping_batches`), but {reason}.",
        hint='Use a scheduler with `interval="epoch"`, and compute its length from `trainer.max_epochs` (rounds).',
        argument="estimated_stepping_batches",
    )


class FitHooks(Callback):
    """The Trainer's first callback. It runs a round's steps between batches, and saves client states in checkpoints.

    Args:
        federation: The federation.

    Attributes:
        round: The current round. None before the first round.
        logger_steps: The step of logged values.
    """

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.round: Round | None = None
        self.has_started = False  # whether this fit has started to train
        self.logger_steps = LoggerSteps()
        self._logs: RoundLog | None = None
        self._undo_progress: Callable[[], None] | None = None  # restores the counters from before the current round
        self._left_out: list[str] = []  # hyperparameters that the last warning listed
        self.settings: dict[str, list[dict[str, Any]]] = {}  # initial settings of optimizers and schedulers

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Apply the limits of batches and epochs before other callbacks can read the number of rounds."""
        if stage == "fit":
            self.federation.limits.apply(trainer, find_stream(trainer))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the server with the module's state."""
        self.has_started = True
        federation = self.federation
        if trainer.checkpoint_callbacks:
            check_states(one for one in get_callbacks(trainer) if one is not self)
        extra, rules = server_entries(federation.methods, pl_module), federation.settings.rules
        federation.server.start_fit(pl_module, rules, extra, current_round(trainer))
        self._logs = RoundLog(pl_module, federation.ranks)

    def state_dict(self) -> dict[str, Any]:
        federation = self.federation
        between_rounds = self.round is None or self.round.progress.settled
        if between_rounds:
            self._hide_left()
        federation_state = {
            "format": FORMAT,
            "fingerprint": federation_fingerprint(federation),
            "between_rounds": between_rounds,
            "settings": self.settings,
        }
        client_states = federation.placement.gather_all() if federation.placement is not None else None
        return {**federation_state, **federation.server.state_dict(client_states)}

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Remove hyperparameters that would make the checkpoint unreadable."""
        dropped_names = drop_objects(checkpoint)
        if dropped_names and dropped_names != self._left_out:
            self._left_out = dropped_names
            log.warning(
                "Checkpoints do not contain the hyperparameters %s, because a checkpoint with these objects could not "
                "be read. Pass them to `load_from_checkpoint`, or exclude them with "
                "`save_hyperparameters(ignore=...)`.",
                format_code_names(dropped_names),
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.federation.server.load_state_dict(state_dict)
        self.federation.placement = None

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Prepare a round. Lightning has already created the train loader of the round.

        Therefore `reload_dataloaders_every_n_epochs` gets the user's value again, which applies to validation loaders.
        """
        self._hide_left()
        self.logger_steps.show_batches(trainer)
        self._undo_progress = snapshot_progress(trainer)
        # Callbacks that log values when a round starts use the round as step.
        self.logger_steps.show_round(trainer, trainer.current_epoch)
        self.federation.limits.finish_current_round(trainer)
        trainer.reload_dataloaders_every_n_epochs = self.federation.limits.reloads  # type: ignore[attr-defined]
        seed_all(self.federation.seed, "server", trainer.current_epoch)
        check_monitors(trainer)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Use the optimizer of the current clients, and keep the gradients of batches that share an optimizer step."""
        federation = self.federation
        self.logger_steps.show_batches(trainer)
        federation.use_optimizer(trainer)
        if not federation.local_steps.is_first_batch:
            # Lightning zeroes gradients if this value divides `batch_idx`. `training_step` sets the value back to 1.
            trainer.accumulate_grad_batches = batch_idx + 1
        require_started(self._logs, "a fit").start_batch(batch)
        client_group = federation.current_round.client_group
        if client_group is not None:
            federation.epoch_states.watch(client_group.step)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: Batch, batch_idx: int
    ) -> None:
        """After the last batch of a group of clients, let the clients upload. After the last group, aggregate."""
        federation, current = self.federation, require_started(self.round, "a fit")
        self.logger_steps.show_batches(trainer)  # An empty batch has no `on_train_batch_start`.
        progress = current.progress
        progress.has_trained = True
        if progress.last_batch:
            next(current.training, None)
            if not progress.client_groups:
                next(current.steps, None)
            federation.use_optimizer(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End the round, so that the server's model is validated."""
        self._end_round(trainer)
        if self._logs is not None:
            self._logs.start_batch(None)
        self.logger_steps.show_round(trainer, trainer.current_epoch)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.logger_steps.show_batches(trainer)

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.logger_steps.show_round(trainer, trainer.current_epoch)

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.logger_steps.show_batches(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End the round. Hooks that run after this hook can read the attribute values of the last client."""
        self._end_round(trainer)
        # With this value, Lightning creates a new train loader for the next round.
        trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]
        require_started(self._logs, "a fit").reduce_and_log()
        if self.federation.loose is not None:
            self.federation.loose.expose_last_client()
        # After this hook, Lightning subtracts 1 from the counter before it logs the values of the round.
        self.logger_steps.show_round(trainer, trainer.current_epoch + 1)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Finish the experiences if the fit was stopped early, and copy the states of all clients to every process."""
        self._undo_progress = None
        self.logger_steps.show_batches(trainer)
        self._forget_logs()
        self._hide_left()
        if trainer.current_epoch < (trainer.max_epochs or 0):
            hosted = [client for client in self.federation.stream.plan.clients if self.federation.hosts(client)]
            require_started(self.round, "a fit").method_round.finish_stopped(hosted, trainer.current_epoch)
        if self.federation.placement is not None:
            self.federation.placement.sync_all()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Discard an interrupted round, so that a checkpoint that is saved now contains only complete rounds."""
        if trainer.state.fn == "fit" and trainer.ckpt_path and self.round is None:
            exception.add_note(RestoredNote(f"{trainer.ckpt_path} was being restored"))
        self._settle()
        self.logger_steps.show_batches(trainer)
        if self._undo_progress is not None and not self.federation.current_round.done:
            self._undo_progress()
        self._undo_progress = None
        self._forget_logs()

    def _end_round(self, trainer: L.Trainer) -> None:
        self._settle()
        if trainer.state.stage != "sanity_check" and self.round is not None and not self.round.progress.done:
            raise InvalidValueError(
                f"Expected `on_train_batch_start` to return None, but it returned -1 and ended round "
                f"{trainer.current_epoch} before its last client.",
                hint="To skip batches of a client, set `limit_train_batches`, or return a loss of zero from "
                "`training_step`.",
                argument="on_train_batch_start",
                value=-1,
            )
        if self.round is not None:
            self.federation.epoch_states.merge_ranks()

    def _forget_logs(self) -> None:
        if self._logs is not None:
            self._logs.remove()
        self._logs = None
        self._hide_left()

    def _hide_left(self) -> None:
        if self.federation.loose is not None:
            self.federation.loose.hide_last_client()

    def _settle(self) -> None:
        if self.round is not None:
            self.round.finalize()
