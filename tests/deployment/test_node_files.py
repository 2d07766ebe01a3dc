"""Tests of damaged files of a node. The node restores the file, or raises an error that contains the fix."""

import json
import shutil

import numpy as np
import pytest
import torch

from lightning_fcl.deployment.node import client_state_folder
from lightning_fcl.deployment.node_data import count_samples
from lightning_fcl.errors import DamagedFileError
from lightning_fcl.federation.client_store import PROGRESS, ClientStore, with_progress

DAMAGED = [b"", b"\xff\xfe", b'{"round": ', b"[]", b'{"round": "2"}']


def train(folder, rounds):
    """Write the client states of some rounds, as a node does when it trains."""
    for number in rounds:
        place = client_state_folder(folder, "a", number)
        store = ClientStore("disk", place)
        kept = store["a"]
        store["a"] = {
            "Method": {"x": torch.tensor(number)},
            PROGRESS: with_progress(kept, number, 0),
        }
        store.sync()


def state_before(folder, number):
    """Return the numbers of the rounds that the client has trained, from the client state at the start of a round."""
    kept = ClientStore("disk", client_state_folder(folder, "a", number))["a"]
    return kept[PROGRESS]["rounds"].tolist() if kept else []


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_round_file_is_computed_again(tmp_path, content):
    train(tmp_path, range(3))
    (tmp_path / "round.json").write_bytes(content)
    assert state_before(tmp_path, 2) == [0, 1]  # The node starts round 2 again.
    train(tmp_path, [2])
    (tmp_path / "round.json").write_bytes(content)
    assert state_before(tmp_path, 3) == [0, 1, 2]
    assert json.loads((tmp_path / "round.json").read_text()) == {"round": 3}


def test_damaged_round_file_before_first_training_is_computed_again(tmp_path):
    client_state_folder(tmp_path, "a", 0)
    (tmp_path / "round.json").write_bytes(b"")
    assert state_before(tmp_path, 0) == []


@pytest.mark.parametrize("content", [b"", b"\0" * 100])
def test_damaged_unneeded_state_is_written_again(tmp_path, content):
    train(tmp_path, range(3))
    (tmp_path / "now" / "a.safetensors").write_bytes(content)
    assert state_before(tmp_path, 2) == [0, 1]
    train(tmp_path, [2])
    (tmp_path / "before" / "a.safetensors").write_bytes(content)
    assert state_before(tmp_path, 3) == [0, 1, 2]


@pytest.mark.parametrize(("folder", "number"), [("before", 2), ("now", 3)])
def test_damaged_needed_state_raises_with_working_fix(tmp_path, folder, number):
    own = tmp_path / "federation" / "a"
    own.mkdir(parents=True)
    train(own, range(3))
    (own / folder / "a.safetensors").write_bytes(b"")
    with pytest.raises(DamagedFileError, match=f"Remove {own}. The client then starts without the state"):
        client_state_folder(own, "a", number)
    shutil.rmtree(own)
    own.mkdir()
    assert state_before(own, number) == []


def test_round_file_that_cannot_be_computed_raises_with_fix(tmp_path):
    place = client_state_folder(tmp_path, "a", 0)
    # The client state does not contain the trained rounds.
    ClientStore("disk", place)["a"] = {"Method": {"x": torch.zeros(1)}}
    (tmp_path / "round.json").write_bytes(b"")
    with pytest.raises(DamagedFileError, match=f"Remove {tmp_path}"):
        client_state_folder(tmp_path, "a", 1)


@pytest.mark.parametrize("content", [*DAMAGED, b'{"stamp": 3, "samples": null}'])
def test_damaged_data_file_cache_is_computed_again(tmp_path, content):
    data, note = tmp_path / "a.npz", tmp_path / "data.json"
    np.savez(data, x=np.zeros((7, 2), np.float32), y=np.array(["cat", "dog"])[np.arange(7) % 2])
    assert count_samples(str(data), note) == 7
    noted = note.read_bytes()
    note.write_bytes(content)
    assert count_samples(str(data), note) == 7
    assert note.read_bytes() == noted
