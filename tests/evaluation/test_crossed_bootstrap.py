"""Tests of bootstrap intervals over seeds and samples against formulas, hand loops and simulated coverage."""

import itertools

import numpy as np
import pytest
from raising import raises
from scipy import stats

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.evaluation.crossed_bootstrap import crossed_interval, crossed_means


def draw_differences(generator, num_seeds, num_samples, seed_std, sample_std, noise, shift=0.03):
    """Return the differences of two models, and the expected difference over seeds and samples.

    A model is correct if a normal score is positive. Scores of both models contain the difficulty of the sample.
    """
    difficulty, effect = generator.normal(0, 1.2, num_samples), generator.normal(0, sample_std, num_samples)
    seeds, scores = (
        generator.normal(0, seed_std, (num_seeds, 1)),
        generator.normal(0, noise, (2, num_seeds, num_samples)),
    )
    first = difficulty + effect + shift + seeds + scores[0] > 0
    second = difficulty + scores[1] > 0
    std = np.sqrt(1.2**2 + noise**2 + sample_std**2 + seed_std**2)
    return first.astype(np.int8) - second.astype(np.int8), stats.norm.cdf(shift / std) - 0.5


@pytest.mark.parametrize("seed", range(3))
def test_crossed_means_have_variance_of_crossed_design(seed):
    generator = np.random.default_rng(seed)
    values, _ = draw_differences(generator, 5 + seed, 300, 0.1, 0.3, 0.3)
    (num_seeds, num_samples), mean = values.shape, values.mean()
    rows, columns = values.mean(1) - mean, values.mean(0) - mean
    rest = values - mean - rows[:, None] - columns
    # The draws of rows and columns are independent. So the variances of seeds, samples and their interaction add up.
    of_rows = (rows**2).sum() / (num_seeds * (num_seeds - 1))
    of_columns = (columns**2).sum() / num_samples**2
    of_both = (rest**2).sum() / (num_seeds * (num_seeds - 1) * num_samples**2)
    assert of_rows == pytest.approx(values.mean(1).var(ddof=1) / num_seeds)
    means = crossed_means(values, 40_000, seed)
    assert means.mean() == pytest.approx(mean, abs=4 * np.sqrt((of_rows + of_columns + of_both) / 40_000))
    assert means.var() == pytest.approx(of_rows + of_columns + of_both, rel=0.03)
    assert of_rows < 0.9 * means.var() and of_columns < 0.9 * means.var()


def test_crossed_means_have_distribution_of_all_draws():
    """All 2 * 2 draws of columns are equally probable. A draw of rows has one of two rows."""
    values = np.array([[1, 0], [-1, -1]], dtype=np.int8)
    expected = [
        values[row][list(columns)].mean() for row in range(2) for columns in itertools.product(range(2), repeat=2)
    ]
    found = crossed_means(values, 80_000)
    for value in {*expected, *found.tolist()}:
        assert (found == value).mean() == pytest.approx(np.mean(np.array(expected) == value), abs=0.01)


def test_crossed_means_share_columns_between_rows():
    """With equal rows, only the samples contribute variance."""
    row = np.array([1] * 40 + [0] * 30 + [-1] * 30, dtype=np.int8)
    means = crossed_means(np.stack([row] * 6))
    assert means.var() == pytest.approx(row.var() / 100, rel=0.05)
    assert crossed_means(np.stack([row] * 6)).tolist() == means.tolist()


def test_crossed_interval_equals_percentiles_of_loop():
    values, _ = draw_differences(np.random.default_rng(3), 6, 200, 0.1, 0.4, 0.3)
    generator = np.random.default_rng(9)
    means = [values[generator.integers(0, 6, 5)][:, generator.integers(0, 200, 200)].mean() for _ in range(10_000)]
    assert crossed_interval(values) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), abs=0.004)


def test_crossed_interval_of_constant_differences_is_one_value():
    assert crossed_interval(np.ones((5, 20), dtype=np.int8)) == (1.0, 1.0)


@pytest.mark.seconds
@pytest.mark.parametrize(("num_seeds", "seed_std", "sample_std"), [(5, 0.05, 0.3), (10, 0.02, 0.6)])
def test_crossed_interval_covers_known_difference(num_seeds, seed_std, sample_std):
    generator, num_covered, num_covered_by_t, num_tables = np.random.default_rng(4), 0, 0, 150
    for _ in range(num_tables):
        values, expected = draw_differences(generator, num_seeds, 500, seed_std, sample_std, 0.3)
        low, high = crossed_interval(values, 1000)
        num_covered += low <= expected <= high
        means = values.mean(1)
        low, high = stats.t.interval(0.95, num_seeds - 1, means.mean(), stats.sem(means))
        num_covered_by_t += low <= expected <= high
    # The standard error of the share is 0.018. The bootstrap of crossed designs counts the interaction of seeds and
    # samples more than once, so that the interval can cover more than 95 %.
    assert num_covered / num_tables > 0.92
    # An interval over the seeds alone ignores the samples.
    assert num_covered_by_t < num_covered


@pytest.mark.parametrize("shape", [(1, 5), (5, 0), (5,)])
def test_crossed_means_reject_other_shapes(shape):
    with raises(InvalidValueError, "differences"):
        crossed_means(np.zeros(shape, dtype=np.int8))
