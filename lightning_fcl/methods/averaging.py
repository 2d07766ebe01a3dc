"""What methods share that correct a mean of uploads: SCAFFOLD, FedDyn and FedNova."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import lightning.pytorch as L
import torch
from torch.optim import Optimizer

from lightning_fcl.federation.aggregation import State, reductions_of
from lightning_fcl.federation.protocol import federation_of, need_federation
from lightning_fcl.methods.client import Client
from lightning_fcl.methods.declaration import Needs
from lightning_fcl.methods.method import Method


def averaged_parameters(module: L.LightningModule) -> State:
    """The trainable parameters that a federation's clients receive and send, by name; its own stay with each."""
    federation = federation_of(module.trainer)
    of = reductions_of(module, federation.strategy.rules if federation is not None else {})
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    return {name: p.detach() for name, p in named if of[name].up and of[name].down}


def gradient_weight(group: Mapping[str, Any], steps: int) -> float:
    """The weights of all gradients in so many steps of SGD, added up: their number, and more with momentum.

    ``learning rate * gradient_weight`` is how far the steps go with a gradient of 1 each, the ``||a||_1`` of Wang et
    al. 2020 for SGD with momentum; without, and for the groups of other optimizers, it is the number of steps.

    Example:
        >>> gradient_weight({"lr": 0.1}, 3), gradient_weight({"momentum": 0.5}, 3)
        (3.0, 4.25)
    """
    total = velocity = 0.0
    momentum, nesterov = group.get("momentum", 0.0), group.get("nesterov", False)
    for _ in range(steps):
        velocity = momentum * velocity + 1
        total += 1 + momentum * velocity if nesterov else velocity
    return total


def optimizer_of(client: Client) -> Optimizer:
    """The module's own optimizer, whose settings are those of each client's."""
    federation = client.federation
    return federation.optimizers[0] if federation is not None else client.module.trainer.optimizers[0]


def need_uniform_weights(trainer: L.Trainer, name: str) -> None:
    """Refuse a federation in whose mean some clients weigh more than others."""
    weights = need_federation(trainer, name, "it has no clients").server.client_weights
    if weights != "uniform" and not (isinstance(weights, dict) and len({*weights.values()}) == 1):
        raise ValueError(
            f'Expected `client_weights="uniform"` for `{name}`, in whose correction all clients count alike, but got '
            f"{weights!r}. Give it to the strategy."
        )


class MovesServer(Method):
    """A method that moves the server's model on from the mean of a round's uploads, before anybody tests it.

    All clients use it.
    """

    needs: ClassVar[Needs] = Needs(federation="no server brings uploads together. Use the strategy")

    _begun: State  # the server's, before the round

    @abstractmethod
    def moved(self, begun: State, mean: State, kept: State, share: float) -> State:
        """Where the server goes.

        Args:
            begun: Its parameters when the round began: those that clients receive and send.
            mean: What the uploads of the round have come to.
            kept: The method's entries of `server_state`, to be changed in place.
            share: That of the stream's clients whose uploads they are.
        """

    def prepare(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.clients != "all":
            raise ValueError(
                f'Expected `clients="all"` for `{type(self).__name__}`, which corrects the mean of all, but got '
                f"{self.clients}. Leave it out."
            )

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begun = {name: value.clone() for name, value in averaged_parameters(pl_module).items()}

    @torch.no_grad()
    def on_round_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put the server's new parameters into the module, from where the next round begins."""
        federation = federation_of(trainer)
        if federation is None or not federation.server.record.trained:
            return
        mean, server = averaged_parameters(pl_module), federation.server
        share = len(server.record.trained) / len(federation.stream.plan.clients)
        for name, value in self.moved(self._begun, mean, server.kept_for(self.section), share).items():
            mean[name].copy_(value)


def missed(client: Client) -> bool:
    """Whether the client has trained, but what it sends does not arrive."""
    return client.federation is not None and client.part.client in client.federation.server.record.missed
