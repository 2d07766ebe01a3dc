"""Tests of results by simulated time: times of rounds, time to reach a value, curves, CSV columns and charts."""

import csv
import math

import numpy as np
import pytest
from raising import raises

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.evaluation.curves import curves
from lightning_fcl.evaluation.metrics import summarize
from lightning_fcl.evaluation.report import rounds_chart
from lightning_fcl.evaluation.results import write_csv
from lightning_fcl.evaluation.summary import simulated_times, time_to


def record_of(correct, seconds=None, tasks=1):
    rounds = []
    for number, right in enumerate(correct):
        entry = {
            "round": number,
            "experience": {"server": min(number, tasks - 1)},
            "correct": {"server": [right] * tasks} if right is not None else {},
            "upload_bytes": {"a": 10},
            "download_bytes": {"a": 20, "b": 20},
        }
        if seconds is not None:
            entry |= {"simulated_seconds": seconds[number], "late_clients": ["b"], "staleness": {}}
        rounds.append(entry)
    return {"groups": ["x", "y"][:tasks], "totals": [10] * tasks, "tasks": {"server": [[t] for t in range(tasks)]}} | {
        "rounds": rounds
    }


def test_simulated_times_are_cumulative_and_in_summary():
    record = record_of([1, 5, 4, 9], [2.0, 0.5, 3.0, 1.0])
    assert simulated_times(record).tolist() == [2.0, 2.5, 5.5, 6.5]
    summary = summarize(record)
    assert (summary["simulated_seconds/total"], summary["late_uploads/total"]) == (6.5, 4)
    assert (summary["upload_bytes/total"], summary["download_bytes/total"]) == (40, 160)
    assert not {"simulated_seconds/total", "late_uploads/total"} & summarize(record_of([1, 5])).keys()


def test_time_to_returns_first_round_with_the_value():
    record = record_of([1, 5, 4, 9], [2.0, 0.5, 3.0, 1.0])
    assert [time_to(record, value) for value in (0.1, 0.5, 0.51, 0.9, 0.91)] == [2.0, 2.5, 6.5, 6.5, math.inf]
    assert time_to(record, 0.1, "nobody") == math.inf
    with raises(InvalidValueError, "synchronization"):
        time_to(record_of([1, 5]), 0.1)


def test_time_to_counts_rounds_without_test():
    record = record_of([None, 5, None, 9], [2.0, 0.5, 3.0, 1.0])
    assert (time_to(record, 0.5), time_to(record, 0.9)) == (2.5, 6.5)


def test_time_to_lower_is_better_measure():
    record = record_of([None] * 3, [1.0, 1.0, 1.0])
    record["measures"] = [{"name": "MSE", "higher_is_better": False}]
    for entry, value in zip(record["rounds"], (0.9, 0.3, 0.5), strict=True):
        entry["values"] = {"server": {"MSE": {"0": value}}}
        del entry["correct"]
    assert time_to(record, 0.4) == 2.0


@pytest.mark.parametrize("tasks", [1, 2])
def test_rounds_chart_has_a_point_for_each_test(tasks):
    record = record_of([1, 5, None, 9], [2.0, 0.5, 3.0, 1.0], tasks)
    drawn = rounds_chart(record, curves(record))
    rows = drawn["datasets"]["rows"]
    whole = [(row["round"], row["seconds"], row["value"]) for row in rows if row["line"] == "server, whole test set"]
    assert whole == [(1, 2.0, 0.1), (2, 2.5, 0.5), (4, 6.5, 0.9)]
    assert len(rows) == tasks * 3
    assert rounds_chart(record_of([1, 5]), curves(record_of([1, 5]))) is None


@pytest.mark.parametrize("seconds", [None, [2.0, 0.5]])
def test_write_csv_has_simulated_time_only_with_a_clock(tmp_path, seconds):
    write_csv(tmp_path / "metrics.csv", record_of([1, 5], seconds))
    lines = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    assert len(lines) == 2 * 3
    ends = [line.get("simulated_time") for line in lines]
    assert ends == ([None] * 6 if seconds is None else [*np.repeat(["2.0", "2.5"], 3)])
