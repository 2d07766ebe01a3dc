"""Recipes that name classes of the working directory, run by the installed command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import lightning_fcl

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
        "scenario": {"class_path": "ClassIncremental", "init_args": {"experiences": 1}},
        "partition": {"class_path": "IID", "init_args": {"clients": 2}},
    },
}
SEARCH = {
    "configs": ["my.yaml"],
    "objective": "final_accuracy/server",
    "trials": 2,
    "measure_on": "test",
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


def command(folder, *words):
    """Run words as the installed command does, whose own folder stands first in ``sys.path``."""
    package = str(Path(lightning_fcl.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": package, "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-P", "-c", "from lightning_fcl.cli.main import main; main()", *words]
    return subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_fit_and_test_find_them(folder):
    done = command(folder, "fit", "--config", "my.yaml", "--out", "out")
    assert done.returncode == 0, done.stderr
    checkpoint = next((folder / "out" / "checkpoints").glob("*.ckpt"))
    again = command(folder, "test", "--config", "my.yaml", "--ckpt_path", str(checkpoint))
    assert again.returncode == 0 and "test/accuracy" in again.stdout, again.stderr


@pytest.mark.slow
def test_worker_processes_find_them(folder):
    done = command(folder, "tune", "search.yaml", "--out", "out", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert len(list((folder / "out").glob("trial-*/seed-0/results.json"))) == 2


@pytest.mark.seconds
def test_a_class_that_is_nowhere_is_named(folder):
    (folder / "my_model.py").unlink()
    done = command(folder, "fit", "--config", "my.yaml", "--out", "out")
    assert done.returncode == 2 and "my_model" in done.stderr and "Traceback" not in done.stderr
