"""Descriptions of networks and tasks as plain data, and functions that create the objects again.

Only networks of this package and torch's optimizers are created from a description. The class and its arguments are
checked before the class is called. A description cannot import other modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from importlib import import_module
from types import UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

import torch
from torch import nn

from lightning_fcl.annotations import accepts, all_argument_types, to_plain
from lightning_fcl.errors import InvalidValueError, UnknownNameError
from lightning_fcl.validation import check_arguments, did_you_mean

Arguments = ParamSpec("Arguments")
Made = TypeVar("Made", bound="Serializable")

_MODELS, _OPTIMIZERS = "lightning_fcl.models", "torch.optim"


class Serializable(nn.Module):
    """A module whose ``init_config`` describes how it was created: its class path and arguments as plain data."""

    init_config: dict[str, Any]
    __signature__: inspect.Signature

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls) and cls.__module__.partition(".")[0] == __name__.partition(".")[0]:
            setattr(cls, "__init__", check_arguments(cls.__init__))  # noqa: B010 # mypy rejects an assignment
        signature = inspect.signature(cls.__init__)
        cls.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])

    def __new__(cls, *args: object, **kwargs: object) -> Serializable:
        instance = super().__new__(cls)
        object.__setattr__(instance, "init_config", _description(cls, args, kwargs))
        return instance


def serializable(make: Callable[Arguments, Made]) -> Callable[Arguments, Made]:
    """Decorate a function that creates a network. The network's ``init_config`` then describes the function call."""
    make = check_arguments(make)

    @wraps(make)
    def making(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Made:
        network = make(*args, **kwargs)
        network.init_config = _description(make, args, kwargs)
        return network

    return making


def to_plain_config(value: object) -> Any:
    """Return an argument as plain data, or only the class path of an object that cannot be created again."""
    value = to_plain(value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Serializable):
        return value.init_config
    if isinstance(value, list | tuple):
        return [to_plain_config(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_plain_config(item) for key, item in value.items()}
    subject, arguments = value, {}
    # An optimizer of a recipe is a `partial` of a factory. The optimizer class is its last positional argument.
    if isinstance(value, partial):
        *_, subject = (value.func, *value.args)
        arguments = to_plain_config(value.keywords)
    if isinstance(subject, type) and _class_named(path := f"{_OPTIMIZERS}.{subject.__name__}") is subject:
        return {"class_path": path, "init_args": arguments}
    kind = subject if isinstance(subject, type) or inspect.isroutine(subject) else type(subject)
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}"}


def build_from_config(init_config: object, name: str) -> Any:
    """Return the argument that a result of `to_plain_config` describes. The description can be untrusted.

    For an optimizer, return a `functools.partial` that creates the optimizer.

    Args:
        init_config: Description of the argument.
        name: Name of the argument for messages.

    Raises:
        InvalidValueError: If a class is not a network of `lightning_fcl.models` or an optimizer, or if an argument has
            a wrong type.
        UnknownNameError: If an argument of a class is missing or unknown.
    """
    if isinstance(init_config, list | tuple):
        return [build_from_config(item, name) for item in init_config]
    if not isinstance(init_config, Mapping):
        return init_config
    if "class_path" not in init_config:
        return {key: build_from_config(item, f"{name}.{key}") for key, item in init_config.items()}
    make, arguments = _class_named(init_config["class_path"]), init_config.get("init_args")
    if make is None or not isinstance(arguments, Mapping):
        top = name.partition(".")[0]
        raise InvalidValueError(
            f"Expected the object `{top}` to be passed, because its description names {init_config['class_path']}. "
            f"Only networks of `{_MODELS}` and optimizers of `{_OPTIMIZERS}` can be created from a description, "
            "which must contain `init_args`.",
            hint=f"Pass the object as `{top}=...`.",
            argument=top,
        )
    arguments = {key: build_from_config(value, f"{name}.{key}") for key, value in arguments.items()}
    if make.__module__.startswith(_OPTIMIZERS):
        cast = validate_arguments(make, {"params": [], **arguments}, name)
        return partial(make, **{key: cast[key] for key in arguments})
    return make(**validate_arguments(make, arguments, name))


def validate_arguments(make: Callable[..., object], arguments: Mapping[str, object], name: str) -> dict[str, object]:
    """Return plain arguments, converted to the types that a class or function declares. Nothing is called.

    Args:
        make: The class or function.
        arguments: Arguments by name.
        name: Name of the object for messages.

    Raises:
        UnknownNameError: If an argument is missing or unknown.
        InvalidValueError: If an argument has a wrong type.
    """
    signature = inspect.signature(make)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        hint = "".join(did_you_mean(key, signature.parameters) for key in arguments if key not in signature.parameters)
        raise UnknownNameError(
            f"Expected valid arguments of {_named(make)} for `{name}`, but the call fails: {error}.",
            hint=hint,
            argument=name,
        ) from None
    types = all_argument_types(make)
    cast: dict[str, object] = {}
    for key, value in arguments.items():
        hint = types.get(key, Any)
        try:
            cast[key] = _cast(value, hint)
        except TypeError:
            kind = hint.__name__ if isinstance(hint, type) and not get_origin(hint) else hint
            raise InvalidValueError(
                f"Expected `{name}.{key}` to be of type {kind}, but got {value!r}.",
                argument=f"{name}.{key}",
                value=value,
            ) from None
    return cast


def _description(make: Callable[..., object], args: Iterable[object], kwargs: Mapping[str, object]) -> dict[str, Any]:
    signature = inspect.signature(make)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:  # the call itself also raises this error, or `copy` calls `__new__` without arguments
        return {}
    bound.apply_defaults()
    arguments: dict[str, object] = {}
    for key, value in bound.arguments.items():
        arguments |= value if signature.parameters[key].kind is inspect.Parameter.VAR_KEYWORD else {key: value}
    return {"class_path": _named(make), "init_args": to_plain_config(arguments)}


def _named(make: Callable[..., object]) -> str:
    public = make.__module__.startswith(_MODELS) and make.__name__ in import_module(_MODELS).__all__
    return f"{_MODELS if public else make.__module__}.{make.__name__}"


def _class_named(path: object) -> Callable[..., Any] | None:
    """Return the network class, network function or optimizer class with a public name, or None if there is none."""
    package, _, name = str(path).rpartition(".")
    if package == _MODELS and name in import_module(_MODELS).__all__:
        make: Callable[..., Any] = getattr(import_module(_MODELS), name)
        return make if not isinstance(make, type) or issubclass(make, Serializable) else None
    if package == _OPTIMIZERS:
        optimizer_class = vars(torch.optim).get(name)
        return (
            optimizer_class
            if isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
            else None
        )
    return None


def _cast(value: Any, hint: Any) -> Any:
    """Return plain data converted to the type of an annotation, such as a list to a tuple, or raise TypeError."""
    origin, type_args = get_origin(hint), get_args(hint)
    if origin is Literal:
        fits = value in type_args
    elif origin in (Union, UnionType):
        for type_arg in type_args:
            with suppress(TypeError):
                return _cast(value, type_arg)
        fits = False
    elif origin in (list, tuple, Sequence, Iterable) and isinstance(value, list):
        items = [_cast(item, type_args[min(place, len(type_args) - 1)]) for place, item in enumerate(value)]
        return tuple(items) if origin is tuple else items
    elif origin in (dict, Mapping) and isinstance(value, dict):
        return {_cast(key, type_args[0]): _cast(item, type_args[1]) for key, item in value.items()}
    elif hint is Any:
        fits = True
    elif origin is not None:
        fits = isinstance(value, origin) and not isinstance(value, str)
    elif hint in (int, float):
        fits = accepts(value, hint)
    else:
        fits = isinstance(value, hint) if isinstance(hint, type) else True
    if not fits:
        raise TypeError
    return value
