"""Tests of datasets with `__getitems__`, of `worker_init_fn`, and of targets in the argument `y`."""

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from raising import raises
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, get_worker_info, random_split

from lightning_fcl import FederatedStrategy, FederatedStream
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental, Stationary
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidValueError

SIZE = 48


class Padded(Dataset):
    """A dataset of sequences of different lengths.

    `__getitems__` pads the sequences of a batch to the same length, like transforms of Hugging Face.
    """

    def __init__(self, size=SIZE):
        self.lengths = torch.arange(size) % 7 + 1
        self.batches, self.shift = [], 0.0

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, row):
        return self.__getitems__([row])[0]

    def __getitems__(self, rows):
        self.batches.append(len(rows))
        width = int(self.lengths[list(rows)].max())
        return [
            {
                "x": F.pad(torch.full((int(self.lengths[r]),), r + self.shift), (0, width - int(self.lengths[r]))),
                "label": r % 4,
            }
            for r in rows
        ]


class OneByOne(Padded):
    __getitems__ = None

    def __getitem__(self, row):
        self.batches.append(1)
        return {"x": torch.full((7,), row + self.shift), "label": row % 4}


class Seen(Callback):
    """Callback that stores the training batches."""

    def __init__(self):
        self.batches = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch["x"].clone())


class Sums(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 4)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.layer(batch["x"].sum(1, keepdim=True) / 100), batch["label"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


WRAPPED = {
    "alone": lambda make: make(),
    "subset": lambda make: Subset(make(), range(5, SIZE)),
    "random split": lambda make: random_split(make(), [0.75, 0.25], torch.Generator().manual_seed(0))[0],
    "concatenated": lambda make: ConcatDataset([make(20), make(24)]),
}


@pytest.mark.seconds
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("wrap", "make"),
    # A plain `ConcatDataset` reads one item at a time and does not pad, so it is not combined with `Padded`.
    [(wrap, make) for wrap in WRAPPED for make in (Padded, OneByOne) if (wrap, make) != ("concatenated", Padded)],
)
def test_batched_reads_equal_plain_loader(quiet, wrap, make, workers):
    data, seen = WRAPPED[wrap](make), Seen()
    stream = FederatedStream(
        {"a": data}, Stationary(1), split=Split(test=0.0), batch_size=8, shuffle=False, num_workers=workers
    )
    trainer = L.Trainer(strategy=FederatedStrategy(max_vectorized_clients=1), callbacks=[seen], max_epochs=1, **quiet)
    trainer.fit(Sums(), datamodule=stream)
    plain = [batch["x"] for batch in DataLoader(WRAPPED[wrap](make), 8)]
    assert len(plain) == len(seen.batches)
    assert all(map(torch.equal, plain, seen.batches))


@pytest.mark.seconds
def test_batched_reads_several_clients_use_getitems(quiet):
    data = {name: Padded(24) for name in "ab"}
    stream = FederatedStream(data, Stationary(1), split=Split(test=0.25), batch_size=6, seed=0)
    stream.setup("fit")
    # Setup also reads the targets in batches.
    assert sum(len(own.batches) for own in data.values()) <= 4
    for own in data.values():
        own.batches.clear()
    trainer = L.Trainer(strategy=FederatedStrategy(max_vectorized_clients=1), max_epochs=1, **quiet)
    trainer.fit(Sums(), datamodule=stream)
    for own in data.values():
        assert sum(size == 6 for size in own.batches) >= 2


@pytest.mark.seconds
def test_batched_reads_labels_become_class_numbers(quiet):
    class Named(Padded):
        def __getitems__(self, rows):
            return [{**item, "label": "wxyz"[item["label"]]} for item in super().__getitems__(rows)]

    stream = FederatedStream(Named(), ClassIncremental(2), IID(2), Split(test=0.25), batch_size=8, seed=0)
    stream.setup("fit")
    rows = stream.plan.train[0]["0"]
    batch = stream.get_samples(rows)
    assert stream.classes == ("w", "x", "y", "z")
    assert torch.equal(batch["label"], torch.from_numpy(rows % 4))
    assert torch.equal(batch["x"][:, 0], torch.from_numpy(rows).float())


class Module(L.LightningDataModule):
    def __init__(self, data, init, sampler=None):
        super().__init__()
        self.data, self.init, self.sampler = data, init, sampler

    def train_dataloader(self):
        loading = {"sampler": self.sampler, "batch_size": 8, "num_workers": 2, "worker_init_fn": self.init}
        return DataLoader(self.data, **loading)


def shifts(worker):
    get_worker_info().dataset.shift = 0.5


@pytest.mark.seconds
@pytest.mark.parametrize("case", ["one module", "sampler", "two clients"])
def test_worker_init_fn_gets_dataset_of_its_loader(quiet, case):
    def of_its_own(worker):
        get_worker_info().dataset.shift = 100.5

    data = Module(OneByOne(), shifts, range(8, 40) if case == "sampler" else None)
    if case == "two clients":
        data = {"a": data, "b": Module(OneByOne(), of_its_own)}
    seen = Seen()
    stream = FederatedStream(data, Stationary(1), split=Split(test=0.0), shuffle=False)
    if not isinstance(data, dict):
        stream.partition = IID(1)
    trainer = L.Trainer(strategy=FederatedStrategy(max_vectorized_clients=1), callbacks=[seen], max_epochs=1, **quiet)
    trainer.fit(Sums(), datamodule=stream)
    found = torch.cat(seen.batches)[:, 0].sort().values
    rows = torch.arange(8, 40) if case == "sampler" else torch.arange(SIZE)
    expected = [rows + 0.5] + ([rows + 100.5] if case == "two clients" else [])
    assert torch.equal(found, torch.cat(expected).sort().values)


class Graph:
    """An item whose type the stream does not recognize, so that the stream cannot find the target."""

    def __init__(self, row):
        self.x, self.y = torch.full((row % 3 + 1, 2), float(row)), row % 4


class Graphs(Dataset):
    def __init__(self, size=SIZE):
        self.graphs = [Graph(row) for row in range(size)]
        self.y = np.array([graph.y for graph in self.graphs])

    def __len__(self):
        return len(self.graphs)

    def __getitem__(self, row):
        return self.graphs[row]


def together(graphs):
    return {"x": torch.stack([graph.x.sum(0)[:1] for graph in graphs]), "label": torch.tensor([g.y for g in graphs])}


class GraphModule(L.LightningDataModule):
    def __init__(self, test=None):
        super().__init__()
        self.test = test
        if test is not None:
            self.test_dataloader = lambda: DataLoader(test, 8, collate_fn=together)

    def train_dataloader(self):
        return DataLoader(Graphs(), 8, collate_fn=together)


@pytest.mark.seconds
@pytest.mark.parametrize("kind", ["module", "dataset", "splits", "clients", "list of modules"])
def test_separate_targets_define_classes(quiet, kind):
    y, few = Graphs().y, Graphs(12).y
    options = {"collate_fn": together, "split": Split(test=0.25), "batch_size": 8, "partition": IID(2)}
    data, targets = {
        "module": (GraphModule(), y),
        "dataset": (Graphs(), y),
        "splits": ({"train": Graphs(), "test": Graphs(12)}, {"train": y, "test": few}),
        "clients": ({"a": {"train": Graphs(), "test": Graphs(12)}, "b": {"train": Graphs(12), "test": Graphs(12)}},
                    {"a": {"train": y, "test": few}, "b": {"train": few, "test": few}}),
        "list of modules": ([GraphModule(), GraphModule()], [y, y]),
    }[kind]  # fmt: skip
    if kind in ("splits", "clients"):
        options.pop("split")
    if kind in ("clients", "list of modules"):
        options.pop("partition")
    stream = FederatedStream(data, ClassIncremental(2), y=targets, seed=0, **options)
    seen = Seen()
    trainer = L.Trainer(strategy=FederatedStrategy(max_vectorized_clients=1), callbacks=[seen], max_epochs=2, **quiet)
    trainer.fit(Sums(), datamodule=stream)
    assert stream.num_classes == 4 and len(seen.batches) > 2
    for number, current in enumerate(stream.plan.train):
        for rows in current.values():
            labels = stream.get_samples(rows)["label"].numpy()
            assert np.array_equal(labels, stream.y[rows])
            assert {*labels} <= {*stream.plan.class_split(number)[0]}


REJECTED = [
    (Graphs, lambda y: y[:5], "y"),
    (GraphModule, lambda y: y[:5], "y"),
    (lambda: {"a": Graphs(), "b": Graphs()}, lambda y: {"a": y}, "y"),
    (lambda: {"a": Graphs(), "b": Graphs()}, lambda y: y, "y"),
    (lambda: [Graphs(), Graphs()], lambda y: [y, y[:3]], "y"),
    (lambda: GraphModule(Graphs(8)), lambda y: y, "y"),
    (lambda: "digits", lambda y: y, "y"),
]


@pytest.mark.parametrize(("data", "y", "argument"), REJECTED)
def test_separate_targets_wrong_structure_raises(data, y, argument):
    stream = FederatedStream(data(), Stationary(1), y=y(Graphs().y), collate_fn=together)
    with raises(InvalidValueError, argument):
        stream.setup("fit")
