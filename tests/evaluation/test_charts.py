"""Tests of lines and labels of charts: every measured value is in its line, and no two labels overlap."""

import re

import numpy as np
import pytest
import vl_convert
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fcl.evaluation.charts import (
    COLORS,
    get_chart,
    line_widths,
    over_seeds,
    quantity_scale,
    round_axis,
    small_multiples,
    spec,
)
from lightning_fcl.evaluation.comparison import final_metrics_chart, rounds_chart
from lightning_fcl.evaluation.curves import curves
from lightning_fcl.evaluation.labels import LINE_HEIGHT, PointLabels, axis_range, chart_height, shorten_names
from lightning_fcl.evaluation.record import ACCURACY
from lightning_fcl.evaluation.report import overview_chart
from lightning_fcl.evaluation.summary import SummaryMetric

VALUE = st.one_of(st.none(), st.integers(0, 1000))
RUNS = st.lists(st.lists(VALUE, min_size=1, max_size=12), min_size=1, max_size=len(COLORS))


def make_run(correct):
    """Return a run whose server has a number of correct predictions in each round. None is a round without a test."""
    rounds = [
        {
            "round": number,
            "experience": {} if value is None else {"server": number // 3},
            "correct": {} if value is None else {"server": [value]},
            "upload_bytes": {},
            "download_bytes": {},
        }
        for number, value in enumerate(correct)
    ]
    record = {"groups": ["all"], "totals": [1000], "tasks": {"server": [[0]] * 4}, "rounds": rounds}
    return {"record": record, "metrics": {}}


def drawn_lines(chart):
    """Return the corners of each line of a chart of 900 pixels, in pixels. The first corner has the command ``M``."""
    svg = vl_convert.vegalite_to_svg(chart | {"width": 900, "autosize": "pad"})
    groups = re.findall(r'<g class="mark-line[^>]*>(.*?)</g>', svg, re.DOTALL)
    paths = [path for group in groups for path in re.findall(r'<path[^>]* d="([^"]+)"', group)]
    return [[(kind, *map(float, at.split(","))) for kind, at in re.findall("([ML])([^MLZ]+)", path)] for path in paths]


@settings(max_examples=25, deadline=None)
@given(RUNS)
def test_rounds_chart_draws_each_segment_between_measured_values(runs):
    groups = {f"run {number}": [make_run(correct)] for number, correct in enumerate(runs)}
    chart = rounds_chart(groups, ACCURACY)
    measured = [
        [(number, value / 1000) for number, value in enumerate(correct) if value is not None] for correct in runs
    ]
    longest = max(map(len, runs))
    if longest < 2 or not any(measured):
        assert chart is None
        return
    expected = [
        [(900 * (number + 0.5) / longest, 320 * (1 - value)) for number, value in points]
        for points in measured
        if points
    ]
    lines = drawn_lines(chart)
    assert [[kind for kind, *_ in line] for line in lines] == [["M"] + ["L"] * (len(line) - 1) for line in expected]
    for line, points in zip(lines, expected, strict=True):
        np.testing.assert_allclose([at for _, *at in line], points, atol=0.2)


def test_overview_chart_has_no_point_for_a_round_without_value():
    rounds = [
        {"round": number, "experience": {"server": 0}, "values": {"server": {"MSE": {"0": value}}}}
        for number, value in enumerate([3.0, None, 2.0, 1.0])
    ]
    record = {"groups": ["all"], "totals": [5], "tasks": {"server": [[0]]}, "rounds": rounds}
    record["measures"] = [{"name": "MSE", "higher_is_better": False}]
    chart = overview_chart(record, curves(record))
    assert [(row["round"], row["value"]) for row in chart["datasets"]["lines"]] == [(1, 3.0), (3, 2.0), (4, 1.0)]
    (line,) = drawn_lines(chart)
    assert [kind for kind, *_ in line] == ["M", "L", "L"]


@given(st.lists(st.lists(st.sampled_from([0.0, 0.25, 0.2501, 1.0]), min_size=4, max_size=4), min_size=1, max_size=7))
def test_line_widths_covered_line_is_wider(curves_by_line):
    names = [str(number) for number in range(len(curves_by_line))]
    rows = [
        {"line": name, "round": position, "value": value}
        for name, curve in zip(names, curves_by_line, strict=True)
        for position, value in enumerate(curve)
    ]
    widths = line_widths(names, rows)
    for first in range(len(names)):
        for later in range(first + 1, len(names)):
            near = np.isclose(curves_by_line[first], curves_by_line[later], atol=2e-4, rtol=0)
            if np.any(near[1:] & near[:-1]):
                assert widths[first] >= widths[later] + 2
    assert widths[-1] == 2


@pytest.mark.parametrize("number", [2, len(COLORS), len(COLORS) + 1])
def test_small_multiples_equal_lines_have_different_widths_and_one_legend(number):
    names = [f"line {position}" for position in range(number)]
    rows = [{"line": name, "round": position, "value": 0.5} for name in names for position in (1, 2)]
    base = get_chart("rows").encode(x=round_axis(2))
    layers = small_multiples(base, names, "accuracy", quantity_scale(ACCURACY), rows)
    chart = spec(layers[1] + layers[2], rows=rows)
    svg = vl_convert.vegalite_to_svg(chart)
    found = [int(width) for width in re.findall(r'aria-roledescription="line mark"[^>]*stroke-width="(\d+)"', svg)]
    assert found == [2 * (number - position) for position in range(number)]
    assert all(svg.count(f">{name}<") == 1 for name in names)


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=9), st.integers(0, 2))
def test_over_seeds_std_equals_numpy(values, missing):
    (point,) = over_seeds([[value] for value in values] + [[np.nan]] * missing)
    assert point["value"] == pytest.approx(np.mean(values), abs=1e-9) and point["seeds"] == len(values)
    # A single seed has no standard deviation.
    assert point["std"] == (pytest.approx(np.std(values, ddof=1), abs=1e-9) if len(values) > 1 else "-")


@settings(max_examples=60)
@given(st.data(), st.sampled_from([2, 6, 12, 40]), st.sampled_from([1e-9, 1e-3, 1.0]), st.booleans())
def test_point_labels_of_nearly_equal_values_do_not_overlap(data, number, spread, log):
    position = st.floats(0.5, 0.5 + spread).map(float)
    length = st.integers(1, 60)
    rows = [
        {"row": "n" * data.draw(length), "value": data.draw(position), "forgetting": data.draw(position)}
        for _ in range(number)
    ]
    x_range, y_range = (axis_range([row[field] for row in rows]) for field in ("value", "forgetting"))
    height = chart_height(number, 200)
    labels = PointLabels("row", "value", "forgetting", x_range, y_range, 240, height, log)
    labels.set_heights(rows)
    for width in (240, 900):
        boxes = []
        for row in rows:
            start, end, at = (np.log(x) if log else x for x in (*x_range, row["value"]))
            share, letters = (at - start) / (end - start), 8 + 6.5 * len(row["row"])
            edge = share * width
            left, right = (edge, edge + letters) if share <= 0.5 else (edge - letters, edge)
            boxes.append((left, right, row[labels.field]))
        assert all(-1e-6 <= at <= height + 1e-6 for *_, at in boxes)
        for position_of_first, (left, right, at) in enumerate(boxes):
            for other_left, other_right, other_at in boxes[:position_of_first]:
                overlap = min(right, other_right) - max(left, other_left)
                assert overlap <= 1e-6 or abs(at - other_at) >= LINE_HEIGHT - 1e-6


@pytest.mark.parametrize("number", [2, 6, 12])
@pytest.mark.parametrize("spread", [0, 1e-5])
def test_final_metrics_chart_names_each_point_once(number, spread):
    rng = np.random.default_rng(0)
    metrics = {}
    for position in range(number):
        value, lost = (0.7 + spread * rng.random(2)).tolist()
        pair = [SummaryMetric("average accuracy", value, ""), SummaryMetric("forgetting", lost, "")]
        metrics[f"run with a long name {position}"] = [{one.name: one for one in pair}]
    svg = vl_convert.vegalite_to_svg(final_metrics_chart(metrics, ACCURACY) | {"width": 300})
    places = re.findall(r'transform="translate\(([-\d.]+),([-\d.]+)\)"[^>]*>(run with a long name \d+)<', svg)
    assert sorted(name for *_, name in places) == sorted(metrics)
    looks = re.findall(r'aria-roledescription="point"[^>]*? d="([^"]*)"[^>]*? fill="([^"]*)"', svg)
    assert len({*looks}) == number


@given(
    st.lists(st.text("ab-_/ 1=", min_size=1, max_size=50), min_size=1, max_size=8, unique=True),
    st.text("ab-/", max_size=40),
)
def test_shorten_names_returns_distinct_names(ends, prefix):
    names = [prefix + end for end in ends]
    shortened = shorten_names(names)
    assert [*shortened] == names and len({*shortened.values()}) == len(names)
    assert all(len(text) <= len(name) + 1 for name, text in shortened.items())
    if max(map(len, names)) <= 30:
        assert [*shortened.values()] == names


def test_shorten_names_long_names_keep_the_part_in_which_they_differ():
    names = [f"grid-over-many-hyperparameters-of-a-run-lr-{rate}" for rate in ("0.1", "0.01")]
    assert [*shorten_names(names).values()] == ["…lr-0.1", "…lr-0.01"]
    assert [*shorten_names(["a" * 40 + "b" * 40]).values()] == ["a" * 14 + "…" + "b" * 14]
