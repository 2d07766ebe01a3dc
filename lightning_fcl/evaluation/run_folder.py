"""All that a run's folder has beside its results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_fcl.evaluation.files import write_whole
from lightning_fcl.evaluation.results import CONFIG, read_results, seal
from lightning_fcl.evaluation.rounds import write_csv

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
    from lightning_fcl.evaluation.run_page import run_page  # with Altair, a second of imports

    path = folder / CONFIG
    recipe = path.read_text(encoding="utf-8") if path.is_file() else ""
    return write_whole(folder / "report.html", run_page(results, recipe))
