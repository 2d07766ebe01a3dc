"""Scenarios `Blurry` and `GrowingClasses`, and the scenarios `Online` and `Delayed`, which change another scenario."""

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
    """Stochastic incremental blurry scenario, Si-Blurry (Moon et al., 2023, section 3).

    The classes of each experience are drawn. The number of classes of an experience is also drawn, and is at least one.
    A fraction of all classes is disjoint: these classes occur in one experience only. From the samples of all other
    classes, a fraction is drawn over all clients. Each of these blurry samples occurs in a random experience.

    The test of an experience contains all classes of the samples that clients have in the experience. Use this scenario
    within `Online` to use each sample in one round only, as in the paper.

    Args:
        num_experiences: Number of experiences.
        rounds_per_experience: Number of rounds of each experience.
        disjoint_ratio: Fraction of the classes that occur in one experience only, from 0 to 1.
        blurry_ratio: Fraction of the samples of the other classes that occur in a random experience, from 0 to 1.

    Raises:
        ValueError: If an argument is out of range, or if there are fewer classes than experiences.

    Example:
        >>> y = np.arange(1000) % 10
        >>> pool = SamplePool(y, clients={"a": np.arange(1000)}, classes=tuple("abcdefghij"))
        >>> plan = Blurry(3, disjoint_ratio=0.5, blurry_ratio=0.1).plan(pool)
        >>> times = [sum(c in y[current["a"]] for current in plan.train) for c in range(10)]
        >>> sorted(times), sum(len(current["a"]) for current in plan.train)
        ([1, 1, 1, 1, 1, 3, 3, 3, 3, 3], 1000)
    """

    citations = ("moon2023siblurry",)

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
        # Index of the experience of each class.
        time = np.zeros(int(pool.y.max()) + 1, dtype=np.int64)
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
    """Class-incremental scenario in which each experience has at least as many new classes as the previous one.

    For example, ten classes in four experiences are divided into 1, 2, 3 and 4 classes.

    Args:
        num_experiences: Number of experiences.
        rounds_per_experience: Number of rounds of each experience.
        class_order: Classes in the order in which they occur, by number or by name. None draws the order from the seed.

    Raises:
        ValueError: If an argument is out of range, or if there are fewer classes than experiences.

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
    """Single-pass scenario. A client's samples of an experience are divided among rounds, and no sample is used twice.

    With ``local_epochs=1`` and a small ``batch_size``, a client trains on each sample once, like a device without
    storage.

    Args:
        scenario: Scenario to change, such as `Blurry`, or the name of its class. The ``history`` of the scenario must
            be "round". Default: `ClassIncremental` with ten rounds per experience.

    Raises:
        TypeError: If ``scenario`` is not a scenario.
        ValueError: If the name of the scenario is unknown. `plan` raises it if the ``history`` is not "round".

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
                'Expected the scenario of `Online` to have the history "round", because no sample is reused, but got '
                f'"{plan.history}".',
                hint="Remove `history` from the scenario.",
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
    """Scenario in which clients start tasks at different times, with delays of up to ``max_delay`` rounds.

    The delays are drawn for each client and task. For each client, the delays are sorted, so that a later task never
    has a shorter delay and no task is shortened. A client has the samples of a task in at least as many rounds as in
    the original scenario. If the samples of a task are the same in each of its rounds, the client has these samples
    until its next task starts.
    Rounds in which no client has samples are removed.

    Args:
        scenario: Scenario to change, or the name of its class. Default: `ClassIncremental` with ten rounds per
            experience.
        max_delay: Maximum delay of a client, in rounds.

    Raises:
        TypeError: If ``scenario`` is not a scenario.
        ValueError: If ``max_delay`` is below 0, or if the name of the scenario is unknown.

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
    """Return the classes of the clients' samples. Raise ValueError if there are fewer classes than experiences."""
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
    """Set `provides_split` and `provides_clients` to the values of the inner scenario."""
    inner_scenario = _inner(scenario.scenario)
    for name, value in {
        "provides_split": inner_scenario.provides_split,
        "provides_clients": inner_scenario.provides_clients,
    }.items():
        # A frozen dataclass does not allow plain assignment.
        object.__setattr__(scenario, name, value)


def _runs(experiences: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Yield a pair (experience, rounds) for each run of consecutive rounds in which a client has one experience."""
    for experience, rounds in groupby(range(len(experiences)), experiences.__getitem__):
        yield experience, list(rounds)


def _without_empty_rounds(
    plan: Plan, train: Sequence[dict[str, IntArray]], experiences: Mapping[str, tuple[int, ...]]
) -> Plan:
    round_indices = [round_idx for round_idx, current in enumerate(train) if current]
    numbers = {client: tuple(own[round_idx] for round_idx in round_indices) for client, own in experiences.items()}
    return replace(plan, train=tuple(train[round_idx] for round_idx in round_indices), experiences=numbers)
