"""The code in the documents runs."""

import ast
import re
import runpy
import shlex
from pathlib import Path

import pytest

import lightning_fcl

FOLDER = Path(__file__).parents[1] / "docs"
DOCS = sorted(FOLDER.rglob("*.md"))
README = Path(__file__).parents[1] / "README.md"
CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"
BLOCK = re.compile(r"^```(python|yaml|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

NAME = re.compile(r"# ([\w-]+\.yaml)")


# Pages without code of their own: lists, what they include, a table of a command. Notebooks run in `make docs`;
# one's own project is a script: tests/cli/test_own_project.py.
CODELESS = {"index", "reliability", "changelog", "security", "own-project"}
PAGES = [path for path in DOCS if path.stem not in CODELESS and path.parent.name not in ("api", "papers", "notebooks")]
# Others' commands want data, a hub, or minutes.
COMMANDS = [README, *(FOLDER / name for name in ("quickstart.md", "recipes.md", "reports.md", "resume.md", "tune.md"))]


@pytest.mark.seconds
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow) if path in COMMANDS[1:] else path for path in [README, *PAGES]],
    ids=lambda path: path.stem,
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


def test_the_index_names_every_page():
    """As a link, which works on GitHub, too; that the menu has each is what the build looks at."""
    text = (FOLDER / "index.md").read_text()
    elsewhere = {"papers": "../recipes/README.md", "api": "api/index.md"}  # they have lists of their own
    named = {"security": "../SECURITY.md", "changelog": "../CHANGELOG.md"}
    for path in DOCS:
        own = named.get(path.stem, path.relative_to(FOLDER).as_posix())
        assert path.stem == "index" or f"({elsewhere.get(path.parent.name, own)})" in text


def test_what_own_modules_may_do_is_what_tests_show():
    """After a change: `python tests/promises.py`."""
    tool = runpy.run_path(str(Path(__file__).parent / "promises.py"))
    text = (FOLDER / "own-modules.md").read_text()
    assert tool["write_table"](text) == text


def test_the_contributing_page_names_the_index():
    assert "(docs/index.md)" in CONTRIBUTING.read_text()


@pytest.mark.seconds
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
