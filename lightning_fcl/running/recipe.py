"""A recipe: files and settings, merged into one dictionary as the command line merges them."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import yaml

from lightning_fcl.errors import InvalidValueError, MissingFileError, MissingValueError, UnknownNameError, did_you_mean
from lightning_fcl.hub.documents import load_yaml, read_yaml

SECTIONS = ("model", "data", "trainer", "recipe")
# Where classes are looked up that a recipe names without their module.
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
_ARGUMENTS = {"init_args", "dict_kwargs"}


@dataclass(frozen=True)
class Setting:
    """A value that goes over those of the files before it.

    Args:
        name: Dotted name, such as ``data.partition.clients``. An entry of a list goes by its position at the end, or
            by the name of its class, as in ``trainer.callbacks.Replay.max_size``. A ``+`` at its end appends to a list.
        value: The value, or its text, which is read by the type of the argument.
    """

    name: str
    value: Any

    @property
    def words(self) -> tuple[str, str]:
        """The words of a command line that say the same."""
        return f"--{self.name}", self.value if isinstance(self.value, str) else json.dumps(self.value)


@dataclass(frozen=True)
class Recipe:
    """Files and settings, of which later ones replace values of earlier ones.

    Args:
        layers: The files and settings.
    """

    layers: tuple[Path | Setting, ...] = ()

    @classmethod
    def of_words(cls, words: Sequence[str]) -> Recipe:
        """Return the files and settings that the words of a command line name.

        Example:
            >>> Recipe.of_words(["--config", "mine.yaml", "--data.batch_size=16"]).words
            ['--config', 'mine.yaml', '--data.batch_size', '16']
        """
        return cls(tuple(take_settings(words, ())[1]))

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(layer for layer in self.layers if isinstance(layer, Path))

    @property
    def settings(self) -> tuple[Setting, ...]:
        return tuple(layer for layer in self.layers if isinstance(layer, Setting))

    @property
    def words(self) -> list[str]:
        """The words of a command line that name it."""
        pairs = [("--config", str(one)) if isinstance(one, Path) else one.words for one in self.layers]
        return [word for pair in pairs for word in pair]

    def with_layers(self, *layers: Path | Setting) -> Recipe:
        """Return the recipe with more files and settings, which go over it."""
        return replace(self, layers=(*self.layers, *layers))

    def with_values(self, values: Mapping[str, Any]) -> Recipe:
        """Return the recipe with more settings, by their dotted names."""
        return self.with_layers(*(Setting(name, value) for name, value in values.items()))

    def content(self) -> dict[str, Any]:
        """Return the values of all layers as one dictionary.

        Raises:
            InvalidValueError: If a file holds no settings by name, or is too large.
            MissingFileError: If a file does not exist.
            MissingValueError: If a setting has no value.
        """
        whole: dict[str, Any] = {}
        for layer in self.layers:
            values = read_recipe_file(layer) if isinstance(layer, Path) else {layer.name: layer.value}
            for name, value in values.items():
                merge(whole, _nested(str(name), value))
        return whole


def read_recipe_file(path: Path) -> dict[str, Any]:
    """Return the content of a recipe's file. A section may name another file, relative to this one."""
    if not path.exists():
        raise MissingFileError(f"Expected a recipe at {path} but there is no such file.")
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise InvalidValueError(
            f"Expected {path} to hold settings by name, as in trainer: {{max_epochs: 3}}, but got "
            f"{'nothing' if content is None else f'{content!r:.100}'}.",
            value=content,
        )
    for section in SECTIONS:
        if isinstance(named := content.get(section), str) and (path.parent / named).is_file():
            content[section] = read_yaml(path.parent / named)
    return content


def take_settings(words: Sequence[str], known: Collection[str]) -> tuple[list[str], list[Path | Setting]]:
    """Return the words that belong to the options of a command, and the files and settings among the others, in order.

    Args:
        words: The words of a command line.
        known: The options of the command, such as ``--out``.
    """
    rest, layers, more = list[str](), list[Path | Setting](), list(words)
    while more:
        word = more.pop(0)
        option, equals, value = word.partition("=")
        if option == "--config":
            if not equals and not more:
                raise MissingValueError("Expected a file behind `--config` but got none.", argument="--config")
            layers.append(Path(value if equals else more.pop(0)))
        elif not option.startswith("--") or option == "--" or option in known:
            rest.append(word)
        elif equals or (more and not more[0].startswith("--")):
            layers.append(Setting(option[2:], value if equals else more.pop(0)))
        else:
            raise MissingValueError(
                f"Expected a value behind `{option}` but got none.",
                hint=did_you_mean(option, known) or f"Write {option}=VALUE.",
                argument=option,
            )
    return rest, layers


def _nested(name: str, value: Any) -> dict[str, Any]:
    """A recipe that holds nothing but a value, by its dotted name."""
    *sections, last = name.split(".")
    more = {last: value}
    for section in reversed(sections):
        more = {section: more}
    return more


def merge(whole: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Put the values of a recipe over those of another one.

    A class that is named again keeps its arguments; another class in its place keeps those that it takes, too. A key
    that ends in ``+`` appends to a list. Values for a list go to its last entry, or to the one whose class they name.
    """
    for key, value in more.items():
        name = str(key).removesuffix("+")
        if name != key:
            value = _read(value)
            items = value if isinstance(value, list) else [value]
            here = whole.get(name)
            whole[name] = [*(here if isinstance(here, list) else [here] if here else []), *copy.deepcopy(items)]
        else:
            whole[key] = _merged(whole.get(key), value)


def _merged(here: Any, value: Any) -> Any:
    """The value that stands where ``value`` is put over ``here``."""
    if isinstance(here, dict | list):
        value = _read(value)
    if isinstance(value, Mapping):
        here = _read(here)
    if isinstance(here, list) and here:
        if isinstance(value, Mapping) and not is_spec(value):
            position, value = _entry_of(here, value)
            return [_merged(one, value) if n == position else one for n, one in enumerate(here)]
        if isinstance(value, list) and len(value) == len(here) and any(map(is_spec, here)):
            return [_merged(*pair) for pair in zip(here, value, strict=True)]
    if isinstance(here, str) and isinstance(value, Mapping) and not is_spec(value) and find_class(here):
        here = {"class_path": here}
    if is_spec(here):
        if isinstance(value, str) and find_class(value):
            value = {"class_path": value}
        if isinstance(value, Mapping):
            return _merged_class(here, value)
    if isinstance(here, dict) and isinstance(value, Mapping) and not is_spec(value):
        merged = copy.copy(here)
        merge(merged, value)
        return merged
    return copy.deepcopy(value)


def _read(value: Any) -> Any:
    """The values that a text stands for, as in ``"{lr: 0.1}"``; another value as it is."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        with suppress(yaml.YAMLError):
            return load_yaml(value)
    return value


def _merged_class(here: dict[str, Any], value: Mapping[str, Any]) -> dict[str, Any]:
    if "class_path" not in value and not {*value} <= _ARGUMENTS:
        value = {"init_args": value}
    path = value.get("class_path", here["class_path"])
    merged = {**here, "class_path": path}
    if path != here["class_path"] and (made := find_class(path)) is not find_class(here["class_path"]):
        taken = inspect.signature(made).parameters if callable(made) else {}
        kept = {name: one for name, one in (here.get("init_args") or {}).items() if name in taken}
        merged = {"class_path": path} | ({"init_args": kept} if kept else {})
    for name in _ARGUMENTS & {*value}:
        merged[name] = _merged(merged.get(name), value[name])
    return merged


def _entry_of(entries: Sequence[Any], value: Mapping[str, Any]) -> tuple[int, Any]:
    """The position of the entry of a list to which a value belongs, and the value: the one whose class it names."""
    (name, inner), *more = value.items()
    if more or not isinstance(inner, Mapping) or not name[:1].isupper():
        return len(entries) - 1, value
    paths = [one["class_path"] if is_spec(one) else one for one in entries]
    names = [str(path).rpartition(".")[2] for path in paths]
    if names.count(name) != 1:
        raise UnknownNameError(
            f"Expected one {name} in a list but its entries are {', '.join(names)}.",
            hint=did_you_mean(name, names),
            value=name,
        )
    return names.index(name), inner


def is_spec(value: object) -> bool:
    """Return whether a value of a recipe stands for an object of a class."""
    return isinstance(value, Mapping) and "class_path" in value and {*value} <= {"class_path", *_ARGUMENTS}


def find_class(name: object) -> Any:
    """Return the class or function that a recipe names, with its module or without; None if there is none."""
    if not isinstance(name, str) or not name.replace(".", "").isidentifier():
        return None
    if "." in name:
        with suppress(ImportError, AttributeError, ValueError):
            made = resolve_name(name)
            return made if callable(made) else None
        return None
    return next((made for package in _PACKAGES if callable(made := getattr(import_module(package), name, None))), None)


def full_name(made: Any) -> str:
    """Return the shortest name, with its module, of a class or function."""
    name = str(made.__qualname__)
    homes = [package for package in _PACKAGES if getattr(import_module(package), name, None) is made]
    return f"{homes[-1] if homes else made.__module__}.{name}"
