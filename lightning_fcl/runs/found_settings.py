"""The file ``settings.yaml`` next to a ``rows.yaml``: the settings that a search has found for each row, by case."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lightning_fcl.annotations import field_types
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.evaluation.table import markdown_table
from lightning_fcl.io.atomic import write_atomic
from lightning_fcl.io.safe_yaml import read_yaml
from lightning_fcl.library_errors import one_line
from lightning_fcl.runs.recipe import short_names
from lightning_fcl.validation import check_argument

_HEAD = """\
# Settings of each row, found by `lightning-fcl leaderboard --search`, by case and row.
# overrides: best settings. num_settings, num_failed: number of searched settings, and number of settings that failed.
# score: objective of the best settings. null for settings that are not from a search.
# edge: arguments whose best value is at an end of the searched values. search: checksum of the search.
"""


@dataclass(frozen=True)
class FoundSettings:
    """The result of the search of a row in a case.

    Args:
        overrides: Best settings by their dotted names.
        num_settings: Number of settings that the search has tried.
        num_failed: Number of settings whose runs failed.
        score: Value of the objective for the best settings. None if the settings are not from a search.
        edge: Names of the arguments whose best value is the smallest or largest value that was tried.
        search: Checksum of the search: its recipe, its settings and the version of the library.
    """

    overrides: Mapping[str, Any]
    num_settings: int = 0
    num_failed: int = 0
    score: float | None = None
    edge: list[str] = field(default_factory=list)
    search: str = ""


SettingsByCase = dict[str, dict[str, FoundSettings]]
"""Found settings by case and row."""


def settings_file(folder: Path) -> Path:
    """Return the path of the ``settings.yaml`` in the folder of a ``rows.yaml``."""
    return folder / "settings.yaml"


def read_settings(folder: Path) -> SettingsByCase:
    """Return the found settings of a ``rows.yaml`` by case and row. Empty if there is no ``settings.yaml``.

    Args:
        folder: Folder of the ``rows.yaml``.

    Raises:
        InvalidValueError: If the file does not contain the settings of rows by case.
    """
    file = settings_file(folder)
    content = read_yaml(file) if file.is_file() else {}
    try:
        return {
            str(case): {str(row): _to_found(entry) for row, entry in rows.items()} for case, rows in content.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidValueError(
            f"Expected {file} to contain the found settings of rows by case, but got: {one_line(error)}.",
            hint="Delete the file, and run `lightning-fcl leaderboard --search`.",
            value=file,
        ) from error


def _to_found(entry: Mapping[str, Any]) -> FoundSettings:
    for name, hint in field_types(FoundSettings).items():
        if name in entry:
            check_argument(name, entry[name], hint)
    return FoundSettings(**entry)


def write_settings(folder: Path, case: str, row: str, entry: FoundSettings) -> Path:
    """Set the entry of a row in a case in ``settings.yaml``, keep all other entries, and return the file's path."""
    settings = read_settings(folder)
    settings.setdefault(case, {})[row] = entry
    content = {case: {row: asdict(one) for row, one in rows.items()} for case, rows in settings.items()}
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)
    return write_atomic(settings_file(folder), _HEAD + text)


def values_text(entry: FoundSettings) -> str:
    """Return the values of found settings with short names.

    Example:
        >>> values_text(FoundSettings({"model.lr": 0.1, "trainer.callbacks.EWC.strength": 0.5}))
        'lr=0.1, strength=0.5'
    """
    names = short_names(list(entry.overrides))
    return ", ".join(f"{names[name]}={value}" for name, value in entry.overrides.items())


def settings_table(settings: SettingsByCase, cases: Iterable[str], rows: Iterable[str]) -> str:
    """Return a Markdown table of found settings: values, numbers of settings, and arguments at an end of their values.

    The table is empty if there is no entry.

    Example:
        >>> found = FoundSettings({"a.lr": 0.1}, num_settings=10, num_failed=2, score=0.5, edge=["lr"])
        >>> print(settings_table({"beta .5": {"EWC": found}}, ["beta .5"], ["EWC"]))
        | case    | method | settings | failed | best   | at an end |
        | ------- | ------ | -------: | -----: | ------ | --------- |
        | beta .5 | EWC    |       10 |      2 | lr=0.1 | lr        |
    """
    lines = []
    for case in cases:
        for row in rows:
            if (entry := settings.get(case, {}).get(row)) is not None:
                counts = [str(entry.num_settings), str(entry.num_failed)]
                lines.append([case, row, *counts, values_text(entry), ", ".join(entry.edge) or "-"])
    return markdown_table(["case", "method", "settings", "failed", "best", "at an end"], lines) if lines else ""
