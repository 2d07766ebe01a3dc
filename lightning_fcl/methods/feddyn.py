"""FedDyn: local losses whose regulariser moves, so that all clients agree where the sum of their losses is least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_fcl.data.batches import Batch
from lightning_fcl.errors import argument, at_least
from lightning_fcl.federation.aggregation import Rules, State
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.methods.averaging import MovesServer, averaged_parameters, need_uniform_weights
from lightning_fcl.methods.client import Client, Server, remember, section
from lightning_fcl.methods.fedprox import proximal_term
from lightning_fcl.methods.importance import summed
from lightning_fcl.methods.step import Step


@dataclass(eq=False)
class FedDyn(MovesServer):
    """Every step: a proximal term, and a linear one that remembers where the client wants to go (Acar et al. 2021).

    ``task loss - <g_k, w> + alpha / 2 * ||w - w_server||^2`` (equation 1), where g_k is minus alpha times the sum of
    how far the client's rounds have moved w, ``w_k - w_server``. The server goes to the mean of the uploads, plus the
    sum of all these ways so far divided by the number of the stream's clients: ``- h / alpha`` of Algorithm 1. Where
    nobody moves any more, the g_k are the gradients of the clients' losses and add up to 0. A client keeps g_k, and
    sends what FedAvg sends. Parameters that stay with the clients are left alone.

    Args:
        alpha: Weight of both terms, at least 0; 0 is FedAvg.

    Raises:
        ValueError: If ``alpha`` is negative, or no server goes to the uniform mean of what clients have made of it.

    Example:
        >>> FedDyn(alpha=0.1).alpha
        0.1
    """

    reductions: ClassVar[Rules] = {"*": "fixed"}

    alpha: float = argument(0.01, at_least, 0)

    def prepare(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().prepare(trainer, pl_module)
        need_uniform_weights(trainer, "FedDyn")

    def server_state(self, module: L.LightningModule) -> State:
        averaged = averaged_parameters(module) if self.alpha else {}
        return {name: torch.zeros_like(value) for name, value in averaged.items()}

    def on_download(self, client: Client) -> Memory:
        return client.memory or remember({n: torch.zeros_like(way) for n, way in client.shared.items()}, "way")

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        if self.alpha == 0:
            return 0.0
        way = section(client.memory, "way")
        params = {name: value for name, value in step.params.items() if name in way}
        linear = summed(((way[name] * value).sum() for name, value in params.items()), step.params)
        return self.alpha * (linear + proximal_term(params, step.server))

    def end_round(self, client: Client, own: State, data: Batch) -> Memory:
        ways = section(client.memory, "way").items()
        return {f"way.{name}": way + (own[name] - client.server[name]) for name, way in ways}

    def server_turn(self, server: Server) -> State:
        """The mean, and all ways so far: those of this round are, over all clients, ``share`` of the mean's."""
        for name, way in server.kept.items():
            server.kept[name] = way.add(server.state[name] - server.begun[name], alpha=server.share)
        return {name: server.state[name] + way for name, way in server.kept.items()}
