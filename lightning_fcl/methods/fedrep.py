"""FedRep: a shared body and a head of one's own, trained one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import lightning.pytorch as L

from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.errors import argument, at_least
from lightning_fcl.federation.aggregation import reductions_of
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.federation.protocol import need_federation
from lightning_fcl.methods.compose import methods_of
from lightning_fcl.methods.declaration import overrides
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.step import Part


@dataclass(eq=False)
class FedRep(Method):
    """Every local epoch: trains the head alone, in the first epochs, then the body alone (Collins et al. 2021, Alg. 1).

    What is not trained is frozen to the bit. The body travels, the head stays with the client: declare it, as in
    ``FederatedStrategy(reductions={"model.head.*": "none"})``.

    Args:
        head_epochs: Local epochs of the head, at least 1.
        body_epochs: Local epochs of the body, at least 1. Both go over the strategy's `local_epochs`.
        head: Shell-style pattern of the head's entries.

    Raises:
        ValueError: If the Trainer is no federation's, ``head`` matches all parameters or none, or the head is not
            declared to stay with the clients.

    Example:
        >>> FedRep(head_epochs=2, body_epochs=4).head
        'model.head.*'
    """

    vectorizable: ClassVar[bool] = False

    head_epochs: int = argument(2, at_least, 1)
    body_epochs: int = argument(4, at_least, 1)
    head: str = "model.head.*"

    def local_epochs(self, memory: Memory, client_round: ClientRound) -> int | None:
        return self.head_epochs + self.body_epochs if self.applies_to(client_round) else None

    def trains(self, memory: Memory, local_epoch: int) -> Part | None:
        return Part(self.head, inverse=local_epoch >= self.head_epochs)

    def prepare(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        check_stages(self, trainer, pl_module, self.head)


def check_stages(method: Method, trainer: L.Trainer, module: L.LightningModule, head: str) -> None:
    """Refuse a Trainer in which a method cannot train head and body in stages."""
    why = "it has no local epochs, and no clients that share a body"
    federation = need_federation(trainer, type(method).__name__, why)
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    chosen = sorted(name for name in trainable if name in Part(head))
    if not chosen or len(chosen) == len(trainable):
        raise ValueError(
            f"Expected `head` to match some of the trainable parameters but `{head}` matches {len(chosen)} of "
            f"{len(trainable)}: {', '.join(sorted(trainable)[:3])}, ..."
        )
    staged = [type(other).__name__ for other in methods_of(trainer) if overrides(other, "trains")]
    if len(staged) > 1:
        raise ValueError(
            f"Expected at most one method that trains head and body in stages but got {' and '.join(staged)}. "
            "Remove one."
        )
    reductions = reductions_of(module, federation.strategy.rules)
    for name in chosen:
        if not reductions[name].own:
            raise ValueError(
                f'Expected the head to stay with the clients but {name} has the reduction "{reductions[name].name}". '
                f'Give the strategy `reductions={{"{head}": "none"}}`.'
            )
