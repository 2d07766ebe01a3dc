"""What tasks share: each tells what it was made with, and is made again from its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fcl.federation.aggregation import check_state, load_entries
from lightning_fcl.federation.protocol import federation_of
from lightning_fcl.hub.checkpoint import read_checkpoint
from lightning_fcl.models.described import Described, cast_arguments, rebuild


class Task(Described, L.LightningModule):
    """A LightningModule whose hyperparameters say what it was made with, as plain data."""

    speaks_lightning_fcl: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters(self.described["init_args"])

    @classmethod
    def load_from_checkpoint(  # type: ignore[override] # Lightning hides a class method behind a descriptor
        cls, checkpoint_path: str | Path, map_location: Any = None, strict: bool | None = None, **arguments: object
    ) -> Self:
        """A task with the weights of a checkpoint, a file or ``https://host/name.ckpt#sha256=...``.

        Networks of `lightning_fcl.models` and optimizers of `torch.optim` are made again from the hyperparameters, each
        checked before it is called; anything else is handed in as one of ``arguments``, such as ``model=MyNetwork()``.
        """
        read = partial(torch.load, map_location=map_location, weights_only=True)
        checkpoint = read_checkpoint(read, checkpoint_path)
        told = checkpoint.get("hyper_parameters", {})
        if not isinstance(told, Mapping):
            raise ValueError(f"Expected the hyperparameters of {checkpoint_path} to be a mapping but got {told!r}.")
        made = {key: rebuild(value, key) for key, value in told.items() if key not in arguments}
        task = cls(**cast_arguments(cls, {**made, **arguments}, cls.__name__))
        task.on_load_checkpoint(checkpoint)
        state = checkpoint["state_dict"]
        if strict if strict is not None else task.strict_loading:
            check_state(task, state)
            load_entries(task, state)
        else:
            task.load_state_dict(state, strict=False)
        return task


def one_hot(y: Tensor, num_classes: int) -> Tensor:
    """Labels as vectors of 0 and 1, in double precision."""
    if len(y) and not 0 <= int(y.min()) <= int(y.max()) < num_classes:
        wrong = int(y[(y < 0) | (y >= num_classes)][0])
        raise ValueError(
            f"Expected labels between 0 and {num_classes - 1} but got {wrong}. Set `num_classes` to the data's number "
            "of classes."
        )
    return F.one_hot(y.long(), num_classes).double()


def one_local_epoch(module: L.LightningModule, more: str = "") -> None:
    """Refuse several local epochs for a module whose readout adds up samples: they would count several times."""
    federation = federation_of(module.trainer)
    epochs = federation.strategy.local_epochs if federation is not None else 1
    if epochs != 1:
        raise ValueError(
            f"Expected the strategy's `local_epochs` to be 1 for a `{type(module).__name__}`, whose readout takes one "
            f"pass, but got {epochs}.{more}"
        )
