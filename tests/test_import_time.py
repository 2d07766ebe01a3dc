"""Tests that training works with only the core dependencies, and that a fit imports only packages that it uses."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import lightning_fcl

CORE = ("torch", "lightning", "safetensors", "numpy", "lazy-loader")

TRAINS = """
import logging, sys, warnings
sys.path += [FOLDER, PACKAGE]
warnings.filterwarnings("ignore")
import lightning.pytorch as L
import numpy as np
import torch
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

from lightning_fcl import Classifier, FederatedStrategy, FederatedStream, callbacks
from lightning_fcl.models import MLP

rng = np.random.default_rng(0)
x, y = rng.normal(size=(400, 6)).astype(np.float32), np.arange(400) % 10
options = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
               enable_model_summary=False)
stream = FederatedStream.from_arrays(x, y, group=y // 5, scenario="DomainIncremental", batch_size=8)
methods = [callbacks.FLwF2T(), callbacks.FedProx(mu=0.1), callbacks.ContinualMetrics()]
trainer = L.Trainer(strategy=FederatedStrategy(), max_epochs=2, callbacks=methods, **options)
trainer.fit(Classifier(MLP([6, 8, 10]), 10), datamodule=stream)
print("rounds", trainer.current_epoch)

class Tasks(L.LightningDataModule):
    def train_dataloader(self):
        own = np.flatnonzero(y // 5 == self.trainer.current_epoch % 2)
        data = torch.utils.data.TensorDataset(torch.from_numpy(x[own]), torch.from_numpy(y[own]))
        return torch.utils.data.DataLoader(data, batch_size=8)

gem = callbacks.GEM(memory_size=10)
trainer = L.Trainer(max_epochs=4, callbacks=[gem], reload_dataloaders_every_n_epochs=1, **options)
trainer.fit(Classifier(MLP([6, 8, 10]), 10), datamodule=Tasks())
print("epochs", trainer.current_epoch)
from lightning_fcl.methods.projection import project
nothing = project(torch.ones(2), -torch.eye(2))
print("projected", nothing.abs().max().item() < 1e-9)

def missing(call):
    try:
        call()
    except ModuleNotFoundError as error:
        print(error)

import lightning_fcl.models
from lightning_fcl.data import datasets
missing(lambda: lightning_fcl.models.ViT(10))
missing(lambda: datasets.load_dataset("digits"))
missing(lambda: FederatedStream.from_arrays(x, y).setup("fit"))
print("loaded", sorted({name.partition(".")[0] for name in sys.modules} & (set(OTHERS) - {"lightning_fcl"})))
"""


@pytest.fixture(scope="module")
def printed(install, tmp_path_factory):
    """Return the output of the code `TRAINS` in an environment with only the core dependencies."""
    folder = tmp_path_factory.mktemp("installed")
    others = install(folder, CORE)
    package = str(Path(lightning_fcl.__file__).parents[1])
    code = f"FOLDER, PACKAGE, OTHERS = {str(folder)!r}, {package!r}, {others!r}\n{TRAINS}"
    ended = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.seconds
def test_training_works_with_only_the_core_dependencies(printed):
    assert "rounds 2\nepochs 4\nprojected True\n" in printed
    assert "loaded []" in printed


@pytest.mark.seconds
def test_optional_packages_are_imported_in_functions_after_a_check():
    """Skip `cli`, `runs` and the modules that draw charts, because they need the full installation."""
    folder = Path(lightning_fcl.__file__).parent
    known = {
        "torch",
        "lightning",
        "numpy",
        "safetensors",
        "lazy_loader",
        "torchmetrics",
        "lightning_utilities",
        "tqdm",
        "yaml",
    }
    known |= {"lightning_fcl", *sys.stdlib_module_names}
    amiss = []
    # The callers of these modules check for the optional packages first.
    drawing = (
        "charts.py",
        "confusion_charts.py",
        "labels.py",
        "report.py",
        "comparison.py",
        "leaderboard.py",
        "ranking_chart.py",
        "paper_figures.py",
    )
    for path in folder.rglob("*.py"):
        if path.parent.name in ("cli", "runs") or path.name in drawing:
            continue
        text = path.read_text()
        tree = ast.parse(text)
        for checking in (node for node in ast.walk(tree) if isinstance(node, ast.If)):
            if ast.unparse(checking.test) == "TYPE_CHECKING":
                checking.body = [ast.Pass()]
        for node in ast.walk(tree):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            named += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for other in {name.partition(".")[0] for name in named} - known:
                if node in tree.body or not any(way in text for way in ("require_package(", f'find_spec("{other}"')):
                    amiss.append(f"{path.relative_to(folder)}, line {node.lineno}: {other}")
    assert amiss == [], "import these packages in the function that uses them, after `require_package`"


def test_missing_package_error_names_the_package_and_pip_command(printed):
    for name, install in {"timm": "timm", "sklearn": "scikit-learn", "avalanche": "avalanche-lib"}.items():
        assert re.search(f"Expected `{name}`, which .*, but it is not installed. Run `pip install {install}`", printed)


FITS = """
import contextlib, io, json, sys
sys.modules |= dict.fromkeys(["quadprog", "cvxopt", "ecos", "qpalm"])  # packages with restrictive licenses
from lightning_fcl.cli.main import main
with contextlib.redirect_stdout(io.StringIO()) as said:
    main(["fit", "quickstart", "--trainer.max_epochs=1", "--out=run"])
print(json.dumps([said.getvalue(), sorted(name for name, module in sys.modules.items() if module is not None)]))
"""

# Modules that a fit of digits does not use. Some packages, such as `wandb`, are lazy modules in `sys.modules`: only
# their submodules show that they were really imported.
LEFT_OUT = {
    *("wandb.sdk", "qpsolvers.solvers", "gdown.download", "GPUtil.GPUtil", "jax", "jaxopt", "bs4", "requests"),
    *("sklearn", "pandas", "pooch", "timm", "optuna", "mlflow", "torchao", "onnx"),
}


@pytest.mark.seconds
def test_fit_of_digits_imports_only_the_packages_that_it_uses(tmp_path):
    """Avalanche splits the classes into experiences. No package under the GPL is imported."""
    words = [sys.executable, "-c", FITS]
    environment = os.environ | {"PYTHONPATH": str(Path(lightning_fcl.__file__).parents[1])}
    ended = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert ended.returncode == 0, ended.stderr
    said, loaded = json.loads(ended.stdout)
    assert "final accuracy:   0." in said
    assert "avalanche.benchmarks" in loaded
    assert sorted(LEFT_OUT & set(loaded)) == []
    parts = {"wandb.sdk", "qpsolvers.solvers", "gdown.download", "GPUtil.GPUtil"}
    assert parts == {name for name in parts if find_spec(name)}, "these submodules were renamed, update their names"
