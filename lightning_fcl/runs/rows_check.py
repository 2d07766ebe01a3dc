"""Checks of a ``rows.yaml`` before its rows are trained."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from lightning_fcl.annotations import field_types
from lightning_fcl.errors import (
    InvalidValueError,
    LightningFCLError,
    MissingFileError,
    MissingValueError,
    UnknownNameError,
)
from lightning_fcl.evaluation.metrics import METRICS, find_metric
from lightning_fcl.io.safe_yaml import read_yaml
from lightning_fcl.runs.paper_rows import RowEntry, expand_grids, paper_rows, rows_file
from lightning_fcl.validation import at_least, check_argument, did_you_mean, format_names, nearest_name

_SCALES = ("smoke", "small", "medium", "paper")


@dataclass(frozen=True)
class RowsContent:
    """The keys of a ``rows.yaml``.

    Args:
        rows: For each row, the name of a recipe file, or a mapping with the arguments of `RowEntry`.
        base: Recipe file that all rows share.
        grids: Combinations of rows and changes, see `expand_grids`.
        metrics: Metrics of the table. By default, the metrics with an expected value.
        tolerance: Largest difference from an expected value that counts as near, for all metrics or by metric.
        figures: Figures, see `lightning_fcl.evaluation.paper_figures.write_figures`.
        citations: Keys of the papers of all rows, see `RowEntry`.
        gains: Gains of rows over other rows, see `lightning_fcl.evaluation.table.with_tasks`.
        tables: Tables of the page of a paper.
        why: Reason of the verdict on the page of a paper.
        whole: Rows that the page of a paper must contain.
        comparisons: Planned comparisons, see `lightning_fcl.evaluation.planned_comparisons.read_comparisons`.
        ranking: Methods and protocols of average ranks, see `lightning_fcl.evaluation.ranking.read_ranking`.
    """

    rows: Mapping[str, Any]
    base: str = ""
    grids: Sequence[Mapping[str, Any]] = ()
    metrics: Sequence[str] = ()
    tolerance: float | Mapping[str, float] = 0.05
    figures: Sequence[Mapping[str, Any]] = ()
    citations: Sequence[str] = ()
    gains: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    whole: Sequence[str] = ()
    comparisons: Sequence[Mapping[str, str]] = ()
    ranking: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class GridContent:
    """The keys of an entry of ``grids``."""

    rows: Sequence[str]
    changes: Mapping[str, Mapping[str, Any]]
    expected: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    scales: Sequence[str] | None = None
    seeds: int | None = None


@dataclass(frozen=True)
class ChangeContent:
    """The keys of an entry of ``with`` of a grid."""

    configs: Sequence[str] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)
    settings: str | None = None
    families: Mapping[str, str] = field(default_factory=dict)
    search: str | None = None


@dataclass(frozen=True)
class FigureContent:
    """The keys of an entry of ``figures``."""

    file: str
    kind: str
    panels: Mapping[str, Mapping[str, str]]
    title: str = ""
    scales: Sequence[str] = _SCALES
    experiences: bool = False


@dataclass(frozen=True)
class GainsContent:
    """The keys of ``gains``."""

    of: Sequence[str]
    over: Sequence[str]
    paper: Sequence[float]


def check_rows(path: Path, scale: str) -> None:
    """Raise an error for the first invalid key, value or file of a ``rows.yaml``.

    The settings in the recipes are not checked.

    Args:
        path: The file, or its folder.
        scale: Scale of the runs, whose recipe files must exist.

    Raises:
        InvalidValueError: If a value is invalid, or if two rows have the same folder.
        MissingFileError: If the file or a recipe does not exist.
        MissingValueError: If a required key is missing.
        UnknownNameError: If a key, a row, a metric or a kind of figure is unknown.
    """
    file = rows_file(path)
    content = read_yaml(file)
    _check_mapping(RowsContent, content, str(file))
    if not content["rows"]:
        raise MissingValueError(
            f"Expected `rows` in {file} to contain at least one row, but it is empty.",
            hint="Write a line for each row, as in `rows: {FedAvg: fedavg.yaml}`.",
            argument="rows",
        )
    _check_files([content.get("base", "")], f"`base` in {file}")
    for title, entry in content["rows"].items():
        source = f"row {title} in {file}"
        if not isinstance(title, str):
            raise InvalidValueError(
                f"Expected the names of rows in {file} to be text, but got {title}.",
                hint=f'Write "{title}" with quotation marks.',
                argument="rows",
                value=title,
            )
        if not isinstance(entry, str):
            _check_mapping(RowEntry, entry, source, excluded_fields=("is_named", "lacking"))
            _check_files(entry.get("configs", ()), f"`configs` of {source}")
            _check_metrics(entry.get("expected") or (), f"`expected` of {source}")
            _check_numbers(entry.get("expected") or {}, f"`expected` of {source}")
            _check_names(entry.get("scales") or (), _SCALES, f"`scales` of {source}")
            _check_names(entry.get("scale_overrides", ()), _SCALES, f"`scale_overrides` of {source}")
    for grid in content.get("grids", []):
        source = f"a grid in {file}"
        _check_mapping(GridContent, grid, source, renamed={"changes": "with"})
        for name, change in grid["with"].items():
            _check_mapping(ChangeContent, change, f"{name} of {source}")
            _check_files(change.get("configs", ()), f"`configs` of {name} of {source}")
        for expected in grid.get("expected", {}).values():
            _check_metrics(expected, f"`expected` of {source}")
            _check_numbers(expected, f"`expected` of {source}")
        _check_names(grid.get("scales") or (), _SCALES, f"`scales` of {source}")
    _check_metrics(content.get("metrics", ()), f"`metrics` in {file}")
    _check_tolerance(content.get("tolerance", 0.05), file)
    entries = expand_grids(content)
    for figure in content.get("figures", []):
        _check_figure(figure, entries, file)
    if "gains" in content:
        _check_mapping(GainsContent, content["gains"], f"`gains` in {file}")
        _check_names([*content["gains"]["of"], *content["gains"]["over"]], entries, f"the rows of `gains` in {file}")
    _check_recipes(file, scale)


def _check_recipes(file: Path, scale: str) -> None:
    """Raise an error if a row has no recipe, a recipe file is missing, or two rows have the same folder."""
    rows = paper_rows(file, None, scale)
    titles_by_folder: dict[str, str] = {}
    for title, row in rows.items():
        if not row.configs:
            raise MissingValueError(
                f"Expected row {title} in {file} to have a recipe, but it has none.",
                hint="Set `base`, or `configs` of the row.",
                argument="configs",
            )
        if missing := [str(config) for config in row.configs if not config.is_file()]:
            raise MissingFileError(
                f"Expected the recipes of row {title} in {file} to exist, but could not find {', '.join(missing)}.",
                hint="Write their paths relative to the folder of this file.",
                argument="configs",
                value=missing[0],
            )
        if other := titles_by_folder.get(row.slug):
            raise InvalidValueError(
                f"Expected each row in {file} to have its own folder of runs, but {other} and {title} both have the "
                f"folder {row.slug}.",
                hint="Rename a row. A row that is only a file has the name of the file: write `{configs: [FILE]}`.",
                argument="rows",
                value=title,
            )
        titles_by_folder[row.slug] = title


def _check_mapping(
    kind: type,
    content: object,
    source: str,
    excluded_fields: Sequence[str] = (),
    renamed: Mapping[str, str] | None = None,
) -> None:
    """Raise an error if a mapping has an unknown key, misses a required key, or has a value of another type.

    Args:
        kind: Dataclass with the keys and the types of the values.
        content: The mapping.
        source: Name of the mapping for messages.
        excluded_fields: Fields of the dataclass that are no keys.
        renamed: Keys by the names of their fields, if they differ.
    """
    if not isinstance(content, Mapping):
        raise InvalidValueError(
            f"Expected {source} to contain a mapping (`name: value`), but got {content!r:.100}.", value=content
        )
    types = {
        (renamed or {}).get(name, name): hint for name, hint in field_types(kind).items() if name not in excluded_fields
    }
    _check_names(content, types, f"the keys of {source}")
    defaults = {(renamed or {}).get(one.name, one.name): one for one in fields(kind)}
    for name, hint in types.items():
        if name not in content:
            if _is_required(defaults[name]):
                raise MissingValueError(
                    f"Expected `{name}` in {source}, but it is missing.", hint=f"Add `{name}`.", argument=name
                )
            continue
        try:
            check_argument(name, content[name], hint)
        except LightningFCLError as error:
            raise InvalidValueError(f"In {source}: {error}", argument=name, value=content[name]) from error


def _is_required(data_field: Field[Any]) -> bool:
    return data_field.default is MISSING and data_field.default_factory is MISSING


def _check_names(names: Iterable[object], allowed: Iterable[str], subject: str) -> None:
    known_names = list(allowed)
    for name in names:
        if name not in known_names:
            raise UnknownNameError(
                f"Expected {subject} to be among {format_names(known_names)}, but got {name}.",
                hint=did_you_mean(name, known_names),
                argument=str(name),
                value=name,
            )


def _check_files(names: Iterable[object], subject: str) -> None:
    for name in names:
        if not isinstance(name, str):
            raise InvalidValueError(
                f"Expected {subject} to be the name of a file, but got {name!r}.",
                hint="Write the name with quotation marks.",
                argument=subject,
                value=name,
            )


def _check_metrics(names: Iterable[str], subject: str) -> None:
    """Raise UnknownNameError if a metric has no model, or if its name is almost the name of a known metric.

    Other unknown names are accepted, because a module can define its own measures.
    """
    for key in names:
        name, slash, model = str(key).rpartition("/")
        if not (slash and model):
            raise UnknownNameError(
                f"Expected the names of metrics in {subject} to contain a model, but got {key}.",
                hint=f"Write {key.rstrip('/')}/server, {key.rstrip('/')}/clients or {key.rstrip('/')}/total.",
                argument=str(key),
                value=key,
            )
        if find_metric(key) is None and (suggestion := nearest_name(name, [metric.name for metric in METRICS], 0.85)):
            raise UnknownNameError(
                f"Expected the names of metrics in {subject} to be names of `lightning-fcl ls metrics`, but got {key}.",
                hint=f"Did you mean {suggestion}/{model}?",
                argument=str(key),
                value=key,
            )


def _check_numbers(values: Mapping[str, float], subject: str) -> None:
    for name, value in values.items():
        if not math.isfinite(value):
            raise InvalidValueError(
                f"Expected {subject} to contain finite numbers, but got {value} for {name}.",
                hint="Remove the metric if there is no expected value.",
                argument=name,
                value=value,
            )


def _check_tolerance(tolerance: float | Mapping[str, float], file: Path) -> None:
    by_metric = tolerance if isinstance(tolerance, Mapping) else {}
    _check_metrics(by_metric, f"`tolerance` in {file}")
    for value in by_metric.values() if isinstance(tolerance, Mapping) else (tolerance,):
        at_least(0, tolerance=value)


def _check_figure(figure: Mapping[str, Any], rows: Iterable[str], file: Path) -> None:
    from lightning_fcl.evaluation.paper_figures import FIGURE_KINDS  # The import of Altair takes a second.

    source = f"a figure in {file}"
    _check_mapping(FigureContent, figure, source)
    kinds = [kind for kind in FIGURE_KINDS if " " not in kind]
    _check_names([figure["kind"]], kinds, f"`kind` of {source}")
    _check_names(figure.get("scales", ()), _SCALES, f"`scales` of {source}")
    _check_names([row for panel in figure["panels"].values() for row in panel.values()], rows, f"the rows of {source}")
    if Path(figure["file"]).name != figure["file"] or Path(figure["file"]).suffix != ".png":
        raise InvalidValueError(
            f"Expected `file` of {source} to be the name of a PNG file, but got {figure['file']}.",
            hint="Write a name without a folder, as in `file: accuracy.png`.",
            argument="file",
            value=figure["file"],
        )
    if not figure["panels"] or not all(figure["panels"].values()):
        raise MissingValueError(
            f"Expected `panels` of {source} to contain a row for each panel, but a panel has none.",
            hint="Write the rows of each panel, as in `panels: {Digits: {FedAvg: FedAvg}}`.",
            argument="panels",
        )
    if figure.get("experiences") and figure["kind"] != "activation_density":
        raise InvalidValueError(
            f"Expected `experiences` only for the kind activation_density, but {source} has the kind {figure['kind']}.",
            hint="Remove `experiences`.",
            argument="experiences",
        )
    if figure.get("experiences") and any(len(panel) > 1 for panel in figure["panels"].values()):
        raise InvalidValueError(
            f"Expected one row in each panel with `experiences: true`, but {source} has a panel with several rows.",
            hint="Write a panel for each row.",
            argument="panels",
        )
