"""What a module and its optimizer hold beside their state: for each client as it was at the start of the round."""

from __future__ import annotations

import operator
import random
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_fcl.federation.aggregation import entries

_INTERNAL = frozenset(vars(L.LightningModule()))
_BY_CLIENT = frozenset({"state", "param_groups", "defaults"})  # of an optimizer: they begin anew elsewhere
_CONSTANT = (
    *(type(None), bool, int, float, complex, str, bytes, range, type, torch.dtype, torch.device),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
    *(weakref.ReferenceType, weakref.ProxyType, weakref.CallableProxyType),
)
# What is no state of a client, by the package of its class or of a parent: what Lightning and this library run by, what
# gathers over a round, data, and ways to the outside.
_LEFT_ALONE = (
    *("lightning.", "lightning_fcl.", "torchmetrics.", "torch._", "torch.distributed.", "torch.fx.", "torch.jit."),
    *(
        "torch.utils.",
        "logging",
        "threading",
        "_thread",
        "queue",
        "socket",
        "asyncio",
        "concurrent.",
        "multiprocessing",
    ),
    *("_io", "tqdm.", "rich.", "matplotlib.", "wandb.", "mlflow.", "comet_ml.", "neptune.", "clearml.", "tensorboard"),
)
_GONE = object()


class _Change(NamedTuple):
    name: str
    undo: Callable[[], object]
    redo: Callable[[], object]
    grown: bool = False  # it is a list that was appended to


class LooseState:
    """What a module and its optimizer hold beside their state when this is made: attributes, and buffers not kept.

    Attributes are looked into as far as they are containers, tensors, arrays, generators of random numbers, networks or
    objects of a user's own. Metrics of torchmetrics, parts of this library and of Lightning, and data sets are left
    alone. A list to which clients append is a record: none finds what others have appended, but after the round, and
    after later ones, all of it is there.

    Args:
        module: The module. Its `entries` are no part of it.
        optimizer: Its optimizer, whose state and groups are no part of it.
        others: What is left alone, too, such as schedulers.
        before: That of the round before.

    Example:
        >>> module = nn.Linear(1, 1)
        >>> module.seen = [1]
        >>> loose = LooseState(module)
        >>> module.seen.append(2); module.last = 3; loose.changes()
        ['last', 'seen']
        >>> loose.put_back(); module.seen, hasattr(module, "last")
        ([1], False)
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        others: Iterable[object] = (),
        before: LooseState | None = None,
    ) -> None:
        self.unknown: list[str] = []  # names of what cannot be looked into
        self._parts: list[_Names | _Content] = []
        self._networks: list[nn.Module] = []
        self._modes: list[tuple[nn.Module, bool]] = []
        self._learn: list[tuple[Tensor, bool]] = []
        self._left: list[_Change] = []
        self._records = before._gathering() if before is not None else {}
        self._state = {id(value) for value in entries(module).values()}
        self._seen = {*self._state, *map(id, others)}
        if optimizer is not None:
            self._seen |= {id(value) for value in (optimizer, optimizer.param_groups, *optimizer.param_groups)}
            self._look(self._names(f"{type(optimizer).__name__}.", vars(optimizer), _BY_CLIENT))
        self._look([("", module)])

    def changes(self) -> list[str]:
        """Names of what has changed since."""
        return sorted({change.name for change in self._changes()})

    def put_back(self) -> None:
        """Let all be as it was, without gradients."""
        self._undo(self._changes())
        self._clear_gradients()

    def end_round(self) -> None:
        """Let all be as it was, but remember what the last client has left, and show records."""
        changes = list(self._changes())
        self._undo(changes)
        self._left = [change for change in changes if not change.grown]
        for record in self._gathering().values():
            record.value[:] = record.saved + record.gathered

    def show_left(self) -> None:
        """Show hooks at an epoch's end what the last client has left in attributes, as a plain Trainer's see it."""
        for change in self._left:
            change.redo()

    def hide_left(self) -> None:
        """Put back what they have seen."""
        self._undo(self._left)
        self._left = []
        self._clear_gradients()

    def _changes(self) -> Iterator[_Change]:
        for part in self._parts:
            yield from part.changes()

    def _undo(self, changes: Iterable[_Change]) -> None:
        for change in changes:
            change.undo()
        for module, training in self._modes:
            module.training = training
        for parameter, learns in self._learn:
            if parameter.requires_grad is not learns:
                parameter.requires_grad_(learns)

    def _clear_gradients(self) -> None:
        for network in self._networks:
            network.zero_grad()

    def _gathering(self) -> dict[int, _Content]:
        return {id(part.value): part for part in self._parts if isinstance(part, _Content) and part.gathered}

    # What there is.

    def _look(self, named: Iterable[tuple[str, Any]]) -> None:
        todo = list(named)
        while todo:
            name, value = todo.pop()
            if isinstance(value, _CONSTANT) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            kind = next((kind for kind in _KINDS if isinstance(value, kind.of)), None)
            if isinstance(value, nn.Module):
                todo += self._network(name, value)
            elif kind is not None or not _is_of(value, _LEFT_ALONE):
                todo += self._value(name, value, kind)

    def _network(self, name: str, network: nn.Module) -> list[tuple[str, Any]]:
        self._networks.append(network)
        found: list[tuple[str, Any]] = []
        for path, part in network.named_modules(prefix=name):
            self._seen.add(id(part))
            own, prefix = vars(part), f"{path}." if path else ""
            self._modes.append((part, part.training))
            self._learn += [(p, p.requires_grad) for p in own["_parameters"].values() if p is not None]
            if type(part).__module__.startswith("lightning_fcl.") or _is_of(part, ("torchmetrics.",)):
                continue
            found += self._names(prefix, own, _INTERNAL)
            for values in (own["_buffers"], own["_parameters"], own["_modules"]):
                kept = {name for name, value in values.items() if value is None or id(value) in self._state}
                found += self._names(prefix, values, kept, attributes=False)
        return found

    def _value(self, name: str, value: Any, kind: _Kind | None) -> list[tuple[str, Any]]:
        if kind is not None and kind.can_change(value):
            part = _Content(name, value, kind, kind.copy(kind.read(value)))
            part.go_on_from(self._records.get(id(value)))
            self._parts.append(part)
        inner: list[tuple[str, Any]] = []
        if isinstance(value, list | tuple | set | frozenset | deque | dict):
            inner = [(name, part) for part in (value.values() if isinstance(value, dict) else value)]
        elif kind is None and not (hasattr(value, "__dict__") or callable(value) or _is_value(value)):
            self.unknown.append(name)
        return [*inner, *self._names(f"{name}.", vars(value))] if hasattr(value, "__dict__") else inner

    def _names(
        self, prefix: str, values: dict[str, Any], ignored: Set[str] = frozenset(), attributes: bool = True
    ) -> list[tuple[str, Any]]:
        saved = {name: value for name, value in values.items() if name not in ignored}
        self._parts.append(_Names(prefix, values, ignored, saved, attributes))
        return [(f"{prefix}{name}", value) for name, value in saved.items()]


def _is_of(value: object, packages: tuple[str, ...]) -> bool:
    return any(kind.__module__.startswith(packages) for kind in type(value).__mro__)


def _is_value(value: object) -> bool:
    """Whether something is what it is for good, such as a date or a path: Python's sets take it by what it says."""
    return isinstance(value, Hashable) and type(value).__eq__ is not object.__eq__


@dataclass
class _Names:
    """What stands under names: attributes, or buffers and the like, which are not shown."""

    prefix: str
    values: dict[str, Any]
    ignored: Set[str]
    saved: Mapping[str, Any]
    attributes: bool

    def changes(self) -> Iterator[_Change]:
        for name in (self.values.keys() | self.saved.keys()) - self.ignored:
            value, before = self.values.get(name, _GONE), self.saved.get(name, _GONE)
            if value is not before:
                shown = value if self.attributes else before
                yield _Change(f"{self.prefix}{name}", partial(self._put, name, before), partial(self._put, name, shown))

    def _put(self, name: str, value: object) -> None:
        self.values[name] = value
        if value is _GONE:
            del self.values[name]


class _Kind(NamedTuple):
    """How to look at the content of some type, to copy what is seen, to compare two of these, and to write one."""

    of: type | tuple[type, ...]
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]
    same: Callable[[Any, Any], bool] = operator.eq
    copy: Callable[[Any], Any] = lambda content: content
    can_change: Callable[[Any], bool] = lambda value: True


@dataclass
class _Content:
    """What is in a container, a tensor and the like, whoever holds it."""

    name: str
    value: Any
    kind: _Kind
    saved: Any
    gathered: list[Any] = field(default_factory=list)  # what clients have appended to a list

    def go_on_from(self, record: _Content | None) -> None:
        """Hide what was gathered in earlier rounds, unless a hook has changed the list since."""
        if record is not None and _same_items(self.value, record.saved + record.gathered):
            self.saved, self.gathered = record.saved, record.gathered
            self.value[:] = self.saved

    def changes(self) -> Iterator[_Change]:
        now = self.kind.read(self.value)
        if self.kind.same(now, self.saved):
            return
        if isinstance(self.value, list) and _same_items(now[: len(self.saved)], self.saved):
            yield _Change(self.name, partial(self._gather, now), tuple, grown=True)
        else:
            shown, write = now if isinstance(now, list) else self.saved, self.kind.write  # not what tensors hold
            yield _Change(self.name, partial(write, self.value, self.saved), partial(write, self.value, shown))

    def _gather(self, now: list[Any]) -> None:
        self.gathered += now[len(self.saved) :]
        self.value[:] = self.saved


def _refill(container: Any, content: list[Any]) -> None:
    container.clear()
    (container.update if isinstance(container, set) else container.extend)(content)


def _refill_dict(container: dict[Any, Any], content: list[Any]) -> None:
    container.clear()
    for key, value in zip(content[: len(content) // 2], content[len(content) // 2 :], strict=True):
        container[key] = value  # a Counter's `update` counts


def _overwrite(tensor: Tensor, content: Tensor) -> None:
    if tensor.shape == content.shape:
        tensor.data.copy_(content)
    else:
        tensor.data = content.clone()


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor can be written to: it has numbers, each in a place of its own."""
    if is_lazy(tensor) or tensor.is_meta or tensor.layout is not torch.strided:
        return False
    return all(stride or size < 2 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _same_items(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(map(operator.is_, left, right))


def _same_text(left: object, right: object) -> bool:
    return repr(left) == repr(right)


_KINDS = (
    _Kind(Tensor, Tensor.detach, _overwrite, torch.equal, Tensor.clone, _is_plain),
    _Kind(dict, lambda value: [*value, *value.values()], _refill_dict, _same_items),
    _Kind((list, deque, set), list, _refill, _same_items),
    _Kind(
        np.ndarray,
        lambda value: value,
        lambda value, content: value.__setitem__(..., content),
        lambda left, right: left.tobytes() == right.tobytes(),
        np.copy,
        lambda value: value.flags.writeable and not isinstance(value, np.memmap),
    ),
    _Kind(torch.Generator, torch.Generator.get_state, torch.Generator.set_state, torch.equal),
    _Kind(random.Random, random.Random.getstate, random.Random.setstate),
    _Kind(
        np.random.Generator,
        lambda value: value.bit_generator.state,
        lambda value, state: setattr(value.bit_generator, "state", state),
        _same_text,
    ),
    _Kind(np.random.RandomState, np.random.RandomState.get_state, np.random.RandomState.set_state, _same_text),
)
