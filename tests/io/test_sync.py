"""Tests that a file's data are synchronized before its folder, so that a power failure cannot damage the file."""

import os

import pytest
import torch

from lightning_fcl.federation.client_store import ClientStore
from lightning_fcl.io.atomic import append, sync_files, write_atomic


@pytest.fixture
def calls(monkeypatch):
    """Record the calls that synchronize or rename files: kind, path, and file size at the time of the call."""
    found, fsync, replace = [], os.fsync, os.replace

    def path_of(descriptor):
        return os.readlink(f"/proc/self/fd/{descriptor}")

    def recorded_fsync(descriptor):
        found.append(("sync", path_of(descriptor), os.fstat(descriptor).st_size))
        fsync(descriptor)

    def recorded_replace(source, target):
        found.append(("rename", str(target), os.stat(source).st_size))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    return found


def test_write_atomic_syncs_data_then_renames_then_syncs_folder(tmp_path, calls):
    path = tmp_path / "a.txt"
    for content in ("one", "three"):
        calls.clear()
        write_atomic(path, content)
        assert [call[:2] for call in calls] == [
            ("sync", str(tmp_path / ".a.txt.tmp")),
            ("rename", str(path)),
            ("sync", str(tmp_path)),
        ]
        assert calls[0][2] == calls[1][2] == len(content)
        assert path.read_text() == content


def test_append_syncs_the_data_and_a_new_name(tmp_path, calls):
    path = tmp_path / "record.jsonl"
    append(path, 0, b"one\n")
    assert calls == [("sync", str(path), 4), ("sync", str(tmp_path), calls[-1][2])]
    calls.clear()
    append(path, 4, b"two\n")
    assert calls == [("sync", str(path), 8)]
    assert path.read_bytes() == b"one\ntwo\n"


def test_sync_files_syncs_each_folder_once_and_skips_removed_files(tmp_path, calls):
    paths = [tmp_path / "a", tmp_path / "b", tmp_path / "removed"]
    for path in paths:
        write_atomic(path, "x", sync=False)
    paths[-1].unlink()
    assert not [call for call in calls if call[0] == "sync"]
    calls.clear()
    sync_files(paths)
    assert [call[1] for call in calls] == [str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path)]


def test_client_store_syncs_once_per_round_unless_temporary(tmp_path, calls):
    state = {"Replay": {"x": torch.arange(3.0)}}
    for store, synced in ((ClientStore("disk", tmp_path), 3), (ClientStore("disk"), 0)):
        for _ in range(2):
            calls.clear()
            store.start_round()
            for client in ("a", "b", "a"):  # Client "a" is written twice in the round.
                store[client] = state
            assert not [call for call in calls if call[0] == "sync"]
            store.commit_round()
            assert len([call for call in calls if call[0] == "sync"]) == synced
            assert store["a"]["Replay"]["x"].tolist() == [0, 1, 2]


def test_folder_of_a_file_system_without_synchronization_is_skipped(tmp_path, monkeypatch):
    fsync = os.fsync

    def refused(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(22, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refused)
    assert write_atomic(tmp_path / "a", "x").read_text() == "x"

    def broken(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output error"):
        write_atomic(tmp_path / "a", "y")
    assert (tmp_path / "a").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
