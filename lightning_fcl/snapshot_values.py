"""Snapshots of attributes, containers, tensors and random generators. Functions find changes and restore old values."""

from __future__ import annotations

import operator
import random
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

CONSTANT = (
    *(type(None), bool, int, float, complex, str, bytes, range, type, torch.dtype, torch.device),
    *(types.BuiltinFunctionType, types.ModuleType),
    *(weakref.ReferenceType, weakref.ProxyType, weakref.CallableProxyType),
)
"""Types whose values are never inspected because they have no content to restore."""

LEFT_ALONE = (
    *("lightning.", "torchmetrics.", "torch._", "torch.distributed.", "torch.fx.", "torch.jit.", "logging"),
    *("threading", "_thread", "queue", "socket", "asyncio", "concurrent.", "_io", "tqdm.", "multiprocessing", "rich."),
    *("matplotlib.", "wandb.", "mlflow.", "comet_ml.", "neptune.", "clearml.", "tensorboard", "aim."),
    *("_pytest.", "pluggy."),
)
"""Prefixes of module names. An object whose class or base class is in such a module is not inspected by default.

Examples are loggers and threads. A search can make exceptions, for example for metrics of torchmetrics.
"""

_GONE = object()


class Change(NamedTuple):
    """A difference between the current state and a snapshot.

    Attributes:
        name: Name of the changed value.
        undo: Function that restores the value of the snapshot.
        redo: Function that sets the changed value again.
        is_shown: Function that returns whether the current value is the value that ``redo`` sets.
        grown: Whether the value is a list, and the only change is that items were appended.
    """

    name: str
    undo: Callable[[], object]
    redo: Callable[[], object]
    is_shown: Callable[[], bool]
    grown: bool = False


@dataclass
class NamedValues:
    """A snapshot of the values in a mapping, such as attributes or buffers.

    Args:
        prefix: Prefix of the names of changes.
        values: The mapping, which is modified when changes are undone or redone.
        ignored: Names of values to skip.
        saved: The values at the time of the snapshot.
        attributes: Whether the values are attributes. Changes of other values, such as buffers, are not set again by
            ``redo``.
    """

    prefix: str
    values: MutableMapping[str, Any]
    ignored: Set[str]
    saved: Mapping[str, Any]
    attributes: bool

    def changes(self) -> Iterator[Change]:
        """Yield a change for each value that was added, replaced or deleted since the snapshot."""
        saved_values, ignored = self.saved, self.ignored
        if all(map(operator.is_, self.values.values(), saved_values.values())) and [*self.values] == [*saved_values]:
            return
        changed_names = [
            n for n, value in self.values.items() if saved_values.get(n, _GONE) is not value and n not in ignored
        ]
        for name in [*changed_names, *(saved_values.keys() - self.values.keys() - ignored)]:
            value, saved_value = self.values.get(name, _GONE), saved_values.get(name, _GONE)
            shown_value = value if self.attributes else saved_value
            set_value = partial(self._put, name)
            yield Change(
                f"{self.prefix}{name}",
                partial(set_value, saved_value),
                partial(set_value, shown_value),
                partial(self._is, name, shown_value),
            )

    def commit(self) -> None:
        """Replace the snapshot by the current values."""
        self.saved = dict(self.values)

    def _is(self, name: str, value: object) -> bool:
        return self.values.get(name, _GONE) is value

    def _put(self, name: str, value: object) -> None:
        self.values[name] = value
        if value is _GONE:
            del self.values[name]


class ValueKind(NamedTuple):
    """Functions that read, write, compare and copy the content of values of some types.

    ``can_change`` returns whether the content of a value can be overwritten. ``seed`` seeds a random generator, and is
    None for other types.
    """

    types: type | tuple[type, ...]
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]
    is_equal: Callable[[Any, Any], bool] = operator.eq
    copy: Callable[[Any], Any] = lambda content: content
    can_change: Callable[[Any], bool] = lambda value: True
    seed: Callable[[Any, int], object] | None = None


@dataclass
class ContainerValue:
    """A snapshot of the content of a container, a tensor, an array or a random generator.

    A list to which items are appended is called a record. The appended items are stored separately from the snapshot,
    so that they can be removed from the list and written to it again.

    Args:
        name: Name of the value.
        value: The object, whose content is modified when changes are undone or redone.
        kind: Functions for the content of the object.
        saved: Content at the time of the snapshot.
        history: Items that clients have appended to a list.
        base: Content that counts as unchanged: ``saved``, or ``saved + history`` if the appended items are in the list.
        earlier: Number of items in ``history`` that were appended in earlier rounds.
    """

    name: str
    value: Any
    kind: ValueKind
    saved: Any
    history: list[Any] = field(default_factory=list)
    base: Any = None
    earlier: int = 0

    def __post_init__(self) -> None:
        self.base = self.saved

    def load_history(self, record: ContainerValue | None) -> None:
        """Continue the history of the previous round, and remove the items of this history from the list.

        Do nothing if there was no previous round, or if the list has changed since the previous round.

        Args:
            record: Snapshot of the same list in the previous round. None if there is no such snapshot.
        """
        if record is not None and _same_items(self.value, record.base):
            self.saved = self.base = record.saved
            self.history = record.history
            self.earlier = len(self.history)
            self.value[:] = self.saved

    def gather(self, items: list[Any]) -> None:
        """Replace the items that were appended in this round by ``items``, and write all appended items to the list."""
        self.history[self.earlier :] = items
        self.show()

    def show(self) -> None:
        """Write the snapshot and all appended items to the list."""
        self.base = self.saved + self.history
        self.value[:] = self.base

    def commit(self) -> None:
        """Replace the snapshot by the current content. Items appended to a list are added to the history instead."""
        for change in self.changes():
            if change.grown:
                change.undo()
            else:
                self.saved = self.base = self.kind.copy(self.kind.read(self.value))
                self.history, self.earlier = [], 0

    def changes(self) -> Iterator[Change]:
        """Yield one change if the current content differs from ``base``."""
        current_content = self.kind.read(self.value)
        if self.kind.is_equal(current_content, self.base):
            return
        if isinstance(self.value, list) and _same_items(current_content[: len(self.base)], self.base):
            yield Change(self.name, partial(self._gather, current_content), tuple, bool, grown=True)
        else:
            # `redo` writes the changed content of a list again. Other values, such as tensors, stay restored.
            shown_content = current_content if isinstance(current_content, list) else self.base
            write = partial(self.kind.write, self.value)
            yield Change(
                self.name, partial(write, self.base), partial(write, shown_content), partial(self._holds, shown_content)
            )

    def _holds(self, content: Any) -> bool:
        return self.kind.is_equal(self.kind.read(self.value), content)

    def _gather(self, current_content: list[Any]) -> None:
        is_shown = self.base is not self.saved
        self.history += current_content[len(self.base) :]
        self.value[:] = self.base
        if is_shown:
            self.show()


def _refill(container: Any, content: list[Any]) -> None:
    container.clear()
    (container.update if isinstance(container, set) else container.extend)(content)


def _refill_dict(container: dict[Any, Any], content: list[Any]) -> None:
    container.clear()
    for key, value in zip(content[: len(content) // 2], content[len(content) // 2 :], strict=True):
        container[key] = value  # `update` of a Counter would add to the counts


def _overwrite(tensor: Tensor, content: Tensor) -> None:
    if tensor.shape == content.shape:
        tensor.data.copy_(content)
    else:
        tensor.data = content.clone()


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor can be overwritten in place: it has dense data, and no dimension is expanded."""
    if is_lazy(tensor) or tensor.is_meta or tensor.layout is not torch.strided:
        return False
    return all(stride or size < 2 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _same_items(first_items: list[Any], second_items: list[Any]) -> bool:
    return len(first_items) == len(second_items) and all(map(operator.is_, first_items, second_items))


def _same_text(first_value: object, second_value: object) -> bool:
    return repr(first_value) == repr(second_value)


_KINDS = (
    ValueKind(Tensor, Tensor.detach, _overwrite, torch.equal, Tensor.clone, _is_plain),
    ValueKind(dict, lambda value: [*value, *value.values()], _refill_dict, _same_items),
    ValueKind((list, deque), list, _refill, _same_items),
    ValueKind(set, list, _refill, lambda first_set, second_set: set(first_set) == set(second_set)),
    ValueKind(
        np.ndarray,
        lambda value: value,
        lambda value, content: value.__setitem__(..., content),
        lambda first_array, second_array: first_array.tobytes() == second_array.tobytes(),
        np.copy,
        lambda value: value.flags.writeable and not isinstance(value, np.memmap),
    ),
    ValueKind(
        torch.Generator,
        torch.Generator.get_state,
        torch.Generator.set_state,
        torch.equal,
        seed=torch.Generator.manual_seed,
    ),
    ValueKind(random.Random, random.Random.getstate, random.Random.setstate, seed=random.Random.seed),
    ValueKind(
        np.random.Generator,
        lambda value: value.bit_generator.state,
        lambda value, state: setattr(value.bit_generator, "state", state),
        _same_text,
        seed=lambda value, seed: setattr(value.bit_generator, "state", type(value.bit_generator)(seed).state),
    ),
    ValueKind(
        np.random.RandomState,
        partial(np.random.RandomState.get_state, legacy=False),
        np.random.RandomState.set_state,
        _same_text,
        seed=lambda value, seed: value.set_state(
            getattr(np.random, value.get_state(legacy=False)["bit_generator"])(seed).state
        ),
    ),
)


def find_kind(value: object) -> ValueKind | None:
    """Return the `ValueKind` of a value, or None if the value has no content that can be inspected."""
    return next((kind for kind in _KINDS if isinstance(value, kind.types)), None)


def is_of(value: object, packages: tuple[str, ...]) -> bool:
    """Return whether the class of a value, or a base class, is in a module with one of the prefixes ``packages``."""
    return any(kind.__module__.startswith(packages) for kind in type(value).__mro__)
