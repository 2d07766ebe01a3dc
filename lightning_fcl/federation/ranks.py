"""Ranks: the processes that share the clients of one federation, and their communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")


class Ranks(Protocol):
    """The processes that run one federation. All ranks call the same functions in the same order.

    Results do not depend on the order of communication. Integers are added exactly, and other values are returned in
    the order of the ranks.
    """

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""

    @property
    def rank(self) -> int:
        """Index of this rank, from 0."""

    def all_gather_object(self, value: T) -> Sequence[T]:
        """Return the values of all ranks, in the order of the ranks."""

    def all_reduce(self, numbers: Tensor) -> None:
        """Replace integers, shape (n,), by their sum over all ranks, in place."""


class SingleRank:
    """The `Ranks` of a federation that runs in a single process."""

    num_ranks = 1
    rank = 0

    def all_gather_object(self, value: T) -> Sequence[T]:
        return [value]

    def all_reduce(self, numbers: Tensor) -> None:
        return


SINGLE_RANK = SingleRank()
"""The single rank of a federation that runs in one process."""


def gather_by_client(ranks: Ranks, local_values: Mapping[str, T], order: Sequence[str]) -> dict[str, T]:
    """Return the values of all clients from all ranks as one dict. At most one rank has a value for each client.

    With several ranks, the result contains only clients in ``order``, in this order.
    """
    if ranks.num_ranks == 1:
        return dict(local_values)
    value_by_client = {
        client: value for part in ranks.all_gather_object(dict(local_values)) for client, value in part.items()
    }
    return {client: value_by_client[client] for client in order if client in value_by_client}
