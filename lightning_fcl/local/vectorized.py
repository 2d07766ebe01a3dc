"""Local training of many clients at once: their parameters are stacked, and a step is one for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from lightning_fcl.data.batches import Batch
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.federation.aggregation import State, entries
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.federation.local_training import Trained
from lightning_fcl.federation.optimizer_state import group_values, set_group_values, with_parameters
from lightning_fcl.federation.protocol import Vectorizable
from lightning_fcl.local.sequential import client_keys, step_keys
from lightning_fcl.local.traced import TracedStep, is_traceable
from lightning_fcl.methods.client import Client
from lightning_fcl.methods.compose import compose
from lightning_fcl.methods.declaration import Declaration, Recalls, client_of, overrides, shapes_loss
from lightning_fcl.methods.functional import Embedding, SampleLoss, teacher_of
from lightning_fcl.methods.random_layers import KeyedRandomness, without_advancing
from lightning_fcl.methods.recalls import Recalled
from lightning_fcl.methods.step import Step


class VectorizedTrainer:
    """Trains several clients' copies of one module, stacked.

    The clients' batches are padded where they are unequal, and those that are done stay as they are. It is the same
    training as that of one client after the other, up to the rounding of batched products.

    Args:
        module: The module, which states its loss apart; its own parameters are not touched.
        methods: The methods of its Trainer.
        optimizer: The module's optimizer: its class and options are those of the stacked one.
        clients_at_once: How many clients train side by side.
        seed: Seed of what methods recall.
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
        self._module = module
        self._loss = _vectorizable(module)
        self._all_methods = methods
        self._template = optimizer
        self._seed = seed
        self._made: dict[int, tuple[dict[str, nn.Parameter], Optimizer]] = {}
        self._params: dict[str, nn.Parameter] = {}
        self._traceable = is_traceable(module)
        self._traced: dict[tuple[str, ...], TracedStep] = {}  # of the parameters that learn
        self._known: Sequence[Tensor | None] | None = None  # the gradients of the step
        self._step = 0

    def begin(
        self,
        clients: Sequence[ClientRound],
        states: Sequence[State],
        memories: Sequence[Sequence[Memory]],
        optimizers: Sequence[Memory],
    ) -> None:
        self._received, self._step = stack(states), 0
        self._params, self.optimizer = self._parameters(len(states))
        self._finite = torch.tensor(True)
        own = set(entries(self._module))
        self._rest = {n: v.clone() for n, v in self._received.items() if n in own and n not in self._params}
        self._kept = memories
        self._keys = client_keys(self._seed, clients, "layers")
        self._begin_methods(clients)

    def _parameters(self, clients: int) -> tuple[dict[str, nn.Parameter], Optimizer]:
        """So many clients' parameters, as they have received them, and their optimizer: both are used again."""
        trainable = {name for name, p in self._module.named_parameters() if p.requires_grad}
        values = {name: value for name, value in self._received.items() if name in trainable}
        params, optimizer = self._made.get(clients, ({}, self._template))
        if {n: p.shape for n, p in params.items()} == {n: v.shape for n, v in values.items()}:
            with torch.no_grad():
                torch._foreach_copy_(list(params.values()), list(values.values()))
            optimizer.state.clear()
            set_group_values(optimizer, group_values(self._template))  # a rate may change
            return params, optimizer
        params = {name: nn.Parameter(value.clone()) for name, value in values.items()}
        twins = {id(p): params[name] for name, p in self._module.named_parameters() if name in params}
        self._made[clients] = params, with_parameters(self._template, twins)
        return self._made[clients]

    def _begin_methods(self, clients: Sequence[ClientRound]) -> None:
        """Stack what the methods remember that any of the clients uses."""
        device = next(iter(self._params.values())).device
        applies = [[method.applies_to(part) for part in clients] for method in self._all_methods]
        shaping = [
            any(on and shapes_loss(method, Client(own[i])) for on, own in zip(applies[i], self._kept, strict=True))
            for i, method in enumerate(self._all_methods)
        ]
        used = [i for i, shapes in enumerate(shaping) if shapes]
        self._methods = [self._all_methods[i] for i in used]
        for i in used:
            _check_alike(self._all_methods[i], clients, [own[i] for own in self._kept])
        self._memories = [stack_common([own[i] for own in self._kept]) for i in used]
        self._applies = [torch.tensor(applies[i], dtype=torch.float32, device=device) for i in used]
        each = [[Client(own[i]) for i in used] for own in self._kept] if used else []
        self._recalls = Recalled(self._methods, each, partial(client_keys, self._seed, clients, "recall"))

    def training_step(self, batch: Batch, batch_idx: int | None, weight: Tensor | None) -> Tensor:
        assert weight is not None  # batches are stacked
        x, y = batch
        keys = step_keys(self._keys, self._step).to(x.device)
        self._step += 1
        self._known = None
        if self._methods or not self._traceable:
            losses, task_losses = self.losses(x, y, weight, keys)
        else:
            learning = tuple(self._params)
            step = self._traced.setdefault(learning, TracedStep(partial(self._plain_step, learning, tuple(self._rest))))
            known = step(list(self._params.values()), list(self._rest.values()), [keys, x, y, weight])
            losses, task_losses, *self._known = known
        self._finite = self._finite.to(losses.device) & losses.detach().isfinite()
        samples = (weight > 0).sum(dim=1)
        self._loss.count_loss((task_losses.detach() * samples).sum(), int(samples.sum()))
        return losses.sum()

    def gradients(self, loss: Tensor) -> Sequence[Tensor | None]:
        """The clients' gradients, stacked, in the optimizer's order, which need not be the module's."""
        params, known = list(self._params.values()), self._known
        if known is None:
            # Not `loss.backward()`, which copies each gradient that does not lie in memory as its parameter does.
            known = torch.autograd.grad(loss, params, allow_unused=True)
        of = {id(parameter): gradient for parameter, gradient in zip(params, known, strict=True)}
        assert self.optimizer is not None  # clients have begun
        return [of[id(parameter)] for group in self.optimizer.param_groups for parameter in group["params"]]

    def _plain_step(
        self,
        learning: Sequence[str],
        others: Sequence[str],
        params: list[Tensor],
        rest: list[Tensor],
        batch: list[Tensor],
    ) -> list[Tensor | None]:
        """Every client's loss, once more as its task loss, and the gradients: a step without methods."""
        keys, x, y, weight = batch
        state = dict(zip((*learning, *others), (*params, *rest), strict=True))
        losses = self._task_losses(self._outputs(state, keys, x, "different"), y, weight)
        gradients = torch.autograd.grad(losses.sum(), params, allow_unused=True)
        return [losses.detach(), losses.detach(), *gradients]

    def _outputs(self, state: State, keys: Tensor, x: Tensor, randomness: str) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # vmap runs the fused kernels client by client
            outputs: Tensor = vmap(self._output, randomness=randomness)(state, keys, x)
        return outputs

    def _task_losses(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Outside of vmap, on the samples of all clients in a row, the loss is a single call."""
        samples = self._loss.sample_loss(outputs.flatten(0, 1), y.flatten(0, 1)).view_as(weight)
        return (samples * weight).sum(dim=1)

    def losses(
        self, x: Tensor, y: Tensor, weight: Tensor, keys: Tensor, randomness: str = "different"
    ) -> tuple[Tensor, Tensor]:
        """Every client's loss on its own batch, and its task loss alone, both of shape (clients,).

        Args:
            x: Inputs, shape (clients, batch, ...).
            y: Targets, shape (clients, batch, ...).
            weight: Share of each sample in its client's mean, shape (clients, batch).
            keys: What each client's random layers draw by, shape (clients,).
            randomness: What other random layers do: see `torch.func.vmap`.
        """
        if not self._methods:
            task = self._task_losses(self._outputs({**self._params, **self._rest}, keys, x, randomness), y, weight)
            return task, task
        with sdpa_kernel(SDPBackend.MATH):
            outputs, scale, extra = vmap(self._client_output, randomness=randomness)(
                dict(self._params),
                self._rest,
                self._received,
                self._memories,
                self._applies,
                *self._recalled(weight),
                keys,
                x,
                y,
                weight,
            )
        task = self._task_losses(outputs, y, weight)
        return scale * task + extra, task

    def _output(self, state: State, key: Tensor, x: Tensor) -> Tensor:
        """One client's output."""
        with KeyedRandomness(key):
            output: Tensor = functional_call(self._module, state, (x,))
        return output

    def _client_output(
        self,
        params: Mapping[str, Tensor],
        rest: State,
        received: State,
        memories: list[Memory],
        applies: list[Tensor],
        recalled: list[Mapping[str, Tensor]],
        there: list[Tensor],
        key: Tensor,
        x: Tensor,
        y: Tensor,
        weight: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One client's output, the factor of its task loss, and what its methods add."""
        state = {**params, **rest}

        def outputs(x: Tensor) -> Tensor:
            with without_advancing():
                result: Tensor = functional_call(self._module, state, (x,))
            return result

        def features(x: Tensor) -> Tensor:
            named = {f"{Embedding.prefix}{name}": value for name, value in state.items()}
            with without_advancing():
                result: Tensor = functional_call(Embedding(self._module), named, (x,))
            return result

        def loss_of(
            x: Tensor, y: Tensor, params: Mapping[str, Tensor] | None = None, loss: SampleLoss | None = None
        ) -> Tensor:
            with without_advancing():
                output = functional_call(self._module, {**state, **(params or {})}, (x,))
            return (loss or self._loss.sample_loss)(output, y).mean()

        with KeyedRandomness(key):
            output, one = functional_call(self._module, state, (x,)), torch.ones((), device=weight.device)
            step = Step(params, received, x, output, teacher_of(self._module), outputs, features, loss_of, weight, y)
            steps = [
                replace(step, recalled=samples, recalled_weight=real)
                for samples, real in zip(recalled, there, strict=True)
            ]
            alike = [
                client_of(method, self._module, memory, received)
                for method, memory in zip(self._methods, memories, strict=True)
            ]
            scale, extra = compose(self._methods, alike, steps, one * 0, applies)
        return output, one * scale, extra

    def _recalled(self, weight: Tensor) -> tuple[list[Mapping[str, Tensor]], list[Tensor]]:
        """The remembered samples of this step, method by method and stacked, and for which clients they are real."""
        recalled: list[Mapping[str, Tensor]] = []
        there: list[Tensor] = []
        for method in self._methods:
            if method.section not in self._recalls.pools:
                recalled.append({})
                there.append(weight.new_zeros(len(weight)))
                continue
            rows = self._recalls.draw(method.section)
            like = next((row for row in rows if row), {})
            full = [row or {name: torch.zeros_like(value) for name, value in like.items()} for row in rows]
            recalled.append({name: torch.stack([row[name] for row in full]).to(weight.device) for name in like})
            there.append(torch.tensor([float(bool(row)) for row in rows], device=weight.device))
        return recalled, there

    def optimizer_step(self, step: Callable[[], object], active: int) -> object:
        """Step, and undo the step for the clients that were done before it."""
        done = {name: p.detach()[active:].clone() for name, p in self._params.items() if active < len(p)}
        result = step()
        for name, value in done.items():
            self._params[name].data[active:] = value
        return result

    def finish(self) -> Trained:
        """The clients' states, and their memories as they were."""
        states = {**self._params, **self._rest}
        uploads = {name: states[name].detach() for name in self._received if name in states}
        self.optimizer, self._params = None, {}
        return Trained(uploads, self._kept, finite=self._finite)


def _vectorizable(module: nn.Module) -> Vectorizable:
    if not isinstance(module, Vectorizable):
        raise ValueError(
            f"Expected a module that states its loss apart, as `Classifier` does, but got a `{type(module).__name__}`."
        )
    return module


def stack(rows: Sequence[Mapping[str, Tensor]]) -> State:
    """Several clients' states as one, every entry of shape (clients, ...)."""
    if all(row is rows[0] for row in rows):
        return {name: value.expand(len(rows), *value.shape) for name, value in rows[0].items()}
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _check_alike(method: Declaration, clients: Sequence[ClientRound], memories: Sequence[Memory]) -> None:
    """Refuse memories of which a step would see what all clients have, and not what some have."""
    if isinstance(method, Recalls) or overrides(method, "rehearse"):
        return  # samples, of which each client may have another number
    shapes = [{name: value.shape for name, value in memory.items()} for memory in memories]
    for part, other in zip(clients, shapes, strict=True):
        for name in sorted({*shapes[0], *other}):
            if shapes[0].get(name) != other.get(name):
                raise ValueError(
                    f"Expected `{type(method).__name__}` to remember the same entries of each client, as several train "
                    f"side by side, but `{name}` differs between client {clients[0].client} and client {part.client}. "
                    "Let `on_download` fill in what is not there yet, or set `vectorizable = False`."
                )


def stack_common(rows: Sequence[Memory]) -> Memory:
    """Several clients' memories as one: the entries that all have, of equal shapes, every one of shape (clients, ...).

    Remembered samples, of which each client may have another number, are brought to a step by `Recalls`.
    """
    common = [name for name in rows[0] if all(name in row and row[name].shape == rows[0][name].shape for row in rows)]
    return {name: torch.stack([row[name] for row in rows]) for name in common}
