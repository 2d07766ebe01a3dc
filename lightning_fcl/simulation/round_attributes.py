"""A record of how clients change lists and counters in a round. The record is merged over all processes."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.serialization import default_restore_location

from lightning_fcl.local_training.module_snapshot import ModuleSnapshot
from lightning_fcl.local_training.search import INTERNAL
from lightning_fcl.simulation.growth import (
    Change,
    Entries,
    Items,
    Snapshot,
    apply,
    change,
    is_merged,
    joined,
    snapshot,
)

Name = tuple[str, str]
"""The path of an object, and the name of an attribute of this object."""

MODULE = "module"
"""The path of the module."""

_COMMON = -1  # used as the group number of hooks that run on every rank


class RoundAttributes:
    """A record of the changes of list and counter attributes in a round, for each group of clients.

    At the end of the round, the changes of all processes are merged. For attributes of the module that are
    restored for each client, only items that were appended to lists are merged.

    Args:
        attributes: The attributes of each object, by the path of the object.
        ignored: Names of attributes that cannot be merged. More names are added during the round.
        copies: Whether to copy tensors, arrays, sets and deques, to detect changes in place.
        loose: The module state that is restored for each client. None: no such state.
        device: The device of this process, for tensors from the devices of other processes.
    """

    def __init__(
        self,
        attributes: Mapping[str, dict[str, Any]],
        ignored: set[Name],
        copies: bool,
        loose: ModuleSnapshot | None,
        device: torch.device,
    ) -> None:
        self._device = str(device)
        self._attributes, self._ignored, self._copies, self._loose = attributes, ignored, copies, loose
        self._group: int | None = None  # the current group
        self._grown: dict[int, dict[Name, Change]] = {_COMMON: {}}  # changes by each group
        self._before = self._now = self._snapshots()

    def enter(self, group: int) -> None:
        """Start or continue recording the changes by a group."""
        self._group = group
        self._now = self._snapshots()

    def watch(self) -> None:
        """Record which attributes cannot be merged, because the group replaced a value or decreased a counter."""
        if self._group is not None:
            self._ignored |= {name for name, part in self._changes().items() if not is_merged(part)}

    def leave(self) -> None:
        """Record the changes by the current group. Without a group, record changes by hooks that run on every rank."""
        group_changes = self._grown.setdefault(_COMMON if self._group is None else self._group, {})
        for name, value_change in self._changes().items():
            if is_merged(value_change):
                group_changes[name] = (
                    joined([group_changes[name], value_change]) if name in group_changes else value_change
                )
            elif self._group is None:
                self._discard_client_changes(name)
            else:
                self._ignored.add(name)
        self._group = None
        self._now = self._snapshots()

    def contributions(self) -> dict[int, dict[Name, bytes]]:
        """Return the changes by this process's groups, serialized for other processes."""
        return {group: self._packed(own) for group, own in self._grown.items() if group != _COMMON}

    def merge(self, groups: Mapping[int, Mapping[Name, bytes]]) -> None:
        """Apply the changes by the groups of all processes, in the order of the groups."""
        for name in sorted({name for found in groups.values() for name in found} - self._ignored):
            parts = [self._part(group, name, found[name]) for group, found in groups.items() if name in found]
            common = self._grown[_COMMON].get(name)
            total_change = joined(parts if common is None else [common, *parts])
            path, attribute = name
            if not is_merged(total_change):
                self._ignored.add(name)
            elif path in self._attributes:
                values = self._attributes[path]
                values[attribute] = apply(self._before.get(name), total_change, self._extend)

    def _snapshots(self) -> dict[Name, Snapshot]:
        return {name: snapshot(value, self._copies) for name, value in self._values().items()}

    def _values(self) -> dict[Name, Any]:
        return {
            (path, attribute): value
            for path, values in self._attributes.items()
            for attribute, value in values.items()
            if (path, attribute) not in self._ignored and not (path.startswith(MODULE) and attribute in INTERNAL)
        }

    def _changes(self) -> dict[Name, Change]:
        """Return the changes since the last snapshots.

        Attributes of the module that are restored for each client are left out, except for items appended to lists.
        Between groups these items are also left out, because the lists then contain items of other clients.
        """
        changes: dict[Name, Change] = {}
        for name, value in self._values().items():
            is_put_back = self._loose is not None and name[0].startswith(MODULE)
            if is_put_back and self._group is None:
                continue
            value_change = change(self._now.get(name), value)
            if value_change is not None and (not is_put_back or _only_appends(value_change)):
                changes[name] = value_change
        return changes

    def _discard_client_changes(self, name: Name) -> None:
        """Discard the clients' changes to an attribute that a hook has replaced on every rank."""
        for group_changes in self._grown.values():
            group_changes.pop(name, None)
        path, attribute = name
        self._before[name] = snapshot(self._attributes[path][attribute], self._copies)

    def _packed(self, group_changes: Mapping[Name, Change]) -> dict[Name, bytes]:
        packed: dict[Name, bytes] = {}
        for name, value_change in group_changes.items():
            content = io.BytesIO()
            try:
                torch.save(value_change, content)
            except Exception:  # Pickling a user's object may raise any error.
                self._ignored.add(name)
            else:
                packed[name] = content.getvalue()
        return packed

    def _part(self, group: int, name: Name, content: bytes) -> Change:
        """Return the change of an attribute by a group, deserialized if it comes from another process."""
        if group in self._grown:
            return self._grown[group][name]

        unpacked_change: Change = torch.load(io.BytesIO(content), self._placed, weights_only=False)
        return unpacked_change

    def _placed(self, storage: Any, location: str) -> Any:
        return default_restore_location(storage, location if location == "cpu" else self._device)  # type: ignore[no-untyped-call]

    def _extend(self, value: list[Any], items: list[Any]) -> None:
        if self._loose is None or not self._loose.gather(value, items):
            value.extend(items)


def _only_appends(value_change: Change) -> bool:
    if isinstance(value_change, Entries):
        return all(map(_only_appends, value_change.parts.values()))
    return isinstance(value_change, Items)
