"""Tests of downloads: files are verified, and archives are unpacked completely or not at all."""

import re
import sys
import tarfile
from contextlib import suppress
from dataclasses import replace

import pytest
from raising import raises

from lightning_fcl.errors import FileAccessError, InvalidValueError, MissingPackageError
from lightning_fcl.io.download import Layout, Source, unpack

FILES = {f"original/images/{n}.png": bytes(range(n, n + 200)) * 20 for n in range(10)} | {"original/train.csv": b"1,0"}
ARCHIVES = ["x.zip", "x.tgz", "x.tar.gz"]


def source(archive: str, **changes) -> Source:
    words = dict.fromkeys(("title", "content", "license", "citation", "url", "size", "expected_files"), "x")
    layouts = (Layout("folder", ("x/original", "original"), markers=("train.csv",)), Layout("npz file", ("x.npz",)))
    return Source(
        **{"name": "x", "layouts": layouts, "archive": f"x/{archive}", "folder": "original"} | words | changes
    )


@pytest.mark.parametrize("kind", ["", "md5:"])
@pytest.mark.parametrize("archive", ARCHIVES)
def test_source_download_archive_once_and_unpacks(tmp_path, serve, archive, kind):
    """An existing npz file of the dataset does not prevent the download of the original folder."""
    served, _, asked = serve(source(archive, digest=kind), archive, FILES | {"README": b""})
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.npz").touch()
    folder = served.download(tmp_path / "data")
    assert folder == tmp_path / "data" / "x" / "original"
    assert {f"original/{p.relative_to(folder).as_posix()}": p.read_bytes() for p in folder.rglob("*.*")} == FILES
    assert [path.name for path in folder.parent.iterdir()] == ["original"]
    assert served.download(tmp_path / "data") == folder and asked == [f"/{archive}"]


@pytest.mark.parametrize("archive", ARCHIVES)
def test_source_download_existing_archive_is_unpacked(tmp_path, serve, pack, archive):
    content = pack(archive, FILES)
    served, _, asked = serve(source(archive), archive, content)
    path = tmp_path / "data" / "x" / archive
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert served.download(tmp_path / "data") == path.parent / "original"
    assert [path.name for path in path.parent.iterdir()] == ["original"] and asked == []


def test_source_download_without_folder_keeps_the_file(tmp_path, serve):
    served, _, asked = serve(source("x.zip", folder=""), "x.zip", b"whole")
    for _ in range(2):
        path = served.download(tmp_path / "data")
        assert path == tmp_path / "data" / "x" / "x.zip" and path.read_bytes() == b"whole" and asked == ["/x.zip"]
    path.write_bytes(b"half")
    assert served.download(tmp_path / "data").read_bytes() == b"whole"


@pytest.mark.parametrize(
    ("folder", "then"), [("original", " and run `lightning-fcl data download x` to unpack it."), ("", ".")]
)
def test_source_download_failed_names_the_path_for_the_file(tmp_path, serve, folder, then):
    served = serve(source("x.zip", folder=folder), "x.zip", b"")[0]
    place = tmp_path / "data" / "x" / "x.zip"
    with pytest.raises(
        ConnectionError, match=f"{re.escape(f'or download the file by hand to {place}{then}')}$"
    ) as caught:
        replace(served, url=served.url.replace("x.zip", "missing.zip")).download(tmp_path / "data")
    assert "404" in str(caught.value)


DAMAGES = {
    "cut short": lambda pack, name: pack(name, FILES)[: len(pack(name, FILES)) // 2],
    "no archive": lambda pack, name: b"hello",
    "another folder": lambda pack, name: pack(name, {"faces/train.csv": b""}),
}


@pytest.mark.parametrize("archive", ["x.zip", "x.tgz"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_source_download_damaged_archive_leaves_no_folder(tmp_path, serve, pack, damage, archive):
    served = serve(source(archive), archive, DAMAGES[damage](pack, archive))[0]
    folder = tmp_path / "data" / "x"
    with raises(FileAccessError, value=folder / archive):
        served.download(tmp_path / "data")
    assert [path.name for path in folder.iterdir()] == [archive]


@pytest.mark.parametrize("archive", ["x.zip", "x.tgz"])
def test_source_download_does_not_unpack_outside_of_its_folder(tmp_path, serve, pack, archive):
    served = serve(source(archive), archive, pack(archive, {"../../../out.txt": b"out", **FILES}))[0]
    with suppress(OSError):
        served.download(tmp_path / "data")
    assert not list(tmp_path.rglob("out.txt"))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_unpack_tar_with_special_member_raises(tmp_path, kind):
    special = tarfile.TarInfo("inside/special")
    special.type, special.linkname = kind, "../../outside"
    with tarfile.open(tmp_path / "x.tgz", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("inside/plain.txt"))
        tar.addfile(special)
    with raises(InvalidValueError, value="inside/special"):
        unpack(tmp_path / "x.tgz", tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_source_download_without_pooch_raises_missing_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with raises(MissingPackageError, value="pooch"):
        source("x.zip", url="https://x.invalid/x.zip", digest="0" * 64).download(tmp_path)
