"""Sphinx extension for API pages: a table of public names for each package, and types without their modules."""

from __future__ import annotations

import importlib
import re

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

MODULES = re.compile(r"~(?:\w+\.)+(?=\w)")


def list_names(app: Sphinx, object_type: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Add a table of public names, with the first line of each docstring, below the docstring of a package."""
    if object_type == "module":
        names = getattr(importlib.import_module(name), "__all__", ())
        lines += ["", ".. autosummary::", "   :nosignatures:", "", *(f"   {public}" for public in names), ""]


def shorten_types(app: Sphinx, doctree: nodes.document) -> None:
    """Remove the modules from types that Sphinx does not shorten, such as unions with literals."""
    for fields in doctree.findall(nodes.field_list):
        for text in list(fields.findall(nodes.Text)):
            if MODULES.search(text) and not isinstance(text.parent, addnodes.pending_xref):
                text.parent.replace(text, nodes.Text(MODULES.sub("", text)))


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect `list_names` and `shorten_types` to Sphinx events."""
    app.connect("autodoc-process-docstring", list_names)
    app.connect("doctree-read", shorten_types)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
