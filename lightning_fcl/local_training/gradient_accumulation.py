"""From a client's gradients to its optimizer's steps: batches counted, accumulated, and schedules of single steps."""

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
    """The optimizer's steps within the local training of a client, or of several side by side.

    A step is taken after every so many batches of a client in a round, and after its last one, with the sum of their
    gradients divided by that number, as Lightning's ``accumulate_grad_batches`` has it within an epoch. Schedulers step
    with it, and are back at their start, as is all that is in the optimizer's groups, when the next clients begin.
    Clients side by side step together: who ends within a group of batches steps with that group's last one, which is
    the same step, since nothing is added for it in between.

    Args:
        accumulate_grad_batches: Batches per step.
        configs: The schedulers by step.
        step: Steps a scheduler.
        is_manual: The schedulers of a module that optimizes by hand, and steps them itself; None for all other modules.
            If clients step them with their last batch only, such as by `trainer.is_last_batch`, they are schedules by
            round, which stay. Otherwise they start anew with each client.
    """

    def __init__(
        self,
        accumulate_grad_batches: int = 1,
        configs: Sequence[LRSchedulerConfig] = (),
        step: Callable[[Any], None] = LRScheduler.step,
        is_manual: Sequence[LRSchedulerConfig] | None = None,
    ) -> None:
        self.accumulate_grad_batches = accumulate_grad_batches
        self.is_complete = True  # whether the batch at hand is the last of its group
        self.is_active = 1  # clients, from the front, that have a batch in the group at hand
        self.is_manual = is_manual
        self.scheduled = bool(configs)  # whether rates change within a client's round
        self._configs = configs
        self._step = step
        self._batches = self._steps = 0
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._start: tuple[list[Groups], list[dict[str, Any]]] | None = None  # of the round's clients
        self._before_hooks: tuple[list[Groups], list[dict[str, Any]]] | None = None  # of the last batch
        self._steps_within = False  # whether clients have stepped schedulers by hand before their last batch

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """Clients begin: note where schedules and optimizers stand when a round's first ones do, and go back to it."""
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
        """Note whether these clients have stepped schedulers by hand before their last batch."""
        if self.is_manual and self._start is not None:
            self._steps_within |= self._schedules() != self._start[1]

    def end_batches(self, optimizers: Sequence[Optimizer]) -> None:
        """Note the rates after the last batch: its hooks may change them, which no other client must see."""
        self._before_hooks = _copied([*map(group_values, optimizers)]), copy.deepcopy(self._schedules())

    def end_schedules(self, optimizer: Optimizer) -> None:
        """These clients' last step is done: back to the start of the schedules, before those by round step."""
        if self._start is not None:
            groups, schedules = _copied(self._start[0]), copy.deepcopy(self._start[1])
            self._go_back([optimizer], [_with_rates(group_values(optimizer), groups[0])], schedules)

    def end_round(self, optimizers: Sequence[Optimizer], whole: bool = True, ranks: Ranks = SINGLE_RANK) -> None:
        """A round is done, or was cut short: of what is in the optimizers, nothing but schedules by round stays."""
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
            if snapshot is not None and snapshot[1] == schedules:  # otherwise a hook has stepped a schedule by round
                rates = snapshot[0]
            groups = [_with_rates(*pair) for pair in zip(groups, rates, strict=True)]
        self._go_back(optimizers, groups, schedules)

    def _schedules(self) -> list[dict[str, Any]]:
        return [config.scheduler.state_dict() for config in (*self._configs, *(self.is_manual or ()))]

    def _go_back(
        self, optimizers: Sequence[Optimizer], groups: Sequence[Groups], schedules: Sequence[dict[str, Any]]
    ) -> None:
        for optimizer, optimizer_groups in zip(optimizers, groups, strict=True):
            del optimizer.param_groups[len(optimizer_groups) :]  # what clients have added
            set_group_values(optimizer, optimizer_groups)
        for config, state in zip((*self._configs, *(self.is_manual or ())), schedules, strict=True):
            config.scheduler.load_state_dict(state)

    @property
    def is_first_batch(self) -> bool:
        """Whether the batch to come is the first of its group, before which Lightning zeroes the gradients."""
        return self._batches % self.accumulate_grad_batches == 0

    def accumulate(
        self, optimizer: Optimizer, closure: Callable[[], object], active: int, last: bool
    ) -> Callable[[], object]:
        """Return a closure of the next batch that accumulates gradients. After the last batch of a step they are means.

        Args:
            optimizer: The optimizer in use.
            closure: Computes loss and gradients of the batch.
            active: Clients, from the front, that have this batch; the first of a stack's rows.
            last: Whether it is the last batch of these clients.
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
                    "Expected `accumulate_grad_batches=1` for gradients of single samples (`grad_sample`), of which "
                    f"the optimizer would see the last batch's alone, but got {self.accumulate_grad_batches}.",
                    hint="Leave `accumulate_grad_batches` out, and use a larger `batch_size`.",
                    argument="accumulate_grad_batches",
                    value=self.accumulate_grad_batches,
                )
            gradient = p.grad.detach().clone()
            if active < self.is_active:  # the others have no such batch
                gradient[active:] = 0
            self._sums[p] = self._sums[p].add_(gradient) if p in self._sums else gradient
        if self.is_complete:
            for p, total in self._sums.items():
                p.grad = total.div_(self.accumulate_grad_batches)
            self._sums.clear()
        return result

    @torch.no_grad()
    def record_step(self, optimizer: Optimizer, in_use: Optimizer) -> None:
        """The optimizer has stepped: so do the schedulers, which are the module's optimizer's.

        Args:
            optimizer: The module's optimizer.
            in_use: The one that has stepped, of the same groups: that, or that of clients side by side.
        """
        self._steps += 1
        if not self._configs:
            return
        with warnings.catch_warnings():
            # Clients side by side step another optimizer.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            for config in self._configs:
                if self._steps % config.frequency == 0:
                    self._step(config.scheduler)
        if in_use is not optimizer:
            set_group_values(in_use, group_values(optimizer))


def _copied(groups: Sequence[Groups]) -> list[Groups]:
    """Copies of optimizers' groups, most of whose values are numbers."""
    return [
        [{n: v if isinstance(v, float | int | None) else copy.deepcopy(v) for n, v in group.items()} for group in own]
        for own in groups
    ]


def _with_rates(groups: Sequence[dict[str, Any]], rate_groups: Sequence[dict[str, Any]]) -> Groups:
    """Groups with what schedules set in others."""
    rates = [{name: value for name, value in other.items() if name in SCHEDULED} for other in rate_groups]
    return [group | own for group, own in zip(groups, rates, strict=False)]


def count_client_batches(trainer: L.Trainer) -> int | float:
    """The batches, over its local epochs, of the client that trains now: what its `batch_idx` counts up to.

    In the module's hooks and in users' callbacks it equals `trainer.num_training_batches`. For clients of one
    vectorized step it is the largest of their numbers. In a plain Trainer it is `trainer.num_training_batches`.

    Args:
        trainer: The Trainer.

    Raises:
        ValueError: If no client trains, as between rounds.

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
            "Expected a client that trains for `count_client_batches` but none does.",
            hint="Ask within a step, or in a batch's hooks.",
            argument="count_client_batches",
        )
    return federation.batches
