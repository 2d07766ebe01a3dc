"""The clock of a rehearsed deployment: when each round was over, and how long it took to become so good.

Computed from the record of `ContinualMetrics`, whose rounds have ``simulated_seconds``, ``late`` and ``staleness``
where the strategy was given a schedule.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lightning_fcl.evaluation.continual import FloatArray
from lightning_fcl.evaluation.metrics import curves, sign

__all__ = ["simulated_times", "time_to"]


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
