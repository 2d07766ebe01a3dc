"""What a module and its optimizer hold beside their state: for each client as it was at the start of the round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_fcl.federation.aggregation import state_tensors
from lightning_fcl.local_training.outside import Carried, ClientMetric
from lightning_fcl.local_training.search import Search
from lightning_fcl.snapshot_values import Change, ContainerValue

_BY_CLIENT = frozenset({"state", "param_groups", "defaults"})  # of an optimizer: they begin anew elsewhere


class ModuleSnapshot:
    """What a module and its optimizer hold beside their state when this is made: attributes, and buffers not kept.

    Attributes are looked into as far as they are containers, tensors, arrays, generators of random numbers, networks or
    objects of a user's own. Metrics of torchmetrics, parts of this library and of Lightning, and data sets are left
    alone. A list to which clients append is a record: none finds what others have appended, but after the round, and
    after later ones, all of it is there.

    Args:
        module: The module. Its `state_tensors` are no part of it.
        optimizers: Its optimizers, whose state and groups are no part of it.
        extra_objects: What is left alone, too, such as schedulers.
        previous_snapshot: That of the round before.
        carried: State outside the module that starts anew, too.

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
        self.unknown_attributes = search.unknown  # names of what cannot be looked into
        self._parts, self._modes, self._learn, self._leaves = search.parts, search.modes, search.learn, search.leaves
        self._metrics: list[ClientMetric] = []
        if carried is not None:
            parts, self._metrics = carried.search(records)
            self._parts += parts
        self._left: list[Change] = []
        self._settled = self._shown = False

    def changes(self) -> list[str]:
        """Names of what has changed since."""
        modes = [f"{name}training" for name, module, training in self._modes if module.training is not training]
        learn = [f"{name}.requires_grad" for name, value, learns in self._learn if value.requires_grad is not learns]
        return sorted({*modes, *learn, *(change.name for change in self._changes())})

    def restore(self) -> None:
        """Let all be as it was, for another client, without gradients."""
        _undo(self._changes())
        for metric in self._metrics:
            metric.begin()
        self._put_back_flags()
        self._clear_gradients()

    def finish_clients(self) -> None:
        """Let all be as it was, but remember what the last client has left, and show records."""
        self._leave()
        self._put_back_flags()

    def commit(self) -> None:
        """What hooks have changed since then is the server's; those to come see what the last client has left."""
        for snapshot_value in self._parts:
            snapshot_value.commit()
        self._learn = [(name, parameter, parameter.requires_grad) for name, parameter, _ in self._learn]
        self.expose_last_client()

    def finalize(self) -> None:
        """After the last hook of the last client: let all be as it was, once, but remember what is left."""
        if not self._settled:
            self._leave()
            self._clear_gradients()
            self._settled, self._shown = True, False

    def expose_last_client(self) -> None:
        """Show hooks what the last client has left in attributes, as a plain Trainer's see it."""
        for change in self._left:
            change.redo()
        self._shown = True

    def hide_last_client(self) -> None:
        """Put back what they have seen, if they have, but for what they have changed: that is the server's."""
        if self._shown:
            _undo([change for change in self._left if change.is_shown()])
            self._shown = False

    def gather(self, value: list[Any], items: list[Any]) -> bool:
        """Replace the items that clients of this round have appended to a list. Return whether the list is a record."""
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
