"""The page of several runs: side by side, over their seeds, and against the paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_fcl.evaluation import comparison_charts
from lightning_fcl.evaluation.comparison_charts import RunsByName
from lightning_fcl.evaluation.headline import Headline, headlines, number_text
from lightning_fcl.evaluation.metrics import quantity
from lightning_fcl.evaluation.names import extent_of
from lightning_fcl.evaluation.pages import fill_template
from lightning_fcl.evaluation.results import read_results
from lightning_fcl.evaluation.table import Table, metric_title

__all__ = ["compare_page", "runs_below", "runs_by_name"]


def compare_page(groups: RunsByName, table: Table | None = None) -> str:
    """The HTML of the page of several runs.

    Args:
        groups: The seeds of each, by the name to show.
        table: The paper's table that they make, if they do.

    Raises:
        ValueError: If there is none.
    """
    if not groups:
        raise ValueError("Expected at least one run but got none. Name the folders of runs.")
    runs = [run for of in groups.values() for run in of]
    found = {label: [{one.name: one for one in headlines(run)} for run in of] for label, of in groups.items()}
    what = quantity(runs[0]["record"])
    names = list(dict.fromkeys(name for of in found.values() for run in of for name in run))
    extents = {label: extent_of(of[0]) for label, of in groups.items()}
    extents = extents if len({*extents.values()}) > 1 else {}
    head = ["", *(["extent"] if extents else []), *names]
    lines = [
        [label, *([extents[label]] if extents else []), *(_mean([run[n] for run in of if n in run]) for n in names)]
        for label, of in found.items()
    ]
    return fill_template(
        "comparison.html",
        groups=groups,
        table=table,
        several_seeds=len(runs) > len(groups),
        runs=len(runs),
        stopped=[label for label, of in groups.items() if not all(run["finished"] for run in of)],
        on_validation=[
            label for label, of in groups.items() if any(run.get("measured_on") == "validation" for run in of)
        ],
        glance=[head, *lines],
        told=list(dict.fromkeys(metric_title(name) for _, name, _ in table.told)) if table else [],
        against_paper=_against(table) if table else [],
        charts={
            "against": comparison_charts.against(table) if table else None,
            "rounds": comparison_charts.rounds(groups, what),
            "clients": comparison_charts.clients(groups, what),
            "kept": comparison_charts.kept(found, what),
        },
    )


def runs_below(folders: Sequence[Path]) -> list[Path]:
    """The folders of all runs that are given, or lie below one that is given.

    Raises:
        FileNotFoundError: If one holds no run.
    """
    found: dict[Path, None] = {}
    for folder in folders:
        there = sorted(path.parent for path in folder.rglob("results.json"))
        if not there:
            raise FileNotFoundError(
                f"Expected {folder} to be the folder of a run, or of several, but found no results.json in it."
            )
        found |= dict.fromkeys(there)
    return list(found)


def runs_by_name(runs: Sequence[Path]) -> dict[str, list[dict[str, Any]]]:
    """Runs by the name to show: their row's, or that of their folder where two would have the same.

    Folders called ``seed-0``, ``seed-1`` in one folder, as `reproduce` makes them, are the seeds of one row.

    Raises:
        ValueError: If the results of one are not understood.
    """
    by_place: dict[Path, list[dict[str, Any]]] = {}
    for run in runs:
        by_place.setdefault(run.parent if run.name.startswith("seed-") else run, []).append(read_results(run))
    names = [of[0]["recipe"]["row"] if of[0]["recipe"] else "" for of in by_place.values()]
    return {
        name if name and names.count(name) == 1 else str(place): of
        for name, (place, of) in zip(names, by_place.items(), strict=True)
    }


def _mean(found: Sequence[Headline]) -> str:
    if not found:
        return "-"
    values, unit = [one.value for one in found], found[0].unit
    spread = f" ± {number_text(float(np.std(values, ddof=1)), unit)}" if len(values) > 1 and np.ptp(values) > 0 else ""
    return number_text(float(np.mean(values)), unit) + spread


def _against(table: Table) -> list[list[str | tuple[str, str]]]:
    """A line for each row: the numbers of which the paper tells some, and how they stand to them."""
    names = list(dict.fromkeys(name for _, name, _ in table.told))
    return [
        [row, *((of[name].text(name), of[name].stands) if name in of else "-" for name in names)]
        for row, of in table.rows.items()
        if names
    ]
