"""FedProto: clients learn features that are near the other clients' of the same class."""

from __future__ import annotations

from typing import ClassVar, Literal

import lightning.pytorch as L
from torch import Tensor

from lightning_fcl.data.batches import Batch
from lightning_fcl.errors import at_least, one_of
from lightning_fcl.federation.aggregation import Rules, State
from lightning_fcl.methods.client import Client
from lightning_fcl.methods.declaration import Clients
from lightning_fcl.methods.episodic import labelled
from lightning_fcl.methods.functional import Embedding, embeddings
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.needs import Needs
from lightning_fcl.methods.prototypes import ClassSums, class_means, class_sums, nearest_mean, no_sums
from lightning_fcl.methods.step import Step


class FedProto(Method):
    """Every step: pulls features to the prototype of their class, the mean over all clients (Tan et al. 2022).

    ``task loss + strength * mean (f(x) - C_y)^2``, the mean over the samples and features of a batch, as in the
    authors' code (equation 7 has a distance between means for each class); f are the module's features, C_y the
    prototype of the class that the client has received. A class without one adds nothing.

    After its training a client sends, for each class of its samples, the sum of their features by its own model, and
    their number; their quotient over all clients of the round is the prototype (equation 6; the authors' code weighs
    clients equally). A class that none of them has keeps its earlier prototype.

    In the paper nothing but prototypes travels: ``FederatedStrategy(reductions={"*": "none"})``.

    Args:
        strength: Weight (lambda) of the distance, at least 0.
        predict: Whether the ``"nearest"`` prototype tells the class, or the module's own ``"head"``.

    Raises:
        ValueError: If an argument is out of range, or the module does not tell its features.
        TypeError: If the samples are no pairs.

    Example:
        >>> from lightning_fcl import Classifier
        >>> from lightning_fcl.models import MLP
        >>> FedProto(strength=1.0).server_state(Classifier(MLP([6, 5, 4]), num_classes=4))["sums"].shape
        torch.Size([4, 6])
    """

    needs: ClassVar[Needs] = Needs(samples=True)
    reductions: ClassVar[Rules] = {"sums": ClassSums()}

    def __init__(
        self, strength: float = 1.0, predict: Literal["nearest", "head"] = "nearest", clients: Clients = "all"
    ) -> None:
        super().__init__(clients)
        at_least(0, strength=strength)
        one_of(("nearest", "head"), predict=predict)
        self.strength = strength
        self.predicts = predict

    def server_state(self, module: L.LightningModule) -> State:
        return {"sums": no_sums(module)}

    def contribute(self, client: Client, own: State, data: Batch) -> State:
        x, y = labelled(data)
        return {"sums": class_sums(client.module, embeddings(client.module, own, x), y)}

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        if self.strength == 0 or step.y is None:
            return 0.0
        means, known = class_means(client.shared["sums"])
        distance = (step.features(step.x) - means[step.y]).square().mean(dim=1)
        return self.strength * step.mean(distance * known[step.y])

    def predict(self, server: State, module: L.LightningModule, x: Tensor, output: Tensor) -> Tensor:
        if self.predicts == "head":
            return output
        return nearest_mean(Embedding(module)(x), *class_means(server["sums"]), output)
