"""What every scenario is: `Scenario`, which makes a `Plan` of a `SamplePool` of samples; and what they share."""

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
"""Rounds of an experience: a plan has an entry for each."""

EMPTY: IntArray = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Plan:
    """Who sees which samples when, as indices into the data set.

    Args:
        train: For every round, the samples of every client that has any.
        experiences: For every client, its experience in every round.
        tasks: For every client, the test groups (classes, or domains) of each of its experiences.
        groups: The test group of every sample of the data set, shape (n,).
        pretrain: Samples for the server before the first round, as those of a ``base_samples`` session.
        class_order: The classes in the order in which the scenario numbers them, shape (C,); None keeps the data set's.
        num_outputs: Number of classes to tell apart, the first ones of ``class_order``.
        groups_are_classes: Whether the test groups are classes.
        task_classes: For every client, all classes of the task of each of its experiences, see `classes_of_task`; empty
            where experiences are not told apart.
        history: Whether a round has its own samples, or also those that its clients have seen, or will ever see.
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
        """The classes that are new to the whole federation in a round, and those of earlier experiences."""
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

    @cached_property
    def _classes(self) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
        return {}

    @cached_property
    def _ways(self) -> set[tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]]:
        return {(parts, self.experiences[client]) for client, parts in self.tasks.items()}

    def current_experiences(self, round_idx: int) -> tuple[int, ...]:
        """The experiences that clients are in during a round, ascending."""
        return tuple(sorted({numbers[round_idx] for numbers in self._numbers}))

    @cached_property
    def in_step(self) -> bool:
        """Whether all clients enter each experience in the same round."""
        changes = {tuple(before != after for before, after in pairwise(numbers)) for numbers in self._numbers}
        return len(changes) <= 1

    @cached_property
    def _numbers(self) -> set[tuple[int, ...]]:
        return {*self.experiences.values()}

    def classes_of_task(self, client: str, experience: int) -> tuple[int, ...]:
        """The outputs to which a task-incremental method slices the logits of a client's experience.

        ``tasks`` has those of which the client has samples. Empty where all classes compete.
        """
        return self.task_classes[client][experience] if self.task_classes else ()

    def group_names(self, classes: Sequence[str]) -> list[str]:
        """Names of the test groups: the classes, or the numbers of the domains."""
        number = int(self.groups.max()) + 1
        return list(classes) if number == len(classes) else [str(group) for group in range(number)]

    @property
    def common_tasks(self) -> tuple[tuple[int, ...], ...]:
        """The classes of each task, if all clients have these in common, by their first label; empty if not."""
        parts = self.task_classes or (self.tasks if self.groups_are_classes else {})
        blocks = tuple(sorted({block for own in parts.values() for block in own}))
        labels = [label for block in blocks for label in block]
        return blocks if len(set(labels)) == len(labels) else ()

    @cached_property
    def clients(self) -> tuple[str, ...]:
        """The clients' ids, in order."""
        return tuple(self.experiences)

    @cached_property
    def client_keys(self) -> Keys:
        """A number of each client's name, shape (clients,), see `lightning_fcl.rng.derive_keys`."""
        return hash_names(self.clients)

    @cached_property
    def fingerprint(self) -> str:
        """A short name of the plan: the same plan has the same one, on every machine. Every checkpoint has it."""
        digest = hashlib.sha256()
        round_bytes: dict[int, bytes] = {}  # of rounds that share their samples
        for current in self.train:
            if id(current) not in round_bytes:
                parts = ((client.encode(), rows.astype("<i8").tobytes()) for client, rows in current.items())
                round_bytes = {id(current): b"".join(chain.from_iterable(parts))}
            digest.update(round_bytes[id(current)])
        return digest.hexdigest()[:16]

    def num_client_samples(self, client: str) -> int:
        """The number of different samples that a client sees in all rounds."""
        if client not in self._samples:
            self._samples[client] = len(self.client_indices(client))
        return self._samples[client]

    def client_indices(self, client: str) -> IntArray:
        """The different samples that a client sees in all rounds, ascending."""
        # Rounds of one experience share their arrays: each is looked at once.
        rows_by_id = {id(current[client]): current[client] for current in self.train if client in current}
        return np.unique(np.concatenate([EMPTY, *rows_by_id.values()]))

    @cached_property
    def _samples(self) -> dict[str, int]:
        return {}

    @property
    def different_rounds(self) -> list[dict[str, IntArray]]:
        """The entries of ``train``, once each: rounds may share an entry."""
        return [*{id(current): current for current in self.train}.values()]

    @property
    def num_rounds(self) -> int:
        """Number of rounds."""
        return len(self.train)

    def num_rounds_of_tasks(self, tasks: int | None) -> int:
        """Rounds until every client has had its first ``tasks``; None: all."""
        if tasks is None:
            return self.num_rounds
        ways = set(self.experiences.values())
        return sum(any(numbers[round_idx] < tasks for numbers in ways) for round_idx in range(self.num_rounds))


@dataclass(frozen=True)
class SamplePool:
    """The samples that a scenario deals out, and what is known of them.

    Args:
        y: Label of each sample, shape (n,); all 0 where targets are no classes.
        train: The samples to train on, as ``test`` and ``validation`` are the others.
        clients: The training samples of each client, as the stream's partition has divided them.
        group: Natural domain of each sample, numbered from 0, shape (n,); None where the data name none.
        classes: Names of the classes, as of the ``domains``; empty where targets are no classes.
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
        provides_split: Whether it draws test and validation samples itself; a stream then takes no `split`.
        provides_clients: Whether it deals the samples to clients itself; a stream then takes no `partition`.
    """

    provides_split: ClassVar[bool] = False
    provides_clients: ClassVar[bool] = False

    @property
    def needs_classes(self) -> bool:
        """Whether the scenario needs targets that are classes. A stream rejects other targets if it is True."""
        return False

    def __post_init__(self) -> None:
        validate_fields(self)

    @abstractmethod
    def plan(self, pool: SamplePool, seed: int = 0) -> Plan:
        """Who sees which samples when, all draws by the seed.

        Raises:
            ValueError: If the samples cannot be dealt out so.
        """

    def __str__(self) -> str:
        return type(self).__name__


def stratified_split(y: IntArray, fraction: float, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    """Split samples into the rest and a stratified random ``fraction`` of each class."""
    if not 0 <= fraction < 1:
        raise InvalidValueError(
            f"Expected the fraction of a split to be at least 0 and below 1 but got {fraction}.",
            argument="fraction",
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
    """Return the divisor of a number that is nearest to a wanted one.

    Example:
        >>> nearest_divisor(10, 3)
        2
    """
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    return min(divisors, key=lambda divisor: abs(divisor - target), default=1)


def concat_views(clients: Sequence[str], rows: IntArray, counts: IntArray) -> dict[str, IntArray]:
    """Each client's samples, where they lie one client after the other in one array: no client has a copy."""
    first = [0, *np.cumsum(counts).tolist()]
    return {client: rows[first[n] : first[n + 1]] for n, client in enumerate(clients)}


def with_history(rounds: Sequence[dict[str, IntArray]], history: History) -> tuple[dict[str, IntArray], ...]:
    """Add to each round what its clients have seen before (``"seen"``) or will ever see (``"all"``)."""
    if history == "round":
        return tuple(rounds)
    if history not in ("seen", "all"):
        raise InvalidValueError(
            f'Expected `history` to be "round", "seen" or "all" but got `{history}`.', argument="history"
        )
    result = []
    for r, current in enumerate(rounds):
        window = rounds[: r + 1] if history == "seen" else rounds
        result.append({c: np.unique(np.concatenate([past[c] for past in window if c in past])) for c in current})
    return tuple(result)


def order_to_indices(
    order: Sequence[int | str], names: Sequence[str], argument: str, present: Sequence[int]
) -> list[int]:
    """Return the numbers of ordered classes or domains: their positions in the list of all names.

    Args:
        order: Names or positions. Integers are names if they cannot be positions, as for the names "10", "20" and "30".
        names: All names, or none.
        argument: Name of the argument that has the order.
        present: Numbers that the order must contain.

    Raises:
        TypeError: If the order is one string.
        ValueError: If the order has an unknown or repeated entry, lacks an entry, or has integers that can be names as
            well as positions, with different results.
    """
    if isinstance(order, str):
        raise InvalidTypeError(
            f'Expected `{argument}` to be a list of names or numbers but got "{order}".', argument=argument
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
            f"{', '.join(names)}, or their positions from 0 to {len(names) - 1}," if names else "whole numbers"
        )
        raise UnknownNameError(
            f"Expected `{argument}` to contain {allowed_entries} but got {entry}.",
            hint=did_you_mean(entry, names),
            argument=argument,
            value=entry,
        )
    if not possible:
        raise InvalidValueError(
            f"Expected `{argument}` to order all of {list(present)} but got {by_position}.",
            argument=argument,
            value=by_position,
        )
    return possible[0]


def _position(entry: object, names: Sequence[str]) -> int:
    """Return a position in the list of names, or any whole number if there are no names; -1 for anything else."""
    is_position = isinstance(entry, int | np.integer) and (not names or 0 <= entry < len(names))
    return int(entry) if is_position else -1  # type: ignore[call-overload]


def from_name(argument: str, value: T | str, classes: Iterable[type[T]]) -> T:
    """A scenario or partition, or that of a class's name, as in "class-incremental" or "ClassIncremental"."""
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
