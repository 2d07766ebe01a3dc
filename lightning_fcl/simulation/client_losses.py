"""Mean training losses of clients, computed from the losses of their steps."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from lightning_fcl.data.scenarios import IntArray
from lightning_fcl.federation.record import ClientLoss


def client_losses(
    step_losses: Mapping[int, Tensor], batch_sizes: IntArray, batches_per_epoch: IntArray
) -> list[ClientLoss | None]:
    """Return the training loss of each client of a group. None for a client without a loss.

    Args:
        step_losses: For each step with a loss, the mean loss of each client's batch, shape (clients with a batch,) or
            more. The clients with a batch are the first clients.
        batch_sizes: Number of samples in each batch, shape (clients, steps). 0 for a client without a batch.
        batches_per_epoch: Each client's number of batches per local epoch, shape (clients,).

    Example:
        >>> losses = {0: torch.tensor([1.0, 5.0]), 1: torch.tensor([4.0])}
        >>> client_losses(losses, np.array([[2, 2], [1, 0]]), np.array([1, 1]))
        [ClientLoss(mean=2.5, epochs=(1.0, 4.0)), ClientLoss(mean=5.0, epochs=(5.0,))]
    """
    present = list(step_losses.values())
    if not present:
        return [None] * len(batch_sizes)
    # One conversion of all losses waits only once for an accelerator.
    values = iter(np.split(torch.cat(present).cpu().double().numpy(), np.cumsum([len(losses) for losses in present])))
    losses, weights = np.zeros(batch_sizes.shape), np.zeros(batch_sizes.shape)
    for step in step_losses:
        active = np.flatnonzero(batch_sizes[:, step])
        losses[active, step], weights[active, step] = next(values)[active], batch_sizes[active, step]
    epoch_idx = np.arange(batch_sizes.shape[1]) // np.asarray(batches_per_epoch)[:, None]
    num_epochs = np.where(batch_sizes > 0, epoch_idx + 1, 0).max(axis=1)
    totals, counts = np.zeros((len(losses), num_epochs.max())), np.zeros((len(losses), num_epochs.max()))
    for epoch in range(num_epochs.max()):
        is_epoch = epoch_idx == epoch
        totals[:, epoch] = (losses * weights).sum(axis=1, where=is_epoch)
        counts[:, epoch] = weights.sum(axis=1, where=is_epoch)
    has_loss: list[bool] = (counts.sum(axis=1) > 0).tolist()
    with np.errstate(invalid="ignore"):
        epoch_means, means = totals / counts, totals.sum(axis=1) / counts.sum(axis=1)
    return [
        ClientLoss(float(means[row]), tuple(epoch_means[row, :number].tolist())) if has_loss[row] else None
        for row, number in enumerate(num_epochs.tolist())
    ]
