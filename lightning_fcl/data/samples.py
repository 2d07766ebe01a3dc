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
from lightning_fcl.data.scenarios import IntArray

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
        x = self.x[torch.from_numpy(indices)]
        if self.scale is not None:
            x = (x - self.scale[0]) / self.scale[1]
        return [x, torch.from_numpy(self.targets[indices])]


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
    if isinstance(data, Arrays):
        return of_arrays(data)
    wanted = PublicData(data) if isinstance(data, str) else data
    return of_arrays(load(wanted.name, wanted.root, **wanted.options), wanted.name)


def of_arrays(arrays: Arrays, name: str = "the data") -> Samples:
    """Samples in memory."""
    scale = None
    if arrays.mean is not None and arrays.std is not None:
        scale = (torch.from_numpy(arrays.mean), torch.from_numpy(arrays.std))
    return Samples(
        torch.from_numpy(np.ascontiguousarray(arrays.x)),
        arrays.y,
        arrays.classes,
        arrays.client,
        arrays.group,
        arrays.official_test,
        scale=scale,
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

    Args:
        x: Samples, shape (n, ...): float32, or whole numbers of any type; or a data set, whose items may be anything
            that ``collate_fn`` makes a batch of.
        y: Targets, shape (n, ...); default: the data set's ``targets``, or what its items hold: the second entry of a
            tuple, or that of a dict called labels, label, targets, target or y.
        client: Owner of each sample, shape (n,), or None.
        group: Domain of each sample, shape (n,), or None.
        classes: Names of the classes; default: their numbers. ``()`` says that targets are no classes.
        collate_fn: Makes a batch of a data set's items.

    Raises:
        ValueError: If there are no targets, or the columns do not fit together.
    """
    dataset = x if isinstance(x, Dataset) else None
    if y is None and dataset is None:
        raise ValueError("Expected `y`, the labels, or a data set with `targets` but got neither.")
    targets, names = targets_of(_targets(dataset) if y is None and dataset is not None else y, classes)
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


def targets_of(y: Any, classes: Sequence[str] | None) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Targets as an array, and the names of their classes: none, if they are not whole numbers, one for each sample.

    Example:
        >>> targets_of([0.0, 2.0], None)
        (array([0, 2]), ('0', '1', '2'))
        >>> targets_of([0.5, 2.0], None)
        (array([0.5, 2. ], dtype=float32), ())
    """
    given = np.asarray(y)
    if given.ndim == 1 and given.size and given.dtype.kind in "biuf" and (classes is None or len(classes)):
        labels = given.astype(np.int64)
        if (labels == given).all():
            return labels, tuple(classes) if classes is not None else tuple(map(str, range(int(labels.max()) + 1)))
    # As torch makes tensors of Python's numbers, and as models want them.
    return given.astype(np.float32) if given.dtype == np.float64 else given, ()


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
    return replace(whole, validation=validation, test=test)


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
