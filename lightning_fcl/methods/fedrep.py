"""FedRep: a shared body and a head of one's own, trained one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_fcl.errors import argument, at_least
from lightning_fcl.methods.client import Client
from lightning_fcl.methods.declaration import Needs
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.step import Pattern


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
    needs: ClassVar[Needs] = Needs(federation="it has no local epochs, and no clients that share a body", head=True)

    head_epochs: int = argument(2, at_least, 1)
    body_epochs: int = argument(4, at_least, 1)
    head: str = "model.head.*"

    def local_epochs(self, client: Client) -> int | None:
        return self.head_epochs + self.body_epochs if client.active else None

    def trains(self, client: Client) -> Pattern | None:
        return self.head if client.local_epoch < self.head_epochs else f"!{self.head}"
