"""The progress of the current round."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.simulation.client_group import ClientGroup


@dataclass(eq=False)
class RoundProgress:
    """The progress of a round: the current clients, and the clients that have not trained yet.

    Args:
        round_idx: Number of the round, from 0.
        client_groups: The groups of clients that have not trained yet. A single None if no client trains in this
            process.
        client_group: The clients that currently train, or that trained last.
        has_trained: Whether clients have trained on a batch of the round.
        done: Whether the server's new state is in the module.
        settled: Whether all hooks of the round's last batch have run.
    """

    round_idx: int
    client_groups: deque[ClientGroup | None] = field(default_factory=deque)
    client_group: ClientGroup | None = None
    has_trained: bool = False
    done: bool = False
    settled: bool = True

    @property
    def client_round(self) -> ClientRound | None:
        """The client that currently trains. None between rounds and in vectorized training."""
        return self.client_group.client_round if self.client_group is not None else None

    @property
    def local_epoch(self) -> int:
        """The local epoch of the current batch, from 0. 0 if no client trains."""
        return self.client_group.local_epoch if self.client_group is not None else 0

    @property
    def last_batch(self) -> bool:
        """Whether the current batch is the last batch of the current clients. True if no client trains."""
        return self.client_group is None or self.client_group.last_batch
