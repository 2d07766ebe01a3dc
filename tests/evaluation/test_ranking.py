"""Tests of average ranks, Friedman's test and critical distances against hand computations and published values."""

import itertools
import math

import numpy as np
import pytest
import vl_convert
from raising import raises
from scipy import stats

from lightning_fcl.errors import InvalidValueError, UnknownNameError
from lightning_fcl.evaluation.labels import LINE_HEIGHT
from lightning_fcl.evaluation.ranking import (
    Ranking,
    RankingPlan,
    average_ranks,
    critical_distance,
    rank_methods,
    ranking_table,
    read_ranking,
)
from lightning_fcl.evaluation.ranking_chart import ranking_chart
from lightning_fcl.evaluation.table import Cell, Table

METHODS, PROTOCOLS = ("a", "b", "c", "d"), tuple(f"P{number}" for number in range(6))


def make_table(values):
    rows = {
        f"{protocol} {method}": {"last_accuracy": Cell({0: value - 0.01, 1: value + 0.01})}
        for protocol, of in zip(PROTOCOLS, values, strict=False)
        for method, value in zip(METHODS, of, strict=True)
    }
    return Table("leaderboard", "paper", "", {}, "", 0.0, rows)


def ranks_by_hand(values):
    """Return ranks by comparing all pairs: an equal value counts half."""
    return [[1 + sum((other > one) + 0.5 * (other == one) for other in of) - 0.5 for one in of] for of in values]


def test_average_ranks_share_ranks_of_ties():
    values = [[0.9, 0.9, 0.7, 0.9], [0.1, 0.2, 0.3, 0.4], [0.5, 0.5, 0.6, 0.6]]
    # Ranks by hand: 2 2 4 2, then 4 3 2 1, then 3.5 3.5 1.5 1.5.
    assert average_ranks(values).tolist() == pytest.approx([9.5 / 3, 8.5 / 3, 7.5 / 3, 4.5 / 3])
    assert np.mean(ranks_by_hand(values), axis=0) == pytest.approx(average_ranks(values))


@pytest.mark.parametrize(
    ("num_methods", "quantile"),
    [(2, 1.960), (3, 2.343), (4, 2.569), (5, 2.728), (6, 2.850), (7, 2.949), (8, 3.031), (9, 3.102), (10, 3.164)],
)
def test_critical_distance_equals_table_of_demsar(num_methods, quantile):
    for num_protocols in (8, 30):
        expected = quantile * math.sqrt(num_methods * (num_methods + 1) / (6 * num_protocols))
        assert critical_distance(num_methods, num_protocols) == pytest.approx(expected, rel=4e-4)
    if num_methods == 5:
        assert critical_distance(5, 14, 0.10) == pytest.approx(2.459 * math.sqrt(30 / 84), rel=4e-4)


@pytest.mark.parametrize("digits", [1, 6])
def test_rank_methods_equals_friedman_formula_with_ties(digits):
    values = np.round(np.random.default_rng(2).random((6, 4)) + np.array([0.3, 0.2, 0.1, 0.0]), digits)
    ranking = rank_methods(make_table(values), RankingPlan(METHODS, PROTOCOLS))
    ranks = np.array(ranks_by_hand(values))
    expected = dict(zip(METHODS, ranks.mean(0), strict=True))
    assert ranking.ranks == pytest.approx(expected)
    assert [*ranking.ranks.values()] == sorted(expected.values())
    # Friedman's statistic: squared deviations of the rank sums, divided by the variance of the ranks in each row.
    num_rows, k = values.shape
    deviations = ((ranks.sum(0) - num_rows * (k + 1) / 2) ** 2).sum()
    statistic = (k - 1) * deviations / ((ranks - (k + 1) / 2) ** 2).sum()
    assert (len(np.unique(values)) < values.size) == (digits == 1)
    assert ranking.statistic == pytest.approx(statistic)
    assert ranking.statistic == pytest.approx(stats.friedmanchisquare(*values.T).statistic)
    assert ranking.p_value == pytest.approx(stats.chi2.sf(statistic, k - 1))
    assert ranking.critical_distance == critical_distance(4, 6) and ranking.num_protocols == 6


def test_rank_methods_missing_row_has_no_ranking():
    table = make_table(np.random.default_rng(0).random((6, 4)))
    plan = RankingPlan(METHODS, PROTOCOLS)
    assert rank_methods(table, plan) is not None
    assert rank_methods(table, RankingPlan((*METHODS, "e"), PROTOCOLS)) is None
    assert rank_methods(table, RankingPlan(METHODS, (*PROTOCOLS, "P9"))) is None


def ranking_of(distance, **ranks):
    return Ranking(ranks, 6, 12.34, 0.0062, distance)


def test_groups_are_the_largest_sets_within_the_critical_distance():
    ranks = {"a": 1.2, "b": 1.6, "c": 3.0, "d": 3.4, "e": 5.8}
    for distance in (0.3, 0.5, 1.5, 2.0, 3.0, 9.0):
        found = {frozenset(group) for group in ranking_of(distance, **ranks).groups}
        close = [
            {*group}
            for size in range(2, 6)
            for group in itertools.combinations(ranks, size)
            if max(ranks[m] for m in group) - min(ranks[m] for m in group) < distance
        ]
        assert found == {frozenset(group) for group in close if not any(group < other for other in close)}
        assert len(found) == len(ranking_of(distance, **ranks).groups)


def test_ranking_table_and_text_contain_the_result():
    ranking = ranking_of(1.5, a=1.2, b=1.6, c=3.0)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in ranking_table(ranking).splitlines()]
    assert lines[2:] == [["a", "1.20", "b"], ["b", "1.60", "a, c"], ["c", "3.00", "b"]]
    assert "3 methods and 6 protocols: chi-squared = 12.3, p = 0.006. " in ranking.text and "1.50" in ranking.text


@pytest.mark.parametrize("num_methods", [3, 4, 10])
def test_ranking_chart_labels_do_not_overlap_and_bars_join_groups(num_methods):
    ranks = {f"method {number}": 1 + 0.01 * number for number in range(num_methods)}
    ranks["method 0"], ranks[f"method {num_methods - 1}"] = 1.0, float(num_methods)
    chart = ranking_chart(ranking_of(1.5, **ranks))
    data = chart["datasets"]
    for side in ("left", "right"):
        heights = sorted(row["height"] for row in data["rows"] if row["side"] == side)
        assert heights and all(b - a >= LINE_HEIGHT for a, b in itertools.pairwise(heights))
    lowest_bar = max(bar["height"] for bar in data["bars"])
    assert all(row["height"] > lowest_bar for row in data["rows"])
    # The chart has as many pixels as units of height, so that distances of labels are in pixels.
    domain = chart["layer"][0]["encoding"]["y"]["scale"]["domain"]
    assert chart["height"] == pytest.approx(domain[0] - domain[1], abs=1)
    (bar,) = [bar for bar in data["bars"] if bar["start"] == 1.0]
    assert bar["end"] == pytest.approx(ranks[f"method {num_methods - 2}"])
    assert data["distance"][0]["end"] == 2.5
    text = vl_convert.vegalite_to_svg(chart)
    assert "method 0 1.00" in text and "critical distance 1.50" in text


KNOWN = {protocol: [*METHODS, *"efghijkl"] for protocol in PROTOCOLS}


def test_read_ranking_returns_names():
    assert read_ranking({}, KNOWN) is None
    content = {"ranking": {"methods": ["a", "b", "c"], "protocols": ["P1", "P0"]}}
    assert read_ranking(content, KNOWN) == RankingPlan(("a", "b", "c"), ("P1", "P0"))


@pytest.mark.parametrize(
    ("ranking", "argument", "kind"),
    [
        (["a"], "ranking", InvalidValueError),
        ({"methods": ["a", "b", "c"]}, "ranking", InvalidValueError),
        ({"methods": ["a", "b"], "protocols": ["P0", "P1"]}, "methods", InvalidValueError),
        ({"methods": ["a", "b", "b"], "protocols": ["P0", "P1"]}, "methods", InvalidValueError),
        ({"methods": [*"abcdefghijk"], "protocols": ["P0", "P1"]}, "methods", InvalidValueError),
        ({"methods": "abc", "protocols": ["P0", "P1"]}, "methods", InvalidValueError),
        ({"methods": ["a", "b", "c"], "protocols": ["P0"]}, "protocols", InvalidValueError),
        ({"methods": ["a", "b", "c"], "protocols": ["P0", "P9"]}, "protocols", UnknownNameError),
        ({"methods": ["a", "b", "x"], "protocols": ["P0", "P1"]}, "methods", UnknownNameError),
    ],
)
def test_read_ranking_rejects_invalid_entries(ranking, argument, kind):
    with raises(kind, argument):
        read_ranking({"ranking": ranking}, KNOWN)
