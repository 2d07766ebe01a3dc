"""The page of several runs: side by side, over their seeds, and against the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from lightning_fcl.evaluation import comparison_charts as charts
from lightning_fcl.evaluation.against import stands, told, verdict
from lightning_fcl.evaluation.comparison_charts import Groups, Headlines
from lightning_fcl.evaluation.headline import headlines, number_text
from lightning_fcl.evaluation.report_page import extent_of
from lightning_fcl.evaluation.results import read_results
from lightning_fcl.evaluation.table import Table, metric_title
from lightning_fcl.evaluation.webpage import Cell, Chart, Grid, Page, Section, Tile

__all__ = ["compare_page", "labelled", "runs_below"]

Results: TypeAlias = Mapping[str, Any]


def compare_page(groups: Groups, table: Table | None = None) -> Page:
    """The page of several runs.

    Args:
        groups: The seeds of each, by the name to show.
        table: The paper's table that they make, if they do.

    Raises:
        ValueError: If there is none.
    """
    if not groups:
        raise ValueError("Expected at least one run but got none. Name the folders of runs.")
    runs = sum(map(len, groups.values()))
    found = {label: [{one.name: one for one in headlines(run)} for run in runs] for label, runs in groups.items()}
    sections = [_at_a_glance(groups, found), *_against(table), *_drawn(groups, found), _what_ran(groups)]
    title = " against ".join(groups) if len(groups) < 3 else "Runs side by side"
    return Page(
        title=f"{table.paper}: our runs and the paper's numbers" if table else title,
        subtitle=f"{len(groups)} rows, {runs} runs" + (f", at the scale {table.scale}" if table else ""),
        warnings=_warnings(groups, table),
        tiles=_verdict_tiles(table),
        sections=sections,
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


def labelled(runs: Sequence[Path]) -> dict[str, list[Results]]:
    """Runs by the name to show: their row's, or that of their folder where two would have the same.

    Folders called ``seed-0``, ``seed-1`` in one folder, as `reproduce` makes them, are the seeds of one row.

    Raises:
        ValueError: If the results of one are not understood.
    """
    by_place: dict[Path, list[Results]] = {}
    for run in runs:
        by_place.setdefault(run.parent if run.name.startswith("seed-") else run, []).append(read_results(run))
    names = [of[0]["recipe"]["row"] if of[0]["recipe"] else "" for of in by_place.values()]
    return {
        name if name and names.count(name) == 1 else str(place): of
        for name, (place, of) in zip(names, by_place.items(), strict=True)
    }


def _at_a_glance(groups: Groups, found: Headlines) -> Section:
    names = dict.fromkeys(name for runs in found.values() for run in runs for name in run)
    extents = {label: extent_of(runs[0]) for label, runs in groups.items()}
    differ = len({*extents.values()}) > 1
    lines = [
        [Cell(label), *([Cell(extents[label])] if differ else []), *(Cell(_mean(runs, name)) for name in names)]
        for label, runs in found.items()
    ]
    text = "Mean ± standard deviation over the seeds." if _has_seeds(groups) else ""
    return Section("At a glance", text, grids=[Grid(["", *(["extent"] if differ else []), *names], lines)])


def _has_seeds(groups: Groups) -> bool:
    return any(len(runs) > 1 for runs in groups.values())


def _mean(runs: Sequence[Mapping[str, Any]], name: str) -> str:
    values = [run[name].value for run in runs if name in run]
    if not values:
        return "-"
    unit = next(run[name].unit for run in runs if name in run)
    spread = f" ± {number_text(float(np.std(values, ddof=1)), unit)}" if len(values) > 1 and np.ptp(values) > 0 else ""
    return number_text(float(np.mean(values)), unit) + spread


def _verdict_tiles(table: Table | None) -> list[Tile]:
    if table is None or not (of := verdict(table)).cells:
        return []
    return [
        Tile(of.word, f"{of.near} of {of.cells}", "numbers within .05 of the paper's"),
        Tile("inside the spread", str(of.spread), "others within two standard deviations over the seeds"),
        Tile("outside", str(of.outside), "further away, or not measured"),
    ]


def _warnings(groups: Groups, table: Table | None) -> list[str]:
    said = []
    if table is not None and table.scale != "paper":
        said.append(f"Ours are at the scale `{table.scale}`; the paper's numbers are of its own scale.")
    if short := [label for label, runs in groups.items() if not all(run["finished"] for run in runs)]:
        said.append(f"Stopped before the end: {', '.join(short)}.")
    if instead := [label for label, runs in groups.items() if any(r.get("measured_on") == "validation" for r in runs)]:
        said.append(f"Measured on validation samples in place of the test set: {', '.join(instead)}.")
    return said


def _against(table: Table | None) -> list[Section]:
    if table is None or not any(told(table)):
        return []
    metrics = list(dict.fromkeys(name for _, name, _ in told(table)))
    lines = [
        [Cell(row), *(Cell(of[name].text(name), stands(of[name])) if name in of else Cell("-") for name in metrics)]
        for row, of in table.rows.items()
    ]
    text = "Ours, with the paper's number in brackets. Blue: within .05 of it. Grey: within two standard deviations of "
    text += "the seeds. Orange: outside."
    caption = "Every number against the paper's; the grey band is .05 wide on both sides."
    points = [Chart(caption, drawn)] if (drawn := charts.against(table)) else []
    grid = Grid(["", *map(metric_title, metrics)], lines)
    return [Section("Against the paper", text, grids=[grid], charts=points)]


def _drawn(groups: Groups, found: Headlines) -> list[Section]:
    ticks = "A tick for each client and seed, at the end, on all that it has learnt; a diamond for their mean."
    curve = "Mean over the seeds, with one standard deviation." if _has_seeds(groups) else "A line for each run."
    parts = (
        ("Round by round", curve, charts.rounds(groups)),
        ("Who is worst off", ticks, charts.clients(groups)),
        ("Learnt and forgotten", "Right and low is best.", charts.kept(charts.quantity_of(groups), found)),
    )
    return [Section(title, charts=[Chart(caption, spec)]) for title, caption, spec in parts if spec]


def _what_ran(groups: Groups) -> Section:
    lines = [
        [label, str(run["seed"]), f"{run['seconds']:.0f} s", run["machine"], run["command"]]
        for label, runs in groups.items()
        for run in runs
    ]
    return Section("What ran", grids=[Grid.of(["", "seed", "time", "machine", "command"], lines)], folded=True)
