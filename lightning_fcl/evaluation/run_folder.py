"""All that a run's folder has beside its results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_fcl.errors import require
from lightning_fcl.evaluation.files import write_whole
from lightning_fcl.evaluation.results import read_results, seal
from lightning_fcl.evaluation.rounds import write_csv
from lightning_fcl.evaluation.webpage import render

__all__ = ["write_files", "write_page"]


def write_files(folder: str | Path) -> Path:
    """Write all that a run's folder has beside ``results.json``: ``metrics.csv``, ``report.html``, and last the seal.

    A run that was stopped before its end gets no seal. The path of ``report.html`` comes back.

    Raises:
        FileNotFoundError: If there is no ``results.json``.
        ValueError: If it is not understood.
    """
    folder = Path(folder)
    results = read_results(folder)
    table, page = write_csv(folder / "metrics.csv", results["record"]), write_page(folder, results)
    if results["finished"]:
        seal(folder, [folder / "results.json", table, page])
    return page


def write_page(folder: Path, results: Mapping[str, Any]) -> Path:
    """Write ``report.html`` of a run."""
    require("altair", "draws the charts of reports")
    from lightning_fcl.evaluation.report_page import recipe_of, run_page  # with Altair, a second of imports

    return write_whole(folder / "report.html", render(run_page(results, recipe_of(folder))))
