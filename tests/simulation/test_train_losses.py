"""Tests of the training losses of the clients in the record of a round."""

import math

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn

from lightning_fcl import Classifier, FederatedStrategy, RidgeClassifier
from lightning_fcl.callbacks import EWC, FedProx, LwF, Replay
from lightning_fcl.federation.record import ClientLoss
from lightning_fcl.models import MLP
from lightning_fcl.simulation.client_losses import client_losses


class Reads(Callback):
    """Reads the losses of each round."""

    def __init__(self):
        self.rounds = []

    def on_round_end(self, trainer, pl_module):
        self.rounds.append(dict(trainer.strategy.server.record.train_losses))


class ReadsBatches(Reads):
    """Reads the loss of each batch, so that clients train sequentially."""

    def __init__(self):
        super().__init__()
        self.batches = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        current = trainer.strategy.current_round
        if outputs:
            row = (trainer.current_epoch, current.client_round.client_id, current.local_epoch)
            self.batches.append((*row, len(batch[1]), float(outputs["loss"])))

    def by_hand(self):
        """Return the losses of the rounds, computed from the losses of the batches."""
        rounds = []
        for round_idx in range(len(self.rounds)):
            rows = [row for row in self.batches if row[0] == round_idx]
            losses = {}
            for client in dict.fromkeys(row[1] for row in rows):
                own = [row for row in rows if row[1] == client]
                epochs = sorted({row[2] for row in own})
                parts = [[row for row in own if row[2] == epoch] for epoch in epochs]
                means = [np.average([r[4] for r in part], weights=[r[3] for r in part]) for part in [own, *parts]]
                losses[client] = ClientLoss(means[0], tuple(means[1:]))
            rounds.append(losses)
        return rounds


class Own(L.LightningModule):
    """A module with its own training step, which is vectorized without padding."""

    def __init__(self, gives=lambda batch_idx: True):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.gives = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)), gives

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        return {"loss": loss} if self.gives(batch_idx) else None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def assert_losses_equal(found, expected):
    assert len(found) == len(expected) > 0
    for own, other in zip(found, expected, strict=True):
        assert {*own} == {*other} and own
        for client, loss in own.items():
            assert loss.mean == pytest.approx(other[client].mean, rel=1e-6)
            assert loss.epochs == pytest.approx(other[client].epochs, rel=1e-6)


@pytest.fixture
def read(fit, make_stream):
    """Return a function that fits a module and returns the callback that has read the losses."""

    def run(task, callbacks=(), trainer_args=None, by_batch=False, **options):
        reads = ReadsBatches() if by_batch else Reads()
        stream = make_stream(partition="dirichlet", num_clients=5, num_experiences=2, rounds_per_experience=2)
        trainer = fit(task, stream, [*callbacks, reads], trainer_args=trainer_args, **options)
        reads.is_vectorized = trainer.strategy.num_vectorized_clients > 1
        return reads

    return run


METHODS = {
    "none": list,
    "penalty": lambda: [FedProx(0.5)],
    "importance": lambda: [EWC(1.0)],
    "teacher": lambda: [LwF()],
    "replay": lambda: [Replay(8)],
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", ["sample_loss", "training_step"])
def test_losses_of_vectorized_clients_equal_those_of_sequential_clients(read, make_task, kind, name):
    if kind == "training_step" and name == "importance":
        pytest.skip("EWC needs a module with `sample_loss`")

    def losses(number, **options):
        task = make_task() if kind == "sample_loss" else Own()
        return read(task, METHODS[name](), max_vectorized_clients=number, local_epochs=3, **options)

    sequential, *vectorized = map(losses, (1, 2, "auto"))
    assert not sequential.is_vectorized
    for reads in vectorized:
        assert reads.is_vectorized
        assert_losses_equal(reads.rounds, sequential.rounds)
    if name in ("none", "replay"):  # Lightning's outputs contain the terms of other methods.
        assert_losses_equal(sequential.rounds, losses(1, by_batch=True).by_hand())
    assert all(len(loss.epochs) == 3 for losses in sequential.rounds for loss in losses.values())


def test_losses_leave_out_the_terms_of_methods(read, make_task):
    """With a learning rate of 0, the weights do not change. A teacher then has no effect on the task loss."""
    for number in (1, "auto"):
        still = dict(max_vectorized_clients=number)
        plain, penalized = (
            read(make_task(lambda params: torch.optim.SGD(params, lr=0.0)), callbacks, **still)
            for callbacks in ([], [FedProx(100.0), LwF(strength=100.0)])
        )
        assert_losses_equal(penalized.rounds, plain.rounds)


@pytest.mark.parametrize("number", [1, "auto"])
def test_losses_with_limited_batches_and_accumulation_equal_those_by_hand(read, make_task, number):
    arguments = {"limit_train_batches": 5, "accumulate_grad_batches": 2}
    hand = read(make_task(), trainer_args=arguments, local_epochs=2, by_batch=True).by_hand()
    reads = read(make_task(), trainer_args=arguments, local_epochs=2, max_vectorized_clients=number)
    assert_losses_equal(reads.rounds, hand)


def test_optimizer_that_repeats_batches_records_the_first_loss(read):
    class Repeats(Own):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    class First(Own):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    # In the first step of the first round, both modules have the same weights.
    repeated, first = (
        read(task, trainer_args={"limit_train_batches": 1}, max_vectorized_clients=1) for task in (Repeats(), First())
    )
    assert_losses_equal(repeated.rounds[:1], first.rounds[:1])


def test_batches_without_a_loss_are_left_out(read):
    skips = Own(lambda batch_idx: batch_idx % 2 == 0)
    reads = read(skips, by_batch=True)
    assert_losses_equal(reads.rounds, reads.by_hand())
    assert len(reads.batches) < len(read(Own(), by_batch=True).batches)


def test_manual_optimization_records_the_returned_loss(read):
    class Manual(Own):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss, optimizer = super().training_step(batch, batch_idx)["loss"], self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return loss

    assert_losses_equal(read(Manual()).rounds, read(Own(), max_vectorized_clients=1).rounds)


def test_non_finite_losses_are_recorded(fit, make_stream, make_task):
    for number in (1, "auto"):
        reads, task = Reads(), make_task(lambda params: torch.optim.SGD(params, lr=1e30))
        fit(task, make_stream(), [reads], max_vectorized_clients=number, max_epochs=1, on_empty_round="warn")
        assert reads.rounds[0] and not any(math.isfinite(loss.mean) for loss in reads.rounds[0].values())


def test_module_without_losses_has_no_record(fit, make_stream):
    reads = Reads()
    fit(RidgeClassifier(MLP([6, 5, 4]), 4), make_stream(), [reads])
    assert reads.rounds and not any(reads.rounds)


def test_only_sampled_clients_have_losses_of_a_round(read, make_task):
    for losses in read(make_task(), participation=2).rounds:
        assert len(losses) == 2


@pytest.mark.seconds
def test_losses_of_two_processes_equal_those_of_one(fit, make_stream, tmp_path):
    class Writes(Callback):
        def __init__(self, name):
            self.name = name

        def on_round_end(self, trainer, pl_module):
            path = tmp_path / f"{self.name}-{trainer.global_rank}-{trainer.current_epoch}"
            path.write_text(repr(trainer.strategy.server.record.train_losses))

    for number in (1, 2):
        torch.manual_seed(0)
        task = Classifier(MLP([6, 5, 4]), 4, lambda params: torch.optim.SGD(params, lr=0.1))
        strategy = FederatedStrategy(start_method="fork", max_vectorized_clients=1)
        stream = make_stream(num_clients=4)
        fit(task, stream, [Writes(number)], strategy, trainer_args={"devices": number})
        rounds = stream.plan.num_rounds
    for round_idx in range(rounds):
        texts = {(tmp_path / f"{name}-{round_idx}").read_text() for name in ("1-0", "2-0", "2-1")}
        assert len(texts) == 1


def test_client_losses_weight_batches_by_samples():
    losses = {step: torch.tensor([1.0 + step, 10.0 * (step + 1)]) for step in range(3)}
    sizes = np.array([[3, 1, 4], [2, 0, 0]])
    first, second = client_losses(losses, sizes, np.array([2, 1]))
    assert first == ClientLoss(pytest.approx((3 * 1 + 1 * 2 + 4 * 3) / 8), (pytest.approx(5 / 4), 3.0))
    assert second == ClientLoss(10.0, (10.0,))
    assert client_losses({}, sizes, np.array([2, 1])) == [None, None]
    only_last = client_losses({2: torch.tensor([7.0])}, sizes, np.array([2, 1]))
    assert only_last[0].mean == 7.0 and math.isnan(only_last[0].epochs[0]) and only_last[1] is None
