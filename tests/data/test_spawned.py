"""Tests of worker processes on systems without forks, where processes are spawned."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_fcl

SPAWNS = """
import multiprocessing
import numpy as np
import torch

DRAWS = np.random.default_rng()

class Noisy(torch.utils.data.Dataset):
    R = np.random.RandomState()

    def __len__(self):
        return 20

    def __getitem__(self, index):
        own = float(self.R.normal() + DRAWS.normal())
        return torch.randn(4) + own + index, index % 2

def state(workers):
    import lightning.pytorch as L  # here: the processes that are spawned run this file, too
    from lightning_fcl import Classifier, FederatedStrategy, FederatedStream
    from lightning_fcl.data.partition import IID
    from lightning_fcl.data.scenarios import ClassIncremental
    from lightning_fcl.models import MLP

    L.seed_everything(0)
    options = dict(num_workers=workers, batch_size=16, seed=0)
    stream = FederatedStream(Noisy(), ClassIncremental(1), IID(2), **options)
    task = Classifier(MLP([4, 2]), 2)
    trainer = L.Trainer(strategy=FederatedStrategy(), max_epochs=1, accelerator="cpu", logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(task, datamodule=stream)
    return task.state_dict()

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    alone, helped = state(0), state(2)
    print("the same:", all(torch.equal(alone[name], helped[name]) for name in alone))
"""


@pytest.mark.slow
@pytest.mark.long
def test_spawned_workers_do_not_change_results(tmp_path):
    """On macOS and Windows, processes are spawned and receive only what can be pickled."""
    (tmp_path / "spawns.py").write_text(SPAWNS)
    environment = os.environ | {"PYTHONPATH": str(Path(lightning_fcl.__file__).parents[1])}
    words = [sys.executable, str(tmp_path / "spawns.py")]
    ended = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert "the same: True" in ended.stdout, ended.stderr
