"""The few numbers that tell most of a run, each under one name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_fcl.errors import listed
from lightning_fcl.evaluation.metrics import curves, quantity, sign


@dataclass(frozen=True)
class Headline:
    """A number of a run: what it is, of whom and on what, and its unit, ``"B"`` for bytes."""

    name: str
    value: float
    note: str
    unit: str = ""

    @property
    def text(self) -> str:
        return number_text(self.value, self.unit)


def number_text(value: float, unit: str = "") -> str:
    if unit != "B":
        return f"{value:.3f}"
    for name, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:.0f} B"


def headlines(results: Mapping[str, Any]) -> list[Headline]:
    """At most five numbers of a run; what was not measured is left out."""
    record, metrics = results["record"], results["metrics"]
    of = quantity(record)
    lost = "forgetting" if of == "accuracy" else f"forgetting_{of}"
    wanted = (
        (f"final {of}", f"final_{of}/server", "server, whole test set"),
        (f"average {of}", f"average_{of}/clients", "mean of the clients, over their tasks"),
        (f"average {of}", f"average_{of}/server", "server, over its tasks"),
        ("forgetting", f"{lost}/clients", "mean of the clients"),
        ("forgetting", f"{lost}/server", "server, since each task's own rounds"),
    )
    found: dict[str, Headline] = {}
    for name, metric, note in wanted:
        if metric in metrics and name not in found:
            found[name] = Headline(name, metrics[metric], note)
    if len(ends := ends_of_clients(record)) > 1:
        client, value = ends[0]
        found["worst"] = Headline("worst-off client", value, f"{model_name(client)}, on all that it has learnt")
    if moved := sum(metrics.get(f"{way}_bytes/total", 0.0) for way in ("upload", "download")):
        found["traffic"] = Headline("traffic", moved, "all clients and rounds, up and down", "B")
    return list(found.values())


def ends_of_clients(record: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Each client with what it came to when it was last tested, on all that it had learnt; the worst off first."""
    every = {model: curve.learnt for model, curve in curves(record).items() if model != "server"}
    ends = [(model, float(values[-1])) for model, values in every.items() if np.isfinite(values[-1])]
    return sorted(ends, key=lambda end: sign(record) * end[1])


def model_name(model: str) -> str:
    return "mean of the clients" if model == "clients" else f"client {model}" if model.isdigit() else model


def task_name(record: Mapping[str, Any], model: str, task: int) -> str:
    """The groups of a model's task."""
    return listed((record["groups"][group] for group in record["tasks"][model][task]), most=12)


def experience_names(record: Mapping[str, Any]) -> list[str]:
    """What the server's experiences are called: by their groups, or their numbers where names would be too long."""
    names = [", ".join(record["groups"][group] for group in groups) for groups in record["tasks"].get("server", [])]
    distinct = len(set(names)) == len(names) and max(map(len, names), default=0) <= 24
    return names if distinct else [str(number + 1) for number in range(len(names))]


def experience_labels(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """What stands for each experience of several runs: by name, if it is the same in all of them."""
    names, numbers = (
        experience_names(records[0]),
        [str(n + 1) for n in range(len(records[0]["tasks"].get("server", [])))],
    )
    if names != numbers and all(experience_names(record) == names for record in records):
        return [f"after {name}" for name in names]
    return [f"after experience {number}" for number in numbers]


def extent_of(results: Mapping[str, Any]) -> str:
    """How many rounds and clients a run had."""
    clients = [model for model in results["record"]["tasks"] if model != "server"]
    counts = {"round": len(results["record"]["rounds"]), "client": len(clients)}
    return ", ".join(f"{number} {what}{'s' * (number != 1)}" for what, number in counts.items())
