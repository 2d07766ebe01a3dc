"""Distillation from the server's model and from earlier ones: LwF, FLwF, FLwF-2T, FedNTD; and MOON, of features."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fcl.data.batches import Batch
from lightning_fcl.errors import InvalidValueError, above, argument, at_least, between, one_of
from lightning_fcl.federation.aggregation import Rules, State
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.methods.client import Client, Step, remember, section
from lightning_fcl.methods.functional import embeddings
from lightning_fcl.methods.method import Method, for_output, masked, true_class, with_classes
from lightning_fcl.methods.needs import Needs
from lightning_fcl.methods.teachers import Once, models_before, present_experiences, with_teacher, without_teacher


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float = 2.0) -> Tensor:
    """Cross-entropy of the softened student against the softened teacher, per sample (Hinton et al. 2015).

    Classes whose logits are -inf count for nothing.
    """
    share = F.softmax(teacher / temperature, dim=-1)
    return -(share * F.log_softmax(student / temperature, dim=-1).masked_fill(share == 0, 0.0)).sum(dim=-1)


@dataclass(eq=False)
class FLwF2T(Method):
    """Every step: distils from the client's previous model and the server's (Usmanova et al. 2021, section 4.2).

    ``alpha * task loss + beta * KD(own previous model) + (1 - alpha - beta) * KD(received server model)``. A client's
    previous model is the one it trained in the last round it took part in; before its first, the server's stands in, so
    that the whole weight is on the server.

    The defaults are the paper's text. Its tables are nearer to ``alpha=0.01, mean_over="elements", previous="live"``
    (``recipes/flwf/README.md``).

    Args:
        alpha: Weight of the task loss, 0 to 1.
        beta: Weight of the own previous model, 0 to 1 - alpha.
        temperature: Softens both sides, above 0.
        mean_over: What distillation is the mean over: the ``"batch"``, or its ``"elements"``, samples times classes.
        previous: ``"kept"``: a copy of the client's model after its last round. ``"live"``: a reference to the model
            in training, as in a program that forgot to copy; it teaches itself nothing, and the term vanishes.
        clients: Who distils; the others fine-tune. See `Method`.

    Raises:
        ValueError: If an argument is outside its range.

    Example:
        >>> FLwF2T(alpha=0.001, beta=0.7).task_weight(Client())
        0.001
    """

    needs: ClassVar[Needs] = Needs(logits=True)

    alpha: float = argument(0.001, between, 0, 1)
    beta: float = 0.7
    temperature: float = argument(2.0, above, 0)
    mean_over: Literal["batch", "elements"] = argument("batch", one_of, ("batch", "elements"))
    previous: Literal["kept", "live"] = argument("kept", one_of, ("kept", "live"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.beta <= 1 or self.alpha + self.beta > 1 + 1e-9:
            raise InvalidValueError(
                f"Expected `alpha + beta` to be at most 1 and `beta` at least 0 but got alpha={self.alpha}, "
                f"beta={self.beta}.",
                hint="Lower one of them, so that the weight of the server's model, 1 - alpha - beta, is at least 0."
                if self.alpha + self.beta > 1 + 1e-9
                else "Use a `beta` between 0 and 1 - alpha.",
                argument="beta",
                value=self.beta,
            )

    def on_download(self, client: Client) -> Memory:
        return client.memory or (remember(client.server, "own") if self.previous == "kept" else {})

    def task_weight(self, client: Client) -> float:
        return self.alpha

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        terms: Tensor | float = 0.0
        share = 1 if self.mean_over == "batch" else step.output.shape[-1]
        for weight, teacher in ((self.beta, section(client.memory, "own")), (1 - self.alpha - self.beta, step.server)):
            if teacher and weight > 1e-9:
                logits = step.predict(teacher, step.x)
                terms = terms + weight / share * step.mean(distillation_loss(step.output, logits, self.temperature))
        return terms

    def end_round(self, client: Client, own: State, data: Batch) -> Memory:
        return remember(own, "own") if self.previous == "kept" else {}


@dataclass(eq=False)
class FLwF(FLwF2T):
    """Every step: distils from the client's own previous model alone (Usmanova et al. 2021, section 4.1).

    ``alpha * task loss + (1 - alpha) * KD(own previous model)``: FLwF-2T with beta = 1 - alpha.

    Args:
        alpha: Weight of the task loss, 0 to 1.
        temperature: Softens both sides, above 0.
        mean_over: See `FLwF2T`.
        previous: See `FLwF2T`.
        clients: Who distils; the others fine-tune. See `Method`.

    Example:
        >>> FLwF(alpha=0.001).beta
        0.999
    """

    beta: float = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.beta = 1 - self.alpha


@dataclass(eq=False)
class LwF(Method):
    """Every step: distils the classes of earlier experiences from the model at their end (Li and Hoiem 2016).

    ``task loss + strength * KD`` over the logits of the classes that the client saw before this experience; nothing is
    added in the first.

    Args:
        strength: Weight (lambda) of the distillation, at least 0.
        temperature: Softens both sides, above 0.
        teacher: Whose model distils: ``"own"``: the client's, after its last round of earlier experiences;
            ``"server"``: the server's, before the first client entered this experience, see
            `lightning_fcl.methods.teachers`. The client receives this model once in each experience but the first.
        clients: Who distils; the others fine-tune. See `Method`.

    Raises:
        ValueError: If an argument is outside its range.

    Example:
        >>> LwF(strength=0.0).task_weight(Client())
        1.0
    """

    needs: ClassVar[Needs] = Needs(labels=True, logits=True)
    """Labels tell the classes that were seen."""
    reductions: ClassVar[Rules] = {"before.*": Once()}
    of_experience: ClassVar[tuple[str, ...]] = ("old", "teacher.*")

    strength: float = argument(1.0, at_least, 0)
    temperature: float = argument(2.0, above, 0)
    teacher: Literal["own", "server"] = argument("own", one_of, ("own", "server"))

    def server_state(self, module: L.LightningModule) -> State:
        fits = 0 if self.local is None else self.local.fits
        return models_before(module, present_experiences(module, fits)) if self.teacher == "server" else {}

    def on_download(self, client: Client) -> Memory:
        if "old" not in client.memory:
            nothing = torch.zeros(max(client.part.num_classes, 1), dtype=torch.bool)
            memory = client.memory if "seen" in client.memory else {"seen": nothing, **self._latest(client.server)}
            client.memory = {**memory, "old": memory["seen"], **remember(section(memory, "latest"), "teacher")}
        return with_teacher(client, client.part.experience) if self.teacher == "server" else client.memory

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        if self.strength == 0:
            return 0.0
        old = for_output(client.memory["old"], step.output)
        teacher = masked(step.predict({**step.server, **section(client.memory, "teacher")}, step.x), old)
        loss = step.mean(distillation_loss(masked(step.output, old), teacher, self.temperature))
        return self.strength * loss * old.any()

    def end_round(self, client: Client, own: State, data: Batch) -> Memory:
        seen = with_classes(client.memory["seen"], client.part.labels)
        return {**without_teacher(client), "seen": seen, **self._latest(own)}

    def _latest(self, state: State) -> Memory:
        return remember(state, "latest") if self.teacher == "own" else {}


@dataclass(eq=False)
class FedNTD(Method):
    """Every step: distils the classes that a sample is not of from the server (Lee et al. 2022, arXiv 2106.03097).

    ``task loss + beta * temperature^2 * KD`` over the logits of all classes but the true one, the teacher being the
    model that the client has received: its data teach it the true class, and make it forget the others. The square is
    that of the authors' code. A client keeps nothing, and sends what FedAvg sends.

    Args:
        beta: Weight of the distillation, at least 0; 0 is FedAvg.
        temperature: Softens both sides, above 0.

    Raises:
        ValueError: If an argument is out of range, or the module's output are no logits of classes.
        TypeError: If the batches are no pairs.

    Example:
        >>> FedNTD(beta=0.5).temperature
        1.0
    """

    needs: ClassVar[Needs] = Needs(labels=True, logits=True)

    beta: float = argument(1.0, at_least, 0)
    temperature: float = argument(1.0, above, 0)

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        if self.beta == 0 or step.y is None:
            return 0.0
        true, logits = true_class(step.y, step.output), (step.output, step.predict(step.server, step.x))
        student, teacher = (each.masked_fill(true, -torch.inf) for each in logits)
        return self.beta * self.temperature**2 * step.mean(distillation_loss(student, teacher, self.temperature))


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
