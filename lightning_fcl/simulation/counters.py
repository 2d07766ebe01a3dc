"""The Trainer's counters of batches and steps: counters of the current client, and counters of all clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

from lightning_fcl.federation.ranks import Ranks
from lightning_fcl.local_training.gradient_accumulation import GradientAccumulation
from lightning_fcl.local_training.loop_counts import Count, batch_counts, step_counts
from lightning_fcl.simulation.client_group import ClientGroup
from lightning_fcl.simulation.multiprocess import RanksStrategy

Users = Mapping[str, Set[int]]
"""Ids of the callbacks, the module and the data module in which a user has defined a hook, by the hook's name."""

_SAME: AbstractContextManager[None] = nullcontext()


class ClientCounters:
    """The counters that the module's hooks and users' callbacks read while a client trains.

    The client's counters start at 0, as in a new Trainer that has only the data of this client. Lightning's loops and
    bookkeeping use the counters of all clients. This class switches the Trainer between the two sets of counters. By
    default the Trainer has the counters of all clients. Inside of ``with counters.client():`` the Trainer has the
    client's counters. Changes inside of this block also change the counters of all clients.

    The clients of one vectorized step share one set of counters. The counters count the batches of the client with the
    most batches.

    Attributes:
        shown: Whether the Trainer currently has the client's counters.
        batches: Number of the client's batches in the round, valid while ``shown``.
        users: The objects whose hooks read the client's counters in the current round.
        schedules: All learning rate schedulers. Hooks read these schedulers while a client trains.
    """

    def __init__(self) -> None:
        self.shown, self.batches = False, 0
        self.users: Users = {}
        self.schedules: list[LRSchedulerConfig] = []
        self._client_group: ClientGroup | None = None
        self._trainer: L.Trainer
        self._local_steps = GradientAccumulation()
        self._optimizers: Sequence[Optimizer] = ()
        self._every = 1  # batches per optimizer step
        self._starts: list[tuple[Count, Count]] = []  # each counter, and a copy of its values at the clients' start
        self._offsets: list[tuple[Count, Count]] = []  # each counter, and the numbers that were subtracted from it
        self._before: tuple[Any, ...] = ()
        self._client, self._totals = _Switch(self.show, self.hide), _Switch(self.hide, self.show)

    @property
    def batch_idx(self) -> int:
        """Number of the client's current batch in the round, from 0."""
        return self._client_group.step if self._client_group is not None else 0

    @property
    def steps(self) -> bool:
        """Whether the optimizer steps after the current batch. Otherwise the batch only accumulates gradients."""
        return (
            self._client_group is None
            or self._client_group.last_batch
            or (self._client_group.step + 1) % self._every == 0
        )

    def begin(
        self,
        trainer: L.Trainer,
        client_group: ClientGroup,
        local_steps: GradientAccumulation,
        optimizers: Sequence[Optimizer],
    ) -> None:
        """Start the counters of the clients that train next.

        Args:
            trainer: The Trainer.
            client_group: The clients.
            local_steps: The gradient accumulation of these clients.
            optimizers: The module's optimizers.
        """
        self.end()
        counts = [*batch_counts(trainer), *step_counts(trainer)]
        self._trainer, self._client_group, self._starts = (
            trainer,
            client_group,
            [(count, dict(count)) for count in counts],
        )
        self._local_steps, self._optimizers, self._every = local_steps, optimizers, local_steps.accumulate_grad_batches

    def end(self) -> None:
        """End the clients' counters, so that only the counters of all clients exist."""
        self.hide()
        self._client_group, self._starts = None, []

    def client(self) -> AbstractContextManager[None]:
        """If a client trains, temporarily show the client's counters, and 1 as the number of processes."""
        return _SAME if self.shown or self._client_group is None else self._client

    def totals(self) -> AbstractContextManager[None]:
        """Temporarily show the counters of all clients and the real number of processes."""
        return self._totals if self.shown else _SAME

    def end_batch(self) -> None:
        """After a client's last batch, save rates and schedules, so that later changes by hooks can be undone."""
        if self._client_group is not None and self._client_group.last_batch:
            self._local_steps.end_batches(self._optimizers)

    @contextmanager
    def after_step(self) -> Iterator[None]:
        """Temporarily show the client's counters, increased by the current optimizer step."""
        counts = step_counts(self._trainer)
        for count in counts:
            count["completed"] += 1
        try:
            with self.client():
                yield
        finally:
            for count in counts:
                count["completed"] -= 1

    @contextmanager
    def after_client(self, batches: int) -> Iterator[None]:
        """Temporarily show the counters of a client that has finished its training on ``batches`` batches."""
        self.show(batches, one_process=False)
        try:
            yield
        finally:
            self.hide()

    def count_steps(self, trainer: L.Trainer, number: int) -> None:
        """Add optimizer steps of other processes to the Trainer's counters, but not to the client's counters."""
        count = step_counts(trainer)[0]
        for counter in (count, *(start for own, start in self._starts if own is count)):
            counter["ready"] += number
            counter["completed"] += number

    def step_together(self, trainer: L.Trainer, ranks: Ranks, previous_steps: int) -> None:
        """Add the optimizer steps of the other processes in this round to the Trainer's counters.

        ``previous_steps`` is the Trainer's number of steps at the start of the round.
        """
        num_rank_steps = trainer.global_step - previous_steps
        self.count_steps(trainer, sum(ranks.all_gather_object(num_rank_steps)) - num_rank_steps)

    def show(self, batches: int | None = None, one_process: bool = True) -> None:
        """Show the client's counters in the Trainer.

        Args:
            batches: Number of batches of the client. None: the number of the client with the most batches.
            one_process: Whether the strategy reports 1 process in place of the real number of processes.
        """
        if self.shown or self._client_group is None:
            return
        trainer, fit, batches_per_step = self._trainer, self._trainer.fit_loop, self._every
        strategy: RanksStrategy = trainer.strategy  # type: ignore[assignment]
        max_batches = len(self._client_group)
        loop, number = fit.epoch_loop, max_batches if batches is None else batches
        self._offsets = self._starts if batches_per_step == 1 and batches is None else self._offsets_of(number)
        _subtract(self._offsets)
        progress = loop.batch_progress
        self._before = (
            fit.max_batches,
            loop.max_steps,
            progress.is_last_batch,
            trainer.accumulate_grad_batches,
            strategy.lr_scheduler_configs,
        )
        self.batches = number
        # Lightning computes `estimated_stepping_batches` from `max_steps`.
        fit.max_batches, loop.max_steps = (
            number,
            -(-number // batches_per_step),
        )
        progress.is_last_batch = self._client_group.step == max_batches - 1
        trainer.accumulate_grad_batches = batches_per_step
        strategy.lr_scheduler_configs = self.schedules
        strategy.shows_one_process = one_process
        self.shown = True

    def hide(self) -> None:
        """Show the counters of all clients in the Trainer."""
        if not self.shown:
            return
        trainer, fit = self._trainer, self._trainer.fit_loop
        strategy: RanksStrategy = trainer.strategy  # type: ignore[assignment]
        for count, offset in self._offsets:
            for name, number in offset.items():
                count[name] += number
        (
            fit.max_batches,
            fit.epoch_loop.max_steps,
            fit.epoch_loop.batch_progress.is_last_batch,
            trainer.accumulate_grad_batches,
            strategy.lr_scheduler_configs,
        ) = self._before
        strategy.shows_one_process = self.shown = False

    def _offsets_of(self, batches: int) -> list[tuple[Count, Count]]:
        """Return pairs of a counter and the numbers to subtract from this counter.

        After the subtraction, the counters show ``batches`` batches, and the optimizer steps of these batches.
        """
        assert self._client_group is not None
        client_offset = len(self._client_group) - batches  # batches that only clients with more batches have
        of_batches, of_steps = self._starts[:2], self._starts[2:]
        offsets = [
            (count, {name: number + client_offset for name, number in start.items()}) for count, start in of_batches
        ]
        for count, start in of_steps:
            batch_counts_by_name = {name: count[name] - number - client_offset for name, number in start.items()}
            offsets.append(
                (count, {name: count[name] - self._steps_after(n, batches) for name, n in batch_counts_by_name.items()})
            )
        return offsets

    def _steps_after(self, batch_count: int, batches: int) -> int:
        return -(-batches // self._every) if batch_count == batches else batch_count // self._every


class _Switch:
    """A reusable context manager that calls one function on entry and another function on exit."""

    def __init__(self, enter: Callable[[], None], leave: Callable[[], None]) -> None:
        self._enter, self._leave = enter, leave

    def __enter__(self) -> None:
        self._enter()

    def __exit__(self, *error: object) -> None:
        self._leave()


def _subtract(offsets: list[tuple[Count, Count]]) -> None:
    for count, offset in offsets:
        for name, number in offset.items():
            count[name] -= number


def snapshot_progress(trainer: L.Trainer) -> Callable[[], None]:
    """Save a Trainer's counters at the start of an epoch.

    Return a function that restores the counters to their values before the epoch.
    """
    epochs, loop = trainer.fit_loop.epoch_progress, trainer.fit_loop.epoch_loop
    optimizer = loop.automatic_optimization.optim_progress.optimizer
    counters = [epochs, loop.batch_progress, loop.scheduler_progress, optimizer.step, optimizer.zero_grad]
    counters.append(loop.manual_optimization.optim_step_progress)
    counts = [vars(part) for counter in counters for part in (counter.current, counter.total)]
    counts.append(vars(loop.batch_progress))
    count_copies, logger_step = [dict(count) for count in counts], loop._batches_that_stepped

    def restore() -> None:
        for count, previous_count in zip(counts, count_copies, strict=True):
            count.update(previous_count)
        loop._batches_that_stepped = logger_step
        epochs.current.ready -= 1
        epochs.total.ready -= 1

    return restore
