"""MOON: features near those of the server's model, and far from those of the client's previous one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from lightning_fcl.data.batches import Batch
from lightning_fcl.errors import above, argument, at_least
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.methods.client import Client, remember, section
from lightning_fcl.methods.declaration import Needs
from lightning_fcl.methods.functional import embeddings
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.step import Step


def contrastive_loss(features: Tensor, near: Tensor, far: Tensor, temperature: float = 0.5) -> Tensor:
    """``-log(e^(s_near / t) / (e^(s_near / t) + e^(s_far / t)))`` of cosine similarities s, per sample: shape (batch,).

    Example:
        >>> contrastive_loss(Tensor([[1, 2]]), near=Tensor([[3, 6]]), far=Tensor([[1, 2]]))
        tensor([0.6931])
    """
    return F.softplus((F.cosine_similarity(features, far) - F.cosine_similarity(features, near)) / temperature)


@dataclass(eq=False)
class MOON(Method):
    """Every step: draws features to the server's, and away from the previous model's (Li et al. 2021, Algorithm 1).

    ``task loss + mu * mean contrastive_loss(f(x))``: near are the features of ``x`` by the model that the client has
    received, far those by the one that it trained last. In a client's first round these are one, and the term has no
    gradient. The features are what the module's `embed` gives, where the paper adds a projection head of its own. A
    client keeps its last model, and sends what FedAvg sends.

    Args:
        mu: Weight of the contrastive loss, at least 0; 0 is FedAvg.
        temperature: Divides the similarities, above 0.

    Raises:
        ValueError: If an argument is out of range, or the module does not tell its features.

    Example:
        >>> MOON(mu=5.0).temperature
        0.5
    """

    needs: ClassVar[Needs] = Needs(labels=True)

    mu: float = argument(1.0, at_least, 0)
    temperature: float = argument(0.5, above, 0)

    def on_download(self, client: Client) -> Memory:
        return client.memory or ({} if self.mu == 0 else remember(client.server, "own"))

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        if self.mu == 0:
            return 0.0
        near, far = (embeddings(client.module, s, step.x) for s in (step.server, section(client.memory, "own")))
        return self.mu * step.mean(contrastive_loss(step.features(step.x), near, far, self.temperature))

    def end_round(self, client: Client, own: State, data: Batch) -> Memory:
        return {} if self.mu == 0 else remember(own, "own")
