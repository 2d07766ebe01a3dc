"""A client begins as if it were alone: what another has left in the module or its optimizer does not reach it."""

import collections
import copy
import random

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.optim.lr_scheduler import StepLR

from lightning_fcl import FederatedStream
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split

OWNERS = np.array(["a", "b", "c"])[np.arange(96) % 3]


def stream_of(clients):
    """Four batches of eight samples for each of some clients, the same whoever else there is."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(96, 6)).astype(np.float32), np.arange(96) // 3 % 4
    chosen = np.isin(OWNERS, list(clients))
    words = {"scenario": ClassIncremental(1), "split": Split(test=0.0), "batch_size": 8, "seed": 0}
    return FederatedStream.from_arrays(x[chosen], y[chosen], OWNERS[chosen], **words)


class Uploads(Callback):
    """What each client sends in the first round."""

    def __init__(self):
        self.of = {}

    def on_client_end(self, trainer, pl_module, client_round):
        if client_round.round == 0:
            state = pl_module.state_dict().items()
            self.of[client_round.client] = {name: value.detach().clone() for name, value in state}


@pytest.fixture
def uploads(fit):
    """What each of some clients sends, from a module that is made for it."""

    def run(make, clients, **kwargs):
        torch.manual_seed(0)
        watch = Uploads()
        fit(make(), stream_of(clients), [watch], seed=0, **{"local_epochs": 2, "cohort_size": 1, **kwargs})
        return watch.of

    return run


class Base(L.LightningModule):
    """A network of two layers, whose subclasses add what a step keeps."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.prepare()

    def prepare(self):
        """Make what a step keeps."""

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        return self.loss(*batch)

    def loss(self, x, y):
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class AccumulatesByHand(Base):
    def prepare(self):
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.loss(*batch))
        if (batch_idx + 1) % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()


class SkipsBatches(Base):
    def training_step(self, batch, batch_idx):
        return None if batch_idx % 3 == 2 else self.loss(*batch)


class SchedulesByHand(Base):
    def prepare(self):
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(*batch))
        optimizer.step()
        self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        return [optimizer], [StepLR(optimizer, 1, gamma=0.8)]


class WarmsUp(Base):
    """Sets the optimizer's rate in its step."""

    def training_step(self, batch, batch_idx):
        for group in self.optimizers().param_groups:
            group["lr"] *= 1.2
        return self.loss(*batch)


class CountsInGroups(torch.optim.SGD):
    """Keeps numbers in its groups, as Adan and Prodigy do, and in an attribute."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.calls = 0
        for group in self.param_groups:
            group["estimate"] = torch.tensor(1.0)

    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["estimate"] *= 1.1
            group["lr"] = 0.1 * float(group["estimate"]) / group["step"] / self.calls
        return super().step(closure)


class KeepsInGroups(Base):
    def configure_optimizers(self):
        return CountsInGroups(self.parameters(), lr=0.1)


class Wrapper(torch.optim.Optimizer):
    """Steps another optimizer, which has a state of its own."""

    def __init__(self, params):
        super().__init__(params, {})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)


class Wraps(Base):
    def configure_optimizers(self):
        return Wrapper(self.parameters())


class MemoryBank(Base):
    """A buffer that is not kept, written in place and made anew."""

    def prepare(self):
        self.register_buffer("bank", torch.zeros(16, 8), persistent=False)
        self.register_buffer("mean", torch.zeros(8), persistent=False)

    def loss(self, x, y):
        hidden = self.model[:2](x)
        loss = (
            super().loss(x, y) + (hidden @ self.bank.T.clone()).square().mean() + (hidden - self.mean).square().mean()
        )
        self.bank.copy_(torch.cat([self.bank, hidden.detach()])[-16:])
        self.mean = 0.5 * self.mean + 0.5 * hidden.detach().mean(dim=0)
        return loss


class Attributes(Base):
    """Numbers, lists, arrays and others, nested, some made in the first step."""

    def prepare(self):
        self.average, self.losses, self.kinds = 0.0, [], {"seen": set(), "nested": [[1.0]]}
        self.recent, self.array = collections.deque(maxlen=3), np.zeros(2)
        self.plain = torch.zeros(2)
        self.model[1].scale = 1.0

    def loss(self, x, y):
        if not hasattr(self, "first"):
            self.first = float(x.mean())
        loss = super().loss(x, y)
        number = float(loss.detach())
        self.average = 0.5 * self.average + 0.5 * number
        self.losses.append(number)
        self.kinds["seen"].add(round(number, 3))
        self.kinds["nested"][0][0] += number
        self.recent.append(number)
        self.array += number
        self.plain += number
        self.model[1].scale *= 1.1
        kept = [self.average, *self.losses, len(self.kinds["seen"]), self.kinds["nested"][0][0], *self.recent]
        kept += [*self.array, *self.plain, self.model[1].scale, self.first]
        return loss * (1 + 0.01 * sum(kept))


class Holder:
    def __init__(self):
        self.values, self.count = [torch.zeros(())], 0


class Objects(Base):
    """Objects of a user's own, generators, a teacher that is no part of the module, with its optimizer."""

    def prepare(self):
        self.holder = Holder()
        self.drawn = torch.Generator().manual_seed(0), np.random.default_rng(0), random.Random(0)
        self.teacher = [copy.deepcopy(self.model)]
        self.teaching = torch.optim.SGD(self.teacher[0].parameters(), lr=0.1, momentum=0.9)

    def loss(self, x, y):
        torches, numpys, pythons = self.drawn
        F.cross_entropy(self.teacher[0](x), y).backward()
        self.teaching.step()
        self.teaching.zero_grad()
        loss = super().loss(x, y)
        self.holder.count += 1
        self.holder.values[0] += loss.detach()
        kept = self.holder.count + float(self.holder.values[0])
        kept += float(torch.rand((), generator=torches)) + numpys.random() + pythons.random()
        return loss * (1 + 0.01 * kept) + 0.1 * F.mse_loss(self(x), self.teacher[0](x).detach())


class Freezes(Base):
    """Freezes layers and puts them into evaluation as it goes."""

    def prepare(self):
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.model(self.drop(x))

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            self.drop.eval()
            self.model[0].requires_grad_(False)
        return self.loss(*batch)


class HoldsAdapters(Base):
    """Its state is a part of its parameters; the others, of which one learns, are made anew for each client."""

    def state_dict(self, *args, **kwargs):
        return {n: v for n, v in super().state_dict(*args, **kwargs).items() if "model.2" in n}


MODULES = [
    AccumulatesByHand,
    SkipsBatches,
    SchedulesByHand,
    WarmsUp,
    KeepsInGroups,
    Wraps,
    MemoryBank,
    Attributes,
    Objects,
    Freezes,
]


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("make", MODULES)
def test_a_client_sends_the_same_alone_and_after_others(uploads, make):
    alone, after, last = (uploads(make, clients)["b"] for clients in ("b", "ab", "abc"))
    assert same(alone, after) and same(alone, last)
    assert not same(alone, uploads(make, "b", local_epochs=1)["b"])
