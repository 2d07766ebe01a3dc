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
    def number(self) -> int:
        """How many there are."""

    @property
    def rank(self) -> int:
        """Which one this is, from 0."""

    def share(self, value: T) -> Sequence[T]:
        """What each of them has, by rank."""

    def add_up(self, numbers: Tensor) -> None:
        """Let whole numbers, shape (n,), become their sum over all ranks, in place."""


class OneRank:
    """A federation in a single process."""

    number = 1
    rank = 0

    def share(self, value: T) -> Sequence[T]:
        return [value]

    def add_up(self, numbers: Tensor) -> None:
        return


ALONE = OneRank()
"""A process that runs a federation on its own."""


def share_by_client(ranks: Ranks, mine: Mapping[str, T], order: Sequence[str]) -> dict[str, T]:
    """What all ranks have for clients, each of which is one rank's: of several ranks in an order of the clients."""
    if ranks.number == 1:
        return dict(mine)
    found = {client: value for part in ranks.share(dict(mine)) for client, value in part.items()}
    return {client: found[client] for client in order if client in found}
