"""The committed pages of recipes are those that their tables make; finished tables are taken in."""

import pytest
import yaml

from lightning_fcl.cli.main import main
from lightning_fcl.cli.tables import layouts, pages
from lightning_fcl.evaluation.table import Cell, Table, format_of, read_table, write_table
from lightning_fcl.running.rows import expanded, paper_rows, recipes_folder

RECIPES = recipes_folder()
PAPERS = sorted(path.parent.name for path in RECIPES.glob("*/README.md"))


@pytest.mark.seconds
def test_each_page_is_what_its_tables_make():
    made = pages(RECIPES)
    assert len(made) == len(PAPERS) + 1
    for path, text in made.items():
        assert path.read_text() == text, f"{path} differs: run `lightning-fcl tables`"


@pytest.mark.parametrize("paper", PAPERS)
def test_each_layout_has_its_place_in_the_page(paper):
    text = (RECIPES / paper / "README.md").read_text()
    for name in ["verdict", *layouts(RECIPES / paper)]:
        assert text.count(f"<!-- {name} -->\n") == 1
    assert "<!-- written" in text
    assert text.count("<!-- end -->") == sum(line.startswith("<!-- ") for line in text.splitlines()) / 2


@pytest.mark.parametrize("path", sorted(RECIPES.glob("**/table.json")), ids=lambda path: path.parent.name)
def test_each_table_of_this_format_is_whole(path):
    if format_of(path) is None:
        pytest.skip("of 0.1")
    table = read_table(path)
    assert (path.parent / "rows.yaml").is_file() == (table.scale == "paper")
    home = path.parent if table.scale == "paper" else path.parent.parent
    assert table.paper == home.name
    content = yaml.safe_load((home / "rows.yaml").read_text())
    asked = content.get("whole") if table.scale == "paper" else None
    assert set(table.rows) == set(asked or paper_rows(home, None, table.scale))


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A paper of two rows, with a page; its folder."""
    folder = tmp_path / "recipes" / "toy"
    folder.mkdir(parents=True)
    rows = {"base": "base.yaml", "rows": {"one": "one.yaml", "two": "two.yaml"}, "why": "It is\n  a toy."}
    rows["tables"] = {"main": {"columns": {"test": "final/server"}, "of": "small"}}
    rows["figures"] = [{"file": "curves.png", "kind": "stream_accuracy", "panels": {"all": {"one": "one"}}}]
    (folder / "rows.yaml").write_text(yaml.safe_dump(rows))
    parts = ("verdict", "main", "mine", "written: small")
    (folder / "README.md").write_text("# toy\n" + "".join(f"\n<!-- {part} -->\nold\n<!-- end -->\n" for part in parts))
    (tmp_path / "recipes" / "README.md").write_text("<!-- papers -->\n<!-- end -->\n")
    for module in ("running.rows", "cli.tables"):
        monkeypatch.setattr(f"lightning_fcl.{module}.recipes_folder", lambda: folder.parent)
    return folder


def write(folder, scale="small", rows=("one", "two")):
    cells = {row: {"final/server": Cell({0: 0.5, 1: 0.6}, 0.56)} for row in rows}
    write_table(folder, Table("toy", scale, f"lightning-fcl reproduce toy --scale {scale}", {}, "a box", 60.0, cells))
    for name in ("against-paper.png", "curves.png", "other.png"):
        (folder / name).write_bytes(b"a picture")


def test_finished_tables_are_taken_in(toy, tmp_path, capsys):
    write(tmp_path / "small")
    write(tmp_path / "paper", "paper")
    main(["tables", str(tmp_path / "small"), str(tmp_path / "paper")])
    names = {"table.json", "against-paper.png", "curves.png"}
    assert {path.name for path in (toy / "small").iterdir()} == names
    assert {path.name for path in toy.iterdir() if path.is_file()} == {"rows.yaml", "README.md", *names}
    text = (toy / "README.md").read_text()
    assert "old" in text.split("<!-- mine -->")[1].split("<!-- end -->")[0] and text.count("old") == 1
    assert "**Reproduced**: of the 2 numbers" in text and "It is a toy." in text
    assert "| one | 0.550 ± 0.071 (0.560) |" in text and "(small/table.json)" in text
    assert "| [toy](toy/README.md) | reproduced" in (toy.parent / "README.md").read_text()
    capsys.readouterr()
    main(["tables"])
    assert capsys.readouterr().out == ""


def test_a_table_of_0_1_leaves_the_page_as_it_is(toy):
    before = (toy / "README.md").read_text()
    for place in (toy, toy / "small"):
        place.mkdir(exist_ok=True)
        (place / "table.json").write_text('{"one": {}}')
    main(["tables"])
    assert (toy / "README.md").read_text() == before
    assert "Its table is of 0.1. It is a toy." in (toy.parent / "README.md").read_text()


def test_tables_that_are_not_finished_are_refused(toy, tmp_path, capsys):
    def refused(message):
        with pytest.raises(SystemExit):
            main(["tables", str(tmp_path / "out")])
        assert message in capsys.readouterr().err

    refused("Expected a table in")
    write(tmp_path / "out", rows=["one"])
    refused("Expected all rows of toy in")
    write(tmp_path / "out", scale="smoke")
    refused("is of the scale smoke")
    rows = yaml.safe_load((toy / "rows.yaml").read_text())
    rows["tables"]["main"]["lines"] = {"row": ["three"]}
    (toy / "rows.yaml").write_text(yaml.safe_dump(rows))
    write(tmp_path / "out")
    refused("Expected table main of toy to be one that can be made. Expected rows among one, two but got three.")
    assert set(expanded(rows)) == {"one", "two"}


@pytest.mark.parametrize("scale", ["..", "../../victim", "/victim", "a/../..", "x\\y", "", " "])
def test_a_table_of_a_scale_that_leads_elsewhere_is_refused(toy, tmp_path, error_of, scale):
    write(tmp_path / "out", scale)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    assert "Expected a plain name of something inside" in error_of(["tables", str(tmp_path / "out")])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()} == before
