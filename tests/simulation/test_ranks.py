"""Tests of training in several processes: bitwise identical results, and each client is trained by one process."""

import hashlib
import os
import time
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn

from lightning_fcl import (
    AdaptiveClip,
    ClientSpeeds,
    DifferentialPrivacy,
    FedBuff,
    FederatedStrategy,
    Poisson,
    RidgeClassifier,
)
from lightning_fcl.callbacks import (
    CCVR,
    EWC,
    FOT,
    GEM,
    SCAFFOLD,
    ContinualMetrics,
    DERpp,
    Fed3R,
    FedCBDR,
    FedDyn,
    FedNova,
    FedProto,
    FedProx,
    FedRep,
    FLwF2T,
    IntrinsicPlasticity,
    LwF,
    ReFed,
    Replay,
    Unlearning,
)
from lightning_fcl.federation.compression import TopK
from lightning_fcl.federation.reductions import Reduction
from lightning_fcl.federation.robust import Krum, TrimmedMean
from lightning_fcl.federation.swarm import Swarm
from lightning_fcl.models import MLP


def digest(module):
    """Return a hash of the bits of a module's state."""
    found = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        found.update(name.encode() + value.cpu().numpy().tobytes())
    return found.hexdigest()


class Noise:
    """A transform that draws from a NumPy generator and from PyTorch's global generator."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __call__(self, x):
        return x + torch.randn(x.shape) + float(self.rng.normal())


class WhoTrains(Callback):
    """Creates an empty file for each client that a process has trained in a round."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def on_client_end(self, trainer, pl_module, client_round):
        (self.folder / f"{client_round.round_idx}-{client_round.client_id}-{trainer.global_rank}").touch()


@pytest.fixture
def ranks(fit, tmp_path):
    """Return a function that fits with a number of processes.

    The function returns the hash of the weights, the record, the (round, client, process) triples and the checkpoint.
    Fits use one thread, as each of several processes does, because sums of batch normalization differ with two threads.
    """

    def run(number, task, stream, callbacks=(), max_epochs=None, ckpt_path=None, **kwargs):
        folder = tmp_path / str(time.monotonic_ns())
        folder.mkdir()
        metrics = ContinualMetrics(when="both")
        strategy = FederatedStrategy(start_method="fork", **kwargs)
        fit(
            task,
            stream,
            [*callbacks, metrics, WhoTrains(folder), ModelCheckpoint(folder, "last")],
            strategy,
            max_epochs,
            ckpt_path,
            {"devices": number, "enable_checkpointing": True},
        )
        for entry in metrics.record["rounds"]:
            entry.pop("seconds")
            entry.pop("processor_seconds")
        trained = [tuple(path.name.split("-")) for path in folder.glob("*-*-*")]
        return digest(task), metrics.record, trained, folder / "last.ckpt"

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield run
    torch.set_num_threads(threads)


@pytest.fixture
def alike(ranks):
    """Return a function that fits with each number of processes, compares the results, and returns the hash."""

    def check(make, numbers=(1, 2, 3), **options):
        found = [ranks(number, *make(), **options)[:2] for number in numbers]
        assert all(other == found[0] for other in found)
        return found[0][0]

    return check


METHODS = {
    "averages": lambda: ([], {}),
    "a server optimizer": lambda: ([], {"server_optimizer": lambda params: torch.optim.Adam(params, lr=0.01)}),
    "compression": lambda: ([], {"compression": TopK(0.2)}),
    "client-local head": lambda: ([FedRep(head_pattern="model.3.*")], {"reductions": {"model.3.*": "local"}}),
    "replay and two teachers": lambda: ([FLwF2T(), Replay(memory_size=10)], {}),
    "replay samples with a transform": lambda: ([Replay(10, update="round", transform=Noise())], {}),
    "importances": lambda: ([EWC()], {}),
    "projection": lambda: ([GEM()], {}),
    "replay of logits": lambda: ([DERpp(memory_size=10)], {}),
    "prototypes at the server": lambda: ([FedProto()], {}),
    "control variates": lambda: ([SCAFFOLD()], {"client_weights": "uniform"}),
    "distillation from the server": lambda: (
        [LwF(teacher="server")],
        {"participation": 0.5, "max_vectorized_clients": 1},
    ),
    "dynamic regularization": lambda: (
        [FedDyn(0.1)],
        {"client_weights": "uniform", "participation": 0.5, "max_vectorized_clients": 1},
    ),
    "normalized averaging": lambda: ([FedNova()], {}),
    "sums at the server": lambda: ([Fed3R()], {}),
    "moments at the server": lambda: ([CCVR(num_samples=20)], {}),
    "samples chosen by leverage": lambda: ([FedCBDR(30)], {}),
    "samples chosen by a personal model": lambda: ([ReFed(10)], {"participation": 0.5, "max_vectorized_clients": 1}),
    "a basis at the server": lambda: ([FOT(eps=0.8)], {}),
    "a proximal term, optimizers kept": lambda: (
        [FedProx(0.1)],
        {"keep_optimizer_state": True, "max_vectorized_clients": 1},
    ),
    "medians": lambda: ([], {"reductions": {"*": "median"}}),
    "trimmed means": lambda: ([], {"reductions": {"*": TrimmedMean(0.2)}}),
    "krum": lambda: ([], {"reductions": {"*": Krum(1)}}),
    "sparse means": lambda: ([], {"reductions": {"*": "sparse_mean"}}),
    "half of the clients": lambda: ([Replay(memory_size=10)], {"participation": 0.5, "max_vectorized_clients": 1}),
    "a swarm": lambda: ([], {"swarm": Swarm(missed_sync_prob=0.3, leaves_at={"1": 3})}),
    "clients' states on disk": lambda: ([Replay(memory_size=10)], {"client_store": "disk"}),
    "uniform weights": lambda: ([], {"client_weights": "uniform", "local_epochs": 2}),
}


FAST = ["averages", "a server optimizer", "replay and two teachers", "sums at the server", "krum", "a swarm"]
# CI runs these cases and the fast cases. The remaining cases are marked `long`.
SLOW = [
    "client-local head",
    "compression",
    "projection",
    "control variates",
    "distillation from the server",
    "clients' states on disk",
]


@pytest.mark.rounding
@pytest.mark.argument(
    "devices",
    "Supported. Starts one process per device. Results are [bitwise identical](scale.md) for any number of processes.",
)
@pytest.mark.seconds
@pytest.mark.parametrize(
    "name",
    [
        name if name in FAST else pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.long)
        for name in METHODS
    ],
)
def test_results_are_bitwise_equal_on_1_2_and_3_processes(ranks, make_task, make_stream, name):
    """Train six clients of different sizes on 1, 2 and 3 processes, vectorized in pairs if this is supported."""
    results = []
    for number in (1, 2, 3):
        callbacks, options = METHODS[name]()
        stream = make_stream(partition="dirichlet", num_clients=6, num_experiences=2, rounds_per_experience=2)
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, 4))
        task = make_task(model=MLP([6, 5, 4]) if "at the server" in name or "leverage" in name else network)
        side_by_side = all(method.vectorizable for method in callbacks)
        options.setdefault("max_vectorized_clients", 2 if side_by_side else 1)
        results.append(ranks(number, task, stream, callbacks, **options)[:3])
    (one, record, trained), *others = results
    for number, (bits, theirs, mine) in enumerate(others, 2):
        assert bits == one
        assert theirs == record
        assert len(mine) == len(trained)  # Each client is trained by exactly one process.
        assert {who[:2] for who in mine} == {who[:2] for who in trained}
        assert {rank for *_, rank in mine} == {str(rank) for rank in range(number)}


class Own(L.LightningModule):
    """A module with dropout and batch normalization layers, and a `training_step` that logs the loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, 4))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.rounding
@pytest.mark.seconds
@pytest.mark.parametrize("max_vectorized_clients", [1, 2])
def test_custom_training_step_is_bitwise_equal_on_processes(alike, make_stream, max_vectorized_clients):
    stream = {"partition": "dirichlet", "num_clients": 6, "rounds_per_experience": 2, "drop_last": True}
    assert alike(lambda: (Own(), make_stream(**stream)), max_vectorized_clients=max_vectorized_clients) != digest(Own())


class NoisyGradients(Callback):
    """Adds noise from the callback's generator to gradients."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def on_after_backward(self, trainer, pl_module):
        for p in pl_module.parameters():
            p.grad += 0.1 * torch.randn(p.shape, generator=self.generator)


@pytest.mark.seconds
def test_callback_with_generator_is_bitwise_equal_on_processes(alike, make_stream):
    stream = {"partition": "dirichlet", "num_clients": 6, "rounds_per_experience": 2, "drop_last": True}
    plain = alike(lambda: (Own(), make_stream(**stream)), numbers=(1,), max_vectorized_clients=1)
    assert alike(lambda: (Own(), make_stream(**stream), [NoisyGradients()]), max_vectorized_clients=1) != plain


class Odd(nn.Linear):
    """A layer with non-finite buffers and an average. Training sets a part of the buffers."""

    def __init__(self):
        super().__init__(6, 4)
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.register_buffer("late", torch.full((2,), torch.nan))
        self.average, self.seen = 0.0, []

    def forward(self, x):
        if self.training:
            self.average = 0.5 * self.average + float(x.mean())
            self.seen.append(len(x))
            self.late[0], self.late[1] = 3.0, self.average if self.average > 0.2 else torch.nan
        return super().forward(x) * (1 + self.average)


def places(trainer):
    """Return all numbers with which a Trainer describes its process."""
    module = trainer.lightning_module
    ranks = (trainer.global_rank, trainer.local_rank, trainer.node_rank, module.global_rank, module.local_rank)
    return *ranks, trainer.num_devices, len(trainer.device_ids), trainer.num_nodes, trainer.world_size


class AsksWhere(Callback):
    """Changes gradients and learning rates by factors that depend on the process numbers and the client's counters."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.factor = 1 / (1 + trainer.global_step) + sum(places(trainer)) + (not trainer.is_global_zero)
        for parameter in pl_module.parameters():
            parameter.grad *= self.factor / 3

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.1 / (trainer.num_devices + trainer.global_step + trainer.fit_loop.total_batch_idx)


class SaysWhere(Own):
    """A module that writes the numbers that describe the process to a file at the end of each epoch."""

    def __init__(self, folder, automatic=True):
        super().__init__()
        self.folder, self.automatic_optimization = folder, automatic

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx) * sum(places(self.trainer)) * (1 + self.global_step)
        if self.automatic_optimization:
            return loss
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()

    def on_train_epoch_end(self):
        if self.global_rank == 0:
            with open(self.folder / "saved", "a") as file:
                file.write(".")
        rank, devices = self.trainer.global_rank, self.trainer.num_devices
        found = [self.trainer.local_rank, self.trainer.is_global_zero, self.trainer.global_step]
        (self.folder / f"{self.current_epoch}-{rank}").write_text(f"{devices} {found}")


@pytest.mark.seconds
@pytest.mark.may(
    "`trainer.num_devices`, `global_rank` or `is_global_zero`",
    "Hooks of a client's batches get the values of one process. Hooks at the end of an epoch get the real values.",
)
@pytest.mark.parametrize("automatic", [True, False])
def test_client_hooks_see_one_process_and_epoch_hooks_see_all(ranks, make_stream, tmp_path, automatic):
    found = []
    for number in (1, 2, 3):
        folder = tmp_path / f"on {number}"
        folder.mkdir()
        stream = make_stream(
            partition="dirichlet", num_clients=6, num_experiences=1, rounds_per_experience=2, drop_last=True
        )
        callbacks = [AsksWhere()] if automatic else []
        found.append(ranks(number, SaysWhere(folder, automatic), stream, callbacks, max_vectorized_clients=1)[0])
        assert (folder / "saved").read_text() == ".."
        for epoch in (0, 1):
            told = [(folder / f"{epoch}-{rank}").read_text() for rank in range(number)]
            steps = {text.split(", ")[2] for text in told}
            # All processes have the same number of steps.
            assert len(steps) == 1
            assert told == [f"{number} [{rank}, {rank == 0}, {steps.copy().pop()}" for rank in range(number)]
    assert found[0] == found[1] == found[2]


@pytest.mark.seconds
def test_rank_without_clients_gives_equal_results(alike, make_task, make_stream):
    swarm = Swarm(leaves_at={"1": 1})
    alike(lambda: (make_task(), make_stream(num_clients=3)), (1, 3), max_vectorized_clients=1, swarm=swarm)


@pytest.mark.seconds
def test_non_finite_buffers_and_attributes_are_equal_on_processes(alike, make_task, make_stream):
    def make():
        torch.manual_seed(0)
        return make_task(model=Odd()), make_stream(num_clients=6, rounds_per_experience=2)

    alike(make, max_vectorized_clients=1)


@pytest.mark.rounding
@pytest.mark.seconds
@pytest.mark.parametrize("methods", [lambda: [], lambda: [IntrinsicPlasticity()], lambda: [Unlearning({"1": 0})]])
def test_reservoirs_are_bitwise_equal_on_processes(alike, make_reservoir_task, make_series_stream, methods):
    """Several processes give bitwise identical sums, from which the server solves the regression."""
    stream = {"num_clients": 4, "rounds_per_experience": 3}
    alike(lambda: (make_reservoir_task(), make_series_stream(**stream), methods()), (1, 2), max_vectorized_clients=2)


@pytest.mark.rounding
@pytest.mark.seconds
@pytest.mark.parametrize("options", [{"rank": 3}, {"upload": "moments", "groups": 2}, {"gamma": 1.0}])
def test_ridge_regressions_are_bitwise_equal_on_processes(alike, make_stream, options):
    """Gathered values have the order of the clients for any number of processes."""

    def make():
        torch.manual_seed(0)
        task = RidgeClassifier(MLP([6, 4]), 4, min_samples=1, **options)
        return task, make_stream(num_clients=4, rounds_per_experience=2)

    alike(make, (1, 2), max_vectorized_clients=2)


class Stays(Reduction):
    """A custom reduction whose accumulator does not support several processes."""

    name = "stays"

    def make_accumulator(self):
        return SimpleNamespace(update=lambda values, weights: None, compute=dict)


@pytest.mark.seconds
def test_unsupported_reduction_or_too_many_processes_raise(ranks, make_task, make_stream):
    with pytest.raises(Exception, match=r"Expected one device for the reduction `stays` .* but got 2"):
        ranks(2, make_task(), make_stream(), reductions={"*": Stays()}, max_vectorized_clients=1)
    with pytest.raises(
        Exception, match=r"client groups in a round, but got 3. Each group has at most 2 clients. Set fewer `devices`"
    ):
        ranks(3, make_task(), make_stream(), max_vectorized_clients=2)


def test_processes_with_different_data_raise(ranks, make_task, make_stream, monkeypatch):
    """The second process has different samples than the first process."""
    stream = make_stream()
    setup = stream.setup

    def other(stage):
        setup(stage)
        if os.environ.get("LOCAL_RANK") == "1":
            stream.plan.train[0]["0"] = stream.plan.train[0]["0"][1:]

    monkeypatch.setattr(stream, "setup", other)
    with pytest.raises(Exception, match="to have the same `data`, but process 1 has"):
        ranks(2, make_task(), stream, max_vectorized_clients=1)


@pytest.mark.seconds
@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_resume_with_another_number_of_processes_is_equal(ranks, fit, make_task, make_stream, tmp_path, kind):
    """Two rounds on two processes and two rounds on one or three processes equal four rounds on one process."""

    def stream():
        return make_stream(num_clients=6, num_experiences=2, rounds_per_experience=2)

    options = {"max_vectorized_clients": 1, "client_store": kind}
    whole, record, *_ = ranks(1, make_task(), stream(), [FLwF2T(), Replay(memory_size=10)], **options)
    *_, path = ranks(2, make_task(), stream(), [FLwF2T(), Replay(memory_size=10)], max_epochs=2, **options)
    for number in (1, 3):
        methods = [FLwF2T(), Replay(memory_size=10)]
        bits, found, *_ = ranks(number, make_task(), stream(), methods, ckpt_path=path, **options)
        assert (bits, found["rounds"]) == (whole, record["rounds"])


@pytest.mark.seconds
def test_asynchronous_rounds_are_equal_on_processes(alike, make_task, make_stream):
    """In asynchronous rounds, a client trains from the model version that the client has downloaded, on any process."""
    schedule, stream = (
        FedBuff(ClientSpeeds(0.01, spread=1.0), buffer_size=3),
        {"num_clients": 6, "rounds_per_experience": 3},
    )
    alike(lambda: (make_task(), make_stream(**stream)), (1, 2), synchronization=schedule, max_vectorized_clients=1)


@pytest.mark.parametrize("participation", [1.0, Poisson(0.6)])
@pytest.mark.parametrize("noise", ["server", "client"])
def test_private_fits_are_bitwise_equal_on_processes(alike, make_task, make_stream, participation, noise):
    privacy = DifferentialPrivacy("client", delta=1e-2, clip=AdaptiveClip(start=0.3), noise_multiplier=1.0, noise=noise)
    options = {"privacy": privacy, "participation": participation, "max_vectorized_clients": 2}
    alike(lambda: (make_task(), make_stream(num_clients=8)), (1, 2), **options)


def test_private_ridge_regressions_are_bitwise_equal_on_processes(alike, make_stream):
    privacy = DifferentialPrivacy("sample", delta=1e-3, epsilon=2.0)

    def make():
        torch.manual_seed(0)
        return RidgeClassifier(MLP([6, 5, 4]), 4, unit_norm=True), make_stream(num_clients=8)

    alike(make, (1, 2), privacy=privacy, max_vectorized_clients=2)
