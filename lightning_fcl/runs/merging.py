"""Merging of recipes: later files and settings override earlier ones, as on the command line."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from os.path import exists, isdir, relpath
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import yaml

from lightning_fcl.annotations import all_argument_types, dataclass_type, item_type, members, object_types
from lightning_fcl.errors import InvalidValueError, UnknownNameError
from lightning_fcl.io.safe_yaml import load_yaml, read_yaml
from lightning_fcl.validation import did_you_mean

SECTIONS = ("model", "data", "trainer", "recipe")
# Packages in which a class name without a module is looked up.
_PACKAGES = (
    "lightning_fcl",
    "lightning_fcl.callbacks",
    "lightning_fcl.models",
    "lightning_fcl.data.scenarios",
    "lightning_fcl.data.partition",
    "torch.optim",
    "torch.optim.lr_scheduler",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
)
_SUFFIXES = (".yaml", ".yml", ".json")
_ARGUMENTS = {"init_args", "dict_kwargs"}
# Class of each section that contains only arguments.
_SECTION_CLASSES = {"data": "lightning_fcl.FederatedStream", "trainer": "lightning.pytorch.Trainer"}


def _is_no_folder(path: str | Path) -> bool:
    """Return whether a path exists and is not a folder. True also for a device, which the reader of files rejects."""
    return exists(path) and not isdir(path)


@dataclass(frozen=True)
class _Place:
    """The place of a value in a recipe.

    The annotation of the value is resolved only when needed, because resolving imports classes.

    Args:
        find: Function that returns the annotation of the value. If ``group``, it returns the class whose arguments are
            at this place.
        files: Chain of files that leads to the value. Each file names the next file. File names are relative to the
            folder of the last file.
        group: Whether the place contains arguments by name, such as a section or ``init_args``.
        sections: Whether the place contains a whole recipe.
        name: Name of the argument that has the value, or that contains the list or dictionary with the value.
    """

    find: Callable[[], Any] = lambda: Any
    files: tuple[Path, ...] = ()
    group: bool = False
    sections: bool = False
    name: str = ""

    @cached_property
    def hint(self) -> Any:
        return self.find()

    @property
    def owner(self) -> Any:
        """The class whose arguments this place contains by name. None for a plain dictionary or another value."""
        return self.hint if self.group else dataclass_type(self.hint)

    def argument(self, name: str) -> _Place:
        """Return the place of the argument ``name``."""
        if self.sections:
            return _Place(lambda: find_class(_SECTION_CLASSES.get(name)), self.files, name in SECTIONS, name=name)
        return _Place(
            lambda: all_argument_types(self.owner).get(name, Any) if self.owner else Any, self.files, name=name
        )

    def arguments_of(self, path: object) -> _Place:
        """Return the place of the arguments of the class with the name ``path``."""
        return _Place(lambda: find_class(path), self.files, True)

    @property
    def item(self) -> _Place:
        """The place of an item of the list, or a value of the dictionary, at this place."""
        return _Place(lambda: item_type(self.hint), self.files, name=self.name)

    def follow(self, value: Any) -> tuple[Any, _Place]:
        """Return the content of the file that a value names, and the place of the content.

        A value that names no file is returned unchanged, with this place.

        Raises:
            InvalidValueError: If files name each other in a cycle, or if a file name is relative to the working
                directory instead of the recipe.
        """
        location = self
        while isinstance(value, str) and (file := location._file(value)):
            if file.resolve() in [one.resolve() for one in location.files]:
                raise InvalidValueError(
                    "Expected the files of a recipe not to name each other in a cycle, but got "
                    f"{' -> '.join(map(str, [*location.files, file]))}.",
                    hint=f"Write the values into {location.files[-1]} in place of the file name.",
                    value=value,
                )
            location = replace(location, files=(*location.files, file))
            value = read_yaml(file)
        return value, location

    def _file(self, name: str) -> Path | None:
        """Return the file that a text names. None if there is no such file, or if the text is a value or names a class.

        Raises:
            InvalidValueError: If the file name is relative to the working directory instead of the recipe.
        """
        folder = self.files[-1].parent if self.files else Path()
        if not (_is_no_folder(folder / name) or _is_no_folder(name)) or not (self.group or object_types(self.hint)):
            return None
        if not self.group and str in members(self.hint) and Path(name).suffix not in _SUFFIXES:
            return None  # The text is the value itself, not the name of a file.
        if _is_no_folder(folder / name):
            return folder / name
        if find_class(name):
            return None
        raise InvalidValueError(
            f"Expected a file at {folder / name}, but there is no such file.",
            hint=f"Write {relpath(name, folder)}: file names are relative to the folder of {self.files[-1]}.",
            value=name,
        )

    def leads_to_files(self, value: Any) -> bool:
        """Return whether a value contains the name of a file."""
        if isinstance(value, Mapping | list):
            return any(map(self.leads_to_files, value.values() if isinstance(value, Mapping) else value))
        folder = self.files[-1].parent if self.files else Path()
        return isinstance(value, str) and (_is_no_folder(folder / value) or _is_no_folder(value))


class _Dotted(dict[str, Any]):
    """A dictionary that a recipe writes as a dotted name: ``{"a.b": 1}`` becomes ``{"a": {"b": 1}}``.

    A dictionary of this class is always merged into the current dictionary. A plain dictionary may replace the current
    dictionary.
    """


def _nested(name: str, value: Any) -> dict[str, Any]:
    """Return a recipe with one value, which has the dotted name ``name``."""
    *sections, last = name.split(".")
    nested_values = _Dotted({last: value})
    for section in reversed(sections):
        nested_values = _Dotted({section: nested_values})
    return nested_values


def merge(whole: dict[str, Any], updates: Mapping[str, Any], files: tuple[Path, ...] = ()) -> None:
    """Merge ``updates`` into the recipe ``whole``. The new values override the values of ``whole``.

    Sections, arguments of classes and fields of dataclasses are merged by name. Any other dictionary, such as
    ``reductions``, is replaced. If the class of an object stays the same, its arguments are kept. If the class changes,
    the arguments that the new class accepts are kept.

    A key that ends in ``+`` appends to a list. A dictionary for a list changes the last entry of the list, or the entry
    whose class the dictionary names. The name of a file in place of an object or a section is replaced by the content
    of the file.

    Args:
        whole: The recipe to change.
        updates: The recipe with the new values. Its names may be dotted.
        files: Tuple with the file of ``updates``, or an empty tuple. Names in ``updates`` are relative to this file.
    """
    _merge(whole, updates, _Place(files=files, sections=True))


def _merge(whole: dict[str, Any], updates: Mapping[str, Any], location: _Place) -> None:
    for key, value in updates.items():
        if isinstance(key, str) and "." in key:
            _merge(whole, _nested(key, value), location)
        elif isinstance(key, str) and key.endswith("+"):
            name = key.removesuffix("+")
            value, item_location = location.argument(name).follow(_read(value))
            whole[name] = [*_to_items(_read(whole.get(name))), *_merged(None, _to_items(value), item_location)]
        else:
            whole[key] = _merged(whole.get(key), value, location.argument(key))


def _to_items(value: Any) -> list[Any]:
    """Return a value as a list. The list is empty for None, and for the text "null" of a command line."""
    return value if isinstance(value, list) else [] if value in (None, "null") else [value]


def _merged(current_value: Any, value: Any, location: _Place) -> Any:
    """Return the result of merging ``value`` into ``current_value``."""
    value, location = location.follow(value)
    if isinstance(current_value, dict | list):
        value = _read(value)
    if isinstance(value, Mapping):
        current_value = _read(current_value)
    is_for_entry = (
        isinstance(value, Mapping) and "class_path" not in value and (current_value or isinstance(value, _Dotted))
    )
    if isinstance(current_value, list) and is_for_entry:
        position, value = _find_entry(current_value, value, location.name)
        return [_merged(one, value, location.item) if n == position else one for n, one in enumerate(current_value)]
    if (
        isinstance(current_value, list)
        and isinstance(value, list)
        and len(value) == len(current_value)
        and any(map(is_spec, current_value))
    ):
        return [_merged(*pair, location.item) for pair in zip(current_value, value, strict=True)]
    if (
        isinstance(current_value, str)
        and isinstance(value, Mapping)
        and "class_path" not in value
        and find_class(current_value)
    ):
        current_value = {"class_path": current_value}
    if is_spec(current_value):
        if isinstance(value, str) and find_class(value):
            value = {"class_path": value}
        if isinstance(value, Mapping):
            return _merged_class(current_value, value, location)
    if is_spec(value):
        return _merged_class({"class_path": value["class_path"]}, value, location)
    files = isinstance(value, Mapping | list) and location.leads_to_files(value)
    if isinstance(value, Mapping):
        if (
            isinstance(value, _Dotted)
            or location.group
            or ((files or isinstance(current_value, dict)) and location.owner)
        ):
            merged_values = copy.copy(current_value) if isinstance(current_value, dict) else {}
            _merge(merged_values, value, location)
            return merged_values
        if files:
            return {key: _merged(None, one, location.item) for key, one in value.items()}
    if isinstance(value, list) and files:
        return [_merged(None, one, location.item) for one in value]
    return copy.deepcopy(dict(value) if isinstance(value, _Dotted) else value)


def _read(value: Any) -> Any:
    """Return the parsed value of a text such as ``"{lr: 0.1}"``. Any other value is returned unchanged."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        with suppress(yaml.YAMLError):
            return load_yaml(value)
    return value


def _merged_class(current_value: dict[str, Any], value: Mapping[str, Any], location: _Place) -> dict[str, Any]:
    if "class_path" not in value and not {*value} <= _ARGUMENTS:
        value = {"init_args": _Dotted(value)}
    if unknown := sorted({*map(str, value)} - {"class_path", *_ARGUMENTS}):
        expected_keys = ("class_path", "init_args", "dict_kwargs")
        raise UnknownNameError(
            f"Expected the keys of {value['class_path']} to be among {', '.join(expected_keys)}, "
            f"but got `{unknown[0]}`.",
            hint=did_you_mean(unknown[0], expected_keys)
            or f"Write it in `init_args`, as in init_args: {{{unknown[0]}: ...}}.",
            argument=unknown[0],
        )
    path = value.get("class_path", current_value["class_path"])
    merged_spec = {**current_value, "class_path": path}
    if path != current_value["class_path"] and (factory := find_class(path)) is not find_class(
        current_value["class_path"]
    ):
        accepted_names = argument_names(factory) if factory else []
        retained_arguments = {
            name: one for name, one in (current_value.get("init_args") or {}).items() if name in accepted_names
        }
        merged_spec = {"class_path": path} | ({"init_args": retained_arguments} if retained_arguments else {})
    if "init_args" in value:
        merged_spec["init_args"] = _merged(
            merged_spec.get("init_args"), value["init_args"], location.arguments_of(path)
        )
    if "dict_kwargs" in value:
        previous_kwargs, updated_kwargs = _read(merged_spec.get("dict_kwargs")) or {}, _read(value["dict_kwargs"])
        is_mergeable = isinstance(previous_kwargs, Mapping) and isinstance(updated_kwargs, Mapping)
        merged_spec["dict_kwargs"] = (
            {**previous_kwargs, **dict(_flat(updated_kwargs))} if is_mergeable else updated_kwargs
        )
    return merged_spec


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each entry. A value that a recipe gives with a dotted name keeps this name.

    jsonargparse reads ``dict_kwargs`` with dotted names.
    """
    for name, value in values.items():
        if isinstance(value, _Dotted):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", copy.deepcopy(value)


def argument_names(factory: Any) -> list[str]:
    """Return the argument names of a class or function, including names that it accepts through ``**kwargs``."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    names: list[str] = []
    with suppress(ValueError, TypeError):  # Some built-in classes have no signature.
        names += inspect.signature(factory).parameters
        add = parser.add_class_arguments if isinstance(factory, type) else parser.add_function_arguments
        add(factory, fail_untyped=False)
    keys = parser.get_defaults(skip_validation=True).as_flat().__dict__
    return list(dict.fromkeys([*names, *(str(key).partition(".")[0] for key in keys)]))


def _find_entry(entries: Sequence[Any], value: Mapping[str, Any], argument: str) -> tuple[int, Any]:
    """Return the position of the list entry that a value changes, and the value for this entry.

    In ``{"Replay": {"memory_size": 100}}``, the name of a class selects the entry of this class, and the inner
    dictionary is the value. Any other value is for the last entry. The error message contains ``argument``, the name of
    the list.
    """
    (name, inner), *other_items = value.items()
    by_class = not other_items and isinstance(inner, Mapping) and str(name)[:1].isupper()
    if entries and not by_class:
        return len(entries) - 1, value
    paths = [one["class_path"] if is_spec(one) else one for one in entries]
    names = [str(path).rpartition(".")[2] for path in paths]
    if names.count(name) != 1:
        raise UnknownNameError(
            f"Expected one {name} in the list `{argument}`, but the list contains {', '.join(names)}."
            if names
            else f"Expected an entry for `{name}` in `{argument}`, but the list is empty. Add the entry first.",
            hint=did_you_mean(name, names),
            value=name,
        )
    return names.index(name), inner


def is_spec(value: object) -> bool:
    """Return whether a value describes an object.

    Such a value is a mapping with ``class_path``, and with no other keys than ``init_args`` and ``dict_kwargs``.
    """
    return isinstance(value, Mapping) and "class_path" in value and {*value} <= {"class_path", *_ARGUMENTS}


def find_class(name: object) -> Any:
    """Return the class or function with a name, which may omit the module. None if there is no such class."""
    if not isinstance(name, str) or not name.replace(".", "").isidentifier():
        return None
    if "." in name:
        with suppress(Exception):  # Importing a module can raise any error.
            factory = resolve_name(name)
            return factory if callable(factory) else None
        return None
    return next(
        (factory for package in _PACKAGES if callable(factory := getattr(import_module(package), name, None))), None
    )


def full_name(factory: Any) -> str:
    """Return an importable name of a class or function. If possible, the module is a package of `_PACKAGES`."""
    name = str(factory.__qualname__)
    homes = [package for package in _PACKAGES if getattr(import_module(package), name, None) is factory]
    return f"{homes[-1] if homes else factory.__module__}.{name}"
