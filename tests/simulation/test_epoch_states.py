"""Metrics, lists and counters at the end of an epoch, with one process and with several."""

from collections import Counter, defaultdict
from copy import deepcopy

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, MinMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassPrecision
from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef
from torchmetrics.wrappers import Running

from lightning_fcl import FederatedStrategy
from lightning_fcl.federation.swarm import Swarm

pytestmark = pytest.mark.rounding


class Network(L.LightningModule):
    """A linear network that keeps metrics of its outputs, and of its samples alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(6, 4)
        self.accuracy = MulticlassAccuracy(4, average="micro")
        self.never_reset = MulticlassAccuracy(4, average="micro")
        self.logged = MulticlassAccuracy(4, average="micro")
        self.untouched = SumMetric()
        self.labels = CatMetric()
        self.loss = MeanMetric()
        self.most, self.least = MaxMetric(), MinMetric()
        self.scores = MetricCollection([MulticlassF1Score(4), MulticlassPrecision(4), MulticlassAccuracy(4)])

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        output = self(x)
        loss = F.cross_entropy(output, y)
        for metric in (self.accuracy, self.never_reset, self.logged, self.scores):
            metric.update(output, y)
        for metric in (self.most, self.least):
            metric.update(x[:, 0])
        self.labels.update(y)
        self.loss.update(loss.detach(), len(y))
        self.log("logged", self.logged, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.untouched.update(len(batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def values(self):
        """What the module sees at the end of an epoch."""
        return {
            "accuracy": self.accuracy.compute(),
            "updates": self.accuracy.update_count,
            "never reset": self.never_reset.compute(),
            "logged": self.logged.compute(),
            "labels": self.labels.compute(),
            "loss": self.loss.compute(),
            "most": self.most.compute(),
            "least": self.least.compute(),
            "scores": self.scores.compute(),
        }

    def reset(self):
        for metric in (self.accuracy, self.labels, self.loss, self.most, self.least, self.scores, self.untouched):
            metric.reset()


class Nested(Network):
    """Keeps metrics, lists and numbers in containers, and trains one client at a time."""

    def __init__(self):
        super().__init__()
        self.by_name = {"sums": [SumMetric(), MeanSquaredError()]}
        self.pearson = PearsonCorrCoef()
        self.sizes, self.lists = [], {"sizes": []}

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.by_name["sums"][0].update(y)
        self.by_name["sums"][1].update(x[:, 0], x[:, 1])
        self.pearson.update(x[:, 0], x[:, 1])
        self.sizes.append(len(y))
        self.lists["sizes"].append(float(x[0, 0]))
        return super().training_step(batch, batch_idx)

    def values(self):
        sums = {str(place): metric.compute() for place, metric in enumerate(self.by_name["sums"])}
        own = {"sums": sums, "pearson": self.pearson.compute(), "sizes": [*self.sizes], "lists": [*self.lists["sizes"]]}
        return {**super().values(), **own}


class Watch(Callback):
    """Counts and keeps what it sees in batches, and notes all of it at the end of each epoch."""

    def __init__(self, folder):
        self.folder = folder
        self.batches = self.samples = self.rounds = self.clients = 0
        self.seen, self.labels, self.by_label = [], Counter(), defaultdict(list)
        self.metric, self.sums = CatMetric(), {"x": SumMetric()}
        self.found = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        x, y = batch
        self.batches += 1
        self.samples += len(y)
        self.seen.append(x[:, 0])
        self.labels.update(y.tolist())
        self.by_label[int(y[0])].append(len(y))
        self.metric.update(y)
        self.sums["x"].update(x)

    def on_client_end(self, trainer, pl_module, client_round):
        self.clients += 1

    def on_round_end(self, trainer, pl_module):
        self.rounds += 1

    def on_train_epoch_end(self, trainer, pl_module):
        own = {
            "counts": [self.batches, self.samples, self.rounds, self.clients],
            "seen": torch.cat(self.seen),
            "labels": dict(self.labels),
            "by label": dict(self.by_label),
            "metric": self.metric.compute(),
            "sum": self.sums["x"].compute(),
        }
        self.found.append(deepcopy({"callback": own, "module": pl_module.values()}))
        pl_module.reset()
        self.metric.reset()

    def on_train_end(self, trainer, pl_module):
        torch.save(self.found, self.folder / f"{trainer.global_rank}.pt")


@pytest.fixture
def seen(fit, tmp_path):
    """Fits with a number of processes. Returns what each of them has noted, the stream, and the Trainer."""

    def run(number, module, stream, callback=Watch, **kwargs):
        folder = tmp_path / str(number)
        folder.mkdir()
        strategy = FederatedStrategy(start_method="fork", seed=0, **kwargs)
        trainer = fit(module, stream, [callback(folder)], strategy, trainer_args={"devices": number})
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(number)], trainer

    return run


def check_close(one, other):
    """Whole numbers, lists and orders are equal, sums of floats to rounding."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert [*one] == [*other]
        for key, value in one.items():
            check_close(value, other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for value, second in zip(one, other, strict=True):
            check_close(value, second)
    else:
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def trained(stream):
    """The first two features and the labels of the samples of each round, by client."""
    x, y = toy()
    return [
        {client: (x[rows][:, :2], y[rows]) for client, rows in clients.items() if len(rows)}
        for clients in stream.plan.train
    ]


def toy():
    rng = np.random.default_rng(0)
    y = np.arange(240) % 4
    x = rng.normal(size=(240, 6)) + 2 * np.eye(4, 6)[y]
    return x.astype(np.float32), y.astype(np.int64)


def check_by_hand(found, stream, epochs=2):
    """All values that depend on samples alone, over all clients' samples, in NumPy."""
    batches = samples = 0
    every_label = Counter()
    for number, (noted, clients) in enumerate(zip(found, trained(stream), strict=True), 1):
        x = np.concatenate([x for x, _ in clients.values() for _ in range(epochs)])
        y = np.concatenate([y for _, y in clients.values() for _ in range(epochs)])
        batches += epochs * sum(-(-len(y) // 8) for _, y in clients.values())
        samples += len(y)
        every_label.update(y.tolist())
        callback, module = noted["callback"], noted["module"]
        assert callback["counts"][:3] == [batches, samples, number]
        assert callback["labels"] == dict(every_label)
        assert sum(map(sum, callback["by label"].values())) == samples
        assert len(callback["seen"]) == samples
        np.testing.assert_array_equal(sorted(callback["seen"][-len(y) :].tolist()), sorted(x[:, 0].tolist()))
        np.testing.assert_array_equal(sorted(callback["metric"].tolist()), sorted(y.tolist()))
        np.testing.assert_array_equal(sorted(module["labels"].tolist()), sorted(y.tolist()))
        assert float(module["most"]) == x[:, 0].max() and float(module["least"]) == x[:, 0].min()
        if "pearson" not in module:
            continue
        so_far = [one[:, :2] for clients in trained(stream)[:number] for one, _ in clients.values()]
        pairs = np.concatenate(so_far).astype(np.float64)
        assert float(module["pearson"]) == pytest.approx(np.corrcoef(pairs.T)[0, 1], abs=1e-4)
        assert float(module["sums"]["1"]) == pytest.approx(np.square(pairs[:, 0] - pairs[:, 1]).mean(), rel=1e-5)
        assert sum(module["sizes"]) == samples


@pytest.mark.may("compute metrics in `on_train_epoch_end`, in several processes", "metrics cover the samples of all clients")
@pytest.mark.seconds
@pytest.mark.parametrize(("kind", "cohort_size"), [(Network, 1), (Network, 2), (Nested, 1)])
def test_epoch_states_equal_on_1_2_and_3_processes(seen, make_stream, kind, cohort_size):
    found = {}
    for number in (1, 2, 3):
        stream = make_stream(partition="dirichlet", clients=6, experiences=2, rounds_per_experience=2)
        everywhere, trainer = seen(number, kind(), stream, cohort_size=cohort_size, local_epochs=2)
        assert trainer.strategy.clients_at_once == cohort_size or number > 1
        for other in everywhere[1:]:
            check_close(other, everywhere[0])
        found[number] = everywhere[0]
        check_by_hand(everywhere[0], stream)
    check_close(found[2], found[1])
    check_close(found[3], found[1])
    for one, two, three in zip(*found.values(), strict=True):
        assert torch.equal(two["module"]["loss"], three["module"]["loss"])  # to the last bit
        assert torch.equal(one["module"]["never reset"], two["module"]["never reset"])
