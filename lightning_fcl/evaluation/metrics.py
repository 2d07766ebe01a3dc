"""Metrics of a run: from its record of predictions to curves, matrices and a flat summary.

A ``record``, that of `ContinualMetrics`, tells how many test samples of each *group* (a class, or a domain) each model
got right after each round: ``groups``, ``totals`` (test samples of each group), ``tasks`` (of each model, the groups of
each task) and ``rounds``, each with ``upload_bytes`` and ``download_bytes`` of the clients.
Where a task is measured by other quantities than accuracy, ``measures`` tells their names and which way is better, and
the rounds tell what each came to, under ``values``.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.errors import one_of
from lightning_fcl.evaluation.continual import (
    FloatArray,
    Tasks,
    ValuesOf,
    average_accuracy,
    backward_transfer,
    counted,
    finite_mean,
    forgetting,
    learning_accuracy,
    personal_values,
    stream_values,
    value_matrix,
    values_of_measure,
)

__all__ = [
    "Curve",
    "average_accuracy",
    "backward_transfer",
    "curves",
    "first_tasks",
    "forgetting",
    "learning_accuracy",
    "matrices",
    "stream_accuracies",
    "summarize",
    "task_curves",
]

_AFTER_TASKS = ("average_", "forgetting", "BWT", "learning_")  # of the last test in each experience alone


@dataclass(frozen=True)
class Curve:
    """How one model did, round by round.

    Args:
        rounds: Numbers of the rounds in which it was tested, from 0, shape (R,).
        experience: Number of its experience in each of them, from 0, shape (R,).
        accuracy: Accuracy, or `quantity`, per round and group, shape (R, G); NaN for a group without test samples.
        overall: The same on the whole test set, shape (R,).
        learnt: The same on all groups that the model had learnt by then, shape (R,).

    Example:
        >>> zero, half = np.array([0]), np.array([0.5])
        >>> Curve(zero, zero, accuracy=np.array([[0.5, 0.1]]), overall=np.array([0.3]), learnt=half).overall
        array([0.3])
    """

    rounds: NDArray[np.int64]
    experience: NDArray[np.int64]
    accuracy: FloatArray
    overall: FloatArray
    learnt: FloatArray


def quantity(record: Mapping[str, Any]) -> str:
    """What curves and matrices of a record are of: accuracy, or the first of its measures."""
    name: str = record["measures"][0]["name"] if "measures" in record else "accuracy"
    return name


def sign(record: Mapping[str, Any], measure: str | None = None) -> int:
    """1 for a quantity that is better when higher, else -1."""
    higher = {one["name"]: one["higher_is_better"] for one in record.get("measures", [])}
    return 1 if higher.get(measure or quantity(record), True) else -1


def models_tested(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """The models that were tested in a round, with what they came to."""
    found: Mapping[str, Any] = entry["values"] if "values" in entry else entry["correct"]
    return found


def curves(record: Mapping[str, Any], measure: str | None = None) -> dict[str, Curve]:
    """Accuracy, or a measure, by default `quantity`, per group and round of every model of a record, the server first.

    Example:
        >>> rounds = [{"round": 0, "experience": {"server": 0}, "correct": {"server": [5, 1]}}]
        >>> record = {"groups": ["a", "b"], "totals": [10, 10], "tasks": {"server": [[0, 1]]}, "rounds": rounds}
        >>> curves(record)["server"].accuracy
        array([[0.5, 0.1]])
    """
    result = {}
    for model in sorted(record["tasks"], key=lambda model: bool(model != "server")):
        on, experience, tasks = _history(record, model, measure, start=False)
        if experience:
            groups = range(len(record["groups"]))
            rounds = [entry["round"] for entry in record["rounds"] if model in models_tested(entry)]
            result[model] = Curve(
                rounds=np.array(rounds, dtype=np.int64),
                experience=np.array(experience, dtype=np.int64),
                accuracy=np.stack([on([group]) for group in groups], axis=1),
                overall=on(groups),
                learnt=personal_values(on, experience, tasks),
            )
    return result


def matrices(record: Mapping[str, Any], rounds: Literal["mean", "last"] = "mean") -> dict[str, FloatArray]:
    """Matrix of the accuracy, or `quantity`, of every model of a record with at least two tasks, the server first.

    Args:
        record: That of a run.
        rounds: ``"mean"``: mean over the rounds of task t, as Usmanova et al. 2021 have it; ``"last"``: its last round
            only, as is usual in continual learning.

    Returns:
        Shape (T, T), with NaN in the rows of tasks without a round and the columns of tasks without a test sample.

    Example:
        >>> rounds = [{"round": r, "experience": {"a": r}, "correct": {"a": [10 - 9 * r, 8 * r]}} for r in range(2)]
        >>> record = {"groups": ["x", "y"], "totals": [10, 10], "tasks": {"a": [[0], [1]]}, "rounds": rounds}
        >>> matrices(record)["a"].tolist()
        [[1.0, 0.0], [0.1, 0.8]]
    """
    several = [model for model in curves(record) if len(record["tasks"][model]) > 1]
    return {model: value_matrix(*_history(record, model), rounds) for model in several}


def task_curves(record: Mapping[str, Any]) -> tuple[FloatArray, FloatArray]:
    """`average_accuracy` and `forgetting` after each task, mean over the clients, both of shape (T,).

    Of each client's own sequence of tasks, from the last round of each in which it was tested. A client counts after
    the tasks that it has been tested after.

    Returns:
        NaN where no client was tested, and for the forgetting after the first task. T is the longest sequence of a
        client with several tasks; empty if there is no such client.

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
        long_enough = [matrix for matrix in of_clients if len(matrix) >= t]
        accuracy[t - 1] = finite_mean([average_accuracy(matrix, t) for matrix in long_enough])
        if t > 1:
            forgotten[t - 1] = finite_mean([forgetting(sign(record) * matrix, t) for matrix in long_enough])
    return accuracy, forgotten


def stream_accuracies(record: Mapping[str, Any], model: str = "server") -> FloatArray:
    """Accuracy on the test samples of experiences 0..i after the last round of experience i, shape (T,).

    Weighted by samples; a group that several experiences share counts once. The stream accuracy of De Caro et al. 2023,
    "Decentralized plasticity in reservoir dynamical networks for pervasive environments", table 2.

    Args:
        record: That of a run.
        model: Whose: ``"server"``, or a client's id.

    Returns:
        The accuracies, with NaN for an experience in whose rounds the model was not tested.

    Raises:
        ValueError: If the record knows no such model.

    Example:
        >>> rounds = [{"round": r, "experience": {"a": r}, "correct": {"a": [10 - 5 * r, 30 * r]}} for r in range(2)]
        >>> record = {"groups": ["x", "y"], "totals": [10, 30], "tasks": {"a": [[0], [1], [1]]}, "rounds": rounds}
        >>> stream_accuracies(record, "a")
        array([1.   , 0.875,   nan])
    """
    one_of(record["tasks"], model=model)
    return stream_values(*_history(record, model))


def summarize(record: Mapping[str, Any]) -> dict[str, float]:
    """Every metric of a run as a flat dictionary ``metric/model``, ready for JSON.

    For each model ``A_gen``, ``final_accuracy`` (on the whole test set after the last round) and ``stream_accuracy``;
    for each client ``A_per``. For each model with T > 1 tasks ``A_T`` and ``F_T`` with the number in T's place, from
    the mean over a task's rounds (Usmanova et al. 2021); and from a task's last round, as is usual in continual
    learning, ``average_accuracy``, ``forgetting``, ``BWT`` and ``learning_accuracy``; and ``stream_accuracy_i`` after
    experience i, from 0. Where clients' own models were tested before aggregation beside what they predict with after
    it, ``average_accuracy_own``, ``forgetting_own``, ``BWT_own`` and ``learning_accuracy_own``. Beside the clients'
    values the mean over the clients that have one, as ``metric/clients``. Finally ``kept_bytes/clients``, the mean of
    what stays with a client when the run ends, ``upload_bytes/total`` and ``download_bytes/total``, and by the clock of
    a rehearsed deployment ``simulated_seconds/total`` and ``late/total``, the number of late uploads.

    A metric that cannot be computed, for example because the run ended before the last task, is left out.

    Example:
        >>> rounds = [{"round": r, "experience": {"a": r}, "correct": {"a": [10 - 10 * r, 10 * r]},
        ...     "upload_bytes": {"a": 40}, "download_bytes": {"a": 50}} for r in range(2)]
        >>> record = {"groups": ["x", "y"], "totals": [10, 10], "tasks": {"a": [[0], [1]]}, "rounds": rounds}
        >>> summary = summarize(record)
        >>> summary["A_per/a"], summary["A_2/a"], summary["F_2/clients"], summary["upload_bytes/total"]
        (0.75, 0.5, 1.0, 80.0)
    """
    measures = [one["name"] for one in record["measures"]] if "measures" in record else [None]
    models = _all_metrics(record, measures)
    # The clients' own models alone, as their last local training of each experience has left them.
    name = "values" if "measures" in record else "correct"
    own = [{**entry, name: entry["own"]} for entry in record["rounds"] if "own" in entry]
    tasks = {model: tasks for model, tasks in record["tasks"].items() if model != "server"}
    for model, metrics in _all_metrics({**record, "tasks": tasks, "rounds": own}, measures).items():
        found = {name: value for name, value in metrics.items() if name.startswith(_AFTER_TASKS)}
        models[model] = models.get(model, {}) | {f"{name}_own": value for name, value in found.items()}
    clients = [metrics for model, metrics in models.items() if model != "server"]
    names = dict.fromkeys(name for metrics in clients for name in metrics)
    models["clients"] = {name: finite_mean([metrics.get(name, np.nan) for metrics in clients]) for name in names}
    summary = {f"{name}/{model}": value for model, metrics in models.items() for name, value in metrics.items()}
    summary = {name: value for name, value in summary.items() if np.isfinite(value)}
    if training := record.get("training"):
        if "measures" in record:
            summary |= {f"training_{name}/server": values["0"] for name, values in training.items()}
        else:
            summary["training_accuracy/server"] = training["correct"] / training["total"]
    if kept := record.get("kept_bytes"):
        summary["kept_bytes/clients"] = finite_mean(list(kept.values()))
    for way in ("upload_bytes", "download_bytes"):
        summary[f"{way}/total"] = float(sum(sum(entry.get(way, {}).values()) for entry in record["rounds"]))
    if timed := [entry for entry in record["rounds"] if "simulated_seconds" in entry]:
        summary["simulated_seconds/total"] = float(sum(entry["simulated_seconds"] for entry in timed))
        summary["late/total"] = float(sum(len(entry.get("late", ())) for entry in timed))
    return summary


def first_tasks(record: Mapping[str, Any], tasks: int) -> dict[str, Any]:
    """The record that a run would have if each client had its first tasks alone; of a whole one, without its end.

    Example:
        >>> rounds = [{"round": r, "experience": {"server": r, "a": r}, "correct": {"a": [9 - r, r]}} for r in range(2)]
        >>> cut = first_tasks({"tasks": {"a": [[0], [1]]}, "rounds": rounds, "kept_bytes": {"a": 40}}, tasks=1)
        >>> cut["tasks"], len(cut["rounds"]), "kept_bytes" in cut
        ({'a': [[0]]}, 1, False)
    """
    rounds = [entry for entry in record["rounds"] if entry["experience"]["server"] < tasks]
    ended = ("kept_bytes", "training") if len(rounds) < len(record["rounds"]) else ()
    kept = {name: value for name, value in record.items() if name not in ended}
    return {**kept, "tasks": {model: own[:tasks] for model, own in record["tasks"].items()}, "rounds": rounds}


def _all_metrics(record: Mapping[str, Any], measures: Sequence[str | None]) -> dict[str, dict[str, float]]:
    """The metrics of each model: of accuracy, or of measures, which have their names in theirs."""
    found: dict[str, dict[str, float]] = {model: {} for model in curves(record)}
    for (model, metrics), measure in itertools.product(found.items(), measures):
        on, experience, tasks = history = _history(record, model, measure)
        general, personal, of, lost = "A_gen", "A_per", "accuracy", ""
        if measure is not None:
            general, personal, of, lost = f"general_{measure}", f"personal_{measure}", measure, f"_{measure}"
        overall, passed, t = on(range(len(record["groups"]))), stream_values(*history), len(tasks)
        tested = overall[int(model == "server" and "start" in record) :]  # a base session was no round
        metrics[general] = float(tested.mean()) if measure is None else finite_mean(tested)
        if model != "server":
            metrics[personal] = finite_mean(personal_values(*history))
        metrics |= {f"final_{of}": float(overall[-1]), f"stream_{of}": float(passed[experience[-1]])}
        if t > 1:
            mean, last, way = value_matrix(*history, "mean"), value_matrix(*history, "last"), sign(record, measure)
            metrics |= {f"A_{t}": average_accuracy(mean, t), f"F_{t}": forgetting(mean, t)} if measure is None else {}
            metrics[f"average_{of}"] = average_accuracy(last, t)
            metrics[f"forgetting{lost}"] = forgetting(way * last, t)
            metrics[f"BWT{lost}"] = backward_transfer(way * last)
            metrics[f"learning_{of}"] = learning_accuracy(last)
            metrics |= {f"stream_{of}_{i}": float(value) for i, value in enumerate(passed)}
    return found


def _history(
    record: Mapping[str, Any], model: str, measure: str | None = None, start: bool = True
) -> tuple[ValuesOf, list[int], Tasks]:
    """Values, experiences and tasks of a model in the rounds in which it was tested, from the ``start`` of a record."""
    entries = [entry for entry in record["rounds"] if model in models_tested(entry)]
    found = [models_tested(entry)[model] for entry in entries]
    experiences = [entry["experience"][model] for entry in entries]
    if start and model == "server" and "start" in record:
        found, experiences = [record["start"], *found], [0, *experiences]
    if "measures" not in record:
        return counted(found, record["totals"]), experiences, record["tasks"][model]
    return values_of_measure([one[measure or quantity(record)] for one in found]), experiences, record["tasks"][model]
