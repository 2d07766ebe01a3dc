"""The page of a run: what ran, what came out and for whom, and the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lightning_fcl.evaluation import run_charts as charts
from lightning_fcl.evaluation.against import near
from lightning_fcl.evaluation.headline import ends_of_clients, headlines
from lightning_fcl.evaluation.metrics import Curve, curves, quantity
from lightning_fcl.evaluation.panels import experience_labels
from lightning_fcl.evaluation.plots import model_name
from lightning_fcl.evaluation.report import PAPER, clock_line, extent_of, metrics_lines, paper_lines, title_of
from lightning_fcl.evaluation.table import Cell as Number
from lightning_fcl.evaluation.webpage import Cell, Chart, Grid, Page, Section, Tile

_WORST = 10


def run_page(results: Mapping[str, Any], recipe: str = "") -> Page:
    """The page of a run.

    Args:
        results: Contents of its ``results.json``.
        recipe: Its ``config.yaml``, to show.
    """
    record = results["record"]
    every = curves(record)
    sections = [
        _against(results),
        *_accuracy(record, every),
        _clients(record, every),
        *_tasks(record),
        _others(results),
    ]
    folds = [_every_metric(results), _what_ran(results), _recipe(recipe)]
    return Page(
        title=title_of(results),
        subtitle=_subtitle(results),
        warnings=_warnings(results),
        tiles=[Tile(one.name, one.text, one.note) for one in headlines(results)],
        sections=[section for section in (*sections, *folds) if section is not None],
    )


def _subtitle(results: Mapping[str, Any]) -> str:
    parts = map(str, results.get("parts", {}).values())
    return " · ".join([*parts, extent_of(results), f"seed\u00a0{results['seed']}"])


def _warnings(results: Mapping[str, Any]) -> list[str]:
    said = []
    if not results["finished"]:
        said.append("The run was stopped before its end: these are the results of the rounds done.")
    if results.get("measured_on") == "validation":
        said.append("Measured on the validation samples in place of the test set.")
    return said


def _against(results: Mapping[str, Any]) -> Section | None:
    lines = []
    for name, (title, ours, paper, difference) in paper_lines(results).items():
        kind = ""
        if (value := results["metrics"].get(name)) is not None:
            kind = "near" if near(Number({0: value}, results["expected"][name])) else "outside"
        lines.append([Cell(title), Cell(ours, kind), Cell(paper), Cell(difference)])
    if not lines:
        return None
    text = "One run against the paper's numbers: blue is within .05 of it, orange is not."
    return Section("Against the paper", text, grids=[Grid(PAPER, lines)])


def _accuracy(record: Mapping[str, Any], every: Mapping[str, Curve]) -> list[Section]:
    of = quantity(record)
    title = f"{of[0].upper()}{of[1:]}"
    whole = "The server on the whole test set and on what was learnt so far; the clients on what each has learnt: "
    whole += "mean, middle half, and from the worst to the best. Dashed lines: where an experience begins."
    drawn = [
        (whole, charts.overview(record, every)),
        (
            "The server by the clock of the rehearsed deployment, a point for each round.",
            charts.over_time(record, every),
        ),
        (f"{title} on each class, or domain.", charts.by_group(record, every)),
    ]
    found = [Chart(caption, spec) for caption, spec in drawn if spec]
    return [Section(f"{title}, round by round", charts=found)] if found else []


def _clients(record: Mapping[str, Any], tested: Mapping[str, Curve]) -> Section | None:
    ends = ends_of_clients(record)
    if (spec := charts.of_clients(record, ends)) is None:
        return None
    values = [value for _, value in ends]
    spread = f"from {min(values):.3f} to {max(values):.3f}, standard deviation {np.std(values, ddof=1):.3f}"
    every = len([model for model in record["tasks"] if model != "server"])
    text = f"{len(ends)} of {every} clients were tested: {spread}."
    lines = [[model_name(model), f"{value:.3f}", str(tested[model].rounds[-1] + 1)] for model, value in ends]
    worst = Grid.of(["worst off", quantity(record), "last tested in round"], lines[:_WORST])
    return Section(
        "Who is worst off",
        text,
        charts=[Chart("Each client at the end.", spec)],
        grids=[worst] if len(lines) > _WORST else [],
    )


def _tasks(record: Mapping[str, Any]) -> list[Section]:
    learnt = "Each cell: the mean over the rounds of one task, tested on another; pale ones were not learnt yet."
    drawn = [
        (learnt, charts.matrix(record)),
        ("After its own rounds, and when the run ended.", charts.kept_tasks(record)),
    ]
    found = [Chart(caption, spec) for caption, spec in drawn if spec]
    return [Section("What is kept, and what is forgotten", charts=found)] if found else []


def _others(results: Mapping[str, Any]) -> Section | None:
    record = results["record"]
    drawn = [("Bytes on the wire.", charts.traffic(record))]
    if "densities" in results:
        shown = charts.densities(results["densities"], experience_labels([record]))
        drawn.append(("Density of the reservoir's activations after each experience.", shown))
    lines = [
        [f"round {entry['round'] + 1}", client, reason]
        for entry in record["rounds"]
        for client, reason in [
            *entry.get("dropped", {}).items(),
            *((client, "its loss was not finite") for client in entry.get("diverged", [])),
        ]
    ]
    grids = [Grid.of(["left out", "client", "why"], lines)] if lines else []
    found = [Chart(caption, spec) for caption, spec in drawn if spec]
    return Section("On the wire and inside", charts=found, grids=grids) if found or grids else None


def _every_metric(results: Mapping[str, Any]) -> Section:
    head, lines, notes = metrics_lines(results["metrics"], results["record"])
    return Section("Every metric", facts=notes, grids=[Grid.of(head, lines)], folded=True)


def _what_ran(results: Mapping[str, Any]) -> Section:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    facts = [
        *results.get("parts", {}).items(),
        ("seed", str(results["seed"])),
        ("machine", results["machine"]),
        ("time", f"{results['seconds']:.1f} s"),
        *([("rehearsed deployment", told)] if (told := clock_line(results["metrics"])) else []),
        ("versions", versions),
    ]
    return Section("What ran", facts=facts, code=results["command"], folded=True)


def _recipe(recipe: str) -> Section | None:
    return Section("The recipe, with every default", code=recipe, folded=True) if recipe else None


def recipe_of(folder: Path) -> str:
    """The recipe that a run's folder holds; nothing where there is none."""
    path = folder / "config.yaml"
    return path.read_text(encoding="utf-8") if path.is_file() else ""
