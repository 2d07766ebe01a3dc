"""No class has a member with a name that `docs/renames.csv` has replaced: an override of it would have no effect."""

import ast
import csv
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("lightning_fcl", "tests", "benchmarks", "recipes")


with (ROOT / "docs" / "renames.csv").open(newline="") as table:
    ROWS = list(csv.DictReader(table))
RENAMES = [row for row in ROWS if row["status"] == "done"]
MOVES = {
    row["old"]: row["note"].removeprefix("named ") or row["new"]
    for row in RENAMES
    if row["kind"] in ("module", "package")
}
CLASSES = {row["old"]: row["new"] for row in RENAMES if row["kind"] == "class"}


def replaced_members(renames):
    """Return the replaced names of each class, by its present name."""
    members = defaultdict(set)
    for row in renames:
        scope = row["where"].partition(":")[2]
        if row["kind"] in ("method", "attribute") and scope:
            members[CLASSES.get(scope, scope)].add(row["old"])
    return members


def present_path(path):
    """Return the path of a module after the moves of modules and packages."""
    name = path.removeprefix("lightning_fcl/").removesuffix(".py")
    package, slash, module = MOVES.get(name, name).partition("/")
    return f"lightning_fcl/{MOVES.get(package, package) if slash else package}{slash}{module}.py"


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
    file_bases, package_bases = defaultdict(lambda: defaultdict(set)), defaultdict(set)
    for file, node in nodes:
        file_bases[file][node.name] |= base_names(node)
        if str(file).startswith("lightning_fcl"):
            package_bases[node.name] |= base_names(node)

    def ancestors(file, name, seen=()):
        bases = file_bases[file].get(name, package_bases.get(name, set()))
        parents = bases - {*seen, name}
        return {name}.union(*(ancestors(file, parent, (*seen, name)) for parent in parents))

    return sorted(
        f"{file}: {node.name}.{member}"
        for file, node in nodes
        for member in bound_members(node)
        & set().union(*(replaced.get(name, set()) for name in ancestors(file, node.name)))
    )


@pytest.fixture(scope="module")
def sources():
    """The paths of all modules below the root, each with its syntax tree."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [(path.relative_to(ROOT), ast.parse(path.read_text())) for path in paths]


@pytest.mark.seconds
def test_no_class_has_a_member_with_a_replaced_name(sources):
    assert find_replaced(sources, replaced_members(RENAMES)) == []


@pytest.mark.parametrize("body", ["down = False", "def down(self): ...", "down: bool = False"])
def test_an_override_of_a_replaced_name_in_a_derived_class_is_found(body):
    sources = [
        ("lightning_fcl/a.py", ast.parse("class Base(Reduction): ...")),
        ("b.py", ast.parse(f"class Mine(a.Base):\n    {body}")),
    ]
    assert find_replaced(sources, {"Reduction": {"down"}}) == ["b.py: Mine.down"]
    assert find_replaced(sources, {"Other": {"down"}}) == []


@pytest.mark.seconds
def test_modules_do_not_define_replaced_functions_and_classes(sources):
    modules = defaultdict(set)
    for row in RENAMES:
        if row["kind"] in ("function", "class") and row["where"].endswith(":"):
            modules[present_path(row["where"].rstrip(":"))].add(row["old"])
    files = {str(file) for file, _ in sources}
    assert len(modules.keys() & files) > 100  # a path that is not translated would find nothing
    found = []
    for file, tree in sources:
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        found += [f"{file}: {name}" for name in sorted(names & modules[str(file)])]
    assert found == []


@pytest.mark.parametrize(
    ("path", "present"),
    [
        ("lightning_fcl/federation/wire.py", "lightning_fcl/federation/compression.py"),
        ("lightning_fcl/running/rows.py", "lightning_fcl/runs/paper_rows.py"),
        ("lightning_fcl/device/export.py", "lightning_fcl/edge/export.py"),
        ("lightning_fcl/errors.py", "lightning_fcl/errors.py"),
    ],
)
def test_path_of_a_moved_module_is_its_present_one(path, present):
    assert present_path(path) == present and (ROOT / present).exists()


def test_each_row_is_done_or_open_or_void_with_a_reason():
    assert {row["status"] for row in ROWS} <= {"done", "open", "void"}
    assert [row["old"] for row in ROWS if row["status"] == "void" and not row["note"]] == []
