"""The scenario of the paper `fedvit`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightning_fcl.data.scenarios.scenario import MOST_ROUNDS, IntArray, Plan, Pool, Scenario, numbered
from lightning_fcl.errors import argument, at_least, between, check_fields

Blocks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class FedViTScenario(Scenario):
    """The scenario of Zuo et al. 2024, section 5.1: every client learns every task, in its own order, with few samples.

    As the paper says, each client has a distinct sequence of the tasks, 2 to 5 of a task's classes, and 5 % to 10 % of
    the training samples of each. Our reading: tasks are blocks of equal size, the same for all; numbers and shares are
    drawn uniformly, the share anew for each class of a client; a class's samples are dealt in turn, and anew from the
    first when the last is dealt, so that no sample goes to more than one client more than another. All of a task's
    samples are there in each of its rounds. A client's draws depend on the seed, its number and the block alone.

    Evaluation is task-incremental: a sample of a task is classified among the task's whole block,
    `Plan.classes_of_task`, of which the client's own classes, `Plan.tasks`, are the ones that it is tested on.

    Args:
        tasks: Blocks into which the classes are cut; it must divide their number.
        clients: Number of clients.
        classes_per_client: Fewest and most classes that a client has of a block. At least 2, as one class alone leaves
            nothing to tell apart, unless the blocks themselves have one class.
        share: Smallest and largest share of a class's training samples that a client has.
        rounds_per_task: Rounds that each task lasts.
        order_per_client: Whether each client has an order of the tasks of its own; otherwise all have that of the
            blocks.
        class_order: The classes, in the order in which they are cut into blocks; ``"ascending"``: by label; None draws
            one.

    Raises:
        ValueError: If a number is out of range, or a class has too few samples.

    Example:
        >>> y = np.repeat(np.arange(20), 100)
        >>> plan = FedViTScenario(tasks=4, clients=3).plan(Pool(y, np.arange(2000)))
        >>> plan.rounds, plan.clients, len(plan.classes_of_task("1", 0))
        (40, ('0', '1', '2'), 5)
        >>> set(plan.tasks["1"][0]) <= set(plan.classes_of_task("1", 0))
        True
    """

    own_clients = True
    tasks: int = argument(10, at_least, 1)
    clients: int = argument(20, at_least, 1)
    classes_per_client: Sequence[int] = (2, 5)
    share: Sequence[float] = (0.05, 0.1)
    rounds_per_task: int = argument(10, between, 1, MOST_ROUNDS)
    order_per_client: bool = True
    class_order: Sequence[int | str] | Literal["ascending"] | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def plan(self, pool: Pool, seed: int = 0) -> Plan:
        y, members, clients = pool.y, pool.train, range(self.clients)
        blocks = _blocks(y[members], self.tasks, self.class_order, pool.classes, seed)
        _require_classes(self.classes_per_client, len(blocks[0]))
        _require_share(self.share, y[members])
        draws = (np.random.default_rng([seed, 5, client]).permutation(self.tasks).tolist() for client in clients)
        orders = list(draws) if self.order_per_client else [list(range(self.tasks))] * self.clients
        asked = [
            [_asked(block, b, c, self.classes_per_client, self.share, seed) for b, block in enumerate(blocks)]
            for c in clients
        ]
        hands = _dealt(y, members, asked, seed)
        parts = {str(c): [hands[c][b] for b in order] for c, order in enumerate(orders)}
        current = tuple(task for task in range(self.tasks) for _ in range(self.rounds_per_task))
        return Plan(
            train=tuple({client: own[task] for client, own in parts.items()} for task in current),
            experiences=dict.fromkeys(parts, current),
            tasks={str(c): tuple(tuple(sorted(asked[c][b])) for b in order) for c, order in enumerate(orders)},
            groups=np.asarray(y),
            test=pool.test,
            validation=pool.validation,
            task_classes={str(c): tuple(blocks[b] for b in order) for c, order in enumerate(orders)},
        )


def _blocks(
    y: IntArray, tasks: int, order: Sequence[int | str] | str | None, names: Sequence[str], seed: int
) -> Blocks:
    classes = np.unique(y).tolist()
    if not classes or len(classes) % tasks:
        raise ValueError(
            f"Expected `tasks` to divide the number of classes, {len(classes)}, but got {tasks}. Change it."
        )
    if isinstance(order, str) and order != "ascending":
        raise ValueError(
            f'Expected `class_order` to be "ascending" or a list of classes but got {order!r}. Leave it out.'
        )
    if order is None:
        numbers = np.random.default_rng([seed, 4]).permutation(classes).tolist()
    else:
        numbers = classes if isinstance(order, str) else numbered(order, names, "class_order")
    if sorted(numbers) != classes:
        raise ValueError(f"Expected `class_order` to order all classes {classes} but got {numbers}.")
    size = len(classes) // tasks
    return tuple(tuple(sorted(numbers[first : first + size])) for first in range(0, len(classes), size))


def _require_classes(given: Sequence[int], block: int) -> None:
    fewest = min(2, block)
    whole = isinstance(given, list | tuple) and len(given) == 2 and all(type(number) is int for number in given)
    if not whole or not fewest <= given[0] <= given[1] <= block:
        raise ValueError(
            f"Expected `classes_per_client` to be two whole numbers from {fewest} to {block}, fewest and most of the "
            f"{block} classes of a task, but got {given!r}. Pass, for example, ({fewest}, {min(5, block)})"
            f"{', or fewer `tasks`' if block < 5 else ''}."
        )


def _require_share(given: Sequence[float], y: IntArray) -> None:
    pair = isinstance(given, list | tuple) and len(given) == 2 and all(type(s) in (int, float) for s in given)
    if not pair or not 0 < given[0] <= given[1] <= 1:
        raise ValueError(
            f"Expected `share` to be two numbers above 0 and at most 1, smallest and largest, but got {given!r}. Pass, "
            "for example, (0.05, 0.1)."
        )
    labels, counts = np.unique(y, return_counts=True)
    rarest = int(counts.argmin())
    if np.rint(given[0] * counts[rarest]) < 1:
        raise ValueError(
            f"Expected the smallest `share` to leave a client one sample of every class but got {given[0]} of the "
            f"{counts[rarest]} training samples of class {labels[rarest]}. Raise `share`."
        )


def _asked(
    block: tuple[int, ...], number: int, client: int, classes: Sequence[int], share: Sequence[float], seed: int
) -> dict[int, float]:
    rng = np.random.default_rng([seed, 6, client, number])
    own = rng.choice(block, size=rng.integers(classes[0], classes[1], endpoint=True), replace=False).tolist()
    return {label: rng.uniform(share[0], share[1]) for label in own}


def _dealt(y: IntArray, members: IntArray, asked: list[list[dict[int, float]]], seed: int) -> list[list[IntArray]]:
    pools = {
        int(c): np.random.default_rng([seed, 7, int(c)]).permutation(members[y[members] == c]) for c in np.unique(y)
    }
    dealt = dict.fromkeys(pools, 0)
    hands = []
    for own in asked:
        hand = []
        for shares in own:
            rows = []
            for label, share in shares.items():
                pool, first = pools[label], dealt[label]
                dealt[label] += int(np.rint(share * len(pool)))
                rows.append(pool[np.arange(first, dealt[label]) % len(pool)])
            hand.append(np.sort(np.concatenate(rows)))
        hands.append(hand)
    return hands
