"""Choice of the local trainer: vectorized or sequential training of clients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_fcl.data.trainer_access import check_no_transfer_hook
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.local_trainer import HasLocalTrainer, LocalTrainer
from lightning_fcl.federation.obstacles import Obstacle, Reason
from lightning_fcl.local_training.sequential import SequentialTrainer
from lightning_fcl.local_training.vectorized import VectorizedTrainer
from lightning_fcl.local_training.vmap_check import find_padding_obstacle, find_vmap_obstacle
from lightning_fcl.local_training.vmap_step_check import find_step_obstacle
from lightning_fcl.local_training.vmap_training_step import StepTrainer
from lightning_fcl.methods.base import changes_loss
from lightning_fcl.methods.context import Client, is_labelled
from lightning_fcl.methods.replay import Replay
from lightning_fcl.simulation.federation import Federation

log = logging.getLogger(__name__)
_LARGEST = 200_000  # maximum number of parameters of a module for vectorized training
# Maximum number of parameters of all clients in a vectorized step, and of values in the batches of these clients.
# Larger steps take more time per client.
_NUMBERS = 4_000_000


def choose_trainer(federation: Federation, step: Callable[..., Any]) -> tuple[LocalTrainer, Obstacle | None]:
    """Return the local trainer of a federation's clients, and the obstacle to vectorized training, if there is one.

    If the module defines `configure_local_trainer`, the result is used. Otherwise the first possible choice is used:

    1. Vectorized training on padded batches. The module must define the loss of single samples, and neither the module
       nor a method may mix samples.
    2. Vectorized training with the module's `training_step`, without padding.
    3. Sequential training.

    Args:
        federation: The federation.
        step: The `training_step` of Lightning's strategy.
    """
    module, stream, settings = federation.module, federation.stream, federation.settings
    methods, optimizers, keep_optimizer_state = federation.methods, federation.optimizers, settings.keep_optimizer_state
    for method in methods:
        if method.needs.round_samples and not (isinstance(method, Replay) and method.buffer is None):
            check_no_transfer_hook(module, stream, type(method).__name__)
    if isinstance(module, HasLocalTrainer):
        return module.configure_local_trainer(
            federation, [type(m).__name__ for m in methods if changes_loss(m, Client())]
        ), None
    if len(optimizers) > 1:
        for method in methods:
            if changes_loss(method, Client()) or not method.vectorizable:
                raise InvalidValueError(
                    f"Expected `configure_optimizers` to return one optimizer, because `{type(method).__name__}` "
                    "supports only one, but got several.",
                    hint=f"Remove `{type(method).__name__}`.",
                    argument="configure_optimizers",
                    value=type(method).__name__,
                )
    if keep_optimizer_state and any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise InvalidValueError(
            "Expected `keep_optimizer_state=False` for `LBFGS`, whose state contains lists, but got True.",
            hint="Remove `keep_optimizer_state`.",
            argument="keep_optimizer_state",
            value=keep_optimizer_state,
        )
    requested_size = None if settings.max_vectorized_clients == "auto" else settings.max_vectorized_clients
    size = choose_group_size(module) if requested_size is None else requested_size
    if size == 1:
        reason: Obstacle | None = (
            Obstacle(Reason.COHORT_SIZE) if requested_size else Obstacle(Reason.PARAMETERS, (_LARGEST,))
        )
    elif keep_optimizer_state:
        reason = Obstacle(Reason.KEEP_OPTIMIZER)
    else:
        reason = find_vmap_obstacle(module, methods, optimizers, stream)
    padded = reason or find_padding_obstacle(module, methods, optimizers[0], stream)
    by_step = padded and (reason or find_step_obstacle(module, methods, optimizers[0], stream))
    if requested_size is not None and any(why is not None and why.reason is Reason.RANDOM for why in (padded, by_step)):
        log.warning("Random layers draw different numbers in vectorized training than in sequential training.")
        padded, by_step = (None if why and why.reason is Reason.RANDOM else why for why in (padded, by_step))
    if padded and by_step:
        if size > 1 and requested_size is not None:
            raise InvalidValueError(
                f'Expected `max_vectorized_clients` to be 1 or "auto", but got {requested_size}: {by_step}.',
                hint="Remove `max_vectorized_clients`.",
                argument="max_vectorized_clients",
                value=requested_size,
            )
        if size > 1:
            log.info("Clients of `%s` train sequentially, not vectorized: %s.", type(module).__name__, by_step)
        return SequentialTrainer(module, methods, optimizers, keep_optimizer_state, federation.seed, step), by_step
    if requested_size is None:
        # Estimate of the batch size, from the mean number of samples per client.
        samples = min(stream.batch_size, max(1, len(stream.samples) // len(stream.plan.clients)))
        with isolate_rng():  # Reading a sample may apply a random transform.
            batch = stream.samples.get(np.arange(1), "test")
        numbers = samples * max(1, _numbers(batch[0] if is_labelled(batch) else batch))
        size = min(size, max(2, _NUMBERS // numbers))
    kind = StepTrainer if padded else VectorizedTrainer
    return kind(module, methods, optimizers[0], size, federation.seed), None


def choose_group_size(module: L.LightningModule) -> int:
    """Return the number of clients per vectorized step. It is 1 for modules with more than 200,000 parameters."""
    parameters = sum(p.numel() for p in module.parameters())
    return 1 if parameters > _LARGEST else max(2, min(1024, _NUMBERS // max(parameters, 1)))


def _numbers(batch: Any) -> int:
    """Return the number of values in nested tensors."""
    if isinstance(batch, Tensor):
        return batch.numel()
    return sum(map(_numbers, batch.values() if isinstance(batch, Mapping) else batch))
