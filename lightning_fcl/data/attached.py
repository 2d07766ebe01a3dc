"""What is attached to a Trainer and has no type there: its callbacks, the stream it trains on, and their hooks."""

from __future__ import annotations

import lightning.pytorch as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_fcl.data.batches import Batch
from lightning_fcl.data.data_module import TRANSFER_HOOKS, refuse_hooks
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.errors import InvalidValueError


def callbacks_of(trainer: L.Trainer) -> list[Callback]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def stream_of(trainer: L.Trainer) -> FederatedStream | None:
    """The federated stream that a Trainer trains on; None where it trains on other data."""
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    return datamodule if isinstance(datamodule, FederatedStream) else None


def need_stream(trainer: L.Trainer) -> FederatedStream:
    stream = stream_of(trainer)
    if stream is None:
        given = trainer.datamodule  # type: ignore[attr-defined]
        raise InvalidValueError(
            f"Expected a `FederatedStream` as the Trainer's `datamodule` but got {given}.",
            argument="datamodule",
            value=given,
        )
    return stream


def transfer_batch(trainer: L.Trainer, batch: Batch, as_in: RunningStage = RunningStage.TESTING) -> Batch:
    """Return a batch as a Trainer gives it to its module in a stage: on the device, after the transfer hooks."""
    data, stage = trainer.datamodule, trainer.state.stage  # type: ignore[attr-defined]
    owner = data if is_overridden(TRANSFER_HOOKS[0], data) else trainer.lightning_module
    trainer.state.stage = as_in
    try:
        return trainer.strategy.batch_to_device(owner.on_before_batch_transfer(batch, 0))
    finally:
        trainer.state.stage = stage


def refuse_transfer_hook(module: L.LightningModule, stream: FederatedStream, who: str) -> None:
    """Refuse hooks that batches go through, for one who shows a module samples that have not gone through them."""
    refuse_hooks(f"`{who}`, which shows it some beside the batches,", stream.data, stream, module)
