"""Tests of the warning about reads that change the state of a dataset, if later samples can depend on this state."""

import functools
import logging
import random
from collections import Counter, deque

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from lightning_fcl import FederatedStrategy, FederatedStream
from lightning_fcl.data.scenarios import Stationary
from lightning_fcl.data.split import Split

ROUNDS, SIZE = 2, 8


class Items(Dataset):
    def __init__(self):
        self.x = torch.randn(SIZE, 5, generator=torch.Generator().manual_seed(0))
        self.targets = [index % 2 for index in range(SIZE)]
        self.begin()

    def begin(self):
        pass

    def changed(self, x, index):
        return x

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return self.changed(self.x[index], index), self.targets[index]


class CountedAttribute(Items):
    def begin(self):
        self.reads = 0

    def changed(self, x, index):
        self.reads += 1
        return x + self.reads


class Tick:
    __slots__ = ("reads",)

    def __init__(self):
        self.reads = 0

    def __call__(self, x):
        self.reads += 1
        return x + self.reads


class CountedTransform(Items):
    def begin(self):
        self.transforms = [nn.Identity(), Tick()]

    def changed(self, x, index):
        for transform in self.transforms:
            x = transform(x)
        return x


class CountedTensor(Items):
    def begin(self):
        self.steps = torch.zeros(1)

    def changed(self, x, index):
        self.steps += 1
        return x + self.steps


class CountedArray(Items):
    def begin(self):
        self.seen = np.zeros(SIZE, dtype=np.int64)

    def changed(self, x, index):
        self.seen[index] += 1
        return x + float(self.seen[index])


class AppendedList(Items):
    def begin(self):
        self.history = []

    def changed(self, x, index):
        self.history.append(index)
        return x + len(self.history)


class CountedDict(Items):
    def begin(self):
        self.counts = Counter()

    def changed(self, x, index):
        self.counts[index] += 1
        return x + self.counts[index]


class CountedClass(Items):
    reads = 0

    def changed(self, x, index):
        type(self).reads += 1
        return x + type(self).reads


class CountedClosure(Items):
    def begin(self):
        reads = 0

        def tick(x):
            nonlocal reads
            reads += 1
            return x + reads

        self.tick = tick

    def changed(self, x, index):
        return self.tick(x)


GLOBAL_READS = 0


class CountedGlobal(Items):
    def changed(self, x, index):
        global GLOBAL_READS
        GLOBAL_READS += 1
        return x + GLOBAL_READS


class LateGenerator(Items):
    """A dataset that makes its generator at the first read, as some datasets do in each worker."""

    def begin(self):
        self.rng = None

    def changed(self, x, index):
        self.rng = self.rng or np.random.default_rng(0)
        return x + float(self.rng.normal())


class FreshEntropy(Items):
    def changed(self, x, index):
        return x + float(np.random.default_rng().normal())


class ChangedInPlace(Items):
    def changed(self, x, index):
        return x.add_(1)


CHANGING = {
    CountedAttribute: "`reads`",
    CountedTransform: "`transforms[1].reads`",
    CountedTensor: "`steps`",
    CountedArray: "`seen`",
    AppendedList: "`history`",
    CountedDict: "`counts`",
    CountedClass: "`CountedClass.reads`",
    CountedClosure: "tick.reads`",
    CountedGlobal: "GLOBAL_READS`",
    FreshEntropy: "gives different samples",
    ChangedInPlace: "`x`",
}


class Cached(Items):
    def begin(self):
        self.cache = {}

    def changed(self, x, index):
        return self.cache.setdefault(index, 2 * x)


class LastRead(Items):
    """A dataset that stores its last read in new objects."""

    def changed(self, x, index):
        self.last = {"index": 1000 + index, "x": x.clone(), "mean": x.numpy().mean()}
        self.recent = deque([index], maxlen=3)
        return x


class OpenedLate(Items):
    def begin(self):
        self.file = None

    def changed(self, x, index):
        self.file = self.file or open(__file__)  # noqa: SIM115
        return x


class Memoized(Items):
    def begin(self):
        self.double = functools.lru_cache(lambda index: 2 * self.x[index])

    def changed(self, x, index):
        return self.double(index)


class OwnGenerators(Items):
    def begin(self):
        self.rng, self.draws = np.random.default_rng(), random.Random()

    def changed(self, x, index):
        self.last = self.rng.normal()
        return x + self.last + self.draws.random()


class GlobalGenerators(Items):
    def changed(self, x, index):
        self.last = random.random()
        return x + torch.randn(5) + np.random.rand() + self.last


class NotANumber(Items):
    def changed(self, x, index):
        return x * float("nan")


LASTING = [Items, Cached, LastRead, OpenedLate, Memoized, OwnGenerators, GlobalGenerators, NotANumber]


class Keeper(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 2)
        self.batches = []

    def training_step(self, batch, batch_idx):
        self.batches.append(batch[0].clone())
        return self.layer(batch[0].nan_to_num()).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def warnings_of(data, quiet, caplog, workers=0, plain=False):
    caplog.clear()
    words = dict(split=Split(test=0.0), batch_size=4, num_workers=workers, seed=0)
    options = {} if plain else {"strategy": FederatedStrategy(seed=0, max_vectorized_clients=1)}
    task = Keeper()
    with caplog.at_level(logging.WARNING, "lightning_fcl"):
        trainer = L.Trainer(max_epochs=ROUNDS, **options, **quiet)
        trainer.fit(task, datamodule=FederatedStream(data, Stationary(num_rounds=ROUNDS), **words))
    found = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Reading a sample")]
    return found, task.batches


@pytest.mark.parametrize("kind", CHANGING, ids=lambda kind: kind.__name__)
def test_reading_check_changed_state_warns_once(quiet, caplog, kind):
    found, _ = warnings_of({"a": kind(), "b": kind()}, quiet, caplog)
    assert len(found) == 1 and CHANGING[kind] in found[0] and f"`{kind.__name__}`" in found[0]
    assert "num_workers" in found[0]


@pytest.mark.parametrize("kind", LASTING, ids=lambda kind: kind.__name__)
def test_reading_check_caches_and_generators_do_not_warn(quiet, caplog, kind):
    assert warnings_of({"a": kind(), "b": kind()}, quiet, caplog)[0] == []


def test_reading_check_plain_trainer_warns_once(quiet, caplog):
    found, _ = warnings_of({"a": CountedAttribute()}, quiet, caplog, plain=True)
    assert len(found) == 1 and "`reads`" in found[0]


def test_reading_check_stateful_collate_fn_warns(quiet, caplog):
    class Collate:
        calls = 0

        def __call__(self, items):
            self.calls += 1
            return torch.utils.data.default_collate(items)

    with caplog.at_level(logging.WARNING, "lightning_fcl"):
        stream = FederatedStream({"a": Items()}, Stationary(), split=Split(test=0.0), seed=0, collate_fn=Collate())
        L.Trainer(strategy=FederatedStrategy(), max_epochs=1, **quiet).fit(Keeper(), datamodule=stream)
    assert sum("`collate_fn.calls`" in record.getMessage() for record in caplog.records) == 1


def given_targets(data):
    """Return a stream that gets the targets as an argument, so that no item is read before the fit."""
    words = dict(scenario=Stationary(num_rounds=ROUNDS), split=Split(test=0.0), batch_size=SIZE, shuffle=False, seed=0)
    return FederatedStream.from_arrays(data, data.targets, client_ids=["a"] * SIZE, **words)


@pytest.mark.parametrize("kind", [Items, CountedAttribute, CountedTensor, CountedArray, AppendedList, CountedDict])
def test_reading_check_restores_dataset(quiet, kind):
    """The first batch equals the first batch of a dataset that has not been read before."""
    task, stream = Keeper(), given_targets(kind())
    trainer = L.Trainer(strategy=FederatedStrategy(max_vectorized_clients=1), max_epochs=1, **quiet)
    trainer.fit(task, datamodule=stream)
    fresh = kind()
    expected = torch.stack([fresh[row][0] for row in stream.plan.train[0]["a"]])
    assert torch.equal(task.batches[0], expected)


def test_reading_check_generator_created_by_read_warns(quiet, caplog):
    with caplog.at_level(logging.WARNING, "lightning_fcl"):
        trainer = L.Trainer(strategy=FederatedStrategy(max_vectorized_clients=1), max_epochs=1, **quiet)
        trainer.fit(Keeper(), datamodule=given_targets(LateGenerator()))
    assert sum("changes `rng`" in record.getMessage() for record in caplog.records) == 1


def test_reading_check_collate_fn_for_pairs_is_no_error(quiet):
    def pairs(items):
        first, second = items[0], items[1]
        return [torch.stack([first[0], second[0]]), torch.tensor([first[1], second[1]])]

    task, stream = Keeper(), given_targets(Items())
    stream.collate_fn = pairs
    L.Trainer(strategy=FederatedStrategy(max_vectorized_clients=1), max_epochs=1, **quiet).fit(task, datamodule=stream)
    assert len(task.batches[0]) == 2
