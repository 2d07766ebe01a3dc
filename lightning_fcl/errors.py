"""Messages that say what was expected and how to mend it."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, field, fields
from difflib import get_close_matches
from functools import partial
from numbers import Integral
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar, cast

from lightning_fcl.door import WITH_AVALANCHE, put_off

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Value = TypeVar("Value")

log = logging.getLogger(__name__)

_WHOLE = ("int", int, "int | None", int | None)  # types of fields, as they are or as `annotations` leaves them

# What pip calls the packages that are imported by another name.
_DISTRIBUTIONS = {"PIL": "pillow", "avalanche": "avalanche-lib", "sklearn": "scikit-learn"}


class NoRoomError(OSError):
    """A disk is full, or a quota reached."""


def did_you_mean(name: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the last sentence of a message about an unknown name: the nearest known name, or "" if none is near."""
    lowered = {one.lower(): one for one in known}
    near = get_close_matches(str(name).lower(), list(lowered), 1, cutoff)
    if near and lowered[near[0]] == str(name):  # a number or another type that prints as the name
        return "" if isinstance(name, str) else f' Write "{name}", as text.'
    return f" Did you mean {lowered[near[0]]}?" if near else ""


def listed(names: Iterable[object], most: int = 10) -> str:
    """Names for a message: those that come first, and how many more there are."""
    all_names = [str(name) for name in names]
    shown, more = all_names[:most], len(all_names) - most
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def quoted(names: Iterable[object]) -> str:
    """Names of entries or arguments for a message: the first three, and how many more there are."""
    return listed((f"`{name}`" for name in names), most=3)


def check_clients(what: str, named: Iterable[str], clients: Collection[str]) -> None:
    """Refuse names of clients that the stream does not have; ``what`` names them, after "Expected"."""
    unknown = sorted(set(named) - set(clients), key=str)
    if unknown:
        hint = did_you_mean(unknown[0], clients)
        raise ValueError(
            f"Expected {what} of the stream's clients ({listed(clients)}) but got {listed(unknown)}.{hint}"
        )


def require(module: str, for_what: str, extra: str | None = None) -> ModuleType:
    """Import a package that not everybody has, or say ``for_what`` it is needed ("which ...") and how to install it."""
    try:
        with put_off(*WITH_AVALANCHE):
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        wanted = f'"lightning-fcl[{extra}]"' if extra else _DISTRIBUTIONS.get(missing, missing)
        raise ModuleNotFoundError(
            f"Expected `{missing}`, which {for_what}, but it is not installed. Run `pip install {wanted}`.",
            name=error.name,
        ) from error


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


def refuse_other_lightning(*parts: object) -> None:
    """Refuse objects of the package `pytorch_lightning`."""
    for reason in filter(None, map(other_lightning, map(type, parts))):
        raise TypeError(reason)


def warn_of_other_lightning() -> None:
    """Say what is wrong with modules of `pytorch_lightning`: a Trainer refuses them before a strategy sees them."""
    package = sys.modules.get("pytorch_lightning")
    for kind in package.LightningModule.__subclasses__() if package is not None else ():
        if reason := not kind.__module__.startswith("pytorch_lightning") and other_lightning(kind):
            log.warning(reason)


def _refuse(arguments: Mapping[str, float], allows: Callable[[float], bool], expected: str) -> None:
    for name, value in arguments.items():
        if not allows(value):
            raise ValueError(f"Expected `{name}` to be {expected} but got {value}.")


def at_least(low: float, **arguments: float) -> None:
    """Refuse an argument that is below ``low``, or no number."""
    _refuse(arguments, lambda value: value >= low, f"at least {low}")


def above(low: float, **arguments: float) -> None:
    """Refuse an argument that is not above ``low``."""
    _refuse(arguments, lambda value: value > low, f"above {low}")


def between(low: float, high: float, **arguments: float) -> None:
    """Refuse an argument outside of a closed range."""
    _refuse(arguments, lambda value: low <= value <= high, f"between {low} and {high}")


def share(**arguments: float) -> None:
    """Refuse an argument that is no share: above 0 and at most 1."""
    _refuse(arguments, lambda value: 0 < value <= 1, "above 0 and at most 1")


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
    *rest, last = map(_quoted, choices)
    words = f"{', '.join(rest)} or {last}" if rest else last
    for name, value in arguments.items():
        if value not in choices:
            hint = did_you_mean(value, filter(None, choices))
            raise ValueError(f"Expected `{name}` to be {words} but got {_quoted(value)}.{hint}")


def argument(default: Value, check: Callable[..., None], *bounds: object) -> Value:
    """A field of a dataclass whose values `check_fields` checks, by a check from above; a default of None is not."""
    value: Value = field(default=default, metadata={"check": partial(check, *bounds)})
    return value


def check_fields(instance: object) -> None:
    """Refuse a dataclass's values that are out of the ranges which its fields declare. See `argument`."""
    for one in fields(cast("DataclassInstance", instance)):
        value = getattr(instance, one.name, None)
        if value is None and one.default is None:
            continue
        if value is None and "check" not in one.metadata:
            if one.default is not MISSING and "None" not in str(one.type):
                raise TypeError(f"Expected `{one.name}` to be given but got None. Leave it out for {one.default!r}.")
            continue
        if one.type in _WHOLE and not isinstance(value, int):
            raise TypeError(f"Expected `{one.name}` to be a whole number but got {_quoted(value)}.")
        if one.type == "int | Sequence[int]" and not _is_whole(value):
            raise TypeError(f"Expected `{one.name}` to be a whole number, or a list of some, but got {_quoted(value)}.")
        if "check" not in one.metadata:
            continue
        try:
            one.metadata["check"](**{one.name: value})
        except TypeError as error:
            raise TypeError(f"Expected `{one.name}` to be a number but got {_quoted(value)}.") from error


def _is_whole(value: object) -> bool:
    several = isinstance(value, Sequence) and not isinstance(value, str)
    return all(isinstance(one, Integral) for one in (value if several else [value]))  # type: ignore[attr-defined]


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
