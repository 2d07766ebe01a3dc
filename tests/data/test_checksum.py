"""Tests of the checksum of a stream's data: content, location, times, order, and datasets whose files are unknown."""

import os
import shutil
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset
from torchvision import datasets
from torchvision.datasets import ImageFolder
from torchvision.transforms import ToTensor

from lightning_fcl.data.adapters import to_samples
from lightning_fcl.data.checksum import _ARRAYS, _FILES, data_checksum
from lightning_fcl.data.tables import Table


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_FCL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(5):
            pixels = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{number}.png")
    return tmp_path / "data"


def images(folder, kind=ImageFolder, **options):
    return kind(folder, transform=ToTensor(), **options)


def checksum(data, **options):
    return data_checksum(to_samples(data, **options))


def test_data_checksum_of_files_does_not_depend_on_place_times_and_order(folder, tmp_path):
    whole = checksum(images(folder))
    moved = shutil.copytree(folder, tmp_path / "elsewhere" / "deeper")
    for number, path in enumerate(sorted(moved.rglob("*.png"))):
        os.utime(path, (1000 + number, 1000 + number))
    shuffled = images(moved)
    shuffled.samples = shuffled.samples[::-1]
    shuffled.imgs, shuffled.targets = shuffled.samples, [target for _, target in shuffled.samples]
    assert checksum(images(moved)) == whole == checksum(shuffled)
    relative = os.path.relpath(folder)
    assert checksum(images(relative)) == whole


def test_data_checksum_of_files_follows_each_byte_of_used_files(folder):
    path = folder / "dog" / "3.png"
    content, seen = path.read_bytes(), {checksum(images(folder))}
    for position in range(0, len(content), 7):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        part = Subset(images(folder, loader=lambda path: Image.new("RGB", (4, 4))), range(10))
        seen.add(checksum(part))
    assert len(seen) == 1 + len(range(0, len(content), 7))


def test_data_checksum_of_subset_covers_only_its_files(folder):
    rows = [0, 2, 5, 9]
    first = checksum(Subset(images(folder), rows))
    (folder / "cat" / "1.png").unlink()
    assert checksum(Subset(images(folder), [0, 1, 4, 8])) == first
    assert checksum(Subset(images(folder), [0, 1, 4, 7])) != first


def test_data_checksum_follows_names_labels_owners_and_splits(folder):
    seen = [checksum(images(folder))]
    seen.append(checksum({"train": images(folder), "test": Subset(images(folder), [0, 5])}))
    seen.append(checksum({"a": images(folder), "b": Subset(images(folder), [0, 5])}))
    seen.append(checksum({"a": images(folder), "c": Subset(images(folder), [0, 5])}))
    seen.append(checksum(images(folder, target_transform=lambda target: 1 - target)))
    (folder / "cat" / "0.png").rename(folder / "cat" / "00.png")
    seen.append(checksum(images(folder)))
    assert len({*seen}) == len(seen) and None not in seen


def test_data_checksum_of_clients_does_not_depend_on_their_order(folder):
    first, second = Subset(images(folder), [0, 1, 5, 6]), Subset(images(folder), [2, 7])
    assert checksum({"a": first, "b": second}) == checksum({"b": second, "a": first})
    assert checksum({"a": first, "b": second}) != checksum({"a": second, "b": first})


def test_data_checksum_second_run_reads_no_file(folder, monkeypatch):
    monkeypatch.setattr("lightning_fcl.io.file_digests.SETTLED_NANOSECONDS", -(10**15))
    samples = to_samples(images(folder))
    whole = data_checksum(samples)

    def sha256(path):
        raise AssertionError(path)

    monkeypatch.setattr("lightning_fcl.io.file_digests.sha256", sha256)
    assert data_checksum(samples) == whole


class Reads(Dataset):
    def __init__(self, paths):
        self.paths = paths

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return ToTensor()(Image.open(self.paths[index])), index % 2


class Changed(ImageFolder):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 1, y


class Batched(ImageFolder):
    def __getitems__(self, rows):
        return [self[row] for row in rows]


class Renamed(ImageFolder):
    """An ImageFolder that does not override how items are read."""


def test_data_checksum_of_unknown_files_is_none(folder):
    paths = sorted(folder.rglob("*.png"))
    for data in (
        Reads(paths),
        images(folder, Changed),
        images(folder, Batched),
        datasets.FakeData(4, transform=ToTensor()),
    ):
        assert checksum(data) is None
    assert checksum(ConcatDataset([images(folder), Reads(paths)])) is None
    assert checksum(images(folder, Renamed)) == checksum(images(folder))


def test_data_checksum_of_missing_or_special_file_is_none(folder):
    samples = to_samples(images(folder))
    (folder / "cat" / "0.png").unlink()
    assert data_checksum(samples) is None
    if sys.platform != "win32":
        os.mkfifo(folder / "cat" / "0.png")
        assert data_checksum(samples) is None


def test_data_checksum_of_stored_datasets_follows_values_and_rows(tmp_path):
    x, y = torch.arange(24.0).view(12, 2), torch.arange(12) % 3
    changed = x.clone()
    changed[7, 1] += 1e-3
    path = tmp_path / "a.csv"
    path.write_text("a,b,label\n" + "".join(f"{row},{row},{row % 2}\n" for row in range(6)))
    digits = datasets.MNIST.__new__(datasets.MNIST)
    vars(digits).update(data=torch.zeros(6, 28, 28, dtype=torch.uint8), targets=torch.arange(6) % 2)
    vars(digits).update(transform=ToTensor(), target_transform=None, transforms=None)
    seen = [
        checksum(data)
        for data in (
            TensorDataset(x, y),
            TensorDataset(changed, y),
            Subset(TensorDataset(x, y), range(11)),
            Table(path, "label", ["a", "b"]),
            Table(path, "label", ["b"]),
            digits,
        )
    ]
    assert len({*seen}) == len(seen) and None not in seen
    assert checksum(TensorDataset(x.clone(), y.clone())) == seen[0]


def test_known_readers_define_getitem_in_torchvision():
    """A class that is renamed in torchvision, or no longer defines `__getitem__`, fails here."""
    for name in {*_FILES, *_ARRAYS} - {"TensorDataset", "Table"}:
        assert "__getitem__" in vars(getattr(datasets, name)), name
