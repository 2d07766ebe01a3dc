"""APFL and Ditto: a personal model beside the shared one, mixed with it by a learnt weight, or drawn to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fcl.data.batches import Batch
from lightning_fcl.errors import InvalidValueError, argument, at_least, between
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.federation.optimizers import (
    group_values,
    optimizer_memory,
    restore_optimizer,
    set_group_values,
    with_parameters,
)
from lightning_fcl.methods.client import Client, remember, section
from lightning_fcl.methods.functional import gradient_of, step_along, stepped_by, trainable
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.needs import Needs
from lightning_fcl.methods.projection import flatten


@dataclass(eq=False)
class APFL(Method):
    """Every step: a personal model ``v`` and its weight ``alpha`` learn beside the shared ``w`` (Deng et al. 2020).

    ``w`` travels and trains as without it. With ``v_bar = alpha v + (1 - alpha) w`` and g the gradient of the task
    loss at ``v_bar`` on the step's batch, remembered samples included, ``v`` takes a step with ``alpha g`` and
    ``alpha`` one with ``<v - w, g>`` (Algorithm 1 and eq. 10); ``alpha`` is clipped to [0, 1]. A client predicts with
    ``v_bar`` of its ``v`` and the server's ``w``: `personalize`, which ``ContinualMetrics(when="aggregated")`` tests.
    ``v`` holds trainable parameters; buffers are those of ``w``.

    ``v`` has an optimizer like that of ``w``, while the paper has SGD. Clients train one at a time; a step costs two
    forward and backward passes in place of one.

    Args:
        alpha0: What ``alpha`` begins with, from 0 to 1.
        alpha_lr: Step size of ``alpha``; None: the optimizer's learning rate, as in the paper; 0: ``alpha`` is fixed.

    Raises:
        ValueError: If an argument is out of range, the Trainer is no federation's, or the module does not state its
            loss apart.

    Example:
        >>> APFL(alpha0=0.5).alpha0
        0.5
    """

    vectorizable: ClassVar[bool] = False
    needs: ClassVar[Needs] = Needs(
        labels=True, loss=True, federation="with a single client there is no shared model to mix with. Remove `APFL`"
    )

    alpha0: float = argument(0.5, between, 0, 1)
    alpha_lr: float | None = argument(None, at_least, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._trainable: list[str] = []
        self._personal: dict[str, nn.Parameter] = {}  # of the client that trains now
        self._optimizer: Optimizer | None = None

    def prepare(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.accumulate_grad_batches != 1:
            raise InvalidValueError(
                f"Expected `accumulate_grad_batches=1` for `{type(self).__name__}`, whose personal model steps with "
                f"each batch, but got {trainer.accumulate_grad_batches}.",
                hint="Raise the stream's `batch_size` instead.",
                argument="accumulate_grad_batches",
                value=trainer.accumulate_grad_batches,
            )
        self._trainable = [*trainable(pl_module)]

    def on_download(self, client: Client) -> Memory:
        if not client.active:
            return client.memory
        own = {**client.server, **section(client.memory, "v")}
        begun = remember({name: own[name] for name in self._trainable}, "v")
        alpha = client.memory.get("alpha", torch.tensor(float(self.alpha0)))
        return {**client.memory, **begun, "alpha": alpha.clone()}

    def begin(self, client: Client) -> None:
        self._personal, self._optimizer = {}, None

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        client, shared = self.client, stepped_by(optimizer, pl_module)
        if not (client.active and shared):
            return
        if self._optimizer is None:
            self._optimizer = self._begun(client, optimizer)
        own = {name: self._personal[name].detach() for name in shared}
        alpha = client.memory["alpha"]
        gradient = gradient_of(pl_module, shared)(*client.batch, mix(own, shared, alpha))
        if not torch.isfinite(gradient.sum()):
            return  # what a client keeps must stay of use; one that diverges is the federation's to refuse
        towards = flatten(own) - flatten(shared).detach()
        set_group_values(self._optimizer, group_values(optimizer))  # a schedule's
        along = alpha * gradient + self.pull(client, own)
        step_along(pl_module, self._optimizer, {name: self._personal[name] for name in shared}, along)
        rate = optimizer.param_groups[0]["lr"] if self.alpha_lr is None else self.alpha_lr
        alpha.sub_(rate * (towards @ gradient)).clamp_(0, 1)

    def pull(self, client: Client, own: State) -> Tensor | float:
        """What is added to the gradient that the parameters ``own`` of ``v`` step with, as one vector."""
        return 0.0

    def _begun(self, client: Client, optimizer: Optimizer) -> Optimizer:
        """An optimizer like the client's own, for ``v``, which it changes in place in the memory."""
        self._personal = {name: nn.Parameter(value) for name, value in section(client.memory, "v").items()}
        named = dict(client.module.named_parameters())
        own = with_parameters(optimizer, {id(named[name]): p for name, p in self._personal.items()})
        restore_optimizer(own, section(client.memory, "optimizer"))
        return own

    def end_round(self, client: Client, own: State, data: Batch) -> Memory:
        assert client.federation is not None  # as it needs one
        if not client.federation.settings.keep_optimizer or self._optimizer is None:
            return client.memory
        return {**client.memory, **remember(optimizer_memory(self._optimizer), "optimizer")}

    def personalize(self, client: Client, state: State) -> State:
        own = {name: value.to(state[name].device) for name, value in section(client.memory, "v").items()}
        return {**state, **mix(own, state, client.memory["alpha"])} if own else state


@torch.no_grad()
def mix(personal: Mapping[str, Tensor], shared: Mapping[str, Tensor], alpha: Tensor) -> State:
    """``alpha v + (1 - alpha) w`` of the entries of ``personalize``; exactly w at 0 and v at 1."""
    return {name: torch.lerp(shared[name], v, alpha.to(v.device, v.dtype)) for name, v in personal.items()}


@dataclass(eq=False)
class Ditto(APFL):
    """Every step: a personal model ``v`` learns the task near the server's model (Li et al. 2021, Algorithm 1).

    The shared ``w`` travels and trains as without it. On each batch ``v``, too, takes a step, by an optimizer like that
    of ``w``, along the gradient of ``task loss + strength / 2 * ||v - w_server||^2``, of which w_server is what the
    client has received: `APFL` with a mixture of ``v`` alone, and a pull. A client begins with ``v`` where it is in its
    first round, predicts with it, as `APFL` says, keeps it, and sends what FedAvg sends.

    Args:
        strength: Weight (lambda) of the distance, at least 0; with 0, ``v`` learns from the client's data alone.

    Raises:
        ValueError: If ``strength`` is negative, or for what `APFL` raises it.

    Example:
        >>> Ditto(strength=0.1).alpha0
        1.0
    """

    needs: ClassVar[Needs] = Needs(
        labels=True, loss=True, federation="with a single client there is no shared model to stay near. Remove `Ditto`"
    )

    alpha0: float = field(default=1.0, init=False)
    alpha_lr: float | None = field(default=0.0, init=False)
    strength: float = argument(0.1, at_least, 0)

    def pull(self, client: Client, own: State) -> Tensor:
        return self.strength * (flatten(own) - flatten({name: client.server[name] for name in own}))
