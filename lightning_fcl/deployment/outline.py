"""What a server tells a client of the stream: rounds, classes, tasks. With it a node finds its samples of a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.samples import Samples
from lightning_fcl.data.scenarios import EMPTY, ClassIncremental, DomainIncremental, IntArray, Plan, Pool
from lightning_fcl.data.scenarios.scenario import History, with_history
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.deployment.messages import RefusedError
from lightning_fcl.randomness import seed_of

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Outline:
    """The stream as one client sees it, without a sample of it.

    Args:
        groups: Names of what tasks are made of: the classes, or the domains.
        of_classes: Whether it is the classes.
        experiences: The client's experience in each round.
        tasks: The numbers of the groups of each of its experiences.
        task_classes: All classes of the task of each experience, or nothing.
        common_tasks: The classes of each task that all clients have in common.
        new_classes: The classes that are new to the whole federation in each round.
        dealt: Whether groups tell a round's samples; if not, a node's data must tell its rounds.
    """

    client: str
    classes: tuple[str, ...]
    groups: tuple[str, ...]
    of_classes: bool
    experiences: tuple[int, ...]
    tasks: Groups
    task_classes: Groups
    common_tasks: Groups
    new_classes: Groups
    old_classes: Groups
    history: History = "round"
    samples_per_round: int | None = None
    dealt: bool = True

    @classmethod
    def of_plain(cls, values: Mapping[str, Any]) -> Outline:
        try:
            return cls(**{name: _tuples(value) for name, value in values.items()})
        except TypeError as error:
            raise RefusedError(f"Expected the outline of a stream but got: {error}.") from error


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class ClientPlan(Plan):
    """The plan of one client, which knows of the others what the server has told."""

    outline: Outline = field(kw_only=True)

    def classes(self, round: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.outline.new_classes[round], self.outline.old_classes[round]

    @property
    def common_tasks(self) -> Groups:
        return self.outline.common_tasks


def outline_of(stream: FederatedStream, client: str) -> Outline:
    plan, scenario = stream.plan, stream.scenario
    dealt = isinstance(scenario, ClassIncremental | DomainIncremental)
    per_round = scenario.samples_per_round if isinstance(scenario, ClassIncremental | DomainIncremental) else None
    both = [plan.classes(round) for round in range(plan.rounds)]
    domains = stream.samples.group
    names = stream.samples.classes
    if not plan.of_classes and domains is not None:
        names = tuple(map(str, np.unique(domains)))
    return Outline(
        client,
        stream.samples.classes,
        names,
        plan.of_classes,
        plan.experiences[client],
        plan.tasks[client],
        plan.task_classes.get(client, ()),
        plan.common_tasks,
        tuple(new for new, _ in both),
        tuple(old for _, old in both),
        plan.history,
        per_round,
        dealt,
    )


def client_plan(outline: Outline, groups: IntArray, rounds: NDArray[np.bool_] | None, seed: int) -> ClientPlan:
    """The plan of a node's own samples.

    Args:
        groups: The number of each sample's class or domain, shape (n,).
        rounds: Whether each sample is of each round, shape (n, rounds), where the data say so themselves.
    """
    number = len(outline.experiences)
    if rounds is not None:
        if rounds.shape[1] != number:
            raise RefusedError(
                f"Expected `rounds` of the data of client {outline.client} to have a column for each of {number} "
                f"rounds but got {rounds.shape[1]}. Split the data for this recipe."
            )
        dealt = [np.flatnonzero(column) for column in rounds.T]
    elif not outline.dealt:
        raise RefusedError(
            f"Expected the data of client {outline.client} to say in `rounds` which samples come in which round: this "
            "scenario deals them out one by one. Write them with `lightning-fcl deploy split`."
        )
    else:
        whole = [_rows(outline, groups, round, seed) for round in range(number)]
        own = [{outline.client: rows} if len(rows) else {} for rows in whole]
        dealt = [current.get(outline.client, EMPTY) for current in with_history(own, outline.history)]
    return ClientPlan(
        train=tuple({outline.client: rows} if len(rows) else {} for rows in dealt),
        experiences={outline.client: outline.experiences},
        tasks={outline.client: outline.tasks},
        groups=groups,
        test=EMPTY,
        of_classes=outline.of_classes,
        task_classes={outline.client: outline.task_classes} if outline.task_classes else {},
        history=outline.history,
        outline=outline,
    )


def _rows(outline: Outline, groups: IntArray, round: int, seed: int) -> IntArray:
    experience = outline.experiences[round]
    everything = len(outline.tasks) == 1 and not outline.classes
    wanted = outline.tasks[experience] if experience < len(outline.tasks) else ()
    rows = np.arange(len(groups)) if everything else np.flatnonzero(np.isin(groups, wanted))
    if outline.samples_per_round is None:
        return rows
    rng = np.random.default_rng(seed_of(seed, outline.client, "rounds", experience))
    within, size = round - outline.experiences.index(experience), outline.samples_per_round
    part = rng.permutation(rows)[within * size : (within + 1) * size]
    return np.sort(part)


def server_plan(
    scenario: ClassIncremental | DomainIncremental,
    samples: Samples,
    part: NDArray[Any] | None,
    clients: Sequence[str],
    seed: int,
) -> Plan:
    """A plan in which clients have tasks and no samples, and the server's samples are tested on, each in its part."""
    named = np.zeros(len(samples), dtype=np.int64) if samples.group is None else samples.group
    domains, group = np.unique(named, return_inverse=True)
    number = max(len(samples.classes), len(domains), 1)
    each = np.arange(number)
    y = np.concatenate([each % max(len(samples.classes), 1), samples.labels])
    of_all = None if samples.group is None else np.concatenate([each % len(domains), group])
    names = () if samples.group is None else tuple(map(str, domains))
    part = np.full(len(samples), "test") if part is None else part
    test, validation = (np.flatnonzero(part == name) + number for name in ("test", "validation"))
    pool = Pool(y, EMPTY, test, validation, dict.fromkeys(clients, each), of_all, samples.classes, names)
    plan = replace(scenario, samples_per_round=None).plan(pool, seed)
    return replace(
        plan,
        train=tuple(dict.fromkeys(clients, EMPTY) for _ in plan.train),
        groups=plan.groups[number:],
        test=plan.test - number,
        validation=plan.validation - number,
    )
