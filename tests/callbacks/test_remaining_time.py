"""Tests of the estimate of a fit's remaining time."""

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_fcl import Classifier, FederatedStrategy, FederatedStream
from lightning_fcl.callbacks import FederatedProgressBar, progress
from lightning_fcl.callbacks.remaining_time import RemainingTime, count_training_samples
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.models import MLP


@pytest.mark.parametrize("seed", range(5))
def test_remaining_time_proportional_to_samples_is_exact_after_the_second_round(seed):
    rng = np.random.default_rng(seed)
    samples, rate = rng.integers(1, 500, size=8).tolist(), float(rng.uniform(0.01, 5))
    first = int(rng.integers(3))
    remaining_time = RemainingTime(samples)
    assert remaining_time.seconds == 0
    for number in range(first, len(samples)):
        slow_start = 20.0 if number == first else 0.0
        remaining_time.add(number, rate * samples[number] + slow_start)
        rest = rate * sum(samples[number + 1 :])
        expected = rest * (1 + 20 / (rate * samples[number])) if number == first else rest
        assert remaining_time.seconds == pytest.approx(expected)
    assert remaining_time.seconds == 0


def test_remaining_time_rounds_without_samples_are_finite():
    remaining_time = RemainingTime([0, 0, 10])
    remaining_time.add(0, 0.5)
    assert remaining_time.seconds == 5.5


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


class Advance(Callback):
    """A callback that advances a clock by 0.01 s for each sample of a round, and by further 7 s in the first round."""

    def __init__(self):
        self.now, self.samples = 100.0, []

    def on_train_epoch_start(self, trainer, pl_module):
        self.samples = count_training_samples(trainer)
        self.now += 0.01 * self.samples[trainer.current_epoch] + 7 * (trainer.current_epoch == 0)


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_progress_lines_weight_rounds_by_samples(quiet, capfd, monkeypatch, participation):
    clock = Advance()
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    stream = FederatedStream("digits", ClassIncremental([2, 3, 5], 2), IID(4))
    strategy = FederatedStrategy(participation=participation)
    trainer = L.Trainer(
        strategy=strategy,
        callbacks=[FederatedProgressBar(), clock],
        max_epochs=6,
        **quiet | {"enable_progress_bar": True},
    )
    trainer.fit(Classifier(MLP([64, 10]), 10, sgd), datamodule=stream)
    train = stream.plan.train
    sampled = [strategy.federation.participation.expected_clients(stream.plan, number) for number in range(6)]
    assert clock.samples == [sum(len(train[n][client]) for client in sampled[n]) for n in range(6)]
    assert len({*map(len, sampled)}) == 1 and len({*clock.samples}) > 2
    lines = [line for line in capfd.readouterr().err.splitlines() if "remaining" in line]
    shown = [float(line.rpartition(", ")[2].removesuffix(" s remaining")) for line in lines]
    expected = [0.01 * sum(clock.samples[number + 1 :]) for number in range(6)]
    assert shown[1:] == pytest.approx(expected[1:], abs=0.051) and shown[0] > expected[0]


def test_count_training_samples_draws_clients_of_a_limited_number_of_rounds(fit, make_stream, make_task, monkeypatch):
    """Rounds between two sampled rounds have the number of the first of them."""

    class Counts(Callback):
        def on_train_start(self, trainer, pl_module):
            self.all = count_training_samples(trainer)
            monkeypatch.setattr("lightning_fcl.callbacks.remaining_time._SAMPLED_ROUNDS", 2)
            self.sampled = count_training_samples(trainer)

    counts = Counts()
    fit(make_task(), make_stream(partition="dirichlet", rounds_per_experience=2), [counts], participation=2, seed=0)
    assert counts.sampled == [counts.all[0]] * 2 + [counts.all[2]] * 2 and len(counts.all) == 4
