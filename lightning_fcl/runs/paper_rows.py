"""Recipes by name, such as ``quickstart``, or ``flwf/flwf-2t`` for a row of a paper's table."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from lightning_fcl.errors import InvalidValueError, MissingFileError, MissingValueError, UnknownNameError
from lightning_fcl.io.paths import safe_join
from lightning_fcl.io.reading import read_text
from lightning_fcl.runs.found_settings import FoundSettings, read_settings
from lightning_fcl.runs.recipe import Recipe, Setting, read_recipe_file
from lightning_fcl.validation import did_you_mean, one_of


def recipes_folder() -> Path:
    """Return the folder of the recipes: in the installed package, or at the top of a checkout."""
    package_folder = Path(__file__).parent.parent
    return package_folder / "recipes" if (package_folder / "recipes").is_dir() else package_folder.parent / "recipes"


def list_papers() -> list[str]:
    """Return the names of the papers with recipes in the package."""
    return sorted(path.parent.name for path in recipes_folder().glob("*/rows.yaml"))


def paper_folder(paper: str) -> Path:
    """Return the folder of a paper's recipes."""
    one_of(list_papers(), paper=paper)
    return recipes_folder() / paper


def read_rows(path: Path) -> dict[str, Any]:
    """Return the content of a ``rows.yaml``.

    Args:
        path: The file, or the folder of the file.
    """
    content: dict[str, Any] = yaml.safe_load(read_text(rows_file(path)))
    return content


def row_citations(paper: str, title: str) -> tuple[str, ...]:
    """Return the keys of the papers of a row in ``evaluation/citations.bib``.

    The result is empty for other recipes, such as recipes of the user.

    Args:
        paper: Short name of the paper.
        title: Name of the row.

    Example:
        >>> row_citations("analytic", "RanPAC")
        ('mcdonnell2023ranpac',)
    """
    file = recipes_folder() / slug(paper) / "rows.yaml"
    if slug(paper) != paper or not file.is_file():
        return ()
    content = read_rows(file.parent)
    row = expand_grids(content).get(title)
    return () if row is None else (*content.get("citations", ()), *row.citations)


def rows_file(path: Path) -> Path:
    """Return the path of a ``rows.yaml``, given the file or its folder."""
    return path / "rows.yaml" if path.is_dir() else path


def scale_folder(recipes: Path, scale: str) -> Path:
    """Return the folder with the table, figures and committed runs of a paper at a scale."""
    return recipes if scale == "paper" else safe_join(recipes, scale)


@dataclass(frozen=True)
class RowEntry:
    """An entry of ``rows.yaml`` that describes one row of a paper's table.

    Args:
        configs: Recipe files. They override the base file, which all rows share.
        overrides: Settings by their dotted names, merged into the files.
        scale_overrides: Further settings by scale.
        expected: Metric values from the paper, by the name of the metric. None if the recipe files contain them.
        scales: Scales at which the row can be run. None for all scales.
        notes: Texts for further columns of tables, by the name of the column.
        search: File of the hyperparameter search of this row.
        citations: Keys of the row's papers in ``evaluation/citations.bib``. The entry ``citations`` of ``rows.yaml``
            contains the papers of all rows.
        kind: ``"method"``, or ``"bound"`` for a row that is not a federated continual method, such as training on all
            data in one place.
        model: Model whose accuracy the leaderboard shows: ``"server"``, or ``"clients"`` for a row without a model of
            the server.
        seeds: Number of seeds if the command does not specify the number. None for the default of the command.
        is_named: Whether the title is the name of the row in the results. False for a row that is only the name of a
            recipe file.
        lacking: The row and the case for which ``settings.yaml`` has no entry, although a grid needs this entry.
    """

    configs: Sequence[str] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)
    scale_overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    expected: Mapping[str, float] | None = None
    scales: Sequence[str] | None = None
    notes: Mapping[str, str] = field(default_factory=dict)
    search: str | None = None
    citations: Sequence[str] = ()
    kind: Literal["method", "bound"] = "method"
    model: Literal["server", "clients"] = "server"
    seeds: int | None = None
    is_named: bool = True
    lacking: tuple[str, str] | None = None


@dataclass(frozen=True)
class Row:
    """A recipe with a title, such as a row of a paper's table.

    Args:
        title: Name of the row in the table.
        configs: Recipe files. Later files override earlier files.
        expected: Metric values from the paper, by the name of the metric. None if the recipe files contain them.
        settings: Settings that override the values of the files.
        is_named: Whether the title is the name of the row in the results. Otherwise, the recipe files contain the name.
        lacking: The row and the case of a search whose settings are missing, see `RowEntry`.
    """

    title: str
    configs: tuple[Path, ...]
    expected: Mapping[str, float] | None = None
    settings: tuple[Setting, ...] = ()
    is_named: bool = False
    lacking: tuple[str, str] | None = None

    @property
    def slug(self) -> str:
        """Name of the row's folder: the slug of the title if `is_named`, otherwise the stem of the last file."""
        return slug(self.title) if self.is_named else self.configs[-1].stem

    @property
    def recipe(self) -> Recipe:
        """The recipe of the files and settings, with the title if `is_named`, and with the expected values if any.

        Raises:
            MissingValueError: If ``settings.yaml`` has no settings for the row.
        """
        if self.lacking is not None:
            row, case = self.lacking
            raise MissingValueError(
                f"Expected settings of {row} for the case {case} in {self.configs[0].with_name('settings.yaml')}, but "
                "there are none.",
                hint=f"Search them with `{search_command(row, case)}`.",
                argument="settings",
            )
        values = {"recipe.row": self.title} if self.is_named else {}
        values |= {} if self.expected is None else {"recipe.expected_metrics": json.dumps(self.expected)}
        return Recipe((*self.configs, *self.settings)).with_values(values)

    @property
    def summary(self) -> str:
        """First sentence of the comment in the first line of the last file. If this line is no comment, the title."""
        first = read_text(self.configs[-1]).partition("\n")[0]
        return first.removeprefix("#").strip().partition(". ")[0].rstrip(".") if first.startswith("#") else self.title


def search_command(row: str, case: str) -> str:
    """Return the command that searches the settings of a row of the leaderboard in a case.

    Example:
        >>> search_command("EWC", "beta .5")
        "lightning-fcl leaderboard --search --cases 'beta .5' --methods EWC"
    """
    return shlex.join(["lightning-fcl", "leaderboard", "--search", "--cases", case, "--methods", row])


def paper_rows(path: Path, rows: Sequence[str] | None, scale: str = "paper") -> dict[str, Row]:
    """Return rows of a table at a scale: all rows, or only those in ``rows``.

    `expand_grids` describes the format of ``rows.yaml``.

    Args:
        path: The ``rows.yaml``, or its folder.
        rows: Names of rows. None for all rows.
        scale: Scale of the runs.
    """
    content, folder = read_rows(path), rows_file(path).parent
    entries = expand_grids(content, read_settings(folder))
    at_scale = {title: entry for title, entry in entries.items() if scale in (entry.scales or [scale])}
    for title in rows or ():
        one_of(entries, rows=title)
        if title not in at_scale:
            scales = ", ".join(entries[title].scales or ())
            raise InvalidValueError(
                f"Expected `scale` to be one of {scales} for row {title}, but got {scale}.",
                argument="scale",
                value=scale,
            )
    result = {}
    for title in rows or at_scale:
        entry = entries[title]
        values = {**entry.overrides, **entry.scale_overrides.get(scale, {})}
        settings = tuple(Setting(name, v if isinstance(v, str) else json.dumps(v)) for name, v in values.items())
        base = [content["base"]] if "base" in content else []
        configs = tuple(folder / name for name in (*base, *entry.configs))
        result[title] = Row(title, configs, entry.expected, settings, entry.is_named, entry.lacking)
    return result


def scaled_configs(configs: Sequence[Path], scale: str) -> tuple[Path, ...]:
    """Return the recipe files of a row, followed by the file of a scale unless the scale is ``paper``."""
    if scale == "paper":
        return tuple(configs)
    scaling = configs[0].with_name(f"scale-{scale}.yaml")
    one_of([*sorted(path.stem[len("scale-") :] for path in scaling.parent.glob("scale-*.yaml")), "paper"], scale=scale)
    return (*configs, scaling)


def slug(name: str) -> str:
    """Return a name in lower case with hyphens, for folders and files."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def expand_grids(
    content: Mapping[str, Any], settings: Mapping[str, Mapping[str, FoundSettings]] | None = None
) -> dict[str, RowEntry]:
    """Return all rows of a ``rows.yaml``: the entries of ``rows``, and the rows that ``grids`` generate.

    An entry of ``rows`` is the name of a recipe file, or the arguments of `RowEntry`. A grid combines each of its
    ``rows`` with each change in ``with``. The title of a generated row is the name of the change and the title of the
    row.

    A change may have ``overrides``, ``configs`` and ``settings``. ``settings`` is the name of a case: the settings that
    were found for the row in this case override the settings of the row, and ``overrides`` of the change override both.
    With ``families``, a row uses the settings of another row, as in ``{FedProx: FedAvg}``. ``search`` is the search
    file of the case, in place of the search files of the rows.
    The ``scales`` and ``seeds`` of a grid apply to all its rows. ``expected`` contains the paper's numbers by the title
    of the generated row.

    Args:
        content: Content of the ``rows.yaml``.
        settings: Found settings by case and row, see `read_settings`. A row without an entry has `RowEntry.lacking`.

    Raises:
        InvalidValueError: If a grid names a row that does not exist.
    """
    rows = {
        title: RowEntry(**entry) if isinstance(entry, dict) else RowEntry([entry], is_named=False)
        for title, entry in content["rows"].items()
    }
    result = dict(rows)
    for grid in content.get("grids", []):
        expected = grid.get("expected", {})
        row_titles = [f"{change} {row}" for change in grid["with"] for row in grid["rows"]]
        unknown = [("rows", row, [*rows]) for row in grid["rows"] if row not in rows]
        unknown += [("expected", title, row_titles) for title in sorted({*expected} - {*row_titles})]
        for key, title, titles in unknown:
            raise InvalidValueError(
                f"Expected the names in `{key}` of a grid to be among {', '.join(titles)}, but got {title}.",
                argument="rows",
                value=title,
            )
        for change, change_settings in grid["with"].items():
            case = change_settings.get("settings")
            for title in grid["rows"]:
                row, searched = rows[title], change_settings.get("families", {}).get(title, title)
                found_settings = (settings or {}).get(case, {}).get(searched)
                result[f"{change} {title}"] = replace(
                    row,
                    configs=[*row.configs, *change_settings.get("configs", [])],
                    overrides={
                        **row.overrides,
                        **({} if found_settings is None else found_settings.overrides),
                        **change_settings.get("overrides", {}),
                    },
                    expected=expected.get(f"{change} {title}", {}),
                    scales=grid.get("scales"),
                    seeds=grid.get("seeds", row.seeds),
                    is_named=True,
                    lacking=(searched, case) if case is not None and found_settings is None else None,
                )
    return result


def list_protocols(content: Mapping[str, Any], kind: str = "") -> dict[str, dict[str, Mapping[str, str]]]:
    """Return, for each name in ``with`` of the grids, the notes of each row that the grid combines with the name.

    Args:
        content: Content of the ``rows.yaml``.
        kind: Kind of the rows, see `RowEntry`. Empty for all rows.

    Example:
        >>> rows = {"a": {"configs": [], "notes": {"logits": "all"}}, "b": "b.yaml"}
        >>> list_protocols({"rows": rows, "grids": [{"with": {"P": {}}, "rows": ["a", "b"]}]})
        {'P': {'a': {'logits': 'all'}, 'b': {}}}
    """
    entries, notes_by_change = expand_grids(content), dict[str, dict[str, Mapping[str, str]]]()
    for grid in content.get("grids", []):
        for change in grid["with"]:
            notes_by_change.setdefault(change, {}).update(
                {row: entries[row].notes for row in grid["rows"] if kind in ("", entries[row].kind)}
            )
    return notes_by_change


def list_cases(
    content: Mapping[str, Any], protocols: Collection[str] | None = None
) -> dict[str, dict[str, str | None]]:
    """Return the search file of each row whose settings a grid reads from ``settings.yaml``, by case and row.

    Args:
        content: Content of the ``rows.yaml``.
        protocols: Names in ``with`` of the grids. None for all names.

    Example:
        >>> rows = {name: {"configs": [], "search": "search.yaml"} for name in "abc"}
        >>> change = {"settings": "beta .5", "families": {"c": "a"}}
        >>> list_cases({"rows": rows, "grids": [{"with": {"P": change, "Q": {}}, "rows": ["a", "b", "c"]}]})
        {'beta .5': {'a': 'search.yaml', 'b': 'search.yaml'}}
    """
    files_by_case = dict[str, dict[str, str | None]]()
    entries = expand_grids({"rows": content["rows"]})
    for grid in content.get("grids", []):
        for name, change in grid["with"].items():
            if "settings" in change and (protocols is None or name in protocols):
                rows = [change.get("families", {}).get(row, row) for row in grid["rows"]]
                files = files_by_case.setdefault(change["settings"], {})
                files.update({row: change.get("search", entries[row].search) for row in rows})
    return files_by_case


def list_recipes(scale: str = "paper", paper: str = "") -> dict[str, Row]:
    """Return the recipes of the package at a scale, by name.

    If ``paper`` is set, only the recipes of this paper are returned. Recipes that belong to no paper, such as the
    quickstart, are added if the scale is ``paper``.
    """
    files = sorted(recipes_folder().glob("*.yaml")) if scale == "paper" else []
    rows_by_name = {path.stem: Row(path.stem, (path,)) for path in files}
    for folder in sorted(path.parent for path in recipes_folder().glob("*/rows.yaml")):
        for row in paper_rows(folder, None, scale).values() if paper in ("", folder.name) else ():
            with suppress(ValueError):  # The paper has no such scale.
                rows_by_name[f"{folder.name}/{row.slug}"] = replace(row, configs=scaled_configs(row.configs, scale))
    return rows_by_name


def find_recipe(name: str) -> Row:
    """Return the recipe with a name or a path, from the package or a YAML file."""
    if Path(name).suffix in (".yaml", ".yml") or Path(name).is_file():
        read_recipe_file(Path(name))
        return Row(Path(name).stem, (Path(name),))
    if Path(name).parts[:1] == ("runs",) or Path(name).is_absolute() or Path(name).is_dir():
        raise MissingFileError(
            f"Expected a recipe at {name}, but {'got a folder' if Path(name).is_dir() else 'there is no such path'}.",
            hint="Pass a YAML file. Only `fit` and `test` accept the folder of a run, and only one folder.",
            value=name,
        )
    plain, _, scale = name.partition("@")
    recipes = list_recipes(scale or "paper", plain.partition("/")[0])
    if plain not in recipes:
        recipes = list_recipes(scale or "paper")
        raise UnknownNameError(
            f"Expected the name of a recipe or a YAML file, but got {name}.",
            hint=f"{did_you_mean(plain, recipes)} List all names with `lightning-fcl ls recipes`.",
        )
    return recipes[plain]


def find_recipes(names: Sequence[str]) -> Recipe:
    """Return several recipes merged into one. Later recipes override earlier recipes."""
    return Recipe(tuple(layer for name in names for layer in find_recipe(name).recipe.layers))


def recipe_name(recipe: Recipe) -> str:
    """Return the name of a recipe: its paper and row, as in `lightning-fcl ls recipes`, or the name of its first file.

    Return "" for a recipe that has neither a paper nor a file.

    Example:
        >>> recipe_name(find_recipes(["quickstart"])), recipe_name(find_recipes(["flwf/flwf-2t"]))
        ('quickstart', 'flwf/flwf-2t')
    """
    section = recipe.content().get("recipe")
    if isinstance(section, Mapping) and section.get("paper") and section.get("row"):
        return f"{section['paper']}/{slug(str(section['row']))}"
    return next((file.stem for file in recipe.files), "")
