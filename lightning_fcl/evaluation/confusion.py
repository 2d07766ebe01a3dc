"""Confusion matrices: sparse counts of targets and predictions, and the matrices in the record of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.evaluation.record import server_first

Confusion: TypeAlias = list[list[int]]
"""The entries of a confusion matrix that are not 0, as sorted lists ``[target, prediction, count]``."""

_MAX_ENTRIES = 500_000
"""Maximum number of entries that the confusion matrices of all clients in a record can have."""


def count_confusion(targets: NDArray[np.int64], predictions: NDArray[np.int64]) -> Confusion:
    """Return the confusion matrix of predictions.

    Args:
        targets: Class of each sample, shape (n,).
        predictions: Predicted class of each sample, shape (n,).

    Example:
        >>> count_confusion(np.array([0, 1, 1]), np.array([0, 2, 2]))
        [[0, 0, 1], [1, 2, 2]]
    """
    if not len(targets):
        return []
    num_classes = 1 + int(max(targets.max(), predictions.max()))
    cells, counts = np.unique(targets * num_classes + predictions, return_counts=True)
    entries: Confusion = np.stack([*np.divmod(cells, num_classes), counts], axis=1).tolist()
    return entries


def add_confusions(parts: Sequence[Confusion]) -> Confusion:
    """Return the sum of confusion matrices.

    Example:
        >>> add_confusions([[[0, 0, 1], [1, 2, 2]], [[1, 2, 3]]])
        [[0, 0, 1], [1, 2, 5]]
    """
    if len(parts) == 1:
        return parts[0]
    counts: Counter[tuple[int, int]] = Counter()
    for matrix in parts:
        for target, prediction, count in matrix:
            counts[target, prediction] += count
    return [[*cell, count] for cell, count in sorted(counts.items())]


def recorded_models(clients: Iterable[str], num_classes: int, num_samples: int, num_experiences: int) -> list[str]:
    """Return the models whose confusion matrices are recorded: the server, and the first of the tested clients.

    All matrices of the clients together have at most 500,000 entries. A matrix has at most
    ``min(num_classes**2, num_samples)`` entries.

    Args:
        clients: The tested clients.
        num_classes: Number of classes. 0 if unknown.
        num_samples: Number of test samples.
        num_experiences: Number of experiences. Each client has one matrix for each experience.

    Example:
        >>> len(recorded_models(map(str, range(1000)), num_classes=10, num_samples=10_000, num_experiences=5))
        1001
        >>> len(recorded_models(map(str, range(1000)), num_classes=100, num_samples=10_000, num_experiences=10))
        6
    """
    entries = min(num_classes**2 or num_samples, num_samples)
    return ["server", *list(clients)[: _MAX_ENTRIES // max(1, entries * num_experiences)]]


def confusions(record: Mapping[str, Any]) -> dict[tuple[str, int], Confusion]:
    """Return the confusion matrix of each model after each of its experiences.

    The keys are pairs of model and experience, the server first. If a model has several matrices in one experience, the
    last matrix is returned. A record of measures other than accuracy has no matrices.

    Example:
        >>> first = {"experience": {"server": 0}, "confusion": {"server": [[0, 0, 5]]}}
        >>> record = {"rounds": [first, {"experience": {"server": 1}}], "confusion": {"server": [[0, 1, 5]]}}
        >>> confusions(record)
        {('server', 0): [[0, 0, 5]], ('server', 1): [[0, 1, 5]]}
    """
    matrices: dict[str, dict[int, Confusion]] = {}
    rounds = record["rounds"]
    # The record of a fit that ended within an experience contains the matrices of the last round as a separate entry.
    final = [{**rounds[-1], "confusion": record["confusion"]}] if rounds and "confusion" in record else []
    for entry in [*rounds, *final]:
        for model, matrix in entry.get("confusion", {}).items():
            matrices.setdefault(model, {})[entry["experience"][model]] = matrix
    return {
        (model, experience): matrices[model][experience]
        for model in server_first(matrices)
        for experience in matrices[model]
    }


def class_names(record: Mapping[str, Any], num_classes: int = 0) -> list[str]:
    """Return the names of the classes of a record, at least ``num_classes``. A class without a name has its number.

    Example:
        >>> class_names({"classes": ["cat", "dog"]}, num_classes=3)
        ['cat', 'dog', '2']
    """
    names: list[str] = list(record.get("classes", []))
    return names + [str(number) for number in range(len(names), num_classes)]
