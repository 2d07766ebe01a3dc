"""What methods share that correct a mean of uploads, as SCAFFOLD, FedDyn, FedNova, FOT and RegMean do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import lightning.pytorch as L

from lightning_fcl.errors import quoted
from lightning_fcl.federation.aggregation import Reduction, State, reductions_of
from lightning_fcl.federation.fedbuff import FedBuff
from lightning_fcl.federation.protocol import federation_of, need_federation
from lightning_fcl.methods.compose import methods_of
from lightning_fcl.methods.declaration import Needs, overriding
from lightning_fcl.methods.method import Method


def reductions_in_use(module: L.LightningModule) -> dict[str, Reduction]:
    """How a module's entries come together in the fit at hand, by name."""
    federation = federation_of(module.trainer)
    return reductions_of(module, federation.strategy.rules if federation is not None else {})


def averaged_parameters(module: L.LightningModule) -> State:
    """The trainable parameters that a federation's clients receive and send, by name; its own stay with each."""
    of = reductions_in_use(module)
    return {n: p.detach() for n, p in module.named_parameters() if p.requires_grad and of[n].up and of[n].down}


def gradient_weight(group: Mapping[str, Any], steps: int) -> float:
    """The weights of all gradients in so many steps of SGD, added up: their number, and more with momentum.

    The ``||a||_1`` of Wang et al. 2020; of the groups of other optimizers it is the number of steps.

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


def need_uniform_weights(trainer: L.Trainer, name: str) -> None:
    """Refuse a federation in whose mean some clients weigh more than others."""
    federation = need_federation(trainer, name, "it has no clients")
    if federation.server.client_weights != "uniform" and len(federation.stream.plan.clients) > 1:
        raise ValueError(
            f'Expected `client_weights="uniform"` for `{name}`, in whose correction all clients count alike, but got '
            f"{federation.server.client_weights!r}. Give it to the strategy."
        )


class MovesServer(Method):
    """A method of all clients whose `server_turn` moves the model on from the mean of uploads."""

    needs: ClassVar[Needs] = Needs(federation="no server brings uploads together. Use the strategy")

    def prepare(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        federation = need_federation(trainer, type(self).__name__, self.needs.federation)
        methods = methods_of(trainer)
        before = [type(one).__name__ for one in overriding(methods[: methods.index(self)], "server_turn")]
        unfit = {
            f"`clients={self.clients}`": self.clients != "all",
            "a `Swarm` whose nodes may miss it": federation.participation.may_miss,
            "a `FedBuff`": isinstance(federation.participation.schedule, FedBuff),
            "a `server_optimizer`": federation.server.optimizer_settings is not None,
            f"{quoted(before)} before it": bool(before),
        }
        for got in (what for what, there in unfit.items() if there):
            raise ValueError(
                f"Expected a server that goes to the mean of what all clients have trained from its model, for "
                f"`{type(self).__name__}`, which moves it from there, but got {got}. Leave one out."
            )
