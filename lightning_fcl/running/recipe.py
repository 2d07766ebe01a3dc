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
from lightning_fcl.io.safe_yaml import load_yaml, read_yaml

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
_GROUPS = ("split",)  # arguments whose values are arguments of a dataclass


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
            UnknownNameError: If a list has no entry of a class that a setting names, or a class a misspelt key.
        """
        whole: dict[str, Any] = {}
        for layer in self.layers:
            values = read_recipe_file(layer) if isinstance(layer, Path) else {layer.name: layer.value}
            for name, value in values.items():
                if name in ("subcommand", "config"):
                    raise UnknownNameError(
                        f"Expected {', '.join(SECTIONS[:3])} or the like in a recipe but got `{name}`.",
                        hint="Pass further recipes on the command line, as in `--config FILE`.",
                        argument=str(name),
                    )
                if name in SECTIONS:
                    value = _read_section(value, layer.parent if isinstance(layer, Path) else Path())
                if value is not None or name not in SECTIONS:
                    merge(whole, _nested(str(name), value))
        return whole


def read_recipe_file(path: Path) -> dict[str, Any]:
    """Return the content of a recipe's file."""
    if not path.exists():
        raise MissingFileError(
            f"Expected a recipe at {path} but there is no such file.",
            hint="Pass an existing file, or a name of `lightning-fcl ls recipes`.",
        )
    if path.is_dir():
        raise InvalidValueError(
            f"Expected a recipe at {path} but it is a folder.",
            hint="Pass a file, or the folder of a run, as in `lightning-fcl fit runs/fit`.",
            value=path,
        )
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise InvalidValueError(
            f"Expected {path} to hold settings by name, as in trainer: {{max_epochs: 3}}, but got "
            f"{'nothing' if content is None else f'{content!r:.100}'}.",
            value=content,
        )
    return content


def _read_section(value: Any, folder: Path) -> Any:
    """Return the value of a section, which may be the name of a file. A name of a pipe or a device is rejected."""
    is_file = isinstance(value, str) and (folder / value).exists() and not (folder / value).is_dir()
    return read_yaml(folder / value) if is_file else value


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
                raise MissingValueError(
                    "Expected a file behind `--config` but got none.",
                    hint="Write --config=FILE.",
                    argument="--config",
                )
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


class _Dotted(dict[str, Any]):
    """The values that a dotted name leads to: they are put into a dictionary, where another one would replace it."""


def _nested(name: str, value: Any) -> dict[str, Any]:
    """A recipe that holds nothing but a value, by its dotted name."""
    *sections, last = name.split(".")
    more = _Dotted({last: value})
    for section in reversed(sections):
        more = _Dotted({section: more})
    return more


def merge(whole: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Put the values of a recipe over those of another one.

    Sections, arguments of classes and groups of arguments are merged name by name. Another dictionary, such as
    ``reductions``, is replaced as a whole. A class that is named again keeps its arguments; another class in its place
    keeps those that it takes, too. A key that ends in ``+`` appends to a list. Values for a list go to its last entry,
    or to the one whose class they name.
    """
    for key, value in more.items():
        if isinstance(key, str) and key.endswith("+"):
            name, value = key.removesuffix("+"), _read(value)
            items = value if isinstance(value, list) else [] if value in (None, "null") else [value]
            here = whole.get(name)
            whole[name] = [*(here if isinstance(here, list) else [here] if here else []), *copy.deepcopy(items)]
        elif isinstance(key, str) and "." in key:
            merge(whole, _nested(key, value))
        else:
            joined = key in (*SECTIONS, *_GROUPS) or isinstance(value, _Dotted)
            whole[key] = _merged(whole.get(key), value, joined)


def _merged(here: Any, value: Any, joined: bool = False) -> Any:
    """The value that stands where ``value`` is put over ``here``; ``joined``: dictionaries are merged name by name."""
    if isinstance(here, dict | list):
        value = _read(value)
    if isinstance(value, Mapping):
        here = _read(here)
    if isinstance(here, list) and here:
        if isinstance(value, Mapping) and "class_path" not in value:
            position, value = _entry_of(here, value)
            return [_merged(one, value, joined) if n == position else one for n, one in enumerate(here)]
        if isinstance(value, list) and len(value) == len(here) and any(map(is_spec, here)):
            return [_merged(*pair) for pair in zip(here, value, strict=True)]
    if isinstance(here, str) and isinstance(value, Mapping) and "class_path" not in value and find_class(here):
        here = {"class_path": here}
    if is_spec(here):
        if isinstance(value, str) and find_class(value):
            value = {"class_path": value}
        if isinstance(value, Mapping):
            return _merged_class(here, value)
    if is_spec(value):
        return _merged_class({"class_path": value["class_path"]}, value)
    if isinstance(value, Mapping) and joined:
        merged = copy.copy(here) if isinstance(here, dict) else {}
        merge(merged, value)
        return merged
    return copy.deepcopy(dict(value) if isinstance(value, _Dotted) else value)


def _read(value: Any) -> Any:
    """The values that a text stands for, as in ``"{lr: 0.1}"``; another value as it is."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        with suppress(yaml.YAMLError):
            return load_yaml(value)
    return value


def _merged_class(here: dict[str, Any], value: Mapping[str, Any]) -> dict[str, Any]:
    if "class_path" not in value and not {*value} <= _ARGUMENTS:
        value = {"init_args": _Dotted(value)}
    if unknown := sorted({*map(str, value)} - {"class_path", *_ARGUMENTS}):
        known = ("class_path", "init_args", "dict_kwargs")
        raise UnknownNameError(
            f"Expected {', '.join(known)} of {value['class_path']} but got `{unknown[0]}`.",
            hint=did_you_mean(unknown[0], known)
            or f"Write it into `init_args`, as in init_args: {{{unknown[0]}: ...}}.",
            argument=unknown[0],
        )
    path = value.get("class_path", here["class_path"])
    merged = {**here, "class_path": path}
    if path != here["class_path"] and (made := find_class(path)) is not find_class(here["class_path"]):
        taken = argument_names(made) if made else []
        kept = {name: one for name, one in (here.get("init_args") or {}).items() if name in taken}
        merged = {"class_path": path} | ({"init_args": kept} if kept else {})
    for name in _ARGUMENTS & {*value}:
        merged[name] = _merged(merged.get(name), value[name], joined=True)
    return merged


def argument_names(made: Any) -> list[str]:
    """Return the names of the arguments of a class or function, with those that it passes on as ``**kwargs``."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    names: list[str] = []
    with suppress(ValueError, TypeError):  # built-in classes have no signature
        names += inspect.signature(made).parameters
        add = parser.add_class_arguments if isinstance(made, type) else parser.add_function_arguments
        add(made, fail_untyped=False)
    keys = parser.get_defaults(skip_validation=True).as_flat().__dict__
    return list(dict.fromkeys([*names, *(str(key).partition(".")[0] for key in keys)]))


def _entry_of(entries: Sequence[Any], value: Mapping[str, Any]) -> tuple[int, Any]:
    """The position of the entry of a list to which a value belongs, and the value: the one whose class it names."""
    (name, inner), *more = value.items()
    if more or not isinstance(inner, Mapping) or not str(name)[:1].isupper():
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
        with suppress(Exception):  # a module may raise anything when it is imported
            made = resolve_name(name)
            return made if callable(made) else None
        return None
    return next((made for package in _PACKAGES if callable(made := getattr(import_module(package), name, None))), None)


def full_name(made: Any) -> str:
    """Return the shortest name, with its module, of a class or function."""
    name = str(made.__qualname__)
    homes = [package for package in _PACKAGES if getattr(import_module(package), name, None) is made]
    return f"{homes[-1] if homes else made.__module__}.{name}"
