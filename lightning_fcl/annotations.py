"""Checks of values against the type annotations of arguments, and error messages for values that do not match.

The checks support annotations of numbers, choices, lists, mappings and objects. They also detect a class that is passed
in place of an object.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import lru_cache
from inspect import Parameter, signature, unwrap
from numbers import Integral, Number, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

_PACKAGE = "lightning_fcl"
# If the annotation is a class of these packages, a number, a string, None or a class is rejected unless it is an
# instance of the annotation.
_STRICT = (_PACKAGE, "lightning", "numpy", "torch")
_SEQUENCES = (list, tuple, Sequence, Iterable, Collection)
_WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "a string", NoneType: "None"}
_FUNCTION: Any = Callable
# Modules of classes whose objects are never created from a recipe.
_PLAIN = ("builtins", "types", "collections.abc", "pathlib", "typing")
_TRUTH = dict.fromkeys(("true", "yes", "on", "1", "1.0"), True) | dict.fromkeys(
    ("false", "no", "off", "0", "0.0"), False
)


class _Names(dict[str, Any]):
    """The names of a module. A missing name maps to the built-in object with this name, or to `Any`."""

    def __missing__(self, name: str) -> Any:
        return vars(sys.modules["builtins"]).get(name, Any)


def resolve_annotations(annotations: Mapping[str, Any], module: str) -> dict[str, Any]:
    """Return the type of each annotation, by name. Strings are evaluated with the names of ``module``.

    If a string cannot be evaluated, its type is `Any`.
    """
    names = _Names(vars(sys.modules[module])) if module in sys.modules else _Names()
    return {name: _resolve(hint, names) if isinstance(hint, str) else hint for name, hint in annotations.items()}


def _resolve(hint: str, names: _Names) -> Any:
    try:
        return eval(hint, {}, names)
    # For example, `module.Name` fails if only type checkers import `module`.
    except Exception:
        return Any


@lru_cache(maxsize=1024)
def field_types(kind: type) -> dict[str, Any]:
    """Return the type of each field of a dataclass, by the field's name.

    For fields that another package declares, only the types of numbers, booleans, choices and lists of these are
    returned. The other types are `Any`.
    """
    types: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        hints = resolve_annotations(vars(base).get("__annotations__", {}), base.__module__)
        is_package_class = base.__module__.partition(".")[0] == _PACKAGE
        types |= {name: hint if is_package_class or _is_plain(hint) else Any for name, hint in hints.items()}
    return types


def argument_types(make: Callable[..., object]) -> dict[str, tuple[Any, object]]:
    """Return a pair (type, default) for each argument of a class or function, by the argument's name.

    The default is `Parameter.empty` if the argument has no default.
    """
    function = unwrap(make.__init__ if isinstance(make, type) else make)  # type: ignore[misc]
    module = getattr(function, "__module__", None) or make.__module__
    types = resolve_annotations(getattr(function, "__annotations__", {}), module)
    if isinstance(make, type):
        types |= {name: hint for name, hint in field_types(make).items() if hint is not Any or name not in types}
    return {name: (types.get(name, Any), one.default) for name, one in signature(make).parameters.items()}


def all_argument_types(make: Callable[..., object]) -> dict[str, Any]:
    """Return the type of each argument of a class or function, by the argument's name.

    For a class, the arguments of its base classes are included.
    """
    types: dict[str, Any] = {}
    for base in reversed(make.__mro__) if isinstance(make, type) else (make,):
        with suppress(TypeError, ValueError):  # A built-in class may have no signature.
            types |= {name: hint for name, (hint, _) in argument_types(base).items()}
    return types


def _is_plain(hint: Any) -> bool:
    """Return whether an annotation contains only numbers, booleans, choices, None, and lists of them."""
    if get_origin(hint) in (Union, UnionType, list, tuple, Sequence):
        return all(one is Ellipsis or _is_plain(one) for one in get_args(hint))
    return hint in (int, float, bool, None, NoneType) or get_origin(hint) is Literal


def accepts(value: object, hint: Any) -> bool:
    """Return whether an annotation accepts a value.

    Example:
        >>> accepts(16, int), accepts(16.0, int), accepts("16", int | None), accepts(True, float)
        (True, False, False, False)
        >>> accepts(3, float), accepts(float("nan"), float), accepts([1, 2], Sequence[int]), accepts(dict, dict)
        (True, False, True, False)
    """
    kind, type_arguments = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(accepts(value, one) for one in type_arguments)
    if kind is Literal:
        return any(type(value) is type(choice) and value == choice for choice in type_arguments)
    if kind is None or not isinstance(kind, type) or kind in (type, object):
        return value is None if kind is None else True
    if kind is bool:
        return isinstance(value, bool) or _is_numpy_bool(value)
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if kind is float:
        return is_number(value) and not is_nan(value)
    if kind is str:
        return isinstance(value, str | bytes | Number | os.PathLike)
    if kind is _FUNCTION:
        return callable(value) and not (isinstance(value, type) and _makes_callables(value, type_arguments))
    return _accepts_object(value, kind, type_arguments)


def _accepts_object(value: Any, kind: type, type_arguments: Sequence[Any]) -> bool:
    plain = value is None or isinstance(value, str | bytes | Number | type) or _is_numpy_bool(value)
    if kind in _SEQUENCES:
        items = value if isinstance(value, Sequence) or getattr(value, "ndim", 0) == 1 else ()
        hints = (
            type_arguments if kind is tuple and Ellipsis not in type_arguments else [*type_arguments[:1]] * len(items)
        )
        return not plain and all(map(accepts, items, hints))
    if issubclass(kind, Mapping):
        return isinstance(value, Mapping) and (
            not type_arguments or all(accepts(one, type_arguments[1]) for one in value.values())
        )
    if issubclass(kind, os.PathLike) and isinstance(value, str):
        return True
    if getattr(kind, "_is_protocol", False):
        return not isinstance(value, type)
    package = kind.__module__.partition(".")[0]
    if kind is NoneType or package == _PACKAGE or (plain and package in _STRICT):
        return isinstance(value, kind)
    return not isinstance(value, type)


def _makes_callables(kind: type, type_arguments: Sequence[Any]) -> bool:
    """Return whether the instances of a class are callable, and the class itself does not return the expected object.

    The expected object is the return value in the annotation, such as ``Net`` in ``Callable[[], Net]``.
    """
    result = type_arguments[-1] if type_arguments else Any
    is_expected = isinstance(result, type) and issubclass(kind, result)
    return not is_expected and any("__call__" in vars(base) for base in kind.__mro__)


def is_number(value: Any) -> bool:
    """Return whether a value is a number, NaN included. Strings and booleans are not numbers."""
    if isinstance(value, str | bytes | bool | type) or _is_numpy_bool(value) or not hasattr(value, "__float__"):
        return False
    return getattr(value, "ndim", 0) == 0


def is_nan(value: Any) -> bool:
    """Return whether a value is NaN, or a list or a one-dimensional array that contains NaN."""
    if isinstance(value, list | tuple) or getattr(value, "ndim", 0) == 1:
        return any(map(is_nan, value))
    return is_number(value) and not isinstance(value, Integral) and math.isnan(float(value))


def _is_numpy_bool(value: object) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")


def to_plain(value: Any) -> Any:
    """Convert a real number or a NumPy Boolean to an int, float or bool of Python. Return other values unchanged."""
    if isinstance(value, bool | type) or type(value) in (int, float):
        return value
    if _is_numpy_bool(value):
        return bool(value)
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def describe(hint: Any, plural: bool = False) -> str:
    """Return a description of an annotation for a message.

    Example:
        >>> describe(int | None), describe(float | Sequence[float]), describe(int | Literal["auto"])
        ('a whole number or None', 'a number or a list of numbers', 'a whole number or "auto"')
    """
    kind, type_arguments = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        members = [one for one in type_arguments if not (one is int and float in type_arguments)]
        parts: list[str] = []
        for member in members:
            words = (
                list(map(quoted_value, get_args(member)))
                if get_origin(member) is Literal
                else [describe(member, plural)]
            )
            parts += ["True", "False"] if member is bool else words
        *rest, last = dict.fromkeys(parts)
        return f"{', '.join(rest)} or {last}" if rest else last
    if kind is Literal:
        return describe_choices(type_arguments)
    container = "list" if kind in _SEQUENCES else "dict" if isinstance(kind, type) and issubclass(kind, Mapping) else ""
    if container:
        items = f" of {describe(type_arguments[container == 'dict'], plural=True)}" if type_arguments else ""
        return f"{container}s{items}" if plural else f"a {container}{items}"
    phrase = "a function" if kind is _FUNCTION else _WORDS.get(NoneType if kind is None else kind)
    if phrase is None:
        name = getattr(kind, "__name__", str(kind))
        phrase = f"{'an' if name[0] in 'AEIOU' else 'a'} `{name}`"
    return f"{phrase.partition(' ')[2]}s" if plural and phrase.endswith(("number", "string", "`")) else phrase


def literal_words(hint: Any) -> list[str]:
    """Return the strings that the `Literal` members of an annotation contain."""
    return [word for one in members(hint) if get_origin(one) is Literal for word in get_args(one) if type(word) is str]


def describe_choices(choices: Iterable[object]) -> str:
    *rest, last = map(quoted_value, choices)
    return f"{', '.join(rest)} or {last}" if rest else last


def quoted_value(value: object) -> str:
    if isinstance(value, type):
        return f"the class `{value.__name__}`"
    return f'"{value}"' if isinstance(value, str) else f"{value!r:.100}"


def explain(name: str, value: object, hint: Any, default: object = Parameter.empty) -> tuple[str, str]:
    """Return a message about a value that an annotation does not accept, and a hint on how to fix it.

    Example:
        >>> explain("batch_size", "16", int | None, None)
        ('Expected `batch_size` to be a whole number or None, but got "16".', 'Use `batch_size=16`.')
        >>> explain("shuffle", 1, bool | None)
        ('Expected `shuffle` to be True, False or None, but got 1.', 'Use `shuffle=True`.')
    """
    description = "an object" if isinstance(value, type) else describe(hint)
    return f"Expected `{name}` to be {description}, but got {quoted_value(value)}.", _fix(name, value, hint, default)


def _fix(name: str, value: Any, hint: Any, default: object) -> str:
    if isinstance(value, type):
        return f"Use `{name}={value.__name__}({_arguments(value)})`."
    if is_nan(value):
        example = f", such as `{name}={default!r}`" if is_number(default) else ""
        return f"Use {'a finite number' if is_number(value) else 'finite numbers'}{example}."
    if isinstance(value, str) and (close_matches := get_close_matches(value.lower(), literal_words(hint), 1)):
        return f"Use `{name}={quoted_value(close_matches[0])}`."
    conversions = [_convert(value, wanted) for wanted in members(hint)]
    usable = [other for other in conversions if other is not None and accepts(other, hint)]
    equal = [other for other in usable if isinstance(other, bool) or other == _convert(value, float)]
    if equal:
        return f"Use `{name}={equal[0]!r}`."
    # The second case is a dataclass field with a `default_factory`.
    if default is Parameter.empty or repr(default) == "<factory>":
        return f"Pass {describe(hint)}."
    return "Leave it out." if default is None else f"Leave it out (default of the class: {quoted_value(default)})."


def _arguments(kind: type) -> str:
    try:
        required_parameters = [one for one in signature(kind).parameters.values() if one.default is Parameter.empty]
    except (TypeError, ValueError):
        required_parameters = []
    return (
        "..."
        if any(one.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) for one in required_parameters)
        else ""
    )


def members(hint: Any) -> Sequence[Any]:
    """Return the members of a union. For another annotation, return the annotation itself in a tuple."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def item_type(hint: Any) -> Any:
    """Return the annotation of the items of a list, or of the values of a dictionary. Otherwise, return `Any`.

    Example:
        >>> item_type(int | list[str]), item_type(Mapping[str, float]), item_type(int)
        (<class 'str'>, <class 'float'>, typing.Any)
    """
    for member in members(hint):
        kind, type_arguments = get_origin(member), get_args(member)
        if isinstance(kind, type) and type_arguments and issubclass(kind, Iterable) and kind is not tuple:
            return type_arguments[-1]
    return Any


def is_maker(hint: Any) -> bool:
    """Return whether an annotation is a callable with a return type, such as `Callable[[int], str]`."""
    return get_origin(hint) is _FUNCTION and bool(get_args(hint))


def object_types(hint: Any) -> tuple[type, ...]:
    """Return the classes whose objects an annotation accepts. Plain types such as `int` and `str` are not returned.

    For an annotation of a function, return the classes of its return value.

    Example:
        >>> from fractions import Fraction
        >>> object_types(Fraction | str | None), object_types(Callable[[int], Fraction]), object_types(list[Fraction])
        ((<class 'fractions.Fraction'>,), (<class 'fractions.Fraction'>,), ())
    """
    classes: list[type] = []
    for member in members(hint):
        kind = get_origin(member) or member
        if is_maker(member):
            classes += object_types(get_args(member)[-1])
        elif isinstance(kind, type) and kind.__module__ not in _PLAIN and not issubclass(kind, os.PathLike):
            classes.append(kind)
    return tuple(classes)


def dataclass_type(hint: Any) -> type | None:
    """Return the dataclass whose objects an annotation accepts, or None."""
    return next((one for one in members(hint) if isinstance(one, type) and is_dataclass(one)), None)


def _convert(value: Any, target_type: Any) -> Any:
    """Convert a string or a number to ``target_type``: int, float or bool. Return None if this is not possible."""
    if target_type is bool:
        return _TRUTH.get(str(value).lower())
    if target_type not in (int, float) or isinstance(value, bool):
        return None
    try:
        return round(float(value)) if target_type is int else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
