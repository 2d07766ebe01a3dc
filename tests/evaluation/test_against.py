"""Tests of the comparison of results with a paper: agreement of each value, verdict on a table, and the chart."""

import pytest

from lightning_fcl.evaluation.comparison import paper_comparison_chart
from lightning_fcl.evaluation.table import Cell, Table, VerdictCounts

ROWS = {
    "one": {
        # The values 0.510 and 0.560 differ by 0.05 after rounding, which counts as near.
        "accuracy/server": Cell({0: 0.50, 1: 0.52}, 0.56),
        # The difference from the mean, 0.1, is within 2 standard deviations. The standard deviation is 0.071.
        "loss/server": Cell({0: 0.50, 1: 0.60}, 0.65),
        "bytes/server": Cell({0: 1.0}),
    },
    "two": {
        # A single seed has no standard deviation, so the value counts as outside.
        "accuracy/server": Cell({0: 0.50}, 0.8),
        "loss/server": Cell({0: 0.1, 1: 0.102}, 0.5),
        # This metric was not measured.
        "gain/server": Cell({}, 0.5),
    },
}


def table(rows=ROWS, scale="paper"):
    return Table("toy", scale, "", {}, "", 1.0, rows)


def test_verdict_counts_near_within_spread_and_outside():
    assert table().verdict_counts == VerdictCounts(num_near=1, num_within_spread=1, num_outside=3)
    assert table({"one": {"a/server": Cell({0: 0.4504}, 0.5)}}).verdict_counts.num_near == 1
    assert table({"one": {"a/server": Cell({0: 0.4486}, 0.5)}}).verdict_counts.num_outside == 1


@pytest.mark.parametrize(
    ("counts", "word"),
    [
        ((9, 0, 1), "reproduced"),
        ((5, 0, 5), "partly reproduced"),
        ((4, 0, 5), "not reproduced"),
        ((0,) * 3, "not compared"),
    ],
)
def test_verdict_depends_on_share_outside(counts, word):
    assert VerdictCounts(*counts).verdict == word


def test_paper_comparison_chart_has_each_measured_value():
    rows = paper_comparison_chart(table())["datasets"]["rows"]
    points = sorted((row["paper"], row["ours"]) for row in rows)
    assert points == [pytest.approx(point) for point in ((0.5, 0.101), (0.56, 0.51), (0.65, 0.55), (0.8, 0.5))]
    agreement = ["within 0.05", "within 2 standard deviations", "outside", "outside"]
    assert [row["agreement"] for row in rows] == agreement
    assert paper_comparison_chart(table({"one": {"accuracy/server": Cell({0: 0.5})}})) is None
