"""Tests of atomic writing of checkpoints."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_fcl.simulation.checkpoint_io import AtomicCheckpointIO

ROOT = Path(__file__).parents[2]
BEFORE = {"state_dict": {"weight": torch.arange(4.0)}}

KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from lightning_fcl.simulation.checkpoint_io import AtomicCheckpointIO
if sys.argv[2] == "while it is written":
    write = Path.write_bytes
    def half(path, data):
        write(path, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    Path.write_bytes = half
else:
    os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
AtomicCheckpointIO().save_checkpoint({"state_dict": {"weight": torch.ones(10_000)}}, sys.argv[1])
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "checkpoints" / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(BEFORE, path)
    return path


def is_as_before(path):
    loaded = AtomicCheckpointIO().load_checkpoint(path, weights_only=True)
    return torch.equal(loaded["state_dict"]["weight"], BEFORE["state_dict"]["weight"])


def test_strategy_default_checkpoint_io_writes_atomically(fit, make_stream, make_task, tmp_path):
    trainer = fit(make_task(), make_stream())
    assert isinstance(trainer.strategy.checkpoint_io, AtomicCheckpointIO)
    trainer.save_checkpoint(tmp_path / "deep" / "er" / "a.ckpt")
    assert [path.name for path in (tmp_path / "deep" / "er").iterdir()] == ["a.ckpt"]


def test_save_checkpoint_full_disk_keeps_previous_file_and_raises(path, full_disk):
    message = f"bytes of free disk space for {path}, but the disk is full.*Free disk space, then resume from the"
    with full_disk(8192), pytest.raises(OSError, match=message):
        AtomicCheckpointIO().save_checkpoint({"state_dict": {"weight": torch.ones(10_000)}}, path)
    assert is_as_before(path) and [entry.name for entry in path.parent.iterdir()] == ["last.ckpt"]


@pytest.mark.seconds
@pytest.mark.parametrize(
    "moment", ["while it is written", pytest.param("before it is renamed", marks=pytest.mark.long)]
)
def test_save_checkpoint_killed_keeps_previous_file_until_next_save(path, moment):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run([sys.executable, "-c", KILLED, path, moment], env=environment)
    assert process.returncode == -signal.SIGKILL
    assert is_as_before(path)
    assert [entry.name for entry in path.parent.glob("*.ckpt")] == ["last.ckpt"]
    assert len(list(path.parent.iterdir())) == 2
    AtomicCheckpointIO().save_checkpoint(BEFORE, path)
    assert [entry.name for entry in path.parent.iterdir()] == ["last.ckpt"]
