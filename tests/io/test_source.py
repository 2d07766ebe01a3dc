"""Files are found by their layout, and fetched only where somebody publishes their digest."""

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


def test_a_folder_is_known_by_all_of_its_signs(tmp_path):
    put(tmp_path / "original" / "train.csv")
    assert FOLDER.find(tmp_path) is None
    put(tmp_path / "original" / "images")  # a file
    assert FOLDER.find(tmp_path) is None
    (tmp_path / "original" / "images").unlink()
    assert FOLDER.find(tmp_path) is None
    put(tmp_path / "original" / "images" / "1.png")
    assert FOLDER.find(tmp_path) == tmp_path / "original"
    (tmp_path / "original" / "train.csv").rename(tmp_path / "original" / "test.csv")
    assert FOLDER.find(tmp_path) == tmp_path / "original"


def test_the_first_place_counts(tmp_path):
    for place in (".", "original", "x/original"):
        assert FOLDER.find(tmp_path) != tmp_path / place
        put_folder(tmp_path / place)
        assert FOLDER.find(tmp_path) == tmp_path / place


def test_a_match_may_have_to_fit_more_strictly(tmp_path):
    people = Layout("people", (".",), markers=("*/*.jpg",), required_file=r"(.+)/\1_\d\.jpg")
    put(tmp_path / "Ann" / "Bob_1.jpg")
    put(tmp_path / "Ann" / "._Ann_1.jpg")
    assert people.find(tmp_path) is None
    put(tmp_path / "Ann" / "Ann_1.jpg")
    assert people.find(tmp_path) == tmp_path


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "x.npz").mkdir()
    assert NPZ.find(tmp_path) is None
    assert NPZ.find(put(tmp_path / "x" / "x.npz").parents[1]) == tmp_path / "x" / "x.npz"


def test_layouts_are_found_in_their_order(tmp_path, monkeypatch):
    path = put(tmp_path / "x.npz")
    assert SOURCE.find(tmp_path) == ("npz file", path) and SOURCE.download(tmp_path) == path
    folder = put_folder(tmp_path / "original")
    assert SOURCE.find(tmp_path) == ("folder", folder) and SOURCE.download(tmp_path) == folder
    monkeypatch.setenv("LIGHTNING_FCL_DATA", str(tmp_path))
    assert SOURCE.find() == ("folder", folder)


def test_what_is_missing_is_told_with_what_to_do(tmp_path):
    message = f"Expected the X below `root` but found nothing in {tmp_path}."
    end = "or point LIGHTNING_FCL_DATA at the folder that holds `original` or `x.npz`."
    by_hand = replace(SOURCE, manual_steps="Unpack {url} to {root}/x")
    for source, advice in (
        (SOURCE, f"Run `lightning-fcl data download x`, {end}"),
        (by_hand, f"Unpack https://x.invalid/x.zip to {tmp_path}/x, {end}"),
        (replace(by_hand, expected_files=""), f"Unpack https://x.invalid/x.zip to {tmp_path}/x."),
    ):
        for call in (source.find, source.download):
            with pytest.raises(FileNotFoundError, match=f"^{re.escape(f'{message} {advice}')}$"):
                call(tmp_path)


def test_the_remedy_names_the_command_only_where_it_downloads():
    assert SOURCE.remedy == "Delete this copy and unpack the publishers' archive again."
    assert replace(SOURCE, digest="0" * 64).remedy == "Delete this copy and run `lightning-fcl data download x`."


def test_the_hub_needs_the_standard_library_alone():
    # The package's own __init__ is left out: what it imports is not the hub's.
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
