"""Tests that a stream uses a LightningDataModule like a plain Trainer, or rejects it with a message."""

import itertools

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from raising import raises
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)
from torchmetrics.functional import accuracy

from lightning_fcl import Classifier, FederatedStrategy, FederatedStream
from lightning_fcl.callbacks import EWC, ContinualMetrics, Pretrain, Replay
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental, FLwFScenario, Stationary
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.local_training.vectorized import VectorizedTrainer

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(64, 5, generator=GENERATOR), torch.arange(64) % 4
WHOLE = TensorDataset(X, Y)


class Loaders(L.LightningDataModule):
    """Data module that returns the loaders in its arguments."""

    def __init__(self, train, test=None, val=None):
        super().__init__()
        self.made = {"train": train, "val": val, "test": test}

    def train_dataloader(self):
        return self.made["train"]

    def val_dataloader(self):
        return self.made["val"]

    def test_dataloader(self):
        return self.made["test"]


class Keeper(L.LightningModule):
    """A linear model that stores every batch of training."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(5, 4)
        torch.nn.init.ones_(self.layer.weight)
        torch.nn.init.zeros_(self.layer.bias)
        self.trained = []

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        self.trained.append(batch)
        return F.mse_loss(self(batch[0])[:, 0], batch[1].float())

    def test_step(self, batch, batch_idx):
        self.log("loss", F.mse_loss(self(batch[0])[:, 0], batch[1].float()))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def stream_of(data, **kwargs):
    return FederatedStream(data, **{"scenario": ClassIncremental(1), "partition": IID(1), "seed": 0, **kwargs})


def trainer_of(quiet, **kwargs):
    return L.Trainer(**{"max_epochs": 1, "strategy": FederatedStrategy(seed=0), **quiet, **kwargs})


def rows(batches):
    """Return the index in `X` of each sample in the batches."""
    return [int((x == X).all(dim=1).nonzero()) for batch in batches for x in batch[0]]


def trained_on(data, quiet, **kwargs):
    task = Keeper()
    trainer_of(quiet).fit(task, datamodule=stream_of(data, **kwargs))
    return task.trained


# Tests of samplers


class EveryThird(Sampler):
    def __len__(self):
        return 22

    def __iter__(self):
        return iter(range(0, 64, 3))


@pytest.mark.may("Samplers that select splits of one dataset", "Each split contains the samples of its sampler.")
@pytest.mark.parametrize(
    "sampler", [SubsetRandomSampler(range(48)), SequentialSampler(range(48)), [*range(47, -1, -1)], EveryThird()]
)
@pytest.mark.parametrize("word", ["sampler", "batch_sampler"])
def test_sampler_selects_samples_of_split(quiet, sampler, word):
    own = set(sampler)
    left = sorted(set(range(64)) - own)
    test = SubsetRandomSampler(left) if word == "sampler" else BatchSampler(SubsetRandomSampler(left), 3, False)
    module = Loaders(DataLoader(WHOLE, 8, sampler=sampler), DataLoader(WHOLE, **{word: test}))
    stream, task = stream_of(module), Keeper()
    trainer_of(quiet).fit(task, datamodule=stream)
    assert sorted(rows(task.trained)) == sorted(own) == sorted(rows(module.train_dataloader()))
    assert rows(stream.test_dataloader()) == left == sorted(rows(module.test_dataloader()))
    assert stream.shuffle == isinstance(sampler, SubsetRandomSampler)


class Endless(Sampler):
    def __iter__(self):
        return itertools.count()


class Drawn(Endless):
    def __iter__(self):
        return iter(torch.randperm(64)[:10].tolist())

    def __len__(self):
        return 10


class Stream(IterableDataset):
    def __iter__(self):
        return iter(WHOLE)


class OwnBatches(Endless):
    def __iter__(self):
        return iter([[0, 1], [2, 3]])


class OwnLoader(DataLoader):
    def __iter__(self):
        return itertools.cycle(super().__iter__())


@pytest.mark.may(
    "Samplers that are weighted, infinite, distributed or different at each iteration",
    "Not supported. The samples of the split are not defined.",
)
@pytest.mark.parametrize(
    ("loader", "value"),
    [
        (DataLoader(WHOLE, sampler=WeightedRandomSampler(torch.ones(9), 64)), "WeightedRandomSampler"),
        (DataLoader(WHOLE, sampler=RandomSampler(WHOLE, replacement=True)), "RandomSampler"),
        (DataLoader(WHOLE, sampler=RandomSampler(WHOLE, num_samples=9)), "RandomSampler"),
        (DataLoader(WHOLE, sampler=DistributedSampler(WHOLE, 1, 0)), "DistributedSampler"),
        (DataLoader(WHOLE, sampler=Endless()), "Endless"),
        (DataLoader(WHOLE, sampler=Drawn()), "Drawn"),
        (DataLoader(WHOLE, batch_sampler=OwnBatches()), "OwnBatches"),
        (DataLoader(WHOLE, batch_size=None), "TensorDataset"),
        (DataLoader(Stream()), "Stream"),
        (OwnLoader(WHOLE), "OwnLoader"),
        ({"a": DataLoader(WHOLE)}, "dict"),
        (None, "NoneType"),
    ],
)  # fmt: skip
def test_loader_with_unsupported_sampler_raises(loader, value):
    with raises(InvalidValueError, "dataloader", value=value):
        stream_of(Loaders(loader)).setup("fit")


# Tests of splits in `setup`


class Splits(L.LightningDataModule):
    """Data module whose `setup` splits the data without a seed and makes a new dataset in each stage."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def prepare_data(self):
        self.calls.append("prepare")

    def setup(self, stage):
        self.calls.append(stage)
        if self.trainer is not None:
            self.calls.append(self.trainer.world_size)
        self.parts = random_split(TensorDataset(X, Y), [30, 10, 24])

    def train_dataloader(self):
        return DataLoader(self.parts[0], 8)

    def val_dataloader(self):
        return DataLoader(self.parts[1], 8)

    def test_dataloader(self):
        return DataLoader(self.parts[2], 8)


class SplitsByStage(Splits):
    def setup(self, stage):
        before = getattr(self, "parts", [])
        super().setup(stage)
        self.parts = self.parts[:2] if stage == "fit" else [*before, self.parts[2]]


@pytest.mark.may(
    "Random splits in `setup`",
    "`setup` runs once per stage, so the splits do not overlap. Each process gets the same splits.",
)
@pytest.mark.parametrize("kind", [Splits, SplitsByStage])
def test_random_splits_in_setup_are_disjoint_and_reproducible(quiet, kind):
    stream, again, task = stream_of(kind()), stream_of(kind()), Keeper()
    trainer_of(quiet).fit(task, datamodule=stream)
    state = torch.get_rng_state()
    again.setup("fit")
    assert torch.equal(state, torch.get_rng_state())
    found = [rows(task.trained), rows(stream.val_dataloader()), rows(stream.test_dataloader())]
    assert list(map(len, found)) == [30, 10, 24] and sorted(itertools.chain(*found)) == list(range(64))
    # A second stream makes the same splits, so another process would also make the same splits.
    assert found[1:] == [rows(again.val_dataloader()), rows(again.test_dataloader())]


@pytest.mark.may("`self.trainer` in hooks of a LightningDataModule", "Each hook runs once, and `self.trainer` is set.")
def test_data_module_hooks_run_once_with_trainer(quiet):
    module = Splits()
    stream, task = stream_of(module), Keeper()
    trainer = trainer_of(quiet)
    trainer.fit(task, datamodule=stream)
    assert module.calls == ["prepare", "fit", 1, "test", 1] and module.trainer is trainer
    later = trainer_of(quiet)
    later.test(task, datamodule=stream, verbose=False)
    assert len(module.calls) == 5 and module.trainer is later
    by_hand = Splits()
    stream = stream_of(by_hand)
    stream.setup("fit")
    trainer_of(quiet).fit(Keeper(), datamodule=stream)
    assert by_hand.calls == ["prepare", "fit", "test"]


@pytest.mark.parametrize("clients", [1, 2])
def test_prepare_data_in_fit_has_trainer(quiet, clients):
    """As in a plain Trainer, the data module has the attribute `trainer` when `prepare_data` runs.

    `LightningNodeData` of PyTorch Geometric uses this attribute.
    """

    class Asks(Splits):
        def prepare_data(self):
            super().prepare_data()
            self.trainer_of_prepare = self.trainer

    modules, trainer = [Asks() for _ in range(clients)], trainer_of(quiet)
    trainer.fit(Keeper(), datamodule=FederatedStream(modules if clients > 1 else modules[0], Stationary()))
    assert [module.trainer_of_prepare for module in modules] == [trainer] * clients


class Closes(Splits):
    def teardown(self, stage):
        self.calls.append(f"teardown {stage.value}")
        del self.parts


@pytest.mark.may(
    "Files that `teardown` closes", "`teardown` runs after each fit and test. The next fit or test calls `setup` again."
)
def test_teardown_is_followed_by_new_setup(quiet):
    module, task = Closes(), Keeper()
    stream, kept = stream_of(module), Keeper()
    trainer_of(quiet).fit(task, datamodule=stream)
    assert module.calls == ["prepare", "fit", 1, "test", 1, "teardown fit"]
    plan = stream.plan.fingerprint
    trainer_of(quiet).test(task, datamodule=stream, verbose=False)
    assert module.calls[6:] == ["fit", 1, "test", 1, "teardown test"] and stream.plan.fingerprint == plan
    trainer_of(quiet).fit(kept, datamodule=stream)
    assert rows(kept.trained) == rows(task.trained)


@pytest.mark.may(
    "Splits that share samples",
    "Not supported, except for identical validation and test splits. "
    "The model would be trained or selected on test samples.",
)
def test_splits_that_share_samples_raise():
    inner = Subset(WHOLE, range(10, 60))
    # The test samples are 18, 19 and 45.
    test = DataLoader(Subset(Subset(inner, range(5, 50)), [3, 4, 30]))
    module = Loaders(DataLoader(Subset(WHOLE, range(20))), test)
    with raises(InvalidValueError, "data"):
        stream_of(module).setup("fit")
    with raises(InvalidValueError, "data"):
        stream_of(Loaders(DataLoader(Subset(WHOLE, range(9))), test, DataLoader(Subset(WHOLE, [45])))).setup("fit")
    # Many data modules use one loader for validation and test.
    stream = stream_of(Loaders(DataLoader(Subset(WHOLE, range(9))), test, test))
    stream.setup("fit")
    assert rows(stream.val_dataloader()) == rows(stream.test_dataloader()) == [18, 19, 45]


def test_test_label_without_training_samples_raises():
    module = Loaders(DataLoader(WHOLE), DataLoader(TensorDataset(X[:8] + 1, 3 * Y[:8])))
    with raises(InvalidValueError, "y"):
        stream_of(module).setup("fit")


# Tests of batch transfer hooks


class Scales(Loaders):
    """Scales batches in the transfer hooks, and stores the stage of the Trainer for each batch."""

    def __init__(self, train=None, test=None, size=64):
        train = train or Subset(WHOLE, range(40))
        super().__init__(DataLoader(train, size), DataLoader(test or Subset(WHOLE, range(40, 64)), 7))
        self.stages = []

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] - 1, *batch[1:]]

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return super().transfer_batch_to_device([3 * batch[0], *batch[1:]], device, dataloader_idx)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.stages.append(str(self.trainer.state.stage.value))
        return [batch[0] + 2, *batch[1:]]


def scaled(x):
    return 3 * (x - 1) + 2


@pytest.mark.may(
    "A LightningDataModule with transfer hooks", "[The hooks run](custom-data.md) on each batch, as in a plain Trainer."
)
def test_transfer_hooks_equal_plain_trainer(quiet):
    plain, task, module = Keeper(), Keeper(), Scales()
    alone = trainer_of(quiet, strategy="auto")
    alone.fit(plain, datamodule=Scales())
    stream = stream_of(module)
    trainer = trainer_of(quiet)
    trainer.fit(task, datamodule=stream)
    assert len(task.trained) == 1
    torch.testing.assert_close(sorted(map(tuple, task.trained[0][0].tolist())),
                               sorted(map(tuple, scaled(X[:40]).tolist())))  # fmt: skip
    torch.testing.assert_close(task.state_dict(), plain.state_dict())
    tested = [t.test(m, datamodule=d, verbose=False)[0]["loss"]
              for t, m, d in ((alone, plain, Scales()), (trainer, task, stream))]  # fmt: skip
    by_hand = F.mse_loss(task(scaled(X[40:]))[:, 0], Y[40:].float()).item()
    assert tested == pytest.approx([by_hand, by_hand])
    torch.testing.assert_close(torch.cat(trainer.predict(task, datamodule=stream)), task(scaled(X[40:])))
    assert module.stages[0] == "train" and set(module.stages) == {"train", "test", "predict"}


def classifier(seed=0):
    torch.manual_seed(seed)
    return Classifier(torch.nn.Linear(5, 4), 4, lambda params: torch.optim.SGD(params, lr=0.1))


@pytest.mark.may("Normalization in transfer hooks", "Metrics and predictions use the normalized batches.")
def test_metrics_apply_transfer_hooks(quiet):
    class OwnHook(Classifier):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [scaled(batch[0]), batch[1]]

    torch.manual_seed(0)
    own = OwnHook(torch.nn.Linear(5, 4), 4, lambda params: torch.optim.SGD(params, lr=0.1))
    parts = Subset(WHOLE, range(40)), Subset(WHOLE, range(40, 64))
    without = Loaders(*(DataLoader(part, 64) for part in parts))
    for task, module in ((classifier(), Scales()), (own, without)):
        metrics = ContinualMetrics()
        trainer_of(quiet, callbacks=[metrics]).fit(task, datamodule=stream_of(module))
        with torch.no_grad():
            wanted = accuracy(task.model(scaled(X[40:])), Y[40:], "multiclass", num_classes=4)
        counts = metrics.record["rounds"][0]["correct"]["server"]
        assert sum(counts) / sum(metrics.record["totals"]) == pytest.approx(wanted.item())
    assert module is without and set(Scales().stages) == set()


def test_transfer_hooks_see_stage_of_trainer(quiet):
    module = Scales()
    trainer_of(quiet, callbacks=[ContinualMetrics()]).fit(classifier(), datamodule=stream_of(module))
    # The stages are a trial before the first round, one training batch, and the test batches for the client and
    # server models. The 24 test samples are in batches of 7.
    assert module.stages == ["test", "train", *["test"] * 8]


def test_pretraining_applies_transfer_hooks(quiet):
    class Seen(Classifier):
        # A class attribute is shared with the copy that is pre-trained.
        seen = []  # noqa: RUF012

        def training_step(self, batch, batch_idx):
            Seen.seen += batch[0].tolist()
            return super().training_step(batch, batch_idx)

    scenario = FLwFScenario(2, samples_per_round=8, test_per_class=3, pretrain_per_class=2)
    stream = FederatedStream(Scales(WHOLE, TensorDataset(X[:4] + 1, Y[:4])), scenario, seed=0)
    trainer_of(quiet, callbacks=[Pretrain(1)]).fit(Seen(torch.nn.Linear(5, 4), 4), datamodule=stream)
    assert {tuple(scaled(x).tolist()) for x in stream.get_samples(stream.plan.pretrain)[0]} <= set(
        map(tuple, Seen.seen)
    )


def test_vectorized_training_requires_no_transfer_hooks(quiet):
    def fit(module, size):
        trainer = trainer_of(quiet, strategy=FederatedStrategy(seed=0, max_vectorized_clients=size))
        trainer.fit(classifier(), datamodule=stream_of(module, partition=IID(2)))
        return trainer.strategy.federation.local_trainer

    loaders = [DataLoader(Subset(WHOLE, part), 8) for part in (range(40), range(40, 64))]
    assert isinstance(fit(Loaders(*loaders), "auto"), VectorizedTrainer)
    assert not isinstance(fit(Scales(), "auto"), VectorizedTrainer)
    with raises(InvalidValueError, "max_vectorized_clients"):
        fit(Scales(), 2)


def test_method_with_samples_outside_batches_and_hooks_raises(quiet):
    with raises(InvalidValueError, "datamodule"):
        trainer_of(quiet, callbacks=[EWC(1.0)]).fit(classifier(), datamodule=stream_of(Scales()))
    task = Keeper()
    stream = stream_of(Scales(size=100), scenario=ClassIncremental(2), partition=IID(1))
    trainer_of(quiet, max_epochs=2, callbacks=[Replay(20, update="round")]).fit(task, datamodule=stream)
    again = scaled(X[:40]).tolist()
    assert all(row in again for batch in task.trained for row in batch[0].tolist()) and len(task.trained[1][0]) == 40


# Tests of loader settings


def doubled(items):
    x, y = default_collate(items)
    return [2 * x, y]


@pytest.mark.may(
    "`batch_size`, `shuffle`, `drop_last` and `num_workers` of loaders",
    "`FederatedStream` uses these values unless you pass other values.",
)
def test_loader_settings_apply_unless_overridden(quiet):
    parts = [Subset(WHOLE, part) for part in (range(44), range(44, 52), range(52, 64))]
    train = DataLoader(parts[0], 8, drop_last=True, collate_fn=doubled)
    module = Loaders(train, DataLoader(parts[2], 5, num_workers=1, pin_memory=True), DataLoader(parts[1], 3))
    stream, task = stream_of(module), Keeper()
    trainer_of(quiet).fit(task, datamodule=stream)
    assert [len(batch[0]) for batch in task.trained] == [8] * 5 == [len(batch[0]) for batch in train]
    # Shuffling is off, so the samples are in the order of the client's plan.
    own = stream.plan.train[0]["0"][:40]
    torch.testing.assert_close(torch.cat([x for x, _ in task.trained]), 2 * X[own])
    for part, loader, whole in ((parts[1], stream.val_dataloader(), 3), (parts[2], stream.test_dataloader(), 5)):
        assert loader.batch_size == whole and loader.num_workers == loader.pin_memory == (whole == 5)
        assert torch.equal(torch.cat([x for x, _ in DataLoader(loader.dataset, 4)]), X[part.indices])
    assert [len(x) for x, _ in stream.val_dataloader()] == [3, 3, 2]
    given = stream_of(module, batch_size=11, drop_last=False, shuffle=True, num_workers=0, collate_fn=doubled)
    assert [len(x) for x, _ in trained_on(module, quiet, batch_size=11, drop_last=False)] == [11] * 4
    given.setup("fit")
    assert (given.batch_size, given.shuffle, given.drop_last, given.num_workers) == (11, True, False, 0)
    assert torch.equal(next(iter(given.test_dataloader()))[0], 2 * X[52:57])
    held = FederatedStream("digits")
    assert (held.batch_size, held.shuffle, held.drop_last, held.num_workers) == (32, True, False, 0)


@pytest.mark.seconds
def test_num_workers_of_training_loader_is_used(quiet, tmp_path):
    def begin(worker):
        (tmp_path / str(worker)).touch()

    loader = DataLoader(Subset(WHOLE, range(40)), 8, num_workers=2, worker_init_fn=begin)
    helped = trained_on(Loaders(loader), quiet)
    alone = trained_on(Loaders(loader), quiet, num_workers=0)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
    assert all(torch.equal(a[0], b[0]) for a, b in zip(helped, alone, strict=True))


@pytest.mark.may(
    "A `collate_fn` of the training loader that mixes samples", "Each split uses the `collate_fn` of its own loader."
)
def test_training_collate_fn_is_not_used_for_testing(quiet):
    """A `collate_fn` such as mixup applies to training only, even if the split is passed to the stream."""
    module = Loaders(DataLoader(Subset(WHOLE, range(40)), 8, collate_fn=doubled), DataLoader(Subset(WHOLE, [50, 51])))
    for split in (None, Split(0.25)):
        stream, metrics = stream_of(module, split=split), ContinualMetrics()
        trainer_of(quiet, callbacks=[metrics]).fit(task := classifier(), datamodule=stream)
        assert len(rows(stream.test_dataloader())) == len(stream.plan.test)
        x, y = (torch.cat(column) for column in zip(*stream.test_dataloader(), strict=True))
        assert sum(metrics.record["rounds"][0]["correct"]["server"]) == (task.model(x).argmax(1) == y).sum()


def test_metrics_of_dict_batches_raise(quiet):
    class Dicts(Dataset):
        def __getitem__(self, index):
            return {"x": X[index], "label": index % 4}

        def __len__(self):
            return 40

    with raises(InvalidValueError, "Classifier"):
        trainer_of(quiet, callbacks=[ContinualMetrics()]).fit(classifier(), datamodule=stream_of(Dicts()))


# Tests of predictions


@pytest.mark.may(
    "`trainer.predict(model, datamodule=stream)`", "The predictions equal those of a loop over the samples."
)
@pytest.mark.parametrize("kind", ["arrays", "data set", "data module", "its own"])
def test_predict_equals_loop_over_samples(quiet, kind):
    class Own(Loaders):
        def setup(self, stage):
            self.predicted = Subset(WHOLE, range(60, 64)) if stage == "predict" else None

        def predict_dataloader(self):
            return DataLoader(self.predicted, batch_size=3)

    loaders = [DataLoader(Subset(WHOLE, part), 5, drop_last=True) for part in (range(50), range(50, 64))]
    data = {"data set": WHOLE, "data module": Loaders(*loaders), "its own": Own(*loaders)}
    words = {"scenario": ClassIncremental(1), "partition": IID(1), "seed": 0}
    stream = FederatedStream.from_arrays(X, Y, **words) if kind == "arrays" else stream_of(data[kind])
    task = Keeper()
    found = torch.cat(trainer_of(quiet).predict(task, datamodule=stream))
    own = {"data module": X[50:], "its own": X[60:]}
    with torch.no_grad():
        torch.testing.assert_close(found, task(own.get(kind, X[stream.plan.test])))
