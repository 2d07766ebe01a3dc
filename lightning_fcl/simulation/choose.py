"""Who trains how: which local trainer a federation takes, and why not another."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_fcl.data.attached import refuse_transfer_hook
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.federation.local_training import BringsLocalTrainer, LocalTrainer
from lightning_fcl.local.own_step import StepTrainer
from lightning_fcl.local.sequential import SequentialTrainer
from lightning_fcl.local.step_trial import why_not_by_step
from lightning_fcl.local.trial import RANDOM, why_not_padded, why_not_side_by_side
from lightning_fcl.local.vectorized import VectorizedTrainer
from lightning_fcl.methods.client import Client, is_labelled
from lightning_fcl.methods.declaration import Declaration, shapes_loss
from lightning_fcl.methods.replay import Replay

if TYPE_CHECKING:
    from lightning_fcl.simulation.federation import Federation

log = logging.getLogger(__name__)

_LARGEST = 200_000  # parameters of a module whose clients train side by side
_NUMBERS = 4_000_000  # parameters, and numbers in batches, side by side: beyond, a step takes longer a client


def choose_trainer(federation: Federation, step: Callable[..., Any]) -> tuple[LocalTrainer, str | None]:
    """The local trainer of a federation's clients, and why they train one at a time, if they do.

    The module's own trainer, if it brings one. Else, where several are to train side by side: on padded batches if the
    module states the loss of samples apart and nothing in it looks at other samples; if not, by its own training step
    under `vmap`, batches of one shape together; if that cannot be, one at a time.

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
        return module.local_trainer(federation, [type(m).__name__ for m in methods if shapes_loss(m, Client())]), None
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
    if size == 1:
        reason: str | None = "`cohort_size` is 1" if wanted else f"it has more than {_LARGEST:,} parameters"
    elif keep_optimizer:
        reason = "each client keeps its optimizer"
    else:
        reason = why_not_side_by_side(module, methods, optimizers, stream)
    padded = reason or why_not_padded(module, optimizers[0], stream)
    by_step = padded and (reason or why_not_by_step(module, methods, optimizers[0], stream))
    if wanted is not None and RANDOM in (padded, by_step):
        log.warning("Random layers draw other numbers in a cohort than one by one: the result will differ.")
        padded, by_step = (None if why == RANDOM else why for why in (padded, by_step))
    if padded and by_step:
        if size > 1 and wanted is not None:
            raise ValueError(f'Expected `cohort_size=1` or "auto" but got {wanted}: {by_step}.')
        if size > 1:
            log.info("Clients of `%s` train one at a time, not side by side: %s.", type(module).__name__, by_step)
        return SequentialTrainer(module, methods, optimizers, keep_optimizer, federation.seed, step), by_step
    if wanted is None:
        size = min(size, max(2, _NUMBERS // _batch_numbers(stream)))
    kind = StepTrainer if padded else VectorizedTrainer
    return kind(module, methods, optimizers[0], size, federation.seed), None


def _check_several(methods: Sequence[Declaration]) -> None:
    for method in methods:
        if shapes_loss(method, Client()) or not method.vectorizable:
            raise ValueError(
                f"Expected one optimizer beside `{type(method).__name__}`, which changes the step of one, but "
                f"`configure_optimizers` returned several. Leave `{type(method).__name__}` out."
            )


def automatic_size(module: L.LightningModule) -> int:
    """Clients per vectorised step: small models gain most, those above `_LARGEST` nothing (see benchmarks)."""
    parameters = sum(p.numel() for p in module.parameters())
    return 1 if parameters > _LARGEST else max(2, min(1024, _NUMBERS // max(parameters, 1)))


def _batch_numbers(stream: FederatedStream) -> int:
    """How many numbers a batch of a client has that is as large as most."""
    samples = min(stream.batch_size, max(1, len(stream.samples) // len(stream.plan.clients)))
    with isolate_rng():  # a data set may draw a transform
        batch = stream.samples.take(np.arange(1), "test")
    return samples * max(1, _numbers(batch[0] if is_labelled(batch) else batch))


def _numbers(batch: Any) -> int:
    """How many numbers there are in any nest of tensors."""
    if isinstance(batch, Tensor):
        return batch.numel()
    return sum(map(_numbers, batch.values() if isinstance(batch, Mapping) else batch))
