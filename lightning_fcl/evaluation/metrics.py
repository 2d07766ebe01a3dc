"""The registry of metrics.

A metric is a `Metric` in `METRICS`. ``results.json``, reports, tables, cards and `lightning-fcl ls metrics` read the
registry. To add a metric, add a `Metric` to `METRICS`.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from lightning_fcl.evaluation.bytes_curve import bytes_scores
from lightning_fcl.evaluation.client_spread import lowest_tenth, own_scores, spread_of_own
from lightning_fcl.evaluation.continual import (
    average_accuracy,
    backward_transfer,
    finite_mean,
    forgetting,
    forward_transfer,
    learning_accuracy,
)
from lightning_fcl.evaluation.metric import (
    Metric,
    clients,
    local_task_sequences,
    per_model,
    per_number,
    task_sequences,
)
from lightning_fcl.evaluation.record import (
    ACCURACY,
    Evaluation,
    Quantity,
    Record,
    get_quantities,
    server_first,
)
from lightning_fcl.evaluation.scores import (
    anytime_scores,
    average_value,
    backward_transfer_value,
    client_state_scores,
    download_scores,
    forgetting_value,
    forward_transfer_scores,
    general_value,
    incremental_scores,
    late_upload_scores,
    learning_value,
    num_tasks,
    processor_seconds_scores,
    simulated_seconds_scores,
    train_sample_scores,
    training_scores,
    upload_scores,
)

__all__ = [
    "METRICS",
    "average_accuracy",
    "backward_transfer",
    "describe",
    "find_metric",
    "forgetting",
    "forward_transfer",
    "learning_accuracy",
    "metrics_for",
    "summarize",
]


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
    per_model(average_value, task_sequences),
    "quantity",
    "{quantity} on each task after the last round, mean over the tasks",
    measure_name="average_{measure}",
)
FORGETTING = Metric(
    "forgetting",
    per_model(forgetting_value, task_sequences),
    "minimize",
    "worsening of {quantity} on earlier tasks since the best value (tested after each task)",
    measure_name="forgetting_{measure}",
)
INCREMENTAL_ACCURACY = Metric(
    "incremental_accuracy",
    incremental_scores,
    "quantity",
    "{quantity} on the test samples of all experiences so far after each experience, mean over the experiences",
    measure_name="incremental_{measure}",
    title="average incremental accuracy",
)
ANYTIME_ACCURACY = Metric(
    "anytime_accuracy",
    anytime_scores,
    "quantity",
    "{quantity} on the test samples of all experiences so far, mean over all tests during the fit",
    measure_name="anytime_{measure}",
    title="average anytime accuracy",
)
LEARNING_ACCURACY = Metric(
    "learning_accuracy",
    per_model(learning_value, task_sequences),
    "quantity",
    "{quantity} on a task after its last round, mean over the tasks",
    measure_name="learning_{measure}",
)
OWN_ACCURACY = Metric(
    "own_accuracy",
    own_scores,
    "quantity",
    "{quantity} with each class weighted by its share of the client's training samples, after the last round",
    measure_name=None,
)
OWN_ACCURACY_STD = Metric(
    "own_accuracy_std",
    spread_of_own(np.std),
    "minimize",
    "population standard deviation of own_accuracy over the clients",
    measure_name=None,
)
OWN_ACCURACY_LOWEST = Metric(
    "own_accuracy_lowest",
    spread_of_own(np.min),
    "quantity",
    "{quantity} of the worst client, with classes weighted as in own_accuracy",
    measure_name=None,
    title="worst client",
)
OWN_ACCURACY_TENTH = Metric(
    "own_accuracy_lowest_tenth",
    spread_of_own(lowest_tenth),
    "quantity",
    "{quantity} of the worst 10 % of the clients (rounded up), mean, with classes weighted as in own_accuracy",
    measure_name=None,
    title="worst 10 % of clients",
)
BYTES_ACCURACY = Metric(
    "bytes_accuracy",
    bytes_scores,
    "quantity",
    "{quantity} on the whole test set, mean over log10 of a client's cumulative bytes from 10 kB to 100 MB",
    measure_name=None,
    title="accuracy over bytes",
)
TRAIN_SAMPLES = Metric(
    "train_samples",
    train_sample_scores,
    "minimize",
    "number of samples in the training batches of all clients, over all rounds and local epochs",
    "samples",
)
PROCESSOR_SECONDS = Metric(
    "processor_seconds",
    processor_seconds_scores,
    "minimize",
    "processor time of training and aggregation, without tests of models",
    "s",
)
CLIENT_STATE_BYTES = Metric(
    "client_state_bytes",
    client_state_scores,
    "minimize",
    "size of a client's state between rounds at the end of the run, mean over clients",
    "B",
)
UPLOAD_BYTES = Metric("upload_bytes", upload_scores, "minimize", "size of all uploads of all clients", "B")
DOWNLOAD_BYTES = Metric("download_bytes", download_scores, "minimize", "size of all downloads of all clients", "B")

METRICS: tuple[Metric, ...] = (
    Metric(
        "general_accuracy",
        per_model(general_value),
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
        per_model(lambda history: average_accuracy(history.mean_matrix, num_tasks(history)), task_sequences, num_tasks),
        "quantity",
        "{quantity} on each of the tasks, mean over the rounds of the last task and over the tasks",
        measure_name=None,
    ),
    Metric(
        "F_{number}",
        per_model(lambda history: forgetting(history.mean_matrix, num_tasks(history)), task_sequences, num_tasks),
        "minimize",
        "worsening of {quantity} on earlier tasks since the best value (mean over the rounds of each task)",
        measure_name=None,
    ),
    AVERAGE_ACCURACY,
    INCREMENTAL_ACCURACY,
    ANYTIME_ACCURACY,
    FORGETTING,
    Metric(
        "forward_transfer",
        forward_transfer_scores,
        "maximize",
        "forward transfer: improvement of {quantity} on a task from before the fit to before the task, mean over tasks",
        measure_name="forward_transfer_{measure}",
        title="FWT",
    ),
    OWN_ACCURACY,
    OWN_ACCURACY_STD,
    OWN_ACCURACY_LOWEST,
    OWN_ACCURACY_TENTH,
    BYTES_ACCURACY,
    Metric(
        "backward_transfer",
        per_model(backward_transfer_value, task_sequences),
        "maximize",
        "backward transfer: improvement of {quantity} from a task's last round to the end of the run, mean over tasks",
        measure_name="backward_transfer_{measure}",
        title="BWT",
    ),
    LEARNING_ACCURACY,
    Metric(
        "stream_accuracy_{number}",
        per_number(lambda history: dict(enumerate(history.stream.tolist())), task_sequences),
        "quantity",
        "{quantity} on the test samples of experiences 0 to N after the last round of experience N",
        measure_name="stream_{measure}_{number}",
    ),
    Metric(
        "average_accuracy_local",
        per_model(average_value, local_task_sequences),
        "quantity",
        "{quantity} of the client's model before aggregation, on each task after the last round, mean over the tasks",
        measure_name="average_{measure}_local",
    ),
    Metric(
        "forgetting_local",
        per_model(forgetting_value, local_task_sequences),
        "minimize",
        "worsening of {quantity} of the client's model before aggregation on earlier tasks since the best value",
        measure_name="forgetting_{measure}_local",
    ),
    Metric(
        "backward_transfer_local",
        per_model(backward_transfer_value, local_task_sequences),
        "maximize",
        "backward transfer of the client's model before aggregation: improvement of {quantity} on a task until the end",
        measure_name="backward_transfer_{measure}_local",
    ),
    Metric(
        "learning_accuracy_local",
        per_model(learning_value, local_task_sequences),
        "quantity",
        "{quantity} of the client's model before aggregation on a task after its last round, mean over the tasks",
        measure_name="learning_{measure}_local",
    ),
    Metric(
        "train_accuracy",
        training_scores,
        "quantity",
        "{quantity} on all training samples after the last round",
        measure_name="train_{measure}",
    ),
    CLIENT_STATE_BYTES,
    UPLOAD_BYTES,
    DOWNLOAD_BYTES,
    TRAIN_SAMPLES,
    Metric("simulated_seconds", simulated_seconds_scores, "minimize", "simulated duration of the run", "s"),
    Metric(
        "late_uploads", late_upload_scores, "minimize", "number of late uploads in the timing simulation", "uploads"
    ),
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
