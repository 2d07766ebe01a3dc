"""Table of hints in error messages.

Each row has a call that raises the error, and the arguments that the fix changes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    ModelCheckpoint,
    ModelPruning,
    SpikeDetection,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import nn
from torch.nn.utils import prune
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import SWALR
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from lightning_fcl import (
    Classifier,
    ClientSpeeds,
    Deadline,
    FedBuff,
    FederatedStrategy,
    FederatedStream,
    Regressor,
    RidgeClassifier,
    Swarm,
    TopK,
    client_model,
)
from lightning_fcl.callbacks import (
    APFL,
    BCN,
    CCVR,
    EWC,
    SCAFFOLD,
    ActivationDensity,
    ContinualMetrics,
    DyToxMethod,
    FedDyn,
    FedKNOW,
    FedNova,
    FedProto,
    FedProx,
    FedRep,
    FedViT,
    FedWEIT,
    FLwF2T,
    IntrinsicPlasticity,
    LogitAdjustment,
    LVTMethod,
    LwF,
    Replay,
    ServerWeightAveraging,
    Unlearning,
)
from lightning_fcl.data.partition import IID, ByClientId, ClassSubsets, Dirichlet, Shards
from lightning_fcl.data.scenarios import (
    Blurry,
    ClassIncremental,
    Delayed,
    DomainIncremental,
    FedViTScenario,
    Online,
    Stationary,
)
from lightning_fcl.data.split import Split
from lightning_fcl.edge.footprint import measure_footprint
from lightning_fcl.errors import (
    InvalidTypeError,
    InvalidValueError,
    LightningFCLError,
    MissingValueError,
    UnknownNameError,
)
from lightning_fcl.federation.compression import Quantize
from lightning_fcl.federation.pipeline import Pipeline
from lightning_fcl.federation.uploads import Setting, Stage, UploadTransform
from lightning_fcl.models import HARCNN, MLP, DyTox, EchoStateNetwork, FedWEITNet, ViT
from lightning_fcl.tasks.reservoir import ReservoirClassifier


@dataclass(frozen=True)
class Row:
    """A call that raises an error, and the fix that the error's hint suggests.

    Args:
        call: Function that is called with the fixtures and the arguments.
        wrong: Arguments with which the call raises the error.
        fix: Arguments that the fix changes, or a function that is called with the fixtures and corrects the files.
            With None, the fix is a call without the arguments of ``wrong``.
        hint: Part of the expected hint.
        error: Class of the error.
        argument: Expected `argument` of the error. Default: not checked.
    """

    call: Callable[..., Any]
    wrong: Mapping[str, Any]
    fix: Mapping[str, Any] | Callable[[Any], Any] | None
    hint: str
    error: type[LightningFCLError] = InvalidValueError
    argument: str | None = None


ROWS: dict[str, Row] = {}
SECONDS = {  # Rows that take at least 0.5 s.
    "callback GradientAccumulationScheduler",
    "image size of a vision transformer",
    "tasks of DyTox",
}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def adam_with_betas(parameters, betas):
    """Return Adam with coefficients that its constructor does not check."""
    optimizer = torch.optim.Adam(parameters)
    optimizer.param_groups[0]["betas"] = betas
    return optimizer


def has_rounds(trainer, rounds=1):
    assert trainer.current_epoch >= rounds
    assert all(value.isfinite().all() for value in trainer.lightning_module.state_dict().values())
    return trainer


# Rows about fits


class SumsOnly(UploadTransform):
    """An upload transform with which the server receives only sums."""

    stage = Stage.MASK
    sums_only = True


class Halves(UploadTransform):
    """An upload transform that halves the sums of a round on the server."""

    stage = Stage.NOISE

    def on_sum(self, sums):
        sums.values.update({name: value / 2 for name, value in sums.values.items()})


def fit_one_round(lab, stream=None, task=None, **options):
    return has_rounds(lab.fit(task or lab.task(), stream or lab.stream(), max_epochs=1, **options))


def fit_kind(lab, kind, **options):
    return fit_one_round(lab, task=kind(MLP([6, 5, 4]), 4, sgd), **options)


def small_stream(**options):
    x, y, client = torch.randn(48, 6), torch.arange(48) % 4, torch.arange(48) // 4 % 2
    return FederatedStream.from_arrays(**{"x": x, "y": y, "client_ids": client, "scenario": Stationary(), **options})


def fit_averaged(lab, callback, scheduler=False, mean=None, max_vectorized_clients=1):
    task, states = lab.task(), []
    if scheduler:
        optimizer = sgd(task.parameters())
        schedule = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
        task.configure_optimizers = lambda: ([optimizer], [schedule])
    stream = lab.stream(num_experiences=1, rounds_per_experience=4)
    look = LambdaCallback(on_train_epoch_end=lambda _, module: states.append([p.clone() for p in module.parameters()]))
    trainer = lab.fit(task, stream, [callback, look], max_vectorized_clients=max_vectorized_clients)
    wanted = [mean(values) for values in zip(*states, strict=True)]
    assert len(states) == 4 and all(map(torch.allclose, task.parameters(), wanted))
    assert not scheduler or trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05)


def average_equally(values):
    return torch.stack(values).mean(0)


def average_newest(values):
    average = values[0]
    for value in values[1:]:
        average = 0.9 * average + 0.1 * value
    return average


def fit_and_prune(lab, callbacks=(), pruned=False):
    task = lab.task()
    lab.fit(task, lab.stream(), callbacks, max_epochs=1)
    prune.l1_unstructured(task.model[1], "weight", amount=0.5)
    prune.remove(task.model[1], "weight")
    assert (task.model[1].weight == 0).float().mean() == pytest.approx(0.5, abs=0.05)


ROWS |= {
    "callback GradientAccumulationScheduler": Row(
        fit_one_round,
        {"callbacks": [GradientAccumulationScheduler({0: 4})]},
        {"callbacks": [], "trainer_args": {"accumulate_grad_batches": 4}},
        "Set `accumulate_grad_batches` of the Trainer",
    ),
    "callback StochasticWeightAveraging": Row(
        fit_averaged,
        {"callback": StochasticWeightAveraging(0.1)},
        {"callback": ServerWeightAveraging(None), "scheduler": True, "mean": average_equally},
        "`SWALR`",
    ),
    "callback WeightAveraging": Row(
        fit_averaged,
        {"callback": WeightAveraging()},
        {"callback": ServerWeightAveraging(decay=None), "mean": average_equally, "max_vectorized_clients": "auto"},
        "Use `ServerWeightAveraging(decay=None)`",
    ),
    "callback EMAWeightAveraging": Row(
        fit_averaged,
        {"callback": EMAWeightAveraging()},
        {"callback": ServerWeightAveraging(decay=0.9), "mean": average_newest},
        "Use `ServerWeightAveraging(decay=0.9)`",
    ),
    "callback BatchSizeFinder": Row(
        lambda lab, callbacks, batch_size: fit_one_round(lab, lab.stream(batch_size=batch_size), callbacks=callbacks),
        {"callbacks": [BatchSizeFinder()], "batch_size": 8},
        {"callbacks": [], "batch_size": 32},
        "Set `batch_size` of the stream.",
    ),
    "callback ModelPruning": Row(
        fit_and_prune,
        {"callbacks": [ModelPruning("l1_unstructured", amount=0.5)]},
        None,
        "Prune the model after the fit, with `torch.nn.utils.prune`.",
    ),
    "callback SpikeDetection": Row(
        fit_one_round,
        {"callbacks": [SpikeDetection()]},
        {"callbacks": [], "reductions": {"*": "median"}},
        '`FederatedStrategy(reductions={"*": "median"})`',
    ),
    "callback ModelCheckpoint by step": Row(
        lambda lab, **options: fit_one_round(
            lab,
            callbacks=[ModelCheckpoint(lab.folder, **options)],
            trainer_args={"enable_checkpointing": True},
        ),
        {"every_n_train_steps": 2},
        {"every_n_train_steps": None, "every_n_epochs": 1},
        "Use `every_n_epochs=1` instead.",
    ),
    "callback is a class": Row(
        fit_one_round,
        {"callbacks": [ContinualMetrics]},
        {"callbacks": [ContinualMetrics()]},
        "Use `ContinualMetrics(...)`.",
        InvalidTypeError,
    ),
    "data module is a class": Row(
        lambda lab, stream: lab.fit(lab.task(), stream, max_epochs=1),
        {"stream": FederatedStream},
        {"stream": small_stream()},
        "Use `FederatedStream(...)`.",
        InvalidTypeError,
    ),
}


class Plateau(Classifier):
    """A classifier that uses `ReduceLROnPlateau`."""

    monitor, interval = "val/loss", "epoch"

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = ReduceLROnPlateau(optimizer)
        found = {"scheduler": schedule, "monitor": self.monitor, "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": found}


def fit_plateau(lab, validation=0.0, **options):
    task = Plateau(MLP([6, 5, 4]), 4, sgd)
    vars(task).update(options)
    validation_step = task.validation_step
    task.validation_step = lambda batch, batch_idx: [validation_step(batch, batch_idx), task.log("val/loss", 1.0)][0]
    return fit_one_round(lab, lab.stream(validation=validation), task)


class ByHand(Classifier):
    """A classifier that uses manual optimization."""

    schedule_options: Mapping[str, Any] = {}
    steps_itself = False

    def __init__(self, **options):
        super().__init__(MLP([6, 5, 4]), 4, sgd)
        self.automatic_optimization = False
        vars(self).update(options)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, 0.5), **self.schedule_options}]

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        if self.steps_itself:
            self.lr_schedulers().step()


def fit_by_hand(lab, **options):
    task, rates = ByHand(**options), []

    class Rates(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            rates.append((batch_idx, pl_module.optimizers().param_groups[0]["lr"]))

    fit_one_round(lab, task=task, callbacks=[Rates()])
    # The learning rate schedule restarts for each client.
    assert [rate for _, rate in rates] == [0.1 * 0.5**batch for batch, _ in rates]


def fit_lazy(lab, layer, configured=False):
    class Lazy(Classifier):
        def configure_model(self):
            if configured:
                self.model(torch.zeros(2, 6))

    return fit_one_round(lab, task=Lazy(nn.Sequential(layer, nn.Linear(5, 4)), 4, sgd))


class States(Classifier):
    """A classifier that overrides `state_dict`."""

    def __init__(self, state_dict):
        super().__init__(MLP([6, 5, 4]), 4, sgd)
        self.states = state_dict

    def state_dict(self, *args, **kwargs):
        return self.states(super().state_dict, *args, **kwargs)


def without_keep_vars(state_dict, destination=None, prefix=""):
    return state_dict(prefix=prefix)


def copied(state_dict, *args, **kwargs):
    return {name: value.clone() for name, value in state_dict(*args, **kwargs).items()}


def own_tensors(state_dict, *args, **kwargs):
    return state_dict(*args, **kwargs)


def only_the_head(state_dict, *args, **kwargs):
    return {name: value for name, value in state_dict(*args, **kwargs).items() if "model.3" in name}


def fit_states(lab, states, frozen=()):
    task = States(states)
    for name, parameter in task.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    return fit_one_round(lab, task=task)


class Grows(Classifier):
    """A module that gets a new output layer after the first round."""

    in_place = False

    def on_train_epoch_start(self):
        if self.trainer.current_epoch != 1:
            return
        self.model[-1] = nn.Linear(5, 4)
        if self.in_place:
            self.optimizers().param_groups[0]["params"] = [*self.parameters()]
        else:
            self.trainer.strategy.optimizers = [sgd(self.parameters())]


def fit_growing(lab, in_place):
    task = Grows(MLP([6, 5, 4]), 4, sgd)
    task.in_place = in_place
    has_rounds(lab.fit(task, lab.stream(), max_epochs=2), 2)


class Skips(Classifier):
    """A module that skips all batches of a client except the first one."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx else None


class ZeroLoss(Classifier):
    """A module whose loss is zero for all batches of a client except the first one."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * 0.0 if batch_idx else loss


class Counts(Classifier):
    """A module whose learning rate schedule depends on the number of steps or of rounds."""

    by_round = False

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        steps = self.trainer.max_epochs if self.by_round else self.trainer.estimated_stepping_batches
        return [optimizer], [StepLR(optimizer, steps)]


def fit_counting(lab, by_round):
    task = Counts(MLP([6, 5, 4]), 4, sgd)
    task.by_round = by_round
    return fit_one_round(lab, lab.stream(partition="dirichlet"), task)


class Returns(Classifier):
    """A classifier whose optimizers come from a given function."""

    def __init__(self, optimizers, optimizer=sgd):
        super().__init__(MLP([6, 5, 4]), 4, optimizer)
        self.find = optimizers

    def configure_optimizers(self):
        return self.find(self)


class TwoByHand(Returns):
    """A module that uses two optimizers with manual optimization."""

    def __init__(self):
        super().__init__(lambda task: [sgd(task.model[1].parameters()), sgd(task.model[3].parameters())])
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():
            optimizer.step()


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=2)


class Iterates(Classifier):
    """A module whose training step receives the data loader iterator instead of a batch."""

    def training_step(self, dataloader_iter):
        return super().training_step(next(dataloader_iter), 0)


ROWS |= {
    "ReduceLROnPlateau without validation samples": Row(
        fit_plateau, {}, {"validation": 0.25}, "Pass `split=Split(validation=0.1)` to the stream"
    ),
    "ReduceLROnPlateau of training": Row(
        fit_plateau, {}, {"monitor": "train/loss"}, "monitor a metric that training logs"
    ),
    "ReduceLROnPlateau by step": Row(
        fit_plateau, {"interval": "step", "validation": 0.25}, {"interval": "epoch"}, '`"interval": "epoch"`'
    ),
    "no optimizer": Row(
        lambda lab, find: fit_one_round(lab, task=Returns(find)),
        {"find": lambda task: []},
        {"find": lambda task: sgd(task.parameters())},
        "Return an optimizer of the trainable parameters.",
    ),
    "LBFGS with accumulated gradients": Row(
        lambda lab, every, size: fit_one_round(
            lab,
            lab.stream(batch_size=size),
            lab.task(lbfgs),
            trainer_args={"accumulate_grad_batches": every},
        ),
        {"every": 2, "size": 8},
        {"every": 1, "size": 16},
        "Increase `batch_size` instead.",
    ),
    "LBFGS with keep_optimizer_state": Row(
        lambda lab, **options: fit_one_round(lab, task=lab.task(lbfgs), **options),
        {"keep_optimizer_state": True},
        None,
        "Remove `keep_optimizer_state`.",
    ),
    "step schedule with manual optimization": Row(
        fit_by_hand,
        {"schedule_options": {"interval": "step"}, "steps_itself": True},
        {"schedule_options": {}},
        "`self.lr_schedulers().step()` in `training_step`",
    ),
    "limit_train_batches with a schedule": Row(
        fit_one_round,
        {"synchronization": Deadline(ClientSpeeds(0.01)), "trainer_args": {"limit_train_batches": 0.5}},
        {"trainer_args": {}},
        "Remove the limit, or remove `synchronization`.",
    ),
    "max_steps": Row(
        lambda lab, epochs, **limits: lab.fit(lab.task(), lab.stream(), max_epochs=epochs, trainer_args=limits),
        {"max_steps": 10, "epochs": -1},
        {"max_steps": -1, "epochs": 1},
        "Use `max_epochs` and `min_epochs`.",
    ),
    "val_check_interval": Row(
        fit_one_round,
        {"trainer_args": {"val_check_interval": 0.5}},
        {"trainer_args": {"check_val_every_n_epoch": 1}},
        "Use `check_val_every_n_epoch`.",
    ),
    "dataloader_iter": Row(
        fit_kind,
        {"kind": Iterates},
        {"kind": Classifier},
        "Use the arguments `batch` and `batch_idx`.",
    ),
    "lazy layer": Row(
        fit_lazy, {"layer": nn.LazyLinear(5)}, {"layer": nn.Linear(6, 5)}, "Set the number of inputs of the layer"
    ),
    "lazy layer in configure_model": Row(
        fit_lazy, {"layer": nn.LazyLinear(5)}, {"configured": True}, "run the module on a batch in `configure_model`"
    ),
    "state_dict without keep_vars": Row(
        fit_states, {"states": without_keep_vars}, {"states": own_tensors}, "Accept `*args, **kwargs`"
    ),
    "state_dict of copies": Row(fit_states, {"states": copied}, {"states": own_tensors}, "the module's own tensors"),
    "state_dict without trainable parameters": Row(
        fit_states, {"states": only_the_head}, {"frozen": ["model.1"]}, "freeze parameters that are not returned"
    ),
    "num_classes of the task": Row(
        lambda lab, classes: fit_one_round(lab, task=Classifier(MLP([6, 5, classes]), classes, sgd)),
        {"classes": 3},
        {"classes": 4},
        "Increase `num_classes` of the task and of the network.",
    ),
    "optimizer that a hook replaces": Row(
        fit_growing,
        {"in_place": False},
        {"in_place": True},
        'Assign the new parameters to the existing optimizer: `self.optimizers().param_groups[0]["params"] = '
        "[*self.parameters()]`",
    ),
    "monitor that is not logged": Row(
        lambda lab, monitor: has_rounds(
            lab.fit(
                lab.task(),
                lab.stream(),
                [ModelCheckpoint(lab.folder, monitor=monitor)],
                trainer_args={"enable_checkpointing": True},
            )
        ),
        {"monitor": "train_loss"},
        {"monitor": "train/loss"},
        "Did you mean train/loss?",
        UnknownNameError,
    ),
    "round ended by a hook": Row(
        fit_kind,
        {"kind": Skips},
        {"kind": Classifier, "trainer_args": {"limit_train_batches": 2}},
        "set `limit_train_batches`",
    ),
    "round ended by a hook, with a loss of zero": Row(
        fit_kind, {"kind": Skips}, {"kind": ZeroLoss}, "a loss of zero from `training_step`"
    ),
    "steps that differ between clients": Row(
        fit_counting, {"by_round": False}, {"by_round": True}, "compute its length from `trainer.max_epochs` (rounds)"
    ),
    "two optimizers with a method": Row(
        lambda lab, callbacks: fit_one_round(lab, task=TwoByHand(), callbacks=callbacks),
        {"callbacks": [FedProx(0.1)]},
        {"callbacks": []},
        "Remove `FedProx`.",
    ),
    "max_epochs beyond the stream": Row(
        lambda lab, epochs: has_rounds(lab.fit(lab.task(), lab.stream(), max_epochs=epochs)),
        {"epochs": 9},
        {"epochs": 2},
        "Set `max_epochs=2`, or remove it.",
    ),
    "data module that is not a stream": Row(
        lambda lab, data: lab.fit(lab.task(), data(), max_epochs=1),
        {"data": lambda: L.LightningDataModule.from_datasets(TensorDataset(torch.zeros(8, 6), torch.zeros(8).long()))},
        {"data": lambda: small_stream()},
        "Create a stream from your data with `FederatedStream.from_arrays(x, y, client_ids=...)`.",
    ),
    "swarm with dropout and compression": Row(
        lambda lab, **options: FederatedStrategy(**options),
        {"swarm": Swarm(missed_sync_prob=0.5), "compression": TopK(0.1)},
        {"swarm": Swarm()},
        "Remove `missed_sync_prob` and `missed_rounds`",
    ),
    "swarm with a schedule": Row(
        lambda lab, **options: FederatedStrategy(**options),
        {"swarm": Swarm(), "synchronization": Deadline(ClientSpeeds(0.01))},
        {"swarm": None},
        "Remove `swarm` or `synchronization`.",
    ),
    "FedBuff with a mask": Row(
        lambda lab, **options: FederatedStrategy(**options),
        {"synchronization": FedBuff(ClientSpeeds(0.01), 2), "upload_transforms": [SumsOnly()]},
        {"upload_transforms": []},
        "Remove the transform, or use `Deadline`",
    ),
    "FedBuff with a mask, replaced by Deadline": Row(
        lambda lab, **options: FederatedStrategy(**options),
        {"synchronization": FedBuff(ClientSpeeds(0.01), 2), "upload_transforms": [SumsOnly()]},
        {"synchronization": Deadline(ClientSpeeds(0.01))},
        "or use `Deadline` as the `synchronization`",
    ),
    "upload transforms in another order": Row(
        lambda lab, transforms: FederatedStrategy(upload_transforms=transforms),
        {"transforms": [SumsOnly(), TopK(0.1)]},
        {"transforms": [Quantize()]},
        "Change the order of the list.",
    ),
    "two compressions": Row(
        lambda lab, transforms: FederatedStrategy(upload_transforms=transforms),
        {"transforms": [TopK(0.1), Quantize()]},
        {"transforms": [TopK(0.1)]},
        "Keep only one of these transforms.",
    ),
    "compression with a mask": Row(
        lambda lab, **options: FederatedStrategy(**options),
        {"compression": TopK(0.1), "upload_transforms": [SumsOnly()]},
        {"compression": None},
        "Remove `compression`.",
    ),
    "compression of a reduction that cannot be compressed": Row(
        lambda lab, **options: fit_one_round(lab, **options),
        {"compression": TopK(0.1), "reductions": {"*": "sparse_mean"}},
        {"reductions": {"*": "mean"}},
        "Use another reduction",
    ),
    "compression of a reduction that cannot be compressed, removed": Row(
        lambda lab, **options: fit_one_round(lab, **options),
        {"compression": TopK(0.1), "reductions": {"*": "sparse_mean"}},
        {"compression": None},
        "or remove `compression`.",
    ),
    "mask with a method whose clients send messages": Row(
        lambda lab, senders: Pipeline([SumsOnly()]).setup(
            Setting({}, {}, [], seed=0, round_idx=0, clients=[], senders=senders)
        ),
        {"senders": ["FedWEIT"]},
        {"senders": []},
        "Remove methods whose clients send messages, or",
    ),
    "mask with a median": Row(
        lambda lab, **options: fit_one_round(lab, **options),
        {"upload_transforms": [Halves()], "reductions": {"*": "median"}},
        {"reductions": {"*": "mean"}},
        "Use another reduction",
    ),
    "limit_train_batches with a schedule, removed": Row(
        fit_one_round,
        {"synchronization": Deadline(ClientSpeeds(0.01)), "trainer_args": {"limit_train_batches": 0.5}},
        {"synchronization": None},
        "or remove `synchronization`.",
    ),
    "FedBuff with a large buffer": Row(
        lambda lab, size: fit_one_round(lab, synchronization=FedBuff(ClientSpeeds(0.01), buffer_size=size)),
        {"size": 9},
        {"size": 2},
        "Use `buffer_size=3` or less.",
    ),
    "FedBuff with a median": Row(
        lambda lab, synchronization: fit_one_round(lab, synchronization=synchronization, reductions={"*": "median"}),
        {"synchronization": FedBuff(ClientSpeeds(0.01), 2)},
        {"synchronization": Deadline(ClientSpeeds(0.01))},
        "Use `Deadline`",
    ),
    "client without a speed": Row(
        lambda lab, speeds: fit_one_round(lab, synchronization=Deadline(speeds)),
        {"speeds": ClientSpeeds(per_client={"0": {"seconds_per_sample": 0.1}})},
        {"speeds": ClientSpeeds(0.01, per_client={"0": {"seconds_per_sample": 0.1}})},
        "Set `seconds_per_sample` in `ClientSpeeds`",
        MissingValueError,
    ),
    "pattern of reductions without an entry": Row(
        fit_one_round,
        {"reductions": {"head.*": "local"}},
        {"reductions": {"model.3.*": "local"}},
        "The entries are: model.1.weight",
    ),
    "optimizer with a negative rate": Row(
        lambda lab, rate: fit_one_round(lab, server_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate)),
        {"rate": -1.0},
        {"rate": 1.0},
        "Correct the arguments of the optimizer",
    ),
    "optimizer with a rate of NaN": Row(
        lambda lab, rate: fit_one_round(lab, task=lab.task(lambda parameters: torch.optim.SGD(parameters, lr=rate))),
        {"rate": float("nan")},
        {"rate": 0.01},
        "Use a finite number, such as `lr=0.01`.",
    ),
    "optimizer with a coefficient of NaN": Row(
        lambda lab, betas: fit_one_round(lab, task=lab.task(lambda parameters: adam_with_betas(parameters, betas))),
        {"betas": (float("nan"), 0.999)},
        {"betas": (0.9, 0.999)},
        "Use finite numbers, such as `betas=(0.9, 0.999)`.",
    ),
    "batches of one sample with batch normalization": Row(
        lambda lab, size: fit_one_round(
            lab,
            lab.stream(batch_size=size),
            lab.task(model=nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))),
        ),
        {"size": 1},
        {"size": 2},
        "Use `batch_size=2` or more.",
    ),
    "nested client_model": Row(
        lambda lab, together: show_two(fit_one_round(lab), together),
        {"together": True},
        {"together": False},
        "Exit the other `with` block first.",
    ),
}


def show_two(trainer, together):
    with client_model(trainer, "0"):
        if together:
            with client_model(trainer, "1"):
                pass
    with client_model(trainer, "1"):
        pass


# Rows about data


def stream_of(lab=None, **options):
    stream = small_stream(**options)
    stream.setup("fit")
    assert stream.plan.num_rounds and stream.plan.clients
    return stream


def stream_of_data(lab, data, **options):
    stream = FederatedStream(data, Stationary(), **options)
    stream.setup("fit")
    assert len(stream.samples)
    return stream


def pairs(size=24, features=6, classes=4, first=0):
    return TensorDataset(torch.randn(size, features), torch.arange(size) % classes + first)


class Ragged(Dataset):
    """Samples of different lengths. If ``pad`` is given, all samples have this length."""

    def __init__(self, pad=None, size=24):
        self.pad, self.size = pad, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.ones(self.pad or 1 + index % 3), index % 4


def pad_batch(items):
    x, y = zip(*items, strict=True)
    return nn.utils.rnn.pad_sequence(x, batch_first=True), torch.tensor(y)


class Moves(L.LightningDataModule):
    """A data module without batch transfer hooks. With `in_dataset`, the data set adds 1 to the training inputs."""

    def __init__(self, in_dataset=False):
        super().__init__()
        self.in_dataset = in_dataset

    def train_dataloader(self):
        data = pairs()
        if self.in_dataset:
            data = [(x + 1, y) for x, y in data]
        return DataLoader(data, batch_size=8, shuffle=True)

    def test_dataloader(self):
        return DataLoader(pairs(8), batch_size=8)


class MovesBatches(Moves):
    """A data module that changes batches in `on_after_batch_transfer`."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + 1, batch[1]]


def module_of(**options):
    options = {"batch_size": 8, **options}
    return L.LightningDataModule.from_datasets(pairs(), test_dataset=pairs(8), **options)


class Streams(IterableDataset):
    """An iterable data set, without indices."""

    def __iter__(self):
        return iter(pairs())


def images(size=24, channels=3):
    return np.random.default_rng(0).integers(256, size=(size, channels, 8, 8), dtype=np.uint8)


X, Y = torch.randn(24, 6), torch.arange(24) % 4
OWNER = np.arange(24) // 4 % 3
FLAT = np.full((24, 6), np.nan, dtype=np.float32)


def divide(lab, partition):
    parts = partition.partition(np.repeat(np.arange(4), 6), None, np.random.default_rng(0))
    assert all(len(part) for part in parts.values())


def stream_of_arrays(lab, x=X, y=Y, **options):
    stream = FederatedStream.from_arrays(x, y, **{"scenario": Stationary(), "partition": IID(2), **options})
    stream.setup("fit")
    return stream


ROWS |= {
    "number of classes not divisible by experiences": Row(
        stream_of, {"scenario": ClassIncremental(3)}, {"scenario": ClassIncremental([2, 1, 1])}, "such as [2, 1, 1]"
    ),
    "number of classes not divisible by experiences, other number": Row(
        stream_of,
        {"scenario": ClassIncremental(3)},
        {"scenario": ClassIncremental(2)},
        "Use a divisor, such as `num_experiences=2`, or the number",
    ),
    "order of all clients and of each": Row(
        lambda lab, **options: ClassIncremental(2, **options),
        {"class_order": [3, 2, 1, 0], "order_per_client": True},
        {"order_per_client": False},
        "Remove `class_order` or `order_per_client`.",
    ),
    "order without a client": Row(
        stream_of,
        {"scenario": ClassIncremental(2, class_order={"0": [3, 2, 1, 0]})},
        {"scenario": ClassIncremental(2, class_order={"0": [3, 2, 1, 0], "1": [0, 1, 2, 3]})},
        "Add an order for this client.",
        MissingValueError,
    ),
    "order with a wrong name": Row(
        stream_of,
        {
            "classes": ["cat", "dog", "cow", "hen"],
            "scenario": ClassIncremental(2, class_order=["cat", "dgo", "cow", "hen"]),
        },
        {"scenario": ClassIncremental(2, class_order=["cat", "dog", "cow", "hen"])},
        "Did you mean dog?",
        UnknownNameError,
    ),
    "class order of ambiguous numbers": Row(
        stream_of,
        {"classes": ["1", "0", "2", "3"], "scenario": ClassIncremental(2, class_order=[1, 0, 2, 3])},
        {"scenario": ClassIncremental(2, class_order=["1", "0", "2", "3"])},
        'Write names as text, as in ["1", "0", "2", ...].',
    ),
    "domains without a group": Row(
        stream_of,
        {"scenario": DomainIncremental()},
        {"group": torch.arange(48) // 24},
        "Pass `group=` to `FederatedStream.from_arrays`",
    ),
    "samples_per_round": Row(
        stream_of,
        {"scenario": ClassIncremental(1, 3, samples_per_round=100)},
        {"scenario": ClassIncremental(1, 3, samples_per_round=2)},
        "Lower `samples_per_round`",
    ),
    "Blurry with many experiences": Row(
        stream_of, {"scenario": Blurry(9)}, {"scenario": Blurry(4)}, "Use `num_experiences=4` or fewer."
    ),
    "Online with a history": Row(
        stream_of,
        {"scenario": Online(ClassIncremental(2, history="seen"))},
        {"scenario": Online(ClassIncremental(2))},
        "Remove `history` from the scenario.",
    ),
    "client_ids with a scenario that defines clients": Row(
        lambda lab, **options: FederatedStream("digits", "fedvit", **options),
        {"partition": IID(2)},
        None,
        "Remove this argument.",
    ),
    "ByClientId without owners": Row(
        stream_of_arrays, {"partition": ByClientId()}, {"partition": IID(2)}, "Use another `partition`, such as `IID`."
    ),
    "Dirichlet that finds no partition": Row(
        divide,
        {"partition": Dirichlet(8, alpha=0.01, min_partition_size=2)},
        {"partition": Dirichlet(8, alpha=100.0, min_partition_size=2)},
        "you can also raise `alpha`",
    ),
    "Dirichlet that finds no partition, lower min_size": Row(
        divide,
        {"partition": Dirichlet(8, alpha=0.3, min_partition_size=3)},
        {"partition": Dirichlet(8, alpha=0.3, min_partition_size=1)},
        "Lower `min_partition_size`",
    ),
    "Dirichlet that finds no partition, fewer clients": Row(
        divide,
        {"partition": Dirichlet(12, alpha=0.3, min_partition_size=2)},
        {"partition": Dirichlet(2, alpha=0.3, min_partition_size=2)},
        "or `num_clients`",
    ),
    "ClassSubsets with a small fraction": Row(
        divide,
        {"partition": ClassSubsets(4, 2, fraction=0.05)},
        {"partition": ClassSubsets(4, 2, fraction=0.4)},
        "Raise `fraction`",
    ),
    "ClassSubsets with many clients": Row(
        divide,
        {"partition": ClassSubsets(12, 4, fraction=0.2)},
        {"partition": ClassSubsets(3, 4, fraction=0.2)},
        "or lower `num_clients`",
    ),
    "ClassSubsets with many classes": Row(
        divide,
        {"partition": ClassSubsets(12, 4, fraction=0.5)},
        {"partition": ClassSubsets(12, 1, fraction=0.5)},
        "`classes_per_client`",
    ),
    "no training samples": Row(
        stream_of,
        {"split": Split(test=0.9, validation=0.9)},
        {"split": Split(test=0.2)},
        "Use smaller fractions for `test` and `validation`",
    ),
    "no official test set": Row(
        stream_of, {"split": Split(test="official")}, {"split": Split(test=0.2)}, "Use a fraction, such as `test=0.2`"
    ),
    "split with a typo": Row(
        lambda lab, test: stream_of_data(
            lab, {"train": pairs(), "test": pairs(8)}, partition=IID(2), split=Split(test=test)
        ),
        {"test": "oficial"},
        {"test": "official"},
        '`test="official"`',
    ),
    "split by owners without owners": Row(
        stream_of_arrays,
        {"split": Split(test=["1"])},
        {"client_ids": OWNER, "partition": ByClientId()},
        "or pass the owners as `client_ids`",
    ),
    "targets of a regression in a scenario of classes": Row(
        stream_of_arrays,
        {"y": torch.randn(24), "scenario": ClassIncremental(2)},
        {"y": Y},
        "pass labels as `y`",
    ),
    "targets of a regression in a scenario of classes, stationary": Row(
        stream_of_arrays,
        {"y": torch.randn(24), "scenario": ClassIncremental(2)},
        {"scenario": Stationary()},
        "Use `Stationary`",
    ),
    "targets of a regression in a partition of classes": Row(
        stream_of_arrays, {"y": torch.randn(24), "partition": Shards(2)}, {"partition": IID(2)}, "`IID`"
    ),
    "labels with a second axis": Row(
        stream_of_arrays, {"y": Y[:, None]}, {"y": Y[:, None].squeeze(-1)}, "`y.squeeze(-1)`"
    ),
    "labels with a second axis, as targets": Row(
        stream_of_arrays, {"y": Y[:, None]}, {"classes": ()}, "pass `classes=()`"
    ),
    "targets that are NaN": Row(
        stream_of_arrays,
        {"y": torch.full((24,), float("nan"))},
        {"y": torch.randn(24)},
        "Correct or remove these samples",
    ),
    "targets of a floating type with classes": Row(
        stream_of_arrays,
        {"y": torch.randn(24), "classes": ["a", "b"]},
        {"classes": None},
        "Remove `classes` if you passed it",
        InvalidTypeError,
    ),
    "label without a class name": Row(
        stream_of_arrays, {"classes": ["a", "b", "c"]}, {"classes": ["a", "b", "c", "d"]}, "or name every class."
    ),
    "samples that are NaN": Row(stream_of_arrays, {"x": FLAT}, {"x": np.nan_to_num(FLAT)}, "these samples first."),
    "samples that are text": Row(
        stream_of_arrays,
        {"x": np.full((24, 6), "1")},
        {"x": np.full((24, 6), "1").astype(np.float32)},
        "Convert `x`, for example with `x.astype(np.float32)`.",
        InvalidTypeError,
    ),
    "samples of different shapes": Row(
        stream_of_arrays,
        {"x": [[1.0] * (1 + n % 2) for n in range(24)]},
        {"x": [[1.0] * 2 for n in range(24)]},
        "Convert the samples to one shape.",
    ),
    "fewer targets than samples": Row(stream_of_arrays, {"y": Y[:20]}, {"y": Y}, "Pass one target for each sample."),
    "client_ids of a floating type": Row(
        stream_of_arrays,
        {"client_ids": OWNER / 2, "partition": None},
        {"client_ids": OWNER.astype(str)},
        "Convert `client_ids` with `client_ids.astype(str)`",
    ),
    "mean without std": Row(
        stream_of_arrays, {"x": images(), "mean": 0.5}, {"std": 0.25}, "Pass both `mean` and `std`"
    ),
    "mean of grey levels": Row(
        stream_of_arrays,
        {"x": images(), "mean": 127.0, "std": 64.0},
        {"mean": 127.0 / 255, "std": 64.0 / 255},
        "Divide values for pixels from 0 to 255 by 255.",
    ),
    "mean with floating-point images": Row(
        stream_of_arrays,
        {"x": images().astype(np.float32), "mean": 0.5, "std": 0.25},
        {"x": (images().astype(np.float32) / 255 - 0.5) / 0.25, "mean": None, "std": None},
        "Normalize other samples beforehand",
    ),
    "client without samples": Row(
        stream_of_data,
        {"data": {"a": pairs(), "b": pairs(0)}},
        {"data": {"a": pairs()}},
        "Remove client b from `data`.",
        MissingValueError,
    ),
    "clients of different shapes": Row(
        stream_of_data,
        {"data": {"a": pairs(), "b": pairs(features=5)}},
        {"data": {"a": pairs(), "b": pairs()}},
        "Convert the samples to one shape",
    ),
    "clients of different shapes with collate_fn": Row(
        stream_of_data,
        {"data": {"a": Ragged(4), "b": Ragged(3)}},
        {"collate_fn": pad_batch},
        "pass a `collate_fn` that accepts several shapes",
    ),
    "splits with another key": Row(
        stream_of_data,
        {"data": {"train": pairs(), "test": pairs(8), "extra": pairs(8)}, "partition": IID(2)},
        {"data": {"train": pairs(), "test": pairs(8)}},
        "Remove splits with other names",
    ),
    "test samples of an unknown class": Row(
        stream_of_data,
        {"data": {"train": pairs(classes=3), "test": pairs(8)}, "partition": IID(2)},
        {"data": {"train": pairs(classes=3), "test": pairs(8, classes=3)}},
        "Remove the validation and test samples of these classes, or add training samples",
    ),
    "y without an entry for each client": Row(
        stream_of_data,
        {"data": {"a": pairs(), "b": pairs()}, "y": {"a": Y}},
        {"y": {"a": Y, "b": Y}},
        "Pass a dict with the keys of `data`.",
    ),
    "y of fewer samples": Row(
        stream_of_data,
        {"data": {"a": pairs(), "b": pairs()}, "y": {"a": Y, "b": Y[:3]}},
        {"y": {"a": Y, "b": Y}},
        "Pass one target for each sample, in the order of the samples.",
    ),
    "y of fewer splits": Row(
        stream_of_data,
        {"data": {"train": pairs(), "test": pairs(8)}, "partition": IID(2), "y": {"train": Y}},
        {"y": {"train": Y, "test": Y[:8]}},
        "Pass a dict with one array for each split.",
    ),
    "y of a public dataset": Row(
        stream_of_data, {"data": "digits", "y": Y, "partition": IID(2)}, {"y": None}, "Remove `y`."
    ),
    "name of a dataset": Row(
        stream_of_data,
        {"data": "digit", "partition": IID(2)},
        {"data": "digits"},
        "Did you mean digits?",
        UnknownNameError,
    ),
    "data modules with hooks for batches": Row(
        stream_of_data,
        {"data": {"a": MovesBatches(), "b": MovesBatches()}},
        {"data": {"a": Moves(True), "b": Moves(True)}},
        "Move the code of the hook to the transform",
    ),
    "data modules of some clients": Row(
        stream_of_data,
        {"data": {"a": module_of(), "b": pairs()}},
        {
            "data": {
                "a": module_of(),
                "b": L.LightningDataModule.from_datasets(pairs(), test_dataset=pairs(8), batch_size=8),
            }
        },
        "`L.LightningDataModule.from_datasets(train, test_dataset=test, batch_size=32)`",
        MissingValueError,
    ),
    "data modules with different batch sizes": Row(
        stream_of_data,
        {"data": {"a": module_of(), "b": module_of(batch_size=4)}},
        {"batch_size": 4},
        "Pass `batch_size=` to `FederatedStream`.",
    ),
    "scenario with a typo": Row(
        lambda lab, scenario: FederatedStream("digits", scenario),
        {"scenario": "ClassIncrementel"},
        {"scenario": "ClassIncremental"},
        "Did you mean ClassIncremental?",
        UnknownNameError,
    ),
    "partition with a typo": Row(
        lambda lab, partition: FederatedStream("digits", partition=partition),
        {"partition": "Dirichlett"},
        {"partition": "Dirichlet"},
        "Did you mean Dirichlet?",
        UnknownNameError,
    ),
}


# Rows of the table of hints: methods, tasks, networks and metrics


def fit_with(lab, method, options=None, stream=None, **arguments):
    return fit_one_round(lab, lab.stream(**(stream or {})), callbacks=[method(**(options or {}))], **arguments)


class Numbers(nn.Module):
    """A module that converts the input to floating point."""

    def forward(self, x):
        return x.float()


class Plain(L.LightningModule):
    """A module without `sample_loss`."""

    def __init__(self):
        super().__init__()
        self.model = MLP([6, 5, 4])

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return sgd(self.parameters())


class StatesLoss(Plain):
    """A module with `sample_loss`."""

    lightning_fcl_protocols = True

    def sample_loss(self, output, y):
        return nn.functional.cross_entropy(output, y, reduction="none")


class Embeds(StatesLoss):
    """A module with `embed`."""

    num_classes, features = 4, 5

    def embed(self, x):
        return self.model.embed(x)


def fit_module(lab, module, method):
    return fit_one_round(lab, task=module(), callbacks=[method])


def fit_fedweit(lab, incremental=True, tasks=2, others=(), **reductions):
    net = FedWEITNet(lab_net(), num_tasks=tasks)
    task = Classifier(net, 4, sgd, task_incremental=incremental)
    return fit_one_round(lab, task_stream(), task, callbacks=[FedWEIT(), *others], **reductions)


def task_stream(tasks=2, **options):
    scenario = FedViTScenario(
        tasks, num_clients=2, classes_per_client=(4 // tasks,) * 2, sample_fraction=(0.4, 0.5), rounds_per_task=1
    )
    x, y = torch.randn(120, 6), torch.arange(120) % 4
    return FederatedStream.from_arrays(x, y, **{"scenario": scenario, **options})


def lab_net():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 4)

        def forward(self, x):
            return self.head(self.body(x).relu())

    return Net()


FEDWEIT = {"model.tasks.*": "local", "model.net.head.*": "local", "model.net.body.*weight": "sparse_mean"}


def series_stream(split=None, rounds=1, **options):
    x, y, client = torch.randn(48, 9, 3), torch.arange(48) % 4, torch.arange(48) // 4 % 2
    scenario = options.pop("scenario", Stationary(rounds))
    return FederatedStream.from_arrays(x, y, client, scenario=scenario, split=split, **options)


def fit_reservoir(lab, split=None, callbacks=(), stream=None, task=None, rounds=1, strategy=None, **options):
    reservoir = EchoStateNetwork(3, units=12, leaking_rate=0.6, seed=0)
    task = (task or ReservoirClassifier)(reservoir, 4, **{"beta": 1e-2, "min_samples": 1, **options})
    stream = stream() if stream else series_stream(split, rounds)
    return has_rounds(lab.fit(task, stream, callbacks, **(strategy or {})))


class Steps(ReservoirClassifier):
    """A task that overrides `training_step`."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)


class Pairs(ReservoirClassifier):
    """A task that overrides `readout_pairs`."""

    def readout_pairs(self, x, y):
        return super().readout_pairs(x * 2, y)


def run_network(lab, make, x):
    assert make()(x).isfinite().all()


ROWS |= {
    "EWC with a module without sample_loss": Row(
        fit_module,
        {"module": Plain, "method": EWC(1.0)},
        {"module": StatesLoss},
        "define `sample_loss` and `lightning_fcl_protocols = True`",
    ),
    "EWC with a module without sample_loss, as a Classifier": Row(
        fit_module,
        {"module": Plain, "method": EWC(1.0)},
        {"module": lambda: Classifier(MLP([6, 5, 4]), 4, sgd)},
        "Use a `Classifier`",
    ),
    "FedProto with a module without features": Row(
        fit_module,
        {"module": StatesLoss, "method": FedProto()},
        {"module": Embeds},
        "define these names and set `lightning_fcl_protocols = True`",
    ),
    "CCVR with a module without features": Row(
        fit_module,
        {"module": StatesLoss, "method": CCVR(epochs=1)},
        {"module": lambda: Classifier(MLP([6, 5, 4]), 4, sgd)},
        "Use a `Classifier`",
    ),
    "LogitAdjustment without num_classes": Row(
        fit_module,
        {"module": StatesLoss, "method": LogitAdjustment(prior="federation")},
        {"module": Embeds},
        "define `num_classes` and `lightning_fcl_protocols = True` in the module",
    ),
    "two methods that weight the loss": Row(
        fit_one_round, {"callbacks": [FLwF2T(), BCN()]}, {"callbacks": [FLwF2T()]}, "Use only one of these methods."
    ),
    "SCAFFOLD with weights by samples": Row(
        fit_with,
        {"method": SCAFFOLD},
        {"client_weights": "uniform"},
        'Use `FederatedStrategy(client_weights="uniform")`.',
    ),
    "SCAFFOLD with Adam": Row(
        lambda lab, optimizer: fit_with(lab, SCAFFOLD, task=lab.task(optimizer), client_weights="uniform"),
        {"optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.01)},
        {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.01)},
        "Use SGD with one parameter group and without dampening, and change the learning rate only between rounds.",
    ),
    "FedDyn with a server optimizer": Row(
        fit_with,
        {"method": FedDyn, "client_weights": "uniform", "server_optimizer": sgd},
        {"server_optimizer": None},
        "Fit without a `server_optimizer`, or without `FedDyn`.",
    ),
    "FedNova with FedBuff": Row(
        fit_with,
        {"method": FedNova, "synchronization": FedBuff(ClientSpeeds(0.01), 2)},
        {"synchronization": None},
        "Fit without a `FedBuff`, or without `FedNova`.",
    ),
    "FedNova with momentum that clients keep": Row(
        lambda lab, keeps: fit_with(
            lab,
            FedNova,
            task=lab.task(lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9)),
            keep_optimizer_state=keeps,
        ),
        {"keeps": True},
        {"keeps": False},
        "Fit without momentum and `keep_optimizer_state=True`.",
    ),
    "APFL with accumulated gradients": Row(
        lambda lab, every, size: fit_with(
            lab, APFL, stream={"batch_size": size}, trainer_args={"accumulate_grad_batches": every}
        ),
        {"every": 2, "size": 4},
        {"every": 1, "size": 8},
        "Raise the stream's `batch_size` instead.",
    ),
    "FedPer head that the server averages": Row(
        fit_with,
        {"method": FedRep, "options": {"head_pattern": "model.3.*"}},
        {"reductions": {"model.3.*": "local"}},
        'Give the strategy `reductions={"model.3.*": "local"}`',
    ),
    "head that matches nothing": Row(
        fit_with,
        {"method": FedRep, "options": {"head_pattern": "head.*"}, "reductions": {"model.3.*": "local"}},
        {"options": {"head_pattern": "model.3.*"}},
        'Use a pattern of the last layer, such as `head_pattern="model.3.*"`',
    ),
    "head of a module with one layer": Row(
        lambda lab, sizes, head: fit_one_round(
            lab, task=Classifier(MLP(sizes), 4, sgd), callbacks=[FedRep(head_pattern=head)], reductions={head: "local"}
        ),
        {"sizes": [6, 4], "head": "model.1.*"},
        {"sizes": [6, 5, 4], "head": "model.3.*"},
        "Use a module with at least two layers of trainable parameters",
    ),
    "FedProx with a pattern that matches nothing": Row(
        fit_with,
        {"method": FedProx, "options": {"pattern": "body.*"}},
        {"options": {"pattern": "model.1.*"}},
        "Omit `pattern`, or use a pattern that matches one of these parameters: model.1.weight",
    ),
    "FLwF2T weights above 1": Row(
        lambda lab, alpha, beta: FLwF2T(alpha, beta),
        {"alpha": 0.5, "beta": 0.7},
        {"beta": 0.3},
        "Lower `beta` to at most 1 - alpha, so that the weight of the server's model, 1 - alpha - beta, is at least 0.",
    ),
    "FLwF2T with a negative weight": Row(
        lambda lab, alpha, beta: FLwF2T(alpha, beta),
        {"alpha": 0.5, "beta": -0.1},
        {"beta": 0.5},
        "Use a `beta` between 0 and 1 - alpha.",
    ),
    "BCN with integer inputs": Row(
        lambda lab, eps: has_rounds(
            lab.fit(
                Classifier(nn.Sequential(Numbers(), nn.Linear(6, 4)), 4, sgd),
                small_stream(x=torch.arange(48 * 6).view(48, 6), scenario=ClassIncremental(2)),
                [BCN(eps=eps)],
            )
        ),
        {"eps": 0.1},
        {"eps": 0.0},
        "Use `eps=0`.",
        InvalidTypeError,
    ),
    "replay with a wrong policy for repeats": Row(
        lambda lab, policy: Replay(10, policy=policy, oversample=True),
        {"policy": "refresh"},
        {"policy": "reservoir"},
        'Use `policy="reservoir"`',
    ),
    "replay with a transform that is not a function": Row(
        lambda lab, transform: fit_with(lab, Replay, {"memory_size": 10, "transform": transform}),
        {"transform": 0.1},
        {"transform": None},
        "Leave it out.",
        InvalidTypeError,
    ),
    "replay with base without a base session": Row(
        fit_with, {"method": Replay, "options": {"include_base": True}}, {"options": {}}, "Leave `include_base` out."
    ),
    "LVT without its parameters": Row(fit_with, {"method": LVTMethod}, {"options": {"gamma": 0.0}}, "or set `gamma=0`"),
    "FedKNOW without layers": Row(
        lambda lab, method: fit_one_round(
            lab,
            lab.stream(),
            lab.task(model=nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4))),
            callbacks=[method(head_pattern="model.1.*")],
            reductions={"model.1.*": "local"},
        ),
        {"method": FedKNOW},
        {"method": FedViT},
        "Use `FedViT`",
    ),
    "FedWEIT without a task-incremental Classifier": Row(
        fit_fedweit,
        {"incremental": False, "reductions": FEDWEIT},
        {"incremental": True},
        "Pass `task_incremental=True` to `Classifier`.",
    ),
    "FedWEIT with few tasks": Row(
        fit_fedweit, {"tasks": 1, "reductions": FEDWEIT}, {"tasks": 2}, "Pass `num_tasks=2` to `FedWEITNet`."
    ),
    "FedWEIT without reductions": Row(fit_fedweit, {}, {"reductions": FEDWEIT}, str(FEDWEIT).replace("'", '"')),
    "FedWEIT with EWC": Row(
        fit_fedweit, {"others": [EWC()], "reductions": FEDWEIT}, {"others": []}, "Remove the other methods."
    ),
    "FedWEIT without a FedWEITNet network": Row(
        lambda lab, wrap: fit_one_round(
            lab,
            task_stream(),
            task=Classifier(wrap(lab_net()), 4, sgd, task_incremental=True),
            callbacks=[FedWEIT()],
            reductions=FEDWEIT if wrap(lab_net()).__class__ is FedWEITNet else {},
        ),
        {"wrap": lambda net: net},
        {"wrap": lambda net: FedWEITNet(net, num_tasks=10)},
        "Pass `FedWEITNet(net, num_tasks=10)` as the `model` of a `Classifier`.",
    ),
    "task_incremental without tasks": Row(
        lambda lab, incremental, stream: fit_one_round(
            lab, stream(), Classifier(MLP([6, 5, 4]), 4, sgd, task_incremental=incremental)
        ),
        {"incremental": True, "stream": small_stream},
        {"incremental": False},
        "or leave `task_incremental` out.",
    ),
    "task_incremental without tasks, with tasks": Row(
        lambda lab, stream: fit_one_round(lab, stream(), Classifier(MLP([6, 5, 4]), 4, sgd, task_incremental=True)),
        {"stream": small_stream},
        {"stream": task_stream},
        "Use `scenario=FedViTScenario(...)`",
    ),
    "number of classes not divisible by tasks": Row(
        lambda lab, tasks: task_stream(scenario=FedViTScenario(tasks, classes_per_client=(2, 2))).setup("fit"),
        {"tasks": 3},
        {"tasks": 2},
        "Use a divisor, such as `num_tasks=2`.",
    ),
    "task of one class": Row(
        lambda lab, tasks: fit_one_round(
            lab, task_stream(tasks), Classifier(MLP([6, 5, 4]), 4, sgd, task_incremental=True)
        ),
        {"tasks": 4},
        {"tasks": 2},
        "Decrease `num_tasks`",
    ),
    "network with other outputs": Row(
        lambda lab, outputs: fit_one_round(lab, task=Classifier(MLP([6, 5, outputs]), 4, sgd)),
        {"outputs": 5},
        {"outputs": 4},
        "Set the network's number of outputs to 4, or use `num_classes=5`.",
    ),
    "ContinualMetrics without validation samples": Row(
        fit_with,
        {"method": ContinualMetrics, "options": {"split": "validation"}},
        {"stream": {"split": Split(validation=0.1)}},
        "Set `split=Split(validation=0.1)` of the stream.",
        MissingValueError,
    ),
    "ContinualMetrics without test samples": Row(
        fit_with,
        {"method": ContinualMetrics, "stream": {"split": Split(test=0.0)}},
        {"stream": {"split": Split(test=0.2)}},
        "Set `split=Split(test=0.2)` of the stream.",
        MissingValueError,
    ),
    "ContinualMetrics of one client": Row(
        fit_with,
        {"method": lambda clients: ContinualMetrics(clients=clients), "options": {"clients": "2"}},
        {"options": {"clients": ["2"]}},
        'Use `clients=["2"]`.',
    ),
    "ContinualMetrics of an unknown client": Row(
        fit_with,
        {"method": ContinualMetrics, "options": {"clients": ["2", "01"]}},
        {"options": {"clients": ["2", "1"]}},
        "Did you mean",
        UnknownNameError,
    ),
    "ContinualMetrics with lower_is_better": Row(
        fit_with,
        {"method": ContinualMetrics, "options": {"lower_is_better": ["loss"]}},
        {"options": {}},
        "Leave `lower_is_better` out.",
    ),
    "ActivationDensity without a reservoir": Row(
        lambda lab, call: call(lab, callbacks=[ActivationDensity()]),
        {"call": fit_one_round},
        {"call": fit_reservoir},
        "Use a `ReservoirClassifier`",
    ),
    "ActivationDensity without test samples": Row(
        fit_reservoir,
        {"callbacks": [ActivationDensity()], "split": Split(test=0.0)},
        {"split": Split(test=0.2)},
        "Set `split=Split(test=0.2)` of the stream",
        MissingValueError,
    ),
    "reservoir with several beta and no validation samples": Row(
        fit_reservoir,
        {"beta": [0.1, 1.0]},
        {"split": Split(validation=0.1)},
        "Set `split=Split(validation=0.1)` of the stream",
    ),
    "reservoir with several beta and no validation samples, with one": Row(
        fit_reservoir, {"beta": [0.1, 1.0]}, {"beta": 0.1}, "or pass one `beta`."
    ),
    "reservoir without beta": Row(fit_reservoir, {"beta": []}, {"beta": 1.0}, "such as `beta=1.0`"),
    "reservoir with several beta that shares weights": Row(
        fit_reservoir, {"beta": [0.1, 1.0], "upload": "weights"}, {"beta": 0.1}, "Pass one number"
    ),
    "ridge regression with rank and gamma": Row(
        lambda lab, **options: RidgeClassifier(MLP([6, 5, 4]), 4, **options),
        {"rank": 5, "gamma": 0.1},
        {"gamma": 0.0},
        "Leave `rank` or `gamma` out",
    ),
    "ridge regression with rank that shares weights": Row(
        lambda lab, **options: RidgeClassifier(MLP([6, 5, 4]), 4, **options),
        {"rank": 5, "upload": "weights"},
        {"upload": "statistics"},
        'use `upload="statistics"`',
    ),
    "reservoir with local epochs": Row(
        fit_reservoir, {"strategy": {"local_epochs": 2}}, {"strategy": {}}, "Leave `local_epochs` out."
    ),
    "reservoir with local epochs, as plasticity": Row(
        fit_reservoir,
        {"strategy": {"local_epochs": 2}, "rounds": 2},
        {"strategy": {}, "callbacks": [IntrinsicPlasticity(local_epochs=2)]},
        "`IntrinsicPlasticity(local_epochs=...)`",
    ),
    "reservoir with reductions": Row(
        fit_reservoir, {"strategy": {"reductions": {"*": "median"}}}, {"strategy": {}}, "Leave `reductions` out."
    ),
    "reservoir with a method that changes the loss": Row(
        fit_reservoir, {"callbacks": [FedProx()]}, {"callbacks": []}, "Remove `FedProx`."
    ),
    "reservoir with a training step": Row(
        fit_reservoir, {"task": Steps}, {"task": Pairs}, "Override `readout_pairs` instead."
    ),
    "plasticity in one round": Row(
        fit_reservoir,
        {"callbacks": [IntrinsicPlasticity()]},
        {"rounds": 2},
        "Raise `max_epochs`. With a `FederatedStream`, also raise `rounds_per_experience` of its `scenario`.",
    ),
    "unlearning after the last round": Row(
        lambda lab, round_idx: fit_reservoir(lab, callbacks=[Unlearning({"0": round_idx})]),
        {"round_idx": 5},
        {"round_idx": 0},
        "Use a round of the fit",
    ),
    "reservoir with inputs of another size": Row(
        lambda lab, features: EchoStateNetwork(features, units=12, seed=0)(torch.randn(2, 9, 3)),
        {"features": 5},
        {"features": 3},
        "Set the reservoir's `in_features`",
    ),
    "reservoir with a long washout": Row(
        lambda lab, washout: EchoStateNetwork(3, units=12, washout=washout, seed=0)(torch.randn(2, 9, 3)),
        {"washout": 9},
        {"washout": 2},
        "Decrease `washout`",
    ),
    "FedWEITNet without layers": Row(
        lambda lab, layers: FedWEITNet(lab_net(), 2, layers),
        {"layers": "trunk.*"},
        {"layers": "body.*"},
        'Use a pattern of layers, such as `layers="body.weight"`',
    ),
    "HARCNN with inputs of another shape": Row(
        lambda lab, x: HARCNN("16-8C_4M_32D", 3, 32, 4)(x),
        {"x": torch.randn(2, 32, 3)},
        {"x": torch.randn(2, 32, 3).transpose(1, 2)},
        "Transpose the windows",
    ),
}


# Rows of the table of hints: more fits, networks, tasks and checkpoints


class Logs(L.LightningModule):
    """A module that returns one number per sample. If ``logs`` is true, the module logs a metric in `test_step`."""

    def __init__(self, logs):
        super().__init__()
        self.layer, self.logs = nn.Linear(6, 1), logs

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        return self(batch[0]).square().mean()

    def test_step(self, batch, batch_idx):
        if self.logs:
            self.log("score", self(batch[0]).mean())

    def configure_optimizers(self):
        return sgd(self.parameters())


class NoStep(Logs):
    """A module without `test_step`."""

    test_step = L.LightningModule.test_step


class Branches(Classifier):
    """A module whose training step contains a branch on the value of the loss."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if loss > 1 else loss


def fit_measured(lab, module, **options):
    return fit_one_round(lab, task=module(), callbacks=[ContinualMetrics(**options)])


def reservoir_series(lab, y, readout="mean"):
    stream = FederatedStream.from_arrays(
        torch.randn(24, 9, 3), y, torch.arange(24) % 2, scenario=Stationary(), classes=()
    )
    task = ReservoirClassifier(EchoStateNetwork(3, 12, seed=0), 4, min_samples=1, readout=readout)
    return has_rounds(lab.fit(task, stream))


def continue_fit(lab, continued=True, momentum=0.0, weights=False, num_clients=3):
    folder = lab.folder / str(len([*lab.folder.iterdir()]))
    checkpoints = ModelCheckpoint(folder, save_last=True, save_weights_only=weights)
    saving = {"enable_checkpointing": True}
    lab.fit(lab.task(), lab.stream(), [checkpoints], max_epochs=1, trainer_args=saving)

    def optimizer(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=momentum)

    path = folder / "last.ckpt" if continued else None
    has_rounds(lab.fit(lab.task(optimizer), lab.stream(num_clients=num_clients), ckpt_path=path), 2)


def fit_plain(lab, strategy="auto", clients=2):
    x, y = torch.randn(48, 6), torch.arange(48) % 4
    stream = FederatedStream.from_arrays(x, y, torch.arange(48) // 4 % clients, scenario=Stationary())
    trainer = L.Trainer(strategy=strategy, max_epochs=1, **lab.quiet)
    trainer.fit(lab.task(), datamodule=stream)
    return has_rounds(trainer)


def read_batches_of_one_client(lab, with_trainer=True):
    x, y = torch.randn(8, 6), torch.arange(8) % 4
    stream = FederatedStream.from_arrays(x, y, torch.zeros(8, dtype=torch.long), scenario=Stationary())
    if with_trainer:
        return L.Trainer(max_epochs=1, **lab.quiet).fit(lab.task(), datamodule=stream)
    stream.setup("fit")
    return list(stream.train_dataloader())


def fit_diverging(lab, rate=1e30, **options):
    def optimizer(parameters):
        return torch.optim.SGD(parameters, lr=rate)

    task = lab.task(optimizer)
    trainer = lab.fit(task, lab.stream(num_experiences=1, rounds_per_experience=3, batch_size=4), **options)
    assert trainer.current_epoch == 3


ROWS |= {
    "metrics of a step that logs nothing": Row(
        fit_measured,
        {"module": lambda: Logs(False)},
        {"module": lambda: Logs(True)},
        "Call `self.log(name, value)` in that step.",
    ),
    "metrics of a module without a step": Row(
        fit_measured,
        {"module": lambda: NoStep(True)},
        {"module": lambda: Logs(True)},
        "or define `test_step(self, batch, batch_idx)`",
    ),
    "lower_is_better with a typo": Row(
        fit_measured,
        {"module": lambda: Logs(True), "lower_is_better": ["scor"]},
        {"lower_is_better": ["score"]},
        "Did you mean score?",
        UnknownNameError,
    ),
    "reduction with a typo": Row(
        fit_one_round, {"reductions": {"*": "medain"}}, {"reductions": {"*": "median"}}, "Did you mean median?"
    ),
    "client_weights without a client": Row(
        fit_one_round,
        {"client_weights": {"0": 1.0, "1": 2.0}},
        {"client_weights": {"0": 1.0, "1": 2.0, "2": 0.5}},
        "Add a number above 0 for each",
    ),
    "client_weights of an unknown client": Row(
        fit_one_round,
        {"client_weights": {"client-0": 1.0}},
        {"client_weights": {"0": 1.0, "1": 1.0, "2": 1.0}},
        'Write client names as in the stream, for example "0".',
        UnknownNameError,
    ),
    "participation above 1": Row(
        lambda lab, participation: FederatedStrategy(participation=participation),
        {"participation": 1.5},
        {"participation": 1.0},
        "Use 1.0 for all clients.",
    ),
    "max_vectorized_clients with a module that reads values": Row(
        lambda lab, **options: fit_kind(lab, Branches, **options),
        {"max_vectorized_clients": 2},
        None,
        "Remove `max_vectorized_clients`.",
    ),
    "plain Trainer for several clients": Row(
        lambda lab, strategy: fit_plain(lab, strategy=strategy),
        {"strategy": "auto"},
        {"strategy": FederatedStrategy()},
        "Use `L.Trainer(strategy=FederatedStrategy())`",
    ),
    "plain Trainer for several clients, one client": Row(
        lambda lab, clients: fit_plain(lab, clients=clients), {"clients": 2}, {"clients": 1}, "a stream of one client"
    ),
    "batches of one client without a Trainer": Row(
        read_batches_of_one_client,
        {"with_trainer": False},
        {"with_trainer": True},
        "Pass the stream to `trainer.fit(module, datamodule=stream)`.",
    ),
    "non-finite uploads": Row(fit_diverging, {}, {"rate": 0.1}, "Lower the learning rate"),
    "non-finite uploads, warning only": Row(
        fit_diverging, {}, {"on_empty_round": "warn"}, 'set `on_empty_round="warn"`'
    ),
    "checkpoint with another optimizer": Row(
        continue_fit, {"momentum": 0.9}, {"momentum": 0.0}, "Resume with the settings of the checkpoint"
    ),
    "checkpoint with another optimizer, new fit": Row(
        continue_fit, {"momentum": 0.9}, {"continued": False}, "or start without `ckpt_path`"
    ),
    "checkpoint with other clients": Row(
        continue_fit, {"num_clients": 4}, {"num_clients": 3}, "Resume with the settings of the checkpoint"
    ),
    "checkpoint of weights only": Row(
        continue_fit, {"weights": True}, {"weights": False}, "Save the checkpoint with `save_weights_only=False`."
    ),
    "images with channels last": Row(
        stream_of_arrays,
        {"x": images().transpose(0, 2, 3, 1), "mean": [0.5] * 3, "std": [0.25] * 3},
        {"x": images()},
        "Pass `x.transpose(0, 3, 1, 2)`",
    ),
    "classes of a public dataset": Row(
        stream_of_data,
        {"data": "digits", "classes": ["a"], "partition": IID(2)},
        {"classes": None},
        "Remove `classes`.",
    ),
    "list of samples": Row(
        lambda lab, data: stream_of_data(lab, {"train": data, "test": pairs(8)}, partition=IID(2)),
        {"data": iter(pairs())},
        {"data": Subset([*pairs()], range(24))},
        "`torch.utils.data.Subset(x, range(len(x)))`",
        InvalidTypeError,
    ),
    "arrays of a client": Row(
        stream_of_data,
        {"data": {"a": (X, Y), "b": (X + 1, Y)}},
        {"data": {"a": TensorDataset(X, Y), "b": TensorDataset(X + 1, Y)}},
        "`torch.utils.data.TensorDataset`",
        InvalidTypeError,
    ),
    "iterable dataset of a data module": Row(
        lambda lab, data: stream_of_data(
            lab, L.LightningDataModule.from_datasets(data, test_dataset=pairs(8), batch_size=8), partition=IID(2)
        ),
        {"data": Streams()},
        {"data": Subset([*Streams()], range(24))},
        "Read the items into a list.",
    ),
    "reservoir with one label per step": Row(
        reservoir_series,
        {"y": torch.arange(24)[:, None].repeat(1, 9) % 4},
        {"readout": "steps"},
        'Use `readout="steps"`.',
    ),
    "reservoir with labels for too few steps": Row(
        reservoir_series,
        {"y": torch.arange(24)[:, None].repeat(1, 5) % 4, "readout": "steps"},
        {"y": torch.arange(24) % 4},
        "or one target for each sequence",
    ),
    "regressor with targets of another size": Row(
        lambda lab, outputs: has_rounds(
            lab.fit(Regressor(MLP([6, 5, outputs]), outputs, sgd), small_stream(y=torch.randn(48, 2)))
        ),
        {"outputs": 1},
        {"outputs": 2},
        "Set `num_outputs` to the size of the target",
    ),
    "notation of HARCNN with a wrong token": Row(
        lambda lab, notation: HARCNN(notation, 3, 32, 4),
        {"notation": "16-8C__32d"},
        {"notation": "16-8C_32D"},
        "Separate the tokens with a single `_`, and use capitals",
    ),
    "notation of HARCNN with a dense layer first": Row(
        lambda lab, notation: HARCNN(notation, 3, 32, 4),
        {"notation": "32D_16-8C"},
        {"notation": "16-8C_32D"},
        "Move the dense layers to the end.",
    ),
    "length of HARCNN": Row(
        lambda lab, length: HARCNN("16-8C_32D", 3, length, 4), {"length": 4}, {"length": 8}, "Use longer windows"
    ),
    "image size of a vision transformer": Row(
        lambda lab, size: ViT(num_classes=4, image_size=size, patch_size=4, width=8, depth=1, num_heads=2),
        {"size": 10},
        {"size": 12},
        "Resize the images, to 12 for example.",
    ),
    "images of another size": Row(
        lambda lab, size: ViT(num_classes=4, image_size=size, patch_size=4, width=8, depth=1, num_heads=2)(
            torch.randn(2, 3, 12, 12)
        ),
        {"size": 8},
        {"size": 12},
        "build the model with the `image_size`",
    ),
    "tasks of DyTox": Row(
        lambda lab, tasks: DyTox(tasks, 6, image_size=8, patch_size=4, width=8, depth=1, num_heads=2),
        {"tasks": 4},
        {"tasks": [[0, 1], [2, 3, 4], [5]]},
        "Use a divisor of `num_classes`, or pass a list with the classes of each task.",
    ),
    "readout of another reservoir": Row(
        lambda lab, seeds: add_readouts(*seeds),
        {"seeds": (0, 1)},
        {"seeds": (0, 0)},
        "Compute the other readout again with this reservoir.",
    ),
    "type of an argument": Row(
        lambda lab, size: FederatedStream("digits", batch_size=size),
        {"size": "16"},
        {"size": 16},
        "Use `batch_size=16`.",
        InvalidTypeError,
    ),
    "class instead of an object": Row(
        lambda lab, partition: FederatedStream("digits", partition=partition),
        {"partition": IID},
        {"partition": IID()},
        "Use `partition=IID()`.",
        InvalidTypeError,
    ),
    "name of an option": Row(
        lambda lab, store: FederatedStrategy(client_store=store),
        {"store": "disc"},
        {"store": "disk"},
        "Did you mean disk?",
        UnknownNameError,
    ),
}


def add_readouts(first, second):
    def readout(seed):
        task = ReservoirClassifier(EchoStateNetwork(3, 12, seed=seed), 4, min_samples=1)
        task.readout.tag.fill_(seed)
        return task.readout

    readout(first).merge(readout(second))


# Rows of the table of hints: batches and state


class Items(Dataset):
    """A data set of 24 samples. A given function makes the samples."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return self.make(index)


def of_dict(index):
    return {"x": torch.ones(6) * index, "y": index % 4}


def of_pair(index):
    return torch.ones(6) * index, index % 4


class TakesAny(Classifier):
    """A classifier that accepts batches that are pairs or dicts."""

    def training_step(self, batch, batch_idx):
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        return nn.functional.cross_entropy(self(torch.as_tensor(x)), torch.as_tensor(y))


def fit_items(lab, make, method, collate_fn=None):
    stream = FederatedStream(
        {"a": Items(make), "b": Items(make)}, ClassIncremental(2), batch_size=6, collate_fn=collate_fn, seed=0
    )
    return fit_one_round(lab, stream, TakesAny(MLP([6, 5, 4]), 4, sgd), callbacks=[method])


def batch_of_lists(items):
    x, y = zip(*items, strict=True)
    return [list(x), torch.tensor(y)]


class ListClassifier(Classifier):
    """A classifier that accepts batches whose inputs are lists of tensors."""

    def training_step(self, batch, batch_idx):
        return super().training_step([torch.stack([*batch[0]]), batch[1]], batch_idx)


def fit_lists(lab, collate_fn=None, callbacks=()):
    stream = FederatedStream({"a": pairs(), "b": pairs()}, Stationary(), batch_size=6, collate_fn=collate_fn, seed=0)
    return fit_one_round(lab, stream, ListClassifier(MLP([6, 5, 4]), 4, sgd), callbacks=callbacks)


class Late(Classifier):
    """A module that registers a buffer in its training step, or in its constructor."""

    def __init__(self, early):
        super().__init__(MLP([6, 5, 4]), 4, sgd)
        if early:
            self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        if "seen" not in self._buffers:
            self.register_buffer("seen", torch.zeros(()))
        return super().training_step(batch, batch_idx)


def fit_staggered(lab, method, scenario):
    stream = lab.stream(scenario=scenario, partition="iid", num_clients=3)
    return fit_one_round(lab, stream, callbacks=[method()], client_weights="uniform")


ROWS |= {
    "LwF with samples that are dicts": Row(
        fit_items,
        {"make": of_dict, "method": LwF()},
        {"make": of_pair},
        "Return a pair from your dataset.",
        InvalidTypeError,
    ),
    "Replay with batches that are lists": Row(
        fit_lists,
        {"collate_fn": batch_of_lists, "callbacks": [Replay(8)]},
        {"collate_fn": None},
        "Return tensors of one shape from the dataset or `collate_fn`",
        InvalidTypeError,
    ),
    "Replay with batches that are lists, removed": Row(
        fit_lists,
        {"collate_fn": batch_of_lists, "callbacks": [Replay(8)]},
        {"callbacks": []},
        "or remove `Replay`.",
        InvalidTypeError,
    ),
    "LwF without logits": Row(
        lambda lab, callbacks: has_rounds(
            lab.fit(Regressor(MLP([6, 5, 1]), 1, sgd), small_stream(y=torch.randn(48)), callbacks, max_epochs=1)
        ),
        {"callbacks": [LwF()]},
        {"callbacks": []},
        "Use class labels as targets and return one logit per class from `Regressor.forward`, or remove `LwF`",
    ),
    "buffer that a training step registers": Row(
        lambda lab, early: fit_one_round(lab, task=Late(early), max_vectorized_clients=1),
        {"early": False},
        {"early": True},
        "Create the state in `__init__`",
    ),
    "FedDyn with Delayed": Row(
        fit_staggered,
        {"method": FedDyn, "scenario": Delayed(ClassIncremental(2, 2), max_delay=2)},
        {"scenario": ClassIncremental(2, 2)},
        "Use a scenario in which all clients enter each experience in the same round",
    ),
    "FedDyn with Delayed, by another method": Row(
        fit_staggered,
        {"method": FedDyn, "scenario": Delayed(ClassIncremental(2, 2), max_delay=2)},
        {"method": SCAFFOLD},
        "or use `SCAFFOLD`",
    ),
}


# Rows of the table of hints: swarms, single samples, images and metrics


def fit_norm(lab, norm=None, num_clients=12):
    model = nn.Sequential(nn.Linear(6, 6), norm or nn.BatchNorm1d(6), nn.Linear(6, 4))
    stream = FederatedStream.from_arrays(
        torch.randn(12, 6),
        torch.arange(12) % 4,
        scenario=Stationary(),
        partition=IID(num_clients),
        split=Split(test=0.0),
    )
    return fit_one_round(lab, stream, lab.task(model=model))


def fit_dytox(lab, scenario):
    x, y = torch.randn(80, 3, 8, 8), torch.arange(80) % 4
    partition = None if isinstance(scenario, FedViTScenario) else IID(2)
    stream = FederatedStream.from_arrays(x, y, scenario=scenario, partition=partition)
    model = DyTox(2, 4, image_size=8, patch_size=4, width=8, depth=1, num_heads=2)
    return fit_one_round(lab, stream, Classifier(model, 4, sgd), callbacks=[DyToxMethod(memory_size=4)])


ROWS |= {
    "swarm that a client leaves after the last round": Row(
        lambda lab, round_idx: fit_one_round(lab, swarm=Swarm(leaves_at={"0": round_idx})),
        {"round_idx": 9},
        {"round_idx": 1},
        "Use an earlier round.",
    ),
    "reservoir in a swarm with dropout": Row(
        fit_reservoir,
        {"strategy": {"swarm": Swarm(missed_sync_prob=0.5)}},
        {"strategy": {"swarm": Swarm()}},
        "Remove `missed_sync_prob` and `missed_rounds` from the swarm.",
    ),
    "plasticity with Delayed": Row(
        fit_reservoir,
        {
            "stream": lambda: series_stream(scenario=Delayed(ClassIncremental(2, 3), max_delay=3)),
            "callbacks": [IntrinsicPlasticity()],
        },
        {"stream": lambda: series_stream(scenario=ClassIncremental(2, 3))},
        "Use another `scenario`.",
    ),
    "clients of one sample with batch normalization": Row(
        fit_norm, {}, {"num_clients": 2}, "Use fewer clients", MissingValueError
    ),
    "clients of one sample with group normalization": Row(
        fit_norm, {}, {"norm": nn.GroupNorm(2, 6)}, "by group normalization", MissingValueError
    ),
    "DyTox with an order of each client": Row(
        fit_dytox,
        {"scenario": ClassIncremental(2, order_per_client=True)},
        {"scenario": ClassIncremental(2)},
        '"class-incremental" without `order_per_client`',
    ),
    "DyTox with an order of each client, with fedvit": Row(
        fit_dytox,
        {"scenario": ClassIncremental(2, order_per_client=True)},
        {"scenario": FedViTScenario(2, 2, classes_per_client=(2, 2), sample_fraction=(0.4, 0.5), rounds_per_task=1)},
        'Use `scenario="fedvit"`',
    ),
    "footprint of a sample of another shape": Row(
        lambda lab, shape: measure_footprint(lab.task(), shape),
        {"shape": (5,)},
        {"shape": (6,)},
        "Pass the shape of a sample",
    ),
}
