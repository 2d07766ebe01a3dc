"""Check whether reading a sample changes state on which later samples depend."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lightning_fcl.data.batching import BatchRequest
from lightning_fcl.data.reachable import Reachable, reachable
from lightning_fcl.data.samples import Samples
from lightning_fcl.data.scenarios import IntArray
from lightning_fcl.snapshot_values import ContainerValue, NamedValues, find_kind
from lightning_fcl.validation import format_code_names

log = logging.getLogger(__name__)

# Maximum size in bytes of a tensor or an array whose content is compared.
_SMALL = 2**20


def prepare_reading(samples: Samples, rows: IntArray, seed: int, warn: bool = True) -> None:
    """Discard the generators that were found in an earlier fit, and check the reading of a sample.

    A warning is logged if reading the sample changes state, or if two reads with the same seed differ.

    Args:
        samples: Samples of a stream.
        rows: Numbers of the training samples. The first sample is read twice.
        seed: Seed of both reads.
        warn: Whether this process may log the warning.
    """
    samples.generators.forget()
    if warn and samples.is_random and len(rows):
        _warn_of_changes(samples, rows, seed)


def _warn_of_changes(samples: Samples, rows: IntArray, seed: int) -> None:
    request = BatchRequest(rows[:1], seed, ("check",))
    roots = samples.readers(request.rows, "train")
    data = roots.pop("0")
    try:
        changed_names, is_repeatable = changes_of(lambda: request.load(samples.get), {"": data, **roots})
    except Exception:
        # The check reads one sample, but `collate_fn` may need several samples. Other errors occur again in training.
        log.debug("Could not check whether reading a sample changes the dataset.", exc_info=True)
        return
    class_name = type(data).__name__
    if changed_names:
        log.warning(
            "Reading a sample of `%s` changes %s, and the change is not restored. If samples depend on this state, "
            "results depend on `num_workers` and on the clients that trained before. Compute the state from the index "
            "in `__getitem__`, or draw it from a random generator that is an attribute: `self.rng = "
            "np.random.default_rng(0)` in `__init__`.",
            class_name,
            format_code_names(changed_names),
        )
    elif not is_repeatable:
        log.warning(
            "Reading a sample of `%s` twice with the same random numbers gives different samples. Results depend on "
            "`num_workers` and on the clients that trained before. Draw from torch, numpy or random, or from a random "
            "generator that is an attribute: `self.rng = np.random.default_rng(0)` in `__init__`.",
            class_name,
        )


def changes_of(read_sample: Callable[[], Any], roots: Mapping[str, object]) -> tuple[list[str], bool]:
    """Read a sample twice with the same random numbers, and compare the state and the samples.

    The state of attributes and containers is restored. Slots, class attributes and variables of functions are not
    restored. Changes that only the first read makes, such as caches and opened files, are not reported.

    Args:
        read_sample: Function that reads the sample.
        roots: Objects whose code reads the sample, keyed by the first part of the paths to report.

    Returns:
        The paths of all values that the second read has changed, and whether both samples are equal.
    """
    first = _Snapshot(roots)
    try:
        first_sample = read_sample()
        second = _Snapshot(roots)
        try:
            second_sample = read_sample()
            return second.changed(), _is_same(first_sample, second_sample)
        finally:
            second.restore()
    finally:
        first.restore()


@contextmanager
def restored_reading(samples: Samples, rows: IntArray, split_name: str) -> Iterator[None]:
    """On exit, restore state that reads of the given samples have changed, as in `changes_of`."""
    snapshot = _Snapshot(samples.readers(rows, split_name))
    try:
        yield
    finally:
        snapshot.restore()


class _Snapshot:
    """A snapshot of the values that the given objects can reach, by path."""

    def __init__(self, roots: Mapping[str, object]) -> None:
        self._parts: list[NamedValues | ContainerValue] = []
        self._held: list[tuple[Reachable, dict[str, Any]]] = []
        for node in reachable(roots):
            value, kind, attributes = node.value, find_kind(node.value), getattr(node.value, "__dict__", None)
            values = node.held()
            self._held.append((node, values))
            if values and isinstance(attributes, dict):
                self._parts.append(NamedValues("", attributes, frozenset(), dict(attributes), attributes=True))
            if kind is not None and kind.can_change(value) and getattr(value, "nbytes", 0) <= _SMALL:
                self._parts.append(ContainerValue(node.path, value, kind, kind.copy(kind.read(value))))

    def changed(self) -> list[str]:
        """Return the paths of changed values. An attribute or item comes before the object that contains it."""
        names: list[str] = []
        for node, previous_values in self._held:
            updated_values = node.held()
            names += [
                path
                for path in {**previous_values, **updated_values}
                if not _is_same(previous_values.get(path), updated_values.get(path))
            ]
        contents = [part for part in self._parts if isinstance(part, ContainerValue)]
        names += [part.name for part in contents if not _is_same(part.saved, part.kind.read(part.value))]
        return list(dict.fromkeys(names))

    def restore(self) -> None:
        for record in self._parts:
            for change in record.changes():
                change.undo()


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two values are equal. Objects of unknown content are equal if their types are equal."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, dict):
        return list(value) == list(other) and all(map(_is_same, value.values(), other.values()))
    if isinstance(value, list | tuple | deque):
        return len(value) == len(other) and all(map(_is_same, value, other))
    if isinstance(value, torch.Tensor):
        return value.dtype is other.dtype and (
            torch.equal(value, other) or torch.equal(value.nan_to_num(), other.nan_to_num())
        )
    kind = find_kind(value)
    if kind is not None:
        return kind.is_equal(kind.read(value), kind.read(other)) if kind.can_change(value) else True
    return bool(value == other) if isinstance(value, bool | int | float | complex | str | bytes | np.generic) else True
