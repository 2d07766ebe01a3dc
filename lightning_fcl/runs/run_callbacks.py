"""Callbacks for fits on the command line: write ``config.yaml``, print the participation, and stop after a round."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import yaml
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import SaveConfigCallback

from lightning_fcl.callbacks import ContinualMetrics
from lightning_fcl.callbacks.run_tracking import get_tracking_loggers, log_settings
from lightning_fcl.data.trainer_access import find_stream, get_callbacks
from lightning_fcl.evaluation.results import CONFIG, clear_run
from lightning_fcl.federation.protocols import find_federation
from lightning_fcl.io.atomic import write_atomic
from lightning_fcl.runs.logger_runs import write_logger_runs
from lightning_fcl.runs.secret_values import secrets_of, without_secrets
from lightning_fcl.runs.signals import Stopped, stop

# Arguments that are not part of a run's recipe. They are not written to `config.yaml`.
_PLACES = ("config", "out", "ckpt_path", "weights_only")


class SaveConfig(SaveConfigCallback):
    """A callback that writes the recipe to ``config.yaml``, W&B and MLflow when training starts.

    The recipe contains environment variables in place of secrets. A fit that fails before training keeps the file of an
    earlier run.
    """

    folder = Path("runs/fit")

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Do nothing. Lightning's callback would write the file here, before training starts."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if not trainer.ckpt_path:
            clear_run(self.folder)
        config = self.config.clone()
        for name in _PLACES:
            config.pop(name, None)
        text = self.parser.dump(config, skip_unset=False, skip_validation=True)
        content = yaml.safe_load(text)
        if any(secrets_of(content)):
            content = without_secrets(content)
            text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        write_atomic(self.folder / CONFIG, text)
        if loggers := get_tracking_loggers(trainer):
            log_settings(loggers, content)
            write_logger_runs(self.folder, loggers)


class PrintParticipation(Callback):
    """A callback that prints the number of clients per round when a fit starts."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        federation, stream = find_federation(trainer), find_stream(trainer)
        if federation is not None and stream is not None and trainer.is_global_zero:
            print(f"Federation: {federation.participation.describe(len(stream.plan.clients))}")


class StopAfterRound(Callback):
    """A callback that stops a fit at the end of the round in which Ctrl-C or SIGTERM was received.

    Lightning would stop within the round, when only some clients have been trained.

    Args:
        checkpoint: Checkpoint file that is written if a signal stops the fit and no checkpoint was saved after the last
            round. If None, no file is written.
    """

    def __init__(self, checkpoint: Path | None) -> None:
        self._checkpoint = checkpoint
        self._saved = -1  # the round of the newest checkpoint
        self._told = False  # whether any process of the federation received a signal
        self._patience = ExitStack()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        stop.install()
        self._patience.enter_context(
            stop.defer_stop(
                lambda: (
                    f"stopping after this round, {trainer.current_epoch + 1} of {trainer.max_epochs}, with the results "
                    "so far."
                )
            )
        )

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._told = trainer.strategy.reduce_boolean_decision(bool(stop.signal), all=False)
        if self._told:
            _stop(trainer)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, object]
    ) -> None:
        self._saved = trainer.current_epoch

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._told and self._checkpoint is not None and self._saved + 1 < trainer.current_epoch:
            trainer.save_checkpoint(self._checkpoint)

    def close(self) -> None:
        """End the deferral of signals. After this call, a signal ends the process at once."""
        self._patience.close()

    def check(self, program: str, out: Path, num_finished_rounds: int, rounds: int, checkpoint: Path | None) -> None:
        """Raise `Stopped` if the fit received a signal to stop.

        For an unfinished fit with a checkpoint, the message contains the command that resumes the fit.
        """
        if not stop.signal:
            return
        report = f"Results of the finished rounds: {out / 'report.html'}"
        if num_finished_rounds >= rounds:
            raise Stopped(stop.signal, f"finished all rounds ({rounds} of {rounds}). {report}")
        words = ["python", sys.argv[0], "fit", "--config", str(out / "config.yaml"), "--ckpt_path", str(checkpoint)]
        words = [program, "fit", str(out)] if program else words
        advice = f"Resume with: {shlex.join(words)}" if checkpoint else "The fit saved no checkpoint to resume from."
        raise Stopped(stop.signal, f"stopped after round {num_finished_rounds} of {rounds}. {report}\n{advice}")


class StopOnRecord(Callback):
    """A callback that stops a fit at the end of a round if a function of the record returns True.

    The function is also called before the first round of a resumed fit, with the record of the earlier rounds.

    Args:
        should_stop: Function that gets the record of `ContinualMetrics`, and returns whether the fit stops.
    """

    def __init__(self, should_stop: Callable[[Mapping[str, Any]], bool]) -> None:
        self._should_stop = should_stop

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.on_train_epoch_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        metrics = next(one for one in get_callbacks(trainer) if isinstance(one, ContinualMetrics))
        if self._should_stop(metrics.record):
            _stop(trainer)


def _stop(trainer: L.Trainer) -> None:
    """Stop a fit after the current round, even if it has a minimum number of epochs or steps."""
    trainer.fit_loop.min_epochs = None
    trainer.fit_loop.epoch_loop.min_steps = None
    trainer.should_stop = True
