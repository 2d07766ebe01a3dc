"""Mean Output Loss: new classes are learnt beside the old ones without a stored sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fcl.data.batches import Batch
from lightning_fcl.errors import argument, at_least, one_of
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.methods.client import Client
from lightning_fcl.methods.declaration import Needs
from lightning_fcl.methods.method import Method, class_mask, masked, padded, with_classes
from lightning_fcl.methods.step import Step

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
    """How far the mean output of the new classes, without the target's, is from that of the old classes, per sample.

    Kröger et al. give it in words. It is 0 where no class is old, or none is new but the target's. ``new`` and ``old``
    tell classes of the session and of earlier ones, shape (classes,); probabilities are those of a softmax over all.
    """
    if outputs == "probabilities":
        logits = logits.softmax(dim=-1)
    elif outputs == "log-probabilities":
        logits = logits.log_softmax(dim=-1)
    others = new & ~_one_hot(target, logits)
    of_new, of_old = (
        (logits * classes).sum(dim=-1) / classes.sum(dim=-1).clamp(min=1) for classes in (others, old.expand_as(others))
    )
    difference = torch.where(others.any(dim=-1) & old.any(), of_new - of_old, 0.0)
    return difference.square() if distance == "squared" else difference.abs()


def _one_hot(target: Tensor, like: Tensor) -> Tensor:
    return torch.arange(like.shape[-1], device=like.device) == target[..., None]


@dataclass(eq=False)
class MeanOutputLoss(Method):
    """Every step: cross-entropy among the session's classes, and `mean_output_loss` (Kröger et al.: MOL).

    ``cross-entropy + mu * MOL``. A session's new classes are those that any client of the federation learns in it; old
    are those of all sessions before. The stream tells them; in a plain Trainer without a `FederatedStream`, a `fit` is
    a session, and the new classes are those of the batch that were not seen in an earlier one.

    Of the readings of the paper's words that were tried (``recipes/odfcl/README.md``) the default is the one that
    works: squared difference of mean probabilities, with a cross-entropy that leaves the old classes alone. For a
    remembered sample of an old class (`Replay`) the cross-entropy is over all classes seen.

    Args:
        mu: Weight of MOL, at least 0.
        outputs: What the means are of: see `mean_output_loss`.
        distance: See `mean_output_loss`.
        cross_entropy: The classes that the task's cross-entropy is over: those of the ``"session"``, all ``"seen"``,
            or ``"all"`` outputs. The first two presume that the task's loss is cross-entropy, as `Classifier`'s is.

    Raises:
        ValueError: If an argument is out of range, or a batch has no labels.

    Example:
        >>> MeanOutputLoss(mu=2.0).mu
        2.0
    """

    needs: ClassVar[Needs] = Needs(labels=True, logits=True)

    mu: float = argument(2.0, at_least, 0)
    outputs: Outputs = argument("probabilities", one_of, get_args(Outputs))
    distance: Distance = argument("squared", one_of, get_args(Distance))
    cross_entropy: Scope = argument("session", one_of, get_args(Scope))

    def on_download(self, client: Client) -> Memory:
        memory, part = client.memory, client.part
        if part.new_classes or part.old_classes:
            known = {"new": part.new_classes, "old": part.old_classes}
            return {name: class_mask(part.num_classes, classes) for name, classes in known.items()}
        seen = memory.get("seen", class_mask(part.num_classes, ()))
        if not memory or part.experience > int(memory["experience"]):
            memory = {"experience": torch.tensor(part.experience), "old": seen, "seen": seen}
        return memory

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        assert step.y is not None  # as it needs labels
        output, own = step.output, _one_hot(step.y, step.output)
        known = {
            n: padded(v.to(output.device), output.shape[-1]) for n, v in client.memory.items() if n in ("new", "old")
        }
        old, new = known["old"], known.get("new")
        if new is None:
            real = own if step.weight is None else own & (step.weight > 0)[:, None]
            new = real.any(dim=0) & ~old
        total = self.mu * mean_output_loss(output, step.y, new, old, self.outputs, self.distance)
        if self.cross_entropy != "all":
            allowed = (new if self.cross_entropy == "session" else new | old).expand_as(output)
            remembered = (own & old).any(dim=-1, keepdim=True)
            allowed = torch.where(remembered, new | old, allowed) | own
            total = total + F.cross_entropy(masked(output, allowed), step.y, reduction="none")
            total = total - F.cross_entropy(output, step.y, reduction="none")
        return step.mean(total)

    def end_round(self, client: Client, own: State, data: Batch) -> Memory:
        memory = client.memory
        if "seen" not in memory:
            return memory
        return {**memory, "seen": with_classes(memory["seen"], client.part.labels)}
