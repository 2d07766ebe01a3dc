"""Typed access to parts of a Trainer that have no types: callbacks, the federated stream, and batch transfer hooks."""

from __future__ import annotations

import lightning.pytorch as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_fcl.data.batching import Batch
from lightning_fcl.data.datamodule_adapter import TRANSFER_HOOKS, check_no_hooks
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.errors import InvalidValueError


def get_callbacks(trainer: L.Trainer) -> list[Callback]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def find_stream(trainer: L.Trainer) -> FederatedStream | None:
    """Return the Trainer's data module if it is a `FederatedStream`, otherwise None."""
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    return datamodule if isinstance(datamodule, FederatedStream) else None


def require_stream(trainer: L.Trainer) -> FederatedStream:
    stream = find_stream(trainer)
    if stream is None:
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        actual = None if datamodule is None else f"a `{type(datamodule).__name__}`"
        raise InvalidValueError(
            f"Expected a `FederatedStream` as the Trainer's `datamodule`, but got {actual}.",
            argument="datamodule",
            value=datamodule,
        )
    return stream


def move_batch(trainer: L.Trainer, batch: Batch, as_in: RunningStage = RunningStage.TESTING) -> Batch:
    """Return a batch as the module gets it in a stage: moved to the device and changed by the batch transfer hooks."""
    data, stage = trainer.datamodule, trainer.state.stage  # type: ignore[attr-defined]
    owner = data if is_overridden(TRANSFER_HOOKS[0], data) else trainer.lightning_module
    trainer.state.stage = as_in
    try:
        return trainer.strategy.batch_to_device(owner.on_before_batch_transfer(batch, 0))
    finally:
        trainer.state.stage = stage


def check_no_transfer_hook(module: L.LightningModule, stream: FederatedStream, caller: str) -> None:
    """Raise ValueError if a batch transfer hook is overridden, because the caller's samples would skip the hook."""
    check_no_hooks(f"`{caller}`, which passes samples to the module outside of batches", stream.data, stream, module)
