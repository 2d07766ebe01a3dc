"""Ditto: a personal model that stays near the shared one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from lightning_fcl.errors import argument, at_least
from lightning_fcl.federation.aggregation import State
from lightning_fcl.methods.client import Client, section
from lightning_fcl.methods.declaration import Needs
from lightning_fcl.methods.functional import GradientOf
from lightning_fcl.methods.personal import PersonalModel
from lightning_fcl.methods.projection import flatten


@dataclass(eq=False)
class Ditto(PersonalModel):
    """Every step: a personal model ``v`` learns the task near the server's model (Li et al. 2021, Algorithm 1).

    The shared ``w`` travels and trains as without it. With each of its steps ``v`` takes one on the same batch, by an
    optimizer like its, along the gradient of ``task loss + strength / 2 * ||v - w_server||^2``, of which w_server is
    what the client has received. A client predicts with its ``v``: `personalize`, which
    ``ContinualMetrics(when="aggregated")`` tests; buffers are those of ``w``. It keeps ``v``, and sends what FedAvg
    sends.

    Clients train one at a time; a step costs two forward and backward passes in place of one.

    Args:
        strength: Weight (lambda) of the distance, at least 0; with 0, ``v`` learns from the client's data alone.

    Raises:
        ValueError: If ``strength`` is negative, the Trainer is no federation's, or the module does not state its loss
            apart.

    Example:
        >>> Ditto(strength=0.1).strength
        0.1
    """

    needs: ClassVar[Needs] = Needs(
        labels=True, loss=True, federation="with a single client there is no shared model to stay near. Remove `Ditto`"
    )

    strength: float = argument(0.1, at_least, 0)

    def personal_gradient(
        self, client: Client, own: State, shared: Mapping[str, nn.Parameter], gradient_of: GradientOf
    ) -> Tensor:
        gradient = gradient_of(*client.batch, own)
        return gradient + self.strength * (flatten(own) - flatten({name: client.server[name] for name in own}))

    def personalize(self, client: Client, state: State) -> State:
        own = {name: value.to(state[name].device) for name, value in section(client.memory, "v").items()}
        return {**state, **own}
