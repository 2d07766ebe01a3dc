"""The scenario of the paper `flwf`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_fcl.data.scenarios.scenario import (
    EMPTY,
    MOST_ROUNDS,
    History,
    IntArray,
    Plan,
    Pool,
    Scenario,
    with_history,
)
from lightning_fcl.errors import between


@dataclass(frozen=True)
class FLwFScenario(Scenario):
    """The scenario of Usmanova et al. 2021, section 3.4: one client whose task changes, one that stands for the others.

    Args:
        rounds: Communication rounds, shared out evenly among a client's tasks.
        samples_per_round: Samples per client and round, the same number of each class of its task, never reused.
        test_per_class: Samples of each class in the common test set.
        pretrain_per_class: Samples of each class for the initial model.
        tasks: For every client, the classes of each of its tasks. Default: client1 has class 1, then class 2;
            generalized has all classes.
        history: As for `ClassIncremental`.

    Raises:
        ValueError: If a class has too few samples, or a number does not divide as it must.

    Example:
        >>> plan = FLwFScenario().plan(Pool(np.repeat(np.arange(6), 1500)))
        >>> plan.rounds, plan.clients, {client: len(rows) for client, rows in plan.train[0].items()}
        (8, ('client1', 'generalized'), {'client1': 120, 'generalized': 120})
    """

    own_split = own_clients = True
    rounds: int = 8
    samples_per_round: int = 120
    test_per_class: int = 100
    pretrain_per_class: int = 10
    tasks: Mapping[str, Sequence[Sequence[int]]] | None = None
    history: History = "round"

    def plan(self, pool: Pool, seed: int = 0) -> Plan:
        between(1, MOST_ROUNDS, rounds=self.rounds)
        classes = np.unique(pool.y).tolist()
        tasks = self.tasks or {"client1": [[1], [2]], "generalized": [classes]}
        rng = np.random.default_rng([seed, 2])
        left = {c: rng.permutation(np.flatnonzero(pool.y == c)) for c in classes}
        test = self._draw(left, classes, self.test_per_class)
        pretrain = self._draw(left, classes, self.pretrain_per_class)
        train: list[dict[str, IntArray]] = []
        experiences: dict[str, list[int]] = {client: [] for client in tasks}
        for r in range(self.rounds):
            current = {}
            for client, sequence in tasks.items():
                if self.rounds % len(sequence):
                    raise ValueError(f"Expected `rounds` to be a multiple of client {client}'s {len(sequence)} tasks.")
                experiences[client].append(r * len(sequence) // self.rounds)
                labels = sequence[experiences[client][-1]]
                if self.samples_per_round % len(labels):
                    raise ValueError(f"Expected `samples_per_round` to be a multiple of {len(labels)} classes.")
                current[client] = self._draw(left, labels, self.samples_per_round // len(labels))
            train.append(current)
        return Plan(
            train=with_history(train, self.history),
            experiences={client: tuple(numbers) for client, numbers in experiences.items()},
            tasks={client: tuple(tuple(labels) for labels in sequence) for client, sequence in tasks.items()},
            groups=np.asarray(pool.y),
            test=test,
            pretrain=pretrain,
            history=self.history,
        )

    def _draw(self, left: dict[int, IntArray], labels: Sequence[int], number: int) -> IntArray:
        drawn = [EMPTY]
        for label in labels:
            rows = left.get(label, EMPTY)
            if len(rows) < number:
                raise ValueError(
                    f"Expected at least {number - len(rows)} more samples of class {label}. Lower `rounds`, "
                    f"`samples_per_round` ({self.samples_per_round}), `test_per_class` or `pretrain_per_class`."
                )
            drawn.append(rows[:number])
            left[label] = rows[number:]
        return np.sort(np.concatenate(drawn))
