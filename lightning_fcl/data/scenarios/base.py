"""Base classes and functions for scenarios: `Scenario`, its input `SamplePool`, and its result `Plan`."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from typing import ClassVar, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from lightning_fcl.errors import InvalidTypeError, InvalidValueError, UnknownNameError
from lightning_fcl.rng import Keys, hash_names
from lightning_fcl.validation import did_you_mean, format_names, validate_fields

IntArray = npt.NDArray[np.int64]
T = TypeVar("T")
History = Literal["round", "seen", "all"]

MAX_ROUNDS = 1_000_000
"""Maximum number of rounds of an experience. The limit exists because a plan has an entry for each round."""

EMPTY: IntArray = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Plan:
    """The samples of each client in each round, as indices into the dataset.

    Args:
        train: For each round, a dict with the samples of each client that has samples.
        experiences: For each client, the index of its experience in each round.
        tasks: For each client and each of its experiences, the test groups (classes or domains) of the experience.
        groups: Test group of each sample of the dataset, shape (n,).
        test: Samples of the test set, which all clients share.
        validation: Samples of the validation set.
        pretrain: Samples for pre-training the server's model before the first round.
        base_samples: Samples of the server's base session before the first round.
        class_order: Class numbers of the dataset, in the order of the scenario, shape (C,). If None, the scenario keeps
            the order of the dataset.
        num_outputs: Number of classes to classify, which are the first classes of ``class_order``. None means all
            classes.
        groups_are_classes: Whether the test groups are classes.
        task_classes: For each client and each of its experiences, all classes of the experience's task. See
            `classes_of_task`. Empty if the logits of all classes are used.
        history: ``"round"``, ``"seen"`` or ``"all"``. With ``"round"``, a client has only the samples of the round.
            ``"seen"`` adds the client's samples of earlier rounds. ``"all"`` adds the client's samples of all rounds.
    """

    train: tuple[dict[str, IntArray], ...]
    experiences: dict[str, tuple[int, ...]]
    tasks: dict[str, tuple[tuple[int, ...], ...]]
    groups: IntArray
    test: IntArray
    validation: IntArray = field(default_factory=lambda: EMPTY)
    pretrain: IntArray = field(default_factory=lambda: EMPTY)
    base_samples: IntArray = field(default_factory=lambda: EMPTY)
    class_order: IntArray | None = None
    num_outputs: int | None = None
    groups_are_classes: bool = True
    task_classes: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    history: History = "round"

    def class_split(self, round_idx: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the new classes of a round and the classes of earlier experiences, both over all clients.

        Both are empty if the test groups are domains.
        """
        if not self.groups_are_classes:
            return (), ()
        if round_idx not in self._classes:
            new: set[int] = set()
            old: set[int] = set()
            for parts, numbers in self._ways:
                number = numbers[round_idx]
                new.update(parts[number])
                old.update(group for groups in parts[:number] for group in groups)
            self._classes[round_idx] = tuple(sorted(new - old)), tuple(sorted(old))
        return self._classes[round_idx]

    def current_classes(self, round_idx: int) -> tuple[int, ...] | None:
        """Return the classes of the experiences of all clients in a round. None if the test groups are domains."""
        if not self.groups_are_classes:
            return None
        return tuple(sorted({group for parts, numbers in self._ways for group in parts[numbers[round_idx]]}))

    @cached_property
    def _classes(self) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
        return {}

    @cached_property
    def _ways(self) -> set[tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]]:
        return {(parts, self.experiences[client]) for client, parts in self.tasks.items()}

    def current_experiences(self, round_idx: int) -> tuple[int, ...]:
        """Return the indices of the experiences that clients have in a round, in ascending order."""
        return tuple(sorted({numbers[round_idx] for numbers in self._numbers}))

    @cached_property
    def in_step(self) -> bool:
        """Whether all clients start each experience in the same round."""
        changes = {tuple(before != after for before, after in pairwise(numbers)) for numbers in self._numbers}
        return len(changes) <= 1

    @cached_property
    def _numbers(self) -> set[tuple[int, ...]]:
        return {*self.experiences.values()}

    def classes_of_task(self, client: str, experience: int) -> tuple[int, ...]:
        """Return the classes to which a task-incremental method restricts the logits in a client's experience.

        The client may have samples of only some of these classes. The result is empty if the logits of all classes are
        used.
        """
        return self.task_classes[client][experience] if self.task_classes else ()

    def group_names(self, classes: Sequence[str]) -> list[str]:
        """Return the names of the test groups: class names, or numbers as text.

        The names are numbers if the groups are domains, or if ``classes`` contains too few names.
        """
        number = int(self.groups.max()) + 1
        if self.groups_are_classes and number <= len(classes):
            return list(classes[:number])
        return [str(group) for group in range(number)]

    @property
    def common_tasks(self) -> tuple[tuple[int, ...], ...]:
        """Classes of each different task: one tuple for each task, ordered by the first class of the tuple.

        Empty if two different tasks share a class, or if the tasks are domains.
        """
        parts = self.task_classes or (self.tasks if self.groups_are_classes else {})
        blocks = tuple(sorted({block for own in parts.values() for block in own}))
        labels = [label for block in blocks for label in block]
        return blocks if len(set(labels)) == len(labels) else ()

    @cached_property
    def clients(self) -> tuple[str, ...]:
        """Names of the clients, in the order of ``experiences``."""
        return tuple(self.experiences)

    @cached_property
    def client_keys(self) -> Keys:
        """Hash of each client's name, shape (clients,). See `lightning_fcl.rng.derive_keys`."""
        return hash_names(self.clients)

    @cached_property
    def fingerprint(self) -> str:
        """Short hash of the plan's training samples, identical on every machine. Every checkpoint contains the hash."""
        digest = hashlib.sha256()
        # Consecutive rounds can share one dict of samples. Such a dict is converted only once.
        round_bytes: dict[int, bytes] = {}
        for current in self.train:
            if id(current) not in round_bytes:
                parts = ((client.encode(), rows.astype("<i8").tobytes()) for client, rows in current.items())
                round_bytes = {id(current): b"".join(chain.from_iterable(parts))}
            digest.update(round_bytes[id(current)])
        return digest.hexdigest()[:16]

    def num_client_samples(self, client: str) -> int:
        """Return the number of different samples that a client has in all rounds together."""
        if client not in self._samples:
            self._samples[client] = len(self.client_indices(client))
        return self._samples[client]

    def client_indices(self, client: str) -> IntArray:
        """Return the different samples that a client has in all rounds together, in ascending order."""
        # Rounds of one experience can share an array, so each array is used once.
        rows_by_id = {id(current[client]): current[client] for current in self.train if client in current}
        return np.unique(np.concatenate([EMPTY, *rows_by_id.values()]))

    @cached_property
    def _samples(self) -> dict[str, int]:
        return {}

    @property
    def different_rounds(self) -> list[dict[str, IntArray]]:
        """The different entries of ``train``. Several rounds can share an entry."""
        return [*{id(current): current for current in self.train}.values()]

    @property
    def num_rounds(self) -> int:
        """Number of rounds."""
        return len(self.train)

    def num_rounds_of_tasks(self, tasks: int | None) -> int:
        """Return the number of rounds until each client has finished its first ``tasks`` tasks. None: all tasks."""
        if tasks is None:
            return self.num_rounds
        ways = set(self.experiences.values())
        return sum(any(numbers[round_idx] < tasks for numbers in ways) for round_idx in range(self.num_rounds))


@dataclass(frozen=True)
class SamplePool:
    """The samples that a scenario assigns to rounds, and their labels, domains and clients.

    Args:
        y: Label of each sample, shape (n,). All labels are 0 if targets are not classes.
        train: Indices of the training samples.
        test: Indices of the test samples.
        validation: Indices of the validation samples.
        clients: Training samples of each client, from the partition of the stream.
        group: Domain of each sample, numbered from 0, shape (n,). None if the data define no domains.
        classes: Names of the classes. Empty if targets are not classes.
        domains: Names of the domains. Empty if the data define no domains.
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
    """A rule that defines which samples each client has in each round.

    To add a scenario, define a subclass with a method `plan`. The subclass can have any arguments. In a recipe, write
    the name of the subclass. If the subclass is defined outside of this package, write the full import path.

    Attributes:
        provides_split: Whether the scenario draws test and validation samples itself. If True, do not pass a `split`.
        provides_clients: Whether the scenario assigns samples to clients itself. If True, do not pass a `partition`.
    """

    provides_split: ClassVar[bool] = False
    provides_clients: ClassVar[bool] = False

    @property
    def needs_classes(self) -> bool:
        """Whether the scenario requires targets that are classes. If True, a stream rejects other targets."""
        return False

    def __post_init__(self) -> None:
        validate_fields(self)

    @abstractmethod
    def plan(self, pool: SamplePool, seed: int = 0) -> Plan:
        """Return the plan: the samples of each client in each round.

        Args:
            pool: The samples.
            seed: Seed of all random draws.

        Raises:
            ValueError: If the samples cannot be assigned as requested.
        """

    def __str__(self) -> str:
        return type(self).__name__


def stratified_split(
    y: IntArray, fraction: float, rng: np.random.Generator, argument: str = "fraction"
) -> tuple[IntArray, IntArray]:
    """Draw a random ``fraction`` of each class. Return two arrays: the indices not drawn, and the drawn indices.

    Args:
        y: Class of each sample, shape (n,).
        fraction: Fraction to draw, at least 0 and below 1.
        rng: Random generator for all draws.
        argument: Name of the setting that contains the fraction, for the error message.

    Raises:
        ValueError: If ``fraction`` is out of range.
    """
    if not 0 <= fraction < 1:
        raise InvalidValueError(
            f"Expected `{argument}` to be at least 0 and below 1, but got {fraction}.",
            argument=argument,
            value=fraction,
        )
    class_rows = [
        rng.permutation(np.flatnonzero(y == c))[: round(fraction * int((y == c).sum()))] for c in np.unique(y)
    ]
    subset = np.sort(np.concatenate(class_rows)) if class_rows else EMPTY
    rest = np.ones(len(y), dtype=np.bool_)
    rest[subset] = False
    return np.flatnonzero(rest), subset


def nearest_divisor(number: int, target: int) -> int:
    """Return the divisor of ``number`` that is nearest to ``target``.

    Example:
        >>> nearest_divisor(10, 3)
        2
    """
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    return min(divisors, key=lambda divisor: abs(divisor - target), default=1)


def concat_views(clients: Sequence[str], rows: IntArray, counts: IntArray) -> dict[str, IntArray]:
    """Return a dict with the samples of each client, as views of ``rows`` instead of copies.

    Args:
        clients: Names of the clients.
        rows: Samples of all clients, in the order of the clients.
        counts: Number of samples of each client.
    """
    first = [0, *np.cumsum(counts).tolist()]
    return {client: rows[first[n] : first[n + 1]] for n, client in enumerate(clients)}


def with_history(rounds: Sequence[dict[str, IntArray]], history: History) -> tuple[dict[str, IntArray], ...]:
    """Return the rounds with the additional samples that a history mode requires. See ``history`` of `Plan`."""
    if history == "round":
        return tuple(rounds)
    if history not in ("seen", "all"):
        raise InvalidValueError(
            f'Expected `history` to be "round", "seen" or "all", but got `{history}`.', argument="history"
        )
    result = []
    for r, current in enumerate(rounds):
        window = rounds[: r + 1] if history == "seen" else rounds
        result.append({c: np.unique(np.concatenate([past[c] for past in window if c in past])) for c in current})
    return tuple(result)


def order_to_indices(
    order: Sequence[int | str], names: Sequence[str], argument: str, present: Sequence[int]
) -> list[int]:
    """Return the numbers of classes or domains in the given order. A number is the position in the list of all names.

    Args:
        order: Names or positions. Integers are names if they cannot be positions, for example with the names "10", "20"
            and "30".
        names: All names. Can be empty.
        argument: Name of the argument that contains the order.
        present: Numbers that the order must contain.

    Raises:
        TypeError: If the order is a string.
        ValueError: If the order has an unknown or repeated entry, or lacks an entry. Also if the integers of the order
            can be names as well as positions, and the results differ.
    """
    if isinstance(order, str):
        raise InvalidTypeError(
            f'Expected `{argument}` to be a list of names or numbers, but got "{order}".', argument=argument
        )
    index_by_name = {name: number for number, name in enumerate(names)}
    by_name = [index_by_name.get(str(entry), -1) for entry in order]
    by_position = [
        number if isinstance(entry, str) else _position(entry, names)
        for entry, number in zip(order, by_name, strict=True)
    ]
    possible = [
        numbers
        for numbers in (by_position, by_name)
        if -1 not in numbers and len({*numbers}) == len(numbers) and {*present} <= {*numbers}
    ]
    if len(possible) == 2 and by_position != by_name:
        first = ", ".join(f'"{entry}"' for entry in order[:3])
        raise InvalidValueError(
            f"Expected `{argument}` to have one meaning, but got {list(order)}, which can be names or positions in "
            f"the list of names ({format_names(names)}).",
            hint=f"Write names as text, as in [{first}, ...].",
            argument=argument,
        )
    if not possible and -1 in by_position:
        entry = order[by_position.index(-1)]
        allowed_entries = (
            f"{', '.join(names)}, or their positions from 0 to {len(names) - 1}" if names else "whole numbers"
        )
        raise UnknownNameError(
            f"Expected `{argument}` to contain {allowed_entries}, but got {entry}.",
            hint=did_you_mean(entry, names),
            argument=argument,
            value=entry,
        )
    if not possible:
        raise InvalidValueError(
            f"Expected `{argument}` to contain each of the positions {list(present)} once (as numbers or names), but "
            f"got the positions {by_position}.",
            argument=argument,
            value=by_position,
        )
    return possible[0]


def _position(entry: object, names: Sequence[str]) -> int:
    """Return an entry that is a position in the list of names, otherwise -1. Without names, accept any whole number."""
    is_position = isinstance(entry, int | np.integer) and (not names or 0 <= entry < len(names))
    return int(entry) if is_position else -1  # type: ignore[call-overload]


def from_name(argument: str, value: T | str, classes: Iterable[type[T]]) -> T:
    """Return a scenario or partition. If the value is a class name, such as "ClassIncremental", create the object.

    The name can also have the form "class-incremental". An object is returned unchanged.
    """
    kinds = {kind.__name__: kind for kind in classes}
    if not isinstance(value, str):
        return value
    normalized_name = value.replace("-", "").lower()
    for full, kind in kinds.items():
        if normalized_name in (full.lower(), full.lower().removesuffix("scenario")):
            return kind()
    raise UnknownNameError(
        f'Expected `{argument}` to be an object of {", ".join(kinds)}, or one of these names, but got "{value}".',
        hint=did_you_mean(value, kinds),
        argument=argument,
        value=value,
    )
