"""A recipe: files and settings that are merged into one dictionary."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_fcl.errors import InvalidValueError, MissingFileError, MissingValueError, UnknownNameError
from lightning_fcl.io.safe_yaml import read_yaml
from lightning_fcl.runs.merging import SECTIONS, merge
from lightning_fcl.validation import did_you_mean


@dataclass(frozen=True)
class Setting:
    """A named value of a recipe that overrides the values of earlier files and settings.

    Args:
        name: Dotted name, such as ``data.partition.num_clients``. A name within a list applies to the last entry, or to
            the entry of a class, as in ``trainer.callbacks.Replay.memory_size``. A ``+`` at the end appends to a list.
        value: The value, or its text, which is converted to the type of the argument.
    """

    name: str
    value: Any

    @property
    def words(self) -> tuple[str, str]:
        """The words of a command line for this setting."""
        return f"--{self.name}", self.value if isinstance(self.value, str) else json.dumps(self.value)


@dataclass(frozen=True)
class Recipe:
    """A sequence of layers. A layer is a file or a setting. Later layers override the values of earlier layers.

    Args:
        layers: The files and settings in their order.
    """

    layers: tuple[Path | Setting, ...] = ()

    @classmethod
    def from_words(cls, words: Sequence[str]) -> Recipe:
        """Return the recipe of the files and settings in the words of a command line.

        Example:
            >>> Recipe.from_words(["--config", "mine.yaml", "--data.batch_size=16"]).words
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
        """The words of a command line for this recipe."""
        pairs = [("--config", str(one)) if isinstance(one, Path) else one.words for one in self.layers]
        return [word for pair in pairs for word in pair]

    def with_layers(self, *layers: Path | Setting) -> Recipe:
        """Return the recipe with further files and settings, which override the values of this recipe."""
        return replace(self, layers=(*self.layers, *layers))

    def with_values(self, values: Mapping[str, Any]) -> Recipe:
        """Return the recipe with further settings, which are given as values by dotted name."""
        return self.with_layers(*(Setting(name, value) for name, value in values.items()))

    def content(self) -> dict[str, Any]:
        """Return the values of all layers, merged into one dictionary.

        Raises:
            InvalidValueError: If a file does not contain settings by name, or is too large.
            MissingFileError: If a file does not exist.
            UnknownNameError: If a setting names a class that a list does not contain, or if a key is unknown.
        """
        whole: dict[str, Any] = {}
        for layer in self.layers:
            values = read_recipe_file(layer) if isinstance(layer, Path) else {layer.name: layer.value}
            for name, value in values.items():
                if name in ("subcommand", "config"):
                    raise UnknownNameError(
                        f"Expected a section such as {', '.join(SECTIONS[:3])} in a recipe, but got `{name}`.",
                        hint="Pass further recipes on the command line, as in `--config FILE`."
                        if name == "config"
                        else "Pass the command on the command line, as in `lightning-fcl fit FILE`.",
                        argument=str(name),
                    )
                if value is not None or name not in SECTIONS:
                    files = (layer,) if isinstance(layer, Path) else ()
                    merge(whole, {str(name): value}, files)
        return whole


def read_recipe_file(path: Path) -> dict[str, Any]:
    """Return the content of a recipe file.

    Raises:
        InvalidValueError: If the path is a folder, or if the file does not contain settings by name.
        MissingFileError: If the file does not exist.
    """
    if not path.exists():
        raise MissingFileError(
            f"Expected a recipe at {path}, but there is no such file.",
            hint="Pass an existing file, or a name from `lightning-fcl ls recipes`.",
        )
    if path.is_dir():
        raise InvalidValueError(
            f"Expected a recipe at {path}, but it is a folder.",
            hint="Pass a file, or the folder of a run, as in `lightning-fcl fit runs/fit`.",
            value=path,
        )
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise InvalidValueError(
            f"Expected {path} to contain settings by name, as in trainer: {{max_epochs: 3}}, but got "
            f"{'nothing' if content is None else f'{content!r:.100}'}.",
            value=content,
        )
    return content


def take_settings(words: Sequence[str], command_options: Collection[str]) -> tuple[list[str], list[Path | Setting]]:
    """Split the words of a command line into the command's own words and the layers of a recipe.

    Args:
        words: The words of a command line.
        command_options: The options of the command, such as ``--out``.

    Returns:
        The words that belong to the command, and the files and settings in their order.

    Raises:
        MissingValueError: If an option has no value.
    """
    rest, layers, remaining_words = list[str](), list[Path | Setting](), list(words)
    while remaining_words:
        word = remaining_words.pop(0)
        option, equals, value = word.partition("=")
        if option == "--config":
            if not equals and not remaining_words:
                raise MissingValueError(
                    "Expected a file after `--config`, but got none.",
                    hint="Write --config=FILE.",
                    argument="--config",
                )
            layers.append(Path(value if equals else remaining_words.pop(0)))
        elif not option.startswith("--") or option == "--" or option in command_options:
            rest.append(word)
        elif equals or (remaining_words and not remaining_words[0].startswith("--")):
            layers.append(Setting(option[2:], value if equals else remaining_words.pop(0)))
        else:
            raise MissingValueError(
                f"Expected a value after `{option}`, but got none.",
                hint=did_you_mean(option, command_options) or f"Write {option}=VALUE.",
                argument=option,
            )
    return rest, layers


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Return the last part of each dotted name, or the whole name if two names have the same last part.

    Example:
        >>> short_names(["data.batch_size", "a.lr", "b.lr"])
        {'data.batch_size': 'batch_size', 'a.lr': 'a.lr', 'b.lr': 'b.lr'}
    """
    last = [name.rpartition(".")[2] for name in names]
    return {name: part if last.count(part) == 1 else name for part, name in zip(last, names, strict=True)}
