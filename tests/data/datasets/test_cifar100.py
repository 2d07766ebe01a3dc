"""Tests of the CIFAR-100 loader: it reads the original pickles, runs no code in pickles, and reports damaged files."""

import pickle

import numpy as np
import pytest
from PIL import Image

from lightning_fcl.data.datasets.cifar import CIFAR100_MD5, load_cifar100
from lightning_fcl.data.datasets.readers import SOURCES

REMEDY = "Delete this copy and run `lightning-fcl data download cifar100`."


def test_fixture_pickles_are_read_by_standard_pickle(cifar):
    for name, content in cifar.files(cifar.contents).items():
        if name != "file.txt~":
            read = pickle.loads(content, encoding="latin1")
            assert str(read) == str(cifar.contents[name]) and list(read) == list(cifar.contents[name])
            assert b"numpy._core" not in content


@pytest.mark.parametrize("place", ["cifar100/cifar-100-python", "cifar-100-python", "cifar100", "."])
def test_load_cifar100_original_folder_reads_pixels_and_labels(tmp_path, cifar, place, put):
    folder = cifar.put(tmp_path / place, cifar.contents)
    assert SOURCES["cifar100"].find(tmp_path) == ("pickles", folder)
    data = load_cifar100(tmp_path, normalize="none")
    rows = np.concatenate([cifar.contents[part]["data"] for part in ("train", "test")])
    assert data.x.dtype == np.uint8 and data.x.shape == (300, 3, 32, 32)
    # Each line of `rows` is an image: all red values from top to bottom, then all green values, then all blue values.
    for channel in range(3):
        np.testing.assert_array_equal(data.x[:, channel, 5, 7], rows[:, 1024 * channel + 32 * 5 + 7])
    np.testing.assert_allclose(data.samples().reshape(300, -1), rows / 255, rtol=1e-6)
    assert data.y.tolist() == cifar.contents["train"]["fine_labels"] + cifar.contents["test"]["fine_labels"]
    assert data.classes == tuple(cifar.contents["meta"]["fine_label_names"])
    assert data.official_test.tolist() == [False] * 200 + [True] * 100
    assert data.client_ids is None and data.group is None


def test_load_cifar100_equals_torchvision(tmp_path, cifar, monkeypatch, put):
    datasets = pytest.importorskip("torchvision.datasets")
    cifar.put(tmp_path / "cifar-100-python", cifar.contents)
    monkeypatch.setattr(datasets.CIFAR100, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *args: True)
    data = load_cifar100(tmp_path)
    for train in (True, False):
        theirs = datasets.CIFAR100(tmp_path, train=train)
        own = data.official_test != train
        np.testing.assert_array_equal(data.x[own].transpose(0, 2, 3, 1), theirs.data)
        assert data.y[own].tolist() == theirs.targets and data.classes == tuple(theirs.classes)


def test_load_cifar100_size_resizes_each_image(tmp_path, cifar, put):
    cifar.put(tmp_path, cifar.contents)
    one, small = load_cifar100(tmp_path), load_cifar100(tmp_path, size=20)
    assert small.x.shape == (300, 3, 20, 20)
    for i in (0, 299):
        image = Image.fromarray(one.x[i].transpose(1, 2, 0)).resize((20, 20), Image.Resampling.BICUBIC)
        np.testing.assert_array_equal(small.x[i].transpose(1, 2, 0), np.asarray(image))


@pytest.mark.parametrize("name", ["train", "test", "meta"])
@pytest.mark.parametrize("content", [b"", b"\x80\x02}.", None])
def test_load_cifar100_unpublished_file_raises_with_path(tmp_path, cifar, name, content, put, refused):
    path = cifar.put(tmp_path, cifar.contents) / name
    path.unlink() if content is None else path.write_bytes(content)
    said = refused(load_cifar100, tmp_path, error=FileNotFoundError if content is None else ValueError)
    missing = f"Expected the file {path} but it is missing. {REMEDY}"
    damaged = f"Expected {path} to be the published file but got: a file with MD5 "
    assert said.startswith(missing if content is None else damaged) and REMEDY in said


def test_cifar100_url_and_digests_equal_torchvision():
    published = pytest.importorskip("torchvision.datasets").CIFAR100
    assert published.url == SOURCES["cifar100"].url
    files = {
        **dict(published.train_list),
        **dict(published.test_list),
        published.meta["filename"]: published.meta["md5"],
    }
    assert files == CIFAR100_MD5


def test_download_cifar100_creates_loadable_folder(tmp_path, publish, cifar):
    files = {f"cifar-100-python/{name}": content for name, content in cifar.files(cifar.contents).items()}
    publish("cifar100", "small.tar.gz", files)
    assert SOURCES["cifar100"].download(tmp_path / "data") == tmp_path / "data" / "cifar100" / "cifar-100-python"
    assert len(load_cifar100(tmp_path / "data").x) == 300


@pytest.mark.data
def test_load_cifar100_real_data_has_known_statistics(real):
    data = load_cifar100(real("cifar100"), normalize="channel")
    assert data.x.shape == (60000, 3, 32, 32) and data.official_test.sum() == 10000
    assert np.bincount(data.y[data.official_test]).tolist() == [100] * 100
    # Statistics in common use for CIFAR-100.
    np.testing.assert_allclose(data.mean.ravel() / 255, [0.5071, 0.4865, 0.4409], atol=1e-3)
    np.testing.assert_allclose(data.std.ravel() / 255, [0.2673, 0.2564, 0.2762], atol=1e-3)
