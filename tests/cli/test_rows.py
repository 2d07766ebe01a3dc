"""Tests of `lightning-fcl reproduce` with a `rows.yaml` outside of the package."""

import json
import re

import pytest
import yaml

from lightning_fcl.cli.main import main
from lightning_fcl.cli.reproduce import find_rows
from lightning_fcl.errors import InvalidValueError, MissingFileError, MissingValueError, UnknownNameError
from lightning_fcl.evaluation.table import Cell, Table, read_table, write_table
from lightning_fcl.runs.paper_rows import list_papers, paper_folder, recipes_folder
from lightning_fcl.runs.rows_check import check_rows

FIGURE = {"file": "a.png", "kind": "communication", "panels": {"digits": {"A": "A"}}}

DENSITIES = {**FIGURE, "kind": "activation_density", "experiences": True}


@pytest.fixture
def write(tmp_path, small_recipe):
    """Return a function that writes `mine/rows.yaml` with changed keys, and returns its path."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "base.yaml").write_text((recipes_folder() / "quickstart.yaml").read_text())
    (folder / "small.yaml").write_text(yaml.safe_dump(small_recipe(rounds=2, clients=2)))
    (folder / "other.yaml").write_text("data: {batch_size: 32}")

    def rows(**changes):
        content = {"base": "base.yaml", "rows": {"A": {"configs": ["small.yaml"]}}} | changes
        content = {key: value for key, value in content.items() if value is not None}
        (folder / "rows.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        return folder / "rows.yaml"

    return rows


@pytest.mark.seconds
def test_reproduce_own_rows_writes_table_verdict_and_figure(write, tmp_path, monkeypatch, capsys, reports):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lightning_fcl.evaluation.comparison.fill_template", lambda *words, **values: "page")
    rows = {
        "A": {"configs": ["small.yaml"], "expected": {"final_accuracy/server": 2.0, "upload_bytes/total": 1e9}},
        "B": {
            "configs": ["small.yaml"],
            "overrides": {"data.batch_size": 8},
            "expected": {"final_accuracy/server": 0.5},
        },
        "small": "small.yaml",
    }
    figures = [{**FIGURE, "panels": {"digits": {"first": "A", "second": "B"}}}]
    file = write(
        rows=rows,
        figures=figures,
        metrics=["final_accuracy/server", "upload_bytes/total"],
        tolerance={"final_accuracy/server": 1.0},
    )
    main(["reproduce", str(file), "--seeds", "2", "--workers", "1"])
    printed = capsys.readouterr().out
    out = tmp_path / "runs" / "mine"
    table = read_table(out / "table.json")
    # The name of a row is its name in rows.yaml, also if the recipe contains another name.
    assert list(table.rows) == ["A", "B", "small"] and table.seeds == [0, 1]
    results = {
        name: [
            json.loads((out / folder / f"seed-{seed}" / "results.json").read_text())["metrics"]["final_accuracy/server"]
            for seed in range(2)
        ]
        for name, folder in (("A", "a"), ("B", "b"), ("small", "small"))
    }
    for name, values in results.items():
        assert list(table.rows[name]["final_accuracy/server"].values.values()) == values
    mean = sum(results["A"]) / 2
    near = round(mean, 3) >= 1.0
    assert table.rows["A"]["final_accuracy/server"].verdict == ("near" if near else "outside")
    assert table.rows["B"]["final_accuracy/server"].verdict == "near"
    assert table.rows["A"]["upload_bytes/total"].verdict == "outside"
    assert f"Verdict: {table.verdict_counts.verdict}. Of 3 expected values, " in printed
    assert "Outside: A, upload_bytes/total: " in printed
    assert (out / "a.png").read_bytes().startswith(b"\x89PNG")
    main(["reproduce", str(file.parent), "--seeds", "2", "--finished-only"])
    assert read_table(out / "table.json").rows == table.rows


def test_find_rows_prefers_paper_and_accepts_paths(write, tmp_path, monkeypatch):
    file = write()
    assert find_rows(str(file)) == ("mine", file) == find_rows(str(file.parent))
    other = file.rename(file.with_name("My table.yaml"))
    assert find_rows(str(other)) == ("my-table", other)
    (tmp_path / "flwf").mkdir()
    (tmp_path / "flwf" / "rows.yaml").write_text("rows: {}")
    monkeypatch.chdir(tmp_path)
    assert find_rows("flwf") == ("flwf", paper_folder("flwf"))
    assert find_rows("./flwf/rows.yaml")[1].resolve() == tmp_path / "flwf" / "rows.yaml"
    with pytest.raises(UnknownNameError, match=re.escape("Did you mean flwf?")):
        find_rows("flfw")
    with pytest.raises(MissingFileError, match="no such file"):
        find_rows("rows.yaml")


@pytest.mark.parametrize("paper", list_papers())
def test_check_rows_accepts_rows_of_papers(paper):
    check_rows(paper_folder(paper), "paper")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"row": {}}, UnknownNameError, "but got row. Did you mean rows?"),
        ({"rows": None}, MissingValueError, "Expected `rows` in"),
        ({"rows": {}}, MissingValueError, "at least one row"),
        ({"base": 3}, InvalidValueError, "to be the name of a file, but got 3. Write the name with"),
        ({"base": "no.yaml"}, MissingFileError, "no.yaml"),
        ({"base": None, "rows": {"A": {}}}, MissingValueError, "Expected row A in"),
        ({"rows": {"A": None}}, InvalidValueError, "to contain a mapping"),
        ({"rows": {1: "small.yaml"}}, InvalidValueError, 'Write "1" with quotation marks.'),
        ({"rows": {"A": {"config": []}}}, UnknownNameError, "Did you mean configs?"),
        ({"rows": {"A": {"is_named": False}}}, UnknownNameError, "but got is_named"),
        ({"rows": {"A": {"configs": "small.yaml"}}}, InvalidValueError, "`configs` to be a list of strings"),
        ({"rows": {"A": {"configs": [3]}}}, InvalidValueError, "`configs` of row A"),
        ({"rows": {"A": {"configs": ["no.yaml"]}}}, MissingFileError, "relative to the folder of this file."),
        ({"rows": {"A": {"expected": {"final_acuracy/server": 1}}}}, UnknownNameError, "mean final_accuracy/server?"),
        ({"rows": {"A": {"expected": {"final_accuracy": 1}}}}, UnknownNameError, "Write final_accuracy/server"),
        ({"rows": {"A": {"expected": {"final_accuracy/server": "a"}}}}, InvalidValueError, "a dict of numbers"),
        ({"rows": {"A": {"expected": {"final_accuracy/server": float("inf")}}}}, InvalidValueError, "finite numbers"),
        ({"rows": {"A": {"scales": ["big"]}}}, UnknownNameError, "`scales` of row A"),
        ({"rows": {"A": {"scale_overrides": {"big": {}}}}}, UnknownNameError, "`scale_overrides` of row A"),
        ({"rows": {"A": {}, "a": {}}}, InvalidValueError, "A and a both have the folder a"),
        ({"tolerance": -1}, InvalidValueError, "`tolerance` to be at least 0"),
        ({"tolerance": "x"}, InvalidValueError, "`tolerance` to be a number"),
        ({"tolerance": {"final_acuracy/server": 1}}, UnknownNameError, "mean final_accuracy/server?"),
        ({"metrics": "final_accuracy/server"}, InvalidValueError, "`metrics` to be a list of strings"),
        ({"grids": [{"rows": ["A"], "wit": {}}]}, UnknownNameError, "Did you mean with?"),
        ({"grids": [{"rows": ["A"]}]}, MissingValueError, "Expected `with` in"),
        ({"grids": [{"rows": ["B"], "with": {"x": {}}}]}, InvalidValueError, "but got B"),
        ({"grids": [{"rows": ["A"], "with": {"x": {"override": {}}}}]}, UnknownNameError, "Did you mean overrides?"),
        ({"figures": [{**FIGURE, "kind": "bars"}]}, UnknownNameError, "`kind` of a figure"),
        ({"figures": [{**FIGURE, "file": "../a.png"}]}, InvalidValueError, "the name of a PNG file"),
        ({"figures": [{**FIGURE, "file": "a.pdf"}]}, InvalidValueError, "the name of a PNG file"),
        ({"figures": [{**FIGURE, "panels": {"x": {"A": "B"}}}]}, UnknownNameError, "the rows of a figure"),
        ({"figures": [{**FIGURE, "panels": {}}]}, MissingValueError, "`panels` of a figure"),
        ({"figures": [{**FIGURE, "experiences": True}]}, InvalidValueError, "Remove `experiences`."),
        ({"gains": {"of": ["B"], "over": [], "paper": []}}, UnknownNameError, "the rows of `gains`"),
    ],
)
def test_check_rows_invalid_content_raises(write, changes, error, message):
    with pytest.raises(error) as raised:
        check_rows(write(**changes), "paper")
    assert message in str(raised.value)


FIXES = [
    ({"rows": {}}, {"rows": {"A": "small.yaml"}}, "Write a line for each row, as in `rows: {FedAvg: fedavg.yaml}`."),
    ({"rows": {1: "small.yaml"}}, {"rows": {"1": "small.yaml"}}, 'Write "1" with quotation marks.'),
    ({"base": None, "rows": {"A": {}}}, {"rows": {"A": {}}}, "Set `base`, or `configs` of the row."),
    ({"rows": None}, {"rows": {"A": {}}}, "Add `rows`."),
    ({"rows": {"A": {"config": []}}}, {"rows": {"A": {"configs": []}}}, "Did you mean configs?"),
    ({"base": 3}, {"base": "base.yaml"}, "Write the name with quotation marks."),
    (
        {"rows": {"A": "mine/small.yaml"}},
        {"rows": {"A": "small.yaml"}},
        "Write their paths relative to the folder of this file.",
    ),
    (
        {"rows": {"A": "small.yaml", "B": "small.yaml"}},
        {"rows": {"A": "small.yaml", "B": {"configs": ["small.yaml"]}}},
        "Rename a row. A row that is only a file has the name of the file: write `{configs: [FILE]}`.",
    ),
    (
        {"metrics": ["final_accuracy"]},
        {"metrics": ["final_accuracy/server"]},
        "Write final_accuracy/server, final_accuracy/clients or final_accuracy/total.",
    ),
    (
        {"rows": {"A": {"expected": {"final_accuracy/server": float("inf")}}}},
        {"rows": {"A": {"expected": {}}}},
        "Remove the metric if there is no expected value.",
    ),
    (
        {"figures": [{**FIGURE, "file": "x/a.png"}]},
        {"figures": [{**FIGURE, "file": "accuracy.png"}]},
        "Write a name without a folder, as in `file: accuracy.png`.",
    ),
    (
        {"figures": [{**FIGURE, "panels": {"Digits": {}}}]},
        {"figures": [FIGURE]},
        "Write the rows of each panel, as in `panels: {Digits: {FedAvg: FedAvg}}`.",
    ),
    ({"figures": [{**FIGURE, "experiences": True}]}, {"figures": [FIGURE]}, "Remove `experiences`."),
    (
        {"figures": [{**DENSITIES, "panels": {"x": {"a": "A", "b": "A"}}}]},
        {"figures": [{**DENSITIES, "panels": {"x": {"a": "A"}, "y": {"b": "A"}}}]},
        "Write a panel for each row.",
    ),
]


@pytest.mark.parametrize(("wrong", "right", "hint"), FIXES)
def test_check_rows_hint_is_a_fix_that_works(write, wrong, right, hint):
    with pytest.raises(InvalidValueError if "relative" not in hint else MissingFileError) as raised:
        check_rows(write(**wrong), "paper")
    assert raised.value.hint == hint
    check_rows(write(**right), "paper")


def test_find_rows_hint_is_a_fix_that_works():
    with pytest.raises(MissingFileError) as raised:
        find_rows("nowhere/rows.yaml")
    assert raised.value.hint == "Pass an existing file, or the name of a paper such as flwf."
    assert find_rows("flwf")[0] == "flwf"
    with pytest.raises(UnknownNameError) as unknown:
        find_rows("zzz")
    assert unknown.value.hint == "Pass a file, as in `lightning-fcl reproduce rows.yaml`."


def test_check_rows_accepts_measures_of_own_modules(write):
    check_rows(write(rows={"A": {"expected": {"final_MSE/server": 0.1, "my_metric/total": 2}}}), "paper")


@pytest.mark.seconds
def test_reproduce_invalid_setting_raises_before_first_run(write, tmp_path, error_of):
    file = write(rows={"A": {"configs": ["small.yaml"]}, "B": {"overrides": {"data.batch_sise": 8}}})
    error = error_of(["reproduce", str(file), "--out", str(tmp_path / "out"), "--workers", "1"])
    assert (
        "Expected `fit` to accept the recipe of row B, but got: " in error and "Did you mean data.batch_size?" in error
    )
    assert not (tmp_path / "out").exists()


def test_table_tolerance_changes_verdict_and_is_stored(tmp_path):
    cells = {"final_accuracy/server": Cell({0: 0.5}, 0.58), "forgetting/clients": Cell({0: 0.1}, 0.12)}
    table = Table("mine", "paper", "command", {}, "machine", 1.0, {"A": cells})
    verdicts = {
        tolerance: [cell.verdict for _, _, cell in table.with_tolerance(tolerance).paper_cells]
        for tolerance in (0.0, 0.05, 0.1)
    }
    assert verdicts == {0.0: ["outside"] * 2, 0.05: ["outside", "near"], 0.1: ["near"] * 2}
    by_metric = table.with_tolerance({"final_accuracy/server": 0.08})
    assert [cell.verdict for _, _, cell in by_metric.paper_cells] == ["near", "near"]
    assert (table.near_text, by_metric.near_text) == ("within 0.05", "within the tolerance of the metric")
    write_table(tmp_path, by_metric)
    assert read_table(tmp_path / "table.json") == by_metric
    # The default is not stored, so that tables of papers do not change.
    write_table(tmp_path, table)
    assert "tolerance" not in (tmp_path / "table.json").read_text()
