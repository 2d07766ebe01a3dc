"""Tests that `read_checkpoint` reads tensors and plain values, and rejects damaged files and all other content."""

import io
import os
import pickle
import zipfile
from dataclasses import dataclass

import pytest
import torch
from raising import raises

from lightning_fcl.errors import ConnectionFailedError, DamagedFileError, InvalidValueError, MissingFileError
from lightning_fcl.io.checkpoint import get_run_checkpoint, newest_checkpoint, read_checkpoint, resolve_checkpoint

STATE = {"state_dict": {"weight": torch.arange(6.0)}}


def read(path):
    return torch.load(path, weights_only=True)


def archive(content):
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


@dataclass
class Afar:
    """URL and digest of a served file."""

    url: str = ""
    digest: str = "sha256:"


class Command:
    """An object that runs a command when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def foreign_zip():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as content:
        content.writestr("notes.txt", "nothing of torch")
    return buffer.getvalue()


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole, marker: b"",
        lambda whole, marker: b"\x00" * 100,
        lambda whole, marker: whole[:40],
        lambda whole, marker: whole[: len(whole) // 2],
        lambda whole, marker: whole[:-1],
        lambda whole, marker: whole[len(whole) // 2 :],
        lambda whole, marker: whole.replace(b"weight", b"height"),
        lambda whole, marker: foreign_zip(),
        lambda whole, marker: archive([1, 2]),
        lambda whole, marker: archive({"weights": torch.zeros(2)}),
        lambda whole, marker: archive({"state_dict": 3}),
        lambda whole, marker: archive({**STATE, "extra": Command(marker)}),
        lambda whole, marker: pickle.dumps(Command(marker)),
        lambda whole, marker: pickle.dumps({**STATE, "extra": Command(marker)}),
    ],
)
def test_read_checkpoint_damaged_raises_and_names_the_newest_undamaged(tmp_path, damage):
    marker, whole = tmp_path / "marker", archive(STATE)
    for age, name in enumerate(["old", "new"]):
        (tmp_path / f"{name}.ckpt").write_bytes(whole)
        os.utime(tmp_path / f"{name}.ckpt", (age, age))
    path = tmp_path / "damaged.ckpt"
    path.write_bytes(damage(whole, marker))
    with raises(DamagedFileError, value=path) as refused:
        read_checkpoint(read, path)
    assert not marker.exists()
    if newest_checkpoint(tmp_path) != path:  # `newest_checkpoint` accepts some of the damaged zip files.
        assert str(refused.value).endswith(f"Use {tmp_path / 'new.ckpt'}, the newest undamaged checkpoint there.")


def test_read_checkpoint_folder_or_missing_file_raises(tmp_path):
    (tmp_path / "folder.ckpt").mkdir()
    with raises(DamagedFileError, value=tmp_path / "folder.ckpt"):
        read_checkpoint(read, tmp_path / "folder.ckpt")
    with raises(MissingFileError, value=tmp_path / "none.ckpt"):
        read_checkpoint(read, tmp_path / "none.ckpt")
    assert newest_checkpoint(tmp_path) is None


def test_read_checkpoint_above_the_size_limit_raises_before_reading(tmp_path, monkeypatch):
    (tmp_path / "last.ckpt").write_bytes(archive(STATE))
    monkeypatch.setenv("LIGHTNING_FCL_MAX_BYTES", "100")
    with pytest.raises(ValueError, match=r"bytes, above the limit of 100\)\. .* set LIGHTNING_FCL_MAX_BYTES to"):
        read_checkpoint(lambda path: pytest.fail("it was read"), tmp_path / "last.ckpt")


@pytest.fixture
def afar(serve, monkeypatch, tmp_path):
    """Return a function that serves a checkpoint. Downloads are cached below ``tmp_path``."""
    monkeypatch.setenv("LIGHTNING_FCL_CACHE", str(tmp_path / "cache"))
    return lambda content: serve(Afar(), "last.ckpt", content)


def test_checkpoint_url_is_verified_and_cached(afar):
    source, _, asked = afar(archive(STATE))
    url = f"{source.url}#sha256={source.digest.partition(':')[2].upper()}"
    for _ in range(2):
        assert torch.equal(read_checkpoint(read, url)["state_dict"]["weight"], torch.arange(6.0))
    assert asked == ["/last.ckpt"]
    resolve_checkpoint(url).write_bytes(b"damaged on this disk")
    assert torch.equal(read_checkpoint(read, url)["state_dict"]["weight"], torch.arange(6.0))


def test_checkpoint_url_objects_are_not_unpickled(afar, tmp_path):
    source, _, _ = afar(archive({**STATE, "extra": Command(tmp_path / "marker")}))
    with pytest.raises(ValueError, match="Expected an undamaged checkpoint of tensors and plain values"):
        read_checkpoint(read, f"{source.url}#sha256={source.digest.partition(':')[2]}")
    assert not (tmp_path / "marker").exists()


def test_checkpoint_url_wrong_or_missing_digest_raises(afar):
    source, _, asked = afar(archive(STATE))
    for end in ("", "#sha256=", "#sha256=0123", f"#sha256={'0' * 65}"):
        with raises(InvalidValueError, "sha256"):
            read_checkpoint(read, f"{source.url}{end}")
    assert asked == []
    with raises(InvalidValueError, "sha256"):
        read_checkpoint(read, f"{source.url}#sha256={'0' * 64}")
    with raises(ConnectionFailedError, value="http://127.0.0.1:1/last.ckpt"):
        read_checkpoint(read, f"http://127.0.0.1:1/last.ckpt#sha256={'0' * 64}")


def test_get_run_checkpoint_missing_or_damaged_raises_with_reason(tmp_path):
    run, whole = tmp_path / "run", archive(STATE)
    checkpoint = run / "checkpoints" / "last.ckpt"

    def message(kind):
        with pytest.raises(kind) as raised:
            get_run_checkpoint(run)
        return str(raised.value)

    assert f"at {run} but found no such folder" in message(MissingFileError)
    run.write_text("")
    assert f"at {run} but found a file" in message(MissingFileError)
    run.unlink()
    run.mkdir()
    assert f"at {run / 'config.yaml'} but found no such file" in message(MissingFileError)
    (run / "config.yaml").write_text("")
    assert f"Expected a checkpoint in {checkpoint.parent}, but found none" in message(MissingFileError)
    checkpoint.parent.mkdir()
    for content in (b"", whole[:-1], whole[: len(whole) // 2]):
        checkpoint.write_bytes(content)
        assert "but each checkpoint is damaged: last.ckpt" in message(DamagedFileError)
    checkpoint.unlink()
    os.mkfifo(checkpoint)
    assert "but each checkpoint is damaged: last.ckpt" in message(DamagedFileError)
    checkpoint.with_name("first.ckpt").write_bytes(whole)
    assert get_run_checkpoint(run) == checkpoint.with_name("first.ckpt")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_read_checkpoint_not_a_regular_file_raises(tmp_path, make):
    make(tmp_path / "last.ckpt")
    with pytest.raises(DamagedFileError, match=r"to be a regular file, but got a (named pipe|device)"):
        read_checkpoint(lambda file: pytest.fail("the file was read"), tmp_path / "last.ckpt")
