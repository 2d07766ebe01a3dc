"""Communication of a run: how much went over the network, and how long that takes at a given bandwidth.

Computed from the record of `ContinualMetrics`, which holds the bytes that every client sent and received in every
round: the volume and time of Zuo et al. 2024, "FedViT", section 5.3.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lightning_fcl.evaluation.continual import FloatArray

__all__ = ["BANDWIDTHS", "communication_time", "communication_times", "totals", "volumes"]

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


def totals(record: Mapping[str, Any]) -> dict[str, float]:
    """Bytes of all clients and rounds; by the clock of a rehearsed deployment also its seconds, and the late uploads.

    Example:
        >>> totals({"rounds": [{"upload_bytes": {"a": 40}, "simulated_seconds": 2.5, "late": ["b"]}]})
        {'upload_bytes/total': 40.0, 'download_bytes/total': 0.0, 'simulated_seconds/total': 2.5, 'late/total': 1.0}
    """
    found = {
        f"{way}/total": float(sum(sum(entry.get(way, {}).values()) for entry in record["rounds"])) for way in _WAYS
    }
    timed = [entry for entry in record["rounds"] if "simulated_seconds" in entry]
    if timed:
        found["simulated_seconds/total"] = float(sum(entry["simulated_seconds"] for entry in timed))
        found["late/total"] = float(sum(len(entry.get("late", ())) for entry in timed))
    return found


def communication_times(record: Mapping[str, Any], bandwidth: float) -> FloatArray:
    """Seconds of communication in each round, shape (R,).

    All clients transfer at once, each over a link of its own, first down and after its training up; the round waits for
    the client with the most bytes, both ways together. Neither latency nor a limit of the server's own link counts.

    Args:
        record: That of a run.
        bandwidth: Bytes per second of each client's link, the same up and down.

    Raises:
        ValueError: If ``bandwidth`` is not a positive number.

    Example:
        >>> record = {"rounds": [{"upload_bytes": {"a": 40, "b": 10}, "download_bytes": {"a": 50, "b": 50}}]}
        >>> communication_times(record, bandwidth=10)
        array([9.])
    """
    if not 0 < bandwidth < float("inf"):
        raise ValueError(f"Expected `bandwidth` to be a positive number of bytes per second but got {bandwidth}.")
    slowest = []
    for entry in record["rounds"]:
        up, down = (entry.get(way, {}) for way in _WAYS)
        slowest.append(max((up.get(client, 0) + down.get(client, 0) for client in {*up, *down}), default=0))
    return np.asarray(slowest, dtype=np.float64) / bandwidth


def communication_time(record: Mapping[str, Any], bandwidth: float) -> float:
    """Seconds of communication of a whole run. See `communication_times`.

    Example:
        >>> record = {"rounds": [{"upload_bytes": {"a": 400_000}, "download_bytes": {"a": 600_000}}] * 3}
        >>> communication_time(record, bandwidth=1e6)
        3.0
    """
    return float(communication_times(record, bandwidth).sum())
