"""All recorded facts of a run: results or the rounds so far, recipe, versions, machine and data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_fcl.evaluation.comparison import label_places
from lightning_fcl.evaluation.results import ENVIRONMENT, RECORD, make_missing_run_error, read_results
from lightning_fcl.evaluation.run_data import Run, read_run
from lightning_fcl.io.reading import read_text


@dataclass(frozen=True)
class RecordedRun:
    """The recorded facts of a run. A run without ``results.json`` has only a recipe and the rounds so far.

    Args:
        run: Rounds, metrics and recipe.
        results: Content of ``results.json``. Empty if the file is missing.
        environment: Content of ``environment.json``. Empty if the file is missing or damaged.
    """

    run: Run
    results: Mapping[str, Any]
    environment: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> RecordedRun:
        """Return the recorded facts in a run folder.

        Raises:
            InvalidValueError: If a file of the run is damaged, or no round has ended yet.
            MissingFileError: If the folder contains neither results nor the record of a run.
        """
        run, results, environment = read_run(folder), dict[str, Any](), None
        with suppress(FileNotFoundError):
            results = read_results(folder)
        with suppress(FileNotFoundError, ValueError):
            environment = json.loads(read_text(folder / ENVIRONMENT))
        return cls(run, results, environment if isinstance(environment, dict) else {})

    @property
    def config(self) -> Mapping[str, Any]:
        """Recipe of the run with all defaults. Empty if it is missing."""
        return self.run.config

    @property
    def record(self) -> Mapping[str, Any]:
        """Record of the run. See `lightning_fcl.evaluation.record`."""
        return self.run.record

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of this library and of the main packages. Empty if they are unknown."""
        versions: Mapping[str, str] = self.results.get("versions", {})
        return versions

    @property
    def clients(self) -> list[str]:
        """Names of the clients."""
        return [model for model in self.record["tasks"] if model != "server"]

    @property
    def row(self) -> str:
        """Row of the recipe, or an empty string."""
        recipe = self.results.get("recipe") or self.config.get("recipe") or {}
        return str(recipe.get("row") or "")

    @property
    def method_names(self) -> list[str]:
        """Class names of the methods in ``results.json``. Empty if there are none, or if the file is missing."""
        names = str(self.results.get("parts", {}).get("methods", ""))
        return [] if names.startswith("none (") else [name for name in names.split(", ") if name]

    @property
    def results_for_tables(self) -> Mapping[str, Any]:
        """Values of the run that `RunTable` needs, also for a run without ``results.json``."""
        run = self.run
        return {"seed": run.seed, "metrics": run.metrics, "record": run.record, "searched": run.searched}


def find_recorded_runs(folders: Sequence[Path]) -> dict[str, list[RecordedRun]]:
    """Return the runs in some folders and their subfolders, also unfinished runs, by row.

    The rows and their names are those of `runs_by_name`.

    Raises:
        FileNotFoundError: If a folder contains no run.
        ValueError: If a file of a run is damaged.
    """
    all_folders: dict[Path, None] = {}
    for folder in folders:
        run_folders = sorted({path.parent for name in ("results.json", RECORD) for path in folder.rglob(name)})
        if not run_folders:
            raise make_missing_run_error(folder)
        all_folders |= dict.fromkeys(run_folders)
    runs_by_folder: dict[Path, list[RecordedRun]] = {}
    for folder in all_folders:
        row_folder = folder.parent if folder.name.startswith("seed-") else folder
        runs_by_folder.setdefault(row_folder, []).append(RecordedRun.read(folder))
    labels = label_places({row_folder: runs[0].row for row_folder, runs in runs_by_folder.items()})
    return {labels[row_folder]: runs for row_folder, runs in runs_by_folder.items()}
