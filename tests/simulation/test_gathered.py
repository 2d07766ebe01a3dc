"""Tests of the warning about attributes that training fills and that hooks write to the module's state."""

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import MeanMetric

from lightning_fcl import FederatedStream
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split

MESSAGE = "at the end of a round compute the module's state from `{}`, which clients fill in training"


def stream_of(rounds=2):
    """Return a stream of three clients with 16 samples each."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(48, 6)).astype(np.float32), np.arange(48) // 3 % 4
    scenario = ClassIncremental(1, rounds_per_experience=rounds)
    split = Split(test=0.0)
    return FederatedStream.from_arrays(x, y, np.arange(48) % 3, scenario=scenario, split=split, batch_size=8, seed=0)


class Gaussian(L.LightningModule):
    """A module that computes the mean of the embeddings of a round's samples, as anomalib's Padim does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 5).requires_grad_(False), nn.Linear(5, 4)
        self.register_buffer("mean", torch.zeros(5))
        self.prepare()

    def prepare(self):
        self.embeddings = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        features = self.body(x)
        loss = F.cross_entropy(self.head(features), y)
        self.keep(features.detach(), loss.detach())
        return loss

    def keep(self, features, loss):
        self.embeddings.append(features)

    def on_train_epoch_end(self):
        self.mean = torch.cat(self.embeddings).mean(0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


class Bank(Gaussian):
    """A module that grows a tensor in an object, and replaces a buffer by a larger buffer at the end of a round."""

    class Rows:
        rows = None

    def prepare(self):
        self.bank = self.Rows()
        self.register_buffer("memory", torch.zeros(0, 5))

    def keep(self, features, loss):
        self.bank.rows = features if self.bank.rows is None else torch.cat([self.bank.rows, features])

    def on_train_epoch_end(self):
        self.memory = self.bank.rows[:2]


class Losses(Gaussian):
    """A module that collects losses only for logging, and computes the module's state from other values."""

    def prepare(self):
        self.losses, self.measured, self.rounds = [], MeanMetric(), 0
        self.register_buffer("temperature", torch.ones(()))

    def keep(self, features, loss):
        self.losses.append(loss)
        self.measured.update(loss)

    def on_train_epoch_end(self):
        self.rounds += 1
        self.temperature.mul_(0.9)
        self.log("mean", torch.stack(self.losses).mean())
        self.losses.clear()


class Sums(Gaussian):
    """A module that follows the hint of the warning: training stores sums in buffers, which clients upload."""

    reductions = {"total": "sum", "number": "sum"}  # noqa: RUF012

    def prepare(self):
        self.register_buffer("total", torch.zeros(5))
        self.register_buffer("number", torch.zeros(()))

    def keep(self, features, loss):
        self.total += features.sum(0)
        self.number += len(features)

    def on_train_epoch_end(self):
        self.mean = self.total / self.number


@pytest.mark.may(
    "Values that steps gather and a hook writes to the state at the end of a round",
    "A warning names the attributes, and a deployment rejects the module. "
    "The server's model then depends on values that are not counted as uploads.",
)
@pytest.mark.parametrize(("kind", "name"), [(Gaussian, "embeddings"), (Bank, "bank.rows")])
def test_gathered_values_written_to_state_warn_once(fit, caplog, kind, name):
    task = kind()
    fit(task, stream_of(), max_vectorized_clients=1)
    assert caplog.text.count(MESSAGE.format(name)) == 1
    assert 'with the reduction "sum"' in caplog.text
    assert len(task.embeddings) == 12 if kind is Gaussian else task.memory.shape == (2, 5)


@pytest.mark.parametrize("kind", [Losses, Sums])
def test_gathered_values_not_written_to_state_do_not_warn(fit, caplog, kind):
    fit(kind(), stream_of(), max_vectorized_clients=1)
    assert "at the end of a round" not in caplog.text


def test_sums_in_buffers_equal_gathered_values(fit):
    gathered, summed, stream = Gaussian(), Sums(), stream_of()
    fit(gathered, stream_of(1), max_vectorized_clients=1, seed=0)
    trainer = fit(summed, stream, max_vectorized_clients=1, seed=0)
    expected = gathered.body(stream.get_samples(np.arange(48))[0]).mean(0)
    torch.testing.assert_close(gathered.mean, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(summed.mean, expected, rtol=1e-5, atol=1e-6)
    uploaded = sum(value.nbytes for name, value in summed.state_dict().items() if not name.startswith("body"))
    assert {*trainer.strategy.server.record.upload_bytes.values()} == {uploaded}
