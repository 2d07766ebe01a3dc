"""Snapshots of attributes of a module and its optimizers, which are restored for each client of a round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_fcl.federation.aggregation import state_tensors
from lightning_fcl.local_training.outside import Carried, ClientMetric
from lightning_fcl.local_training.search import Search
from lightning_fcl.snapshot_values import Change, ContainerValue

# Attributes of an optimizer that other code resets for each client.
_BY_CLIENT = frozenset({"state", "param_groups", "defaults"})


class ModuleSnapshot:
    """A snapshot of the attributes of a module and its optimizers, and of the module's non-persistent buffers.

    The snapshot covers containers, tensors, arrays, random generators, networks, and objects of user classes. It does
    not cover metrics of torchmetrics, datasets, or objects of this library and of Lightning.

    A list to which clients append items is a *record*. During training, a client's list does not contain the items of
    other clients. After each round, the list contains the items of all clients and of earlier rounds.

    Args:
        module: The module. The module's `state_tensors` are not part of the snapshot.
        optimizers: The module's optimizers. Optimizer states and groups are not part of the snapshot.
        extra_objects: Other objects that are not part of the snapshot, such as schedulers.
        previous_snapshot: The snapshot of the previous round, which contains the records of earlier rounds.
        carried: State outside the module that is restored for each client too.

    Example:
        >>> module = nn.Linear(1, 1)
        >>> module.seen = [1]
        >>> loose = ModuleSnapshot(module)
        >>> module.seen.append(2); module.last = 3; loose.changes()
        ['last', 'seen']
        >>> loose.restore(); module.seen, hasattr(module, "last")
        ([1], False)
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Iterable[Optimizer] = (),
        extra_objects: Iterable[object] = (),
        previous_snapshot: ModuleSnapshot | None = None,
        carried: Carried | None = None,
    ) -> None:
        records = previous_snapshot._gathering() if previous_snapshot is not None else {}
        ignored_ids, optimizers = {*map(id, extra_objects)}, list(optimizers)
        for optimizer in optimizers:
            ignored_ids |= {id(value) for value in (optimizer, optimizer.param_groups, *optimizer.param_groups)}
        search = Search(ignored_ids, {id(value) for value in state_tensors(module).values()}, records)
        for optimizer in optimizers:
            search.look_below(f"{type(optimizer).__name__}.", vars(optimizer), _BY_CLIENT)
        search.look([("", module)])
        self.search = search
        # Names of attributes that cannot be inspected.
        self.unknown_attributes = search.unknown
        self._parts, self._modes, self._learn, self._leaves = search.parts, search.modes, search.learn, search.leaves
        self._metrics: list[ClientMetric] = []
        if carried is not None:
            parts, self._metrics = carried.search(records)
            self._parts += parts
        self._left: list[Change] = []
        self._settled = self._shown = False

    def changes(self) -> list[str]:
        """Return the names of the attributes that have changed since the snapshot."""
        modes = [f"{name}training" for name, module, training in self._modes if module.training is not training]
        learn = [f"{name}.requires_grad" for name, value, learns in self._learn if value.requires_grad is not learns]
        return sorted({*modes, *learn, *(change.name for change in self._changes())})

    def restore(self) -> None:
        """Restore the snapshot for the next client, and delete all gradients."""
        _undo(self._changes())
        for metric in self._metrics:
            metric.begin()
        self._put_back_flags()
        self._clear_gradients()

    def finish_clients(self) -> None:
        """Restore the snapshot after the last client, save the last client's changes, and fill the records.

        See `ModuleSnapshot` for records.
        """
        self._leave()
        self._put_back_flags()

    def commit(self) -> None:
        """Add changes by hooks at the end of the round to the snapshot. Then apply the last client's changes again."""
        for snapshot_value in self._parts:
            snapshot_value.commit()
        self._learn = [(name, parameter, parameter.requires_grad) for name, parameter, _ in self._learn]
        self.expose_last_client()

    def finalize(self) -> None:
        """Restore the snapshot after the last hook of the last client. A second call in a round does nothing.

        The last client's changes are saved.
        """
        if not self._settled:
            self._leave()
            self._clear_gradients()
            self._settled, self._shown = True, False

    def expose_last_client(self) -> None:
        """Apply the last client's saved changes, so that hooks can read these attributes as in a plain Trainer."""
        for change in self._left:
            change.redo()
        self._shown = True

    def hide_last_client(self) -> None:
        """Undo `expose_last_client`. Attributes that hooks have changed since then keep the values of the hooks."""
        if self._shown:
            _undo([change for change in self._left if change.is_shown()])
            self._shown = False

    def gather(self, value: list[Any], items: list[Any]) -> bool:
        """Write ``items`` to a list instead of the items that clients of this round have appended to the list.

        Returns:
            Whether the list is part of the snapshot. If False, this call does not change the list.
        """
        records = (part for part in self._parts if isinstance(part, ContainerValue) and part.value is value)
        record = next(records, None)
        if record is not None:
            record.gather(items)
        return record is not None

    def _changes(self) -> Iterator[Change]:
        for snapshot_value in self._parts:
            yield from snapshot_value.changes()

    def _leave(self) -> None:
        changes = list(self._changes())
        _undo(changes)
        self._left = [change for change in changes if not change.grown]
        for record in self._gathering().values():
            record.show()
        for metric in self._metrics:
            metric.show()
        self._put_back_learning()

    def _put_back_flags(self) -> None:
        for _, module, training in self._modes:
            if module.training is not training:
                module.training = training
        self._put_back_learning()

    def _put_back_learning(self) -> None:
        for _, parameter, learns in self._learn:
            if parameter.requires_grad is not learns:
                parameter.requires_grad_(learns)

    def _clear_gradients(self) -> None:
        for leaf in (*(parameter for _, parameter, _ in self._learn), *self._leaves):
            if leaf.grad is not None:
                leaf.grad = None

    def _gathering(self) -> dict[int, ContainerValue]:
        return {id(part.value): part for part in self._parts if isinstance(part, ContainerValue) and part.history}


def _undo(changes: Iterable[Change]) -> None:
    for change in changes:
        change.undo()
