"""A swarm: nodes without a server. One node aggregates the uploads of a round, and nodes can be unreachable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.rng import derive_seed
from lightning_fcl.validation import check_arguments


class Swarm:
    """A federation without a server, in which an ad hoc master aggregates the uploads (Kröger et al., 2025).

    The master of a round is the first reachable node. The transmitted bytes of the master count as 0, and the choice of
    the master does not change the result. A node that misses a synchronization continues from its own weights. The node
    uploads these weights when it is reachable again.

    Args:
        missed_sync_prob: Probability that a node misses the synchronization of a round.
        missed_rounds: For each node, the indices (from 0) of the rounds whose synchronization the node misses.
        leaves_at: For each node that leaves permanently, the first round without it.

    Raises:
        ValueError: If ``missed_sync_prob`` is not at least 0 and below 1, or a round is negative.

    Example:
        >>> swarm = Swarm(leaves_at={"node1": 3})
        >>> swarm.departed_nodes(2), swarm.departed_nodes(3), swarm.elect_master(["node2", "node3"])
        (set(), {'node1'}, 'node2')
    """

    citations: ClassVar[tuple[str, ...]] = ("kroeger2025odfcl",)

    @check_arguments
    def __init__(
        self,
        missed_sync_prob: float = 0.0,
        missed_rounds: dict[str, list[int]] | None = None,
        leaves_at: dict[str, int] | None = None,
    ) -> None:
        if not 0 <= missed_sync_prob < 1:
            raise InvalidValueError(
                f"Expected `missed_sync_prob` to be at least 0 and below 1, but got {missed_sync_prob}.",
                argument="missed_sync_prob",
                value=missed_sync_prob,
            )
        self.missed_sync_prob = missed_sync_prob
        self.missed_rounds = {str(node): list(rounds) for node, rounds in (missed_rounds or {}).items()}
        self.leaves_at = {str(node): int(round_idx) for node, round_idx in (leaves_at or {}).items()}
        for round_idx in self.explicit_rounds:
            if round_idx < 0:
                raise InvalidValueError(
                    f"Expected rounds of `missed_rounds` and `leaves_at` to be at least 0, but got {round_idx}.",
                    argument="leaves_at" if round_idx in self.leaves_at.values() else "missed_rounds",
                    value=round_idx,
                )

    @property
    def explicit_nodes(self) -> list[str]:
        return [*self.missed_rounds, *self.leaves_at]

    @property
    def explicit_rounds(self) -> list[int]:
        return [
            *self.leaves_at.values(),
            *(round_idx for rounds in self.missed_rounds.values() for round_idx in rounds),
        ]

    def departed_nodes(self, round_idx: int) -> set[str]:
        return {node for node, first in self.leaves_at.items() if round_idx >= first}

    def misses_sync(self, node: str, round_idx: int, seed: int) -> bool:
        """Return whether a node misses the synchronization of a round. The result depends only on the arguments."""
        if round_idx in self.missed_rounds.get(node, ()):
            return True
        return bool(np.random.default_rng(derive_seed(seed, "swarm", node, round_idx)).random() < self.missed_sync_prob)

    def elect_master(self, reachable_clients: Sequence[str]) -> str | None:
        """Return the client that aggregates the uploads: the first client of the list, or None for an empty list."""
        return reachable_clients[0] if reachable_clients else None

    def fingerprint(self) -> dict[str, Any]:
        return {"dropout": self.missed_sync_prob, "missing": dict(self.missed_rounds), "leaves": self.leaves_at}
