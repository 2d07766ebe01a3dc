"""Search for objects that code can reach: attributes, containers, closures, class attributes and globals."""

from __future__ import annotations

import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple

import lightning.pytorch as L
import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from lightning_fcl.snapshot_values import CONSTANT, LEFT_ALONE, is_of

_SIMPLE = (*CONSTANT, Tensor, np.ndarray, np.generic)
_CONTAINERS = (dict, list, tuple, deque)
_LEFT_ALONE = (*LEFT_ALONE, "lightning_fcl.", "PIL.", "pandas.", "pyarrow.", "h5py.")
# Packages whose classes and functions are known. Their class attributes and globals contain no state of the user.
_KNOWN = ("numpy.", "torch.", "torchvision.", *_LEFT_ALONE)
_STANDARD = frozenset({"builtins", "abc", "typing", "collections", "functools", "enum", "dataclasses"})

_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


class Reachable(NamedTuple):
    """An object that code can reach.

    Args:
        path: Path from the start object, such as ``transform.transforms[0].rng``.
        value: The object.
        held: Function that returns the attributes, items or variables of the object, keyed by their paths.
    """

    path: str
    value: Any
    held: Callable[[], dict[str, Any]]


def reachable(roots: Mapping[str, object]) -> Iterator[Reachable]:
    """Yield each object that can be reached from the start objects. Each object is yielded once, the nearest first.

    The order and the paths are identical in each process. Tensors, arrays and objects without attributes are included.
    Constants are left out. The items of containers are left out if all of them are constants, tensors or arrays.

    Args:
        roots: The start objects, keyed by the first part of their paths. The first part may be empty.
    """
    todo = deque(roots.items())
    seen_ids: set[int] = set()
    while todo:
        path, value = todo.popleft()
        if id(value) in seen_ids or isinstance(value, CONSTANT):
            continue
        seen_ids.add(id(value))
        node = Reachable(path, value, _held_by(path, value))
        yield node
        todo.extend(node.held().items())


def _held_by(path: str, value: Any) -> Callable[[], dict[str, Any]]:
    if isinstance(value, _SIMPLE):
        return dict
    if isinstance(value, types.FunctionType):
        return lambda: _variables_of(path, value)
    if isinstance(value, types.MethodType):
        return lambda: {f"{path}.__func__": value.__func__, f"{path}.__self__": value.__self__}
    if isinstance(value, partial):
        return lambda: {f"{path}.func": value.func, f"{path}.args": value.args, f"{path}.keywords": value.keywords}
    if isinstance(value, _CONTAINERS):
        items = dict if _is_simple(value) else partial(_items_of, path, value)
        return (lambda: {**items(), **_attributes_of(path, value)}) if hasattr(value, "__dict__") else items
    return partial(_attributes_of, path, value) if _is_looked_into(value) else dict


def _items_of(path: str, container: Any) -> dict[str, Any]:
    pairs = container.items() if isinstance(container, dict) else enumerate(container)
    return {f"{path}[{key!r}]": item for key, item in pairs}


def _is_looked_into(value: object) -> bool:
    """Return whether the attributes of an object are searched."""
    if isinstance(value, Dataset):
        return True
    # `collate_fn` may be a method of the module.
    if isinstance(value, L.LightningDataModule | L.LightningModule):
        return not type(value).__module__.startswith("lightning_fcl.")
    return not is_of(value, _LEFT_ALONE)


def _attributes_of(path: str, value: object) -> dict[str, Any]:
    prefix, attributes = f"{path}." if path else "", getattr(value, "__dict__", None)
    names = dict(attributes) if isinstance(attributes, dict) else {}
    for name in _slots(type(value)):
        if hasattr(value, name):
            names[name] = getattr(value, name)
    return {**{f"{prefix}{name}": item for name, item in names.items()}, **_class_attributes_of(type(value))}


def _is_known(module: str) -> bool:
    return module in _STANDARD or module.startswith(_KNOWN)


def _slots(kind: type) -> tuple[str, ...]:
    """Return the names of the attributes that a class and its base classes store in slots."""
    slot_declarations = (vars(base).get("__slots__", ()) for base in kind.__mro__ if not _is_known(base.__module__))
    names = chain.from_iterable([own] if isinstance(own, str) else own for own in slot_declarations)
    return tuple(name for name in names if not name.startswith("__"))


def _class_attributes_of(kind: type) -> dict[str, Any]:
    """Return the attributes and methods of a class and its base classes, by paths that start with a class's name."""
    attributes: dict[str, Any] = {}
    for base in kind.__mro__:
        if _is_known(base.__module__):
            continue
        for name, item in vars(base).items():
            function = _function_of(item)
            if function is not None or not name.startswith("__"):
                attributes[f"{base.__qualname__}.{name}"] = item if function is None else function
    return attributes


def _function_of(item: object) -> types.FunctionType | None:
    if isinstance(item, staticmethod | classmethod):
        item = item.__func__
    elif isinstance(item, property):
        item = item.fget
    return item if isinstance(item, types.FunctionType) else None


def _variables_of(path: str, function: types.FunctionType) -> dict[str, Any]:
    """Return the variables that a function uses: closure variables, defaults and attributes.

    Global variables are included, unless the code is part of the standard library or of an installed package. The
    result is empty for functions of packages such as torch and NumPy.
    """
    if _is_known(function.__module__ or ""):
        return {}
    values_by_path: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values_by_path[f"{path}.{name}"] = cell.cell_contents
        except ValueError:
            # The variable has no value yet.
            continue
    values_by_path |= {f"{path}.__defaults__": function.__defaults__, f"{path}.__kwdefaults__": function.__kwdefaults__}
    values_by_path |= {f"{path}.{name}": value for name, value in vars(function).items()}
    if _is_installed(function.__code__.co_filename):
        return values_by_path
    # In a spawned process, the main script has the module name `__mp_main__`.
    module = (function.__module__ or "").replace("__mp_main__", "__main__")
    variables = function.__globals__
    return values_by_path | {
        f"{module}.{name}": variables[name] for name in _names_in(function.__code__) if name in variables
    }


@lru_cache(maxsize=4096)
def _is_installed(file: str) -> bool:
    return file.startswith(_STANDARD_LIBRARY) or "site-packages" in file or "dist-packages" in file


@lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of globals that code may use, including the code of functions that are defined inside."""
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return tuple(dict.fromkeys(chain(code.co_names, *inner)))


def _values(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _is_simple(container: Any) -> bool:
    """Return whether a container has only constants, tensors and arrays. False if it has more than four levels."""
    containers = [container]
    for _ in range(4):
        kinds = set[type]()
        for value in containers:
            kinds.update(map(type, _values(value)))
        nested = kinds & {tuple, list, dict}
        if not all(issubclass(kind, _SIMPLE) for kind in kinds - nested):
            return False
        if not nested:
            return True
        containers = [item for value in containers for item in _values(value) if type(item) in nested]
    return False
