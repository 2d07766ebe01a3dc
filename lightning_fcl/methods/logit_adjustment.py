"""Logit adjustment: a loss that takes into account how often each class comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fcl.data.attached import stream_of
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.errors import argument, at_least, one_of
from lightning_fcl.federation.aggregation import Rules, State
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.federation.protocol import HasClasses
from lightning_fcl.methods.method import Method, padded
from lightning_fcl.methods.prototypes import SumOfSome
from lightning_fcl.methods.step import Step

_NEVER = -1e4  # not -inf: differences of losses stay finite


class Total(SumOfSome):
    """The reduction ``sum`` of what is often nothing, of which clients also receive the server's value."""

    name = "total"
    down = True

    def start(self, server: Tensor) -> Tensor:
        return server

    def nothing(self, server: Tensor) -> Tensor:
        return torch.zeros_like(server)


def logit_adjusted_loss(logits: Tensor, target: Tensor, counts: Tensor, tau: float = 1.0) -> Tensor:
    """Cross-entropy of logits that are shifted by ``tau * log(prior)`` of their class, per sample.

    Menon et al. 2021, equation 10; with ``tau = 1`` the balanced softmax of Ren et al. 2020. The prior is the share of
    ``counts``, shape (classes,). A class without samples takes no part, but as a sample's own, whose logit then stays
    as it is; where all counts are 0, or ``tau`` is, nothing is shifted.
    """
    if tau == 0:
        return F.cross_entropy(logits, target, reduction="none")
    there = counts > 0
    shift = tau * torch.where(there, counts / counts.sum().clamp(min=1), 1.0).log()
    own = torch.arange(logits.shape[-1], device=logits.device) == target[..., None]
    shifted = torch.where(there | own | ~there.any(), logits + shift, _NEVER)
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

    needs_labels: ClassVar[bool] = True
    needs_logits: ClassVar[bool] = True
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

    def on_download(self, memory: Memory, server: State, client_round: ClientRound) -> Memory:
        counts = _counted(client_round.labels, client_round.num_classes)
        if not counts.any() and memory:
            counts = memory["counts"]
        all_counts = server.get(f"{self.section}.counts")
        if all_counts is not None:
            own = counts.to(all_counts.device) * (not self._is_counted(memory, client_round))
            counts = all_counts + padded(own, len(all_counts))
        return {"experience": memory.get("experience", torch.tensor(-1)), "counts": counts}

    def contribute(self, memory: Memory, own: State, data: object, client_round: ClientRound) -> State:
        if self.prior == "client" or self._is_counted(memory, client_round):
            return {}
        return {"counts": _counted(client_round.labels, len(memory["counts"]))}

    def _is_counted(self, memory: Memory, client_round: ClientRound) -> bool:
        return bool(memory) and client_round.experience <= int(memory["experience"])

    def penalty(self, memory: Memory, step: Step) -> Tensor | float:
        if step.y is None:
            raise ValueError("Expected batches `[x, y]` for `LogitAdjustment` but got none with labels. Return pairs.")
        if self.tau == 0:
            return 0.0
        counts = padded(memory["counts"].to(step.output.device), step.output.shape[-1])
        adjusted = logit_adjusted_loss(step.output, step.y, counts, self.tau)
        return step.mean(adjusted - F.cross_entropy(step.output, step.y, reduction="none"))

    def end_round(
        self, memory: Memory, own: State, data: object, client_round: ClientRound, generator: torch.Generator
    ) -> Memory:
        federation, counted = self.federation, torch.tensor(client_round.experience)
        if federation is not None and client_round.client in federation.server.record.missed:
            counted = memory["experience"]
        return {"experience": counted, "counts": _counted(client_round.labels, client_round.num_classes)}


def _counted(labels: Tensor, classes: int) -> Tensor:
    return torch.bincount(labels.long(), minlength=classes).float()
