"""Search for state: attributes, containers, tensors and random generators that are reachable from an object."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, MutableMapping, Set
from typing import Any

import lightning.pytorch as L
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_fcl.snapshot_values import (
    CONSTANT,
    LEFT_ALONE,
    Change,
    ContainerValue,
    NamedValues,
    ValueKind,
    find_kind,
    is_of,
)

INTERNAL = frozenset(vars(L.LightningModule()))
"""Names of the attributes of a module that Lightning and torch set."""
NO_STATE = (*CONSTANT, types.FunctionType, types.MethodType)
# Prefixes of module names. Objects of classes in these modules, such as datasets, are not state of clients.
NOT_OF_CLIENTS = (*LEFT_ALONE, "lightning_fcl.", "torch.utils.")


class Search:
    """The state that is reachable from some objects, with its values at the time of the search.

    Args:
        ignored_ids: Ids of objects that are not inspected.
        state: Ids of the tensors of the module's state.
        records: Snapshots of the lists to which clients of earlier rounds have appended items, by the `id` of the list.
        metrics: Whether to inspect metrics of torchmetrics.

    Attributes:
        parts: Attributes and contents of containers, with their values at the time of the search.
        modes: For each network: the prefix of its names, the network, and its training mode.
        learn: For each parameter: its name, the parameter, and its `requires_grad`.
        leaves: Tensors that require gradients and are not parameters of a network.
        metrics: Inspected metrics, by name.
        unknown: Names of objects that cannot be inspected, such as iterators.
        others: Names of objects of other packages that are not inspected, such as loggers and datasets.
    """

    def __init__(
        self,
        ignored_ids: Iterable[int] = (),
        state: Collection[int] = (),
        records: Mapping[int, ContainerValue] | None = None,
        metrics: bool = False,
    ) -> None:
        self.parts: list[NamedValues | ContainerValue] = []
        self.modes: list[tuple[str, nn.Module, bool]] = []
        self.learn: list[tuple[str, Tensor, bool]] = []
        self.leaves: list[Tensor] = []
        self.metrics: dict[str, Metric] = {}
        self.unknown: list[str] = []
        self.others: list[str] = []
        self._seen, self._state, self._metrics = {*ignored_ids, *state}, state, metrics
        self._records = records or {}

    def look(self, named_values: Iterable[tuple[str, Any]]) -> None:
        """Add values, given as pairs of a name and a value, and all state that is reachable from these values."""
        todo = list(named_values)
        while todo:
            name, value = todo.pop()
            if isinstance(value, NO_STATE) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            kind = find_kind(value)
            if isinstance(value, nn.Module):
                todo += self._network(name, value)
            elif kind is not None or not is_of(value, NOT_OF_CLIENTS):
                todo += self._value(name, value, kind)
            else:
                self.others.append(name)

    def look_below(
        self,
        prefix: str,
        values: MutableMapping[str, Any],
        ignored: Set[str] = frozenset(),
        follow: Callable[[object], bool] = lambda value: True,
    ) -> None:
        """Add the values of a mapping. Values for which ``follow`` returns True are also searched."""
        self.look((name, value) for name, value in self._names(prefix, values, ignored) if follow(value))

    def changes(self, names: Collection[str] | None = None) -> Iterator[Change]:
        """Yield the changes since the search. With ``names``, yield only changes for which `is_below` is True."""
        for snapshot_value in self.parts:
            for change in snapshot_value.changes():
                if names is None or is_below(change.name, names):
                    yield change

    def restore(self, names: Collection[str] | None = None) -> None:
        """Undo the changes since the search. With ``names``, undo only changes for which `is_below` is True."""
        for change in [*self.changes(names)]:
            change.undo()

    def _network(self, name: str, network: nn.Module) -> list[tuple[str, Any]]:
        children: list[tuple[str, Any]] = []
        for path, submodule in network.named_modules(prefix=name):
            self._seen.add(id(submodule))
            attributes, prefix = vars(submodule), f"{path}." if path else ""
            if self._metrics and isinstance(submodule, Metric):
                self.metrics[path] = submodule
                children += self._names(prefix, attributes, INTERNAL)
                continue
            self.modes.append((prefix, submodule, submodule.training))
            learning = {n: p for n, p in attributes["_parameters"].items() if p is not None}
            self.learn += [(f"{prefix}{n}", p, p.requires_grad) for n, p in learning.items()]
            if type(submodule).__module__.startswith("lightning_fcl.") or is_of(submodule, ("torchmetrics.",)):
                continue
            children += self._names(prefix, attributes, INTERNAL)
            for values in (attributes["_buffers"], attributes["_parameters"], attributes["_modules"]):
                ignored_names = {name for name, value in values.items() if value is None or id(value) in self._state}
                children += self._names(prefix, values, ignored_names, attributes=False)
        return children

    def _value(self, name: str, value: Any, kind: ValueKind | None) -> list[tuple[str, Any]]:
        if kind is not None and kind.can_change(value):
            container = ContainerValue(name, value, kind, kind.copy(kind.read(value)))
            container.load_history(self._records.get(id(value)))
            self.parts.append(container)
        inner: list[tuple[str, Any]] = []
        # A hashable object that defines `__eq__` is assumed to be immutable, such as a date or a path.
        immutable = isinstance(value, Hashable) and type(value).__eq__ is not object.__eq__
        if isinstance(value, Tensor) and value.is_leaf and value.requires_grad:
            self.leaves.append(value)
        if isinstance(value, list | tuple | set | frozenset | deque | dict):
            inner = [(name, part) for part in (value.values() if isinstance(value, dict) else value)]
        elif kind is None and not (hasattr(value, "__dict__") or callable(value) or immutable):
            self.unknown.append(name)
        return [*inner, *self._names(f"{name}.", vars(value))] if hasattr(value, "__dict__") else inner

    def _names(
        self,
        prefix: str,
        values: MutableMapping[str, Any],
        ignored: Set[str] = frozenset(),
        attributes: bool = True,
    ) -> list[tuple[str, Any]]:
        self.parts.append(NamedValues(prefix, values, ignored, dict(values), attributes))
        return [(f"{prefix}{name}", value) for name, value in values.items() if name not in ignored]


def is_below(name: str, names: Collection[str]) -> bool:
    """Return whether a name is one of ``names``, or the name of an attribute below one of ``names``.

    Example:
        >>> is_below("EMA.mean.count", ["EMA.mean"]), is_below("EMA.means", ["EMA.mean"])
        (True, False)
    """
    return name in names or any(name.startswith(f"{one}.") for one in names)
