"""The samples of a client's batches, taken from memory or read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_start_method
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.apply_func import apply_to_collection
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_fcl.randomness import start_randomness

Batch = Any
"""A batch as a data set makes it: often ``[x, y]``, but any nest of lists, dicts and tensors."""

Take = Callable[[NDArray[np.int64]], Any]

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Loading:
    """How a loader reads samples and makes batches of them: arguments of torch's `DataLoader`, with their meaning."""

    batch_size: int
    shuffle: bool = False
    drop_last: bool = False
    num_workers: int = 0
    pin_memory: bool = False
    worker_init_fn: Callable[[int], None] | None = None
    collate_fn: Collate = default_collate

    def loader(self, data: Dataset[Any]) -> DataLoader[Any]:
        return DataLoader(data, **vars(self))


def round_half_up(value: float) -> int:
    """The nearest whole number, halves up: 0.5 clients are one client."""
    return int(value + 0.5)


def some_of(samples: Any, rows: Tensor) -> Any:
    """Some samples of those that are stacked in any nest of lists and dicts of tensors."""
    return apply_to_collection(samples, Tensor, itemgetter(rows))


# Samples that are read when they are asked for.


@dataclass(frozen=True)
class Request:
    """Samples to read for one batch; ``seed`` and ``key``, whose and when, settle what is random in it."""

    rows: NDArray[np.int64]
    seed: int
    key: tuple[str | int, ...]

    @classmethod
    def of(cls, rows: NDArray[np.int64], seed: int, client: str, round: int, *place: int) -> Request:
        """A request of a client in a round; ``place``: its local epoch and batch, none for all of its samples."""
        return cls(rows, seed, (client, round, "data", *place))

    def read(self, take: Take) -> Any:
        """The samples, whatever has been read or trained before; it changes no state of a random number generator."""
        with isolate_rng(include_cuda=torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
            start_randomness(self.seed, *self.key)
            return take(self.rows)


class _Requested(Dataset[Any]):
    """A data set whose items are the batches that requests ask for: workers read whole batches."""

    def __init__(self, take: Take) -> None:
        self.take = take

    def __getitem__(self, request: Request) -> Any:
        return request.read(self.take)


def read(take: Take, requests: Iterable[Request], loading: Loading) -> Iterator[Any]:
    """What requests ask for, read here or by workers; those that a system spawns run the main script first."""
    if not loading.num_workers:
        yield from (request.read(take) for request in requests)
        return
    loader = DataLoader(
        _Requested(take),
        batch_size=None,
        sampler=requests,
        num_workers=loading.num_workers,
        collate_fn=_as_it_is,
        pin_memory=loading.pin_memory,
        worker_init_fn=loading.worker_init_fn,
        generator=torch.Generator().manual_seed(0),  # it would draw from the global one
    )
    try:
        yield from loader
    except RuntimeError as error:
        if "exited unexpectedly" not in str(error) or get_start_method() == "fork":
            raise
        raise RuntimeError(
            f"Expected the {loading.num_workers} processes of `num_workers` to read but one has ended: this system "
            'spawns them with the main script. Put what trains below `if __name__ == "__main__":`, or set '
            "`num_workers=0`."
        ) from error


def _as_it_is(batch: Any) -> Any:
    return batch


def number_of(samples: Any) -> int:
    """How many samples there are in any nest of lists and dicts of tensors; 0 in an empty one, or none."""
    if isinstance(samples, Mapping):
        samples = list(samples.values())
    if samples is None or isinstance(samples, list | tuple):
        return number_of(samples[0]) if samples else 0
    return len(samples)


def joined(parts: Sequence[Any]) -> Any:
    """Samples one after the other, in the nest of lists, dicts and named tuples that the first of them has."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {name: joined([part[name] for part in parts]) for name in first}
    if isinstance(first, list | tuple):
        columns = [joined(column) for column in zip(*parts, strict=True)]
        return type(first)(*columns) if isinstance(first, tuple) and type(first) is not tuple else columns
    if any(part.shape[1:] != first.shape[1:] for part in parts):
        shapes = " and ".join(str(tuple(part.shape[1:])) for part in parts)
        raise ValueError(f"Expected samples of one shape to join but got {shapes}. Pad them to one, in `collate_fn`.")
    return torch.cat(list(parts))


class Alike(NamedTuple):
    """Batches of clients, numbered by ``rows``, that have one shape: stacked, every tensor of shape (clients, ...)."""

    rows: Tensor
    batch: Any


def alike(each: Sequence[Any]) -> list[Alike]:
    """The batches of several clients, those of one shape together: nests of tensors, and of nothing else."""
    rows: dict[Hashable, list[int]] = {}
    for row, batch in enumerate(each):
        leaves, nest = tree_flatten(batch)
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                kind = type(leaf).__name__
                raise ValueError(f"its batches hold a `{kind}` where clients side by side have tensors alone")
        rows.setdefault((nest, *((leaf.shape, leaf.dtype) for leaf in leaves)), []).append(row)
    return [Alike(torch.tensor(own), stacked([each[row] for row in own])) for own in rows.values()]


def stacked(parts: Sequence[Any]) -> Any:
    """Batches of one shape as one, in the nest that the first of them has."""
    return tree_map(lambda *leaves: torch.stack(leaves), *parts)
