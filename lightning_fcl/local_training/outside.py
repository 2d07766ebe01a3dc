"""State outside a module that training can read: in callbacks, metrics, classes and global variables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_fcl.local_training.search import INTERNAL, Search, is_below
from lightning_fcl.local_training.user_code import (
    closure_of,
    functions_in,
    globals_in,
    is_users,
    names_in,
    reached,
    user_classes,
)
from lightning_fcl.snapshot_values import ContainerValue, NamedValues, find_kind

# Maximum number of elements or items of a global variable. A larger variable is assumed to be data, not state.
_LARGEST = 1_000_000
# Attributes that Lightning sets on callbacks and that this library sets on methods.
_NO_STATE = frozenset({"log", "log_dict", "local", "_client"})


class _Scope(MutableMapping[str, Any]):
    """A view of a mapping that contains only the names that some code uses."""

    def __init__(self, values: MutableMapping[str, Any], names: Collection[str]) -> None:
        self._values, self._names = values, sorted(names)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in self._values)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _ClassAttributes(MutableMapping[str, Any]):
    """The attributes of a class as a mapping."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def __getitem__(self, name: str) -> Any:
        return vars(self._kind)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._kind, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._kind, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in [*vars(self._kind)] if not name.startswith(("__", "_abc_")))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Cells(MutableMapping[str, Any]):
    """The closure variables of a function as a mapping."""

    def __init__(self, function: FunctionType) -> None:
        self._function = function
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def __getitem__(self, name: str) -> Any:
        return closure_of(self._function)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self._cells[name].cell_contents

    def __iter__(self) -> Iterator[str]:
        return iter(closure_of(self._function))

    def __len__(self) -> int:
        return len(closure_of(self._function))


class Outside:
    """State outside a module that training can read: state that user code uses, and the attributes of the holders.

    Args:
        module: The module.
        holders: User callbacks and data modules, whose hooks run in training.
        ignored: Ids of objects that are not inspected, such as the Trainer.

    Attributes:
        names: Dict from a prefix to a holder. The names of the holder's attributes start with the prefix.
        shared: Prefixes of the names of class attributes, function attributes and variables.
        functions: User functions that training can call, by the `id` of the function.
    """

    def __init__(self, module: nn.Module, holders: Sequence[object] = (), ignored: Iterable[int] = ()) -> None:
        self._module = module
        networks = (part for part in module.modules() if not isinstance(part, Metric))
        self._ignored = {*ignored, *map(id, networks), *map(id, module.parameters())}
        numbers: dict[str, int] = {}
        self.names: dict[str, object] = {}
        for holder in holders:
            name = type(holder).__name__
            numbers[name] = numbers.get(name, 0) + 1
            self.names[f"{name}." if numbers[name] == 1 else f"{name}#{numbers[name]}."] = holder
        kinds = {type(part): None for part in (*module.modules(), *holders)}
        self.functions: dict[int, FunctionType] = {}
        classes: dict[type, None] = {}
        for kind in kinds:
            functions_by_name = functions_in(kind)
            self.functions |= {
                id(function): function for function in reached(functions_by_name.values(), functions_by_name)
            }
            classes |= dict.fromkeys(user_classes(kind))
        self._roots: list[tuple[str, MutableMapping[str, Any]]] = []
        for kind in classes:
            self._roots.append((_prefix(kind), _ClassAttributes(kind)))
        self._add_functions(classes)
        self.shared = [prefix for prefix, _ in self._roots]

    def _add_functions(self, classes: Mapping[type, None]) -> None:
        """Add the variables, function attributes and class attributes that the functions in `functions` use."""
        scopes: dict[int, tuple[ModuleType | str, dict[str, Any], set[str]]] = {}
        for function in self.functions.values():
            prefix = _prefix(function)
            self._roots += [(prefix, _Cells(function)), (prefix, vars(function))]
            names, values = globals_in(function.__code__), function.__globals__
            scopes.setdefault(id(values), (function.__module__, values, set()))[2].update(names)
            for name in names:
                value = values.get(name)
                if isinstance(value, ModuleType) and is_users(value):
                    module_attributes = vars(value)
                    scopes.setdefault(id(module_attributes), (value.__name__, module_attributes, set()))[2].update(
                        names_in(function.__code__)
                    )
                elif isinstance(value, type) and is_users(value) and value not in classes:
                    self._roots.append((_prefix(value), _ClassAttributes(value)))
        self._roots += [
            (f"{name.rpartition('.')[2]}.", _Scope(values, names)) for name, values, names in scopes.values()
        ]

    def search(self, records: Mapping[int, ContainerValue] | None = None) -> Search:
        """Return a `Search` that contains the current values of the state."""
        state_search = Search(self._ignored, records=records, metrics=True)
        for path, submodule in self._module.named_modules():
            state_search.look(_metrics_in(path, submodule))
        for prefix, holder in self.names.items():
            state_search.look_below(prefix, vars(holder), _NO_STATE)
        for function in self.functions.values():
            default_values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
            state_search.look(
                (f"{_prefix(function)}__defaults__", value) for value in default_values if _is_state(value)
            )
        for prefix, values in self._roots:
            state_search.look_below(prefix, values, follow=_is_state)
        return state_search


def _prefix(owner: type | FunctionType) -> str:
    """Return the prefix for attribute names: the last part of the module's name, and the class or function name."""
    return f"{owner.__module__.rpartition('.')[2]}.{owner.__qualname__.replace('<locals>.', '')}."


def _metrics_in(path: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield pairs of a name and a metric: the module if it is a metric, and the metrics in its attributes."""
    prefix = f"{path}." if path else ""
    if isinstance(module, Metric):
        yield path, module
    for name, value in vars(module).items():
        if name in INTERNAL:
            continue
        yield from _metrics_within(f"{prefix}{name}", value)


def _metrics_within(name: str, value: object) -> Iterator[tuple[str, Any]]:
    """Yield pairs of a name and a metric: the value if it is a metric, or the metrics in a nested container."""
    if isinstance(value, Metric):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _metrics_within(f"{name}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _metrics_within(f"{name}[{index}]", item)


def _is_state(value: object) -> bool:
    """Return whether a value may be state. Large data and objects of other packages are not state."""
    if isinstance(value, Tensor):
        return value.numel() <= _LARGEST
    if isinstance(value, np.ndarray):
        return value.size <= _LARGEST
    if isinstance(value, nn.Module):
        return sum(p.numel() for p in value.parameters()) <= _LARGEST
    if isinstance(value, list | tuple | dict | set):
        return len(value) <= _LARGEST
    return find_kind(value) is not None or is_users(type(value))


class Carried:
    """State outside a module that is restored for each client, because training reads it or may read it.

    Args:
        outside_state: All state outside the module.
        names: Names of the state that is restored.
        metrics: Names of the metrics that are reset for each client. At the end of a round, the values of all clients
            are merged, if `can_merge` returns True.
        whole: Prefixes of names. All state whose name starts with a prefix is restored, except metrics.
    """

    def __init__(
        self,
        outside_state: Outside,
        names: Collection[str] = (),
        metrics: Collection[str] = (),
        whole: Collection[str] = (),
    ) -> None:
        self._outside, self.names, self.metrics, self.whole = (
            outside_state,
            frozenset(names),
            frozenset(metrics),
            tuple(whole),
        )

    def search(
        self, records: Mapping[int, ContainerValue]
    ) -> tuple[list[NamedValues | ContainerValue], list[ClientMetric]]:
        """Return the current values to restore for each client, and the metrics to reset for each client."""
        state_search = self._outside.search(records)
        parts: list[NamedValues | ContainerValue] = []
        for snapshot_value in state_search.parts:
            name = snapshot_value.name if isinstance(snapshot_value, ContainerValue) else snapshot_value.prefix
            if name.startswith(self.whole) and not is_below(name, state_search.metrics):
                parts.append(snapshot_value)
            elif isinstance(snapshot_value, ContainerValue):
                parts += [snapshot_value] if is_below(name, self.names) else []
            elif is_below(name, self.names):
                parts.append(snapshot_value)
            elif attribute_names := {n.removeprefix(name) for n in self.names if n.startswith(name)}:
                values = _Scope(snapshot_value.values, {n for n in attribute_names if "." not in n})
                parts.append(NamedValues(name, values, snapshot_value.ignored, dict(values), snapshot_value.attributes))
        return parts, [ClientMetric(metric) for name, metric in state_search.metrics.items() if name in self.metrics]


class ClientMetric:
    """A metric that is reset for each client. At the end of a round, all updates are merged if `can_merge` is True.

    Args:
        metric: The metric.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._earlier: dict[str, Any] | None = None  # metric state before the current client
        self._updates = 0
        self._open = False  # whether a client is training

    def begin(self) -> None:
        """Reset the metric for the next client, and save the updates of earlier clients."""
        self._close()
        self._earlier = _copied(self._metric) if self._updates else None
        self._metric.reset()
        self._open = True

    def show(self) -> None:
        """Merge the updates of all clients into the metric at the end of a round, if `can_merge` is True."""
        if self._open:
            self._close()
            self._open = False

    def _close(self) -> None:
        updates = self._metric.update_count
        if self._open and self._earlier is not None and can_merge(self._metric):
            if updates:
                self._metric.merge_state(self._earlier)
            else:
                for name, value in self._earlier.items():
                    setattr(self._metric, name, value)
        self._updates = updates + (self._updates if self._open else 0)
        self._metric._update_count, self._metric._computed = self._updates, None


def can_merge(metric: Metric) -> bool:
    """Return whether torchmetrics can merge two states of a metric."""
    return metric.full_state_update is False and not metric.dist_sync_on_step


def _copied(metric: Metric) -> dict[str, Any]:
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else [*value]
        for name, value in metric.metric_state.items()
    }
