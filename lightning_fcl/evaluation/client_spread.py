"""The accuracy of each client on its own distribution of classes, and the spread of this accuracy over the clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from lightning_fcl.evaluation.continual import FloatArray, finite_mean
from lightning_fcl.evaluation.metric import Score, clients
from lightning_fcl.evaluation.record import Evaluation, ModelHistory


def own_accuracies(evaluation: Evaluation) -> dict[str, float]:
    """Return the accuracy of each tested client's model after the last round on the client's own distribution.

    The accuracy on each test group (class or domain) is weighted by the group's share of the client's training samples
    of all experiences so far. Groups without test samples are left out. NaN for a client without training samples, or
    whose model was not tested on one of these groups.

    Example:
        >>> rounds = [{"round": 0, "experience": {"a": 0}, "correct": {"a": [10, 4]}}]
        >>> record = {"groups": ["x", "y"], "totals": [10, 10], "tasks": {"a": [[0, 1]]}, "rounds": rounds}
        >>> from lightning_fcl.evaluation.record import ACCURACY
        >>> own_accuracies(Evaluation({**record, "client_samples": {"a": [[0, 3], [1, 1]]}}, ACCURACY))
        {'a': 0.85}
    """
    samples = evaluation.record.get("client_samples", {})
    return {
        history.model: _own_accuracy(history, dict(samples[history.model]), evaluation.record["totals"])
        for history in clients(evaluation)
        if history.model in samples
    }


def _own_accuracy(history: ModelHistory, counts: dict[int, int], totals: list[int]) -> float:
    learned = {group for task in history.tasks[: history.experience[-1] + 1] for group in task}
    groups = sorted(group for group in learned & counts.keys() if totals[group])
    weights = np.array([counts[group] for group in groups], dtype=np.float64)
    if not groups:
        return math.nan
    accuracies = np.array([history.values([group])[-1] for group in groups])
    return float((weights * accuracies).sum() / weights.sum())


def own_scores(evaluation: Evaluation) -> Iterator[Score]:
    """Yield the accuracy of each client on its own distribution, and the mean over the clients."""
    values = own_accuracies(evaluation)
    yield from (Score(client, value) for client, value in values.items())
    if values:
        yield Score("clients", finite_mean(list(values.values())))


def spread_of_own(statistic: Callable[[FloatArray], float]) -> Callable[[Evaluation], Iterator[Score]]:
    """Return the function of a metric: a statistic of the clients' accuracies on their own distributions."""

    def scores(evaluation: Evaluation) -> Iterator[Score]:
        values = np.array([value for value in own_accuracies(evaluation).values() if math.isfinite(value)])
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
