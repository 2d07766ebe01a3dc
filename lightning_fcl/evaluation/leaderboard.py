"""The leaderboard: what methods come to under the same protocol, what they cost, and what leaves a client."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import altair as alt
import numpy as np

from lightning_fcl.evaluation import charts
from lightning_fcl.evaluation.charts import Drawn, Points, Spec
from lightning_fcl.evaluation.metrics import stream_accuracies
from lightning_fcl.evaluation.table import Cell, Table, markdown_table

_WIDTH, _HEIGHT, _LINE = 440, 420, 12  # of a picture's half, and of a line of its text

Notes = Mapping[str, Mapping[str, str]]
"""Of each method what a table tells beside its numbers, by the column: the ``logits`` that its loss sees, and so on."""


class Column(NamedTuple):
    """A column of numbers: its head, what its numbers are divided by, and how many digits they show."""

    head: str
    unit: float = 1.0
    digits: int = 3

    def text(self, cell: Cell) -> str:
        mean, std = ((value or 0.0) / self.unit for value in (cell.mean, cell.std))
        spread = f" ± {std:.{self.digits}f}" if cell.n > 1 and self.digits else ""
        return f"{mean:.{self.digits}f}{spread}"


COLUMNS = {
    "last_accuracy": Column("last accuracy"),
    "stage_accuracy": Column("mean over stages"),
    "forgetting": Column("forgetting"),
    "worst_client": Column("worst client"),
    "rounds": Column("rounds", digits=0),
    "upload_bytes": Column("up, kB", 1e3, 0),
    "download_bytes": Column("down, kB", 1e3, 0),
    "kept_bytes": Column("kept, kB", 1e3, 0),
    "seconds": Column("seconds", digits=0),
}


def standing(run: Mapping[str, Any]) -> dict[str, float]:
    """What a run came to, and what it took.

    Args:
        run: The contents of its ``results.json``, of a `ContinualMetrics` that tests each client.

    Returns:
        ``last_accuracy`` of the server's model on the whole test set after the last round; ``stage_accuracy``, the mean
        over experiences of its accuracy on all classes that had come by the end of each; ``forgetting``, where there
        are several; ``worst_client``, the lowest accuracy of a client on what it has learnt; ``rounds``;
        ``upload_bytes`` and ``download_bytes`` of a client and an experience, in the mean; ``kept_bytes`` of a client;
        ``seconds``.
    """
    record, metrics = run["record"], run["metrics"]
    clients = [model for model in record["tasks"] if model != "server"]
    shares = len(clients) * len(record["tasks"]["server"])
    found = {
        "last_accuracy": metrics["final_accuracy/server"],
        "stage_accuracy": float(np.nanmean(stream_accuracies(record))),
        "forgetting": metrics.get("forgetting/server", math.nan),
        "worst_client": min(metrics.get(f"stream_accuracy/{client}", math.inf) for client in clients),
        "rounds": float(len(record["rounds"])),
        "upload_bytes": metrics["upload_bytes/total"] / shares,
        "download_bytes": metrics["download_bytes/total"] / shares,
        "kept_bytes": metrics["kept_bytes/clients"],
        "seconds": float(run["seconds"]),
    }
    return {name: value for name, value in found.items() if math.isfinite(value)}


def board(table: Table, protocol: str, notes: Notes) -> str:
    """A protocol's table in Markdown, the most accurate method first; nothing where none was run.

    Args:
        table: Of `standing`, its rows called ``PROTOCOL METHOD``.
        notes: Of all methods of the protocol; those that were not run are left out.
    """
    found = {method: table.rows[f"{protocol} {method}"] for method in notes if f"{protocol} {method}" in table.rows}
    if not found:
        return ""
    columns = [name for name in COLUMNS if any(name in cells for cells in found.values())]
    told = list(dict.fromkeys(name for method in found for name in notes[method]))
    lines = [
        [
            method,
            *(COLUMNS[name].text(cells[name]) if name in cells else "-" for name in columns),
            *(notes[method].get(name, "-") for name in told),
        ]
        for method, cells in sorted(found.items(), key=lambda one: -(one[1]["last_accuracy"].mean or 0.0))
    ]
    return markdown_table(["method", *(COLUMNS[name].head for name in columns), *told], lines)


def picture(table: Table, protocol: str, notes: Notes) -> Spec | None:
    """Accuracy against bytes and against seconds, a point for each method; nothing where fewer than two were run."""
    rows: Points = []
    for method, told in notes.items():
        if cells := table.rows.get(f"{protocol} {method}"):
            mean = {name: cell.mean or 0.0 for name, cell in cells.items()}
            traffic = (mean["upload_bytes"] + mean["download_bytes"]) / 1e6
            point = {"method": method, "accuracy": mean["last_accuracy"], "logits": told.get("logits", "-")}
            rows.append(point | {"traffic": traffic, "seconds": mean["seconds"]})
    if len(rows) < 2:
        return None
    kinds = list(dict.fromkeys(row["logits"] for row in rows))
    parts = [_against(rows, "traffic", "MB of a client and task, up and down", kinds)]
    parts.append(_against(rows, "seconds", "seconds of a run", kinds))
    return charts.spec(alt.hconcat(*parts).properties(title=protocol), rows=rows)


def _against(rows: Points, cost: str, title: str, kinds: Sequence[str]) -> Drawn:
    """Accuracy against a cost."""
    ends, (low, high) = _ends([math.log(row[cost]) for row in rows]), _ends([row["accuracy"] for row in rows])
    across = alt.Scale(type="log", domain=[math.exp(end) for end in ends], nice=False)
    x, up = alt.X(f"{cost}:Q", title=title, scale=across), alt.Scale(domain=[low, high], nice=False)
    base = charts.chart_of("rows").encode(x=x, y=alt.Y("accuracy:Q", title="last accuracy", scale=up))
    points = base.mark_point(filled=True, size=60, opacity=0.9)
    points = points.encode(color=charts.colour("logits", kinds), shape=charts.shape("logits", kinds))
    middle, beside = math.exp(sum(ends) / 2), f"beside {cost}"
    _set_apart(rows, cost, beside, ends, (low, high))
    names = charts.names_beside(base.encode(y=alt.Y(f"{beside}:Q", scale=up)), "method", cost, middle)
    return alt.layer(points, *names).properties(width=_WIDTH, height=_HEIGHT)


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """The ends of an axis, a little beyond the values."""
    beyond = 0.08 * (max(values) - min(values)) or 0.1
    return min(values) - beyond, max(values) + beyond


def _set_apart(rows: Points, cost: str, beside: str, across: tuple[float, float], up: tuple[float, float]) -> None:
    """Enter at which accuracy each name stands beside its point: at the point's, or below it and the names there."""
    places: list[tuple[float, float, float]] = []
    for row in sorted(rows, key=lambda row: -row["accuracy"]):
        x = _WIDTH * (math.log(row[cost]) - across[0]) / (across[1] - across[0])
        y = _HEIGHT * (up[1] - row["accuracy"]) / (up[1] - up[0])
        wide = 8 + 6.5 * len(row["method"])
        left, right = (x, x + wide) if x <= _WIDTH / 2 else (x - wide, x)
        for other in sorted(height for start, end, height in places if start < right and left < end):
            if abs(other - y) < _LINE:
                y = other + _LINE
        places.append((left, right, y))
        row[beside] = up[1] - y * (up[1] - up[0]) / _HEIGHT
