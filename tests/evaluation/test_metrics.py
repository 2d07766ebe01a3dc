"""Tests of metrics of continual learning, compared with a slow reference and with values computed by hand."""

import json
import math
import statistics
import subprocess
import sys

import numpy as np
import pytest
from raising import raises

from lightning_fcl.errors import UnknownNameError
from lightning_fcl.evaluation.curves import curves, matrices, stream_accuracies, task_curves
from lightning_fcl.evaluation.metrics import (
    average_accuracy,
    backward_transfer,
    forgetting,
    forward_transfer,
    summarize,
)

CLIENTS = ("client1", "7", "generalized")


def fine_tuning_record():
    """Return a record of two clients and the server.

    `client1` learns class 1 in rounds 0-3 and class 2 in rounds 4-7. `client1` predicts only the current class and
    class 5 correctly. `generalized` has all classes in one task.
    """
    rounds = []
    for r in range(8):
        learnt = 1 if r < 4 else 2
        rounds.append(
            {
                "round": r,
                "experience": {"client1": r // 4, "generalized": 0, "server": r // 4},
                "correct": {
                    "client1": [100 if group in (learnt, 5) else 0 for group in range(6)],
                    "generalized": [80] * 6,
                    "server": [60] * 6,
                },
                "upload_bytes": {"client1": 7, "generalized": 5},
                "download_bytes": {"client1": 11, "generalized": 13},
                "dropped": {},
                "seconds": 0.5,
            }
        )
    everything = list(range(6))
    return {
        "groups": ["walking", "upstairs", "downstairs", "sitting", "standing", "laying"],
        "totals": [100] * 6,
        "tasks": {"client1": [[1], [2]], "generalized": [everything], "server": [everything, everything]},
        "rounds": rounds,
    }


def random_record(seed):
    """Return a record with unequal groups, a group without test samples, overlapping tasks, and missed rounds."""
    rng = np.random.default_rng(seed)
    totals = [7, 12, 0, 30, 5]
    tasks = {
        "client1": [[0, 1], [2, 3], [1, 4]],
        "7": [[4], [3], [0, 2]],
        "generalized": [[0, 1, 2, 3, 4]],
        "server": [[0, 1, 4], [2, 3], [0, 1, 2, 4]],
    }
    rounds = []
    for r in range(12):
        present = [c for c in CLIENTS if rng.random() < 0.5 and not (c == "7" and r // 4 == seed % 3)]
        rounds.append(
            {
                "round": r,
                "experience": {model: 0 if model == "generalized" else r // 4 for model in (*CLIENTS, "server")},
                "correct": {model: [int(rng.integers(n + 1)) for n in totals] for model in (*present, "server")},
                "upload_bytes": {c: int(rng.integers(100_000)) for c in present},
                "download_bytes": {c: int(rng.integers(1000)) for c in present},
                "dropped": {},
                "seconds": 1.0,
            }
        )
    samples = {c: [[g, int(rng.integers(1, 50))] for g in range(5) if rng.random() < 0.7] for c in CLIENTS}
    record = {"groups": list("abcde"), "totals": totals, "tasks": tasks, "rounds": rounds}
    return {**record, "client_samples": samples}


# The slow reference loops over the record. It uses the definitions of Usmanova et al. 2021, section 4.3. Numbers of
# tasks start at 1.


def mean(values):
    values = [v for v in values if v is not None]
    return sum(values) / len(values) if values else None


def accuracy_on(record, entry, model, groups):
    groups = set(groups)
    samples = sum(record["totals"][g] for g in groups)
    return sum(entry["correct"][model][g] for g in groups) / samples if samples else None


def slow_summary(record):
    result, everything = {}, range(len(record["groups"]))
    for model, tasks in record["tasks"].items():
        entries = [e for e in record["rounds"] if model in e["correct"]]
        if not entries:
            continue
        result[f"general_accuracy/{model}"] = mean([accuracy_on(record, e, model, everything) for e in entries])
        result[f"final_accuracy/{model}"] = accuracy_on(record, entries[-1], model, everything)
        personal = []
        for position in range(len(entries)):
            seen = [g for e in entries[: position + 1] for g in tasks[e["experience"][model]]]
            personal.append(accuracy_on(record, entries[position], model, seen))
        result[f"{'anytime' if model == 'server' else 'personal'}_accuracy/{model}"] = mean(personal)
        if model == "server":
            result["bytes_accuracy/server"] = slow_bytes_accuracy(record)
        else:
            result[f"own_accuracy/{model}"] = slow_own_accuracy(record, model, tasks, entries[-1])
        seen = [g for i in range(entries[-1]["experience"][model] + 1) for g in tasks[i]]
        result[f"stream_accuracy/{model}"] = accuracy_on(record, entries[-1], model, seen)
        if len(tasks) > 1:
            result.update(slow_task_metrics(record, model, tasks, entries))
    stages = [result[f"stream_accuracy_{t}/server"] for t in range(len(record["tasks"]["server"]))]
    result["incremental_accuracy/server"] = mean(stages)
    own = sorted(v for n, v in result.items() if n.startswith("own_accuracy/") and v is not None)
    if own:
        spread = {"_std": statistics.pstdev(own), "_lowest": own[0], "_lowest_tenth": own[0]}
        result.update({f"own_accuracy{name}/clients": value for name, value in spread.items()})
    for name in {n.split("/")[0] for n in result if not n.endswith("/clients")}:
        values = [result.get(f"{name}/{c}") for c in CLIENTS]
        if any(v is not None for v in values):
            result[f"{name}/clients"] = mean(values)
    result = {name: value for name, value in result.items() if value is not None}
    for way in ("upload_bytes", "download_bytes"):
        result[f"{way}/total"] = sum(n for e in record["rounds"] for n in e[way].values())
    return result


def slow_own_accuracy(record, model, tasks, entry):
    learned = {g for i in range(entry["experience"][model] + 1) for g in tasks[i]}
    right, number = 0.0, 0
    for group, count in record["client_samples"][model]:
        if group in learned and record["totals"][group]:
            right += count * entry["correct"][model][group] / record["totals"][group]
            number += count
    return right / number if number else None


def slow_bytes_accuracy(record):
    """Return the mean of the accuracy at a million points on the logarithmic axis from 10 kB to 100 MB."""
    clients, totals, total = len(record["tasks"]) - 1, [], 0
    for entry in record["rounds"]:
        total += sum(n for way in ("upload_bytes", "download_bytes") for n in entry[way].values())
        totals.append(total / clients)
    everything = range(len(record["groups"]))
    accuracies = [0.0] + [accuracy_on(record, entry, "server", everything) for entry in record["rounds"]]
    points = 10 ** (4 + 4 * (np.arange(1_000_000) + 0.5) / 1_000_000)
    return float(np.array(accuracies)[np.searchsorted(totals, points, side="right")].mean())


def slow_task_metrics(record, model, tasks, entries):
    number = len(tasks)

    def a(t, d, last):
        rounds = [e for e in entries if e["experience"][model] == t - 1]
        return mean([accuracy_on(record, e, model, tasks[d - 1]) for e in (rounds[-1:] if last else rounds)])

    def lost(d, last):
        now, before = a(number, d, last), [a(i, d, last) for i in range(d, number)]
        before = [v for v in before if v is not None]
        return max(before) - now if before and now is not None else None

    def transferred(d):
        now, then = a(number, d, True), a(d, d, True)
        return None if now is None or then is None else now - then

    def seen_so_far(t):
        rounds = [e for e in entries if e["experience"][model] == t - 1]
        return accuracy_on(record, rounds[-1], model, [g for i in range(t) for g in tasks[i]]) if rounds else None

    return {
        **{f"stream_accuracy_{t - 1}/{model}": seen_so_far(t) for t in range(1, number + 1)},
        f"A_{number}/{model}": mean([a(number, d, False) for d in range(1, number + 1)]),
        f"F_{number}/{model}": mean([lost(d, False) for d in range(1, number)]),
        f"average_accuracy/{model}": mean([a(number, d, True) for d in range(1, number + 1)]),
        f"forgetting/{model}": mean([lost(d, True) for d in range(1, number)]),
        f"learning_accuracy/{model}": mean([a(d, d, True) for d in range(1, number + 1)]),
        f"backward_transfer/{model}": mean([transferred(d) for d in range(1, number)]),
    }


@pytest.mark.parametrize("seed", range(20))
def test_summary_equals_slow_reference(seed):
    record = random_record(seed)
    expected = slow_summary(record)
    ours = summarize(record)
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        tolerance = 1e-5 if name.startswith("bytes_accuracy") else 1e-12
        assert ours[name] == pytest.approx(value, abs=tolerance), name


def test_summarize_fine_tuning_equals_values_of_the_paper():
    # The paper states in Tables 2 and 3, row CL-FT: A_gen 0.338, A_per 0.75, A_2 0.5, F_2 1.
    summary = summarize(fine_tuning_record())
    assert summary["A_2/client1"] == 0.5
    assert summary["F_2/client1"] == 1.0
    assert summary["personal_accuracy/client1"] == 0.75
    assert summary["general_accuracy/client1"] == pytest.approx(1 / 3)
    assert summary["backward_transfer/client1"] == -1.0
    assert summary["stream_accuracy/client1"] == 0.5


def client_record(correct, totals, experience, tasks):
    """Return a client's record with the given numbers of correct predictions per round and group."""
    rounds = [
        {"round": r, "experience": {"a": e}, "correct": {"a": row}}
        for r, (e, row) in enumerate(zip(experience, correct, strict=True))
    ]
    return {"groups": [*map(str, totals)], "totals": totals, "tasks": {"a": tasks}, "rounds": rounds}


def test_matrices_and_stream_accuracies_equal_values_by_hand():
    # Task 1 has groups of 10 and 30 samples, and lasts two rounds. Task 2 has one group of 20 samples.
    record = client_record([[10, 0, 20], [0, 30, 0], [5, 15, 10]], [10, 30, 20], [0, 0, 1], [[0, 1], [2]])
    np.testing.assert_allclose(matrices(record)["a"], [[0.5, 0.5], [0.5, 0.5]])
    np.testing.assert_allclose(matrices(record, rounds="last")["a"], [[0.75, 0.0], [0.5, 0.5]])
    np.testing.assert_allclose(stream_accuracies(record, "a"), [0.75, 0.5])
    assert summarize(record)["general_accuracy/a"] == pytest.approx(0.5)
    assert summarize(record)["personal_accuracy/a"] == pytest.approx((0.25 + 0.75 + 0.5) / 3)


def test_summarize_base_session_counts_only_for_the_server():
    """The base session has two groups. Each of two sessions of two rounds adds one group."""
    correct = [[4, 2, 3, 0], [3, 3, 4, 0], [1, 0, 4, 1], [2, 1, 1, 5]]
    rounds = [
        {"round": r, "experience": {"node": 1 + r // 2, "server": 1 + r // 2}, "correct": {"node": row, "server": row}}
        for r, row in enumerate(correct)
    ]
    tasks = {model: [[0, 1], [2], [3]] for model in ("node", "server")}
    record = {"groups": list("abcd"), "totals": [5, 5, 5, 5], "tasks": tasks, "rounds": rounds, "start": [5, 3, 0, 0]}
    summary = summarize(record)
    expected = {"stream_accuracy_0": 8 / 10, "stream_accuracy_1": 10 / 15, "stream_accuracy_2": 9 / 20}
    for name, value in {**expected, "stream_accuracy": 9 / 20, "final_accuracy": 9 / 20}.items():
        assert summary[f"{name}/server"] == pytest.approx(value), name
    in_rounds = pytest.approx((9 + 10 + 6 + 9) / 80)
    assert summary["general_accuracy/server"] == summary["general_accuracy/node"] == in_rounds
    assert summary["average_accuracy/server"] == pytest.approx((3 / 10 + 1 / 5 + 5 / 5) / 3)
    assert summary["forgetting/server"] == pytest.approx((8 / 10 - 3 / 10 + 4 / 5 - 1 / 5) / 2)
    assert "stream_accuracy_0/node" not in summary and "forgetting/node" in summary
    assert summary["stream_accuracy_1/node"] == pytest.approx(10 / 15)
    np.testing.assert_allclose(stream_accuracies(record), [8 / 10, 10 / 15, 9 / 20])
    np.testing.assert_allclose(matrices(record, "last")["server"][0], [8 / 10, 0, 0])
    assert [len(curve.rounds) for curve in curves(record).values()] == [4, 4]
    del record["start"]
    assert "stream_accuracy_0/server" not in summarize(record)


def test_stream_accuracies_untested_model_is_nan():
    record = {**fine_tuning_record(), "rounds": []}
    assert np.isnan(stream_accuracies(record)).tolist() == [True, True]
    with raises(UnknownNameError, "model", value="client2"):
        stream_accuracies(record, "client2")


def test_matrices_repeated_group_counts_once():
    record = client_record([[10, 0], [10, 0]], [10, 10], [0, 1], [[0], [0, 0, 1]])
    assert matrices(record)["a"][1, 1] == 0.5
    assert stream_accuracies(record, "a")[1] == 0.5


def test_forgetting_uses_best_value_since_task_was_learned():
    # Task 1 has its best accuracy after task 2. The accuracy of 0.9 on task 2 before it was learned does not count.
    matrix = [[0.6, 0.9, 0.0], [0.8, 0.7, 0.0], [0.5, 0.6, 1.0]]
    assert forgetting(matrix, 3) == pytest.approx(((0.8 - 0.5) + (0.7 - 0.6)) / 2)
    assert forgetting(matrix, 2) == pytest.approx(0.6 - 0.8)
    assert average_accuracy(matrix, 3) == pytest.approx(0.7)
    assert average_accuracy(matrix, 2) == pytest.approx(0.75)
    assert backward_transfer(matrix) == pytest.approx(((0.5 - 0.6) + (0.6 - 0.7)) / 2)


def test_summarize_omits_metrics_of_tasks_not_learned():
    matrix = matrices(client_record([[4, 2], [1, 3]], [4, 4], [0, 0], [[0], [1]]))["a"]
    assert np.isnan(matrix[1]).all() and not np.isnan(matrix[0]).any()
    assert math.isnan(average_accuracy(matrix, 2)) and math.isnan(forgetting(matrix, 2))
    record = fine_tuning_record()
    record["rounds"] = record["rounds"][:4]
    summary = summarize(record)
    assert "A_2/client1" not in summary and "F_2/clients" not in summary
    assert summary["stream_accuracy/client1"] == 1.0
    json.dumps(summary, allow_nan=False)


def test_summarize_record_without_rounds_has_only_bytes():
    summary = summarize({**fine_tuning_record(), "rounds": []})
    assert summary == {"upload_bytes/total": 0.0, "download_bytes/total": 0.0}


def test_curves_and_matrices_have_server_first_and_skip_missed_rounds():
    record = random_record(3)
    models = curves(record)
    assert next(iter(models)) == "server" and next(iter(matrices(record))) == "server"
    assert "generalized" not in matrices(record)
    there = [entry for entry in record["rounds"] if "7" in entry["correct"]]
    assert 0 < len(there) < len(record["rounds"])
    assert models["7"].rounds.tolist() == [entry["round"] for entry in there]
    assert models["7"].accuracy[0, 3] == there[0]["correct"]["7"][3] / 30
    assert np.isnan(models["7"].accuracy[:, 2]).all()
    assert models["7"].overall[0] == pytest.approx(sum(there[0]["correct"]["7"]) / 54)


def test_metrics_module_imports_without_torch():
    source = "import runpy, sys; runpy.run_path(sys.argv[1]); sys.exit('torch' in sys.modules)"
    path = sys.modules["lightning_fcl.evaluation.metrics"].__file__
    assert subprocess.run([sys.executable, "-c", source, path], check=False).returncode == 0


def test_task_curves_are_mean_over_tested_clients():
    # Client a learns x, y, z. Clients b and c learn y, x and have no third task. Client c is not tested after its
    # second task.
    correct = {
        "a": [[9, 0, 0], [5, 8, 0], [6, 2, 7]],
        "b": [[0, 6, 0], [10, 7, 0]],
        "c": [[0, 4, 0]],
        "server": [[1, 1, 1]] * 3,
    }
    rounds = []
    for e in range(3):
        now = {model: rows[e] for model, rows in correct.items() if e < len(rows)}
        entry = {"round": 2 * e, "experience": dict.fromkeys(now, e), "correct": {model: [0, 0, 0] for model in now}}
        # The metrics use only the last round of a task.
        rounds += [entry, {**entry, "round": 2 * e + 1, "correct": now}]
    tasks = {"a": [[0], [1], [2]], "b": [[1], [0]], "c": [[1], [0]], "server": [[0, 1], [0, 1], [2]]}
    record = {"groups": ["x", "y", "z"], "totals": [10] * 3, "tasks": tasks, "rounds": rounds}
    accuracy, forgotten = task_curves(record)
    np.testing.assert_allclose(accuracy, [(0.9 + 0.6 + 0.4) / 3, (0.65 + 0.85) / 2, 0.5])
    np.testing.assert_allclose(forgotten, [np.nan, (0.4 - 0.1) / 2, (0.3 + 0.6) / 2])
    alone = {**record, "tasks": {model: parts[:1] for model, parts in tasks.items()}, "rounds": rounds[:2]}
    assert [len(values) for values in task_curves(alone)] == [0, 0]


def test_summarize_local_models_with_measures_are_separate():
    """Metrics of clients' models after aggregation are separate from metrics of their models before aggregation."""
    rounds = [
        {
            "round": r,
            "experience": {"a": r},
            "values": {"a": {"MSE": {"0": 4.0 + r, "1": 2.0, "0+1": 3.0}}},
            "local": {"a": {"MSE": {"0": 1.0 + 2 * r, "1": 5.0 * r, "0+1": 3.0 * r}}},
        }
        for r in range(2)
    ]
    measures = [{"name": "MSE", "higher_is_better": False}]
    record = {"groups": ["x", "y"], "totals": [10, 10], "tasks": {"server": [[0], [1]], "a": [[0], [1]]}}
    summary = summarize({**record, "measures": measures, "rounds": rounds})
    own = {name: value for name, value in summary.items() if name.endswith("_local/a")}
    assert own == {
        "average_MSE_local/a": 4.0,
        "learning_MSE_local/a": 3.0,
        "forgetting_MSE_local/a": 2.0,
        "backward_transfer_MSE_local/a": -2.0,
    }
    assert summary["average_MSE/a"] == 3.5 and summary["average_MSE_local/clients"] == 4.0
    before = [{name: value for name, value in entry.items() if name != "local"} for entry in rounds]
    plain = summarize({**record, "measures": measures, "rounds": before})
    assert plain == {name: value for name, value in summary.items() if "_local" not in name}


def domain_record(rows, start, scenario="domain"):
    """Return a record of the server with accuracies in percent: one task of one group in each round."""
    number = len(rows)
    rounds = [
        {"round": r, "experience": {"server": r, "a": r}, "correct": {"server": row}} for r, row in enumerate(rows)
    ]
    tasks = {model: [[group] for group in range(number)] for model in ("server", "a")}
    record = {"groups": [*map(str, range(number))], "totals": [100] * number, "tasks": tasks, "rounds": rounds}
    return {**record, "start": start, "scenario": scenario}


def test_transfers_and_learning_accuracy_equal_avalanche():
    """The metrics equal those of Avalanche for random accuracies of four domains."""
    from avalanche.evaluation.metrics import BWT, ForwardTransfer

    rng = np.random.default_rng(0)
    rows, start = rng.integers(0, 101, (4, 4)), rng.integers(0, 101, 4)
    found = summarize(domain_record(rows.tolist(), start.tolist()))
    forward, backward = ForwardTransfer(), BWT()
    for task in range(4):
        forward.update(task, start[task] / 100, initial=True)
        backward.update(task, rows[task, task] / 100, initial=True)
    for task in range(1, 4):
        forward.update(task, rows[task - 1, task] / 100)
    for task in range(3):
        backward.update(task, rows[3, task] / 100)
    assert found["forward_transfer/server"] == pytest.approx(
        np.mean([forward.result_key(task) for task in range(1, 4)])
    )
    assert found["backward_transfer/server"] == pytest.approx(np.mean([backward.result_key(task) for task in range(3)]))
    assert found["learning_accuracy/server"] == pytest.approx(rows.diagonal().mean() / 100)
    assert forward_transfer(rows / 100, start / 100) == found["forward_transfer/server"]


def test_forward_transfer_only_where_later_tasks_can_be_predicted():
    rows, start = [[50, 30], [40, 60]], [10, 20]
    assert summarize(domain_record(rows, start))["forward_transfer/server"] == pytest.approx(0.1)
    assert summarize(domain_record(rows, start, "task"))["forward_transfer/server"] == pytest.approx(0.1)
    assert "forward_transfer/server" not in summarize(domain_record(rows, start, "class"))
    without_start = {name: value for name, value in domain_record(rows, start).items() if name != "start"}
    assert "forward_transfer/server" not in summarize(without_start)


def test_anytime_accuracy_is_mean_over_tests_of_seen_tasks():
    rounds = [[8, 0], [10, 0], [4, 5], [6, 9]]
    record = client_record(rounds, [10, 10], [0, 0, 1, 1], [[0], [1]])
    record["tasks"]["server"] = record["tasks"].pop("a")
    for entry in record["rounds"]:
        entry["experience"], entry["correct"] = ({"server": v["a"]} for v in (entry["experience"], entry["correct"]))
    found = summarize(record)
    assert found["anytime_accuracy/server"] == pytest.approx((0.8 + 1.0 + 0.45 + 0.75) / 4)
    assert found["incremental_accuracy/server"] == pytest.approx((1.0 + 0.75) / 2)


def test_bytes_accuracy_by_hand():
    """One of two clients transmits 2 MB in each of two rounds: 1 MB and then 2 MB as the mean over the clients."""
    rounds = [
        {
            "round": r,
            "experience": {"server": 0, "a": 0, "b": 0},
            "correct": {"server": [5 + 3 * r]},
            "upload_bytes": {"a": 1_500_000},
            "download_bytes": {"a": 500_000},
        }
        for r in range(2)
    ]
    tasks = {model: [[0]] for model in ("server", "a", "b")}
    found = summarize({"groups": ["x"], "totals": [10], "tasks": tasks, "rounds": rounds})
    expected = (math.log10(2) * 0.5 + (2 - math.log10(2)) * 0.8) / 4
    assert found["bytes_accuracy/server"] == pytest.approx(expected)
