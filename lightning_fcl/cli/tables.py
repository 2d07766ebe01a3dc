"""`lightning-fcl tables`: finished tables into the folders of recipes, and the recipes' pages by them."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_fcl.evaluation.figures import figures_at
from lightning_fcl.evaluation.files import write_whole
from lightning_fcl.evaluation.inside import inside
from lightning_fcl.evaluation.pages import Layout, papers_block, render, verdict_block, written_block
from lightning_fcl.evaluation.table import Table, format_of, read_table
from lightning_fcl.running.rows import expanded, paper_folder, paper_rows, place_of, recipes_folder


def command(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Take finished tables and their figures into the folders of their recipes, then write the recipes' pages by them.

    Raises:
        FileNotFoundError: If there is no table.
        ValueError: If a table is not of all rows, or a page's table is not understood.
    """
    parser.description = "Bring the tables and figures of finished runs, and the recipes' pages, up to date."
    parser.add_argument("folders", nargs="*", type=Path, help="what `reproduce` wrote, as in: runs/flwf-paper")
    options = parser.parse_args(words[1:])
    for folder in options.folders:
        for path in take_in(folder):
            print(f"Written: {path}")
    for path, text in pages(recipes_folder()).items():
        if path.read_text(encoding="utf-8") != text:
            print(f"Written: {write_whole(path, text)}")


def take_in(folder: Path) -> list[Path]:
    """Copy a finished table and its figures into the folder of its recipes; the paths there.

    Raises:
        FileNotFoundError: If there is no table.
        ValueError: If rows are missing, or the runs were only to try whether they run.
    """
    table = read_table(folder / "table.json")
    home = paper_folder(table.paper)
    if table.scale == "smoke":
        raise ValueError(f"Expected a table of runs that tell something but {folder} is of the scale smoke.")
    asked = _content(home).get("whole") if table.scale == "paper" else None  # of its own scale a paper may ask for some
    if missing := [row for row in asked or paper_rows(home, None, table.scale) if row not in table.rows]:
        raise ValueError(
            f"Expected all rows of {table.paper} in {folder} but {', '.join(missing)} are missing. Run `reproduce` "
            "without --rows."
        )
    figures = figures_at(table.scale, _content(home).get("figures", []))
    names = ["table.json", "against-paper.png", *(figure["file"] for figure in figures)]
    place = place_of(home, table.scale)
    place.mkdir(exist_ok=True)
    found = [(inside(folder, name), inside(place, name)) for name in names]
    return [write_whole(to, path.read_bytes()) for path, to in found if path.is_file()]


def pages(recipes: Path) -> dict[Path, str]:
    """Every page of the recipes as its tables make it, by its path.

    Raises:
        ValueError: If a table of a page is not understood.
    """
    made = {path: _page(path) for path in sorted(recipes.glob("*/README.md"))}
    papers = {path.parent.name: (_table(path.parent), _reason(path.parent)) for path in made}
    summary = recipes / "README.md"
    if summary.is_file():
        text = summary.read_text(encoding="utf-8")
        made[summary] = render(text, lambda name, of: papers_block(papers) if name == "papers" else None)
    return made


def layouts(folder: Path) -> dict[str, Layout]:
    """The layouts of a paper's tables, each of whose rows there is.

    Raises:
        ValueError: If one is not understood.
    """
    read = {name: Layout.read(name, content) for name, content in _content(folder).get("tables", {}).items()}
    for name, layout in read.items():
        try:
            layout.places(_rows(folder / layout.of))
        except (KeyError, ValueError) as error:
            raise ValueError(f"Expected table {name} of {folder.name} to be one that can be made. {error}") from error
    return read


def _page(path: Path) -> str:
    folder = path.parent
    known = layouts(folder)

    def part(name: str, of: str) -> str | None:
        if name in known:
            layout = known[name]
            return layout.markdown(table, _rows(folder / layout.of)) if (table := _table(folder / layout.of)) else None
        if name == "verdict":
            return None if _is_old(folder / of) else verdict_block(_table(folder / of), _why(folder))
        return written_block(table, of) if name == "written" and (table := _table(folder / of)) else None

    return render(path.read_text(encoding="utf-8"), part)


def _table(folder: Path) -> Table | None:
    """The table in a folder; None if there is none, or an old one."""
    path = folder / "table.json"
    return read_table(path) if path.is_file() and not _is_old(folder) else None


def _is_old(folder: Path) -> bool:
    """Whether a folder's table is of 0.1: without values seed by seed. What a page tells of it stays as it is."""
    path = folder / "table.json"
    return path.is_file() and format_of(path) is None


def _rows(folder: Path) -> list[str]:
    """All rows of the paper that a folder belongs to: its own, or that of one of its scales."""
    home = folder if (folder / "rows.yaml").is_file() else folder.parent
    return list(expanded(_content(home)))


def _why(folder: Path) -> str:
    return " ".join(str(_content(folder).get("why", "")).split())


def _reason(folder: Path) -> str:
    return f"Its table is of 0.1. {_why(folder)}" if _is_old(folder) else _why(folder)


def _content(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((folder / "rows.yaml").read_text(encoding="utf-8"))
    return content
