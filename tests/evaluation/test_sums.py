"""Tests of checksum lists, which contain the SHA-256 of each file."""

import hashlib

import pooch
import pytest
from raising import raises

from lightning_fcl.errors import InvalidValueError, MissingFileError
from lightning_fcl.io.checksums import check_digest, read_checksums, write_checksums

DIGEST = hashlib.sha256(b"whole").hexdigest()


def test_read_checksums_reads_written_list_like_pooch(tmp_path):
    path = write_checksums(tmp_path / "files.txt", {"b/y": DIGEST, "a": "0" * 64})
    assert read_checksums(path) == {"a": "0" * 64, "b/y": DIGEST}
    other = pooch.create(tmp_path, "")
    other.load_registry(path)
    assert other.registry == read_checksums(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"a", b"a 0", f"a {DIGEST} x".encode(), f"a  {DIGEST}".encode(), f"a {DIGEST.upper()}".encode(), b"\xff 0\n"],
)
def test_read_checksums_invalid_content_raises(tmp_path, content):
    (tmp_path / "files.txt").write_bytes(content)
    with raises(InvalidValueError, value=tmp_path / "files.txt"):
        read_checksums(tmp_path / "files.txt")


def test_check_digest_missing_or_changed_file_raises(tmp_path):
    path = tmp_path / "x"
    with raises(MissingFileError, value=path):
        check_digest(path, DIGEST)
    path.write_bytes(b"whole")
    check_digest(path, DIGEST)
    path.write_bytes(b"whole?")
    with raises(InvalidValueError, value=path):
        check_digest(path, DIGEST)
