"""What a run has trained: its recipe's parts with the state of its newest checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_fcl.callbacks.base_session import BaseSession
from lightning_fcl.federation.aggregation import check_state
from lightning_fcl.hub.checkpoint import newest_checkpoint, read_checkpoint
from lightning_fcl.running.fit import Parts, read_parts


def trained_parts(run: Path) -> Parts:
    """A run's recipe, with the state of its newest checkpoint in the model."""
    checkpoint = trained_checkpoint(run)
    return with_checkpoint(read_parts([run / "config.yaml"]), checkpoint)


def trained_checkpoint(run: Path) -> dict[str, Any]:
    """The newest checkpoint of a run: tensors and plain values."""
    checkpoint = newest_checkpoint(run / "checkpoints")
    if checkpoint is None or not (run / "config.yaml").is_file():
        raise ValueError(
            f"Expected {run} to be the folder of a run, with config.yaml and checkpoints, but it is none. Give what "
            "was `--out` of `lightning-fcl fit`."
        )
    return read_checkpoint(partial(torch.load, map_location="cpu", weights_only=True), checkpoint)


def with_checkpoint(parts: Parts, checkpoint: dict[str, Any]) -> Parts:
    for callback in parts.callbacks:
        if isinstance(callback, BaseSession):
            callback.freeze(parts.model.model)
    check_state(parts.model, checkpoint["state_dict"])
    parts.model.load_state_dict(checkpoint["state_dict"])
    parts.model.on_load_checkpoint(checkpoint)
    return parts
