"""Tests that samples of any kind reach the module unchanged, one batch at a time."""

import itertools

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from raising import raises
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from lightning_fcl import FederatedStrategy, FederatedStream
from lightning_fcl.data.batching import BatchRequest, LoaderConfig, read_batches
from lightning_fcl.data.collation import concat_nested
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental, DomainIncremental
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidTypeError, InvalidValueError, MissingValueError, UnknownNameError


class Tokens(Dataset):
    """A dataset of dicts with token ids and a label. If `ragged`, the sentences have different lengths."""

    def __init__(self, samples=48, ragged=False):
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(2, 7, (samples,), generator=generator) if ragged else torch.full((samples,), 5)
        self.ids = [torch.randint(1, 20, (int(length),), generator=generator) for length in lengths]
        self.labels = [index % 4 for index in range(samples)]

    def __getitem__(self, index):
        return {"ids": self.ids[index], "labels": self.labels[index]}

    def __len__(self):
        return len(self.labels)


class Noisy(Dataset):
    """Samples with noise from the global generators of torch and NumPy."""

    def __init__(self, samples=48):
        self.targets = [index % 4 for index in range(samples)]

    def __getitem__(self, index):
        return torch.eye(4, 6)[index % 4] + torch.rand(6) + float(np.random.rand()), index % 4

    def __len__(self):
        return len(self.targets)


def padded(items):
    ids = nn.utils.rnn.pad_sequence([item["ids"] for item in items], batch_first=True)
    return {"ids": ids, "labels": torch.tensor([item["labels"] for item in items])}


class Keeper(L.LightningModule):
    """Module that stores every batch with its client. Its parameters hardly change."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.batches = []

    def training_step(self, batch, batch_idx):
        client_round = self.trainer.strategy.current_client_round
        self.batches.append((client_round.client_id, client_round.round_idx, batch))
        values = batch["ids"] if isinstance(batch, dict) else batch[0]
        return (self.scale * values.float().mean()).square()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001)


def seen(stream, quiet, **options):
    stream.setup("fit")
    task = Keeper()
    trainer = L.Trainer(strategy=FederatedStrategy(seed=0, **options), max_epochs=stream.plan.num_rounds, **quiet)
    trainer.fit(task, datamodule=stream)
    return task.batches


def stream_of(data, **kwargs):
    words = {"scenario": ClassIncremental(2), "partition": IID(2), "batch_size": 4, "seed": 0, **kwargs}
    return FederatedStream(data, **words)


def everything(stream):
    return sum(len(rows) for current in stream.plan.train for rows in current.values())


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.bool_])
def test_integer_samples_keep_their_type(quiet, dtype):
    ids = np.random.default_rng(0).integers(0, 200, (48, 5)).astype(dtype)
    stream = FederatedStream.from_arrays(ids, np.arange(48) % 4, scenario=ClassIncremental(2), partition=IID(2), seed=0)
    for client, round_idx, (x, y) in seen(stream, quiet):
        assert x.dtype == torch.from_numpy(ids).dtype and y.dtype == torch.int64
        rows = stream.plan.train[round_idx][client]
        assert sorted(map(tuple, x.tolist())) == sorted(map(tuple, ids[rows].tolist()))


def test_dict_items_have_labels(quiet):
    data = Tokens()
    stream = stream_of(data)
    batches = seen(stream, quiet)
    assert sum(len(batch["labels"]) for *_, batch in batches) == everything(stream)
    assert stream.y.tolist() == data.labels and stream.client_round("0", 0).labels.numel()
    assert batches[0][2]["ids"].shape == (4, 5) and batches[0][2]["ids"].dtype == torch.int64


def test_ragged_items_are_padded_per_batch(quiet):
    data = Tokens(ragged=True)
    stream = stream_of(data, collate_fn=padded)
    widths = set()
    for client, round_idx, batch in seen(stream, quiet):
        rows = [tuple(ids[ids > 0].tolist()) for ids in batch["ids"]]
        own = [tuple(data.ids[row].tolist()) for row in stream.plan.train[round_idx][client]]
        assert set(rows) <= set(own)
        widths.add(batch["ids"].shape[1])
    # Sentences are padded to the longest in the batch, not to the longest in the dataset.
    assert len(widths) > 1
    tested = [batch["ids"] for batch in stream.test_dataloader()]
    assert sum(map(len, tested)) == len(stream.plan.test)


@pytest.mark.parametrize("shape", [(48,), (48, 3)])
def test_targets_that_are_not_classes_are_kept(quiet, shape):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(48, 6)).astype(np.float32), rng.normal(size=shape)
    for scenario, group in ((ClassIncremental(1, 2), None), (DomainIncremental(), np.arange(48) % 2)):
        stream = FederatedStream.from_arrays(x, y, group=group, scenario=scenario, partition=IID(2), seed=0)
        batches = seen(stream, quiet)
        assert stream.num_classes == 0 and len(stream.y) == 0 and stream.plan.num_rounds == 2
        client, round_idx, (inputs, targets) = batches[0]
        assert targets.dtype == torch.float32 and targets.shape[1:] == shape[1:]
        assert stream.client_round(client, round_idx).labels.numel() == 0
        rows = stream.plan.train[round_idx][client]
        assert sorted(inputs[:, 0].tolist()) == sorted(x[rows, 0].tolist())
    several = (rng.random((48, 3)) > 0.5).astype(np.int64)
    stream = FederatedStream.from_arrays(x, several, scenario=ClassIncremental(1), partition=IID(2), seed=0)
    assert seen(stream, quiet)[0][2][1].shape[1:] == (3,)


def test_integer_targets_with_empty_classes_are_not_labels():
    x, counts = np.zeros((8, 2), np.float32), np.arange(8)
    assert FederatedStream.from_arrays(x, counts).data.classes == tuple(map(str, range(8)))
    assert FederatedStream.from_arrays(x, counts, classes=()).data.classes == ()
    assert FederatedStream.from_arrays(x[:2], [1.0, 0.0], classes=["a", "b"]).data.targets.tolist() == [1, 0]


def test_random_transforms_differ_between_local_epochs(quiet):
    stream = stream_of(Noisy(), partition=IID(1), shuffle=False, batch_size=100)
    first, second = (batch[0] for *_, batch in seen(stream, quiet, local_epochs=2)[:2])
    assert first.shape == second.shape and not torch.isclose(first, second).any()


def test_random_samples_do_not_depend_on_other_clients(quiet):
    everybody = seen(stream_of(Noisy(), partition=IID(3)), quiet, local_epochs=2)
    some = seen(stream_of(Noisy(), partition=IID(3)), quiet, local_epochs=2, participation=1)
    for client, round_idx, (x, y) in some:
        assert any(
            (c, r) == (client, round_idx) and torch.equal(x, a) and torch.equal(y, b) for c, r, (a, b) in everybody
        )
    state = torch.get_rng_state()
    next(iter(read_batches(stream_of(Noisy()).get_samples, [], LoaderConfig(1))), None)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.seconds
@pytest.mark.parametrize("data", [Noisy, Tokens])
def test_num_workers_does_not_change_batches(quiet, data):
    alone, helped = (seen(stream_of(data(), num_workers=n), quiet, local_epochs=2) for n in (0, 2))
    assert len(alone) == len(helped)
    for (client, round_idx, one), (c, r, other) in zip(alone, helped, strict=True):
        assert (client, round_idx) == (c, r)
        pairs = (
            zip(one.values(), other.values(), strict=True) if isinstance(one, dict) else zip(one, other, strict=True)
        )
        assert all(torch.equal(a, b) for a, b in pairs)


def test_dataset_vectorized_training_equals_sequential(fit, make_task):
    states = []
    for size in (1, 3):
        task = make_task()
        fit(task, stream_of(Noisy(50), partition=IID(3)), max_vectorized_clients=size, seed=0, local_epochs=2)
        states.append(task.state_dict())
    torch.testing.assert_close(states[0], states[1])


def test_only_one_batch_is_read_at_a_time(quiet):
    class Counting(Noisy):
        held = 0

        def __getitem__(self, index):
            Counting.held += 1
            return super().__getitem__(index)

    class Watch(Keeper):
        def training_step(self, batch, batch_idx):
            self.read.append(Counting.held)
            return super().training_step(batch, batch_idx)

    stream, task = stream_of(Counting(), partition=IID(1)), Watch()
    task.read = []
    stream.setup("fit")
    # `setup` has read some items to compare them with `targets`, so reset the count.
    Counting.held = 0
    L.Trainer(strategy=FederatedStrategy(max_vectorized_clients=1, seed=0), max_epochs=1, **quiet).fit(
        task, datamodule=stream
    )
    # Between two steps, at most two batches of 4 samples are read. At most 8 batches are read up to the first step,
    # including the batches of the trial before the first round.
    read = [later - earlier for earlier, later in itertools.pairwise(task.read)]
    assert max(read) <= 2 * 4 < sum(read) and task.read[0] <= 8 * 4


def test_from_avalanche_keeps_experiences(quiet):
    from avalanche.benchmarks import nc_benchmark, ni_benchmark
    from avalanche.benchmarks.utils import as_classification_dataset

    generator = torch.Generator().manual_seed(0)

    def data(samples):
        y = torch.arange(samples) % 6
        raw = TensorDataset(torch.randn(samples, 3, generator=generator) + y[:, None], y)
        raw.targets = y.tolist()
        return raw

    train, test = data(60), data(24)
    benchmark = nc_benchmark(train, test, n_experiences=3, task_labels=False, seed=1)
    stream = FederatedStream.from_avalanche(
        benchmark, ClassIncremental(rounds_per_experience=2), partition=IID(2), seed=0
    )
    batches = seen(stream, quiet)
    classes = [sorted(experience.classes_in_this_experience) for experience in benchmark.train_stream]
    assert [list(labels) for labels in stream.plan.tasks["0"]] == classes
    for _, round_idx, (x, y) in batches:
        assert set(y.tolist()) <= set(classes[round_idx // 2])
        assert all((x[i] == train.tensors[0]).all(1).any() for i in range(len(y)))
    assert len(stream.plan.test) == 24 and everything(stream) == 120
    instances = ni_benchmark(train, test, n_experiences=2, task_labels=False, seed=1)
    stream = FederatedStream.from_avalanche(instances, partition=IID(3), seed=0)
    stream.setup("fit")
    assert isinstance(stream.scenario, DomainIncremental) and stream.plan.num_rounds == 2 and everything(stream) == 60
    parts = [as_classification_dataset(data(n)) for n in (12, 18)]
    stream = FederatedStream.from_avalanche(parts, split=Split(0.0), partition=IID(2), seed=0)
    stream.setup("fit")
    assert [sum(map(len, current.values())) for current in stream.plan.train] == [12, 18]
    with raises(MissingValueError, "train"):
        FederatedStream.from_avalanche([])


def test_batch_request_restores_global_generators():
    before = torch.get_rng_state()
    take = stream_of(Noisy())
    take.setup("fit")
    request = BatchRequest.keyed(np.arange(3), 0, "a", 1, 0, 2)
    assert torch.equal(request.load(take.get_samples)[0], request.load(take.get_samples)[0])
    assert torch.equal(before, torch.get_rng_state())


def test_concat_nested_different_shapes_raises():
    with raises(InvalidValueError, "x"):
        concat_nested([{"a": torch.zeros(1, 2)}, {"a": torch.zeros(1, 3)}])


LABELS = {
    "gaps": [3, 7, 9],
    "negative": [-1, 0, 1],
    "strings": ["sit", "stand", "walk"],
    "objects": np.array(["sit", "stand", "walk"], dtype=object),
}


def items(labels, samples, kind):
    """Return arrays, or a dataset of pairs or dicts. The input of each sample is its index."""
    y = np.asarray(labels)[np.arange(samples) % len(labels)]
    x = np.arange(samples, dtype=np.float32)[:, None]
    if kind == "arrays":
        return x, y

    class Items(Dataset):
        def __getitem__(self, index):
            return (x[index], y[index]) if kind == "pairs" else {"x": x[index], "label": y[index]}

        def __len__(self):
            return samples

    return Items(), None


@pytest.mark.parametrize("kind", ["arrays", "pairs", "dicts"])
@pytest.mark.parametrize("labels", LABELS)
def test_labels_become_numbers_and_names_are_kept(labels, kind):
    given = LABELS[labels]
    stream = FederatedStream.from_arrays(
        *items(given, 60, kind), scenario=ClassIncremental(3), partition=IID(2), split=Split(0.2), seed=0
    )
    # `num_classes` is available before `setup`.
    assert stream.num_classes == 3
    names = tuple(map(str, given))
    assert stream.classes == names and stream.plan.group_names(stream.classes) == list(names)
    stream.setup("fit")
    assert stream.y.tolist() == [index % 3 for index in range(60)]
    batch = stream.get_samples(np.arange(60))
    x, y = (batch["x"], batch["label"]) if kind == "dicts" else batch
    assert torch.equal(y, torch.arange(60) % 3) and y.dtype == torch.int64
    assert torch.equal(x[:, 0], torch.arange(60.0))
    assert sorted(stream.plan.tasks["0"]) == [(0,), (1,), (2,)]
    named = FederatedStream.from_arrays(
        *items(given, 60, kind), scenario=ClassIncremental(3, class_order=[names[2], names[0], names[1]]), seed=0
    )
    named.setup("fit")
    assert list(named.plan.tasks["0"]) == [(2,), (0,), (1,)]


def test_classes_define_numbers_of_text_labels():
    x, y = items(["sit", "walk"], 20, "arrays")
    stream = FederatedStream.from_arrays(x, y, classes=["walk", "run", "sit"], scenario=ClassIncremental(1))
    stream.setup("fit")
    assert stream.classes == ("walk", "run", "sit") and stream.y[:4].tolist() == [2, 0, 2, 0]
    with raises(UnknownNameError, "y"):
        FederatedStream.from_arrays(x, y, classes=["walk", "run"])


@pytest.mark.parametrize("labels", [[0.0, 1.0, np.nan], np.array(["a", "b", None], dtype=object), [0.0, np.inf, 1.0]])
def test_missing_labels_raise(labels):
    x, y = items(labels, 12, "arrays")
    with raises(InvalidValueError, "y"):
        FederatedStream.from_arrays(x, y)


def test_fractional_labels_with_classes_raise():
    x, y = items([0.5, 1.5], 12, "arrays")
    with pytest.raises(InvalidTypeError, check=lambda error: error.argument == "y"):
        FederatedStream.from_arrays(x, y, classes=["low", "high"])


def test_from_avalanche_keeps_class_names():
    from avalanche.benchmarks import nc_benchmark

    x, y = torch.arange(40.0)[:, None], torch.tensor([3, 7, 9, 11]).repeat(10)
    data = TensorDataset(x, y)
    data.targets = y
    benchmark = nc_benchmark(data, data, n_experiences=2, task_labels=False, fixed_class_order=[9, 3, 11, 7])
    stream = FederatedStream.from_avalanche(benchmark, partition=IID(2), seed=0)
    stream.setup("fit")
    assert stream.classes == ("3", "7", "9", "11")
    assert list(stream.plan.tasks["0"]) == [(0, 2), (1, 3)]
    assert set(stream.get_samples(stream.plan.test)[1].tolist()) == {0, 1, 2, 3}
