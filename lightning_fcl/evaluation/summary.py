"""The main numbers of a run, and its communication in bytes and seconds.

Communication volume and time follow Zuo et al. 2024, "FedViT", section 5.3. They are computed from the record of
`ContinualMetrics`, which contains the bytes that every client sent and received in every round. If the strategy has a
`synchronization`, the rounds can also contain ``simulated_seconds``, ``late_clients`` and ``staleness``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.evaluation.continual import FloatArray
from lightning_fcl.evaluation.curves import curves
from lightning_fcl.evaluation.metric import Unit
from lightning_fcl.evaluation.metrics import (
    AVERAGE_ACCURACY,
    DOWNLOAD_BYTES,
    FINAL_ACCURACY,
    FORGETTING,
    UPLOAD_BYTES,
)
from lightning_fcl.evaluation.record import ACCURACY, Evaluation, get_quantity
from lightning_fcl.validation import format_names

BANDWIDTHS = (1e5, 2.5e5, 5e5, 1e6, 5e6, 1e7)
"""Bandwidths in bytes per second. Zuo et al. (2024) name 100 KB/s and 10 MB/s, and use 1 MB/s."""
DIRECTIONS = ("upload_bytes", "download_bytes")


HEADLINES = (
    (FINAL_ACCURACY, {"server": "server, whole test set"}),
    (AVERAGE_ACCURACY, {"clients": "mean over clients and their tasks", "server": "server, mean over its tasks"}),
    (FORGETTING, {"clients": "mean over clients", "server": "server, mean over earlier tasks"}),
)
"""Metrics at the top of reports, with a note for each model. A report shows the first of these models with a value."""


@dataclass(frozen=True)
class SummaryMetric:
    """A main number of a run.

    Args:
        name: Heading.
        value: Value.
        note: The model and the test samples of the value.
        unit: Unit of the value.
    """

    name: str
    value: float
    note: str
    unit: Unit = ""

    @property
    def text(self) -> str:
        """Value with its unit."""
        return format_value(self.value, self.unit)


def format_value(value: float, unit: Unit = "") -> str:
    """Return a value as text.

    Seconds and bytes are followed by their unit. A count, such as a number of rounds, is a whole number without its
    unit. A value without a unit has three decimals.
    """
    if unit == "s":
        return f"{value:.1f} s"
    if unit != "B":
        return f"{value:.0f}" if unit else f"{value:.3f}"
    for name, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:.0f} B"


def summary_metrics(results: Mapping[str, Any]) -> list[SummaryMetric]:
    """Return the main numbers of a run: final and average accuracy, forgetting, worst client and communication.

    Numbers that the run does not have are left out.
    """
    record, metrics = results["record"], results["metrics"]
    quantity, summaries = get_quantity(record), list[SummaryMetric]()
    for metric, notes in HEADLINES:
        if quantity_metric := metric.for_quantity(quantity):
            values = ((metrics.get(f"{quantity_metric.name}/{model}"), note) for model, note in notes.items())
            available_metrics = [
                SummaryMetric(quantity_metric.heading, value, note, quantity_metric.unit)
                for value, note in values
                if value is not None
            ]
            summaries += available_metrics[:1]
    own_values = Evaluation(record, quantity).own_accuracies if quantity == ACCURACY else {}
    own_values = {client: value for client, value in own_values.items() if np.isfinite(value)}
    if len(own_values) > 1:
        client = min(own_values, key=own_values.__getitem__)
        note = f"{model_name(client)}, with the classes of its own samples"
        summaries.append(SummaryMetric("worst client", own_values[client], note))
    elif len(ends := final_client_metrics(record)) > 1:
        client, value = ends[0]
        summaries.append(SummaryMetric("worst client", value, f"{model_name(client)}, on all experiences so far"))
    if communication_bytes := sum(
        metrics.get(f"{metric.name}/total", 0.0) for metric in (UPLOAD_BYTES, DOWNLOAD_BYTES)
    ):
        summaries.append(
            SummaryMetric("communication", communication_bytes, "uploads and downloads of all clients", "B")
        )
    return summaries


def final_client_metrics(record: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the last value of each tested client on all groups that the client has learned, the worst client first.

    The result contains pairs of client and value. Clients with a non-finite value are left out.
    """
    values_by_client = {model: curve.seen_classes for model, curve in curves(record).items() if model != "server"}
    ends = [(model, float(values[-1])) for model, values in values_by_client.items() if np.isfinite(values[-1])]
    return sorted(ends, key=lambda end: get_quantity(record).sign * end[1])


def model_name(model: str) -> str:
    """Return the name that reports use for a model."""
    return "mean over clients" if model == "clients" else f"client {model}" if model.isdigit() else model


def task_name(record: Mapping[str, Any], model: str, task: int) -> str:
    """Return the names of the groups in a model's task as text: at most 12 names, and the number of remaining names."""
    return format_names((record["groups"][group] for group in record["tasks"][model][task]), max_names=12)


def experience_names(record: Mapping[str, Any]) -> list[str]:
    """Return the names of the server's experiences.

    The name of an experience contains the names of its groups. If a name is longer than 24 characters or two names are
    equal, all experiences are numbered from 1 instead.
    """
    names = [", ".join(record["groups"][group] for group in groups) for groups in record["tasks"].get("server", [])]
    distinct = len(set(names)) == len(names) and max(map(len, names), default=0) <= 24
    return names if distinct else [str(number + 1) for number in range(len(names))]


def experience_labels(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a label for each experience, such as "after digits".

    The labels are "after experience 1", "after experience 2", ... if the experiences have numbers instead of names, or
    if the runs have different experience names.
    """
    names = experience_names(records[0])
    numbers = [str(number + 1) for number in range(len(names))]
    if names != numbers and all(experience_names(record) == names for record in records):
        return [f"after {name}" for name in names]
    return [f"after experience {number}" for number in numbers]


def describe_run_size(results: Mapping[str, Any]) -> str:
    """Return the number of rounds and clients of a run as text."""
    clients = [model for model in results["record"]["tasks"] if model != "server"]
    counts = {"round": len(results["record"]["rounds"]), "client": len(clients)}
    return ", ".join(f"{number} {what}{'s' * (number != 1)}" for what, number in counts.items())


def communication_volumes(record: Mapping[str, Any]) -> FloatArray:
    """Return the bytes that all clients together sent (row 0) and received (row 1) in each of R rounds, shape (2, R).

    Example:
        >>> record = {"rounds": [{"upload_bytes": {"a": 40, "b": 40}, "download_bytes": {"a": 50, "b": 50}}]}
        >>> communication_volumes(record)
        array([[ 80.],
               [100.]])
    """
    sums = [[sum(entry.get(way, {}).values()) for entry in record["rounds"]] for way in DIRECTIONS]
    return np.asarray(sums, dtype=np.float64)


def communication_time(record: Mapping[str, Any], bandwidth: float) -> float:
    """Return the communication time of a run in seconds.

    All clients transfer at the same time, each over its own link. A client first downloads, then trains, and then
    uploads. A round waits for the client with the largest sum of uploaded and downloaded bytes. Latency and the
    bandwidth of the server are ignored.

    Args:
        record: Record of a run.
        bandwidth: Bytes per second of the link of each client, for uploads and for downloads.

    Raises:
        ValueError: If ``bandwidth`` is not a positive finite number.

    Example:
        >>> record = {"rounds": [{"upload_bytes": {"a": 400_000}, "download_bytes": {"a": 600_000}}] * 3}
        >>> communication_time(record, bandwidth=1e6)
        3.0
    """
    if not 0 < bandwidth < float("inf"):
        raise InvalidValueError(
            f"Expected `bandwidth` to be a positive finite number of bytes per second, but got {bandwidth}.",
            argument="bandwidth",
            value=bandwidth,
        )
    slowest = []
    for entry in record["rounds"]:
        upload_bytes, download_bytes = (entry.get(way, {}) for way in DIRECTIONS)
        slowest.append(
            max(
                (
                    upload_bytes.get(client, 0) + download_bytes.get(client, 0)
                    for client in {*upload_bytes, *download_bytes}
                ),
                default=0,
            )
        )
    return float((np.asarray(slowest, dtype=np.float64) / bandwidth).sum())


def simulated_times(record: Mapping[str, Any]) -> FloatArray:
    """Return the simulated seconds from the start of the run to the end of each of R rounds, shape (R,).

    The array is empty if the run has no simulated clock.

    Example:
        >>> simulated_times({"rounds": [{"simulated_seconds": 2.0}, {"simulated_seconds": 3.0}]})
        array([2., 5.])
    """
    seconds = [entry["simulated_seconds"] for entry in record["rounds"] if "simulated_seconds" in entry]
    return np.cumsum(np.asarray(seconds, dtype=np.float64))


def time_to(record: Mapping[str, Any], value: float, model: str = "server") -> float:
    """Return the simulated seconds from the start of a run until a model first reached a value on the whole test set.

    Args:
        record: Record of a run.
        value: Accuracy, or value of the first measure of the record.
        model: ``"server"``, or a client's id.

    Returns:
        Simulated seconds at the end of the first round with this value or a better value. Infinite if no round has such
        a value, or if the model was not tested.

    Raises:
        ValueError: If the record contains no simulated seconds.

    Example:
        >>> rounds = [{"round": r, "experience": {"server": 0}, "correct": {"server": [5 + r]},
        ...     "simulated_seconds": 10.0} for r in range(3)]
        >>> record = {"groups": ["x"], "totals": [10], "tasks": {"server": [[0]]}, "rounds": rounds}
        >>> time_to(record, 0.6), time_to(record, 0.9)
        (20.0, inf)
    """
    times = simulated_times(record)
    if not len(times):
        raise InvalidValueError(
            "Expected a record with simulated seconds, but the record has none.",
            hint="Give the strategy a `synchronization`, such as `Deadline(ClientSpeeds(0.01))`.",
            argument="synchronization",
        )
    sign, tested = get_quantity(record).sign, curves(record).get(model)
    if tested is None:
        return float("inf")
    matching_times = times[tested.rounds][sign * tested.overall >= sign * value]
    return float(matching_times[0]) if len(matching_times) else float("inf")
