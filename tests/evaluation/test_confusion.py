"""Tests of confusion matrices: counts, sums, limits of the record, the report and the table of a run."""

import json
import re

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix

from lightning_fcl.evaluation.confusion import (
    add_confusions,
    class_names,
    confusions,
    count_confusion,
    recorded_models,
)
from lightning_fcl.evaluation.confusion_charts import confusion_chart, confusion_history_chart
from lightning_fcl.evaluation.metrics import summarize
from lightning_fcl.evaluation.report import render_report
from lightning_fcl.evaluation.run_data import Run

CAPTION = "Row: class of the test samples."


def results(groups=4, tasks=2):
    """Return results of a run with one round for each task, without confusion matrices."""
    names = ["server", "0"]
    rounds = [
        {
            "round": number,
            "experience": dict.fromkeys(names, number),
            "correct": dict.fromkeys(names, [1] * groups),
            "upload_bytes": {"0": 10},
            "download_bytes": {"0": 10},
            "dropped": {},
            "seconds": 0.1,
        }
        for number in range(tasks)
    ]
    record = {
        "groups": [f"group {number}" for number in range(groups)],
        "totals": [5] * groups,
        "tasks": {name: [[number % groups] for number in range(tasks)] for name in names},
        "rounds": rounds,
    }
    return {
        "recipe": None,
        "seed": 0,
        "metrics": summarize(record),
        "record": record,
        "expected": {},
        "versions": {"lightning-fcl": "0.2.0"},
        "machine": "a computer",
        "seconds": 1.0,
        "command": "lightning-fcl fit",
        "finished": True,
    }


def charts_of(page):
    """Return the charts of a page by caption."""
    pattern = r'aria-label="([^"]*)"></div><script type="application/json">(.*?)</script>'
    return {caption: json.loads(content) for caption, content in re.findall(pattern, page, flags=re.DOTALL)}


def to_array(matrix, classes):
    counts = np.zeros((classes, classes), dtype=int)
    for target, prediction, count in matrix:
        counts[target, prediction] += count
    return counts


def with_matrices(classes, experiences=2, clients=1, samples=20, seed=0):
    """Return results whose record has random confusion matrices of the server and some clients."""
    rng = np.random.default_rng(seed)
    content = results(groups=classes, tasks=experiences)
    record = content["record"]
    models = ["server", *map(str, range(clients))]
    targets = np.repeat(np.arange(classes), samples)
    for experience, entry in enumerate(record["rounds"]):
        entry["experience"] = dict.fromkeys([*entry["experience"], *models], experience)
        entry["confusion"] = {
            model: count_confusion(targets, rng.integers(0, classes, len(targets))) for model in models
        }
    record["classes"] = [f"class {number}" for number in range(classes)]
    return content


@pytest.mark.parametrize(("classes", "samples"), [(1, 5), (3, 1), (3, 200), (50, 1000)])
def test_count_confusion_equals_sklearn(classes, samples):
    rng = np.random.default_rng(0)
    targets, predictions = rng.integers(0, classes, (2, samples))
    matrix = count_confusion(targets, predictions)
    assert (to_array(matrix, classes) == confusion_matrix(targets, predictions, labels=range(classes))).all()
    assert matrix == sorted(matrix) and all(count > 0 for *_, count in matrix)
    assert json.loads(json.dumps(matrix)) == matrix


@pytest.mark.parametrize("parts", [1, 2, 7])
def test_add_confusions_of_parts_equals_whole(parts):
    rng = np.random.default_rng(0)
    targets, predictions = rng.integers(0, 6, (2, 40))
    pieces = zip(np.array_split(targets, parts), np.array_split(predictions, parts), strict=True)
    assert add_confusions([count_confusion(*piece) for piece in pieces]) == count_confusion(targets, predictions)
    empty = np.empty(0, dtype=np.int64)
    assert count_confusion(empty, empty) == [] == add_confusions([[], []])


@pytest.mark.parametrize("classes", [0, 2, 10, 100, 1000, 10_000])
@pytest.mark.parametrize("samples", [100, 10_000, 50_000])
@pytest.mark.parametrize("experiences", [1, 10, 100])
def test_recorded_models_bound_entries_of_clients(classes, samples, experiences):
    clients = [str(number) for number in range(20_000)]
    models = recorded_models(clients, classes, samples, experiences)
    assert models == ["server", *clients[: len(models) - 1]]
    assert (len(models) - 1) * experiences * min(classes**2 or samples, samples) <= 500_000


def test_confusions_record_without_matrices_returns_none():
    content = results()
    assert confusions(content["record"]) == {}
    assert "Confusion matrix" not in render_report(content)
    run = Run.__new__(Run)
    object.__setattr__(run, "record", content["record"])
    assert run.confusion.empty and [*run.confusion.columns][-1] == "count"


def test_class_names_missing_names_are_numbers():
    assert class_names({}, 2) == ["0", "1"] and class_names({"classes": ["a"]}, 0) == ["a"]


def find_chart(page_charts, start):
    return next(chart for caption, chart in page_charts.items() if caption.startswith(start))


@pytest.mark.parametrize("classes", [2, 12, 13, 100])
def test_report_confusion_charts_have_counts_of_record(classes):
    content = with_matrices(classes, experiences=3, clients=2)
    page_charts = charts_of(render_report(content))
    matrices = confusions(content["record"])
    chart = find_chart(page_charts, CAPTION)
    rows = {(row["model"], row["experience"]): row for row in chart["datasets"]["matrices"]}
    assert rows.keys() == matrices.keys()
    for key, row in rows.items():
        entries = zip(row["target"], row["prediction"], row["count"], strict=True)
        assert [list(entry) for entry in entries] == matrices[key]
    assert ('"type": "text"' in json.dumps(chart)) == (classes <= 12)
    history = find_chart(page_charts, "Confusion matrix of the server after each experience")
    assert [row["model"] for row in history["datasets"]["matrices"]] == ["server"] * 3


def test_report_confusion_charts_are_bounded():
    # Clients are left out of the charts if there are many clients, and all charts if there are many classes.
    models = {row["model"] for row in confusion_chart(with_matrices(4, clients=11)["record"])["datasets"]["matrices"]}
    assert models == {"server"}
    assert confusion_chart(with_matrices(251, samples=1)["record"]) is None
    assert confusion_history_chart(with_matrices(4, experiences=1)["record"]) is None
    assert confusion_history_chart(with_matrices(4, experiences=13)["record"]) is None
    content = with_matrices(200, experiences=8, clients=9, samples=100)
    sizes = [len(row["count"]) for row in confusion_chart(content["record"])["datasets"]["matrices"]]
    assert sum(sizes) <= 100_000


def test_report_class_names_are_escaped():
    content = with_matrices(3)
    content["record"]["classes"] = ["</script><b>", "a'b\"", "c"]
    page = render_report(content)
    assert "</script><b>" not in page
    assert "</script><b>" in json.dumps(find_chart(charts_of(page), CAPTION), ensure_ascii=False)
