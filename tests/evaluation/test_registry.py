"""Tests of the registry of metrics: each record of a metric is complete, and a new record appears in all outputs."""

import itertools
import json
from typing import get_args

import pytest
import yaml

from lightning_fcl.cli.main import main
from lightning_fcl.evaluation import metrics as registry
from lightning_fcl.evaluation.comparison import compare_page, runs_by_name
from lightning_fcl.evaluation.leaderboard import COLUMNS, leaderboard_row
from lightning_fcl.evaluation.metric import Metric, Unit, clients, per_model
from lightning_fcl.evaluation.metrics import METRICS, find_metric, metrics_for, summarize
from lightning_fcl.evaluation.record import ACCURACY, Quantity
from lightning_fcl.evaluation.report import render_report
from lightning_fcl.evaluation.results import read_results
from lightning_fcl.evaluation.table import Table, write_table
from lightning_fcl.runs.paper_rows import expand_grids, read_rows, recipes_folder

MSE, R2 = Quantity("MSE", higher_is_better=False), Quantity("R2", higher_is_better=True)
MODELS = ("server", "a", "b")
RECORDS = [*METRICS, *COLUMNS]


def known(key, quantity=ACCURACY):
    metric = find_metric(key, [quantity])
    assert metric is not None, key
    return metric


def name_of(metric):
    return metric.name


@pytest.mark.parametrize("metric", RECORDS, ids=name_of)
def test_metric_record_is_complete(metric):
    assert metric.unit in get_args(Unit)
    assert metric.direction in ("maximize", "minimize", "quantity")
    description = metric.description
    assert 10 < len(description) <= 120 and description == description.strip() and not description.endswith(".")
    # If the quantity determines the direction, the description contains a placeholder for the quantity. The measure
    # name, if any, contains a placeholder for the measure.
    if metric.direction == "quantity":
        assert description.startswith("{quantity}")
        assert metric.measure_name is None or "{measure}" in metric.measure_name
    if metric.measure_name and "{measure}" in metric.measure_name:
        assert "{quantity}" in description
        assert ("{number}" in metric.measure_name) == ("{number}" in metric.name)
    assert not metric.unit or "{quantity}" not in description
    for quantity in (ACCURACY, MSE):
        named = metric.for_quantity(quantity)
        assert named is None or not {*"{}"} & {*named.name.replace("{number}", ""), *named.description}


def test_metric_names_are_unique_for_every_quantity():
    for quantity in (ACCURACY, MSE, R2):
        names = [metric.name for metric in metrics_for(quantity)]
        assert len(names) == len({*names})
        for metric in metrics_for(quantity):
            key = metric.name.replace("{number}", "12") + "/server"
            assert find_metric(key, [R2, quantity, ACCURACY]) == metric


def test_leaderboard_columns_match_units_and_directions_of_metrics():
    for column in COLUMNS:
        if metric := find_metric(column.name):
            assert (metric.unit, metric.direction) == (column.unit, column.for_quantity(ACCURACY).direction)


def run_of(quantity, is_good):
    """Return a record of two tasks.

    If ``is_good`` is true, values are good and costs are low. Otherwise, values get worse and costs are high.
    """
    names = ["x", "y", "z"]
    tasks = {model: [[0, 1], [2]] for model in MODELS}
    rounds = []
    for number in range(4):
        share = (0.7 + 0.05 * number) if is_good else (0.5 - 0.1 * number)
        local = (0.75 + 0.05 * number) if is_good else (0.4 - 0.1 * number)
        size = 100 if is_good else 1000
        rounds.append(
            {
                "round": number,
                "experience": dict.fromkeys(MODELS, number // 2),
                **results_of("values" if quantity != ACCURACY else "correct", MODELS, quantity, share),
                **{"local": next(iter(results_of("own", MODELS[1:], quantity, local).values()))},
                "upload_bytes": {"a": size, "b": size},
                "download_bytes": {"a": 2 * size, "b": size},
                "simulated_seconds": size / 10,
                "late_clients": [] if is_good else ["a"],
                "train_samples": {"a": size, "b": size},
                "seconds": size / 100,
                "processor_seconds": size / 200,
            }
        )
    record = {"groups": names, "totals": [100] * 3, "tasks": tasks, "rounds": rounds, "scenario": "domain"}
    before = results_of("values" if quantity != ACCURACY else "correct", ["server"], quantity, 0.1 if is_good else 0.7)
    record |= {"start": next(iter(before.values()))["server"]}
    record["client_samples"] = {"a": [[0, 5], [2, 1]], "b": [[1, 3]]}
    if quantity == ACCURACY and not is_good:
        # The clients of the bad run differ.
        for entry in rounds:
            entry["correct"]["b"] = [count - 5 for count in entry["correct"]["b"]]
    record["client_state_bytes"] = {"a": 5, "b": 7} if is_good else {"a": 50, "b": 70}
    if quantity == ACCURACY:
        return record | {"training": {"correct": 9 if is_good else 2, "total": 10}}
    record["measures"] = [{"name": quantity.name, "higher_is_better": quantity.higher_is_better}]
    return record | {"training": {quantity.name: {"0": of(quantity, 0.9 if is_good else 0.2)}}}


def of(quantity, share):
    return share if quantity.higher_is_better else 10 * (1 - share)


def results_of(name, models, quantity, share):
    """Return the test results of some models. All groups of samples have the same value."""
    if quantity == ACCURACY:
        return {name: {model: [round(100 * share)] * 3 for model in models}}
    groups = ("+".join(part) for n in (1, 2, 3) for part in itertools.combinations("012", n))
    values = dict.fromkeys(groups, of(quantity, share))
    return {name: {model: {quantity.name: values} for model in models}}


@pytest.mark.parametrize("quantity", [ACCURACY, MSE, R2], ids=lambda quantity: quantity.name)
def test_metric_direction_prefers_the_good_run(quantity):
    good, bad = (summarize(run_of(quantity, is_good)) for is_good in (True, False))
    assert good.keys() == bad.keys()
    seen = set()
    for key in good:
        metric = known(key, quantity)
        seen.add(metric.name)
        assert (good[key] > bad[key]) == (metric.direction == "maximize") and good[key] != bad[key], key
    assert seen == {metric.name for metric in metrics_for(quantity)}


def test_leaderboard_column_direction_prefers_the_good_run():
    good, bad = (leaderboard_row({"record": run_of(ACCURACY, is_good)}) for is_good in (True, False))
    assert good.keys() == bad.keys() == {column.name for column in COLUMNS}
    for column in metrics_for(ACCURACY, COLUMNS):
        if column.name != "rounds":
            better = good[column.name] > bad[column.name]
            assert better == (column.direction == "maximize") and good[column.name] != bad[column.name], column.name


def test_metric_units_scale_with_bytes_and_seconds_of_the_record():
    """Metrics in bytes or seconds are proportional to the record's bytes or simulated seconds. Others do not change."""
    record = run_of(ACCURACY, True)
    before = summarize(record)
    for unit, names in {
        "B": ("upload_bytes", "download_bytes"),
        "s": ("simulated_seconds",),
    }.items():
        rounds = [{**entry, **{name: times_three(entry[name]) for name in names}} for entry in record["rounds"]]
        kept = times_three(record["client_state_bytes"]) if unit == "B" else record["client_state_bytes"]
        after = summarize(record | {"rounds": rounds, "client_state_bytes": kept})
        for key, value in before.items():
            if key == "bytes_accuracy/server":  # It depends on the bytes, but has no unit.
                continue
            factor = 3 if known(key).unit == unit else 1
            assert after[key] == pytest.approx(factor * value), key


def times_three(value):
    return {name: 3 * one for name, one in value.items()} if isinstance(value, dict) else 3 * value


def test_find_metric_unknown_name_returns_none():
    assert find_metric("speed") is None and find_metric("A_x/server") is None and find_metric("A_2b/server") is None
    assert find_metric("final_MSE/server") is None and find_metric("final_MSE/server", [MSE]) is not None
    assert find_metric("A_2/server", [MSE]) is None


def test_find_metric_measure_with_slash_and_underscore():
    loss = Quantity("val/my_loss", higher_is_better=False)
    assert known("stream_val/my_loss_3/server", loss).name == "stream_val/my_loss_{number}"
    assert known("average_val/my_loss/client1", loss).direction == "minimize"


@pytest.mark.seconds
def test_summarize_committed_runs_equals_their_metrics():
    paths = [*recipes_folder().glob("**/results.json")]
    assert len(paths) > 30
    for path in paths:
        results = read_results(path.parent)
        assert list(summarize(results["record"]).items()) == list(results["metrics"].items()), path


def test_recipes_name_only_metrics_of_the_registry():
    names = set()
    for path in recipes_folder().glob("*/*.yaml"):
        if path.name == "rows.yaml":
            content = read_rows(path.parent)
            names |= {*content.get("metrics", [])}
            names |= {name for row in expand_grids(content).values() for name in row.expected or {}}
        elif objective := (yaml.safe_load(path.read_text()) or {}).get("objective"):
            names.add(objective)
    assert {"final_accuracy/server", "stream_accuracy/server", "forgetting/clients"} <= names
    assert [name for name in names if find_metric(name) is None] == []


WORST_TASK = Metric(
    "worst_task",
    per_model(lambda history: min(history.last_matrix[-1]) if len(history.tasks) > 1 else float("nan"), clients),
    "quantity",
    "{quantity} on the worst task after the last round",
    measure_name="worst_task_{measure}",
)


@pytest.mark.seconds
def test_new_metric_record_reaches_results_reports_and_listing(tmp_path, monkeypatch, capsys, small_recipe):
    """The new metric is the accuracy on the worst task."""
    monkeypatch.setattr(registry, "METRICS", (*METRICS, WORST_TASK))
    recipe = small_recipe(rounds=2, clients=2)
    for seed in range(2):
        (tmp_path / "small.yaml").write_text(yaml.safe_dump(recipe | {"seed_everything": seed}))
        main(["fit", "quickstart", str(tmp_path / "small.yaml"), "--out", str(tmp_path / f"seed-{seed}")])
    found = json.loads((tmp_path / "seed-0" / "results.json").read_text())
    last = found["record"]["rounds"][-1]["correct"]
    totals, tasks, values = found["record"]["totals"], found["record"]["tasks"], {}
    for client in (model for model in tasks if model != "server"):
        shares = [sum(last[client][g] for g in task) / sum(totals[g] for g in task) for task in tasks[client]]
        values[client] = min(shares)
        assert found["metrics"][f"worst_task/{client}"] == pytest.approx(values[client])
    mean = found["metrics"]["worst_task/clients"]
    assert mean == pytest.approx(sum(values.values()) / 2)

    page = (tmp_path / "seed-0" / "report.html").read_text()
    assert page == render_report(read_results(tmp_path / "seed-0"), (tmp_path / "seed-0" / "config.yaml").read_text())
    assert "accuracy on the worst task after the last round; higher is better" in page
    assert f"<td>{mean:.3f}</td>" in page[page.index("<summary>All metrics") :]

    groups = runs_by_name([tmp_path / "seed-0", tmp_path / "seed-1"])
    table = Table.from_results([run for runs in groups.values() for run in runs], "none", "paper", "")
    (cell,) = (cells["worst_task/clients"] for cells in table.rows.values())
    assert cell.values[0] == mean and cell.n == 2
    text = cell.text("worst_task/clients")
    line = next(line for line in compare_page(groups).splitlines() if "worst_task/clients" in line)
    assert text in line
    _, markdown = write_table(tmp_path / "table", table)
    head, _, row, *_ = markdown.read_text().splitlines()
    column = [cell.strip() for cell in head.split("|")].index("worst_task clients")
    assert row.split("|")[column].strip() == text

    capsys.readouterr()
    main(["ls", "metrics", "worst"])
    assert "accuracy on the worst task after the last round; higher is better" in capsys.readouterr().out


def test_ls_metrics_lists_every_metric_with_its_direction(capsys):
    main(["ls", "metrics", "--json"])
    listed = json.loads(capsys.readouterr().out)
    assert len(listed) == len(METRICS)
    assert listed["A_N"].startswith("accuracy on each of the tasks") and listed["A_N"].endswith("higher is better")
    assert all(text.endswith(("higher is better", "lower is better")) for text in listed.values())
