"""Tables in the docs of what marked tests show; `python tests/capability_table.py` writes them."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
TABLES = [  # a page, the mark of its tests, and the head of the table
    ("custom-modules.md", "may", "| a module, its data or its metrics may | and then | shown by |"),
    ("trainer.md", "argument", "| an argument of `Trainer` | in a federation | shown by |"),
    ("trainer.md", "callback", "| a callback of Lightning's | in a federation | shown by |"),
]


def promises(mark: str) -> Iterator[tuple[str, str, str]]:
    """What tests with a mark are about, what they show of it, and each test."""
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text()
        for node in ast.parse(text).body if f"pytest.mark.{mark}(" in text else []:
            for call in node.decorator_list if isinstance(node, ast.FunctionDef) else []:
                if isinstance(call, ast.Call) and ast.unparse(call.func) == f"pytest.mark.{mark}":
                    what, follows = map(ast.literal_eval, call.args)
                    yield what, follows, f"{path.relative_to(TESTS.parent).as_posix()}::{node.name}"


def write_tables(page: str) -> str:
    """A page's text with its tables anew."""
    text = (DOCS / page).read_text()
    for mark, head in [table[1:] for table in TABLES if table[0] == page]:
        before, after = text.split(head)
        rows = sorted(promises(mark), key=order if mark == "may" else None)
        name = "{}" if mark == "may" else "`{}`"
        lines = [f"| {name.format(what)} | {follows} | `{test}` |" for what, follows, test in rows]
        text = before + "\n".join([head, "|---|---|---|", *lines]) + after[after.index("\n\n") :]
    return text


def order(row: tuple[str, str, str]) -> tuple[bool, bool]:
    """What holds for modules of any library, what else is honoured, what is refused."""
    return row[1].startswith("refused"), not row[2].startswith("tests/third_party")


if __name__ == "__main__":
    for page in dict.fromkeys(table[0] for table in TABLES):
        text = write_tables(page)  # whole, before the page is opened
        (DOCS / page).write_text(text)
