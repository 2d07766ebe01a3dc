"""Tests that the layouts of a source find its files, and that downloads require a published digest."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import lightning_fcl
from lightning_fcl.io.download import Layout, Source

FOLDER = Layout("folder", ("x/original", "original", "."), markers=("images/", "train.csv|test.csv"))
NPZ = Layout("npz file", ("x/x.npz", "x.npz"))
SOURCE = Source(
    name="x",
    title="the X",
    content="ten images",
    license="CC0",
    citation="X 2020",
    url="https://x.invalid/x.zip",
    size="1 MB",
    layouts=(FOLDER, NPZ),
    expected_files="`original` or `x.npz`",
)


def put(path: Path, content: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def put_folder(folder: Path, listed: str = "test.csv") -> Path:
    put(folder / listed)
    put(folder / "images" / "1.png")
    return folder


def test_layout_folder_requires_all_markers(tmp_path):
    put(tmp_path / "original" / "train.csv")
    assert FOLDER.find(tmp_path) is None
    # The layout needs a folder of this name, not a file.
    put(tmp_path / "original" / "images")
    assert FOLDER.find(tmp_path) is None
    (tmp_path / "original" / "images").unlink()
    assert FOLDER.find(tmp_path) is None
    put(tmp_path / "original" / "images" / "1.png")
    assert FOLDER.find(tmp_path) == tmp_path / "original"
    (tmp_path / "original" / "train.csv").rename(tmp_path / "original" / "test.csv")
    assert FOLDER.find(tmp_path) == tmp_path / "original"


def test_layout_find_returns_the_first_path(tmp_path):
    for place in (".", "original", "x/original"):
        assert FOLDER.find(tmp_path) != tmp_path / place
        put_folder(tmp_path / place)
        assert FOLDER.find(tmp_path) == tmp_path / place


def test_layout_required_file_restricts_matches(tmp_path):
    people = Layout("people", (".",), markers=("*/*.jpg",), required_file=r"(.+)/\1_\d\.jpg")
    put(tmp_path / "Ann" / "Bob_1.jpg")
    put(tmp_path / "Ann" / "._Ann_1.jpg")
    assert people.find(tmp_path) is None
    put(tmp_path / "Ann" / "Ann_1.jpg")
    assert people.find(tmp_path) == tmp_path


def test_layout_without_markers_requires_a_file(tmp_path):
    (tmp_path / "x.npz").mkdir()
    assert NPZ.find(tmp_path) is None
    assert NPZ.find(put(tmp_path / "x" / "x.npz").parents[1]) == tmp_path / "x" / "x.npz"


def test_source_find_returns_the_first_existing_layout(tmp_path, monkeypatch):
    path = put(tmp_path / "x.npz")
    assert SOURCE.find(tmp_path) == ("npz file", path) and SOURCE.download(tmp_path) == path
    folder = put_folder(tmp_path / "original")
    assert SOURCE.find(tmp_path) == ("folder", folder) and SOURCE.download(tmp_path) == folder
    monkeypatch.setenv("LIGHTNING_FCL_DATA", str(tmp_path))
    assert SOURCE.find() == ("folder", folder)


def test_source_find_missing_files_raises_with_a_hint(tmp_path):
    message = f"Expected the X below `root`, but found no such files in {tmp_path}."
    end = "or set LIGHTNING_FCL_DATA to the folder that contains `original` or `x.npz`."
    by_hand = replace(SOURCE, manual_steps="Unpack {url} to {root}/x")
    for source, advice in (
        (SOURCE, f"Run `lightning-fcl data download x`, {end}"),
        (by_hand, f"Unpack https://x.invalid/x.zip to {tmp_path}/x, {end}"),
        (replace(by_hand, expected_files=""), f"Unpack https://x.invalid/x.zip to {tmp_path}/x."),
    ):
        for call in (source.find, source.download):
            with pytest.raises(FileNotFoundError, match=f"^{re.escape(f'{message} {advice}')}$"):
                call(tmp_path)


def test_source_remedy_names_the_command_only_with_a_digest():
    assert SOURCE.remedy == "Delete this copy and unpack the publishers' archive again."
    assert replace(SOURCE, digest="0" * 64).remedy == "Delete this copy and run `lightning-fcl data download x`."


def test_download_module_imports_no_large_packages():
    # Skip the package's own `__init__`, which imports more.
    code = (
        "import sys, types\n"
        "package = types.ModuleType('lightning_fcl')\n"
        f"package.__path__ = [{str(Path(lightning_fcl.__file__).parent)!r}]\n"
        "sys.modules['lightning_fcl'] = package\n"
        "import lightning_fcl.io.download\n"
        "print(sorted({'torch', 'lightning', 'numpy', 'pooch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
