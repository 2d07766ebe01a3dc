"""Sphinx extension for links of pages: links that work on GitHub also work on the site.

The extension resolves links to included pages and to files of the repository.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

INCLUDES = re.compile(r"^```\{include\} (\S+)$", re.MULTILINE)


def included_pages(docs: Path) -> dict[Path, str]:
    """Return a dict that maps the path of each included file to the name of the page that includes the file."""
    return {
        (page.parent / target).resolve(): page.relative_to(docs).with_suffix("").as_posix()
        for page in docs.rglob("*.md")
        for target in INCLUDES.findall(page.read_text(encoding="utf-8"))
    }


def resolve(app: Sphinx, doctree: nodes.document) -> None:
    """Replace the target of each link by the page that is or includes the target file, or by a copy of the file.

    A link is relative to the file that contains it, which can be an included file.
    """
    docs = Path(app.srcdir)
    pages = included_pages(docs)
    for link in list(doctree.findall(addnodes.pending_xref)):
        if link["reftype"] != "myst":
            continue
        target = link["reftarget"] if link["refdomain"] != "doc" else link["reftarget"] + ".md"
        source_folder = docs if link["refdomain"] == "doc" else _written_in(link).parent
        file = (source_folder / target.partition("#")[0]).resolve()
        page = pages.get(file) or (file.relative_to(docs).with_suffix("").as_posix() if _is_page(file, docs) else None)
        if page:
            link["refdomain"], link["reftarget"] = "doc", page
            link["reftargetid"] = target.partition("#")[2] or None
        elif file.is_file():
            copy = addnodes.download_reference("", "", *link.children, classes=["download"])
            copy["reftarget"] = os.path.relpath(file, docs / Path(app.env.docname).parent)
            copy["refdoc"] = app.env.docname
            link.replace_self(copy)


def _is_page(file: Path, docs: Path) -> bool:
    return file.suffix == ".md" and file.is_relative_to(docs) and file.is_file()


def _written_in(node: nodes.Node) -> Path:
    while not node.source:
        node = node.parent
    return Path(node.source)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect `resolve` to the event `doctree-read`. `resolve` runs before Sphinx collects the downloads of pages."""
    app.connect("doctree-read", resolve, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
