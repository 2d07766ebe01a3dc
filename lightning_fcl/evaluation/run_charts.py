"""Charts of a run's record, for a page: values under the pointer, and a list to choose the model from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import altair as alt
import numpy as np

from lightning_fcl.errors import listed
from lightning_fcl.evaluation.chart_parts import (
    HEIGHT,
    ROUND,
    VALUE,
    Record,
    Rows,
    Spec,
    by_round,
    chart_of,
    chosen,
    colour,
    heat,
    numbers,
    round_axis,
    scale_of,
    spec,
    tip,
    value_axis,
)
from lightning_fcl.evaluation.clock import simulated_times
from lightning_fcl.evaluation.communication import volumes
from lightning_fcl.evaluation.continual import FloatArray
from lightning_fcl.evaluation.metrics import Curve, matrices, quantity, sign
from lightning_fcl.evaluation.plots import COLOURS, model_name

Curves: TypeAlias = Mapping[str, Curve]

_LINES = 7  # as many as there are colours that stay apart
_VALUES = 20_000  # numbers in one chart
_BARS = 60
_SPREAD = ("worst", "lower quarter", "upper quarter", "best")
_SERVER, _STREAM, _CLIENTS = "server, whole test set", "server, what was learnt so far", "clients, mean"


def overview(record: Record, every: Curves) -> Spec | None:
    """The server on the whole test set and on what was learnt, the clients on what each has learnt."""
    of, x = quantity(record), round_axis(len(record["rounds"]))
    server = every.get("server")
    spread = _spread(record, every)
    lines = [{"round": row["round"], "line": _CLIENTS, "value": row["mean"]} for row in spread]
    if server is not None:
        tasks = len(record["tasks"]["server"])
        for name, values in ((_SERVER, server.overall), (_STREAM, server.learnt))[: 1 + (tasks > 1)]:
            pairs = zip(server.rounds.tolist(), values.tolist(), strict=True)
            lines += [{"round": number + 1, "line": name, "value": value} for number, value in pairs]
    if not lines:
        return None
    tips = [tip(ROUND, "round", "d"), *(tip(f"{name}:Q", name) for name in ("best", "upper quarter", "mean"))]
    tips += [tip("lower quarter:Q", "lower quarter"), tip("worst:Q", "worst"), tip("who:N", "worst client")]
    band = chart_of("spread").encode(x=x, tooltip=[*tips, tip("clients:Q", "clients", "d")])
    layers: list[alt.Chart] = []
    for low, high, opacity in (("worst", "best", 0.13), ("lower quarter", "upper quarter", 0.22)):
        area = band.mark_area(opacity=opacity, color=COLOURS[1])
        if any(row["clients"] > 1 for row in spread):
            layers.append(area.encode(y=value_axis(of, f"{low}:Q"), y2=f"{high}:Q"))
    looks = {_SERVER: COLOURS[0], _STREAM: COLOURS[2], _CLIENTS: COLOURS[1]}
    there = [name for name in looks if any(line["line"] == name for line in lines)]
    base = chart_of("lines").encode(
        x=x,
        y=value_axis(of),
        color=colour("line", there, [looks[name] for name in there]),
        tooltip=[tip("line:N", "model"), tip(ROUND, "round", "d"), tip(VALUE, of)],
    )
    starts = _starts(record, next(iter(every)))
    layers += [*(_experiences(x) if len(starts) > 1 else ()), base.mark_line(), _points(base)]
    return spec(alt.layer(*layers), lines=lines, spread=spread, starts=starts)


def over_time(record: Record, every: Curves) -> Spec | None:
    """The server on the whole test set and on what was learnt, by the clock of a rehearsed deployment."""
    times, server, of = simulated_times(record), every.get("server"), quantity(record)
    if not len(times) or server is None:
        return None
    shown = (_SERVER, _STREAM)[: 1 + (len(record["tasks"]["server"]) > 1)]
    rows = [
        {"round": number + 1, "seconds": float(times[number]), "line": line, "value": value}
        for line, values in zip(shown, (server.overall, server.learnt), strict=False)
        for number, value in zip(server.rounds.tolist(), values.tolist(), strict=True)
    ]
    tips = [tip("line:N", "model"), tip("seconds:Q", "seconds", ",.1f"), tip(ROUND, "round", "d"), tip(VALUE, of)]
    base = chart_of("rows").encode(
        x=alt.X("seconds:Q", title="seconds since the beginning", scale=alt.Scale(nice=False, zero=True)),
        y=value_axis(of),
        color=colour("line", shown, (COLOURS[0], COLOURS[2])),
        tooltip=tips,
    )
    return spec(alt.layer(base.mark_line(interpolate="step-after"), _points(base)), rows=rows)


def by_group(record: Record, every: Curves) -> Spec | None:
    """Each group of test samples, round by round, of the model that is chosen: lines, or many groups as a heat map."""
    of, names = quantity(record), record["groups"]
    if not every or len(names) < 2:
        return None
    models = _first(every, max(curve.accuracy.size for curve in every.values()))
    rows = [
        {"model": model, "round": number + 1, "group": name, "value": value}
        for model in models
        for number, values in zip(every[model].rounds.tolist(), every[model].accuracy.tolist(), strict=True)
        for name, value in zip(names, values, strict=True)
        if np.isfinite(value)
    ]
    tips = [tip("group:N", "group"), tip(ROUND, "round", "d"), tip(VALUE, of)]
    base = chart_of("rows").encode(tooltip=tips)
    if len(names) <= _LINES:
        lines = base.encode(x=round_axis(len(record["rounds"])), y=value_axis(of), color=colour("group", names))
        return spec(chosen(alt.layer(lines.mark_line(), _points(lines)), models), rows=rows)
    y = alt.Y("group:N", sort=names, title=None, axis=alt.Axis(labelOverlap=True))
    cells = base.mark_rect().encode(x=alt.X("round:O", title="round", axis=numbers()), y=y, color=heat(of))
    return spec(chosen(cells, models), max(HEIGHT, min(16 * len(names), 480)), rows=rows)


def matrix(record: Record) -> Spec | None:
    """The value on each task after each task, of the model that is chosen."""
    found, of = matrices(record), quantity(record)
    if not found:
        return None
    longest = max(map(len, found.values()))
    models = _first(found, longest**2)
    rows = [
        {"model": model, "after": after + 1, "on": on + 1, "value": value, "groups": task_name(record, model, on)}
        | {"learnt": "learnt" if on <= after else "not learnt yet"}
        for model in models
        for (after, on), value in np.ndenumerate(found[model])
        if np.isfinite(value)
    ]
    tips = [tip("after:O", "after task"), tip("on:O", "on task"), tip("groups:N", "groups"), tip("learnt:N", "is")]
    base = chart_of("rows").encode(
        x=alt.X("on:O", title=f"{of} on task", axis=numbers()),
        y=alt.Y("after:O", title="after task", axis=numbers()),
        tooltip=[*tips, tip(VALUE, of)],
    )
    faint = alt.condition("datum.learnt == 'learnt'", alt.value(1), alt.value(0.7))
    layers = [base.mark_rect().encode(color=heat(of), opacity=faint)]
    if longest <= 12 and of == "accuracy":
        ink = alt.condition("datum.value < 0.6", alt.value("white"), alt.value("black"))
        layers.append(base.mark_text().encode(text=alt.Text(VALUE, format=".2f"), color=ink))
    return spec(chosen(alt.layer(*layers), models), min(420, max(140, 34 * longest)), rows=rows)


def kept_tasks(record: Record) -> Spec | None:
    """Each task right after it was learnt, and at the end: the length between is what was forgotten."""
    found, of = matrices(record, rounds="last"), quantity(record)
    models = _first(found, max(map(len, found.values()), default=1))
    ways = ("after its own rounds", "at the end")
    rows = [
        {
            "model": model,
            "task": task + 1,
            "groups": task_name(record, model, task),
            **dict(zip(ways, both, strict=True)),
        }
        for model in models
        for task, both in enumerate(zip(found[model].diagonal().tolist(), found[model][-1].tolist(), strict=True))
        if np.isfinite(both).all()
    ]
    if not rows:
        return None
    tips = [tip("groups:N", "groups"), *(tip(f"{way}:Q", way) for way in ways)]
    base = chart_of("rows").encode(x=alt.X("task:O", title="task", axis=numbers()), tooltip=tips)
    start, end = (value_axis(of, f"{way}:Q") for way in ways)
    layers = [base.mark_rule(strokeWidth=2, color="#999999").encode(y=start, y2=f"{ways[1]}:Q")]
    for way, axis, shape in zip(ways, (start, end), ("circle", "diamond"), strict=True):
        points = base.transform_calculate(when=f"'{way}'").mark_point(filled=True, size=90, opacity=1, shape=shape)
        layers.append(points.encode(y=axis, color=colour("when", ways)))
    return spec(chosen(alt.layer(*layers), models), rows=rows)


def of_clients(record: Record, ends: Sequence[tuple[str, float]]) -> Spec | None:
    """How each client ended, on all that it has learnt, the worst off first; very many are counted by their values."""
    of = quantity(record)
    rows = [{"client": model_name(model), "value": value} for model, value in ends]
    if len(rows) < 2:
        return None
    bars = chart_of("rows").mark_bar(color=COLOURS[1])
    title = f"{of} at the end, on all that the client has learnt"
    if len(rows) > _BARS:
        bins = alt.X(VALUE, bin=alt.Bin(maxbins=40), title=title)
        return spec(bars.encode(x=bins, y=alt.Y("count()", title="clients"), tooltip=["count()"]), rows=rows)
    x = alt.X(VALUE, title=title, scale=scale_of(of) if of == "accuracy" else alt.Scale(zero=True))
    y = alt.Y("client:N", sort=None, title=None)
    return spec(bars.encode(x=x, y=y, tooltip=[tip("client:N", "client"), tip(VALUE, of)]), 17 * len(rows), rows=rows)


def traffic(record: Record) -> Spec | None:
    """Megabytes of all clients together, up and down, per round."""
    sums = volumes(record) / 1e6
    if not np.any(sums):
        return None
    rounds = [entry["round"] + 1 for entry in record["rounds"]]
    rows = [
        {"round": number, "way": way, "MB": value}
        for way, values in zip(("up", "down"), sums.tolist(), strict=True)
        for number, value in zip(rounds, values, strict=True)
    ]
    bars = chart_of("rows").mark_bar()
    bars = bars.encode(
        x=alt.X("round:O", title="round", axis=numbers()),
        y=alt.Y("MB:Q", title="MB of all clients (1 MB = 10⁶ bytes)"),
        color=colour("way", ("up", "down")),
        tooltip=[tip("round:O", "round"), tip("way:N", "way"), tip("MB:Q", "MB", ",.4f")],
    )
    return spec(bars, 180, rows=rows)


def densities(found: Mapping[str, Any], names: Sequence[str]) -> Spec | None:
    """The density of a reservoir's activations after each experience, over all test samples or a group's."""
    entries, edges = found["experiences"], found["edges"]
    if not entries:
        return None
    order = [names[entry["experience"]] for entry in entries]
    rows = [
        {"model": panel, "experience": name, "activation": (low + high) / 2, "value": value}
        for name, entry in zip(order, entries, strict=True)
        for panel, density in {"all test samples": entry["all"], **entry["groups"]}.items()
        for low, high, value in zip(edges[:-1], edges[1:], density, strict=True)
    ]
    shades = alt.Color("experience:N", sort=order, title=None, scale=alt.Scale(scheme="viridis"))
    lines = chart_of("rows").mark_line(interpolate="step")
    lines = lines.encode(
        x=alt.X("activation:Q", scale=alt.Scale(domain=[-1, 1])),
        y=alt.Y(VALUE, title="density"),
        color=shades,
        tooltip=[tip("experience:N", "after"), tip("activation:Q", "activation"), tip(VALUE, "density")],
    )
    return spec(chosen(lines, list(dict.fromkeys(row["model"] for row in rows)), "test samples "), rows=rows)


def task_name(record: Record, model: str, task: int) -> str:
    """The groups of a model's task."""
    return listed((record["groups"][group] for group in record["tasks"][model][task]), most=12)


def _first(models: Mapping[str, Any], each: int) -> list[str]:
    """As many of the models as a chart has room for, with so many values each."""
    return list(models)[: max(1, _VALUES // max(each, 1))]


def _points(base: alt.Chart) -> alt.Chart:
    made: alt.Chart = base.mark_point(filled=True, size=36, opacity=1)
    return made


def _spread(record: Record, every: Curves) -> Rows:
    """The clients that were tested in each round, on what they had learnt by then."""
    rows, way = [], sign(record)
    for number, of in by_round(every).items():
        values: FloatArray = way * np.array([*of.values()])
        ends = dict(zip(_SPREAD, (way * np.quantile(values, (0, 0.25, 0.75, 1))).tolist(), strict=True))
        who = model_name(min(of, key=lambda client: way * of[client]))
        rows.append({"round": number + 1, "mean": way * values.mean(), "who": who, "clients": len(values), **ends})
    return rows


def _starts(record: Record, model: str) -> Rows:
    """Where a model's experiences begin, and what is learnt from there."""
    starts, last = [], -1
    for entry in record["rounds"]:
        number = entry["experience"].get(model, last)
        if last != number < len(record["tasks"][model]):
            name = task_name(record, model, number)
            starts.append({"round": entry["round"] + 0.5, "experience": number + 1, "groups": name})
            last = number
    return starts


def _experiences(x: alt.X) -> tuple[alt.Chart, alt.Chart]:
    """A line where each experience begins, and its number beside it."""
    base = chart_of("starts").encode(x=x, tooltip=[tip("experience:O", "experience"), tip("groups:N", "learns")])
    names = base.mark_text(align="left", dx=4, baseline="top", color="#888888")
    return base.mark_rule(strokeDash=[4, 3], color="#999999"), names.encode(y=alt.value(2), text="experience:O")
