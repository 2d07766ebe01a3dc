"""How far a fit has come: Lightning's counters, put back where a round is cut short, and those of other processes."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as L

from lightning_fcl.federation.ranks import Ranks


def note_progress(trainer: L.Trainer) -> Callable[[], None]:
    """Note a Trainer's counters when an epoch starts; what comes back lets them be as before that epoch."""
    epochs, loop = trainer.fit_loop.epoch_progress, trainer.fit_loop.epoch_loop
    optimizer = loop.automatic_optimization.optim_progress.optimizer
    counters = [epochs, loop.batch_progress, loop.scheduler_progress, optimizer.step, optimizer.zero_grad]
    counters.append(loop.manual_optimization.optim_step_progress)
    counts = [vars(part) for counter in counters for part in (counter.current, counter.total)]
    counts.append(vars(loop.batch_progress))
    before = [dict(count) for count in counts]

    def put_back() -> None:
        for count, then in zip(counts, before, strict=True):
            count.update(then)
        epochs.current.ready -= 1
        epochs.total.ready -= 1

    return put_back


def step_together(trainer: L.Trainer, ranks: Ranks, before: int) -> None:
    """Count the steps of all ranks since ``before`` as this one's."""
    mine = trainer.global_step - before
    count_steps(trainer, sum(ranks.share(mine)) - mine)


def count_steps(trainer: L.Trainer, number: int) -> None:
    """Count the steps of others as the Trainer's."""
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
    progress.total.completed += number
    progress.total.ready += number
