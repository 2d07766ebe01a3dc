"""FedRep: a shared body and a head of one's own, trained one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import lightning.pytorch as L
from torch import nn

from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.federation.aggregation import reductions_of
from lightning_fcl.methods.method import Method, methods_of


class FedRep(Method):
    """Every local epoch: trains the head alone, in the first epochs, then the body alone (Collins et al. 2021, Alg. 1).

    What is not trained is frozen to the bit: its parameters get no gradient, and normalisation layers keep their
    statistics. The body travels, the head stays with the client: declare it, as in
    ``FederatedStrategy(reductions={"model.head.*": "none"})``. Clients train one at a time.

    Args:
        head_epochs: Local epochs of the head, at least 1.
        body_epochs: Local epochs of the body, at least 1. Both go over the strategy's `local_epochs`.
        head: Shell-style pattern of the head's entries.
        clients: Who uses it. See `Method`.

    Raises:
        ValueError: If a number is below 1, the Trainer is no federation's, ``head`` matches all parameters or none, or
            the head is not declared to stay with the clients.

    Example:
        >>> FedRep(head_epochs=2, body_epochs=4).head
        'model.head.*'
    """

    def __init__(
        self,
        head_epochs: int = 2,
        body_epochs: int = 4,
        head: str = "model.head.*",
        clients: Literal["all", "unbalanced"] | Sequence[str] = "all",
    ) -> None:
        super().__init__(clients)
        if min(head_epochs, body_epochs) < 1:
            raise ValueError(
                f"Expected `head_epochs` and `body_epochs` to be at least 1 but got {head_epochs} and {body_epochs}."
            )
        self.head_epochs = head_epochs
        self.body_epochs = body_epochs
        self.head = head
        self._trainable: set[str] = set()
        self._part: bool | None = None  # what learns: the head, the body, or all
        self._resting: list[nn.Module] = []  # layers that were in training mode

    @property
    def alone(self) -> bool:
        """Clients train one at a time."""
        return True

    def local_epochs(self, client_round: ClientRound) -> int | None:
        """Those of the head and of the body."""
        return self.head_epochs + self.body_epochs if self.applies_to(client_round) else None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse what has no local epochs, or no head that stays."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        if not self._federated:
            raise ValueError(
                f'Expected a Trainer with `strategy="federated"` for `{type(self).__name__}` but got a plain one, '
                "which has no local epochs, and no clients that share a body."
            )
        self._trainable = {name for name, p in pl_module.named_parameters() if p.requires_grad}
        chosen = {name for name in self._trainable if fnmatchcase(name, self.head)}
        if not chosen or chosen == self._trainable:
            raise ValueError(
                f"Expected `head` to match some of the trainable parameters but `{self.head}` matches {len(chosen)} of "
                f"{len(self._trainable)}: {', '.join(sorted(self._trainable)[:3])}, ..."
            )
        staged = [type(method).__name__ for method in methods_of(trainer) if isinstance(method, FedRep)]
        if len(staged) > 1:
            raise ValueError(
                f"Expected at most one method that trains head and body in stages but got {' and '.join(staged)}. "
                "Remove one."
            )
        strategy: Any = trainer.strategy
        reductions = reductions_of(pl_module, strategy.reductions)
        if any(not reductions[name].own for name in chosen):
            raise ValueError(
                f"Expected the head to stay with the clients but {sorted(chosen)[0]} has the reduction "
                f'"{reductions[sorted(chosen)[0]]}". Give the strategy `reductions={{"{self.head}": "none"}}`.'
            )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Freeze what is not trained in this local epoch."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        strategy: Any = trainer.strategy
        self._train(pl_module, self.trains_head(strategy.local_epoch) if self._active else None)

    def trains_head(self, epoch: int) -> bool:
        """Whether a local epoch, from 0, trains the head, or the body."""
        return epoch < self.head_epochs

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a client's last batch, everything is trainable again."""
        strategy: Any = trainer.strategy
        if strategy.client_round is None or strategy.last_batch:
            self._train(pl_module, None)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Everything is trainable again."""
        super().on_exception(trainer, pl_module, exception)
        self._train(pl_module, None)

    def _train(self, module: nn.Module, part: bool | None) -> None:
        """Let the head learn, or the rest, or all of it."""
        if part == self._part:
            return
        self._part = part
        for name, parameter in module.named_parameters():
            if name in self._trainable:
                parameter.requires_grad_(part is None or fnmatchcase(name, self.head) == part)
        for layer in self._resting:
            layer.training = True
        self._resting = [] if part is None else self._with_buffers(module, head=not part)
        for layer in self._resting:
            layer.training = False

    def _with_buffers(self, module: nn.Module, head: bool) -> list[nn.Module]:
        """The layers of the head, or of the rest, that may keep statistics of what they see."""
        return [
            layer
            for place, layer in module.named_modules()
            if place
            and layer.training
            and (names := [name for name, _ in layer.named_buffers(place, recurse=False)])
            and all(fnmatchcase(name, self.head) == head for name in names)
        ]
