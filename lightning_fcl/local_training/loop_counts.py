"""Lightning's counters of batches and steps in a trial, and a context that suppresses logs and printed output."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.utilities import CombinedLoader

Count = dict[str, int]
"""Writable attributes of one of Lightning's counters, such as ``ready`` and ``completed``."""

_LOGS = ("log", "log_dict", "update_train_loss")


def batch_counts(trainer: L.Trainer) -> list[Count]:
    """Return the counters of batches: over all epochs, and in the current epoch."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return [vars(progress.total), vars(progress.current)]


def step_counts(trainer: L.Trainer) -> list[Count]:
    """Return the counters of optimizer steps, over all epochs and in the current epoch.

    Manual and automatic optimization have different counters.
    """
    loop = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization:
        progress = loop.automatic_optimization.optim_progress.optimizer.step
    else:
        progress = loop.manual_optimization.optim_step_progress
    return [vars(progress.total), vars(progress.current)]


@contextmanager
def counting(trainer: L.Trainer, step: int, batches: int) -> Iterator[None]:
    """Temporarily set Lightning's counters to a step in a client's round.

    Args:
        trainer: The Trainer.
        step: Number of the step, from 0.
        batches: Number of the client's batches in the round.
    """
    loop, counts = trainer.fit_loop.epoch_loop, [*batch_counts(trainer), *step_counts(trainer)]
    previous_counts, limits = [dict(count) for count in counts], (trainer.fit_loop.max_batches, loop.max_steps)
    was_last, loader = loop.batch_progress.is_last_batch, trainer.fit_loop._combined_loader
    for count in counts:
        count.update({name: step + (name in ("ready", "started")) for name in count})
    loop.batch_progress.is_last_batch = step == batches - 1
    trainer.fit_loop.max_batches = loop.max_steps = batches
    # This loader becomes `trainer.train_dataloader`, whose length user code may read.
    trainer.fit_loop._combined_loader = CombinedLoader(range(batches))
    try:
        yield
    finally:
        for count, previous_count in zip(counts, previous_counts, strict=True):
            count.update(previous_count)
        loop.batch_progress.is_last_batch = was_last
        trainer.fit_loop.max_batches, loop.max_steps = limits
        trainer.fit_loop._combined_loader = loader


@contextmanager
def silent(objects: Sequence[object]) -> Iterator[None]:
    """Temporarily suppress the logs of some objects, and all printed output, log messages and warnings."""
    attributes, level = [vars(one) for one in objects], logging.root.manager.disable
    names = [[name for name in _LOGS if hasattr(one, name)] for one in objects]
    previous_functions = [{name: own[name] for name in _LOGS if name in own} for own in attributes]
    for object_attributes, own_names in zip(attributes, names, strict=True):
        object_attributes.update(dict.fromkeys(own_names, _ignore))
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        for object_attributes, own_names, functions in zip(attributes, names, previous_functions, strict=True):
            for name in own_names:
                del object_attributes[name]
            object_attributes.update(functions)


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Do nothing. Replaces `log` and `log_dict`."""
