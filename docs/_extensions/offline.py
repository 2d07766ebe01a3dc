"""Built pages load nothing from another host: what would is a warning, and warnings are errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

ELSEWHERE = re.compile(r"\s*(?:[a-z]+:)?//", re.IGNORECASE)
IN_CSS = re.compile(r"""(?:url\(\s*["']?|@import\s+["'])((?:[a-z]+:)?//[^"')\s]+)""", re.IGNORECASE)
IN_SCRIPTS = re.compile(
    r"""(?:\bimport\b|\bfrom\b|\bfetch\b|\bimportScripts\b)\s*\(?\s*["'`]((?:https?:)?//[^"'`]+)""", re.IGNORECASE
)
LOADING = ("src", "srcset", "poster", "data", "background")


class _Page(HTMLParser):
    """Collects what a browser would load from elsewhere to show a page; what a reader may follow is left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        for name, value in attrs:
            loads = name in LOADING or (name.endswith("href") and tag not in ("a", "base"))
            if value and loads:
                self.found += [part for part in value.split(",") if ELSEWHERE.match(part)]
            if value and name == "style":
                self.found += IN_CSS.findall(value)

    def handle_data(self, data: str) -> None:
        if self._inside in ("style", "script"):
            self.found += (IN_CSS if self._inside == "style" else IN_SCRIPTS).findall(data)

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""


def loaded_from_elsewhere(name: str, text: str) -> list[str]:
    """The addresses on other hosts that a page, a style sheet or a script loads.

    Args:
        name: File name: its ending says what the text is.
        text: What the file holds.
    """
    if name.endswith(".html"):
        page = _Page()
        page.feed(text)
        return page.found
    return (IN_CSS if name.endswith((".css", ".svg")) else IN_SCRIPTS).findall(text)


def in_folder(folder: Path) -> Iterator[tuple[Path, str]]:
    """Each file of a built site that loads something from elsewhere, and what."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".html", ".css", ".js", ".svg"):
            for address in loaded_from_elsewhere(path.name, path.read_text(encoding="utf-8", errors="replace")):
                yield path, address


def check(app: Sphinx, exception: Exception | None) -> None:
    """Warn of all that the site would load from elsewhere."""
    if exception is None:
        for path, address in in_folder(Path(app.outdir)):
            logging.getLogger(__name__).warning("%s would load %s: keep a copy in docs/_static.", path, address)


def setup(app: Sphinx) -> dict[str, bool]:
    """Look when all is written."""
    app.connect("build-finished", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
