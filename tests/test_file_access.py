"""Static check that code outside of lightning_fcl/io opens only checked paths for reading.

Opening an unchecked path could block a command, because the path can be a named pipe or a device.
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_fcl"

METHODS = {"read_text", "read_bytes"}
"""Methods of `Path` that read a file."""

BY_NAME = {"load", "loadtxt", "genfromtxt", "read_csv", "read_parquet", "read_json", "read_pickle", "ZipFile"}
"""Functions that take a path or an open file. An open file is allowed."""

LIBRARIES = {"np", "torch", "pd", "zipfile", "json", "pickle"}

BY_PATH = {"fromfile", "from_file", "memmap", "safe_open", "load_file"}
"""Functions that take only a path."""

OPENED = {"file", "content", "numbers", "packed", "opened", "archive", "io", "sys", "reader"}
"""Names that the package uses for open files and for contents in memory."""

ALLOWED = {
    ("cli/main.py", "open"): "The call opens the null device for writing.",
    ("data/datasets/sensors.py", "read_bytes"): "The path is a member of an open zip file.",
    ("data/datasets/readers.py", "load"): "The call is a method of an unpickler of an open file.",
}


def name_of(node):
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_opened(argument):
    """Return whether an argument is an open file, a content in memory, or a checked path, judged by its name."""
    made = argument.func if isinstance(argument, ast.Call) else argument
    return name_of(made) in {*OPENED, "open_file", "regular_file", "BytesIO", "StringIO", "read_text"}


def writes(call):
    """Return whether a call of `open` has a write mode."""
    modes = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return bool(modes) and modes[-1][0] in "wax" and len(modes[-1]) <= 3


def is_unsafe(call):
    """Return whether a call opens an unchecked path for reading."""
    name, first = name_of(call.func), call.args[0] if call.args else None
    owner = name_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if name == "open":
        return (
            not is_opened(first) if owner in ("Image", "gzip") else owner not in ("archive", "os") and not writes(call)
        )
    if name in METHODS:
        return isinstance(call.func, ast.Attribute)
    if name in BY_NAME:
        return (owner in LIBRARIES or name == "ZipFile") and not is_opened(first)
    if isinstance(first, ast.Call) and name_of(first.func) == "str":
        first = first.args[0]
    return name in BY_PATH and name_of(getattr(first, "func", None)) != "regular_file"


def unsafe_reads(source, path):
    """Return the calls of a module that open an unchecked path for reading, except the calls in `ALLOWED`."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and is_unsafe(node)]
    return [
        f"{path}:{call.lineno}: {ast.unparse(call)[:80]}" for call in calls if (path, name_of(call.func)) not in ALLOWED
    ]


@pytest.mark.parametrize(
    "source",
    [
        "open(path)",
        'open(path, "rb")',
        'path.open("rb")',
        "path.open()",
        "path.read_text()",
        "Path(name).read_bytes()",
        "np.load(path)",
        "torch.load(path, weights_only=True)",
        "pd.read_csv(path)",
        "ZipFile(path)",
        "np.memmap(path)",
        "safe_open(path)",
        "load_file(path)",
        "Image.open(path)",
    ],
)
def test_unsafe_reads_finds_unchecked_path(source):
    assert unsafe_reads(source, "a.py")


@pytest.mark.parametrize(
    "source",
    ['path.open("wb")', "read_text(path)", "np.load(file)", "safe_open(regular_file(path))", "Image.open(file)"],
)
def test_unsafe_reads_accepts_checked_files(source):
    assert not unsafe_reads(source, "a.py")


def test_package_opens_files_only_in_io():
    paths = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "io"]
    assert len(paths) > 200
    found = [one for path in paths for one in unsafe_reads(path.read_text(), path.relative_to(PACKAGE).as_posix())]
    assert not found, "\n".join(found)


def test_allowed_reads_exist():
    for path, name in ALLOWED:
        assert f"{name}(" in (PACKAGE / path).read_text()
