"""Tests of recipes that name classes in the working directory. The installed command runs these recipes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import lightning_fcl
from lightning_fcl.cli.main import main

MODEL = """
import torch
from torch import nn
from lightning_fcl import Classifier

class MyNet(Classifier):
    def __init__(self, width: int = 4):
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3)), 3)
"""
DATA = """
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

class MyData(L.LightningDataModule):
    def __init__(self, samples: int = 90):
        super().__init__()
        self.samples = samples

    def _loader(self, seed):
        y = torch.arange(self.samples) % 3
        x = torch.randn(self.samples, 6, generator=torch.Generator().manual_seed(seed)) + 3 * torch.eye(3, 6)[y]
        return DataLoader(TensorDataset(x, y))

    def train_dataloader(self):
        return self._loader(0)

    def test_dataloader(self):
        return self._loader(1)
"""
RECIPE = {
    "trainer": {
        "max_epochs": 1,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "strategy": {"class_path": "lightning_fcl.FederatedStrategy"},
    },
    "model": {"class_path": "my_model.MyNet", "init_args": {"width": 5}},
    "data": {
        "data": {"class_path": "my_data.MyData"},
        "scenario": {"class_path": "ClassIncremental", "init_args": {"num_experiences": 1}},
        "partition": {"class_path": "IID", "init_args": {"num_clients": 2}},
    },
}
SEARCH = {
    "configs": ["my.yaml"],
    "objective": "final_accuracy/server",
    "trials": 2,
    "eval_split": "test",
    "space": {"model.init_args.width": [4, 5]},
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_model.py").write_text(MODEL)
    (tmp_path / "my_data.py").write_text(DATA)
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(RECIPE))
    (tmp_path / "search.yaml").write_text(yaml.safe_dump(SEARCH))
    (tmp_path / "random.py").write_text("raise RuntimeError('in place of the module of this name')\n")
    return tmp_path


@pytest.mark.slow
def test_fit_and_test_find_classes_of_working_directory(folder):
    code = """
from pathlib import Path
from lightning_fcl.cli.main import main
main(["fit", "--config", "my.yaml", "--out", "out"])
(checkpoint,) = Path("out/checkpoints").glob("*.ckpt")
main(["test", "--config", "my.yaml", "--ckpt_path", str(checkpoint)])
"""
    package = str(Path(lightning_fcl.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": package, "OMP_NUM_THREADS": "1"}
    # `-P` leaves the working directory out of `sys.path`, as for the installed command.
    words = [sys.executable, "-P", "-c", code]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "test/accuracy" in done.stdout, done.stderr


@pytest.fixture
def here(folder, monkeypatch):
    """Change to the folder for the test. Unload the modules of the folder, named `my_...`, afterwards."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {*sys.modules}
    yield folder
    for name in {*sys.modules} - before:
        if name.startswith("my_"):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.long
def test_tune_workers_find_classes_and_give_equal_results(here):
    rows = []
    for workers in "12":
        main(["tune", "search.yaml", "--out", workers, "--workers", workers])
        assert len(list((here / workers).glob("trial-*/seed-0/results.json"))) == 2
        rows.append((here / workers / "trials.csv").read_text())
    assert rows[0] == rows[1]


def test_fit_missing_class_error_names_module(here, error_of):
    (here / "my_model.py").unlink()
    assert "my_model" in error_of(["fit", "--config", "my.yaml", "--out", "out"])
