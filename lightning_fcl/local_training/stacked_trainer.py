"""Clients that train side by side: their parameters and buffers, stacked, and what their methods remember."""

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
from lightning_fcl.methods.keyed_dropout import preserve_rng_state
from lightning_fcl.methods.replay_samples import DrawnSamples


class StackedTrainer(ABC):
    """Trains several clients' copies of one module, every entry of shape (clients, ...): but for what a step is.

    Args:
        module: The module; its own parameters are not touched.
        methods: The methods of its Trainer.
        optimizer: The module's optimizer: its class and options are those of the stacked one.
        num_vectorized_clients: How many clients train side by side.
        seed: Seed of random layers and replay samples.

    Attributes:
        params: What learns.
        untrained_state: The other entries.
        methods: Those that change the loss of any of the clients at hand.
        has_finite_loss: Whether each client's every loss was finite.
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
        # Under vmap the gradients of linear layers lie in memory by columns: steps are faster where all else does.
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
        module_names = set(state_tensors(self._module))
        self.untrained_state = {
            n: v.clone() for n, v in self._received.items() if n in module_names and n not in self.params
        }
        self._buffers = {name for name, _ in self._module.named_buffers()}
        self._kept = method_states
        self._keys = client_round_keys(self._seed, clients, "layers")
        self._begin_methods(clients)

    def _parameters(self, clients: int) -> tuple[dict[str, nn.Parameter], Optimizer]:
        """So many clients' parameters, as they have received them, and their optimizer: both are used again."""
        learning = trainable_parameters(self._module)
        values = {name: value for name, value in self._received.items() if name in learning}
        params, optimizer = self._made.get(clients, ({}, self._template))
        if {n: p.shape for n, p in params.items()} == {n: v.shape for n, v in values.items()}:
            with torch.no_grad():
                torch._foreach_copy_(list(params.values()), list(values.values()))
            optimizer.state.clear()
            set_group_values(optimizer, group_values(self._template))  # a rate may change
            return params, optimizer
        params = {name: nn.Parameter(value.clone()) for name, value in values.items()}  # which lie as the values do
        twins = {id(p): params[name] for name, p in self._module.named_parameters() if name in params}
        self._made[clients] = params, with_parameters(self._template, twins)
        return self._made[clients]

    def _begin_methods(self, clients: Sequence[ClientRound]) -> None:
        """Stack what the methods remember that any of the clients uses."""
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
        """The sum of the clients' losses."""

    @abstractmethod
    def gradients(self, loss: Tensor) -> Sequence[Tensor | None]:
        """The clients' gradients of the step whose loss is given, stacked, in the optimizer's order."""

    def next_keys(self, device: torch.device) -> Tensor:
        """What each client's random layers draw by in another step, shape (clients,)."""
        self._steps += 1
        return step_keys(self._keys, self._steps - 1).to(device)

    def method_inputs(self, device: torch.device) -> dict[str, Any]:
        """Return what the methods know of the clients in the next step, with the drawn replay samples, stacked."""
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
        """Within vmap, the factor of one client's task loss, and what its methods add.

        Args:
            params: The client's parameters.
            untrained_state: Its other entries.
            method_inputs: What its methods know, as `method_inputs` has it of all clients.
            x: Inputs of its batch.
            output: What the module made of them.
            y: Targets.
            weight: Share of every sample in the mean; None: equal shares.
            reason: Why there are no ``x`` and ``output``, with a place for a method's name; None: there are.
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
        """Note whether the losses of a step are finite, shape (clients,) or of fewer, which come first."""
        self.has_finite_loss = self.has_finite_loss.to(losses.device)
        self.has_finite_loss[: len(losses)] &= losses.detach().isfinite()

    def reorder_gradients(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Gradients of `params`, in the optimizer's order, which need not be the module's."""
        # Each lies in memory as its parameter does: torch's fused optimizers take it for granted.
        gradient_by_id = {
            id(p): g if g is None or g.stride() == p.stride() else torch.empty_like(p).copy_(g)
            for p, g in zip(self.params.values(), gradients, strict=True)
        }
        assert self.optimizer is not None  # clients have begun
        return [gradient_by_id[id(parameter)] for group in self.optimizer.param_groups for parameter in group["params"]]

    def optimizer_step(self, step: Callable[[], object], active: int) -> object:
        """Step, and undo the step for the clients that were done before it."""
        finished_params = {name: p.detach()[active:].clone() for name, p in self.params.items() if active < len(p)}
        result = step()
        for name, value in finished_params.items():
            self.params[name].data[active:] = value
        return result

    def finish(self) -> LocalResult:
        """The clients' states, and their memories as they were."""
        states = {**self.params, **self.untrained_state}
        uploads = {name: states[name].detach() for name in self._received if name in states}
        self.optimizer, self.params = None, {}
        return LocalResult(uploads, self._kept, has_finite_loss=self.has_finite_loss)


def stack(rows: Sequence[Mapping[str, Tensor]]) -> State:
    """Several clients' states as one, every entry of shape (clients, ...)."""
    if all(row is rows[0] for row in rows):
        return {name: value.expand(len(rows), *value.shape) for name, value in rows[0].items()}
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def by_columns(matrices: Tensor) -> Tensor:
    """The same matrices, shape (clients, rows, columns), each of which lies in memory column by column."""
    distinct_matrices = matrices[0] if matrices.stride(0) == 0 else matrices
    return distinct_matrices.mT.contiguous().mT.expand(matrices.shape)


def _check_alike(method: MethodBase, clients: Sequence[ClientRound], memories: Sequence[StateSection]) -> None:
    """Refuse memories of which a step would see what all clients have, and not what some have."""
    if overrides_hook(method, "replay_samples"):
        return  # each client may have another number of replay samples
    shapes = [{name: value.shape for name, value in memory.items()} for memory in memories]
    for client_round, other in zip(clients, shapes, strict=True):
        for name in sorted({*shapes[0], *other}):
            if shapes[0].get(name) != other.get(name):
                raise InvalidValueError(
                    f"Expected `{type(method).__name__}` to remember the same entries of each client, as several "
                    f"train side by side, but `{name}` differs between client {clients[0].client_id} and client "
                    f"{client_round.client_id}.",
                    hint="Add the missing entries in `prepare_client_state`, or set `vectorizable = False`.",
                    argument=f"{type(method).__name__}",
                )


def stack_common(rows: Sequence[StateSection]) -> StateSection:
    """Several clients' memories as one: the entries that all have, of equal shapes, every one of shape (clients, ...).

    `DrawnSamples` and `JoiningSamples` bring replay samples to a step. Each client may have another number of them.
    """
    common = [name for name in rows[0] if all(name in row and row[name].shape == rows[0][name].shape for row in rows)]
    return {name: torch.stack([row[name] for row in rows]) for name in common}
