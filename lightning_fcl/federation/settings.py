"""The settings of a federation that methods, tasks and rounds read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_fcl.federation.aggregation import ReductionRules


@dataclass
class FederationSettings:
    """The arguments of `lightning_fcl.FederatedStrategy` that are read during a fit.

    Args:
        rules: Reductions by pattern, which override those of the module.
        local_epochs: Passes over a client's data per round.
        max_vectorized_clients: Maximum number of clients per vectorized step.
        keep_optimizer_state: Whether a client's optimizer state lasts from round to round.
        stops_unusable: Whether a round whose uploads were all dropped ends the fit.
        seed: Seed of participation and of each client's randomness. None: the global seed.
    """

    rules: ReductionRules
    local_epochs: int
    max_vectorized_clients: int | Literal["auto"]
    keep_optimizer_state: bool
    stops_unusable: bool
    seed: int | None = None
