"""The scenario of the paper `flwf`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lightning_fcl.data.scenarios.plan import History, IntArray, Plan, with_history


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
