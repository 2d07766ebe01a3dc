"""Tests of further values beyond the ends of a search."""

import pytest

from lightning_fcl.cli.search_edges import edges, further_points, values_beyond

RATES = [0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0]


@pytest.mark.parametrize(
    ("values", "is_upper", "number", "expected"),
    [
        (RATES, True, 2, [30.0, 100.0]),
        (RATES, False, 2, [0.001, 0.0003]),
        ([0.1, 0.5], True, 2, [2.5, 12.5]),
        ([0.5, 0.1], False, 1, [0.02]),
        ([1, 10, 100], True, 1, [1000.0]),
        ([0.0, 0.5], True, 2, []),
        ([0.5], True, 2, []),
    ],
)
def test_values_beyond_continues_geometric_steps(values, is_upper, number, expected):
    assert values_beyond(values, is_upper, number) == pytest.approx(expected)


def grid(**values):
    (first, firsts), (second, seconds) = values.items()
    return [{first: one, second: other} for one in firsts for other in seconds]


POINTS = grid(lr=[0.1, 0.3, 1.0, 3.0], mu=[0.5, 1.0, 2.0])


@pytest.mark.parametrize(
    ("best", "expected"),
    [
        ({"lr": 0.3, "mu": 1.0}, []),
        ({"lr": 3.0, "mu": 1.0}, [{"lr": 10.0, "mu": 1.0}, {"lr": 30.0, "mu": 1.0}]),
        ({"lr": 0.1, "mu": 1.0}, [{"lr": 0.03, "mu": 1.0}, {"lr": 0.01, "mu": 1.0}]),
        ({"lr": 0.3, "mu": 2.0}, [{"lr": 0.3, "mu": 4.0}, {"lr": 0.3, "mu": 8.0}]),
        ({"lr": 3.0, "mu": 0.5}, [{"lr": 10.0, "mu": 0.5}, {"lr": 3.0, "mu": 0.25}]),
    ],
)
def test_further_points_beyond_ends_of_best_point(best, expected):
    assert further_points(POINTS, best, {}) == expected


def test_further_points_outside_of_limits_are_left_out():
    points = grid(lr=[0.1, 0.3, 1.0], eps=[0.85, 0.95])
    best = {"lr": 0.3, "eps": 0.95}
    assert further_points(points, best, {"eps": [0.0, 1.0]}) == []
    further = [point["eps"] for point in further_points(points, best, {})]
    assert further == pytest.approx([0.95**2 / 0.85, 0.95**3 / 0.85**2], rel=1e-4)


def test_edges_ignores_choices_that_are_not_numbers_and_single_values():
    points = grid(kind=["a", "b"], mu=[1.0])
    assert edges(points, points[0]) == {} and edges([{"a": True}, {"a": False}], {"a": True}) == {}
    assert further_points(points, points[0], {}) == []


def test_edges_after_further_points_uses_all_points():
    points = [*POINTS, {"lr": 10.0, "mu": 1.0}, {"lr": 30.0, "mu": 1.0}]
    assert edges(points, {"lr": 10.0, "mu": 1.0}) == {}
    assert edges(points, {"lr": 30.0, "mu": 1.0}) == {"lr": True}
    assert edges(points, {"lr": 0.1, "mu": 2.0}) == {"lr": False, "mu": True}
