"""Scenarios of the papers whose recipes are named `flwf`, `odfcl` and `fedvit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from lightning_fcl.data.scenarios.base import (
    EMPTY,
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
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.validation import at_least, between, validated


@dataclass(frozen=True)
class FLwFScenario(Scenario):
    """Scenario of Usmanova et al. (2021), section 3.4.

    By default, one client has changing tasks. Another client represents all other clients of the federation.

    Args:
        num_rounds: Number of communication rounds, divided evenly among the tasks of a client.
        samples_per_round: Number of samples per client and round. No sample is drawn twice. Each class of the client's
            task has the same number of samples.
        test_per_class: Number of samples of each class in the test set, which all clients share.
        pretrain_per_class: Number of samples of each class for pre-training the initial model.
        tasks: For each client, the classes of each of its tasks, by number or by name. By default, ``client1`` first
            has the class with number 1 and then the class with number 2. By default, ``generalized`` has all classes
            in a single task.
        history: Rounds whose samples a round contains, see `Plan`.

    Raises:
        ValueError: If a class has too few samples, or if rounds or samples cannot be divided evenly.

    Example:
        >>> plan = FLwFScenario().plan(SamplePool(np.repeat(np.arange(6), 1500)))
        >>> plan.num_rounds, plan.clients, {client: len(rows) for client, rows in plan.train[0].items()}
        (8, ('client1', 'generalized'), {'client1': 120, 'generalized': 120})
    """

    citations: ClassVar[tuple[str, ...]] = ("usmanova2021flwf",)

    provides_split = provides_clients = needs_classes = True
    num_rounds: int = 8
    samples_per_round: int = 120
    test_per_class: int = 100
    pretrain_per_class: int = 10
    tasks: Mapping[str, Sequence[Sequence[int | str]]] | None = None
    history: History = "round"

    def plan(self, pool: SamplePool, seed: int = 0) -> Plan:
        between(1, MAX_ROUNDS, num_rounds=self.num_rounds)
        classes = np.unique(pool.y).tolist()
        tasks = {
            client: [[order_to_indices([entry], pool.classes, "tasks", [])[0] for entry in labels] for labels in own]
            for client, own in (self.tasks or {}).items()
        } or {"client1": [[1], [2]], "generalized": [classes]}
        rng = np.random.default_rng([seed, 2])
        remaining_rows = {c: rng.permutation(np.flatnonzero(pool.y == c)) for c in classes}
        test = self._draw(remaining_rows, classes, self.test_per_class)
        pretrain = self._draw(remaining_rows, classes, self.pretrain_per_class)
        train: list[dict[str, IntArray]] = []
        experiences: dict[str, list[int]] = {client: [] for client in tasks}
        for r in range(self.num_rounds):
            current = {}
            for client, sequence in tasks.items():
                if self.num_rounds % len(sequence):
                    raise InvalidValueError(
                        f"Expected `num_rounds` to be a multiple of the number of tasks of client {client}, "
                        f"{len(sequence)}, but got {self.num_rounds}.",
                        argument="num_rounds",
                    )
                experiences[client].append(r * len(sequence) // self.num_rounds)
                labels = sequence[experiences[client][-1]]
                if self.samples_per_round % len(labels):
                    raise InvalidValueError(
                        f"Expected `samples_per_round` to be a multiple of {len(labels)}, the number of classes of a "
                        f"task, but got {self.samples_per_round}.",
                        argument="samples_per_round",
                    )
                current[client] = self._draw(remaining_rows, labels, self.samples_per_round // len(labels))
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

    def _draw(self, remaining_rows: dict[int, IntArray], labels: Sequence[int], number: int) -> IntArray:
        drawn_rows = [EMPTY]
        for label in labels:
            rows = remaining_rows.get(label, EMPTY)
            if len(rows) < number:
                raise InvalidValueError(
                    f"Expected the number of unused samples of class {label} to be at least {number}, but got "
                    f"{len(rows)}.",
                    hint=f"Lower `num_rounds`, `samples_per_round` ({self.samples_per_round}), `test_per_class` or "
                    "`pretrain_per_class`.",
                    argument="num_rounds",
                    value=self.num_rounds,
                )
            drawn_rows.append(rows[:number])
            remaining_rows[label] = rows[number:]
        return np.sort(np.concatenate(drawn_rows))


@dataclass(frozen=True)
class ODFCLScenario(Scenario):
    """Scenario of Kröger et al. (2025): a base session, then sessions in which each node of a swarm learns new classes.

    Each class is a person. The people to learn are drawn from the dataset and numbered in the order in which they are
    learned. All other people can be used for pre-training. Experience 0 is the base session, which is not a round. The
    callback `lightning_fcl.callbacks.BaseSession` trains the model on the samples of the base session.

    Args:
        num_people: Number of classes to learn.
        num_base_people: Number of classes in the base session. The other classes are divided evenly among the sessions.
        num_sessions: Number of sessions after the base session.
        num_nodes: Number of clients. In a session, each client has its own classes. If a session has fewer classes
            than clients, each client has one class or a part of one class.
        train_per_class: Number of training samples of each class, including the validation samples.
        test_per_class: Number of test samples of each class.
        validation_per_class: Number of the training samples of each class that are used only for validation.
        pretrain_per_class: Maximum number of pre-training samples of each person that is not learned. With 0, there is
            no pre-training.
        rounds_per_session: Number of rounds in each session.
        history: ``"round"``, ``"seen"`` or ``"all"``. With ``"round"``, a round has the samples of its session. With
            ``"seen"``, a round has the samples of all classes so far (joint training). With ``"all"``, a round has the
            samples of all sessions. With ``"seen"`` and ``"all"``, the samples of the base session are divided among
            the nodes.

    Raises:
        ValueError: If there are too few people or samples, or if the classes cannot be divided evenly.

    Example:
        >>> plan = ODFCLScenario().plan(SamplePool(np.repeat(np.arange(12), 40)))
        >>> plan.num_rounds, plan.clients, plan.tasks["node1"], plan.class_split(20)
        (40, ('node1', 'node2', 'node3'), ((0, 1, 2, 3), (4,), (7,)), ((7, 8, 9), (0, 1, 2, 3, 4, 5, 6)))
    """

    citations: ClassVar[tuple[str, ...]] = ("kroeger2025odfcl",)

    provides_split = provides_clients = needs_classes = True
    num_people: int = 10
    num_base_people: int = validated(4, at_least, 1)
    num_sessions: int = validated(2, at_least, 1)
    num_nodes: int = validated(3, at_least, 1)
    train_per_class: int = validated(28, at_least, 1)
    test_per_class: int = validated(7, at_least, 1)
    validation_per_class: int = 0
    pretrain_per_class: int = validated(100, at_least, 0)
    rounds_per_session: int = validated(20, between, 1, MAX_ROUNDS)
    history: History = "round"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_people <= self.num_base_people or (self.num_people - self.num_base_people) % self.num_sessions:
            raise InvalidValueError(
                "Expected `num_people` minus `num_base_people` to be a positive multiple of "
                f"`num_sessions`={self.num_sessions}, but got `num_people`={self.num_people} and "
                f"`num_base_people`={self.num_base_people}.",
                hint=f"Set `num_people` to {self.num_base_people} plus a multiple of `num_sessions`.",
                argument="num_people",
                value=self.num_people,
            )

    def plan(self, pool: SamplePool, seed: int = 0) -> Plan:
        rng, y = np.random.default_rng([seed, 3]), pool.y
        sizes = (self.train_per_class, self.test_per_class, self.validation_per_class)
        learned_classes, parts = _draw_people(y, self.num_people, sizes, rng)
        shares, tasks = self._shares(parts["train"])
        joint = with_history(
            [{node: own[e] for node, own in shares.items()} for e in range(self.num_sessions + 1)], self.history
        )
        rounds = [{k: v for k, v in joint[e].items() if len(v)} for e in range(1, self.num_sessions + 1)]
        current = tuple(e for e in range(1, self.num_sessions + 1) for _ in range(self.rounds_per_session))
        pretrain_classes = rng.permutation(np.setdiff1d(np.arange(y.max() + 1), learned_classes))
        order = np.concatenate([learned_classes, pretrain_classes])
        numbers = np.argsort(order)[y]
        pretrain = [rng.permutation(np.flatnonzero(y == c))[: self.pretrain_per_class] for c in pretrain_classes]
        return Plan(
            train=tuple(rounds[e - 1] for e in current),
            experiences=dict.fromkeys(shares, current),
            tasks={node: tuple(groups) for node, groups in tasks.items()},
            groups=np.where(numbers < self.num_people, numbers, 0),
            test=np.sort(np.concatenate(parts["test"])),
            validation=np.sort(np.concatenate(parts["validation"])).astype(np.int64),
            pretrain=np.sort(np.concatenate([EMPTY, *pretrain])).astype(np.int64),
            base_samples=np.sort(np.concatenate(parts["train"][: self.num_base_people])),
            class_order=order,
            num_outputs=self.num_people,
            history=self.history,
        )

    def _shares(self, train: Sequence[IntArray]) -> tuple[dict[str, list[IntArray]], dict[str, list[tuple[int, ...]]]]:
        """Return two dicts, both by node name: the samples of each node, and the classes of each node.

        Each value is a list with one entry for the base session and one entry for each later session.
        """
        base, nodes, classes_per_session = (
            self.num_base_people,
            self.num_nodes,
            (self.num_people - self.num_base_people) // self.num_sessions,
        )
        shares = {
            f"node{n + 1}": [np.sort(np.concatenate([samples[n::nodes] for samples in train[:base]]))]
            for n in range(nodes)
        }
        tasks = {node: [tuple(range(base))] for node in shares}
        for first in range(base, self.num_people, classes_per_session):
            hands: list[list[IntArray]] = [[EMPTY] for _ in shares]
            groups: list[list[int]] = [[] for _ in shares]
            for index, samples in enumerate(train[first : first + classes_per_session]):
                sharing = [
                    n
                    for n in range(nodes)
                    if (index % nodes == n if nodes <= classes_per_session else n % classes_per_session == index)
                ]
                for offset, n in enumerate(sharing):
                    hands[n].append(samples[offset :: len(sharing)])
                    groups[n].append(first + index)
            for node, hand, node_groups in zip(shares, hands, groups, strict=True):
                shares[node].append(np.sort(np.concatenate(hand)))
                tasks[node].append(tuple(node_groups))
        return shares, tasks


def _draw_people(
    y: IntArray, people: int, sizes: tuple[int, int, int], rng: np.random.Generator
) -> tuple[IntArray, dict[str, list[IntArray]]]:
    """Draw the classes to learn, and the training, test and validation samples of each of these classes.

    Returns:
        The classes in the order of learning, and a dict with the keys ``train``, ``test`` and ``validation``. Each
        value is a list with the samples of each class.
    """
    train, test, validation = sizes
    between(0, train - 1, validation_per_class=validation)
    classes, counts = np.unique(y, return_counts=True)
    enough = classes[counts >= train + test]
    if len(enough) < people:
        raise InvalidValueError(
            f"Expected at least {people} people with at least {train + test} samples each, but the dataset has "
            f"{len(enough)}.",
            hint="Lower `num_people`, `train_per_class` or `test_per_class`.",
            argument="num_people",
            value=people,
        )
    learned_classes = rng.permutation(enough)[:people]
    parts: dict[str, list[IntArray]] = {"train": [], "test": [], "validation": []}
    for c in learned_classes:
        class_rows = rng.permutation(np.flatnonzero(y == c))
        parts["test"].append(class_rows[:test])
        parts["validation"].append(class_rows[test : test + validation])
        parts["train"].append(class_rows[test + validation : test + train])
    return learned_classes, parts


Blocks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class FedViTScenario(Scenario):
    """Scenario of Zuo et al. (2024), section 5.1: each client learns all tasks in its own order, with few samples.

    As in the paper, each client has its own order of the tasks. For each task, a client has 2 to 5 classes, and 5 % to
    10 % of the training samples of each of these classes. This implementation makes these assumptions:

    - All clients have the same tasks, which are blocks of classes of equal size.
    - The number of classes and the fraction of samples are drawn uniformly. The fraction is drawn for each client and
      class.
    - The samples of a class are assigned to clients one after another. After the last sample, the assignment starts
      again with the first sample. Therefore, each sample of a class has nearly the same number of clients. The numbers
      differ by at most one.
    - Each round of a task has all samples of the task.
    - The number of classes and the fractions of a client depend only on the seed, the number of the client, and the
      block.

    Evaluation is task-incremental. A sample of a task is classified among all classes of the task's block, see
    `Plan.classes_of_task`. A client is tested on the classes of the block that the client has, see `Plan.tasks`.

    Args:
        num_tasks: Number of blocks of classes. It must divide the number of classes.
        num_clients: Number of clients.
        classes_per_client: Minimum and maximum number of classes of a block that a client has. The minimum must be at
            least 2, because a single class cannot be classified. For blocks of one class, the minimum must be 1.
        sample_fraction: Minimum and maximum fraction of a class's training samples that a client has.
        rounds_per_task: Number of rounds of each task.
        order_per_client: Whether each client has its own order of the tasks. If False, all clients have the order of
            the blocks.
        class_order: Classes in the order in which they are cut into blocks. ``"ascending"`` sorts the classes by label.
            None draws the order from the seed.

    Raises:
        ValueError: If an argument is out of range, or if a class has too few samples.

    Example:
        >>> y = np.repeat(np.arange(20), 100)
        >>> plan = FedViTScenario(num_tasks=4, num_clients=3).plan(SamplePool(y, np.arange(2000)))
        >>> plan.num_rounds, plan.clients, len(plan.classes_of_task("1", 0))
        (40, ('0', '1', '2'), 5)
        >>> set(plan.tasks["1"][0]) <= set(plan.classes_of_task("1", 0))
        True
    """

    citations: ClassVar[tuple[str, ...]] = ("zuo2024fedvit",)

    provides_clients = needs_classes = True
    num_tasks: int = validated(10, at_least, 1)
    num_clients: int = validated(20, at_least, 1)
    classes_per_client: Sequence[int] = (2, 5)
    sample_fraction: Sequence[float] = (0.05, 0.1)
    rounds_per_task: int = validated(10, between, 1, MAX_ROUNDS)
    order_per_client: bool = True
    class_order: Sequence[int | str] | Literal["ascending"] | None = None

    def plan(self, pool: SamplePool, seed: int = 0) -> Plan:
        blocks = _blocks(pool.y[pool.train], self.num_tasks, self.class_order, pool.classes, seed)
        size = len(blocks[0])
        (min_classes, max_classes), (smallest, largest) = self.classes_per_client, self.sample_fraction
        between(min(2, size), size, classes_per_client=min_classes)
        between(min_classes, size, classes_per_client=max_classes)
        between(0, 1, sample_fraction=smallest)
        between(smallest, 1, sample_fraction=largest)
        labels, counts = np.unique(pool.y[pool.train], return_counts=True)
        if np.rint(smallest * counts.min()) < 1:
            raise InvalidValueError(
                "Expected the minimum of `sample_fraction` to give each client at least one sample of each of its "
                f"classes, but got {smallest}, and class {labels[counts.argmin()]} has {counts.min()} training "
                "sample(s).",
                hint="Raise `sample_fraction`.",
                argument="sample_fraction",
                value=smallest,
            )
        clients = [str(client) for client in range(self.num_clients)]
        draws = [
            np.random.default_rng([seed, 5, client]).permutation(self.num_tasks).tolist()
            for client in range(self.num_clients)
        ]
        orders = dict(
            zip(clients, draws if self.order_per_client else [range(self.num_tasks)] * self.num_clients, strict=True)
        )
        classes, rows = self._deal(blocks, pool, seed)
        current = tuple(task for task in range(self.num_tasks) for _ in range(self.rounds_per_task))
        return Plan(
            train=tuple({client: rows[client][order[task]] for client, order in orders.items()} for task in current),
            experiences=dict.fromkeys(orders, current),
            tasks={client: tuple(classes[client][b] for b in order) for client, order in orders.items()},
            groups=np.asarray(pool.y),
            test=pool.test,
            validation=pool.validation,
            task_classes={client: tuple(blocks[b] for b in order) for client, order in orders.items()},
        )

    def _deal(self, blocks: Blocks, pool: SamplePool, seed: int) -> tuple[dict[str, Blocks], dict[str, list[IntArray]]]:
        """Return two dicts by client: the client's classes in each block, and the client's samples in each block."""
        y, members = pool.y, pool.train
        decks = {
            c: np.random.default_rng([seed, 7, c]).permutation(members[y[members] == c]) for c in np.unique(y).tolist()
        }
        dealt = dict.fromkeys(decks, 0)
        classes: dict[str, Blocks] = {}
        samples: dict[str, list[IntArray]] = {}
        (min_classes, max_classes), (smallest, largest) = self.classes_per_client, self.sample_fraction
        for client in range(self.num_clients):
            client_classes: list[tuple[int, ...]] = []
            hands: list[IntArray] = []
            for number, block in enumerate(blocks):
                rng = np.random.default_rng([seed, 6, client, number])
                labels = rng.choice(
                    block, size=rng.integers(min_classes, max_classes, endpoint=True), replace=False
                ).tolist()
                rows = []
                for label in labels:
                    deck, first = decks[label], dealt[label]
                    dealt[label] += int(np.rint(rng.uniform(smallest, largest) * len(deck)))
                    rows.append(deck[np.arange(first, dealt[label]) % len(deck)])
                client_classes.append(tuple(sorted(labels)))
                hands.append(np.sort(np.concatenate(rows)))
            classes[str(client)], samples[str(client)] = tuple(client_classes), hands
        return classes, samples


def _blocks(
    y: IntArray, tasks: int, order: Sequence[int | str] | str | None, names: Sequence[str], seed: int
) -> Blocks:
    classes = np.unique(y).tolist()
    if not classes or len(classes) % tasks:
        raise InvalidValueError(
            f"Expected `num_tasks` to divide the number of classes, {len(classes)}, but got {tasks}.",
            hint=f"Use a divisor, such as `num_tasks={nearest_divisor(len(classes), tasks)}`.",
            argument="num_tasks",
            value=tasks,
        )
    if order is None:
        numbers = np.random.default_rng([seed, 4]).permutation(classes).tolist()
    else:
        numbers = classes if isinstance(order, str) else order_to_indices(order, names, "class_order", classes)
        numbers = [label for label in numbers if label in classes]
    size = len(classes) // tasks
    return tuple(tuple(sorted(numbers[first : first + size])) for first in range(0, len(classes), size))
