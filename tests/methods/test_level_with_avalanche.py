"""Tests that methods of this library and of Avalanche give the same weights on the same batches and stored samples.

This library trains first, in a plain Trainer (one `fit` per experience) or in a federation of one client. The test
records each batch that a training step gets, and the samples that the method stores. Then Avalanche's training loop and
plugins train the same network on the recorded data. If the two libraries define a method differently, `CASES` converts
the arguments.
"""

import warnings
from dataclasses import dataclass
from itertools import chain
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from kept import memory_of
from lightning.pytorch.callbacks import Callback
from sklearn.datasets import load_digits
from torch.nn import CrossEntropyLoss
from torch.utils.data import DataLoader, TensorDataset

from lightning_fcl import Classifier, FederatedStream
from lightning_fcl.callbacks import AGEM, EWC, GEM, LwF, Replay
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split
from lightning_fcl.federation.protocols import find_federation
from lightning_fcl.methods.projection import project
from lightning_fcl.models import MLP

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from avalanche.benchmarks import tensors_benchmark
    from avalanche.training import Naive
    from avalanche.training.plugins import AGEMPlugin, EWCPlugin, GEMPlugin, LwFPlugin, ReplayPlugin
    from avalanche.training.storage_policy import ExemplarsBuffer

pytestmark = pytest.mark.rounding

CLASSES = ([3, 0, 7, 5], [1, 8, 2], [9, 4, 6])
BATCH, EPOCHS = 16, 2
# Double precision keeps rounding errors small.
DOUBLE = {"precision": "64-true"}
# Avalanche's GEM and the code of GEM's authors add this ridge to the diagonal of the dual problem.
RIDGE = 1e-3


def digits():
    """Return 128 digits per experience. All batches are full, and single precision represents all values exactly."""
    x, y = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    rows = [torch.nonzero(torch.isin(y, torch.tensor(classes))).flatten()[:128] for classes in CLASSES]
    return [(x[chosen].float() / 16, y[chosen]) for chosen in rows]


def sgd(params):
    # Avalanche would keep the optimizer state between experiences. SGD without momentum has no state.
    return torch.optim.SGD(params, lr=0.2)


def network():
    torch.manual_seed(0)
    return MLP([64, 20, 10]).double()


def in_double(part):
    return part.double() if part.is_floating_point() else part.clone()


class Watch(Callback):
    """A callback that records the batches of each experience as training steps get them."""

    def __init__(self):
        self.batches = {}

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        federation = find_federation(trainer)
        number = self.fit if federation is None else federation.current_round.client_round.experience_idx
        self.batches.setdefault(number, []).append([in_double(part) for part in batch])


@dataclass
class Ours:
    """A network that this library trained, the training batches, the method, and the method's client state."""

    network: torch.nn.Module
    batches: list[list[Any]]
    method: Any
    memory: Any
    """The client state of the method after training."""


def in_a_trainer(method, quiet, fit):
    task, watch = Classifier(network(), 10, sgd), Watch()
    for watch.fit, part in enumerate(digits()):
        trainer = L.Trainer(max_epochs=EPOCHS, callbacks=[*([method] if method else []), watch], **quiet, **DOUBLE)
        trainer.fit(task, DataLoader(TensorDataset(*part), batch_size=BATCH))
    return Ours(task.model, list(watch.batches.values()), method, method and memory_of(method))


def in_a_federation(method, quiet, fit):
    x, y = (torch.cat(column) for column in zip(*digits(), strict=True))
    scenario = ClassIncremental([len(classes) for classes in CLASSES], class_order=[*chain(*CLASSES)])
    stream = FederatedStream.from_arrays(
        x, y, scenario=scenario, partition=IID(1), split=Split(test=0.0), batch_size=BATCH, seed=0
    )
    task, watch = Classifier(network(), 10, sgd), Watch()
    trainer = fit(
        task, stream, [*([method] if method else []), watch], trainer_args=DOUBLE, local_epochs=EPOCHS, seed=0
    )
    assert sorted(watch.batches) == [0, 1, 2]
    memory = method and trainer.strategy.server.client_store["0"][type(method).__name__]
    return Ours(task.model, [watch.batches[number] for number in range(3)], method, memory)


class OnGiven(Naive):
    """Avalanche's training loop, run on the recorded batches."""

    def make_train_dataloader(self, **kwargs):
        # All samples have the same task label.
        label = torch.zeros(BATCH, dtype=torch.long)
        self.dataloader = [[x, y, label[: len(y)]] for x, y in self.given[self.experience.current_experience]]


def by_avalanche(ours, plugins):
    # One epoch is enough, because the recorded batches include all epochs.
    strategy = make_strategy(OnGiven, plugins, epochs=1)
    strategy.given = ours.batches
    train_on(strategy, [[torch.cat(column) for column in zip(*batches, strict=True)] for batches in ours.batches])
    return strategy.model


def make_strategy(kind, plugins, epochs):
    model = network()
    return kind(
        model=model, optimizer=sgd(model.parameters()), criterion=CrossEntropyLoss(), train_mb_size=BATCH,
        train_epochs=epochs, plugins=plugins, evaluator=None,
    )  # fmt: skip


def train_on(strategy, parts):
    for experience in experiences(parts):
        strategy.train(experience, shuffle=False)


def experiences(parts):
    return tensors_benchmark(train_tensors=parts, test_tensors=parts, task_labels=[0] * len(parts)).train_stream


class EWCBySample(EWCPlugin):
    """Avalanche's EWC with the squared gradients of single samples (Fisher information) instead of batches."""

    def compute_importances(self, model, criterion, optimizer, dataset, device, batch_size, **kwargs):
        return super().compute_importances(model, criterion, optimizer, dataset, device, 1, **kwargs)


class GEMOnGiven(GEMPlugin):
    """Avalanche's GEM with the samples that this library stored. Otherwise, each library draws different samples."""

    def __init__(self, ours, strength):
        super().__init__(len(ours.memory["y"]), strength)
        self.ours = ours.memory

    def update_memory(self, dataset, t, batch_size):
        rows = self.ours["task"] == t
        self.memory_x[t], self.memory_y[t] = in_double(self.ours["x"][rows]), self.ours["y"][rows]
        self.memory_tid[t] = self.ours["task"][rows]


class AGEMOnGiven(AGEMPlugin):
    """Avalanche's A-GEM with the reference samples that this library used."""

    def __init__(self, ours):
        super().__init__(1, 1)
        self.references = iter(ours.method.references)

    def sample_from_memory(self):
        x, y = next(self.references)
        return in_double(x), y, torch.zeros_like(y)


class KeptAGEM(AGEM):
    """This library's A-GEM. It also records the samples of each reference gradient."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.references = []

    def project_gradient(self, client, gradient, gradient_fn):
        def kept(x, y):
            self.references.append((x, y))
            return gradient_fn(x, y)

        return super().project_gradient(client, gradient, kept)


def with_ridge(gradient, constraints, margin):
    """Return a gradient projected with Avalanche's ridge, which acts like one additional coordinate per constraint."""
    more = RIDGE**0.5 * torch.eye(len(constraints), dtype=constraints.dtype)
    longer = torch.cat([gradient, gradient.new_zeros(len(constraints))])
    return project(longer, torch.cat([constraints, more], dim=1), margin)[: len(gradient)]


CASES = {
    "Naive": (lambda: None, lambda ours: []),
    "LwF": (lambda: LwF(strength=3.0, temperature=1.5), lambda ours: [LwFPlugin(alpha=3.0, temperature=1.5)]),
    # EWC of this library has a factor 1/2 and optional normalization. It has one center for all experiences, as
    # Avalanche in the mode "online".
    "EWC": (
        lambda: EWC(strength=3.0, normalize=False),
        lambda ours: [EWCBySample(1.5, mode="online", decay_factor=1.0)],
    ),
    "EWC with decay": (
        lambda: EWC(strength=3.0, decay=0.5, normalize=False),
        lambda ours: [EWCBySample(1.5, mode="online", decay_factor=0.5)],
    ),
    "GEM": (lambda: GEM(20, margin=0.5), lambda ours: [GEMOnGiven(ours, 0.5)]),
    "GEM without a margin": (lambda: GEM(0.3, margin=0.0), lambda ours: [GEMOnGiven(ours, 0.0)]),
    "A-GEM": (lambda: KeptAGEM(20), lambda ours: [AGEMOnGiven(ours)]),
    "A-GEM with a reference batch": (lambda: KeptAGEM(30, batch_size=10), lambda ours: [AGEMOnGiven(ours)]),
}


@pytest.mark.seconds
@pytest.mark.parametrize("run", [in_a_trainer, in_a_federation])
@pytest.mark.parametrize("case", CASES)
def test_method_weights_equal_avalanche(run, case, fit, quiet, assert_same, monkeypatch):
    make_method, make_plugins = CASES[case]
    monkeypatch.setattr("lightning_fcl.methods.episodic.project", with_ridge)
    ours = run(make_method(), quiet, fit)
    theirs = by_avalanche(ours, make_plugins(ours))
    assert_same(ours.network, theirs, 1e-5)
    # The method has changed the weights.
    if case != "Naive":
        assert not near(theirs, by_avalanche(ours, []), 1e-3)


def near(left, right, tolerance):
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=tolerance) for a, b in pairs)


class Given(ExemplarsBuffer):
    """A buffer with the samples that this library stored after each experience."""

    def __init__(self, memories):
        super().__init__(BATCH)
        self.memories = memories

    def post_adapt(self, agent, exp):
        x, y = self.memories[exp.current_experience]
        self.buffer = experiences([(in_double(x), y)])[0].dataset

    def resize(self, agent, new_size):
        raise NotImplementedError


def test_replay_buffer_of_batch_size_equals_avalanche(quiet, assert_same):
    task, method, memories = Classifier(network(), 10, sgd), Replay(BATCH, policy="reservoir"), []
    for part in digits():
        trainer = L.Trainer(max_epochs=EPOCHS, callbacks=[method], **quiet, **DOUBLE)
        trainer.fit(task, DataLoader(TensorDataset(*part), batch_size=BATCH))
        memories.append((memory_of(method)["x"], memory_of(method)["y"]))
    replay = ReplayPlugin(BATCH, batch_size_mem=BATCH, storage_policy=Given(memories))
    weights = []
    for plugins in ([replay], []):
        strategy = make_strategy(Naive, plugins, EPOCHS)
        train_on(strategy, [(in_double(x), y) for x, y in digits()])
        weights.append(strategy.model)
    assert_same(task.model, weights[0], 1e-5)
    assert not near(*weights, 1e-3)


@pytest.mark.parametrize("run", [in_a_trainer, in_a_federation])
@pytest.mark.parametrize("policy", ["reservoir", "class-balanced", "refresh"])
def test_replay_batches_give_weights_of_avalanche(run, policy, fit, quiet, assert_same):
    ours = run(Replay(40, policy=policy), quiet, fit)
    first, second, third = ({label for _, y in batches for label in y.tolist()} for batches in ours.batches)
    assert first == {*CLASSES[0]} and second - first == {*CLASSES[1]} and third - second >= {*CLASSES[2]}
    assert second & first and third & first and third & {*CLASSES[1]}
    assert_same(ours.network, by_avalanche(ours, []), 1e-5)
