"""Tests that Avalanche is imported without its optional packages and without files in the home directory."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from lightning_fcl.data import avalanche

PARTS = {"wandb": "wandb.sdk", "qpsolvers": "qpsolvers.solvers", "gdown": "gdown.download", "GPUtil": "GPUtil.GPUtil"}

CODE = f"""
import json, sys
from lightning_fcl.data.avalanche import nc_benchmark, storage_policy
parts = {[*PARTS.values()]!r}
print(json.dumps(sorted({{*parts, *{[*PARTS]!r}, 'jax', 'quadprog', 'cvxopt'}} & set(sys.modules))))
from avalanche.benchmarks.datasets.dataset_utils import default_dataset_location
print(default_dataset_location("mnist"))
from avalanche.training.plugins import gem
from avalanche.evaluation.metrics import confusion_matrix
print(gem.qpsolvers.solve_qp.__module__, confusion_matrix.wandb.Image.__name__)
import qpsolvers
print(gem.qpsolvers.solve_qp is qpsolvers.solve_qp, sorted({{'qpsolvers', 'GPUtil', 'gdown'}} & set(sys.modules)))
"""


def printed(home, code=CODE):
    """Return the lines that a new interpreter with the home directory `home` prints."""
    environment = os.environ | {"HOME": str(home)}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


@pytest.mark.seconds
@pytest.mark.parametrize("exists", [pytest.param(True, marks=pytest.mark.long), False])
def test_avalanche_import_skips_unused_packages(tmp_path, exists):
    home = tmp_path if exists else "/proc/nothing"
    loaded, location, used, same = printed(home)
    assert json.loads(loaded) == []
    assert location == f"{home}/.avalanche/data/mnist"
    assert used.startswith("qpsolvers") and used.endswith("Image")
    assert same == "True ['qpsolvers']"
    assert not (tmp_path / ".avalanche").exists()
    assert all(map(find_spec, PARTS.values())), "a package has changed: update its module names in PARTS"


@pytest.mark.seconds
@pytest.mark.long
def test_avalanche_import_reads_user_settings(tmp_path):
    (tmp_path / ".avalanche").mkdir()
    settings = tmp_path / ".avalanche" / "config.json"
    settings.write_text('{"dataset_location": "/elsewhere"}')
    assert printed(tmp_path)[1] == "/elsewhere/mnist"
    assert settings.read_text() == '{"dataset_location": "/elsewhere"}'


@pytest.mark.seconds
@pytest.mark.long
def test_avalanche_import_after_user_import_is_identical(tmp_path):
    code = "from avalanche.benchmarks import nc_benchmark as first\n"
    code += "from lightning_fcl.data.avalanche import nc_benchmark\nprint(first is nc_benchmark)\n"
    code += "import wandb; print(wandb.Image.__name__)"
    assert printed(tmp_path, code) == ["True", "Image"]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Yield the name of a package that prints a line when it is imported. Two other modules use this package."""
    (tmp_path / "printing").mkdir()
    (tmp_path / "printing" / "__init__.py").write_text("print('imported')\nanswer = 42\n")
    (tmp_path / "printing" / "part.py").write_text("answer = 43\n")
    (tmp_path / "user.py").write_text("import printing\ndef ask(): return printing.answer\n")
    (tmp_path / "taker.py").write_text("from printing import answer\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "printing"
    for name in ("printing", "printing.part", "user", "taker"):
        sys.modules.pop(name, None)


def test_light_import_unused_package_loads_once_on_first_use(package, capsys, monkeypatch):
    monkeypatch.setattr(avalanche, "_UNUSED", (package, "no_such_package"))
    with avalanche._light_import():
        user = importlib.import_module("user")
        assert package in sys.modules and find_spec(package) is not None
        assert not hasattr(user.printing, "answer")
    assert capsys.readouterr().out == "" and package not in sys.modules
    assert user.ask() == user.ask() == 42
    assert capsys.readouterr().out == "imported\n"
    assert importlib.import_module("printing.part").answer == 43
    assert sys.modules[package].answer == 42 and not hasattr(user.printing, "nothing")


def test_light_import_loaded_package_is_unchanged(package, capsys, monkeypatch):
    monkeypatch.setattr(avalanche, "_UNUSED", (package,))
    first = importlib.import_module(package)
    with avalanche._light_import():
        assert importlib.import_module("user").ask() == 42
    assert sys.modules[package] is first


def test_light_import_error_removes_placeholders(package, monkeypatch):
    monkeypatch.setattr(avalanche, "_UNUSED", (package,))
    with pytest.raises(ImportError, match="answer"), avalanche._light_import():
        importlib.import_module("taker")
    assert package not in sys.modules
