"""Partitions, which divide samples among clients.

A partition is an object. Its arguments define how samples are divided. Its method `partition` returns the samples of
each client. In a recipe, a partition without arguments can be specified by its class name. A sample belongs to at most
one client. All randomness comes from the random generator that is passed to `partition`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.scenarios import IntArray, concat_views
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.validation import between, unit_interval, validate_fields, validated

_ATTEMPTS = 1000


class Partition(ABC):
    """A rule that divides samples among clients. To add a partition, define a subclass with a method `partition`."""

    def __post_init__(self) -> None:
        validate_fields(self)

    @property
    def needs_classes(self) -> bool:
        """Whether the partition requires targets that are classes. If True, a stream rejects other targets."""
        return False

    @abstractmethod
    def partition(self, y: IntArray, client_ids: NDArray[Any] | None, rng: np.random.Generator) -> dict[str, IntArray]:
        """Return the sorted positions in ``y`` of each client's samples. No position is returned twice.

        The keys are the names of the clients: "0", "1" and so on, or the owners in ``client_ids``.

        Args:
            y: Label of each sample, shape ``(n,)``. All labels are 0 if targets are not classes.
            client_ids: Owner of each sample, integers or strings, shape ``(n,)``. None if the data define no owners.
            rng: Random generator for all draws.

        Raises:
            ValueError: If the samples cannot be divided as requested.
        """


@dataclass(frozen=True)
class ByClientId(Partition):
    """One client for each owner in the data, such as a subject or a user. The client has the owner's samples.

    Example:
        >>> parts = ByClientId().partition(np.zeros(3, int), np.array([10, 2, 10]), np.random.default_rng(0))
        >>> {name: index.tolist() for name, index in parts.items()}
        {'2': [1], '10': [0, 2]}
    """

    def partition(self, y: IntArray, client_ids: NDArray[Any] | None, rng: np.random.Generator) -> dict[str, IntArray]:
        if client_ids is None:
            raise InvalidValueError(
                "Expected the owner of each sample for the partition `ByClientId`, but the data define no owners.",
                hint="Use another `partition`, such as `IID`.",
                argument="partition",
            )
        names, number = np.unique(client_ids, return_inverse=True)
        # A single stable sort finds the samples of all owners. A search per owner would read all samples each time.
        rows = np.argsort(number, kind="stable").astype(np.int64, copy=False)
        return concat_views(list(map(str, names.tolist())), rows, np.bincount(number))


@dataclass(frozen=True)
class IID(Partition):
    """Samples are assigned to clients uniformly at random. All samples are used. Client sizes differ by at most one.

    Args:
        num_clients: Number of clients, at most the number of samples.

    Raises:
        ValueError: If ``num_clients`` is below 1 or above the number of samples.

    Example:
        >>> parts = IID(3).partition(np.zeros(7, int), None, np.random.default_rng(0))
        >>> sorted(len(index) for index in parts.values())
        [2, 2, 3]
    """

    num_clients: int = 10

    def partition(self, y: IntArray, client_ids: NDArray[Any] | None, rng: np.random.Generator) -> dict[str, IntArray]:
        between(1, len(y), num_clients=self.num_clients)
        return _named([np.array_split(rng.permutation(len(y)), self.num_clients)])


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Each class is divided among the clients in proportions drawn from a symmetric Dirichlet distribution.

    The distribution is from section 4 of Yurochkin et al. (2019), "Bayesian nonparametric federated learning of neural
    networks". For each class, one proportion per client is drawn from Dir(alpha, ..., alpha). All samples are used. If
    a client has fewer than `min_partition_size` samples, all proportions are drawn again, up to 1000 draws in total.

    Args:
        num_clients: Number of clients, at most the number of samples.
        alpha: Concentration, from 1e-9 to 1e6. With a small value, each client has few classes. With a large value,
            each client has nearly the same share of every class.
        min_partition_size: Minimum number of samples per client.

    Raises:
        ValueError: If an argument is out of range, or if there are fewer than ``num_clients * min_partition_size``
            samples. Also if none of 1000 draws gives each client `min_partition_size` samples.

    Example:
        >>> y = np.repeat([0, 1], 50)
        >>> parts = Dirichlet(4, alpha=0.5, min_partition_size=5).partition(y, None, np.random.default_rng(0))
        >>> sum(len(index) for index in parts.values()), min(len(index) for index in parts.values()) >= 5
        (100, True)
    """

    needs_classes = True
    num_clients: int = 10
    alpha: float = validated(0.5, between, 1e-9, 1e6)
    min_partition_size: int = 1

    def partition(self, y: IntArray, client_ids: NDArray[Any] | None, rng: np.random.Generator) -> dict[str, IntArray]:
        between(1, len(y), num_clients=self.num_clients)
        for _ in range(_ATTEMPTS if self.min_partition_size <= len(y) // self.num_clients else 0):
            pieces = []
            for label in np.unique(y):
                members = rng.permutation(np.flatnonzero(y == label))
                ends = np.cumsum(rng.dirichlet(np.full(self.num_clients, self.alpha)))[:-1]
                pieces.append(_cut(members, ends))
            parts = _named(pieces)
            if min(map(len, parts.values())) >= self.min_partition_size:
                return parts
        raise InvalidValueError(
            f"Expected each client to have at least `min_partition_size`={self.min_partition_size} sample(s), but "
            f"found no such partition with `alpha`={self.alpha}, `num_clients`={self.num_clients} and {len(y)} "
            "sample(s).",
            hint="Lower `min_partition_size` or `num_clients`. With enough samples, you can also raise `alpha`.",
            argument="min_partition_size",
            value=self.min_partition_size,
        )


@dataclass(frozen=True)
class Shards(Partition):
    """Samples are sorted by label and cut into shards of nearly equal size. Each client gets random shards.

    McMahan et al. (2017), "Communication-efficient learning of deep networks from decentralized data", section 3, use
    100 clients with 2 shards of 300 samples. Only the assignment of shards to clients is random. All samples are used.
    The sizes of shards differ by at most one.

    Args:
        num_clients: Number of clients.
        shards_per_client: Number of shards per client. ``num_clients * shards_per_client`` must be at most the number
            of samples.

    Raises:
        ValueError: If there are more shards than samples, or if an argument is below 1.

    Example:
        >>> parts = Shards(2, shards_per_client=1).partition(np.array([1, 0, 1, 0]), None, np.random.default_rng(0))
        >>> sorted(index.tolist() for index in parts.values())
        [[0, 2], [1, 3]]
    """

    needs_classes = True
    num_clients: int = 10
    shards_per_client: int = 2

    def partition(self, y: IntArray, client_ids: NDArray[Any] | None, rng: np.random.Generator) -> dict[str, IntArray]:
        between(1, len(y), num_clients=self.num_clients)
        between(1, len(y) // self.num_clients, shards_per_client=self.shards_per_client)
        pieces = np.array_split(np.argsort(y, kind="stable"), self.num_clients * self.shards_per_client)
        dealt = rng.permutation(len(pieces)).reshape(self.num_clients, self.shards_per_client)
        return _named([[pieces[shard] for shard in hand] for hand in dealt.T])


@dataclass(frozen=True)
class ClassSubsets(Partition):
    """Each client draws a random subset of the classes, and gets a random fraction of the samples of these classes.

    If the fractions of a class, summed over the clients, exceed 1, the samples of the class are divided in proportion
    to the fractions. If the clients' numbers of classes add up to at least the number of classes in the data, every
    class is used. For each class that no client has drawn, one client then gets this class instead of the class that
    the most clients have. If the numbers add up to less, classes that no client has drawn stay unused.

    Args:
        num_clients: Number of clients.
        classes_per_client: Number of classes per client, or an inclusive range from which each client draws the number.
        fraction: Fraction of the samples of each of the client's classes, above 0 and at most 1. Or an inclusive range
            from which each client draws one fraction for all of its classes.

    Raises:
        ValueError: If an argument is out of range, or if a client would get no sample of one of its classes.

    Example:
        >>> y = np.repeat(np.arange(5), 20)
        >>> parts = ClassSubsets(3, classes_per_client=2, fraction=0.1).partition(y, None, np.random.default_rng(0))
        >>> [(len(index), len(np.unique(y[index]))) for index in parts.values()]
        [(4, 2), (4, 2), (4, 2)]
    """

    needs_classes = True
    num_clients: int = 10
    classes_per_client: int | Sequence[int] = 2
    fraction: float | Sequence[float] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = _range(self.fraction)
        unit_interval(fraction=low)
        between(low, 1, fraction=high)

    def partition(self, y: IntArray, client_ids: NDArray[Any] | None, rng: np.random.Generator) -> dict[str, IntArray]:
        between(1, len(y), num_clients=self.num_clients)
        classes = np.unique(y)
        min_classes, max_classes = _range(self.classes_per_client)
        between(1, len(classes), classes_per_client=min_classes)
        between(min_classes, len(classes), classes_per_client=max_classes)
        client_fractions = np.zeros((self.num_clients, len(classes)))
        for client in range(self.num_clients):
            client_classes = rng.choice(
                len(classes), size=rng.integers(min_classes, max_classes, endpoint=True), replace=False
            )
            client_fractions[client, client_classes] = rng.uniform(*_range(self.fraction))
        _deal_left_out(client_fractions, rng)
        pieces = []
        for label, shares in zip(classes, client_fractions.T, strict=True):
            members = rng.permutation(np.flatnonzero(y == label))
            *parts, _ = _cut(members, np.cumsum(shares) / max(1.0, shares.sum()))
            for client, rows in enumerate(parts):
                if shares[client] > 0 and len(rows) == 0:
                    raise InvalidValueError(
                        f"Expected at least one sample of class {label} for client '{client}', but got none (samples "
                        f"of the class: {len(members)}, clients with the class: {np.count_nonzero(shares)}, "
                        f"`fraction` of the client: {shares[client]:.3g}).",
                        hint="Raise `fraction`, or lower `num_clients` or `classes_per_client`.",
                        argument="fraction",
                        value=shares[client],
                    )
            pieces.append(parts)
        return _named(pieces)


def _deal_left_out(client_fractions: NDArray[np.float64], rng: np.random.Generator) -> None:
    """Assign each class that no client has drawn to one client, in place of the class that the most clients have.

    Nothing is changed if the clients' numbers of classes add up to less than the number of classes in the data.
    """
    holders = np.count_nonzero(client_fractions, axis=0)
    if holders.sum() < len(holders):
        return
    for left_out in np.flatnonzero(holders == 0).tolist():
        # At least two clients have drawn `frequent`, because there are at least as many draws as classes, and one class
        # has no draw.
        frequent = int(holders.argmax())
        client = rng.choice(np.flatnonzero(client_fractions[:, frequent]))
        client_fractions[client, [left_out, frequent]] = client_fractions[client, [frequent, left_out]]
        holders[[left_out, frequent]] += 1, -1


def _range(value: float | Sequence[float]) -> tuple[Any, Any]:
    low, high = value if isinstance(value, Sequence) else (value, value)
    return low, high


def _cut(members: IntArray, ends: NDArray[np.float64]) -> list[IntArray]:
    """Return the pieces of ``members`` that end at the given cumulative shares, and a last piece with the rest."""
    # Round the cumulative shares instead of each share. Separately rounded shares could add up to more samples than the
    # class has. If the shares add up to 1, all samples are used.
    return np.split(members, np.rint(ends * len(members)).astype(np.int64))


def _named(pieces: Sequence[Sequence[IntArray]]) -> dict[str, IntArray]:
    """Return the sorted samples of each client, by client number. Client i gets entry i of every item in ``pieces``."""
    parts = (np.sort(np.concatenate(own)).astype(np.int64) for own in zip(*pieces, strict=True))
    return {str(client): part for client, part in enumerate(parts)}
