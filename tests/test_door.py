"""The package's door: what importing it loads, and the names that it offers."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys

import pytest

import lightning_fcl
from lightning_fcl import callbacks, methods, models
from lightning_fcl.door import many_imports, put_off

HEAVY = "{'torch', 'lightning', 'numpy', 'avalanche', 'timm', 'torchvision', 'scipy', 'yaml'}"


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


FORKS = """
import os, sys
import torch, torchmetrics, torchvision  # what takes longest, once: each piece of code runs in a copy of this process
for code in CODES:
    sys.stdout.flush()
    if not os.fork():
        exec(code)
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0
"""
LATE = [
    "import lightning.pytorch as L\nimport lightning_fcl, sys",
    "import lightning_fcl.callbacks as c; c.FedProx\nimport lightning_fcl, sys; import lightning.pytorch as L",
]
OTHERS = {"timm", "avalanche", "quadprog", "sklearn", "pandas", "pooch", "jsonargparse", "optuna", "tensorboard"}


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """What interpreters print that import Lightning, one after the other: of each piece of code below a line."""
    codes = [
        f"""{first}
print('lightning_fcl.simulation.strategy' in sys.modules, end=" ")
trainer = L.Trainer(strategy='federated', logger=False, enable_checkpointing=False)
from lightning_fcl import Classifier, callbacks, models; callbacks.FLwF2T, models.MLP
print(type(trainer.strategy) is lightning_fcl.FederatedStrategy, {OTHERS} & set(sys.modules))"""
        for first in LATE
    ]
    barebones = "L.Trainer(strategy='federated', barebones=True)"
    codes.append(f"import lightning as L, lightning_fcl; print(type({barebones}.strategy))")
    return python(f"CODES = {codes!r}\n{FORKS}").splitlines()


@pytest.mark.seconds
def test_import_is_what_registers_the_strategy(printed: list[str]):
    assert "FederatedStrategy" in printed[2]


def test_importing_the_package_is_light():
    code = "import sys, time; began = time.process_time(); import lightning_fcl; took = time.process_time() - began\n"
    code += "import lightning_fcl.callbacks, lightning_fcl.methods, lightning_fcl.models, lightning_fcl.data\n"
    code += "import lightning_fcl.cli, lightning_fcl.federation, lightning_fcl.evaluation, lightning_fcl.io\n"
    loaded, took = python(f"{code}print(sorted({HEAVY} & set(sys.modules)), took)").rsplit(" ", 1)
    assert loaded == "[]"
    assert float(took) < 0.3


@pytest.mark.parametrize("first", LATE)
def test_the_strategy_is_registered_and_no_name_loads_more_than_it_needs(printed: list[str], first: str):
    assert printed[LATE.index(first)].split() == ["False", "True", "set()"]


@pytest.mark.parametrize(("package", "number"), [(lightning_fcl, 12), (callbacks, 27), (methods, 22), (models, 18)])
def test_a_package_offers_its_names(package, number):
    assert len(package.__all__) >= number and set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        value = getattr(package, name)
        assert value.__name__ == name and value.__module__.startswith("lightning_fcl.")
        assert getattr(sys.modules[value.__module__], name) is value
    assert {*methods.__all__} - {*callbacks.__all__} == {"Client", "Needs", "Server", "flatten", "remember", "section"}


def test_a_name_that_is_not_there_is_no_attribute():
    for package in (lightning_fcl, callbacks, models):
        assert not hasattr(package, "Nothing")


def test_short_class_names_are_found_in_recipes():
    from lightning_fcl.running.fit import resolve_recipe
    from lightning_fcl.running.recipe import Recipe

    words = ["--model=Classifier", "--model.num_classes=6", "--model.model=HARCNN"]
    recipe = resolve_recipe(Recipe.of_words([*words, "--trainer.callbacks+=FLwF2T"]))
    found = [recipe["model"], recipe["model"]["init_args"]["model"], recipe["trainer"]["callbacks"][0]]
    assert [entry["class_path"].rsplit(".", 1)[1] for entry in found] == ["Classifier", "HARCNN", "FLwF2T"]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The name of a package that tells when it runs, and a module that imports it."""
    (tmp_path / "told").mkdir()
    (tmp_path / "told" / "__init__.py").write_text("print('it runs')\nanswer = 42\n")
    (tmp_path / "told" / "part.py").write_text("answer = 43\n")
    (tmp_path / "teller.py").write_text("import told\ndef ask(): return told.answer\n")
    (tmp_path / "taker.py").write_text("from told import answer\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "told"
    for name in ("told", "told.part", "teller", "taker"):
        sys.modules.pop(name, None)


def test_a_package_that_is_put_off_runs_once_when_it_is_used(package, capsys):
    with put_off(package):
        teller = importlib.import_module("teller")
    assert capsys.readouterr().out == ""
    assert teller.ask() == teller.ask() == 42
    assert capsys.readouterr().out == "it runs\n"
    assert importlib.import_module("told.part").answer == 43


def test_what_takes_a_name_of_a_package_that_is_put_off_runs_it(package, capsys):
    with put_off(package):
        assert importlib.import_module("taker").answer == 42
    assert capsys.readouterr().out == "it runs\n"


def test_only_packages_of_the_names_are_put_off_and_only_meanwhile(package, capsys):
    finders = list(sys.meta_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"), put_off("no_such_package", "another"):
        importlib.import_module("no_such_package")
    assert sys.meta_path == finders
    with put_off("another"):
        importlib.import_module("teller")
    assert capsys.readouterr().out == "it runs\n"


def test_garbage_is_looked_for_again_after_many_imports():
    with many_imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with many_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
