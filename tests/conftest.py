"""What all tests share: one thread, silence, and a small stream."""

import os
import warnings

import lightning.pytorch as L
import numpy as np
import pytest
import torch

from lightning_fcl import Classifier, FederatedStrategy, FederatedStream
from lightning_fcl.models import MLP

torch.set_num_threads(1)
warnings.filterwarnings("ignore", module="lightning")


@pytest.fixture(autouse=True)
def _seeded(monkeypatch):
    """No test depends on another's seed, or on that of the shell."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    torch.manual_seed(0)


@pytest.fixture
def data_folder():
    """The folder of the real data sets."""
    if not os.environ.get("LIGHTNING_FCL_DATA"):
        pytest.skip("LIGHTNING_FCL_DATA names no folder of data sets")
    return os.environ["LIGHTNING_FCL_DATA"]


def toy_arrays(samples=240, features=6, classes=4, seed=0):
    """Separable Gaussian classes."""
    rng = np.random.default_rng(seed)
    y = np.arange(samples) % classes
    x = rng.normal(size=(samples, features)) + 2 * np.eye(classes, features)[y]
    return x.astype(np.float32), y.astype(np.int64)


@pytest.fixture
def make_stream():
    """Makes streams of toy data."""

    def make(client=None, samples=240, **kwargs):
        x, y = toy_arrays(samples)
        return FederatedStream.from_arrays(
            x, y, client, **{"clients": 3, "experiences": 2, "batch_size": 8, "seed": 0, **kwargs}
        )

    return make


@pytest.fixture
def make_task():
    """Makes small classifiers, all with the same initial weights."""

    def make(optimizer=lambda params: torch.optim.SGD(params, lr=0.1), model=None, seed=0):
        torch.manual_seed(seed)
        return Classifier(model if model is not None else MLP([6, 5, 4]), 4, optimizer)

    return make


@pytest.fixture
def quiet():
    """Arguments of a Trainer that shows and writes nothing."""
    return {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }


@pytest.fixture
def fit(quiet):
    """Fits silently and gives the Trainer back."""

    def run(task, stream, callbacks=(), strategy=None, max_epochs=None, ckpt_path=None, trainer_args=None, **kwargs):
        options = {**quiet, **(trainer_args or {})}
        if max_epochs is None:
            stream.setup("fit")
            max_epochs = stream.plan.rounds
        trainer = L.Trainer(
            strategy=strategy or FederatedStrategy(**kwargs),
            max_epochs=max_epochs,
            callbacks=list(callbacks),
            **options,
        )
        trainer.fit(task, datamodule=stream, ckpt_path=ckpt_path)
        return trainer

    return run
