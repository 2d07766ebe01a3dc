"""Tests of `settings.yaml`."""

import pytest
import yaml

from lightning_fcl.errors import InvalidValueError, MissingValueError
from lightning_fcl.runs.found_settings import FoundSettings, read_settings, write_settings
from lightning_fcl.runs.paper_rows import expand_grids, paper_rows
from lightning_fcl.runs.recipe import Setting

FOUND = FoundSettings({"a.lr": 0.1, "b": [1, 2]}, num_settings=10, num_failed=2, score=0.5, edge=["lr"], search="abc")


def test_settings_file_keeps_other_entries_and_order(tmp_path):
    assert read_settings(tmp_path) == {}
    write_settings(tmp_path, "beta .5", "EWC", FOUND)
    write_settings(tmp_path, "beta .05", "EWC", FoundSettings({"a.lr": 1.0}))
    file = write_settings(tmp_path, "beta .5", "MAS", FoundSettings({}))
    write_settings(tmp_path, "beta .5", "EWC", FoundSettings({"a.lr": 0.3}, score=0.25))
    assert yaml.safe_load(file.read_text())["beta .5"]["EWC"] == {
        "overrides": {"a.lr": 0.3},
        "num_settings": 0,
        "num_failed": 0,
        "score": 0.25,
        "edge": [],
        "search": "",
    }
    found = read_settings(tmp_path)
    assert {case: [*rows] for case, rows in found.items()} == {"beta .5": ["EWC", "MAS"], "beta .05": ["EWC"]}
    write_settings(tmp_path, "beta .5", "EWC", FOUND)
    assert read_settings(tmp_path)["beta .5"]["EWC"] == FOUND


@pytest.mark.parametrize(
    "text",
    ["[]", "beta: 1", "beta: {EWC: 1}", "beta: {EWC: {lr: 1}}", "beta: {EWC: {overrides: 1}}", "beta: {EWC: {}}"],
)
def test_read_settings_invalid_file_raises_with_fix(tmp_path, text):
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(InvalidValueError, match="found settings of rows by case") as raised:
        read_settings(tmp_path)
    assert "Delete the file, and run `lightning-fcl leaderboard --search`." in str(raised.value)
    file.unlink()
    assert read_settings(tmp_path) == {}


CONTENT = {
    "rows": {"A": {"configs": ["a.yaml"], "overrides": {"x": 1, "y": 1, "z": 1}}, "B": {"configs": ["b.yaml"]}},
    "grids": [{"rows": ["A", "B"], "with": {"P": {"settings": "c", "overrides": {"z": 3}}, "Q": {}}, "seeds": 10}],
}


def test_expand_grids_found_settings_override_row_and_change_overrides_both():
    entries = expand_grids(CONTENT, {"c": {"A": FoundSettings({"y": 2, "z": 2})}})
    assert entries["P A"].overrides == {"x": 1, "y": 2, "z": 3} and entries["P A"].lacking is None
    assert entries["Q A"].overrides == {"x": 1, "y": 1, "z": 1} and entries["Q B"].lacking is None
    assert entries["P B"].lacking == ("B", "c") and entries["P B"].seeds == 10 and entries["A"].seeds is None


def test_row_without_found_settings_raises_with_search_command(tmp_path):
    (tmp_path / "rows.yaml").write_text(yaml.safe_dump(CONTENT))
    write_settings(tmp_path, "c", "A", FoundSettings({"y": 2}))
    rows = paper_rows(tmp_path, None)
    assert Setting("y", "2") in rows["P A"].recipe.settings
    assert rows["Q B"].recipe.files == (tmp_path / "b.yaml",)
    with pytest.raises(MissingValueError, match="Expected settings of B for the case c") as raised:
        _ = rows["P B"].recipe
    assert "Search them with `lightning-fcl leaderboard --search --cases c --methods B`." in str(raised.value)
    write_settings(tmp_path, "c", "B", FoundSettings({"y": 5}))
    assert Setting("y", "5") in paper_rows(tmp_path, None)["P B"].recipe.settings
