"""Scenarios: which client sees which samples in which round. Pure functions from labels and owners to a `Plan`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from lightning.pytorch.utilities.seed import isolate_rng

IntArray = npt.NDArray[np.int64]
History = Literal["round", "seen", "all"]

EMPTY: IntArray = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Plan:
    """Who sees which samples when, as indices into the data set.

    Args:
        train: For every round, the samples of every client that has any.
        experiences: For every client, its experience in every round.
        tasks: For every client, the test groups (classes, or domains) of each of its experiences.
        groups: The test group of every sample of the data set, shape (n,).
        test: The test samples.
        validation: The validation samples.
        pretrain: Samples for the server before the first round.
        base: Samples of a base session, which the server learns before the first round.
        order: The classes in the order in which the scenario numbers them, shape (C,); None keeps the data set's.
        outputs: Number of classes to tell apart, the first ones of ``order``.
        of_classes: Whether the test groups are classes.
    """

    train: tuple[dict[str, IntArray], ...]
    experiences: dict[str, tuple[int, ...]]
    tasks: dict[str, tuple[tuple[int, ...], ...]]
    groups: IntArray
    test: IntArray
    validation: IntArray = field(default_factory=lambda: EMPTY)
    pretrain: IntArray = field(default_factory=lambda: EMPTY)
    base: IntArray = field(default_factory=lambda: EMPTY)
    order: IntArray | None = None
    outputs: int | None = None
    of_classes: bool = True

    def classes(self, round: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The classes that are new to the whole federation in a round, and those of earlier experiences."""
        if not self.of_classes:
            return (), ()
        new: set[int] = set()
        old: set[int] = set()
        for client, parts in self.tasks.items():
            number = self.experiences[client][round]
            new.update(parts[number])
            old.update(group for groups in parts[:number] for group in groups)
        return tuple(sorted(new - old)), tuple(sorted(old))

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients' ids, in order."""
        return tuple(self.experiences)

    @cached_property
    def samples(self) -> dict[str, int]:
        """The number of different samples that each client sees in all rounds."""
        seen = {client: [current[client] for current in self.train if client in current] for client in self.clients}
        return {client: len(np.unique(np.concatenate(rows))) if rows else 0 for client, rows in seen.items()}

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return len(self.train)


def split(y: IntArray, fraction: float, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    """Split samples into the rest and a stratified random ``fraction`` of each class.

    Example:
        >>> rest, part = split(np.array([0, 0, 0, 0, 1, 1, 1, 1]), 0.25, np.random.default_rng(0))
        >>> len(rest), len(part)
        (6, 2)
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"Expected the fraction of a split to be at least 0 and below 1 but got {fraction}.")
    part = [rng.permutation(np.flatnonzero(y == c))[: round(fraction * int((y == c).sum()))] for c in np.unique(y)]
    chosen = np.sort(np.concatenate(part)) if part else EMPTY
    return np.setdiff1d(np.arange(len(y)), chosen), chosen


class Indices:
    """A data set for Avalanche: labels, and samples that are nothing but their own indices."""

    def __init__(self, indices: IntArray, y: IntArray) -> None:
        self.indices = indices
        self.targets = [int(label) for label in y[indices]]

    def __getitem__(self, item: int) -> tuple[int, int]:
        return int(self.indices[item]), self.targets[item]

    def __len__(self) -> int:
        return len(self.targets)


def class_experiences(
    indices: IntArray, y: IntArray, experiences: int, order: Sequence[int] | None, seed: int
) -> tuple[list[IntArray], list[tuple[int, ...]]]:
    """Class-incremental experiences of some samples, built by Avalanche.

    Args:
        indices: The samples, as indices into ``y``.
        y: Labels of the whole data set.
        experiences: Number of experiences; it must divide the number of classes among the samples.
        order: Order of the classes; None draws one from ``seed``.
        seed: Seed of the class order.

    Returns:
        The samples and the classes of each experience.

    Raises:
        ValueError: If the classes cannot be divided evenly or ``order`` is not an order of the classes.
    """
    from avalanche.benchmarks import nc_benchmark

    classes = np.unique(y[indices])
    if experiences < 1 or len(classes) % experiences:
        raise ValueError(
            f"Expected `experiences` to divide the number of classes, {len(classes)}, but got {experiences}."
        )
    if order is not None and (len(set(order)) < len(order) or not set(classes.tolist()) <= set(order)):
        raise ValueError(f"Expected `class_order` to order all classes {classes.tolist()} but got {list(order)}.")
    rank = {int(c): i for i, c in enumerate(classes)}  # Avalanche wants classes 0..C-1
    compact = np.array([rank[int(label)] for label in y[indices]], dtype=np.int64)
    # Avalanche decides over classes but looks at every sample: one of each class is enough for it.
    data = Indices(np.unique(compact, return_index=True)[1], compact)
    fixed = [rank[c] for c in order if c in rank] if order is not None else None
    with warnings.catch_warnings(), isolate_rng():  # Avalanche seeds torch's global generator
        warnings.simplefilter("ignore")
        benchmark = nc_benchmark(
            data, data, n_experiences=experiences, task_labels=False, seed=seed, fixed_class_order=fixed
        )
    samples, groups = [], []
    for experience in benchmark.train_stream:
        members = np.isin(compact, experience.classes_in_this_experience)
        samples.append(indices[members])
        groups.append(tuple(sorted(int(classes[c]) for c in experience.classes_in_this_experience)))
    return samples, groups


def domain_experiences(
    indices: IntArray, group: IntArray, order: Sequence[int] | None
) -> tuple[list[IntArray], list[tuple[int, ...]]]:
    """Domain-incremental experiences: one per value of ``group``, in ``order`` (default: ascending).

    Raises:
        ValueError: If ``order`` leaves out a domain of the samples or has one twice.
    """
    present = np.unique(group[indices]).tolist()
    domains = present if order is None else list(order)
    if len(set(domains)) < len(domains) or not set(present) <= set(domains):
        raise ValueError(f"Expected `class_order` to order all domains {present} but got {domains}.")
    return [indices[group[indices] == d] for d in domains], [(int(d),) for d in domains]


def rounds_of(
    experiences: Mapping[str, Sequence[IntArray]],
    rounds_per_experience: int,
    samples_per_round: int | None,
    history: History,
    rng: np.random.Generator,
) -> tuple[dict[str, IntArray], ...]:
    """Spread each client's experiences over rounds.

    Args:
        experiences: For every client, the samples of each of its experiences.
        rounds_per_experience: Rounds that each experience lasts.
        samples_per_round: New samples of a round, never used again; None: all of the experience's samples, every round.
        history: ``"round"``: a round's own samples; ``"seen"``: those of all rounds so far; ``"all"``: of all rounds
            (offline learning, an upper bound).
        rng: Draws the samples of each round.

    Raises:
        ValueError: If an experience has too few samples for its rounds, or ``samples_per_round`` is below 1.
    """
    if samples_per_round is not None and samples_per_round < 1:
        raise ValueError(f"Expected `samples_per_round` to be at least 1 but got {samples_per_round}.")
    rounds: list[dict[str, IntArray]] = []
    shuffled = {client: [rng.permutation(samples) for samples in parts] for client, parts in experiences.items()}
    for r in range(rounds_per_experience * max(len(parts) for parts in experiences.values())):
        e, within = divmod(r, rounds_per_experience)
        current: dict[str, IntArray] = {}
        for client, parts in shuffled.items():
            if e >= len(parts):
                continue
            samples = parts[e]
            if samples_per_round is not None:
                samples = samples[within * samples_per_round : (within + 1) * samples_per_round]
                if len(samples) < samples_per_round and len(parts[e]):
                    raise ValueError(
                        f"Expected `samples_per_round` to leave enough samples for {rounds_per_experience} rounds of "
                        f"experience {e} of client {client}, which has {len(parts[e])}, but got {samples_per_round}."
                    )
            if len(samples):
                current[client] = np.sort(samples)
        rounds.append(current)
    return with_history(rounds, history)


def with_history(rounds: Sequence[dict[str, IntArray]], history: History) -> tuple[dict[str, IntArray], ...]:
    """Add to each round what its clients have seen before (``"seen"``) or will ever see (``"all"``).

    Example:
        >>> with_history([{"a": np.array([1])}, {"a": np.array([0])}], "seen")[1]
        {'a': array([0, 1])}
    """
    if history == "round":
        return tuple(rounds)
    if history not in ("seen", "all"):
        raise ValueError(f'Expected `history` to be "round", "seen" or "all" but got `{history}`.')
    result = []
    for r, current in enumerate(rounds):
        window = rounds[: r + 1] if history == "seen" else rounds
        result.append({c: np.unique(np.concatenate([past[c] for past in window if c in past])) for c in current})
    return tuple(result)


def incremental(
    kind: Literal["class-incremental", "domain-incremental"],
    y: IntArray,
    owners: Mapping[str, IntArray],
    group: IntArray | None,
    *,
    experiences: int,
    rounds_per_experience: int,
    samples_per_round: int | None,
    order: Sequence[int] | None,
    order_per_client: bool,
    history: History,
    seed: int,
) -> dict[str, Any]:
    """The `Plan` entries of a class- or domain-incremental stream over the samples that ``owners`` hold."""
    rng = np.random.default_rng([seed, 1])
    everything = np.sort(np.concatenate(list(owners.values())))
    if kind == "domain-incremental" and group is None:
        raise ValueError("Expected `group`, the domain of every sample, for a domain-incremental stream but got None.")
    parts: dict[str, list[IntArray]] = {}
    tasks: dict[str, tuple[tuple[int, ...], ...]] = {}
    shared = None
    for position, (client, indices) in enumerate(owners.items()):
        if kind == "domain-incremental":
            assert group is not None
            mine = np.unique(group[indices]).tolist()
            chosen = rng.permutation(mine).tolist() if order_per_client else order or np.unique(group).tolist()
            samples, groups = domain_experiences(indices, group, chosen)
        elif order_per_client:
            samples, groups = class_experiences(indices, y, experiences, None, seed + 1 + position)
        else:
            shared = shared or class_experiences(everything, y, experiences, order, seed)
            groups = shared[1]
            samples = [np.intersect1d(indices, whole, assume_unique=True) for whole in shared[0]]
        parts[client], tasks[client] = samples, tuple(groups)
    train = rounds_of(parts, rounds_per_experience, samples_per_round, history, rng)
    current = tuple(r // rounds_per_experience for r in range(len(train)))
    groups_of = np.asarray(group if kind == "domain-incremental" else y)
    plan = {"train": train, "experiences": dict.fromkeys(owners, current), "tasks": tasks, "groups": groups_of}
    return {**plan, "of_classes": kind == "class-incremental"}


def flwf(
    y: IntArray,
    *,
    rounds: int = 8,
    samples_per_round: int = 120,
    test_per_class: int = 100,
    pretrain_per_class: int = 10,
    tasks: Mapping[str, Sequence[Sequence[int]]] | None = None,
    history: History = "round",
    seed: int = 0,
) -> Plan:
    """The scenario of Usmanova et al. 2021, section 3.4: one client whose task changes, one that stands for the others.

    Args:
        y: Labels.
        rounds: Communication rounds, shared out evenly among a client's tasks.
        samples_per_round: Samples per client and round, the same number of each class of its task, never reused.
        test_per_class: Samples of each class in the common test set.
        pretrain_per_class: Samples of each class for the initial model.
        tasks: For every client, the classes of each of its tasks. Default: client1 has class 1, then class 2;
            generalized has all classes.
        history: See `rounds_of`.
        seed: Seed of all draws.

    Raises:
        ValueError: If a class has too few samples, or a number does not divide as it must.

    Example:
        >>> plan = flwf(np.repeat(np.arange(6), 1500))
        >>> plan.rounds, plan.clients, {client: len(rows) for client, rows in plan.train[0].items()}
        (8, ('client1', 'generalized'), {'client1': 120, 'generalized': 120})
    """
    classes = np.unique(y)
    tasks = tasks or {"client1": [[1], [2]], "generalized": [classes.tolist()]}
    rng = np.random.default_rng([seed, 2])
    pools = {int(c): list(rng.permutation(np.flatnonzero(y == c))) for c in classes}

    def draw(label: int, number: int) -> list[int]:
        pool = pools.get(label, [])
        if len(pool) < number:
            raise ValueError(
                f"Expected at least {number - len(pool)} more samples of class {label}. Lower `rounds`, "
                f"`samples_per_round` ({samples_per_round}), `test_per_class` or `pretrain_per_class`."
            )
        taken, pools[label] = pool[:number], pool[number:]
        return taken

    test = np.sort([i for c in classes for i in draw(int(c), test_per_class)])
    pretrain = np.sort([i for c in classes for i in draw(int(c), pretrain_per_class)]).astype(np.int64)
    train: list[dict[str, IntArray]] = []
    experiences: dict[str, list[int]] = {client: [] for client in tasks}
    for r in range(rounds):
        current = {}
        for client, sequence in tasks.items():
            if rounds % len(sequence):
                raise ValueError(f"Expected `rounds` to be a multiple of client {client}'s {len(sequence)} tasks.")
            experiences[client].append(r * len(sequence) // rounds)
            labels = sequence[experiences[client][-1]]
            if samples_per_round % len(labels):
                raise ValueError(f"Expected `samples_per_round` to be a multiple of {len(labels)} classes.")
            current[client] = np.sort([i for c in labels for i in draw(int(c), samples_per_round // len(labels))])
        train.append(current)
    return Plan(
        train=with_history(train, history),
        experiences={client: tuple(numbers) for client, numbers in experiences.items()},
        tasks={client: tuple(tuple(labels) for labels in sequence) for client, sequence in tasks.items()},
        groups=np.asarray(y),
        test=test.astype(np.int64),
        pretrain=pretrain,
    )


def odfcl(
    y: IntArray,
    *,
    people: int = 10,
    base: int = 4,
    sessions: int = 2,
    nodes: int = 3,
    train_per_class: int = 28,
    test_per_class: int = 7,
    validation_per_class: int = 0,
    pretrain_per_class: int = 100,
    rounds_per_session: int = 20,
    history: History = "round",
    seed: int = 0,
) -> Plan:
    """The scenario of Kröger et al.: a base session, then sessions in which each node of a swarm sees its own class.

    The people are drawn from the data set and numbered in the order in which they are learnt. Experience 0 is the base
    session, which is not a round: `lightning_fcl.callbacks.BaseSession` trains it. The people that are not drawn are
    there for pre-training, numbered behind the others.

    Args:
        y: Labels.
        people: Classes to learn.
        base: Classes of the base session; the sessions share the others evenly.
        sessions: Sessions after the base session.
        nodes: Clients. Each has its own classes of a session; where there are more nodes than classes, a class's
            samples are shared by several.
        train_per_class: Training samples of each class.
        test_per_class: Test samples of each class.
        validation_per_class: Of the training samples, those that are kept to choose settings on.
        pretrain_per_class: At most so many samples of each person that is not drawn; 0: no pre-training.
        rounds_per_session: Synchronisations in each session.
        history: ``"round"``, or ``"seen"``: the samples of all classes so far, those of the base session shared by the
            nodes (joint training), or ``"all"``.
        seed: Seed of all draws.

    Raises:
        ValueError: If there are too few people or samples, or the classes do not divide as they must.

    Example:
        >>> plan = odfcl(np.repeat(np.arange(12), 40))
        >>> plan.rounds, plan.clients, plan.tasks["node1"], plan.classes(20)
        (40, ('node1', 'node2', 'node3'), ((0, 1, 2, 3), (4,), (7,)), ((7, 8, 9), (0, 1, 2, 3, 4, 5, 6)))
    """
    for name, number in (("base", base), ("sessions", sessions), ("nodes", nodes), ("rounds", rounds_per_session)):
        if number < 1:
            name = "rounds_per_session" if name == "rounds" else name
            raise ValueError(f"Expected `{name}` to be at least 1 but got {number}.")
    if pretrain_per_class < 0:
        raise ValueError(f"Expected `pretrain_per_class` to be at least 0 but got {pretrain_per_class}.")
    if people <= base or (people - base) % sessions:
        raise ValueError(
            f"Expected `people` to leave as many classes for each of {sessions} sessions but got {people}, {base} of "
            f"them in the base session. Set `people` to {base} and a multiple of `sessions`."
        )
    rng = np.random.default_rng([seed, 3])
    drawn, parts = _draw_people(y, people, (train_per_class, test_per_class, validation_per_class), rng)
    each = (people - base) // sessions
    shares = {f"node{n + 1}": [_dealt(parts["train"][:base], nodes, n, split=True)] for n in range(nodes)}
    tasks = {node: [tuple(range(base))] for node in shares}
    for first in range(base, people, each):
        for n, (node, own) in enumerate(shares.items()):
            own.append(_dealt(parts["train"][first : first + each], nodes, n))
            tasks[node].append(tuple(c for c in range(first, first + each) if _holds(c - first, each, nodes, n)))
    joint = with_history([{node: own[e] for node, own in shares.items()} for e in range(sessions + 1)], history)
    rounds = [{k: v for k, v in joint[e].items() if len(v)} for e in range(1, sessions + 1)]
    others = rng.permutation(np.setdiff1d(np.arange(y.max() + 1), drawn))
    order = np.concatenate([drawn, others])
    numbers = np.argsort(order)[y]
    pretrain = [rng.permutation(np.flatnonzero(y == c))[:pretrain_per_class] for c in others]
    return Plan(
        train=tuple(current for current in rounds for _ in range(rounds_per_session)),
        experiences={
            node: tuple(e for e in range(1, sessions + 1) for _ in range(rounds_per_session)) for node in shares
        },
        tasks={node: tuple(groups) for node, groups in tasks.items()},
        groups=np.where(numbers < people, numbers, 0),
        test=np.sort(np.concatenate(parts["test"])),
        validation=np.sort(np.concatenate(parts["validation"])).astype(np.int64),
        pretrain=np.sort(np.concatenate([EMPTY, *pretrain])).astype(np.int64),
        base=np.sort(np.concatenate(parts["train"][:base])),
        order=order,
        outputs=people,
    )


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


def _holds(index: int, classes: int, nodes: int, node: int) -> bool:
    """Whether a node has samples of the session's class of an index."""
    return index % nodes == node if nodes <= classes else node % classes == index


def _dealt(parts: Sequence[IntArray], nodes: int, node: int, split: bool = False) -> IntArray:
    """A node's samples of a session: its classes whole, or its share of each class."""
    mine = []
    for index, samples in enumerate(parts):
        if split:
            mine.append(samples[node::nodes])
        elif _holds(index, len(parts), nodes, node):
            sharing = [n for n in range(nodes) if _holds(index, len(parts), nodes, n)]
            mine.append(samples[sharing.index(node) :: len(sharing)])
    return np.sort(np.concatenate([EMPTY, *mine]))
