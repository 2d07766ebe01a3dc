"""Functions that extract the datasets and the loader settings from a LightningDataModule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from functools import partial
from inspect import isfunction, ismethod
from itertools import islice, product
from typing import Any, NoReturn, TypeGuard

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    get_worker_info,
)

from lightning_fcl.data.batching import LoaderConfig
from lightning_fcl.errors import InvalidValueError, MissingValueError
from lightning_fcl.rng import seed_all
from lightning_fcl.validation import format_names

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")

_HOOKS = {"train": "train_dataloader", "validation": "val_dataloader", "test": "test_dataloader"}

SplitDatasets = dict[str, tuple[Dataset[Any], LoaderConfig | None]]
"""Dataset and loader settings of each split (``"train"``, ``"validation"``, ``"test"``). The settings can be None."""


def is_module_per_client(data: object) -> TypeGuard[Mapping[Any, object] | Sequence[object]]:
    """Return whether the data of a stream are a dict, list or tuple, with one entry per client or split.

    A dataset that is also a dict, list or tuple counts as one dataset.
    """
    return isinstance(data, Mapping | list | tuple) and not isinstance(data, Dataset)


def client_modules(data: object) -> list[L.LightningDataModule]:
    """Return the data modules in the data of a stream: one for all clients, or the data modules of single clients."""
    parts = (data.values() if isinstance(data, Mapping) else data) if is_module_per_client(data) else [data]
    return [part for part in parts if isinstance(part, L.LightningDataModule)]


def delegate_hooks(
    modules: Sequence[L.LightningDataModule], stream: L.LightningDataModule, is_prepared: bool = False
) -> None:
    """Make a stream call the hooks of its data modules to prepare data and to transfer batches.

    Args:
        modules: The data modules.
        stream: The stream.
        is_prepared: Whether the data are already prepared.

    Raises:
        ValueError: If there are several data modules and one of them overrides a batch transfer hook.
    """
    stream.prepare_data_per_node = all(module.prepare_data_per_node for module in modules)
    hooks = [partial(_prepare, module, stream) for module in modules]
    stream.prepare_data = partial(_once, [True] * is_prepared, hooks)  # type: ignore[method-assign]
    for module, hook in product(modules, TRANSFER_HOOKS):
        if not is_overridden(hook, module):
            continue
        if len(modules) > 1:
            raise InvalidValueError(
                f"Expected the data modules of several clients not to change batches, but {type(module).__name__} "
                f"overrides `{hook}`.",
                hint="Move the code of the hook to the transforms of the datasets.",
                argument=hook,
                value=type(module).__name__,
            )
        setattr(stream, hook, partial(_unless_idle, getattr(module, hook)))


def _prepare(module: L.LightningDataModule, stream: L.LightningDataModule) -> None:
    """Prepare the data of a data module. Before that, set its Trainer to the Trainer of the stream."""
    module.trainer = stream.trainer
    module.prepare_data()


def _once(completion_flag: list[bool], hooks: Iterable[Callable[[], None]]) -> None:
    if not completion_flag:
        completion_flag.append(True)
        for hook in hooks:
            hook()


def _unless_idle(hook: Callable[..., Any], batch: Any, *arguments: Any) -> Any:
    """Return the batch that a transfer hook returns. If a batch has no samples, return it unchanged, without a call.

    If no client trains in a round, the only batch of the round is None or has no samples.
    """
    idle = batch is None or (isinstance(batch, list) and isinstance(batch[0], torch.Tensor) and not batch[0].numel())
    return batch if idle else hook(batch, *arguments)


def overridden_hook(*owners: object) -> str | None:
    """Return a text such as "`Module` overrides `hook`" for the first overridden batch transfer hook, or None."""
    modules = [owner for owner in owners if isinstance(owner, L.LightningDataModule | L.LightningModule)]
    overrides = ((owner, hook) for owner, hook in product(modules, TRANSFER_HOOKS) if is_overridden(hook, owner))
    return next((f"`{type(owner).__name__}` overrides `{hook}`" for owner, hook in overrides), None)


def check_no_hooks(caller: str, *owners: object) -> None:
    """Raise ValueError if a data module or module overrides a batch transfer hook, and a feature would skip the hook.

    Args:
        caller: Name of the feature that skips the hooks, for the message.
        owners: Data modules and modules. Other objects are ignored.
    """
    if hook := overridden_hook(*owners):
        raise InvalidValueError(
            f"Expected no batch transfer hook for {caller}, but {hook}.",
            hint="Move the code of the hook to the transform of the dataset.",
            argument="datamodule",
            value=hook,
        )


def call_seeded(seed: int, hook: Callable[..., Any], *args: Any) -> Any:
    """Call a hook of a data module with seeded global generators.

    As a result, a random split is identical in all hooks, processes and resumed fits.
    """
    with isolate_rng(include_cuda=torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        seed_all(seed, "data module")
        return hook(*args)


def extract_splits(module: L.LightningDataModule, seed: int, required_split: str = "train") -> SplitDatasets:
    """Return the dataset and the loader settings of each split of a data module.

    Args:
        module: The data module.
        seed: Seed of the random draws in the hooks of the data module.
        required_split: The split that the data module must have.

    Raises:
        ValueError: If the required split is missing, or if a loader is not supported.
    """
    loader_hooks = {
        part: hook for part, hook in _HOOKS.items() if part == required_split or is_overridden(hook, module)
    }
    if not is_overridden(_HOOKS[required_split], module):
        name = type(module).__name__
        raise MissingValueError(
            f"Expected {name} to define `{_HOOKS[required_split]}`, but it does not.",
            hint=f"Define `{_HOOKS[required_split]}` in {name}.",
        )
    for stage in ("fit", "test") if "test" in loader_hooks else ("fit",):
        call_seeded(seed, module.setup, stage)
    parts: SplitDatasets = {}
    for split_name, hook in loader_hooks.items():
        loader = call_seeded(seed, getattr(module, hook))
        if isinstance(loader, list | tuple) and len(loader) < 2:
            loader = loader[0] if loader else None
        if loader is not None or split_name == required_split:
            data, loading = call_seeded(seed, _taken_apart, loader, f"`{hook}` of {type(module).__name__}")
            parts[split_name] = data, loading if split_name == "train" else replace(loading, shuffle=False)
    return parts


def common_loader_config(clients: Mapping[Any, SplitDatasets], left_open: Collection[str]) -> dict[str, LoaderConfig]:
    """Return the loader settings that all clients share, by split. Without data modules, return an empty dict.

    Args:
        clients: The splits of each client.
        left_open: Names of settings that the user did not pass to the stream. Only these settings must be equal in the
            data modules of all clients. For validation and test, only `collate_fn` is compared.

    Raises:
        ValueError: If only some clients have data modules, or if a setting in ``left_open`` differs between clients.
    """
    configs_by_client = {
        client: {part: loading for part, (_, loading) in parts.items()} for client, parts in clients.items()
    }
    plain_clients = [str(client) for client, parts in configs_by_client.items() if None in parts.values()]
    if plain_clients and len(plain_clients) < len(configs_by_client):
        raise MissingValueError(
            "Expected data modules for all clients or for none, but got no data module for "
            f"{format_names(plain_clients)}.",
            hint="Create one with `L.LightningDataModule.from_datasets(train, test_dataset=test, batch_size=32)` for "
            "each of these clients.",
            argument="datamodule",
            value=plain_clients,
        )
    loaders: dict[str, LoaderConfig] = {}
    for client, parts in configs_by_client.items():
        for split_name, loading in parts.items():
            if loading is None:
                continue
            first = loaders.setdefault(split_name, loading)
            for name in left_open if split_name == "train" else {"collate_fn"} & {*left_open}:
                if _kind(vars(first)[name]) != _kind(vars(loading)[name]):
                    raise InvalidValueError(
                        f"Expected the same `{name}` in the data modules of all clients, but got {vars(first)[name]} "
                        f"for an earlier client and {vars(loading)[name]} for client {client}.",
                        hint=f"Pass `{name}=` to `FederatedStream`.",
                        argument=name,
                        value=vars(loading)[name],
                    )
    if loaders:
        # A split without a loader uses the settings of another split.
        train = loaders.get("train") or loaders.get("test") or loaders["validation"]
        for split_name, fallback_split in (("validation", "test"), ("test", "validation")):
            loaders.setdefault(split_name, replace(loaders.get(fallback_split, train), shuffle=False, drop_last=False))
        loaders.setdefault("train", train)
    return loaders


def _kind(value: Any) -> object:
    """Return the part of a setting to compare: a method's function, a callable object's class, or the value."""
    if ismethod(value):
        return value.__func__
    return type(value) if callable(value) and not isfunction(value) else value


def _taken_apart(loader: Any, loader_name: str) -> tuple[Dataset[Any], LoaderConfig]:
    def refuse(requirement: str, actual_value: object, remedy: str, description: str = "an object of type") -> NoReturn:
        kind = type(actual_value).__name__
        raise InvalidValueError(
            f"Expected {loader_name} to return {requirement}, but got {description} {kind}.",
            hint=remedy,
            argument="dataloader",
            value=kind,
        )

    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        refuse("one `DataLoader`", loader, "Pass the dataset of the loader to `FederatedStream.from_arrays`.")
    data, batches = loader.dataset, loader.batch_sampler
    if isinstance(data, IterableDataset):
        requirement = "a loader of a map-style dataset, whose samples have indices"
        refuse(requirement, data, "Read the items into a list.", "a loader of a dataset of type")
    if type(batches) is not BatchSampler:
        refuse(
            "a loader that makes batches with `batch_size`",
            data if batches is None else batches,
            "Set `batch_size` in the loader, and remove its `batch_sampler`.",
            "a loader without batches, of a dataset of type"
            if batches is None
            else "a loader with a batch sampler of type",
        )
    rows = _rows(batches.sampler)
    if rows is None or any(not 0 <= row < len(data) for row in rows):  # type: ignore[arg-type]  # map-style
        refuse(
            "a loader whose sampler returns the same samples in each epoch",
            batches.sampler,
            "Use `shuffle`, a `SubsetRandomSampler`, or a `Subset` of the dataset.",
            "a loader with a sampler of type",
        )
    shuffled = type(batches.sampler) in (RandomSampler, SubsetRandomSampler)
    settings = {name: getattr(loader, name) for name in ("num_workers", "pin_memory", "worker_init_fn", "collate_fn")}
    loading = LoaderConfig(batches.batch_size, shuffled, batches.drop_last, **settings)
    return (data if rows == list(range(len(data))) else SampledRows(data, rows)), loading  # type: ignore[arg-type]


class SampledRows(Subset[Any]):
    """The items of a loader's dataset that the loader's sampler selects."""


class WorkerInit:
    """A ``worker_init_fn`` that calls the ``worker_init_fn`` of several loaders.

    During each call, ``torch.utils.data.get_worker_info().dataset`` is the user's dataset, as in a plain loader.

    Args:
        calls: A pair for each loader: the loader's ``worker_init_fn`` and the loader's dataset.
    """

    def __init__(self, calls: Sequence[tuple[Callable[[int], None], object]]) -> None:
        self.calls = calls

    def __call__(self, worker_id: int) -> None:
        info: Any = get_worker_info()
        previous_dataset = info.dataset
        try:
            for function, data in self.calls:
                # The class of `info` does not allow plain assignment.
                object.__setattr__(info, "dataset", data)
                function(worker_id)
        finally:
            object.__setattr__(info, "dataset", previous_dataset)


def with_worker_init(
    loaders: Mapping[str, LoaderConfig], pieces: Iterable[tuple[str, object, LoaderConfig | None]]
) -> dict[str, LoaderConfig]:
    """Return the loader settings by split, with one ``worker_init_fn`` that calls the functions of all clients.

    Args:
        loaders: Loader settings of each split.
        pieces: A tuple for each split of each client: name of the split, dataset, and loader settings.
    """
    calls: dict[str, dict[tuple[int, int], tuple[Callable[[int], None], object]]] = {}
    for split_name, data, loading in pieces:
        if loading is not None and loading.worker_init_fn is not None:
            whole = data.dataset if isinstance(data, SampledRows) else data
            function = loading.worker_init_fn
            calls.setdefault(split_name, {})[id(function), id(whole)] = function, whole
    configs = {}
    for split_name, loading in loaders.items():
        # If a split has no loader, its samples come from the training dataset.
        split_calls = calls.get(split_name) or calls.get("train", {})
        init = None if loading.worker_init_fn is None else WorkerInit([*split_calls.values()])
        configs[split_name] = replace(loading, worker_init_fn=init)
    return configs


def _rows(sampler: Any) -> list[int] | None:
    """Return the sample indices that a sampler returns in every epoch, or None if they may differ between epochs."""
    if type(sampler) is SubsetRandomSampler:
        return [int(row) for row in sampler.indices]
    if type(sampler) is RandomSampler:
        size = len(sampler.data_source)
        return list(range(size)) if not sampler.replacement and sampler.num_samples == size else None
    if not isinstance(sampler, Sized) or hasattr(sampler, "set_epoch"):
        return None
    first_rows, second_rows = (list(islice(sampler, len(sampler) + 1)) for _ in range(2))  # type: ignore[call-overload]
    is_repeatable = (
        len(first_rows) <= len(sampler)
        and all(isinstance(row, int | np.integer) for row in first_rows)
        and first_rows == second_rows
    )
    return list(map(int, first_rows)) if is_repeatable else None
