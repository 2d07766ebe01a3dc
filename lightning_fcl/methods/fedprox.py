"""FedProx: local training that stays near the server's model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from lightning_fcl.errors import argument, at_least
from lightning_fcl.methods.client import Client
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.step import Step


def proximal_term(params: Mapping[str, Tensor], server: Mapping[str, Tensor]) -> Tensor:
    """Half the squared distance between parameters and the server's, over the entries of ``params``."""
    return 0.5 * torch.stack([(value - server[name]).pow(2).sum() for name, value in params.items()]).sum()


@dataclass(eq=False)
class FedProx(Method):
    """Every step: adds ``mu / 2 * ||w - w_server||^2`` (Li et al. 2020, equation 2).

    Args:
        mu: Weight of the proximal term, at least 0; 0 is FedAvg.
        part: Shell-style pattern of the parameters that it holds, as in ``"head.*"``.

    Raises:
        ValueError: If ``mu`` is negative or ``part`` matches no trainable parameter.

    Example:
        >>> FedProx(mu=0.1).mu
        0.1
    """

    mu: float = argument(0.1, at_least, 0)
    part: str = "*"

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        if self.mu == 0:
            return 0.0
        params = {name: value for name, value in step.params.items() if fnmatchcase(name, self.part)}
        if not params:
            raise ValueError(f"Expected `part` to match a trainable parameter but `{self.part}` matches none.")
        return self.mu * proximal_term(params, step.server)
