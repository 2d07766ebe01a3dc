"""The leaderboard: accuracy and costs of methods under the same protocol."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import altair as alt

from lightning_fcl.evaluation import charts
from lightning_fcl.evaluation.charts import Chart, Points, Spec
from lightning_fcl.evaluation.labels import PointLabels, axis_range, chart_height
from lightning_fcl.evaluation.metric import Metric, Score, Unit
from lightning_fcl.evaluation.metrics import (
    ANYTIME_ACCURACY,
    BYTES_ACCURACY,
    CLIENT_STATE_BYTES,
    DOWNLOAD_BYTES,
    FINAL_ACCURACY,
    FORGETTING,
    INCREMENTAL_ACCURACY,
    LEARNING_ACCURACY,
    OWN_ACCURACY,
    OWN_ACCURACY_LOWEST,
    OWN_ACCURACY_STD,
    OWN_ACCURACY_TENTH,
    PROCESSOR_SECONDS,
    TRAIN_SAMPLES,
    UPLOAD_BYTES,
    summarize,
)
from lightning_fcl.evaluation.record import Evaluation
from lightning_fcl.evaluation.table import Cell, Table, markdown_table

# Width and least height of each of the two panels of the figure, in pixels.
_WIDTH, _HEIGHT = 440, 420

Notes = Mapping[str, Mapping[str, str]]
"""Notes on each method, by method and table column. The note ``logits`` describes the logits in the method's loss."""


def _of(metric: Metric, model: str) -> Callable[[Evaluation], Iterator[Score]]:
    """Return the function of a column that contains the value of a metric for one model."""

    def scores(evaluation: Evaluation) -> Iterator[Score]:
        yield from (score._replace(model="") for score in metric.function(evaluation) if score.model == model)

    return scores


def _per_client_and_experience(metric: Metric) -> Callable[[Evaluation], Iterator[Score]]:
    """Return the function of a column: a total, divided by the number of clients and the number of experiences."""

    def scores(evaluation: Evaluation) -> Iterator[Score]:
        tasks = evaluation.record["tasks"]
        shares = sum(model != "server" for model in tasks) * len(tasks["server"])
        yield from (Score("", score.value / shares) for score in metric.function(evaluation))

    return scores


def _rounds(evaluation: Evaluation) -> Iterator[Score]:
    yield Score("", float(len(evaluation.record["rounds"])))


def _column(name: str, metric: Metric, model: str, title: str = "") -> Metric:
    """Return a column that contains the value of a metric for one model."""
    return replace(metric, name=name, function=_of(metric, model), measure_name=None, title=title or metric.title)


COLUMNS = (
    _column("last_accuracy", FINAL_ACCURACY, "server"),
    _column("incremental_accuracy", INCREMENTAL_ACCURACY, "server"),
    _column("anytime_accuracy", ANYTIME_ACCURACY, "server"),
    _column("learning_accuracy", LEARNING_ACCURACY, "server"),
    _column("forgetting", FORGETTING, "server"),
    _column("own_accuracy", OWN_ACCURACY, "clients", "mean of the clients"),
    _column("own_accuracy_std", OWN_ACCURACY_STD, "clients", "standard deviation of the clients"),
    _column("own_accuracy_lowest", OWN_ACCURACY_LOWEST, "clients"),
    _column("own_accuracy_lowest_tenth", OWN_ACCURACY_TENTH, "clients"),
    _column("bytes_accuracy", BYTES_ACCURACY, "server"),
    Metric("rounds", _rounds, "minimize", "number of rounds", "rounds"),
    Metric(
        "upload_bytes",
        _per_client_and_experience(UPLOAD_BYTES),
        "minimize",
        "mean size of the uploads of a client in an experience",
        "B",
        title="upload",
    ),
    Metric(
        "download_bytes",
        _per_client_and_experience(DOWNLOAD_BYTES),
        "minimize",
        "mean size of the downloads of a client in an experience",
        "B",
        title="download",
    ),
    _column("client_state_bytes", CLIENT_STATE_BYTES, "clients", "client state"),
    _column("processor_seconds", PROCESSOR_SECONDS, "total", "processor time"),
    _column("train_samples", TRAIN_SAMPLES, "total", "training samples"),
)
"""The columns of the leaderboard, which ``table.json`` contains."""

_SHOWN = (
    "last_accuracy",
    "incremental_accuracy",
    "forgetting",
    "own_accuracy_lowest",
    "own_accuracy_std",
    "bytes_accuracy",
    "upload_bytes",
    "download_bytes",
    "client_state_bytes",
    "processor_seconds",
)
"""Names of the columns that tables in Markdown show."""

_FORMATS: Mapping[Unit, tuple[str, float, int]] = {
    "": ("", 1.0, 3),
    "B": (", kB", 1e3, 0),
    "s": (", s", 1.0, 0),
    "rounds": ("", 1.0, 0),
    "samples": (", thousands", 1e3, 0),
}
"""For each unit: the text after the heading, the divisor of the values, and the number of decimals."""


def cell_text(metric: Metric, cell: Cell) -> str:
    """Return the mean of a cell as text.

    The text also contains the standard deviation if the cell has several seeds and the unit is shown with decimals.
    """
    _, divisor, digits = _FORMATS[metric.unit]
    mean, std = ((value or 0.0) / divisor for value in (cell.mean, cell.std))
    spread = f" ± {std:.{digits}f}" if cell.n > 1 and digits else ""
    return f"{mean:.{digits}f}{spread}"


def leaderboard_row(run: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of the leaderboard's columns for a run, by the name of the column.

    Args:
        run: Contents of ``results.json`` of a run whose `ContinualMetrics` tests each client.
    """
    return summarize(run["record"], COLUMNS)


def leaderboard_table(table: Table, protocol: str, notes: Notes) -> str:
    """Return the table of a protocol in Markdown, the most accurate method first. Empty if no method was run.

    The table shows the most important columns. ``table.json`` contains all columns.

    Args:
        table: Table with the metrics of `leaderboard_row`. The name of a row is ``PROTOCOL METHOD``.
        protocol: Name of the protocol.
        notes: Notes on each method of the protocol, by method. Methods that were not run are left out.
    """
    cells_by_method = {
        method: table.rows[f"{protocol} {method}"] for method in notes if f"{protocol} {method}" in table.rows
    }
    if not cells_by_method:
        return ""
    columns = [
        metric
        for metric in COLUMNS
        if metric.name in _SHOWN and any(metric.name in cells for cells in cells_by_method.values())
    ]
    note_names = list(dict.fromkeys(name for method in cells_by_method for name in notes[method]))
    lines = [
        [
            method,
            *(cell_text(metric, cells[metric.name]) if metric.name in cells else "-" for metric in columns),
            *(notes[method].get(name, "-") for name in note_names),
        ]
        for method, cells in sorted(cells_by_method.items(), key=lambda item: -(item[1]["last_accuracy"].mean or 0.0))
    ]
    heads = [f"{metric.heading}{_FORMATS[metric.unit][0]}" for metric in columns]
    return markdown_table(["method", *heads, *note_names], lines)


def leaderboard_chart(table: Table, protocol: str, notes: Notes) -> Spec | None:
    """Return two charts: accuracy against communication, and accuracy against time. Each method is a point.

    The result is None if fewer than two methods were run.
    """
    rows: Points = []
    for method, method_notes in notes.items():
        if cells := table.rows.get(f"{protocol} {method}"):
            mean = {name: cell.mean or 0.0 for name, cell in cells.items()}
            megabytes = (mean["upload_bytes"] + mean["download_bytes"]) / 1e6
            point = {"method": method, "accuracy": mean["last_accuracy"], "logits": method_notes.get("logits", "-")}
            rows.append(point | {"communication": megabytes, "seconds": mean["processor_seconds"]})
    if len(rows) < 2:
        return None
    kinds = list(dict.fromkeys(row["logits"] for row in rows))
    parts = [_against(rows, "communication", "uploads and downloads per client and experience (MB)", kinds)]
    parts.append(_against(rows, "seconds", "processor time of a run (s)", kinds))
    return charts.spec(alt.hconcat(*parts).properties(title=protocol), rows=rows)


def _against(rows: Points, cost: str, title: str, kinds: Sequence[str]) -> Chart:
    """Return the chart of accuracy against ``cost``, the name of a field. Both axes have a margin around the values."""
    start, end = axis_range([math.log(row[cost]) for row in rows])
    x_range, y_range = (math.exp(start), math.exp(end)), axis_range([row["accuracy"] for row in rows])
    height, y_title = chart_height(len(rows), _HEIGHT), "last accuracy"
    x = alt.X(f"{cost}:Q", title=title, scale=alt.Scale(type="log", domain=[*x_range], nice=False))
    y = alt.Y("accuracy:Q", title=y_title, scale=alt.Scale(domain=[*y_range], nice=False))
    base = charts.get_chart("rows").encode(x=x)
    points = base.mark_point(filled=True, size=60, opacity=0.9)
    points = points.encode(y=y, color=charts.color_scale("logits", kinds), shape=charts.shape("logits", kinds))
    labels = PointLabels("method", cost, "accuracy", x_range, y_range, _WIDTH, height, log=True)
    labels.set_heights(rows)
    return alt.layer(points, *labels.layers(base, y_title)).properties(width=_WIDTH, height=height)
