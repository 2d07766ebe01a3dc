"""Tables of documentation pages, built from marks of tests. `python tests/capability_table.py` writes them."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
# For each table: its page, the mark of its tests, and its header.
TABLES = [
    ("custom-modules.md", "may", "| feature of a module, its data or its metrics | behavior | test |"),
    ("trainer.md", "argument", "| `Trainer` argument | behavior in a federation | test |"),
    ("trainer.md", "callback", "| Lightning callback | behavior in a federation | test |"),
]


def promises(mark: str) -> Iterator[tuple[str, str, str]]:
    """Yield the subject, the behavior and the test id for each use of a mark on a test."""
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text()
        for node in ast.parse(text).body if f"pytest.mark.{mark}(" in text else []:
            for call in node.decorator_list if isinstance(node, ast.FunctionDef) else []:
                if isinstance(call, ast.Call) and ast.unparse(call.func) == f"pytest.mark.{mark}":
                    what, follows = map(ast.literal_eval, call.args)
                    yield what, follows, f"{path.relative_to(TESTS.parent).as_posix()}::{node.name}"


def write_tables(page: str) -> str:
    """Return the text of a page with its tables rebuilt."""
    text = (DOCS / page).read_text()
    for mark, head in [table[1:] for table in TABLES if table[0] == page]:
        before, after = text.split(head)
        rows = sorted(promises(mark), key=order if mark == "may" else None)
        name = "{}" if mark == "may" else "`{}`"
        lines = [f"| {name.format(what)} | {follows} | `{test}` |" for what, follows, test in rows]
        text = before + "\n".join([head, "|---|---|---|", *lines]) + after[after.index("\n\n") :]
    return text


def order(row: tuple[str, str, str]) -> tuple[bool, bool]:
    """Return a sort key: supported features before unsupported ones, then tests of third-party modules first."""
    return row[1].startswith("Not supported"), not row[2].startswith("tests/third_party")


if __name__ == "__main__":
    for page in dict.fromkeys(table[0] for table in TABLES):
        # Opening the page for writing empties it, so build the text first.
        text = write_tables(page)
        (DOCS / page).write_text(text)
