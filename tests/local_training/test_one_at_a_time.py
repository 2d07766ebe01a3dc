"""Tests of training steps that cannot be vectorized: clients train sequentially, or the fit raises an error."""

import logging
import random
import re
from typing import ClassVar

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.demos.boring_classes import ManualOptimBoringModel
from lightning.pytorch.loggers.logger import DummyLogger
from raising import raises
from torch import nn
from torch.overrides import _get_current_function_mode
from torchmetrics.classification import MulticlassAccuracy

from lightning_fcl import FederatedStream
from lightning_fcl.callbacks import LwF
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidTypeError, InvalidValueError
from lightning_fcl.federation.obstacles import Reason

GATHERED = []  # A training step appends to this list, which is outside the module.


def stream_of(clients=3):
    """Return a stream of clients with 40 samples each, in 5 batches of 8."""
    rng, number = np.random.default_rng(0), 40 * clients
    x, y = rng.normal(size=(number, 6)).astype(np.float32), np.arange(number) // clients % 4
    return FederatedStream.from_arrays(
        x, y, np.arange(number) % clients, scenario=ClassIncremental(1), split=Split(test=0.0), batch_size=8, seed=0
    )


class Step(L.LightningModule):
    """A network. Subclasses change the loss or the training step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 4))
        self.prepare()

    def prepare(self):
        """Add layers or state. Subclasses override this hook."""

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        return self.change(loss, x, y, batch_idx)

    def change(self, loss, x, y, batch_idx):
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Items(Step):
    def change(self, loss, x, y, batch_idx):
        return loss * (1 + loss.item())


class ItemsNowAndThen(Step):
    def change(self, loss, x, y, batch_idx):
        return loss * (1 + float(loss)) if batch_idx % 3 == 2 else loss


class Branches(Step):
    def change(self, loss, x, y, batch_idx):
        return 2 * loss if loss > 1.4 else loss


class GoesByAMetric(Step):
    def prepare(self):
        self.accuracy = MulticlassAccuracy(4)

    def change(self, loss, x, y, batch_idx):
        self.log("accuracy", self.accuracy(self.net(x), y), on_step=False, on_epoch=True)
        return loss


class MeasuresInAList(Step):
    def prepare(self):
        self.measures = [MulticlassAccuracy(4, validate_args=False)]

    def change(self, loss, x, y, batch_idx):
        self.measures[0].update(self.net(x), y)
        return loss


class Appends(Step):
    def prepare(self):
        self.losses = []

    def change(self, loss, x, y, batch_idx):
        self.losses.append(loss.detach())
        return loss


class AppendsElsewhere(Step):
    def change(self, loss, x, y, batch_idx):
        GATHERED.append(batch_idx)
        return loss


class AppendsToItsClass(Step):
    numbers: ClassVar = []

    def change(self, loss, x, y, batch_idx):
        self.numbers.append(batch_idx)
        return loss


class Averages(Step):
    def prepare(self):
        self.mean = torch.zeros(())

    def change(self, loss, x, y, batch_idx):
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss * (1 + self.mean)


class SetsBuffer(Step):
    def prepare(self):
        self.register_buffer("mean", torch.zeros(()))

    def change(self, loss, x, y, batch_idx):
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss * (1 + self.mean)


class Clips(Step):
    def change(self, loss, x, y, batch_idx):
        with torch.no_grad():
            self.net[0].weight.clamp_(-0.3, 0.3)
        return F.cross_entropy(self(x), y)


class WritesPassingBuffer(Step):
    def prepare(self):
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def change(self, loss, x, y, batch_idx):
        self.calls += 1
        return loss / self.calls


class DrawsByPython(Step):
    def change(self, loss, x, y, batch_idx):
        return loss * (1 + random.random())


class DrawsNoise(Step):
    def change(self, loss, x, y, batch_idx):
        return loss + F.cross_entropy(self(x + 0.1 * torch.randn_like(x)), y)


class CountsBatches(Step):
    def change(self, loss, x, y, batch_idx):
        return loss * (batch_idx + 1) / self.trainer.num_training_batches


class EndsGently(Step):
    def change(self, loss, x, y, batch_idx):
        return loss / 2 if self.trainer.is_last_batch else loss


class Cycles(Step):
    def change(self, loss, x, y, batch_idx):
        return loss * (1 + self.global_step / self.trainer.estimated_stepping_batches)


class WarmsUp(Step):
    def change(self, loss, x, y, batch_idx):
        for group in self.optimizers().param_groups:
            group["lr"] *= 1.2
        return loss


class Skips(Step):
    def change(self, loss, x, y, batch_idx):
        return None if batch_idx == 1 else loss


class Freezes(Step):
    def change(self, loss, x, y, batch_idx):
        if batch_idx == 2:
            self.net[1].eval()
        return loss


class Hooked(Step):
    def prepare(self):
        self.net[0].register_full_backward_hook(lambda part, inputs, outputs: None)


class Watches(Step):
    def on_after_backward(self):
        self.norm = float(self.net[0].weight.grad.norm())


class OwnBackward(Step):
    def backward(self, loss):
        (2 * loss).backward()


class Lbfgs(Step):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


class ByHand(ManualOptimBoringModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 2)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch[0], batch_idx)


REASONS = {
    Items: Reason.READS_VALUE,
    ItemsNowAndThen: Reason.READS_VALUE,
    Branches: Reason.BRANCHES,
    GoesByAMetric: Reason.METRIC,
    MeasuresInAList: Reason.METRIC,
    Appends: Reason.STATE,
    AppendsElsewhere: Reason.OUTSIDE,
    AppendsToItsClass: Reason.OUTSIDE,
    Averages: Reason.STATE,
    SetsBuffer: Reason.NEW_BUFFER,
    Clips: Reason.WRITES_PARAMETER,
    WritesPassingBuffer: Reason.STATE,
    DrawsByPython: Reason.OTHER_RANDOM,
    DrawsNoise: Reason.RANDOM,
    CountsBatches: Reason.NOT_REPEATABLE,
    EndsGently: Reason.NOT_REPEATABLE,
    Cycles: Reason.NOT_REPEATABLE,
    WarmsUp: Reason.CHANGES_OPTIMIZER,
    Skips: Reason.NO_LOSS,
    Freezes: Reason.STATE,
    Hooked: Reason.HOOKED,
    Watches: Reason.OVERRIDES,
    OwnBackward: Reason.OVERRIDES,
    Lbfgs: Reason.OPTIMIZER,
    ByHand: Reason.MANUAL,
}
NAMES = {
    Appends: "`losses`",
    AppendsElsewhere: "`test_one_at_a_time.GATHERED`",
    AppendsToItsClass: "`test_one_at_a_time.AppendsToItsClass.numbers`",
    Averages: "`mean`",
    SetsBuffer: "mean",
    Clips: "`net.0.weight`",
    WritesPassingBuffer: "`calls`",
    Freezes: "`net.1.training`",
    Lbfgs: "LBFGS",
}
"""Name in the `details` of the expected reason, for each step whose reason names an attribute, tensor or optimizer."""


@pytest.mark.may(
    "A step that reads values, draws random numbers, uses the logger, stores state or optimizes manually",
    "Clients train sequentially. `trainer.strategy.sequential_reason` gives the reason.",
)
@pytest.mark.parametrize("make", REASONS)
def test_unsupported_step_trains_sequentially_with_reason(fit, caplog, make):
    with caplog.at_level(logging.INFO, "lightning_fcl"):
        auto = make()
        strategy = fit(auto, stream_of(), seed=0).strategy
    obstacle = strategy.sequential_reason
    assert strategy.num_vectorized_clients == 1 and obstacle.reason is REASONS[make]
    assert make not in NAMES or NAMES[make] in obstacle.details
    logged = [record.args for record in caplog.records if record.name == "lightning_fcl.simulation.trainer_choice"]
    assert (make.__name__, obstacle) in logged
    one = make()
    fit(one, stream_of(), max_vectorized_clients=1, seed=0)
    torch.testing.assert_close(auto.state_dict(), one.state_dict(), rtol=0, atol=0)
    # With an explicit `max_vectorized_clients`, DrawsNoise logs a warning instead of raising an error.
    if make is not DrawsNoise:
        with pytest.raises(ValueError, match=re.escape(str(obstacle))):
            fit(make(), stream_of(), max_vectorized_clients=2)


def test_trial_of_step_leaves_no_recorded_values(fit):
    GATHERED.clear()
    task, appends = AppendsElsewhere(), Appends()
    fit(task, stream_of(), seed=0)
    assert 3 * [*range(5)] == GATHERED
    fit(appends, stream_of(), seed=0)
    assert len(appends.losses) == 15


def test_step_calling_logger_logs_for_each_client(fit):
    class Keeps(DummyLogger):
        def log_metrics(self, metrics, step=None):
            kept.append(metrics["own"])

    class Speaks(Step):
        def change(self, loss, x, y, batch_idx):
            self.logger.log_metrics({"own": float(batch_idx)}, step=self.global_step)
            return loss

    kept = []
    trainer = fit(Speaks(), stream_of(), trainer_args={"logger": Keeps()})
    assert trainer.strategy.sequential_reason.reason is Reason.LOGGER
    assert kept == 3 * [0.0, 1.0, 2.0, 3.0, 4.0]


def test_method_needing_pairs_with_dict_batches_raises(fit):
    class Named(torch.utils.data.Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, index):
            return {"x": torch.full((6,), float(index)), "label": index % 4}

    class Dicts(Step):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch["x"]), batch["label"])

    def stream():
        return FederatedStream.from_arrays(Named(), client_ids=np.arange(24) % 3, scenario=ClassIncremental(1), seed=0)

    assert fit(Dicts(), stream()).strategy.num_vectorized_clients > 1
    with raises(InvalidTypeError, "batch"):
        fit(Dicts(), stream(), [LwF(1.0)])


# Tests of steps that a trial of a few batches cannot detect. These steps raise an error during the fit.


class Late(Step):
    """A module whose training step also calls `late` in the last batch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 4:
            self.late(loss, batch)
        return loss


class LateAttribute(Late):
    def late(self, loss, batch):
        self.last = loss.detach()


class LateMode(Late):
    def late(self, loss, batch):
        self.net[1].eval()


@pytest.mark.may(
    "State that only a later vectorized step stores",
    "The fit ends with an error that names the state. Set `max_vectorized_clients=1`.",
)
@pytest.mark.parametrize(("make", "changed"), [(LateAttribute, "last"), (LateMode, "net.1.training")])
def test_state_stored_in_later_vectorized_step_raises(fit, make, changed):
    with raises(InvalidValueError, "max_vectorized_clients", value=[changed]):
        fit(make(), stream_of())
    fit(make(), stream_of(), max_vectorized_clients=1)


def test_value_read_in_later_vectorized_step_raises_with_hint(fit):
    class LateItem(Late):
        def late(self, loss, batch):
            loss.item()

    with pytest.raises(RuntimeError) as found:
        fit(LateItem(), stream_of())
    assert any("set `max_vectorized_clients=1`" in note for note in found.value.__notes__)


@pytest.mark.parametrize("rate", [0.0, 0.2, None])
def test_later_steps_draw_by_keys_only_with_random_layer(fit, rate):
    """After the first step, random numbers come from the client's key only if the first step ran a random layer."""
    watched = []

    class Looks(Step):
        def prepare(self):
            self.net[1] = nn.Identity() if rate is None else nn.Dropout(rate)

        def change(self, loss, x, y, batch_idx):
            watched.append(_get_current_function_mode() is not None)
            return loss

    fit(Looks(), stream_of(), max_vectorized_clients=1)
    assert watched == 3 * ([True, False, False, False, False] if rate is None else [True] * 5)
