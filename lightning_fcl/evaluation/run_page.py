"""The page of a run: what ran, what came out and for whom, and the recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from lightning_fcl.errors import listed
from lightning_fcl.evaluation import run_charts
from lightning_fcl.evaluation.headline import ends_of_clients, experience_labels, extent_of, headlines, model_name
from lightning_fcl.evaluation.metrics import curves, quantity
from lightning_fcl.evaluation.pages import fill_template
from lightning_fcl.evaluation.table import Cell, metric_number, metric_title

_WORST = 10
_MEANINGS = {
    "general": "on the whole test set, mean over the rounds",
    "personal": "on all groups the client has learnt so far, mean over the rounds",
    "final": "on the whole test set after the last round",
    "stream": "on the test data of all experiences so far, after the last round",
    "average": "on each task after the last round, mean over the tasks",
    "learning": "on a task after its last round, mean over tasks",
    "forgetting": "what was lost on the earlier tasks since their best, by the last round of each task: above 0",
    "BWT": "backward transfer: what was gained on a task from its last round to the end of the run; below 0 if lost",
    "training": "on all samples that clients have trained on, after the last round",
    "T": "on all tasks, mean over the rounds of the last task",
    "F": "what was lost on the earlier tasks since their best, by the means over each task's rounds",
    "kept_bytes": "what stays with a client between rounds, when the run ends",
}


def run_page(results: Mapping[str, Any], recipe: str = "") -> str:
    """The HTML of a run's page, of its ``results.json`` and, to copy, its recipe with every default."""
    record, metrics = results["record"], results["metrics"]
    every, ends = curves(record), ends_of_clients(record)
    values = [value for _, value in ends]
    worst = [[model_name(model), f"{value:.3f}", str(every[model].rounds[-1] + 1)] for model, value in ends]
    kinds = list(dict.fromkeys(name.rpartition("/")[0] for name in metrics if not name.endswith("/total")))
    tested = dict.fromkeys(name.rpartition("/")[2] for name in metrics if not name.endswith("/total"))
    limits = [entry["limits"] for entry in record["rounds"] if entry.get("limits")]
    drawn = {
        "overview": run_charts.overview(record, every),
        "over_time": run_charts.over_time(record, every),
        "by_group": run_charts.by_group(record, every),
        "ends": run_charts.ends(record, ends),
        "matrix": run_charts.matrix(record),
        "kept_tasks": run_charts.kept_tasks(record),
        "traffic": run_charts.traffic(record),
        "densities": run_charts.densities(results.get("densities", {"experiences": []}), experience_labels([record])),
    }
    return fill_template(
        "run.html",
        results=results,
        record=record,
        recipe=recipe,
        extent=extent_of(results),
        headlines=headlines(results),
        against_paper=[_against(name, metrics.get(name), paper) for name, paper in results["expected"].items()],
        quantity=quantity(record),
        charts=drawn,
        spread=(len(ends), min(values), max(values), np.std(values, ddof=1)) if len(values) > 1 else None,
        worst_off=worst[:_WORST] if len(worst) > _WORST else [],
        left_out=[*_left_out(record)],
        limits=limits[-1] if limits else None,
        kinds=kinds,
        metrics=[
            [model_name(model), *(metric_number(kind, metrics.get(f"{kind}/{model}")) for kind in kinds)]
            for model in sorted(tested, key=lambda model: {"server": 0, "clients": 1}.get(model, 2))
        ],
        meanings=_meanings(kinds, record),
    )


def _against(name: str, ours: float | None, paper: float) -> list[str | tuple[str, str]]:
    if ours is None:
        return [metric_title(name), "-", metric_number(name, paper), "-"]
    kind = Cell({0: ours}, paper).stands
    return [metric_title(name), (metric_number(name, ours), kind), metric_number(name, paper), f"{ours - paper:+.3f}"]


def _left_out(record: Mapping[str, Any]) -> Iterator[list[str]]:
    """Whose upload did not count in which round, and why."""
    for entry in record["rounds"]:
        why = [
            *entry.get("dropped", {}).items(),
            *((one, "its loss was not finite") for one in entry.get("diverged", [])),
        ]
        why += [(one, f"nodes that say they are it: {listed(of)}") for one, of in entry.get("claims", {}).items()]
        yield from ([f"round {entry['round'] + 1}", client, reason] for client, reason in why)


def _meanings(kinds: list[str], record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What each metric means that has a meaning."""
    meanings = {kind: meaning for kind, meaning in _MEANINGS.items() if kind in ("forgetting", "BWT", "kept_bytes")}
    meanings |= {f"{kind}_accuracy": f"accuracy {meaning}" for kind, meaning in _MEANINGS.items()}
    meanings |= {"A_gen": meanings["general_accuracy"], "A_per": meanings["personal_accuracy"]}
    meanings |= {kind: meanings["T_accuracy"] for kind in kinds if kind[:2] == "A_" and kind[2:].isdigit()}
    meanings |= {kind: _MEANINGS["F"] for kind in kinds if kind[:2] == "F_"}
    for one in record.get("measures", []):
        way = "higher" if one["higher_is_better"] else "lower"
        meanings |= {f"{k}_{one['name']}": f"{one['name']} ({way} is better) {what}" for k, what in _MEANINGS.items()}
    own = ", of the client's own model: after its last local training of each task, before aggregation"
    meanings |= {f"{kind}_own": f"{meaning}{own}" for kind, meaning in meanings.items()}
    return [(kind, meanings[kind]) for kind in kinds if kind in meanings]
