"""The scores of the metrics in the registry: formulas applied to the models of a run."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from lightning_fcl.evaluation.continual import (
    average_accuracy,
    backward_transfer,
    finite_mean,
    forgetting,
    forward_transfer,
    learning_accuracy,
)
from lightning_fcl.evaluation.metric import Score
from lightning_fcl.evaluation.record import ACCURACY, Evaluation, ModelHistory, Record


def general_value(history: ModelHistory) -> float:
    in_rounds = history.overall[history.num_before_fit :]
    # If a round tested a client on some groups only, the client has no accuracy on the whole test set, and no mean.
    return float(in_rounds.mean()) if history.quantity == ACCURACY else finite_mean(in_rounds)


def average_value(history: ModelHistory) -> float:
    return average_accuracy(history.last_matrix, len(history.tasks))


def forgetting_value(history: ModelHistory) -> float:
    return forgetting(history.quantity.sign * history.last_matrix, len(history.tasks))


def backward_transfer_value(history: ModelHistory) -> float:
    return backward_transfer(history.quantity.sign * history.last_matrix)


def learning_value(history: ModelHistory) -> float:
    return learning_accuracy(history.last_matrix)


def num_tasks(history: ModelHistory) -> int:
    return len(history.tasks)


def anytime_scores(evaluation: Evaluation) -> Iterator[Score]:
    for history in _server(evaluation):
        yield Score("server", finite_mean(history.personal[history.num_before_fit :]))


def incremental_scores(evaluation: Evaluation) -> Iterator[Score]:
    for history in _server(evaluation):
        yield Score("server", finite_mean(history.stream))


def _server(evaluation: Evaluation) -> list[ModelHistory]:
    return [history for history in evaluation.models if history.model == "server"]


def forward_transfer_scores(evaluation: Evaluation) -> Iterator[Score]:
    # In a class-incremental stream, a model cannot predict the classes of later tasks.
    if evaluation.record.get("scenario") not in ("domain", "task"):
        return
    for history in _server(evaluation):
        if history.num_before_fit and len(history.tasks) > 1:
            before_fit = np.array([history.values(task)[0] for task in history.tasks])
            sign = history.quantity.sign
            yield Score("server", forward_transfer(sign * history.last_matrix, sign * before_fit))


def training_scores(evaluation: Evaluation) -> Iterator[Score]:
    training = evaluation.record.get("training")
    if not training:
        return
    if evaluation.quantity == ACCURACY:
        yield Score("server", training["correct"] / training["total"])
    elif (value := training[evaluation.quantity.name]["0"]) is not None:
        yield Score("server", value)


def client_state_scores(evaluation: Evaluation) -> Iterator[Score]:
    if bytes_by_client := evaluation.record.get("client_state_bytes"):
        yield Score("clients", finite_mean(list(bytes_by_client.values())))


def upload_scores(evaluation: Evaluation) -> Iterator[Score]:
    yield Score("total", _total_bytes(evaluation.record, "upload_bytes"))


def download_scores(evaluation: Evaluation) -> Iterator[Score]:
    yield Score("total", _total_bytes(evaluation.record, "download_bytes"))


def simulated_seconds_scores(evaluation: Evaluation) -> Iterator[Score]:
    if timed := _timed_rounds(evaluation.record):
        yield Score("total", float(sum(entry["simulated_seconds"] for entry in timed)))


def late_upload_scores(evaluation: Evaluation) -> Iterator[Score]:
    if timed := _timed_rounds(evaluation.record):
        yield Score("total", float(sum(len(entry.get("late_clients", ())) for entry in timed)))


def _total_bytes(record: Record, name: str) -> float:
    return float(sum(sum(entry.get(name, {}).values()) for entry in record["rounds"]))


def train_sample_scores(evaluation: Evaluation) -> Iterator[Score]:
    counts = [entry["train_samples"] for entry in evaluation.record["rounds"] if "train_samples" in entry]
    if counts:
        yield Score("total", float(sum(sum(by_client.values()) for by_client in counts)))


def processor_seconds_scores(evaluation: Evaluation) -> Iterator[Score]:
    rounds = evaluation.record["rounds"]
    if rounds and all("processor_seconds" in entry for entry in rounds):
        yield Score("total", float(sum(entry["processor_seconds"] for entry in rounds)))


def _timed_rounds(record: Record) -> list[Mapping[str, Any]]:
    return [entry for entry in record["rounds"] if "simulated_seconds" in entry]
