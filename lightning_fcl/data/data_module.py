"""A LightningDataModule taken apart: the samples of each of its loaders, and how they make batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from dataclasses import replace
from functools import partial
from itertools import combinations, islice
from typing import Any, NoReturn

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
)

from lightning_fcl.data.batches import Loading
from lightning_fcl.randomness import start_randomness

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")

_HOOKS = {"train": "train_dataloader", "validation": "val_dataloader", "test": "test_dataloader"}

Parts = dict[str, tuple[Dataset[Any], Loading]]
"""The samples of ``"train"``, ``"validation"`` and ``"test"``, where there are such, and how each is loaded."""


def lend_hooks(module: L.LightningDataModule, stream: L.LightningDataModule, prepared: bool = False) -> None:
    """Let a stream prepare its data, and transfer batches, by the hooks of a data module that overrides them."""
    stream.prepare_data_per_node = module.prepare_data_per_node
    stream.prepare_data = partial(_once, [True] * prepared, module.prepare_data)  # type: ignore[method-assign]
    for hook in TRANSFER_HOOKS:
        if is_overridden(hook, module):
            setattr(stream, hook, partial(_unless_idle, getattr(module, hook)))


def _once(done: list[bool], hook: Callable[[], None]) -> None:
    if not done:
        done.append(True)
        hook()


def _unless_idle(hook: Callable[..., Any], batch: Any, *arguments: Any) -> Any:
    """What a hook makes of a batch; where no client trains, the only batch of a round is None, or of no sample."""
    idle = batch is None or (isinstance(batch, list) and isinstance(batch[0], torch.Tensor) and not batch[0].numel())
    return batch if idle else hook(batch, *arguments)


def call_seeded(seed: int, hook: Callable[..., Any], *args: Any) -> Any:
    """Call a hook that draws from a seed: what it splits is the same in all hooks, processes, and continued fits."""
    with isolate_rng(include_cuda=torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        start_randomness(seed, "data module")
        return hook(*args)


def parts_of(module: L.LightningDataModule, seed: int) -> Parts:
    there = {part: hook for part, hook in _HOOKS.items() if part == "train" or is_overridden(hook, module)}
    for stage in ("fit", "test") if "test" in there else ("fit",):
        call_seeded(seed, module.setup, stage)
    parts: Parts = {}
    for part, hook in there.items():
        made = call_seeded(seed, getattr(module, hook))
        if isinstance(made, list | tuple) and len(made) < 2:
            made = made[0] if made else None
        if made is not None or part == "train":
            data, loading = call_seeded(seed, _taken_apart, made, f"`{hook}` of {type(module).__name__}")
            parts[part] = data, loading if part == "train" else replace(loading, shuffle=False)
    _refuse_shared(parts, type(module).__name__)
    return parts


def _taken_apart(loader: Any, whose: str) -> tuple[Dataset[Any], Loading]:
    def refuse(wanted: str, got: object, remedy: str) -> NoReturn:
        raise ValueError(f"Expected {whose} to {wanted} but got a {type(got).__name__}. {remedy}")

    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        refuse("give one `DataLoader`", loader, "Pass its data set to `FederatedStream.from_arrays`.")
    data, batches = loader.dataset, loader.batch_sampler
    if isinstance(data, IterableDataset):
        refuse("have a map-style data set, whose samples have numbers,", data, "Read its items into a list.")
    if type(batches) is not BatchSampler:
        refuse(
            "make batches by `batch_size`",
            data if batches is None else batches,
            "Leave its own batches out: clients have theirs.",
        )
    rows = _rows(batches.sampler)
    if rows is None or any(not 0 <= row < len(data) for row in rows):  # type: ignore[arg-type]  # map-style
        refuse(
            "have a sampler that gives the same samples in each epoch",
            batches.sampler,
            "Use `shuffle`, a `SubsetRandomSampler`, or a `Subset` of the data set.",
        )
    loading = Loading(
        batches.batch_size,
        type(batches.sampler) in (RandomSampler, SubsetRandomSampler),
        batches.drop_last,
        loader.num_workers,
        loader.pin_memory,
        loader.worker_init_fn,
        loader.collate_fn,
    )
    return (data if rows == list(range(len(data))) else Subset(data, rows)), loading  # type: ignore[arg-type]


def _rows(sampler: Any) -> list[int] | None:
    """The samples that a sampler gives in every epoch; None if it may give others."""
    if type(sampler) is SubsetRandomSampler:
        return [int(row) for row in sampler.indices]
    if type(sampler) is RandomSampler:
        size = len(sampler.data_source)
        return list(range(size)) if not sampler.replacement and sampler.num_samples == size else None
    if not isinstance(sampler, Sized) or hasattr(sampler, "set_epoch"):
        return None
    once, again = (list(islice(sampler, len(sampler) + 1)) for _ in range(2))  # type: ignore[call-overload]
    alike = len(once) <= len(sampler) and all(isinstance(row, int | np.integer) for row in once) and once == again
    return list(map(int, once)) if alike else None


def _origin(data: Dataset[Any]) -> NDArray[np.int64]:
    """The data set below all subsets, and the place in it, of each sample, shape (n, 2)."""
    if isinstance(data, Subset):
        return _origin(data.dataset)[np.asarray(data.indices, dtype=np.int64)]
    if isinstance(data, ConcatDataset):
        return np.concatenate([_origin(part) for part in data.datasets])
    size = len(data)  # type: ignore[arg-type]  # map-style
    return np.stack([np.full(size, id(data)), np.arange(size)], axis=1)


def _refuse_shared(parts: Mapping[str, tuple[Dataset[Any], Loading]], name: str) -> None:
    """Refuse samples that two parts share; validation and test samples may all be the same."""
    origins = {part: np.unique(_origin(data).view("i8,i8")) for part, (data, _) in parts.items()}
    for (one, first), (other, second) in combinations(origins.items(), 2):
        shared = np.intersect1d(first, second, assume_unique=True)
        if len(shared) and not (one == "validation" and np.array_equal(first, second)):
            raise ValueError(
                f"Expected `{_HOOKS[one]}` and `{_HOOKS[other]}` of {name} to have samples of their own but got "
                f"{len(shared)} that both have, such as number {shared[0][1]} of their data set. Split it once."
            )
