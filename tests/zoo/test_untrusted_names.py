"""Tests that malicious registries and entries raise an error, and access no files outside of their folders."""

import runpy
import shutil
from pathlib import Path

import pytest
from raising import raises

from lightning_fcl import zoo
from lightning_fcl.cli.main import main
from lightning_fcl.errors import FileAccessError, FileConflictError, InvalidValueError, MissingFileError
from lightning_fcl.io.checksums import sha256
from lightning_fcl.runs.paper_rows import recipes_folder
from lightning_fcl.runs.recipe import Recipe, Setting
from lightning_fcl.zoo import verifying as recipes
from lightning_fcl.zoo.model_entry import CARD, CHECKSUMS_FILE, CONFIG, WEIGHTS, write_entry_checksums
from lightning_fcl.zoo.registry import REGISTRY, copy_to_registry, get_entry, package_folder, register
from lightning_fcl.zoo.verifying import UnknownRecipeError

NAME = "mlp.digits.flwf2t_replay"
NAMES = runpy.run_path(str(Path(__file__).parents[1] / "untrusted_names.py"))
DOORS, evil = NAMES["DOORS"], NAMES["evil_zoo"]


def all_below(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def registry(small_zoo, tmp_path):
    """Return the registry file of the small zoo. Write files at paths to which malicious names lead."""
    for place in (tmp_path, small_zoo, small_zoo / NAME, tmp_path / "a"):
        place.mkdir(exist_ok=True)
        for name in ("x", "y", "victim"):
            (place / name).write_text("whole")
    return small_zoo / REGISTRY


@pytest.fixture
def alone(monkeypatch, registry, tmp_path):
    """Hide the zoo of the package, so that only the registry of the test is used."""
    monkeypatch.setattr("lightning_fcl.zoo.registry.package_folder", lambda: tmp_path / "none")


@pytest.mark.seconds
@pytest.mark.parametrize("door", DOORS)
def test_load_malicious_registry_accesses_no_other_files(alone, registry, tmp_path, door):
    before = all_below(tmp_path)
    for value in (*DOORS[door][2], f"{tmp_path}/victim"):
        evil(registry.parent, door, value)
        with pytest.raises((ValueError, FileNotFoundError), match=r"(?s)^(In .*: )?Expected .*\.$") as refused:
            zoo.load(NAME)
        assert len(str(refused.value)) < 1500
        for name in (CONFIG, CHECKSUMS_FILE):
            (registry.parent / NAME / name).write_bytes(before[registry.parent / NAME / name])
        registry.write_bytes(before[registry])
    assert all_below(tmp_path) == before and zoo.load(NAME)


@pytest.mark.parametrize("name", ["../../victim", "model.safetensors/../../../victim", "{outside}"])
@pytest.mark.parametrize(
    "door", ["another file", "one file more", "a file's digest", "the list's digest", "the folder"]
)
def test_load_malicious_remote_registry_accesses_no_other_files(
    alone, registry, tmp_path, serve_folder, monkeypatch, door, name
):
    evil(registry.parent, door, name.format(outside=tmp_path / "victim"))
    url, asked = serve_folder(registry.parent)
    monkeypatch.setenv("LIGHTNING_FCL_ZOO", f"{url}#sha256={sha256(registry)}")
    before = all_below(tmp_path)
    with pytest.raises(ValueError, match=r"^Expected .*\.$"):
        zoo.load(NAME)
    cache = tmp_path / "cache" / "zoo"
    assert {path.name for path in all_below(tmp_path).keys() - before.keys()} <= {REGISTRY, CHECKSUMS_FILE}
    assert before.items() <= all_below(tmp_path).items() and {*asked} <= {f"/{REGISTRY}", f"/{NAME}/{CHECKSUMS_FILE}"}
    assert all(path.is_relative_to(cache) for path in all_below(tmp_path).keys() - before.keys())


def test_load_changed_registry_does_not_replace_cached_files(registry, tmp_path, serve_folder, monkeypatch):
    url, _ = serve_folder(registry.parent)
    monkeypatch.setenv("LIGHTNING_FCL_ZOO", f"{url}#sha256={sha256(registry)}")
    zoo.load(NAME)
    whole = all_below(tmp_path / "cache")
    (registry.parent / NAME / WEIGHTS).write_bytes(b"another")
    write_entry_checksums(registry.parent / NAME)
    register(registry.parent / NAME)
    monkeypatch.setenv("LIGHTNING_FCL_ZOO", f"{url}#sha256={sha256(registry)}")
    with pytest.raises(ValueError, match="to contain tensors, but got"):
        zoo.load(NAME)
    assert whole.items() <= all_below(tmp_path / "cache").items()


def test_load_linked_folder_raises(registry, tmp_path, serve_folder, monkeypatch):
    own, elsewhere, cache = registry.parent / NAME, tmp_path / "elsewhere", tmp_path / "cache" / "zoo"
    # Links to files are valid, because the cache of the hub uses them.
    for file in own.iterdir():
        (own / file.name).rename(registry.parent / f"blob-{file.name}")
        file.symlink_to(f"../blob-{file.name}")
    assert zoo.load(NAME)
    (url, _), digest = serve_folder(registry.parent), get_entry(NAME).digest
    own.rename(elsewhere)
    own.symlink_to(elsewhere)
    before = all_below(elsewhere)
    with raises(InvalidValueError, "name"):
        zoo.load(NAME)
    with raises(InvalidValueError, "name"):
        copy_to_registry(package_folder() / NAME, registry.parent)
    cache.mkdir(parents=True)
    (cache / digest).symlink_to(elsewhere)
    monkeypatch.setenv("LIGHTNING_FCL_ZOO", f"{url}#sha256={sha256(registry)}")
    with raises(InvalidValueError, "name"):
        zoo.load(NAME)
    assert all_below(elsewhere) == before


def test_copy_to_registry_replaces_only_same_entry(registry, tmp_path):
    # Downloading an entry into its own folder changes nothing.
    main(["zoo", "download", str(registry.parent / NAME), "--to", str(registry.parent)])
    assert zoo.load(NAME)
    mine = tmp_path / "mine" / NAME
    mine.mkdir(parents=True)
    (mine / CARD).write_text("of mine")
    with raises(MissingFileError, value=mine / CONFIG):
        copy_to_registry(registry.parent / NAME, mine.parent)
    shutil.copy(package_folder() / "esn.ucihar.incfed" / CONFIG, mine)
    with raises(FileConflictError, value=mine):
        copy_to_registry(registry.parent / NAME, mine.parent)
    assert (mine / CARD).read_text() == "of mine" and {path.name for path in mine.parent.iterdir()} == {NAME}
    with raises(FileAccessError, value=tmp_path / "victim" / NAME):
        copy_to_registry(registry.parent / NAME, tmp_path / "victim")


@pytest.mark.parametrize(
    "told",
    [
        {"words": ["--trainer.callbacks", "os.system"]},
        {"words": ["--config", "../evil.yaml"]},
        {"words": 3},
        {"configs": ["../../evil.yaml"]},
        {"configs": ["/evil.yaml"]},
        {"configs": None},
        {"paper": ["flwf"], "row": {}},
        {"paper": "../evil", "row": "x"},
        {"seed": "0 --config evil.yaml"},
        {"seed": None},
        {"sha256": "0" * 64},
    ],
)
def test_recipe_parts_unknown_recipe_raises(told):
    own = get_entry(NAME).entry.recipe
    agrees = {}
    if "words" in told and told["words"] != 3:
        option, value = told["words"]
        layers = recipes_folder() / "quickstart.yaml", Setting(option.removeprefix("--"), value)
        agrees = recipes._recipe_mark(Recipe(layers))
        assert agrees["words"] == told["words"]
    with raises(UnknownRecipeError, "recipe"):
        recipes.recipe_parts({**own, **agrees, **told}, NAME)
