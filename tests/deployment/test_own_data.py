"""Tests of the cached number of a node's samples. With the cache, a node does not read its data for each message."""

import os

import numpy as np
import pytest
from PIL import Image

from lightning_fcl.deployment.messages import RejectedMessageError
from lightning_fcl.deployment.node_data import count_samples


def save(path, samples):
    np.savez(path, x=np.zeros((samples, 3), np.float32), y=np.array(["a"] * samples))


def overwrite(path, content):
    """Overwrite a file, and keep its size and modification time."""
    told = path.stat()
    path.write_bytes(content[: told.st_size].ljust(told.st_size, b"\0"))
    os.utime(path, ns=(told.st_atime_ns, told.st_mtime_ns))


def test_count_samples_reads_file_again_only_after_change(tmp_path, monkeypatch):
    path, note = tmp_path / "own.npz", tmp_path / "note.json"
    with pytest.raises(RejectedMessageError, match="there is no file"):
        count_samples(str(path), note)
    save(path, 4)
    whole = path.read_bytes()
    assert count_samples(str(path), note) == 4
    overwrite(path, b"no numbers")
    assert count_samples(str(path), note) == 4  # The file is not read again.
    path.write_bytes(b"no numbers")
    with pytest.raises(RejectedMessageError, match=r"own\.npz .* but got: "):
        count_samples(str(path), note)
    path.write_bytes(whole)
    assert count_samples(str(path), note) == 4
    save(path, 5)
    assert count_samples(str(path), note) == 5
    monkeypatch.setenv("LIGHTNING_FCL_MAX_BYTES", "10")
    with pytest.raises(RejectedMessageError, match="above the limit of 10"):
        count_samples(str(path), note)
    monkeypatch.delenv("LIGHTNING_FCL_MAX_BYTES")
    assert count_samples(str(path), note) == 5


def test_count_samples_reads_image_folder_again_after_change(tmp_path):
    photos, note = tmp_path / "photos", tmp_path / "note.json"
    (photos / "cat").mkdir(parents=True)
    for number in range(3):
        Image.effect_noise((8, 8), 40).save(photos / "cat" / f"{number}.png")
        assert count_samples(str(photos), note) == number + 1
    (photos / "cat" / "0.png").unlink()
    assert count_samples(str(photos), note) == 2
