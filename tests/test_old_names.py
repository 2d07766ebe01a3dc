"""Tests that code, recipes, pages and results do not use the replaced names in `docs/renames.csv`."""

import ast
import csv
import json
import re
from collections import defaultdict
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("lightning_fcl", "tests", "benchmarks", "recipes")


with (ROOT / "docs" / "renames.csv").open(newline="") as table:
    ROWS = list(csv.DictReader(table))
RENAMES = [row for row in ROWS if row["status"] == "done"]
MOVES = {
    row["old"]: row["note"].removeprefix("named ") if row["note"].startswith("named ") else row["new"]
    for row in RENAMES
    if row["kind"] in ("module", "package")
}
CLASSES = {row["old"]: row["new"] for row in RENAMES if row["kind"] == "class"}


def replaced_members(renames):
    """Return the replaced names of members for each class, by the current name of the class."""
    members = defaultdict(set)
    for row in renames:
        scope = row["where"].partition(":")[2]
        if row["kind"] in ("method", "attribute") and scope:
            members[CLASSES.get(scope, scope)].add(row["old"])
    return members


def present_path(path):
    """Return the current path of a module for its old path. The module or its package can have moved."""
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
    """Return `file: Class.member` for each class member with a replaced name, including members of derived classes."""
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
    """Return the path and the syntax tree of each module in `FOLDERS`."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [(path.relative_to(ROOT), ast.parse(path.read_text())) for path in paths]


@pytest.mark.seconds
def test_classes_have_no_replaced_members(sources):
    assert find_replaced(sources, replaced_members(RENAMES)) == []


@pytest.mark.parametrize("body", ["down = False", "def down(self): ...", "down: bool = False"])
def test_find_replaced_finds_override_in_derived_class(body):
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
    assert len(modules.keys() & files) > 100  # If no path were translated, the test would find nothing.
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
        ("lightning_fcl/errors.py", "lightning_fcl/validation.py"),
    ],
)
def test_present_path_of_moved_module(path, present):
    assert present_path(path) == present and (ROOT / present).exists()


def test_status_of_rows_is_valid():
    assert {row["status"] for row in ROWS} <= {"done", "open", "void"}
    assert [row["old"] for row in ROWS if row["status"] == "void" and not row["note"]] == []


def replaced_arguments():
    """Return the rows of `docs/renames.csv` for arguments, by the current class or function, and the old argument."""
    arguments = defaultdict(dict)
    for row in RENAMES:
        scope = row["where"].partition(":")[2].removesuffix(".__init__")
        if row["kind"] == "argument" and scope:
            first, dot, rest = scope.partition(".")
            arguments[CLASSES.get(first, FUNCTIONS.get(first, first)) + dot + FUNCTIONS.get(rest, rest)][row["old"]] = (
                row
            )
    return arguments


FUNCTIONS = {row["old"]: row["new"] for row in RENAMES if row["kind"] in ("function", "method")}
ARGUMENTS = replaced_arguments()


def old_arguments(tree):
    """Return (owner, name) pairs of the replaced names among the arguments and dataclass fields of a module."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found += [(node.name, name) for name in sorted(argument_names(node) & ARGUMENTS[node.name].keys())]
        elif isinstance(node, ast.ClassDef):
            fields = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign) if is_name(item.target)}
            found += [(node.name, name) for name in sorted(fields & ARGUMENTS[node.name].keys())]
            for item in node.body:
                if isinstance(item, ast.FunctionDef):
                    full = node.name if item.name == "__init__" else f"{node.name}.{item.name}"
                    found += [(full, name) for name in sorted(argument_names(item) & ARGUMENTS[full].keys())]
    return found


def is_name(node):
    return isinstance(node, ast.Name)


def argument_names(function):
    arguments = function.args
    return {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


@pytest.mark.seconds
def test_modules_do_not_define_replaced_arguments(sources):
    found = [
        (str(file), *pair) for file, tree in sources if file.parts[0] == "lightning_fcl" for pair in old_arguments(tree)
    ]
    assert found == []


def old_keywords(tree):
    """Return (class, keyword) pairs of the replaced keywords in calls of classes."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            found += [(name, word.arg) for word in node.keywords if name[:1].isupper() and word.arg in ARGUMENTS[name]]
    return found


@pytest.mark.seconds
def test_calls_have_no_replaced_keywords(sources):
    found = [(str(file), *pair) for file, tree in sources for pair in old_keywords(tree)]
    assert found == []


def test_old_keywords_finds_replaced_keyword():
    assert old_keywords(ast.parse("x = lightning_fcl.IID(clients=3)")) == [("IID", "clients")]
    assert old_keywords(ast.parse("IID(num_clients=3)")) == []


def mappings(content):
    """Yield all dicts in nested lists and dicts."""
    if isinstance(content, dict):
        yield content
    for value in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from mappings(value)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").rglob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_have_no_replaced_arguments(path):
    found = []
    for mapping in mappings(yaml.safe_load(path.read_text())):
        name = str(mapping.get("class_path", "")).rpartition(".")[2]
        found += [(name, key) for key in mapping.get("init_args") or {} if key in ARGUMENTS[name]]
        words = [key.split(".") for key in mapping if isinstance(key, str) and ".init_args." in key]
        found += [word for word in words if word[-1] in ARGUMENTS.get(word[-2], {})]
    assert found == []


def test_pages_have_no_replaced_keywords():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    names = "|".join(name for name in ARGUMENTS if name[:1].isupper() and "." not in name)
    found = []
    for page in pages:
        for match in re.finditer(rf"\b({names})\(([^()]*)", page.read_text()):
            words = re.findall(r"\b(\w+)=(?!=)", match[2])
            found += [(page.name, match[0]) for word in words if word in ARGUMENTS[match[1]]]
    assert found == []


METRICS = {row["old"] for row in RENAMES if row["kind"] == "metric" and not row["old"].startswith("_")}
RECORD = {"skipped", "missed", "late", "claims", "limits", "own", "kept_bytes"}


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").rglob("*.json")), ids=lambda path: path.parent.name)
def test_committed_results_have_no_replaced_keys(path):
    content = json.loads(path.read_text())
    keys = [*content.get("metrics", {}), *content.get("expected", {})]
    keys += [name for row in content.get("rows", {}).values() for name in row]
    assert [key for key in keys if key.partition("/")[0] in METRICS or key.partition("/")[0].endswith("_own")] == []
    record = content.get("record", {"rounds": []})
    assert not RECORD & {*record, *(key for entry in record["rounds"] for key in entry)}


@pytest.mark.parametrize("path", sorted((ROOT / "zoo").glob("*/config.json")), ids=lambda path: path.parent.name)
def test_zoo_configs_have_no_replaced_keys(path):
    content = json.loads(path.read_text())
    assert not ARGUMENTS["ModelEntry"].keys() & content.keys()
    assert "rate" not in (content["measurement"] or {})
    for mapping in mappings(content["network"]):
        name = mapping.get("class_path", "").rpartition(".")[2]
        assert name != "frozen" and not ARGUMENTS[name].keys() & (mapping.get("init_args") or {}).keys()
