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

from lightning_fcl.data.batches import Batch
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import State, entries
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.federation.local_training import Trained
from lightning_fcl.federation.optimizers import group_values, set_group_values, with_parameters
from lightning_fcl.local.sequential import client_keys, replay_keys, step_keys
from lightning_fcl.methods.client import Client, Step, zeros
from lightning_fcl.methods.compose import compose
from lightning_fcl.methods.declaration import Declaration, client_of, overrides, shapes_loss
from lightning_fcl.methods.functional import Embedding, SampleLoss, states_loss, teacher_of, trainable
from lightning_fcl.methods.random_layers import without_advancing
from lightning_fcl.methods.replay_samples import DrawnSamples


class StackedTrainer(ABC):
    """Trains several clients' copies of one module, every entry of shape (clients, ...): but for what a step is.

    Args:
        module: The module; its own parameters are not touched.
        methods: The methods of its Trainer.
        optimizer: The module's optimizer: its class and options are those of the stacked one.
        clients_at_once: How many clients train side by side.
        seed: Seed of random layers and replay samples.

    Attributes:
        params: What learns.
        rest: The other entries.
        methods: Those that change the loss of any of the clients at hand.
        finite: Whether each client's every loss was finite.
    """

    stacked = True

    def __init__(
        self,
        module: L.LightningModule,
        methods: Sequence[Declaration],
        optimizer: Optimizer,
        clients_at_once: int,
        seed: int,
    ) -> None:
        self.clients_at_once = clients_at_once
        self.optimizer: Optimizer | None = None
        self.params: dict[str, nn.Parameter] = {}
        self.rest: State = {}
        self.methods: Sequence[Declaration] = ()
        self._module = module
        self._all_methods = methods
        self._template = optimizer
        self._seed = seed
        self._made: dict[int, tuple[dict[str, nn.Parameter], Optimizer]] = {}
        # Under vmap the gradients of linear layers lie in memory by columns: steps are faster where all else does.
        layers = (part for part in module.modules() if isinstance(part, nn.Linear))
        weights = {id(layer.weight) for layer in layers}
        self._by_columns = {name for name, value in entries(module).items() if id(value) in weights}

    def begin(
        self,
        clients: Sequence[ClientRound],
        states: Sequence[State],
        memories: Sequence[Sequence[Memory]],
        optimizers: Sequence[Memory],
    ) -> None:
        self.number, self._steps = len(states), 0
        received = stack(states)
        self._received = {n: by_columns(v) if n in self._by_columns else v for n, v in received.items()}
        self.params, self.optimizer = self._parameters(len(states))
        self.finite = torch.ones(self.number, dtype=torch.bool)
        own = set(entries(self._module))
        self.rest = {n: v.clone() for n, v in self._received.items() if n in own and n not in self.params}
        self._buffers = {name for name, _ in self._module.named_buffers()}
        self._kept = memories
        self._keys = client_keys(self._seed, clients, "layers")
        self._begin_methods(clients)

    def _parameters(self, clients: int) -> tuple[dict[str, nn.Parameter], Optimizer]:
        """So many clients' parameters, as they have received them, and their optimizer: both are used again."""
        learning = trainable(self._module)
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
            any(on and shapes_loss(method, Client(own[i])) for on, own in zip(applies[i], self._kept, strict=True))
            for i, method in enumerate(self._all_methods)
        ]
        used = [i for i, shapes in enumerate(shaping) if shapes]
        self.methods = [self._all_methods[i] for i in used]
        for i in used:
            _check_alike(self._all_methods[i], clients, [own[i] for own in self._kept])
        self._memories = [stack_common([own[i] for own in self._kept]) for i in used]
        self._applies = [torch.tensor(applies[i], dtype=torch.float32, device=device) for i in used]
        each = [[Client(own[i]) for i in used] for own in self._kept] if used else []
        self._drawn = DrawnSamples(self.methods, each, replay_keys(self._seed, clients))

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

    def known(self, device: torch.device) -> dict[str, Any]:
        """Return what the methods know of the clients in the next step, with the drawn replay samples, stacked."""
        replayed: list[Mapping[str, Tensor]] = []
        there: list[Tensor] = []
        for method in self.methods:
            if method.section not in self._drawn.pools:
                replayed.append({})
                there.append(torch.zeros(self.number, device=device))
                continue
            rows = self._drawn.draw(method.section)
            like = next((row for row in rows if row), {})
            full = [row or zeros(like) for row in rows]
            replayed.append({name: torch.stack([row[name] for row in full]).to(device) for name in like})
            there.append(torch.tensor([float(bool(row)) for row in rows], device=device))
        of_methods = {"memories": self._memories, "applies": self._applies, "replayed": replayed, "there": there}
        return {"received": dict(self._received), **of_methods}

    def composed(
        self,
        params: Mapping[str, Tensor],
        rest: State,
        known: Mapping[str, Any],
        x: Any,
        output: Tensor,
        y: Tensor | None,
        weight: Tensor | None = None,
        why: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Within vmap, the factor of one client's task loss, and what its methods add.

        Args:
            params: The client's parameters.
            rest: Its other entries.
            known: What its methods know, as `known` has it of all clients.
            x: Inputs of its batch.
            output: What the module made of them.
            y: Targets.
            weight: Share of every sample in the mean; None: equal shares.
            why: Why there are no ``x`` and ``output``, with a place for a method's name; None: there are.
        """

        def state() -> State:
            kept = {name: value.clone() if name in self._buffers else value for name, value in rest.items()}
            return {**params, **kept}

        def outputs(x: Any) -> Tensor:
            with without_advancing():
                result: Tensor = functional_call(self._module, state(), (x,))
            return result

        def features(x: Any) -> Tensor:
            named = {f"{Embedding.prefix}{name}": value for name, value in state().items()}
            with without_advancing():
                result: Tensor = functional_call(Embedding(self._module), named, (x,))
            return result

        def loss_of(
            x: Any, y: Any, params: Mapping[str, Tensor] | None = None, loss: SampleLoss | None = None
        ) -> Tensor:
            with without_advancing():
                output = functional_call(self._module, {**state(), **(params or {})}, (x,))
            return (loss or states_loss(self._module).sample_loss)(output, y).mean()

        received, one = known["received"], torch.ones((), device=output.device)
        step = Step(params, received, x, output, teacher_of(self._module), outputs, features, loss_of, weight, y)
        steps = [
            replace(step, replay_samples=samples, replay_weight=real)
            for samples, real in zip(known["replayed"], known["there"], strict=True)
        ]
        if why is not None:
            steps = [
                own.without_batch(why % type(method).__name__) for method, own in zip(self.methods, steps, strict=True)
            ]
        alike = [
            client_of(method, self._module, memory, received)
            for method, memory in zip(self.methods, known["memories"], strict=True)
        ]
        scale, extra = compose(self.methods, alike, steps, one * 0, known["applies"])
        return one * scale, extra

    def saw(self, losses: Tensor) -> None:
        """Note whether the losses of a step are finite, shape (clients,) or of fewer, which come first."""
        self.finite = self.finite.to(losses.device)
        self.finite[: len(losses)] &= losses.detach().isfinite()

    def in_order(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Gradients of `params`, in the optimizer's order, which need not be the module's."""
        # Each lies in memory as its parameter does: torch's fused optimizers take it for granted.
        of = {
            id(p): g if g is None or g.stride() == p.stride() else torch.empty_like(p).copy_(g)
            for p, g in zip(self.params.values(), gradients, strict=True)
        }
        assert self.optimizer is not None  # clients have begun
        return [of[id(parameter)] for group in self.optimizer.param_groups for parameter in group["params"]]

    def optimizer_step(self, step: Callable[[], object], active: int) -> object:
        """Step, and undo the step for the clients that were done before it."""
        done = {name: p.detach()[active:].clone() for name, p in self.params.items() if active < len(p)}
        result = step()
        for name, value in done.items():
            self.params[name].data[active:] = value
        return result

    def finish(self) -> Trained:
        """The clients' states, and their memories as they were."""
        states = {**self.params, **self.rest}
        uploads = {name: states[name].detach() for name in self._received if name in states}
        self.optimizer, self.params = None, {}
        return Trained(uploads, self._kept, finite=self.finite)


def stack(rows: Sequence[Mapping[str, Tensor]]) -> State:
    """Several clients' states as one, every entry of shape (clients, ...)."""
    if all(row is rows[0] for row in rows):
        return {name: value.expand(len(rows), *value.shape) for name, value in rows[0].items()}
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def by_columns(matrices: Tensor) -> Tensor:
    """The same matrices, shape (clients, rows, columns), each of which lies in memory column by column."""
    one = matrices[0] if matrices.stride(0) == 0 else matrices
    return one.mT.contiguous().mT.expand(matrices.shape)


def _check_alike(method: Declaration, clients: Sequence[ClientRound], memories: Sequence[Memory]) -> None:
    """Refuse memories of which a step would see what all clients have, and not what some have."""
    if overrides(method, "replay_samples"):
        return  # each client may have another number of replay samples
    shapes = [{name: value.shape for name, value in memory.items()} for memory in memories]
    for part, other in zip(clients, shapes, strict=True):
        for name in sorted({*shapes[0], *other}):
            if shapes[0].get(name) != other.get(name):
                raise InvalidValueError(
                    f"Expected `{type(method).__name__}` to remember the same entries of each client, as several "
                    f"train side by side, but `{name}` differs between client {clients[0].client} and client "
                    f"{part.client}.",
                    hint="Add the missing entries in `on_download`, or set `vectorizable = False`.",
                    argument=f"{type(method).__name__}",
                )


def stack_common(rows: Sequence[Memory]) -> Memory:
    """Several clients' memories as one: the entries that all have, of equal shapes, every one of shape (clients, ...).

    `DrawnSamples` and `JoiningSamples` bring replay samples to a step. Each client may have another number of them.
    """
    common = [name for name in rows[0] if all(name in row and row[name].shape == rows[0][name].shape for row in rows)]
    return {name: torch.stack([row[name] for row in rows]) for name in common}
