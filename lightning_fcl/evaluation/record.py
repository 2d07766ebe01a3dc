"""Records of runs: the test results of each model, round by round.

The record of `ContinualMetrics` has these entries:

- ``groups``: names of the groups of test samples (classes or domains).
- ``totals``: number of test samples in each group.
- ``tasks``: groups in each task of each model.
- ``rounds``: one entry for each round. It contains ``correct``, the number of correct predictions of each model in each
  group, and ``upload_bytes`` and ``download_bytes`` of each client.
- ``classes``: names of the classes.
- ``privacy``: guarantee and noise of differential privacy. Each round then contains ``epsilon``, if there is noise.

If experiences of models end with a round, the round also contains ``confusion``, the confusion matrix of each of these
models in its last test in the experience. A confusion matrix is a list of ``[target, prediction, count]``, with one
entry for each pair of classes that has predictions. The matrix counts the samples on which the model was tested. If a
fit ends within an experience, the record contains ``confusion`` with the models' last matrices in this experience.
`lightning_fcl.evaluation.confusion` reads the matrices.

If an experience of the server ends with a round, the round also contains ``correct_samples``: whether the server
predicts each test sample correctly, in the order of the test set. `lightning_fcl.evaluation.sample_bits` reads this
text.

If a module is evaluated by quantities other than accuracy, ``measures`` contains the names and directions of these
quantities. Each round then contains the values of these quantities under ``values`` instead of ``correct``,
and there are no confusion matrices.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from lightning_fcl.evaluation.continual import (
    FloatArray,
    Tasks,
    ValuesOf,
    group_accuracy,
    metric_values,
    personal_values,
    stream_values,
    value_matrix,
)

__all__ = [
    "ACCURACY",
    "Evaluation",
    "ModelHistory",
    "Quantity",
    "get_quantities",
    "get_quantity",
    "model_histories",
    "model_history",
    "server_first",
    "tested_models",
    "truncate_record",
]

Record: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Quantity:
    """A quantity by which models are evaluated: accuracy, or a measure of the module.

    Args:
        name: Name in the record.
        higher_is_better: Whether higher values are better.
        bounds: Lowest and highest value, or None if they are unknown.
    """

    name: str
    higher_is_better: bool
    bounds: tuple[float, float] | None = None

    @property
    def sign(self) -> int:
        """Factor by which a value is multiplied so that higher products are better: 1 or -1."""
        return 1 if self.higher_is_better else -1


ACCURACY = Quantity("accuracy", higher_is_better=True, bounds=(0, 1))


def get_quantities(record: Record) -> list[Quantity]:
    """Return the quantities of a record: accuracy, or the measures of the module.

    Example:
        >>> get_quantities({"measures": [{"name": "MSE", "higher_is_better": False}]})
        [Quantity(name='MSE', higher_is_better=False, bounds=None)]
    """
    if "measures" not in record:
        return [ACCURACY]
    return [Quantity(measure["name"], measure["higher_is_better"]) for measure in record["measures"]]


def get_quantity(record: Record) -> Quantity:
    """Return the quantity that curves and matrices of a record show: accuracy, or the first measure."""
    return get_quantities(record)[0]


def tested_models(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the test results of a round by model."""
    results: Mapping[str, Any] = entry["values"] if "values" in entry else entry["correct"]
    return results


@dataclass(frozen=True)
class ModelHistory:
    """The test results of one model for one quantity, round by round.

    Args:
        model: ``"server"``, or a client's id.
        quantity: Quantity of the values.
        values: Function that returns the value on some groups together for each of the R tests, shape (R,).
        experience: Number of the experience (from 0) in each of the R tests.
        tasks: Groups of each of the T tasks.
        num_groups: Number of groups of test samples.
        num_before_fit: Number of tests before the first round: 1 for the server of a stream with a base session.

    Example:
        >>> rounds = [{"round": r, "experience": {"a": r}, "correct": {"a": [10 - 9 * r, 8 * r]}} for r in range(2)]
        >>> record = {"groups": ["x", "y"], "totals": [10, 10], "tasks": {"a": [[0], [1]]}, "rounds": rounds}
        >>> Evaluation(record, ACCURACY).models[0].last_matrix.tolist()
        [[1.0, 0.0], [0.1, 0.8]]
    """

    model: str
    quantity: Quantity
    values: ValuesOf
    experience: list[int]
    tasks: Tasks
    num_groups: int
    num_before_fit: int = 0

    @cached_property
    def overall(self) -> FloatArray:
        """Value on the whole test set in each test, shape (R,)."""
        return self.values(range(self.num_groups))

    @cached_property
    def personal(self) -> FloatArray:
        """Value in each test on all groups that the model had learned by the time of the test, shape (R,)."""
        return personal_values(self.values, self.experience, self.tasks)

    @cached_property
    def stream(self) -> FloatArray:
        """Value on experiences 0 to i after the last round of experience i, for each experience i, shape (T,)."""
        return stream_values(self.values, self.experience, self.tasks)

    @cached_property
    def mean_matrix(self) -> FloatArray:
        """Value on task d (column), mean over the rounds of task t (row), shape (T, T)."""
        return value_matrix(self.values, self.experience, self.tasks, "mean")

    @cached_property
    def last_matrix(self) -> FloatArray:
        """Value on task d (column) after the last round of task t (row), shape (T, T)."""
        return value_matrix(self.values, self.experience, self.tasks, "last")


@dataclass(frozen=True)
class Evaluation:
    """The test results of all models of a run for one quantity.

    Args:
        record: Record of the run.
        quantity: One of the quantities that `get_quantities` returns.
    """

    record: Record
    quantity: Quantity

    @cached_property
    def models(self) -> list[ModelHistory]:
        """Histories of the models that were tested in a round, the server first."""
        return model_histories(self.record, self.quantity)

    @cached_property
    def own_accuracies(self) -> dict[str, float]:
        """Accuracy of each tested client's model after the last round on the client's own distribution of classes.

        The accuracy on each test group (class or domain) is weighted by the group's share of the client's training
        samples of all experiences so far. Groups without test samples are left out. NaN for a client without training
        samples, or whose model was not tested on one of these groups.
        """
        samples = self.record.get("client_samples", {})
        return {
            history.model: _own_accuracy(history, dict(samples[history.model]), self.record["totals"])
            for history in self.models
            if history.model in samples
        }

    @cached_property
    def local_models(self) -> list[ModelHistory]:
        """Histories of the clients' models before aggregation, from the rounds that recorded tests of these models."""
        name = "values" if "measures" in self.record else "correct"
        rounds = [{**entry, name: entry["local"]} for entry in self.record["rounds"] if "local" in entry]
        tasks = {model: tasks for model, tasks in self.record["tasks"].items() if model != "server"}
        return model_histories({**self.record, "tasks": tasks, "rounds": rounds}, self.quantity)


def _own_accuracy(history: ModelHistory, counts: Mapping[int, int], totals: Sequence[int]) -> float:
    learned = {group for task in history.tasks[: history.experience[-1] + 1] for group in task}
    groups = sorted(group for group in learned & counts.keys() if totals[group])
    if not groups:
        return math.nan
    weights = np.array([counts[group] for group in groups], dtype=np.float64)
    accuracies = np.array([history.values([group])[-1] for group in groups])
    return float((weights * accuracies).sum() / weights.sum())


def truncate_record(record: Record, tasks: int) -> dict[str, Any]:
    """Return a record with the first ``tasks`` tasks of each model, and with the rounds of the server's first tasks.

    If rounds are removed, the values that are measured at the end of a run are also removed.

    Example:
        >>> rounds = [{"round": r, "experience": {"server": r, "a": r}, "correct": {"a": [9 - r, r]}} for r in range(2)]
        >>> record = {"tasks": {"a": [[0], [1]]}, "rounds": rounds, "client_state_bytes": {"a": 40}}
        >>> cut = truncate_record(record, tasks=1)
        >>> cut["tasks"], len(cut["rounds"]), "client_state_bytes" in cut
        ({'a': [[0]]}, 1, False)
    """
    rounds = [entry for entry in record["rounds"] if entry["experience"]["server"] < tasks]
    final_fields = ("client_state_bytes", "training", "confusion") if len(rounds) < len(record["rounds"]) else ()
    retained_fields = {name: value for name, value in record.items() if name not in final_fields}
    return {
        **retained_fields,
        "tasks": {model: groups[:tasks] for model, groups in record["tasks"].items()},
        "rounds": rounds,
    }


def server_first(models: Iterable[str]) -> list[str]:
    """Return the names of models with the server first. The order of the clients is kept."""
    return sorted(models, key=lambda model: model != "server")


def model_histories(record: Record, quantity: Quantity, before_fit: bool = True) -> list[ModelHistory]:
    """Return the histories of the models that were tested in a round, the server first."""
    histories = (model_history(record, model, quantity, before_fit) for model in server_first(record["tasks"]))
    return [history for history in histories if len(history.experience) > history.num_before_fit]


def model_history(record: Record, model: str, quantity: Quantity, before_fit: bool = True) -> ModelHistory:
    """Return the history of a model, by default with the server's test before the first round."""
    entries = [entry for entry in record["rounds"] if model in tested_models(entry)]
    results = [tested_models(entry)[model] for entry in entries]
    experience = [entry["experience"][model] for entry in entries]
    num_before_fit = int(before_fit and model == "server" and "start" in record)
    if num_before_fit:
        results, experience = [record["start"], *results], [0, *experience]
    values = (
        metric_values([one[quantity.name] for one in results])
        if "measures" in record
        else group_accuracy(results, record["totals"])
    )
    tasks = record["tasks"][model]
    return ModelHistory(model, quantity, values, experience, tasks, len(record["groups"]), num_before_fit)
