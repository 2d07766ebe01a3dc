"""The few numbers that tell most of a run, each under one name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_fcl.evaluation.metrics import curves, quantity, sign
from lightning_fcl.evaluation.names import model_name

__all__ = ["Headline", "ends_of_clients", "headlines"]


@dataclass(frozen=True)
class Headline:
    """A number of a run.

    Args:
        name: What it is.
        value: The number.
        note: Of whom, and on what.
        unit: ``"B"`` for bytes, else none.

    Example:
        >>> Headline("traffic", 2_500_000, "up and down", "B").text
        '2.5 MB'
    """

    name: str
    value: float
    note: str
    unit: str = ""

    @property
    def text(self) -> str:
        """The number as it is shown."""
        return number_text(self.value, self.unit)


def number_text(value: float, unit: str = "") -> str:
    if unit != "B":
        return f"{value:.3f}"
    for name, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:.0f} B"


def headlines(results: Mapping[str, Any]) -> list[Headline]:
    """At most five numbers of a run; what was not measured is left out.

    Example:
        >>> metrics = {"final_accuracy/server": 0.5, "upload_bytes/total": 40.0}
        >>> [one.name for one in headlines({"metrics": metrics, "record": {"tasks": {}, "rounds": []}})]
        ['final accuracy', 'traffic']
    """
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
