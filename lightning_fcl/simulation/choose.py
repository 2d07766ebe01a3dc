"""Who trains how: which local trainer a federation takes, and why not another."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_fcl.data.attached import refuse_transfer_hook
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.federation.local_training import BringsLocalTrainer, LocalTrainer
from lightning_fcl.local.sequential import SequentialTrainer
from lightning_fcl.local.trial import RANDOM, why_not_vectorized
from lightning_fcl.local.vectorized import VectorizedTrainer
from lightning_fcl.methods.client import Client
from lightning_fcl.methods.declaration import Declaration, shapes_loss
from lightning_fcl.methods.replay import Replay

if TYPE_CHECKING:
    from lightning_fcl.simulation.federation import Federation

log = logging.getLogger(__name__)

_NUMBERS = 4_000_000  # parameters, and numbers in batches, side by side: beyond, a step takes longer a client


def choose_trainer(
    federation: Federation,
    step: Callable[..., Any],
) -> LocalTrainer:
    """The local trainer of a federation's clients: the module's own, or vectorised where that pays, or one by one.

    Args:
        federation: The federation; where it leaves the number of clients side by side open, that is a function of the
            module and its surroundings alone.
        step: Lightning's own training step.
    """
    module, stream, strategy = federation.module, federation.stream, federation.strategy
    methods, optimizers, keep_optimizer = federation.methods, federation.optimizers, strategy.keep_optimizer
    for method in methods:
        if method.needs.samples and not (isinstance(method, Replay) and method.buffer is None):
            refuse_transfer_hook(module, stream, type(method).__name__)
    if isinstance(module, BringsLocalTrainer):
        return module.local_trainer(federation, [type(m).__name__ for m in methods if shapes_loss(m, Client())])
    if len(optimizers) > 1:
        _check_several(methods)
    if keep_optimizer and any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise ValueError(
            "Expected `keep_optimizer=False` for `LBFGS`, whose state is lists of steps, but got True. Leave it out."
        )
    if "global_step" in getattr(module.training_step, "__code__", choose_trainer.__code__).co_names:
        log.warning(
            "`%s.training_step` reads `global_step`, which counts the steps of all clients, and a cohort's once. A "
            "client's own batches in the round are counted by `batch_idx`.",
            type(module).__name__,
        )
    wanted = None if strategy.cohort_size == "auto" else strategy.cohort_size
    size = automatic_size(module) if wanted is None else wanted
    reason = None
    if size > 1:
        kept = "each client keeps its optimizer" if keep_optimizer else None
        reason = kept or why_not_vectorized(module, methods, optimizers, stream)
        if wanted is not None and reason == RANDOM:
            log.warning("Random layers draw other numbers in a cohort than one by one: the result will differ.")
            reason = None
        if wanted is not None and reason:
            raise ValueError(f'Expected `cohort_size=1` or "auto" but got {wanted}: {reason}.')
    if size == 1 or reason:
        return SequentialTrainer(module, methods, optimizers, keep_optimizer, federation.seed, step)
    if wanted is None:
        size = min(size, max(2, _NUMBERS // _batch_numbers(stream)))
    return VectorizedTrainer(module, methods, optimizers[0], size, federation.seed)


def _check_several(methods: Sequence[Declaration]) -> None:
    for method in methods:
        if shapes_loss(method, Client()) or not method.vectorizable:
            raise ValueError(
                f"Expected one optimizer beside `{type(method).__name__}`, which changes the step of one, but "
                f"`configure_optimizers` returned several. Leave `{type(method).__name__}` out."
            )


def automatic_size(module: L.LightningModule) -> int:
    """Clients per vectorised step: small models gain most, those above 200,000 parameters nothing (see benchmarks)."""
    parameters = sum(p.numel() for p in module.parameters())
    return 1 if parameters > 200_000 else max(2, min(1024, _NUMBERS // max(parameters, 1)))


def _batch_numbers(stream: FederatedStream) -> int:
    """How many numbers a batch of a client has that is as large as most."""
    samples = min(stream.batch_size, max(1, len(stream.samples) // len(stream.plan.clients)))
    with isolate_rng():  # a data set may draw a transform
        x = stream.samples.take(np.arange(1), "test")[0]
    return samples * max(1, int(x.numel()))
