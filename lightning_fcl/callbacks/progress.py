"""Progress of a federation: experience, round, client, and the time that is left."""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from lightning_fcl.data.attached import need_stream, stream_of
from lightning_fcl.data.client_round import ClientRound


class FederatedProgressBar(ProgressBar):
    """Shows the experience, the round, the client and the server's accuracy, with the time that is left.

    One unit of the bar is one client's part in a round.

    Example:
        >>> FederatedProgressBar().is_enabled
        True
    """

    def __init__(self) -> None:
        super().__init__()
        self._bar: Any = None
        self._enabled = True

    @property
    def is_enabled(self) -> bool:
        """Whether anything is shown."""
        return self._enabled

    def disable(self) -> None:
        """Show nothing."""
        self._enabled = False

    def enable(self) -> None:
        """Show again."""
        self._enabled = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the bar."""
        stream = stream_of(trainer)
        if stream is not None:
            counts = [len(current) for current in stream.plan.train[: trainer.max_epochs]]
            done = sum(counts[: trainer.current_epoch])
            pause = 0.1 if sys.stderr.isatty() else 10.0  # a log file needs fewer lines than a screen
            self._bar = tqdm(
                total=sum(counts),
                initial=done,
                disable=not self._enabled,
                file=sys.stderr,
                dynamic_ncols=True,
                mininterval=pause,
                maxinterval=pause,
                unit="client",
            )
            self._describe(trainer, "")

    def on_client_end(self, trainer: L.Trainer, pl_module: L.LightningModule, client_round: ClientRound) -> None:
        """One client is done."""
        if self._bar is not None:
            self._describe(trainer, f", client {client_round.client}")
            self._bar.update()

    def on_round_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The clients that did not take part count as done."""
        if self._bar is not None:
            counts = [len(current) for current in need_stream(trainer).plan.train]
            self._bar.update(sum(counts[: trainer.current_epoch + 1]) - self._bar.n)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show the server's accuracy."""
        accuracy = trainer.callback_metrics.get("server/accuracy")
        if self._bar is not None and accuracy is not None:
            self._bar.set_postfix_str(f"server accuracy {float(accuracy):.3f}", refresh=False)

    def _describe(self, trainer: L.Trainer, client: str) -> None:
        plan = need_stream(trainer).plan
        round = min(trainer.current_epoch, plan.rounds - 1)  # a continued fit may have none left
        now = max(numbers[round] for numbers in plan.experiences.values())
        of = 1 + max(numbers[-1] for numbers in plan.experiences.values())
        self._bar.set_description_str(
            f"experience {now + 1}/{of}, round {round + 1}/{trainer.max_epochs}{client}", refresh=False
        )

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
