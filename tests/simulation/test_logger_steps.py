"""Tests of the step of logged values: the round for values of a round, and the number of batches otherwise."""

import csv

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_fcl import Classifier, FederatedStrategy
from lightning_fcl.callbacks import ContinualMetrics, FedProx, Replay
from lightning_fcl.data.split import Split
from lightning_fcl.models import MLP

ROUND_VALUES = ("val/accuracy", "train/loss", "server/accuracy", "clients/accuracy_min", "own_epoch", "at_end")


class Own(Classifier):
    """A classifier that logs a value of each batch, and the mean of the values of a round."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("own", loss.detach(), on_step=True, on_epoch=True)
        return loss


class AtEnd(Callback):
    """Logs a value at the end of each round."""

    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.log("at_end", float(trainer.current_epoch))


class FailsInRound(Callback):
    """Raises an error in the second batch of a client of a round."""

    def __init__(self, round_idx):
        self.round_idx = round_idx

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.current_epoch == self.round_idx and batch_idx == 1:
            raise RuntimeError("no power")


@pytest.fixture
def train(fit, make_stream, tmp_path):
    """Return a function that fits with loggers in a folder, and returns the Trainer. Rounds differ in length."""

    def run(folder, callbacks=(), trainer_args=None, test=False, **options):
        stream = make_stream(partition="dirichlet", rounds_per_experience=2, split=Split(test=0.2, validation=0.2))
        torch.manual_seed(0)
        task = Own(MLP([6, 5, 4]), 4, lambda params: torch.optim.SGD(params, lr=0.1))
        loggers = [CSVLogger(tmp_path / folder, "", ""), TensorBoardLogger(tmp_path / folder, "", "")]
        arguments = {"logger": loggers, "log_every_n_steps": 1, "enable_checkpointing": True, **(trainer_args or {})}
        saving = ModelCheckpoint(tmp_path / folder, "{epoch}", save_top_k=-1, enable_version_counter=False)
        callbacks = [*callbacks, ContinualMetrics(), AtEnd(), LearningRateMonitor("epoch"), saving]
        trainer = fit(task, stream, callbacks, trainer_args=arguments, **options)
        if test:
            trainer.test(task, datamodule=stream, verbose=False)
        return trainer

    return run


@pytest.fixture
def steps(tmp_path):
    """Return a function that returns the steps and the values of a logged name in ``metrics.csv``."""

    def read(folder, name):
        with (tmp_path / folder / "metrics.csv").open(newline="") as file:
            return [(int(row["step"]), float(row[name])) for row in csv.DictReader(file) if row.get(name)]

    return read


FITS = {
    "sequential": {"max_vectorized_clients": 1},
    "vectorized": {},
    "replay": {"callbacks": [Replay(20)], "local_epochs": 2},
    "sampled": {"callbacks": [FedProx(0.1)], "participation": 2, "max_vectorized_clients": 1},
    "limited": {"trainer_args": {"limit_train_batches": 2, "accumulate_grad_batches": 2}},
}


def test_values_of_a_round_have_the_round_as_step_for_all_fits(train, steps):
    batches = set()
    for name, options in FITS.items():
        trainer = train(name, **options)
        batches.add(trainer.fit_loop.epoch_loop._batches_that_stepped)
        for value in ROUND_VALUES:
            assert [step for step, _ in steps(name, value)] == [0, 1, 2, 3], (name, value)
        assert steps(name, "at_end") == [(number, float(number)) for number in range(4)]
        assert [step for step, _ in steps(name, "lr-SGD")] == [0, 1, 2, 3]
    assert len(batches) == len(FITS)  # Without the replacement, the steps would differ between the fits.


def test_tensorboard_values_of_a_round_have_the_round_as_step(train, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for name in ("sequential", "vectorized"):
        train(name, **FITS[name])
        events = EventAccumulator(str(tmp_path / name), {"histograms": 0}).Reload()
        for value in ROUND_VALUES:
            assert [event.step for event in events.Scalars(value)] == [0, 1, 2, 3]
        assert [event.step for event in events.Histograms("clients/accuracy")] == [0, 1, 2, 3]


@pytest.mark.parametrize("max_vectorized_clients", [1, 2, "auto"])
def test_values_of_a_batch_have_the_number_of_batches_as_step(train, steps, tmp_path, max_vectorized_clients):
    trainer = train("whole", max_vectorized_clients=max_vectorized_clients)
    assert (trainer.strategy.num_vectorized_clients > 1) == (max_vectorized_clients != 1)
    batches = trainer.global_step  # one optimizer step for each batch
    assert [step for step, _ in steps("whole", "own_step")] == list(range(batches))
    loops = torch.load(tmp_path / "whole" / "epoch=3.ckpt", weights_only=True)["loops"]
    assert loops["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"] == batches


@pytest.mark.parametrize("number", [0, 1, 2])
def test_steps_after_a_resume_equal_those_of_an_uninterrupted_fit(train, steps, tmp_path, number):
    train("whole")
    train("resumed", ckpt_path=tmp_path / "whole" / f"epoch={number}.ckpt")
    for value in (*ROUND_VALUES, "own_step", "lr-SGD"):
        resumed = steps("resumed", value)
        assert resumed and resumed == steps("whole", value)[-len(resumed) :], value
    assert [step for step, _ in steps("resumed", "train/loss")] == list(range(number + 1, 4))


def test_steps_after_an_interrupted_round_equal_those_of_an_uninterrupted_fit(train, steps, tmp_path):
    options = {"max_vectorized_clients": 1}
    train("whole", **options)
    with pytest.raises(RuntimeError, match="no power"):
        train("cut", [FailsInRound(2), OnExceptionCheckpoint(tmp_path, "cut")], **options)
    train("resumed", ckpt_path=tmp_path / "cut.ckpt", **options)
    for value in (*ROUND_VALUES, "own_step"):
        resumed, whole = ([step for step, _ in steps(name, value)] for name in ("resumed", "whole"))
        assert resumed and resumed == whole[-len(resumed) :], value
    for value in ("server/accuracy", "train/loss"):
        assert steps("resumed", value) == steps("whole", value)[2:]


def test_steps_without_validation_and_with_rare_validation_are_rounds(train, steps):
    train("none", trainer_args={"limit_val_batches": 0})
    train("rare", trainer_args={"check_val_every_n_epoch": 2})
    for name in ("none", "rare"):
        assert [step for step, _ in steps(name, "train/loss")] == [0, 1, 2, 3]
    assert [step for step, _ in steps("rare", "val/accuracy")] == [1, 3]


def test_step_of_a_test_after_a_fit_is_the_number_of_rounds(train, steps):
    for name, options in FITS.items():
        train(name, test=True, **options)
        assert [step for step, _ in steps(name, "test/accuracy")] == [4]


def test_step_that_the_user_logs_is_kept(train, steps):
    class Hundreds(Callback):
        def on_validation_epoch_end(self, trainer, pl_module):
            pl_module.log("step", 100.0 * trainer.current_epoch)

    train("own", [Hundreds()])
    assert [step for step, _ in steps("own", "val/accuracy")] == [0, 100, 200, 300]
    assert [step for step, _ in steps("own", "own_epoch")] == [0, 1, 2, 3]


@pytest.mark.seconds
def test_steps_and_values_of_two_processes_equal_those_of_one(train, steps):
    for number in (1, 2):
        train(
            str(number),
            strategy=FederatedStrategy(start_method="fork", max_vectorized_clients=1),
            trainer_args={"devices": number},
        )
    for value in (*ROUND_VALUES, "clients/train_loss_mean", "clients/train_loss_std"):
        one, two = steps("1", value), steps("2", value)
        assert [step for step, _ in two] == [0, 1, 2, 3], value
        assert [number for _, number in two] == pytest.approx([number for _, number in one], rel=1e-5), value
