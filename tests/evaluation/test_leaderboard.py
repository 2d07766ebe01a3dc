"""Tests of the leaderboard: its rows, tables and charts."""

import pytest

from lightning_fcl.evaluation.leaderboard import leaderboard_chart, leaderboard_row, leaderboard_table
from lightning_fcl.evaluation.table import Cell, Table


def run(tasks=2):
    """Return a run of two clients with some tasks. At the end, client b has a lower accuracy than client a."""
    rounds = [
        {
            "round": number,
            "experience": {"server": number, "a": number, "b": number},
            "correct": {"server": [9 - number, 6 * number], "a": [9, 7], "b": [7, 5]},
            "upload_bytes": {"a": 30, "b": 50},
            "download_bytes": {"a": 10, "b": 10},
            "processor_seconds": 1.5,
            "train_samples": {"a": 100, "b": 400},
        }
        for number in range(tasks)
    ]
    groups = {model: [[0], [1]][:tasks] for model in ("server", "a", "b")}
    kept = {"a": 8, "b": 16}
    return {
        "record": {
            "groups": ["x", "y"],
            "totals": [10, 10],
            "tasks": groups,
            "rounds": rounds,
            "client_state_bytes": kept,
            "client_samples": {"a": [[0, 10], [1, 30]], "b": [[1, 5]]},
        }
    }


def test_leaderboard_row_has_expected_values():
    found = leaderboard_row(run())
    assert found == {
        "last_accuracy": 0.7,
        "incremental_accuracy": pytest.approx((0.9 + 0.7) / 2),
        "anytime_accuracy": pytest.approx((0.9 + 0.7) / 2),
        "learning_accuracy": pytest.approx((0.9 + 0.6) / 2),
        "forgetting": pytest.approx(0.1),
        "own_accuracy": pytest.approx((0.75 + 0.5) / 2),
        "own_accuracy_std": pytest.approx(0.125),
        "own_accuracy_lowest": 0.5,
        "own_accuracy_lowest_tenth": 0.5,
        # A client transmits 100 bytes, which is below the range.
        "bytes_accuracy": pytest.approx(0.7),
        "rounds": 2.0,
        "upload_bytes": 40.0,
        "download_bytes": 10.0,
        "client_state_bytes": 12.0,
        "processor_seconds": 3.0,
        "train_samples": 1000.0,
    }


def test_leaderboard_row_one_task_has_no_forgetting():
    found = leaderboard_row(run(tasks=1))
    assert "forgetting" not in found and found["incremental_accuracy"] == 0.9 and found["upload_bytes"] == 40.0


def table(**methods):
    rows = {
        f"P {name}": {
            "last_accuracy": Cell(dict(enumerate(values))),
            "upload_bytes": Cell({0: 4000.0 * len(name)}),
            "download_bytes": Cell({0: 4000.0}),
            "processor_seconds": Cell({0: 7.6 * len(name)}),
        }
        for name, values in methods.items()
    }
    return Table("leaderboard", "paper", "", {}, "", 0.0, rows)


NOTES = {"low": {"logits": "all"}, "high": {"logits": "task's", "leaves": "weights"}, "not run": {}}


def test_leaderboard_table_sorts_by_accuracy_and_skips_missing_runs():
    lines = leaderboard_table(table(low=[0.25, 0.35], high=[0.5, 0.5]), "P", NOTES).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == [
        "method",
        "last accuracy",
        "upload, kB",
        "download, kB",
        "processor time, s",
        "logits",
        "leaves",
    ]
    assert cells[2:] == [
        ["high", "0.500 ± 0.000", "16", "4", "30", "task's", "weights"],
        ["low", "0.300 ± 0.071", "12", "4", "23", "all", "-"],
    ]


def test_leaderboard_chart_has_communication_and_time_of_each_method():
    drawn = leaderboard_chart(table(low=[0.3], high=[0.5]), "P", NOTES)
    rows = [{name: row[name] for name in row if "label of" not in name} for row in drawn["datasets"]["rows"]]
    assert rows == [
        {"method": "low", "accuracy": 0.3, "logits": "all", "communication": 0.016, "seconds": 22.8},
        {"method": "high", "accuracy": 0.5, "logits": "task's", "communication": 0.02, "seconds": 30.4},
    ]
    assert [part["layer"][0]["encoding"]["x"]["field"] for part in drawn["hconcat"]] == ["communication", "seconds"]
    assert leaderboard_chart(table(low=[0.3]), "P", NOTES) is None


def test_leaderboard_chart_moves_overlapping_labels():
    notes = {name: {"logits": "all"} for name in ("low", "same", "twin")}
    rows = leaderboard_chart(table(low=[0.3], same=[0.5], twin=[0.5]), "P", notes)["datasets"]["rows"]
    low, same, other = ([row[f"label of {cost}"] for cost in ("communication", "seconds")] for row in rows)
    # The axis of the accuracies 0.3 to 0.5 has a margin of 8 % at each end and 420 pixels.
    place = 420 * 0.08 / 1.16
    assert low == pytest.approx([420 - place] * 2, abs=0.1) and same == pytest.approx([place] * 2, abs=0.1)
    assert other == pytest.approx([place + 12] * 2, abs=0.1)
