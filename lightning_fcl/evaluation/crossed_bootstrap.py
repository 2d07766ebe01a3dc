"""Bootstrap intervals of a mean over seeds and test samples, if each seed has the same test samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.evaluation.continual import FloatArray
from lightning_fcl.evaluation.statistics import CONFIDENCE

NUM_REPLICATES = 10_000
"""Number of resampled means of an interval."""

_SEED = 0
_REPLICATES_PER_STEP = 500


def crossed_interval(differences: NDArray[np.int8], num_replicates: int = NUM_REPLICATES) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean of a matrix with a row for each seed and a column for each sample.

    The ends are percentiles of `crossed_means`. The interval contains two sources of variance: the seeds and the test
    samples. An interval over the seeds alone is too narrow if the differences depend on the samples.

    Args:
        differences: Values -1, 0 and 1, shape (seeds, samples). For two models, the values are the correctness of the
            first model minus the correctness of the second model, each 0 or 1.

    Raises:
        InvalidValueError: If there are fewer than two seeds, or if there are no samples.

    Example:
        >>> first, second = np.array([[1, 1, 1, 0], [1, 0, 1, 1]]), np.array([[1, 0, 0, 0], [1, 0, 0, 0]])
        >>> crossed_interval((first - second).astype(np.int8))
        (0.0, 1.0)
    """
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(crossed_means(differences, num_replicates), [tail, 1 - tail])
    return float(low), float(high)


def crossed_means(differences: NDArray[np.int8], num_replicates: int = NUM_REPLICATES, seed: int = _SEED) -> FloatArray:
    """Return means of a matrix over resampled rows and resampled columns (Owen, 2007), shape (replicates,).

    A replicate draws S - 1 of S rows and N of N columns, with replacement. The columns are the same for all rows. With
    S - 1 rows, the bootstrap variance of the row means is the unbiased variance. The difference is large for few rows:
    S rows give 80 % of this variance if S is 5.

    Args:
        differences: Matrix as in `crossed_interval`, shape (S, N).
        num_replicates: Number of means.
        seed: Seed of the random draws.
    """
    if differences.ndim != 2 or differences.shape[0] < 2 or differences.shape[1] < 1:
        raise InvalidValueError(
            "Expected `differences` to have at least two rows (seeds) and one column (samples), but got shape "
            f"{differences.shape}.",
            argument="differences",
            value=differences.shape,
        )
    num_rows, num_columns = differences.shape
    # Equal columns are one outcome of the multinomial distribution. Their number is at most 3^S, but often much smaller
    # than the number of samples.
    columns, counts = np.unique(differences, axis=1, return_counts=True)
    generator = np.random.default_rng(seed)
    means = []
    for start in range(0, num_replicates, _REPLICATES_PER_STEP):
        size = min(_REPLICATES_PER_STEP, num_replicates - start)
        row_counts = generator.multinomial(num_rows - 1, np.full(num_rows, 1 / num_rows), size)
        column_counts = generator.multinomial(num_columns, counts / num_columns, size)
        sums = np.einsum("rk,rk->r", row_counts @ columns.astype(np.float64), column_counts)
        means.append(sums / ((num_rows - 1) * num_columns))
    return np.concatenate(means)
