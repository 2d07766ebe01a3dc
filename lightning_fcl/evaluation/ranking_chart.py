"""Critical-difference diagram: average ranks of methods, and bars that connect methods that are not separated."""

from __future__ import annotations

import math

import altair as alt

from lightning_fcl.evaluation import charts
from lightning_fcl.evaluation.charts import Chart, Points, Spec
from lightning_fcl.evaluation.labels import LINE_HEIGHT
from lightning_fcl.evaluation.ranking import Ranking

# Width of the axis of ranks, and of the labels at each side, in pixels.
_WIDTH, _MARGIN = 520, 30
_BAR_STEP, _LABEL_STEP = 9, LINE_HEIGHT + 6
_DARK, _LIGHT = "#333333", "#999999"


def ranking_chart(ranking: Ranking) -> Spec:
    """Return the critical-difference diagram (Demsar, 2006) of a ranking.

    The axis has the best rank at the left. Labels of the better half of the methods are left of the axis, and all other
    labels are right of the axis. A thick bar connects methods whose ranks differ by less than the critical distance.
    """
    rows, bars = _label_points(ranking), _bar_points(ranking)
    height = max(float(row["height"]) for row in rows) + _LABEL_STEP
    last = len(ranking.ranks)
    first_rank = 1.0
    distance = [{"start": first_rank, "end": first_rank + ranking.critical_distance, "height": -34.0}]
    ticks = [{"rank": float(rank), "height": 0.0} for rank in range(1, last + 1)]
    # The horizontal axis is wider than the ranks, so that the arms of the labels have space at both sides.
    scale = alt.Scale(domain=[_rank_at(-_MARGIN, last), _rank_at(_WIDTH + _MARGIN, last)], nice=False, zero=False)
    x = alt.X("rank:Q", scale=scale, axis=None)
    y_scale = alt.Scale(domain=[height, -52], nice=False, zero=False)
    y = alt.Y("height:Q", scale=y_scale, axis=None)
    axis = (
        charts.get_chart("axis")
        .mark_rule(color=_DARK)
        .encode(x=alt.X("start:Q", scale=scale, axis=None), x2="end", y=y)
    )
    tick_marks = charts.get_chart("ticks").mark_tick(color=_DARK, thickness=1, size=8).encode(x=x, y=y)
    numbers = (
        charts.get_chart("ticks").mark_text(dy=-12, color=_DARK).encode(x=x, y=y, text=alt.Text("rank:Q", format="d"))
    )
    span = charts.get_chart("distance").encode(x=alt.X("start:Q", scale=scale, axis=None), y=y)
    ruler = span.mark_rule(color=_DARK, strokeWidth=2).encode(x2="end")
    ruler_text = span.mark_text(align="left", dy=-9, color=_DARK).encode(
        text=alt.value(f"critical distance {ranking.critical_distance:.2f}")
    )
    labels = charts.get_chart("rows")
    stems = labels.mark_rule(color=_LIGHT).encode(x=x, y=alt.Y("start:Q", scale=y_scale, axis=None), y2="height")
    arms = labels.mark_rule(color=_LIGHT).encode(x=x, x2="end", y=y)
    dots = labels.mark_point(filled=True, size=36, opacity=1, color=charts.COLORS[0]).encode(
        x=x, y=alt.Y("start:Q", scale=y_scale, axis=None)
    )
    texts = labels.encode(x=alt.X("end:Q", scale=scale, axis=None), y=y, text="label:N")
    left_labels = texts.transform_filter("datum.side == 'left'").mark_text(align="right", dx=-4, color=_DARK)
    right_labels = texts.transform_filter("datum.side == 'right'").mark_text(align="left", dx=4, color=_DARK)
    groups = (
        charts.get_chart("bars")
        .mark_rule(strokeWidth=4, strokeCap="round", color=charts.COLORS[5])
        .encode(x=alt.X("start:Q", scale=scale, axis=None), x2="end", y=y)
    )
    layers: Chart = alt.layer(
        stems, arms, axis, tick_marks, numbers, ruler, ruler_text, groups, dots, left_labels, right_labels
    )
    title = f"Average rank of the last accuracy over {ranking.num_protocols} protocols"
    figure = layers.properties(
        width=_WIDTH + 2 * _MARGIN, height=int(height + 52), title=title, view=alt.ViewConfig(stroke=None)
    )
    axis_points: Points = [{"start": 1.0, "end": float(last), "height": 0.0}]
    return charts.spec(figure, rows=rows, bars=bars, axis=axis_points, ticks=ticks, distance=distance)


def _rank_at(pixel: float, last: int) -> float:
    """Return the rank at a number of pixels from the start of the axis."""
    return 1 + pixel * (last - 1) / _WIDTH


def _label_points(ranking: Ranking) -> Points:
    """Return a point for each method. Labels have different heights, so that no two labels overlap."""
    last, below = len(ranking.ranks), 14.0 + _BAR_STEP * len(ranking.groups)
    num_left = math.ceil(last / 2)
    points: Points = []
    for number, (method, rank) in enumerate(ranking.ranks.items()):
        is_left = number < num_left
        line = number if is_left else last - 1 - number
        end = _rank_at(-_MARGIN / 2 if is_left else _WIDTH + _MARGIN / 2, last)
        points.append(
            {
                "method": method,
                "label": f"{method} {rank:.2f}",
                "rank": rank,
                "start": 0.0,
                "height": below + _LABEL_STEP * line,
                "end": end,
                "side": "left" if is_left else "right",
            }
        )
    return points


def _bar_points(ranking: Ranking) -> Points:
    """Return a bar for each group, from the first to the last rank of the group."""
    return [
        {
            "start": ranking.ranks[group[0]],
            "end": ranking.ranks[group[-1]],
            "height": float(10 + _BAR_STEP * number),
        }
        for number, group in enumerate(ranking.groups)
    ]
