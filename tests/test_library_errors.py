"""Tests that errors of the installed libraries, such as torch and Lightning, match the patterns in `LibraryError`."""

import mmap
import os
import warnings
from functools import partial
from inspect import cleandoc

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fcl.library_errors import LibraryError, first_line, match_error, one_line

BATCH = torch.ones(3, 2)


class Logging(L.LightningModule):
    """A module that logs two metrics."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch):
        loss = self.layer(batch[0]).sum()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch):
        self.log("val/loss", self.layer(batch[0]).sum())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(**arguments):
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(**{"accelerator": "cpu", "enable_checkpointing": False, **silent, **arguments})


def fit(callback, folder):
    loader = DataLoader(TensorDataset(BATCH), batch_size=3)
    is_checkpoint = isinstance(callback, ModelCheckpoint)
    made = trainer(
        callbacks=[callback],
        max_epochs=1,
        num_sanity_val_steps=0,
        enable_checkpointing=is_checkpoint,
        default_root_dir=folder,
    )
    made.fit(Logging(), loader, loader)


def end_worker(start_method):
    """End a worker process of a DataLoader with exit code 1 when it collates the sample 1."""
    list(DataLoader([1], batch_size=None, collate_fn=os._exit, num_workers=1, multiprocessing_context=start_method))


def seed_by_cli(seed):
    LightningCLI(Logging, args=["--seed_everything", seed], run=False, save_config_callback=None)


def without_gpus(accelerator):
    with pytest.MonkeyPatch.context() as patch:
        for kind in (CUDAAccelerator, MPSAccelerator):
            patch.setattr(kind, "is_available", staticmethod(lambda: False))
        trainer(accelerator=accelerator)


def vectorize(function):
    torch.func.vmap(function)(BATCH)


def case(kind, name, raises, provoke, groups=(), names=None, marks=()):
    """Return a test case: a call that raises an error of a kind.

    Args:
        kind: Kind of the error.
        name: Name of the case.
        raises: Class of the error.
        provoke: Function that raises the error. Its argument is a folder.
        groups: Prefix of the text of each group of the match.
        names: For a pattern with named groups: the text of the group ``name``, and a part of the text of each other
            group.
        marks: Marks of the test.
    """
    return pytest.param(kind, raises, provoke, groups, names or {}, id=f"{kind.name}-{name}", marks=marks)


CASES = [
    case(LibraryError.WORKER_ENDED, "fork", RuntimeError, lambda _: end_worker("fork")),
    case(LibraryError.WORKER_ENDED, "spawn", RuntimeError, lambda _: end_worker("spawn"), marks=pytest.mark.seconds),
    case(LibraryError.ONE_SAMPLE, "vectors", ValueError, lambda _: nn.BatchNorm1d(2)(torch.ones(1, 2))),
    case(LibraryError.ONE_SAMPLE, "images", ValueError, lambda _: nn.BatchNorm2d(2)(torch.ones(1, 2, 1, 1))),
    case(LibraryError.VMAP_RANDOM, "draw", RuntimeError, lambda _: vectorize(lambda x: x + torch.rand(2))),
    case(LibraryError.VMAP_RANDOM, "dropout", RuntimeError, lambda _: vectorize(nn.Dropout())),
    case(LibraryError.VMAP_ITEM, "item", RuntimeError, lambda _: vectorize(lambda x: x * x.sum().item())),
    case(LibraryError.VMAP_ITEM, "float", RuntimeError, lambda _: vectorize(lambda x: x * float(x.sum()))),
    case(LibraryError.VMAP_BRANCH, "if", RuntimeError, lambda _: vectorize(lambda x: x if x.sum() > 0 else -x)),
    case(LibraryError.NO_MEMORY, "torch", RuntimeError, lambda _: torch.empty(2**60)),
    case(LibraryError.NO_MEMORY, "numpy", MemoryError, lambda _: np.empty(2**58)),
    case(LibraryError.NO_MEMORY, "map", OSError, lambda _: mmap.mmap(-1, 2**60)),
    case(
        LibraryError.NO_TORCH_DEVICE,
        "gpu",
        MisconfigurationException,
        lambda _: without_gpus("gpu"),
        ("No supported gpu backend found!",),
    ),
    *(
        case(
            LibraryError.NO_TORCH_DEVICE,
            name,
            MisconfigurationException,
            partial(lambda name, _: without_gpus(name), name),
            (f"`{name.upper()}Accelerator` can not run on your system",),
        )
        for name in ("cuda", "mps")
    ),
    case(
        LibraryError.NO_TORCH_DEVICE,
        "tpu",
        ModuleNotFoundError,
        lambda _: without_gpus("tpu"),
        ("Requirement 'torch_xla>=",),
    ),
    case(
        LibraryError.UNKNOWN_PLUGIN,
        "strategy",
        ValueError,
        lambda _: trainer(strategy="federatd"),
        ("You selected an invalid strategy name: `strategy='federatd'`.", "strategy", "federatd"),
    ),
    case(
        LibraryError.UNKNOWN_PLUGIN,
        "accelerator",
        ValueError,
        lambda _: trainer(accelerator="gpus"),
        ("You selected an invalid accelerator name: `accelerator='gpus'`.", "accelerator", "gpus"),
    ),
    case(
        LibraryError.UNKNOWN_METRIC,
        "early-stopping",
        RuntimeError,
        lambda folder: fit(EarlyStopping("val/los"), folder),
        names={"name": "val/los", "known": "`val/loss`"},
    ),
    case(
        LibraryError.UNKNOWN_METRIC,
        "checkpoint",
        MisconfigurationException,
        lambda folder: fit(ModelCheckpoint(folder, monitor="val/los"), folder),
        names={"name": "val/los", "known": "'val/loss'"},
    ),
    case(LibraryError.SEED_BOUNDS, "call", ValueError, lambda _: L.seed_everything(-1), ("-1", "4294967295")),
    case(
        LibraryError.SEED_BOUNDS, "large", ValueError, lambda _: L.seed_everything(2**32), ("4294967296", "4294967295")
    ),
    case(LibraryError.SEED_BOUNDS, "cli", ValueError, lambda _: seed_by_cli("-1"), ("-1", "4294967295")),
    case(
        LibraryError.SAME_CALLBACKS,
        "early-stopping",
        RuntimeError,
        lambda _: trainer(callbacks=[EarlyStopping("loss"), EarlyStopping("loss")]),
        ("EarlyStopping",),
    ),
    case(LibraryError.DEVICES, "negative", TypeError, lambda _: trainer(devices=-1)),
    case(LibraryError.DEVICES, "text", TypeError, lambda _: trainer(devices="two")),
    case(LibraryError.DEVICES, "zero", MisconfigurationException, lambda _: trainer(devices=0)),
    case(LibraryError.DEVICES, "empty", MisconfigurationException, lambda _: trainer(devices=[])),
]


def test_library_error_kinds_all_have_a_case():
    assert {one.values[0] for one in CASES} == {*LibraryError}


@pytest.mark.parametrize(("kind", "raises", "provoke", "groups", "names"), CASES)
def test_library_error_of_the_installed_version_matches_one_kind(kind, raises, provoke, groups, names, tmp_path):
    with warnings.catch_warnings(), pytest.raises(raises) as raised:
        warnings.simplefilter("ignore")
        provoke(tmp_path)
    error = raised.value
    assert [one for one in LibraryError if match_error(error, one)] == [kind]
    found = match_error(error, kind)
    assert found.groupdict().keys() == names.keys()
    assert found.groupdict().get("name") == names.get("name")
    assert all(part in found[name] for name, part in names.items())
    if not names:
        assert len(found.groups()) == len(groups)
        assert all(map(str.startswith, found.groups(), groups))


@pytest.mark.parametrize("callback", [LearningRateMonitor, ModelCheckpoint])
def test_match_error_unrelated_error_matches_no_kind(callback):
    with pytest.raises((MisconfigurationException, TypeError, ValueError)) as raised:
        callback("nonsense") if callback is LearningRateMonitor else callback(save_top_k=-2)
    assert [one for one in LibraryError if match_error(raised.value, one)] == []


def test_first_line_and_one_line_shorten_error_texts():
    error = ValueError(cleandoc("\n  first:\n    - second\n\n  third.\n"))
    assert first_line(error) == "first:"
    assert first_line(error, 3) == "fir"
    assert one_line(error) == "first: - second third"
    assert one_line(error, 8) == "first: -"
    assert first_line(KeyError()) == one_line(KeyError()) == "KeyError"
