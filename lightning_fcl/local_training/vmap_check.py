"""Search for obstacles to vectorized training: settings, hooks, and a trial of the module on padded batches."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import NoReturn

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback, LambdaCallback
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.datamodule_adapter import overridden_hook
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.data.trainer_access import get_callbacks
from lightning_fcl.federation.aggregation import State, state_tensors
from lightning_fcl.federation.obstacles import Obstacle, ObstacleError, Reason, obstacle_of
from lightning_fcl.federation.protocols import HasLogitMask, Vectorizable
from lightning_fcl.federation.server_optimizer import with_parameters
from lightning_fcl.local_training.drawn import Drawer, has_independent_outputs, is_close, trial_rows
from lightning_fcl.local_training.loop_counts import counting
from lightning_fcl.local_training.method_trial import method_obstacle
from lightning_fcl.local_training.module_snapshot import ModuleSnapshot
from lightning_fcl.local_training.vectorized import VectorizedTrainer
from lightning_fcl.methods.base import MethodBase, overrides_hook
from lightning_fcl.methods.driver import MethodDriver
from lightning_fcl.methods.keyed_dropout import KeyedRandomness

# Elementwise optimizers: the update of each element does not depend on other elements, so stacking does not change it.
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
# A user override of one of these hooks expects the gradients or the step of a single model.
STEP_HOOKS = (
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "configure_gradient_clipping",
    "optimizer_step",
)
# A user override of one of these hooks expects the batch of a single client.
BATCH_HOOKS = ("on_train_batch_start", "on_train_batch_end")


def find_vmap_obstacle(
    module: L.LightningModule, methods: Sequence[MethodBase], optimizers: Sequence[Optimizer], stream: FederatedStream
) -> Obstacle | None:
    """Return the first obstacle that does not depend on the module's step, such as a setting or a hook, or None."""
    for method in methods:
        if not method.vectorizable:
            projects = overrides_hook(method, "project_gradient")
            return Obstacle(Reason.METHOD_PROJECTS if projects else Reason.METHOD_TRAINS, (type(method).__name__,))
    if len(optimizers) > 1:
        return Obstacle(Reason.OPTIMIZERS)
    (optimizer,) = optimizers
    if type(optimizer) not in ELEMENTWISE:
        return Obstacle(Reason.OPTIMIZER, (type(optimizer).__name__,))
    if module.trainer.precision != "32-true":
        return Obstacle(Reason.PRECISION, (f'"{module.trainer.precision}"',))
    return _watching(module, stream)


def find_padding_obstacle(
    module: L.LightningModule, methods: Sequence[MethodBase], optimizer: Optimizer, stream: FederatedStream
) -> Obstacle | None:
    """Return the obstacle to vectorized training on padded batches, or None.

    There is no obstacle if the module's training step is the mean of its `sample_loss`, and if the trials succeed. The
    trials run the module on a few samples, and the loss and the methods also on random outputs.
    """
    if not isinstance(module, Vectorizable):
        return Obstacle(Reason.NO_SAMPLE_LOSS, (type(module).__name__,))
    if obstacle := module.sequential_reason():
        return obstacle
    if (rows := trial_rows(stream)) is None:
        return Obstacle(Reason.NO_SAMPLES)
    with isolate_rng(), torch.enable_grad():
        torch.manual_seed(0)
        data = stream.get_samples(rows)
        if not (isinstance(data, list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)):
            return Obstacle(Reason.NOT_TENSORS)
        try:
            x, y = (part.to(module.device) for part in data)
            return _Trial(module, optimizer, x, y, stream.num_classes).find_obstacle(methods)
        # User code may raise any exception. A module that raises an exception cannot be vectorized on padded batches.
        except Exception as error:
            return obstacle_of(error)


def is_users(hook: Callable[..., object]) -> bool:
    """Return whether a hook is user code, and not part of Lightning or of this library."""
    return not getattr(_function(hook), "__module__", "").startswith(("lightning.", "lightning_fcl."))


def _function(hook: object) -> object:
    return getattr(hook, "__func__", hook)


def _watching(module: L.LightningModule, stream: FederatedStream) -> Obstacle | None:
    """Return an obstacle for a finetuning callback or a user hook that expects a single client, otherwise None."""
    callbacks = get_callbacks(module.trainer)
    for callback in callbacks:
        if isinstance(callback, BaseFinetuning):
            return Obstacle(Reason.FINETUNING, (type(callback).__name__,))
    library_prefixes = ("lightning.", "lightning_fcl.callbacks.", "lightning_fcl.simulation.")
    user_callbacks = [
        c for c in callbacks if not (isinstance(c, MethodDriver) or type(c).__module__.startswith(library_prefixes))
    ]
    user_callbacks += [callback for callback in callbacks if isinstance(callback, LambdaCallback)]
    watchers: list[tuple[object, type]] = [
        (module, L.LightningModule),
        *((callback, Callback) for callback in user_callbacks),
    ]
    for watcher, plain in watchers:
        for hook in STEP_HOOKS + BATCH_HOOKS:
            # A `LambdaCallback` stores its hooks as attributes.
            holder = watcher if isinstance(watcher, LambdaCallback) else type(watcher)
            if _function(getattr(holder, hook, None)) is not getattr(plain, hook, None):
                return Obstacle(Reason.OVERRIDES, (f"`{type(watcher).__name__}` overrides `{hook}`",))
    overridden = overridden_hook(stream.data, stream, module)
    return None if overridden is None else Obstacle(Reason.OVERRIDES, (overridden,))


class _Trial:
    """A trial on padded batches, with a copy of a module.

    Args:
        module: The module, which has a `sample_loss`.
        optimizer: Optimizer of the module.
        x: Inputs of `ROWS` samples.
        y: Targets of these samples.
        num_classes: Number of classes of the stream.
    """

    def __init__(self, module: L.LightningModule, optimizer: Optimizer, x: Tensor, y: Tensor, num_classes: int) -> None:
        self._x, self._y, self._num_classes = x, y, num_classes
        self._module = copy_module(module).train()
        self._module.log = self._module.log_dict = _refuse_log  # type: ignore[method-assign]
        self._state = {name: value.detach().clone() for name, value in state_tensors(self._module).items()}
        twins = dict(zip(map(id, module.parameters()), self._module.parameters(), strict=True))
        self._optimizer = with_parameters(optimizer, twins)
        self._loose, self._counts = ModuleSnapshot(self._module), metric_update_counts(self._module)

    def find_obstacle(self, methods: Sequence[MethodBase]) -> Obstacle | None:
        """Return the obstacle to vectorized training on padded batches, or None."""
        return (
            self._step_obstacle()
            or self._row_obstacle()
            or method_obstacle(self._module, methods, self._optimizer, [self._x, self._y], padded=True)
        )

    def _step_obstacle(self) -> Obstacle | None:
        """Return an obstacle if the step cannot be vectorized, or if padding changes the result, otherwise None."""
        num_samples, generator_states = len(self._x) - 5, generators()
        x, y = self._x[:num_samples], self._y[:num_samples]
        with counting(self._module.trainer, 0, 1):
            expected_results = self._losses_and_gradients([x], [y])
        if self._is_changed():
            return Obstacle(Reason.FORWARD_STATE)
        # Clients have different numbers of batches, so the step must not depend on this number.
        with counting(self._module.trainer, 0, 7):
            repeated_results = self._losses_and_gradients([x], [y])
        if generators() != generator_states:
            return Obstacle(Reason.OTHER_RANDOM)
        if not all(map(torch.equal, repeated_results, expected_results)):
            return Obstacle(Reason.NOT_REPEATABLE)
        for padding in (torch.zeros_like(self._x[num_samples:]), self._x[:1].expand_as(self._x[num_samples:])):
            padded_inputs = [torch.cat([x, padding]), self._x.flip(0)]
            with counting(self._module.trainer, 0, 1):
                padded_results = self._losses_and_gradients(padded_inputs, [self._y, self._y.flip(0)], num_samples)
            if not all(map(is_close, padded_results, expected_results)):
                return Obstacle(Reason.OTHER_SAMPLES, ("the loss",))
        return None

    def _row_obstacle(self) -> Obstacle | None:
        """Return an obstacle if a function of the module mixes samples or changes the module, otherwise None."""
        module, key = self._module, torch.zeros((), dtype=torch.long, device=self._x.device)
        assert isinstance(module, Vectorizable)

        def forward(x: Tensor) -> Tensor:
            with KeyedRandomness(key).recomputable():
                output: Tensor = module(x)
            return output

        output = forward(self._x)
        if self._is_changed():
            return Obstacle(Reason.FORWARD_STATE)
        if not has_independent_outputs(forward, self._x):
            return Obstacle(Reason.OTHER_SAMPLES, ("forward",))
        drawer = Drawer(self._y, output, self._num_classes)
        drawer.fit_range_of(module.sample_loss)
        if isinstance(module, HasLogitMask) and not drawer.has_independent_rows(module.mask_logits):
            return Obstacle(Reason.OTHER_SAMPLES, ("mask_logits",))
        if not drawer.has_independent_rows(module.sample_loss):
            return Obstacle(Reason.OTHER_SAMPLES, ("sample_loss",))
        return Obstacle(Reason.FORWARD_STATE) if self._is_changed() else None

    def _is_changed(self) -> bool:
        """Return whether the module has changed since the start of the trial."""
        counts = metric_update_counts(self._module)
        return bool(self._loose.changes() or counts != self._counts or changed_tensors(self._module, self._state))

    def _losses_and_gradients(self, x: list[Tensor], y: list[Tensor], real: int | None = None) -> list[Tensor]:
        """Return the first client's loss, shape (1,), and its flat gradient. Non-finite numbers are replaced.

        ``real`` is the number of the first client's samples that are not padding. None: no padding.
        """
        module, clients, rows = self._module, len(x), len(y[0])
        state = {name: value.detach().clone() for name, value in state_tensors(module).items()}
        weight = torch.full((clients, rows), 1 / rows, device=module.device)
        if real is not None:
            weight[0] = (torch.arange(rows, device=module.device) < real) / real
        trainer = VectorizedTrainer(module, [], self._optimizer, clients, seed=0)
        trainer.start([ClientRound("", 0)] * clients, [state] * clients, [[]] * clients, [{}] * clients)
        keys = torch.zeros(clients, dtype=torch.long, device=module.device)
        losses, _ = trainer.losses(torch.stack(x), torch.stack(y), weight, keys, randomness="error")
        gradients = [g[0].flatten() for g in trainer.gradients(losses.sum()) if g is not None]
        return [losses.detach()[:1].nan_to_num(), torch.cat(gradients).nan_to_num()]


def copy_module(module: L.LightningModule) -> L.LightningModule:
    """Return a copy of a module with the original Trainer. A Trainer with subprocesses cannot be copied."""
    module_copy = copy.deepcopy(module, {id(part): part for part in (module.trainer, module.trainer.strategy)})
    module_copy.trainer = module.trainer
    return module_copy


def _refuse_log(*args: object, **kwargs: object) -> NoReturn:
    raise ObstacleError(Reason.LOSS_LOGS)


def changed_tensors(module: nn.Module, initial_state: State) -> list[str]:
    """Return the names of the state tensors that differ from an initial state."""
    return [name for name, value in state_tensors(module).items() if not torch.equal(value, initial_state[name])]


def metric_update_counts(module: nn.Module) -> list[int]:
    """Return the number of updates of each metric in a module."""
    parts = [value for part in module.modules() for value in (part, *vars(part).values())]
    container_items = [
        one
        for part in parts
        if isinstance(part, list | tuple | dict)
        for one in (part.values() if isinstance(part, dict) else part)
    ]
    return [part.update_count for part in (*parts, *container_items) if isinstance(part, Metric)]


def generators() -> tuple[object, ...]:
    """Return the states of the random generators of Python and NumPy."""
    return random.getstate(), str(np.random.get_state())
