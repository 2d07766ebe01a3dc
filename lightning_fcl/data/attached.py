"""What is attached to a Trainer and has no type there: its callbacks, and the stream it trains on."""

from __future__ import annotations

import lightning.pytorch as L
from lightning.pytorch.callbacks import Callback

from lightning_fcl.data.stream import FederatedStream


def callbacks_of(trainer: L.Trainer) -> list[Callback]:
    """A Trainer's callbacks, in order.

    Example:
        >>> callbacks_of(L.Trainer(barebones=True, accelerator="cpu"))
        []
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def stream_of(trainer: L.Trainer) -> FederatedStream | None:
    """The federated stream that a Trainer trains on; None where it trains on other data.

    Example:
        >>> stream_of(L.Trainer(barebones=True, accelerator="cpu")) is None
        True
    """
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    return datamodule if isinstance(datamodule, FederatedStream) else None


def need_stream(trainer: L.Trainer) -> FederatedStream:
    """The federated stream that a Trainer trains on.

    Raises:
        ValueError: If it trains on other data.
    """
    stream = stream_of(trainer)
    if stream is None:
        given = trainer.datamodule  # type: ignore[attr-defined]
        raise ValueError(f"Expected a `FederatedStream` as the Trainer's `datamodule` but got {given}.")
    return stream
