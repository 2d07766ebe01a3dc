"""The settings of a federation that methods, tasks and rounds read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_fcl.federation.aggregation import ReductionRules


@dataclass
class FederationSettings:
    """The settings that methods, tasks and rounds read. Arguments of `lightning_fcl.FederatedStrategy` define them.

    Args:
        rules: Reductions by pattern, which override the module's reductions.
        local_epochs: Passes over a client's data per round.
        max_vectorized_clients: Maximum number of clients per vectorized step.
        keep_optimizer_state: Whether each client keeps its optimizer state between rounds.
        stops_unusable: Whether a round in which all uploads were dropped raises an error (``on_empty_round="stop"``).
        seed: Seed of client sampling and of each client's random numbers. None: the global seed.
    """

    rules: ReductionRules
    local_epochs: int
    max_vectorized_clients: int | Literal["auto"]
    keep_optimizer_state: bool
    stops_unusable: bool
    seed: int | None = None
