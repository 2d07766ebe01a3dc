"""DER++: remembered samples are rehearsed with the logits that the model had for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fcl.data.batches import Batch
from lightning_fcl.errors import argument, at_least
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.methods.client import Client
from lightning_fcl.methods.declaration import Needs
from lightning_fcl.methods.episodic import finite_pairs
from lightning_fcl.methods.functional import predictions
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.step import Step


@dataclass(eq=False)
class DERpp(Method):
    """Every step: holds logits of the past, and rehearses it (Buzzega et al. 2020, "Dark Experience", equation 6).

    ``task loss + alpha * ||f(x') - z'||^2 + beta * task loss(f(x''), y'')``: (x', z') and (x'', y'') are drawn from
    what the client remembers, each anew in every step, with replacement; z' are the logits of the client's own model
    when x' came in. As in the authors' code the squared distance is a mean over samples and classes. ``beta=0`` is DER.

    A client remembers a uniform choice of all samples that it has been offered (reservoir sampling): those of each
    round once, after its local training, with the logits of the model that it has just trained.

    Args:
        max_size: Samples that a client remembers, at least 1.
        alpha: Weight of the distance from the remembered logits, at least 0.
        beta: Weight of the remembered samples' task loss, at least 0.
        batch_size: Samples in each of the two draws of a step, at least 1.

    Raises:
        ValueError: If an argument is out of range, or the module does not state its loss apart.
        TypeError: If the samples are no pairs.

    Example:
        >>> DERpp(batch_size=16).recall_size
        32
    """

    needs: ClassVar[Needs] = Needs(loss=True)

    max_size: int = argument(200, at_least, 1)
    alpha: float = argument(0.1, at_least, 0)
    beta: float = argument(0.5, at_least, 0)
    batch_size: int = argument(32, at_least, 1)

    @property
    def recall_size(self) -> int:
        return 2 * self.batch_size

    def recall(self, client: Client) -> Mapping[str, Tensor]:
        return {name: client.memory[name] for name in ("x", "y", "logits") if name in client.memory}

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        if not step.recalled:
            return 0.0
        (first, second), (_, y), (logits, _) = (step.recalled[name].chunk(2) for name in ("x", "y", "logits"))
        output = step.outputs(first)
        distance = F.mse_loss(output, logits.to(output.device))
        return step.recalled_weight * (self.alpha * distance + self.beta * step.loss_of(second, y))

    def end_round(self, client: Client, own: State, data: Batch) -> Memory:
        x, y = finite_pairs(data)
        lots = torch.rand(len(y), generator=client.generator).to(x.device)
        new = {"x": x, "y": y, "logits": predictions(client.module, own, x).to(x.device), "lot": lots}
        if client.memory:
            new = {name: torch.cat([client.memory[name].to(x.device), value]) for name, value in new.items()}
        kept = new["lot"].argsort(descending=True, stable=True)[: self.max_size]
        return {name: value[kept] for name, value in new.items()}
