"""No class has a member with a name that `docs/renames.csv` has replaced: an override of it would have no effect."""

import ast
import csv
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("lightning_fcl", "tests", "benchmarks", "recipes")


def read_renames(status="done"):
    with (ROOT / "docs" / "renames.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["status"] == status]


RENAMES = read_renames()
CLASSES = {row["old"]: row["new"] for row in RENAMES if row["kind"] == "class"}


def replaced_members(renames):
    """Return the replaced names of each class, by its present name."""
    members = defaultdict(set)
    for row in renames:
        scope = row["where"].partition(":")[2]
        if row["kind"] in ("method", "attribute") and scope:
            members[CLASSES.get(scope, scope)].add(row["old"])
    return members


def base_names(node):
    bases = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
    return {base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in bases}


def bound_members(node):
    """Return the members that a class statement binds in its body."""
    names = set()
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return names


def find_replaced(sources, replaced):
    """Return `file: Class.member` for each member with a replaced name in the classes of some sources."""
    sources = list(sources)
    nodes = [(file, node) for file, tree in sources for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    own, package = defaultdict(lambda: defaultdict(set)), defaultdict(set)
    for file, node in nodes:
        own[file][node.name] |= base_names(node)
        if str(file).startswith("lightning_fcl"):
            package[node.name] |= base_names(node)

    def ancestors(file, name, seen=()):
        parents = (own[file][name] if name in own[file] else package.get(name, set())) - {*seen, name}
        return {name}.union(*(ancestors(file, parent, (*seen, name)) for parent in parents))

    return sorted(
        f"{file}: {node.name}.{member}"
        for file, node in nodes
        for member in bound_members(node)
        & set().union(*(replaced.get(name, set()) for name in ancestors(file, node.name)))
    )


def read_sources():
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text())


def test_no_class_has_a_member_with_a_replaced_name():
    assert find_replaced(read_sources(), replaced_members(RENAMES)) == []


@pytest.mark.parametrize("body", ["down = False", "def down(self): ...", "down: bool = False"])
def test_an_override_of_a_replaced_name_in_a_derived_class_is_found(body):
    sources = [
        ("lightning_fcl/a.py", ast.parse("class Base(Reduction): ...")),
        ("b.py", ast.parse(f"class Mine(a.Base):\n    {body}")),
    ]
    assert find_replaced(sources, {"Reduction": {"down"}}) == ["b.py: Mine.down"]
    assert find_replaced(sources, {"Other": {"down"}}) == []


def test_modules_do_not_define_replaced_functions_and_classes():
    modules = defaultdict(set)
    for row in RENAMES:
        if row["kind"] in ("function", "class") and row["where"].endswith(":"):
            modules[row["where"].rstrip(":")].add(row["old"])
    found = []
    for file, tree in read_sources():
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        found += [f"{file}: {name}" for name in sorted(names & modules[str(file)])]
    assert found == []


def test_each_row_has_a_status():
    assert {row["old"] for row in read_renames("void") if not row["note"]} == set()
