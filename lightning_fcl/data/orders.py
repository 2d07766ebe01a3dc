"""Which samples make up each batch of the clients' local training: whole cohorts planned in a few array operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.randomness import Keys, keys_of, numbers

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Batching:
    """How samples become batches.

    Args:
        batch_size: Samples per batch; the last batch of an epoch may be smaller.
        shuffle: Whether every epoch has an order of its own.
        drop_last: Whether an incomplete last batch is left out, unless it is the only one.
    """

    batch_size: int
    shuffle: bool = True
    drop_last: bool = False


def order_keys(seed: int, clients: Sequence[str], round: int) -> Keys:
    """What the orders of the clients' samples in a round depend on, beside the local epoch and the sample."""
    return keys_of(seed, clients, round, "batches")


def permutations(keys: Keys, sizes: IntArray, stream: int) -> IntArray:
    """For each key a random order of so many numbers, shape (keys, largest size); what is beyond its size comes last.

    Args:
        keys: Shape (keys,).
        sizes: Shape (keys,).
        stream: Which of a key's orders: each has one for every whole number.

    Example:
        >>> permutations(keys_of(0, ["a", "b"]), np.array([3, 2]), stream=0).shape
        (2, 3)
    """
    width = int(sizes.max(initial=0))
    drawn = numbers(keys, width, start=stream << 32)
    drawn[np.arange(width) >= sizes[:, None]] = np.iinfo(np.uint64).max
    return drawn.argsort(axis=1, kind="stable")


def window(key: Keys, remembered: int, size: int, start: int) -> IntArray:
    """Which of the remembered samples join a batch that is planned for itself: random orders of them, cut in pieces.

    Args:
        key: What the orders depend on, shape (1,).
        remembered: How many there are, at least 1.
        size: How many join, at most all.
        start: How many have joined before.

    Returns:
        Shape (size,): in ``remembered`` samples from the first on, and from each multiple, every one is there once.

    Example:
        >>> key = keys_of(0, ["a"])
        >>> sorted(np.concatenate([window(key, 5, 3, 0), window(key, 5, 2, 3)]).tolist())
        [0, 1, 2, 3, 4]
    """
    number, place = divmod(start, remembered)
    sizes = np.array([remembered])
    order = permutations(key, sizes, number)[0, place : place + size]
    if len(order) == size:
        return order
    return np.concatenate([order, permutations(key, sizes, number + 1)[0, : size - len(order)]])


def plan_cohort(
    sizes: IntArray, epochs: IntArray, batching: Batching, keys: Keys, remembered: IntArray | None = None
) -> tuple[IntArray, IntArray]:
    """Which samples make up each batch of several clients' local training.

    Args:
        sizes: Number of each client's samples, at least 1, shape (clients,).
        epochs: Local epochs of each client, shape (clients,).
        batching: How samples become batches.
        keys: What each client's orders depend on: see `order_keys`.
        remembered: Number of each client's rehearsed samples, numbered from its size on; each joins one batch of every
            epoch. None: there are none.

    Returns:
        The samples, shape (clients, steps, widest batch), padded by zeros; and how many there are in each batch, shape
        (clients, steps), 0 where a client is done.

    Example:
        >>> plan = plan_cohort(np.array([5]), np.array([1]), Batching(2, shuffle=False), order_keys(0, ["a"], 0))
        >>> plan[0].tolist(), plan[1].tolist()
        ([[[0, 1], [2, 3], [4, 0]]], [[2, 2, 1]])
    """
    steps = np.maximum(1, sizes // batching.batch_size if batching.drop_last else -(-sizes // batching.batch_size))
    extra = np.zeros_like(sizes) if remembered is None else remembered
    step = np.arange(int(steps.max()))
    there = step < steps[:, None]
    own = np.where(there, np.clip(sizes[:, None] - step * batching.batch_size, 0, batching.batch_size), 0)
    more = np.where(there, extra[:, None] // steps[:, None] + (step < (extra % steps)[:, None]), 0)
    index = np.zeros((len(sizes), int((steps * epochs).max()), int((own + more).max())), dtype=np.int64)
    lengths = np.zeros(index.shape[:2], dtype=np.int64)
    for epoch in range(int(epochs.max())):
        training = there & (epochs > epoch)[:, None]
        client, at = training.nonzero()
        place = epoch * steps[client] + at
        lengths[client, place] = (own + more)[client, at]
        # A client's own samples come first in a batch, then those that it has remembered.
        parts = ((own, sizes, np.zeros_like(own), np.zeros_like(sizes)), (more, extra, own, sizes))
        for part, (counts, totals, column, first) in enumerate(parts):
            if not totals.any():
                continue
            number = counts[client, at]
            row, batch = client.repeat(number), at.repeat(number)
            within = np.arange(len(row)) - (number.cumsum() - number).repeat(number)
            position = (counts.cumsum(axis=1) - counts)[row, batch] + within
            if batching.shuffle:
                position = permutations(keys, totals, 2 * epoch + part)[row, position]
            index[row, place.repeat(number), column[row, batch] + within] = first[row] + position
    return index, lengths


def plan_batches(samples: int, epochs: int, batching: Batching, keys: Keys, remembered: int = 0) -> list[IntArray]:
    """Which samples make up each batch of one client's local training. See `plan_cohort`.

    Returns:
        One index array per step.

    Example:
        >>> plan_batches(5, 1, Batching(2, shuffle=False), order_keys(0, ["a"], 0), remembered=1)
        [array([0, 1, 5]), array([2, 3]), array([4])]
    """
    index, lengths = plan_cohort(np.array([samples]), np.array([epochs]), batching, keys, np.array([remembered]))
    return [row[:length] for row, length in zip(index[0], lengths[0], strict=True)]
