"""Tests of client states between rounds, in memory and on disk."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from raising import raises
from safetensors.torch import save_file

from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.errors import DamagedFileError, FileAccessError, InvalidValueError
from lightning_fcl.federation.client_store import ClientStore

ROOT = Path(__file__).parents[2]
STATE = {
    "model": {"head.weight": torch.randn(3, 2), "count": torch.tensor(7), "flags": torch.tensor([True, False])},
    "Replay": {"x": torch.randn(2, 4).half(), "y": torch.tensor([1, 2]), "none": torch.empty(0, 4)},
    # This tensor is not contiguous.
    "FLwF2T": {"own.head.weight": torch.randn(4, 4).T},
}
IDS = ["a/b", "ü", ".", "..", "a.b", "a%2Fb", "CLIENT", "", " ", "x.safetensors"]


def same(left, right):
    return left.keys() == right.keys() and all(
        left[s].keys() == right[s].keys()
        and all(left[s][n].dtype == right[s][n].dtype and torch.equal(left[s][n], right[s][n]) for n in left[s])
        for s in left
    )


@pytest.fixture(params=["memory", "disk"])
def store(request, tmp_path):
    return ClientStore(request.param, tmp_path / "clients")


def test_store_returns_stored_state(store):
    store["client1"] = STATE
    assert same(store["client1"], STATE)
    store["client1"] = {"model": STATE["model"]}
    assert same(store["client1"], {"model": STATE["model"]})
    assert store["client2"] == {} and list(store) == ["client1"]


def test_store_unusual_client_ids_stay_distinct(store):
    for number, client in enumerate(IDS):
        store[client] = {"model": {"number": torch.tensor(number)}}
    assert sorted(store) == sorted(IDS)
    assert [store[client]["model"]["number"].item() for client in IDS] == list(range(len(IDS)))
    store.replace_all({})
    assert list(store) == [] and store["a/b"] == {}


def test_store_path_like_client_ids_stay_in_folder(tmp_path):
    store = ClientStore("disk", tmp_path / "clients")
    for client in ("../escape", "/etc/escape"):
        store[client] = STATE
    assert [path.name for path in tmp_path.iterdir()] == ["clients"]
    assert len(list((tmp_path / "clients").iterdir())) == 2


def test_store_existing_folder_reads_states(tmp_path):
    ClientStore("disk", tmp_path)["ü"] = STATE
    again = ClientStore("disk", tmp_path)
    assert list(again) == ["ü"] and same(again["ü"], STATE)


OWNER = """
import os, signal, sys
import torch
from lightning_fcl.federation.client_store import ClientStore
store = ClientStore("disk")
store["client1"] = {"model": {"weight": torch.zeros(3)}}
print(store._folder, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def owner(tmp_path, monkeypatch):
    """Yield a process with a temporary store, and the folder of the store."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", OWNER], env=environment, **pipes)
    yield process, Path(process.stdout.readline().strip())
    process.kill()
    process.communicate()


@pytest.mark.seconds
def test_temporary_store_is_removed_at_exit(owner):
    process, folder = owner
    assert (folder / "client1.safetensors").exists()
    process.communicate("\n")
    assert not folder.exists()


@pytest.mark.seconds
def test_temporary_store_of_killed_process_is_removed_later(owner):
    process, folder = owner
    other = ClientStore("disk")
    assert (folder / "client1.safetensors").exists()
    process.kill()
    process.wait()
    assert (folder / "client1.safetensors").exists()
    third = ClientStore("disk")
    assert not folder.exists()
    assert other._folder.exists() and third._folder.exists()


def test_store_full_disk_keeps_state_and_raises(tmp_path, full_disk):
    store = ClientStore("disk", tmp_path)
    store["client1"] = STATE
    large = {"model": {"head.weight": torch.zeros(10_000)}}
    with full_disk(4096), pytest.raises(OSError, match=r"bytes are free") as error:
        store["client1"] = large
    assert "TMPDIR" not in str(error.value)
    assert f"bytes of free disk space for {tmp_path / 'client1.safetensors'}, but the disk is full" in str(error.value)
    assert same(store["client1"], STATE)
    assert [path.name for path in tmp_path.iterdir()] == ["client1.safetensors"]
    temporary = ClientStore("disk")
    with full_disk(4096), pytest.raises(OSError, match=r"bytes are free.*TMPDIR.*client_store=\"memory\""):
        temporary["client1"] = large


def test_store_damaged_file_raises(tmp_path):
    store = ClientStore("disk", tmp_path)
    state = {"model": {"weight": torch.arange(5.0), "flags": torch.tensor([True, False])}}
    store["client1"], refused = state, 0
    path = tmp_path / "client1.safetensors"
    whole = path.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        # A flipped bit can replace a space of the header by other whitespace, which does not change the state.
        try:
            assert same(store["client1"], state)
        except ValueError as error:
            refused += 1
            assert str(error).startswith(f"Expected the unchanged state of client client1 in {path}, but ")
    assert refused > 0.9 * len(whole)
    for length in (0, 7, 8, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with raises(DamagedFileError, value=path):
            store["client1"]
    path.write_bytes(whole)
    (tmp_path / "client2.safetensors").write_bytes(whole)
    with raises(DamagedFileError, value=tmp_path / "client2.safetensors"):
        store["client2"]
    assert store["client1"]["model"]["weight"].tolist() == [0, 1, 2, 3, 4]


def test_store_file_without_checksum_raises(tmp_path):
    save_file({"model\x1fweight": torch.zeros(2)}, tmp_path / "client1.safetensors")
    with raises(DamagedFileError, value=tmp_path / "client1.safetensors"):
        ClientStore("disk", tmp_path)["client1"]


def test_store_unknown_kind_raises():
    with raises(InvalidValueError, "client_store"):
        ClientStore("tape")


@pytest.mark.parametrize(
    ("labels", "num_classes", "balanced"),
    [
        ([0, 1, 2], 3, True),
        ([0, 0, 1, 2, 2], 3, True),
        ([0, 0, 0, 1, 2, 2], 3, False),
        ([0, 0, 1, 1], 3, False),
        ([], 3, False),
        ([0, 1], 0, False),
    ],
)
def test_client_round_is_balanced_by_labels(labels, num_classes, balanced):
    client_round = ClientRound("a", 0, labels=torch.tensor(labels, dtype=torch.long), num_classes=num_classes)
    assert client_round.is_balanced is balanced


class Process:
    """One of two ranks that share a folder."""

    num_ranks = 2

    def __init__(self, rank, folder):
        self.rank, self._folder = rank, folder

    def all_gather_object(self, value):
        return [self._folder, value]

    def all_reduce(self, numbers):
        raise AssertionError("unexpected call of `all_reduce`")


CHANGES = {
    "replace_all": lambda store: store.replace_all({"b": STATE}),
    "store_as_uint8": lambda store: store.store_as_uint8((torch.zeros(1), torch.ones(1), (1, 2, 2))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_shared_folder_only_rank_zero_writes_global_changes(tmp_path, change):
    shared = tmp_path / "first"
    first, second = ClientStore("disk", shared), ClientStore("disk", tmp_path / "second")
    for rank, store in enumerate((first, second)):
        store.share_folder(Process(rank, shared))
    first["a"] = STATE

    def written():
        return {path.name: path.stat().st_mtime_ns for path in shared.iterdir()}

    before = written()
    CHANGES[change](second)
    assert written() == before
    CHANGES[change](first)
    assert written() != before


def test_share_folder_in_memory_keeps_own_states():
    store = ClientStore()
    store.share_folder(Process(1, None))
    store.replace_all({"b": STATE})
    assert list(store) == ["b"]


def test_store_folder_below_file_raises(tmp_path):
    (tmp_path / "file").write_text("no folder")
    folder = tmp_path / "file" / "clients"
    with raises(FileAccessError, value=folder):
        ClientStore("disk", folder)
