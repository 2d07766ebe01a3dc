"""Base class of vectorized trainers: stacked parameters, buffers and method states of several clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from lightning_fcl.data.batching import Batch
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import State, state_tensors
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.federation.local_trainer import LocalResult
from lightning_fcl.federation.server_optimizer import group_values, set_group_values, with_parameters
from lightning_fcl.local_training.sequential import client_round_keys, replay_keys, step_keys
from lightning_fcl.methods.base import MethodBase, changes_loss, make_client, overrides_hook
from lightning_fcl.methods.compose import compose
from lightning_fcl.methods.context import Client, Step, zeros_like_state
from lightning_fcl.methods.functional import (
    Embedding,
    SampleLoss,
    make_teacher_fn,
    require_sample_loss,
    trainable_parameters,
)
from lightning_fcl.methods.hook_results import INVALID_HOOK
from lightning_fcl.methods.keyed_dropout import preserve_rng_state
from lightning_fcl.methods.replay_samples import DrawnSamples


class StackedTrainer(ABC):
    """A trainer of copies of one module, one copy per client. Each stacked tensor has shape (clients, ...).

    Subclasses define the training step.

    Args:
        module: The module. The parameters of this module are not changed.
        methods: Methods of the module's Trainer.
        optimizer: Optimizer of the module. The stacked optimizer has the same class and options.
        num_vectorized_clients: Maximum number of clients in a vectorized step.
        seed: Seed of random layers and replay samples.

    Attributes:
        params: Stacked trainable parameters.
        untrained_state: All other tensors of the module's state, stacked.
        methods: Methods that change the loss of at least one of the current clients.
        has_finite_loss: Whether all losses of each client were finite, shape (clients,).
        step_losses: Task losses of each call of `training_step`, see `LocalResult`.
    """

    is_stacked = True

    def __init__(
        self,
        module: L.LightningModule,
        methods: Sequence[MethodBase],
        optimizer: Optimizer,
        num_vectorized_clients: int,
        seed: int,
    ) -> None:
        self.num_vectorized_clients = num_vectorized_clients
        self.optimizer: Optimizer | None = None
        self.params: dict[str, nn.Parameter] = {}
        self.untrained_state: State = {}
        self.methods: Sequence[MethodBase] = ()
        self._module = module
        self._all_methods = methods
        self._template = optimizer
        self._seed = seed
        self._made: dict[int, tuple[dict[str, nn.Parameter], Optimizer]] = {}
        # Under vmap, gradients of linear layers are in column-major order. Column-major weights make steps faster.
        layers = (part for part in module.modules() if isinstance(part, nn.Linear))
        weights = {id(layer.weight) for layer in layers}
        self._by_columns = {name for name, value in state_tensors(module).items() if id(value) in weights}

    def start(
        self,
        clients: Sequence[ClientRound],
        states: Sequence[State],
        method_states: Sequence[Sequence[StateSection]],
        optimizer_states: Sequence[StateSection],
    ) -> None:
        self.number, self._steps = len(states), 0
        stacked_state = stack(states)
        self._received = {n: by_columns(v) if n in self._by_columns else v for n, v in stacked_state.items()}
        self.params, self.optimizer = self._parameters(len(states))
        self.has_finite_loss = torch.ones(self.number, dtype=torch.bool)
        self.step_losses: list[Tensor | None] = []
        module_names = set(state_tensors(self._module))
        self.untrained_state = {
            n: v.clone() for n, v in self._received.items() if n in module_names and n not in self.params
        }
        self._buffers = {name for name, _ in self._module.named_buffers()}
        self._kept = method_states
        self._keys = client_round_keys(self._seed, clients, "layers")
        self._begin_methods(clients)

    def _parameters(self, clients: int) -> tuple[dict[str, nn.Parameter], Optimizer]:
        """Return stacked parameters with the values from which the clients start, and an optimizer of these parameters.

        Both are reused from an earlier call if the number of clients, the names and the shapes are equal.
        """
        learning = trainable_parameters(self._module)
        values = {name: value for name, value in self._received.items() if name in learning}
        params, optimizer = self._made.get(clients, ({}, self._template))
        if {n: p.shape for n, p in params.items()} == {n: v.shape for n, v in values.items()}:
            with torch.no_grad():
                torch._foreach_copy_(list(params.values()), list(values.values()))
            optimizer.state.clear()
            # Group values of the module's optimizer, such as the learning rate, may have changed.
            set_group_values(optimizer, group_values(self._template))
            return params, optimizer
        # A clone keeps the memory order of the value.
        params = {name: nn.Parameter(value.clone()) for name, value in values.items()}
        twins = {id(p): params[name] for name, p in self._module.named_parameters() if name in params}
        self._made[clients] = params, with_parameters(self._template, twins)
        return self._made[clients]

    def _begin_methods(self, clients: Sequence[ClientRound]) -> None:
        """Find the methods that change the loss of a client, and stack the client states of these methods."""
        device = next(iter(self.params.values())).device
        applies = [[method.applies_to(part) for part in clients] for method in self._all_methods]
        shaping = [
            any(on and changes_loss(method, Client(own[i])) for on, own in zip(applies[i], self._kept, strict=True))
            for i, method in enumerate(self._all_methods)
        ]
        method_indices = [i for i, shapes in enumerate(shaping) if shapes]
        self.methods = [self._all_methods[i] for i in method_indices]
        for i in method_indices:
            _check_alike(self._all_methods[i], clients, [own[i] for own in self._kept])
        self._memories = [stack_common([own[i] for own in self._kept]) for i in method_indices]
        self._applies = [torch.tensor(applies[i], dtype=torch.float32, device=device) for i in method_indices]
        method_clients = [[Client(own[i]) for i in method_indices] for own in self._kept] if method_indices else []
        self._drawn = DrawnSamples(self.methods, method_clients, replay_keys(self._seed, clients))

    @abstractmethod
    def training_step(self, batch: Batch, batch_idx: int | None, weight: Tensor | None) -> Tensor | None:
        """Return the sum of the clients' losses, or None if there is no loss."""

    @abstractmethod
    def gradients(self, loss: Tensor) -> Sequence[Tensor | None]:
        """Return the stacked gradients of a step's loss, in the order of the optimizer's parameters."""

    def next_keys(self, device: torch.device) -> Tensor:
        """Return the keys of the clients' random layers in the next step, shape (clients,)."""
        self._steps += 1
        return step_keys(self._keys, self._steps - 1).to(device)

    def method_inputs(self, device: torch.device) -> dict[str, Any]:
        """Return the stacked inputs of the methods in the next step, including the replay samples."""
        replayed: list[Mapping[str, Tensor]] = []
        replay_weights: list[Tensor] = []
        for method in self.methods:
            if method.section_name not in self._drawn.pools:
                replayed.append({})
                replay_weights.append(torch.zeros(self.number, device=device))
                continue
            rows = self._drawn.draw(method.section_name)
            template = next((row for row in rows if row), {})
            full = [row or zeros_like_state(template) for row in rows]
            replayed.append({name: torch.stack([row[name] for row in full]).to(device) for name in template})
            replay_weights.append(torch.tensor([float(bool(row)) for row in rows], device=device))
        of_methods = {
            "memories": self._memories,
            "applies": self._applies,
            "replayed": replayed,
            "there": replay_weights,
        }
        return {"received": dict(self._received), **of_methods}

    def compose_in_vmap(
        self,
        params: Mapping[str, Tensor],
        untrained_state: State,
        method_inputs: Mapping[str, Any],
        x: Any,
        output: Tensor,
        y: Tensor | None,
        weight: Tensor | None = None,
        reason: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the factor of one client's task loss, and the penalty of the methods. Called within vmap.

        Args:
            params: The client's parameters.
            untrained_state: The client's tensors that are not trained.
            method_inputs: The client's part of the result of `method_inputs`.
            x: Inputs of the client's batch.
            output: Output of the module for ``x``.
            y: Targets.
            weight: Weight of each sample in the client's mean. None: equal weights.
            reason: Reason why ``x`` and ``output`` are missing, with ``%s`` for the method's name. None: both exist.
        """

        def state() -> State:
            untrained_entries = {
                name: value.clone() if name in self._buffers else value for name, value in untrained_state.items()
            }
            return {**params, **untrained_entries}

        def outputs(x: Any) -> Tensor:
            with preserve_rng_state():
                result: Tensor = functional_call(self._module, state(), (x,))
            return result

        def features(x: Any) -> Tensor:
            prefixed_state = {f"{Embedding.prefix}{name}": value for name, value in state().items()}
            with preserve_rng_state():
                result: Tensor = functional_call(Embedding(self._module), prefixed_state, (x,))
            return result

        def loss_of(
            x: Any, y: Any, params: Mapping[str, Tensor] | None = None, loss: SampleLoss | None = None
        ) -> Tensor:
            with preserve_rng_state():
                output = functional_call(self._module, {**state(), **(params or {})}, (x,))
            return (loss or require_sample_loss(self._module).sample_loss)(output, y).mean()

        received_state, unit = method_inputs["received"], torch.ones((), device=output.device)
        step = Step(
            params, received_state, x, output, make_teacher_fn(self._module), outputs, features, loss_of, weight, y
        )
        steps = [
            replace(step, replay_samples=samples, replay_weight=real)
            for samples, real in zip(method_inputs["replayed"], method_inputs["there"], strict=True)
        ]
        if reason is not None:
            steps = [
                own.without_batch(reason % type(method).__name__)
                for method, own in zip(self.methods, steps, strict=True)
            ]
        method_clients = [
            make_client(method, self._module, memory, received_state)
            for method, memory in zip(self.methods, method_inputs["memories"], strict=True)
        ]
        scale, extra = compose(self.methods, method_clients, steps, unit * 0, method_inputs["applies"])
        return unit * scale, extra

    def update_finite(self, losses: Tensor) -> None:
        """Update `has_finite_loss` with the losses of a step, shape (clients with a batch,).

        The clients with a batch are the first clients of the stack.
        """
        self.has_finite_loss = self.has_finite_loss.to(losses.device)
        self.has_finite_loss[: len(losses)] &= losses.detach().isfinite()

    def reorder_gradients(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the gradients of `params` in the order of the optimizer's parameters. The two orders can differ."""
        # The fused optimizers of torch require that a gradient has the same strides as its parameter.
        gradient_by_id = {
            id(p): g if g is None or g.stride() == p.stride() else torch.empty_like(p).copy_(g)
            for p, g in zip(self.params.values(), gradients, strict=True)
        }
        assert self.optimizer is not None  # `start` was called
        return [gradient_by_id[id(parameter)] for group in self.optimizer.param_groups for parameter in group["params"]]

    def optimizer_step(self, step: Callable[[], object], active: int) -> object:
        """Step the optimizer. Undo the step for finished clients, which come after the first ``active`` clients."""
        finished_params = {name: p.detach()[active:].clone() for name, p in self.params.items() if active < len(p)}
        result = step()
        for name, value in finished_params.items():
            self.params[name].data[active:] = value
        return result

    def finish(self) -> LocalResult:
        """Return the clients' states, and their unchanged method states."""
        states = {**self.params, **self.untrained_state}
        uploads = {name: states[name].detach() for name in self._received if name in states}
        self.optimizer, self.params = None, {}
        return LocalResult(uploads, self._kept, has_finite_loss=self.has_finite_loss, step_losses=self.step_losses)


def stack(rows: Sequence[Mapping[str, Tensor]]) -> State:
    """Return the states of several clients as one state. Each tensor has shape (clients, ...)."""
    if all(row is rows[0] for row in rows):
        return {name: value.expand(len(rows), *value.shape) for name, value in rows[0].items()}
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def by_columns(matrices: Tensor) -> Tensor:
    """Return matrices of shape (clients, rows, columns) with each matrix in column-major memory order."""
    distinct_matrices = matrices[0] if matrices.stride(0) == 0 else matrices
    return distinct_matrices.mT.contiguous().mT.expand(matrices.shape)


def _check_alike(method: MethodBase, clients: Sequence[ClientRound], memories: Sequence[StateSection]) -> None:
    """Raise InvalidValueError if the states of a method have different names or shapes for different clients.

    A vectorized step would ignore tensors that only some clients have.
    """
    # Each client may have a different number of replay samples.
    if overrides_hook(method, "replay_samples"):
        return
    shapes = [{name: value.shape for name, value in memory.items()} for memory in memories]
    for client_round, other in zip(clients, shapes, strict=True):
        for name in sorted({*shapes[0], *other}):
            if shapes[0].get(name) != other.get(name):
                raise InvalidValueError(
                    f"Expected the client states of `{type(method).__name__}` to have the same entries for all clients "
                    f"of a vectorized step, but `{name}` differs between client {clients[0].client_id} and client "
                    f"{client_round.client_id}.",
                    hint="Return entries with the same names and shapes in `prepare_client_state`, or set "
                    "`vectorizable = False`.",
                    argument=f"{type(method).__name__}",
                    code=INVALID_HOOK,
                )


def stack_common(rows: Sequence[StateSection]) -> StateSection:
    """Return the method states of several clients as one stacked state, with only the tensors that have equal shapes.

    Replay samples are left out if their number differs between clients. `DrawnSamples` and `JoiningSamples` add these
    samples to a step.
    """
    common = [name for name in rows[0] if all(name in row and row[name].shape == rows[0][name].shape for row in rows)]
    return {name: torch.stack([row[name] for row in rows]) for name in common}
