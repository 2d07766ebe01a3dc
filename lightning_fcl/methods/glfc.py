"""GLFC: new and old classes learn at one pace, and old ones as the server's model knew them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fcl.errors import argument, between
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.methods.client import Client, remember, section
from lightning_fcl.methods.declaration import Needs
from lightning_fcl.methods.method import Method, padded, with_classes
from lightning_fcl.methods.step import Step


def class_aware_weights(logits: Tensor, y: Tensor, old: Tensor, share: Tensor | None = None) -> Tensor:
    """``g / mean g`` of ``g = 1 - sigmoid(z_y)``, shape (batch,), the mean over the samples of old, or of new, classes.

    Args:
        logits: z, shape (batch, classes).
        y: Labels, shape (batch,).
        old: Which classes are old, shape (classes,).
        share: What each sample counts in the mean, shape (batch,); None: all alike.

    Example:
        >>> class_aware_weights(Tensor([[0, 0], [0, 0], [9, 0]]), torch.tensor([0, 1, 1]), torch.tensor([True, False]))
        tensor([1., 1., 1.])
    """
    pace = torch.sigmoid(-logits.detach().gather(1, y[:, None])[:, 0])
    share, of_old = torch.ones_like(pace) if share is None else share, old[y]
    old_mean, new_mean = (
        (pace * share * group).sum() / (share * group).sum().clamp(min=1e-12) for group in (of_old, ~of_old)
    )
    return pace / torch.where(of_old, old_mean, new_mean).clamp(min=1e-12)


@dataclass(eq=False)
class GLFC(Method):
    """Every step: class-aware weights, and distillation from the old server's model (Dong et al. 2022, "GLFC").

    In place of the task loss: ``(1 - strength) * mean w BCE(z, y) + strength * mean BCE(z, t)``, of binary
    cross-entropies of the sigmoids of all classes that any client has been given so far; w are `class_aware_weights`, t
    are the labels, for old classes replaced by what the teacher says. While no class is old it is the first term alone.
    The stream tells which classes are old, those of all earlier experiences; one that is not of classes has none.

    The teacher is what the client receives when it first takes part in an experience: the server's model after the one
    before. Exemplars are `Replay`'s, beside it. The paper's proxy server is not here: to choose the best teacher it
    rebuilds images of clients from gradients that they send; nor is its detection of new tasks by entropy.

    Args:
        strength: Share of the distillation, 0 to 1; 0: class-aware weights alone.

    Raises:
        ValueError: If ``strength`` is out of range, or the module's output are no logits of classes.
        TypeError: If the batches are no pairs.

    Example:
        >>> GLFC(strength=0.5).task_weight(Client())
        0.0
    """

    needs: ClassVar[Needs] = Needs(labels=True, logits=True)

    strength: float = argument(0.5, between, 0, 1)

    def on_download(self, client: Client) -> Memory:
        memory, part = client.memory, client.part
        if not memory or part.experience > int(memory["experience"]):
            teacher = remember(client.server, "teacher") if self.strength > 0 else {}
            memory = {"experience": torch.tensor(part.experience), **teacher}
        nothing = torch.zeros(part.num_classes, dtype=torch.bool)
        known = {"old": part.old_classes, "seen": part.old_classes + part.new_classes}
        masks = {name: with_classes(nothing, torch.tensor(c, dtype=torch.long)) for name, c in known.items()}
        return {**memory, **masks}

    def task_weight(self, client: Client) -> float:
        return 0.0

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        assert step.y is not None  # as it needs labels
        z, y = step.output, step.y
        old, seen = (padded(client.memory[name].to(z.device), z.shape[-1]) for name in ("old", "seen"))
        seen = seen | ~seen.any()

        def entropy(target: Tensor) -> Tensor:
            each = F.binary_cross_entropy_with_logits(z, target, reduction="none")
            return (each * seen).sum(dim=1) / seen.sum()

        target = (torch.arange(z.shape[-1], device=z.device) == y[:, None]).to(z)
        loss = step.mean(class_aware_weights(z, y, old, step.weight) * entropy(target))
        if self.strength == 0:
            return loss
        said = step.predict(section(client.memory, "teacher"), step.x).sigmoid()
        share = self.strength * old.any()
        return (1 - share) * loss + share * step.mean(entropy(torch.where(old, said, target)))
