"""Communication and time of a run: how much went over the network, and how long that, and the rounds, took.

Computed from the record of `ContinualMetrics`, which holds the bytes that every client sent and received in every
round: the volume and time of Zuo et al. 2024, "FedViT", section 5.3. By the clock of a rehearsed deployment, where the
strategy was given a schedule, its rounds also have ``simulated_seconds``, ``late`` and ``staleness``.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lightning_fcl.evaluation.continual import FloatArray
from lightning_fcl.evaluation.metrics import curves, sign

__all__ = ["BANDWIDTHS", "communication_time", "simulated_times", "time_to", "volumes"]

BANDWIDTHS = (1e5, 2.5e5, 5e5, 1e6, 5e6, 1e7)
"""Six bandwidths in bytes per second: the paper names the first, 100 KB/s, the last, 10 MB/s, and its own, 1 MB/s."""

_WAYS = ("upload_bytes", "download_bytes")


def volumes(record: Mapping[str, Any]) -> FloatArray:
    """Bytes that all clients together sent, and received, in each round, shape (2, R).

    Example:
        >>> record = {"rounds": [{"upload_bytes": {"a": 40, "b": 40}, "download_bytes": {"a": 50, "b": 50}}]}
        >>> volumes(record)
        array([[ 80.],
               [100.]])
    """
    sums = [[sum(entry.get(way, {}).values()) for entry in record["rounds"]] for way in _WAYS]
    return np.asarray(sums, dtype=np.float64)


def communication_time(record: Mapping[str, Any], bandwidth: float) -> float:
    """Seconds of communication of a whole run.

    All clients transfer at once, each over a link of its own, first down and after its training up; a round waits for
    the client with the most bytes, both ways together. Neither latency nor a limit of the server's own link counts.

    Args:
        record: That of a run.
        bandwidth: Bytes per second of each client's link, the same up and down.

    Raises:
        ValueError: If ``bandwidth`` is not a positive number.

    Example:
        >>> record = {"rounds": [{"upload_bytes": {"a": 400_000}, "download_bytes": {"a": 600_000}}] * 3}
        >>> communication_time(record, bandwidth=1e6)
        3.0
    """
    if not 0 < bandwidth < float("inf"):
        raise ValueError(f"Expected `bandwidth` to be a positive number of bytes per second but got {bandwidth}.")
    slowest = []
    for entry in record["rounds"]:
        up, down = (entry.get(way, {}) for way in _WAYS)
        slowest.append(max((up.get(client, 0) + down.get(client, 0) for client in {*up, *down}), default=0))
    return float((np.asarray(slowest, dtype=np.float64) / bandwidth).sum())


def simulated_times(record: Mapping[str, Any]) -> FloatArray:
    """Seconds from the beginning of the deployment to the end of each round, shape (R,); of none without a clock.

    Example:
        >>> simulated_times({"rounds": [{"simulated_seconds": 2.0}, {"simulated_seconds": 3.0}]})
        array([2., 5.])
    """
    seconds = [entry["simulated_seconds"] for entry in record["rounds"] if "simulated_seconds" in entry]
    return np.cumsum(np.asarray(seconds, dtype=np.float64))


def time_to(record: Mapping[str, Any], value: float, model: str = "server") -> float:
    """Seconds until a model was first so good on the whole test set: time to accuracy.

    Args:
        record: That of a run.
        value: What it is to come to: an accuracy, or what the first of the record's measures is to be.
        model: The model.

    Returns:
        Seconds at the end of that round; infinite if it never was.

    Raises:
        ValueError: If the run had no clock.

    Example:
        >>> rounds = [{"round": r, "experience": {"server": 0}, "correct": {"server": [5 + r]},
        ...     "simulated_seconds": 10.0} for r in range(3)]
        >>> record = {"groups": ["x"], "totals": [10], "tasks": {"server": [[0]]}, "rounds": rounds}
        >>> time_to(record, 0.6), time_to(record, 0.9)
        (20.0, inf)
    """
    times = simulated_times(record)
    if not len(times):
        raise ValueError(
            "Expected a record with simulated seconds but it has none. Give the strategy a `schedule`, such as "
            "`Deadline(Speeds(0.01))`."
        )
    way, tested = sign(record), curves(record).get(model)
    if tested is None:
        return float("inf")
    reached = times[tested.rounds][way * tested.overall >= way * value]
    return float(reached[0]) if len(reached) else float("inf")
