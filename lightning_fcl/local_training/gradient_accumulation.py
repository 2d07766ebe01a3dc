"""Optimizer steps of a client: accumulation of gradients over batches, and schedulers that step within a round."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.protocols import find_federation
from lightning_fcl.federation.ranks import SINGLE_RANK, Ranks
from lightning_fcl.federation.server_optimizer import SCHEDULED, group_values, set_group_values

Groups = list[dict[str, Any]]


class GradientAccumulation:
    """Gradient accumulation and schedulers in the local training of one client, or of the clients of a vectorized step.

    The optimizer steps after every `accumulate_grad_batches` batches of a client in a round, and after the client's
    last batch. The gradient is the sum over these batches divided by `accumulate_grad_batches`, as in Lightning's
    ``accumulate_grad_batches`` within an epoch. Schedulers step with the optimizer. When the next clients start, the
    schedulers and the optimizer's groups are restored to their state at the start of the round.

    Clients of a vectorized step share each optimizer step. If a client has no more batches in a group of batches, its
    optimizer step still happens after the last batch of the group. The result is identical, because the client adds no
    gradient after its last batch.

    Args:
        accumulate_grad_batches: Number of batches per optimizer step.
        configs: Schedulers that step after optimizer steps.
        step: Function that steps a scheduler.
        is_manual: Schedulers of a module with manual optimization, which the module steps. None for other modules. If
            the clients step these schedulers only with their last batch (for example with `trainer.is_last_batch`),
            the schedulers keep their state between clients and rounds. Otherwise, they are restored for each client.
    """

    def __init__(
        self,
        accumulate_grad_batches: int = 1,
        configs: Sequence[LRSchedulerConfig] = (),
        step: Callable[[Any], None] = LRScheduler.step,
        is_manual: Sequence[LRSchedulerConfig] | None = None,
    ) -> None:
        self.accumulate_grad_batches = accumulate_grad_batches
        # Whether the current batch is the last batch of its group. Batches of a group share one optimizer step.
        self.is_complete = True
        # Number of clients, in the first rows of a stack, that have a batch in the current group.
        self.is_active = 1
        self.is_manual = is_manual
        # Whether learning rates change within a client's round.
        self.scheduled = bool(configs)
        self._configs = configs
        self._step = step
        self._batches = self._steps = 0
        self._sums: dict[nn.Parameter, Tensor] = {}
        # Optimizer groups and scheduler states at the start of the round.
        self._start: tuple[list[Groups], list[dict[str, Any]]] | None = None
        # Optimizer groups and scheduler states after the last batch, before the hooks of that batch run.
        self._before_hooks: tuple[list[Groups], list[dict[str, Any]]] | None = None
        # Whether clients have stepped schedulers manually before their last batch.
        self._steps_within = False

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """Prepare for the next clients: save optimizer groups and schedules (first call in a round) or restore them."""
        self._batches = self._steps = 0
        self._before_hooks = None
        self._sums.clear()
        if self._start is None:
            self._start = _copied([*map(group_values, optimizers)]), copy.deepcopy(self._schedules())
            self._steps_within = False
        else:
            groups, schedules = self._start
            self._go_back(optimizers, _copied(groups), copy.deepcopy(schedules))

    def begin_last_batch(self) -> None:
        """Record whether the current clients have stepped schedulers manually before their last batch."""
        if self.is_manual and self._start is not None:
            self._steps_within |= self._schedules() != self._start[1]

    def end_batches(self, optimizers: Sequence[Optimizer]) -> None:
        """Save optimizer groups and schedules after the last batch, so that changes by its hooks can be undone."""
        self._before_hooks = _copied([*map(group_values, optimizers)]), copy.deepcopy(self._schedules())

    def end_schedules(self, optimizer: Optimizer) -> None:
        """Restore schedules and scheduled values, such as learning rates, from the start of the round.

        Call this method before round schedules step. Round schedules are schedulers with ``interval="epoch"``.
        """
        if self._start is not None:
            groups, schedules = _copied(self._start[0]), copy.deepcopy(self._start[1])
            self._go_back([optimizer], [_with_rates(group_values(optimizer), groups[0])], schedules)

    def end_round(self, optimizers: Sequence[Optimizer], whole: bool = True, ranks: Ranks = SINGLE_RANK) -> None:
        """Restore the optimizers after a round. If the round is complete, round schedules keep their state.

        If clients have stepped schedulers manually before their last batch, all schedulers are restored too.

        Args:
            optimizers: The module's optimizers.
            whole: Whether the round is complete.
            ranks: Processes that train clients of the round.
        """
        start, self._start = self._start, None
        by_round = whole and not (
            self.is_manual and True in ranks.all_gather_object(start is not None and self._steps_within)
        )
        if start is None:
            return
        groups, schedules = start
        if by_round:
            rates, snapshot = [*map(group_values, optimizers)], self._before_hooks
            schedules = self._schedules()
            # If the schedules differ, a hook has stepped a round schedule, and the rates of this schedule are kept.
            if snapshot is not None and snapshot[1] == schedules:
                rates = snapshot[0]
            groups = [_with_rates(*pair) for pair in zip(groups, rates, strict=True)]
        self._go_back(optimizers, groups, schedules)

    def _schedules(self) -> list[dict[str, Any]]:
        return [config.scheduler.state_dict() for config in (*self._configs, *(self.is_manual or ()))]

    def _go_back(
        self, optimizers: Sequence[Optimizer], groups: Sequence[Groups], schedules: Sequence[dict[str, Any]]
    ) -> None:
        for optimizer, optimizer_groups in zip(optimizers, groups, strict=True):
            # Delete the groups that clients have added.
            del optimizer.param_groups[len(optimizer_groups) :]
            set_group_values(optimizer, optimizer_groups)
        for config, state in zip((*self._configs, *(self.is_manual or ())), schedules, strict=True):
            config.scheduler.load_state_dict(state)

    @property
    def is_first_batch(self) -> bool:
        """Whether the next batch is the first batch of its group. Lightning zeroes the gradients before this batch."""
        return self._batches % self.accumulate_grad_batches == 0

    def accumulate(
        self, optimizer: Optimizer, closure: Callable[[], object], active: int, last: bool
    ) -> Callable[[], object]:
        """Return a closure for the next batch, which accumulates gradients and averages them at the end of a group.

        Args:
            optimizer: The optimizer in use.
            closure: Function that computes loss and gradients of the batch.
            active: Number of clients, in the first rows of a stack, that have this batch.
            last: Whether the batch is the last batch of the current clients.
        """
        if self.is_first_batch:
            self.is_active = active
        else:
            optimizer.zero_grad()
        self._batches += 1
        self.is_complete = last or self._batches % self.accumulate_grad_batches == 0
        return lambda: self._gathered(optimizer, closure, active)

    def _gathered(self, optimizer: Optimizer, closure: Callable[[], object], active: int) -> object:
        result = closure()
        params: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
        for p in params:
            if p.grad is None:
                continue
            if hasattr(p, "grad_sample"):
                raise InvalidValueError(
                    "Expected `accumulate_grad_batches=1` for gradients of single samples (`grad_sample`), because the "
                    "optimizer would use `grad_sample` of the last batch only, but got "
                    f"{self.accumulate_grad_batches}.",
                    hint="Remove `accumulate_grad_batches`, and use a larger `batch_size`.",
                    argument="accumulate_grad_batches",
                    value=self.accumulate_grad_batches,
                )
            gradient = p.grad.detach().clone()
            # Clients that are not in the first `active` rows have no more batches.
            if active < self.is_active:
                gradient[active:] = 0
            self._sums[p] = self._sums[p].add_(gradient) if p in self._sums else gradient
        if self.is_complete:
            for p, total in self._sums.items():
                p.grad = total.div_(self.accumulate_grad_batches)
            self._sums.clear()
        return result

    @torch.no_grad()
    def record_step(self, optimizer: Optimizer, in_use: Optimizer) -> None:
        """Step the schedulers after an optimizer step.

        Args:
            optimizer: The module's optimizer, which the schedulers refer to.
            in_use: The optimizer that has stepped: the module's optimizer, or a stacked optimizer.
        """
        self._steps += 1
        if not self._configs:
            return
        with warnings.catch_warnings():
            # In vectorized training, only the stacked optimizer steps. torch would warn about the module's optimizer.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            for config in self._configs:
                if self._steps % config.frequency == 0:
                    self._step(config.scheduler)
        if in_use is not optimizer:
            set_group_values(in_use, group_values(optimizer))


def _copied(groups: Sequence[Groups]) -> list[Groups]:
    """Return copies of the groups of some optimizers. Numbers, which are most of the values, need no deep copy."""
    return [
        [{n: v if isinstance(v, float | int | None) else copy.deepcopy(v) for n, v in group.items()} for group in own]
        for own in groups
    ]


def _with_rates(groups: Sequence[dict[str, Any]], rate_groups: Sequence[dict[str, Any]]) -> Groups:
    """Return ``groups`` with the scheduled values (such as the learning rate) of ``rate_groups``."""
    rates = [{name: value for name, value in other.items() if name in SCHEDULED} for other in rate_groups]
    return [group | own for group, own in zip(groups, rates, strict=False)]


def count_client_batches(trainer: L.Trainer) -> int | float:
    """Return the number of batches of the current client over its local epochs. `batch_idx` stays below this number.

    In the module's hooks and in users' callbacks, this number equals `trainer.num_training_batches`. In a vectorized
    step, the function returns the maximum over the clients of the step. In a plain Trainer, it returns
    `trainer.num_training_batches`.

    Args:
        trainer: The Trainer.

    Raises:
        ValueError: If no client trains, for example between rounds.

    Example:
        >>> class Scaled(L.Callback):
        ...     def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        ...         pl_module.kl_weight = 1 / count_client_batches(trainer)
    """
    federation = find_federation(trainer)
    if federation is None:
        return trainer.num_training_batches
    if not federation.batches:
        raise InvalidValueError(
            "Expected a client to train when `count_client_batches` is called, but no client trains.",
            hint="Call the function in a training step, or in the hooks of a batch.",
            argument="count_client_batches",
        )
    return federation.batches
