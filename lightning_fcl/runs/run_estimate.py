"""Estimate of the length of a fit after its first round: time left, communication, and disk space."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import lightning.pytorch as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_fcl.callbacks import ContinualMetrics
from lightning_fcl.callbacks.remaining_time import sample_rounds
from lightning_fcl.data.trainer_access import get_callbacks, require_stream
from lightning_fcl.errors import DiskFullError
from lightning_fcl.evaluation.results import RECORD
from lightning_fcl.evaluation.summary import format_value
from lightning_fcl.federation.aggregation import state_tensors
from lightning_fcl.federation.protocols import find_federation
from lightning_fcl.io.atomic import free_bytes
from lightning_fcl.simulation.communication import find_changing, find_uncounted
from lightning_fcl.simulation.federation import Federation

log = logging.getLogger(__name__)

_REPORT_BYTES = 1_000_000
"""Size of the scripts in ``report.html``."""

_SAMPLED_STATES = 100
"""Largest number of client states whose sizes are read."""

_RESULT_FACTOR = 4
"""Size of the files with results, relative to the record, which these files contain in several forms."""


class PrintEstimate(Callback):
    """A callback that prints an estimate after the first round of a fit, and warns if the disk is too small.

    A fit that saves checkpoints raises an error before training if the disk has no space for the first checkpoint.

    The estimate is printed if the fit shows its progress.

    Args:
        folder: Folder of the run.
        clock: Function that returns the time in seconds.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._first_round, self._start_time = 0, 0.0
        # Number of clients and number of samples that are expected in some rounds, starting with the fit's first round.
        self._num_rounds = 0
        self._clients: list[int] = []
        self._samples: list[int] = []
        # Bytes that all clients transmitted in the first round, until the estimate is printed.
        self._transmitted: int | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Raise an error if the free disk space is too small for a checkpoint.

        Raises:
            DiskFullError: If the state of the module has more bytes than are free.
        """
        self._first_round, self._transmitted = trainer.current_epoch, None
        if trainer.is_global_zero and any(isinstance(one, ModelCheckpoint) for one in get_callbacks(trainer)):
            nbytes, free = sum(value.nbytes for value in state_tensors(pl_module).values()), free_bytes(self._folder)
            if nbytes > free:
                raise DiskFullError(
                    f"Expected at least {format_value(nbytes, 'B')} of free disk space for a checkpoint in "
                    f"{self._folder}, but {format_value(free, 'B')} are free.",
                    hint="Free disk space, or use a folder on another disk with `--out`.",
                    argument="--out",
                    value=self._folder,
                )

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        progress_bar, federation = trainer.progress_bar_callback, find_federation(trainer)
        is_shown = progress_bar is not None and getattr(progress_bar, "is_enabled", True) and trainer.is_global_zero
        if not is_shown or not isinstance(federation, Federation):
            return
        if trainer.current_epoch == self._first_round:
            self._read_plan(trainer, federation)
            self._start_time = self._clock()
        # The last step of a round saves the checkpoint. Its size is known at the start of the second round.
        elif self._transmitted is not None:
            self._print(trainer, federation, self._transmitted)
            self._transmitted = None

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        federation = find_federation(trainer)
        if federation is not None and trainer.current_epoch == self._first_round:
            record = federation.server.record
            self._transmitted = sum(record.upload_bytes.values()) + sum(record.download_bytes.values())

    def _read_plan(self, trainer: L.Trainer, federation: Federation) -> None:
        """Store the numbers of expected clients and samples of some rounds, see `sample_rounds`.

        On a simulated clock, the clients of past rounds are not known.
        """
        plan = require_stream(trainer).plan
        rounds = range(self._first_round, min(trainer.max_epochs or 0, plan.num_rounds))
        self._num_rounds, self._clients, self._samples = len(rounds), [], []
        for round_idx in sample_rounds(rounds):
            clients = federation.participation.expected_clients(plan, round_idx)
            self._clients.append(len(clients))
            self._samples.append(sum(len(plan.train[round_idx][client]) for client in clients))

    def _print(self, trainer: L.Trainer, federation: Federation, transmitted: int) -> None:
        """Print the estimate, and warn if the disk is too small."""
        current_size, final_size = estimate_disk(
            trainer, federation, self._folder, self._first_round + self._num_rounds
        )
        num_first_samples, num_samples = self._samples[0], self._num_rounds * mean(self._samples)
        seconds = (self._clock() - self._start_time) * (num_samples - num_first_samples) / max(num_first_samples, 1)
        communication = ""
        if self._first_round == 0:  # The earlier rounds of a resumed fit are not in this process.
            nbytes = transmitted * self._num_rounds * mean(self._clients) / max(self._clients[0], 1)
            participation = federation.participation
            varies = participation.swarm is not None or participation.synchronization is not None
            varies |= bool(find_uncounted(federation) or find_changing(trainer))
            # For example, clients can send more tensors at the end of an experience.
            condition = " if all rounds are like the first" if varies else ""
            communication = f"{format_value(nbytes, 'B')} of communication{condition}, "
        totals = f"{communication}{format_value(final_size, 'B')} on disk"
        if num_first_samples:  # With Poisson sampling, the first round can have no client. The time is then not known.
            print(f"Estimate: about {_duration(seconds)} left, in total {totals}", file=sys.stderr, flush=True)
        growth, free = final_size - current_size, free_bytes(self._folder)
        if growth > free:
            log.warning(
                "The run needs about %s more disk space in %s, but only %s is free. Free disk space, or save fewer "
                "checkpoints.",
                format_value(growth, "B"),
                self._folder,
                format_value(free, "B"),
            )


def estimate_disk(trainer: L.Trainer, federation: Federation, folder: Path, rounds: int) -> tuple[int, int]:
    """Return the bytes of the files of a run now, and an estimate of the bytes at the end of the run.

    A checkpoint contains the states of all clients that have trained. Clients that have not trained yet are assumed to
    need as much space as the other clients.

    Args:
        trainer: The Trainer, after at least one round.
        federation: The federation.
        folder: Folder of the run.
        rounds: Number of rounds of the fit.
    """
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    store, num_clients = federation.server.client_store, len(require_stream(trainer).plan.clients)
    stored_clients = [*store]
    state_sizes = [store.nbytes(client) for client in stored_clients[:_SAMPLED_STATES]]
    state_size = sum(state_sizes) / max(len(state_sizes), 1)
    checkpoint_sizes = [size for path, size in sizes.items() if path.suffix == ".ckpt"]
    final_size = max(checkpoint_sizes, default=0) + round(state_size * (num_clients - len(stored_clients)))
    num_kept = 0
    for callback in get_callbacks(trainer):
        if isinstance(callback, ModelCheckpoint):
            num_best = rounds if callback.save_top_k == -1 else min(callback.save_top_k, rounds)
            num_kept += num_best + bool(callback.save_last)
    # A checkpoint is written before the checkpoint that it replaces is deleted.
    checkpoints = (
        max((num_kept + 1) * final_size, sum(checkpoint_sizes))
        if checkpoint_sizes and num_kept
        else sum(checkpoint_sizes)
    )
    states = 0 if store.is_in_memory else round(state_size * num_clients)
    scale = rounds / (trainer.current_epoch or 1)
    logs = sum(size for path, size in sizes.items() if path.name.startswith("events.out")) * scale
    metrics = [callback for callback in get_callbacks(trainer) if isinstance(callback, ContinualMetrics)]
    record_size = sum(len(json.dumps(one.record["rounds"])) for one in metrics)
    results = record_size * scale * _RESULT_FACTOR + _REPORT_BYTES
    # Files such as `config.yaml` do not grow.
    growing = [size for path, size in sizes.items() if path.name == RECORD or path.name.startswith("events.out")]
    constant = sum(sizes.values()) - sum(checkpoint_sizes) - sum(growing)
    return sum(sizes.values()), checkpoints + states + constant + round(logs + results)


def _duration(seconds: float) -> str:
    """Return a duration as text.

    Example:
        >>> _duration(0.2), _duration(42.4), _duration(90), _duration(7260)
        ('1 s', '42 s', '2 min', '2.0 h')
    """
    if seconds < 60:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
