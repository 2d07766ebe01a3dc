"""Tests that modules of the package have no import cycles except `KNOWN`. Imports for annotations are included."""

import ast
from pathlib import Path

import lightning_fcl

ROOT = Path(lightning_fcl.__file__).parent
KNOWN = [{"lightning_fcl.data.client_loader", "lightning_fcl.data.stream"}]


def read_imports(root):
    """Return a dict from each module to the modules that it imports, also in functions and for annotations."""
    paths = {".".join(path.relative_to(root.parent).with_suffix("").parts): path for path in root.rglob("*.py")}
    modules = {name: path for name, path in paths.items() if path.name != "__init__.py"}
    found = {}
    for name, path in modules.items():
        found[name] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                found[name] |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names}
        found[name] = found[name] & modules.keys() - {name}
    return found


def find_cycles(imports):
    """Return the sets of modules that import each other, directly or indirectly."""
    reached = {name: set(targets) for name, targets in imports.items()}
    changes = True
    while changes:
        changes = False
        for targets in reached.values():
            more = set().union(*(reached[target] for target in targets)) - targets
            targets |= more
            changes |= bool(more)
    cycles = {
        frozenset(n for n in targets if name in reached[n]) for name, targets in reached.items() if name in targets
    }
    return [set(cycle) for cycle in cycles]


def test_modules_of_the_package_have_no_import_cycles():
    cycles = find_cycles(read_imports(ROOT))
    assert [cycle for cycle in cycles if cycle not in KNOWN] == []


def test_find_cycles_includes_imports_for_annotations(tmp_path):
    package = tmp_path / "lightning_fcl"
    package.mkdir()
    (package / "a.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lightning_fcl.b import B\n"
    )
    (package / "b.py").write_text("def f():\n    import lightning_fcl.c\n")
    (package / "c.py").write_text("from lightning_fcl import a\n")
    (package / "d.py").write_text("from lightning_fcl import a\n")
    assert find_cycles(read_imports(package)) == [{f"lightning_fcl.{name}" for name in "abc"}]
