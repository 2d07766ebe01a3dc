"""Plain federated learning: nothing changes from round to round."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_fcl.data.scenarios.incremental import ClassIncremental
from lightning_fcl.data.scenarios.scenario import MOST_ROUNDS, Plan, Pool, Scenario
from lightning_fcl.errors import argument, between, check_fields


@dataclass(frozen=True)
class Stationary(Scenario):
    """Plain federated learning: every client has all of its samples in every round; targets need be no classes.

    Args:
        rounds: Number of rounds.

    Raises:
        ValueError: If there are fewer than one or more than a million.

    Example:
        >>> import numpy as np
        >>> pool = Pool(np.zeros(3, int), clients={"a": np.arange(2), "b": np.arange(2, 3)})
        >>> [{client: rows.tolist() for client, rows in now.items()} for now in Stationary(2).plan(pool).train]
        [{'a': [0, 1], 'b': [2]}, {'a': [0, 1], 'b': [2]}]
    """

    rounds: int = argument(1, between, 1, MOST_ROUNDS)

    def __post_init__(self) -> None:
        check_fields(self)

    def plan(self, pool: Pool, seed: int = 0) -> Plan:
        return ClassIncremental(1, self.rounds).plan(pool, seed)
