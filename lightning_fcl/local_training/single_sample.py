"""Trial of a module on a batch of one sample. For example, batch normalization cannot train on such a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import tree_leaves

from lightning_fcl.data.batching import Batch
from lightning_fcl.data.reading_check import restored_reading
from lightning_fcl.data.scenarios import IntArray
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.federation.server_optimizer import with_parameters
from lightning_fcl.library_errors import first_line
from lightning_fcl.local_training.loop_counts import counting, silent
from lightning_fcl.local_training.outside import Outside
from lightning_fcl.local_training.vmap_check import copy_module
from lightning_fcl.methods.compose import get_methods
from lightning_fcl.methods.context import is_labelled
from lightning_fcl.methods.dry_run import first_indices, prepare_batch
from lightning_fcl.methods.frozen_layers import frozen_layers
from lightning_fcl.methods.functional import trainable_parameters

_Step = Callable[[L.LightningModule, Batch], Iterable[Tensor]]
"""Function that runs a copy of a module on a batch. The returned tensors must be finite."""


def why_not_single_sample(
    module: L.LightningModule, optimizers: Sequence[Optimizer], stream: FederatedStream
) -> str | None:
    """Return why a module cannot train on a batch of one sample, or None if it can, or if the trial cannot decide.

    A copy of the module takes one training step on two samples. Another copy takes one step on the first sample only.
    If the step fails on two samples (for example, because the step needs attributes that hooks set), the trial calls
    `forward` instead of the step. If `forward` also fails on two samples, the function returns None.

    Args:
        module: The module, with its Trainer.
        optimizers: Optimizers of the module. Empty if they do not exist yet.
        stream: The stream. The trial uses the first and the last sample of the first client that has samples.
    """
    if (rows := first_indices(stream)) is None:
        return None
    two = rows[[0, -1]]
    for step in (_train, _forward):
        if _why_not(step, module, optimizers, stream, two) is None:
            return _why_not(step, module, optimizers, stream, two[:1])
    return None


def has_single_samples(stream: FederatedStream) -> bool:
    """Return whether a batch of any client in any round can have only one sample."""
    sizes = {len(rows) for current in stream.plan.different_rounds for rows in current.values()}
    return any(size % stream.batch_size == 1 or (size and stream.batch_size == 1) for size in sizes)


def _why_not(
    step: _Step,
    module: L.LightningModule,
    optimizers: Sequence[Optimizer],
    stream: FederatedStream,
    rows: IntArray,
) -> str | None:
    """Return why a step on some samples fails on a copy of a module, or None. State outside the copy is restored."""
    trainer = module.trainer
    with isolate_rng(), torch.enable_grad():
        torch.manual_seed(0)
        try:
            module_copy = _copied(module, optimizers)
            outside_search = Outside(module_copy).search()
            try:
                with silent([module_copy]), restored_reading(stream.samples, rows, "train"), counting(trainer, 0, 1):
                    batch = prepare_batch(module_copy, stream.get_samples(rows))
                    with trainer.precision_plugin.train_step_context():
                        results = [value.detach() for value in step(module_copy, batch)]
            finally:
                outside_search.restore()
        except Exception as error:  # User code may raise any exception.
            return f"`{type(error).__name__}: {first_line(error)}`"
    finite = all(bool(torch.isfinite(value).all()) for value in results if value.is_floating_point())
    return None if finite else "its output, its loss, a gradient or a parameter is non-finite"


def _train(module: L.LightningModule, batch: Batch) -> list[Tensor]:
    numbered = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    result = module.training_step(batch, 0) if numbered else module.training_step(batch)
    loss = result.get("loss") if isinstance(result, dict) else result
    if not isinstance(loss, Tensor) or not module.automatic_optimization:
        return [value for value in tree_leaves(loss) if isinstance(value, Tensor)] + [
            *trainable_parameters(module).values()
        ]
    if not loss.requires_grad:
        return [loss]
    learning = [*trainable_parameters(module).values()]
    gradients = torch.autograd.grad(loss.sum(), learning, allow_unused=True)
    return [loss, *(gradient for gradient in gradients if gradient is not None)]


def _forward(module: L.LightningModule, batch: Batch) -> list[Tensor]:
    output = module(batch[0] if is_labelled(batch) else batch)
    return [value for value in tree_leaves(output) if isinstance(value, Tensor)]


def _copied(module: L.LightningModule, optimizers: Sequence[Optimizer]) -> L.LightningModule:
    """Return a copy of a module, with frozen layers as in local training. Copy optimizers for manual optimization."""
    module_copy = copy_module(module)
    if any(method.needs.features for method in get_methods(module.trainer)):
        for _, layer in frozen_layers(module_copy):
            layer.training = False
    if module_copy.automatic_optimization:
        return module_copy
    twins = dict(zip(map(id, module.parameters()), module_copy.parameters(), strict=True))
    copies = [with_parameters(optimizer, twins) for optimizer in optimizers]
    number = len(module.trainer.lr_scheduler_configs)
    schedulers = [LambdaLR(optimizer, _constant) for optimizer in copies[:1] * number]
    stand_ins: dict[str, Callable[..., Any]] = {
        "optimizers": lambda use_pl_optimizer=True: copies[0] if len(copies) == 1 else copies,
        "lr_schedulers": lambda: schedulers[0] if number == 1 else schedulers or None,
        "manual_backward": lambda loss, *args, **kwargs: loss.backward(*args, **kwargs),
        "toggle_optimizer": _ignore,
        "untoggle_optimizer": _ignore,
    }
    vars(module_copy).update(stand_ins)
    return module_copy


def _constant(epoch: int) -> float:
    return 1.0


def _ignore(optimizer: Optimizer) -> None:
    """Do nothing. Replaces `toggle_optimizer` and `untoggle_optimizer`, which are not needed in a single step."""
