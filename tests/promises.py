"""The table of docs/own-modules.md: what tests marked with `may` show; `python tests/promises.py` writes it."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "own-modules.md"
HEAD = "| a module, its data or its metrics may | and then | shown by |\n|---|---|---|\n"


def promises() -> Iterator[tuple[str, str, str]]:
    """What may be, what follows, and the test that shows it."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else []:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.may":
                    what, follows = map(ast.literal_eval, mark.args)
                    yield what, follows, f"{path.relative_to(TESTS.parent).as_posix()}::{node.name}"


def write_table(page: str) -> str:
    """A page with the table anew: what holds for modules of any library, what else is honoured, what is refused."""
    rows = sorted(promises(), key=lambda row: (row[1].startswith("refused"), not row[2].startswith("tests/strangers")))
    table = "".join(f"| {what} | {follows} | `{test}` |\n" for what, follows, test in rows)
    before, after = page.split(HEAD)
    return before + HEAD + table + after[after.index("\n\n") + 1 :]


if __name__ == "__main__":
    PAGE.write_text(write_table(PAGE.read_text()))
