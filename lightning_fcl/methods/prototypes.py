"""The methods FedProto and iCaRL, which use the mean features of each class, and functions for these class means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fcl.data.batching import Batch
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.accumulators import Accumulator, PlainSums
from lightning_fcl.federation.aggregation import ReductionRules, State
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.federation.protocols import HasFeatures, HasNumClasses
from lightning_fcl.federation.reductions import SparseMean, Sum
from lightning_fcl.methods.base import Clients
from lightning_fcl.methods.context import Client, Step
from lightning_fcl.methods.distillation import LwF
from lightning_fcl.methods.episodic import finite_pairs, memory_pairs
from lightning_fcl.methods.functional import Embedding, embeddings
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.needs import Needs
from lightning_fcl.validation import at_least, check_arguments, one_of

# Two distances count as equal if they differ by at most this value. The distances are between unit vectors.
_TIE = 1e-5


class ClassSums(SparseMean):
    """A reduction that replaces the server's per-class sums by the sums over the clients of the round.

    Entries have the shape (classes, 1 + features): a count and a sum of features. Their quotient is the mean over the
    samples of all clients, independent of the clients' weights in other reductions. If no client of the round has
    samples of a class, the server keeps the class's earlier count and sum. Sums of different rounds are not added.
    Uploads are compressed, see `SparseMean.pack`.
    """

    name = "class_sums"

    def make_accumulator(self) -> Accumulator:
        return _Sums()


class SparseSum(Sum):
    """The reduction ``sum`` for entries that are often zero: a client with only zeros uploads 0 bytes."""

    name = "sparse_sum"

    def pack(self, value: Tensor) -> Tensor:
        return value if bool(value.any()) else value.new_empty(0)

    def unpack(self, packed: Tensor, reference: Tensor) -> Tensor:
        return torch.zeros_like(reference) if packed.shape == (0,) else super().unpack(packed, reference)


class _Sums(PlainSums):
    def compute(self, server: Mapping[str, Tensor]) -> State:
        totals = {
            name: exact.total(server[name].dtype).to(server[name].device) for name, exact in self._sums.sums.items()
        }
        return {name: torch.where(total[:, :1] > 0, total, server[name]) for name, total in totals.items()}


def class_sums(module: L.LightningModule, features: Tensor, y: Tensor) -> Tensor:
    """Return the number of samples and the sum of features of each class, shape (classes, 1 + features)."""
    counted_features = torch.cat([torch.ones_like(features[:, :1]), features], dim=1)
    return zero_class_sums(module).to(counted_features).index_add_(0, y.to(counted_features.device), counted_features)


def zero_class_sums(module: L.LightningModule) -> Tensor:
    """Return the class sums of zero samples, shape (classes, 1 + features).

    Raises:
        InvalidValueError: If the module does not define its features or its number of classes.
    """
    if not (isinstance(module, HasNumClasses) and isinstance(module, HasFeatures)):
        raise InvalidValueError(
            "Expected a module with `num_classes`, `embed(x)` and `features`, the number of its features, but got a "
            f"`{type(module).__name__}`.",
            hint="Use a `Classifier`, or define these names and set `lightning_fcl_protocols = True` in the module's "
            "class.",
            argument="embed",
        )
    return next(module.parameters()).new_zeros(module.num_classes, 1 + module.features)


def class_means(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of each class, shape (classes, features), and whether the class has samples, shape (classes,)."""
    return sums[:, 1:] / sums[:, :1].clamp(min=1), sums[:, 0] > 0


def nearest_mean(features: Tensor, means: Tensor, seen_classes: Tensor, output: Tensor) -> Tensor:
    """Return class scores, shape (batch, classes): minus the distance from each class mean.

    Args:
        features: Features, shape (batch, features).
        means: Class means, shape (classes, features).
        seen_classes: Whether a class has a mean, shape (classes,). Other classes get the score -inf.
        output: The scores to return if no class has a mean.
    """
    if not seen_classes.any():
        return output
    # Matrix products would round differently for different numbers of samples.
    distance = torch.cdist(features.to(means), means, compute_mode="donot_use_mm_for_euclid_dist")
    return -distance.masked_fill(~seen_classes, torch.inf)


class FedProto(Method):
    """FedProto (Tan et al., 2022): pull features towards the prototype of their class, the mean over all clients.

    The loss is ``task loss + strength * mean (f(x) - C_y)^2``. The mean is over the samples and features of a batch, as
    in the authors' code (eq. 7 has a distance between the means of each class). f(x) are the module's features. C_y is
    the prototype of class y, as received from the server. A class without a prototype adds nothing.

    After local training a client uploads two values per class: the number of its samples, and the sum of their
    features, computed with its own model. A prototype is the sum of the features over all clients of the round, divided
    by the number of samples (eq. 6; the authors' code weights clients equally). If no client of the round has a class,
    the class keeps its earlier prototype.

    In the paper, clients transmit only prototypes: use ``FederatedStrategy(reductions={"*": "local"})``.

    Args:
        strength: Weight (lambda) of the distance, at least 0.
        predictor: ``"nearest"`` predicts the class of the nearest prototype. ``"head"`` uses the module's own output.
        clients: The clients that use the method. See `MethodBase`.

    Raises:
        ValueError: If an argument is out of range, or the module does not define its features.
        TypeError: If the samples are not pairs.

    Example:
        >>> from lightning_fcl import Classifier
        >>> from lightning_fcl.models import MLP
        >>> FedProto(strength=1.0).init_server_state(Classifier(MLP([6, 5, 4]), num_classes=4))["sums"].shape
        torch.Size([4, 6])
    """

    citations: ClassVar[tuple[str, ...]] = ("tan2022fedproto",)

    needs: ClassVar[Needs] = Needs(round_samples=True, features=True, tensors=True)
    reductions: ClassVar[ReductionRules] = {"sums": ClassSums()}

    @check_arguments
    def __init__(
        self, strength: float = 1.0, predictor: Literal["nearest", "head"] = "nearest", clients: Clients = "all"
    ) -> None:
        super().__init__(clients)
        at_least(0, strength=strength)
        one_of(("nearest", "head"), predictor=predictor)
        self.strength = strength
        self.predictor = predictor

    def init_server_state(self, module: L.LightningModule) -> State:
        return {"sums": zero_class_sums(module)}

    def upload_statistics(self, client: Client, trained_state: State, data: Batch) -> State:
        x, y = finite_pairs(data)
        return {"sums": class_sums(client.module, embeddings(client.module, trained_state, x), y)}

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        if self.strength == 0 or step.y is None:
            return 0.0
        means, seen_classes = class_means(client.server_state["sums"])
        distance = (step.embed_fn(step.x) - means[step.y]).square().mean(dim=1)
        return self.strength * step.mean(distance * seen_classes[step.y])

    def rescore(self, server: State, module: L.LightningModule, x: Tensor, output: Tensor) -> Tensor:
        if self.predictor == "head":
            return output
        return nearest_mean(Embedding(module)(x), *class_means(server["sums"]), output)


def herding_selection(features: Tensor, size: int) -> Tensor:
    """Return the indices of exemplars chosen by herding (Rebuffi et al., 2017, Algorithm 4).

    Each exemplar is chosen so that the mean of all chosen samples is nearest to the mean of all samples. Every mean is
    divided by its norm, as the paper states in section 2.1. Deviation: the authors' code omits this division.

    Args:
        features: Features of the samples, shape (n, features).
        size: Maximum number of exemplars.
    """
    mean, total = F.normalize(features.mean(dim=0), dim=0), torch.zeros_like(features[:1])
    indices: list[int] = []
    for _ in range(min(size, len(features))):
        distance = (F.normalize(total + features) - mean).norm(dim=1)
        distance[indices] = torch.inf
        # Among nearly equal distances take the first, so that rounding errors do not decide. For example, two samples
        # are always equally far from their mean.
        indices.append(int((distance <= distance.min() + _TIE).byte().argmax()))
        total = total + features[indices[-1]]
    return torch.tensor(indices, dtype=torch.long, device=features.device)


class ICaRL(LwF):
    """iCaRL (Rebuffi et al., 2017): distill old classes, replay exemplars, and predict by the nearest class mean.

    At the end of an experience a client chooses exemplars of the experience's classes by `herding_selection`. The
    selection uses normalized features, computed with the client's model after its last round of training. All classes
    that the client has trained on share its ``memory_size`` exemplars equally. If an earlier class exceeds its share,
    its last exemplars are removed.

    The client and the server predict the class of the nearest mean of exemplars. Exemplars stay on the client. After
    local training, a client uploads two values per class: the number of its exemplars and the sum of their features.
    The server keeps the sums over the clients of the latest round. If no client of the round has a class, the class
    keeps its earlier sum. See `ClassSums`.

    The module's own loss trains the classes of the experience. The old classes are distilled as in `LwF`, from the
    client's model at the end of its previous experience. Deviation: the paper uses binary cross-entropies of sigmoids
    for both losses.

    Args:
        memory_size: Number of exemplars that a client keeps, of all classes together, at least 1.
        strength: Weight of the distillation, at least 0.
        temperature: Temperature that softens the outputs of teacher and student, above 0.
        clients: The clients that use the method. See `MethodBase`.

    Raises:
        ValueError: If an argument is out of range, or the module does not define its features.
        TypeError: If the samples are not pairs.

    Example:
        >>> ICaRL(memory_size=100).accumulates
        True
    """

    citations: ClassVar[tuple[str, ...]] = ("rebuffi2017icarl",)

    needs: ClassVar[Needs] = Needs(labels=True, logits=True, features=True, tensors=True)
    accumulates: ClassVar[bool] = True
    reductions: ClassVar[ReductionRules] = {"sums": ClassSums()}

    @check_arguments
    def __init__(
        self, memory_size: int = 200, strength: float = 1.0, temperature: float = 2.0, clients: Clients = "all"
    ) -> None:
        super().__init__(strength, temperature, clients=clients)
        at_least(1, memory_size=memory_size)
        self.memory_size = memory_size

    def replay_samples(self, client: Client) -> tuple[Tensor, Tensor] | None:
        return memory_pairs(client.method_state)

    def end_experience(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        return client.method_state | self._exemplars(client, trained_state, data)

    def _exemplars(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        x, y = finite_pairs(data)
        old = tuple(part.to(x.device) for part in memory_pairs(client.method_state) or (x[:0], y[:0]))
        # If the experience has a result already, choose again among its samples and the new samples.
        if (result_pairs := memory_pairs(client.result)) is not None:
            current = ~torch.isin(result_pairs[1], old[1].to(result_pairs[1].device))
            x, y = (torch.cat([a[current].to(b.device), b]) for a, b in zip(result_pairs, (x, y), strict=True))
        features = F.normalize(embeddings(client.module, trained_state, x)).to(x.device)
        classes, exemplars = torch.unique(torch.cat([old[1], y])), [(x[:0], y[:0])]
        for label in classes:
            new, size = (y == label).nonzero()[:, 0], self.memory_size // len(classes)
            if len(new):
                new = new[herding_selection(features[new], size)]
                exemplars.append((x[new], y[new]))
            else:
                old_rows = (old[1] == label).nonzero()[:size, 0]
                exemplars.append((old[0][old_rows], old[1][old_rows]))
        return {"x": torch.cat([x for x, _ in exemplars]), "y": torch.cat([y for _, y in exemplars])}

    def init_server_state(self, module: L.LightningModule) -> State:
        return {"sums": zero_class_sums(module)}

    def upload_statistics(self, client: Client, trained_state: State, data: Batch) -> State:
        x, y = self._exemplars(client, trained_state, data).values()
        return {"sums": class_sums(client.module, F.normalize(embeddings(client.module, trained_state, x)), y)}

    def rescore(self, server: State, module: L.LightningModule, x: Tensor, output: Tensor) -> Tensor:
        means, seen_classes = class_means(server["sums"])
        return nearest_mean(F.normalize(Embedding(module)(x)), F.normalize(means), seen_classes, output)
