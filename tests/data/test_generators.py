"""Tests that random generators in datasets, transforms and `collate_fn` are seeded by client and round."""

import functools
import itertools
import multiprocessing
import random
from dataclasses import dataclass, replace

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate

from lightning_fcl import FederatedStrategy, FederatedStream
from lightning_fcl.callbacks import ContinualMetrics, Pretrain, Replay
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental, Stationary
from lightning_fcl.data.split import Split
from lightning_fcl.rng import derive_seed, seed_all

SIZE, BATCH, ROUNDS = 15, 4, 2


class Items(Dataset):
    """Pairs of five numbers and a label. An optional transform changes the numbers at each read."""

    def __init__(self, seed=0, transform=None):
        self.x = torch.randn(SIZE, 5, generator=torch.Generator().manual_seed(seed))
        self.targets = [index % 3 for index in range(SIZE)]
        self.transform = transform

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        x = self.x[index]
        return (x if self.transform is None else self.transform(x)), self.targets[index]


class NumPyItems(Items):
    def __init__(self, seed=0, rng=None):
        super().__init__(seed)
        self.rng = rng or np.random.default_rng(seed)

    def __getitem__(self, index):
        return self.x[index] + torch.from_numpy(self.rng.normal(size=5)).float(), self.targets[index]


class OtherItems(NumPyItems):
    """A dataset like `NumPyItems`, with the generator in the attribute `noise`."""

    def __init__(self, seed=0, rng=None):
        super().__init__(seed)
        self.noise = self.rng if rng is None else rng
        del self.rng

    def __getitem__(self, index):
        return self.x[index] + torch.from_numpy(self.noise.normal(size=5)).float(), self.targets[index]


class TorchNoise:
    __slots__ = ("draws",)

    def __init__(self, seed):
        self.draws = torch.Generator().manual_seed(seed)

    def __call__(self, x):
        return x + torch.randn(5, generator=self.draws)


class PythonScale(nn.Module):
    """A transform that is a torch module, like those of torchvision."""

    def __init__(self, seed):
        super().__init__()
        self.draws = random.Random(seed)

    def forward(self, x):
        return x * self.draws.random()


class Randomizable:
    """A transform as in MONAI. It uses the generator of the class until `set_random_state` replaces the generator."""

    R = np.random.RandomState()

    def set_random_state(self, seed):
        self.R = np.random.RandomState(seed)
        return self


class RandomNoise(Randomizable):
    def __call__(self, x):
        self._do_transform = self.R.random() < 0.7
        return x + torch.from_numpy(self.R.normal(size=5)).float() if self._do_transform else x


class RandomFlip(Randomizable):
    def __call__(self, x):
        return x.flip(0) if self.R.random() < 0.5 else x


class Compose(Randomizable):
    def __init__(self, transforms):
        self.transforms = transforms

    def set_random_state(self, seed):
        super().set_random_state(seed)
        for transform in self.transforms:
            transform.set_random_state(int(self.R.randint(2**31)))
        return self

    def __call__(self, x):
        for transform in self.transforms:
            x = transform(x)
        return x


class Brightness:
    """A transform as in albumentations: it draws from a NumPy generator and from a Python generator."""

    def __init__(self, p):
        self.p = p
        self.random_generator, self.py_random = np.random.default_rng(), random.Random()

    def __call__(self, x):
        return x + self.random_generator.uniform(-1, 1) if self.py_random.random() < self.p else x


class OneOf(Brightness):
    def __init__(self, transforms, p=1.0):
        super().__init__(p)
        self.transforms = list(transforms)

    def __call__(self, x):
        return self.transforms[self.random_generator.integers(len(self.transforms))](x)


class AlbumentationsCompose(OneOf):
    def __init__(self, transforms, seed):
        super().__init__(transforms)
        self.random_generator, self.py_random = np.random.default_rng(seed), random.Random(seed)
        for part in self.transforms:
            part.random_generator, part.py_random = self.random_generator, self.py_random

    def __call__(self, x):
        for transform in self.transforms:
            x = transform(x)
        return x


def noise(x, draws):
    return x + torch.from_numpy(draws.normal(size=5)).float()


def closed_over(seed):
    draws = np.random.default_rng(seed)
    return lambda x: noise(x, draws)


GLOBAL_DRAWS = np.random.default_rng(3)


class GlobalItems(Items):
    def __getitem__(self, index):
        return noise(self.x[index], GLOBAL_DRAWS), self.targets[index]


class NoisyCollate:
    def __init__(self, seed):
        self.draws = np.random.default_rng(seed)

    def __call__(self, items):
        x, y = default_collate(items)
        return [x + torch.from_numpy(self.draws.normal(size=x.shape)).float(), y]


def from_global_generators(x):
    return x + torch.rand(5) + float(np.random.rand()) + random.random()


DATA = {
    "numpy": NumPyItems,
    "torch": lambda seed: Items(seed, TorchNoise(seed)),
    "python": lambda seed: Items(seed, nn.Sequential(PythonScale(seed))),
    "monai": lambda seed: Items(seed, Compose([RandomNoise(), RandomFlip()])),
    "monai, seeded": lambda seed: Items(seed, Compose([RandomNoise(), RandomFlip()]).set_random_state(seed)),
    "albumentations": lambda seed: Items(
        seed, AlbumentationsCompose([Brightness(0.6), OneOf([Brightness(1.0), Brightness(0.5)])], seed)
    ),
    "partial": lambda seed: Items(seed, functools.partial(noise, draws=np.random.default_rng(seed))),
    "closure": lambda seed: Items(seed, closed_over(seed)),
    "global variable": GlobalItems,
    "nested": lambda seed: ConcatDataset([Subset(NumPyItems(seed), range(7)), Subset(NumPyItems(seed), range(7, 15))]),
    # Control case: the items use only the global generators.
    "global generators": lambda seed: Items(seed, from_global_generators),
    "none": Items,
}


class Keeper(L.LightningModule):
    """A module that stores each training batch, with its client and round."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)
        self.batches = []
        self.losses = []

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        part = self.trainer.strategy.current_client_round
        self.batches.append((part.client_id, part.round_idx, batch[0].clone()))
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.losses.append(float(nn.functional.cross_entropy(self(batch[0]), batch[1])))
        self.log("loss", self.losses[-1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(data, quiet, workers=0, callbacks=(), validate=False, **options):
    words = dict(scenario=Stationary(num_rounds=ROUNDS), batch_size=BATCH, seed=0, num_workers=workers, **options)
    if not (isinstance(data, dict) and any(isinstance(part, dict) for part in data.values())):
        words["split"] = Split(test=0.0)
    task = Keeper()
    trainer = L.Trainer(
        strategy=FederatedStrategy(seed=0, max_vectorized_clients=1, local_epochs=2),
        max_epochs=ROUNDS,
        callbacks=list(callbacks),
        **quiet | {"limit_val_batches": 1.0 if validate else 0, "num_sanity_val_steps": 2 if validate else 0},
    )
    trainer.fit(task, datamodule=FederatedStream(data, **words))
    return task


def batches_of(task, client=None):
    return [(owner, number, x) for owner, number, x in task.batches if client in (None, owner)]


def difference(one, other, client=None):
    """Return the largest difference between the inputs of corresponding batches of two fits."""
    pairs = zip(batches_of(one, client), batches_of(other, client), strict=True)
    values = [(float((a[2] - b[2]).abs().max()), a[:2] == b[:2]) for a, b in pairs]
    assert values and all(same for _, same in values)
    return max(value for value, _ in values)


def two_clients(make):
    return {"a": make(1), "b": make(2)}


@pytest.mark.seconds
@pytest.mark.parametrize("name", DATA)
def test_samples_do_not_depend_on_num_workers(quiet, name):
    alone, one, two = (train(two_clients(DATA[name]), quiet, workers) for workers in (0, 1, 2))
    assert difference(alone, one) == difference(alone, two) == 0
    for a, b in zip(alone.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)


class Workers(L.Callback):
    """Records the child processes that are alive at the end of each round."""

    def __init__(self):
        self.alive = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.alive.append(multiprocessing.active_children())


@pytest.mark.seconds
def test_worker_processes_end_with_the_round(quiet):
    workers = Workers()
    train(two_clients(DATA["none"]), quiet, 2, [workers])
    assert workers.alive == [[]] * ROUNDS


@pytest.mark.parametrize("name", DATA)
def test_samples_differ_between_rounds_and_local_epochs(quiet, name):
    task = train({"a": DATA[name](1)}, quiet)
    rounds = [torch.cat([x for _, number, x in task.batches if number == wanted]) for wanted in range(ROUNDS)]
    epochs = [part for values in rounds for part in values.split(SIZE)]
    equal = [torch.equal(one.sum(1).sort()[0], other.sum(1).sort()[0]) for one, other in itertools.pairwise(epochs)]
    assert len(epochs) == 2 * ROUNDS and equal == [name == "none"] * 3


@pytest.mark.parametrize("name", DATA)
def test_samples_of_a_client_do_not_depend_on_other_clients(quiet, name):
    both, alone = train(two_clients(DATA[name]), quiet), train({"b": DATA[name](2)}, quiet)
    assert difference(both, alone, "b") == 0


@pytest.mark.parametrize("other", [NumPyItems, OtherItems])
def test_clients_that_share_a_generator_do_not_depend_on_each_other(quiet, other):
    def made():
        shared = np.random.default_rng(5)
        return {"a": other(1, shared), "b": NumPyItems(2, shared)}

    alone = {"b": made()["b"]}
    assert difference(train(made(), quiet), train(alone, quiet), "b") == 0


@pytest.mark.parametrize("name", DATA)
def test_clients_draw_different_numbers(quiet, name):
    task = train({"a": DATA[name](1), "b": DATA[name](1)}, quiet)
    sums = [torch.cat([x for *_, x in batches_of(task, client)]).sum(1).sort()[0] for client in "ab"]
    assert torch.equal(*sums) == (name == "none")


def with_tests(make, shared=False):
    """Return data of two clients with validation and test sets. If ``shared``, a client's sets share generators."""
    found = {}
    for number, client in enumerate("ab"):
        parts = [make(10 * number + part) for part in range(3)]
        if shared:
            for part in parts[1:]:
                vars(part).update({n: v for n, v in vars(parts[0]).items() if n in ("transform", "rng")})
        found[client] = dict(zip(("train", "validation", "test"), parts, strict=True))
    return found


@pytest.mark.seconds
@pytest.mark.parametrize("name", [name for name in DATA if name != "nested"])
@pytest.mark.parametrize("shared", [False, True])
def test_validation_and_metrics_do_not_change_training(quiet, name, shared):
    plain = train(with_tests(DATA[name], shared), quiet)
    validated = train(with_tests(DATA[name], shared), quiet, validate=True)
    measured = train(with_tests(DATA[name], shared), quiet, callbacks=[ContinualMetrics()])
    assert difference(plain, validated) == difference(plain, measured) == 0


@pytest.mark.seconds
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("none", "nested", "numpy") else pytest.param(name, marks=pytest.mark.long)
        for name in DATA
        if name != "global generators"
    ],
)
def test_validation_does_not_depend_on_num_workers(quiet, name):
    alone, two = (train(with_tests(DATA[name]), quiet, workers, validate=True) for workers in (0, 2))
    assert alone.losses == two.losses and len(alone.losses) > 4


@pytest.mark.seconds
@pytest.mark.parametrize("name", ["numpy", "monai", "albumentations", "global variable", "none"])
def test_replay_does_not_depend_on_other_clients_or_change_training(quiet, name):
    def remembered(data):
        replay = Replay(6, update="round")
        task = train(data, quiet, callbacks=[replay])
        return task, task.trainer.strategy.federation.server.client_store.get_section("b", replay.section_name)

    both, kept = remembered(two_clients(DATA[name]))
    alone, kept_alone = remembered({"b": DATA[name](2)})
    assert difference(both, alone, "b") == 0
    assert kept.keys() == kept_alone.keys() and kept
    assert all(torch.equal(kept[key], kept_alone[key]) for key in kept)


def state_of(generator):
    legacy = isinstance(generator, np.random.RandomState)
    return generator.get_state(legacy=False) if legacy else generator.bit_generator.state


def test_generators_are_restored_after_fit(quiet):
    data = with_tests(NumPyItems)
    generators = [part.rng for parts in data.values() for part in parts.values()]
    generators += [draws := np.random.RandomState(4)]
    # `RandomState.normal` draws pairs. The second number of the pair is part of the state.
    draws.normal()
    data["a"]["train"].draws = draws
    before = [
        generator.__reduce__()[2] if generator is draws else generator.bit_generator.state for generator in generators
    ]
    train(data, quiet, validate=True, callbacks=[ContinualMetrics()])
    after = [
        generator.__reduce__()[2] if generator is draws else generator.bit_generator.state for generator in generators
    ]
    assert repr(before) == repr(after)


def test_batches_equal_loop_with_derived_seeds(quiet):
    """The seed of a generator depends on the stream's seed, client, round, epoch, batch and the attribute's path."""
    data, task = NumPyItems(1), train({"a": NumPyItems(1)}, quiet)
    assert len(task.batches) == ROUNDS * 2 * -(-SIZE // BATCH)
    for number, (client, round_idx, x) in enumerate(task.batches):
        step = number % 8
        request = derive_seed(0, client, round_idx, "data", step // 4, step)
        draws = np.random.Generator(np.random.PCG64(derive_seed(request, "0", "rng")))
        for row in x:
            clean = row - torch.from_numpy(draws.normal(size=5)).float()
            assert torch.isclose(data.x, clean, atol=1e-6).all(1).any()


def test_global_generators_draw_same_numbers_beside_others(quiet):
    """Global generators draw the same numbers whether or not the dataset has generators as attributes."""

    class Both(Items):
        def __init__(self, seed):
            super().__init__(seed, from_global_generators)
            self.legacy, self.own = np.random.mtrand._rand, np.random.default_rng(0)

    for make in (Both, DATA["global generators"]):
        data, task = Items(1), train({"a": make(1)}, quiet)
        for number, (client, round_idx, x) in enumerate(task.batches):
            step = number % 8
            with isolate_rng():
                seed_all(0, client, round_idx, "data", step // 4, step)
                for row in x:
                    clean = row - from_global_generators(torch.zeros(5))
                    assert torch.isclose(data.x, clean, atol=1e-6).all(1).any()


@pytest.mark.seconds
def test_collate_fn_is_seeded(quiet):
    def fit(names, workers=0):
        return train({name: Items(ord(name)) for name in names}, quiet, workers, collate_fn=NoisyCollate(7))

    both, alone, two = fit("ab"), fit("b"), fit("ab", 2)
    assert difference(both, alone, "b") == difference(both, two) == 0
    collate = NoisyCollate(7)
    train({"a": Items(1)}, quiet, collate_fn=collate)
    assert collate.draws.bit_generator.state == np.random.default_rng(7).bit_generator.state


@pytest.mark.seconds
def test_plain_trainer_reads_the_same_for_any_num_workers(quiet):
    class Plain(Keeper):
        def training_step(self, batch, batch_idx):
            self.batches.append(("0", self.current_epoch, batch[0].clone()))
            return self(batch[0]).square().mean()

    def fit(workers):
        words = dict(
            scenario=Stationary(num_rounds=ROUNDS), split=Split(test=0.0), batch_size=BATCH, num_workers=workers
        )
        task, stream = Plain(), FederatedStream({"0": NumPyItems(1)}, seed=0, **words)
        L.Trainer(max_epochs=ROUNDS, **quiet).fit(task, datamodule=stream)
        return task

    alone, two = fit(0), fit(2)
    assert difference(alone, two) == 0
    first, second = (torch.cat([x for _, n, x in alone.batches if n == epoch]) for epoch in range(2))
    assert not torch.equal(first.sum(1).sort()[0], second.sum(1).sort()[0])


def test_vectorized_clients_read_same_samples_as_sequential(quiet):
    def weights(size):
        task = Keeper()
        task.training_step = lambda batch, batch_idx: nn.functional.cross_entropy(task(batch[0]), batch[1])
        words = dict(scenario=Stationary(num_rounds=1), split=Split(test=0.0), batch_size=BATCH, seed=0)
        stream = FederatedStream(two_clients(NumPyItems), **words)
        strategy = FederatedStrategy(seed=0, max_vectorized_clients=size)
        L.Trainer(strategy=strategy, max_epochs=1, **quiet).fit(task, datamodule=stream)
        return [p.detach() for p in task.parameters()]

    torch.testing.assert_close(weights(1), weights(2))


def test_reading_targets_restores_generators():
    class Untold(NumPyItems):
        def __init__(self, seed):
            super().__init__(seed)
            self.labels = self.__dict__.pop("targets")

        def __getitem__(self, index):
            return self.x[index] + float(self.rng.normal()), self.labels[index]

    data = Untold(1)
    before = data.rng.bit_generator.state
    stream = FederatedStream(data, ClassIncremental(3), seed=0)
    stream.setup("fit")
    stream.get_samples(np.arange(4))
    assert stream.num_classes == 3 and data.rng.bit_generator.state == before


class Tested(Keeper):
    """Module with a test step."""

    def test_step(self, batch, batch_idx):
        self.log("test_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))


@pytest.mark.parametrize("name", ["numpy", "monai", "none"])
def test_custom_test_step_does_not_change_training(quiet, name):
    def fit(callbacks):
        task = Tested()
        words = dict(scenario=Stationary(num_rounds=ROUNDS), batch_size=BATCH, seed=0)
        strategy = FederatedStrategy(seed=0, max_vectorized_clients=1)
        trainer = L.Trainer(strategy=strategy, max_epochs=ROUNDS, callbacks=callbacks, **quiet)
        trainer.fit(task, datamodule=FederatedStream(with_tests(DATA[name], shared=True), **words))
        return task, trainer.test(task, datamodule=trainer.datamodule, verbose=False)

    (measured, values), (plain, same) = fit([ContinualMetrics()]), fit([])
    assert difference(measured, plain) == 0 and values == same


@dataclass(frozen=True)
class WithPretraining(Stationary):
    """Scenario whose first ten samples are for pre-training."""

    def plan(self, pool, seed=0):
        plan = super().plan(pool, seed)
        rest = tuple({client: rows[rows >= 10] for client, rows in current.items()} for current in plan.train)
        return replace(plan, train=rest, pretrain=np.arange(10))


@pytest.mark.parametrize("name", ["numpy", "monai", "albumentations", "collate", "none"])
def test_pretraining_does_not_depend_on_earlier_draws(quiet, name):
    def fit(draws):
        if name == "collate":
            data, words = Items(1), {"collate_fn": (collate := NoisyCollate(7))}
            for _ in range(draws):
                collate(list(data)[:2])
        else:
            data, words = DATA[name](1), {}
            for index in range(draws):
                data[index]
        stream = FederatedStream(
            data, WithPretraining(num_rounds=1), IID(1), Split(test=0.0), batch_size=BATCH, seed=0, **words
        )
        task = Keeper()
        task.training_step = lambda batch, batch_idx: nn.functional.cross_entropy(task(batch[0]), batch[1])
        trainer = L.Trainer(strategy=FederatedStrategy(seed=0), max_epochs=1, callbacks=[Pretrain(3)], **quiet)
        trainer.fit(task, datamodule=stream)
        return [p.detach().clone() for p in task.parameters()]

    assert all(map(torch.equal, fit(0), fit(3)))
