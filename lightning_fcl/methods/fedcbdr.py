"""FedCBDR: clients remember the samples that matter most among those of all, by leverage scores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fcl.data.batches import Batch
from lightning_fcl.errors import above, argument, at_least
from lightning_fcl.federation.aggregation import Rules, State
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.federation.protocol import federation_of
from lightning_fcl.methods.client import Client, remember, section
from lightning_fcl.methods.declaration import Needs
from lightning_fcl.methods.episodic import finite_pairs
from lightning_fcl.methods.functional import embeddings
from lightning_fcl.methods.method import Method, class_mask, padded
from lightning_fcl.methods.prototypes import SumOfSome, no_sums
from lightning_fcl.methods.step import Step
from lightning_fcl.randomness import seed_of


@dataclass(eq=False)
class FedCBDR(Method):
    """Every batch: joins remembered samples, chosen by their leverage among all clients' (FedCBDR, NeurIPS 2025).

    A sample's leverage is ``x^T (X^T X)^+ x`` of its features x among those X of all clients: what is rare among all
    has more, wherever it is. In the last round of an experience a client sends ``X_k^T X_k`` of its features, by its
    own model, and receives the sum; of its samples it keeps ``max_size`` times its share of all leverage, drawn without
    replacement with probabilities that go by it, beside those of earlier experiences. What it keeps never travels.

    In the paper a client sends ``P_k X_k Q``, P_k and Q random and orthogonal, and the server draws. The scores are the
    same, and ``X_k^T X_k`` up to a rotation is all that these hide. A client that is not drawn for the last round keeps
    no samples of the experience. Logits of classes of earlier experiences and of others are divided by a temperature
    each, and the cross-entropy of a sample is multiplied by a weight of either; where a temperature or a weight is not
    1, the task's loss has to be cross-entropy. The paper has 0.9, 1.1, 1.1 and 0.9.

    Args:
        max_size: Samples kept of an experience by all clients together, at least 1.
        old_temperature: Of logits of old classes, above 0.
        new_temperature: Of all other logits, above 0.
        old_weight: Of samples of old classes, at least 0.
        new_weight: Of all other samples, at least 0.

    Raises:
        ValueError: If an argument is out of range, the Trainer is no federation's, or the module tells no features.

    Example:
        >>> FedCBDR(max_size=100).max_size
        100
    """

    needs: ClassVar[Needs] = Needs(samples=True, logits=True, federation="no server adds up. Use the strategy")
    reductions: ClassVar[Rules] = {"gram": SumOfSome()}

    max_size: int = argument(500, at_least, 1)
    old_temperature: float = argument(1.0, above, 0)
    new_temperature: float = argument(1.0, above, 0)
    old_weight: float = argument(1.0, at_least, 0)
    new_weight: float = argument(1.0, at_least, 0)

    def server_state(self, module: L.LightningModule) -> State:
        size = no_sums(module).shape[1] - 1
        return {"gram": no_sums(module).new_zeros(size, size, dtype=torch.float64)}

    def rehearse(self, client: Client) -> tuple[Tensor, Tensor] | None:
        return (client.memory["x"], client.memory["y"]) if "x" in client.memory else None

    @property
    def _tells_apart(self) -> bool:
        return {self.old_temperature, self.new_temperature, self.old_weight, self.new_weight} != {1.0}

    def on_download(self, client: Client) -> Memory:
        if not self._tells_apart:
            return client.memory
        return {**client.memory, "old": class_mask(client.part.num_classes, client.part.old_classes)}

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        if not self._tells_apart or step.y is None:
            return 0.0
        old = padded(client.memory["old"].to(step.output.device), step.output.shape[-1])
        scaled = step.output / torch.where(old, self.old_temperature, self.new_temperature)
        weighted = torch.where(old[step.y], self.old_weight, self.new_weight) * _cross_entropy(scaled, step.y)
        return step.mean(weighted - _cross_entropy(step.output, step.y))

    def contribute(self, client: Client, own: State, data: Batch) -> State:
        if not client.part.last_round:
            return {}
        features = embeddings(client.module, own, finite_pairs(data)[0]).double()
        return {"gram": features.T @ features}

    def end_round(self, client: Client, own: State, data: Batch) -> Memory:
        if client.missed or not (client.part.last_round and client.active):
            return client.memory
        x, y = finite_pairs(data)
        return client.memory | remember({"x": x, "y": y, "features": embeddings(client.module, own, x)}, "new")

    def on_round_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        federation = federation_of(trainer)
        if federation is None or not (gram := federation.server.kept_for(self.section)["gram"]).any():
            return
        server, rank = federation.server, int(torch.linalg.matrix_rank(gram, hermitian=True))
        inverse = torch.linalg.pinv(gram, hermitian=True)
        for part in federation.client_rounds(federation.round.number):
            if not (part.last_round and part.client in server.record.trained and self.applies_to(part)):
                continue
            server.record.download(part.client, gram.nbytes)
            if not federation.hosts(part.client):
                continue
            memory = server.store.memory(part.client, self.section)
            new = section(memory, "new")
            scores = leverage(new.pop("features"), inverse).cpu()
            size = min(round(self.max_size * float(scores.sum()) / rank), len(scores))
            generator = torch.Generator().manual_seed(seed_of(federation.seed, part.client, part.round, self.section))
            chosen = scores.clamp(min=1e-9).multinomial(size, generator=generator) if size else scores[:0].long()
            kept = {n: torch.cat([memory.get(n, value[:0]), value[chosen]]) for n, value in new.items()}
            server.store.remember(part.client, self.section, kept)
        server.extra[f"{self.section}.gram"] = torch.zeros_like(gram)


_cross_entropy = partial(F.cross_entropy, reduction="none")


def leverage(features: Tensor, inverse: Tensor) -> Tensor:
    """The leverage ``x^T G^+ x`` of samples by their features x, shape (n, d), and G^+, of ``X^T X`` of all samples' X.

    The scores, shape (n,), of all samples add up to the rank of G.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 5.0]])
        >>> leverage(x, torch.linalg.pinv(x.T @ x))
        tensor([0.5000, 0.5000, 1.0000], dtype=torch.float64)
    """
    wide = features.double()
    return torch.einsum("nd,de,ne->n", wide, inverse.double(), wide)
