"""What every scenario is: `Scenario`, which makes a `Plan` of a `Pool` of samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from lightning_fcl.data.scenarios.plan import EMPTY, IntArray, Plan
from lightning_fcl.errors import did_you_mean


@dataclass(frozen=True)
class Pool:
    """The samples that a scenario deals out, and what is known of them.

    Args:
        y: Label of each sample, shape (n,); all 0 where targets are no classes.
        train: The samples to train on.
        test: The test samples.
        validation: The validation samples.
        clients: The training samples of each client, as the stream's partition has divided them.
        group: Natural domain of each sample, numbered from 0, shape (n,); None where the data name none.
        classes: Names of the classes; empty where targets are no classes.
        domains: Names of the domains.
    """

    y: IntArray
    train: IntArray = field(default_factory=lambda: EMPTY)
    test: IntArray = field(default_factory=lambda: EMPTY)
    validation: IntArray = field(default_factory=lambda: EMPTY)
    clients: dict[str, IntArray] = field(default_factory=dict)
    group: IntArray | None = None
    classes: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()


class Scenario(ABC):
    """How a data set becomes a stream: which client sees which samples in which round.

    A scenario of your own is a subclass with a `plan`; its arguments are its own, and in a recipe its class name, or
    its full path if it lives outside this package, is enough.

    Attributes:
        own_split: Whether it draws test and validation samples itself; a stream then takes no `split`.
        own_clients: Whether it deals the samples to clients itself; a stream then takes no `partition`.
    """

    own_split: ClassVar[bool] = False
    own_clients: ClassVar[bool] = False

    @abstractmethod
    def plan(self, pool: Pool, seed: int = 0) -> Plan:
        """Who sees which samples when.

        Args:
            pool: The samples.
            seed: Seed of all draws.

        Raises:
            ValueError: If the samples cannot be dealt out so.
        """

    def __str__(self) -> str:
        return type(self).__name__


def numbered(order: Sequence[int | str], names: Sequence[str], argument: str) -> list[int]:
    """An order of classes or domains by number, where it may name them.

    Raises:
        ValueError: If there is no such name.

    Example:
        >>> numbered(["walk", 0], ["sit", "walk"], "class_order")
        [1, 0]
    """
    for entry in order:
        if isinstance(entry, str) and entry not in names:
            known = ", ".join(names) or "numbers, as they have no names"
            raise ValueError(f"Expected `{argument}` among {known} but got {entry}.{did_you_mean(entry, names)}")
    return [list(names).index(entry) if isinstance(entry, str) else int(entry) for entry in order]
