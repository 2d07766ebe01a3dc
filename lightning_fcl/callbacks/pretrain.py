"""Pre-training: the server's model before the first round."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from lightning_fcl.data.attached import need_stream
from lightning_fcl.data.data_module import TRANSFER_HOOKS
from lightning_fcl.errors import at_least
from lightning_fcl.randomness import seed_of


class Pretrain(Callback):
    """Before the first round: trains the model on the stream's pre-training samples, in a plain Trainer of its own.

    Nothing happens when a fit is continued from a checkpoint.

    Args:
        epochs: Passes over the samples, at least 1.

    Raises:
        ValueError: If ``epochs`` is below 1, or the stream has no samples for pre-training.

    Example:
        >>> Pretrain(epochs=50).epochs
        50
    """

    def __init__(self, epochs: int = 50) -> None:
        at_least(1, epochs=epochs)
        self.epochs = epochs

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.ckpt_path is not None:
            return
        stream = need_stream(trainer)
        torch.manual_seed(seed_of(stream.seed, "pretrain"))
        pupil = copy.deepcopy(pl_module)
        for hook in TRANSFER_HOOKS:
            if is_overridden(hook, stream):
                setattr(pupil, hook, getattr(stream, hook))
        fit_alone(pupil, stream.pretrain_dataloader(), self.epochs, trainer, trainer.precision)
        pl_module.load_state_dict(pupil.state_dict())


def fit_alone(
    module: L.LightningModule,
    loader: DataLoader[Any],
    epochs: int,
    outer: L.Trainer,
    precision: Any = "32-true",
    shown: bool = False,
) -> None:
    """Train a module in a plain Trainer of its own, on another Trainer's device, that leaves nothing on disk."""
    own = L.Trainer(
        accelerator=outer.strategy.root_device.type,
        devices=1,
        precision=precision,
        max_epochs=epochs,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=shown,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You defined a `validation_step`|The 'train_dataloader' does not have")
        own.fit(module, loader)
