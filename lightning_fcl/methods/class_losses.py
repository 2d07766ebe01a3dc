"""Losses that treat classes differently: logit adjustment by class priors, and Mean Output Loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fcl.data.batching import Batch
from lightning_fcl.data.trainer_access import find_stream
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import ReductionRules, State
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.federation.protocols import HasNumClasses
from lightning_fcl.federation.reductions import DeltaSum
from lightning_fcl.methods.context import Client, Step
from lightning_fcl.methods.method import (
    Method,
    add_seen_classes,
    class_mask,
    mask_other_classes,
    match_output,
    pad_classes,
    target_mask,
)
from lightning_fcl.methods.needs import Needs
from lightning_fcl.methods.prototypes import SparseSum
from lightning_fcl.validation import at_least, one_of, validated


class SparseDeltaSum(SparseSum, DeltaSum):
    """The reduction ``delta_sum`` for uploads that are often all zeros: an upload of zeros takes no bytes."""

    name = "sparse_delta_sum"


def logit_adjusted_loss(logits: Tensor, target: Tensor, counts: Tensor, tau: float = 1.0) -> Tensor:
    """Return the cross-entropy of each sample after adding ``tau * log(prior)`` to the logit of each class.

    This is equation 10 of Menon et al. 2021, and with ``tau = 1`` the balanced softmax of Ren et al. 2020. ``counts``
    is the number of samples of each class, shape (classes,). The prior of a class is its share of all these samples.
    Classes with a count of 0 are left out of the softmax. The target class of a sample always stays in the softmax. The
    logit of a target class with a count of 0 does not change. If all counts are 0 or ``tau`` is 0, the result is the
    plain cross-entropy.
    """
    if tau == 0:
        return F.cross_entropy(logits, target, reduction="none")
    present = counts > 0
    shift = tau * torch.where(present, counts / counts.sum().clamp(min=1), 1.0).log()
    shifted = mask_other_classes(logits + shift, present | target_mask(target, logits) | ~present.any())
    return F.cross_entropy(shifted, target, reduction="none")


@dataclass(eq=False)
class LogitAdjustment(Method):
    """Logit adjustment by class priors (Menon et al., 2021).

    Replaces the task's cross-entropy in every step by `logit_adjusted_loss`, so that frequent classes have no
    advantage. The task's loss must be cross-entropy. A client keeps class counts between rounds. It uploads the same
    tensors as in FedAvg, and with ``prior="federation"`` also class counts.

    Args:
        tau: Strength of the adjustment, at least 0. With 0, the loss is the task's own loss.
        prior: Samples from which the class priors are counted. ``"client"``: the client's samples of the round, as in
            Zhang et al. 2022. In a plain Trainer without a `FederatedStream`, these are the samples of the previous
            epoch, and the first epoch uses the task's own loss. ``"federation"``: the samples of all clients so far
            and of the base session, as in Menon et al. 2021 and the balanced softmax of Ren et al. 2020. Clients then
            upload the class counts of samples that they have not trained on before.

    Raises:
        ValueError: If an argument is out of range, or the module's output is not class logits. Also if ``prior`` is
            ``"federation"`` and the module has no ``num_classes``.
        TypeError: If the batches are not pairs.

    Example:
        >>> LogitAdjustment(tau=1.0, prior="federation").prior
        'federation'
    """

    citations: ClassVar[tuple[str, ...]] = ("menon2021logit",)

    needs: ClassVar[Needs] = Needs(labels=True, logits=True, numbers=True)
    reductions: ClassVar[ReductionRules] = {"counts": SparseDeltaSum()}

    tau: float = validated(1.0, at_least, 0)
    prior: Literal["client", "federation"] = validated("client", one_of, ("client", "federation"))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._base: Tensor | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        stream, self._base = find_stream(trainer), None
        if stream is not None and len(stream.plan.base_samples):
            self._base = torch.as_tensor(stream.y[stream.plan.base_samples])

    def init_server_state(self, module: L.LightningModule) -> State:
        if self.prior == "client":
            return {}
        if not isinstance(module, HasNumClasses):
            raise InvalidValueError(
                f"Expected a module with `num_classes` for `LogitAdjustment`, but got a `{type(module).__name__}`.",
                hint="Use a `Classifier`, or define `num_classes` and `lightning_fcl_protocols = True` in the module.",
                argument="num_classes",
            )
        return {"counts": _counted(torch.empty(0) if self._base is None else self._base, module.num_classes)}

    def prepare_client_state(self, client: Client) -> StateSection:
        counts = _counted(client.client_round.labels, client.client_round.num_classes)
        if not counts.any() and client.method_state:
            counts = client.method_state["counts"]
        memory = {"experience": client.method_state.get("experience", torch.tensor(-1)), "counts": counts}
        if "counts" not in client.server_state:
            return memory
        shared = client.server_state["counts"]
        unsent = client.method_state.get("unsent", torch.zeros_like(shared)).to(shared.device)
        local_counts = pad_classes(self._new_counts(client, counts).to(shared.device), len(shared)) + unsent
        return {**memory, "counts": shared + local_counts, "unsent": unsent}

    def _new_counts(self, client: Client, counts: Tensor) -> Tensor:
        """Return the number of the round's samples of each class that the client has not trained on before.

        In a plain Trainer without a `FederatedStream`, samples are counted once per fit.
        """
        if client.history is None:
            return counts * client.is_new_experience
        return _counted(client.client_round.labels[client.history.new], len(counts))

    def upload_statistics(self, client: Client, trained_state: State, data: Batch) -> State:
        if self.prior == "client":
            return {}
        unsent = client.method_state["unsent"]
        counts = _counted(client.client_round.labels, len(unsent))
        return {"counts": self._new_counts(client, counts).to(unsent.device) + unsent}

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        # `needs.labels` guarantees targets.
        assert step.y is not None
        if self.tau == 0:
            return 0.0
        counts = match_output(client.method_state["counts"], step.output)
        adjusted = logit_adjusted_loss(step.output, step.y, counts, self.tau)
        return step.mean(adjusted - F.cross_entropy(step.output, step.y, reduction="none"))

    def update_client_state(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        experience_idx = (
            client.method_state["experience"]
            if client.missed_sync
            else torch.tensor(client.client_round.experience_idx)
        )
        memory = {
            "experience": experience_idx,
            "counts": _counted(client.client_round.labels, client.client_round.num_classes),
        }
        return memory | (
            {"unsent": self.upload_statistics(client, trained_state, data)["counts"]} if client.missed_sync else {}
        )


def _counted(labels: Tensor, classes: int) -> Tensor:
    return torch.bincount(labels.long(), minlength=classes).float()


Outputs = Literal["probabilities", "log-probabilities", "logits"]
Distance = Literal["squared", "absolute"]
Scope = Literal["session", "seen", "all"]


def mean_output_loss(
    logits: Tensor,
    target: Tensor,
    new: Tensor,
    old: Tensor,
    outputs: Outputs = "probabilities",
    distance: Distance = "squared",
) -> Tensor:
    """Return the distance between the mean outputs of new and old classes, per sample (Kröger et al.).

    The mean over the new classes leaves out the target's class. The paper describes the loss in words only. The
    distance is 0 if there are no old classes, or no new classes other than the target's.

    Args:
        logits: Logits, shape (batch, classes).
        target: Target classes, shape (batch,).
        new: Mask of the session's classes, shape (classes,).
        old: Mask of the classes of earlier sessions, shape (classes,).
        outputs: Outputs to average. Probabilities are from a softmax over all classes.
        distance: Squared or absolute difference of the means.
    """
    if outputs == "probabilities":
        logits = logits.softmax(dim=-1)
    elif outputs == "log-probabilities":
        logits = logits.log_softmax(dim=-1)
    other_classes = new & ~target_mask(target, logits)
    of_new, of_old = (
        (logits * classes).sum(dim=-1) / classes.sum(dim=-1).clamp(min=1)
        for classes in (other_classes, old.expand_as(other_classes))
    )
    difference = torch.where(other_classes.any(dim=-1) & old.any(), of_new - of_old, 0.0)
    return difference.square() if distance == "squared" else difference.abs()


@dataclass(eq=False)
class MeanOutputLoss(Method):
    """Mean Output Loss, MOL (Kröger et al., 2025).

    The loss of each step is ``cross-entropy + mu * MOL``, see `mean_output_loss`. New classes are the classes that any
    client of the federation learns in the current session and that no earlier session contained. Old classes are the
    classes of all earlier sessions. If the experiences of a `FederatedStream` are sets of classes, the stream defines
    new and old classes. Otherwise, old classes are the classes on which the client trained in earlier sessions, and new
    classes are all other classes of the batch. In a plain Trainer without a stream, each `fit` is a session. A client
    keeps masks of these classes, and uploads the same tensors as in FedAvg.

    The paper leaves several choices open. The defaults are the squared difference of mean probabilities, and
    cross-entropy over the session's classes only. ``recipes/odfcl/README.md`` compares the choices. For a replay sample
    of an old class (`Replay`), the default cross-entropy is over all classes seen.

    Args:
        mu: Weight of MOL, at least 0.
        output_kind: Outputs that are averaged, see `mean_output_loss`.
        distance: Squared or absolute difference of the means.
        cross_entropy: Classes of the task's cross-entropy: the classes of the ``"session"``, all ``"seen"`` classes, or
            ``"all"`` outputs. With ``"session"`` or ``"seen"``, the task's loss must be cross-entropy, as in
            `Classifier`.

    Raises:
        ValueError: If an argument is out of range, or the module's output is not class logits.
        TypeError: If the batches are not pairs.

    Example:
        >>> MeanOutputLoss(mu=2.0).mu
        2.0
    """

    citations: ClassVar[tuple[str, ...]] = ("kroeger2025odfcl",)

    needs: ClassVar[Needs] = Needs(labels=True, logits=True)

    mu: float = validated(2.0, at_least, 0)
    output_kind: Outputs = validated("probabilities", one_of, get_args(Outputs))
    distance: Distance = validated("squared", one_of, get_args(Distance))
    cross_entropy: Scope = validated("session", one_of, get_args(Scope))

    def prepare_client_state(self, client: Client) -> StateSection:
        memory, client_round = client.method_state, client.client_round
        if client_round.new_classes or client_round.old_classes:
            classes_by_name = {"new": client_round.new_classes, "old": client_round.old_classes}
            return {name: class_mask(client_round.num_classes, classes) for name, classes in classes_by_name.items()}
        seen_mask = memory.get("seen", class_mask(client_round.num_classes, ()))
        if client.is_new_experience:
            memory = {"experience": torch.tensor(client_round.experience_idx), "old": seen_mask, "seen": seen_mask}
        return memory

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        # `needs.labels` guarantees targets.
        assert step.y is not None
        output, target_classes = step.output, target_mask(step.y, step.output)
        old = match_output(client.method_state["old"], output)
        if "new" in client.method_state:
            new = match_output(client.method_state["new"], output)
        else:
            real = target_classes if step.sample_weight is None else target_classes & (step.sample_weight > 0)[:, None]
            new = real.any(dim=0) & ~old
        total = self.mu * mean_output_loss(output, step.y, new, old, self.output_kind, self.distance)
        if self.cross_entropy != "all":
            allowed = (new if self.cross_entropy == "session" else new | old).expand_as(output)
            remembered = (target_classes & old).any(dim=-1, keepdim=True)
            allowed = torch.where(remembered, new | old, allowed) | target_classes
            total = total + F.cross_entropy(mask_other_classes(output, allowed), step.y, reduction="none")
            total = total - F.cross_entropy(output, step.y, reduction="none")
        return step.mean(total)

    def update_client_state(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        memory = client.method_state
        if "seen" not in memory:
            return memory
        return {**memory, "seen": add_seen_classes(memory["seen"], client.client_round.labels)}
