"""The progress of the current round."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.simulation.cohort import Cohort


@dataclass(eq=False)
class RoundProgress:
    """The progress of a round: the clients that train, and those that are yet to train.

    Args:
        number: Number of the round, from 0.
        cohorts: The groups of clients that are yet to train; a single None if no client trains in this process.
        cohort: The clients that train now, or have trained last.
        has_trained: Whether clients have trained on a batch of the round.
        done: Whether the server's new state is in the module.
        settled: Whether no hook of the round's last batch is left to run.
    """

    number: int
    cohorts: deque[Cohort | None] = field(default_factory=deque)
    cohort: Cohort | None = None
    has_trained: bool = False
    done: bool = False
    settled: bool = True

    @property
    def client_round(self) -> ClientRound | None:
        """The client that trains now. None between rounds and in vectorized training."""
        return self.cohort.client_round if self.cohort is not None else None

    @property
    def local_epoch(self) -> int:
        """The local epoch of the current batch, from 0."""
        return self.cohort.local_epoch if self.cohort is not None else 0

    @property
    def last_batch(self) -> bool:
        """Whether the current batch is the last one of its clients in the round."""
        return self.cohort is None or self.cohort.last_batch
