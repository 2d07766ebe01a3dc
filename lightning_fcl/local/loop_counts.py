"""Lightning's counters of batches and steps within an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as L
from lightning.pytorch.utilities import CombinedLoader

Count = dict[str, int]
"""The attributes of one of Lightning's counters, such as ``ready`` and ``completed``, which can be written."""


def batch_counts(trainer: L.Trainer) -> list[Count]:
    """Return the counters of batches: of all epochs, and of the current one."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return [vars(progress.total), vars(progress.current)]


def step_counts(trainer: L.Trainer) -> list[Count]:
    """Return the counters of optimizer steps, as `batch_counts` does; they differ under manual optimization."""
    loop = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization:
        progress = loop.automatic_optimization.optim_progress.optimizer.step
    else:
        progress = loop.manual_optimization.optim_step_progress
    return [vars(progress.total), vars(progress.current)]


@contextmanager
def counting(trainer: L.Trainer, step: int, batches: int) -> Iterator[None]:
    """Temporarily set the counters to those of a step in a client's round, under automatic optimization.

    Args:
        trainer: The Trainer.
        step: Number of the step, from 0.
        batches: Number of the client's batches in the round.
    """
    loop, counts = trainer.fit_loop.epoch_loop, [*batch_counts(trainer), *step_counts(trainer)]
    before, limits = [dict(count) for count in counts], (trainer.fit_loop.max_batches, loop.max_steps)
    was_last, loader = loop.batch_progress.is_last_batch, trainer.fit_loop._combined_loader
    for count in counts:
        count.update({name: step + (name in ("ready", "started")) for name in count})
    loop.batch_progress.is_last_batch = step == batches - 1
    trainer.fit_loop.max_batches = loop.max_steps = batches
    trainer.fit_loop._combined_loader = CombinedLoader(range(batches))  # `trainer.train_dataloader`, which has a length
    try:
        yield
    finally:
        for count, then in zip(counts, before, strict=True):
            count.update(then)
        loop.batch_progress.is_last_batch = was_last
        trainer.fit_loop.max_batches, loop.max_steps = limits
        trainer.fit_loop._combined_loader = loader
