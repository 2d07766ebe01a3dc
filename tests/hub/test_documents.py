"""YAML is bounded before anything walks through it."""

import os

import pytest
import yaml

from lightning_fcl.hub.documents import NODES, SIZE, check_file, check_yaml, read_yaml

LAUGHS = "\n".join(["a0: &a0 [0, 0]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))])
EVIL = {
    LAUGHS: "aliases repeat them more often",
    "grown: &grown [0, *grown]": "one contains itself",
    "[" * 100_000: "at most 100, but got more|maximum nesting depth",
    "{a: " * 100_000: "at most 100, but got more",
    "x" * (SIZE + 1): f"Expected at most {SIZE} characters",
    "a: !!python/object/apply:os.system [touch marker]": "could not determine a constructor",
    "a: [1, 2": "while parsing",
    "\x00": "special characters are not allowed|control characters",
}


@pytest.mark.parametrize("text", EVIL, ids=range(len(EVIL)))
def test_evil_documents_are_refused_at_once(tmp_path, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "evil.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=EVIL[text] if len(text) <= SIZE else "of at most 1000000 bytes"):
        read_yaml(path)
    assert not (tmp_path / "marker").exists()
    if "python/object" not in text:  # well-formed; it is loading that refuses it
        with pytest.raises(yaml.YAMLError, match=EVIL[text]):
            check_yaml(text)


@pytest.mark.seconds
def test_ordinary_documents_are_read_as_recipes_are(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("base: &base {lr: 1e-3, sizes: [64, 10]}\nmore:\n  <<: *base\n  lr: 2\n")
    assert read_yaml(path) == {"base": {"lr": 0.001, "sizes": [64, 10]}, "more": {"lr": 2, "sizes": [64, 10]}}
    path.write_text("")
    assert read_yaml(path) is None
    check_yaml(f"[{', '.join('0' * (NODES - 2))}]")


def test_what_is_no_text_or_never_ends_is_refused(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ValueError, match=r"Expected .*recipe.yaml to be YAML but got: 'utf-8' codec"):
        read_yaml(path)
    with pytest.raises(ValueError, match="it is a device"):
        read_yaml(tmp_path.__class__(os.devnull))
    with pytest.raises(FileNotFoundError):
        check_file(tmp_path / "none.yaml")
