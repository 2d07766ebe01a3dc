"""How many batches the client that trains now has in a round."""

from __future__ import annotations

import lightning.pytorch as L

from lightning_fcl.federation.protocol import federation_of


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
