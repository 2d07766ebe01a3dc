"""Tests of names from files and messages. A name leads to a path inside its folder, or raises an error."""

import hashlib
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from raising import raises

from lightning_fcl.data.datasets import photographs
from lightning_fcl.deployment.flower import _read_node_config
from lightning_fcl.deployment.node import client_folder
from lightning_fcl.deployment.node_data import split_file
from lightning_fcl.errors import DamagedFileError, InvalidValueError
from lightning_fcl.evaluation import paper_figures
from lightning_fcl.evaluation.paper_figures import write_figures
from lightning_fcl.evaluation.results import is_complete
from lightning_fcl.federation.client_store import ClientStore
from lightning_fcl.io.paths import safe_join

NAMES = runpy.run_path(str(Path(__file__).with_name("untrusted_names.py")))
EVIL, TEXTS = NAMES["EVIL"], NAMES["TEXTS"]
WHOLE = hashlib.sha256(b"whole").hexdigest()
REFUSED = "Expected the name of a file or folder inside .*Use a name of letters"


@pytest.mark.parametrize("name", EVIL, ids=lambda name: ascii(name)[:40])
def test_safe_join_unsafe_name_raises(tmp_path, name):
    with raises(InvalidValueError, "name"):
        safe_join(tmp_path, name)
    with raises(InvalidValueError, "name"):
        safe_join(tmp_path, "x", name)


@pytest.mark.parametrize(
    "name", ["a", "0", "a.png", ".part", "x/y z", "Zürich", "学校/1", "a%2F..b", "val_0.JPEG", "é" * 120]
)
def test_safe_join_plain_name_is_joined(tmp_path, name):
    assert safe_join(tmp_path, name) == tmp_path / name
    assert safe_join(tmp_path, "x", name) == tmp_path / "x" / name


def test_safe_join_without_name_raises():
    with raises(InvalidValueError, "name", value=""):
        safe_join(Path("here"))


def test_safe_join_link_out_of_folder_raises(tmp_path):
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
        with raises(InvalidValueError, "name"):
            safe_join(folder, name)
    assert safe_join(folder, "deep", "in", "deep").samefile(folder / "deep")
    (tmp_path / "link").symlink_to(folder)  # The folder itself may be a link.
    assert safe_join(tmp_path / "link", "deep") == tmp_path / "link" / "deep"


def all_below(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path):
    """A nested folder. Files exist at paths to which unsafe names lead."""
    folder = tmp_path / "own" / "folder"
    for place in (tmp_path, folder.parent, folder, folder / "a", tmp_path / "x"):
        place.mkdir(exist_ok=True)
        for name in ("x.png", "y", "x.npz", "x.safetensors"):
            (place / name).write_bytes(b"whole")
    return folder


def test_is_complete_rejects_unsafe_names_in_file_list(folder):
    (folder / "results.json").write_bytes(b"whole")

    def sealed(*names):
        lines = [f"{name} {WHOLE}\n" for name in ("results.json", *names)]
        (folder / "files.txt").write_text("".join(lines), encoding="utf-8", errors="surrogateescape")
        return is_complete(folder)

    assert sealed() and sealed("x.png", "a/x.png")
    for name in (*TEXTS, "../x.png", str(folder.parent / "x.png")):
        if not any("\ud800" <= sign <= "\udfff" for sign in name):
            assert not sealed(name)


def test_write_figures_unsafe_file_name_raises(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(paper_figures.FIGURE_KINDS, "volume_by_round", lambda *_: None)
    before = all_below(tmp_path)
    for name in (*EVIL, "../x.png", "a/../../x.png", str(tmp_path / "x.png")):
        figure = {"file": name, "kind": "volume_by_round", "panels": {"": {"A": "A"}}}
        with raises(InvalidValueError, "name"):
            write_figures(folder, [figure], {"A": [{}]})
    assert all_below(tmp_path) == before


def test_client_store_stays_in_folder_or_raises(folder, tmp_path):
    clients, before, store = folder / "clients", all_below(tmp_path), ClientStore("disk", folder / "clients")
    kept = {}
    for number, name in enumerate((*TEXTS, "../x", str(tmp_path / "x"))):
        try:
            store[name] = {"model": {"number": torch.tensor(number)}}
            kept[name] = number
        except ValueError as error:
            assert re.search(REFUSED, str(error)) or isinstance(error, UnicodeEncodeError)
    assert {*store} == {*kept} and all(store[name]["model"]["number"] == number for name, number in kept.items())
    after = all_below(tmp_path)
    assert before.items() <= after.items()
    assert {path.parent for path in after.keys() - before.keys()} == {clients} and len(after) - len(before) == len(kept)


def test_client_folder_stays_in_folder_or_raises(folder):
    found = []
    for name in (*TEXTS, str(folder)):
        for names in ((name, "client"), ("federation", name)):
            try:
                found.append(client_folder(folder, *names))
            except ValueError as error:
                assert re.search(REFUSED, str(error))
    assert len(found) == len({*found}) > 100
    assert all(path.parent.parent == folder == path.resolve().parent.parent for path in found)
    for names in (("..", "x"), ("x", ".."), (".", "."), ("", "x")):
        with raises(InvalidValueError, "name"):
            client_folder(folder, *names)


def test_split_file_stays_in_folder_or_raises(folder):
    found = []
    for name in TEXTS:
        context = SimpleNamespace(node_config={"client": name}, run_config={"data-folder": str(folder)})
        try:
            found.append(split_file(folder, name))
            assert _read_node_config(context)[1].where == str(found[-1]) or not name
        except ValueError:
            if name:
                with pytest.raises(ValueError):
                    _read_node_config(context)
    assert len(found) == len({*found}) > 100 and all(path.parent == folder for path in found)
    with raises(InvalidValueError, "client", value="Server"):
        split_file(folder, "Server")


def test_image_lists_with_unsafe_names_raise(folder, tmp_path):
    (folder / "images").mkdir()
    for name in TEXTS:
        if name and name == name.strip() and name.isprintable():
            (folder / "wnids.txt").write_text(name)
            with raises(InvalidValueError, "name"):
                photographs.load_tinyimagenet(folder)
            (folder / "train.csv").write_text(f"filename,label\n{name},n01532829\n")
            with raises(DamagedFileError, value=folder / "train.csv"):
                photographs.load_miniimagenet(folder)
    (folder / "images" / "a.jpg").symlink_to(tmp_path / "x.png")
    (folder / "train.csv").write_text("filename,label\na.jpg,n01532829\n")
    with raises(InvalidValueError, "name"):
        photographs.load_miniimagenet(folder)
