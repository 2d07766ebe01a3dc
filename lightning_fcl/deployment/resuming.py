"""Checkpoints of a deployment's server: a checkpoint after each round, and a check that no round is missing."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Checkpoint

from lightning_fcl.errors import InvalidStateError
from lightning_fcl.evaluation.results import LAST, last_recorded_round
from lightning_fcl.io.checkpoint import read_checkpoint

_load = partial(torch.load, map_location="cpu", weights_only=True)


class LastCheckpoint(Checkpoint):
    """A callback that saves a checkpoint after each round, in addition to the checkpoint callbacks of the recipe.

    A node stores only the client states from before and after the client's last round. Therefore a server with an older
    checkpoint cannot continue with the node.

    Args:
        path: File of the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.save_checkpoint(self._path)


def check_no_round_missing(out: Path, checkpoint: Path | None) -> None:
    """Raise InvalidStateError if the newest checkpoint lacks more than one round of the record of a run.

    One round may be missing: the server can be killed between writing the record and writing the checkpoint.
    """
    recorded = last_recorded_round(out)
    checkpoint_round = -1 if checkpoint is None else int(read_checkpoint(_load, checkpoint)["epoch"])
    if recorded > checkpoint_round + 1:
        problem = "there is none" if checkpoint is None else f"{checkpoint.name} is of round {checkpoint_round}"
        raise InvalidStateError(
            f"Expected a checkpoint of round {recorded}, the last round in the record of {out}, but {problem}. Clients "
            "cannot train the missing rounds again.",
            hint=f"Restore {out / LAST} from a backup, or choose another `out` to start a new run.",
        )
