"""Tests of metrics, lists and counters at the end of an epoch, with one process and with several processes."""

import logging
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


class Network(L.LightningModule):
    """A linear network with metrics of its outputs and metrics of its inputs."""

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
        for metric in (self.accuracy, self.never_reset, self.logged):
            metric.update(output, y)
        self.scores(output, y)
        for metric in (self.most, self.least):
            metric.update(x[:, 0])
        self.labels.update(y)
        self.loss.update(loss)
        self.log("logged", self.logged, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.untouched.update(len(batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def values(self):
        """Return the values that the module has at the end of an epoch, by name."""
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
    """A network that also stores metrics and lists in containers. Clients train sequentially."""

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


class Clients(Callback):
    """Counts clients and rounds. Stores the values of the callback and of the module at the end of each epoch."""

    def __init__(self, folder):
        self.folder = folder
        self.rounds = self.clients = 0
        self.names, self.found = [], []

    def on_client_end(self, trainer, pl_module, client_round):
        self.clients += 1
        self.names.append(client_round.client_id)

    def on_round_end(self, trainer, pl_module):
        self.rounds += 1

    def values(self):
        """Return the values that the callback has at the end of an epoch, by name."""
        return {"rounds": self.rounds, "clients": self.clients, "names": self.names}

    def on_train_epoch_end(self, trainer, pl_module):
        self.found.append(deepcopy({"callback": self.values(), "module": pl_module.values()}))
        pl_module.reset()

    def on_train_end(self, trainer, pl_module):
        torch.save(self.found, self.folder / f"{trainer.global_rank}.pt")


class Batches(Clients):
    """Counts clients, rounds, batches and samples, and stores the first feature and the labels of the samples."""

    def __init__(self, folder):
        super().__init__(folder)
        self.batches = self.samples = 0
        self.seen, self.labels, self.by_label = [], Counter(), defaultdict(list)
        self.metric, self.sums = CatMetric(), {"x": SumMetric()}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        x, y = batch
        self.batches += 1
        self.samples += len(y)
        self.seen.append(x[:, 0])
        self.labels.update(y.tolist())
        self.by_label[int(y[0])].append(len(y))
        self.metric.update(y)
        self.sums["x"].update(x)

    def values(self):
        return {
            **super().values(),
            "batches": self.batches,
            "samples": self.samples,
            "seen": torch.cat(self.seen),
            "labels": dict(self.labels),
            "by label": dict(self.by_label),
            "metric": self.metric.compute(),
            "sum": self.sums["x"].compute(),
        }

    def on_train_epoch_end(self, trainer, pl_module):
        super().on_train_epoch_end(trainer, pl_module)
        self.metric.reset()


@pytest.fixture
def seen(fit, tmp_path):
    """Return a function that fits with ``number`` processes, and returns each process's values and the Trainer."""

    def run(number, module, stream, callback=Batches, arguments=None, **kwargs):
        folder = tmp_path / str(number)
        folder.mkdir()
        strategy = FederatedStrategy(start_method="fork", seed=0, **kwargs)
        trainer = fit(
            module, stream, [callback(folder)], strategy, trainer_args={"devices": number, **(arguments or {})}
        )
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(number)], trainer

    return run


def check_close(one, other):
    """Check that integers, lists and orders are equal, and that floats are equal up to rounding."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert [*one] == [*other]
        for key, value in one.items():
            check_close(value, other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for value, second in zip(one, other, strict=True):
            check_close(value, second)
    elif isinstance(one, str):
        assert one == other
    else:
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def trained(stream):
    """Return a dict for each round, which maps a client to the first two features and the labels of its samples."""
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


def check_by_hand(found, stream, epochs):
    """Compare all values that depend only on samples with NumPy's result on all clients' samples."""
    rounds = trained(stream)
    clients = batches = 0
    for number, (noted, now) in enumerate(zip(found, rounds, strict=True), 1):
        so_far = [samples for clients in rounds[:number] for samples in clients.values()]
        every_x, every_y = (np.concatenate(epochs * parts) for parts in zip(*so_far, strict=True))
        x, y = (np.concatenate(epochs * parts) for parts in zip(*now.values(), strict=True))
        callback, module = noted["callback"], noted["module"]
        clients += len(now)
        assert (callback["rounds"], callback["clients"], len(callback["names"])) == (number, clients, clients)
        assert sorted(callback["names"][-len(now) :]) == sorted(now)
        np.testing.assert_array_equal(sorted(module["labels"].tolist()), sorted(y.tolist()))
        assert float(module["most"]) == x[:, 0].max() and float(module["least"]) == x[:, 0].min()
        if "samples" in callback:
            batches += epochs * sum(-(-len(y) // 8) for _, y in now.values())
            assert (callback["batches"], callback["samples"]) == (batches, len(every_y))
            assert callback["labels"] == dict(Counter(every_y.tolist()))
            assert sum(map(sum, callback["by label"].values())) == len(every_y)
            np.testing.assert_array_equal(sorted(callback["seen"].tolist()), sorted(every_x[:, 0].tolist()))
            np.testing.assert_array_equal(sorted(callback["metric"].tolist()), sorted(y.tolist()))
        if "pearson" in module:
            first, second = every_x.astype(np.float64).T
            assert float(module["pearson"]) == pytest.approx(np.corrcoef(first, second)[0, 1], abs=1e-4)
            assert float(module["sums"]["1"]) == pytest.approx(np.square(first - second).mean(), rel=1e-5)
            assert sum(module["sizes"]) == len(every_y)


@pytest.mark.may(
    "Metrics computed in `on_train_epoch_end` with several processes", "The metrics cover the samples of all clients."
)
@pytest.mark.seconds
@pytest.mark.parametrize(
    ("kind", "callback", "max_vectorized_clients"),
    [
        pytest.param(Network, Batches, 1, marks=pytest.mark.long),
        (Network, Clients, 2),
        pytest.param(Nested, Batches, 1, marks=pytest.mark.rounding),  # `Nested` has all metrics of `Network`.
    ],
)
def test_epoch_states_1_2_and_3_processes_are_equal(seen, make_stream, kind, callback, max_vectorized_clients):
    """On every process, each of six clients of different sizes is counted once, in the order of the clients."""
    found = []
    for number in (1, 2, 3):
        stream = make_stream(partition="dirichlet", num_clients=6, num_experiences=2, rounds_per_experience=2)
        everywhere, trainer = seen(
            number, kind(), stream, callback, max_vectorized_clients=max_vectorized_clients, local_epochs=2
        )
        assert trainer.strategy.num_vectorized_clients == max_vectorized_clients or number > 1
        for other in everywhere[1:]:
            check_close(other, everywhere[0])
        check_by_hand(everywhere[0], stream, epochs=2)
        found.append(everywhere[0])
    for one, two, three in zip(*found, strict=True):
        check_close(two, one)
        check_close(three, one)
        assert torch.equal(two["module"]["loss"], three["module"]["loss"])
        assert torch.equal(one["module"]["never reset"], two["module"]["never reset"])


class Validated(Network):
    """A network that updates two metrics in both training and validation."""

    def training_step(self, batch, batch_idx):
        self.untouched.update(len(batch[1]))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.least.update(len(batch[1]))
        self.untouched.update(len(batch[1]))

    def on_validation_epoch_start(self):
        self.at_validation = self.untouched.compute()

    def values(self):
        both = {"both": self.untouched.compute(), "training": self.at_validation}
        return {**super().values(), **both}


@pytest.mark.seconds
def test_epoch_states_validation_counts_once(seen, make_stream):
    """Validation runs on every process, and training metrics contain the samples of all clients."""
    found = []
    for number in (1, 3):
        stream = make_stream(num_clients=3, rounds_per_experience=2, validation=0.2)
        everywhere, _ = seen(
            number, Validated(), stream, arguments={"num_sanity_val_steps": 0}, max_vectorized_clients=1
        )
        for noted, clients in zip(everywhere[-1], trained(stream), strict=True):
            training = sum(len(y) for _, y in clients.values())
            assert float(noted["module"]["training"]) == training < float(noted["module"]["both"])
        found.append(everywhere)
    for everywhere in found[1]:
        check_close(everywhere, found[0][0])


@pytest.mark.seconds
def test_epoch_states_process_without_clients_has_all_states(seen, make_stream):
    """The third process has no client in the second round, but gets the states of the two trained clients."""
    swarm = Swarm(leaves_at={"1": 1})
    found = [
        seen(number, Nested(), make_stream(num_clients=3), max_vectorized_clients=1, swarm=swarm)[0]
        for number in (1, 3)
    ]
    for everywhere in found[1]:
        check_close(everywhere, found[0][0])


class Odd(Metric):
    """A custom metric whose tensor has no reduction, or does not start at 0."""

    full_state_update = False

    def __init__(self, reduction, start=0.0):
        super().__init__()
        self.add_state("total", torch.tensor(start), dist_reduce_fx=reduction)

    def update(self, x):
        self.total = self.total + x.abs().sum()

    def compute(self):
        return self.total


class Strange(Clients):
    """Stores metrics and attributes. Some can be merged over processes, and some cannot."""

    def __init__(self, folder):
        super().__init__(folder)
        self.plain, self.running = Odd(None), Running(SumMetric(), 2)
        self.started, self.resets = Odd("sum", 5.0), SumMetric()
        self.total, self.last, self.array = 0.0, 0, np.zeros(2)
        self.count = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.strategy.current_round.client_group.step == 1:
            self.resets.reset()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for metric in (self.plain, self.running, self.started, self.resets):
            metric.update(batch[0][:, 0])
        self.total += float(batch[0].sum())
        self.last = batch_idx
        self.array += 1
        self.count += 1

    def values(self):
        return {"started": self.started.compute(), "resets": self.resets.compute(), "count": self.count}


@pytest.mark.seconds
def test_epoch_states_not_mergeable_warns_once(seen, make_stream, tmp_path):
    """The warning names the states that cannot be merged. All other states are merged."""
    found = []
    for number in (1, 2):
        handler = logging.FileHandler(tmp_path / f"{number}.log")
        logging.getLogger("lightning_fcl").addHandler(handler)
        stream = make_stream(num_clients=6, rounds_per_experience=2, batch_size=8)
        found.append(seen(number, Network(), stream, Strange, max_vectorized_clients=1)[0])
        logging.getLogger("lightning_fcl").removeHandler(handler)
        handler.close()
        said = (tmp_path / f"{number}.log").read_text()
        assert said.count("`Strange.plain`") == number - 1
        for name in ("plain", "running", "total", "last", "array"):
            assert (f"`Strange.{name}`" in said) is (number == 2)
    assert "started" not in said and "resets" not in said and "count" not in said
    for everywhere in found[1]:
        check_close(everywhere, found[0][0])
