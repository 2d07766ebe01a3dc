"""Fixtures of the dataset tests: a local server, and files of CIFAR-10 and CIFAR-100."""

import hashlib
import struct
from types import SimpleNamespace

import numpy as np
import pytest

from lightning_fcl.data.datasets import cifar as cifar_module
from lightning_fcl.data.datasets import load_dataset
from lightning_fcl.data.datasets.readers import SOURCES


@pytest.fixture
def publish(serve, monkeypatch):
    """Return a function that serves a file on this machine. A dataset then downloads this file."""

    def start(data_set, name, content):
        monkeypatch.setitem(SOURCES, data_set, serve(SOURCES[data_set], name, content)[0])

    return start


@pytest.fixture
def real(data_folder):
    """Return a function that returns the root folder of the real datasets.

    The test is skipped if the dataset is missing, or if ``wanted`` is given and another layout is found.
    """

    def folder(data_set, wanted=None):
        try:
            layout, place = SOURCES[data_set].find(data_folder)
        except FileNotFoundError as error:
            pytest.skip(str(error))
        if wanted not in (None, layout):
            pytest.skip(f"the expected numbers belong to {wanted}, but {place} is found first")
        return data_folder

    return folder


@pytest.fixture
def put():
    """Return a function that writes a file or a folder.

    The content is bytes, the arrays of an npz file (None leaves an array out), or the files of a folder.
    """

    def write(path, content):
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif path.suffix == ".npz":
            np.savez(path, **{name: value for name, value in content.items() if value is not None})
        else:
            for name, part in content.items():
                write(path / name, part)
        return path

    return write


@pytest.fixture
def refused():
    """Return a function that calls another function, which must raise an error, and returns the error message."""

    def message(call, *args, error=ValueError, **options):
        with pytest.raises(error) as caught:
            call(*args, **options)
        return str(caught.value)

    return message


@pytest.fixture
def damaged(tmp_path, put, refused):
    """Return a function that writes a damaged file, loads the dataset, and returns the error message.

    The message must contain the path of the file.
    """

    def message(data_set, name, content, **options):
        path = put(tmp_path / name, content)
        said = refused(load_dataset, data_set, tmp_path, **options)
        assert str(path) in said
        return said

    return message


def python2(value) -> bytes:
    """Pickle lists, dicts, integers and uint8 arrays like the C pickler of Python 2, with strings as bytes."""
    if isinstance(value, dict):
        return b"}(" + b"".join(python2(part) for item in value.items() for part in item) + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(map(python2, value)) + b"e"
    if isinstance(value, int):
        return b"K" + bytes([value]) if value < 256 else b"J" + struct.pack("<i", value)
    if isinstance(value, np.ndarray):
        assert value.dtype == np.uint8
        shape = b"(" + b"".join(map(python2, value.shape)) + b"t"
        empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        return empty + b"(K\x01" + shape + dtype + b"\x89" + python2(value.tobytes()) + b"tb"
    raw = value.encode("latin1") if isinstance(value, str) else value
    return (b"U" + bytes([len(raw)]) if len(raw) < 256 else b"T" + struct.pack("<i", len(raw))) + raw


# Superclasses in the order of their labels, and the fine labels of each, as in the published files.
SUPERCLASSES = {
    "aquatic_mammals": (4, 30, 55, 72, 95), "fish": (1, 32, 67, 73, 91), "flowers": (54, 62, 70, 82, 92),
    "food_containers": (9, 10, 16, 28, 61), "fruit_and_vegetables": (0, 51, 53, 57, 83),
    "household_electrical_devices": (22, 39, 40, 86, 87), "household_furniture": (5, 20, 25, 84, 94),
    "insects": (6, 7, 14, 18, 24), "large_carnivores": (3, 42, 43, 88, 97),
    "large_man-made_outdoor_things": (12, 17, 37, 68, 76), "large_natural_outdoor_scenes": (23, 33, 49, 60, 71),
    "large_omnivores_and_herbivores": (15, 19, 21, 31, 38), "medium_mammals": (34, 63, 64, 66, 75),
    "non-insect_invertebrates": (26, 45, 77, 79, 99), "people": (2, 11, 35, 46, 98), "reptiles": (27, 29, 44, 78, 93),
    "small_mammals": (36, 50, 65, 74, 80), "trees": (47, 52, 56, 59, 96), "vehicles_1": (8, 13, 48, 58, 90),
    "vehicles_2": (41, 69, 81, 85, 89),
}  # fmt: skip


def cifar_contents() -> dict[str, dict]:
    """Return the contents of the original pickles by name, with two training images and one test image per class."""
    rng = np.random.default_rng(0)
    coarse = {label: number for number, labels in enumerate(SUPERCLASSES.values()) for label in labels}
    contents = {}
    for part, copies in (("train", 2), ("test", 1)):
        fine = rng.permutation(np.repeat(np.arange(100), copies)).tolist()
        contents[part] = {
            "filenames": [f"image_s_{number:06d}.png" for number in range(len(fine))],
            "batch_label": f"{part}ing batch 1 of 1",
            "fine_labels": fine,
            "coarse_labels": [coarse[label] for label in fine],
            "data": rng.integers(256, size=(len(fine), 3072), dtype=np.uint8),
        }
    names = [f"class {label}" for label in range(100)]
    contents["meta"] = {"fine_label_names": names, "coarse_label_names": list(SUPERCLASSES)}
    return contents


def cifar10_contents() -> dict[str, dict]:
    """Return the contents of the original pickles by name: one image of each class in each of the six batches."""
    rng = np.random.default_rng(1)
    contents = {
        name: {
            "batch_label": name,
            "labels": rng.permutation(10).tolist(),
            "data": rng.integers(256, size=(10, 3072), dtype=np.uint8),
            "filenames": [f"image_s_{number:06d}.png" for number in range(10)],
        }
        for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
    }
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    contents["batches.meta"] = {"num_cases_per_batch": 10, "label_names": names, "num_vis": 3072}
    return contents


@pytest.fixture(name="pickled")
def write_pickles(monkeypatch):
    """Return a function that returns the published format of contents. Sets the digests to those of these contents."""

    def files(contents, digests) -> dict[str, bytes]:
        pickles = {name: b"\x80\x02" + python2(content) + b"." for name, content in contents.items()}
        for name, content in pickles.items():
            monkeypatch.setitem(digests, name, hashlib.md5(content).hexdigest())
        return pickles | {"file.txt~": b"left by an editor"}

    return files


@pytest.fixture
def cifar10(pickled):
    """Return contents of a small CIFAR-10, and a function that writes the published format."""

    def files(contents):
        return pickled(contents, cifar_module.CIFAR10_MD5)

    return SimpleNamespace(contents=cifar10_contents(), files=files)


@pytest.fixture
def cifar(pickled):
    """Return contents of a small CIFAR-100, the superclasses, and functions that write the published format."""

    def files(contents) -> dict[str, bytes]:
        return pickled(contents, cifar_module.CIFAR100_MD5)

    def put(folder, contents):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files(contents).items():
            (folder / name).write_bytes(content)
        return folder

    return SimpleNamespace(contents=cifar_contents(), superclasses=SUPERCLASSES, files=files, put=put)
