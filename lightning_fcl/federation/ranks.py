"""Ranks: the processes among which the clients of one federation are shared out, and what they say to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")


class Ranks(Protocol):
    """The processes that run one federation. All of them call all of this, in the same order.

    What they hand each other has no order that a result could depend on: whole numbers are added up, and other values
    come back by rank.
    """

    @property
    def num_ranks(self) -> int:
        """How many there are."""

    @property
    def rank(self) -> int:
        """Which one this is, from 0."""

    def all_gather_object(self, value: T) -> Sequence[T]:
        """What each of them has, by rank."""

    def all_reduce(self, numbers: Tensor) -> None:
        """Let whole numbers, shape (n,), become their sum over all ranks, in place."""


class SingleRank:
    """A federation in a single process."""

    num_ranks = 1
    rank = 0

    def all_gather_object(self, value: T) -> Sequence[T]:
        return [value]

    def all_reduce(self, numbers: Tensor) -> None:
        return


SINGLE_RANK = SingleRank()
"""A process that runs a federation on its own."""


def gather_by_client(ranks: Ranks, local_values: Mapping[str, T], order: Sequence[str]) -> dict[str, T]:
    """What all ranks have for clients, each of which is one rank's: of several ranks in an order of the clients."""
    if ranks.num_ranks == 1:
        return dict(local_values)
    value_by_client = {
        client: value for part in ranks.all_gather_object(dict(local_values)) for client, value in part.items()
    }
    return {client: value_by_client[client] for client in order if client in value_by_client}
