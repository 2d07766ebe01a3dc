"""Local training of many clients at once: their parameters are stacked, and a step is one for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_fcl.data.batches import Batch
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.protocol import Vectorizable
from lightning_fcl.local.stacked import StackedTrainer
from lightning_fcl.local.traced import TracedStep, is_traceable
from lightning_fcl.methods.declaration import Declaration
from lightning_fcl.methods.random_layers import KeyedRandomness


class VectorizedTrainer(StackedTrainer):
    """Trains several clients' copies of one module, stacked.

    The clients' batches are padded where they are unequal, and nothing is computed for those that are done, which stay
    as they are. It is the same training as that of one client after the other, up to the rounding of batched products.

    Args:
        module: The module, which states its loss apart.
        methods: As for `StackedTrainer`, and so are the others.
    """

    def __init__(
        self,
        module: L.LightningModule,
        methods: Sequence[Declaration],
        optimizer: Optimizer,
        clients_at_once: int,
        seed: int,
    ) -> None:
        super().__init__(module, methods, optimizer, clients_at_once, seed)
        self._loss = _vectorizable(module)
        self._traceable = is_traceable(module)
        self._traced: dict[tuple[str, ...], TracedStep] = {}  # of the parameters that learn
        self._known: Sequence[Tensor | None] | None = None  # the gradients of the step

    def training_step(self, batch: Batch, batch_idx: int | None, weight: Tensor | None) -> Tensor:
        assert weight is not None  # batches are stacked
        x, y = batch
        clients, keys = self._clients, _first(len(weight), self._clients.next_keys(x.device))
        self._known = None
        if clients.methods or not self._traceable:
            losses, task_losses = self.losses(x, y, weight, keys)
        else:
            learning = tuple(clients.params)
            plain = partial(self._plain_step, learning, tuple(clients.rest))
            step = self._traced.setdefault(learning, TracedStep(plain))
            known = step(list(clients.params.values()), list(clients.rest.values()), [keys, x, y, weight])
            losses, task_losses, *self._known = known
        clients.saw(losses)
        samples = (weight > 0).sum(dim=1)
        self._loss.count_loss((task_losses.detach() * samples).sum(), int(samples.sum()))
        return losses.sum()

    def gradients(self, loss: Tensor) -> Sequence[Tensor | None]:
        known = self._known
        if known is None:
            # Not `loss.backward()`, which copies each gradient that does not lie in memory as its parameter does.
            known = torch.autograd.grad(loss, list(self._clients.params.values()), allow_unused=True)
        return self._clients.in_order(known)

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
        state = _first(len(weight), dict(zip((*learning, *others), (*params, *rest), strict=True)))
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
        """Each client's loss on its own batch, and its task loss alone, of those that have one, shape (clients,).

        Args:
            x: Inputs, shape (clients, batch, ...).
            y: Targets, shape (clients, batch, ...).
            weight: Share of each sample in its client's mean, shape (clients, batch).
            keys: What each client's random layers draw by, shape (clients,).
            randomness: What other random layers do: see `torch.func.vmap`.
        """
        clients = self._clients
        params, rest = _first(len(weight), dict(clients.params)), _first(len(weight), clients.rest)
        if not clients.methods:
            task = self._task_losses(self._outputs({**params, **rest}, keys, x, randomness), y, weight)
            return task, task
        known = _first(len(weight), clients.known(weight.device))
        with sdpa_kernel(SDPBackend.MATH):
            outputs, scale, extra = vmap(self._client_output, randomness=randomness)(
                params, rest, known, keys, x, y, weight
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
        known: Mapping[str, Any],
        key: Tensor,
        x: Tensor,
        y: Tensor,
        weight: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One client's output, the factor of its task loss, and what its methods add."""
        with KeyedRandomness(key):
            output: Tensor = functional_call(self._module, {**params, **rest}, (x,))
            scale, extra = self._clients.composed(params, rest, known, x, output, y, weight)
        return output, scale, extra


def _first(clients: int, values: Any) -> Any:
    """Of the first so many clients what is stacked in any nest of lists and dicts."""
    return tree_map(lambda value: value if len(value) == clients else value[:clients], values)


def _vectorizable(module: nn.Module) -> Vectorizable:
    if not isinstance(module, Vectorizable):
        raise ValueError(
            f"Expected a module that states its loss apart, as `Classifier` does, but got a `{type(module).__name__}`."
        )
    return module
