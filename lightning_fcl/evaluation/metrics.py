"""Metrics of federated continual learning: from counts of correct predictions to a flat summary.

Everything is computed from one record per run: how many test samples of each *group* (a class, or a domain) each model
got right after each round. The functions on arrays take ``correct`` of shape (R, G), a row for every round in which the
model was tested: a round in which a client did not take part is simply not there. A group that it was not tested on has
None (NaN); a metric that asks for it cannot be computed. Accuracies are between 0 and 1.

`general_accuracy`, `personal_accuracy`, `average_accuracy` and `forgetting` follow section 4.3 of Usmanova et al. 2021,
"A distillation-based approach integrating continual learning and federated learning for pervasive services".
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "Curve",
    "accuracy_matrix",
    "average_accuracy",
    "backward_transfer",
    "curves",
    "forgetting",
    "general_accuracy",
    "learning_accuracy",
    "matrices",
    "personal_accuracy",
    "stream_accuracies",
    "stream_accuracy",
    "summarize",
    "task_curves",
]

FloatArray: TypeAlias = NDArray[np.float64]
Tasks: TypeAlias = Sequence[Sequence[int]]


def general_accuracy(correct: ArrayLike, totals: ArrayLike) -> float:
    """A_gen: accuracy on the whole test set, mean over the rounds (Usmanova et al. 2021, section 4.3).

    Args:
        correct: Correct predictions per round and group, shape (R, G).
        totals: Test samples per group, shape (G,).

    Raises:
        ValueError: If shapes or counts do not fit together.

    Example:
        >>> general_accuracy([[10, 0], [8, 4]], totals=[10, 10])
        0.55
    """
    counts, sizes = _counts(correct, totals)
    return float(_accuracy(counts, sizes, range(len(sizes))).mean())


def personal_accuracy(correct: ArrayLike, totals: ArrayLike, experience: ArrayLike, tasks: Tasks) -> float:
    """A_per: accuracy on all groups the client has learnt so far, mean over the rounds (Usmanova et al. 2021, 4.3).

    Args:
        correct: Correct predictions per round and group, shape (R, G).
        totals: Test samples per group, shape (G,).
        experience: Number of the task (from 0) that each round trained on, shape (R,).
        tasks: Groups of each task.

    Raises:
        ValueError: If shapes or counts do not fit together, or a round trained on a task that does not exist.

    Example:
        >>> personal_accuracy([[10, 0], [0, 10]], totals=[10, 10], experience=[0, 1], tasks=[[0], [1]])
        0.75
    """
    counts, sizes = _counts(correct, totals)
    learnt: set[int] = set()
    values = []
    for row, number in zip(counts, _numbers(experience, len(counts), tasks), strict=True):
        learnt.update(tasks[number])
        values.append(float(_accuracy(row, sizes, learnt)))
    return _mean(values)


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

    Raises:
        ValueError: If shapes or counts do not fit together, or a round trained on a task that does not exist.

    Example:
        >>> accuracy_matrix([[10, 0], [8, 0], [0, 10]], [10, 10], experience=[0, 0, 1], tasks=[[0], [1]])
        array([[0.9, 0. ],
               [0. , 1. ]])
    """
    if rounds not in ("mean", "last"):
        raise ValueError(f'Expected `rounds` to be "mean" or "last" but got "{rounds}".')
    counts, sizes = _counts(correct, totals)
    numbers = _numbers(experience, len(counts), tasks)
    on_task = np.stack([_accuracy(counts, sizes, groups) for groups in tasks], axis=1)
    matrix = np.full((len(tasks), len(tasks)), np.nan)
    for t in np.unique(numbers):
        chosen = on_task[numbers == t]
        matrix[t] = chosen.mean(axis=0) if rounds == "mean" else chosen[-1]
    return matrix


def average_accuracy(matrix: ArrayLike, t: int) -> float:
    """A_t: mean accuracy on the tasks 1..t after learning task t (Usmanova et al. 2021, section 4.3).

    Args:
        matrix: Accuracy matrix of shape (T, T), see `accuracy_matrix`. NaN entries are left out of the mean.
        t: Number of tasks learnt, from 1 to T.

    Returns:
        A_t, or NaN if task t has not been learnt.

    Raises:
        ValueError: If `matrix` is not square or `t` is out of range.

    Example:
        >>> average_accuracy([[1.0, 0.0], [0.0, 1.0]], t=2)
        0.5
    """
    return _mean(_square(matrix, t)[t - 1, :t])


def forgetting(matrix: ArrayLike, t: int) -> float:
    """F_t: best earlier accuracy on a task minus the one after task t, mean over tasks 1..t-1 (Usmanova 2021, 4.3).

    Args:
        matrix: Accuracy matrix of shape (T, T), see `accuracy_matrix`. NaN entries are left out.
        t: Number of tasks learnt, from 2 to T.

    Returns:
        F_t between -1 and 1, negative if the model improved; NaN if task t has not been learnt.

    Raises:
        ValueError: If `matrix` is not square or `t` is out of range.

    Example:
        >>> forgetting([[1.0, 0.0], [0.0, 1.0]], t=2)
        1.0
    """
    a = _square(matrix, t, lowest=2)
    # fmax passes over the NaN rows of tasks that the model has skipped.
    best = [np.fmax.reduce(a[d : t - 1, d]) for d in range(t - 1)]
    return _mean(np.array(best) - a[t - 1, : t - 1])


def backward_transfer(matrix: ArrayLike) -> float:
    """BWT: change of the accuracy on a task between learning it and the end, mean over tasks 1..T-1.

    Equation 3 of Lopez-Paz and Ranzato 2017, "Gradient episodic memory for continual learning".

    Args:
        matrix: Accuracy matrix of shape (T, T) with T at least 2, see `accuracy_matrix`. NaN entries are left out.

    Returns:
        BWT between -1 and 1, negative if the model forgets; NaN if the last task has not been learnt.

    Raises:
        ValueError: If `matrix` is not square or smaller than 2 by 2.

    Example:
        >>> backward_transfer([[1.0, 0.0], [0.25, 1.0]])
        -0.75
    """
    a = _square(matrix, len(np.asarray(matrix)), lowest=2)
    return _mean(a[-1, :-1] - a.diagonal()[:-1])


def learning_accuracy(matrix: ArrayLike) -> float:
    """LA: accuracy on a task right after it was learnt, mean over tasks (Riemer et al. 2019, section 5).

    Args:
        matrix: Accuracy matrix of shape (T, T), see `accuracy_matrix`. NaN entries are left out.

    Returns:
        LA between 0 and 1; NaN if no task has been learnt.

    Raises:
        ValueError: If `matrix` is not square.

    Example:
        >>> learning_accuracy([[1.0, 0.0], [0.25, 0.5]])
        0.75
    """
    return _mean(_square(matrix, len(np.asarray(matrix))).diagonal())


def stream_accuracy(correct: ArrayLike, totals: ArrayLike, experience: ArrayLike, tasks: Tasks) -> FloatArray:
    """Accuracy on the test samples of experiences 0..i after the last round of experience i, shape (T,).

    Weighted by samples; a group that several experiences share counts once. The stream accuracy of De Caro et al. 2023,
    "Decentralized plasticity in reservoir dynamical networks for pervasive environments", table 2.

    Args:
        correct: Correct predictions per round and group, shape (R, G).
        totals: Test samples per group, shape (G,).
        experience: Number of the experience (from 0) that each round trained on, shape (R,).
        tasks: Groups of each of the T experiences.

    Returns:
        The accuracies, with NaN for an experience without a round.

    Raises:
        ValueError: If shapes or counts do not fit together, or a round trained on a task that does not exist.

    Example:
        >>> stream_accuracy([[10, 0], [5, 30]], totals=[10, 30], experience=[0, 1], tasks=[[0], [1]])
        array([1.   , 0.875])
    """
    counts, sizes = _counts(correct, totals)
    numbers = _numbers(experience, len(counts), tasks)
    result = np.full(len(tasks), np.nan)
    for i in np.unique(numbers):
        seen = {group for groups in tasks[: i + 1] for group in groups}
        result[i] = _accuracy(counts[numbers == i][-1], sizes, seen)
    return result


@dataclass(frozen=True)
class Curve:
    """How one model did, round by round.

    Args:
        rounds: Numbers of the rounds in which it was tested, from 0, shape (R,).
        experience: Number of its experience in each of them, from 0, shape (R,).
        accuracy: Accuracy per round and group, shape (R, G); NaN for a group without test samples.
        overall: Accuracy on the whole test set, shape (R,).

    Example:
        >>> Curve(np.array([0]), np.array([0]), accuracy=np.array([[0.5, 0.1]]), overall=np.array([0.3])).overall
        array([0.3])
    """

    rounds: NDArray[np.int64]
    experience: NDArray[np.int64]
    accuracy: FloatArray
    overall: FloatArray


def curves(record: Mapping[str, Any]) -> dict[str, Curve]:
    """Accuracy per group and round of every model of a record, the server first.

    Args:
        record: The record of a run: ``groups``, ``totals``, ``tasks`` and ``rounds``.

    Raises:
        ValueError: If the counts do not fit together.

    Example:
        >>> rounds = [{"round": 0, "experience": {"server": 0}, "correct": {"server": [5, 1]}}]
        >>> record = {"groups": ["a", "b"], "totals": [10, 10], "tasks": {"server": [[0, 1]]}, "rounds": rounds}
        >>> curves(record)["server"].accuracy
        array([[0.5, 0.1]])
    """
    result = {}
    for model in sorted(record["tasks"], key=lambda model: bool(model != "server")):
        entries = [entry for entry in record["rounds"] if model in entry["correct"]]
        if not entries:
            continue
        counts, sizes = _counts([entry["correct"][model] for entry in entries], record["totals"])
        result[model] = Curve(
            rounds=np.array([entry["round"] for entry in entries], dtype=np.int64),
            experience=np.array([entry["experience"][model] for entry in entries], dtype=np.int64),
            accuracy=np.stack([_accuracy(counts, sizes, [group]) for group in range(len(sizes))], axis=1),
            overall=_accuracy(counts, sizes, range(len(sizes))),
        )
    return result


def matrices(record: Mapping[str, Any], rounds: Literal["mean", "last"] = "mean") -> dict[str, FloatArray]:
    """Accuracy matrix of every model of a record that has at least two tasks, the server first.

    Args:
        record: The record of a run: ``groups``, ``totals``, ``tasks`` and ``rounds``.
        rounds: See `accuracy_matrix`.

    Raises:
        ValueError: If the counts do not fit together.

    Example:
        >>> rounds = [{"round": r, "experience": {"a": r}, "correct": {"a": [10 - 9 * r, 8 * r]}} for r in range(2)]
        >>> record = {"groups": ["x", "y"], "totals": [10, 10], "tasks": {"a": [[0], [1]]}, "rounds": rounds}
        >>> matrices(record)["a"].tolist()
        [[1.0, 0.0], [0.1, 0.8]]
    """
    several = [model for model in curves(record) if len(record["tasks"][model]) > 1]
    return {model: accuracy_matrix(*_history(record, model), rounds=rounds) for model in several}


def task_curves(record: Mapping[str, Any]) -> tuple[FloatArray, FloatArray]:
    """`average_accuracy` and `forgetting` after each task, mean over the clients, both of shape (T,).

    Of each client's own sequence of tasks, from the last round of each in which it was tested. A client counts after
    the tasks that it has been tested after.

    Args:
        record: The record of a run: ``groups``, ``totals``, ``tasks`` and ``rounds``.

    Returns:
        NaN where no client was tested, and for the forgetting after the first task. T is the longest sequence of a
        client with several tasks; empty if there is no such client.

    Raises:
        ValueError: If the counts do not fit together.

    Example:
        >>> rounds = [{"round": r, "experience": {"a": r}, "correct": {"a": [10 - 9 * r, 8 * r]}} for r in range(2)]
        >>> record = {"groups": ["x", "y"], "totals": [10, 10], "tasks": {"a": [[0], [1]]}, "rounds": rounds}
        >>> task_curves(record)
        (array([1.  , 0.45]), array([nan, 0.9]))
    """
    of_clients = [matrix for model, matrix in matrices(record, rounds="last").items() if model != "server"]
    longest = max(map(len, of_clients), default=0)
    accuracy, forgotten = np.full(longest, np.nan), np.full(longest, np.nan)
    for t in range(1, longest + 1):
        there = [matrix for matrix in of_clients if len(matrix) >= t]
        accuracy[t - 1] = _mean([average_accuracy(matrix, t) for matrix in there])
        if t > 1:
            forgotten[t - 1] = _mean([forgetting(matrix, t) for matrix in there])
    return accuracy, forgotten


def stream_accuracies(record: Mapping[str, Any], model: str = "server") -> FloatArray:
    """How a model's `stream_accuracy` went as experiences passed, shape (T,).

    Args:
        record: The record of a run: ``groups``, ``totals``, ``tasks`` and ``rounds``.
        model: Whose: ``"server"``, or a client's id.

    Returns:
        The accuracies, with NaN for an experience in whose rounds the model was not tested.

    Raises:
        ValueError: If the record knows no such model, or the counts do not fit together.

    Example:
        >>> rounds = [{"round": r, "experience": {"a": r}, "correct": {"a": [10 - 5 * r, 30 * r]}} for r in range(2)]
        >>> record = {"groups": ["x", "y"], "totals": [10, 30], "tasks": {"a": [[0], [1], [1]]}, "rounds": rounds}
        >>> stream_accuracies(record, "a")
        array([1.   , 0.875,   nan])
    """
    if model not in record["tasks"]:
        raise ValueError(f"Expected `model` to be one of {', '.join(record['tasks'])} but got {model}.")
    counts, sizes, experience, tasks = _history(record, model)
    return stream_accuracy(counts, sizes, experience, tasks) if counts else np.full(len(tasks), np.nan)


def summarize(record: Mapping[str, Any]) -> dict[str, float]:
    """Every metric of a run as a flat dictionary ``metric/model``, ready for JSON.

    For each model ``A_gen``, ``final_accuracy`` (on the whole test set after the last round) and ``stream_accuracy``;
    for each client ``A_per``. For each model with T > 1 tasks ``A_T`` and ``F_T`` with the number in T's place, from
    the mean over a task's rounds (Usmanova et al. 2021); and from a task's last round, as is usual in continual
    learning, ``average_accuracy``, ``forgetting``, ``BWT`` and ``learning_accuracy``; and ``stream_accuracy_i`` after
    experience i, from 0. Beside the clients' values the mean over the clients
    that have one, as ``metric/clients``. Finally ``upload_bytes/total`` and ``download_bytes/total``.

    A metric that cannot be computed, for example because the run ended before the last task, is left out.

    Args:
        record: The record of a run: ``groups``, ``totals``, ``tasks`` and ``rounds``.

    Raises:
        ValueError: If the counts do not fit together.

    Example:
        >>> rounds = [{"round": r, "experience": {"a": r}, "correct": {"a": [10 - 10 * r, 10 * r]},
        ...     "upload_bytes": {"a": 40}, "download_bytes": {"a": 50}} for r in range(2)]
        >>> record = {"groups": ["x", "y"], "totals": [10, 10], "tasks": {"a": [[0], [1]]}, "rounds": rounds}
        >>> summary = summarize(record)
        >>> summary["A_per/a"], summary["A_2/a"], summary["F_2/clients"], summary["upload_bytes/total"]
        (0.75, 0.5, 1.0, 80.0)
    """
    models = {model: _metrics_of(record, model) for model in curves(record)}
    clients = [metrics for model, metrics in models.items() if model != "server"]
    names = dict.fromkeys(name for metrics in clients for name in metrics)
    models["clients"] = {name: _mean([metrics.get(name, np.nan) for metrics in clients]) for name in names}
    summary = {f"{name}/{model}": value for model, metrics in models.items() for name, value in metrics.items()}
    summary = {name: value for name, value in summary.items() if np.isfinite(value)}
    if training := record.get("training"):
        summary["training_accuracy/server"] = training["correct"] / training["total"]
    for way in ("upload_bytes", "download_bytes"):
        summary[f"{way}/total"] = float(sum(sum(entry.get(way, {}).values()) for entry in record["rounds"]))
    return summary


def _metrics_of(record: Mapping[str, Any], model: str) -> dict[str, float]:
    history = _history(record, model)
    counts, sizes, experience, tasks = history
    rounds = counts[int(model == "server" and "start" in record) :]
    metrics = {"A_gen": general_accuracy(rounds, sizes)}
    if model != "server":
        metrics["A_per"] = personal_accuracy(*history)
    metrics["final_accuracy"] = general_accuracy(counts[-1:], sizes)
    passed = stream_accuracy(*history)
    metrics["stream_accuracy"] = float(passed[experience[-1]])
    if (t := len(tasks)) > 1:
        mean, last = accuracy_matrix(*history), accuracy_matrix(*history, rounds="last")
        metrics[f"A_{t}"] = average_accuracy(mean, t)
        metrics[f"F_{t}"] = forgetting(mean, t)
        metrics["average_accuracy"] = average_accuracy(last, t)
        metrics["forgetting"] = forgetting(last, t)
        metrics["BWT"] = backward_transfer(last)
        metrics["learning_accuracy"] = learning_accuracy(last)
        metrics |= {f"stream_accuracy_{i}": float(value) for i, value in enumerate(passed)}
    return metrics


def _history(record: Mapping[str, Any], model: str) -> tuple[list[list[int]], list[int], list[int], list[list[int]]]:
    """Counts, totals, experience and tasks of a model in the rounds in which it was tested."""
    entries = [entry for entry in record["rounds"] if model in entry["correct"]]
    counts = [entry["correct"][model] for entry in entries]
    experiences = [entry["experience"][model] for entry in entries]
    if model == "server" and "start" in record:  # the model of a base session, which was no round
        counts, experiences = [record["start"], *counts], [0, *experiences]
    return counts, record["totals"], experiences, record["tasks"][model]


def _counts(correct: ArrayLike, totals: ArrayLike) -> tuple[FloatArray, FloatArray]:
    counts, sizes = np.asarray(correct, dtype=np.float64), np.asarray(totals, dtype=np.float64)
    if sizes.ndim != 1 or not sizes.sum() > 0 or (sizes < 0).any():
        raise ValueError(f"Expected `totals` to count the test samples of each group but got {sizes.tolist()}.")
    if counts.ndim != 2 or not len(counts) or counts.shape[1] != len(sizes):
        raise ValueError(
            f"Expected `correct` to have one row per round and {len(sizes)} columns, one for each entry of `totals`, "
            f"but got shape {counts.shape}."
        )
    if wrong := np.argwhere((counts < 0) | (counts > sizes)).tolist():
        r, g = wrong[0]
        raise ValueError(
            f"Expected `correct` to be between 0 and `totals` but got {counts[r, g]:g} of {sizes[g]:g} in row {r}, "
            f"group {g}. Count every model on the same test set."
        )
    return counts, sizes


def _numbers(experience: ArrayLike, rounds: int, tasks: Tasks) -> NDArray[np.int64]:
    numbers = np.asarray(experience, dtype=np.int64)
    if numbers.shape != (rounds,):
        raise ValueError(f"Expected `experience` to have one entry per row of `correct`, {rounds}, but got {numbers}.")
    if not ((numbers >= 0) & (numbers < len(tasks))).all():
        raise ValueError(
            f"Expected `experience` to number the {len(tasks)} `tasks` from 0 but got {numbers.tolist()}. "
            f"List the groups of every experience in `tasks`."
        )
    return numbers


def _accuracy(counts: FloatArray, sizes: FloatArray, groups: Iterable[int]) -> FloatArray:
    """Accuracy over the samples of some groups, along the last axis; NaN if they have no samples."""
    chosen = sorted(set(groups))
    total = sizes[chosen].sum()
    result: FloatArray = np.asarray(counts[..., chosen].sum(axis=-1) / (total if total else np.nan))
    return result


def _square(matrix: ArrayLike, t: int, lowest: int = 1) -> FloatArray:
    a = np.asarray(matrix, dtype=np.float64)
    if a.ndim != 2 or a.shape[0] != a.shape[1]:
        raise ValueError(f"Expected `matrix` to be square, tasks by tasks, but got shape {a.shape}.")
    if not lowest <= t <= len(a):
        raise ValueError(f"Expected `t` to be a number of tasks between {lowest} and {len(a)} but got {t}.")
    return a


def _mean(values: ArrayLike) -> float:
    array = np.asarray(values, dtype=np.float64)
    array = array[np.isfinite(array)]
    return float(array.mean()) if len(array) else float("nan")
