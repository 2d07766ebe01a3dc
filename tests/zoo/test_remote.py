"""Tests of downloads from a static web server on the loopback interface."""

import pytest
from raising import raises

from lightning_fcl import zoo
from lightning_fcl.errors import InvalidValueError, MissingFileError
from lightning_fcl.io.checksums import sha256
from lightning_fcl.zoo.model_entry import CARD, CHECK, CHECKSUMS_FILE, CONFIG, WEIGHTS
from lightning_fcl.zoo.registry import REGISTRY, copy_to_registry, package_folder

NAME = "mlp.digits.flwf2t_replay"


def label_of(name):
    return zoo.load(name).predict([[[8.0] * 8] * 8])[0].label


@pytest.fixture
def remote(small_zoo, serve_folder, monkeypatch):
    """Serve the zoo, and set LIGHTNING_FCL_ZOO to its URL and its registry's SHA-256. Return the requested paths."""
    url, asked = serve_folder(small_zoo)
    monkeypatch.setenv("LIGHTNING_FCL_ZOO", f"{url}#sha256={sha256(small_zoo / REGISTRY)}")
    return asked


def test_load_from_url_downloads_once(remote, monkeypatch):
    found = label_of(NAME)
    assert sorted(remote) == sorted(
        [f"/{REGISTRY}", *(f"/{NAME}/{file}" for file in (CHECKSUMS_FILE, CONFIG, WEIGHTS, CHECK, CARD))]
    )
    remote.clear()
    monkeypatch.setenv("LIGHTNING_FCL_OFFLINE", "1")
    assert label_of(NAME) == found and remote == []


@pytest.mark.parametrize("name", [CHECKSUMS_FILE, WEIGHTS])
def test_load_from_url_changed_file_raises(small_zoo, remote, name):
    file = small_zoo / NAME / name
    data = bytearray(file.read_bytes())
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with raises(InvalidValueError, "sha256"):
        zoo.load(NAME)
    file.write_bytes(data)
    assert label_of(NAME)


@pytest.mark.seconds
def test_load_from_url_changed_registry_raises(small_zoo, remote):
    copy_to_registry(package_folder() / "esn.ucihar.incfed", small_zoo)
    with raises(InvalidValueError, "sha256"):
        zoo.load(NAME)


@pytest.mark.seconds
def test_load_from_url_damaged_cache_downloads_again(remote, tmp_path):
    found = label_of(NAME)
    (copy,) = (tmp_path / "cache").rglob(WEIGHTS)
    copy.write_bytes(copy.read_bytes()[:-1])
    assert label_of(NAME) == found


@pytest.mark.seconds
def test_load_from_url_without_digest_completes_package_registry(small_zoo, serve_folder, monkeypatch, tmp_path):
    inside = tmp_path / "package"
    inside.mkdir()
    copy_to_registry(package_folder() / NAME, inside)
    (inside / NAME / WEIGHTS).unlink()
    monkeypatch.setattr("lightning_fcl.zoo.registry.package_folder", lambda: inside)
    monkeypatch.delenv("LIGHTNING_FCL_ZOO")
    with raises(MissingFileError, value="mlp.digits.flwf2t_replay"):
        zoo.load(NAME)
    monkeypatch.setenv("LIGHTNING_FCL_ZOO", serve_folder(small_zoo)[0])
    assert label_of(NAME)
