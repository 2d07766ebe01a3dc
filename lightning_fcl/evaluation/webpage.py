"""A page for a browser: one file that asks no host for anything, from plain parts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from lightning_fcl import __version__
from lightning_fcl.errors import require
from lightning_fcl.evaluation.files import cache_folder, write_whole

_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Args:
        text: What it shows.
        kind: How it stands to the paper: ``"near"``, ``"spread"``, ``"outside"``, or nothing.
    """

    text: str
    kind: str = ""


@dataclass(frozen=True)
class Grid:
    """A table: a head, and lines that begin with their names."""

    head: Sequence[str]
    lines: Sequence[Sequence[Cell]]

    @classmethod
    def of(cls, head: Sequence[str], lines: Sequence[Sequence[str]]) -> Grid:
        """A table of texts alone."""
        return cls(head, [[Cell(text) for text in line] for line in lines])


@dataclass(frozen=True)
class Chart:
    """A chart in Vega-Lite, and what it shows."""

    caption: str
    spec: dict[str, Any]


@dataclass(frozen=True)
class Tile:
    """A number at the top of a page."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A part of a page: text, names with values, tables, charts and code, each of which may be missing."""

    title: str
    text: str = ""
    facts: Sequence[tuple[str, str]] = ()
    grids: Sequence[Grid] = ()
    charts: Sequence[Chart] = ()
    code: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Page:
    """What a page shows, from top to bottom."""

    title: str
    subtitle: str = ""
    warnings: Sequence[str] = ()
    tiles: Sequence[Tile] = ()
    sections: Sequence[Section] = field(default_factory=list)
    footer: str = f"Written by lightning-fcl {__version__}."


def render(page: Page) -> str:
    """The page's HTML: whatever its parts say is shown as text, and the browser may ask for nothing else.

    Example:
        >>> "<h1>a &lt;b&gt; c</h1>" in render(Page("a <b> c"))
        True
    """
    jinja2 = require("jinja2", "fills in the pages of reports")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    charts = any(section.charts for section in page.sections)
    text: str = environment.get_template("page.html").render(
        page=page,
        charts=charts,
        style=_text("page.css"),
        script=_text("page.js"),
        library=_library() if charts else "",
    )
    return text


def _text(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


@cache
def _library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script; kept between processes, as putting it together takes seconds."""
    bundler = require("vl_convert", "holds the script that draws the charts of reports")
    folder = cache_folder() / "scripts"
    for path in folder.glob(f"vega-{bundler.__version__}-*.js"):
        text = path.read_text(encoding="utf-8")
        if path.stem.endswith(_digest(text)):
            return text
    made: str = bundler.javascript_bundle().replace("</script", "<\\/script")
    with suppress(OSError):  # a folder that cannot be written to costs time, no more
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / f"vega-{bundler.__version__}-{_digest(made)}.js", made)
    return made


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
