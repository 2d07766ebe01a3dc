"""Functions that divide the samples of many clients into batches, and functions that read the batches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import get_start_method
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.apply_func import apply_to_collection
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_fcl.data.collation import return_unchanged
from lightning_fcl.errors import InvalidStateError
from lightning_fcl.library_errors import LibraryError, match_error
from lightning_fcl.rng import Keys, derive_seed, make_client_keys, random_uint64, seed_all

Batch = Any
"""A batch in the form in which the dataset returns it: often ``[x, y]``, or any nesting of lists, dicts and tensors."""

TakeFn = Callable[..., Any]
"""Function that returns the samples at given indices. The argument ``seed`` seeds generators that are not global."""

Collate = Callable[[list[Any]], Any]
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class LoaderConfig:
    """Settings of a data loader. The names and meanings are those of the arguments of torch's `DataLoader`."""

    batch_size: int
    shuffle: bool = False
    drop_last: bool = False
    num_workers: int = 0
    pin_memory: bool = False
    worker_init_fn: Callable[[int], None] | None = None
    collate_fn: Collate = default_collate

    def make_loader(self, data: Dataset[Any]) -> DataLoader[Any]:
        return DataLoader(data, **vars(self))


def round_half_up(value: float) -> int:
    """Return the integer that is nearest to a non-negative number. Halves are rounded up, for example 0.5 to 1."""
    return int(value + 0.5)


def index_nested(samples: Any, rows: Tensor) -> Any:
    """Return the samples at some rows of a batch. The batch can be any nesting of lists, dicts and tensors."""
    return apply_to_collection(samples, Tensor, itemgetter(rows))


def fetch(data: Any, rows: Sequence[int]) -> Any:
    """Return the items of a map-style dataset at some rows, as torch's `DataLoader` reads them before `collate_fn`.

    If the dataset has a method ``__getitems__``, the result is the method's result for all rows.

    Example:
        >>> fetch(["a", "b", "c"], [2, 0])
        ['c', 'a']
    """
    read_all = getattr(data, "__getitems__", None)
    return read_all(rows) if read_all else [data[row] for row in rows]


# Requests for batches, and functions that read the requested batches.


@dataclass(frozen=True)
class BatchRequest:
    """A request to read the samples of one batch. Random draws while reading depend only on ``seed`` and ``key``."""

    rows: NDArray[np.int64]
    seed: int
    key: tuple[str | int, ...]

    @classmethod
    def keyed(cls, rows: NDArray[np.int64], seed: int, client: str, round_idx: int, *key_parts: int) -> BatchRequest:
        """Return a request for samples of a client in a round.

        Args:
            rows: Numbers of the samples, shape (n,).
            seed: Seed of the stream.
            client: Name of the client.
            round_idx: Index of the round.
            key_parts: Local epoch and index of the batch. Leave them out to request all samples of the client.
        """
        return cls(rows, seed, (client, round_idx, "data", *key_parts))

    def load(self, take: TakeFn) -> Any:
        """Return the requested samples. Afterwards, restore all random generators.

        Random draws do not depend on earlier reads.
        """
        with isolate_rng(include_cuda=torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
            seed_all(self.seed, *self.key)
            return take(self.rows, seed=derive_seed(self.seed, *self.key))


class _Requested(Dataset[Any]):
    """A dataset whose items are whole batches, so that each worker process reads a whole batch at once."""

    def __init__(self, take: TakeFn) -> None:
        self.take = take

    def __getitem__(self, request: BatchRequest) -> Any:
        return request.load(self.take)


def read_batches(take: TakeFn, requests: Iterable[BatchRequest], loading: LoaderConfig) -> Generator[Any, None, None]:
    """Yield the requested batches. If ``num_workers`` is above 0, worker processes read the batches.

    If the start method of `multiprocessing` is not ``"fork"``, each worker process first imports the main script.
    """
    if not loading.num_workers:
        yield from (request.load(take) for request in requests)
        return
    loader = DataLoader(
        _Requested(take),
        batch_size=None,
        sampler=requests,
        num_workers=loading.num_workers,
        collate_fn=return_unchanged,
        pin_memory=loading.pin_memory,
        worker_init_fn=loading.worker_init_fn,
        # Without this argument, the loader would draw from the global generator.
        generator=torch.Generator().manual_seed(0),
    )
    try:
        yield from loader
    except RuntimeError as error:
        if not match_error(error, LibraryError.WORKER_ENDED) or get_start_method() == "fork":
            raise
        raise InvalidStateError(
            f"Expected each worker process (`num_workers`={loading.num_workers}) to read data, but a process has "
            "ended. On this system, each worker process first imports the main script.",
            hint='Put the training code below `if __name__ == "__main__":`, or set `num_workers=0`.',
        ) from error


@dataclass(frozen=True)
class BatchPlan:
    """Settings that define how a client's samples are divided into batches. A client's only batch is never dropped.

    Args:
        batch_size: Number of samples per batch.
        shuffle: Whether samples are shuffled in each local epoch.
        drop_last: Whether an incomplete last batch is dropped.
        limit_batches: If an integer, the maximum number of batches over all local epochs. If a float, the fraction of
            batches that is kept, rounded down to whole batches. With a float, at least one batch is kept.
        min_size: Minimum number of samples in a batch, at most ``batch_size``. A smaller last batch is merged into the
            previous batch, if there is one. With ``drop_last``, batches are not merged.
    """

    batch_size: int
    shuffle: bool = True
    drop_last: bool = False
    limit_batches: int | float = 1.0
    min_size: int = 1

    def batches_per_epoch(self, sizes: IntArray, replayed: IntArray | None = None) -> IntArray:
        """Return the number of batches per epoch for each client, shape (clients,).

        Args:
            sizes: Number of samples of each client, shape (clients,).
            replayed: Number of replay samples that are added to each client's batches, shape (clients,). None means 0.
        """
        if self.drop_last:
            return np.maximum(1, sizes // self.batch_size)
        steps = np.maximum(1, -(-sizes // self.batch_size))
        if self.min_size > 1:
            last = sizes - (steps - 1) * self.batch_size
            if replayed is not None:
                # The last batch gets the fewest replay samples.
                last = last + replayed // steps
            steps = steps - ((last < self.min_size) & (steps > 1))
        return steps

    def limit_steps(self, steps: IntArray) -> IntArray:
        """Return each client's number of batches after `limit_batches` is applied, shape (clients,)."""
        if isinstance(self.limit_batches, int):
            return np.minimum(steps, self.limit_batches)
        return np.maximum(1, (steps * self.limit_batches).astype(np.int64))


def order_keys(seed: int, clients: Sequence[str], round_idx: int) -> Keys:
    """Return a key for each client. The key defines the client's sample order in each local epoch of a round."""
    return make_client_keys(seed, clients, round_idx, "batches")


def keyed_permutations(keys: Keys, sizes: IntArray, stream: int) -> IntArray:
    """Return a random order of the numbers from 0 to size - 1 for each key, shape (keys, largest size).

    If a size is below the largest size, the order is followed by the remaining numbers, from the size on. For the same
    key, each ``stream`` draws an independent order.
    """
    width = int(sizes.max(initial=0))
    draws = random_uint64(keys, width, start=stream << 32)
    draws[np.arange(width) >= sizes[:, None]] = np.iinfo(np.uint64).max
    return draws.argsort(axis=1, kind="stable")


def shuffled_window(key: Keys, num_replay_samples: int, size: int, start: int) -> IntArray:
    """Return the indices of the replay samples in one batch, if each batch is planned separately. Shape (size,).

    The batches are consecutive parts of a long sequence. The sequence consists of random orders of all replay samples.

    Args:
        key: Key of the random orders.
        num_replay_samples: Number of replay samples.
        size: Number of replay samples in the batch, at most ``num_replay_samples``.
        start: Position of the batch's first replay sample in the sequence.
    """
    number, position = divmod(start, num_replay_samples)
    sizes = np.array([num_replay_samples])
    order = keyed_permutations(key, sizes, number)[0, position : position + size]
    if len(order) == size:
        return order
    return np.concatenate([order, keyed_permutations(key, sizes, number + 1)[0, : size - len(order)]])


def plan_group_batches(
    sizes: IntArray, epochs: IntArray, batching: BatchPlan, keys: Keys, num_replay_samples: IntArray | None = None
) -> tuple[IntArray, IntArray]:
    """Return the sample indices in each batch of the local training of several clients, and the sizes of the batches.

    Args:
        sizes: Number of samples of each client, shape (clients,).
        epochs: Number of local epochs of each client, shape (clients,).
        batching: Settings of the batches.
        keys: Keys of the sample orders of the clients, see `order_keys`.
        num_replay_samples: Number of replay samples of each client, shape (clients,). The indices of replay samples
            follow the indices of the client's own samples. Each replay sample is in one batch per epoch. None means no
            replay samples.

    Returns:
        The indices of the samples, shape (clients, steps, largest batch), padded with zeros. Then the number of samples
        in each batch, shape (clients, steps). The number is 0 after a client's last batch.
    """
    steps = batching.batches_per_epoch(sizes, num_replay_samples)
    extra = np.zeros_like(sizes) if num_replay_samples is None else num_replay_samples
    step = np.arange(int(steps.max()))
    has_step = step < steps[:, None]
    own_counts = np.where(has_step, np.clip(sizes[:, None] - step * batching.batch_size, 0, batching.batch_size), 0)
    # If the last batch would be too small, it is merged into the previous batch.
    if batching.min_size > 1 and not batching.drop_last:
        own_counts += np.where(
            step == steps[:, None] - 1, np.maximum(0, sizes - steps * batching.batch_size)[:, None], 0
        )
    replay_counts = np.where(has_step, extra[:, None] // steps[:, None] + (step < (extra % steps)[:, None]), 0)
    index = np.zeros((len(sizes), int((steps * epochs).max()), int((own_counts + replay_counts).max())), dtype=np.int64)
    lengths = np.zeros(index.shape[:2], dtype=np.int64)
    for epoch in range(int(epochs.max())):
        training = has_step & (epochs > epoch)[:, None]
        client, step_idx = training.nonzero()
        global_step = epoch * steps[client] + step_idx
        lengths[client, global_step] = (own_counts + replay_counts)[client, step_idx]
        # In a batch, the client's own samples come first, and its replay samples come last.
        parts = (
            (own_counts, sizes, np.zeros_like(own_counts), np.zeros_like(sizes)),
            (replay_counts, extra, own_counts, sizes),
        )
        for part_idx, (counts, totals, column, first) in enumerate(parts):
            if not totals.any():
                continue
            number = counts[client, step_idx]
            row, batch = client.repeat(number), step_idx.repeat(number)
            offset = np.arange(len(row)) - (number.cumsum() - number).repeat(number)
            position = (counts.cumsum(axis=1) - counts)[row, batch] + offset
            if batching.shuffle:
                position = keyed_permutations(keys, totals, 2 * epoch + part_idx)[row, position]
            index[row, global_step.repeat(number), column[row, batch] + offset] = first[row] + position
    num_steps = batching.limit_steps(steps * epochs)
    lengths[np.arange(lengths.shape[1]) >= num_steps[:, None]] = 0
    return index[:, : num_steps.max()], lengths[:, : num_steps.max()]


def plan_batches(
    samples: int, epochs: int, batching: BatchPlan, keys: Keys, num_replay_samples: int = 0
) -> list[IntArray]:
    """Return the sample indices of a client's local training, one array per batch. See `plan_group_batches`."""
    index, lengths = plan_group_batches(
        np.array([samples]), np.array([epochs]), batching, keys, np.array([num_replay_samples])
    )
    return [row[:length] for row, length in zip(index[0], lengths[0], strict=True)]


def plan_client(samples: int, batching: BatchPlan, seed: int, client: str, round_idx: int) -> list[IntArray]:
    """Return the sample indices of one local epoch of a client in a round, one array per batch. See `plan_batches`."""
    return plan_batches(samples, 1, batching, order_keys(seed, [client], round_idx))
