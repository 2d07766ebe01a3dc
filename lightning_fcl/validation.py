"""Checks of arguments. Messages contain the expected value, the actual value and, if possible, a hint on the fix."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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


# Names on PyPI of packages that are imported by a different name.
_DISTRIBUTIONS = {"PIL": "pillow", "avalanche": "avalanche-lib", "sklearn": "scikit-learn"}


def did_you_mean(name: object, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a sentence that suggests the most similar known name, or "" if no known name is similar.

    If a value of another type prints as a known name, the sentence says to write the value as text. The sentence starts
    with a space and is appended to the message about an unknown name.
    """
    nearest = nearest_name(name, candidates, cutoff)
    # A value of another type can print as a known name, such as the number 1 and the name "1".
    if nearest and nearest == str(name):
        return "" if isinstance(name, str) else f' Write "{name}", as text.'
    return f" Did you mean {nearest}?" if nearest else ""


def nearest_name(name: object, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known name that is most similar to a name, ignoring case. Return "" if no known name is similar."""
    lowered = {one.lower(): one for one in candidates}
    matches = get_close_matches(str(name).lower(), list(lowered), 1, cutoff)
    return lowered[matches[0]] if matches else ""


def format_names(names: Iterable[object], max_names: int = 10) -> str:
    """Return the first ``max_names`` names for a message, and the number of the remaining names."""
    all_names = [str(name) for name in names]
    shown_names, num_remaining = all_names[:max_names], len(all_names) - max_names
    return ", ".join(shown_names) + (f" and {num_remaining} more" if num_remaining > 0 else "")


def format_code_names(names: Iterable[object]) -> str:
    """Return at most three names as code for a message, and the number of the remaining names."""
    return format_names((f"`{name}`" for name in names), max_names=3)


def differing_values(first: object, second: object, name: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield the dotted name, the first value and the second value of each difference between two nested mappings.

    A value that only one mapping contains is "unset" in the other mapping.

    Example:
        >>> list(differing_values({"seed": 1, "task": {"beta": 0.1}}, {"seed": 1, "task": {"beta": 0.2}}))
        [('task.beta', 0.1, 0.2)]
    """
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for key in sorted(first.keys() | second.keys(), key=str):
            path = f"{name}.{key}" if name else str(key)
            yield from differing_values(first.get(key, "unset"), second.get(key, "unset"), path)
    elif first != second:
        yield name, first, second


def check_clients(
    setting: str, client_ids: Iterable[str], clients: Collection[str], argument: str | None = None
) -> None:
    """Raise UnknownNameError if a name in ``client_ids`` is not a client of the stream.

    Args:
        setting: Name of the argument for the message.
        client_ids: Names to check.
        clients: Names of the stream's clients.
        argument: Name of the argument for the error. Default: ``setting`` without backticks.
    """
    unknown = sorted(set(client_ids) - set(clients), key=str)
    if unknown:
        hint = (
            did_you_mean(unknown[0], clients)
            or f'Write client names as in the stream, for example "{next(iter(clients), "0")}".'
        )
        raise UnknownNameError(
            f"Expected {setting} to match clients of the stream ({format_names(clients)}), but got "
            f"{format_names(unknown)}.",
            hint=hint,
            argument=argument or setting.strip("`"),
            value=unknown,
        )


def require_package(module: str, for_what: str, extra: str | None = None) -> ModuleType:
    """Import and return a module of an optional package.

    Args:
        module: Name of the module to import.
        for_what: Purpose of the package, as a verb phrase such as "reads images". The message inserts it after "which".
        extra: Extra of lightning-fcl that installs the package. By default, the hint installs the package itself.

    Raises:
        MissingPackageError: If the package, or a package that it imports, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing, package = (error.name or module).partition(".")[0], module.partition(".")[0]
        requirement = f'"lightning-fcl[{extra}]"' if extra else _DISTRIBUTIONS.get(missing, missing)
        purpose = for_what if missing == package else f"`{package}` imports"
        absent = MissingPackageError(
            f"Expected `{missing}`, which {purpose}, but it is not installed.",
            hint=f"Run `pip install {requirement}`.",
            value=missing,
        )
        absent.name = error.name
        raise absent from error


def other_lightning(kind: type) -> str:
    """Return a message for a class that derives from a class of the package `pytorch_lightning`, otherwise "".

    `lightning.pytorch` does not recognize such classes as modules, data modules or callbacks.
    """
    if not any(base.__module__.startswith("pytorch_lightning") for base in kind.__mro__):
        return ""
    return (
        f"Expected a class of `lightning.pytorch`, but {kind.__name__} is a class of the package `pytorch_lightning`. "
        "Write `import lightning.pytorch as pl` in place of `import pytorch_lightning as pl` in the file that defines "
        "the class."
    )


def check_lightning_namespace(*objects: object) -> None:
    """Raise TypeError if the class of an object derives from a class of the package `pytorch_lightning`."""
    for kind in map(type, objects):
        if reason := other_lightning(kind):
            raise InvalidTypeError(reason, value=kind)


def warn_other_lightning() -> None:
    """Log a warning for each imported class whose direct base class is the LightningModule of `pytorch_lightning`.

    A Trainer rejects an instance of the class before the strategy can check the instance.
    """
    package = sys.modules.get("pytorch_lightning")
    for kind in package.LightningModule.__subclasses__() if package is not None else ():
        if reason := not kind.__module__.startswith("pytorch_lightning") and other_lightning(kind):
            log.warning(reason)


def _check_range(
    expected: str, arguments: Mapping[str, float], low: float, high: float = inf, is_open: bool = False
) -> None:
    """Raise TypeError if an argument is not a number, or ValueError if it is outside of a range.

    Args:
        expected: Description of the range for the message.
        arguments: Values by name.
        low: Lower bound.
        high: Upper bound.
        is_open: Whether the lower bound is excluded from the range.
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
    """Raise ValueError if an argument is below ``low``, or TypeError for an argument that is not a number."""
    _check_range(f"at least {low}", arguments, low)


def above(low: float, **arguments: float) -> None:
    """Raise ValueError if an argument is not above ``low``, or TypeError for an argument that is not a number."""
    _check_range(f"above {low}", arguments, low, is_open=True)


def between(low: float, high: float, **arguments: float) -> None:
    """Raise ValueError if an argument is below ``low`` or above ``high``, or TypeError if it is not a number."""
    _check_range(f"between {low} and {high}", arguments, low, high)


def unit_interval(**arguments: float) -> None:
    """Raise ValueError if an argument is at most 0 or above 1, or TypeError if it is not a number."""
    _check_range("above 0 and at most 1", arguments, 0, 1, is_open=True)


def warn_of_one(argument: str, value: float, number: str, share: str) -> None:
    """Warn if an argument that accepts a count or a fraction is the integer 1, because the fraction 1.0 may be meant.

    Args:
        argument: Name of the argument.
        value: Value of the argument. An integer is a count, a float is a fraction.
        number: Meaning of 1, such as "1 client per round".
        share: Meaning of 1.0, such as "all clients".
    """
    if isinstance(value, int) and value == 1:
        from lightning_utilities.core.rank_zero import rank_zero_only

        rank_zero_only(log.warning)("`%s` is the integer 1, which means %s. Write 1.0 for %s.", argument, number, share)


def one_of(choices: Collection[str | None], **arguments: object) -> None:
    """Raise UnknownNameError if an argument is not one of the choices. None can be a choice."""
    words = describe_choices(choices)
    for name, value in arguments.items():
        if value not in choices:
            hint = did_you_mean(value, filter(None, choices))
            raise UnknownNameError(
                f"Expected `{name}` to be {words} but got {quoted_value(value)}.", hint=hint, argument=name, value=value
            )


def validated(default: Value, check: Callable[..., None], *bounds: object) -> Value:
    """Return a dataclass field whose value `validate_fields` checks. If the default is None, None is not checked.

    Args:
        default: Default of the field.
        check: One of the checks of this module, such as `at_least`.
        *bounds: Bounds to pass to the check.
    """
    value: Value = field(default=default, metadata={"check": partial(check, *bounds)})
    return value


def validate_fields(instance: object) -> None:
    """Raise TypeError if a field of a dataclass does not match its annotation, or ValueError if the value is invalid.

    `validated` declares the check of a value, such as a range. NumPy numbers are converted to Python numbers.
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
                hint=f"Leave `{data_field.name}` out for the default, {data_field.default!r}.",
                argument=data_field.name,
            )
        default = Parameter.empty if data_field.default is MISSING else data_field.default
        checked = check_argument(data_field.name, value, types[data_field.name], default)
        if checked is not value:
            object.__setattr__(instance, data_field.name, checked)  # frozen dataclasses reject plain assignment
        if "check" in data_field.metadata and value is not None:
            data_field.metadata["check"](**{data_field.name: checked})


def check_argument(name: str, value: object, hint: Any, default: object = Parameter.empty) -> Any:
    """Return the value of an argument if the annotation accepts it. Convert a NumPy number to a Python number.

    Raises:
        TypeError: If the value does not match the annotation.
        ValueError: If the value is NaN, or is not one of the strings of a `Literal`.
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
    """Wrap a function so that it raises TypeError or ValueError if an argument does not match its annotation.

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
        except TypeError:
            # The call raises the error again, with the name of the function in the message.
            return make(*args, **kwargs)
        for name, value in bound.arguments.items():
            parameter = parameters.parameters[name]
            if name in types() and parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
                bound.arguments[name] = check_argument(name, value, types()[name], parameter.default)
        return make(*bound.args, **bound.kwargs)

    return checked
