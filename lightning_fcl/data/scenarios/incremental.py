"""Class-incremental, domain-incremental and stationary scenarios. Classes are divided into experiences by Avalanche."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import TensorDataset

from lightning_fcl.data.scenarios.base import (
    MAX_ROUNDS,
    History,
    IntArray,
    Plan,
    SamplePool,
    Scenario,
    nearest_divisor,
    order_to_indices,
    with_history,
)
from lightning_fcl.errors import InvalidValueError, MissingValueError
from lightning_fcl.validation import at_least, between, check_clients, one_of, validated

Order = Sequence[int | str] | Mapping[str, Sequence[int | str]] | None
Groups = list[tuple[int, ...]]


@dataclass(frozen=True)
class ClassIncremental(Scenario):
    """Class-incremental scenario. Each experience has classes that do not occur in earlier experiences.

    Args:
        num_experiences: Number of experiences, among which the classes are divided evenly. Or a list with the number of
            classes of each experience, such as ``[4, 3, 3]``. With 1, this is plain federated learning, and targets
            need not be classes.
        rounds_per_experience: Number of rounds of each experience.
        samples_per_round: Number of new samples per client and round. No sample is drawn twice. If None, each round has
            all samples of its experience.
        class_order: Classes in the order in which they occur, by number or by name. Or a dict with an order for each
            client. None draws the order from the seed. Write names that are numbers as text, as in ``["10", "2"]``.
        order_per_client: Whether a separate order is drawn for each client.
        history: ``"round"``, ``"seen"`` or ``"all"``. With ``"round"``, a round has only its own samples. ``"seen"``
            adds the client's samples of earlier rounds. ``"all"`` adds the client's samples of all rounds (offline
            training, an upper bound).

    Raises:
        ValueError: If an argument is out of range, or if the classes cannot be divided as requested.

    Example:
        >>> y = np.repeat([0, 1, 2], 4)
        >>> pool = SamplePool(y, clients={"a": np.arange(6), "b": np.arange(6, 12)}, classes=("sit", "walk", "run"))
        >>> plan = ClassIncremental([1, 2], class_order=["run", "sit", "walk"]).plan(pool)
        >>> plan.tasks["a"], [list(current) for current in plan.train]
        (((2,), (0, 1)), [['b'], ['a', 'b']])
    """

    num_experiences: int | Sequence[int] = 5
    rounds_per_experience: int = validated(1, between, 1, MAX_ROUNDS)
    samples_per_round: int | None = validated(None, at_least, 1)
    class_order: Order = None
    order_per_client: bool = False
    history: History = validated("round", one_of, ("round", "seen", "all"))

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_one_order("class_order", self.class_order, self.order_per_client)

    @property
    def needs_classes(self) -> bool:
        return self.num_experiences != 1

    def plan(self, pool: SamplePool, seed: int = 0) -> Plan:
        rng = np.random.default_rng([seed, 1])
        if not pool.classes and self.num_experiences == 1:
            parts = {client: [rows] for client, rows in pool.clients.items()}
            return make_plan(self, pool, parts, {client: [(0,)] for client in parts}, np.zeros_like(pool.y), False, rng)
        parts, tasks = {}, dict[str, Groups]()
        if self.order_per_client or isinstance(self.class_order, Mapping):
            for position, (client, rows) in enumerate(pool.clients.items()):
                present = np.unique(pool.y[rows]).tolist()
                order = _order_of(client, pool.clients, self.class_order, pool.classes, "class_order", present)
                tasks[client] = _class_experiences(
                    pool.y[rows], self.num_experiences, order, seed + 1 + position, f" of client {client}"
                )
                parts[client] = [rows[np.isin(pool.y[rows], group)] for group in tasks[client]]
        else:
            everyone = np.concatenate(list(pool.clients.values()))
            present = np.unique(pool.y[everyone]).tolist()
            order = _order_of("", pool.clients, self.class_order, pool.classes, "class_order", present)
            groups = _class_experiences(pool.y[everyone], self.num_experiences, order, seed)
            tasks = dict.fromkeys(pool.clients, groups)
            parts = _parts(pool, everyone, groups)
        return make_plan(self, pool, parts, tasks, np.asarray(pool.y), True, rng)


@dataclass(frozen=True)
class DomainIncremental(Scenario):
    """Domain-incremental scenario. Each experience is a domain of the data, such as a device or a place.

    Different domains can have the same classes, but with different inputs.

    Args:
        rounds_per_experience: See `ClassIncremental`.
        samples_per_round: See `ClassIncremental`.
        domain_order: Domains in the order in which they occur, by number or by name. Numbers follow the ascending order
            of the names. Or a dict with an order for each client. None means ascending order.
        order_per_client: Whether a separate order is drawn for each client, from the domains that the client has.
        history: See `ClassIncremental`.

    Raises:
        ValueError: If an argument is out of range, or if the data define no domains.

    Example:
        >>> pool = SamplePool(np.zeros(4, int), clients={"a": np.arange(4)}, group=np.array([1, 0, 0, 1]))
        >>> [rows["a"].tolist() for rows in DomainIncremental().plan(pool).train]
        [[1, 2], [0, 3]]
    """

    rounds_per_experience: int = validated(1, between, 1, MAX_ROUNDS)
    samples_per_round: int | None = validated(None, at_least, 1)
    domain_order: Order = None
    order_per_client: bool = False
    history: History = validated("round", one_of, ("round", "seen", "all"))

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_one_order("domain_order", self.domain_order, self.order_per_client)

    def plan(self, pool: SamplePool, seed: int = 0) -> Plan:
        rng = np.random.default_rng([seed, 1])
        if pool.group is None:
            raise InvalidValueError(
                "Expected `group` to contain the domain of each sample for a domain-incremental stream, but got None.",
                hint="Pass `group=` to `FederatedStream.from_arrays`, or use a scenario that needs no domains, such as "
                "`ClassIncremental`.",
                argument="group",
            )
        parts, tasks = {}, dict[str, Groups]()
        for client, indices in pool.clients.items():
            present = np.unique(pool.group[indices]).tolist()
            order = _order_of(client, pool.clients, self.domain_order, pool.domains, "domain_order", present)
            order = rng.permutation(present).tolist() if self.order_per_client else order
            order = order or np.unique(pool.group).tolist()
            parts[client] = [indices[pool.group[indices] == domain] for domain in order]
            tasks[client] = [(int(domain),) for domain in order]
        return make_plan(self, pool, parts, tasks, pool.group, False, rng)


@dataclass(frozen=True)
class Stationary(Scenario):
    """Plain federated learning. Each client has all of its samples in each round. Targets need not be classes.

    Args:
        num_rounds: Number of rounds.

    Raises:
        ValueError: If ``num_rounds`` is below 1 or above one million.

    Example:
        >>> pool = SamplePool(np.zeros(3, int), clients={"a": np.arange(2), "b": np.arange(2, 3)})
        >>> [{client: rows.tolist() for client, rows in now.items()} for now in Stationary(2).plan(pool).train]
        [{'a': [0, 1], 'b': [2]}, {'a': [0, 1], 'b': [2]}]
    """

    num_rounds: int = validated(1, between, 1, MAX_ROUNDS)

    @property
    def as_incremental(self) -> ClassIncremental:
        """The equivalent `ClassIncremental` with one experience. Each client has the same samples in each round."""
        return ClassIncremental(1, self.num_rounds)

    def plan(self, pool: SamplePool, seed: int = 0) -> Plan:
        return self.as_incremental.plan(pool, seed)


def _class_experiences(
    y: IntArray, experiences: int | Sequence[int], order: Sequence[int] | None, seed: int, owner_name: str = ""
) -> Groups:
    """Return the classes of each experience. Avalanche divides the classes in the given order, or draws an order."""
    classes = np.unique(y)
    is_even = isinstance(experiences, int)
    sizes = [len(classes) // max(experiences, 1)] * experiences if isinstance(experiences, int) else list(experiences)
    if sum(sizes) != len(classes) or min(sizes, default=0) < 1:
        raise InvalidValueError(
            f"Expected `num_experiences` to be a divisor of the number of classes{owner_name}, {len(classes)}, or a "
            f"list of positive numbers with this sum, but got {experiences}.",
            hint=_suggest_experiences(len(classes), max(len(sizes), 1)),
            argument="num_experiences",
            value=experiences,
        )
    if len(sizes) == 1:
        return [tuple(classes.tolist())]
    from lightning_fcl.data.avalanche import nc_benchmark

    # Avalanche requires classes 0..C-1 and reads every sample. One sample per class is enough to divide the classes.
    numbers = torch.arange(len(classes))
    data = TensorDataset(numbers, numbers)
    fixed_order = None if order is None else [int(np.searchsorted(classes, c)) for c in order if c in classes]
    # Avalanche seeds torch's global generator. `isolate_rng` restores the generator.
    with warnings.catch_warnings(), isolate_rng():
        warnings.simplefilter("ignore")
        benchmark = nc_benchmark(
            data,
            data,
            n_experiences=len(sizes),
            task_labels=False,
            seed=seed,
            fixed_class_order=fixed_order,
            per_exp_classes=None if is_even else dict(enumerate(sizes)),
        )
    return [
        tuple(sorted(classes[list(experience.classes_in_this_experience)].tolist()))
        for experience in benchmark.train_stream
    ]


def _suggest_experiences(classes: int, num_experiences: int) -> str:
    """Return a hint with valid values of ``num_experiences``.

    Args:
        classes: Number of classes.
        num_experiences: Invalid number of experiences. The hint suggests similar values.
    """
    nearest = nearest_divisor(classes, num_experiences)
    sizes = [len(part) for part in np.array_split(np.arange(classes), min(max(num_experiences, 1), classes))]
    sizes_hint = f", or the number of classes of each experience, such as {sizes}" if len(sizes) <= 10 else ""
    return f"Use a divisor, such as `num_experiences={nearest}`{sizes_hint}."


def _parts(pool: SamplePool, everyone: IntArray, groups: Groups) -> dict[str, list[IntArray]]:
    """Return the samples of each client in each experience, in ascending order.

    Args:
        pool: The samples and the clients.
        everyone: Samples of all clients, in the order of the clients.
        groups: Classes of each experience.
    """
    # Index of the experience of each class.
    experience = np.empty(max(map(max, groups)) + 1, dtype=np.int64)
    for number, group in enumerate(groups):
        experience[list(group)] = number
    sizes = np.fromiter(map(len, pool.clients.values()), dtype=np.int64, count=len(pool.clients))
    part_indices = np.arange(len(sizes)).repeat(sizes) * len(groups) + experience[pool.y[everyone]]
    rows = everyone[np.lexsort((everyone, part_indices))]
    ends = np.bincount(part_indices, minlength=len(sizes) * len(groups)).cumsum().tolist()
    pieces = [rows[first:end] for first, end in zip([0, *ends], ends, strict=False)]
    return {client: pieces[n * len(groups) : (n + 1) * len(groups)] for n, client in enumerate(pool.clients)}


def make_plan(
    scenario: ClassIncremental | DomainIncremental,
    pool: SamplePool,
    client_parts: Mapping[str, Sequence[IntArray]],
    tasks: Mapping[str, Groups],
    groups: IntArray,
    groups_are_classes: bool,
    rng: np.random.Generator,
) -> Plan:
    """Return a plan from the samples of each client in each experience. The scenario defines the rounds."""
    num_rounds, number = scenario.rounds_per_experience, scenario.samples_per_round
    if number is not None:
        client_parts = {client: [rng.permutation(samples) for samples in own] for client, own in client_parts.items()}
    train: list[dict[str, IntArray]] = []
    for experience in range(max(len(own) for own in client_parts.values())):
        client_samples = {client: own[experience] for client, own in client_parts.items() if len(own) > experience}
        client_samples = {client: samples for client, samples in client_samples.items() if len(samples)}
        # Without `samples_per_round`, all rounds of an experience share one dict with all samples of the experience.
        if number is None:
            train += [{client: _ascending(samples) for client, samples in client_samples.items()}] * num_rounds
            continue
        for client, samples in client_samples.items():
            if len(samples) < num_rounds * number:
                raise InvalidValueError(
                    f"Expected experience {experience} of client {client} to have at least {num_rounds * number} "
                    f"samples, because `rounds_per_experience`={num_rounds} and `samples_per_round`={number}, but got "
                    f"{len(samples)}.",
                    hint="Lower `samples_per_round` or `rounds_per_experience`, or use fewer clients.",
                    argument="samples_per_round",
                    value=number,
                )
        pieces = {
            client: samples[: num_rounds * number].reshape(num_rounds, number)
            for client, samples in client_samples.items()
        }
        train += [
            {client: _ascending(own[round_idx]) for client, own in pieces.items()} for round_idx in range(num_rounds)
        ]
    # Clients that share one list of tasks also share one tuple in the plan.
    shared = {id(own): tuple(own) for own in tasks.values()}
    return Plan(
        train=with_history(train, scenario.history),
        experiences=dict.fromkeys(client_parts, tuple(r // num_rounds for r in range(len(train)))),
        tasks={client: shared[id(own)] for client, own in tasks.items()},
        groups=groups,
        test=pool.test,
        validation=pool.validation,
        groups_are_classes=groups_are_classes,
        history=scenario.history,
    )


def _ascending(samples: IntArray) -> IntArray:
    return samples if (samples[1:] >= samples[:-1]).all() else np.sort(samples)


def _require_one_order(name: str, order: Order, per_client: bool) -> None:
    if per_client and order is not None:
        raise InvalidValueError(
            f"Expected either `{name}` or `order_per_client=True`, but got both. The order is {order}.",
            hint=f"Remove `{name}` or `order_per_client`.",
            argument=name,
        )


def _order_of(
    client: str, clients: Collection[str], order: Order, names: Sequence[str], argument: str, present: Sequence[int]
) -> list[int] | None:
    """Return the numbers of a client's classes or domains in the given order, or None if no order is given."""
    if isinstance(order, Mapping):
        check_clients(f"`{argument}`", order, clients)
        if client not in order:
            raise MissingValueError(
                f"Expected `{argument}` to have an order for client {client}, but got none.",
                hint="Add an order for this client.",
                argument=argument,
            )
        order = order[client]
    return None if order is None else order_to_indices(order, names, argument, present)
