"""Static check that no variable or argument is named only by a pronoun, preposition, adverb or participle."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    path
    for folder in ("lightning_fcl", "benchmarks", "recipes", "zoo", "docs")
    for path in (ROOT / folder).rglob("*.py")
)
PRONOUNS = """
all another any both each either every everybody everything few fine it its least less mine more most neither none
nothing odd one others ours own same several some that theirs these this those what which who whose wanted
"""
PREPOSITIONS = """
about above across after again against ahead alike alone along among anew apart around aside at away before behind
beside beyond down even here how inside later like near now often on once outside over past place since then there to
together up when where why within without
"""
PARTICIPLES = """
added asked begun called changed chosen claimed closed copied counted cut declared described done drawn driven ended
failed finished forgotten found gathered given gone got grown having held hidden joined kept known left lost made
measured merged met moved named needed opened part put reached read received replaced said saved seen sent shown taken
told tried used waiting written of
"""
WORDS = frozenset(f"{PRONOUNS} {PREPOSITIONS} {PARTICIPLES}".split())
# Names that an external interface requires: path, function and name.
GIVEN = {
    # The strategy class of Lightning requires this name.
    ("lightning_fcl/simulation/multiprocess.py", "reduce_boolean_decision", "all"),
}


def bindings(function: ast.FunctionDef) -> Iterator[str]:
    """Yield the names of arguments and of variables. Variables of comprehensions are excluded."""
    arguments = function.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            yield argument.arg
    short = {
        id(name)
        for comprehension in ast.walk(function)
        if isinstance(comprehension, ast.comprehension)
        for name in ast.walk(comprehension.target)
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in short:
            yield node.id
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name is not None:
            yield node.name
        elif isinstance(node, ast.Lambda):
            yield from (argument.arg for argument in node.args.args)


def unclear_names(source: str) -> set[tuple[str, str]]:
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return {(function.name, name) for function in functions for name in WORDS.intersection(bindings(function))}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_variables_have_meaningful_names(path):
    relative = path.relative_to(ROOT).as_posix()
    assert {found for found in unclear_names(path.read_text()) if (relative, *found) not in GIVEN} == set()


@pytest.mark.parametrize(
    "body",
    [
        "def f(own): pass",
        "def f(*, kept): pass",
        "def f(*given): pass",
        "def f():\n    for part in x: pass",
        "def f():\n    with x as found: pass",
        "def f():\n    try: pass\n    except E as told: pass",
        "def f():\n    if (before := x): pass",
        "def f(): return lambda of: 1",
        "class A:\n    def f(self):\n        a, [one, b] = x",
    ],
)
def test_unclear_names_finds_each_kind_of_binding(body):
    assert len(unclear_names(body)) == 1


def test_unclear_names_allows_comprehension_variables():
    assert unclear_names("def f():\n    return [one for one in x]") == set()
