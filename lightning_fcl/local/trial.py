"""Whether clients of a module can train side by side: what it says, who watches it, and a trial on a few samples."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback, LambdaCallback
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_fcl.data.attached import callbacks_of
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.data_module import overridden_hook
from lightning_fcl.data.scenarios import IntArray
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.federation.aggregation import State, entries
from lightning_fcl.federation.optimizers import with_parameters
from lightning_fcl.federation.protocol import Vectorizable
from lightning_fcl.local.loop_counts import counting
from lightning_fcl.local.loose_state import LooseState
from lightning_fcl.local.vectorized import VectorizedTrainer
from lightning_fcl.methods.declaration import Declaration, overrides
from lightning_fcl.methods.driver import MethodDriver

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


def why_not_side_by_side(
    module: L.LightningModule, methods: Sequence[Declaration], optimizers: Sequence[Optimizer], stream: FederatedStream
) -> str | None:
    """The reason why clients must train one at a time whatever the module's step is, or None."""
    for method in methods:
        if not method.vectorizable:
            what = "changes the gradient of" if overrides(method, "project") else "trains"
            return f"`{type(method).__name__}` {what} one client at a time"
    if len(optimizers) > 1:
        return "it has several optimizers"
    (optimizer,) = optimizers
    if type(optimizer) not in ELEMENTWISE:
        return f"`{type(optimizer).__name__}` does not update each number on its own"
    if module.trainer.precision != "32-true":
        return f'the precision is "{module.trainer.precision}"'
    return _watching(module, stream)


def why_not_padded(module: L.LightningModule, optimizer: Optimizer, stream: FederatedStream) -> str | None:
    """The reason why a module's clients cannot train on padded batches, or None.

    They can if it says that its training step is the mean of its `sample_loss`, and a trial on a few samples succeeds.
    """
    if not isinstance(module, Vectorizable):
        return f"`{type(module).__name__}` is no `Classifier`, which states its loss apart"
    return module.why_not_vectorized() or _trial(module, optimizer, stream)


def is_users(hook: Callable[..., Any]) -> bool:
    """Return whether a hook is a user's code, and not Lightning's or this library's."""
    return not getattr(_function(hook), "__module__", "").startswith(("lightning.", "lightning_fcl."))


def _function(hook: object) -> object:
    return getattr(hook, "__func__", hook)


def _watching(module: L.LightningModule, stream: FederatedStream) -> str | None:
    """Who overrides a hook that shows one client at a time."""
    callbacks = callbacks_of(module.trainer)
    for callback in callbacks:
        if isinstance(callback, BaseFinetuning):
            return f"`{type(callback).__name__}` adds parameters to the optimizer while it trains"
    known = ("lightning.", "lightning_fcl.callbacks.", "lightning_fcl.simulation.")
    others = [c for c in callbacks if not (isinstance(c, MethodDriver) or type(c).__module__.startswith(known))]
    others += [callback for callback in callbacks if isinstance(callback, LambdaCallback)]
    watchers: list[tuple[object, type]] = [(module, L.LightningModule), *((callback, Callback) for callback in others)]
    for watcher, plain in watchers:
        for hook in STEP_HOOKS + BATCH_HOOKS:
            if _function(getattr(watcher, hook, None)) is not getattr(plain, hook, None):
                return f"`{type(watcher).__name__}` overrides `{hook}`"
    return overridden_hook(stream.data, stream, module)


def _trial(module: L.LightningModule, optimizer: Optimizer, stream: FederatedStream) -> str | None:
    """What goes wrong when a client trains on two samples, vectorised: alone, again, and padded beside another one."""
    if (chosen := samples_of_two(stream, 2)) is None:  # of one sample nothing could be told
        return "no client has samples"
    own, last = chosen
    others = np.resize(last, len(own) + 1)
    with isolate_rng(), torch.enable_grad():
        data = stream.take(np.concatenate([own, others]))
        if not (isinstance(data, list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)):
            return "its batches are not pairs of tensors"
        (x, others_x), (y, others_y) = (part.to(module.device).split([len(own), len(own) + 1]) for part in data)
        try:
            copied = copy_of(module).train()
            copied.log = copied.log_dict = _refuse_log  # type: ignore[method-assign]
            begun = {name: value.detach().clone() for name, value in entries(copied).items()}
            drawn, loose, counts = generators(), LooseState(copied), updates(copied)
            twins = dict(zip(map(id, module.parameters()), copied.parameters(), strict=True))
            step = partial(_trial_step, copied, with_parameters(optimizer, twins))
            with counting(module.trainer, 0, 1):
                alone = step([x], [y])
            if loose.changes() or updates(copied) != counts or moved(copied, begun):
                return "its forward leaves something on the module"
            with counting(module.trainer, 0, 7):  # clients have different numbers of batches
                again = step([x], [y])
            if not all(map(torch.equal, again, alone)) or generators() != drawn:
                return "its forward gives something else each time"
            with counting(module.trainer, 0, 1):
                copied(x)
            if loose.changes() or updates(copied) != counts or moved(copied, begun):
                return "its forward changes buffers"
            # As the loader pads: with zeros what is read batch by batch, else with the client's first sample.
            x, y = (torch.cat([p, torch.zeros_like(p[:1]) if stream.samples.draws else p[:1]]) for p in (x, y))
            with counting(module.trainer, 0, 1):
                padded = step([x, others_x], [y, others_y], len(own))
        except Exception as error:  # whatever it is, this module cannot be vectorised
            return RANDOM if "randomness" in str(error) else f"vectorising it fails ({error})"
    if all((a - b).norm() <= 1e-5 * b.norm() for a, b in zip(padded, alone, strict=True)):
        return None
    return "its loss looks at other samples of a batch, and would take padding, or other clients' samples, for some"


def samples_of_two(stream: FederatedStream, most: int) -> tuple[IntArray, IntArray] | None:
    """Up to so many samples of a client, and those of another in another order; None: no client has any."""
    plan = [rows for current in stream.plan.train for rows in itertools.islice(current.values(), 100) if len(rows)]
    return (max((rows[:most] for rows in plan), key=len), plan[-1][::-1]) if plan else None


def copy_of(module: L.LightningModule) -> L.LightningModule:
    """A copy of a module, without its Trainer: that may hold processes."""
    return copy.deepcopy(module, {id(part): part for part in (module.trainer, module.trainer.strategy)})


def _refuse_log(*args: object, **kwargs: object) -> NoReturn:
    raise ValueError("its loss logs, which would count padding")


def _trial_step(
    module: L.LightningModule, optimizer: Optimizer, x: list[Tensor], y: list[Tensor], real: int | None = None
) -> list[Tensor]:
    """The first client's loss and gradient when these train side by side; ``real`` samples of its batch are its own."""
    clients, state = len(x), {name: value.detach().clone() for name, value in entries(module).items()}
    weight = torch.full((clients, len(y[0])), 1 / len(y[0]), device=module.device)
    if real is not None:
        weight[0] = (torch.arange(len(y[0]), device=module.device) < real) / real
    trainer = VectorizedTrainer(module, [], optimizer, clients, seed=0)
    trainer.begin([ClientRound("", 0)] * clients, [state] * clients, [[]] * clients, [{}] * clients)
    keys = torch.zeros(clients, dtype=torch.long, device=module.device)
    losses, _ = trainer.losses(torch.stack(x), torch.stack(y), weight, keys, randomness="error")
    gradients = [g[0].flatten() for g in trainer.gradients(losses.sum()) if g is not None]
    return [losses.detach()[:1].nan_to_num(), torch.cat(gradients).nan_to_num()]


def moved(module: nn.Module, begun: State) -> list[str]:
    """Names of a module's entries that are not as they were."""
    return [name for name, value in entries(module).items() if not torch.equal(value, begun[name])]


def updates(module: nn.Module) -> list[int]:
    """How often each metric of a module has been updated."""
    parts = [value for part in module.modules() for value in (part, *vars(part).values())]
    several = [
        one
        for part in parts
        if isinstance(part, list | tuple | dict)
        for one in (part.values() if isinstance(part, dict) else part)
    ]
    return [part.update_count for part in (*parts, *several) if isinstance(part, Metric)]


def generators() -> tuple[object, ...]:
    """Where NumPy's and Python's generators are."""
    return random.getstate(), str(np.random.get_state())
