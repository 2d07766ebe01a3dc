"""The samples of a stream: arrays in memory, or the items of a torch data set, read when they are asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, default_collate

from lightning_fcl.data.batching import Collate, LoaderConfig, fetch
from lightning_fcl.data.collation import as_it_is
from lightning_fcl.data.datamodule_adapter import SampledRows
from lightning_fcl.data.datasets import ArrayDataset, load_dataset
from lightning_fcl.data.datasets.arrays import Measurement, check_scale
from lightning_fcl.data.generators import Generators
from lightning_fcl.data.labels import IndexedTargets, check_names, check_targets
from lightning_fcl.data.origins import origins_of
from lightning_fcl.data.scenarios import IntArray
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.rng import derive_seed


@dataclass(frozen=True)
class DatasetSpec:
    """A public data set by name, with what its loader is to do.

    Args:
        name: One of `lightning_fcl.data.datasets`; ``lightning-fcl data ls`` shows them.
        root: Folder of the data sets; default: the environment variable LIGHTNING_FCL_DATA.
        options: Further arguments of the data set's loader, as in ``{"chunk": 16}``.
    """

    name: str = "digits"
    root: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Samples:
    """The samples of a stream, and what is known of each.

    Args:
        x: Samples, shape (n, ...), or a map-style data set of n items.
        targets: Target of each sample, shape (n, ...): labels 0..C-1 if there are ``classes``. Of a data set, whose
            items hold their own targets, empty where these are no classes.
        classes: Names of the classes; empty where targets are no classes.
        client_ids: Natural owner of each sample, shape (n,), as ``group`` is its natural domain.
        test: True for the samples of the data's own test set, shape (n,), as ``validation`` for its validation set.
        scale: Mean and standard deviation that make samples of stored pixels; None: they are samples as they are.
        loader_configs: How a data module's loaders load what is for ``"train"``, ``"validation"`` and ``"test"``.
        has_client_splits: Whether its own test and validation sets are the split, unless another is asked for.
        raw_samples: The samples as they were before any `map`; None: these are.
    """

    x: Tensor | Dataset[Any]
    targets: NDArray[Any]
    classes: tuple[str, ...] = ()
    client_ids: NDArray[Any] | None = None
    group: NDArray[Any] | None = None
    test: NDArray[np.bool_] | None = None
    validation: NDArray[np.bool_] | None = None
    scale: tuple[Tensor, Tensor] | None = None
    collate_fn: Collate = default_collate
    loader_configs: Mapping[str, LoaderConfig] = field(default_factory=dict)
    measurement: Measurement | None = None
    name: str = "the data"
    has_client_splits: bool = False
    raw_samples: Samples | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if targets, names of classes, or mean and standard deviation are invalid."""
        check_targets(self.targets)
        check_names(self.classes)
        if self.scale is not None and isinstance(self.x, Tensor):
            mean, std = (part.numpy() for part in self.scale)
            check_scale(mean, std, tuple(self.x.shape[1:]))

    def __len__(self) -> int:
        return len(self.x)  # type: ignore[arg-type]  # a map-style data set has a length

    @property
    def labels(self) -> IntArray:
        """The class of each sample, shape (n,); all 0 where targets are no classes."""
        return self.targets if self.classes else np.zeros(len(self), dtype=np.int64)

    @cached_property
    def origin(self) -> IntArray | None:
        """A number for each sample, equal for samples of one origin, shape (n,); None if all origins differ."""
        return origins_of(self.x) if isinstance(self.x, Dataset) else None

    @property
    def is_random(self) -> bool:
        """Whether taking samples runs a data set's own code, which may draw random numbers."""
        return isinstance(self.x, Dataset)

    def collate(self, split_name: str) -> Collate:
        """What makes a batch of samples for ``"train"``, ``"validation"`` or ``"test"``."""
        if not isinstance(self.x, Dataset):
            return default_collate
        return self.loader_configs[split_name].collate_fn if split_name in self.loader_configs else self.collate_fn

    def to_float32(self) -> Samples:
        """These, whose arrays of double precision, NumPy's default, are such as models have them."""
        if not isinstance(self.x, Tensor):
            return self
        x, targets = self.x, self.targets
        x = x.float() if x.dtype == torch.float64 else x
        return replace(self, x=x, targets=targets.astype(np.float32) if targets.dtype == np.float64 else targets)

    @cached_property
    def generators(self) -> Generators:
        """The random generators that a data set's own code holds."""
        return Generators()

    def get(self, indices: IntArray, split_name: str = "train", seed: int = 0) -> Any:
        """Return some samples, stacked: ``[x, y]``, or the content of a data set's items.

        Args:
            indices: Numbers of the samples, shape (n,).
            split_name: ``"train"``, ``"validation"`` or ``"test"``, whose `collate_fn` is used.
            seed: Seed of the random generators that a data set holds. Their own state stays as it is.
        """
        if isinstance(self.x, Dataset):
            batch = self.read(indices, split_name, seed)
            return list(batch) if type(batch) is tuple else batch
        x, y = self.get_stored(indices)
        return [self.normalize(x), y]

    def read(self, indices: Iterable[int], split_name: str, seed: int) -> Any:
        """Return a batch of a data set's items as `collate_fn` makes it. See `get`."""
        data: Any = self.x
        with self.seeded(indices, split_name, seed):
            return self.collate(split_name)(fetch(data, [int(i) for i in indices]))

    def seeded(self, indices: Iterable[int], split_name: str, seed: int) -> AbstractContextManager[None]:
        """Temporarily seed the random generators of the data sets that hold some samples, and of `collate_fn`."""
        return self.generators.seeded(self.readers(indices, split_name), seed)

    def readers(self, indices: Iterable[int], split_name: str) -> dict[str, object]:
        """Return the data sets that hold some samples, numbered as they are read, and `collate_fn`.

        A client's own data set has the same name whichever other clients there are.
        """
        if not isinstance(self.x, Dataset):
            return {}
        datasets = {id(data): data for data in _holding(self.x, indices)}
        numbered = {str(number): data for number, data in enumerate(datasets.values())}
        return {**numbered, "collate_fn": self.collate(split_name)}

    def find_generators(self) -> None:
        """Find all generators now, so that processes that are forked to read need not."""
        for data in _all_within(self.x) if isinstance(self.x, Dataset) else ():
            self.generators.of(data)

    def map(self, function: Callable[[Tensor], Tensor], device: torch.device | None = None) -> Samples:
        """What a function makes of these, batch by batch, on a device: features of a frozen backbone."""
        indices = np.arange(len(self))
        with torch.no_grad():
            parts = [
                function(self.get(part, "test", seed=int(part[0]))[0].to(device)).cpu()
                for part in np.split(indices, range(256, len(indices), 256))
            ]
        return replace(self, x=torch.cat(parts), scale=None, raw_samples=self.raw_samples or self)

    def get_stored(self, indices: IntArray, seed: int = 0) -> Any:
        """As `get`, but pixels as they are stored, which `normalize` makes samples of."""
        if isinstance(self.x, Dataset):
            return self.get(indices, "test", seed)
        return [self.x[torch.from_numpy(indices)], torch.from_numpy(self.targets[indices])]

    def normalize(self, x: Tensor) -> Tensor:
        """Samples as models take them, on whatever device they are: stored pixels normalised, others as they are."""
        if self.scale is None:
            return x
        mean, std = (part.to(x.device) for part in self.scale)
        return (x - mean) / std

    @property
    def pixel_encoding(self) -> tuple[Tensor, Tensor, tuple[int, ...]] | None:
        """Mean, standard deviation and shape of stored images; None where samples are stored as models take them."""
        return None if self.scale is None or isinstance(self.x, Dataset) else (*self.scale, tuple(self.x.shape[1:]))


def data_name(data: object) -> str:
    """The name of a public data set, or of the class of whatever else a `FederatedStream` takes as its data."""
    if isinstance(data, str):
        return data
    return data.name if isinstance(data, DatasetSpec | Samples) else type(data).__name__


def load_public(data: str | DatasetSpec | ArrayDataset) -> Samples:
    """The samples of a public data set, or of arrays as its loader gives them."""
    name, scale = "the data", None
    if not isinstance(data, ArrayDataset):
        public_data = DatasetSpec(data) if isinstance(data, str) else data
        data, name = load_dataset(public_data.name, public_data.root, **public_data.options), public_data.name
    if data.mean is not None and data.std is not None:
        scale = (torch.from_numpy(data.mean), torch.from_numpy(data.std))
    x = torch.from_numpy(np.ascontiguousarray(data.x))
    return Samples(
        x,
        data.y,
        data.classes,
        data.client_ids,
        data.group,
        data.official_test,
        scale=scale,
        measurement=data.measurement,
        name=name,
    )


class Joined(ConcatDataset[Any]):
    """The datasets of clients and splits, one after the other.

    Items of one dataset are read in a batch by its ``__getitems__``, which `ConcatDataset` ignores.
    """

    def __getitems__(self, rows: Sequence[int]) -> Any:
        """Return some items in the order of ``rows``; a batch of one dataset is returned as the dataset returns it."""
        positions: dict[int, list[int]] = {}
        numbers = []
        for row in rows:
            number, position = self.place_of(row)
            positions.setdefault(number, []).append(position)
            numbers.append(number)
        batches = {number: fetch(self.datasets[number], own) for number, own in positions.items()}
        if len(batches) == 1:
            return batches[numbers[0]]
        items = {number: iter(found) for number, found in batches.items()}
        return [next(items[number]) for number in numbers]

    def place_of(self, row: int) -> tuple[int, int]:
        """Return the number of the dataset that has an item, and the number of the item in this dataset."""
        number = bisect_right(self.cumulative_sizes, row)
        return number, row - (self.cumulative_sizes[number - 1] if number else 0)


class SampleRows(Dataset[tuple[Tensor, Tensor]]):
    """Some samples in memory as a data set; stored pixels are normalised when they are read."""

    def __init__(self, samples: Samples, indices: IntArray) -> None:
        self.samples = samples
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, rows: list[int]) -> list[tuple[Tensor, Tensor]]:
        x, y = self.samples.get(self.indices[rows])
        return list(zip(x, y, strict=True))


class _SeededRows(Dataset[Any]):
    """Some items of a data set whose code holds random generators, read in batches that are seeded by their place."""

    def __init__(self, samples: Samples, indices: IntArray, split_name: str, seed: int) -> None:
        self.samples = samples
        self.indices = indices
        self.part = split_name
        self.seed = seed

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        with self.samples.seeded([self.indices[index]], self.part, self._seed(index)):
            return self.samples.x[int(self.indices[index])]

    def __getitems__(self, rows: list[int]) -> Any:
        """Return a whole batch, as the loader's `collate_fn` returns it."""
        return self.samples.read(self.indices[rows], self.part, self._seed(rows[0]))

    def _seed(self, first: int) -> int:
        return derive_seed(self.seed, "server", self.part, first)


def select_samples(samples: Samples, indices: IntArray) -> Dataset[Any]:
    return Subset(samples.x, indices.tolist()) if isinstance(samples.x, Dataset) else SampleRows(samples, indices)


def loader_of(
    samples: Samples, indices: IntArray, loading: LoaderConfig, split_name: str, seed: int
) -> DataLoader[Any]:
    """Return a loader of the samples of a part, whose batches do not depend on `num_workers`."""
    if not any(map(samples.generators.of, samples.readers(indices, split_name).values())):
        return loading.make_loader(select_samples(samples, indices))
    return replace(loading, collate_fn=as_it_is).make_loader(_SeededRows(samples, indices, split_name, seed))


def _holding(data: Dataset[Any], rows: Iterable[int]) -> Iterator[Dataset[Any]]:
    """Yield the data sets that hold some items, without those of torch and of this package that join others."""
    if type(data) is IndexedTargets:
        yield from _holding(data.data, rows)
    elif type(data) is Subset or type(data) is SampledRows:
        yield from _holding(data.dataset, (data.indices[int(row)] for row in rows))
    elif type(data) is ConcatDataset or type(data) is Joined:
        parts: dict[int, list[int]] = {}
        for row in rows:
            number = bisect_right(data.cumulative_sizes, row)
            parts.setdefault(number, []).append(int(row) - (data.cumulative_sizes[number - 1] if number else 0))
        for number, dataset_rows in parts.items():
            yield from _holding(data.datasets[number], dataset_rows)
    else:
        yield data


def _all_within(data: Dataset[Any]) -> Iterator[Dataset[Any]]:
    if type(data) is ConcatDataset or type(data) is Joined:
        for dataset in data.datasets:
            yield from _all_within(dataset)
    elif type(data) is IndexedTargets:
        yield from _all_within(data.data)
    elif type(data) is Subset or type(data) is SampledRows:
        yield from _all_within(data.dataset)
    else:
        yield data


def normalize_samples(samples: Samples, mean: Any, std: Any) -> Samples:
    """Samples of uint8 images that are normalised when they are taken."""
    x = samples.x
    if not isinstance(x, Tensor) or x.dtype != torch.uint8 or x.dim() < 2:
        description = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise InvalidValueError(
            "Expected `x` to be uint8 images of shape (n, channels, height, width) for `mean` and `std` but got "
            f"{description}.",
            hint="Normalise other samples beforehand, or in your data set's transform.",
            argument="x",
            value=description,
        )
    scale = []
    for name, value, lower_bound in (("mean", mean, "at least 0"), ("std", std, "above 0")):
        values = np.asarray(np.nan if value is None else value, dtype=np.float32)
        if not ((values >= 0) & (values <= 1) & ((values > 0) | (name == "mean"))).all():
            raise InvalidValueError(
                f"Expected `{name}` to be {lower_bound} and at most 1, of pixels scaled to [0, 1], but got {value}.",
                hint="Pass `mean` and `std`, in units of 255 grey levels.",
                argument=name,
                value=value,
            )
        if values.ndim > 1 or values.size not in (1, x.shape[1]):
            last = x.dim() == 4 and values.size == x.shape[-1]
            raise InvalidValueError(
                f"Expected `{name}` to be a number, or one for each of {x.shape[1]} channels of images of shape "
                f"{tuple(x.shape[1:])}, but got {values.size}.",
                hint="The channels come last: pass `x.transpose(0, 3, 1, 2)`." if last else "",
                argument=name,
                value=value,
            )
        scale.append(torch.from_numpy(255 * values.reshape(-1, *[1] * (x.dim() - 2))))
    return replace(samples, scale=(scale[0], scale[1]))
