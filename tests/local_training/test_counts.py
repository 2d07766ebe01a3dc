"""Tests of a client's batch and step counts, which training steps, hooks and learning rate schedules read."""

import random
import re

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from raising import raises
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torchmetrics.classification import MulticlassAccuracy

from lightning_fcl import Classifier, FederatedStream, count_client_batches
from lightning_fcl.callbacks import Replay
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidTypeError, InvalidValueError
from lightning_fcl.federation.obstacles import Obstacle, Reason


def stream_of(**samples):
    """Return a stream of two rounds in batches of 8. Keyword arguments give the number of samples of each client."""
    owners = np.repeat([*samples], [*samples.values()])
    x = np.random.default_rng(0).normal(size=(len(owners), 6)).astype(np.float32)
    scenario = ClassIncremental(1, rounds_per_experience=2)
    return FederatedStream.from_arrays(
        x, np.arange(len(x)) % 4, owners, scenario=scenario, split=Split(test=0.0), batch_size=8, seed=0
    )


class Scaled(Classifier):
    """A classifier whose loss has a term divided by the number of batches, as in Bayesian layers."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 4), 4, torch.optim.SGD)

    def sample_loss(self, output, y):
        kl = self.model.weight.square().sum() if torch.is_grad_enabled() else 0
        return super().sample_loss(output, y) + kl / self.trainer.num_training_batches


class Counts(L.LightningModule):
    """A module that records the client, batch index, batch counts and learning rate of each training step."""

    def __init__(self, make=None):
        super().__init__()
        self.model, self.make = nn.Linear(6, 4), make
        self.seen, self.rates = [], []

    def training_step(self, batch, batch_idx):
        counted = self.trainer.num_training_batches
        self.seen.append(
            (
                self.trainer.strategy.current_client_round.client_id,
                batch_idx,
                counted,
                count_client_batches(self.trainer),
            )
        )
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return optimizer if self.make is None else self.make(self, optimizer)


@pytest.mark.may("`trainer.num_training_batches`", "This value is the number of batches of the client in the round.")
def test_num_training_batches_counts_batches_of_the_client(fit):
    module, outside = Counts(), []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            outside.append((count_client_batches(trainer), trainer.num_training_batches))

    fit(module, stream_of(a=24, b=9), [Watch()], local_epochs=2, max_epochs=1)
    assert module.seen == [("a", i, 6, 6) for i in range(6)] + [("b", i, 4, 4) for i in range(4)]
    assert outside == [(6, 6)] * 6 + [(4, 4)] * 4


def test_loss_reading_num_training_batches_trains_sequentially(fit, assert_same):
    """Training is sequential, because vectorized clients would all read the largest client's number of batches."""
    auto, alone = Scaled(), Scaled()
    trainer = fit(auto, stream_of(a=24, b=9))
    assert trainer.strategy.federation.local_trainer.num_vectorized_clients == 1
    fit(alone, stream_of(a=24, b=9), max_vectorized_clients=1)
    assert_same(auto, alone)


def test_count_client_batches_between_rounds_raises_in_plain_trainer_counts(fit, quiet):
    trainer = fit(Counts(), stream_of(a=8, b=8))
    with raises(InvalidValueError, "count_client_batches"):
        count_client_batches(trainer)
    plain = L.Trainer(max_epochs=1, **quiet)
    data = torch.utils.data.TensorDataset(torch.zeros(8, 6), torch.zeros(8, dtype=torch.long))

    class Plain(Counts):
        def training_step(self, batch, batch_idx):
            assert count_client_batches(self.trainer) == self.trainer.num_training_batches == 4

    plain.fit(Plain(), torch.utils.data.DataLoader(data, 2))


def one_cycle(steps):
    def make(module, optimizer):
        schedule = OneCycleLR(optimizer, max_lr=1.0, total_steps=steps(module.trainer))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return make


ASKED = {
    "estimated_stepping_batches": lambda trainer: trainer.estimated_stepping_batches,
    "len(train_dataloader)": lambda trainer: (
        -(-len(trainer.datamodule.train_dataloader()) // trainer.accumulate_grad_batches)
    ),
}


@pytest.mark.may(
    "`trainer.estimated_stepping_batches` or the length of `train_dataloader()`",
    "These values are the numbers of optimizer steps and of batches of one client in a round. "
    "They raise an error if clients have different numbers of batches.",
)
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_one_cycle_schedule_spans_round_of_a_client(fit, asked, accumulate):
    module = Counts(one_cycle(ASKED[asked]))
    fit(module, stream_of(a=24, b=24), local_epochs=2, trainer_args={"accumulate_grad_batches": accumulate})
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    steps, expected = -(-6 // accumulate), []
    schedule = OneCycleLR(optimizer, max_lr=1.0, total_steps=steps)
    for batch in range(6):
        expected.append(optimizer.param_groups[0]["lr"])
        if batch % accumulate == accumulate - 1 and len(expected) < 6:
            optimizer.step(), schedule.step()
    assert module.rates == pytest.approx(expected * 4)  # 2 clients and 2 rounds


@pytest.mark.parametrize("asked", ASKED)
def test_estimated_stepping_batches_unequal_clients_raises(fit, asked):
    with raises(InvalidValueError, "estimated_stepping_batches"):
        fit(Counts(one_cycle(ASKED[asked])), stream_of(a=24, b=9))


def test_estimated_stepping_batches_with_replay_raises(fit):
    with raises(InvalidValueError, "estimated_stepping_batches"):
        fit(Counts(one_cycle(ASKED["len(train_dataloader)"])), stream_of(a=24, b=24), [Replay(8)])


def test_train_dataloader_length_outside_fit_raises():
    with raises(InvalidTypeError, "strategy"):
        len(stream_of(a=24, b=24).train_dataloader())


@pytest.mark.may("A `training_step(self, batch)` without `batch_idx`", "The step is called without `batch_idx`.")
def test_training_step_without_batch_idx_is_supported(fit, assert_same):
    class Plain(Counts):
        def training_step(self, batch):
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    class Numbered(Plain):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch)

    modules = []
    for made in (Plain, Numbered):
        torch.manual_seed(0)
        modules.append(made())
        fit(modules[-1], stream_of(a=24, b=9))
    assert_same(*modules)


@pytest.mark.may(
    "A `training_step(self, dataloader_iter)`",
    "Not supported. The iterator would continue with the batches of the next client.",
)
def test_training_step_with_dataloader_iter_raises(fit):
    class Iterates(Counts):
        def training_step(self, dataloader_iter):
            return self.model(next(dataloader_iter)[0][0]).sum()

    with raises(InvalidValueError, "dataloader_iter"):
        fit(Iterates(), stream_of(a=24, b=9))


def test_lr_schedulers_in_step_restarts_for_each_client(fit):
    class Reads(Counts):
        def training_step(self, batch, batch_idx):
            self.seen.append(self.lr_schedulers().get_last_lr()[0])
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    module = Reads(one_cycle(lambda trainer: 3))
    trainer = fit(module, stream_of(a=24, b=24))
    assert len(set(module.seen[:3])) == 3 and module.seen == module.seen[:3] * 4
    assert trainer.lr_scheduler_configs == []


def test_lr_schedulers_in_step_returns_step_and_epoch_schedules(fit):
    class Reads(Counts):
        def training_step(self, batch, batch_idx):
            by_step, by_round = self.lr_schedulers()
            self.seen.append((type(by_step), type(by_round), by_round.last_epoch))
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def make(module, optimizer):
        cycle = {"scheduler": OneCycleLR(optimizer, 0.1, total_steps=3), "interval": "step"}
        return [optimizer], [cycle, StepLR(optimizer, 1)]

    module = Reads(make)
    fit(module, stream_of(a=24, b=24))
    assert module.seen == [(OneCycleLR, StepLR, round_idx) for round_idx in (0, 1) for _ in range(6)]


@pytest.mark.parametrize("automatic", [True, False])
def test_training_step_without_batch_idx_accumulation_or_manual_optimization(fit, automatic):
    class Plain(Counts):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = automatic

        def training_step(self, batch):
            loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
            if automatic:
                return loss
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()

    module = Plain()
    start = module.model.weight.clone()
    fit(module, stream_of(a=24, b=9), trainer_args={"accumulate_grad_batches": 2 if automatic else 1})
    assert not torch.equal(module.model.weight, start)


class Watched(Classifier):
    """A classifier with state that the loss or the forward pass of a subclass can change."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 4), 4, torch.optim.SGD)
        self.accuracy = MulticlassAccuracy(4)
        self.register_buffer("mean", torch.zeros(6), persistent=False)
        self.rng = np.random.default_rng(0)


class Measures(Watched):
    def sample_loss(self, output, y):
        self.accuracy.update(output, y)
        return super().sample_loss(output, y)


class Logs(Watched):
    def sample_loss(self, output, y):
        loss = super().sample_loss(output, y)
        if loss.requires_grad:
            self.log("loss of samples", loss.mean())
        return loss


class DrawsByNumPy(Watched):
    def forward(self, x):
        return super().forward(x) * (1 + np.random.rand())


class DrawsByItsOwn(Watched):
    def forward(self, x):
        return super().forward(x) + self.rng.random()


class DrawsByPython(Watched):
    def forward(self, x):
        return super().forward(x) + random.random()


class DrawsInItsLoss(Watched):
    def sample_loss(self, output, y):
        return super().sample_loss(output, y) * np.random.rand()


class AssignsBuffer(Watched):
    def forward(self, x):
        self.mean = x.detach().mean(0)
        return super().forward(x)


class WritesBuffer(Watched):
    def forward(self, x):
        self.mean.copy_(x.detach().mean(0))
        return super().forward(x)


@pytest.mark.may(
    "Logging in `sample_loss`, random numbers of NumPy or Python, or buffers changed in `forward`",
    "Clients train sequentially.",
)
@pytest.mark.parametrize(
    "kind",
    [Logs, DrawsByNumPy, DrawsByItsOwn, DrawsByPython, DrawsInItsLoss, AssignsBuffer, WritesBuffer],
)
def test_loss_or_forward_with_side_effects_trains_sequentially(fit, kind):
    assert fit(kind(), stream_of(a=24, b=9)).strategy.num_vectorized_clients == 1
    with raises(InvalidValueError, "max_vectorized_clients", value=2):
        fit(kind(), stream_of(a=24, b=9), max_vectorized_clients=2)


def test_metric_updated_in_loss_vectorized_equals_sequential(fit):
    tasks = [Measures(), Measures()]
    for task, size in zip(tasks, (1, "auto"), strict=True):
        assert (fit(task, stream_of(a=24, b=9), max_vectorized_clients=size).strategy.num_vectorized_clients > 1) == (
            size == "auto"
        )
    assert torch.equal(tasks[0].accuracy.tp, tasks[1].accuracy.tp) and tasks[0].accuracy.tp.any()


def test_loss_that_logs_with_max_vectorized_clients_raises_reason(fit):
    with pytest.raises(ValueError, match=f"but got 2: {re.escape(str(Obstacle(Reason.STEP_LOGS)))}"):
        fit(Logs(), stream_of(a=24, b=9), max_vectorized_clients=2)


@pytest.mark.may(
    "Per-sample gradients (`grad_sample`) with `accumulate_grad_batches`", "Not supported. Use a larger batch size."
)
def test_grad_sample_with_accumulate_grad_batches_raises(fit):
    class Samples(Counts):
        def on_after_backward(self):
            for parameter in self.parameters():
                parameter.grad_sample = parameter.grad[None]

    fit(Samples(), stream_of(a=24, b=9))
    with raises(InvalidValueError, "accumulate_grad_batches", value=2):
        fit(Samples(), stream_of(a=24, b=9), trainer_args={"accumulate_grad_batches": 2})
