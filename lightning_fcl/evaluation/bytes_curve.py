"""The accuracy of a run as a function of the bytes that its clients transmit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from lightning_fcl.evaluation.metric import Score
from lightning_fcl.evaluation.record import Evaluation, Record, tested_models

BYTES = (1e4, 1e8)
"""Range of a client's cumulative bytes over which accuracies are averaged. It is the same for all runs."""


def bytes_scores(evaluation: Evaluation) -> Iterator[Score]:
    """Yield the mean of the server's accuracy over the logarithm of a client's cumulative bytes."""
    for history in evaluation.models:
        if history.model == "server":
            accuracies = history.overall[history.num_before_fit :]
            yield Score("server", mean_over_bytes(client_bytes(evaluation.record), accuracies, BYTES))


def client_bytes(record: Record) -> list[float]:
    """Return the bytes that a client has uploaded and downloaded until each test of the server, mean over clients.

    Example:
        >>> first = {"correct": {}, "upload_bytes": {"a": 4}}
        >>> second = {"correct": {"server": [1]}, "download_bytes": {"b": 8}}
        >>> client_bytes({"tasks": {"a": [], "b": [], "server": []}, "rounds": [first, second]})
        [6.0]
    """
    num_clients = max(1, sum(model != "server" for model in record["tasks"]))
    result, total = list[float](), 0
    for entry in record["rounds"]:
        total += sum(sum(entry.get(name, {}).values()) for name in ("upload_bytes", "download_bytes"))
        if "server" in tested_models(entry):
            result.append(total / num_clients)
    return result


def mean_over_bytes(num_bytes: Sequence[float], accuracies: ArrayLike, limits: tuple[float, float]) -> float:
    """Return the mean accuracy over log10 of the bytes, from the lower to the upper limit.

    From each test until the next test, the accuracy is that of the first of the two tests. Before the first test, it is
    0. After the last test, it is that of the last test.

    Args:
        num_bytes: Cumulative bytes until each test, in ascending order, shape (R,).
        accuracies: Accuracy in each test, shape (R,).
        limits: Lower and upper limit of the bytes, above 0.

    Returns:
        The mean. NaN if an accuracy is NaN, or if there are no tests.

    Example:
        >>> round(mean_over_bytes([100.0, 1000.0], [0.2, 0.8], (10.0, 10_000.0)), 6)
        0.333333
    """
    values = np.asarray(accuracies, dtype=np.float64)
    if not len(values):
        return float("nan")
    low, high = np.log10(limits)
    with np.errstate(divide="ignore"):
        starts = np.clip(np.log10(np.asarray(num_bytes, dtype=np.float64)), low, high)
    widths = np.diff(np.append(starts, high))
    return float((values * widths).sum() / (high - low))
