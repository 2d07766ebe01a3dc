"""Tests of training on features of a frozen backbone instead of images."""

import os
import threading
import time

import lightning.pytorch as L
import numpy as np
import onnxruntime
import pytest
import torch
from raising import raises
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from lightning_fcl import FederatedStream, RidgeClassifier
from lightning_fcl.cli.main import main
from lightning_fcl.data.adapters import to_samples
from lightning_fcl.data.feature_cache import compute_features
from lightning_fcl.data.image_keys import key_file
from lightning_fcl.data.partition import IID, Dirichlet
from lightning_fcl.data.samples import DatasetSpec, Samples
from lightning_fcl.data.scenarios import ClassIncremental, Stationary
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.models.backbone import FrozenBackbone

# Number of first images that are embedded to check that cached features are valid.
FIRST = 16


class Counted(FrozenBackbone):
    """A small backbone that counts the images that it embeds."""

    def __init__(self, seed=0, size=8, seconds=0.0):
        generator = torch.Generator().manual_seed(seed)
        convolution = nn.Conv2d(3, 6, 3, stride=2, bias=False)
        convolution.weight.data = torch.randn(convolution.weight.shape, generator=generator)
        super().__init__(nn.Sequential(convolution, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()), size)
        self.count, self.fails, self.seconds = 0, None, seconds

    def embed(self, x):
        self.count += len(x)
        time.sleep(self.seconds)
        if self.fails is not None and self.count > self.fails:
            raise RuntimeError("cut off")
        return super().embed(x)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_FCL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "features"


@pytest.fixture
def images():
    """Return 100 uint8 images, and their classes."""
    rng = np.random.default_rng(0)
    return rng.integers(256, size=(100, 3, 8, 8), dtype=np.uint8), np.arange(100) % 4


def prepared(x, y, features, **kwargs):
    kwargs = {"scenario": ClassIncremental(2), "seed": 0} | kwargs
    stream = FederatedStream.from_arrays(x, y, backbone=features, **kwargs)
    stream.setup("fit")
    return stream


def test_features_of_stored_pixels_keep_targets_and_plan(images):
    x, y = images
    # The backbone normalizes images itself, so these values have no effect.
    scale = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.2)}
    stream = prepared(x, y, backbone := Counted(), **scale)
    plain = prepared(x, y, None, **scale)
    rows = np.array([5, 99, 0])
    features, labels = stream.get_samples(rows)
    torch.testing.assert_close(features, backbone.embed(torch.from_numpy(x[rows]) / 255))
    assert labels.tolist() == plain.get_samples(rows)[1].tolist() and stream.classes == plain.classes
    for client, own in plain.plan.train[1].items():
        assert np.array_equal(stream.plan.train[1][client], own)
    tested = torch.cat([batch for batch, _ in stream.test_dataloader()])
    assert torch.equal(tested, stream.get_samples(stream.plan.test)[0])


def test_features_cached_once_for_all_scenarios_and_splits(images, cache):
    backbone = Counted()
    first = prepared(*images, backbone)
    assert backbone.count == FIRST + 100
    others = [
        {"scenario": ClassIncremental(4)},
        {"partition": Dirichlet(3, 0.5)},
        {"split": Split(test=0.5), "seed": 9},
    ]
    for other in others:
        assert torch.equal(prepared(*images, Counted(), **other).samples.x, first.samples.x)
    backbone.count = 0
    prepared(*images, backbone)
    assert backbone.count == FIRST and len(list(cache.iterdir())) == 1


def test_features_cached_separately_per_images_and_backbone(images, cache):
    x, y = images
    changed = x.copy()
    changed[99, 2, 7, 7] ^= 1
    cases = [(x, Counted()), (changed, Counted()), (x[::-1].copy(), Counted()), (x, Counted(1)), (x, Counted(size=7))]
    kept = [prepared(pixels, y, backbone).samples.x for pixels, backbone in cases]
    assert len(list(cache.iterdir())) == 5
    for (pixels, backbone), features in zip(cases, kept, strict=True):
        torch.testing.assert_close(features, backbone.embed(torch.from_numpy(pixels) / 255))


@pytest.mark.parametrize("damage", ["cut", "bit", "code"])
def test_features_cache_damaged_is_recomputed(images, cache, damage, monkeypatch):
    expected = prepared(*images, Counted()).samples.x.clone()
    (file,) = cache.iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= damage == "bit"
    file.write_bytes(content[: len(content) - (damage == "cut")])
    # The weights and layers are equal, but the code of the backbone has changed.
    if damage == "code":
        monkeypatch.setattr(Counted, "embed", lambda self, x: 2 * FrozenBackbone.embed(self, x))
        expected = 2 * expected
    assert torch.equal(prepared(*images, Counted()).samples.x, expected)


def test_features_changed_in_memory_leave_file_unchanged(images, cache):
    stream = prepared(*images, Counted())
    (file,) = cache.iterdir()
    before = file.read_bytes()
    stream.samples.x.zero_()
    assert file.read_bytes() == before


def test_features_interrupted_leave_no_file(images, cache):
    backbone = Counted()
    backbone.fails = 60
    with pytest.raises(RuntimeError, match="cut off"):
        prepared(*images, backbone)
    assert list(cache.iterdir()) == []
    backbone.fails = None
    assert len(prepared(*images, backbone).samples) == 100


def test_features_first_run_reads_images_once(images):
    """If the same backbone has cached features of other images, the images are read twice.

    The first read computes the cache key of the images. The second read embeds the images.
    """
    x, y = images
    backbone = Counted()
    for pixels, times in ((x, 1), (x, 1), (x[::-1], 2)):
        data = Augmented(pixels, y)
        samples, data.reads = to_samples(data), 0
        compute_features(samples, backbone)
        assert data.reads == times * len(x)


def test_features_concurrent_runs_embed_once(images):
    samples = FederatedStream.from_arrays(*images).data
    backbones = [Counted(seconds=0.01) for _ in range(3)]
    threads = [threading.Thread(target=compute_features, args=(samples, backbone)) for backbone in backbones]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(backbone.count for backbone in backbones) == [FIRST, FIRST, FIRST + 100]


@pytest.fixture
def photographs(tmp_path, monkeypatch):
    """Return a function that writes a TinyImageNet file with 40 images. Its modification time is 2020."""
    monkeypatch.setenv("LIGHTNING_FCL_DATA", str(tmp_path))
    monkeypatch.setattr("lightning_fcl.data.image_keys.SETTLED_NANOSECONDS", 0)
    (tmp_path / "tinyimagenet32").mkdir()

    def write(seed):
        rng, path = np.random.default_rng(seed), tmp_path / "tinyimagenet32" / "100classes.npz"
        labels = {"y_train": np.arange(30) % 2, "y_val": np.arange(10) % 2}
        x = {f"X_{n[2:]}": rng.integers(256, size=(len(y), 32, 32, 3), dtype=np.uint8) for n, y in labels.items()}
        np.savez(path, wnids=["n1", "n2"], names=["cat", "dog"], **labels, **x)
        os.utime(path, (1577880000, 1577880000))

    write(0)
    return write


def public_features(data="tinyimagenet"):
    """Return the features of a public dataset, and the number of images that were read."""
    reads, original = [], Samples.get_stored
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Samples, "get_stored", lambda self, rows, *args: reads.append(len(rows)) or original(self, rows))
        stream = FederatedStream(data, ClassIncremental(2), backbone=Counted())
        stream.setup("fit")
    return stream.samples.x, sum(reads)


def test_features_of_unchanged_files_read_first_images_only(photographs):
    first, reads = public_features()
    assert reads == 40
    again, reads = public_features()
    assert reads == FIRST and torch.equal(again, first)


@pytest.mark.parametrize("change", ["file", "option", "damaged key"])
def test_features_of_changed_files_read_all_images(photographs, change, tmp_path):
    """A changed file is noticed although its size and its modification time are equal."""
    data = "tinyimagenet"
    first, _ = public_features()
    (key,) = (tmp_path / "cache" / "image-keys").iterdir()
    if change == "file":
        photographs(1)
    elif change == "option":
        data = DatasetSpec("tinyimagenet", options={"size": 16})
    else:
        key.write_text("damaged")
    changed, reads = public_features(data)
    assert reads == (40 if change == "damaged key" else 80)
    raw = to_samples(data).x
    torch.testing.assert_close(changed, Counted().embed(raw / 255))
    assert torch.equal(changed, first) == (change == "damaged key")


def test_key_file_of_recently_changed_file_is_none(photographs, monkeypatch):
    monkeypatch.setattr("lightning_fcl.data.image_keys.SETTLED_NANOSECONDS", 10**12)
    assert key_file("tinyimagenet") is None
    assert key_file("no such dataset") is None
    first, reads = public_features()
    again, reads = public_features()
    assert reads == 40 and torch.equal(again, first)


class Augmented(Dataset):
    """Images with noise that is drawn in each read."""

    def __init__(self, images, classes):
        self.images, self.classes, self.reads = images, classes, 0

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        self.reads += 1
        image = torch.from_numpy(self.images[index]) / 255
        return (image + 0.01 * torch.randn(image.shape)).clamp(0, 1), int(self.classes[index])


def test_features_of_augmented_images_are_drawn_once(images):
    x, y = images
    clients = {name: Augmented(x[part::2], y[part::2]) for part, name in enumerate("ab")}
    streams = []
    for backbone in (Counted(), Counted()):
        torch.manual_seed(backbone.count)
        streams.append(FederatedStream(clients, ClassIncremental(2), backbone=backbone, seed=len(streams)))
        streams[-1].setup("fit")
        assert backbone.count == (FIRST + 100 if len(streams) == 1 else FIRST)
    assert torch.equal(streams[0].samples.x, streams[1].samples.x)
    assert streams[0].plan.clients == ("a", "b") and not streams[0].samples.is_random


class Photographs(L.LightningDataModule):
    """A data module whose `collate_fn` makes batches of images and labels."""

    def __init__(self, images, classes):
        super().__init__()
        self.parts = [Augmented(images[:50], classes[:50]), Augmented(images[50:], classes[50:])]

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.parts[0], 10, shuffle=True, collate_fn=self.collate, num_workers=1)

    def test_dataloader(self):
        return torch.utils.data.DataLoader(self.parts[1], 10, collate_fn=self.collate)

    def collate(self, items):
        return torch.stack([image for image, _ in items]), torch.tensor([label for _, label in items])


def test_features_of_data_module_use_its_loaders(images):
    stream = FederatedStream(Photographs(*images), ClassIncremental(2), backbone=Counted(), num_workers=0)
    stream.setup("fit")
    assert stream.batch_size == 10 and len(stream.plan.test) == 50
    assert [tuple(x.shape) for x, _ in stream.test_dataloader()] == [(10, 6)] * 5


def test_features_with_transfer_hook_raise(images):
    class Normalises(Photographs):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [(batch[0] - 0.5) / 0.2, batch[1]]

    stream = FederatedStream(Normalises(*images), ClassIncremental(2), backbone=Counted())
    with raises(InvalidValueError, "datamodule"):
        stream.setup("fit")


@pytest.mark.parametrize("clients", [1, 5])
def test_ridge_on_features_equals_ridge_on_images(clients, fit):
    """The readout is equal up to rounding for cached features and for features computed from each batch of images."""
    solved = []
    for features in (None, Counted()):
        torch.manual_seed(0)
        stream = FederatedStream("digits", ClassIncremental(2), IID(clients), seed=0, backbone=features)
        fit(task := RidgeClassifier(Counted(), 10, beta=0.1), stream)
        solved.append(task.readout)
    assert solved[0].n == solved[1].n
    torch.testing.assert_close(solved[0].B, solved[1].B, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(solved[0].weight, solved[1].weight, rtol=1e-2, atol=1e-3)


def test_features_without_images_or_embed_raise(images):
    x, y = images
    with raises(InvalidValueError, "backbone"):
        prepared(x, y, nn.Linear(2, 2))
    without = FederatedStream(
        TensorDataset(torch.rand(9, 3, 8, 8)), Stationary(1), IID(1), classes=(), backbone=Counted()
    )
    with raises(InvalidValueError, "backbone"):
        without.setup("fit")
    with raises(InvalidValueError, "x"):
        prepared((x / 255 - 0.5).astype(np.float32), y, Counted())


@pytest.mark.data
@pytest.mark.seconds
@pytest.mark.parametrize(
    ("data", "samples"),
    [
        (DatasetSpec("lfw", options={"normalize": "none"}), 2053),
        (DatasetSpec("orl", options={"normalize": "none", "size": None}), 400),
        ("tinyimagenet", 17000),
        ("digits", 1797),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_features_of_public_datasets(data, samples, data_folder):
    stream, backbone = FederatedStream(data, ClassIncremental(1), backbone=Counted()), Counted()
    stream.setup("fit")
    assert stream.samples.x.shape == (samples, 6)
    raw = to_samples(data)
    x = raw.x[-3:] / 255 if raw.x.dtype == torch.uint8 else raw.x[-3:]
    torch.testing.assert_close(stream.samples.x[-3:], backbone.embed(x), rtol=1e-3, atol=1e-4)


def write_recipe(folder):
    """Write a recipe that trains on features of digits, and return its path.

    The digits are scaled to 32 x 32 pixels.
    """
    backbone = "{class_path: lightning_fcl.models.frozen_backbone, init_args: {size: 32}}"
    (folder / "recipe.yaml").write_text(
        f"trainer: {{accelerator: cpu, strategy: federated}}\n"
        f"model: {{class_path: RidgeClassifier, init_args: {{num_classes: 10, model: {backbone}}}}}\n"
        f"data: {{data: digits, scenario: {{class_path: ClassIncremental, init_args: {{num_experiences: 2}}}}, "
        f"backbone: {backbone}}}\n"
    )
    return str(folder / "recipe.yaml")


@pytest.mark.seconds
def test_data_show_and_edge_report_compute_no_features(tmp_path, cache, capsys):
    recipe = write_recipe(tmp_path)
    main(["data", "show", recipe])
    main(["edge-report", recipe])
    assert "A sample has the shape 1 x 8 x 8." in capsys.readouterr().out
    assert not cache.exists()


@pytest.mark.slow
@pytest.mark.long
def test_recipe_with_backbone_fits_exports_and_clears_features(tmp_path, cache, capsys):
    """The exported file takes images as input, although the training used cached features."""
    main(["fit", write_recipe(tmp_path), "--out", str(tmp_path / "run")])
    (kept,) = cache.iterdir()
    size = 4 * 1797 * 1280 + 32
    assert kept.stat().st_size == size
    capsys.readouterr()
    main(["export", str(tmp_path / "run"), "--int8"])
    assert "% of 100 predictions equal to PyTorch" in capsys.readouterr().out
    plain, small = (tmp_path / "run" / "export" / f"classifier{kind}.onnx" for kind in ("", "-int8"))
    assert small.stat().st_size < 0.35 * plain.stat().st_size
    session = onnxruntime.InferenceSession(plain, providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape[1:] == [1, 8, 8]
    digits = to_samples("digits")
    predicted = session.run(None, {"input": digits.x[:300].numpy()})[0].argmax(axis=1)
    assert (predicted == digits.targets[:300]).mean() > 0.7
    main(["data", "clear-features"])
    assert capsys.readouterr().out == f"Deleted cached features: number of files 1, size {size:,} bytes.\n"
    main(["data", "clear-features"])
    assert list(cache.iterdir()) == [] and "number of files 0" in capsys.readouterr().out
