"""Statistics of a metric over the seeds of a run: mean, standard deviation, confidence interval and paired tests.

Tables of papers, the leaderboard and tables that compare runs use these functions.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.validation import require_package

MIN_SEEDS = 5
"""Minimum number of seeds for a confidence interval or a test."""

CONFIDENCE = 0.95
"""Probability that a confidence interval contains the expected value, if the values are normally distributed."""

SIGNIFICANCE = 0.05
"""Largest p-value at which a difference is called significant."""


@dataclass(frozen=True)
class SeedStatistics:
    """Statistics of a metric over seeds.

    Args:
        n: Number of seeds, at least 1.
        mean: Mean over the seeds.
        std: Sample standard deviation over the seeds (divided by n - 1). None for one seed.
    """

    n: int
    mean: float
    std: float | None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Lower and upper end of the 95 % confidence interval of the mean, from Student's t distribution.

        None for fewer than `MIN_SEEDS` seeds.
        """
        if self.std is None or self.n < MIN_SEEDS:
            return None
        # Charts need no interval, so that they do not import SciPy.
        stats = require_package("scipy.stats", "computes confidence intervals")
        half = float(stats.t.ppf((1 + CONFIDENCE) / 2, self.n - 1)) * self.std / math.sqrt(self.n)
        return (self.mean - half, self.mean + half)


def seed_statistics(values: Iterable[float]) -> SeedStatistics:
    """Return the statistics of a metric over seeds.

    Args:
        values: Value of the metric for each seed, at least one.

    Raises:
        ValueError: If there are no values.

    Example:
        >>> seed_statistics([0.70, 0.72, 0.71]).mean
        0.71
        >>> low, high = seed_statistics([0.70, 0.72, 0.71, 0.69, 0.73]).interval
        >>> round(low, 4), round(high, 4)
        (0.6904, 0.7296)
    """
    numbers = [float(value) for value in values]
    if not numbers:
        raise InvalidValueError("Expected the values of at least one seed, but got none.", argument="values")
    n, mean = len(numbers), statistics.fmean(numbers)
    std = statistics.stdev(numbers) if n > 1 else None
    return SeedStatistics(n, mean, std)


def paired_p_value(values: Mapping[int, float], reference: Mapping[int, float]) -> float | None:
    """Return the two-sided p-value of the paired t-test between two rows, over the seeds that both rows have.

    Args:
        values: Value of the metric for each seed.
        reference: Value of the metric for each seed of the row to compare with.

    Returns:
        The p-value, not corrected for several tests. None for fewer than `MIN_SEEDS` common seeds. If all differences
        are equal, the p-value is 1 for equal values and 0 otherwise.

    Example:
        >>> better = {seed: 0.7 + 0.01 * seed for seed in range(5)}
        >>> worse = {seed: 0.6 + 0.01 * seed + 0.001 * seed**2 for seed in range(5)}
        >>> round(paired_p_value(better, worse), 6)
        6e-06
        >>> paired_p_value({0: 0.7, 1: 0.7}, {0: 0.6, 1: 0.6}) is None
        True
    """
    seeds = sorted(values.keys() & reference.keys())
    if len(seeds) < MIN_SEEDS:
        return None
    first, second = (np.array([row[seed] for seed in seeds], dtype=np.float64) for row in (values, reference))
    # Rounding errors of equal differences must not be taken for a standard deviation.
    rounding_error = 1e-12 * float(np.abs([first, second]).max())
    if np.ptp(first - second) <= rounding_error:
        return float(abs((first - second).mean()) <= rounding_error)
    stats = require_package("scipy.stats", "computes paired tests")
    return float(stats.ttest_rel(first, second).pvalue)


def holm_correction(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return the p-values of several tests after the correction of Holm (1979).

    The probability that at least one true hypothesis is rejected is at most the significance level.

    Args:
        p_values: P-value of each test, by the name of the test.

    Example:
        >>> holm_correction({"a": 0.01, "b": 0.04, "c": 0.03})
        {'a': 0.03, 'b': 0.06, 'c': 0.06}
    """
    corrected: dict[str, float] = {}
    largest = 0.0
    for rank, (name, p_value) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_value))
        corrected[name] = largest
    return {name: corrected[name] for name in p_values}
