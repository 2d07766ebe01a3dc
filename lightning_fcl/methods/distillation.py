"""Distillation from the server's model and from earlier models (LwF, FLwF, FLwF-2T, FedNTD), and MOON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fcl.data.batching import Batch
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import ReductionRules, State
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.methods.context import Client, Step, strip_prefix, with_prefix
from lightning_fcl.methods.functional import embeddings
from lightning_fcl.methods.method import Method, add_seen_classes, mask_other_classes, match_output, target_mask
from lightning_fcl.methods.needs import Needs
from lightning_fcl.methods.teachers import Once, models_before, present_experiences, with_teacher, without_teacher
from lightning_fcl.validation import above, at_least, between, one_of, validated


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float = 2.0) -> Tensor:
    """Return the cross-entropy between the softened outputs of teacher and student, per sample (Hinton et al. 2015).

    Both outputs are a softmax of the logits divided by ``temperature``. Classes for which the teacher's logit is -inf
    do not contribute.
    """
    share = F.softmax(teacher / temperature, dim=-1)
    return -(share * F.log_softmax(student / temperature, dim=-1).masked_fill(share == 0, 0.0)).sum(dim=-1)


@dataclass(eq=False)
class FLwF2T(Method):
    """FLwF-2T: distillation from the client's previous model and the server's model (Usmanova et al., 2021, sec. 4.2).

    The loss is ``alpha * task loss + beta * KD(client's previous model) + (1 - alpha - beta) * KD(received server
    model)``. KD is `distillation_loss`. The client's previous model is its model after the last round in which it
    trained. A client keeps this model. In its first round, it uses the received server model instead. It uploads the
    same tensors as in FedAvg.

    The defaults are from the paper's text. The settings ``alpha=0.01, reduction="mean", teacher="live"`` give results
    that are closer to the paper's tables (``recipes/flwf/README.md``).

    Args:
        alpha: Weight of the task loss, 0 to 1.
        beta: Weight of the client's previous model, 0 to 1 - alpha.
        temperature: Temperature of teacher and student, above 0.
        reduction: Mean of the distillation loss, as in `torch.nn.KLDivLoss`. ``"batchmean"``: over samples.
            ``"mean"``: over samples and classes.
        teacher: Kind of the previous model in the loss. ``"snapshot"``: a copy of the client's model after its last
            round. ``"live"``: a reference to the model that is training, as in code that does not copy the model. With
            ``"live"``, the term of the previous model has no gradient and is left out. The client keeps no model.
        clients: Clients that distill. All other clients fine-tune. See `Method`.

    Raises:
        ValueError: If an argument is outside its range, or the module's output is not class logits.

    Example:
        >>> FLwF2T(alpha=0.001, beta=0.7).task_weight(Client())
        0.001
    """

    citations: ClassVar[tuple[str, ...]] = ("usmanova2021flwf",)

    needs: ClassVar[Needs] = Needs(logits=True)

    alpha: float = validated(0.001, between, 0, 1)
    beta: float = 0.7
    temperature: float = validated(2.0, above, 0)
    reduction: Literal["batchmean", "mean"] = validated("batchmean", one_of, ("batchmean", "mean"))
    teacher: Literal["snapshot", "live"] = validated("snapshot", one_of, ("snapshot", "live"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.beta <= 1 or self.alpha + self.beta > 1 + 1e-9:
            raise InvalidValueError(
                f"Expected `alpha + beta` to be at most 1 and `beta` at least 0, but got alpha={self.alpha}, "
                f"beta={self.beta}.",
                hint="Lower `beta` to at most 1 - alpha, so that the weight of the server's model, 1 - alpha - beta, "
                "is at least 0."
                if self.alpha + self.beta > 1 + 1e-9
                else "Use a `beta` between 0 and 1 - alpha.",
                argument="beta",
                value=self.beta,
            )

    def prepare_client_state(self, client: Client) -> StateSection:
        return client.method_state or (with_prefix(client.received_state, "own") if self.teacher == "snapshot" else {})

    def task_weight(self, client: Client) -> float:
        return self.alpha

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        terms: Tensor | float = 0.0
        share = 1 if self.reduction == "batchmean" else step.output.shape[-1]
        for weight, teacher in (
            (self.beta, strip_prefix(client.method_state, "own")),
            (1 - self.alpha - self.beta, step.received_state),
        ):
            if teacher and weight > 1e-9:
                logits = step.teacher_forward(teacher, step.x)
                terms = terms + weight / share * step.mean(distillation_loss(step.output, logits, self.temperature))
        return terms

    def update_client_state(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        return with_prefix(trained_state, "own") if self.teacher == "snapshot" else {}


@dataclass(eq=False)
class FLwF(FLwF2T):
    """FLwF: distillation from the client's previous model only (Usmanova et al., 2021, section 4.1).

    The loss is ``alpha * task loss + (1 - alpha) * KD(client's previous model)``. KD is `distillation_loss`.
    The method is `FLwF2T` with ``beta = 1 - alpha``.

    Args:
        alpha: Weight of the task loss, 0 to 1.
        temperature: Temperature of teacher and student, above 0.
        reduction: See `FLwF2T`.
        teacher: See `FLwF2T`.
        clients: Clients that distill. All other clients fine-tune. See `Method`.

    Example:
        >>> FLwF(alpha=0.001).beta
        0.999
    """

    citations: ClassVar[tuple[str, ...]] = ("usmanova2021flwf",)

    beta: float = field(init=False)

    def __post_init__(self) -> None:
        # The fields are checked before alpha is subtracted.
        self.beta = 0.0
        super().__post_init__()
        self.beta = 1 - self.alpha


@dataclass(eq=False)
class LwF(Method):
    """Learning without forgetting (Li and Hoiem, 2016): distillation of the classes of earlier experiences.

    The loss is ``task loss + strength * KD``. KD is `distillation_loss` on the logits of the classes that the client
    saw before the current experience. In the client's first experience, KD is 0. A client keeps the set of classes that
    it has seen, its teacher, and with ``teacher="client"`` its latest model. It uploads the same tensors as in FedAvg.

    Args:
        strength: Weight (lambda) of the distillation, at least 0.
        temperature: Temperature of teacher and student, above 0.
        teacher: The teacher model. ``"client"``: the client's model after its last round of earlier experiences.
            ``"server"``: the server's model from before the first client entered the current experience, see
            `lightning_fcl.methods.teachers`. The client receives this model once in each experience except the first.
        clients: Clients that distill. All other clients fine-tune. See `Method`.

    Raises:
        ValueError: If an argument is outside its range, or the module's output is not class logits.
        TypeError: If the batches are not pairs.

    Example:
        >>> LwF(strength=0.0).task_weight(Client())
        1.0
    """

    citations: ClassVar[tuple[str, ...]] = ("li2016lwf",)

    needs: ClassVar[Needs] = Needs(labels=True, logits=True)
    """The labels of the batches define the classes that a client has seen. The distillation compares logits."""
    reductions: ClassVar[ReductionRules] = {"before.*": Once()}
    of_experience: ClassVar[tuple[str, ...]] = ("old", "teacher.*")

    strength: float = validated(1.0, at_least, 0)
    temperature: float = validated(2.0, above, 0)
    teacher: Literal["client", "server"] = validated("client", one_of, ("client", "server"))

    def init_server_state(self, module: L.LightningModule) -> State:
        fits = 0 if self.local is None else self.local.fits
        return models_before(module, present_experiences(module, fits)) if self.teacher == "server" else {}

    def prepare_client_state(self, client: Client) -> StateSection:
        if "old" not in client.method_state:
            empty_mask = torch.zeros(max(client.client_round.num_classes, 1), dtype=torch.bool)
            memory = (
                client.method_state
                if "seen" in client.method_state
                else {"seen": empty_mask, **self._latest(client.received_state)}
            )
            client.method_state = {
                **memory,
                "old": memory["seen"],
                **with_prefix(strip_prefix(memory, "latest"), "teacher"),
            }
        return (
            with_teacher(client, client.client_round.experience_idx)
            if self.teacher == "server"
            else client.method_state
        )

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        if self.strength == 0:
            return 0.0
        old = match_output(client.method_state["old"], step.output)
        teacher = mask_other_classes(
            step.teacher_forward({**step.received_state, **strip_prefix(client.method_state, "teacher")}, step.x), old
        )
        loss = step.mean(distillation_loss(mask_other_classes(step.output, old), teacher, self.temperature))
        return self.strength * loss * old.any()

    def update_client_state(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        seen_mask = add_seen_classes(client.method_state["seen"], client.client_round.labels)
        return {**without_teacher(client), "seen": seen_mask, **self._latest(trained_state)}

    def _latest(self, state: State) -> StateSection:
        return with_prefix(state, "latest") if self.teacher == "client" else {}


@dataclass(eq=False)
class FedNTD(Method):
    """FedNTD: distillation of the not-true classes from the server's model (Lee et al., 2022, arXiv 2106.03097).

    The loss is ``task loss + beta * temperature^2 * KD``. KD is `distillation_loss` on the logits of all classes except
    the sample's true class. The teacher is the model that the client received. The task loss thus trains the true
    class, and the distillation keeps the outputs of all other classes close to the server's outputs. The factor
    ``temperature^2`` is from the authors' code. A client keeps no state and uploads the same tensors as in FedAvg.

    Args:
        beta: Weight of the distillation, at least 0. With 0, the method is FedAvg.
        temperature: Temperature of teacher and student, above 0.

    Raises:
        ValueError: If an argument is out of range, or the module's output is not class logits.
        TypeError: If the batches are not pairs.

    Example:
        >>> FedNTD(beta=0.5).temperature
        1.0
    """

    citations: ClassVar[tuple[str, ...]] = ("lee2022fedntd",)

    needs: ClassVar[Needs] = Needs(labels=True, logits=True)

    beta: float = validated(1.0, at_least, 0)
    temperature: float = validated(1.0, above, 0)

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        if self.beta == 0 or step.y is None:
            return 0.0
        true, logits = (
            target_mask(step.y, step.output),
            (step.output, step.teacher_forward(step.received_state, step.x)),
        )
        student, teacher = (each.masked_fill(true, -torch.inf) for each in logits)
        return self.beta * self.temperature**2 * step.mean(distillation_loss(student, teacher, self.temperature))


def contrastive_loss(features: Tensor, positive: Tensor, negative: Tensor, temperature: float = 0.5) -> Tensor:
    """Return MOON's loss ``-log(e^(s_pos / t) / (e^(s_pos / t) + e^(s_neg / t)))`` of each sample, shape (batch,).

    s_pos is the cosine similarity of ``features`` and ``positive``. s_neg is the cosine similarity of ``features`` and
    ``negative``. t is ``temperature``.

    Example:
        >>> contrastive_loss(Tensor([[1, 2]]), positive=Tensor([[3, 6]]), negative=Tensor([[1, 2]]))
        tensor([0.6931])
    """
    return F.softplus((F.cosine_similarity(features, negative) - F.cosine_similarity(features, positive)) / temperature)


@dataclass(eq=False)
class MOON(Method):
    """MOON: model-contrastive learning (Li et al., 2021, Algorithm 1).

    The loss is ``task loss + mu * mean of contrastive_loss``. The contrastive loss makes the features of a sample more
    similar to the features of the model that the client received. It also makes the features less similar to the
    features of the model that the client trained last. In a client's first round, these two models are identical, and
    the term has no gradient. The features are the result of the module's `embed`. The paper adds a projection head that
    computes the features. This class adds no projection head. A client keeps its last model, and uploads the same
    tensors as in FedAvg.

    Args:
        mu: Weight of the contrastive loss, at least 0. With 0, the method is FedAvg.
        temperature: Divisor of the similarities, above 0.

    Raises:
        ValueError: If an argument is out of range, or the module has no features.
        TypeError: If the batches are not pairs.

    Example:
        >>> MOON(mu=5.0).temperature
        0.5
    """

    citations: ClassVar[tuple[str, ...]] = ("li2021moon",)

    needs: ClassVar[Needs] = Needs(labels=True)

    mu: float = validated(1.0, at_least, 0)
    temperature: float = validated(0.5, above, 0)

    def prepare_client_state(self, client: Client) -> StateSection:
        return client.method_state or ({} if self.mu == 0 else with_prefix(client.received_state, "own"))

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        if self.mu == 0:
            return 0.0
        positive, negative = (
            embeddings(client.module, s, step.x)
            for s in (step.received_state, strip_prefix(client.method_state, "own"))
        )
        return self.mu * step.mean(contrastive_loss(step.embed_fn(step.x), positive, negative, self.temperature))

    def update_client_state(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        return {} if self.mu == 0 else with_prefix(trained_state, "own")
