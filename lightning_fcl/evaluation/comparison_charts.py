"""Charts of several runs side by side, and of ours against a paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import altair as alt
import numpy as np

from lightning_fcl.evaluation import charts
from lightning_fcl.evaluation.charts import COLOURS, Drawn, Points, Spec, on_page
from lightning_fcl.evaluation.continual import FloatArray
from lightning_fcl.evaluation.headline import Headline, ends_of_clients
from lightning_fcl.evaluation.metrics import curves
from lightning_fcl.evaluation.table import NEAR, Table, metric_title

_VIEWS = ("server, whole test set", "clients, on what each has learnt")
_KINDS = {"near": "within .05", "spread": "inside the spread", "outside": "outside"}

RunsByName: TypeAlias = Mapping[str, Sequence[Mapping[str, Any]]]
"""Contents of ``results.json`` of the seeds of each row, by the name to show."""


def rounds(groups: RunsByName, what: str) -> Spec | None:
    """The server or the clients' mean, round by round: a line per row, the one that is chosen in front."""
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
    choice = alt.param(name="view", value=views[0], bind=alt.binding_select(options=views, name=f"{what} of the "))
    base = charts.chart_of("rows").transform_filter("datum.view == view").encode(x=charts.round_axis(longest))
    base = base.encode(tooltip=charts.tips(line="row", round="", value="mean", std="", seeds=""))
    if len(groups) <= len(COLOURS):
        layers = charts.bands(base, [*groups], what, charts.quantity_scale(what))
        return on_page(alt.layer(*layers).add_params(choice), 320, rows=rows)
    # More lines than colours: all are pale but one.
    row = alt.param(name="row", value=next(iter(groups)), bind=alt.binding_select(options=[*groups], name="in front "))
    lines = base.mark_line(point=True).encode(y=charts.value_axis(what))
    pale = lines.encode(detail="line:N", color=alt.value("#b8bfc8"))
    front = lines.transform_filter("datum.line == row").encode(color=alt.value(COLOURS[5]))
    return on_page(alt.layer(pale, front).add_params(choice, row), 320, rows=rows)


def clients(groups: RunsByName, what: str) -> Spec | None:
    """How each client ended: a tick for every client and seed, and the mean of each row."""
    rows = [
        {"row": label, "client": client, "seed": run["seed"], "value": value}
        for label, runs in groups.items()
        for run in runs
        for client, value in ends_of_clients(run["record"])
    ]
    if not rows:
        return None
    base = charts.chart_of("rows").encode(y=alt.Y("row:N", sort=[*groups], title=None))
    ticks = base.mark_tick(thickness=2, size=16, opacity=0.55, color=COLOURS[1])
    ticks = ticks.encode(x=alt.X("value:Q", title=what, scale=charts.quantity_scale(what)))
    ticks = ticks.encode(tooltip=charts.tips(row="", client="", seed="", value=what))
    means = base.mark_point(shape="diamond", filled=True, size=70, color=COLOURS[0], opacity=1)
    means = means.encode(x="mean(value):Q", tooltip=["row:N", alt.Tooltip("mean(value):Q", title="mean", format=".3f")])
    return on_page(alt.layer(ticks, means), 24 * len({row["row"] for row in rows}) + 10, rows=rows)


def kept(found: Mapping[str, Sequence[Mapping[str, Headline]]], what: str) -> Spec | None:
    """Average accuracy, or another quantity, against forgetting, a point for each row: its mean over the seeds."""
    rows: Points = []
    wanted = (f"average {what}", "forgetting")
    for label, runs in found.items():
        if both := [[one[name].value for name in wanted] for one in runs if {*wanted} <= {*one}]:
            value, lost = np.mean(both, axis=0).tolist()
            rows.append({"row": label, "value": value, "forgetting": lost, "seeds": len(both)})
    if len(rows) < 2:
        return None
    middle = (min(row["value"] for row in rows) + max(row["value"] for row in rows)) / 2
    base = charts.chart_of("rows").encode(
        x=alt.X("value:Q", title=wanted[0], scale=alt.Scale(zero=False, padding=20)),
        y=alt.Y("forgetting:Q", scale=alt.Scale(zero=False, padding=20)),
        tooltip=charts.tips(row="", value=what, forgetting="", seeds=""),
    )
    points, names = base.mark_point(filled=True, size=80, color=COLOURS[0], opacity=1), base.encode(text="row:N")
    left = names.transform_filter(f"datum.value <= {middle}").mark_text(align="left", dx=8, color="#888888")
    right = names.transform_filter(f"datum.value > {middle}").mark_text(align="right", dx=-8, color="#888888")
    return on_page(alt.layer(points, left, right), 320, rows=rows)


def against(table: Table) -> Spec | None:
    """Each mean against the paper's number, with two standard deviations over the seeds."""
    if not (rows := compared(table)):
        return None
    kinds = [*_KINDS.values()]
    look = charts.colour("stands", kinds, (COLOURS[0], COLOURS[6], COLOURS[5])), charts.shape("stands", kinds)
    return on_page(scatter(rows, "", *look), 420, rows=rows)


def compared(table: Table) -> Points:
    """Every number that the paper tells and ours were measured of."""
    points: Points = []
    for row, name, cell in table.told:
        if cell.mean is not None and cell.paper is not None:
            two, kind = 2 * (cell.std or 0.0), _KINDS[cell.stands]
            point = {"row": row, "metric": metric_title(name), "stands": kind, "off": cell.off}
            points.append(
                point | {"paper": cell.paper, "ours": cell.mean, "low": cell.mean - two, "high": cell.mean + two}
            )
    return points


def scatter(rows: Points, scale: str, look: alt.Color, shape: alt.Shape) -> Drawn:
    """The points, the line on which ours is the paper's, and the band of what is near."""
    every = [row[name] for row in rows for name in ("paper", "ours")]
    low, high = min(every) - NEAR, max(every) + NEAR
    axis = alt.Scale(domain=[low, high], nice=False)
    x = alt.X("paper:Q", scale=axis, title=f"the paper's number{scale}")
    ours = "ours: mean, and two standard deviations over the seeds"
    y, lowest = alt.Y("ours:Q", scale=axis, title=ours), alt.Y("low:Q", scale=axis, title=ours)
    ends = [{"paper": end, "ours": end, "low": end - NEAR, "high": end + NEAR} for end in (low, high)]
    line = alt.Chart(alt.InlineData(ends)).encode(x=x)
    points = charts.chart_of("rows").encode(x=x, color=look, tooltip=charts.tips(row="", metric="", ours="", paper=""))
    return alt.layer(
        line.mark_area(color="#999999", opacity=0.25, clip=True).encode(y=lowest, y2="high:Q"),
        line.mark_line(color="#777777").encode(y=y),
        points.mark_rule(opacity=0.5, clip=True).encode(y=lowest, y2="high:Q"),
        points.mark_point(filled=True, size=60, opacity=0.9).encode(y=y, shape=shape),
    )


def _views(record: Mapping[str, Any]) -> tuple[FloatArray, FloatArray]:
    """The server in each round, and the mean of the clients that were tested in it; NaN in others."""
    whole, of_clients = np.full((2, 1 + max((entry["round"] for entry in record["rounds"]), default=-1)), np.nan)
    every = curves(record)
    if (server := every.get("server")) is not None:
        whole[server.rounds] = server.overall
    for number, of in charts.by_round(every).items():
        of_clients[number] = np.mean([*of.values()])
    return whole, of_clients
