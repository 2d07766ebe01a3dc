"""Lists and counters that grow while clients train: the changes by each client, and the merged result."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from lightning_fcl.snapshot_values import find_kind

_DEEPEST = 4  # maximum depth of nested dicts
_NEW = (dict, Counter)  # types of dicts that can be created empty
_ABSENT = object()


class Snapshot(NamedTuple):
    """A saved value: the object, and a copy of its content if changes in place have to be detected."""

    value: Any
    content: Any = None


class Count(int):
    """The increase of a counter."""


class Items(list[Any]):
    """The items that were appended to a list."""


class Entries(NamedTuple):
    """The changes of a dict's entries by key, and the type of the dict."""

    parts: dict[Hashable, Any]
    kind: type


class Added(NamedTuple):
    """The value of a new attribute or dict key."""

    value: Any


class Changed:
    """A change that cannot be merged, such as a replaced value or a decreased counter."""


Change = Count | Items | Entries | Added | Changed


def snapshot(value: Any, copies: bool, depth: int = 0) -> Snapshot:
    """Return a snapshot of a value.

    Args:
        value: The value.
        copies: Whether to also copy tensors, arrays, sets and deques, to detect changes in place.
        depth: The number of dicts that contain the value.
    """
    if isinstance(value, list):
        return Snapshot(value, value.copy())
    if isinstance(value, dict) and depth < _DEEPEST:
        return Snapshot(value, {key: snapshot(part, copies, depth + 1) for key, part in value.items()})
    if copies and isinstance(value, Tensor | np.ndarray | set | deque) and (kind := find_kind(value)) is not None:
        return Snapshot(value, kind.copy(kind.read(value)))
    return Snapshot(value)


def change(previous_snapshot: Snapshot | None, current_value: Any) -> Change | None:
    """Return the change of a value since its snapshot. None: no change was found.

    Args:
        previous_snapshot: The snapshot. None: the value did not exist.
        current_value: The current value.
    """
    value, content = previous_snapshot if previous_snapshot is not None else Snapshot(_ABSENT)
    if isinstance(current_value, dict) and (
        value is current_value or (value is _ABSENT and type(current_value) in _NEW)
    ):
        return _entries(content or {}, current_value)
    if isinstance(current_value, list) and (value is current_value or value is _ABSENT):
        return _items(content or [], current_value)
    if _is_count(current_value) and (value is _ABSENT or _is_count(value)):
        increase = current_value - (0 if value is _ABSENT else value)
        return Changed() if increase < 0 else Count(increase) if increase or value is _ABSENT else None
    if value is _ABSENT:
        return Added(current_value)
    if value is not current_value:
        return None if _is_equal(value, current_value) else Changed()
    kind = find_kind(value) if content is not None else None
    return None if kind is None or kind.is_equal(kind.read(current_value), content) else Changed()


def joined(changes: Iterable[Change]) -> Change:
    """Return one change that combines successive changes of a value. `Changed` if they cannot be combined."""
    first, *other_changes = changes
    for other in other_changes:
        if isinstance(first, Count) and isinstance(other, Count):
            first = Count(first + other)
        elif isinstance(first, Items) and isinstance(other, Items):
            first = Items([*first, *other])
        elif isinstance(first, Entries) and isinstance(other, Entries):
            first_parts = first.parts
            updated_parts = {
                key: joined([first_parts[key], part]) if key in first_parts else part
                for key, part in other.parts.items()
            }
            first = Entries({**first_parts, **updated_parts}, first.kind)
        else:
            return Changed()
    return first


def is_merged(value_change: Change | None) -> bool:
    """Return whether a change can be merged with the changes by other clients."""
    if isinstance(value_change, Entries):
        return all(map(is_merged, value_change.parts.values()))
    return not isinstance(value_change, Changed)


def apply(
    previous_snapshot: Snapshot | None, value_change: Change, extend: Callable[[list[Any], list[Any]], None]
) -> Any:
    """Apply a change to the value of a snapshot, and return the result. Containers are changed in place.

    Args:
        previous_snapshot: The snapshot of the value. None: the value did not exist.
        value_change: The change.
        extend: Function that appends items to a list. Arguments: the list with the items of the snapshot, and the
            items that clients appended.
    """
    value, content = previous_snapshot if previous_snapshot is not None else Snapshot(_ABSENT)
    if isinstance(value_change, Count):
        return int(value_change) + (0 if value is _ABSENT else value)
    if isinstance(value_change, Items):
        if value is _ABSENT:
            return list(value_change)
        value[:] = content
        extend(value, value_change)
        return value
    if isinstance(value_change, Entries):
        target = value_change.kind() if value is _ABSENT else value
        for key in value_change.parts.keys() - (content or {}).keys():
            target.pop(key, None)  # Remove new keys, so that the loop below adds them in the order of the clients.
        for key, entry_change in value_change.parts.items():
            target[key] = apply((content or {}).get(key), entry_change, extend)
        return target
    assert isinstance(value_change, Added)
    return value_change.value


def _entries(previous_entries: dict[Hashable, Snapshot], current_entries: dict[Hashable, Any]) -> Change | None:
    if previous_entries.keys() - current_entries.keys():
        return Changed()
    parts = {key: change(previous_entries.get(key), value) for key, value in current_entries.items()}
    entry_changes = {key: part for key, part in parts.items() if part is not None}
    return Entries(entry_changes, type(current_entries)) if entry_changes else None


def _items(previous_items: list[Any], current_items: list[Any]) -> Change | None:
    if len(current_items) < len(previous_items) or any(
        one is not other for one, other in zip(previous_items, current_items, strict=False)
    ):
        return Changed()
    return Items(current_items[len(previous_items) :]) if len(current_items) > len(previous_items) else None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_equal(first_value: object, second_value: object) -> bool:
    """Return whether two values have the same type, are booleans, floats or strings, and are equal."""
    return (
        type(first_value) is type(second_value)
        and isinstance(first_value, bool | float | str)
        and first_value == second_value
    )
