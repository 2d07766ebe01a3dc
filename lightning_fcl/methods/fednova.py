"""FedNova: a mean of what clients' steps were like, whatever their number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import lightning.pytorch as L
import torch

from lightning_fcl.data.batches import Batch
from lightning_fcl.federation.aggregation import State
from lightning_fcl.methods.averaging import MovesServer, averaged_parameters, gradient_weight
from lightning_fcl.methods.client import Client, Server


@dataclass(eq=False)
class FedNova(MovesServer):
    """Every round: clients send their mean step, so many steps are no more votes (Wang et al. 2020, arXiv 2007.07481).

    A client uploads ``x + (y - x) / tau_k``, x being what it has received, y what its training has left, and tau_k the
    `gradient_weight` of its steps. The server goes ``tau`` times as far as their mean, where ``tau`` is the mean of
    the tau_k, by the same weights: ``x + tau * sum_k p_k (y_k - x) / tau_k``. Where all take equally many steps that
    is FedAvg, which else finds the minimum of the losses weighted by ``p_k tau_k``. A client keeps nothing, and sends
    one number more than for FedAvg. Parameters that stay with the clients, and buffers, are left alone.

    Raises:
        ValueError: If no server goes to the mean of what all clients of a round have trained from its model.

    Example:
        >>> FedNova().reductions
        {}
    """

    vectorizable: ClassVar[bool] = True

    def server_state(self, module: L.LightningModule) -> State:
        return {"tau": torch.ones(())}

    def upload(self, client: Client, own: State) -> State:
        start, tau = client.server, _tau(client)
        return {**own, **{n: start[n] + (own[n] - start[n]) / tau for n in averaged_parameters(client.module)}}

    def contribute(self, client: Client, own: State, data: Batch) -> State:
        return {"tau": torch.tensor(_tau(client))}

    def server_turn(self, server: Server) -> State:
        mean, begun = averaged_parameters(server.module), server.begun
        return {name: begun[name] + server.kept["tau"] * (value - begun[name]) for name, value in mean.items()}


def _tau(client: Client) -> float:
    return gradient_weight(client.module.trainer.optimizers[0].param_groups[0], client.steps)
