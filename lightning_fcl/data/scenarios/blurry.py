"""Streams without clear boundaries: classes that blur or grow, samples that come once, clients that are late."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from lightning_fcl.data.scenarios.base import EMPTY, MAX_ROUNDS, IntArray, Plan, SamplePool, Scenario, from_name
from lightning_fcl.data.scenarios.incremental import ClassIncremental, make_plan
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.validation import at_least, between, validated


@dataclass(frozen=True)
class Blurry(Scenario):
    """Classes come at random times; some of them only then, of the others some samples also at other times.

    The stochastic incremental blurry scenario (Si-Blurry) of Moon et al. 2023, section 3: which classes come in an
    experience, and how many, at least one, is drawn. A share of all classes is disjoint; of the other classes' samples
    a share, drawn over all clients, comes in an experience that is drawn for each sample.

    An experience is tested on all classes of which some client has samples in it. `Online` around it lets each sample
    come in one round only, as the paper has it.

    Args:
        num_experiences: Number of experiences.
        rounds_per_experience: Rounds that each experience lasts.
        disjoint_ratio: Share of the classes that come in one experience alone, from 0 to 1.
        blurry_ratio: Share of the other classes' samples that come at a time of their own, from 0 to 1.

    Raises:
        ValueError: If an argument is out of range, or there are fewer classes than experiences.

    Example:
        >>> y = np.arange(1000) % 10
        >>> pool = SamplePool(y, clients={"a": np.arange(1000)}, classes=tuple("abcdefghij"))
        >>> plan = Blurry(3, disjoint_ratio=0.5, blurry_ratio=0.1).plan(pool)
        >>> times = [sum(c in y[current["a"]] for current in plan.train) for c in range(10)]
        >>> sorted(times), sum(len(current["a"]) for current in plan.train)
        ([1, 1, 1, 1, 1, 3, 3, 3, 3, 3], 1000)
    """

    needs_classes = True
    num_experiences: int = validated(5, at_least, 1)
    rounds_per_experience: int = validated(1, between, 1, MAX_ROUNDS)
    disjoint_ratio: float = validated(0.5, between, 0, 1)
    blurry_ratio: float = validated(0.1, between, 0, 1)

    def plan(self, pool: SamplePool, seed: int = 0) -> Plan:
        everyone = np.concatenate(list(pool.clients.values()))
        classes = _classes_of(pool, self.num_experiences)
        rng = np.random.default_rng([seed, 8])
        ends = np.sort(rng.choice(np.arange(1, len(classes)), self.num_experiences - 1, replace=False))
        time = np.zeros(int(pool.y.max()) + 1, dtype=np.int64)  # of each class
        for experience, labels in enumerate(np.split(rng.permutation(classes), ends)):
            time[labels] = experience
        disjoint_classes = rng.choice(classes, round(self.disjoint_ratio * len(classes)), replace=False)
        blurred = rng.permutation(everyone[~np.isin(pool.y[everyone], disjoint_classes)])
        blurred = blurred[: round(self.blurry_ratio * len(blurred))]
        experience_of = time[pool.y]
        experience_of[blurred] = rng.integers(self.num_experiences, size=len(blurred))
        numbers = range(self.num_experiences)
        parts = {client: [rows[experience_of[rows] == e] for e in numbers] for client, rows in pool.clients.items()}
        tasks = [tuple(np.unique(pool.y[everyone[experience_of[everyone] == e]]).tolist()) for e in numbers]
        template = ClassIncremental(rounds_per_experience=self.rounds_per_experience)
        return make_plan(template, pool, parts, dict.fromkeys(parts, tasks), np.asarray(pool.y), True, rng)


@dataclass(frozen=True)
class GrowingClasses(Scenario):
    """Every experience brings new classes, at least as many as the one before: of ten in four 1, 2, 3 and 4.

    Args:
        num_experiences: Number of experiences.
        rounds_per_experience: Rounds that each experience lasts.
        class_order: The classes in the order in which they come, by number or by name; None draws one from the seed.

    Raises:
        ValueError: If an argument is out of range, or there are fewer classes than experiences.

    Example:
        >>> pool = SamplePool(np.arange(10), clients={"a": np.arange(10)}, classes=tuple("abcdefghij"))
        >>> [len(current["a"]) for current in GrowingClasses(4).plan(pool).train]
        [1, 2, 3, 4]
    """

    needs_classes = True
    num_experiences: int = validated(4, at_least, 1)
    rounds_per_experience: int = validated(1, between, 1, MAX_ROUNDS)
    class_order: Sequence[int | str] | None = None

    def plan(self, pool: SamplePool, seed: int = 0) -> Plan:
        classes = len(_classes_of(pool, self.num_experiences))
        first = np.arange(self.num_experiences + 1)
        share = first * (first + 1) / (self.num_experiences * (self.num_experiences + 1))
        sizes = np.sort(np.diff(np.maximum(np.rint(classes * share).astype(int), first))).tolist()
        return ClassIncremental(sizes, self.rounds_per_experience, class_order=self.class_order).plan(pool, seed)


@dataclass(frozen=True)
class Online(Scenario):
    """One pass: the samples that a client has of an experience are dealt out over its rounds, each to one of them.

    With ``local_epochs=1`` and a small ``batch_size`` a client then sees each sample once, as a device that keeps none.

    Args:
        scenario: The scenario, as `Blurry`, or the name of its class; its ``history`` is "round". Default:
            `ClassIncremental`, with ten rounds for each experience.

    Raises:
        TypeError: If it is no scenario.
        ValueError: If its rounds have samples of earlier ones, too.

    Example:
        >>> pool = SamplePool(np.arange(8) // 4, clients={"a": np.arange(8)}, classes=("no", "yes"))
        >>> of = ClassIncremental(2, rounds_per_experience=2, class_order=["no", "yes"])
        >>> rounds = [current["a"] for current in Online(of).plan(pool).train]
        >>> [len(rows) for rows in rounds], sorted(np.concatenate(rounds).tolist())
        ([2, 2, 2, 2], [0, 1, 2, 3, 4, 5, 6, 7])
    """

    scenario: Scenario | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _take_over(self)

    def __str__(self) -> str:
        return f"Online of {_inner(self.scenario)}"

    @property
    def needs_classes(self) -> bool:
        return _inner(self.scenario).needs_classes

    def plan(self, pool: SamplePool, seed: int = 0) -> Plan:
        plan = _inner(self.scenario).plan(pool, seed)
        if plan.history != "round":
            raise InvalidValueError(
                'Expected the scenario of `Online` to have the history "round", as no sample comes twice, but got '
                f'"{plan.history}".',
                hint="Leave it out.",
                argument="history",
                value=plan.history,
            )
        train: list[dict[str, IntArray]] = [{} for _ in plan.train]
        for client_idx, client in enumerate(plan.clients):
            for experience, numbers in _runs(plan.experiences[client]):
                rounds = [round_idx for round_idx in numbers if client in plan.train[round_idx]]
                if not rounds:
                    continue
                rows = np.unique(np.concatenate([plan.train[round_idx][client] for round_idx in rounds]))
                rows = np.random.default_rng([seed, 9, client_idx, experience]).permutation(rows)
                for round_idx, round_rows in zip(rounds, np.array_split(rows, len(rounds)), strict=True):
                    if len(round_rows):
                        train[round_idx][client] = np.sort(round_rows)
        return _without_empty_rounds(plan, train, plan.experiences)


@dataclass(frozen=True)
class Delayed(Scenario):
    """The same tasks reach clients at different times: each comes up to some rounds late, drawn for each client.

    A client that is late with a task is no earlier with those that follow, so none is cut short: a client has a task's
    samples in as many rounds as the scenario has, and in those until its next task comes, if they were the same in each
    round. Rounds in which no client has samples are left out.

    Args:
        scenario: The scenario, or its class's name. Default: `ClassIncremental`, with ten rounds for each experience.
        max_delay: Most rounds by which a client is late.

    Raises:
        TypeError: If it is no scenario.
        ValueError: If ``max_delay`` is below 0.

    Example:
        >>> pool = SamplePool(np.arange(8) % 2, clients={c: np.arange(8) for c in "abc"}, classes=("no", "yes"))
        >>> plan = Delayed(ClassIncremental(2, rounds_per_experience=2), max_delay=3).plan(pool, seed=1)
        >>> [plan.experiences[client] for client in "abc"]
        [(0, 0, 0, 0, 0, 1, 1), (0, 0, 0, 1, 1, 1, 1), (0, 0, 0, 0, 1, 1, 1)]
    """

    scenario: Scenario | str | None = None
    max_delay: int = validated(5, at_least, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        _take_over(self)

    def __str__(self) -> str:
        return f"Delayed of {_inner(self.scenario)}"

    @property
    def needs_classes(self) -> bool:
        return _inner(self.scenario).needs_classes

    def plan(self, pool: SamplePool, seed: int = 0) -> Plan:
        plan = _inner(self.scenario).plan(pool, seed)
        train: list[dict[str, IntArray]] = [{} for _ in range(plan.num_rounds + self.max_delay)]
        experiences = {}
        for client_idx, client in enumerate(plan.clients):
            runs = list(_runs(plan.experiences[client]))
            draws = np.random.default_rng([seed, 10, client_idx]).integers(
                self.max_delay, size=len(runs), endpoint=True
            )
            numbers = np.full(len(train), runs[0][0])
            rows = [EMPTY] * len(train)
            for (experience, rounds), late in zip(runs, np.sort(draws).tolist(), strict=True):
                task_rows = [plan.train[round_idx].get(client, EMPTY) for round_idx in rounds]
                begin, end = rounds[0] + late, rounds[-1] + late + 1
                numbers[begin:] = experience
                rows[begin:end] = task_rows
                has_same_rows = all(one is task_rows[0] or np.array_equal(one, task_rows[0]) for one in task_rows)
                rows[end:] = [task_rows[0] if has_same_rows else EMPTY] * (len(train) - end)
            experiences[client] = tuple(numbers.tolist())
            for current, own_rows in zip(train, rows, strict=True):
                if len(own_rows):
                    current[client] = own_rows
        return _without_empty_rounds(plan, train, experiences)


def _classes_of(pool: SamplePool, experiences: int) -> IntArray:
    """Return the classes of the clients' samples, at least as many as there are experiences."""
    classes = np.unique(pool.y[np.concatenate(list(pool.clients.values()))])
    if len(classes) < experiences:
        raise InvalidValueError(
            f"Expected `num_experiences` to be at most the number of classes, {len(classes)}, but got {experiences}.",
            hint=f"Use `num_experiences={len(classes)}` or fewer.",
            argument="num_experiences",
            value=experiences,
        )
    return classes


def _inner(scenario: Scenario | str | None) -> Scenario:
    default = ClassIncremental(rounds_per_experience=10)
    return default if scenario is None else from_name("scenario", scenario, Scenario.__subclasses__())


def _take_over(scenario: Online | Delayed) -> None:
    """Let a scenario draw what the one inside draws itself."""
    inner_scenario = _inner(scenario.scenario)
    for name, value in {
        "provides_split": inner_scenario.provides_split,
        "provides_clients": inner_scenario.provides_clients,
    }.items():
        object.__setattr__(scenario, name, value)  # of a frozen dataclass


def _runs(experiences: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Each of a client's experiences in a row, and its rounds."""
    for experience, rounds in groupby(range(len(experiences)), experiences.__getitem__):
        yield experience, list(rounds)


def _without_empty_rounds(
    plan: Plan, train: Sequence[dict[str, IntArray]], experiences: Mapping[str, tuple[int, ...]]
) -> Plan:
    round_indices = [round_idx for round_idx, current in enumerate(train) if current]
    numbers = {client: tuple(own[round_idx] for round_idx in round_indices) for client, own in experiences.items()}
    return replace(plan, train=tuple(train[round_idx] for round_idx in round_indices), experiences=numbers)
