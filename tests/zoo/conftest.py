"""Fixtures of the zoo tests: a small zoo in a folder, and small runs."""

import pytest
import torch
import yaml

from lightning_fcl.cli.main import main
from lightning_fcl.runs.paper_rows import recipes_folder
from lightning_fcl.runs.recipe import Recipe
from lightning_fcl.zoo.registry import copy_to_registry, package_folder

NAME = "mlp.digits.flwf2t_replay"


@pytest.fixture
def small_zoo(tmp_path, monkeypatch):
    """Return the folder of a zoo with one network. LIGHTNING_FCL_ZOO is set to this folder, and the cache is empty."""
    folder = tmp_path / "zoo"
    copy_to_registry(package_folder() / NAME, folder)
    monkeypatch.setenv("LIGHTNING_FCL_ZOO", str(folder))
    monkeypatch.setenv("LIGHTNING_FCL_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture(scope="session")
def fit_small(without_pages):
    """Return a function that fits a recipe, merged from package recipes and changes, and returns the run folder."""

    def fit(folder, *changes, recipes=("quickstart.yaml",), words=()):
        folder.mkdir(parents=True, exist_ok=True)
        paths = [recipes_folder() / name for name in recipes]
        for number, content in enumerate(changes):
            paths.append(folder / f"change-{number}.yaml")
            paths[-1].write_text(yaml.safe_dump(content))
        with without_pages():
            main(["fit", *Recipe(tuple(paths)).words, *words, "--out", str(folder / "out")])
        return folder / "out"

    return fit


@pytest.fixture
def tensors_of():
    """Return a function that yields all tensors in nested dicts, lists and tuples."""

    def tensors(content):
        if isinstance(content, torch.Tensor):
            yield content
        elif isinstance(content, dict | list | tuple):
            for part in content.values() if isinstance(content, dict) else content:
                yield from tensors(part)

    return tensors
