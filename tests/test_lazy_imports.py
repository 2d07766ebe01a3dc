"""Tests that `import lightning_fcl` loads no slow modules, exports all public names, and registers the strategy."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_fcl
from lightning_fcl import callbacks, conformance, methods, models, zoo

ROOT = Path(lightning_fcl.__file__).parents[1]
HEAVY = "{'torch', 'lightning', 'numpy', 'avalanche', 'timm', 'torchvision', 'scipy', 'yaml'}"
OTHERS = {"timm", "avalanche", "quadprog", "sklearn", "pandas", "pooch", "jsonargparse", "optuna", "tensorboard"}
FOR_AUTHORS = {"Client", "Needs", "Server", "flatten", "strip_prefix", "with_prefix"}
PACKAGES = [lightning_fcl, callbacks, conformance, methods, models, zoo]


def python(code: str) -> str:
    """Run code in a new interpreter, and return the printed output."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


# The slowest modules are imported once. Each piece of code runs in a fork of the process.
FORKS = """
import os, sys
import torch, torchmetrics, torchvision
for code in CODES:
    sys.stdout.flush()
    if not os.fork():
        exec(code)
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0
"""
ORDERS = [
    "import lightning_fcl; import lightning.pytorch as L",
    "import lightning.pytorch as L; import lightning_fcl",
    "import lightning_fcl; import lightning as L",
    "import lightning as L; import lightning_fcl.data",
    "import lightning_fcl.data; import lightning.pytorch as L",
    "import lightning_fcl.models; from lightning_fcl.models import MLP; import lightning.pytorch as L",
    "from lightning_fcl.callbacks import Replay; import lightning.pytorch as L",
    "from lightning_fcl.evaluation import metrics; import lightning.pytorch as L",
    "import lightning_fcl.callbacks as c; c.FedProx; import lightning.pytorch as L",
    "import lightning_fcl.callbacks; import lightning.fabric; import lightning.pytorch as L",
]


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """Return the output of a process for each order of imports, one line each."""
    codes = [
        f"""{order}
print('lightning_fcl.simulation.strategy' in sys.modules, end=" ")
trainer = L.Trainer(strategy='federated', logger=False, enable_checkpointing=False)
import lightning_fcl
from lightning_fcl import Classifier, callbacks, models; callbacks.FLwF2T, models.MLP
strategies = sys.modules["lightning.pytorch.strategies"]
print(type(trainer.strategy) is lightning_fcl.FederatedStrategy, end=" ")
ours = [finder for finder in sys.meta_path if type(finder).__module__.startswith("lightning_fcl")]
print(ours, end=" ")
print(type(strategies.__loader__) is type(strategies.__spec__.loader) is type(L.__loader__), end=" ")
print({OTHERS} & set(sys.modules))"""
        for order in ORDERS
    ]
    return python(f"CODES = {codes!r}\n{FORKS}").splitlines()


@pytest.mark.seconds
@pytest.mark.parametrize("order", ORDERS)
def test_strategy_any_import_order_is_registered_and_imported_on_use(printed: list[str], order: str):
    assert len(printed) == len(ORDERS)
    assert printed[ORDERS.index(order)] == "False True [] True set()"


@pytest.mark.seconds
def test_strategy_works_in_a_barebones_trainer():
    code = "import lightning as L, lightning_fcl; print(L.Trainer(strategy='federated', barebones=True).strategy)"
    assert "FederatedStrategy" in python(code)


@pytest.mark.seconds
def test_find_spec_of_lightning_keeps_the_registration():
    code = "import lightning_fcl, importlib.util, sys\n"
    code += "found = importlib.util.find_spec('lightning.pytorch.strategies'); assert found.origin, found\n"
    code += (
        "import lightning.pytorch as L; print(type(L.Trainer(strategy='federated', logger=False).strategy).__name__)"
    )
    assert python(code).endswith("FederatedStrategy")


def test_import_is_fast_and_loads_neither_torch_nor_lightning():
    code = "import sys, time; began = time.process_time(); import lightning_fcl; took = time.process_time() - began\n"
    code += "import lightning_fcl.callbacks, lightning_fcl.methods, lightning_fcl.models, lightning_fcl.data\n"
    code += "import lightning_fcl.cli, lightning_fcl.federation, lightning_fcl.evaluation, lightning_fcl.io\n"
    code += "import lightning_fcl.zoo, lightning_fcl.conformance, lightning_fcl.simulation, lightning_fcl.tasks\n"
    ended = [python(f"{code}print(sorted({HEAVY} & set(sys.modules)), took)").rsplit(" ", 1) for _ in range(3)]
    assert {loaded for loaded, _ in ended} == {"[]"}
    assert min(float(took) for _, took in ended) < 0.4


def test_help_is_fast_and_loads_neither_torch_nor_lightning():
    code = "import sys, time\nfrom lightning_fcl.cli.main import main\ntry: main(['--help'])\n"
    code += "except SystemExit: print(time.process_time(), sorted({'torch', 'lightning'} & set(sys.modules)))"
    ended = [python(code).splitlines()[-1].split(" ", 1) for _ in range(3)]
    assert {loaded for _, loaded in ended} == {"[]"}
    assert min(float(took) for took, _ in ended) < 0.5  # The time is measured from the start of the process.


def stub_names(package: str) -> set[str]:
    """Return the names that a package's stub imports, including the names of star imports."""
    stub = Path(importlib.import_module(package).__file__ or "").with_suffix(".pyi")
    nodes = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in nodes for alias in node.names}
    if "*" in names:
        others = [node.module or "" for node in nodes if node.names[0].name == "*"]
        return (names - {"*"}).union(*map(stub_names, others))
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_stub_names_equal_the_names_at_run_time(package):
    names = stub_names(package.__name__)
    listed = {*package.__all__}
    assert listed == ({*dir(package)} if package is not callbacks else names - FOR_AUTHORS)
    assert listed <= names <= listed | FOR_AUTHORS
    for name in sorted(names):
        value = getattr(package, name)
        assert value.__name__ == name and value.__module__.startswith("lightning_fcl.")
        assert getattr(sys.modules[value.__module__], name) is value


def test_callbacks_export_methods_without_helpers_for_authors():
    assert {*methods.__all__} - {*callbacks.__all__} == FOR_AUTHORS
    assert {*callbacks.__all__} - {*methods.__all__} == {
        *("ActivationDensity", "BaseSession", "ContinualMetrics", "FederatedProgressBar", "PredictionWriter"),
        *("Pretrain", "ServerWeightAveraging"),
    }
    assert dir(callbacks) == callbacks.__all__


@pytest.mark.seconds
def test_eager_import_variable_imports_all_names():
    code = "import os; os.environ['EAGER_IMPORT'] = '1'\nimport lightning_fcl, lightning_fcl.callbacks as c\n"
    code += "print({*lightning_fcl.__all__} <= {*vars(lightning_fcl)}, 'ContinualMetrics' in vars(c))"
    assert python(code) == "True True"


@pytest.mark.parametrize("package", PACKAGES)
def test_unknown_name_is_not_an_attribute(package):
    assert not hasattr(package, "Nothing")


@pytest.mark.slow
@pytest.mark.long
def test_mypy_infers_the_type_of_every_public_name(tmp_path):
    names = [f"{package.__name__}.{name}" for package in PACKAGES for name in sorted(package.__all__)]
    lines = [f"import {package.__name__}" for package in PACKAGES] + [f"reveal_type({name})" for name in names]
    lines.append("lightning_fcl.callbacks.Nothing")
    (tmp_path / "untrusted_names.py").write_text("\n".join(lines) + "\n")
    words = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(tmp_path / "untrusted_names.py")]
    said = subprocess.run(words, capture_output=True, text=True, cwd=ROOT).stdout.splitlines()
    revealed = [line.partition("Revealed type is ")[2] for line in said if "Revealed type is " in line]
    assert len(revealed) == len(names), said
    unknown = [name for name, kind in zip(names, revealed, strict=True) if kind.strip('"') in ("Any", "object", "")]
    assert unknown == []
    assert any("lightning_fcl.simulation.strategy.FederatedStrategy" in kind for kind in revealed)
    assert any("lightning_fcl.methods.drift_correction.FedProx" in kind for kind in revealed)
    errors = [line for line in said if "error:" in line]
    assert len(errors) == 1 and 'has no attribute "Nothing"' in errors[0], errors


def test_recipe_short_class_names_are_resolved():
    from lightning_fcl.runs.fit import resolve_recipe
    from lightning_fcl.runs.recipe import Recipe

    words = ["--model=Classifier", "--model.num_classes=6", "--model.model=HARCNN"]
    recipe = resolve_recipe(Recipe.from_words([*words, "--trainer.callbacks+=FLwF2T"]))
    found = [recipe["model"], recipe["model"]["init_args"]["model"], recipe["trainer"]["callbacks"][0]]
    assert [entry["class_path"].rsplit(".", 1)[1] for entry in found] == ["Classifier", "HARCNN", "FLwF2T"]
