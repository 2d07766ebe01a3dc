"""Curves and matrices of a run: the values of each model after each round, and after each task."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.evaluation.continual import FloatArray, average_accuracy, finite_mean, forgetting
from lightning_fcl.evaluation.record import (
    Quantity,
    Record,
    get_quantity,
    model_histories,
    model_history,
    tested_models,
)
from lightning_fcl.validation import one_of

__all__ = ["Curve", "curves", "matrices", "stream_accuracies", "task_curves"]


@dataclass(frozen=True)
class Curve:
    """The test results of one model, round by round.

    Args:
        rounds: Numbers of the rounds in which the model was tested, from 0, shape (R,).
        experience: Number of the model's experience in each of these rounds, from 0, shape (R,).
        accuracy: Accuracy, or another evaluated quantity, in each round and on each group, shape (R, G). NaN for a
            group without test samples.
        overall: Value on the whole test set in each round, shape (R,).
        seen_classes: Value in each round on all groups that the model has learned until this round, shape (R,).

    Example:
        >>> zero, half = np.array([0]), np.array([0.5])
        >>> Curve(zero, zero, accuracy=np.array([[0.5, 0.1]]), overall=np.array([0.3]), seen_classes=half).overall
        array([0.3])
    """

    rounds: NDArray[np.int64]
    experience: NDArray[np.int64]
    accuracy: FloatArray
    overall: FloatArray
    seen_classes: FloatArray


def curves(record: Record, quantity: Quantity | None = None) -> dict[str, Curve]:
    """Return the curve of each tested model, by the name of the model. The server is first.

    Args:
        record: Record of the run.
        quantity: Quantity of the values. By default, the result of `get_quantity`.

    Example:
        >>> rounds = [{"round": 0, "experience": {"server": 0}, "correct": {"server": [5, 1]}}]
        >>> record = {"groups": ["a", "b"], "totals": [10, 10], "tasks": {"server": [[0, 1]]}, "rounds": rounds}
        >>> curves(record)["server"].accuracy
        array([[0.5, 0.1]])
    """
    result = {}
    for history in model_histories(record, quantity or get_quantity(record), before_fit=False):
        rounds = [entry["round"] for entry in record["rounds"] if history.model in tested_models(entry)]
        result[history.model] = Curve(
            rounds=np.array(rounds, dtype=np.int64),
            experience=np.array(history.experience, dtype=np.int64),
            accuracy=np.stack([history.values([group]) for group in range(history.num_groups)], axis=1),
            overall=history.overall,
            seen_classes=history.personal,
        )
    return result


def matrices(record: Record, rounds: Literal["mean", "last"] = "mean") -> dict[str, FloatArray]:
    """Return the value matrix of each tested model with at least two tasks, by the model's name. The server is first.

    The values are those of the quantity that `get_quantity` returns.

    Args:
        record: Record of the run.
        rounds: ``"mean"``: mean over the rounds of task t (Usmanova et al., 2021). ``"last"``: last round of task t, as
            is usual in continual learning.

    Returns:
        Arrays of shape (T, T): value on task d (column) after task t (row). NaN in the rows of tasks without a test,
        and in the columns of tasks without a test sample.

    Example:
        >>> rounds = [{"round": r, "experience": {"a": r}, "correct": {"a": [10 - 9 * r, 8 * r]}} for r in range(2)]
        >>> record = {"groups": ["x", "y"], "totals": [10, 10], "tasks": {"a": [[0], [1]]}, "rounds": rounds}
        >>> matrices(record)["a"].tolist()
        [[1.0, 0.0], [0.1, 0.8]]
    """
    histories = [history for history in model_histories(record, get_quantity(record)) if len(history.tasks) > 1]
    return {one.model: one.mean_matrix if rounds == "mean" else one.last_matrix for one in histories}


def stream_accuracies(record: Record, model: str = "server") -> FloatArray:
    """Return, for each experience i, the accuracy on experiences 0 to i after the last round of experience i.

    Each test sample has the same weight. A group that belongs to several experiences counts once. This is the stream
    accuracy of De Caro et al. 2023, "Decentralized plasticity in reservoir dynamical networks for pervasive
    environments", table 2.

    Args:
        record: Record of the run.
        model: ``"server"``, or a client's id.

    Returns:
        The accuracies, shape (T,). NaN for an experience in whose rounds the model was not tested.

    Raises:
        ValueError: If the record does not contain the model.

    Example:
        >>> rounds = [{"round": r, "experience": {"a": r}, "correct": {"a": [10 - 5 * r, 30 * r]}} for r in range(2)]
        >>> record = {"groups": ["x", "y"], "totals": [10, 30], "tasks": {"a": [[0], [1], [1]]}, "rounds": rounds}
        >>> stream_accuracies(record, "a")
        array([1.   , 0.875,   nan])
    """
    one_of(record["tasks"], model=model)
    return model_history(record, model, get_quantity(record)).stream


def task_curves(record: Record) -> tuple[FloatArray, FloatArray]:
    """Return `average_accuracy` and `forgetting` after each task, mean over the clients, both of shape (T,).

    The values come from the last round of each task in which a client was tested. A client that was not tested after a
    task is left out of the mean for this task.

    Returns:
        Arrays with one value for each task. An entry is NaN if no client was tested after this task. The forgetting
        after the first task is NaN. T is the largest number of tasks of a client. Both arrays are empty if no tested
        client has at least two tasks.

    Example:
        >>> rounds = [{"round": r, "experience": {"a": r}, "correct": {"a": [10 - 9 * r, 8 * r]}} for r in range(2)]
        >>> record = {"groups": ["x", "y"], "totals": [10, 10], "tasks": {"a": [[0], [1]]}, "rounds": rounds}
        >>> task_curves(record)
        (array([1.  , 0.45]), array([nan, 0.9]))
    """
    by_client = [matrix for model, matrix in matrices(record, rounds="last").items() if model != "server"]
    longest = max(map(len, by_client), default=0)
    accuracy, forgetting_values = np.full(longest, np.nan), np.full(longest, np.nan)
    for t in range(1, longest + 1):
        long_enough = [matrix for matrix in by_client if len(matrix) >= t]
        accuracy[t - 1] = finite_mean([average_accuracy(matrix, t) for matrix in long_enough])
        if t > 1:
            sign = get_quantity(record).sign
            forgetting_values[t - 1] = finite_mean([forgetting(sign * matrix, t) for matrix in long_enough])
    return accuracy, forgetting_values
