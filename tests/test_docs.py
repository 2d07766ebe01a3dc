"""The code in the documents runs."""

import ast
import re
import shlex
from pathlib import Path

import pytest

import lightning_fcl

DOCS = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
README = Path(__file__).parents[1] / "README.md"
CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"
BLOCK = re.compile(r"^```(python|yaml|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

NAME = re.compile(r"# ([\w-]+\.yaml)")


# The campaign's page is a table, which a command writes. One's own project is a script: tests/cli/test_own_project.py.
# Others' commands want data, a hub, or minutes.
PAGES = [path for path in DOCS if path.stem not in ("recipes", "reliability", "own-project")]
RECIPES = DOCS[0].with_name("recipes.md")
COMMANDS = [README, RECIPES]


@pytest.mark.parametrize(
    "path", [README, *PAGES, pytest.param(RECIPES, marks=pytest.mark.slow)], ids=lambda path: path.stem
)
def test_the_code_of_a_document_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In order, as printed; a recipe becomes a file of the name in its first line, or is resolved."""
    from lightning_fcl.cli.main import main
    from lightning_fcl.running.fit import resolve

    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(path.read_text())
    names = {"__name__": "__main__"}
    assert blocks
    for language, code in blocks:
        first, _, _ = code.partition("\n")
        if language == "python":
            exec(compile(code, str(path), "exec"), names)
        elif language == "yaml" and (name := NAME.fullmatch(first)):
            (tmp_path / name[1]).write_text(code)
        elif language == "yaml":
            (tmp_path / "recipe.yaml").write_text(code)
            assert resolve(["fit", "--config", "recipe.yaml"])["recipe"]["row"] in code
        elif path in COMMANDS:
            for line in code.splitlines():
                main(shlex.split(line, comments=True)[1:])


def test_contributing_names_every_document():
    text = CONTRIBUTING.read_text()
    assert all(f"(docs/{path.name})" in text for path in DOCS)


def test_what_the_pictures_name_is_there():
    """A class or module, and what it defines."""
    pictures = re.findall(r"```mermaid\n(.*?)```", CONTRIBUTING.read_text(), re.DOTALL)
    named = set(re.findall(r"\b([A-Za-z]+)\.([a-z_]+)\b", " ".join(pictures)))
    defined = set()
    for path in Path(lightning_fcl.__file__).parent.rglob("*.py"):
        for scope in ast.walk(ast.parse(path.read_text())):
            if isinstance(scope, ast.Module | ast.ClassDef):
                name = scope.name if isinstance(scope, ast.ClassDef) else path.stem
                defined |= {(name, member.name) for member in scope.body if isinstance(member, ast.FunctionDef)}
    assert len(pictures) == 3 and len(named) > 12
    assert named <= defined
