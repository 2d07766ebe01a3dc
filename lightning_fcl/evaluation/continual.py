"""Metrics of continual learning, from the values of a model on groups of test samples after each round.

A *group* of test samples is a class, or a domain. A value is an accuracy, or another quantity of a module. NaN means
that the value is not defined. The functions use these names:

- ``on(groups)`` and ``values_of(groups)`` return the values of a model on the test samples of some groups together,
  shape (R,). There is one value for each of the R rounds in which the model was tested.
- ``experience``, shape (R,), contains the number of the task (from 0) in each of these rounds.
- ``tasks`` contains the groups of each of the T tasks.
- ``matrix``, shape (T, T), is the result of `value_matrix`. NaN entries are left out of means.
- ``t`` is the number of tasks learned.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray: TypeAlias = NDArray[np.float64]
Tasks: TypeAlias = Sequence[Sequence[int]]
ValuesOf: TypeAlias = Callable[[Iterable[int]], FloatArray]


def group_accuracy(correct: ArrayLike, totals: ArrayLike) -> ValuesOf:
    """Return a function that computes the accuracy on some groups in each round, or NaN for groups without samples.

    Args:
        correct: Number of correct predictions in each round and group, shape (R, G).
        totals: Number of test samples in each group, shape (G,).
    """
    counts, sizes = np.asarray(correct, dtype=np.float64), np.asarray(totals, dtype=np.float64)

    def on(groups: Iterable[int]) -> FloatArray:
        group_indices = sorted(set(groups))
        return np.asarray(counts[..., group_indices].sum(axis=-1) / (sizes[group_indices].sum() or np.nan))

    return on


def metric_values(rounds: Sequence[Mapping[str, float | None]]) -> ValuesOf:
    """Return a function that looks up the values of a measure on some groups, one value for each round.

    Args:
        rounds: For each round, a mapping from names of groups, as `group_name` returns them, to values. The function
            returns NaN for a missing value or None.
    """
    return lambda groups: np.array([row.get(group_name(groups)) for row in rounds], dtype=np.float64)


def group_name(groups: Iterable[int]) -> str:
    """Return the name that a record uses for several groups together, for example ``0+2``."""
    return "+".join(map(str, sorted(set(groups))))


def personal_values(values_of: ValuesOf, experience: ArrayLike, tasks: Tasks) -> FloatArray:
    """Return the value in each round on all groups learned so far, shape (R,).

    The mean of these values is A_per of Usmanova et al. 2021.
    """
    learnt: set[int] = set()
    values = []
    for row, number in enumerate(np.asarray(experience, dtype=np.int64)):
        learnt.update(tasks[number])
        values.append(values_of(learnt)[row])
    return np.asarray(values, dtype=np.float64)


def value_matrix(
    values_of: ValuesOf, experience: ArrayLike, tasks: Tasks, rounds: Literal["mean", "last"]
) -> FloatArray:
    """Return a[t, d], the value on task d after task t, shape (T, T). Rows of tasks without a round are NaN.

    Entries above the diagonal are values on tasks that the model has not learned yet. If ``rounds`` is ``"mean"``, a
    value is the mean over the rounds of task t. If ``"last"``, a value is from the last of these rounds.
    """
    on_task = np.stack([values_of(groups) for groups in tasks], axis=1)
    numbers = np.asarray(experience, dtype=np.int64)
    matrix = np.full((len(tasks), len(tasks)), np.nan)
    for t in np.unique(numbers):
        task_values = on_task[numbers == t]
        matrix[t] = task_values.mean(axis=0) if rounds == "mean" else task_values[-1]
    return matrix


def stream_values(values_of: ValuesOf, experience: ArrayLike, tasks: Tasks) -> FloatArray:
    """Return, for each experience i, the value on experiences 0 to i after the last round of experience i, shape (T,).

    NaN for experiences without a round.
    """
    numbers = np.asarray(experience, dtype=np.int64)
    result = np.full(len(tasks), np.nan)
    for i in np.unique(numbers):
        seen_groups = {group for groups in tasks[: i + 1] for group in groups}
        result[i] = values_of(seen_groups)[numbers == i][-1]
    return result


def average_accuracy(matrix: ArrayLike, t: int) -> float:
    """Return A_t: the mean accuracy on tasks 1 to t after task t (Usmanova et al. 2021, section 4.3).

    NaN if task t has not been learned.

    Args:
        matrix: Accuracy on each task (column) after each task (row), shape (T, T).
        t: Number of tasks learned.

    Example:
        >>> average_accuracy([[1.0, 0.0], [0.0, 1.0]], t=2)
        0.5
    """
    return finite_mean(np.asarray(matrix, dtype=np.float64)[t - 1, :t])


def forgetting(matrix: ArrayLike, t: int) -> float:
    """Return F_t: the best earlier accuracy on a task minus the accuracy after task t, mean over tasks 1 to t-1.

    See Usmanova et al. 2021, section 4.3. Negative if the model improved. NaN if ``t`` is 1, or if task t has not been
    learned.

    Args:
        matrix: Accuracy on each task (column) after each task (row), shape (T, T).
        t: Number of tasks learned.

    Example:
        >>> forgetting([[1.0, 0.0], [0.0, 1.0]], t=2)
        1.0
    """
    a = np.asarray(matrix, dtype=np.float64)
    # fmax ignores the NaN rows of tasks that the model has skipped.
    best = [np.fmax.reduce(a[d : t - 1, d]) for d in range(t - 1)]
    return finite_mean(np.array(best) - a[t - 1, : t - 1])


def backward_transfer(matrix: ArrayLike) -> float:
    """Return BWT: the change of a task's accuracy from the task's last round to the end, mean over earlier tasks.

    The earlier tasks are all tasks except the last task.

    Equation 3 of Lopez-Paz and Ranzato 2017, "Gradient episodic memory for continual learning". Negative if the model
    forgets. NaN if there is only one task, or if the last task has not been learned.

    Example:
        >>> backward_transfer([[1.0, 0.0], [0.25, 1.0]])
        -0.75
    """
    a = np.asarray(matrix, dtype=np.float64)
    return finite_mean(a[-1, :-1] - a.diagonal()[:-1])


def forward_transfer(matrix: ArrayLike, before_fit: ArrayLike) -> float:
    """Return FWT: the accuracy on a task before its first round minus the accuracy before the fit, mean over tasks.

    The mean is over all tasks except the first task. Equation 4 of Lopez-Paz and Ranzato 2017, "Gradient episodic
    memory for continual learning". Positive if earlier tasks help with later tasks. FWT is only meaningful if a model
    can predict the classes of a task before it has learned the task, as in domain- and task-incremental streams. NaN if
    there is only one task.

    Args:
        matrix: Accuracy on each task (column) after each task (row), shape (T, T).
        before_fit: Accuracy on each task of the model before the first round, shape (T,).

    Example:
        >>> forward_transfer([[0.75, 0.5], [0.25, 1.0]], before_fit=[0.1, 0.25])
        0.25
    """
    a, baseline = np.asarray(matrix, dtype=np.float64), np.asarray(before_fit, dtype=np.float64)
    return finite_mean(a.diagonal(1) - baseline[1:])


def learning_accuracy(matrix: ArrayLike) -> float:
    """Return LA: the accuracy on a task after its last round, mean over the tasks (Riemer et al. 2019, section 5).

    NaN if no task has been learned.

    Example:
        >>> learning_accuracy([[1.0, 0.0], [0.25, 0.5]])
        0.75
    """
    return finite_mean(np.asarray(matrix, dtype=np.float64).diagonal())


def finite_mean(values: ArrayLike) -> float:
    """Return the mean of the finite values, or NaN if there are no finite values."""
    array = np.asarray(values, dtype=np.float64)
    array = array[np.isfinite(array)]
    return float(array.mean()) if len(array) else float("nan")
