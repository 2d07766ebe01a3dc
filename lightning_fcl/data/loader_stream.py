"""The implicit stream of one client, whose samples come from the loaders of a Trainer without a `FederatedStream`."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_fcl.data.client_round import ClientRound, SampleHistory
from lightning_fcl.data.scenarios.base import EMPTY, Plan
from lightning_fcl.rng import global_seed

CLIENT = "local"
"""Name of the only client of a `LoaderStream`."""

# A placeholder, because the number of samples in an epoch is not known until the epoch ends.
_SAMPLES = {CLIENT: np.zeros(1, dtype=np.int64)}


class ClientStream(Protocol):
    """A stream with the data of clients in each round: a `FederatedStream` or a `LoaderStream`."""

    min_batch_size: int

    @property
    def plan(self) -> Plan: ...
    @property
    def seed(self) -> int: ...
    def client_round(self, client: str, round_idx: int) -> ClientRound: ...
    def sample_history(self, client: str, round_idx: int, trained: list[int]) -> SampleHistory | None: ...
    def has_same_samples(self, client: str, *rounds: int) -> bool: ...
    def client_samples(self, client: str, round_idx: int, seed: int) -> Any: ...


class LoaderStream:
    """The implicit stream of one client. Each fit is an experience, and each epoch is a round. Samples have no indices.

    Args:
        is_kept: Whether inputs are kept until the next round begins. If False, only labels are kept.

    Example:
        >>> stream = LoaderStream()
        >>> stream.begin_round(experience=1, round_idx=0, rounds=2)
        >>> stream.add(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
        >>> part = stream.client_round("local", 0)
        >>> part.num_samples, part.experience_idx, part.is_last_round
        (3, 1, False)
    """

    min_batch_size = 1

    def __init__(self, is_kept: bool = False) -> None:
        self._is_kept = is_kept
        self._x: list[Any] = []
        self._y: list[Tensor] = []
        self.plan = _plan(0, 1)

    @property
    def seed(self) -> int:
        """Seed of all random draws."""
        return global_seed()

    def begin_round(self, experience: int, round_idx: int, rounds: int | None) -> None:
        """Start a round, and discard the samples of the previous epoch.

        Args:
            experience: Index of the experience.
            round_idx: Index of the round.
            rounds: Number of rounds of the fit. None and -1 mean that the number is unlimited.
        """
        num_rounds = round_idx + 2 if rounds in (None, -1) else max(rounds or 0, round_idx + 1)
        if self.plan.num_rounds != num_rounds or self.plan.experiences[CLIENT][0] != experience:
            self.plan = _plan(experience, num_rounds)
        self._x, self._y = [], []

    def add(self, x: Any, y: Tensor) -> None:
        """Add the labels of a batch to the current epoch. Inputs are added only if the stream keeps inputs."""
        if self._is_kept:
            self._x.append(x)
        self._y.append(y)

    def client_round(self, client: str, round_idx: int) -> ClientRound:
        """Return the data about the client in a round, with the labels of the samples that were added in this round."""
        labels = torch.cat(self._y).cpu() if self._y else torch.empty(0, dtype=torch.long)
        last = round_idx + 1 == self.plan.num_rounds
        return ClientRound(client, round_idx, self.plan.experiences[client][round_idx], labels, 0, last, len(labels))

    def sample_history(self, client: str, round_idx: int, trained: list[int]) -> None:
        """Return None, because the samples have no indices."""

    def has_same_samples(self, client: str, *rounds: int) -> bool:
        """Return True, because all epochs of a fit have the same samples."""
        return True

    def client_samples(self, client: str, round_idx: int, seed: int) -> list[Tensor]:
        """Return ``[x, y]``, the samples of the current epoch in the order of its batches.

        Without inputs, the result is ``[y]``. Before the first batch, the list is empty.
        """
        return [torch.cat(column) for column in (self._x, self._y) if column]


def _plan(experience: int, rounds: int) -> Plan:
    experiences = {CLIENT: (experience,) * rounds}
    return Plan(
        (_SAMPLES,) * rounds, experiences, {CLIENT: ((),) * (experience + 1)}, EMPTY, EMPTY, groups_are_classes=False
    )
