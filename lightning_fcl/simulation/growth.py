"""Lists and counters that grow while clients train: what clients have added, and all of it put together."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from lightning_fcl.snapshot_values import find_kind

_DEEPEST = 4  # dicts within dicts
_NEW = (dict, Counter)  # types of dicts that can be made without their entries
_ABSENT = object()


class Snapshot(NamedTuple):
    """A value as it was: the object, and a copy of its content if the object can change."""

    value: Any
    content: Any = None


class Count(int):
    """The number by which a counter has grown."""


class Items(list[Any]):
    """The items that were appended to a list."""


class Entries(NamedTuple):
    """The changes of the entries of a dict by key, and the type of the dict."""

    parts: dict[Hashable, Any]
    kind: type


class Added(NamedTuple):
    """A value under a key of a dict that was not there before."""

    value: Any


class Changed:
    """A change that cannot be merged: a value was replaced, or a counter has decreased."""


Change = Count | Items | Entries | Added | Changed


def snapshot(value: Any, copies: bool, depth: int = 0) -> Snapshot:
    """Return a snapshot of a value.

    Args:
        value: The value.
        copies: Whether to copy tensors, arrays, sets and deques as well, to find out whether they change in place.
        depth: The number of dicts that hold the value.
    """
    if isinstance(value, list):
        return Snapshot(value, value.copy())
    if isinstance(value, dict) and depth < _DEEPEST:
        return Snapshot(value, {key: snapshot(part, copies, depth + 1) for key, part in value.items()})
    if copies and isinstance(value, Tensor | np.ndarray | set | deque) and (kind := find_kind(value)) is not None:
        return Snapshot(value, kind.copy(kind.read(value)))
    return Snapshot(value)


def change(previous_snapshot: Snapshot | None, current_value: Any) -> Change | None:
    """Return how a value differs from its snapshot. None: it does not.

    Args:
        previous_snapshot: The snapshot. None: there was no value.
        current_value: The value.
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
    """Return one change for those of several clients, in their order."""
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
    """Return whether a change can be merged with those of other clients."""
    if isinstance(value_change, Entries):
        return all(map(is_merged, value_change.parts.values()))
    return not isinstance(value_change, Changed)


def apply(
    previous_snapshot: Snapshot | None, value_change: Change, extend: Callable[[list[Any], list[Any]], None]
) -> Any:
    """Return a value as it was, with a change; containers are changed in place.

    Args:
        previous_snapshot: The snapshot of the value. None: there was no value.
        value_change: The change.
        extend: Sets the items of a list, of which the first argument is the list and the second the items that
            clients have appended to the items of the snapshot.
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
            target.pop(key, None)  # The keys of all clients come in the clients' order.
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
    """Whether two values are equal numbers or strings: others are only equal if they are one object."""
    return (
        type(first_value) is type(second_value)
        and isinstance(first_value, bool | float | str)
        and first_value == second_value
    )
