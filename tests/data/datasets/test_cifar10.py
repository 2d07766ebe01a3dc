"""Tests of the CIFAR-10 loader: its three layouts contain the same images, and damaged files raise errors."""

import io

import numpy as np
import pytest
from PIL import Image

from lightning_fcl.data.datasets import images
from lightning_fcl.data.datasets.cifar import CIFAR10_MD5, load_cifar10
from lightning_fcl.data.datasets.readers import SOURCES

REMEDY = "Delete this copy and run `lightning-fcl data download cifar10`."
BATCHES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("LIGHTNING_FCL_CACHE", str(folder))
    return folder


def jpeg(pixels):
    Image.fromarray(pixels).save(buffer := io.BytesIO(), "JPEG", quality=90)
    return buffer.getvalue()


def png(pixels):
    Image.fromarray(pixels).save(buffer := io.BytesIO(), "PNG")
    return buffer.getvalue()


@pytest.fixture
def jpegs(cifar10):
    """Return the images of the fixture as JPEG files, and replace the fixture's pixels with the decoded pixels."""
    files = []
    for batch in BATCHES:
        for row in cifar10.contents[batch]["data"]:
            files.append(jpeg(row.reshape(3, 32, 32).transpose(1, 2, 0)))
            row[:] = np.asarray(Image.open(io.BytesIO(files[-1]))).transpose(2, 0, 1).ravel()
    return files


def labels(contents):
    return [label for batch in BATCHES for label in contents[batch]["labels"]]


def arrays(cifar10, jpegs, **changes):
    """Return the arrays of the npz file, in the order of the batches."""
    return {
        "jpeg": np.frombuffer(b"".join(jpegs), np.uint8),
        "offsets": np.cumsum([0, *map(len, jpegs)]),
        "y": np.array(labels(cifar10.contents), np.uint8),
        "train": np.arange(60) < 50,
        "names": np.array(CLASSES),
    } | changes


def folders(contents, encode=png, suffix=".png"):
    """Return the files of the folders of images. The names of a class have the order of the batches."""
    files, y = {}, labels(contents)
    rows = np.concatenate([contents[batch]["data"] for batch in BATCHES])
    for number, (row, label) in enumerate(zip(rows, y, strict=True)):
        part = "train" if number < 50 else "test"
        files[f"{part}/{CLASSES[label]}/{number:04d}{suffix}"] = encode(row.reshape(3, 32, 32).transpose(1, 2, 0))
    return files


@pytest.mark.parametrize("place", ["cifar10/cifar-10-batches-py", "cifar-10-batches-py", "cifar10", "."])
def test_load_cifar10_original_folder_reads_pixels_and_labels(tmp_path, cifar10, place, put):
    folder = put(tmp_path / place, cifar10.files(cifar10.contents))
    assert SOURCES["cifar10"].find(tmp_path) == ("pickles", folder)
    data = load_cifar10(tmp_path, normalize="none")
    rows = np.concatenate([cifar10.contents[batch]["data"] for batch in BATCHES])
    assert data.x.dtype == np.uint8 and data.x.shape == (60, 3, 32, 32)
    for channel in range(3):
        np.testing.assert_array_equal(data.x[:, channel, 5, 7], rows[:, 1024 * channel + 32 * 5 + 7])
    assert data.y.tolist() == labels(cifar10.contents) and data.classes == CLASSES
    assert data.official_test.tolist() == [False] * 50 + [True] * 10
    assert data.client_ids is None and data.group is None


def test_load_cifar10_equals_torchvision(tmp_path, cifar10, monkeypatch, put):
    datasets = pytest.importorskip("torchvision.datasets")
    put(tmp_path / "cifar-10-batches-py", cifar10.files(cifar10.contents))
    monkeypatch.setattr(datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *args: True)
    data = load_cifar10(tmp_path)
    for train in (True, False):
        theirs = datasets.CIFAR10(tmp_path, train=train)
        own = data.official_test != train
        np.testing.assert_array_equal(data.x[own].transpose(0, 2, 3, 1), theirs.data)
        assert data.y[own].tolist() == theirs.targets and data.classes == tuple(theirs.classes)


@pytest.mark.parametrize("size", [32, 20])
def test_load_cifar10_layouts_contain_same_images(tmp_path, cifar10, jpegs, put, size):
    npz_path = put(tmp_path / "npz" / "cifar10" / "images.npz", arrays(cifar10, jpegs))
    put(tmp_path / "folders" / "cifar10", folders(cifar10.contents) | {"train/cat/notes.txt": b"", "readme.md": b""})
    put(tmp_path / "pickles", cifar10.files(cifar10.contents))
    original = load_cifar10(tmp_path / "pickles", size=size)
    packed = load_cifar10(tmp_path / "npz", size=size)
    assert SOURCES["cifar10"].find(tmp_path / "npz") == ("npz file", npz_path)
    np.testing.assert_array_equal(packed.x, original.x)
    np.testing.assert_array_equal(packed.y, original.y)
    np.testing.assert_array_equal(packed.official_test, original.official_test)
    assert SOURCES["cifar10"].find(tmp_path / "folders") == ("folders of images", tmp_path / "folders" / "cifar10")
    sorted_data = load_cifar10(tmp_path / "folders", size=size)
    # Folders contain the images by class. Within a class, the names have the order of the batches.
    order = sorted(range(60), key=lambda n: (n >= 50, original.y[n], n))
    np.testing.assert_array_equal(sorted_data.x, original.x[order])
    np.testing.assert_array_equal(sorted_data.y, original.y[order])
    np.testing.assert_array_equal(sorted_data.official_test, original.official_test)
    assert original.classes == packed.classes == sorted_data.classes == CLASSES


def test_load_cifar10_jpeg_folders_are_read(tmp_path, cifar10, put):
    files = folders(cifar10.contents, jpeg, ".jpg")
    put(tmp_path / "CIFAR-10-images", files)
    data = load_cifar10(tmp_path)
    first = next(name for name in sorted(files) if name.startswith("train/airplane"))
    np.testing.assert_array_equal(data.x[0].transpose(1, 2, 0), np.asarray(Image.open(io.BytesIO(files[first]))))


def test_load_cifar10_npz_file_returns_training_images_first(tmp_path, cifar10, jpegs, put):
    train = np.arange(60) % 6 > 0
    put(tmp_path / "cifar10" / "images.npz", arrays(cifar10, jpegs, train=train))
    data = load_cifar10(tmp_path)
    order = [*np.flatnonzero(train), *np.flatnonzero(~train)]
    assert data.y.tolist() == [labels(cifar10.contents)[n] for n in order]
    assert data.official_test.tolist() == [False] * 50 + [True] * 10
    np.testing.assert_array_equal(data.x[-1].transpose(1, 2, 0), np.asarray(Image.open(io.BytesIO(jpegs[order[-1]]))))


def test_load_cifar10_caches_decoded_images(tmp_path, cifar10, jpegs, cache, put, monkeypatch):
    put(tmp_path / "cifar10" / "images.npz", arrays(cifar10, jpegs))
    first = load_cifar10(tmp_path)
    assert len([*cache.glob("images/*")]) == 1
    monkeypatch.setattr(images, "read_image", None)
    np.testing.assert_array_equal(load_cifar10(tmp_path).x, first.x)


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch", "batches.meta"])
@pytest.mark.parametrize("content", [b"", b"\x80\x02}.", None])
def test_load_cifar10_unpublished_or_missing_file_raises_with_path(tmp_path, cifar10, name, content, put, refused):
    path = put(tmp_path, cifar10.files(cifar10.contents)) / name
    path.unlink() if content is None else path.write_bytes(content)
    said = refused(load_cifar10, tmp_path, error=FileNotFoundError if content is None else ValueError)
    missing = f"Expected the file {path} but it is missing. {REMEDY}"
    damaged = f"Expected {path} to be the published file but got: a file with MD5 "
    assert said.startswith(missing if content is None else damaged) and REMEDY in said


def test_load_cifar10_wrong_label_or_class_raises(tmp_path, cifar10, put, refused):
    cifar10.contents["data_batch_2"]["labels"][4] = 10
    put(tmp_path, cifar10.files(cifar10.contents))
    assert "to be between 0 and 9, but got 10 in sample 14. " + REMEDY in refused(load_cifar10, tmp_path)
    cifar10.contents["data_batch_2"]["labels"][4] = 9
    cifar10.contents["batches.meta"]["label_names"][0] = "plane"
    put(tmp_path, cifar10.files(cifar10.contents))
    said = refused(load_cifar10, tmp_path)
    assert f"Expected {tmp_path / 'batches.meta'} to name the ten classes of CIFAR-10 but got: ['plane'" in said


def test_load_cifar10_invalid_npz_file_raises(tmp_path, cifar10, jpegs, put, refused):
    path = tmp_path / "cifar10" / "images.npz"
    offsets = arrays(cifar10, jpegs)["offsets"]
    swapped = offsets[[0, 2, 1, *range(3, 61)]]
    for wrong in (offsets[:-1], offsets + 1, swapped, offsets[:0]):
        put(path, arrays(cifar10, jpegs, offsets=wrong))
        said = refused(load_cifar10, tmp_path)
        assert f"Expected `offsets` of {path} to cut the {offsets[-1]} bytes of `jpeg` into 60 images, but" in said
        assert REMEDY in said
    wrong_label = np.where(np.arange(60) == 7, 12, labels(cifar10.contents))
    put(path, arrays(cifar10, jpegs, y=wrong_label))
    assert f"Expected `y` of {path} to be between 0 and 9, but got 12 in sample 7." in refused(load_cifar10, tmp_path)
    put(path, arrays(cifar10, jpegs, names=np.array(CLASSES[::-1])))
    assert f"Expected {path} to name the ten classes of CIFAR-10 but got: ['truck'" in refused(load_cifar10, tmp_path)
    broken = jpegs[3][: len(jpegs[3]) // 2]
    put(path, arrays(cifar10, [*jpegs[:3], broken, *jpegs[4:]]))
    assert f"Expected {path / '3.jpg'} to be a complete JPEG image but got: " in refused(load_cifar10, tmp_path)
    put(path, arrays(cifar10, jpegs, train=None))
    assert f"Expected {path} to contain an array 'train', but it does not." in refused(load_cifar10, tmp_path)


def test_load_cifar10_incomplete_or_damaged_folders_raise(tmp_path, cifar10, put, refused):
    files = folders(cifar10.contents)
    folder = put(tmp_path / "cifar10", files)
    horse = next(folder.glob("train/horse/*.png"))
    content = horse.read_bytes()
    horse.unlink()
    said = refused(load_cifar10, tmp_path)
    assert f"Expected {horse.parent} to contain 5 images, like the other classes, but got 4." in said
    horse.write_bytes(content[:-40])
    assert f"Expected {horse} to be a complete PNG image of 32 x 32 but got: " in refused(load_cifar10, tmp_path)
    horse.write_bytes(png(np.zeros((16, 16, 3), np.uint8)))
    assert "an image of 16 x 16" in refused(load_cifar10, tmp_path)


def test_cifar10_url_and_digests_equal_torchvision():
    published = pytest.importorskip("torchvision.datasets").CIFAR10
    assert published.url == SOURCES["cifar10"].url
    files = {
        **dict(published.train_list),
        **dict(published.test_list),
        published.meta["filename"]: published.meta["md5"],
    }
    assert files == CIFAR10_MD5


def test_download_cifar10_creates_loadable_folder(tmp_path, publish, cifar10):
    files = {f"cifar-10-batches-py/{name}": content for name, content in cifar10.files(cifar10.contents).items()}
    publish("cifar10", "small.tar.gz", files)
    assert SOURCES["cifar10"].download(tmp_path / "data") == tmp_path / "data" / "cifar10" / "cifar-10-batches-py"
    assert len(load_cifar10(tmp_path / "data").x) == 60


@pytest.mark.data
@pytest.mark.seconds
def test_load_cifar10_real_data_has_known_statistics(real):
    data = load_cifar10(real("cifar10"), normalize="channel")
    assert data.x.shape == (60000, 3, 32, 32) and data.official_test.tolist() == [False] * 50000 + [True] * 10000
    assert np.bincount(data.y[data.official_test]).tolist() == [1000] * 10
    # Statistics in common use for CIFAR-10. The npz file contains JPEG images, which differ slightly.
    np.testing.assert_allclose(data.mean.ravel() / 255, [0.4914, 0.4822, 0.4465], atol=1e-3)
    np.testing.assert_allclose(data.std.ravel() / 255, [0.2470, 0.2435, 0.2616], atol=3e-3)
