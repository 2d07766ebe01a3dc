"""Tests that the committed pages match their tables, and that ``make_pages.py`` copies finished tables."""

import re

import pytest
import yaml
from raising import raises

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.evaluation.paper_figures import FIGURE_KINDS
from lightning_fcl.evaluation.table import Cell, Table, read_table, write_table
from lightning_fcl.io.paths import safe_join
from lightning_fcl.runs.paper_rows import expand_grids, paper_rows, recipes_folder

RECIPES = recipes_folder()
PAPERS = sorted(path.parent.name for path in RECIPES.glob("*/README.md"))


@pytest.mark.seconds
def test_pages_committed_equal_generated_pages(make_pages):
    made = make_pages.pages(RECIPES)
    assert len(made) == len(PAPERS) + 1
    for path, text in made.items():
        assert path.read_text() == text, f"{path} differs: run `make tables`"


@pytest.mark.parametrize("paper", PAPERS)
def test_pages_contain_each_layout_once(make_pages, paper):
    text = (RECIPES / paper / "README.md").read_text()
    for name in ["boards" if paper == "leaderboard" else "verdict", *make_pages.layouts(RECIPES / paper)]:
        assert text.count(f"<!-- {name} -->\n") == 1
    assert "<!-- written" in text
    assert text.count("<!-- end -->") == sum(line.startswith("<!-- ") for line in text.splitlines()) / 2


@pytest.mark.parametrize("path", sorted(RECIPES.glob("**/table.json")), ids=lambda path: path.parent.name)
def test_committed_table_has_required_rows(path):
    table = read_table(path)
    assert (path.parent / "rows.yaml").is_file() == (table.scale == "paper")
    home = path.parent if table.scale == "paper" else path.parent.parent
    assert table.paper == home.name
    content = yaml.safe_load((home / "rows.yaml").read_text())
    asked = content.get("whole") if table.scale == "paper" else None
    assert set(asked or paper_rows(home, None, table.scale)) <= set(table.rows) <= set(expand_grids(content))


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*/rows.yaml")), ids=lambda path: path.parent.name)
def test_rows_figures_have_known_kinds_and_rows(path):
    content = yaml.safe_load(path.read_text())
    rows = expand_grids(content)
    for figure in content.get("figures", []):
        assert {"file", "kind", "panels"} <= {*figure} <= {"file", "kind", "panels", "title", "experiences", "scales"}
        assert figure["kind"] in FIGURE_KINDS and safe_join(path.parent, figure["file"]).suffix == ".png"
        assert figure["panels"]
        for lines in figure["panels"].values():
            assert lines and {*lines.values()} <= {*rows}
            assert len(lines) == 1 or not figure.get("experiences")


@pytest.fixture
def toy(tmp_path, monkeypatch, make_pages):
    """Return the recipe folder of a paper, with two recipes in `rows.yaml` and a page."""
    folder = tmp_path / "recipes" / "toy"
    folder.mkdir(parents=True)
    rows = {"base": "base.yaml", "rows": {"one": "one.yaml", "two": "two.yaml"}, "why": "It is\n  a toy."}
    rows["tables"] = {"main": {"columns": {"test": "final/server"}, "of": "small"}}
    rows["figures"] = [{"file": "curves.png", "kind": "stream_accuracy", "panels": {"all": {"one": "one"}}}]
    (folder / "rows.yaml").write_text(yaml.safe_dump(rows))
    parts = ("verdict", "main", "mine", "written: small")
    (folder / "README.md").write_text("# toy\n" + "".join(f"\n<!-- {part} -->\nold\n<!-- end -->\n" for part in parts))
    (tmp_path / "recipes" / "README.md").write_text("<!-- papers -->\n<!-- end -->\n")
    for module in ("lightning_fcl.runs.paper_rows", "make_pages"):
        monkeypatch.setattr(f"{module}.recipes_folder", lambda: folder.parent)
    return folder


def write(folder, scale="small", rows=("one", "two")):
    cells = {row: {"final/server": Cell({0: 0.5, 1: 0.6}, 0.56)} for row in rows}
    write_table(folder, Table("toy", scale, f"lightning-fcl reproduce toy --scale {scale}", {}, "a box", 60.0, cells))
    for name in ("curves.png", "other.png"):
        (folder / name).write_bytes(b"a picture")


def test_main_finished_tables_copies_files_and_updates_pages(make_pages, toy, tmp_path, capsys):
    write(tmp_path / "small")
    write(tmp_path / "paper", "paper")
    make_pages.main([tmp_path / "small", tmp_path / "paper"])
    names = {"table.json", "against-paper.png", "curves.png"}
    assert {path.name for path in (toy / "small").iterdir()} == names
    assert {path.name for path in toy.iterdir() if path.is_file()} == {"rows.yaml", "README.md", *names}
    text = (toy / "README.md").read_text()
    assert "old" in text.split("<!-- mine -->")[1].split("<!-- end -->")[0] and text.count("old") == 1
    assert "**Reproduced**. We compare 2 values with the paper." in text and "It is a toy." in text
    assert "| one | 0.550 ± 0.071 (0.560) |" in text and "(small/table.json)" in text
    assert "| [toy](toy/README.md) | reproduced" in (toy.parent / "README.md").read_text()
    capsys.readouterr()
    make_pages.main([])
    assert capsys.readouterr().out == ""


def test_main_unfinished_or_smoke_table_raises(make_pages, toy, tmp_path):
    def refused(message):
        with pytest.raises((OSError, ValueError), match=re.escape(message)):
            make_pages.main([tmp_path / "out"])

    refused("Expected a table in")
    write(tmp_path / "out", rows=["one"])
    refused("Expected all rows of toy in")
    write(tmp_path / "out", scale="smoke")
    refused("has the scale `smoke`")
    rows = yaml.safe_load((toy / "rows.yaml").read_text())
    rows["tables"]["main"]["lines"] = {"row": ["three"]}
    (toy / "rows.yaml").write_text(yaml.safe_dump(rows))
    write(tmp_path / "out")
    refused("Expected table main of toy to have a valid layout. Expected rows among one, two, but got three.")
    assert set(expand_grids(rows)) == {"one", "two"}


@pytest.mark.parametrize("scale", ["..", "../../victim", "/victim", "a/../..", "x\\y", "", " "])
def test_main_scale_with_unsafe_path_raises_and_writes_nothing(make_pages, toy, tmp_path, scale):
    write(tmp_path / "out", scale)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    with raises(InvalidValueError, "name"):
        make_pages.main([tmp_path / "out"])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()} == before
