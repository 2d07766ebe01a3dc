"""Optimizer steps and schedules within a client's round, in place of Lightning's, which go across clients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning.pytorch as L
from torch.optim import Optimizer

from lightning_fcl.local.local_steps import LocalSteps
from lightning_fcl.simulation.limits import require_begun

if TYPE_CHECKING:
    from lightning_fcl.simulation.strategy import FederatedStrategy

Closure = Callable[[], Any]
"""Computes a loss and its gradients."""


def take_over_steps(strategy: FederatedStrategy, trainer: L.Trainer) -> None:
    """Accumulate gradients, and step schedulers by step, within a client. Lightning would do so across clients."""
    strategy.schedules = strategy.lr_scheduler_configs
    by_step = [config for config in strategy.schedules if config.interval == "step"]
    strategy.lr_scheduler_configs = [config for config in strategy.schedules if config.interval != "step"]
    module = strategy.federation.module

    def step(scheduler: Any) -> None:
        with strategy.counters.after_step():
            module.lr_scheduler_step(scheduler, None)

    strategy.local_steps = LocalSteps(
        trainer.accumulate_grad_batches,
        by_step,
        step,
        None if module.automatic_optimization else strategy.lr_scheduler_configs,
    )
    trainer.accumulate_grad_batches = 1
    # A loader is a round, and rounds may be short and of different lengths: no reason to warn.
    trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]
    for known in ("The number of training batches", "You're resuming from a checkpoint that ended before"):
        warnings.filterwarnings("ignore", known)


def take_step(
    strategy: FederatedStrategy, optimizer: Optimizer, closure: Closure, step: Callable[[Optimizer, Closure], Any]
) -> Any:
    """Step after the current batch, or accumulate its gradient.

    Args:
        strategy: The strategy.
        optimizer: The optimizer in use.
        closure: Computes the loss and the gradients of the batch.
        step: Lightning's own optimizer step.
    """
    federation, local = strategy.federation, strategy.local_steps
    cohort = require_begun(federation.round.cohort, "a batch")
    federation.epoch_states.watch_metrics()
    gather = local.next(optimizer, closure, cohort.active, cohort.last_batch)
    if not local.complete:
        return gather()
    result = federation.trainer.optimizer_step(lambda: step(optimizer, gather), local.active)
    if local.by_hand is not None:
        return result
    (own,) = federation.optimizers  # of a module that leaves its steps to Lightning
    local.stepped(own, optimizer)
    if cohort.last_batch and not federation.round.cohorts:  # schedules by round step before the batch has ended
        local.end_schedules(own)
    return result
