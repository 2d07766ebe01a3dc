"""Ours against a paper's numbers: which are near, and what the chart shows."""

import pytest

from lightning_fcl.evaluation.comparison import paper_comparison_chart
from lightning_fcl.evaluation.table import Cell, Table, VerdictCounts

ROWS = {
    "one": {
        "accuracy/server": Cell({0: 0.50, 1: 0.52}, 0.56),  # as printed, .510 and .560: near
        "loss/server": Cell({0: 0.50, 1: 0.60}, 0.65),  # .1 from the mean, the deviation is .071: in the spread
        "bytes/server": Cell({0: 1.0}),
    },
    "two": {
        "accuracy/server": Cell({0: 0.50}, 0.8),  # one seed has no spread
        "loss/server": Cell({0: 0.1, 1: 0.102}, 0.5),
        "gain/server": Cell({}, 0.5),  # not measured
    },
}


def table(rows=ROWS, scale="paper"):
    return Table("toy", scale, "", {}, "", 1.0, rows)


def test_numbers_are_near_in_the_spread_or_outside():
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
def test_the_verdict(counts, word):
    assert VerdictCounts(*counts).verdict == word


def test_the_chart_has_each_number_and_none_is_of_nothing():
    rows = paper_comparison_chart(table())["datasets"]["rows"]
    points = sorted((row["paper"], row["ours"]) for row in rows)
    assert points == [pytest.approx(point) for point in ((0.5, 0.101), (0.56, 0.51), (0.65, 0.55), (0.8, 0.5))]
    assert [row["stands"] for row in rows] == ["within .05", "inside the spread", "outside", "outside"]
    assert paper_comparison_chart(table({"one": {"accuracy/server": Cell({0: 0.5})}})) is None
