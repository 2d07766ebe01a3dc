"""Tests that a plain Trainer gives the same results as a federation of one client."""

import copy
from typing import ClassVar

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from kept import entries_of, memory_of
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from raising import raises
from torch.utils.data import DataLoader, TensorDataset

from lightning_fcl import Classifier, FederatedStrategy, FederatedStream
from lightning_fcl import methods as library
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.methods import EWC, GEM, FedProto, FedProx, LwF, Method, Replay
from lightning_fcl.methods.base import overrides_hook
from lightning_fcl.models import MLP, DyTox
from lightning_fcl.rng import seed_all

from .test_dytox import TINY
from .test_lvt import Net

PUBLIC = {name: kind for name in dir(library) if isinstance(kind := getattr(library, name), type)}
METHODS = {name: kind for name, kind in PUBLIC.items() if issubclass(kind, Method) and kind is not Method}
FEDERATED = sorted(name for name, kind in METHODS.items() if kind.needs.federation_reason)
LOCAL = sorted(set(METHODS) - set(FEDERATED))

ARGUMENTS = {
    "AGEM": [{"memory_size": 6, "batch_size": 4}],
    "BCN": [{"memory_size": 6, "inner_lr": 0.1}],
    "DERpp": [{"memory_size": 9, "batch_size": 4}],
    "DyToxMethod": [{"memory_size": 0.3, "balanced_epochs": 2}],
    "FLwF2T": [{"alpha": 0.4, "beta": 0.3}],
    "FLwF": [{"alpha": 0.1}],
    "GEM": [{"memory_size": 6}],
    "ICaRL": [{"memory_size": 6}],
    "IntrinsicPlasticity": [{}, {"local_epochs": 3}],
    "LwF": [{"strength": 2.0}, {"strength": 2.0, "teacher": "server"}],
    "ReFed": [{"memory_size": 6}],
    "Replay": [
        {"memory_size": 6, "policy": "reservoir", "update": "experience"},
        {"memory_size": 6, "policy": "class-balanced", "update": "round"},
    ],
}
CASES = [(name, arguments) for name in LOCAL for arguments in ARGUMENTS.get(name, [{}])]


class SameDraws(Callback):
    """A callback that seeds the global generator as a federation does for each client.

    A plain Trainer does not seed the generator.
    """

    def on_train_epoch_start(self, trainer, pl_module):
        seed_all(0, "0", trainer.current_epoch)


class Local(Method):
    """A method that overrides hooks for local epochs, uploads, statistics and the server's state."""

    reductions: ClassVar = {"sums": "sum", "kept": "constant"}

    def init_server_state(self, module):
        return {"mean": torch.zeros(2), "sums": torch.zeros(3), "kept": torch.zeros(())}

    def local_epochs(self, client):
        return 2

    def transform_upload(self, client, trained_state):
        return {
            name: 0.5 * (value + client.received_state[name])
            for name, value in trained_state.items()
            if value.is_floating_point()
        }

    def upload_statistics(self, client, trained_state, data):
        return {
            "mean": torch.tensor([client.client_round.round_idx + 1.0, client.num_steps])
            + torch.randn(2, generator=client.generator)
        }

    def contribute_experience(self, client, own, data):
        return {"sums": torch.stack([value.abs().sum() for value in own.values()])[:3]}

    def process_aggregate(self, server):
        server.server_state["kept"] = server.server_state["kept"] + server.participation_rate + server.ends
        return {name: value + 0.01 * server.server_state["sums"].sum() for name, value in server.state.items()}


def net(name):
    if name == "LVTMethod":
        return Net()
    return MLP([6, 5, 4])


@pytest.fixture
def make_case(make_task, make_stream, make_reservoir_task, make_series):
    """Return a function that makes a module and a one-client stream, with two experiences of two rounds."""

    def make(name):
        torch.manual_seed(0)
        scenario = ClassIncremental(2, rounds_per_experience=2)
        if name == "IntrinsicPlasticity":
            x, y = make_series(40)
            stream = FederatedStream.from_arrays(x, y, scenario=scenario, partition=IID(1), batch_size=8, seed=0)
            return make_reservoir_task(), stream
        if name == "DyToxMethod":
            y = np.arange(48) % 4
            x = np.random.default_rng(0).normal(size=(48, 3, 8, 8)).astype(np.float32)
            stream = FederatedStream.from_arrays(x, y, scenario=scenario, partition=IID(1), batch_size=8, seed=0)
            return Classifier(DyTox(2, 4, **TINY), 4, lambda params: torch.optim.SGD(params, lr=0.1)), stream
        stream = make_stream(num_clients=1, num_experiences=2, rounds_per_experience=2, samples=96)
        return make_task(model=net(name)), stream

    return make


def assert_equal(method, server, tolerance):
    """Assert that client state and server state of the plain Trainer are equal to those of the federation."""
    left, right = method.local.server.client_store["0"], server.client_store["0"]
    assert left.keys() == right.keys()
    for section, memory in right.items():
        torch.testing.assert_close(left[section], memory, rtol=0, atol=tolerance)
    torch.testing.assert_close(
        dict(entries_of(method)), server.get_section(method.section_name), rtol=0, atol=tolerance
    )


@pytest.mark.parametrize(("name", "arguments"), [*CASES, ("Local", {})])
def test_plain_trainer_equals_federation_of_one_client(fit, make_case, name, arguments):
    kind = METHODS.get(name, Local)
    tasks = []
    for strategy in ("auto", FederatedStrategy(max_vectorized_clients=1, seed=0)):
        task, stream = make_case(name)
        method = kind(**arguments)
        draws = [SameDraws()] if strategy == "auto" else []
        trainer = fit(task, stream, [method, *draws], strategy=strategy)
        tasks.append(task)
        if strategy == "auto":
            plain = method
    # A federation adds the statistics of a round to the sums in double precision, so the last digits can differ.
    tolerance = 1e-12 if name == "IntrinsicPlasticity" else 0
    # The tag of the readout is a checksum, which cannot be compared with a tolerance.
    states = [{n: v for n, v in task.state_dict().items() if n != "readout.tag"} for task in tasks]
    torch.testing.assert_close(*states, rtol=0, atol=tolerance)
    assert_equal(plain, trainer.strategy.server, tolerance)
    keeps = any(overrides_hook(kind, one) for one in ("update_client_state", "end_experience"))
    assert bool(memory_of(plain)) == keeps or name == "LogitAdjustment"


def test_each_method_is_compared_or_needs_federation():
    assert {name for name, _ in CASES} == set(LOCAL) and len(LOCAL) > 20 and len(FEDERATED) > 12


@pytest.mark.parametrize("name", FEDERATED)
def test_method_needing_federation_raises_before_first_epoch(fit, make_case, name):
    task, stream = make_case(name)
    before = copy.deepcopy(task.state_dict())
    with raises(InvalidValueError, "strategy"):
        fit(task, stream, [METHODS[name]()], strategy="auto")
    torch.testing.assert_close(dict(task.state_dict()), before, rtol=0, atol=0)


class Personal(Method):
    def personalize(self, client, state):
        return state


class Listening(Method):
    def on_round_end(self, trainer, pl_module):
        """Do nothing. A plain Trainer does not call this hook."""


class ListeningToClients(Method):
    def on_client_end(self, trainer, pl_module, client_round):
        """Do nothing. A plain Trainer does not call this hook."""


@pytest.mark.parametrize("kind", [Personal, Listening, ListeningToClients])
def test_hook_not_called_by_plain_trainer_raises(fit, make_case, kind):
    task, stream = make_case("")
    with raises(InvalidValueError, "strategy"):
        fit(task, stream, [kind()], strategy="auto")
    fit(task, stream, [kind()])


def test_local_epochs_with_data_loader_raise_before_first_step(make_task, samples, train):
    task, before = make_task(), make_task()
    with raises(InvalidValueError, "datamodule"):
        train(task, [Local()], samples())
    torch.testing.assert_close(dict(task.state_dict()), dict(before.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_plain_trainer_data_loader_equals_federation(make_task, fit, quiet, samples, assert_same, accumulate):
    """An epoch of the user's data loader equals a round of a stream with the same samples in the same order."""
    (x, y), tasks, methods = samples(number=24), [make_task(), make_task()], [EWC(5.0), EWC(5.0)]
    stream = FederatedStream.from_arrays(
        x,
        y,
        scenario=ClassIncremental(1, rounds_per_experience=2),
        partition=IID(1),
        batch_size=8,
        shuffle=False,
        seed=0,
    )
    stream.setup("fit")
    (rows, _) = (stream.plan.train[number]["0"] for number in range(2))
    loader = DataLoader(TensorDataset(*stream.get_samples(rows)), batch_size=8)
    options = {**quiet, "accumulate_grad_batches": accumulate}
    trainer = L.Trainer(max_epochs=2, callbacks=[methods[0]], **options)
    trainer.fit(tasks[0], loader)
    federated = fit(tasks[1], stream, [methods[1]], max_vectorized_clients=1, trainer_args=options)
    # A federation divides the sum of accumulated gradients. Lightning divides each loss, so the rounding differs.
    assert_same(*tasks, 0 if accumulate == 1 else 1e-7)
    kept = federated.strategy.server.client_store.get_section("0", "EWC")
    torch.testing.assert_close(dict(memory_of(methods[0])), dict(kept), rtol=0, atol=0 if accumulate == 1 else 1e-7)


class ByHand(Classifier):
    """A classifier with manual optimization and one optimizer per layer."""

    def __init__(self, model):
        super().__init__(model, 4)
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [
            torch.optim.SGD(layer.parameters(), lr=0.1) for layer in self.model.modules() if hasattr(layer, "weight")
        ]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()


class Counting(Method):
    """A method that counts the rounds of a client and stores the number of steps."""

    def update_client_state(self, client, trained_state, data):
        return {
            "rounds": client.method_state.get("rounds", torch.tensor(0)) + 1,
            "steps": torch.tensor(client.num_steps),
        }


@pytest.mark.parametrize("make", [lambda: FedProx(0.5), lambda: EWC(5.0), Counting])
def test_manual_optimization_with_two_optimizers_equals_one_optimizer(make_task, train, samples, assert_same, make):
    by_hand, usual, methods = ByHand(make_task().model), make_task(), [make(), make()]
    for seed in (0, 1):
        train(by_hand, [methods[0]], samples(seed=seed))
        train(usual, [methods[1]], samples(seed=seed))
    assert len(by_hand.optimizers()) == 2
    assert_same(by_hand, usual, 0)
    if make is Counting:
        assert memory_of(methods[0])["rounds"] == memory_of(methods[1])["rounds"] == 4
        assert memory_of(methods[0])["steps"] == 2 * memory_of(methods[1])["steps"] == 6


@pytest.mark.parametrize(
    "make", [lambda: EWC(5.0), lambda: GEM(6), lambda: Replay(6, "reservoir"), lambda: FedProto(), Local]
)
@pytest.mark.parametrize("epoch", [0, 2])
def test_resume_with_stream_equals_uninterrupted_fit(fit, make_case, assert_same, tmp_path, make, epoch):
    tasks, methods = [], [make(), make()]
    for method, path in zip(methods, (None, tmp_path / f"epoch={epoch}.ckpt"), strict=True):
        task, stream = make_case("")
        saving = [ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)] if path is None else []
        options = {"enable_checkpointing": path is None}
        fit(task, stream, [method, *saving], strategy="auto", ckpt_path=path, trainer_args=options)
        tasks.append(task)
    assert_same(*tasks, 0)
    for left, right in zip(*(method.local.server.client_store["0"].items() for method in methods), strict=True):
        assert left[0] == right[0]
        torch.testing.assert_close(left[1], right[1], rtol=0, atol=0)
    torch.testing.assert_close(dict(entries_of(methods[0])), dict(entries_of(methods[1])), rtol=0, atol=0)


def test_method_state_moves_to_next_trainer(make_task, samples, train):
    """Methods that were trained in different Trainers keep their states in a Trainer that uses both methods."""
    alone = [EWC(5.0), LwF(2.0)]
    task = make_task()
    train(task, [alone[0]], samples([0, 2]))
    train(make_task(), [alone[1]], samples([0, 2]))
    first = copy.deepcopy(memory_of(alone[1]))
    train(task, alone, samples([1, 3], seed=1))
    assert alone[0].local is alone[1].local and alone[0].local.fits == 2
    assert memory_of(alone[1])["old"].tolist() == first["seen"].tolist()
    assert len(memory_of(alone[0])) and memory_of(alone[1])["seen"].sum() == 4


def test_fit_on_another_stream_starts_new_experience(fit, make_stream, make_task):
    """Rounds of an earlier stream do not count as rounds of another stream."""
    method = Replay(20, "reservoir", "experience")
    for seed in (0, 1):
        stream = make_stream(num_clients=1, num_experiences=1, rounds_per_experience=2, samples=48, seed=seed)
        fit(make_task(), stream, [method], strategy="auto")
    assert int(memory_of(method)["seen"]) == 2 * 48 - 2 * len(stream.plan.test)
