"""Who trains how: which local trainer a federation takes, and why not another."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lightning_fcl.data.attached import callbacks_of
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.errors import quoted
from lightning_fcl.federation.aggregation import entries
from lightning_fcl.federation.local_training import BringsLocalTrainer, LocalTrainer, Start, TrainerRequest
from lightning_fcl.federation.optimizer_state import with_parameters
from lightning_fcl.federation.protocol import Vectorizable
from lightning_fcl.methods.declaration import Declaration, overrides
from lightning_fcl.methods.driver import MethodDriver
from lightning_fcl.simulation.loose_state import LooseState
from lightning_fcl.simulation.sequential import SequentialTrainer
from lightning_fcl.simulation.vectorized import VectorizedTrainer

log = logging.getLogger(__name__)

# Optimizers whose update of one number depends on that number's history alone: they do the same on stacks.
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
)
_NUMBERS = 4_000_000  # parameters, and numbers in batches, side by side: beyond, a step takes longer a client
RANDOM = "its layers draw random numbers"
# Whoever overrides one of these looks at the gradients or the step of one model at a time.
STEP_HOOKS = (
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "configure_gradient_clipping",
    "optimizer_step",
)
# Whoever overrides one of these sees the batch of one client at a time.
BATCH_HOOKS = ("on_train_batch_start", "on_train_batch_end")
TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def choose_trainer(
    module: L.LightningModule,
    methods: Sequence[Declaration],
    optimizer: Optimizer,
    stream: FederatedStream,
    step: Callable[..., Any],
    request: TrainerRequest,
    keep_optimizer: bool,
    seed: int,
) -> LocalTrainer:
    """The local trainer of a federation's clients: the module's own, or vectorised where that pays, or one by one.

    Args:
        module: The module.
        methods: The methods of its Trainer.
        optimizer: The module's optimizer.
        stream: The clients' data.
        step: Lightning's own training step.
        request: What is asked of a trainer; where it leaves the number of clients side by side open, that is a function
            of the module and its surroundings alone.
        keep_optimizer: Whether a client's optimizer state lasts from round to round.
        seed: Seed of the clients' randomness.

    Raises:
        ValueError: If so many clients cannot train side by side, or the optimizer's state cannot be kept.
    """
    if isinstance(module, BringsLocalTrainer):
        return module.local_trainer(request)
    if keep_optimizer and isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "Expected `keep_optimizer=False` for `LBFGS`, whose state is lists of steps, but got True. Leave it out."
        )
    if "global_step" in getattr(module.training_step, "__code__", choose_trainer.__code__).co_names:
        log.warning(
            "`%s.training_step` reads `global_step`, which counts the steps of all clients, and a cohort's once. A "
            "client's own batches in the round are counted by `batch_idx`.",
            type(module).__name__,
        )
    wanted = request.clients_at_once
    size = automatic_size(module) if wanted is None else wanted
    reason = None
    if size > 1:
        kept = "each client keeps its optimizer" if keep_optimizer else None
        reason = kept or why_not_vectorized(module, methods, optimizer, stream)
        if wanted is not None and reason == RANDOM:
            log.warning("Random layers draw other numbers in a cohort than one by one: the result will differ.")
            reason = None
        if wanted is not None and reason:
            raise ValueError(f'Expected `cohort_size=1` or "auto" but got {wanted}: {reason}.')
    if size == 1 or reason:
        return SequentialTrainer(module, methods, step, optimizer, keep_optimizer, seed)
    if wanted is None:
        size = min(size, max(2, _NUMBERS // _batch_numbers(stream)))
    return VectorizedTrainer(module, methods, optimizer, size, seed)


def automatic_size(module: L.LightningModule) -> int:
    """Clients per vectorised step: small models gain most, those above 200,000 parameters nothing (see benchmarks)."""
    parameters = sum(p.numel() for p in module.parameters())
    return 1 if parameters > 200_000 else max(2, min(1024, _NUMBERS // max(parameters, 1)))


def _batch_numbers(stream: FederatedStream) -> int:
    """How many numbers a batch of a client has that is as large as most."""
    samples = min(stream.batch_size, max(1, len(stream.samples) // len(stream.plan.clients)))
    with isolate_rng():  # a data set may draw a transform
        x = stream.take(np.arange(1))[0]
    return samples * max(1, int(x.numel()))


def why_not_vectorized(
    module: L.LightningModule, methods: Sequence[Declaration], optimizer: Optimizer, stream: FederatedStream
) -> str | None:
    """The reason why a module's clients must train one at a time, or None.

    A module can be vectorised if it says that its training step is the mean of its `sample_loss`, its optimizer is one
    of `ELEMENTWISE`, nobody looks at one model's batches or gradients, and a trial on a few samples succeeds.
    """
    trainer = module.trainer
    for method in methods:
        if not method.vectorizable:
            what = "changes the gradient of" if overrides(method, "project") else "trains"
            return f"`{type(method).__name__}` {what} one client at a time"
    if not isinstance(module, Vectorizable):
        return f"`{type(module).__name__}` is no `Classifier`, which states its loss apart"
    reason = module.why_not_vectorized()
    if reason:
        return reason
    if any(isinstance(part, _BatchNorm) and part.running_mean is None for part in module.modules()):
        return "its batch normalisation would take the padding of other clients' batches for samples"
    if type(optimizer) not in ELEMENTWISE:
        return f"`{type(optimizer).__name__}` does not update each number on its own"
    if trainer.precision != "32-true":
        return f'the precision is "{trainer.precision}"'
    return _watching(module, stream) or _trial(module, optimizer, stream)


def _watching(module: L.LightningModule, stream: FederatedStream) -> str | None:
    """Who overrides a hook that shows one client at a time."""
    callbacks = callbacks_of(module.trainer)
    for callback in callbacks:
        if isinstance(callback, BaseFinetuning):
            return f"`{type(callback).__name__}` adds parameters to the optimizer while it trains"
    known = ("lightning.", "lightning_fcl.callbacks.", "lightning_fcl.simulation.")
    others = [c for c in callbacks if not (isinstance(c, MethodDriver) or type(c).__module__.startswith(known))]
    watchers: list[tuple[object, type, tuple[str, ...]]] = [
        (module, L.LightningModule, STEP_HOOKS + BATCH_HOOKS + TRANSFER_HOOKS),
        (stream, L.LightningDataModule, TRANSFER_HOOKS),
        *((callback, Callback, STEP_HOOKS + BATCH_HOOKS) for callback in others),
    ]
    for watcher, plain, hooks in watchers:
        for hook in hooks:
            if getattr(type(watcher), hook, None) is not getattr(plain, hook, None):
                return f"`{type(watcher).__name__}` overrides `{hook}`"
    return None


def _trial(module: L.LightningModule, optimizer: Optimizer, stream: FederatedStream) -> str | None:
    """What goes wrong when two clients train on two samples each, vectorised, if anything."""
    indices = next(rows for current in stream.plan.train for rows in current.values())[:2]
    data = stream.take(indices)
    if not (isinstance(data, list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)):
        return "its batches are not pairs of tensors"
    x, y = (part.to(module.device) for part in data)
    around = (module.trainer, module.trainer.strategy)  # which may hold processes
    copied = copy.deepcopy(module, {id(part): part for part in around}).train()
    state, loose = {name: value.detach().clone() for name, value in entries(module).items()}, LooseState(copied)
    weight = torch.full((2, len(y)), 1 / len(y), device=module.device)
    with isolate_rng(), torch.enable_grad():
        try:
            twins = dict(zip(map(id, module.parameters()), copied.parameters(), strict=True))
            trainer = VectorizedTrainer(copied, [], with_parameters(optimizer, twins), 2, seed=0)
            trainer.begin(Start([ClientRound("", 0)] * 2, [state, state], [[], []], [{}, {}]))
            keys = torch.zeros(2, dtype=torch.long, device=module.device)
            losses, _ = trainer.losses(x.expand(2, *x.shape), y.expand(2, *y.shape), weight, keys, randomness="error")
            trainer.gradients(losses.sum())
        except Exception as error:  # whatever it is, this module cannot be vectorised
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            return RANDOM if "randomness" in text else f"vectorising it fails ({text})"
        if changed := loose.changes():
            return f"its forward changes {quoted(changed)}"
        copied(x)
    if any(not torch.equal(value, state[name]) for name, value in entries(copied).items()):
        return "its forward changes buffers"
    return None
