"""Estimate of the remaining time of a fit, from the times of finished rounds and the samples of each round."""

from __future__ import annotations

import math
from collections.abc import Sequence

import lightning.pytorch as L

from lightning_fcl.data.trainer_access import require_stream
from lightning_fcl.federation.protocols import find_federation

_SAMPLED_ROUNDS = 100
"""Largest number of rounds whose clients are drawn for an estimate."""


class RemainingTime:
    """Estimate of the remaining time of a fit.

    The time of a round is assumed to be proportional to its number of training samples. The first measured round is
    often slower, because caches are filled and code is compiled. The estimate therefore ignores this round as soon as
    another round has been measured.

    Args:
        samples: Number of training samples of each round of the fit.

    Example:
        >>> remaining_time = RemainingTime([100, 100, 200])
        >>> remaining_time.add(0, seconds=9.0)
        >>> remaining_time.seconds
        27.0
        >>> remaining_time.add(1, seconds=2.0)
        >>> remaining_time.seconds
        4.0
    """

    def __init__(self, samples: Sequence[int]) -> None:
        # A round without samples also takes some time.
        self._samples = [max(1, number) for number in samples]
        self._seconds: dict[int, float] = {}

    def add(self, round_idx: int, seconds: float) -> None:
        """Add the time of a finished round."""
        self._seconds[round_idx] = seconds

    @property
    def seconds(self) -> float:
        """Estimated time in seconds of all rounds after the last finished round. 0 if no round is finished."""
        if not self._seconds:
            return 0.0
        first, *later_rounds = self._seconds
        measured_rounds = later_rounds or [first]
        rate = sum(self._seconds[number] for number in measured_rounds) / sum(
            self._samples[number] for number in measured_rounds
        )
        return rate * sum(self._samples[max(self._seconds) + 1 :])


def sample_rounds(rounds: range) -> range:
    """Return evenly spaced rounds, the first round included. Drawing the clients of all rounds would take time.

    Example:
        >>> sample_rounds(range(5)), sample_rounds(range(250))
        (range(0, 5), range(0, 250, 3))
    """
    return rounds[:: math.ceil(len(rounds) / _SAMPLED_ROUNDS) or 1]


def count_training_samples(trainer: L.Trainer) -> list[int]:
    """Return the number of training samples of each round of a fit, summed over the clients that are expected to train.

    With a simulated clock, all clients that have data are counted. A round that `sample_rounds` leaves out has the
    number of the preceding sampled round.
    """
    plan, federation, numbers = require_stream(trainer).plan, find_federation(trainer), list[int]()
    rounds = range(min(trainer.max_epochs or 0, plan.num_rounds))
    for number in sample_rounds(rounds):
        current = plan.train[number]
        clients = [*current]
        if federation is not None and federation.participation.synchronization is None:
            clients = federation.participation.expected_clients(plan, number)
        numbers += [sum(len(current[client]) for client in clients)] * sample_rounds(rounds).step
    return numbers[: len(rounds)]
