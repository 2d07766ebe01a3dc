"""Error messages for recipes that the parser rejects, with the argument, its value and the most similar name."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from lightning_fcl.annotations import (
    argument_types,
    describe,
    explain,
    is_maker,
    item_type,
    members,
    object_types,
)
from lightning_fcl.errors import (
    InvalidTypeError,
    InvalidValueError,
    LightningFCLError,
    MissingValueError,
    UnknownNameError,
)
from lightning_fcl.io.safe_yaml import load_yaml, resolve_class
from lightning_fcl.library_errors import first_line, one_line
from lightning_fcl.runs.merging import SECTIONS, argument_names, full_name, is_spec
from lightning_fcl.validation import did_you_mean, format_names, nearest_name, other_lightning

MODE = "recipe"
"""The parser mode of jsonargparse that reads YAML with limits on size and depth."""

_OPTIONS = {"seed_everything": bool | int, "out": str | None, "ckpt_path": str | None, "weights_only": bool | None}
_ANY = inspect.Parameter.empty


def explain_parser_error(
    error: ArgumentError,
    keys: Iterable[str],
    owners: Mapping[str, Callable[..., Any]],
    bases: Mapping[str, Callable[..., Any]],
    content: Mapping[str, Any],
) -> LightningFCLError:
    """Return an error that contains the rejected value of a recipe, and the reason.

    The recipe is compared with the parser's keys, and with the annotations of the classes that the recipe names. If no
    invalid value is found, the error contains the parser's message.

    Args:
        error: The parser's error.
        keys: The parser's keys.
        owners: Class of each section that contains only arguments, by the name of the section.
        bases: Base class of each section that names its class in ``class_path``, by the name of the section.
        content: The recipe.
    """
    try:
        _Diagnosis(keys, owners, bases).check(content)
    except LightningFCLError as explanation:
        return explanation
    return InvalidValueError(f"Expected a valid recipe, but got: {one_line(error)}.", code="not-understood")


def require_model(content: Mapping[str, Any]) -> None:
    """Raise MissingValueError if the content of a recipe has no ``model``."""
    if "model" not in content:
        raise MissingValueError(
            "Expected a recipe with a `model`, but got a recipe without a `model`.",
            hint="Pass a recipe with a model, as in `lightning-fcl fit quickstart`.",
            argument="model",
        )


class _Diagnosis:
    """A check of a recipe that raises an error at the first value that the parser rejects."""

    def __init__(
        self,
        keys: Iterable[str],
        owners: Mapping[str, Callable[..., Any]],
        bases: Mapping[str, Callable[..., Any]],
    ) -> None:
        self._owners, self._bases, self._keys = owners, bases, set(keys)
        self._top = list(dict.fromkeys([*SECTIONS, *(key.partition(".")[0] for key in self._keys)]))

    def check(self, content: Mapping[str, Any]) -> None:
        """Raise an error at the first invalid value of a recipe, or if a required `model` is missing."""
        for section, value in content.items():
            if section not in self._top:
                raise UnknownNameError(
                    f"Expected a section such as {', '.join(SECTIONS[:3])}, but got `{section}`.",
                    hint=did_you_mean(section, self._top),
                    argument=section,
                )
            owner = self._owners.get(section)
            if owner is not None:
                if not isinstance(value, Mapping):
                    raise InvalidTypeError(
                        f"Expected `{section}` to be a mapping of arguments, but got {value!r:.100}.",
                        argument=section,
                        value=value,
                    )
                self._check_arguments(f"`{section}`", section, owner, value)
            elif section in self._bases:
                self._check_value(section, value, self._bases[section], _ANY)
            elif section in _OPTIONS:
                self._check_value(section, value, _OPTIONS[section], _ANY)
        if "model" in self._bases:
            require_model(content)

    def _check_arguments(self, owner: str, path: str, factory: Callable[..., Any], values: Mapping[str, Any]) -> None:
        """Raise an error if a name or a type is wrong in the arguments of a class or function."""
        if not isinstance(values, Mapping):
            raise InvalidTypeError(
                f"Expected a mapping of arguments of {owner}, but got {values!r:.100}.", argument=path, value=values
            )
        types, names = argument_types(factory), argument_names(factory)
        for name, value in values.items():
            plain = str(name).removesuffix("+")
            if plain not in names and f"{path}.{plain}" not in self._keys:
                raise UnknownNameError(
                    f"Expected an argument of {owner}, but got `{f'{path}.{name}' if path in self._owners else name}`.",
                    hint=_nearest_argument(path, plain, names, values),
                    argument=f"{path}.{name}",
                    value=value,
                )
            hint, default = types.get(plain, (Any, _ANY))
            self._check_value(f"{path}.{plain}", value, hint, default)

    @staticmethod
    def _check_required(owner: str, path: str, factory: Callable[..., Any], values: Mapping[str, Any]) -> None:
        """Raise an error if a class or function lacks an argument that has no default."""
        try:
            parameters = inspect.signature(factory).parameters
        except ValueError:  # Some built-in classes have no signature.
            return
        for name, parameter in parameters.items():
            if (
                parameter.default is _ANY
                and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
                and name not in values
            ):
                raise MissingValueError(
                    f"Expected a value for `{name}` of {owner}, but got none.",
                    hint=f"Set {path}.{name}.",
                    argument=f"{path}.{name}",
                )

    def _check_value(self, path: str, value: Any, hint: Any, default: object) -> None:
        """Raise an error if a value of an argument does not match the annotation of the argument."""
        name = path.rpartition(".")[2]
        if isinstance(value, list):
            inner = item_type(hint)
            for item in value if object_types(inner) else ():
                self._check_value(path, item, inner, _ANY)
        elif isinstance(value, Mapping) and not is_spec(value) and object_types(hint):
            self._check_shorthand(path, value)
        elif is_spec(value) or (_may_name_class(value, hint) and not self._accepts(value, hint)):
            spec = value if isinstance(value, Mapping) else {"class_path": value}
            factory = _resolve(path, spec["class_path"], object_types(hint))
            self._check_arguments(full_name(factory), path, factory, spec.get("init_args") or {})
            # If the argument expects a function that makes objects, missing arguments are passed when it is called.
            if not any(is_maker(one) for one in members(hint)):
                self._check_required(full_name(factory), path, factory, spec.get("init_args") or {})
            if not self._accepts(value, hint):
                self._check_short_names(path, factory, spec.get("init_args") or {})
            return
        if not self._accepts(value, hint):
            loaded_value = value
            if isinstance(value, str):
                with contextlib.suppress(Exception):
                    loaded_value = load_yaml(value)
            wrong = loaded_value if not isinstance(loaded_value, str | NoneType) else value
            message, fix = explain(name, wrong, hint, default)
            raise InvalidTypeError(message, hint=fix, argument=path, value=wrong)

    @staticmethod
    def _check_short_names(path: str, factory: Callable[..., Any], values: Mapping[str, Any]) -> None:
        """Raise an error if the arguments of a class contain the name of another class without its module.

        The parser finds a nested class only by its full name.
        """
        types = argument_types(factory)
        for argument, value in values.items():
            if is_spec(value) and "." not in str(value["class_path"]):
                hint, _ = types.get(argument, (Any, _ANY))
                resolved_class = _resolve(f"{path}.{argument}", value["class_path"], object_types(hint))
                raise InvalidValueError(
                    f"Expected the full name of a class, with its module, for `{path}.{argument}`, but got "
                    f"{value['class_path']}.",
                    hint=f"Write {full_name(resolved_class)}.",
                    argument=f"{path}.{argument}",
                    value=value["class_path"],
                )

    @staticmethod
    def _check_shorthand(path: str, value: Mapping[str, Any]) -> None:
        """Raise an error if a mapping has a class name in place of ``class_path``: ``{module.EWC: {strength: 3}}``."""
        (first, inner), *other_items = value.items() or [("", None)]
        if not other_items and ("." in str(first) or isinstance(inner, Mapping)):
            raise InvalidValueError(
                f"Expected {{class_path: {first}, init_args: {{...}}}}, but got {dict(value)}.",
                hint=f"Write {{class_path: {first}, init_args: {inner or {}}}}.",
                argument=path,
                value=value,
            )

    @staticmethod
    def _accepts(value: Any, hint: Any) -> bool:
        """Return whether the parser accepts a value for an annotation. True for an unsupported annotation."""
        if hint in (Any, _ANY):
            return True
        parser = ArgumentParser(exit_on_error=False, parser_mode=MODE)
        try:
            parser.add_argument("--value", type=hint)
            parser.parse_object({"value": value})
        except ArgumentError:
            return False
        except ValueError:  # The parser does not support this annotation, so the value is not checked.
            return True
        except Exception:  # Importing the module of a class can raise any error.
            return False
        return True


def _resolve(path: str, name: object, bases: tuple[type, ...]) -> Any:
    """Return the class or function that a recipe names.

    Raises:
        InvalidTypeError: If ``name`` is not a string, or if it names neither a class derived from one of ``bases`` nor
            a function with a return annotation. Also for a class of the package `pytorch_lightning`.
        InvalidValueError: If several classes have the name, or if importing the module fails.
        UnknownNameError: If there is no such class or module.
    """
    if not isinstance(name, str):
        raise InvalidTypeError(
            f"Expected `{path}.class_path` to be the name of a class, but got {name!r:.100}.",
            argument=path,
            value=name,
        )
    module, _, short = name.rpartition(".")
    if module and not module.replace(".", "").isidentifier():
        module = ""
    if not module:
        full_names = _known_classes(bases)
        matches = sorted(full_names.get(short, []), key=lambda full: not full.startswith("lightning_fcl."))
        if len(matches) > 1:
            raise InvalidValueError(
                f"Expected one class with the name {name}, but there are {len(matches)}.",
                hint=f"Write the full name of one of them: {format_names(matches)}.",
                argument=path,
                value=name,
            )
        if not matches:
            raise UnknownNameError(
                f"Expected `{path}` to be {_described(bases)}, but got {name}.",
                hint=did_you_mean(name, full_names) or "Write the full name of a class, as in torch.optim.SGD.",
                argument=path,
                value=name,
            )
        module, _, short = matches[0].rpartition(".")
    try:
        home = import_module(module)
    except ModuleNotFoundError as error:
        first = module.partition(".")[0]
        raise UnknownNameError(
            f"Expected a class of a module that can be imported, but got {name}: {first_line(error)}.",
            hint=_where(first) or did_you_mean(first, ["lightning_fcl", "lightning", "torch", "torchmetrics"]),
            argument=path,
            value=name,
        ) from error
    except Exception as error:  # Importing a module can raise any error.
        raise InvalidValueError(
            f"Expected a class of a module that can be imported, but importing {module} raised "
            f"{type(error).__name__}: {first_line(error)}.",
            hint=f'Correct {module} until `python -c "import {module}"` works.',
            argument=path,
            value=name,
        ) from error
    if not hasattr(home, short):
        raise UnknownNameError(
            f"Expected a class of {module}, but the module has no {short}.",
            hint=did_you_mean(short, getattr(home, "__all__", dir(home))),
            argument=path,
            value=name,
        )
    factory = getattr(home, short)
    if not isinstance(factory, type):
        if "return" in getattr(factory, "__annotations__", {}):
            return factory
        raise InvalidTypeError(
            f"Expected a class, but got {name}, which has the type {type(factory).__name__}.",
            hint="Name a class in `class_path`.",
            argument=path,
            value=name,
        )
    if reason := other_lightning(factory):
        raise InvalidTypeError(reason, argument=path, value=name)
    checked = [kind for kind in bases if not getattr(kind, "_is_protocol", False)]
    if checked == [*bases] and bases and not issubclass(factory, bases):
        raise InvalidTypeError(
            f"Expected `{path}` to be {_described(bases)}, but got the class {name}.", argument=path, value=name
        )
    return factory


def _may_name_class(value: object, hint: Any) -> bool:
    """Return whether a value may be the name of a class.

    The result is False if the annotation accepts a number, or if it accepts no objects of a class.
    """
    is_name = isinstance(value, str) and all(part.isidentifier() for part in value.split("."))
    return is_name and bool(object_types(hint)) and not {int, float} & {*members(hint)}


def _where(module: str) -> str:
    """Return a hint if the module is in a subfolder of the working directory, otherwise an empty text."""
    folders = [folder for folder in sorted(Path().glob("*/")) if (folder / f"{module}.py").is_file()]
    return f"Run the command in {folders[0]}, which contains {module}.py." if folders else ""


def _known_classes(bases: Iterable[type]) -> dict[str, list[str]]:
    """Return lists of full names by class name, for the classes ``bases`` and their imported subclasses.

    Private, local and abstract classes are left out.
    """
    full_names: dict[str, list[str]] = {}
    classes = list(bases)
    seen_classes = set(classes)
    for kind in classes:  # The loop also visits the subclasses that it appends.
        new: set[type] = set(type.__subclasses__(kind)) - seen_classes
        classes.extend(new)
        seen_classes |= new
        if not kind.__name__.startswith("_") and "<locals>" not in kind.__qualname__ and not inspect.isabstract(kind):
            full_names.setdefault(kind.__name__, []).append(f"{kind.__module__}.{kind.__qualname__}")
    return full_names


def _described(bases: tuple[type, ...]) -> str:
    return " or ".join(describe(kind) for kind in bases) or "an object"


def _nearest_argument(path: str, name: str, names: Sequence[str], values: Mapping[str, Any]) -> str:
    """Return a hint with the argument name that is most similar to ``name``.

    The candidates are the arguments ``names`` of a class, and the arguments of the classes in ``values``. If no
    candidate is similar, the hint lists ``names``, or is empty if ``path`` is a section.
    """
    prefix = f"{path}." if path in SECTIONS else ""
    full_names = {one: f"{prefix}{one}" for one in names}
    for argument, value in values.items():
        if is_spec(value):
            with contextlib.suppress(LightningFCLError):
                inner = argument_names(_resolve(path, value["class_path"], (object,)))
                full_names |= {one: f"{prefix}{argument}.{one}" for one in inner if one not in full_names}
    if nearest_match := nearest_name(name, full_names):
        return f"Did you mean {full_names[nearest_match]}?"
    return "" if path in SECTIONS else f"Use {format_names(names)}."


def check_class_paths(content: object) -> None:
    """Raise an error if a ``class_path`` names neither a class nor a function with a return annotation."""
    content = vars(content) if isinstance(content, Namespace) else content
    if isinstance(content, Mapping) and isinstance(path := content.get("class_path"), str):
        resolve_class(path)
    for item in content.values() if isinstance(content, Mapping) else content if isinstance(content, list) else []:
        check_class_paths(item)
