"""Names that files and messages bring, at every door: they lead into their folder, or nowhere."""

import runpy
from pathlib import Path

import pytest

from lightning_fcl.evaluation.inside import inside

EVIL = runpy.run_path(str(Path(__file__).parent / "reliability" / "names.py"))["EVIL"]
REFUSED = "Expected a plain name of something inside .*Rename it, or do not use what names it"


@pytest.mark.parametrize("name", EVIL, ids=lambda name: ascii(name)[:40])
def test_no_evil_name_is_joined(tmp_path, name):
    with pytest.raises(ValueError, match=REFUSED):
        inside(tmp_path, name)
    with pytest.raises(ValueError, match=REFUSED):
        inside(tmp_path, "x", name)


@pytest.mark.parametrize(
    "name", ["a", "0", "a.png", ".part", "x/y z", "Zürich", "学校/1", "a%2F..b", "val_0.JPEG", "é" * 120]
)
def test_a_plain_name_is_joined_as_it_is(tmp_path, name):
    assert inside(tmp_path, name) == tmp_path / name
    assert inside(tmp_path, "x", name) == tmp_path / "x" / name


def test_no_name_is_none_of_the_folders():
    with pytest.raises(ValueError, match=REFUSED):
        inside(Path("here"))


def test_links_lead_nowhere_else(tmp_path):
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "victim").write_text("whole")
    links = {"up": "..", "out": outside, "file": outside / "victim", "gone": "../gone", "self": "."}
    for name, target in links.items():
        (folder / name).symlink_to(target)
    (folder / "deep").mkdir()
    (folder / "deep" / "in").symlink_to("..")
    for name in (*links, "out/victim", "up/outside/victim", "self/file", "deep/in"):
        with pytest.raises(ValueError, match=REFUSED):
            inside(folder, name)
    assert inside(folder, "deep", "in", "deep").samefile(folder / "deep")
    (tmp_path / "link").symlink_to(folder)  # a folder that someone has named may be elsewhere itself
    assert inside(tmp_path / "link", "deep") == tmp_path / "link" / "deep"
