"""Tests of documentation pages: their code runs, their tables match the tests, and the index lists all pages."""

import ast
import inspect
import re
import runpy
import shlex
import tomllib
from pathlib import Path

import lightning.pytorch as L
import pytest
from lightning.pytorch import callbacks

import lightning_fcl

FOLDER = Path(__file__).parents[1] / "docs"
DOCS = sorted(FOLDER.rglob("*.md"))
README = Path(__file__).parents[1] / "README.md"
CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"
BLOCK = re.compile(r"^```(python|yaml|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

NAME = re.compile(r"# ([\w-]+\.(?:yaml|py))")
TOOL = runpy.run_path(str(Path(__file__).parent / "capability_table.py"))
LIGHTNING = {
    "argument": [name for name in inspect.signature(L.Trainer.__init__).parameters if name != "self"],
    "callback": [name for name in callbacks.__all__ if issubclass(getattr(callbacks, name), L.Callback)],
}
ROWS = {mark: list(TOOL["promises"](mark)) for mark in LIGHTNING}

# Pages whose code blocks do not run here: the index, pages that include a file, and a table that a command writes.
# tests/cli/test_own_project.py tests the page on a custom command line. Notebooks run in `make docs`.
CODELESS = {"index", "reliability", "changelog", "security", "custom-cli"}
PAGES = [path for path in DOCS if path.stem not in CODELESS and path.parent.name not in ("api", "papers", "notebooks")]
# Commands run only on these pages. Commands of other pages need data, a model hub, or several minutes.
COMMANDS = [
    README,
    *(
        FOLDER / f"{name}.md"
        for name in ("recipes", "experiments", "loggers", "reports", "reproducibility", "add-a-method")
    ),
]


@pytest.mark.seconds
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.long)
        if path.stem in ("recipes", "networks")
        else pytest.param(path, marks=pytest.mark.slow)
        if path in COMMANDS[1:]
        else path
        for path in [README, *PAGES]
    ],
    ids=lambda path: path.stem,
)
def test_code_blocks_of_page_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run the blocks in order. A YAML or Python block is saved under the file name in its first line.

    Other YAML blocks are resolved as recipes.
    """
    from lightning_fcl.cli.main import main
    from lightning_fcl.runs.fit import resolve_recipe
    from lightning_fcl.runs.recipe import Recipe

    if path.stem == "loggers":
        # At its import, W&B creates a temporary folder. A command would remove this folder before the next command.
        pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # Several runs then train in this process, without new processes.
    blocks = BLOCK.findall(path.read_text())
    names = {"__name__": "__main__"}
    assert blocks
    for language, code in blocks:
        first, _, _ = code.partition("\n")
        if name := NAME.fullmatch(first):
            (tmp_path / name[1]).write_text(code)
        elif language == "python":
            exec(compile(code, str(path), "exec"), names)
        elif language == "yaml":
            (tmp_path / "recipe.yaml").write_text(code)
            assert resolve_recipe(Recipe((Path("recipe.yaml"),)))["recipe"]["row"] in code
        elif path in COMMANDS:
            for line in code.splitlines():
                try:
                    main(shlex.split(line, comments=True)[1:])
                except SystemExit as end:  # The option --help raises SystemExit.
                    assert not end.code, line


@pytest.mark.parametrize("path", sorted((FOLDER / "notebooks").glob("*.md")), ids=lambda path: path.stem)
def test_imports_of_notebook_exist(path: Path):
    """Only the imports run here. The whole notebook runs in `make docs`."""
    code = "\n".join(re.findall(r"^```\{code-cell\} python\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL))
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert imports
    for node in imports:
        exec(ast.unparse(node), {})


@pytest.mark.seconds
def test_readme_methods_beat_fine_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The README states an accuracy of about 0.77 with the methods, and of 0.2 without the methods.

    For three seeds, the accuracy is 0.77 to 0.79 with the methods, and 0.195 to 0.198 without the methods.
    """
    monkeypatch.chdir(tmp_path)
    program = next(code for language, code in BLOCK.findall(README.read_text()) if language == "python")
    accuracies = []
    for given in ("callbacks=methods", "callbacks=[]"):
        L.seed_everything(0, verbose=False)
        names = {}
        exec(program.replace("callbacks=methods", given), names)
        accuracies.append(float(names["trainer"].callback_metrics["test/accuracy"]))
    assert accuracies[0] > accuracies[1] + 0.3


def test_index_links_every_page():
    """The links of the index also work on GitHub. The build of the site checks that the menu contains each page."""
    text = (FOLDER / "index.md").read_text()
    elsewhere = {"papers": "../recipes/README.md"}  # The index links to this list instead of each paper.
    named = {"security": "../SECURITY.md", "changelog": "../CHANGELOG.md"}
    for path in DOCS:
        own = named.get(path.stem, path.relative_to(FOLDER).as_posix())
        assert path.stem == "index" or f"({elsewhere.get(path.parent.name, own)})" in text


@pytest.mark.parametrize("page", ["custom-modules.md", "trainer.md"])
def test_capability_tables_match_tests(page: str):
    """To update the tables, run `python tests/capability_table.py`."""
    assert TOOL["write_tables"](page) == (FOLDER / page).read_text()


@pytest.mark.parametrize(("mark", "name"), [(mark, name) for mark, names in LIGHTNING.items() for name in names])
def test_each_lightning_argument_and_callback_has_a_row(mark: str, name: str):
    """A new argument or callback of Lightning needs a test with this mark that shows whether it is supported."""
    assert name in [what for what, _, _ in ROWS[mark]]


@pytest.mark.parametrize("mark", LIGHTNING)
def test_each_row_names_an_existing_argument_or_callback(mark: str):
    for what, follows, _ in ROWS[mark]:
        assert what in LIGHTNING[mark] and follows.startswith(("Supported", "Not supported"))


def test_contributing_links_the_index():
    assert "(docs/index.md)" in CONTRIBUTING.read_text()


@pytest.mark.seconds
def test_contributing_names_methods_that_exist():
    named = set(re.findall(r"`([A-Z][A-Za-z]+)\.([a-z_]+)`", CONTRIBUTING.read_text()))
    defined = set()
    for path in Path(lightning_fcl.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                defined |= {(node.name, member.name) for member in node.body if isinstance(member, ast.FunctionDef)}
    assert len(named) > 20
    assert named <= defined


def test_contributing_diagram_matches_layer_order():
    diagram = re.search(r"```mermaid\n(.*?)```", CONTRIBUTING.read_text(), re.DOTALL)[1]
    contracts = tomllib.loads((README.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    packages = [layer for layer in layers if ":" not in layer and layer != "__main__"]
    arrows = re.findall(r"^    (\w+)[^\n]*--> (\w+)$", diagram, re.MULTILINE)
    assert arrows == list(zip(packages, [*packages[1:], "base"], strict=True))
