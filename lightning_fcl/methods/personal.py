"""A client's second model, which trains beside the shared one and stays with the client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fcl.data.batches import Batch
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.federation.optimizer_state import (
    group_values,
    optimizer_memory,
    restore_optimizer,
    set_group_values,
    with_parameters,
)
from lightning_fcl.federation.protocol import federation_of
from lightning_fcl.methods.client import Client, remember, section
from lightning_fcl.methods.functional import GradientOf, gradient_of, step_along
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.step import stepped_by


@dataclass(eq=False)
class PersonalModel(Method):
    """Every step: a personal model ``v`` takes one of its own, beside that of the shared ``w``, which trains as usual.

    ``v`` holds the trainable parameters, begins as what a client receives in its first round, and has an optimizer like
    that of ``w``, which lasts where the strategy has ``keep_optimizer``. Clients train one at a time.
    """

    vectorizable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._trainable: list[str] = []
        self._keeps = False
        self._personal: dict[str, nn.Parameter] = {}  # of the client that trains now
        self._optimizer: Optimizer | None = None

    def personal_gradient(
        self, client: Client, own: State, shared: Mapping[str, nn.Parameter], gradient_of: GradientOf
    ) -> Tensor:
        """The gradient that ``v`` steps with, as one vector.

        Args:
            client: The client.
            own: ``v``: those of its parameters that step.
            shared: The same ones of ``w``.
            gradient_of: The gradient of the task loss of these: see `GradientOf`.
        """
        raise NotImplementedError

    def prepare(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.accumulate_grad_batches != 1:
            raise ValueError(
                f"Expected `accumulate_grad_batches=1` for `{type(self).__name__}`, whose personal model steps with "
                f"each batch, but got {trainer.accumulate_grad_batches}. Raise the stream's `batch_size` instead."
            )
        self._trainable = [name for name, p in pl_module.named_parameters() if p.requires_grad]
        federation = federation_of(trainer)
        self._keeps = federation is not None and federation.strategy.keep_optimizer

    def on_download(self, client: Client) -> Memory:
        if not client.active:
            return client.memory
        own = {**client.server, **section(client.memory, "v")}
        return {**client.memory, **remember({name: own[name] for name in self._trainable}, "v")}

    def begin(self, client: Client) -> None:
        self._personal, self._optimizer = {}, None

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        client, shared = self.client, stepped_by(optimizer, pl_module)
        if not (client.active and shared):
            return
        if self._optimizer is None:
            self._optimizer = self._begun(client, optimizer)
        own = {name: self._personal[name].detach() for name in shared}
        gradient = self.personal_gradient(client, own, shared, gradient_of(pl_module, shared))
        if not torch.isfinite(gradient.sum()):
            return  # what a client keeps must stay of use; one that diverges is the federation's to refuse
        set_group_values(self._optimizer, group_values(optimizer))  # a schedule's
        step_along(pl_module, self._optimizer, {name: self._personal[name] for name in shared}, gradient)

    def _begun(self, client: Client, optimizer: Optimizer) -> Optimizer:
        """An optimizer like the client's own, for ``v``, which it changes in place in the memory."""
        self._personal = {name: nn.Parameter(value) for name, value in section(client.memory, "v").items()}
        named = dict(client.module.named_parameters())
        own = with_parameters(optimizer, {id(named[name]): p for name, p in self._personal.items()})
        restore_optimizer(own, section(client.memory, "optimizer"))
        return own

    def end_round(self, client: Client, own: State, data: Batch) -> Memory:
        if not self._keeps or self._optimizer is None:
            return client.memory
        return {**client.memory, **remember(optimizer_memory(self._optimizer), "optimizer")}
