"""The scenario of the paper `fedvit`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightning_fcl.data.scenarios.scenario import MOST_ROUNDS, IntArray, Plan, Pool, Scenario, number_order
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
        blocks = _blocks(pool.y[pool.train], self.tasks, self.class_order, pool.classes, seed)
        size = len(blocks[0])
        (fewest, most), (smallest, largest) = self.classes_per_client, self.share
        between(min(2, size), size, classes_per_client=fewest)
        between(fewest, size, classes_per_client=most)
        between(0, 1, share=smallest)
        between(smallest, 1, share=largest)
        labels, counts = np.unique(pool.y[pool.train], return_counts=True)
        if np.rint(smallest * counts.min()) < 1:
            raise ValueError(
                f"Expected the smallest `share` to leave a client one sample of every class but got {smallest} of "
                f"the {counts.min()} training samples of class {labels[counts.argmin()]}. Raise `share`."
            )
        clients = [str(client) for client in range(self.clients)]
        draws = [
            np.random.default_rng([seed, 5, client]).permutation(self.tasks).tolist() for client in range(self.clients)
        ]
        orders = dict(zip(clients, draws if self.order_per_client else [range(self.tasks)] * self.clients, strict=True))
        classes, rows = self._deal(blocks, pool, seed)
        current = tuple(task for task in range(self.tasks) for _ in range(self.rounds_per_task))
        return Plan(
            train=tuple({client: rows[client][order[task]] for client, order in orders.items()} for task in current),
            experiences=dict.fromkeys(orders, current),
            tasks={client: tuple(classes[client][b] for b in order) for client, order in orders.items()},
            groups=np.asarray(pool.y),
            test=pool.test,
            validation=pool.validation,
            task_classes={client: tuple(blocks[b] for b in order) for client, order in orders.items()},
        )

    def _deal(self, blocks: Blocks, pool: Pool, seed: int) -> tuple[dict[str, Blocks], dict[str, list[IntArray]]]:
        """Each client's classes of each block, and its samples of these."""
        y, members = pool.y, pool.train
        decks = {
            c: np.random.default_rng([seed, 7, c]).permutation(members[y[members] == c]) for c in np.unique(y).tolist()
        }
        dealt = dict.fromkeys(decks, 0)
        classes: dict[str, Blocks] = {}
        samples: dict[str, list[IntArray]] = {}
        (fewest, most), (smallest, largest) = self.classes_per_client, self.share
        for client in range(self.clients):
            own: list[tuple[int, ...]] = []
            hands: list[IntArray] = []
            for number, block in enumerate(blocks):
                rng = np.random.default_rng([seed, 6, client, number])
                labels = rng.choice(block, size=rng.integers(fewest, most, endpoint=True), replace=False).tolist()
                rows = []
                for label in labels:
                    deck, first = decks[label], dealt[label]
                    dealt[label] += int(np.rint(rng.uniform(smallest, largest) * len(deck)))
                    rows.append(deck[np.arange(first, dealt[label]) % len(deck)])
                own.append(tuple(sorted(labels)))
                hands.append(np.sort(np.concatenate(rows)))
            classes[str(client)], samples[str(client)] = tuple(own), hands
        return classes, samples


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
        numbers = classes if isinstance(order, str) else number_order(order, names, "class_order", classes)
        numbers = [label for label in numbers if label in classes]
    size = len(classes) // tasks
    return tuple(tuple(sorted(numbers[first : first + size])) for first in range(0, len(classes), size))
