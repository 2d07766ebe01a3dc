"""Tests of metrics after each task, compared with sums that are computed by hand."""

import pytest

from lightning_fcl.evaluation.curves import task_curves
from lightning_fcl.evaluation.metrics import summarize
from lightning_fcl.evaluation.record import truncate_record
from lightning_fcl.evaluation.table import Table, cells, with_tasks


def record(*after, done=2):
    """Return the record of a client with two tasks of ten test samples each.

    Args:
        after: Numbers of correct predictions on both tasks after each task.
        done: Number of rounds until the run is stopped.
    """
    rounds = [
        {"round": r, "experience": {"server": r, "a": r}, "correct": {"a": right}} for r, right in enumerate(after)
    ]
    return {"groups": ["x", "y"], "totals": [10, 10], "tasks": {"a": [[0], [1]]}, "rounds": rounds[:done]}


def test_truncate_record_equals_record_of_stopped_run():
    whole = {**record([9, 0], [5, 7]), "client_state_bytes": {"a": 40}}
    cut = truncate_record(whole, 1)
    assert cut == truncate_record(record([9, 0], [5, 7], done=1), 1) and cut["tasks"] == {"a": [[0]]}
    assert truncate_record(whole, 2) == whole
    assert summarize(cut)["final_accuracy/a"] == pytest.approx(0.45) and "average_accuracy/a" not in summarize(cut)


def results(row, *records):
    return [
        {"recipe": {"row": row}, "seed": seed, "record": one, "metrics": {"m/a": 1.0}, "expected": {}}
        for seed, one in enumerate(records)
    ]


def test_with_tasks_gain_is_relative_to_mean_of_other_rows():
    runs = {
        "new": results("new", record([9, 0], [8, 6]), record([6, 0], [3, 3])),
        "old": results("old", record([4, 0], [2, 4]), record([5, 0], [1, 3])),
        "other": results("other", record([6, 0], [5, 3])),
        "apart": results("apart", record([1, 0], [1, 1]), record([1, 0], done=1)),
    }
    gains = {"of": ["new"], "over": ["old", "other"], "paper": [0.5, 0.75, 0.9]}

    def made(runs):
        found = cells([one for of in runs.values() for one in of])
        return with_tasks(Table("toy", "paper", "", {}, "", 1.0, found), runs, gains).rows

    table = made(runs)
    first, second = (table["new"][f"gain_after_{n}/clients"] for n in (1, 2))
    assert (first.paper, second.paper) == (0.5, 0.75) and "gain_after_3/clients" not in table["new"]
    # Only seed 0 is in all rows. The gains are .9 / mean(.4, .6) - 1 and .7 / mean(.3, .4) - 1.
    assert first.values == {0: pytest.approx(0.9 / 0.5 - 1)} and second.values == {0: pytest.approx(0.7 / 0.35 - 1)}
    for row, runs_of in runs.items():
        values = table[row]["accuracy_after_2/clients"].values
        whole = [one for one in runs_of if len(one["record"]["rounds"]) == 2]
        assert values == {one["seed"]: pytest.approx(task_curves(one["record"])[0][1]) for one in whole}
    del runs["other"]
    assert "gain_after_1/clients" not in made(runs)["new"] and "accuracy_after_1/clients" in made(runs)["new"]
