"""iCaRL: exemplars whose mean is near that of their class, and prediction by the nearest of these means."""

from __future__ import annotations

from typing import ClassVar

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fcl.data.batches import Batch
from lightning_fcl.errors import at_least
from lightning_fcl.federation.aggregation import Rules, State
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.methods.client import Client
from lightning_fcl.methods.declaration import Clients
from lightning_fcl.methods.distillation import LwF
from lightning_fcl.methods.episodic import finite_pairs
from lightning_fcl.methods.functional import Embedding, embeddings
from lightning_fcl.methods.prototypes import ClassSums, class_means, class_sums, nearest_mean, no_sums

_TIE = 1e-5  # distances between vectors of length 1 that are alike


def herd(features: Tensor, size: int) -> Tensor:
    """Indices of samples, each so that the mean of all chosen is nearest the mean of all (Rebuffi et al., alg. 4)."""
    mean, total = F.normalize(features.mean(dim=0), dim=0), torch.zeros_like(features[:1])
    chosen: list[int] = []
    for _ in range(min(size, len(features))):
        distance = (F.normalize(total + features) - mean).norm(dim=1)
        distance[chosen] = torch.inf
        # The first of those that are as near: two samples are equally far from their mean, whatever rounding says.
        chosen.append(int((distance <= distance.min() + _TIE).byte().argmax()))
        total = total + features[chosen[-1]]
    return torch.tensor(chosen, dtype=torch.long, device=features.device)


class ICaRL(LwF):
    """Every step: distils the classes of earlier experiences, beside their exemplars (Rebuffi et al. 2017, "iCaRL").

    When an experience ends, a client chooses exemplars of its classes by `herd`, on features of length 1 of its own
    model (the server's, if it is not drawn for the last round); its ``max_size`` exemplars are shared equally by all
    classes that it has seen, and those of earlier ones are cut from the end.

    Prediction is by the nearest mean of exemplars, for the server as well, which never sees one: after its training
    each client sends, for each class, the sum of its exemplars' features and their number. The server adds up those of
    the round's clients, in place of the earlier ones; a class that none of them has keeps its sum: `ClassSums`.

    The classes of the experience are learnt by the module's own loss, and old ones distilled as in `LwF`, from the
    client's model at the end of its last experience: the paper has binary cross-entropies of sigmoids for both.

    Args:
        max_size: Exemplars that a client keeps, of all classes together, at least 1.
        strength: Weight of the distillation, at least 0.
        temperature: Softens both sides of it, above 0.

    Raises:
        ValueError: If an argument is out of range, or the module does not tell its features.
        TypeError: If the samples are no pairs.

    Example:
        >>> ICaRL(max_size=100).ends_undrawn
        True
    """

    ends_undrawn: ClassVar[bool] = True
    reductions: ClassVar[Rules] = {"sums": ClassSums()}

    def __init__(
        self, max_size: int = 200, strength: float = 1.0, temperature: float = 2.0, clients: Clients = "all"
    ) -> None:
        super().__init__(strength, temperature, clients=clients)
        at_least(1, max_size=max_size)
        self.max_size = max_size

    def rehearse(self, client: Client) -> tuple[Tensor, Tensor] | None:
        return (client.memory["x"], client.memory["y"]) if "x" in client.memory else None

    def end_round(self, client: Client, own: State, data: Batch) -> Memory:
        memory = client.memory
        if client.part.drawn:
            memory = super().end_round(client, own, data)
        return memory | self._exemplars(client, own, data) if memory and client.part.last_round else memory

    def _exemplars(self, client: Client, own: State, data: Batch) -> Memory:
        x, y = finite_pairs(data)
        features = F.normalize(embeddings(client.module, own, x)).to(x.device)
        old = tuple(part.to(x.device) for part in self.rehearse(client) or (x[:0], y[:0]))
        classes, chosen = torch.unique(torch.cat([old[1], y])), [(x[:0], y[:0])]
        for label in classes:
            new, size = (y == label).nonzero()[:, 0], self.max_size // len(classes)
            kept = (old[1] == label).nonzero()[:size, 0]
            new = new[herd(features[new], size)]
            chosen.append((x[new], y[new]) if len(new) else (old[0][kept], old[1][kept]))
        return {"x": torch.cat([x for x, _ in chosen]), "y": torch.cat([y for _, y in chosen])}

    def server_state(self, module: L.LightningModule) -> State:
        return {"sums": no_sums(module)}

    def contribute(self, client: Client, own: State, data: Batch) -> State:
        x, y = self._exemplars(client, own, data).values()
        return {"sums": class_sums(client.module, F.normalize(embeddings(client.module, own, x)), y)}

    def predict(self, server: State, module: L.LightningModule, x: Tensor, output: Tensor) -> Tensor:
        means, known = class_means(server["sums"])
        return nearest_mean(F.normalize(Embedding(module)(x)), F.normalize(means), known, output)
