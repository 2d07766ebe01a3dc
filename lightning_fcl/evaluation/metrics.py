"""The registry of metrics.

A metric is a `Metric` in `METRICS`. ``results.json``, reports, tables, cards and `lightning-fcl ls metrics` read the
registry. To add a metric, add a `Metric` to `METRICS`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lightning_fcl.evaluation.continual import (
    average_accuracy,
    backward_transfer,
    finite_mean,
    forgetting,
    learning_accuracy,
)
from lightning_fcl.evaluation.metric import (
    Metric,
    Score,
    clients,
    local_task_sequences,
    per_model,
    per_number,
    task_sequences,
)
from lightning_fcl.evaluation.record import (
    ACCURACY,
    Evaluation,
    ModelHistory,
    Quantity,
    Record,
    get_quantities,
    server_first,
)

__all__ = [
    "METRICS",
    "average_accuracy",
    "backward_transfer",
    "describe",
    "find_metric",
    "forgetting",
    "learning_accuracy",
    "metrics_for",
    "summarize",
]


def _general(history: ModelHistory) -> float:
    in_rounds = history.overall[history.num_before_fit :]
    # If a round tested a client on some groups only, the client has no accuracy on the whole test set, and no mean.
    return float(in_rounds.mean()) if history.quantity == ACCURACY else finite_mean(in_rounds)


def _average(history: ModelHistory) -> float:
    return average_accuracy(history.last_matrix, len(history.tasks))


def _forgetting(history: ModelHistory) -> float:
    return forgetting(history.quantity.sign * history.last_matrix, len(history.tasks))


def _backward_transfer(history: ModelHistory) -> float:
    return backward_transfer(history.quantity.sign * history.last_matrix)


def _learning(history: ModelHistory) -> float:
    return learning_accuracy(history.last_matrix)


def _num_tasks(history: ModelHistory) -> int:
    return len(history.tasks)


def _training(evaluation: Evaluation) -> Iterator[Score]:
    training = evaluation.record.get("training")
    if not training:
        return
    if evaluation.quantity == ACCURACY:
        yield Score("server", training["correct"] / training["total"])
    elif (value := training[evaluation.quantity.name]["0"]) is not None:
        yield Score("server", value)


def _client_state_bytes(evaluation: Evaluation) -> Iterator[Score]:
    if bytes_by_client := evaluation.record.get("client_state_bytes"):
        yield Score("clients", finite_mean(list(bytes_by_client.values())))


def _upload_bytes(evaluation: Evaluation) -> Iterator[Score]:
    yield Score("total", _total_bytes(evaluation.record, "upload_bytes"))


def _download_bytes(evaluation: Evaluation) -> Iterator[Score]:
    yield Score("total", _total_bytes(evaluation.record, "download_bytes"))


def _simulated_seconds(evaluation: Evaluation) -> Iterator[Score]:
    if timed := _timed_rounds(evaluation.record):
        yield Score("total", float(sum(entry["simulated_seconds"] for entry in timed)))


def _late_uploads(evaluation: Evaluation) -> Iterator[Score]:
    if timed := _timed_rounds(evaluation.record):
        yield Score("total", float(sum(len(entry.get("late_clients", ())) for entry in timed)))


def _total_bytes(record: Record, name: str) -> float:
    return float(sum(sum(entry.get(name, {}).values()) for entry in record["rounds"]))


def _timed_rounds(record: Record) -> list[Mapping[str, Any]]:
    return [entry for entry in record["rounds"] if "simulated_seconds" in entry]


FINAL_ACCURACY = Metric(
    "final_accuracy",
    per_model(lambda history: float(history.overall[-1])),
    "quantity",
    "{quantity} on the whole test set after the last round",
    measure_name="final_{measure}",
)
STREAM_ACCURACY = Metric(
    "stream_accuracy",
    per_model(lambda history: float(history.stream[history.experience[-1]])),
    "quantity",
    "{quantity} on the test samples of all experiences so far, after the last round",
    measure_name="stream_{measure}",
)
AVERAGE_ACCURACY = Metric(
    "average_accuracy",
    per_model(_average, task_sequences),
    "quantity",
    "{quantity} on each task after the last round, mean over the tasks",
    measure_name="average_{measure}",
)
FORGETTING = Metric(
    "forgetting",
    per_model(_forgetting, task_sequences),
    "minimize",
    "worsening of {quantity} on earlier tasks since the best value (tested after each task)",
    measure_name="forgetting_{measure}",
)
CLIENT_STATE_BYTES = Metric(
    "client_state_bytes",
    _client_state_bytes,
    "minimize",
    "size of a client's state between rounds at the end of the run, mean over clients",
    "B",
)
UPLOAD_BYTES = Metric("upload_bytes", _upload_bytes, "minimize", "size of all uploads of all clients", "B")
DOWNLOAD_BYTES = Metric("download_bytes", _download_bytes, "minimize", "size of all downloads of all clients", "B")

METRICS: tuple[Metric, ...] = (
    Metric(
        "general_accuracy",
        per_model(_general),
        "quantity",
        "{quantity} on the whole test set, mean over the rounds",
        measure_name="general_{measure}",
        title="A_gen",
    ),
    Metric(
        "personal_accuracy",
        per_model(lambda history: finite_mean(history.personal), clients),
        "quantity",
        "{quantity} on all groups that the client has learned so far, mean over the rounds",
        measure_name="personal_{measure}",
        title="A_per",
    ),
    FINAL_ACCURACY,
    STREAM_ACCURACY,
    Metric(
        "A_{number}",
        per_model(
            lambda history: average_accuracy(history.mean_matrix, _num_tasks(history)), task_sequences, _num_tasks
        ),
        "quantity",
        "{quantity} on each of the tasks, mean over the rounds of the last task and over the tasks",
        measure_name=None,
    ),
    Metric(
        "F_{number}",
        per_model(lambda history: forgetting(history.mean_matrix, _num_tasks(history)), task_sequences, _num_tasks),
        "minimize",
        "worsening of {quantity} on earlier tasks since the best value (mean over the rounds of each task)",
        measure_name=None,
    ),
    AVERAGE_ACCURACY,
    FORGETTING,
    Metric(
        "backward_transfer",
        per_model(_backward_transfer, task_sequences),
        "maximize",
        "backward transfer: improvement of {quantity} from a task's last round to the end of the run, mean over tasks",
        measure_name="backward_transfer_{measure}",
        title="BWT",
    ),
    Metric(
        "learning_accuracy",
        per_model(_learning, task_sequences),
        "quantity",
        "{quantity} on a task after its last round, mean over the tasks",
        measure_name="learning_{measure}",
    ),
    Metric(
        "stream_accuracy_{number}",
        per_number(lambda history: dict(enumerate(history.stream.tolist())), task_sequences),
        "quantity",
        "{quantity} on the test samples of experiences 0 to N after the last round of experience N",
        measure_name="stream_{measure}_{number}",
    ),
    Metric(
        "average_accuracy_local",
        per_model(_average, local_task_sequences),
        "quantity",
        "{quantity} of the client's model before aggregation, on each task after the last round, mean over the tasks",
        measure_name="average_{measure}_local",
    ),
    Metric(
        "forgetting_local",
        per_model(_forgetting, local_task_sequences),
        "minimize",
        "worsening of {quantity} of the client's model before aggregation on earlier tasks since the best value",
        measure_name="forgetting_{measure}_local",
    ),
    Metric(
        "backward_transfer_local",
        per_model(_backward_transfer, local_task_sequences),
        "maximize",
        "backward transfer of the client's model before aggregation: improvement of {quantity} on a task until the end",
        measure_name="backward_transfer_{measure}_local",
    ),
    Metric(
        "learning_accuracy_local",
        per_model(_learning, local_task_sequences),
        "quantity",
        "{quantity} of the client's model before aggregation on a task after its last round, mean over the tasks",
        measure_name="learning_{measure}_local",
    ),
    Metric(
        "train_accuracy",
        _training,
        "quantity",
        "{quantity} on all training samples after the last round",
        measure_name="train_{measure}",
    ),
    CLIENT_STATE_BYTES,
    UPLOAD_BYTES,
    DOWNLOAD_BYTES,
    Metric("simulated_seconds", _simulated_seconds, "minimize", "simulated duration of the run", "s"),
    Metric("late_uploads", _late_uploads, "minimize", "number of late uploads in the timing simulation", "uploads"),
)
"""All metrics of ``results.json``."""


def summarize(record: Record, metrics: Sequence[Metric] | None = None) -> dict[str, float]:
    """Return the metrics of a run as a flat dictionary. The keys are ``metric/model``, as in ``results.json``.

    ``model`` is ``server``, a client's id, ``clients`` (mean over the clients with a value) or ``total``. Metrics that
    cannot be computed are left out, for example because the run ended before the last task.

    Args:
        record: Record of the run.
        metrics: Metrics to compute. Default: `METRICS`, which `lightning-fcl ls metrics` lists.

    Example:
        >>> rounds = [{"round": r, "experience": {"a": r}, "correct": {"a": [10 - 10 * r, 10 * r]},
        ...     "upload_bytes": {"a": 40}, "download_bytes": {"a": 50}} for r in range(2)]
        >>> record = {"groups": ["x", "y"], "totals": [10, 10], "tasks": {"a": [[0], [1]]}, "rounds": rounds}
        >>> summary = summarize(record)
        >>> summary["personal_accuracy/a"], summary["A_2/a"], summary["F_2/clients"], summary["upload_bytes/total"]
        (0.75, 0.5, 1.0, 80.0)
    """
    by_model: dict[str, dict[str, float]] = {model: {} for model in [*server_first(record["tasks"]), "clients"]}
    for quantity in get_quantities(record):
        evaluation = Evaluation(record, quantity)
        for metric in metrics_for(quantity, metrics):
            for score in metric.function(evaluation):
                if np.isfinite(score.value):
                    by_model.setdefault(score.model, {})[metric.key(score)] = score.value
    return {key: value for values in by_model.values() for key, value in values.items()}


def overall_metrics(names: Iterable[str]) -> list[str]:
    """Return the names of metrics of the server, of the mean over clients and of the whole federation, in this order.

    Example:
        >>> overall_metrics(["upload_bytes/total", "final_accuracy/3", "final_accuracy/server"])
        ['final_accuracy/server', 'upload_bytes/total']
    """
    by_name = list(dict.fromkeys(names))
    return [name for model in ("server", "clients", "total") for name in by_name if name.endswith(f"/{model}")]


def metrics_for(quantity: Quantity, metrics: Sequence[Metric] | None = None) -> list[Metric]:
    """Return a copy of each metric that is defined for a quantity, with the metric's name for the quantity.

    Args:
        quantity: Quantity by which the models are evaluated.
        metrics: Metrics to select from. Default: `METRICS`.

    Example:
        >>> [metric.name for metric in metrics_for(Quantity("MSE", higher_is_better=False), [FORGETTING])]
        ['forgetting_MSE']
    """
    quantity_metrics = (metric.for_quantity(quantity) for metric in (METRICS if metrics is None else metrics))
    return [metric for metric in quantity_metrics if metric is not None]


def describe() -> dict[str, str]:
    """Return the description of each metric of accuracy, by the metric's name. N in a name stands for a number.

    Example:
        >>> describe()["forgetting"]
        'worsening of accuracy on earlier tasks since the best value (tested after each task); lower is better'
    """
    return {metric.name.replace("{number}", "N"): metric.about for metric in metrics_for(ACCURACY)}


def find_metric(key: str, quantities: Sequence[Quantity] = (ACCURACY,)) -> Metric | None:
    """Return the metric with a name, or None if there is no such metric. The name may end in ``/model``.

    Args:
        key: Name in ``results.json``.
        quantities: Quantities by which the models of the run are evaluated.

    Example:
        >>> find_metric("upload_bytes/total").unit
        'B'
    """
    names = (key.rpartition("/")[0], key)
    candidates = [metric for quantity in quantities for metric in metrics_for(quantity)]
    return next((metric for name in names for metric in candidates if metric.matches(name)), None)
