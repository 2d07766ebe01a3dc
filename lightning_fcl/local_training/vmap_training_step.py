"""Vectorized local training with the module's own training step under `torch.func.vmap`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_fcl.data.batching import Batch
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.collation import ShapeGroup
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.federation.local_trainer import LocalResult
from lightning_fcl.local_training.log_recorder import LogEntry, LogRecorder, MetricUpdate
from lightning_fcl.local_training.module_snapshot import ModuleSnapshot
from lightning_fcl.local_training.sequential import reraise_batchnorm_error
from lightning_fcl.local_training.stacked_trainer import StackedTrainer
from lightning_fcl.methods.base import MethodBase
from lightning_fcl.methods.context import is_labelled, without_call
from lightning_fcl.methods.keyed_dropout import KeyedRandomness
from lightning_fcl.validation import format_code_names


class StepTrainer(StackedTrainer):
    """A trainer of copies of one module, one per client. It runs the module's own `training_step` under `vmap`.

    Batches are not padded. In a step, clients whose batches have the same shape form a group. Each group is vectorized,
    and the groups run one after another. All groups contribute to one gradient and one optimizer step. Logged values
    are logged once for all clients.

    Args:
        module: See `StackedTrainer` for this argument and all arguments before ``randomness``.
        randomness: Behavior of random layers that use no key. See `torch.func.vmap`.
    """

    def __init__(
        self,
        module: L.LightningModule,
        methods: Sequence[MethodBase],
        optimizer: Optimizer,
        num_vectorized_clients: int,
        seed: int,
        randomness: str = "different",
    ) -> None:
        super().__init__(module, methods, optimizer, num_vectorized_clients, seed)
        self.recorder = LogRecorder(module)
        # Losses of the current step, and losses without the terms of methods, shape (clients,).
        self.losses, self.task_losses = torch.zeros(0), torch.zeros(0)
        # Logged values of the current step, by group of clients.
        self.logged: list[tuple[Sequence[LogEntry | MetricUpdate], Sequence[Any]]] = []
        self._randomness = randomness
        self._step = _OwnStep(module)
        # Client indices and parameters of each group.
        self._leaves: list[tuple[Tensor, list[Tensor]]] = []
        # Input and output of the last call of the module.
        self._called: tuple[Any, Tensor] | None = None
        # Whether the training step has returned a loss.
        self._gives = True

    def start(
        self,
        clients: Sequence[ClientRound],
        states: Sequence[State],
        method_states: Sequence[Sequence[StateSection]],
        optimizer_states: Sequence[StateSection],
    ) -> None:
        super().start(clients, states, method_states, optimizer_states)
        self._client_rounds = clients
        schedules = [value for value in vars(self._module).values() if isinstance(value, LRScheduler)]
        self._loose = ModuleSnapshot(self._module, [self._template], schedules)

    def training_step(self, batch: Batch, batch_idx: int | None, weight: Tensor | None) -> Tensor | None:
        loss = self.group_losses(batch, batch_idx)
        self.recorder.replay(self.logged)
        self.update_finite(self.losses)
        self.step_losses.append(None if loss is None else self.task_losses)
        return loss

    def group_losses(self, groups: Sequence[ShapeGroup], batch_idx: int | None) -> Tensor | None:
        """Return the sum of the clients' losses, or None if the step returns no loss.

        This function sets `losses`, `task_losses` and `logged`.
        """
        device = groups[0].rows.device
        keys, method_inputs = self.next_keys(device), self.method_inputs(device) if self.methods else {}
        self.losses, self.task_losses = torch.zeros(2, self.number, device=device)
        self.logged, self._leaves = [], []
        group_sums: list[Tensor] = []
        with self._watching(), sdpa_kernel(SDPBackend.MATH):  # under vmap, fused kernels run in a loop over clients
            for rows, batch in groups:
                group_losses = self._group(rows, batch, batch_idx, keys, method_inputs)
                if group_losses is not None:
                    losses, task_losses = group_losses
                    self.losses[rows] = losses.detach().to(self.losses.dtype)
                    self.task_losses[rows] = task_losses.detach().to(self.task_losses.dtype)
                    group_sums.append(losses.sum())
        if group_sums and len(group_sums) < len(groups):
            raise InvalidValueError(
                "Expected a `training_step` that returns a loss for the batches of all clients, or for no batch, but "
                f"in a vectorized step it returned a loss for {len(group_sums)} of {len(groups)} batch shapes.",
                hint="Set `max_vectorized_clients=1`.",
            )
        return torch.stack(group_sums).sum() if group_sums else None

    def _group(
        self, rows: Tensor, batch: Batch, batch_idx: int | None, keys: Tensor, method_inputs: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor] | None:
        """Return the losses and the task losses of clients whose batches have the same shape.

        Return None if the step returns no loss.
        """
        whole = len(rows) == self.number  # the group contains all clients, in their order
        params: dict[str, Tensor] = dict(self.params)
        rest = self.untrained_state
        if not whole:
            params = {name: p.detach()[rows].requires_grad_() for name, p in params.items()}
            rest, keys = {name: value[rows] for name, value in rest.items()}, keys[rows]
            method_inputs = (
                apply_to_collection(method_inputs, Tensor, lambda value: value[rows])
                if method_inputs
                else method_inputs
            )
        self._gives = True
        vectorized_step = vmap(partial(self._client, batch_idx), randomness=self._randomness)
        try:
            losses, task_losses, values = vectorized_step(params, rest, keys, method_inputs, batch)
        except Exception as error:
            error.add_note(
                "This step was vectorized over several clients. If the step depends on values of tensors, or stores "
                "values or draws random numbers in some steps only, set `max_vectorized_clients=1`."
            )
            if isinstance(error, ValueError):
                reraise_batchnorm_error(error, self._client_rounds[int(rows[0])])
            raise
        # Copy in-place changes of the step back to the stack.
        if not whole:
            stacked = {**self.params, **self.untrained_state}
            for name, value in (*params.items(), *rest.items()):
                stacked[name].data[rows] = value.detach()
        self.logged.append((self.recorder.lines, values))
        self._leaves.append((rows, list(params.values())))
        return (losses, task_losses) if self._gives else None

    def _client(
        self,
        batch_idx: int | None,
        params: Mapping[str, Tensor],
        rest: State,
        key: Tensor,
        method_inputs: Mapping[str, Any],
        batch: Batch,
    ) -> tuple[Tensor, Tensor, list[Any]]:
        """Return one client's loss, its loss without the terms of methods, and the values that its step logs."""
        self._called = None
        prefixed_state = {f"{_OwnStep.prefix}{name}": value for name, value in (*params.items(), *rest.items())}
        with KeyedRandomness(key):
            with self.recorder.recording(batch):
                result = functional_call(self._step, prefixed_state, (batch, batch_idx))
            values, loss = self.recorder.values, result.get("loss") if isinstance(result, Mapping) else result
            if loss is None:
                self._gives = False
                no_loss = key.new_zeros((), dtype=torch.get_default_dtype())
                return no_loss, no_loss, values
            loss = loss.reshape(())
            if not self.methods:
                return loss, loss, values
            reason = None if self._called else without_call(self._module)
            x, output = self._called or (None, loss)
            y = batch[1] if is_labelled(batch) else None
            scale, extra = self.compose_in_vmap(params, rest, method_inputs, x, output, y, reason=reason)
        return scale * loss + extra, loss, values

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Temporarily record the module's input and output in a step. Methods need these tensors."""
        if not self.methods:
            yield
            return
        handle = self._module.register_forward_hook(self._watch)
        try:
            yield
        finally:
            handle.remove()
            self._called = None

    def _watch(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module.training and torch.is_grad_enabled() and args:
            self._called = args[0], output

    def gradients(self, loss: Tensor) -> Sequence[Tensor | None]:
        return self.reorder_gradients([gradient for _, gradient in self.param_gradients(loss)])

    def param_gradients(self, loss: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        """Return each parameter, stacked over the clients, paired with the stacked gradient of this parameter."""
        leaves = [leaf for _, own in self._leaves for leaf in own]
        gradients = iter(torch.autograd.grad(loss, leaves, allow_unused=True))
        columns = [[(rows, next(gradients)) for _ in own] for rows, own in self._leaves]
        stacked_gradients = [self._gathered(column) for column in zip(*columns, strict=True)]
        return list(zip(self.params.values(), stacked_gradients, strict=True))

    def _gathered(self, parts: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor | None:
        """Return the stacked gradients of one parameter, or None if no client has a gradient.

        The gradient is 0 for clients without a batch.
        """
        client_gradients = [(rows, gradient) for rows, gradient in parts if gradient is not None]
        if not client_gradients or (len(parts) == 1 and len(parts[0][0]) == self.number):
            return parts[0][1]
        if len(client_gradients) < len(parts):
            raise InvalidValueError(
                "Expected a `training_step` that trains the same parameters for batches of all shapes, because the "
                "step is vectorized over clients, but some parameters have gradients for some shapes only.",
                hint="Set `max_vectorized_clients=1`.",
            )
        full_gradient = client_gradients[0][1].new_zeros(self.number, *client_gradients[0][1].shape[1:])
        for rows, gradient in client_gradients:
            full_gradient[rows] = gradient
        return full_gradient

    def finish(self) -> LocalResult:
        """Return the clients' states.

        Raises:
            ValueError: If the steps have changed attributes of the module, because the changes would affect the next
                clients.
        """
        if changed_names := self._loose.changes():
            raise InvalidValueError(
                "Expected a `training_step` that changes no attributes of the module, because the step is vectorized "
                f"over clients, but in round {self._client_rounds[0].round_idx} it has changed "
                f"{format_code_names(changed_names)}.",
                hint="Set `max_vectorized_clients=1`.",
                argument="max_vectorized_clients",
                value=changed_names,
            )
        self._leaves = []
        return super().finish()


class _OwnStep(nn.Module):
    """A module that calls the training step of another module, for `torch.func.functional_call`."""

    prefix = "module."

    def __init__(self, module: L.LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Batch, batch_idx: int | None) -> Any:
        """Return the result of the step."""
        return self.module.training_step(*(batch,) if batch_idx is None else (batch, batch_idx))
