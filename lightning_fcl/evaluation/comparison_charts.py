"""Charts of several runs side by side, for a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import altair as alt
import numpy as np

from lightning_fcl.evaluation.against import NEAR, stands, told
from lightning_fcl.evaluation.chart_parts import (
    HEIGHT,
    ROUND,
    VALUE,
    Record,
    Rows,
    Spec,
    by_round,
    chart_of,
    colour,
    round_axis,
    scale_of,
    spec,
    tip,
    value_axis,
)
from lightning_fcl.evaluation.continual import FloatArray
from lightning_fcl.evaluation.headline import Headline, ends_of_clients
from lightning_fcl.evaluation.metrics import curves, quantity
from lightning_fcl.evaluation.plots import COLOURS
from lightning_fcl.evaluation.table import Table, metric_title

_VIEWS = ("server, whole test set", "clients, on what each has learnt")
_KINDS = {"near": "within .05", "spread": "inside the spread", "outside": "outside"}
_PALE = "#b8bfc8"

Groups: TypeAlias = Mapping[str, Sequence[Mapping[str, Any]]]
"""Contents of ``results.json`` of the seeds of each row, by the name to show."""

Headlines: TypeAlias = Mapping[str, Sequence[Mapping[str, Headline]]]
"""The headlines of each seed, by their names."""


def rounds(groups: Groups) -> Spec | None:
    """The server or the clients' mean, round by round: a line per row, the one that is chosen in front."""
    of = quantity_of(groups)
    rows: Rows = []
    for label, runs in groups.items():
        for view, seeds in zip(_VIEWS, zip(*(_views(run["record"]) for run in runs), strict=True), strict=True):
            rows += [{"row": label, "view": view, **one} for one in _over_seeds(seeds)]
    longest = max(len(run["record"]["rounds"]) for runs in groups.values() for run in runs)
    if not rows or longest < 2:
        return None
    there = [view for view in _VIEWS if any(row["view"] == view for row in rows)]
    choice = alt.param(name="view", value=there[0], bind=alt.binding_select(options=there, name=f"{of} of the "))
    base = chart_of("rows").transform_filter("datum.view == view").encode(x=round_axis(longest))
    tips = [tip("row:N", "row"), tip(ROUND, "round", "d"), tip(VALUE, "mean"), tip("std:Q", "std")]
    lines = base.mark_line(point=True).encode(y=value_axis(of), tooltip=[*tips, tip("seeds:Q", "seeds", "d")])
    if len(groups) <= len(COLOURS):
        look = colour("row", [*groups])
        band = base.mark_area(opacity=0.12).encode(y=value_axis(of, "low:Q"), y2="high:Q", color=look)
        return spec(alt.layer(band, lines.encode(color=look)).add_params(choice), HEIGHT + 60, rows=rows)
    # More lines than colours: all are pale but one.
    row = alt.param(name="row", value=next(iter(groups)), bind=alt.binding_select(options=[*groups], name="in front "))
    pale = lines.encode(detail="row:N", color=alt.value(_PALE))
    front = lines.transform_filter("datum.row == row").encode(color=alt.value(COLOURS[5]))
    return spec(alt.layer(pale, front).add_params(choice, row), HEIGHT + 60, rows=rows)


def clients(groups: Groups) -> Spec | None:
    """How each client ended: a tick for every client and seed, and the mean of each row."""
    of = quantity_of(groups)
    rows = [
        {"row": label, "client": client, "seed": run["seed"], "value": value}
        for label, runs in groups.items()
        for run in runs
        for client, value in ends_of_clients(run["record"])
    ]
    if not rows:
        return None
    base = chart_of("rows").encode(y=alt.Y("row:N", sort=[*groups], title=None))
    ticks = base.mark_tick(thickness=2, size=16, opacity=0.55, color=COLOURS[1]).encode(
        x=alt.X(VALUE, title=of, scale=scale_of(of)),
        tooltip=[tip("row:N", "row"), tip("client:N", "client"), tip("seed:O", "seed"), tip(VALUE, of)],
    )
    means = base.mark_point(shape="diamond", filled=True, size=70, color=COLOURS[0], opacity=1)
    means = means.encode(x="mean(value):Q", tooltip=[tip("row:N", "row"), tip("mean(value):Q", "mean")])
    return spec(alt.layer(ticks, means), 24 * len({row["row"] for row in rows}) + 10, rows=rows)


def kept(of: str, found: Headlines) -> Spec | None:
    """Average accuracy, or another quantity, against forgetting, a point for each row: its mean over the seeds."""
    rows: Rows = []
    wanted = (f"average {of}", "forgetting")
    for label, runs in found.items():
        if both := [[one[name].value for name in wanted] for one in runs if {*wanted} <= {*one}]:
            value, lost = np.mean(both, axis=0).tolist()
            rows.append({"row": label, "value": value, "forgetting": lost, "seeds": len(both)})
    if len(rows) < 2:
        return None
    middle = (min(row["value"] for row in rows) + max(row["value"] for row in rows)) / 2
    base = chart_of("rows").encode(
        x=alt.X(VALUE, title=f"average {of}", scale=alt.Scale(zero=False, padding=20)),
        y=alt.Y("forgetting:Q", scale=alt.Scale(zero=False, padding=20)),
        tooltip=[tip("row:N", "row"), tip(VALUE, of), tip("forgetting:Q", "forgetting"), tip("seeds:Q", "seeds", "d")],
    )
    layers = [base.mark_point(filled=True, size=80, color=COLOURS[0], opacity=1)]
    left = base.transform_filter(f"datum.value <= {middle}").mark_text(align="left", dx=8, color="#888888")
    right = base.transform_filter(f"datum.value > {middle}").mark_text(align="right", dx=-8, color="#888888")
    return spec(alt.layer(*layers, left.encode(text="row:N"), right.encode(text="row:N")), 320, rows=rows)


def against(table: Table) -> Spec | None:
    """Each mean against the paper's number, with two standard deviations over the seeds."""
    rows: Rows = []
    for row, name, cell in told(table):
        if cell.mean is not None and cell.paper is not None:
            two, kind = 2 * (cell.std or 0.0), _KINDS[stands(cell)]
            numbers = {"paper": cell.paper, "ours": cell.mean, "low": cell.mean - two, "high": cell.mean + two}
            rows.append({"row": row, "metric": metric_title(name), "stands": kind, **numbers})
    if not rows:
        return None
    every = [float(row[name]) for row in rows for name in ("paper", "ours")]
    low, high = min(every) - NEAR, max(every) + NEAR
    scale = alt.Scale(domain=[low, high], nice=False)
    ends = [{"paper": end, "ours": end, "low": end - NEAR, "high": end + NEAR} for end in (low, high)]
    x, y = alt.X("paper:Q", scale=scale, title="the paper's number"), alt.Y("ours:Q", scale=scale, title="ours")
    lowest, kinds = alt.Y("low:Q", scale=scale, title="ours"), [*_KINDS.values()]
    line = chart_of("ends").encode(x=x)
    band = line.mark_area(color="#999999", opacity=0.25, clip=True).encode(y=lowest, y2="high:Q")
    tips = [tip("row:N", "row"), tip("metric:N", "metric"), tip("ours:Q", "ours"), tip("paper:Q", "paper")]
    points = chart_of("rows").encode(
        x=x, y=y, color=colour("stands", kinds, [COLOURS[0], "#777777", COLOURS[5]]), tooltip=tips
    )
    bars = points.mark_rule(opacity=0.5, clip=True).encode(y=lowest, y2="high:Q")
    shapes = alt.Scale(domain=kinds, range=["circle", "square", "triangle-up"])
    marks = points.mark_point(filled=True, size=60, opacity=0.9).encode(
        shape=alt.Shape("stands:N", scale=shapes, title=None)
    )
    return spec(alt.layer(band, line.mark_line(color="#777777").encode(y=y), bars, marks), 420, rows=rows, ends=ends)


def quantity_of(groups: Groups) -> str:
    """What the runs are measured by; that of the first, where they differ."""
    return next(quantity(run["record"]) for runs in groups.values() for run in runs)


def _views(record: Record) -> tuple[dict[int, float], dict[int, float]]:
    """The server in each round, and the mean of the clients that were tested in it."""
    every = curves(record)
    server = every.get("server")
    whole = {} if server is None else dict(zip(server.rounds.tolist(), server.overall.tolist(), strict=True))
    return whole, {number: float(np.mean([*of.values()])) for number, of in by_round(every).items()}


def _over_seeds(seeds: Sequence[Mapping[int, float]]) -> Rows:
    rows = []
    for number in sorted({number for seed in seeds for number in seed}):
        values: FloatArray = np.array([seed[number] for seed in seeds if np.isfinite(seed.get(number, np.nan))])
        if len(values):
            mean, std = values.mean(), values.std(ddof=1) if len(values) > 1 else 0.0
            ends = {"low": mean - std, "high": mean + std}
            rows.append({"round": number + 1, "value": mean, "std": std, "seeds": len(values), **ends})
    return rows
