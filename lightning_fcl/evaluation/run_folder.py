"""All that a run's folder has beside its results."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Mapping
from math import isnan, nan
from pathlib import Path
from typing import Any

from lightning_fcl.errors import require
from lightning_fcl.evaluation.clock import simulated_times
from lightning_fcl.evaluation.files import write_whole
from lightning_fcl.evaluation.metrics import curves, models_tested
from lightning_fcl.evaluation.results import CONFIG, read_results, seal

__all__ = ["write_csv", "write_files", "write_page"]

_WAYS = ("upload_bytes", "download_bytes")


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
    for package in ("altair", "jinja2", "vl_convert"):
        require(package, "draws reports")
    from lightning_fcl.evaluation.run_page import run_page  # with Altair, a second of imports

    path = folder / CONFIG
    recipe = path.read_text(encoding="utf-8") if path.is_file() else ""
    return write_whole(folder / "report.html", run_page(results, recipe))


def write_csv(path: Path, record: Mapping[str, Any]) -> Path:
    """Write a line for each model and round: its accuracy, that of each group, and its bytes on the wire.

    Or, in place of accuracy, each measure of the record. What was not tested is left empty. By the clock of a rehearsed
    deployment, the last column tells the seconds from its beginning to the end of the round.
    """
    names = [one["name"] for one in record.get("measures", [])]
    heads = [[name, *(f"{name} {group}" for group in record["groups"])] for name in names]
    columns = list(itertools.chain(*heads)) or ["accuracy", *record["groups"]]
    tested: dict[tuple[int, str], list[float]] = {}
    for name in names or [None]:
        for model, curve in curves(record, name).items():
            for number, whole, groups in zip(curve.rounds, curve.overall, curve.accuracy.tolist(), strict=True):
                tested.setdefault((int(number), model), []).extend([float(whole), *groups])
    times = simulated_times(record).tolist()
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["round", "model", *columns, *_WAYS, *(["simulated_time"] if times else [])])
    for number, entry in enumerate(record["rounds"]):
        for model in dict.fromkeys([*models_tested(entry), *entry[_WAYS[0]], *entry[_WAYS[1]]]):
            cells = tested.get((entry["round"], model), [nan] * len(columns))
            plain = ["" if isnan(cell) else cell for cell in cells]
            traffic = [entry[way].get(model, "") for way in _WAYS]
            writer.writerow([entry["round"], model, *plain, *traffic, *times[number : number + 1]])
    return write_whole(path, text.getvalue())
