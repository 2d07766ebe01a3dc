"""Tests of the structure of the package: no import cycles, and a docstring about the scope of each subpackage."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

import lightning_fcl

PACKAGE = Path(lightning_fcl.__file__).parent


def test_modules_import_each_other_without_cycles():
    """The graph includes imports inside functions, and excludes imports for type checking."""
    graph = grimp.build_graph("lightning_fcl", exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 90
    TopologicalSorter(imports).prepare()


def test_subpackage_docstrings_have_a_paragraph_on_their_scope():
    files = [*PACKAGE.glob("*/__init__.py")]
    assert len(files) == 17
    for path in files:
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        assert len(docstring.split("\n\n")) > 1, path.parent.name
