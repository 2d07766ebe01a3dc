"""Samples of a stream: arrays in memory, or items of a torch dataset that are read on demand."""

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
from lightning_fcl.data.collation import return_unchanged
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
    """The name of a public dataset, and arguments for the function that loads the dataset.

    Args:
        name: Name of a dataset in `lightning_fcl.data.datasets`. ``lightning-fcl data ls`` lists the names.
        root: Folder of the datasets. Defaults to the environment variable LIGHTNING_FCL_DATA, or to the user's cache.
        options: Further arguments for the function that loads the dataset, such as ``{"chunk": 16}``.
    """

    name: str = "digits"
    root: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Samples:
    """The samples of a stream, with their targets, owners, domains and splits.

    Args:
        x: Samples, shape (n, ...), or a map-style dataset of n items.
        targets: Target of each sample, shape (n, ...). If ``classes`` is not empty, the targets are labels from 0 to
            ``len(classes) - 1``. Empty if the targets are not classes and are read from the items of a dataset.
        classes: Names of the classes. Empty if targets are not classes.
        client_ids: Owner of each sample, shape (n,).
        group: Domain of each sample, shape (n,).
        test: Mask of the samples in the test set of the data, shape (n,).
        validation: Mask of the samples in the validation set of the data, shape (n,).
        scale: Mean and standard deviation that normalize stored pixels. If None, samples are not normalized.
        collate_fn: Function that combines items of a dataset to a batch.
        loader_configs: Loader settings of a data module, keyed by ``"train"``, ``"validation"`` and ``"test"``.
        measurement: Description of the measured channels and their scaling, if known.
        name: Name of the data for messages.
        has_client_splits: Whether the default split uses the test and validation sets of the data.
        raw_samples: The samples before the first `map`. If None, `map` was not used.
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
        """Raise ValueError if targets, class names, mean or standard deviation are invalid."""
        check_targets(self.targets)
        check_names(self.classes)
        if self.scale is not None and isinstance(self.x, Tensor):
            mean, std = (part.numpy() for part in self.scale)
            check_scale(mean, std, tuple(self.x.shape[1:]))

    def __len__(self) -> int:
        return len(self.x)  # type: ignore[arg-type]  # a map-style data set has a length

    @property
    def labels(self) -> IntArray:
        """Class of each sample, shape (n,). All 0 if targets are not classes."""
        return self.targets if self.classes else np.zeros(len(self), dtype=np.int64)

    @cached_property
    def origin(self) -> IntArray | None:
        """Origin of each sample as an integer, shape (n,). None if no two samples share an origin. See `origins_of`."""
        return origins_of(self.x) if isinstance(self.x, Dataset) else None

    @property
    def is_random(self) -> bool:
        """Whether reading samples runs the code of a dataset, which may draw random numbers."""
        return isinstance(self.x, Dataset)

    def collate(self, split_name: str) -> Collate:
        """Return the function that makes a batch of a split: ``"train"``, ``"validation"`` or ``"test"``."""
        if not isinstance(self.x, Dataset):
            return default_collate
        return self.loader_configs[split_name].collate_fn if split_name in self.loader_configs else self.collate_fn

    def to_float32(self) -> Samples:
        """Return the samples with float64 arrays converted to float32. The items of datasets are unchanged."""
        if not isinstance(self.x, Tensor):
            return self
        x, targets = self.x, self.targets
        x = x.float() if x.dtype == torch.float64 else x
        return replace(self, x=x, targets=targets.astype(np.float32) if targets.dtype == np.float64 else targets)

    @cached_property
    def generators(self) -> Generators:
        """Random generators that a dataset's code uses."""
        return Generators()

    def get(self, indices: IntArray, split_name: str = "train", seed: int = 0) -> Any:
        """Return some samples as a batch: ``[x, y]``, or the collated items of a dataset.

        Args:
            indices: Numbers of the samples, shape (n,).
            split_name: ``"train"``, ``"validation"`` or ``"test"``. The `collate_fn` of this split is used.
            seed: Seed of the random generators in a dataset. The state of the generators is restored afterwards.
        """
        if isinstance(self.x, Dataset):
            batch = self.read(indices, split_name, seed)
            return list(batch) if type(batch) is tuple else batch
        x, y = self.get_stored(indices)
        return [self.normalize(x), y]

    def read(self, indices: Iterable[int], split_name: str, seed: int) -> Any:
        """Return a batch of a dataset's items, made by `collate_fn`. See `get`."""
        data: Any = self.x
        with self.seeded(indices, split_name, seed):
            return self.collate(split_name)(fetch(data, [int(i) for i in indices]))

    def seeded(self, indices: Iterable[int], split_name: str, seed: int) -> AbstractContextManager[None]:
        """Temporarily seed the random generators of `collate_fn` and of the datasets that contain the given samples."""
        return self.generators.seeded(self.readers(indices, split_name), seed)

    def readers(self, indices: Iterable[int], split_name: str) -> dict[str, object]:
        """Return the datasets that contain the given samples, and `collate_fn`, keyed by name.

        For samples in memory, the result is empty.

        The names of the datasets are numbers, in the order in which the samples are read. Therefore, the name of a
        client's dataset does not depend on other clients.
        """
        if not isinstance(self.x, Dataset):
            return {}
        rows = list(indices)
        datasets = {id(data): data for data, _, _ in innermost_items(self.x, rows, rows)}
        numbered = {str(number): data for number, data in enumerate(datasets.values())}
        return {**numbered, "collate_fn": self.collate(split_name)}

    def find_generators(self) -> None:
        """Search the datasets for generators now, so that forked worker processes need not search them."""
        for data in _all_within(self.x) if isinstance(self.x, Dataset) else ():
            self.generators.of(data)

    def map(self, function: Callable[[Tensor], Tensor], device: torch.device | None = None) -> Samples:
        """Return samples whose inputs are the outputs of a function, such as the features of a frozen backbone.

        Args:
            function: Function of a batch of inputs.
            device: Device to which the inputs are moved. If None, the inputs are not moved.
        """
        indices = np.arange(len(self))
        with torch.no_grad():
            parts = [
                function(self.get(part, "test", seed=int(part[0]))[0].to(device)).cpu()
                for part in np.split(indices, range(256, len(indices), 256))
            ]
        return replace(self, x=torch.cat(parts), scale=None, raw_samples=self.raw_samples or self)

    def get_stored(self, indices: IntArray, seed: int = 0) -> Any:
        """Return samples like `get`, but without normalizing stored pixels. Use `normalize` afterwards.

        The items of a dataset are combined by the `collate_fn` of the test split.
        """
        if isinstance(self.x, Dataset):
            return self.get(indices, "test", seed)
        return [self.x[torch.from_numpy(indices)], torch.from_numpy(self.targets[indices])]

    def normalize(self, x: Tensor) -> Tensor:
        """Return samples in the form that models expect, on the same device. Only stored pixels are normalized."""
        if self.scale is None:
            return x
        mean, std = (part.to(x.device) for part in self.scale)
        return (x - mean) / std

    @property
    def pixel_encoding(self) -> tuple[Tensor, Tensor, tuple[int, ...]] | None:
        """Mean, standard deviation and shape of stored images. None if stored samples need no normalization."""
        return None if self.scale is None or isinstance(self.x, Dataset) else (*self.scale, tuple(self.x.shape[1:]))


def data_name(data: object) -> str:
    """Return the name of a public dataset or of a `Samples` object, or the class name of any other data."""
    if isinstance(data, str):
        return data
    return data.name if isinstance(data, DatasetSpec | Samples) else type(data).__name__


def load_public(data: str | DatasetSpec | ArrayDataset) -> Samples:
    """Return the samples of a public dataset, or of an `ArrayDataset`."""
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
    """The concatenated datasets of clients and splits.

    A batch whose items all come from one dataset is read by the ``__getitems__`` of this dataset, if the dataset has
    this method. `ConcatDataset` would read the items separately.
    """

    def __getitems__(self, rows: Sequence[int]) -> Any:
        """Return items in the order of ``rows``. If one dataset has all items, return the result of `fetch` for it."""
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
        """Return the index of the dataset that contains an item, and the index of the item in this dataset."""
        number = bisect_right(self.cumulative_sizes, row)
        return number, row - (self.cumulative_sizes[number - 1] if number else 0)


class SampleRows(Dataset[tuple[Tensor, Tensor]]):
    """A dataset of some samples in memory. Stored pixels are normalized when they are read."""

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
    """Some items of a dataset whose code uses random generators. The first item of a batch defines the batch's seed."""

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
        """Return a whole batch, made by the `collate_fn` of the split."""
        return self.samples.read(self.indices[rows], self.part, self._seed(rows[0]))

    def _seed(self, first: int) -> int:
        return derive_seed(self.seed, "server", self.part, first)


def select_samples(samples: Samples, indices: IntArray) -> Dataset[Any]:
    return Subset(samples.x, indices.tolist()) if isinstance(samples.x, Dataset) else SampleRows(samples, indices)


def loader_of(
    samples: Samples, indices: IntArray, loading: LoaderConfig, split_name: str, seed: int
) -> DataLoader[Any]:
    """Return a loader of the samples of a split.

    The draws from the dataset's own random generators do not depend on `num_workers`.
    """
    if not any(map(samples.generators.of, samples.readers(indices, split_name).values())):
        return loading.make_loader(select_samples(samples, indices))
    return replace(loading, collate_fn=return_unchanged).make_loader(_SeededRows(samples, indices, split_name, seed))


def innermost_items(
    data: Dataset[Any], rows: Sequence[int], positions: Sequence[int]
) -> Iterator[tuple[Dataset[Any], list[int], list[int]]]:
    """Yield the datasets that contain the given items. Known wrappers, such as subsets, are unwrapped.

    Args:
        data: The dataset.
        rows: Indices of the items in ``data``.
        positions: A number for each item.

    Yields:
        An innermost dataset, the indices of its items, and the numbers of these items from ``positions``.
    """
    if type(data) is IndexedTargets:
        yield from innermost_items(data.data, rows, positions)
    elif type(data) is Subset or type(data) is SampledRows:
        yield from innermost_items(data.dataset, [data.indices[int(row)] for row in rows], positions)
    elif type(data) is ConcatDataset or type(data) is Joined:
        parts: dict[int, tuple[list[int], list[int]]] = {}
        for index, position in zip(rows, positions, strict=True):
            row = int(index) + (len(data) if index < 0 else 0)
            number = bisect_right(data.cumulative_sizes, row)
            part_rows, part_positions = parts.setdefault(number, ([], []))
            part_rows.append(row - (data.cumulative_sizes[number - 1] if number else 0))
            part_positions.append(position)
        for number, (part_rows, part_positions) in parts.items():
            yield from innermost_items(data.datasets[number], part_rows, part_positions)
    else:
        yield data, [int(row) for row in rows], [int(position) for position in positions]


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
    """Return samples of uint8 images that are normalized when they are read.

    Args:
        samples: Samples of images, shape (n, channels, height, width).
        mean: Mean of the pixels, scaled to [0, 1]: one number, or one number for each channel.
        std: Standard deviation of the pixels, scaled to [0, 1]: one number, or one number for each channel.
    """
    x = samples.x
    if not isinstance(x, Tensor) or x.dtype != torch.uint8 or x.dim() < 2:
        description = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise InvalidValueError(
            "Expected `x` to be uint8 images of shape (n, channels, height, width), because `mean` or `std` "
            f"is passed, but got {description}.",
            hint="Remove `mean` and `std`. Normalize other samples beforehand, or in the transform of your dataset.",
            argument="x",
            value=description,
        )
    scale = []
    for name, value, lower_bound in (("mean", mean, "at least 0"), ("std", std, "above 0")):
        values = np.asarray(np.nan if value is None else value, dtype=np.float32)
        if not ((values >= 0) & (values <= 1) & ((values > 0) | (name == "mean"))).all():
            raise InvalidValueError(
                f"Expected `{name}` to be {lower_bound} and at most 1, for pixels scaled to [0, 1], but got {value}.",
                hint="Pass both `mean` and `std`. Divide values for pixels from 0 to 255 by 255.",
                argument=name,
                value=value,
            )
        if values.ndim > 1 or values.size not in (1, x.shape[1]):
            last = x.dim() == 4 and values.size == x.shape[-1]
            raise InvalidValueError(
                f"Expected `{name}` to be one number, or a list with one number per channel (channels: {x.shape[1]}, "
                f"image shape: {tuple(x.shape[1:])}), but got shape {values.shape}.",
                hint="The channels seem to be the last dimension. Pass `x.transpose(0, 3, 1, 2)` for a NumPy array, or "
                "`x.permute(0, 3, 1, 2)` for a tensor."
                if last
                else "",
                argument=name,
                value=value,
            )
        scale.append(torch.from_numpy(255 * values.reshape(-1, *[1] * (x.dim() - 2))))
    return replace(samples, scale=(scale[0], scale[1]))
