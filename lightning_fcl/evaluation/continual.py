"""Metrics of continual learning on arrays of counts: how many test samples a model got right after each round.

The functions take ``correct`` of shape (R, G), a row for every round in which the model was tested and a column for
each *group* of test samples (a class, or a domain). A round in which a client did not take part is simply not there. A
group that it was not tested on has None (NaN); a metric that asks for it cannot be computed.

``totals``, shape (G,), are the test samples of each group, ``experience``, shape (R,), the number (from 0) of the task
that each round trained on, and ``tasks`` the groups of each of the T tasks. ``matrix``, shape (T, T), is that of
`accuracy_matrix`, whose NaN entries are left out, and ``t`` the number of tasks learnt. Accuracies are between 0 and 1.

`general_accuracy`, `personal_accuracy`, `average_accuracy` and `forgetting` follow section 4.3 of Usmanova et al. 2021,
"A distillation-based approach integrating continual learning and federated learning for pervasive services".
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray: TypeAlias = NDArray[np.float64]
Tasks: TypeAlias = Sequence[Sequence[int]]
ValuesOf: TypeAlias = Callable[[Iterable[int]], FloatArray]
"""What a model came to on the test samples of some groups, round by round, shape (R,)."""


def general_accuracy(correct: ArrayLike, totals: ArrayLike) -> float:
    """A_gen: accuracy on the whole test set, mean over the rounds (Usmanova et al. 2021, section 4.3).

    Example:
        >>> general_accuracy([[10, 0], [8, 4]], totals=[10, 10])
        0.55
    """
    return float(counted(correct, totals)(range(len(np.asarray(totals)))).mean())


def personal_accuracy(correct: ArrayLike, totals: ArrayLike, experience: ArrayLike, tasks: Tasks) -> float:
    """A_per: accuracy on all groups the client has learnt so far, mean over the rounds (Usmanova et al. 2021, 4.3).

    Example:
        >>> personal_accuracy([[10, 0], [0, 10]], totals=[10, 10], experience=[0, 1], tasks=[[0], [1]])
        0.75
    """
    return personal_value(counted(correct, totals), experience, tasks)


def accuracy_matrix(
    correct: ArrayLike,
    totals: ArrayLike,
    experience: ArrayLike,
    tasks: Tasks,
    rounds: Literal["mean", "last"] = "mean",
) -> FloatArray:
    """Accuracy a[t, d] on the groups of task d after learning task t, shape (T, T) (Usmanova et al. 2021, 4.3).

    The entries above the diagonal tell how well a task is solved before it has been learnt.

    Args:
        correct: Correct predictions per round and group, shape (R, G).
        totals: Test samples per group, shape (G,).
        experience: Number of the task (from 0) that each round trained on, shape (R,).
        tasks: Groups of each of the T tasks.
        rounds: ``"mean"``: mean over the rounds of task t, as the paper has it; ``"last"``: its last round only, as is
            usual in continual learning.

    Returns:
        The matrix, with NaN in the rows of tasks without a round and the columns of tasks without a test sample.

    Example:
        >>> accuracy_matrix([[10, 0], [8, 0], [0, 10]], [10, 10], experience=[0, 0, 1], tasks=[[0], [1]])
        array([[0.9, 0. ],
               [0. , 1. ]])
    """
    return value_matrix(counted(correct, totals), experience, tasks, rounds)


def average_accuracy(matrix: ArrayLike, t: int) -> float:
    """A_t: mean accuracy on the tasks 1..t after learning task t (Usmanova et al. 2021, section 4.3).

    Returns:
        A_t, or NaN if task t has not been learnt.

    Example:
        >>> average_accuracy([[1.0, 0.0], [0.0, 1.0]], t=2)
        0.5
    """
    return finite_mean(np.asarray(matrix, dtype=np.float64)[t - 1, :t])


def forgetting(matrix: ArrayLike, t: int) -> float:
    """F_t: best earlier accuracy on a task minus the one after task t, mean over tasks 1..t-1 (Usmanova 2021, 4.3).

    Returns:
        F_t between -1 and 1, negative if the model improved; NaN if task t has not been learnt.

    Example:
        >>> forgetting([[1.0, 0.0], [0.0, 1.0]], t=2)
        1.0
    """
    a = np.asarray(matrix, dtype=np.float64)
    # fmax passes over the NaN rows of tasks that the model has skipped.
    best = [np.fmax.reduce(a[d : t - 1, d]) for d in range(t - 1)]
    return finite_mean(np.array(best) - a[t - 1, : t - 1])


def backward_transfer(matrix: ArrayLike) -> float:
    """BWT: change of the accuracy on a task between learning it and the end, mean over tasks 1..T-1.

    Equation 3 of Lopez-Paz and Ranzato 2017, "Gradient episodic memory for continual learning".

    Returns:
        BWT between -1 and 1, negative if the model forgets; NaN if the last task has not been learnt.

    Example:
        >>> backward_transfer([[1.0, 0.0], [0.25, 1.0]])
        -0.75
    """
    a = np.asarray(matrix, dtype=np.float64)
    return finite_mean(a[-1, :-1] - a.diagonal()[:-1])


def learning_accuracy(matrix: ArrayLike) -> float:
    """LA: accuracy on a task right after it was learnt, mean over tasks (Riemer et al. 2019, section 5).

    Returns:
        LA between 0 and 1; NaN if no task has been learnt.

    Example:
        >>> learning_accuracy([[1.0, 0.0], [0.25, 0.5]])
        0.75
    """
    return finite_mean(np.asarray(matrix, dtype=np.float64).diagonal())


def stream_accuracy(correct: ArrayLike, totals: ArrayLike, experience: ArrayLike, tasks: Tasks) -> FloatArray:
    """Accuracy on the test samples of experiences 0..i after the last round of experience i, shape (T,).

    Weighted by samples; a group that several experiences share counts once. The stream accuracy of De Caro et al. 2023,
    "Decentralized plasticity in reservoir dynamical networks for pervasive environments", table 2.

    Returns:
        The accuracies, with NaN for an experience without a round.

    Example:
        >>> stream_accuracy([[10, 0], [5, 30]], totals=[10, 30], experience=[0, 1], tasks=[[0], [1]])
        array([1.   , 0.875])
    """
    return stream_values(counted(correct, totals), experience, tasks)


# The same of any quantity: accuracy, or what a task is measured by in its place.


def counted(correct: ArrayLike, totals: ArrayLike) -> ValuesOf:
    """Accuracy, of counts (R, G) and totals (G,); NaN on groups without a sample."""
    counts, sizes = np.asarray(correct, dtype=np.float64), np.asarray(totals, dtype=np.float64)

    def on(groups: Iterable[int]) -> FloatArray:
        chosen = sorted(set(groups))
        return np.asarray(counts[..., chosen].sum(axis=-1) / (sizes[chosen].sum() or np.nan))

    return on


def values_of_measure(rounds: Sequence[Mapping[str, float | None]]) -> ValuesOf:
    """A measure, of what it came to in each round on the samples of some groups, by `part_name`, or NaN."""
    return lambda groups: np.array([row.get(part_name(groups)) for row in rounds], dtype=np.float64)


def part_name(groups: Iterable[int]) -> str:
    """What the test samples of some groups together are called in a record."""
    return "+".join(map(str, sorted(set(groups))))


def personal_values(on: ValuesOf, experience: ArrayLike, tasks: Tasks) -> FloatArray:
    """What a model came to on all groups that it had learnt by then, round by round, shape (R,)."""
    learnt: set[int] = set()
    values = []
    for row, number in enumerate(np.asarray(experience, dtype=np.int64)):
        learnt.update(tasks[number])
        values.append(on(learnt)[row])
    return np.asarray(values, dtype=np.float64)


def personal_value(on: ValuesOf, experience: ArrayLike, tasks: Tasks) -> float:
    """What `personal_accuracy` is of accuracy."""
    return finite_mean(personal_values(on, experience, tasks))


def value_matrix(on: ValuesOf, experience: ArrayLike, tasks: Tasks, rounds: Literal["mean", "last"]) -> FloatArray:
    """What `accuracy_matrix` is of accuracy."""
    on_task = np.stack([on(groups) for groups in tasks], axis=1)
    numbers = np.asarray(experience, dtype=np.int64)
    matrix = np.full((len(tasks), len(tasks)), np.nan)
    for t in np.unique(numbers):
        chosen = on_task[numbers == t]
        matrix[t] = chosen.mean(axis=0) if rounds == "mean" else chosen[-1]
    return matrix


def stream_values(on: ValuesOf, experience: ArrayLike, tasks: Tasks) -> FloatArray:
    """What `stream_accuracy` is of accuracy."""
    numbers = np.asarray(experience, dtype=np.int64)
    result = np.full(len(tasks), np.nan)
    for i in np.unique(numbers):
        seen = {group for groups in tasks[: i + 1] for group in groups}
        result[i] = on(seen)[numbers == i][-1]
    return result


def finite_mean(values: ArrayLike) -> float:
    """Mean of what is finite; NaN if nothing is."""
    array = np.asarray(values, dtype=np.float64)
    array = array[np.isfinite(array)]
    return float(array.mean()) if len(array) else float("nan")
