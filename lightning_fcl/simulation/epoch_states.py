"""State that users read at the end of an epoch, merged over the clients of all processes."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_fcl.data.trainer_access import get_callbacks
from lightning_fcl.federation.ranks import Ranks
from lightning_fcl.local_training.module_snapshot import ModuleSnapshot
from lightning_fcl.local_training.search import INTERNAL, NO_STATE, NOT_OF_CLIENTS
from lightning_fcl.simulation.metric_states import RoundMetrics, is_mergeable
from lightning_fcl.simulation.round_attributes import MODULE, Name, RoundAttributes
from lightning_fcl.snapshot_values import is_of
from lightning_fcl.validation import format_names

log = logging.getLogger(__name__)

_OTHERS = ("torch.", "torchmetrics.", "lightning.", "lightning_fcl.")  # packages whose classes have no user attributes


class EpochStates:
    """Metrics, lists and counters of the module and of callbacks. All ranks merge their values at the end of a round.

    Each rank trains different clients. During a round this class records the contribution of each group of clients
    that train at the same time. At the end of the round, every rank adds the contributions of all ranks, in the order
    in which a single process would train the groups. All ranks then have equal values, and nothing is counted twice.

    With one rank the class does nothing.

    Args:
        ranks: The ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._named: set[str] = set()  # names that a warning has already listed
        self._ignored: set[Name] = set()  # attributes that cannot be merged
        self._mergeable: dict[str, bool] = {}  # whether each metric, by path, can be merged
        self._is_first = True  # whether no round has ended yet
        self._last: int | None = None  # number of the group that trained last
        self._metrics: RoundMetrics | None = None
        self._attributes: RoundAttributes | None = None

    def begin(self, module: L.LightningModule, loose: ModuleSnapshot | None) -> None:
        """Start recording a round, after the hooks at the start of the epoch.

        Args:
            module: The module.
            loose: The module state that is restored for each client. None: no such state.
        """
        if self._ranks.num_ranks == 1:
            return
        metrics, attributes = _find(module)
        for name, metric in metrics.items():
            if name not in self._mergeable:
                self._mergeable[name] = is_mergeable(metric)
        self._metrics = RoundMetrics({name: metric for name, metric in metrics.items() if self._mergeable[name]})
        self._attributes = RoundAttributes(attributes, self._ignored, self._is_first, loose, module.device)
        self._last = None

    def enter(self, group: int) -> None:
        """Start or continue the local training of the group with number ``group`` in the round."""
        if self._metrics is not None:
            self.leave()
            self._last = group
            self._metrics.enter(group)
        if self._attributes is not None:
            self._attributes.enter(group)

    def leave(self) -> None:
        """End or interrupt the local training of the current group. The hooks that follow run on every rank."""
        if self._metrics is not None:
            self._metrics.leave()
        if self._attributes is not None:
            self._attributes.leave()

    def resume(self) -> None:
        """Continue with the last group after hooks that ran on every rank. The group's last batch has not ended yet."""
        if self._last is not None:
            self.enter(self._last)

    def watch_metrics(self) -> None:
        """Record which metrics were reset since the last call.

        Call this method before metrics are updated, because an update may hide a reset.
        """
        if self._metrics is not None:
            self._metrics.watch()

    def watch(self, step: int) -> None:
        """Record which metrics were reset before batch number ``step`` of the group.

        At step 1, also record which attributes cannot be merged because the group has replaced their values.
        """
        self.watch_metrics()
        if self._attributes is not None and step == 1:
            self._attributes.watch()

    def undo(self) -> None:
        """Discard the contributions of a round that was interrupted."""
        self.leave()
        self._metrics = self._attributes = self._last = None

    def merge_ranks(self) -> None:
        """Merge the states of all ranks, once per round. All ranks must call this method at the same time."""
        metrics, attributes = self._metrics, self._attributes
        if metrics is None or attributes is None:
            return
        self.undo()
        shared = self._ranks.all_gather_object((metrics.contributions(), attributes.contributions(), self._ignored))
        self._ignored |= set[Name]().union(*(theirs[2] for theirs in shared))
        metrics.merge(dict(sorted(group for theirs in shared for group in theirs[0].items())))
        attributes.merge(dict(sorted(group for theirs in shared for group in theirs[1].items())))
        self._warn()
        self._is_first = False

    def _warn(self) -> None:
        unmerged_names = {f"{path}.{name}" for path, name in self._ignored}
        unmerged_names |= {name for name, mergeable in self._mergeable.items() if not mergeable}
        new = sorted(unmerged_names - self._named)
        self._named |= unmerged_names
        if new and self._ranks.rank == 0:
            log.warning(
                "Did not merge %s over %d processes: at the end of an epoch each process has only the values of the "
                "clients that it trained. Use a torchmetrics metric whose states have a `dist_reduce_fx`, a list to "
                "which training appends, or an integer that only increases. You can also gather values with "
                "`trainer.strategy.ranks.all_gather_object`.",
                format_names(f"`{name}`" for name in new),
                self._ranks.num_ranks,
            )


def _find(module: L.LightningModule) -> tuple[dict[str, Metric], dict[str, dict[str, Any]]]:
    """Return the metrics of a module and of the callbacks, and the attributes of users' objects, both by path.

    Metrics with persistent states are left out. Users' objects are submodules, callbacks and other objects that are not
    from PyTorch, Lightning, torchmetrics or lightning_fcl.
    """
    metrics: dict[str, Metric] = {}
    attributes: dict[str, dict[str, Any]] = {}
    callbacks = get_callbacks(module.trainer)
    kinds = [type(callback).__name__ for callback in callbacks]
    repeats = [kinds[:place].count(kind) for place, kind in enumerate(kinds)]
    names = [f"{kind}[{repeat}]" if repeat else kind for kind, repeat in zip(kinds, repeats, strict=True)]
    todo: list[tuple[str, object]] = [*zip(names, callbacks, strict=True), (MODULE, module)]
    seen_ids: set[int] = set()
    while todo:
        path, value = todo.pop()
        if isinstance(value, (*NO_STATE, Tensor)) or id(value) in seen_ids:
            continue
        seen_ids.add(id(value))
        if isinstance(value, dict):
            todo += [(f"{path}[{key!r}]", part) for key, part in value.items()]
        elif isinstance(value, list | tuple | set | frozenset | deque):
            todo += [(f"{path}[{place}]", part) for place, part in enumerate(value)]
        elif isinstance(value, nn.Module):
            todo += [(f"{path}.{name}", part) for name, part in value.named_children()]
            if isinstance(value, Metric):
                if not set(value.metric_state) & set(value.state_dict()):  # Persistent states are server state.
                    metrics[path] = value
            elif not type(value).__module__.startswith(_OTHERS):
                user_attributes = {name: part for name, part in vars(value).items() if name not in INTERNAL}
                attributes[path] = vars(value)
                todo += [(f"{path}.{name}", part) for name, part in user_attributes.items()]
        elif isinstance(value, Callback) or (hasattr(value, "__dict__") and not is_of(value, NOT_OF_CLIENTS)):
            if not isinstance(value, Callback) or _is_users(value):
                attributes[path] = vars(value)
            todo += [(f"{path}.{name}", part) for name, part in vars(value).items()]
    return metrics, attributes


def _is_users(callback: Callback) -> bool:
    """Return whether a user wrote a callback.

    This is the case if neither its class nor a base class, except `Callback`, is from Lightning or lightning_fcl.
    """
    packages = ("lightning.", "lightning_fcl.")
    return not any(kind.__module__.startswith(packages) for kind in type(callback).__mro__ if kind is not Callback)
