"""Tests of cached checksums of files: values, reads, damaged and unwritable caches, and concurrent processes."""

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_fcl.io import file_digests as module
from lightning_fcl.io.file_digests import file_digests

NAMES = [f"{name}/{number}.png" for name in ("cat", "dog") for number in range(4)]
OLD = time.time_ns() - 10**12


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_FCL_CACHE", str(tmp_path / "cache"))
    # Files of a test are new. Their inode change time cannot be set.
    monkeypatch.setattr(module, "SETTLED_NANOSECONDS", -(10**15))
    for name in NAMES:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode() * 3)
        os.utime(path, ns=(OLD, OLD))
    return tmp_path / "data"


@pytest.fixture
def reads(monkeypatch):
    paths = []

    def sha256(path):
        paths.append(path.name)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    monkeypatch.setattr(module, "sha256", sha256)
    return paths


def expected(folder, names=NAMES):
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def cache_file(folder):
    return next((folder.parent / "cache" / "checksums").glob("*.json"))


def test_file_digests_second_call_reads_no_file(folder, reads):
    assert file_digests(folder, NAMES) == expected(folder) and len(reads) == 8
    assert file_digests(folder, NAMES[::-1]) == expected(folder) and len(reads) == 8


def test_file_digests_of_part_keep_the_checksums_of_other_files(folder, reads):
    file_digests(folder, NAMES[:5])
    file_digests(folder, NAMES[3:])
    assert len(reads) == 8
    file_digests(folder, NAMES)
    assert len(reads) == 8


@pytest.mark.parametrize("keep", ["nothing", "size", "times"])
def test_file_digests_read_a_changed_file_again(folder, reads, keep):
    file_digests(folder, NAMES)
    path = folder / NAMES[2]
    content = path.read_bytes()
    path.write_bytes(content + b"!" if keep == "nothing" else bytes([content[0] ^ 1]) + content[1:])
    if keep == "times":  # only the change time of the inode differs
        os.utime(path, ns=(OLD, OLD))
    assert file_digests(folder, NAMES) == expected(folder)
    assert len(reads) == 9 and reads[-1] == "2.png"


def test_file_digests_of_new_files_are_not_cached(folder, reads, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("LIGHTNING_FCL_CACHE", str(folder.parent / "cache"))
    file_digests(folder, NAMES)
    assert not (folder.parent / "cache").exists()


def damaged_versions(data):
    yield b""
    yield data[: len(data) // 2]
    yield b"not json"
    yield b"[]"
    for position in range(0, len(data), 37):
        yield data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def test_file_digests_with_a_damaged_cache_are_computed_again(folder):
    file_digests(folder, NAMES)
    path = cache_file(folder)
    data = path.read_bytes()
    for damaged in damaged_versions(data):
        path.write_bytes(damaged)
        assert file_digests(folder, NAMES) == expected(folder)
        assert path.read_bytes() == data


@pytest.mark.parametrize(
    "content", ['{"a": 1}', '{"a": [1, 2, 3]}', '{"a": [1, "b", 3, "d"]}', '{"a": [1, 2, 3, "x"]}', "[1]"]
)
def test_file_digests_with_invalid_entries_are_computed_again(folder, content):
    file_digests(folder, NAMES)
    digest = hashlib.sha256(content.encode()).hexdigest()
    cache_file(folder).write_text(f"{digest}\n{content}")
    assert file_digests(folder, NAMES) == expected(folder)


def test_file_digests_with_unwritable_cache_are_computed(folder, reads, monkeypatch):
    (folder.parent / "file").write_text("")
    monkeypatch.setenv("LIGHTNING_FCL_CACHE", str(folder.parent / "file" / "cache"))
    for count in (8, 16):
        assert file_digests(folder, NAMES) == expected(folder) and len(reads) == count


def test_file_digests_without_home_directory_are_computed(folder, monkeypatch):
    def expanduser(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("LIGHTNING_FCL_CACHE")
    monkeypatch.setattr(Path, "expanduser", expanduser)
    assert file_digests(folder, NAMES) == expected(folder)


def test_file_digests_cache_drops_deleted_files(folder):
    file_digests(folder, NAMES)
    (folder / NAMES[0]).unlink()
    (folder / NAMES[1]).write_bytes(b"new")
    file_digests(folder, NAMES[1:2])
    text = cache_file(folder).read_text()
    assert NAMES[0] not in text and all(name in text for name in NAMES[1:])


def test_file_digests_raise_for_missing_file(folder):
    with pytest.raises(FileNotFoundError):
        file_digests(folder, ["missing.png"])


@pytest.mark.seconds
def test_file_digests_of_several_processes_are_equal(folder):
    code = (
        "import sys; from pathlib import Path; from lightning_fcl.io import file_digests as m\n"
        "m.SETTLED_NANOSECONDS = -10**15\n"
        "names = sys.argv[2:]\n"
        "for turn in range(20): print(sorted(m.file_digests(Path(sys.argv[1]), names[turn % 3:]).items()))\n"
    )
    words = [sys.executable, "-c", code, str(folder), *NAMES]
    processes = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate()[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert len({*outputs}) == 1 and str(sorted(expected(folder).items())) in outputs[0]
    assert [path.suffix for path in cache_file(folder).parent.iterdir()] == [".json"]
