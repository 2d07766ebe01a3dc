"""A swarm: nodes without a server, one of which brings the round's uploads together; some may be out of reach."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_fcl.errors import InvalidValueError, check_arguments
from lightning_fcl.rng import derive_seed


class Swarm:
    """How the nodes of a federation without a server find together (Kröger et al.: an ad hoc master).

    The master of a round is the first of the nodes in reach. It sends and receives nothing itself, and does not change
    the result. A node that misses a synchronisation goes on from its own weights, and sends what it has when it is in
    reach again.

    Args:
        dropout: Probability that a node misses a round's synchronisation.
        missing: For each node, rounds (from 0) whose synchronisation it misses in any case.
        leaves: For each node that leaves for good, the first round without it.

    Raises:
        ValueError: If ``dropout`` is not a probability below 1, or a round is negative.

    Example:
        >>> swarm = Swarm(leaves={"node1": 3})
        >>> swarm.departed_nodes(2), swarm.departed_nodes(3), swarm.elect_master(["node2", "node3"])
        (set(), {'node1'}, 'node2')
    """

    @check_arguments
    def __init__(
        self,
        dropout: float = 0.0,
        missing: dict[str, list[int]] | None = None,
        leaves: dict[str, int] | None = None,
    ) -> None:
        if not 0 <= dropout < 1:
            raise InvalidValueError(
                f"Expected `dropout` to be at least 0 and below 1 but got {dropout}.", argument="dropout", value=dropout
            )
        self.dropout = dropout
        self.missing = {str(node): list(rounds) for node, rounds in (missing or {}).items()}
        self.leaves = {str(node): int(round_idx) for node, round_idx in (leaves or {}).items()}
        for round_idx in self.explicit_rounds:
            if round_idx < 0:
                raise InvalidValueError(
                    f"Expected rounds of `missing` and `leaves` from 0 on but got {round_idx}.",
                    argument="leaves" if round_idx in self.leaves.values() else "missing",
                    value=round_idx,
                )

    @property
    def explicit_nodes(self) -> list[str]:
        return [*self.missing, *self.leaves]

    @property
    def explicit_rounds(self) -> list[int]:
        return [*self.leaves.values(), *(round_idx for rounds in self.missing.values() for round_idx in rounds)]

    def departed_nodes(self, round_idx: int) -> set[str]:
        return {node for node, first in self.leaves.items() if round_idx >= first}

    def misses_sync(self, node: str, round_idx: int, seed: int) -> bool:
        """Whether a node misses a round's synchronisation: it depends on nothing but node, round and seed."""
        if round_idx in self.missing.get(node, ()):
            return True
        return bool(np.random.default_rng(derive_seed(seed, "swarm", node, round_idx)).random() < self.dropout)

    def elect_master(self, reachable_clients: Sequence[str]) -> str | None:
        """Who brings the uploads together: the first of the nodes in reach, if there is any."""
        return reachable_clients[0] if reachable_clients else None

    def hparams(self) -> dict[str, Any]:
        return {"dropout": self.dropout, "missing": dict(self.missing), "leaves": self.leaves}
