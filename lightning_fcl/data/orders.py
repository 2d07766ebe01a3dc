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
    """How samples become batches; an incomplete last one that is a client's only one is never dropped.

    Of a client's batches in all its local epochs the first ``limit`` are kept, or that share of them, at least one.
    """

    batch_size: int
    shuffle: bool = True
    drop_last: bool = False
    limit: int | float = 1.0

    def per_epoch(self, sizes: IntArray) -> IntArray:
        """The batches of so many samples."""
        return np.maximum(1, sizes // self.batch_size if self.drop_last else -(-sizes // self.batch_size))

    def limited(self, steps: IntArray) -> IntArray:
        """How many of so many batches are kept."""
        if isinstance(self.limit, int):
            return np.minimum(steps, self.limit)
        return np.maximum(1, (steps * self.limit).astype(np.int64))


def order_keys(seed: int, clients: Sequence[str], round: int) -> Keys:
    """What the orders of the clients' samples in a round depend on, beside the local epoch and the sample."""
    return keys_of(seed, clients, round, "batches")


def permutations(keys: Keys, sizes: IntArray, stream: int) -> IntArray:
    """Random orders, shape (keys, largest size), what is beyond a size last; a key has one for each ``stream``."""
    width = int(sizes.max(initial=0))
    drawn = numbers(keys, width, start=stream << 32)
    drawn[np.arange(width) >= sizes[:, None]] = np.iinfo(np.uint64).max
    return drawn.argsort(axis=1, kind="stable")


def window(key: Keys, remembered: int, size: int, start: int) -> IntArray:
    """Which remembered samples join a batch that is planned for itself, shape (size,): random orders, cut in pieces.

    In ``remembered`` samples from the first on, and from each multiple, every one is there once.
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
        remembered: Number of each client's rehearsed samples, numbered from its size on; each joins one batch of every
            epoch. None: there are none.

    Returns:
        The samples, shape (clients, steps, widest batch), padded by zeros; and how many there are in each batch, shape
        (clients, steps), 0 where a client is done.
    """
    steps = batching.per_epoch(sizes)
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
    kept = batching.limited(steps * epochs)
    lengths[np.arange(lengths.shape[1]) >= kept[:, None]] = 0
    return index[:, : kept.max()], lengths[:, : kept.max()]


def plan_batches(samples: int, epochs: int, batching: Batching, keys: Keys, remembered: int = 0) -> list[IntArray]:
    """Which samples make up each batch of one client's local training, an array a step. See `plan_cohort`."""
    index, lengths = plan_cohort(np.array([samples]), np.array([epochs]), batching, keys, np.array([remembered]))
    return [row[:length] for row, length in zip(index[0], lengths[0], strict=True)]
