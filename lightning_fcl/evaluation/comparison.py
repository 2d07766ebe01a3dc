"""Report that compares several runs: summary, comparison with a paper, and charts over seeds."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import altair as alt
import numpy as np

from lightning_fcl.errors import MissingValueError
from lightning_fcl.evaluation import charts
from lightning_fcl.evaluation.charts import COLORS, Chart, Points, Spec, fill_template, responsive_chart
from lightning_fcl.evaluation.continual import FloatArray
from lightning_fcl.evaluation.curves import curves
from lightning_fcl.evaluation.labels import axis_range, shorten_names
from lightning_fcl.evaluation.metrics import AVERAGE_ACCURACY, FORGETTING, find_metric, overall_metrics
from lightning_fcl.evaluation.record import Quantity, get_quantity
from lightning_fcl.evaluation.results import make_missing_run_error, read_results
from lightning_fcl.evaluation.statistics import seed_statistics
from lightning_fcl.evaluation.summary import (
    SummaryMetric,
    describe_run_size,
    final_client_metrics,
    format_value,
    summary_metrics,
)
from lightning_fcl.evaluation.table import NEAR_TOLERANCE, Cell, Table, metric_title

__all__ = ["compare_page", "find_runs", "label_places", "runs_by_name"]

_VIEWS = ("server, whole test set", "mean over clients, on all experiences so far")

RunsByName: TypeAlias = Mapping[str, Sequence[Mapping[str, Any]]]
"""Runs in a report: for the name of each row in the report, the contents of ``results.json`` of each seed."""


def compare_page(groups: RunsByName, table: Table | None = None) -> str:
    """Return the HTML of a report on several runs.

    Args:
        groups: For the name of each row in the report, the contents of ``results.json`` of each seed.
        table: Table that compares the runs with expected values. None if there are no expected values.

    Raises:
        ValueError: If ``groups`` is empty.
    """
    if not groups:
        raise MissingValueError(
            "Expected `groups` to contain at least one run, but it is empty.",
            hint="Pass the result of `runs_by_name`, or run `lightning-fcl report` with the folders of runs.",
            argument="groups",
        )
    runs = [run for of in groups.values() for run in of]
    metrics_by_run = {
        label: [{one.name: one for one in summary_metrics(run)} for run in of] for label, of in groups.items()
    }
    quantity = get_quantity(runs[0]["record"])
    names = list(dict.fromkeys(name for of in metrics_by_run.values() for run in of for name in run))
    extents = {label: describe_run_size(of[0]) for label, of in groups.items()}
    extents = extents if len({*extents.values()}) > 1 else {}
    head = ["", *(["size"] if extents else []), *names]
    lines = [
        [label, *([extents[label]] if extents else []), *(_mean([run[n] for run in of if n in run]) for n in names)]
        for label, of in metrics_by_run.items()
    ]
    names_in_charts = shorten_names([*groups])
    groups_in_charts = {names_in_charts[label]: of for label, of in groups.items()}
    points = {names_in_charts[label]: of for label, of in metrics_by_run.items()}
    compared_metrics = list(dict.fromkeys(name for _, name, _ in table.paper_cells)) if table else []
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
        summary=[head, *lines],
        quantity=quantity,
        compared=[metric_title(name) for name in compared_metrics],
        against_paper=[
            [row, *((of[name].text(name), of[name].verdict) if name in of else "-" for name in compared_metrics)]
            for row, of in (table.rows.items() if table and compared_metrics else ())
        ],
        charts={
            "against": paper_comparison_chart(table) if table else None,
            "rounds": rounds_chart(groups_in_charts, quantity),
            "clients": clients_chart(groups_in_charts, quantity),
            "forgetting": final_metrics_chart(points, quantity),
        },
        metrics=_all_metrics(groups),
    )


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Return the folders of all runs in some folders and their subfolders.

    Raises:
        FileNotFoundError: If a folder contains no run.
    """
    run_folders: dict[Path, None] = {}
    for folder in folders:
        runs = sorted(path.parent for path in folder.rglob("results.json"))
        if not runs:
            raise make_missing_run_error(folder)
        run_folders |= dict.fromkeys(runs)
    return list(run_folders)


def runs_by_name(runs: Sequence[Path]) -> dict[str, list[dict[str, Any]]]:
    """Return a dict that contains, for the name of each row in a report, the results of all seeds of the row.

    The name of a row comes from the recipe. If the recipe has no row name, or several folders have the same row name,
    the name is the path of the folder without the path that all these folders share. Folders ``seed-0``, ``seed-1`` and
    so on in the same folder are the seeds of one row, as `lightning-fcl fit --seeds` writes them.

    Raises:
        ValueError: If a ``results.json`` is invalid.
    """
    by_place: dict[Path, list[dict[str, Any]]] = {}
    for run in runs:
        by_place.setdefault(run.parent if run.name.startswith("seed-") else run, []).append(read_results(run))
    rows = {place: of[0]["recipe"]["row"] if of[0]["recipe"] else "" for place, of in by_place.items()}
    labels = label_places(rows)
    return {labels[place]: of for place, of in by_place.items()}


def label_places(rows: Mapping[Path, str]) -> dict[Path, str]:
    """Return the name of each row in a report, by the folder of the row.

    Args:
        rows: Row of the recipe, by folder. Empty if the recipe has no row name.
    """
    names = [*rows.values()]
    unnamed = [place for place, name in rows.items() if not name or names.count(name) > 1]
    return {**rows, **dict(zip(unnamed, _shorten_paths(unnamed), strict=True))}


def _shorten_paths(paths: Sequence[Path]) -> list[str]:
    """Return the paths without the folders that all paths share. A single path becomes its last part.

    Example:
        >>> _shorten_paths([Path("runs/lr=0.1"), Path("runs/old/lr=0.1")])
        ['lr=0.1', 'old/lr=0.1']
    """
    if len(paths) < 2:
        return [path.name or str(path) for path in paths]
    whole_paths = [path.absolute() for path in paths]
    shared = os.path.commonpath([path.parent for path in whole_paths])
    return [path.relative_to(shared).as_posix() for path in whole_paths]


def _all_metrics(groups: RunsByName) -> list[list[str]]:
    """Return a table with a line for each metric of the server, of the mean over clients, or of the whole federation.

    The first line is the heading. The table is empty if there are no such metrics.
    """
    names = overall_metrics(name for runs in groups.values() for run in runs for name in run["metrics"])
    lines = []
    for name in names:
        cells = (
            Cell({i: run["metrics"][name] for i, run in enumerate(runs) if name in run["metrics"]})
            for runs in groups.values()
        )
        lines.append([name, *(cell.text(name) for cell in cells)])
    return [["metric", *groups], *lines] if lines else []


def _mean(metrics: Sequence[SummaryMetric]) -> str:
    """Return the mean of a metric over seeds as text, or "-" if there are no values.

    If the values differ, the text also contains the standard deviation.
    """
    if not metrics:
        return "-"
    numbers, unit = seed_statistics(one.value for one in metrics), metrics[0].unit
    return format_value(numbers.mean, unit) + (f" ± {format_value(numbers.std, unit)}" if numbers.std else "")


def rounds_chart(groups: RunsByName, quantity: Quantity) -> Spec | None:
    """Return the chart of the values in each round. A list selects the server, or the mean over clients.

    Each row of the report has a line. If there are more rows than colors, only the selected row is colored. The result
    is None if no model was tested, or if no run has at least two rounds.
    """
    rows = [
        {"line": label, "view": view, **point}
        for label, runs in groups.items()
        for view, seeds in zip(_VIEWS, zip(*(_views(run["record"]) for run in runs), strict=True), strict=True)
        for point in charts.over_seeds(seeds)
    ]
    longest = max(len(run["record"]["rounds"]) for runs in groups.values() for run in runs)
    if not rows or longest < 2:
        return None
    views = [view for view in _VIEWS if any(row["view"] == view for row in rows)]
    choice = alt.param(name="view", value=views[0], bind=alt.binding_select(options=views, name=f"{quantity.name}: "))
    base = charts.get_chart("rows").transform_filter("datum.view == view").encode(x=charts.round_axis(longest))
    base = base.encode(tooltip=charts.make_tooltips(line="row", round="", value="mean", std="", seeds=""))
    if len(groups) <= len(COLORS):
        layers = charts.small_multiples(base, [*groups], quantity.name, charts.quantity_scale(quantity), rows)
        return responsive_chart(alt.layer(*layers).add_params(choice), 320, rows=rows)
    # With more lines than colors, one line is colored and all other lines are gray.
    row = alt.param(name="row", value=next(iter(groups)), bind=alt.binding_select(options=[*groups], name="highlight "))
    lines = base.mark_line(point=True).encode(y=charts.value_axis(quantity))
    pale = lines.encode(detail="line:N", color=alt.value("#b8bfc8"))
    front = lines.transform_filter("datum.line == row").encode(color=alt.value(COLORS[5]))
    return responsive_chart(alt.layer(pale, front).add_params(choice, row), 320, rows=rows)


def clients_chart(groups: RunsByName, quantity: Quantity) -> Spec | None:
    """Return the chart of the clients' final values: a tick for each client and seed, and the mean of each row.

    The result is None if no client was tested.
    """
    rows = [
        {"row": label, "client": client, "seed": run["seed"], "value": value}
        for label, runs in groups.items()
        for run in runs
        for client, value in final_client_metrics(run["record"])
    ]
    if not rows:
        return None
    # The names are not cut, because cut names can be equal.
    axis = alt.Axis(labelLimit=0, labelFontSize=11)
    base = charts.get_chart("rows").encode(y=alt.Y("row:N", sort=[*groups], title=None, axis=axis))
    ticks = base.mark_tick(thickness=2, size=16, opacity=0.55, color=COLORS[1])
    ticks = ticks.encode(x=alt.X("value:Q", title=quantity.name, scale=charts.quantity_scale(quantity)))
    ticks = ticks.encode(tooltip=charts.make_tooltips(row="", client="", seed="", value=quantity.name))
    means = base.mark_point(shape="diamond", filled=True, size=70, color=COLORS[0], opacity=1)
    means = means.encode(x="mean(value):Q", tooltip=["row:N", alt.Tooltip("mean(value):Q", title="mean", format=".3f")])
    return responsive_chart(alt.layer(ticks, means), 24 * len({row["row"] for row in rows}) + 10, rows=rows)


def final_metrics_chart(
    metrics_by_run: Mapping[str, Sequence[Mapping[str, SummaryMetric]]], quantity: Quantity
) -> Spec | None:
    """Return the chart of forgetting against average accuracy, with a point for each row.

    If the models are evaluated by a quantity other than accuracy, the chart shows this quantity. A point is the mean
    over the seeds of the row. A legend names the points, because names next to the points do not fit on a narrow page.
    The result is None if fewer than two rows have both metrics.
    """
    rows: Points = []
    titles = [
        quantity_metric.heading
        for metric in (AVERAGE_ACCURACY, FORGETTING)
        if (quantity_metric := metric.for_quantity(quantity))
    ]
    for label, runs in metrics_by_run.items():
        if metric_pairs := [[one[title].value for title in titles] for one in runs if {*titles} <= {*one}]:
            value, mean_forgetting = (seed_statistics(values).mean for values in zip(*metric_pairs, strict=True))
            if np.isfinite([value, mean_forgetting]).all():
                rows.append({"row": label, "value": value, "forgetting": mean_forgetting, "seeds": len(metric_pairs)})
    if len(rows) < 2:
        return None
    x_range, y_range = (axis_range([row[field] for row in rows]) for field in ("value", "forgetting"))
    names = [row["row"] for row in rows]
    base = charts.get_chart("rows").encode(
        x=alt.X("value:Q", title=titles[0], scale=alt.Scale(domain=[*x_range], nice=False)),
        y=alt.Y("forgetting:Q", title=titles[1], scale=alt.Scale(domain=[*y_range], nice=False)),
        tooltip=charts.make_tooltips(row="", value=quantity.name, forgetting="", seeds=""),
    )
    points = base.mark_point(filled=True, size=80, opacity=1)
    points = points.encode(color=charts.color_scale("row", names), shape=charts.shape("row", names))
    return responsive_chart(points, 320, rows=rows)


def paper_comparison_chart(table: Table) -> Spec | None:
    """Return the chart of measured means against the expected values. Bars show two standard deviations over seeds.

    Sizes and durations are left out. The result is None if no expected value was measured.
    """
    if not (rows := comparison_points(table)):
        return None
    kinds = [*_agreements(table).values()]
    look = charts.color_scale("agreement", kinds, (COLORS[0], COLORS[6], COLORS[5])), charts.shape("agreement", kinds)
    return responsive_chart(scatter(rows, "", *look, tolerance=table.tolerance or 0.0), 420, rows=rows)


def comparison_points(table: Table) -> Points:
    """Return a point for each expected value that was measured. Sizes and durations are left out."""
    points: Points = []
    for row, name, cell in table.paper_cells:
        metric = find_metric(name)
        if cell.mean is not None and cell.paper is not None and not (metric is not None and metric.unit):
            two, kind = 2 * (cell.std or 0.0), _agreements(table)[cell.verdict]
            point = {"row": row, "metric": metric_title(name), "agreement": kind, "deviation": cell.deviation}
            points.append(
                point | {"paper": cell.paper, "ours": cell.mean, "low": cell.mean - two, "high": cell.mean + two}
            )
    return points


def _agreements(table: Table) -> dict[str, str]:
    """Return the label of each verdict."""
    return {"near": table.near_text, "spread": "within 2 standard deviations", "outside": "outside"}


def scatter(rows: Points, scale: str, look: alt.Color, shape: alt.Shape, tolerance: float = NEAR_TOLERANCE) -> Chart:
    """Return a scatter chart with the line of equal values, and a band of ``tolerance`` above and below the line."""
    numbers = [row[name] for row in rows for name in ("paper", "ours")]
    low, high = min(numbers) - NEAR_TOLERANCE, max(numbers) + NEAR_TOLERANCE
    axis = alt.Scale(domain=[low, high], nice=False)
    x = alt.X("paper:Q", scale=axis, title=f"expected value{scale}")
    y_title = "our mean ± two standard deviations over the seeds"
    y, lowest = alt.Y("ours:Q", scale=axis, title=y_title), alt.Y("low:Q", scale=axis, title=y_title)
    ends = [{"paper": end, "ours": end, "low": end - tolerance, "high": end + tolerance} for end in (low, high)]
    line = alt.Chart(alt.InlineData(ends)).encode(x=x)
    points = charts.get_chart("rows").encode(
        x=x, color=look, tooltip=charts.make_tooltips(row="", metric="", ours="", paper="")
    )
    return alt.layer(
        line.mark_area(color="#999999", opacity=0.25, clip=True).encode(y=lowest, y2="high:Q"),
        line.mark_line(color="#777777").encode(y=y),
        points.mark_rule(opacity=0.5, clip=True).encode(y=lowest, y2="high:Q"),
        points.mark_point(filled=True, size=60, opacity=0.9).encode(y=y, shape=shape),
    )


def _views(record: Mapping[str, Any]) -> tuple[FloatArray, FloatArray]:
    """Return the server's value and the mean over the tested clients in each round. NaN in rounds without a test."""
    whole, of_clients = np.full((2, 1 + max((entry["round"] for entry in record["rounds"]), default=-1)), np.nan)
    curves_by_model = curves(record)
    if (server := curves_by_model.get("server")) is not None:
        whole[server.rounds] = server.overall
    for number, value_by_client in charts.client_curves(curves_by_model).items():
        of_clients[number] = np.mean([*value_by_client.values()])
    return whole, of_clients
