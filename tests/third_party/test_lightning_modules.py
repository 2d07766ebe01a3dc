"""Tests of third-party LightningModules and networks: a federation gives the results of plain Trainers."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.demos.transformer import LightningTransformer
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from lightning_fcl import FederatedStream
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split

from .steps import Steps

BATCH = 4


class Items(Dataset):
    """A list as a map-style data set."""

    def __init__(self, items: Sequence[Any]):
        self.items = items

    def __getitem__(self, index: int) -> Any:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)


@dataclass
class Stranger:
    """A third-party module with samples. The last ``tests`` samples are test samples."""

    module: L.LightningModule
    samples: Dataset
    collate_fn: Callable[[list], Any] = default_collate
    tests: int = 0

    def stream(self, clients: int, rounds: int = 1) -> FederatedStream:
        """Return a stream in which sample i belongs to client i modulo ``clients``, apart from the test samples."""
        number = len(self.samples) - self.tests
        owner = [str(i % clients) if i < number else "test" for i in range(len(self.samples))]
        return FederatedStream.from_arrays(
            self.samples,
            client_ids=owner,
            classes=(),
            scenario=ClassIncremental(1, rounds),
            split=Split(test=["test"] if self.tests else 0.0),
            batch_size=BATCH,
            shuffle=False,
            collate_fn=self.collate_fn,
        )

    def loader(self, rows: Sequence[int]) -> DataLoader:
        """Return a loader of the given samples, in order."""
        return DataLoader(Subset(self.samples, [int(row) for row in rows]), BATCH, collate_fn=self.collate_fn)

    test_loader = property(lambda self: self.loader(range(len(self.samples) - self.tests, len(self.samples))))


class Images:
    """A torchgeo module whose data module normalizes batches in `on_after_batch_transfer`."""

    def __init__(self) -> None:
        from torchgeo.datamodules import NonGeoDataModule
        from torchgeo.datasets import NonGeoDataset
        from torchgeo.trainers import ClassificationTask

        class Fields(NonGeoDataset):
            def __init__(self, split: str, rows: Sequence[int] | None = None):
                number = {"train": 16, "val": 4, "test": 10}[split]
                draw = torch.Generator().manual_seed(number)
                x, y = 100 + 50 * torch.randn(number, 3, 32, 32, generator=draw), torch.arange(number) % 3
                rows = rows if rows is not None and split == "train" else range(number)
                self.items = [{"image": x[row] + 20 * y[row], "label": y[row]} for row in rows]

            __getitem__, __len__ = Items.__getitem__, Items.__len__

        class Module(NonGeoDataModule):
            mean, std = torch.tensor([100.0, 110, 120]), torch.tensor([50.0, 55, 60])

            def train_dataloader(self):  # The loader of torchgeo's data module would shuffle.
                return DataLoader(self.train_dataset, self.batch_size)

        self._make = lambda rows=None: Module(Fields, BATCH, rows=rows)
        self.module = ClassificationTask(model="resnet10t", num_classes=3)
        self.test_loader = self._make()

    def stream(self, clients: int, rounds: int = 1) -> FederatedStream:
        scenario = ClassIncremental(1, rounds, class_order=[0, 1, 2])
        split = Split(test="official", validation="official")
        return FederatedStream(self._make(), scenario, IID(clients), split, BATCH, shuffle=False)

    def loader(self, rows: Sequence[int]) -> L.LightningDataModule:
        return self._make([int(row) for row in rows])


def molecules() -> Stranger:
    from chemprop import data, models
    from chemprop import nn as parts

    class Molecules(models.MPNN):
        """A chemprop model without its Noam schedule, which needs the number of steps in advance."""

        configure_optimizers = Steps.configure_optimizers

    smiles = ["C", "CC", "CCC", "CCO", "CO", "CN", "CCN", "CC=O", "C=C", "c1ccccc1", "CC(=O)O", "OCC#N", "CCCl", "CBr"]
    points = [data.MoleculeDatapoint.from_smi(one, [len(one) / 8]) for one in smiles]
    task = Molecules(parts.BondMessagePassing(d_h=16), parts.MeanAggregation(), parts.RegressionFFN(input_dim=16))
    return Stranger(task, data.MoleculeDataset(points), data.collate_batch, tests=4)


def series() -> Stranger:
    import pandas
    from pytorch_forecasting import NBeats, TimeSeriesDataSet

    rows = [(day, name, torch.sin(torch.tensor(day / 3.0 + name)).item()) for name in range(2) for day in range(18)]
    frame = pandas.DataFrame(rows, columns=["day", "name", "value"]).astype({"name": str})
    columns = {"time_idx": "day", "target": "value", "group_ids": ["name"], "time_varying_unknown_reals": ["value"]}
    data = TimeSeriesDataSet(frame, **columns, max_encoder_length=8, max_prediction_length=2)
    options = {"widths": [8, 8], "num_blocks": [1, 1], "num_block_layers": [2, 2], "dropout": 0.0, "optimizer": "adam"}
    return Stranger(NBeats.from_dataset(data, **options), data, data._collate_fn, tests=4)


def views() -> Stranger:
    """Return SimCLR with a memory bank in non-persistent buffers, from lightly's documentation."""
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead

    class SimCLR(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.BatchNorm1d(16), nn.ReLU())
            self.projection_head = SimCLRProjectionHead(16, 16, 8)
            self.criterion = NTXentLoss(memory_bank_size=(16, 8))

        def training_step(self, batch, batch_idx):
            (x0, x1), _ = batch
            return self.criterion(*(self.projection_head(self.backbone(x)) for x in (x0, x1)))

        configure_optimizers = Steps.configure_optimizers

    x = torch.randn(16, 3, 4, 4)
    return Stranger(SimCLR(), Items([((one, one + 0.1 * torch.randn(3, 4, 4)), 0) for one in x]))


def lora() -> Stranger:
    import peft

    network = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    config = peft.LoraConfig(r=2, lora_dropout=0.0, target_modules=["0", "2"], modules_to_save=["4"])
    items = [(torch.randn(6), i % 3) for i in range(16)]
    loss = lambda network, batch: F.cross_entropy(network(batch[0]), batch[1])  # noqa: E731
    return Stranger(Steps(peft.get_peft_model(network, config), loss), Items(items))


def sentences(dropout: float = 0.0, checkpointing: bool = True) -> Stranger:
    from transformers import BertConfig, BertForSequenceClassification

    dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 16,
    }
    network = BertForSequenceClassification(BertConfig(vocab_size=50, **sizes, **dropouts, num_labels=3))
    if checkpointing:
        network.activation_checkpointing_enable()
    # The constructor returns the network in evaluation mode, in which dropout has no effect. Lightning keeps this mode.
    network.train()
    items = []
    for i in range(16):
        mask = (torch.arange(8) < 3 + i % 6).long()
        items.append({"input_ids": torch.randint(50, (8,)) * mask, "attention_mask": mask, "labels": i % 3})
    return Stranger(Steps(network, lambda network, batch: network(**batch).loss), Items(items))


def words() -> Stranger:
    class Words(LightningTransformer):
        """The demo module of Lightning, without the download of a text."""

        def prepare_data(self):
            pass

    task = Words(vocab_size=50)
    for part in task.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(part, nn.MultiheadAttention):
            part.dropout = 0.0
    text = torch.randint(50, (16, 9))
    return Stranger(task, Items([(line[:-1], line[1:]) for line in text]))


STRANGERS = {
    "torchgeo": Images,
    "chemprop": molecules,
    "pytorch-forecasting": series,
    "lightly": views,
    "peft": lora,
    "transformers": sentences,
    "lightning": words,
}


@pytest.mark.may(
    "Any batches, layers, losses and hooks of a plain Trainer",
    "A round of one client equals an epoch of a plain Trainer.",
)
@pytest.mark.parametrize("name", STRANGERS)
def test_one_client_round_equals_plain_trainer_epoch(name, federated, plain, assert_alike):
    stranger = STRANGERS[name]()
    module, stream = copy.deepcopy(stranger.module), stranger.stream(clients=1)
    federated(module, stream)
    (rows,) = stream.plan.train[0].values()
    plain(stranger.module, stranger.loader(rows))
    assert_alike(module, stranger.module.state_dict())


@pytest.mark.may(
    "Training as in a plain Trainer, with several clients",
    "The server state equals the weighted mean of the states after training each client in a plain Trainer.",
)
@pytest.mark.parametrize("name", STRANGERS)
def test_two_client_rounds_equal_hand_written_fedavg(name, federated, by_hand, assert_alike):
    stranger = STRANGERS[name]()
    module, stream = copy.deepcopy(stranger.module), stranger.stream(clients=2, rounds=2)
    federated(module, stream)
    clients = [(len(rows), stranger.loader(rows)) for rows in stream.plan.train[0].values()]
    before = copy.deepcopy(stranger.module.state_dict())
    after = by_hand(stranger.module, clients, rounds=2)
    assert any(not torch.equal(before[key], after[key]) for key in after)
    assert_alike(module, after)


@pytest.mark.may("Metrics logged in `test_step`", "`trainer.test` returns the same values as in a plain Trainer.")
@pytest.mark.parametrize("name", ["torchgeo", "chemprop", "pytorch-forecasting"])
def test_test_step_logs_same_values_as_plain_trainer(name, federated):
    stranger = STRANGERS[name]()
    stream = stranger.stream(clients=2)
    trainer = federated(stranger.module, stream)
    (logged,) = trainer.test(stranger.module, datamodule=stream, verbose=False)
    alone = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    (expected,) = alone.test(stranger.module, stranger.test_loader, verbose=False)
    assert logged and logged == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.may(
    "Random numbers in layers, with gradient checkpointing",
    "Each client has its own random numbers. Recomputed activations use the same random numbers.",
)
@pytest.mark.parametrize("clients", [1, 3])
def test_gradient_checkpointing_with_dropout_equals_without(clients, federated, assert_alike):
    """The activations that gradient checkpointing recomputes have the same dropout masks as the first activations."""
    once, again = sentences(dropout=0.3, checkpointing=False), sentences(dropout=0.3)
    again.module.load_state_dict(once.module.state_dict())
    again.samples = once.samples
    for stranger in (once, again):
        federated(stranger.module, stranger.stream(clients, rounds=2), seed=0)
    assert_alike(again.module, once.module.state_dict())


@pytest.mark.may(
    "Frozen parameters, also if they are frozen temporarily",
    "Clients do not upload a parameter while the parameter is frozen.",
)
def test_frozen_parameters_unchanged_and_not_uploaded(federated):
    stranger = lora()
    before = {name: p.detach().clone() for name, p in stranger.module.named_parameters() if not p.requires_grad}
    trainer = federated(stranger.module, stranger.stream(clients=2))
    after = dict(stranger.module.named_parameters())
    assert before and all(torch.equal(after[name], value) for name, value in before.items())
    trained = sum(p.numel() for p in stranger.module.parameters() if p.requires_grad)
    assert trainer.strategy.server.record.upload_bytes == dict.fromkeys("01", 4 * trained)


def test_noam_schedule_uses_steps_of_one_client(federated):
    from chemprop import models
    from chemprop import nn as parts

    def make():
        return models.MPNN(parts.BondMessagePassing(d_h=16), parts.MeanAggregation(), parts.RegressionFFN(input_dim=16))

    task, stranger = make(), molecules()
    before = copy.deepcopy(task.state_dict())
    federated(task, stranger.stream(clients=2))  # Each client has 5 samples.
    assert any(not torch.equal(value, before[name]) for name, value in task.state_dict().items())
    stranger.tests += 1  # Now the clients have 5 and 4 samples.
    with pytest.raises(ValueError, match=r"^Expected the number of batches to be the same for all clients and rounds"):
        federated(make(), stranger.stream(clients=2))
