"""Tests that YAML documents are checked for limits before they are loaded, and that their fields are checked."""

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import pytest
import yaml
from raising import raises

from lightning_fcl.errors import InvalidValueError, UnknownNameError
from lightning_fcl.io.safe_yaml import MAX_NODES, MAX_SIZE, check_yaml, parse_dataclass, read_yaml

LAUGHS = "\n".join(["a0: &a0 [0, 0]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))])
EVIL = {
    LAUGHS: "including values that aliases repeat",
    "grown: &grown [0, *grown]": "a value contains itself",
    "[" * 100_000: "at most 100 levels of nested values, but got more|maximum nesting depth",
    "{a: " * 100_000: "at most 100 levels of nested values, but got more",
    "x" * (MAX_SIZE + 1): f"Expected at most {MAX_SIZE} characters",
    "a: !!python/object/apply:os.system [touch marker]": "could not determine a constructor",
    "a: [1, 2": "while parsing",
    "\x00": "special characters are not allowed|control characters",
}


@pytest.mark.parametrize("text", EVIL, ids=range(len(EVIL)))
def test_read_yaml_malicious_document_raises(tmp_path, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "evil.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=EVIL[text] if len(text) <= MAX_SIZE else "above the limit of 1000000"):
        read_yaml(path)
    assert not (tmp_path / "marker").exists()
    # `check_yaml` accepts documents with `python/object`, because they are well-formed YAML. Only loading rejects them.
    if "python/object" not in text:
        with pytest.raises(yaml.YAMLError, match=EVIL[text]):
            check_yaml(text)


@pytest.mark.seconds
def test_read_yaml_parses_numbers_and_merges_as_recipes_do(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("base: &base {lr: 1e-3, sizes: [64, 10]}\nmore:\n  <<: *base\n  lr: 2\n")
    assert read_yaml(path) == {"base": {"lr": 0.001, "sizes": [64, 10]}, "more": {"lr": 2, "sizes": [64, 10]}}
    path.write_text("")
    assert read_yaml(path) is None
    check_yaml(f"[{', '.join('0' * (MAX_NODES - 2))}]")


def test_read_yaml_binary_device_or_missing_file_raises(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xff\xfe\xfa")
    with raises(InvalidValueError, value=path):
        read_yaml(path)
    with raises(InvalidValueError, value=tmp_path.__class__(os.devnull)):
        read_yaml(tmp_path.__class__(os.devnull))
    with pytest.raises(FileNotFoundError):
        read_yaml(tmp_path / "none.yaml")


@dataclass(frozen=True)
class Toy:
    """Fields of a document. The field `thing` is an object that the caller passes to the parser."""

    number: int
    word: Literal["a", "b"] = "a"
    many: dict[str, float] | None = None
    thing: object = None


def test_parse_dataclass_reads_fields_of_a_document():
    made = parse_dataclass(Toy, {"number": 3, "many": {"x": 1}}, "here", thing="made")
    assert made == Toy(3, "a", {"x": 1.0}, "made")


@pytest.mark.parametrize(
    ("content", "argument", "code"),
    [
        ({"number": 3, "wrod": "b"}, "wrod", "unknown-name"),
        ({}, None, "not-understood"),
        ({"number": "many"}, None, "not-understood"),
        ({"number": 3, "word": "c"}, None, "not-understood"),
        ({"number": 3, "many": {"x": "y"}}, None, "not-understood"),
        ([3], None, "invalid-value"),
        (None, None, "invalid-value"),
    ],
)
def test_parse_dataclass_invalid_content_raises(content, argument, code):
    kind = UnknownNameError if argument else InvalidValueError
    with raises(kind, argument, code=code):
        parse_dataclass(Toy, content, "here", thing=None)


@pytest.mark.parametrize("value", ["evil.Thing", {"class_path": "evil.Thing"}])
@pytest.mark.parametrize("name", ["number", "word", "many", "thing"])
def test_parse_dataclass_does_not_import_named_classes(tmp_path, monkeypatch, name, value):
    (tmp_path / "evil.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    with suppress(ValueError):
        parse_dataclass(Toy, {"number": 3, name: value}, "here", thing=None)
