"""Tests that texts of the project contain no phrase that always has a plain equivalent."""

from collections import Counter

import pytest
import wording
from wording import ROOT, SAMPLE_SIZES, Text, draw, find_files, find_phrases, read_comments, read_python

EXEMPT = {"tests/wording.py", "tests/test_wording.py"}
# Allowed phrases, as pairs of path and phrase: keys of stored files and messages, and words that a test lists.
KEYS = {
    ("lightning_fcl/methods/replay_samples.py", "rehearse"),
    ("tests/deployment/lies.py", "rehearsed"),
    ("tests/deployment/test_lying_nodes.py", "rehearsed"),
    ("tests/simulation/test_golden.py", "side by side"),
    ("tests/test_variable_names.py", "anew"),
}
MARKDOWN = """# Guide

Clients train side by side.

| group | training |
|---|---|
| first | trained anew |

```py
x = "at hand"
```

## Glossary

| write | not |
|---|---|
| current | at hand |
"""
PYTHON = '''"""A module."""


def train(clients):
    """Train clients side by side."""
    # The state at hand
    # is trained anew.
    raise ValueError(f"Expected finite values, but {clients} is not finite.")
'''


@pytest.fixture(scope="module")
def texts():
    return [text for path in find_files() for text in wording.read_texts(path)]


def test_project_texts_contain_no_phrase_of_the_list(texts):
    messages = [
        message
        for text in texts
        if text.path not in EXEMPT
        for message in find_phrases(text)
        if (text.path, message.split("'")[1]) not in KEYS
    ]
    assert messages == []


def test_find_files_includes_code_pages_recipes_and_templates():
    names = {str(path.relative_to(ROOT)) for path in find_files()}
    assert {"README.md", "Makefile", ".ci/run", "pyproject.toml", "recipes/quickstart.yaml"} <= names
    assert {"lightning_fcl/evaluation/templates/run.html", "lightning_fcl/federation/server.py"} <= names


def test_read_python_returns_each_kind_of_text():
    found = [Text("x.py", line, kind, text) for line, kind, text in read_python(PYTHON)]
    assert [(text.line, text.kind) for text in found] == [
        (1, "docstring"),
        (5, "docstring"),
        (8, "message"),
        (6, "comment"),
    ]
    phrases = sorted(message.split("'")[1] for text in found for message in find_phrases(text))
    assert phrases == ["anew", "at hand", "not finite", "side by side"]


def test_read_markdown_omits_code_and_glossary():
    found = [Text("x.md", line, kind, text) for line, kind, text in wording.read_markdown(MARKDOWN)]
    assert [message.split(":")[1] for text in found for message in find_phrases(text)] == ["3", "7"]


def test_read_comments_returns_comments_and_html_text():
    assert list(read_comments("a: 1  # the state at hand\nb: 2\n<p>Clients trained anew here.</p>")) == [
        (1, "comment", "the state at hand"),
        (3, "comment", "Clients trained anew here."),
    ]


@pytest.mark.parametrize("text", ["Who takes part.", "What a client keeps.", "Of each client, the state."])
def test_find_phrases_riddle_in_docstring_is_found(text):
    assert find_phrases(Text("x.py", 1, "docstring", text))
    assert not find_phrases(Text("x.md", 1, "paragraph", "What is a client? A participant."))


def test_join_lines_removes_code_and_addresses():
    assert wording.join_lines("The `state at hand`\n of ``anew`` (https://x.y/at hand") == "The X of X X hand"


def test_draw_same_seed_returns_the_same_sample(texts):
    assert draw(texts, 1) == draw(texts, 1) != draw(texts, 2)
    assert Counter(text.kind for text in draw(texts, 1)) == SAMPLE_SIZES
