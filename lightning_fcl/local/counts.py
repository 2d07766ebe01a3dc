"""How many batches a client has in a round: of the one at hand, and of all where they have as many."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning.pytorch as L
import numpy as np

from lightning_fcl.federation.protocol import federation_of
from lightning_fcl.methods.compose import methods_of
from lightning_fcl.methods.declaration import SetsEpochs, overrides

if TYPE_CHECKING:
    from lightning_fcl.simulation.federation import Federation


def client_steps(trainer: L.Trainer) -> int | float:
    """The batches, over its local epochs, of the client that trains now: what its `batch_idx` counts up to.

    Within ``training_step`` that is `trainer.num_training_batches` as well, which elsewhere counts those of all clients
    of the round. Of clients side by side it is the number of the one that has most; in a plain Trainer it is
    `trainer.num_training_batches`.

    Args:
        trainer: The Trainer.

    Raises:
        ValueError: If no client trains, as between rounds.

    Example:
        >>> class Scaled(L.Callback):
        ...     def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        ...         pl_module.kl_weight = 1 / client_steps(trainer)
    """
    federation = federation_of(trainer)
    if federation is None:
        return trainer.num_training_batches
    if not federation.batches:
        raise ValueError(
            "Expected a client that trains for `client_steps` but none does. Ask within a step, or in a batch's hooks."
        )
    return federation.batches


def common_batches(federation: Federation) -> int:
    """The batches of a client in a round where all clients have as many in all rounds."""
    stream, strategy = federation.stream, federation.strategy
    batching = strategy.limits.batching(stream)
    sizes = np.array([len(rows) for current in stream.plan.train for rows in current.values() if len(rows)])
    counts = np.unique(batching.limited(batching.per_epoch(sizes) * strategy.local_epochs))
    vary = [m for m in methods_of(federation.module.trainer) if isinstance(m, SetsEpochs) or overrides(m, "rehearse")]
    if len(counts) == 1 and not vary:
        return int(counts[0])
    why = f"`{type(vary[0]).__name__}` changes it" if vary else f"they have between {counts.min()} and {counts.max()}"
    raise ValueError(
        "Expected clients that have as many batches in every round where `configure_optimizers` asks for their number, "
        f"as by `trainer.estimated_stepping_batches`, but {why}. Count rounds, `trainer.max_epochs`, in a schedule by "
        "epoch."
    )
