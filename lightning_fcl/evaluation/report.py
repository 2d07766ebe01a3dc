"""Report of a run: main numbers, charts, metrics of each client, settings and the recipe.

Charts show the values of the point under the mouse pointer. A chart of a single model has a list to select the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import altair as alt
import numpy as np

from lightning_fcl.evaluation import charts
from lightning_fcl.evaluation.charts import COLORS, Points, Spec, fill_template, responsive_chart
from lightning_fcl.evaluation.confusion_charts import confusion_chart, confusion_history_chart
from lightning_fcl.evaluation.curves import Curve, curves, matrices
from lightning_fcl.evaluation.metrics import find_metric
from lightning_fcl.evaluation.record import Quantity, Record, get_quantities, get_quantity
from lightning_fcl.evaluation.statistics import seed_statistics
from lightning_fcl.evaluation.summary import (
    communication_volumes,
    describe_run_size,
    experience_labels,
    final_client_metrics,
    format_value,
    model_name,
    simulated_times,
    summary_metrics,
    task_name,
)
from lightning_fcl.evaluation.table import Cell, metric_number, metric_symbol, metric_title
from lightning_fcl.validation import format_names

Curves: TypeAlias = Mapping[str, Curve]

# Maximum number of values in one chart.
_VALUES = 20_000
# Maximum number of clients that the chart of clients shows as bars.
_BARS = 60
_SPREAD = ("worst", "lower quartile", "upper quartile", "best")
_SERVER, _STREAM, _CLIENTS = "server, whole test set", "server, all experiences so far", "mean over clients"
_LOOKS = {_SERVER: COLORS[0], _STREAM: COLORS[2], _CLIENTS: COLORS[1]}
# Number of clients in the table of the worst clients.
_WORST = 10


def render_report(results: Mapping[str, Any], recipe: str = "") -> str:
    """Return the HTML of the report of a run.

    Args:
        results: Contents of ``results.json`` of the run.
        recipe: Recipe with all defaults as YAML text, which the report shows for copying.
    """
    record, metrics = results["record"], results["metrics"]
    quantities = get_quantities(record)
    curves_by_model, ends = curves(record), final_client_metrics(record)
    values = [value for _, value in ends]
    worst = [[model_name(model), f"{value:.3f}", str(curves_by_model[model].rounds[-1] + 1)] for model, value in ends]
    kinds = list(dict.fromkeys(name.rpartition("/")[0] for name in metrics if not name.endswith("/total")))
    tested = dict.fromkeys(name.rpartition("/")[2] for name in metrics if not name.endswith("/total"))
    limits = [entry["upload_limits"] for entry in record["rounds"] if entry.get("upload_limits")]
    chart_specs = {
        "overview": overview_chart(record, curves_by_model),
        "over_time": rounds_chart(record, curves_by_model),
        "by_group": group_chart(record, curves_by_model),
        "clients": final_metrics_chart(record, ends),
        "matrix": accuracy_matrix_chart(record),
        "forgetting": forgetting_chart(record),
        "confusion": confusion_chart(record),
        "confusion_history": confusion_history_chart(record),
        "communication": communication_chart(record),
        "epsilon": epsilon_chart(record),
        "densities": density_charts(results.get("densities", {"experiences": []}), experience_labels([record])),
    }
    return fill_template(
        "run.html",
        results=results,
        record=record,
        recipe=recipe,
        extent=describe_run_size(results),
        headlines=summary_metrics(results),
        against_paper=[_against(name, metrics.get(name), paper) for name, paper in results["expected"].items()],
        quantity=quantities[0].name,
        charts=chart_specs,
        spread=(len(ends), min(values), max(values), seed_statistics(values).std) if len(values) > 1 else None,
        worst_clients=worst[:_WORST] if len(worst) > _WORST else [],
        client_problems=[*_client_problems(record)],
        limits=limits[-1] if limits else None,
        privacy=_describe_privacy(record),
        kinds=kinds,
        metrics=[
            [model_name(model), *(metric_number(kind, metrics.get(f"{kind}/{model}")) for kind in kinds)]
            for model in sorted(tested, key=lambda model: {"server": 0, "clients": 1}.get(model, 2))
        ],
        meanings=[
            (kind if metric_symbol(kind) == kind else f"{kind} ({metric_symbol(kind)})", metric.about)
            for kind in kinds
            if (metric := find_metric(kind, quantities))
        ],
        totals=_totals(metrics, quantities),
    )


def _against(name: str, value: float | None, paper: float) -> list[str | tuple[str, str]]:
    if value is None:
        return [metric_title(name), "-", metric_number(name, paper), "-"]
    kind = Cell({0: value}, paper).verdict
    return [metric_title(name), (metric_number(name, value), kind), metric_number(name, paper), f"{value - paper:+.3f}"]


def _client_problems(record: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the round (from 1), the client and the reason of each problem of a client.

    Problems are dropped uploads, non-finite losses, and clients that several nodes claim.
    """
    for entry in record["rounds"]:
        reasons = [
            *entry.get("dropped", {}).items(),
            *((one, "non-finite loss") for one in entry.get("diverged", [])),
        ]
        reasons += [
            (one, f"claimed by several nodes: {format_names(of)}")
            for one, of in entry.get("duplicate_claims", {}).items()
        ]
        yield from ([str(entry["round"] + 1), client, reason] for client, reason in reasons)


def _totals(metrics: Mapping[str, float], quantities: Sequence[Quantity]) -> list[list[str]]:
    """Return the name, the value and the description of each metric of the whole federation."""
    totals = [(key, find_metric(key, quantities), value) for key, value in metrics.items() if key.endswith("/total")]
    return [[key, format_value(value, metric.unit), metric.about] for key, metric, value in totals if metric]


def overview_chart(record: Record, curves_by_model: Curves) -> Spec | None:
    """Return the chart of the server's and the clients' values by round, or None if no model was tested.

    The server has a line for the whole test set and, if it has several tasks, a line for all experiences so far. The
    clients have a line for their mean, and bands from the worst to the best client and between the quartiles.
    """
    quantity, x, spread = (
        get_quantity(record),
        charts.round_axis(len(record["rounds"])),
        _spread(record, curves_by_model),
    )
    lines = _server(record, curves_by_model) + [
        {"round": row["round"], "line": _CLIENTS, "value": row["mean"]} for row in spread
    ]
    if not lines:
        return None
    fields = ("round", "best", "upper quartile", "mean", "lower quartile", "worst", "worst client", "clients")
    band = charts.get_chart("spread").encode(x=x, tooltip=charts.make_tooltips(**dict.fromkeys(fields, "")))
    layers = [
        band.mark_area(opacity=opacity, color=COLORS[1]).encode(
            y=charts.value_axis(quantity, f"{low}:Q"), y2=f"{high}:Q"
        )
        for low, high, opacity in (("worst", "best", 0.13), ("lower quartile", "upper quartile", 0.22))
        if any(row["clients"] > 1 for row in spread)
    ]
    starts = _starts(record, next(iter(curves_by_model)))
    begin = charts.get_chart("starts").encode(x=x, tooltip=charts.make_tooltips(experience="", learns=""))
    if len(starts) > 1:
        number = begin.mark_text(align="left", dx=4, baseline="top", color="#888888")
        layers.append(begin.mark_rule(strokeDash=[4, 3], color="#999999"))
        layers.append(number.encode(y=alt.value(2), text="experience:O"))
    base = charts.get_chart("lines").encode(x=x, y=charts.value_axis(quantity))
    layers += _lines(base.encode(tooltip=charts.make_tooltips(line="model", round="", value=quantity.name)), lines)
    return responsive_chart(alt.layer(*layers), lines=lines, spread=spread, starts=starts)


def rounds_chart(record: Record, curves_by_model: Curves) -> Spec | None:
    """Return the chart of the server's values by simulated time.

    The result is None if the run has no simulated clock, or if the server was not tested.
    """
    times, quantity = simulated_times(record), get_quantity(record)
    rows = [
        {**row, "seconds": float(times[row["round"] - 1])} for row in _server(record, curves_by_model) if len(times)
    ]
    if not rows:
        return None
    x = alt.X("seconds:Q", title="simulated time since the start (s)", scale=alt.Scale(nice=False, zero=True))
    tips = charts.make_tooltips(line="model", seconds="", round="", value=quantity.name)
    base = charts.get_chart("rows").encode(x=x, y=charts.value_axis(quantity), tooltip=tips)
    return responsive_chart(alt.layer(*_lines(base, rows, interpolate="step-after")), rows=rows)


def group_chart(record: Record, curves_by_model: Curves) -> Spec | None:
    """Return the chart of the values on each group of test samples by round, for the selected model.

    Up to seven groups are drawn as lines. More groups are drawn as a heat map. The result is None if there are fewer
    than two groups, or if no model was tested.
    """
    quantity, names = get_quantity(record), record["groups"]
    if not curves_by_model or len(names) < 2:
        return None
    models = _first(curves_by_model, max(curve.accuracy.size for curve in curves_by_model.values()))
    rows = [
        {"model": model, "round": number + 1, "group": name, "value": value}
        for model in models
        for number, values in zip(
            curves_by_model[model].rounds.tolist(), curves_by_model[model].accuracy.tolist(), strict=True
        )
        for name, value in zip(names, values, strict=True)
        if np.isfinite(value)
    ]
    base = charts.get_chart("rows").encode(tooltip=charts.make_tooltips(group="", round="", value=quantity.name))
    if len(names) <= len(COLORS):
        lines = base.encode(x=charts.round_axis(len(record["rounds"])), y=charts.value_axis(quantity))
        lines = lines.encode(color=charts.color_scale("group", names))
        return responsive_chart(
            charts.with_model_selector(alt.layer(lines.mark_line(), charts.draw_points(lines)), models), rows=rows
        )
    x = alt.X("round:O", title="round", axis=charts.integer_axis())
    y = alt.Y("group:N", sort=names, title=None, axis=alt.Axis(labelOverlap=True))
    cells = base.mark_rect().encode(x=x, y=y, color=charts.heat_scale(quantity))
    return responsive_chart(charts.with_model_selector(cells, models), max(260, min(16 * len(names), 480)), rows=rows)


def accuracy_matrix_chart(record: Record) -> Spec | None:
    """Return the heat map of the selected model's value on each task (column) in the rounds of each task (row).

    Each cell is the mean over the rounds of the row's task. The result is None if no tested model has several tasks.
    """
    matrix_by_model, quantity = matrices(record), get_quantity(record)
    if not matrix_by_model:
        return None
    longest = max(map(len, matrix_by_model.values()))
    models = _first(matrix_by_model, longest**2)
    rows = [
        {"model": model, "after": after + 1, "on": on + 1, "value": value, "groups": task_name(record, model, on)}
        | {"status": "learned" if on <= after else "not learned yet"}
        for model in models
        for (after, on), value in np.ndenumerate(matrix_by_model[model])
        if np.isfinite(value)
    ]
    base = charts.get_chart("rows").encode(
        x=alt.X("on:O", title=f"{quantity.name} on task", axis=charts.integer_axis()),
        y=alt.Y("after:O", title="after task", axis=charts.integer_axis()),
        tooltip=charts.make_tooltips(after="after task", on="on task", groups="", value=quantity.name)
        + charts.make_tooltips(**{"status": ""}),
    )
    faint = alt.condition("datum.status == 'learned'", alt.value(1), alt.value(0.7))
    layers = [base.mark_rect().encode(color=charts.heat_scale(quantity), opacity=faint)]
    if longest <= 12 and quantity.bounds:
        low, high = quantity.bounds
        ink = alt.condition(f"datum.value < {low + 0.6 * (high - low)}", alt.value("white"), alt.value("black"))
        layers.append(base.mark_text().encode(text=alt.Text("value:Q", format=".2f"), color=ink))
    return responsive_chart(
        charts.with_model_selector(alt.layer(*layers), models), min(420, max(140, 34 * longest)), rows=rows
    )


def forgetting_chart(record: Record) -> Spec | None:
    """Return the chart of the value on each task after the task's last round and at the end of the run.

    The chart shows the selected model. The line between the two points of a task shows the loss or the gain. The result
    is None if no tested model has both values.
    """
    matrix_by_model, quantity = matrices(record, rounds="last"), get_quantity(record)
    models = _first(matrix_by_model, max(map(len, matrix_by_model.values()), default=1))
    ways = ("after its last round", "at the end of the run")
    rows = [
        {"model": model, "task": task + 1, "groups": task_name(record, model, task), "value": value, "when": when}
        | dict(zip(ways, both, strict=True))
        for model in models
        for task, both in enumerate(
            zip(matrix_by_model[model].diagonal().tolist(), matrix_by_model[model][-1].tolist(), strict=True)
        )
        for when, value in zip(ways, both, strict=True)
        if np.isfinite(both).all()
    ]
    if not rows:
        return None
    base = charts.get_chart("rows").encode(x=alt.X("task:O", title="task", axis=charts.integer_axis()))
    base = base.encode(tooltip=charts.make_tooltips(groups="", **dict.fromkeys(ways, "")))
    rule = base.mark_rule(strokeWidth=2, color="#999999")
    rule = rule.encode(y=charts.value_axis(quantity, f"{ways[0]}:Q"), y2=f"{ways[1]}:Q")
    points = base.mark_point(filled=True, size=90, opacity=1).encode(y=charts.value_axis(quantity))
    points = points.encode(color=charts.color_scale("when", ways), shape=charts.shape("when", ways))
    return responsive_chart(charts.with_model_selector(alt.layer(rule, points), models), rows=rows)


def final_metrics_chart(record: Record, final_values: Sequence[tuple[str, float]]) -> Spec | None:
    """Return the chart of the final values of clients, the worst client first.

    Each client has a bar. More than 60 clients are shown as a histogram. The result is None for fewer than two clients.
    """
    quantity = get_quantity(record)
    rows = [{"client": model_name(model), "value": value} for model, value in final_values]
    if len(rows) < 2:
        return None
    bars = charts.get_chart("rows").mark_bar(color=COLORS[1])
    title = f"final {quantity.name} on all groups that the client has learned"
    if len(rows) > _BARS:
        bins = alt.X("value:Q", bin=alt.Bin(maxbins=40), title=title)
        return responsive_chart(
            bars.encode(x=bins, y=alt.Y("count()", title="number of clients"), tooltip=["count()"]), rows=rows
        )
    x = alt.X("value:Q", title=title, scale=charts.quantity_scale(quantity, zero=True))
    y = alt.Y("client:N", sort=None, title=None)
    return responsive_chart(
        bars.encode(x=x, y=y, tooltip=charts.make_tooltips(client="", value=quantity.name)), 17 * len(rows), rows=rows
    )


def communication_chart(record: Record) -> Spec | None:
    """Return the chart of the megabytes that all clients together uploaded and downloaded in each round.

    The result is None if there was no communication.
    """
    sums = communication_volumes(record) / 1e6
    if not np.any(sums):
        return None
    rows = [
        {"round": entry["round"] + 1, "direction": way, "MB": value}
        for way, values in zip(("upload", "download"), sums.tolist(), strict=True)
        for entry, value in zip(record["rounds"], values, strict=True)
    ]
    bars = (
        charts.get_chart("rows")
        .mark_bar()
        .encode(
            x=alt.X("round:O", title="round", axis=charts.integer_axis()),
            y=alt.Y("MB:Q", title="communication (MB)"),
            color=charts.color_scale("direction", ("upload", "download")),
            tooltip=charts.make_tooltips(round="", direction="", MB=""),
        )
    )
    return responsive_chart(bars, 180, rows=rows)


def _describe_privacy(record: Record) -> list[list[str]]:
    """Return the rows of the table on differential privacy: name and value. Return [] without privacy."""
    if (privacy := record.get("privacy")) is None:
        return []
    epsilons = [entry["epsilon"] for entry in record["rounds"] if "epsilon" in entry]
    observers = {
        "server": "users of the published models. The server is trusted",
        "client": "everyone, also the server",
    }
    return [
        ["epsilon of all rounds", f"{epsilons[-1]:.4g}" if epsilons else "none, because there is no noise"],
        ["delta", f"{privacy['delta']:g}"],
        ["protected unit", "all data of a client" if privacy["unit"] == "client" else "a sample"],
        ["protected against", observers[privacy["noise"]]],
        ["maximum norm of a unit's contribution", privacy["clip"]],
        ["noise multiplier", f"{privacy['noise_multiplier']:.4g}"],
        ["probability that a client is sampled for a round", f"{privacy['sampling_prob']:g}"],
        ["not protected", "test accuracies, losses, numbers of samples, sizes of messages, times, client states"],
    ]


def epsilon_chart(record: Record) -> Spec | None:
    """Return the chart of epsilon by round, or None without differential privacy or without noise."""
    rows = [
        {"round": entry["round"] + 1, "epsilon": entry["epsilon"]} for entry in record["rounds"] if "epsilon" in entry
    ]
    if not rows:
        return None
    line = (
        charts.get_chart("rows")
        .mark_line(point=len(rows) <= _BARS)
        .encode(
            x=alt.X("round:Q", title="round", axis=charts.integer_axis()),
            y=alt.Y("epsilon:Q", title="epsilon"),
            tooltip=charts.make_tooltips(round="", epsilon=".3f"),
        )
    )
    return responsive_chart(line, 180, rows=rows)


def density_charts(density_records: Mapping[str, Any], names: Sequence[str]) -> Spec | None:
    """Return the chart of a reservoir's activation densities after each experience.

    If the record has densities of groups of test samples, a list selects a group, or all test samples.
    """
    rows = [
        {"model": model, "line": names[entry["experience"]], **point}
        for entry in density_records["experiences"]
        for model, density in {"all test samples": entry["all"], **entry["groups"]}.items()
        for point in charts.density_points(density_records["edges"], density)
    ]
    if not rows:
        return None
    models, order = (list(dict.fromkeys(row[name] for row in rows)) for name in ("model", "line"))
    lines = charts.density_lines(order, ordered=True)
    lines = lines.encode(tooltip=charts.make_tooltips(line="after", activation="", value="density"))
    return responsive_chart(charts.with_model_selector(lines, models, "test samples "), rows=rows)


def _first(models: Mapping[str, Any], values_per_model: int) -> list[str]:
    """Return as many of the first models as a chart of at most ``_VALUES`` values can show, but at least one model."""
    return list(models)[: max(1, _VALUES // max(values_per_model, 1))]


def _lines(base: alt.Chart, rows: Points, **line: Any) -> list[alt.Chart]:
    """Return the layers with the lines and the points of a chart. A line without values is left out."""
    names = [name for name in _LOOKS if any(row["line"] == name for row in rows)]
    base = base.encode(color=charts.color_scale("line", names, [_LOOKS[name] for name in names]))
    return [base.mark_line(**line), charts.draw_points(base)]


def _server(record: Record, curves_by_model: Curves) -> Points:
    """Return the server's values on the whole test set and, with several tasks, on all experiences so far."""
    if (server := curves_by_model.get("server")) is None:
        return []
    series = [(_SERVER, server.overall), (_STREAM, server.seen_classes)][: 1 + (len(record["tasks"]["server"]) > 1)]
    return [
        {"round": number + 1, "line": line, "value": value}
        for line, values in series
        for number, value in zip(server.rounds.tolist(), values.tolist(), strict=True)
        if np.isfinite(value)
    ]


def _spread(record: Record, curves_by_model: Curves) -> Points:
    """Return the spread of the tested clients' values in each round, on all groups that a client has learned so far."""
    rows, way = [], get_quantity(record).sign
    for number, value_by_client in charts.client_curves(curves_by_model).items():
        values = way * np.array([*value_by_client.values()])
        quarters = dict(zip(_SPREAD, (way * np.quantile(values, (0, 0.25, 0.75, 1))).tolist(), strict=True))
        worst_client = model_name(min(value_by_client, key=lambda client: way * value_by_client[client]))
        counts = {"worst client": worst_client, "clients": len(values)}
        rows.append({"round": number + 1, "mean": way * values.mean(), **counts, **quarters})
    return rows


def _starts(record: Record, model: str) -> Points:
    """Return a point for the start of each experience, with the names of the groups that the model learns.

    The position on the round axis is half a round before the first round of the experience.
    """
    starts, last = [], -1
    for entry in record["rounds"]:
        number = entry["experience"].get(model, last)
        if last != number < len(record["tasks"][model]):
            name = task_name(record, model, number)
            starts.append({"round": entry["round"] + 0.5, "experience": number + 1, "learns": name})
            last = number
    return starts
