"""The samples of a stream: arrays in memory, or the items of a torch data set, read when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import lightning.pytorch as L
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, default_collate

from lightning_fcl.data.batches import Collate, Loading
from lightning_fcl.data.data_module import parts_of
from lightning_fcl.data.datasets import Arrays, load
from lightning_fcl.data.datasets.measurement import Measurement
from lightning_fcl.data.scenarios import IntArray
from lightning_fcl.data.targets import labelled, numbered, targets_of
from lightning_fcl.errors import refuse_other_lightning

if TYPE_CHECKING:
    AnyDataset: TypeAlias = Dataset[Any]
else:
    AnyDataset = Dataset  # jsonargparse would make a plain `Dataset` of a recipe's, were its type `Dataset[Any]`
OfClients = Mapping[str, AnyDataset] | Sequence[AnyDataset]


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
        owner: Natural owner of each sample, shape (n,), as ``group`` is its natural domain.
        test: True for the samples of the data's own test set, shape (n,), as ``validation`` for its validation set.
        scale: Mean and standard deviation that make samples of stored pixels; None: they are samples as they are.
        loaders: How a data module's loaders load what is for ``"train"``, ``"validation"`` and ``"test"``.
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
    loaders: Mapping[str, Loading] = field(default_factory=dict)
    measurement: Measurement | None = None
    name: str = "the data"

    def __len__(self) -> int:
        return len(self.x)  # type: ignore[arg-type]  # a map-style data set has a length

    @property
    def labels(self) -> IntArray:
        """The class of each sample, shape (n,); all 0 where targets are no classes."""
        return self.targets if self.classes else np.zeros(len(self), dtype=np.int64)

    def collate(self, part: str) -> Collate:
        """What makes a batch of samples for ``"train"``, ``"validation"`` or ``"test"``."""
        if not isinstance(self.x, Dataset):
            return default_collate
        return self.loaders[part].collate_fn if part in self.loaders else self.collate_fn

    def in_single_precision(self) -> Samples:
        """These, whose arrays of double precision, NumPy's default, are such as models have them."""
        if not isinstance(self.x, Tensor):
            return self
        x, targets = self.x, self.targets
        x = x.float() if x.dtype == torch.float64 else x
        return replace(self, x=x, targets=targets.astype(np.float32) if targets.dtype == np.float64 else targets)

    def take(self, indices: IntArray, part: str = "train") -> Any:
        """The samples at ``indices``, stacked: ``[x, y]``, or what a data set's items hold; as they are for a part."""
        if isinstance(self.x, Dataset):
            batch = self.collate(part)([self.x[int(i)] for i in indices])
            return list(batch) if type(batch) is tuple else batch
        x, y = self.stored(indices)
        return [self.prepared(x), y]

    def stored(self, indices: IntArray, part: str = "test") -> Any:
        """As `take`, but pixels as they are stored, which `prepared` makes samples of."""
        if isinstance(self.x, Dataset):
            return self.take(indices, part)
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


def samples_of(
    data: str | PublicData | Arrays | Samples | AnyDataset | L.LightningDataModule | OfClients,
    classes: Sequence[str] | None = None,
    seed: int = 0,
) -> Samples:
    if isinstance(data, L.LightningDataModule):
        return _of_module(data, classes, seed)
    if isinstance(data, Dataset):
        return of_anything(data, classes=classes)
    if isinstance(data, Mapping | list | tuple):
        return _of_clients(dict(data) if isinstance(data, Mapping) else dict(enumerate(data)), classes)
    if classes is not None:
        raise ValueError(f"Expected no `classes` for {name_of(data)}, which names its own, but got {list(classes)}.")
    if isinstance(data, Samples):
        return data
    name, scale = "the data", None
    refuse_other_lightning(data)
    if not isinstance(data, str | PublicData | Arrays):
        raise TypeError(
            "Expected `data` to be the name of a public data set, `PublicData`, `Arrays`, a map-style data set, "
            f"a LightningDataModule, or a data set for each client, but got a {type(data).__name__}. "
            "`FederatedStream.from_arrays(x, y)` takes arrays."
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
    """Samples of arrays, tensors or a map-style data set, checked; see `FederatedStream.from_arrays`."""
    dataset = x if isinstance(x, Dataset) else None
    if dataset is not None and (isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized)):
        raise TypeError(
            f"Expected a map-style data set, whose samples have numbers, but got a {type(x).__name__}. Keep its items "
            "in a data set with `__len__` and `__getitem__`."
        )
    if y is None and dataset is None:
        raise ValueError("Expected `y`, the labels, or a data set with `targets` but got neither.")
    own = y is None and dataset is not None
    given = targets_of(dataset) if y is None and dataset is not None else y
    targets, names = labelled(given, classes if classes is None else tuple(classes))
    if own and names and dataset is not None:
        dataset = numbered(dataset, given, targets)
    values = np.zeros((0,)) if dataset is not None else np.asarray(x)
    size = len(dataset) if dataset is not None else len(values)  # type: ignore[arg-type]  # a map-style data set
    owner, domain = (None if column is None else np.asarray(column) for column in (client, group))
    if len(targets) != size and not (dataset is not None and not len(targets)):
        raise ValueError(f"Expected a target for each of {size} samples but got {len(targets)}. Pass one for each.")
    # `Arrays` checks what it can be told: floating point samples, labels, owners and domains.
    single = values.astype(np.float32) if values.dtype == np.float64 else values
    checked = single if values.dtype.kind == "f" and dataset is None else np.zeros((size, 0), dtype=np.float32)
    Arrays(checked, targets if names else np.zeros(size, dtype=np.int64), owner, names or ("",), None, domain)
    content = dataset if dataset is not None else torch.from_numpy(np.ascontiguousarray(values))
    return Samples(content, targets, names, owner, domain, collate_fn=collate_fn)


def _of_module(module: L.LightningDataModule, classes: Sequence[str] | None, seed: int) -> Samples:
    """The data sets behind a data module's loaders, one after the other."""
    parts = parts_of(module, seed)
    data = {part: samples for part, (samples, _) in parts.items()}
    loaders = {part: loading for part, (_, loading) in parts.items()}
    collate_fn = loaders["train"].collate_fn
    whole = of_anything(ConcatDataset(data.values()), classes=classes, collate_fn=collate_fn)
    of = np.repeat(list(data), [len(loaded) for loaded in data.values()])  # type: ignore[arg-type]  # map-style
    validation, test = (of == part if part in data else None for part in ("validation", "test"))
    for part, like in (("validation", "test"), ("test", "validation")):
        if part not in loaders:  # its samples are taken from the training samples
            loaders[part] = replace(loaders.get(like, loaders["train"]), shuffle=False, drop_last=False)
    return all_seen(replace(whole, validation=validation, test=test, loaders=loaders), of == "train")


def _of_clients(data: dict[Any, Any], classes: Sequence[str] | None) -> Samples:
    """The samples of a data set for each client, one client after the other."""
    if not data:
        raise ValueError("Expected `data` to have a data set for each client but got none.")
    if "train" in data and data.keys() <= {"train", "validation", "valid", "val", "test"}:
        raise ValueError(
            f"Expected `data` to be named by clients but got {', '.join(data)}, which are splits. Pass "
            "`L.LightningDataModule.from_datasets(train, val, test, batch_size=32)` of them."
        )
    for client, own in data.items():
        if not isinstance(own, Dataset) or isinstance(own, IterableDataset):
            raise TypeError(
                f"Expected a map-style data set for client {client} but got a {type(own).__name__}. Make one of it, "
                "such as a `torch.utils.data.TensorDataset`, or a list of its items in a data set."
            )
    names = list(data) if all(isinstance(client, int) for client in data) else [str(client) for client in data]
    owner = np.repeat(names, [len(own) for own in data.values()])
    return of_anything(ConcatDataset(data.values()), client=owner, classes=classes)


def all_seen(samples: Samples, train: NDArray[np.bool_]) -> Samples:
    """The samples, none of whose own test and validation sets has a class that nobody learns."""
    seen = set(samples.labels[train].tolist())
    unseen = sorted(set(samples.labels[~train].tolist()) - seen)
    if unseen:
        raise ValueError(
            f"Expected validation and test samples of the classes that are trained on but got label "
            f"{', '.join(samples.classes[label] for label in unseen)}, which no training sample has. Drop these "
            "samples, or train on some."
        )
    return samples
