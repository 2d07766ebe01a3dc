"""Sphinx extension that warns about built files that would load something from another host.

`make docs` treats warnings as errors.
"""

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
    """A parser that collects addresses on other hosts from which a page loads something. Links to pages are ignored."""

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
    """Return the addresses on other hosts that a page, a style sheet or a script loads.

    Args:
        name: File name. Its ending determines the kind of text.
        text: Content of the file.
    """
    if name.endswith(".html"):
        page = _Page()
        page.feed(text)
        return page.found
    return (IN_CSS if name.endswith((".css", ".svg")) else IN_SCRIPTS).findall(text)


def in_folder(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield each file of a built site that loads something from another host, with the address."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".html", ".css", ".js", ".svg"):
            for address in loaded_from_elsewhere(path.name, path.read_text(encoding="utf-8", errors="replace")):
                yield path, address


def check(app: Sphinx, exception: Exception | None) -> None:
    """Warn about each address on another host from which the site would load something."""
    if exception is None:
        for path, address in in_folder(Path(app.outdir)):
            logging.getLogger(__name__).warning("%s would load %s. Put a copy into docs/_static.", path, address)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect `check` to the end of the build."""
    app.connect("build-finished", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
