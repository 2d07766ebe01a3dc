"""Tests of uint8 images that are normalized in each batch, compared with floats normalized beforehand."""

import copy

import numpy as np
import pytest
import torch
from raising import raises
from torch import nn

from lightning_fcl import Classifier, FederatedStream
from lightning_fcl.callbacks import EWC, GEM, ContinualMetrics, DERpp, FedProx, ICaRL, Replay
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.client_store import ClientStore, PixelEncoding

MEAN, STD = (0.49, 0.48, 0.44), (0.2, 0.25, 0.26)


def images(samples=120, classes=4, seed=0):
    rng = np.random.default_rng(seed)
    y = np.arange(samples) % classes
    x = rng.integers(0, 256, size=(samples, 3, 4, 4)) * 0.5 + 120 * np.eye(classes, 4)[y][:, None, :, None]
    return x.clip(0, 255).astype(np.uint8), y


def make(stored, **kwargs):
    x, y = images()
    words = {"batch_size": 8, "seed": 0, "split": Split(test=0.2, validation=0.2), **kwargs}
    words = {"scenario": ClassIncremental(2, rounds_per_experience=2), "partition": IID(3), **words}
    if stored:
        return FederatedStream.from_arrays(x, y, mean=MEAN, std=STD, **words)
    mean, std = (np.array(values)[:, None, None] for values in (MEAN, STD))
    return FederatedStream.from_arrays(((x / 255 - mean) / std).astype(np.float32), y, **words)


class Network(nn.Module):
    features = 8

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(8, 4)

    def embed(self, x):
        assert x.dtype == torch.float32
        return self.body(x)

    def forward(self, x):
        return self.head(self.embed(x))


def task():
    torch.manual_seed(0)
    return Classifier(Network(), 4, lambda params: torch.optim.SGD(params, lr=0.05))


METHODS = {
    "none": [],
    "replay": [Replay(9, "class-balanced", "round"), FedProx(0.1)],
    "DER++": [DERpp(9, batch_size=4)],
    "iCaRL": [ICaRL(9)],
    "importance": [EWC(1.0)],
    "GEM": [GEM(9)],
}


@pytest.mark.seconds
@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
@pytest.mark.parametrize("methods", METHODS)
def test_uint8_images_train_like_floats(fit, methods, max_vectorized_clients):
    states, records, evaluated = [], [], []
    size = 1 if methods == "GEM" else max_vectorized_clients
    for stored in (True, False):
        module, metrics = task(), ContinualMetrics(evaluate_on_train=True)
        words = {"max_vectorized_clients": size, "local_epochs": 2, "seed": 0}
        trainer = fit(module, make(stored), [*copy.deepcopy(METHODS[methods]), metrics], **words)
        states.append(dict(module.state_dict()))
        records.append((metrics.record["training"], [entry["correct"] for entry in metrics.record["rounds"]]))
        evaluated.append(trainer.test(module, datamodule=trainer.datamodule, verbose=False)[0]["test/loss"])
    torch.testing.assert_close(*states, rtol=0, atol=2e-6)
    assert records[0] == records[1]
    assert evaluated[0] == pytest.approx(evaluated[1], abs=1e-5)


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_uint8_images_are_stored_as_uint8_in_client_state(fit, store):
    stream, replay = make(stored=True), Replay(9, "class-balanced", "round")
    trainer = fit(task(), stream, [replay], client_store=store)
    assert stream.samples.x.dtype == torch.uint8
    kept = trainer.strategy.server.client_store
    for client in stream.plan.clients:
        packed, memory = (
            kept._read(client)["Replay"],
            trainer.strategy.server.client_store.get_section(client, "Replay"),
        )
        images_of = [value for value in packed.values() if value.shape[1:] == (3, 4, 4)]
        assert images_of and all(value.dtype == torch.uint8 for value in images_of)
        # The samples that a method gets are bitwise identical to samples of the client.
        own = np.concatenate([current[client] for current in stream.plan.train if client in current])
        rows = {row.numpy().tobytes() for row in stream.get_samples(own)[0]}
        remembered = [value for value in memory.values() if value.shape[1:] == (3, 4, 4)]
        assert all(row.numpy().tobytes() in rows for value in remembered for row in value)


def test_uint8_images_resume_from_checkpoint(fit, tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    whole, parts = task(), task()
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    fit(whole, make(True), [Replay(9), saver], trainer_args={"enable_checkpointing": True})
    trainer = fit(parts, make(True), [Replay(9)], ckpt_path=tmp_path / "epoch=1.ckpt")
    assert all(torch.equal(value, parts.state_dict()[name]) for name, value in whole.state_dict().items())
    packed = trainer.strategy.server.client_store._read("0")["Replay"]
    assert any(value.dtype == torch.uint8 for value in packed.values())


def test_client_store_keeps_tensors_that_are_not_images():
    pixels = PixelEncoding(torch.full((3, 1, 1), 100.0), torch.full((3, 1, 1), 50.0), (3, 4, 4))
    store = ClientStore()
    stored = torch.randint(256, (5, 3, 4, 4), dtype=torch.uint8)
    memory = {
        "x": (stored - pixels.mean) / pixels.std,
        "noise": torch.randn(5, 3, 4, 4),
        "nan": torch.full((1, 3, 4, 4), torch.nan),
        "y": torch.arange(5),
        "none": torch.zeros(0, 3, 4, 4),
        "count": torch.tensor(3),
    }
    store["a"] = {"Replay": memory}
    store.store_as_uint8((pixels.mean, pixels.std, pixels.shape))
    packed, again = store._read("a")["Replay"], store["a"]["Replay"]
    assert {name for name, value in packed.items() if value.dtype == torch.uint8} == {"x|uint8"}
    assert list(again) == list(memory)
    assert all(torch.equal(value.nan_to_num(7), again[name].nan_to_num(7)) for name, value in memory.items())
    store.store_as_uint8(None)
    assert torch.equal(store._read("a")["Replay"]["x"], memory["x"])


PIXELS, LABELS = images()


@pytest.mark.parametrize(
    ("x", "words", "argument"),
    [
        (PIXELS, {"mean": 127.0, "std": 60.0}, "mean"),
        (PIXELS, {"mean": 0.5, "std": 0.0}, "std"),
        (PIXELS, {"mean": 0.5}, "std"),
        (PIXELS, {"mean": [0.5, 0.5], "std": 0.2}, "mean"),
        (PIXELS[:, :, :, :2].transpose(0, 2, 3, 1), {}, "mean"),
        (PIXELS.astype(np.float32), {}, "x"),
    ],
)
def test_mean_and_std_invalid_for_images_raise(x, words, argument):
    with raises(InvalidValueError, argument):
        FederatedStream.from_arrays(x, LABELS, **(words or {"mean": MEAN, "std": STD}))
