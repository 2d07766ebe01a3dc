"""Progress bar of a federation: experience, round, clients, accuracy, and remaining time."""

from __future__ import annotations

import sys
import time
from itertools import accumulate
from typing import TYPE_CHECKING

import lightning.pytorch as L
from lightning.pytorch.callbacks import ProgressBar

from lightning_fcl.callbacks.remaining_time import RemainingTime, count_training_samples
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.trainer_access import find_stream, require_stream
from lightning_fcl.federation.protocols import find_federation
from lightning_fcl.validation import require_package

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class FederatedProgressBar(ProgressBar):
    """Progress bar with the experience, the round, trained and lost clients, the server's accuracy, and remaining time.

    The bar advances by one for each client that ends its local training in a round. At the end of the round, the bar
    also counts the clients that have data but did not train. A client is lost in a round if its upload is dropped, or
    if it misses the synchronization. The bar is shown on a terminal and in a notebook. Otherwise, for example in the
    log file of a cluster, a line is written to the standard error stream after each round.

    Example:
        >>> FederatedProgressBar().is_enabled
        True
    """

    def __init__(self) -> None:
        super().__init__()
        self._bar: Progress | None = None
        self._task: TaskID
        self._enabled = True
        # For each round, the number of clients with data in all earlier rounds. The last entry is the total of the fit.
        self._done: list[int] = []
        self._lost = 0
        # Time at the start of the fit, if lines are written. None if the bar is shown or disabled.
        self._started: float | None = None
        # Time at which the current round started, and the estimate of the remaining time, if lines are written.
        self._round_started = 0.0
        self._remaining_time = RemainingTime([])

    @property
    def is_enabled(self) -> bool:
        return self._enabled

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        console = require_package("rich.console", "shows the progress").Console(stderr=True)
        stream, self._started = find_stream(trainer), None
        if stream is None or not (self._enabled and trainer.is_global_zero):
            return
        self._lost = 0
        if not (console.is_terminal or console.is_jupyter):
            self._started = self._round_started = time.monotonic()
            self._remaining_time = RemainingTime(count_training_samples(trainer))
            return
        rich = require_package("rich.progress", "shows the progress")
        self._bar = rich.Progress(
            rich.TextColumn("experience {task.fields[experience]}, round {task.fields[round]}"),
            rich.BarColumn(bar_width=None),
            rich.TextColumn("{task.completed:.0f}/{task.total:.0f} clients{task.fields[lost]}"),
            rich.TextColumn("{task.fields[accuracy]}"),
            rich.TextColumn("{task.fields[speed]}"),
            rich.TimeRemainingColumn(compact=True),
            console=console,
            expand=True,
            refresh_per_second=4,
        )
        counts = [len(current) for current in stream.plan.train[: trainer.max_epochs]]
        self._done = [0, *accumulate(counts)]
        # A resumed fit may have no rounds left.
        num_completed = self._done[min(trainer.current_epoch, len(counts))]
        self._task = self._bar.add_task(
            "", total=self._done[-1], completed=num_completed, experience="", round="", lost="", accuracy="", speed=""
        )
        self._bar.start()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._bar is not None:
            experience, round_text = _position(trainer)
            self._bar.update(self._task, experience=experience, round=round_text)

    def needs_client_state(self, pl_module: L.LightningModule) -> bool:
        return False

    def on_client_end(self, trainer: L.Trainer, pl_module: L.LightningModule, client_round: ClientRound) -> None:
        if self._bar is not None:
            speed = self._bar.tasks[0].speed
            self._bar.update(self._task, advance=1, speed=f"{speed:.3g}/s" if speed else "")

    def on_round_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if (federation := find_federation(trainer)) is not None:
            self._lost += len(federation.server.record.dropped) + len(federation.server.record.missed_sync)
        if self._bar is not None:
            lost_text = f", {self._lost} lost" if self._lost else ""
            self._bar.update(self._task, completed=self._done[trainer.current_epoch + 1], lost=lost_text)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        accuracy = trainer.callback_metrics.get("server/accuracy")
        accuracy_text = "" if accuracy is None else f"accuracy {float(accuracy):.3f}"
        if self._bar is not None and accuracy_text:
            self._bar.update(self._task, accuracy=accuracy_text)
        if self._started is not None:
            current_time = time.monotonic()
            self._remaining_time.add(trainer.current_epoch, current_time - self._round_started)
            self._round_started = current_time
            experience, round_text = _position(trainer)
            parts = [f"experience {experience}, round {round_text}", accuracy_text]
            parts += [
                f"{self._lost} clients lost" if self._lost else "",
                f"{current_time - self._started:.1f} s, {self._remaining_time.seconds:.1f} s remaining",
            ]
            print(", ".join(filter(None, parts)), file=sys.stderr, flush=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)


def _position(trainer: L.Trainer) -> tuple[str, str]:
    """Return the number of the current experience and of the current round, both from 1 and with their totals."""
    numbers, round_idx = require_stream(trainer).plan.experiences.values(), trainer.current_epoch
    current_experience, last_experience = max(of[round_idx] for of in numbers), max(of[-1] for of in numbers)
    return f"{current_experience + 1}/{last_experience + 1}", f"{round_idx + 1}/{trainer.max_epochs}"
