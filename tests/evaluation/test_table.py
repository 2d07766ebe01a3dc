"""Tests of the tables of a paper: values over seeds equal values by hand, and written tables can be read."""

import json
import re
import statistics

import pytest
from raising import raises

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.evaluation.table import Cell, Table, cells, read_table, write_table

EXPECTED = {"general_accuracy/client1": 0.753, "general_accuracy/other": 0.5}


def results(row="FLwF-2T/FT", seed=0, expected=None):
    """Return the part of a run's results that a table uses."""
    return {
        "recipe": {"paper": "flwf", "row": row} if row else None,
        "seed": seed,
        "metrics": {
            "general_accuracy/client1": 0.7 + 0.01 * seed**2,
            "F_2/client1": 0.2 - 0.03 * seed,
            "general_accuracy/server": 0.6,
        },
        "expected": expected or {},
        "versions": {"lightning-fcl": "0.1.0", "torch": "2.13.0"},
        "machine": "a small computer",
        "seconds": 12.34,
        "command": "lightning-fcl fit --config flwf.yaml",
    }


def of(rows, paper="flwf"):
    versions = {"lightning-fcl": "0.2.0", "torch": "2.15.0"}
    return Table(paper, "paper", f"lightning-fcl reproduce {paper} --seeds 3", versions, "a machine", 90.0, rows)


def test_cells_contain_values_of_each_seed():
    runs = [results("A", seed, EXPECTED) for seed in range(3)] + [results("B", 0), results(None, 0)]
    ours = cells(runs)
    assert list(ours) == ["A", "B", "lightning-fcl fit --config flwf.yaml"]
    values = [run["metrics"]["general_accuracy/client1"] for run in runs[:3]]
    cell = ours["A"]["general_accuracy/client1"]
    assert dict(cell.values) == dict(enumerate(values)) and cell.n == 3 and cell.paper == 0.753
    assert cell.mean == pytest.approx(sum(values) / 3)
    assert cell.std == pytest.approx(statistics.stdev(values))
    assert (single := ours["B"]["general_accuracy/client1"]).std == 0.0 and single.n == 1 and single.paper is None
    missing = ours["A"]["general_accuracy/other"]
    assert (missing.mean, missing.std, missing.n, missing.paper) == (None, None, 0, 0.5)


def test_cells_count_only_seeds_with_the_metric():
    runs = [results("A", seed) for seed in range(3)]
    del runs[1]["metrics"]["F_2/client1"]
    assert list(cells(runs)["A"]["F_2/client1"].values) == [0, 2]


def test_cells_same_row_and_seed_twice_raises():
    with raises(InvalidValueError, "seed", value=4):
        cells([results("A", 4), results("B", 4), results("A", 4)])


def test_table_from_results_contains_versions_machine_and_seconds():
    other = results("B", 1) | {"machine": "a large computer"}
    table = Table.from_results([results("A", 0), other], "flwf", "small", "lightning-fcl reproduce flwf")
    assert table.versions == {"lightning-fcl": "0.1.0", "torch": "2.13.0"} and table.seeds == [0, 1]
    assert table.machine == "a small computer; a large computer" and table.seconds == 24.7
    few = table.select_metrics(["F_2/client1", "general_accuracy/server"])
    assert few.metrics == ["F_2/client1", "general_accuracy/server"] and few.seconds == 24.7
    with raises(InvalidValueError, "metrics"):
        table.select_metrics(["speed"])


def test_read_table_equals_written_table(tmp_path):
    rows = {
        "FT": {
            "F_2/client1": Cell({0: 0.9, 2: 1.0}, 1.0),
            "upload_bytes/total": Cell({0: 2.5e6, 2: 2.5e6}),
            "A_2/other": Cell({}, 0.5),
        },
        "a|b": {"F_2/client1": Cell({0: 0.25})},
    }
    as_json, markdown = write_table(tmp_path / "new", of(rows))
    assert read_table(as_json) == of(rows)
    content = json.loads(as_json.read_text())
    assert content["format"] == 1 and content["seeds"] == [0, 2] and content["seconds"] == 90.0
    assert content["rows"]["FT"]["F_2/client1"]["values"] == {"0": 0.9, "2": 1.0}
    assert re.sub(" +", " ", markdown.read_text()).splitlines()[:4] == [
        "| | F_2 client1 | upload_bytes total | A_2 other |",
        "| ---- | --------------------: | -----------------: | --------: |",
        "| FT | 0.950 ± 0.071 (1.000) | 2.500 MB | - (0.500) |",
        "| a\\|b | 0.250 | - | - |",
    ]


def test_read_table_damaged_file_raises_with_reason(tmp_path):
    path, _ = write_table(tmp_path, of({"FT": {"F_2/client1": Cell({0: 0.9, 1: 1.0}, 1.0)}}))
    content = json.loads(path.read_text())

    def refused(match, **changed):
        path.write_text(json.dumps(content | changed))
        with pytest.raises(ValueError, match=match):
            read_table(path)

    def row(**changed):
        return {"FT": {"F_2/client1": content["rows"]["FT"]["F_2/client1"] | changed}}

    refused("to have format 1, but it has format 7", format=7)
    refused("but reading it failed: .*'int' object", rows={"FT": 3})
    refused("but reading it failed: .*'high'", rows=row(values={"0": 0.9, "1": "high"}))
    refused("but reading it failed: .*'first'", rows=row(values={"first": 0.9, "1": 1.0}))
    refused("but reading it failed: .*'one'", rows=row(paper="one"))
    del content["machine"]
    refused("but reading it failed: KeyError.'machine'")


def test_write_table_failure_keeps_previous_files(tmp_path, monkeypatch):
    write_table(tmp_path, of(cells([results()])))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def broken(source, target):
        raise OSError("cannot rename")

    monkeypatch.setattr("lightning_fcl.io.atomic.os.replace", broken)
    with pytest.raises(OSError, match="cannot rename"):
        write_table(tmp_path, of(cells([results("another")])))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
