"""What can be known of a recipe before it trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint, ProgressBar
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_fcl.callbacks import BaseSession, Pretrain
from lightning_fcl.data.attached import callbacks_of, stream_of
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.hub.checkpoint import checkpoint_file
from lightning_fcl.methods.method import Method
from lightning_fcl.running.fit import add_metrics, read_parts, refusals
from lightning_fcl.running.outcome import refuse_no_round
from lightning_fcl.simulation.limits import check_ranks
from lightning_fcl.simulation.strategy import FederatedStrategy
from lightning_fcl.tasks.classification import Classifier


def describe_recipe(recipes: Sequence[Path], words: Sequence[str] = ()) -> str:
    """Set up what recipes stand for, train nothing, and tell what it is."""
    parts = read_parts(recipes, words)
    trainer, task, stream = parts.make_trainer(), parts.model, parts.datamodule
    callbacks = callbacks_of(trainer)
    methods = [type(one).__name__ for one in callbacks if isinstance(one, Method)]
    _train_nothing(callbacks)
    add_metrics(callbacks, parts.config["recipe"]["measure_on"])
    callbacks.insert(0, _Enough(_processes(trainer.strategy)))
    if parts.config["ckpt_path"]:
        checkpoint_file(parts.config["ckpt_path"])
    if parts.config["trainer"]["logger"] is not False and not parts.config["trainer"]["barebones"]:
        trainer.logger = DummyLogger()
    with refusals():
        try:
            trainer.fit(task, datamodule=stream)
        except _WouldTrainError:
            shape = _outputs(task, stream, trainer)
        else:
            refuse_no_round(trainer)
    plan = stream.plan
    numbers = sum(parameter.numel() for parameter in task.parameters())
    experiences = max(map(max, plan.experiences.values())) + 1
    sample = tuple(stream.take(plan.test[:1])[0].shape[1:])
    lines = {
        "data": f"{len(plan.groups):,} samples of shape {sample}, {len(stream.classes)} classes",
        "federation": f"{len(plan.clients)} clients, {plan.rounds} rounds, {experiences} experiences",
        "model": f"{type(task).__name__} of {numbers:,} parameters, outputs of shape {shape}",
        "methods": ", ".join(methods) or "none: plain fine-tuning",
    }
    return "\n".join(["All of it fits.", *(f"{name:11}{what}" for name, what in lines.items())])


class _WouldTrainError(Exception):
    """A fit has come to its first round, and has refused nothing."""


class _Enough(Callback):
    """Ends a fit when its first round begins, before a callback of anyone's hears of it.

    Args:
        processes: How many there were to be.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if isinstance(trainer.strategy, FederatedStrategy):
            check_ranks(trainer.strategy.federation, self._processes)
        callbacks = callbacks_of(trainer)
        callbacks[:] = [one for one in callbacks if type(one).__module__.startswith("lightning_fcl.")]
        raise _WouldTrainError


class _Checks(Callback):
    """Stands for a base session: refuses what that does, and trains none."""

    def __init__(self, session: BaseSession) -> None:
        self._session = session

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        callbacks = callbacks_of(trainer)
        self._session.check(pl_module, callbacks[: callbacks.index(self)], stream_of(trainer))


def _train_nothing(callbacks: list[Callback]) -> None:
    """Leave out of a Trainer's callbacks what trains before the first round, shows or saves."""
    callbacks[:] = [one for one in callbacks if not isinstance(one, ProgressBar | OnExceptionCheckpoint)]
    for number, callback in enumerate(callbacks):
        if isinstance(callback, BaseSession):
            callbacks[number] = _Checks(callback)
        elif isinstance(callback, Pretrain):
            callback.epochs = 0


def _processes(strategy: object) -> int:
    """How many processes a strategy would have started, which starts none now."""
    if not isinstance(strategy, FederatedStrategy):
        return 1
    wanted = strategy.expected
    strategy.parallel_devices, strategy.num_nodes, strategy._launcher = (strategy.parallel_devices or [])[:1], 1, None
    return wanted


@torch.no_grad()
def _outputs(task: L.LightningModule, stream: FederatedStream, trainer: L.Trainer) -> tuple[int, ...]:
    """The shape of what a task makes of a sample."""
    x, y = trainer.precision_plugin.convert_input(stream.take(stream.plan.test[:2]))
    try:
        with trainer.precision_plugin.forward_context():
            outputs = task.eval()(x)
    except RuntimeError as error:
        raise ValueError(
            f"Expected a network for samples of shape {tuple(x.shape[1:])} but it refuses them: {error}. Set its size, "
            "such as `sizes`, `in_features` or `image_size`, to theirs."
        ) from error
    if isinstance(task, Classifier) and not task.task_incremental:
        task.sample_loss(outputs, y)
    return tuple(outputs.shape[1:])
