"""Further values of a search: settings beyond the smallest or largest value of an argument, if this value is best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NUM_FURTHER = 2
"""Number of further settings if the best value of one argument is at an end of its values."""

# Number of significant digits of further values.
_DIGITS = 6


def values_beyond(values: Sequence[float], is_upper: bool, number: int) -> list[float]:
    """Return the values that continue a geometric sequence beyond one of its ends.

    The ratio of two values that are two steps apart is continued, so that 0.1, 0.3, 1 is followed by 3 and 10. Two
    values define the ratio of one step. The result is empty if a value is not above 0, or if there is only one value.

    Args:
        values: The values of an argument, in any order.
        is_upper: Whether to continue beyond the largest value. Otherwise, beyond the smallest value.
        number: Number of values to return.

    Example:
        >>> values_beyond([0.03, 0.1, 0.3, 1.0], is_upper=True, number=2)
        [3.0, 10.0]
        >>> values_beyond([0.1, 0.5], is_upper=False, number=1)
        [0.02]
    """
    ordered = sorted(values, reverse=not is_upper)
    if len(ordered) < 2 or min(ordered) <= 0:
        return []
    step = 1 if len(ordered) == 2 else 2
    ratio = ordered[-1] / ordered[-1 - step]
    for _ in range(number):
        ordered.append(float(f"{ordered[-step] * ratio:.{_DIGITS}g}"))
    return ordered[-number:]


def edges(points: Sequence[Mapping[str, Any]], best: Mapping[str, Any]) -> dict[str, bool]:
    """Return the arguments whose best value is the smallest or the largest value in ``points``.

    Arguments with values that are not numbers, and arguments with only one value, have no ends.

    Args:
        points: All points of a search. A point maps the names of arguments to values.
        best: The best point.

    Returns:
        Whether the best value is the largest value, by the name of the argument.

    Example:
        >>> edges([{"lr": 0.1, "mu": 1}, {"lr": 0.3, "mu": 2}, {"lr": 1.0, "mu": 2}], {"lr": 0.3, "mu": 2})
        {'mu': True}
    """
    result = {}
    for name, value in best.items():
        values = [point[name] for point in points]
        are_numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in values)
        if are_numbers and len({*values}) > 1 and value in (min(values), max(values)):
            result[name] = value == max(values)
    return result


def further_points(
    points: Sequence[Mapping[str, Any]], best: Mapping[str, Any], limits: Mapping[str, Sequence[float]]
) -> list[dict[str, Any]]:
    """Return the points to try after the grid, if the best value of an argument is at an end of its values.

    For one such argument, these are two points beyond this end. For several such arguments, this is one point for each
    argument. All other arguments have their best values.

    Args:
        points: All points of the grid.
        best: The best point.
        limits: Smallest and largest valid value, by the name of the argument. Points outside are left out.

    Example:
        >>> grid = [{"lr": lr, "mu": mu} for lr in (0.1, 0.3, 1.0) for mu in (0.5, 1.0, 2.0)]
        >>> further_points(grid, {"lr": 1.0, "mu": 1.0}, limits={})
        [{'lr': 3.0, 'mu': 1.0}, {'lr': 10.0, 'mu': 1.0}]
        >>> further_points(grid, {"lr": 0.1, "mu": 2.0}, limits={})
        [{'lr': 0.03, 'mu': 2.0}, {'lr': 0.1, 'mu': 4.0}]
    """
    ends = edges(points, best)
    number = NUM_FURTHER if len(ends) == 1 else 1
    further = []
    for name, is_upper in ends.items():
        low, high = limits.get(name, (float("-inf"), float("inf")))
        values = values_beyond([*{point[name] for point in points}], is_upper, number)
        further += [{**best, name: value} for value in values if low <= value <= high]
    return further
