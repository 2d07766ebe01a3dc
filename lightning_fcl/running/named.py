"""Recipes by name: the quickstart, or a row of a paper's table, as ``flwf/flwf-2t-ft`` or ``fedvit/fedvit@small``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_fcl.errors import did_you_mean
from lightning_fcl.hub.documents import read_yaml
from lightning_fcl.running.rows import at_scale, config_words, paper_rows, recipes_folder

_ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True)
class NamedRecipe:
    """A recipe: its files, later ones over earlier ones, and what else its command line says."""

    name: str
    title: str
    configs: tuple[Path, ...]
    words: tuple[str, ...] = ()

    @property
    def command_words(self) -> list[str]:
        """What names it on a command line."""
        return [*config_words(self.configs), *self.words]

    @property
    def about(self) -> str:
        """The first sentence of the last file's head, as far as its first line has it."""
        first = self.configs[-1].read_text(encoding="utf-8").partition("\n")[0]
        return first.removeprefix("#").strip().partition(". ")[0].rstrip(".") if first.startswith("#") else self.title


def named_recipes(scale: str = "paper", paper: str = "") -> dict[str, NamedRecipe]:
    """All recipes of the package at a scale, by name; or those of a paper, and the quickstart."""
    quickstart = NamedRecipe("quickstart", "quickstart", (recipes_folder() / "quickstart.yaml",))
    found = {"quickstart": quickstart} if scale == "paper" else {}
    for folder in sorted(path.parent for path in recipes_folder().glob("*/rows.yaml")):
        if paper not in ("", folder.name):
            continue
        for title, row in paper_rows(folder, None, scale).items():
            name = f"{folder.name}/{row.slug}"
            with suppress(ValueError):  # the paper has no such scale
                found[name] = NamedRecipe(name, title, at_scale(row.configs, scale), row.fit_words)
    return found


def read_recipe_file(path: Path) -> Any:
    """What a recipe's file says, which is refused if it is none."""
    if not path.exists():
        raise FileNotFoundError(f"Expected a recipe at {path} but there is no such file.")
    return read_yaml(path)


def find_recipe(name: str) -> NamedRecipe:
    """A recipe of the package, or a file, by its name.

    Args:
        name: Such as ``"flwf/flwf-2t-ft"``, at another scale ``"fedvit/fedvit@small"``, or the path of a YAML file.
    """
    if Path(name).suffix in _ENDINGS or Path(name).is_file():
        read_recipe_file(Path(name))
        return NamedRecipe(name, Path(name).stem, (Path(name),))
    plain, _, scale = name.partition("@")
    known = named_recipes(scale or "paper", plain.partition("/")[0])
    if plain not in known:
        known = named_recipes(scale or "paper")
        raise ValueError(
            f"Expected the name of a recipe, or of a YAML file, but got {name}.{did_you_mean(plain, known)} "
            "`lightning-fcl ls recipes` lists them."
        )
    return known[plain]


def find_recipes(names: Sequence[str]) -> NamedRecipe:
    """Some recipes as one, later ones over earlier ones."""
    recipes = [find_recipe(name) for name in names]
    return NamedRecipe(
        " ".join(names),
        recipes[-1].title if recipes else "",
        tuple(config for recipe in recipes for config in recipe.configs),
        tuple(word for recipe in recipes for word in recipe.words),
    )
