"""The scenario of the paper `odfcl`."""

from __future__ import annotations

from collections.abc import Sequence
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
from lightning_fcl.errors import argument, at_least, between, check_fields


@dataclass(frozen=True)
class ODFCLScenario(Scenario):
    """The scenario of Kröger et al.: a base session, then sessions in which each node of a swarm sees its own class.

    The people are drawn from the data set and numbered in the order in which they are learnt; the others are there for
    pre-training. Experience 0 is the base session, which is no round: `lightning_fcl.callbacks.BaseSession` trains it.

    Args:
        people: Classes to learn.
        base: Classes of the base session; the sessions share the others evenly.
        sessions: Sessions after the base session.
        nodes: Clients, each with its own classes of a session, or a part of one class where there are fewer.
        train_per_class: Training samples of each class, as ``test_per_class``.
        validation_per_class: Of the training samples, those that are kept to choose settings on.
        pretrain_per_class: At most so many samples of each person that is not drawn; 0: no pre-training.
        rounds_per_session: Synchronisations in each session.
        history: ``"round"``, or ``"seen"``: the samples of all classes so far, those of the base session shared by the
            nodes (joint training), or ``"all"``.

    Raises:
        ValueError: If there are too few people or samples, or the classes do not divide as they must.

    Example:
        >>> plan = ODFCLScenario().plan(Pool(np.repeat(np.arange(12), 40)))
        >>> plan.rounds, plan.clients, plan.tasks["node1"], plan.classes(20)
        (40, ('node1', 'node2', 'node3'), ((0, 1, 2, 3), (4,), (7,)), ((7, 8, 9), (0, 1, 2, 3, 4, 5, 6)))
    """

    own_split = own_clients = True
    people: int = 10
    base: int = argument(4, at_least, 1)
    sessions: int = argument(2, at_least, 1)
    nodes: int = argument(3, at_least, 1)
    train_per_class: int = 28
    test_per_class: int = 7
    validation_per_class: int = 0
    pretrain_per_class: int = argument(100, at_least, 0)
    rounds_per_session: int = argument(20, between, 1, MOST_ROUNDS)
    history: History = "round"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.people <= self.base or (self.people - self.base) % self.sessions:
            raise ValueError(
                f"Expected `people` to leave as many classes for each of {self.sessions} sessions but got "
                f"{self.people}, {self.base} of them in the base session. Set `people` to {self.base} and a multiple "
                "of `sessions`."
            )

    def plan(self, pool: Pool, seed: int = 0) -> Plan:
        rng, y = np.random.default_rng([seed, 3]), pool.y
        sizes = (self.train_per_class, self.test_per_class, self.validation_per_class)
        drawn, parts = _draw_people(y, self.people, sizes, rng)
        shares, tasks = self._shares(parts["train"])
        joint = with_history(
            [{node: own[e] for node, own in shares.items()} for e in range(self.sessions + 1)], self.history
        )
        rounds = [{k: v for k, v in joint[e].items() if len(v)} for e in range(1, self.sessions + 1)]
        current = tuple(e for e in range(1, self.sessions + 1) for _ in range(self.rounds_per_session))
        others = rng.permutation(np.setdiff1d(np.arange(y.max() + 1), drawn))
        order = np.concatenate([drawn, others])
        numbers = np.argsort(order)[y]
        pretrain = [rng.permutation(np.flatnonzero(y == c))[: self.pretrain_per_class] for c in others]
        return Plan(
            train=tuple(rounds[e - 1] for e in current),
            experiences=dict.fromkeys(shares, current),
            tasks={node: tuple(groups) for node, groups in tasks.items()},
            groups=np.where(numbers < self.people, numbers, 0),
            test=np.sort(np.concatenate(parts["test"])),
            validation=np.sort(np.concatenate(parts["validation"])).astype(np.int64),
            pretrain=np.sort(np.concatenate([EMPTY, *pretrain])).astype(np.int64),
            base=np.sort(np.concatenate(parts["train"][: self.base])),
            order=order,
            outputs=self.people,
            history=self.history,
        )

    def _shares(self, train: Sequence[IntArray]) -> tuple[dict[str, list[IntArray]], dict[str, list[tuple[int, ...]]]]:
        """Every node's samples and classes of the base session and of each session."""
        base, nodes, each = self.base, self.nodes, (self.people - self.base) // self.sessions
        shares = {
            f"node{n + 1}": [np.sort(np.concatenate([samples[n::nodes] for samples in train[:base]]))]
            for n in range(nodes)
        }
        tasks = {node: [tuple(range(base))] for node in shares}
        for first in range(base, self.people, each):
            hands: list[list[IntArray]] = [[EMPTY] for _ in shares]
            groups: list[list[int]] = [[] for _ in shares]
            for index, samples in enumerate(train[first : first + each]):
                sharing = [n for n in range(nodes) if (index % nodes == n if nodes <= each else n % each == index)]
                for place, n in enumerate(sharing):
                    hands[n].append(samples[place :: len(sharing)])
                    groups[n].append(first + index)
            for node, hand, own in zip(shares, hands, groups, strict=True):
                shares[node].append(np.sort(np.concatenate(hand)))
                tasks[node].append(tuple(own))
        return shares, tasks


def _draw_people(
    y: IntArray, people: int, sizes: tuple[int, int, int], rng: np.random.Generator
) -> tuple[IntArray, dict[str, list[IntArray]]]:
    """The classes to learn, in order, and the training, test and validation samples of each."""
    train, test, validation = sizes
    if not 0 <= validation < train or test < 1:
        raise ValueError(
            f"Expected `validation_per_class` to be below `train_per_class` and `test_per_class` at least 1 but got "
            f"{validation}, {train} and {test}."
        )
    classes, counts = np.unique(y, return_counts=True)
    enough = classes[counts >= train + test]
    if len(enough) < people:
        raise ValueError(
            f"Expected at least {people} people with {train + test} samples but the data set has {len(enough)}. Lower "
            "`people`, `train_per_class` or `test_per_class`."
        )
    drawn = rng.permutation(enough)[:people]
    parts: dict[str, list[IntArray]] = {"train": [], "test": [], "validation": []}
    for c in drawn:
        own = rng.permutation(np.flatnonzero(y == c))
        parts["test"].append(own[:test])
        parts["validation"].append(own[test : test + validation])
        parts["train"].append(own[test + validation : test + train])
    return drawn, parts
