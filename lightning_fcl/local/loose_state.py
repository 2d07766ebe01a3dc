"""What a module and its optimizer hold beside their state: for each client as it was at the start of the round."""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Set
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fcl.federation.aggregation import entries
from lightning_fcl.local.contents import Change, Content, Kind, Names, kind_of

INTERNAL = frozenset(vars(L.LightningModule()))
_BY_CLIENT = frozenset({"state", "param_groups", "defaults"})  # of an optimizer: they begin anew elsewhere
CONSTANT = (
    *(type(None), bool, int, float, complex, str, bytes, range, type, torch.dtype, torch.device),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
    *(weakref.ReferenceType, weakref.ProxyType, weakref.CallableProxyType),
)
# What is no state of a client, by the package of its class or of a parent: what Lightning and this library run by, what
# gathers over a round, data, and ways to the outside.
LEFT_ALONE = (
    *("lightning.", "lightning_fcl.", "torchmetrics.", "torch._", "torch.distributed.", "torch.fx.", "torch.jit."),
    *("torch.utils.", "logging", "threading", "_thread", "queue", "socket", "asyncio", "concurrent.", "_io", "tqdm."),
    *("multiprocessing", "rich.", "matplotlib.", "wandb.", "mlflow.", "comet_ml.", "neptune.", "clearml."),
    *("tensorboard", "aim."),
)


class LooseState:
    """What a module and its optimizer hold beside their state when this is made: attributes, and buffers not kept.

    Attributes are looked into as far as they are containers, tensors, arrays, generators of random numbers, networks or
    objects of a user's own. Metrics of torchmetrics, parts of this library and of Lightning, and data sets are left
    alone. A list to which clients append is a record: none finds what others have appended, but after the round, and
    after later ones, all of it is there.

    Args:
        module: The module. Its `entries` are no part of it.
        optimizers: Its optimizers, whose state and groups are no part of it.
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
        optimizers: Iterable[Optimizer] = (),
        others: Iterable[object] = (),
        before: LooseState | None = None,
    ) -> None:
        self.unknown: list[str] = []  # names of what cannot be looked into
        self._parts: list[Names | Content] = []
        self._modes: list[tuple[str, nn.Module, bool]] = []
        self._learn: list[tuple[str, Tensor, bool]] = []
        self._left: list[Change] = []
        self._settled = self._shown = False
        self._leaves: list[Tensor] = []
        self._records = before._gathering() if before is not None else {}
        self._state = {id(value) for value in entries(module).values()}
        self._seen = {*self._state, *map(id, others)}
        for optimizer in optimizers:
            self._seen |= {id(value) for value in (optimizer, optimizer.param_groups, *optimizer.param_groups)}
            self._look(self._names(f"{type(optimizer).__name__}.", vars(optimizer), _BY_CLIENT))
        self._look([("", module)])

    def changes(self) -> list[str]:
        """Names of what has changed since."""
        modes = [f"{name}training" for name, module, training in self._modes if module.training is not training]
        learn = [f"{name}.requires_grad" for name, value, learns in self._learn if value.requires_grad is not learns]
        return sorted({*modes, *learn, *(change.name for change in self._changes())})

    def put_back(self) -> None:
        """Let all be as it was, for another client, without gradients."""
        _undo(self._changes())
        self._put_back_flags()
        self._clear_gradients()

    def end_clients(self) -> None:
        """Let all be as it was, but remember what the last client has left, and show records."""
        self._leave()
        self._put_back_flags()

    def go_on(self) -> None:
        """What hooks have changed since then is the server's; those to come see what the last client has left."""
        for part in self._parts:
            part.accept()
        self._learn = [(name, parameter, parameter.requires_grad) for name, parameter, _ in self._learn]
        self.show_left()

    def settle(self) -> None:
        """After the last hook of the last client: let all be as it was, once, but remember what is left."""
        if not self._settled:
            self._leave()
            self._clear_gradients()
            self._settled, self._shown = True, False

    def show_left(self) -> None:
        """Show hooks what the last client has left in attributes, as a plain Trainer's see it."""
        for change in self._left:
            change.redo()
        self._shown = True

    def hide_left(self) -> None:
        """Put back what they have seen, if they have, but for what they have changed: that is the server's."""
        if self._shown:
            _undo([change for change in self._left if change.is_shown()])
            self._shown = False

    def gather(self, value: list[Any], items: list[Any]) -> bool:
        """Replace the items that clients of this round have appended to a list. Return whether the list is a record."""
        found = (part for part in self._parts if isinstance(part, Content) and part.value is value)
        record = next(found, None)
        if record is not None:
            record.gather(items)
        return record is not None

    def _changes(self) -> Iterator[Change]:
        for part in self._parts:
            yield from part.changes()

    def _leave(self) -> None:
        changes = list(self._changes())
        _undo(changes)
        self._left = [change for change in changes if not change.grown]
        for record in self._gathering().values():
            record.show()
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

    def _gathering(self) -> dict[int, Content]:
        return {id(part.value): part for part in self._parts if isinstance(part, Content) and part.gathered}

    # What there is.

    def _look(self, named: Iterable[tuple[str, Any]]) -> None:
        todo = list(named)
        while todo:
            name, value = todo.pop()
            if isinstance(value, CONSTANT) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            kind = kind_of(value)
            if isinstance(value, nn.Module):
                todo += self._network(name, value)
            elif kind is not None or not is_of(value, LEFT_ALONE):
                todo += self._value(name, value, kind)

    def _network(self, name: str, network: nn.Module) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        for path, part in network.named_modules(prefix=name):
            self._seen.add(id(part))
            own, prefix = vars(part), f"{path}." if path else ""
            self._modes.append((prefix, part, part.training))
            learning = {n: p for n, p in own["_parameters"].items() if p is not None}
            self._learn += [(f"{prefix}{n}", p, p.requires_grad) for n, p in learning.items()]
            if type(part).__module__.startswith("lightning_fcl.") or is_of(part, ("torchmetrics.",)):
                continue
            found += self._names(prefix, own, INTERNAL)
            for values in (own["_buffers"], own["_parameters"], own["_modules"]):
                kept = {name for name, value in values.items() if value is None or id(value) in self._state}
                found += self._names(prefix, values, kept, attributes=False)
        return found

    def _value(self, name: str, value: Any, kind: Kind | None) -> list[tuple[str, Any]]:
        if kind is not None and kind.can_change(value):
            part = Content(name, value, kind, kind.copy(kind.read(value)))
            part.go_on_from(self._records.get(id(value)))
            self._parts.append(part)
        inner: list[tuple[str, Any]] = []
        # As a date or a path is: Python's sets take it by what it says.
        for_good = isinstance(value, Hashable) and type(value).__eq__ is not object.__eq__
        if isinstance(value, Tensor) and value.is_leaf and value.requires_grad:
            self._leaves.append(value)
        if isinstance(value, list | tuple | set | frozenset | deque | dict):
            inner = [(name, part) for part in (value.values() if isinstance(value, dict) else value)]
        elif kind is None and not (hasattr(value, "__dict__") or callable(value) or for_good):
            self.unknown.append(name)
        return [*inner, *self._names(f"{name}.", vars(value))] if hasattr(value, "__dict__") else inner

    def _names(
        self, prefix: str, values: dict[str, Any], ignored: Set[str] = frozenset(), attributes: bool = True
    ) -> list[tuple[str, Any]]:
        self._parts.append(Names(prefix, values, ignored, dict(values), attributes))
        return [(f"{prefix}{name}", value) for name, value in values.items() if name not in ignored]


def _undo(changes: Iterable[Change]) -> None:
    for change in changes:
        change.undo()


def is_of(value: object, packages: tuple[str, ...]) -> bool:
    return any(kind.__module__.startswith(packages) for kind in type(value).__mro__)
