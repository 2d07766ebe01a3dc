"""The batches of clients: which samples make up each, for whole client groups at once, and their values."""

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

from lightning_fcl.data.collation import as_it_is
from lightning_fcl.errors import InvalidStateError
from lightning_fcl.library_errors import LibraryError, match_error
from lightning_fcl.rng import Keys, derive_seed, make_client_keys, random_uint64, seed_all

Batch = Any
"""A batch as a data set makes it: often ``[x, y]``, but any nest of lists, dicts and tensors."""

TakeFn = Callable[..., Any]
"""Returns the samples at some indices. The keyword ``seed`` seeds random generators other than the global ones."""

Collate = Callable[[list[Any]], Any]
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class LoaderConfig:
    """How a loader reads samples and makes batches of them: arguments of torch's `DataLoader`, with their meaning."""

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
    """The nearest whole number, halves up: 0.5 clients are one client."""
    return int(value + 0.5)


def index_nested(samples: Any, rows: Tensor) -> Any:
    """Some samples of those that are stacked in any nest of lists and dicts of tensors."""
    return apply_to_collection(samples, Tensor, itemgetter(rows))


def fetch(data: Any, rows: Sequence[int]) -> Any:
    """Return some items of a map-style dataset for `collate_fn`, as torch's `DataLoader` fetches them.

    A method ``__getitems__`` of the dataset reads all items at once.

    Example:
        >>> fetch(["a", "b", "c"], [2, 0])
        ['c', 'a']
    """
    read_all = getattr(data, "__getitems__", None)
    return read_all(rows) if read_all else [data[row] for row in rows]


# Samples that are read when they are asked for.


@dataclass(frozen=True)
class BatchRequest:
    """Samples to read for one batch; ``seed`` and ``key``, whose and when, settle what is random in it."""

    rows: NDArray[np.int64]
    seed: int
    key: tuple[str | int, ...]

    @classmethod
    def keyed(cls, rows: NDArray[np.int64], seed: int, client: str, round_idx: int, *key_parts: int) -> BatchRequest:
        """A request of a client in a round; ``key_parts``: its local epoch and batch, none for all of its samples."""
        return cls(rows, seed, (client, round_idx, "data", *key_parts))

    def load(self, take: TakeFn) -> Any:
        """The samples, whatever has been read or trained before; it changes no state of a random number generator."""
        with isolate_rng(include_cuda=torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
            seed_all(self.seed, *self.key)
            return take(self.rows, seed=derive_seed(self.seed, *self.key))


class _Requested(Dataset[Any]):
    """A data set whose items are the batches that requests ask for: workers read whole batches."""

    def __init__(self, take: TakeFn) -> None:
        self.take = take

    def __getitem__(self, request: BatchRequest) -> Any:
        return request.load(self.take)


def read_batches(take: TakeFn, requests: Iterable[BatchRequest], loading: LoaderConfig) -> Generator[Any, None, None]:
    """What requests ask for, read here or by workers; those that a system spawns run the main script first."""
    if not loading.num_workers:
        yield from (request.load(take) for request in requests)
        return
    loader = DataLoader(
        _Requested(take),
        batch_size=None,
        sampler=requests,
        num_workers=loading.num_workers,
        collate_fn=as_it_is,
        pin_memory=loading.pin_memory,
        worker_init_fn=loading.worker_init_fn,
        generator=torch.Generator().manual_seed(0),  # it would draw from the global one
    )
    try:
        yield from loader
    except RuntimeError as error:
        if not match_error(error, LibraryError.WORKER_ENDED) or get_start_method() == "fork":
            raise
        raise InvalidStateError(
            f"Expected the {loading.num_workers} processes of `num_workers` to read but one has ended: this system "
            "spawns them with the main script.",
            hint='Put what trains below `if __name__ == "__main__":`, or set `num_workers=0`.',
        ) from error


@dataclass(frozen=True)
class BatchPlan:
    """How samples become batches. A client's only batch is never dropped.

    Args:
        batch_size: Samples per batch.
        shuffle: Whether samples are shuffled in each local epoch.
        drop_last: Whether an incomplete last batch is left out.
        limit_batches: Number of batches of all local epochs that are kept, or their share, at least one.
        min_size: Samples that a batch needs, at most ``batch_size``. A smaller last batch joins the one before it.
    """

    batch_size: int
    shuffle: bool = True
    drop_last: bool = False
    limit_batches: int | float = 1.0
    min_size: int = 1

    def batches_per_epoch(self, sizes: IntArray, replayed: IntArray | None = None) -> IntArray:
        """Return the number of batches of an epoch, shape (clients,).

        Args:
            sizes: Number of each client's samples, shape (clients,).
            replayed: Number of the replay samples that join each client's batches, shape (clients,). None: 0.
        """
        if self.drop_last:
            return np.maximum(1, sizes // self.batch_size)
        steps = np.maximum(1, -(-sizes // self.batch_size))
        if self.min_size > 1:
            last = sizes - (steps - 1) * self.batch_size
            if replayed is not None:
                last = last + replayed // steps  # the last batch gets the fewest
            steps = steps - ((last < self.min_size) & (steps > 1))
        return steps

    def limit_steps(self, steps: IntArray) -> IntArray:
        """How many of so many batches are kept."""
        if isinstance(self.limit_batches, int):
            return np.minimum(steps, self.limit_batches)
        return np.maximum(1, (steps * self.limit_batches).astype(np.int64))


def order_keys(seed: int, clients: Sequence[str], round_idx: int) -> Keys:
    """What the orders of the clients' samples in a round depend on, beside the local epoch and the sample."""
    return make_client_keys(seed, clients, round_idx, "batches")


def keyed_permutations(keys: Keys, sizes: IntArray, stream: int) -> IntArray:
    """Random orders, shape (keys, largest size), what is beyond a size last; a key has one for each ``stream``."""
    width = int(sizes.max(initial=0))
    draws = random_uint64(keys, width, start=stream << 32)
    draws[np.arange(width) >= sizes[:, None]] = np.iinfo(np.uint64).max
    return draws.argsort(axis=1, kind="stable")


def shuffled_window(key: Keys, num_replay_samples: int, size: int, start: int) -> IntArray:
    """Which remembered samples join a batch that is planned for itself, shape (size,): random orders, cut in pieces.

    In ``num_replay_samples`` samples from the first on, and from each multiple, every one is there once.
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
    """Which samples make up each batch of several clients' local training.

    Args:
        num_replay_samples: Number of each client's rehearsed samples, numbered from its size on; each joins one batch
            of every epoch. None: there are none.

    Returns:
        The samples, shape (clients, steps, widest batch), padded by zeros; and how many there are in each batch, shape
        (clients, steps), 0 where a client is done.
    """
    steps = batching.batches_per_epoch(sizes, num_replay_samples)
    extra = np.zeros_like(sizes) if num_replay_samples is None else num_replay_samples
    step = np.arange(int(steps.max()))
    has_step = step < steps[:, None]
    own_counts = np.where(has_step, np.clip(sizes[:, None] - step * batching.batch_size, 0, batching.batch_size), 0)
    if batching.min_size > 1 and not batching.drop_last:  # what a last batch that is too small adds to the one before
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
        # A client's own samples come first in a batch, then those that it has remembered.
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
    """Which samples make up each batch of one client's local training, an array a step. See `plan_group_batches`."""
    index, lengths = plan_group_batches(
        np.array([samples]), np.array([epochs]), batching, keys, np.array([num_replay_samples])
    )
    return [row[:length] for row, length in zip(index[0], lengths[0], strict=True)]


def plan_client(samples: int, batching: BatchPlan, seed: int, client: str, round_idx: int) -> list[IntArray]:
    """Return which samples make up each batch of one local epoch of a client in a round. See `plan_group_batches`."""
    return plan_batches(samples, 1, batching, order_keys(seed, [client], round_idx))
