"""The accuracy of each client on its own distribution of classes, and the spread of this accuracy over the clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from lightning_fcl.evaluation.continual import FloatArray, finite_mean
from lightning_fcl.evaluation.metric import Score
from lightning_fcl.evaluation.record import Evaluation


def own_scores(evaluation: Evaluation) -> Iterator[Score]:
    """Yield the accuracy of each client on its own distribution, and the mean over the clients."""
    values = evaluation.own_accuracies
    yield from (Score(client, value) for client, value in values.items())
    if values:
        yield Score("clients", finite_mean(list(values.values())))


def spread_of_own(statistic: Callable[[FloatArray], float]) -> Callable[[Evaluation], Iterator[Score]]:
    """Return the function of a metric: a statistic of the clients' accuracies on their own distributions."""

    def scores(evaluation: Evaluation) -> Iterator[Score]:
        values = np.array([value for value in evaluation.own_accuracies.values() if math.isfinite(value)])
        if len(values):
            yield Score("clients", float(statistic(values)))

    return scores


def lowest_tenth(values: FloatArray) -> float:
    """Return the mean of the lowest 10 % of the values. The number of values is rounded up.

    Example:
        >>> lowest_tenth(np.array([0.5, 0.75, 0.25, *[1.0] * 8]))
        0.375
    """
    return float(np.sort(values)[: math.ceil(len(values) / 10)].mean())
