"""Logit adjustment: a loss that takes into account how often each class comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fcl.data.attached import stream_of
from lightning_fcl.data.batches import Batch
from lightning_fcl.errors import argument, at_least, one_of
from lightning_fcl.federation.aggregation import Rules, State
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.federation.protocol import HasClasses
from lightning_fcl.federation.reductions import Changes
from lightning_fcl.methods.client import Client
from lightning_fcl.methods.declaration import Needs
from lightning_fcl.methods.method import Method, masked, padded
from lightning_fcl.methods.prototypes import SumOfSome
from lightning_fcl.methods.step import Step


class Total(SumOfSome, Changes):
    """The reduction ``sum`` of what is often nothing, of which clients also receive the server's value."""

    name = "total"


def logit_adjusted_loss(logits: Tensor, target: Tensor, counts: Tensor, tau: float = 1.0) -> Tensor:
    """Cross-entropy of logits that are shifted by ``tau * log(prior)`` of their class, per sample.

    Menon et al. 2021, equation 10; with ``tau = 1`` the balanced softmax of Ren et al. 2020. The prior is the share of
    ``counts``, shape (classes,). A class without samples takes no part, but as a sample's own, whose logit then stays
    as it is; where all counts are 0, or ``tau`` is, nothing is shifted.
    """
    if tau == 0:
        return F.cross_entropy(logits, target, reduction="none")
    present = counts > 0
    shift = tau * torch.where(present, counts / counts.sum().clamp(min=1), 1.0).log()
    own = torch.arange(logits.shape[-1], device=logits.device) == target[..., None]
    shifted = masked(logits + shift, present | own | ~present.any())
    return F.cross_entropy(shifted, target, reduction="none")


@dataclass(eq=False)
class LogitAdjustment(Method):
    """Every step: the cross-entropy is that of logits shifted by the logarithm of the classes' priors.

    A class that comes often no longer wins by coming often, and one that does not come at all is left alone: of a
    client's own classes as in Zhang et al. 2022, or of those that all clients have trained on so far, as in Menon et
    al. 2021 and the balanced softmax of Ren et al. 2020. It presumes that the task's loss is cross-entropy.

    Args:
        tau: Strength, at least 0; 0 is the task's own loss.
        prior: Whose samples the classes are counted in: the ``"client"``'s own of the round (in a plain Trainer
            without a `FederatedStream`, of the epoch before), or those of the ``"federation"``: of all clients so far
            and of the base session. Clients then send their counts, once for each experience.

    Raises:
        ValueError: If an argument is out of range, a batch has no labels, or the module does not tell its classes.

    Example:
        >>> LogitAdjustment(tau=1.0, prior="federation").prior
        'federation'
    """

    needs: ClassVar[Needs] = Needs(labels=True, logits=True)
    reductions: ClassVar[Rules] = {"counts": Total()}

    tau: float = argument(1.0, at_least, 0)
    prior: Literal["client", "federation"] = argument("client", one_of, ("client", "federation"))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._base: Tensor | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        stream, self._base = stream_of(trainer), None
        if stream is not None and len(stream.plan.base):
            self._base = torch.as_tensor(stream.y[stream.plan.base])

    def server_state(self, module: L.LightningModule) -> State:
        if self.prior == "client":
            return {}
        if not isinstance(module, HasClasses):
            raise ValueError(
                f"Expected a module with `num_classes` for `LogitAdjustment` but got a `{type(module).__name__}`. Use "
                "a `Classifier`, or define it beside `speaks_lightning_fcl = True`."
            )
        return {"counts": _counted(torch.empty(0) if self._base is None else self._base, module.num_classes)}

    def on_download(self, client: Client) -> Memory:
        counts = _counted(client.part.labels, client.part.num_classes)
        if not counts.any() and client.memory:
            counts = client.memory["counts"]
        if "counts" in client.shared:
            own = counts.to(client.shared["counts"].device) * (not _is_counted(client))
            counts = client.shared["counts"] + padded(own, len(client.shared["counts"]))
        return {"experience": client.memory.get("experience", torch.tensor(-1)), "counts": counts}

    def contribute(self, client: Client, own: State, data: Batch) -> State:
        if self.prior == "client" or _is_counted(client):
            return {}
        return {"counts": _counted(client.part.labels, len(client.memory["counts"]))}

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        assert step.y is not None  # as it needs labels
        if self.tau == 0:
            return 0.0
        counts = padded(client.memory["counts"].to(step.output.device), step.output.shape[-1])
        adjusted = logit_adjusted_loss(step.output, step.y, counts, self.tau)
        return step.mean(adjusted - F.cross_entropy(step.output, step.y, reduction="none"))

    def end_round(self, client: Client, own: State, data: Batch) -> Memory:
        counted = client.memory["experience"] if client.missed else torch.tensor(client.part.experience)
        return {"experience": counted, "counts": _counted(client.part.labels, client.part.num_classes)}


def _is_counted(client: Client) -> bool:
    """Whether the server has the counts of its experience."""
    return bool(client.memory) and client.part.experience <= int(client.memory["experience"])


def _counted(labels: Tensor, classes: int) -> Tensor:
    return torch.bincount(labels.long(), minlength=classes).float()
