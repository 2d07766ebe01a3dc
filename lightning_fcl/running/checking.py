"""What can be known of a recipe before it trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import LambdaCallback

from lightning_fcl.callbacks import BaseSession
from lightning_fcl.data.attached import callbacks_of
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.methods.method import Method
from lightning_fcl.running.fit import read_parts
from lightning_fcl.tasks.classification import Classifier


def check(recipes: Sequence[Path], words: Sequence[str] = ()) -> str:
    """Set up what recipes stand for, train nothing, and tell what it is."""
    parts = read_parts(recipes, words, with_trainer=True)
    trainer, task, stream = parts.trainer, parts.model, parts.datamodule
    callbacks = callbacks_of(trainer)
    callbacks[:] = [one for one in callbacks if not isinstance(one, BaseSession)]  # it trains when it is set up
    callbacks.append(LambdaCallback(on_fit_start=_train_nothing))
    trainer.fit(task, datamodule=stream)
    plan, shape = stream.plan, _outputs(task, stream)
    numbers = sum(parameter.numel() for parameter in task.parameters())
    experiences = max(map(max, plan.experiences.values())) + 1
    methods = [type(one).__name__ for one in callbacks if isinstance(one, Method)]
    sample = tuple(stream.take(plan.test[:1])[0].shape[1:])
    lines = {
        "data": f"{len(plan.groups):,} samples of shape {sample}, {len(stream.classes)} classes",
        "federation": f"{len(plan.clients)} clients, {plan.rounds} rounds, {experiences} experiences",
        "model": f"{type(task).__name__} of {numbers:,} parameters, outputs of shape {shape}",
        "methods": ", ".join(methods) or "none: plain fine-tuning",
    }
    return "\n".join(["All of it fits.", *(f"{name:11}{what}" for name, what in lines.items())])


def _train_nothing(trainer: L.Trainer, module: L.LightningModule) -> None:
    """All is set up, and what a fit would refuse is refused."""
    trainer.fit_loop.max_epochs = 0


@torch.no_grad()
def _outputs(task: L.LightningModule, stream: FederatedStream) -> tuple[int, ...]:
    """The shape of what a task makes of a sample."""
    x, y = stream.take(stream.plan.test[:2])
    try:
        outputs = task.eval()(x)
    except RuntimeError as error:
        raise ValueError(
            f"Expected a network for samples of shape {tuple(x.shape[1:])} but it refuses them: {error}. Set its size, "
            "such as `sizes`, `in_features` or `image_size`, to theirs."
        ) from error
    if isinstance(task, Classifier) and not task.task_incremental:
        task.sample_loss(outputs, y)
    return tuple(outputs.shape[1:])
