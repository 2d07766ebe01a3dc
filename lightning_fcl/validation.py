"""Checks of arguments. Their messages say what was expected, what was found and how to fix it."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, field, fields
from difflib import get_close_matches
from functools import cache, partial, wraps
from inspect import Parameter, signature
from math import inf
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, cast, get_origin

from lightning_fcl.annotations import (
    accepts,
    describe_choices,
    explain,
    field_types,
    is_nan,
    is_number,
    literal_words,
    quoted_value,
    resolve_annotations,
    to_plain,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
from lightning_fcl.errors import InvalidTypeError, InvalidValueError, MissingPackageError, UnknownNameError

Parameters = ParamSpec("Parameters")


Value = TypeVar("Value")


log = logging.getLogger(__name__)


# What pip calls the packages that are imported by another name.
_DISTRIBUTIONS = {"PIL": "pillow", "avalanche": "avalanche-lib", "sklearn": "scikit-learn"}


def did_you_mean(name: object, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the last sentence of a message about an unknown name: the nearest known name, or "" if none is near."""
    nearest = nearest_name(name, candidates, cutoff)
    if nearest and nearest == str(name):  # a number or another type that prints as the name
        return "" if isinstance(name, str) else f' Write "{name}", as text.'
    return f" Did you mean {nearest}?" if nearest else ""


def nearest_name(name: object, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known name that is nearest to another one, whatever its case; empty if none is near."""
    lowered = {one.lower(): one for one in candidates}
    matches = get_close_matches(str(name).lower(), list(lowered), 1, cutoff)
    return lowered[matches[0]] if matches else ""


def format_names(names: Iterable[object], max_names: int = 10) -> str:
    """Names for a message: those that come first, and how many more there are."""
    all_names = [str(name) for name in names]
    shown_names, num_remaining = all_names[:max_names], len(all_names) - max_names
    return ", ".join(shown_names) + (f" and {num_remaining} more" if num_remaining > 0 else "")


def format_code_names(names: Iterable[object]) -> str:
    """Names of entries or arguments for a message: the first three, and how many more there are."""
    return format_names((f"`{name}`" for name in names), max_names=3)


def check_clients(setting: str, client_ids: Iterable[str], clients: Collection[str]) -> None:
    """Refuse names of clients that the stream does not have; ``setting`` names them, after "Expected"."""
    unknown = sorted(set(client_ids) - set(clients), key=str)
    if unknown:
        hint = (
            did_you_mean(unknown[0], clients) or f'Write names as the stream does, as in "{next(iter(clients), "0")}".'
        )
        raise UnknownNameError(
            f"Expected {setting} of the stream's clients ({format_names(clients)}) but got {format_names(unknown)}.",
            hint=hint,
            argument=setting.strip("`"),
            value=unknown,
        )


def require_package(module: str, for_what: str, extra: str | None = None) -> ModuleType:
    """Import a package that not everybody has, or say ``for_what`` it is needed ("which ...") and how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        requirement = f'"lightning-fcl[{extra}]"' if extra else _DISTRIBUTIONS.get(missing, missing)
        absent = MissingPackageError(
            f"Expected `{missing}`, which {for_what}, but it is not installed.",
            hint=f"Run `pip install {requirement}`.",
            value=missing,
        )
        absent.name = error.name
        raise absent from error


def other_lightning(kind: type) -> str:
    """What to do about a class of the package `pytorch_lightning`, or one that derives from it; empty for all others.

    To `lightning.pytorch` these are strangers: it looks for modules, data modules and callbacks of its own.
    """
    if not any(base.__module__.startswith("pytorch_lightning") for base in kind.__mro__):
        return ""
    return (
        f"Expected parts of `lightning.pytorch` but {kind.__name__} is one of `pytorch_lightning`, another package. "
        "Write `import lightning.pytorch as pl` in place of `import pytorch_lightning as pl` where it is defined."
    )


def check_lightning_namespace(*objects: object) -> None:
    """Raise TypeError if an object is of the package `pytorch_lightning`."""
    for kind in map(type, objects):
        if reason := other_lightning(kind):
            raise InvalidTypeError(reason, value=kind)


def warn_other_lightning() -> None:
    """Say what is wrong with modules of `pytorch_lightning`: a Trainer refuses them before a strategy sees them."""
    package = sys.modules.get("pytorch_lightning")
    for kind in package.LightningModule.__subclasses__() if package is not None else ():
        if reason := not kind.__module__.startswith("pytorch_lightning") and other_lightning(kind):
            log.warning(reason)


def _check_range(
    expected: str, arguments: Mapping[str, float], low: float, high: float = inf, is_open: bool = False
) -> None:
    """Raise TypeError or ValueError if an argument is not a number, or not in a range.

    Args:
        expected: Name of the range for the message.
        arguments: Values by name.
        low: Lower bound.
        high: Upper bound.
        is_open: Whether the lower bound itself is out of range.
    """
    for name, value in arguments.items():
        if not is_number(value):
            message, hint = explain(name, value, float)
            raise InvalidTypeError(message, hint=hint, argument=name, value=value)
        if (value > low if is_open else value >= low) and value <= high:
            continue
        fix = f"Use a number above {low}." if is_open else f"Use {low} or more."
        if value > high:
            fix = f"Use {high} or less."
        raise InvalidValueError(
            f"Expected `{name}` to be {expected} but got {value}.", hint=fix, argument=name, value=value
        )


def at_least(low: float, **arguments: float) -> None:
    """Raise ValueError if an argument is below ``low``."""
    _check_range(f"at least {low}", arguments, low)


def above(low: float, **arguments: float) -> None:
    """Raise ValueError if an argument is not above ``low``."""
    _check_range(f"above {low}", arguments, low, is_open=True)


def between(low: float, high: float, **arguments: float) -> None:
    """Raise ValueError if an argument is outside of a closed range."""
    _check_range(f"between {low} and {high}", arguments, low, high)


def unit_interval(**arguments: float) -> None:
    """Raise ValueError if an argument is not a share, above 0 and at most 1."""
    _check_range("above 0 and at most 1", arguments, 0, 1, is_open=True)


def warn_of_one(argument: str, value: float, number: str, share: str) -> None:
    """Warn if an argument that takes a number or a share is the integer 1, which is not the share 1.0.

    Args:
        argument: Name of the argument.
        value: Value of the argument. An integer is a number, a float is a share.
        number: Meaning of 1, such as "1 client per round".
        share: Meaning of 1.0, such as "all clients".
    """
    if isinstance(value, int) and value == 1:
        from lightning_utilities.core.rank_zero import rank_zero_only

        rank_zero_only(log.warning)("`%s` is the integer 1, which is %s. Write 1.0 for %s.", argument, number, share)


def one_of(choices: Collection[str | None], **arguments: object) -> None:
    """Refuse an argument that is none of some words, of which None may be one."""
    words = describe_choices(choices)
    for name, value in arguments.items():
        if value not in choices:
            hint = did_you_mean(value, filter(None, choices))
            raise UnknownNameError(
                f"Expected `{name}` to be {words} but got {quoted_value(value)}.", hint=hint, argument=name, value=value
            )


def validated(default: Value, check: Callable[..., None], *bounds: object) -> Value:
    """A field of a dataclass whose values `validate_fields` checks, by a check from above; a default of None is not."""
    value: Value = field(default=default, metadata={"check": partial(check, *bounds)})
    return value


def validate_fields(instance: object) -> None:
    """Raise TypeError or ValueError if the value of a dataclass's field does not fit its annotation or its range.

    `validated` declares the range. Numbers of NumPy become numbers of Python.
    """
    kind: type = type(instance)
    types = field_types(kind)
    for data_field in fields(cast("DataclassInstance", instance)):
        value = getattr(instance, data_field.name, None)
        if not data_field.init or (value is None and data_field.default is None):
            continue
        if value is None and data_field.default is not MISSING and not accepts(None, types[data_field.name]):
            raise InvalidTypeError(
                f"Expected `{data_field.name}` to be given but got None.",
                hint=f"Leave it out for {data_field.default!r}.",
                argument=data_field.name,
            )
        default = Parameter.empty if data_field.default is MISSING else data_field.default
        checked = check_argument(data_field.name, value, types[data_field.name], default)
        if checked is not value:
            object.__setattr__(instance, data_field.name, checked)  # also in frozen classes
        if "check" in data_field.metadata and value is not None:
            data_field.metadata["check"](**{data_field.name: checked})


def check_argument(name: str, value: object, hint: Any, default: object = Parameter.empty) -> Any:
    """Return the value of an argument, a number of NumPy as a number of Python.

    Raises:
        TypeError: If the value does not fit the annotation.
        ValueError: If the value is NaN, or not one of the words of a `Literal`.
    """
    if accepts(value, hint):
        return to_plain(value)
    words = literal_words(hint) if isinstance(value, str) else []
    if get_origin(hint) is Literal and words:
        one_of(words, **{name: value})
    error = InvalidValueError if words or is_nan(value) else InvalidTypeError
    message, fix = explain(name, value, hint, default)
    raise error(message, hint=fix, argument=name, value=value)


def check_arguments(make: Callable[Parameters, Value]) -> Callable[Parameters, Value]:
    """Let a function, or ``__init__``, raise TypeError or ValueError if an argument does not fit its annotation.

    Example:
        >>> @check_arguments
        ... def train(batch_size: int = 32) -> None: ...
        >>> train(batch_size="16")
        Traceback (most recent call last):
        lightning_fcl.errors.InvalidTypeError: \
Expected `batch_size` to be a whole number, but got "16". Use `batch_size=16`.
    """
    parameters = signature(make)

    @cache
    def types() -> dict[str, Any]:
        return resolve_annotations(make.__annotations__, make.__module__)

    @wraps(make)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Value:
        try:
            bound = parameters.bind(*args, **kwargs)
        except TypeError:  # the call raises it again, with the name of the function
            return make(*args, **kwargs)
        for name, value in bound.arguments.items():
            parameter = parameters.parameters[name]
            if name in types() and parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
                bound.arguments[name] = check_argument(name, value, types()[name], parameter.default)
        return make(*bound.args, **bound.kwargs)

    return checked
