"""Ditto: a personal model that stays near the shared one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from lightning_fcl.errors import argument, at_least
from lightning_fcl.federation.aggregation import State
from lightning_fcl.methods.apfl import APFL
from lightning_fcl.methods.client import Client
from lightning_fcl.methods.declaration import Needs
from lightning_fcl.methods.projection import flatten


@dataclass(eq=False)
class Ditto(APFL):
    """Every step: a personal model ``v`` learns the task near the server's model (Li et al. 2021, Algorithm 1).

    The shared ``w`` travels and trains as without it. On each batch ``v``, too, takes a step, by an optimizer like that
    of ``w``, along the gradient of ``task loss + strength / 2 * ||v - w_server||^2``, of which w_server is what the
    client has received: `APFL` with a mixture of ``v`` alone, and a pull. A client begins with ``v`` where it is in its
    first round, predicts with it, as `APFL` says, keeps it, and sends what FedAvg sends.

    Args:
        strength: Weight (lambda) of the distance, at least 0; with 0, ``v`` learns from the client's data alone.

    Raises:
        ValueError: If ``strength`` is negative, or for what `APFL` raises it.

    Example:
        >>> Ditto(strength=0.1).alpha0
        1.0
    """

    needs: ClassVar[Needs] = Needs(
        labels=True, loss=True, federation="with a single client there is no shared model to stay near. Remove `Ditto`"
    )

    alpha0: float = field(default=1.0, init=False)
    alpha_lr: float | None = field(default=0.0, init=False)
    strength: float = argument(0.1, at_least, 0)

    def pull(self, client: Client, own: State) -> Tensor:
        return self.strength * (flatten(own) - flatten({name: client.server[name] for name in own}))
