"""The page of a run: what ran, what came out and for whom, and the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lightning_fcl.errors import listed
from lightning_fcl.evaluation import run_charts as charts
from lightning_fcl.evaluation.against import near
from lightning_fcl.evaluation.headline import ends_of_clients, headlines
from lightning_fcl.evaluation.metrics import Curve, curves, quantity
from lightning_fcl.evaluation.panels import experience_labels
from lightning_fcl.evaluation.plots import model_name
from lightning_fcl.evaluation.table import Cell as Number
from lightning_fcl.evaluation.table import metric_number, metric_title
from lightning_fcl.evaluation.webpage import Cell, Chart, Grid, Page, Section, Tile

_WORST = 10
_MEANINGS = {
    "A_gen": "accuracy on the whole test set, mean over the rounds",
    "A_per": "accuracy on all groups the client has learnt so far, mean over the rounds",
    "A_T": "accuracy on all tasks, mean over the rounds of the last task",
    "F_T": "what was lost on the earlier tasks since their best, by the means over each task's rounds",
    "final_accuracy": "accuracy on the whole test set after the last round",
    "stream_accuracy": "accuracy on the test data of all experiences so far, after the last round",
    "average_accuracy": "mean of the accuracies on all tasks after the last round",
    "forgetting": "what was lost on the earlier tasks since their best, by the last round of each task",
    "learning_accuracy": "accuracy on a task after its last round, mean over tasks",
    "kept_bytes": "what stays with a client between rounds, when the run ends",
    "BWT": "backward transfer: change of the accuracy on a task from its last round to the end of the run",
}
_MEASURED = {
    "general": "on the whole test set, mean over the rounds",
    "personal": "on all groups the client has learnt so far, mean over the rounds",
    "final": "on the whole test set after the last round",
    "stream": "on the test data of all experiences so far, after the last round",
    "average": "mean over the tasks after the last round",
    "learning": "on a task after its last round, mean over tasks",
    "forgetting": "what was lost on the earlier tasks since their best, by the last round of each task: above 0",
    "BWT": "backward transfer: what was gained on a task from its last round to the end of the run; below 0 if lost",
    "training": "on all samples that clients have trained on, after the last round",
}


def run_page(results: Mapping[str, Any], recipe: str = "") -> Page:
    record = results["record"]
    every = curves(record)
    sections = [
        _against(results),
        *_accuracy(record, every),
        _clients(record, every),
        *_tasks(record),
        _others(results),
    ]
    head, lines, notes = _metrics(results["metrics"], record)
    folds = [Section("Every metric", facts=notes, grids=[Grid.of(head, lines)], folded=True), _what_ran(results)]
    if recipe:
        folds.append(Section("The recipe, with every default", code=recipe, folded=True))
    parts = map(str, results.get("parts", {}).values())
    return Page(
        title=_title(results),
        subtitle=" · ".join([*parts, extent_of(results), f"seed\u00a0{results['seed']}"]),
        warnings=_warnings(results),
        tiles=[Tile(one.name, one.text, one.note) for one in headlines(results)],
        sections=[section for section in (*sections, *folds) if section is not None],
    )


def _title(results: Mapping[str, Any]) -> str:
    recipe = results["recipe"]
    paper = f" ({recipe['paper']})" if recipe and recipe["paper"] else ""
    return f"{recipe['row']}{paper}" if recipe else "Run"


def extent_of(results: Mapping[str, Any]) -> str:
    clients = [model for model in results["record"]["tasks"] if model != "server"]
    counts = {"round": len(results["record"]["rounds"]), "client": len(clients)}
    return ", ".join(f"{number} {what}{'s' * (number != 1)}" for what, number in counts.items())


def _warnings(results: Mapping[str, Any]) -> list[str]:
    said = []
    if not results["finished"]:
        said.append("The run was stopped before its end: these are the results of the rounds done.")
    if results.get("measured_on") == "validation":
        said.append("Measured on the validation samples in place of the test set.")
    return said


def _against(results: Mapping[str, Any]) -> Section | None:
    lines = []
    for name, paper in results["expected"].items():
        ours, kind, difference = results["metrics"].get(name), "", "-"
        if ours is not None:
            kind = "near" if near(Number({0: ours}, paper)) else "outside"
            difference = f"{ours - paper:+.3f}"
        numbers = Cell(metric_number(name, ours), kind), Cell(metric_number(name, paper)), Cell(difference)
        lines.append([Cell(metric_title(name)), *numbers])
    if not lines:
        return None
    text = "One run against the paper's numbers: blue is within .05 of it, orange is not."
    return Section("Against the paper", text, grids=[Grid(("metric", "ours", "paper", "difference"), lines)])


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
            *(
                (client, f"nodes that say they are it: {listed(nodes)}")
                for client, nodes in entry.get("claims", {}).items()
            ),
        ]
    ]
    grids = [Grid.of(["left out", "client", "why"], lines)] if lines else []
    limits = next((entry["limits"] for entry in reversed(record["rounds"]) if "limits" in entry), None)
    if limits:
        most, largest = limits["most_samples"], limits["largest_update"]
        kinds = [["samples that it counts as", f"{most:,}"], ["norm, by the server's or 1", f"{largest:,g}"]]
        grids.append(Grid.of(["limits of an update", "at most"], kinds))
    found = [Chart(caption, spec) for caption, spec in drawn if spec]
    return Section("On the wire and inside", charts=found, grids=grids) if found or grids else None


def _metrics(
    metrics: Mapping[str, float], record: Mapping[str, Any]
) -> tuple[list[str], list[list[str]], list[tuple[str, str]]]:
    """All metrics as a table: its head, a line for each model, and what each metric means."""
    pairs = [name.rpartition("/")[::2] for name in metrics]
    kinds = list(dict.fromkeys(kind for kind, model in pairs if model != "total"))
    models = sorted(
        dict.fromkeys(model for _, model in pairs if model != "total"),
        key=lambda model: {"server": 0, "clients": 1}.get(model, 2),
    )
    lines = [[model_name(m), *(metric_number(k, metrics.get(f"{k}/{m}")) for k in kinds)] for m in models]
    # A_5 and F_5 are explained as A_T and F_T.
    meanings = {kind: _MEANINGS.get(f"{kind[0]}_T" if kind[2:].isdigit() else kind) for kind in kinds}
    for one in record.get("measures", []):
        way = "higher" if one["higher_is_better"] else "lower"
        meanings |= {f"{k}_{one['name']}": f"{one['name']} ({way} is better) {what}" for k, what in _MEASURED.items()}
    own = ", of the client's own model: after its last local training of each task, before aggregation"
    meanings |= {f"{kind}_own": f"{meaning}{own}" for kind, meaning in meanings.items() if meaning}
    told = [(kind, meaning) for kind in kinds if (meaning := meanings.get(kind))]
    return ["model", *kinds], lines, told


def _clock(metrics: Mapping[str, float]) -> str:
    """How long the rehearsed deployment took, and how many uploads came late; nothing where no clock ran."""
    if "simulated_seconds/total" not in metrics:
        return ""
    late = int(metrics["late/total"])
    return f"{metrics['simulated_seconds/total']:.1f} s, {late} late upload{'s' * (late != 1)}"


def _what_ran(results: Mapping[str, Any]) -> Section:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    facts = [
        *results.get("parts", {}).items(),
        ("seed", str(results["seed"])),
        ("machine", results["machine"]),
        ("time", f"{results['seconds']:.1f} s"),
        *([("rehearsed deployment", told)] if (told := _clock(results["metrics"])) else []),
        ("versions", versions),
    ]
    return Section("What ran", facts=facts, code=results["command"], folded=True)


def recipe_of(folder: Path) -> str:
    """The recipe that a run's folder holds; nothing where there is none."""
    path = folder / "config.yaml"
    return path.read_text(encoding="utf-8") if path.is_file() else ""
