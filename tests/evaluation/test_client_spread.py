"""Tests of the accuracy of clients on their own distributions of classes, and of its spread over the clients."""

import math

import numpy as np
import pytest

from lightning_fcl.callbacks import ContinualMetrics
from lightning_fcl.evaluation.metrics import summarize


def record(client_samples, correct, tasks=((0, 1), (2, 3)), totals=(10, 20, 10, 40)):
    """Return a record of one round in the second of two tasks, in which all models are the server's model."""
    models = [*client_samples, "server"]
    entry = {"round": 0, "experience": dict.fromkeys(models, 1), "correct": {model: [*correct] for model in models}}
    shared = {"groups": list("wxyz"), "totals": [*totals], "tasks": {model: [*map(list, tasks)] for model in models}}
    return {**shared, "rounds": [entry], "client_samples": client_samples}


# Accuracies of the classes: 0.9, 0.5, 0.2 and 1.0. Client b has no samples of class 3.
SAMPLES = {"a": [[0, 10], [1, 10], [2, 10], [3, 10]], "b": [[0, 1], [1, 1], [2, 8]], "c": [[2, 25], [3, 75]]}
OWN = {"a": (0.9 + 0.5 + 0.2 + 1.0) / 4, "b": 0.1 * 0.9 + 0.1 * 0.5 + 0.8 * 0.2, "c": 0.25 * 0.2 + 0.75}


def test_own_accuracy_three_clients_and_four_classes_by_hand():
    found = summarize(record(SAMPLES, [9, 10, 2, 40]))
    for client, value in OWN.items():
        assert found[f"own_accuracy/{client}"] == pytest.approx(value)
    assert found["own_accuracy/clients"] == pytest.approx(sum(OWN.values()) / 3)
    assert found["own_accuracy_std/clients"] == pytest.approx(np.std([*OWN.values()]))
    assert found["own_accuracy_lowest/clients"] == pytest.approx(0.3)
    assert found["final_accuracy/server"] == pytest.approx(61 / 80)


def test_own_accuracy_equals_pooled_accuracy_if_shares_are_those_of_the_test_set():
    found = summarize(record({"a": [[0, 1], [1, 2], [2, 1], [3, 4]]}, [9, 10, 2, 40]))
    assert found["own_accuracy/a"] == pytest.approx(61 / 80) == found["final_accuracy/server"]


def test_own_accuracy_leaves_out_later_tasks_and_groups_without_test_samples():
    one = record(SAMPLES, [9, 10, 0, 40], totals=(10, 20, 0, 40))
    assert summarize(one)["own_accuracy/b"] == pytest.approx((0.9 + 0.5) / 2)
    one["rounds"][0]["experience"] = dict.fromkeys([*SAMPLES, "server"], 0)
    found = summarize(one)
    assert found["own_accuracy/a"] == pytest.approx((0.9 + 0.5) / 2)
    # Client c has no samples of the first task.
    assert "own_accuracy/c" not in found and math.isfinite(found["own_accuracy/clients"])


def test_lowest_tenth_is_mean_of_worst_clients():
    samples = {f"{number:02}": [[0, number], [1, 40 - number]] for number in range(21)}
    found = summarize(record(samples, [9, 10, 2, 40]))
    values = sorted(found[f"own_accuracy/{client}"] for client in samples)
    assert found["own_accuracy_lowest_tenth/clients"] == pytest.approx(sum(values[:3]) / 3)
    assert found["own_accuracy_lowest/clients"] == pytest.approx(values[0])


@pytest.mark.parametrize("when", ["trained", "aggregated"])
def test_recorded_samples_are_those_of_the_clients(fit, make_stream, make_task, when):
    stream = make_stream(rounds_per_experience=2, partition="dirichlet", num_clients=4)
    metrics = ContinualMetrics(clients=["0", "2"], when=when)
    fit(make_task(), stream, [metrics])
    assert [*metrics.record["client_samples"]] == ["0", "2"] and metrics.record["scenario"] == "class"
    for client, pairs in metrics.record["client_samples"].items():
        rows = {row for current in stream.plan.train for row in current.get(client, ())}
        expected = np.bincount(stream.y[sorted(rows)], minlength=4)
        assert dict(pairs) == {group: number for group, number in enumerate(expected.tolist()) if number}
    found = summarize(metrics.record)
    totals, last = metrics.record["totals"], {"0": None, "2": None}
    for entry in metrics.record["rounds"]:
        last |= {client: entry["correct"][client] for client in last if client in entry["correct"]}
    for client, correct in last.items():
        pairs = metrics.record["client_samples"][client]
        shares = [number * correct[group] / totals[group] for group, number in pairs]
        assert found[f"own_accuracy/{client}"] == pytest.approx(sum(shares) / sum(number for _, number in pairs))


def test_clients_none_records_no_samples(fit, make_stream, make_task):
    metrics = ContinualMetrics(clients="none")
    fit(make_task(), make_stream(), [metrics])
    assert metrics.record["client_samples"] == {}
    assert not any(name.startswith("own_accuracy") for name in summarize(metrics.record))
