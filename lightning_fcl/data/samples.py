"""The samples of a stream: arrays in memory, or the items of a torch data set, read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, default_collate

from lightning_fcl.data.datasets import Arrays, load
from lightning_fcl.data.datasets.measurement import Measurement
from lightning_fcl.data.scenarios import IntArray
from lightning_fcl.errors import did_you_mean

Collate = Callable[[list[Any]], Any]

# What data sets of dicts call the targets.
_TARGETS = ("labels", "label", "targets", "target", "y")


@dataclass(frozen=True)
class PublicData:
    """A public data set by name, with what its loader is to do.

    Args:
        name: One of `lightning_fcl.data.datasets`; ``lightning-fcl data list`` shows them.
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
        owner: Natural owner of each sample, shape (n,), or None.
        group: Natural domain of each sample, shape (n,), or None.
        test: True for the samples of the data's own test set, shape (n,), or None.
        validation: True for those of its own validation set.
        scale: Mean and standard deviation that make samples of stored pixels; None: they are samples as they are.
        collate_fn: Makes a batch of a data set's items.
        measurement: What a device measured, and how the samples were made of that, or None.
        name: What messages call the data.
    """

    x: Tensor | Dataset[Any]
    targets: NDArray[Any]
    classes: tuple[str, ...] = ()
    owner: NDArray[Any] | None = None
    group: NDArray[Any] | None = None
    test: NDArray[np.bool_] | None = None
    validation: NDArray[np.bool_] | None = None
    scale: tuple[Tensor, Tensor] | None = None
    collate_fn: Collate = default_collate
    measurement: Measurement | None = None
    name: str = "the data"

    def __len__(self) -> int:
        return len(self.x)  # type: ignore[arg-type]  # a map-style data set has a length

    @property
    def labels(self) -> IntArray:
        """The class of each sample, shape (n,); all 0 where targets are no classes."""
        return self.targets if self.classes else np.zeros(len(self), dtype=np.int64)

    def take(self, indices: IntArray) -> Any:
        """The samples at ``indices``, stacked: ``[x, y]``, or what a data set's items hold."""
        if isinstance(self.x, Dataset):
            batch = self.collate_fn([self.x[int(i)] for i in indices])
            return list(batch) if isinstance(batch, tuple) else batch
        x, y = self.stored(indices)
        return [self.prepared(x), y]

    def stored(self, indices: IntArray) -> Any:
        """As `take`, but pixels as they are stored, which `prepared` makes samples of."""
        if isinstance(self.x, Dataset):
            return self.take(indices)
        return [self.x[torch.from_numpy(indices)], torch.from_numpy(self.targets[indices])]

    def prepared(self, x: Tensor) -> Tensor:
        """Samples as models take them, on whatever device they are: stored pixels normalised, others as they are."""
        if self.scale is None:
            return x
        mean, std = (part.to(x.device) for part in self.scale)
        return (x - mean) / std

    @property
    def pixels(self) -> tuple[Tensor, Tensor, tuple[int, ...]] | None:
        """Mean, standard deviation and shape of stored images; None where samples are stored as models take them."""
        return None if self.scale is None or isinstance(self.x, Dataset) else (*self.scale, tuple(self.x.shape[1:]))


def name_of(data: object) -> str:
    """The name of a public data set, or of the class of whatever else a `FederatedStream` takes as its data."""
    if isinstance(data, str):
        return data
    return data.name if isinstance(data, PublicData | Samples) else type(data).__name__


def samples_of(data: str | PublicData | Arrays | Samples | Dataset[Any] | L.LightningDataModule) -> Samples:
    """The samples of whatever a `FederatedStream` takes as its data.

    Raises:
        ValueError: If the data set is not known, or a data module's loaders cannot be taken apart.
    """
    if isinstance(data, Samples):
        return data
    if isinstance(data, L.LightningDataModule):
        return _of_module(data)
    if isinstance(data, Dataset):
        return of_anything(data)
    name, scale = "the data", None
    if not isinstance(data, str | PublicData | Arrays):
        raise TypeError(
            "Expected `data` to be the name of a public data set, `PublicData`, `Arrays`, a map-style data set or a "
            f"LightningDataModule but got a {type(data).__name__}. `FederatedStream.from_arrays(x, y)` takes arrays."
        )
    if not isinstance(data, Arrays):
        wanted = PublicData(data) if isinstance(data, str) else data
        data, name = load(wanted.name, wanted.root, **wanted.options), wanted.name
    if data.mean is not None and data.std is not None:
        scale = (torch.from_numpy(data.mean), torch.from_numpy(data.std))
    x = torch.from_numpy(np.ascontiguousarray(data.x))
    return Samples(
        x,
        data.y,
        data.classes,
        data.client,
        data.group,
        data.official_test,
        scale=scale,
        measurement=data.measurement,
        name=name,
    )


def of_anything(
    x: Any,
    y: Any = None,
    client: Any = None,
    group: Any = None,
    classes: Sequence[str] | None = None,
    collate_fn: Collate = default_collate,
) -> Samples:
    """Samples of arrays, tensors, or a map-style data set, checked.

    The arguments are those of `FederatedStream.from_arrays`.

    Raises:
        ValueError: If there are no targets, or the columns do not fit together.
    """
    dataset = x if isinstance(x, Dataset) else None
    if y is None and dataset is None:
        raise ValueError("Expected `y`, the labels, or a data set with `targets` but got neither.")
    own = y is None and dataset is not None
    given = _targets(dataset) if y is None and dataset is not None else y
    targets, names = _labelled(given, classes)
    if own and names and dataset is not None and not np.array_equal(np.asarray(given), targets):
        dataset = Numbered(dataset, targets)
    values = np.zeros((0,)) if dataset is not None else np.asarray(x)
    size = len(dataset) if dataset is not None else len(values)  # type: ignore[arg-type]  # a map-style data set
    owner, domain = (None if column is None else np.asarray(column) for column in (client, group))
    if len(targets) != size and not (dataset is not None and not len(targets)):
        raise ValueError(f"Expected a target for each of {size} samples but got {len(targets)}. Pass one for each.")
    # `Arrays` checks what it can be told: floating point samples, labels, owners and domains.
    checked = values if values.dtype.kind == "f" and dataset is None else np.zeros((size, 0), dtype=np.float32)
    Arrays(checked, targets if names else np.zeros(size, dtype=np.int64), owner, names or ("",), None, domain)
    content = dataset if dataset is not None else torch.from_numpy(np.ascontiguousarray(values))
    return Samples(content, targets, names, owner, domain, collate_fn=collate_fn)


def _labelled(y: Any, classes: Sequence[str] | None) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Targets as an array, and the names of their classes: none, if they are no labels, one for each sample.

    Raises:
        ValueError: If a target is not finite, or is none of the ``classes``.
        TypeError: If targets are neither numbers nor strings, or no labels though there are ``classes``.
    """
    given = np.asarray(y)
    _require_targets(given)
    numeric = given.dtype.kind in "biuf"
    whole = given.dtype.kind != "f" or bool((given == np.floor(given)).all())
    if given.ndim == 1 and given.size and whole and (classes is None or len(classes)):
        if numeric and classes is not None:
            return given.astype(np.int64), tuple(classes)
        names = np.unique(given.astype(np.int64 if numeric else np.str_)) if classes is None else np.array(classes)
        return _numbers_of(given.astype(names.dtype), names), tuple(map(str, names))
    if classes or not numeric:
        what = "labels, one whole number or name for each sample" if classes != () else "numbers where `classes=()`"
        raise TypeError(
            f"Expected `y` to be {what}, but got {given.dtype} of shape {given.shape}. Leave `classes` out."
        )
    # As torch makes tensors of Python's numbers, and as models want them.
    return given.astype(np.float32) if given.dtype == np.float64 else given, ()


def _require_targets(given: NDArray[Any]) -> None:
    """Refuse targets that are missing: not finite, or neither numbers nor strings."""
    if given.dtype.kind == "O":
        wrong = np.array([not isinstance(value, str) for value in given.ravel()])
    else:
        wrong = ~np.isfinite(given).ravel() if given.dtype.kind == "f" else np.zeros(0, dtype=bool)
    if wrong.any():
        first = int(wrong.argmax())
        raise ValueError(
            f"Expected `y` to hold a target for each sample but got {given.ravel().tolist()[first]!r} in place {first} "
            f"(and {int(wrong.sum())} such values in all). Mend or drop these samples first."
        )


def _numbers_of(labels: NDArray[Any], names: NDArray[Any]) -> IntArray:
    """The number of each label among the names of the classes."""
    unknown = sorted(set(labels.tolist()) - set(names.tolist()))
    if unknown:
        known = ", ".join(map(str, names))
        raise ValueError(
            f"Expected every label of `y` among the `classes` {known} but got {', '.join(map(str, unknown))}."
            f"{did_you_mean(unknown[0], map(str, names))} Name every class."
        )
    order = np.argsort(names)
    return order[np.searchsorted(names, labels, sorter=order)].astype(np.int64)


class Numbered(Dataset[Any]):
    """A data set whose items hold the numbers of their classes in place of their labels.

    Args:
        data: A map-style data set. Its items are sequences with the label second, or dicts with one.
        numbers: The number of the class of each.
    """

    def __init__(self, data: Dataset[Any], numbers: IntArray) -> None:
        self.data = data
        self.targets = numbers

    def __getitem__(self, index: int) -> Any:
        item, number = self.data[index], int(self.targets[index])
        if isinstance(item, Mapping):
            name = next(name for name in _TARGETS if name in item)
            return {**item, name: number}
        return (item[0], number, *item[2:])

    def __len__(self) -> int:
        return len(self.targets)


def _targets(dataset: Dataset[Any]) -> Any:
    """The targets of a data set, without reading its samples where it tells them; none if items have none."""
    if isinstance(dataset, Subset):
        whole = np.asarray(_targets(dataset.dataset))
        return whole[np.asarray(dataset.indices)] if len(whole) else whole
    if isinstance(dataset, ConcatDataset):
        parts = [np.asarray(_targets(part)) for part in dataset.datasets]
        return np.concatenate(parts) if all(map(len, parts)) else []
    told = getattr(dataset, "targets", None)
    return _read_targets(dataset) if told is None else told


def _read_targets(dataset: Dataset[Any]) -> list[Any]:
    """The target of every item; none if an item has none, or they have several shapes."""
    targets = []
    with isolate_rng(include_cuda=False):
        for index in range(len(dataset)):  # type: ignore[arg-type]  # map-style
            item = dataset[index]
            if isinstance(item, Mapping):
                found = [item[name] for name in _TARGETS if name in item]
            else:
                found = [item[1]] if isinstance(item, Sequence) and len(item) > 1 else []
            if not found:
                return []
            targets.append(np.asarray(found[0]))
    return targets if len({target.shape for target in targets}) == 1 else []


def _of_module(module: L.LightningDataModule) -> Samples:
    """The data sets behind a data module's loaders, one after the other."""
    module.prepare_data()
    loaders = {"train": _loader_of(module, "train")}
    for part, hook in (("validation", "val"), ("test", "test")):
        if is_overridden(f"{hook}_dataloader", module, L.LightningDataModule):
            loaders[part] = _loader_of(module, hook)
    loaders = {part: loader for part, loader in loaders.items() if loader is not None}
    collate_fn = loaders["train"].collate_fn
    whole = of_anything(ConcatDataset([loader.dataset for loader in loaders.values()]), collate_fn=collate_fn)
    of = np.repeat(list(loaders), [len(loader.dataset) for loader in loaders.values()])
    validation, test = (of == part if part in loaders else None for part in ("validation", "test"))
    return all_seen(replace(whole, validation=validation, test=test), of == "train")


def all_seen(samples: Samples, train: NDArray[np.bool_]) -> Samples:
    """The samples, none of whose own test and validation sets has a class that nobody learns.

    Raises:
        ValueError: If one has.
    """
    seen = set(samples.labels[train].tolist())
    unseen = sorted(set(samples.labels[~train].tolist()) - seen)
    if unseen:
        raise ValueError(
            f"Expected validation and test samples of the classes that are trained on but got label "
            f"{', '.join(samples.classes[label] for label in unseen)}, which no training sample has. Drop these "
            "samples, or train on some."
        )
    return samples


def _loader_of(module: L.LightningDataModule, stage: str) -> Any:
    """The only loader of a stage, or None."""
    module.setup("test" if stage == "test" else "fit")
    loader = getattr(module, f"{stage}_dataloader")()
    if isinstance(loader, list | tuple) and len(loader) < 2:
        loader = loader[0] if loader else None
    if loader is not None and not isinstance(loader, DataLoader):
        raise ValueError(
            f"Expected `{stage}_dataloader` of {type(module).__name__} to give one `DataLoader` but got a "
            f"{type(loader).__name__}. Pass its data set to `FederatedStream.from_arrays`."
        )
    return loader
