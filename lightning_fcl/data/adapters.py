"""Conversion of users' data to `Samples`: arrays, datasets, data modules and Avalanche benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence, Sized
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeGuard

import lightning.pytorch as L
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, TensorDataset, default_collate

from lightning_fcl.data.batching import Collate, fetch
from lightning_fcl.data.client_data import (
    SPLITS,
    check_columns,
    check_shapes,
    check_sizes,
    targets_in,
    targets_of_clients,
)
from lightning_fcl.data.datamodule_adapter import (
    SplitDatasets,
    common_loader_config,
    extract_splits,
    is_module_per_client,
    with_worker_init,
)
from lightning_fcl.data.datasets import ArrayDataset
from lightning_fcl.data.frames import frame_values, is_frame
from lightning_fcl.data.labels import (
    LONG,
    ItemsOf,
    SampleName,
    default_name,
    index_labels,
    index_targets,
    read_targets,
    target_position,
    to_array,
)
from lightning_fcl.data.plain_tensors import plain_tensor
from lightning_fcl.data.samples import DatasetSpec, Joined, Samples, data_name, load_public
from lightning_fcl.data.scenarios import ClassIncremental, DomainIncremental, Scenario, from_name
from lightning_fcl.errors import InvalidTypeError, InvalidValueError, MissingValueError
from lightning_fcl.validation import check_lightning_namespace

if TYPE_CHECKING:
    from lightning_fcl.data.avalanche import AvalancheDataset, CLScenario


class MapStyle(Protocol):
    """A dataset with a length and indexed items, such as a torch or Hugging Face dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


if TYPE_CHECKING:
    AnyDataset: TypeAlias = Dataset[Any]
else:
    # With the type `Dataset[Any]`, jsonargparse would create a plain `Dataset` instead of the class in the recipe.
    AnyDataset = Dataset
_Own = AnyDataset | MapStyle | L.LightningDataModule
StreamData = str | DatasetSpec | ArrayDataset | Samples | _Own | Mapping[str, _Own] | Sequence[_Own]
"""Types of data that a `FederatedStream` accepts."""


class SizedItems(ItemsOf):
    """A torch dataset that wraps data with a length and indexed items, such as a Hugging Face dataset.

    If a Hugging Face dataset has a target column, the targets and class names are read from this column.
    """

    def __init__(self, data: Any) -> None:
        self.data = data
        self.classes: tuple[str, ...] | None = None
        hugging_face: Any = sys.modules.get("datasets")
        if hugging_face is not None and isinstance(data, hugging_face.Dataset):
            column = target_position(dict.fromkeys(data.column_names))
            if column is not None:
                self.targets = data.with_format(None)[column][:]
                label = data.features[column]
                self.classes = tuple(label.names) if isinstance(label, hugging_face.ClassLabel) else None

    def __getitem__(self, index: int) -> Any:
        return self.data[index]

    def __getitems__(self, rows: Sequence[int]) -> Any:
        return fetch(self.data, rows)

    def __len__(self) -> int:
        return len(self.data)


def to_dataset(data: Any, owner_name: str) -> Dataset[Any]:
    """Return a torch dataset of data that have a length and indexed items.

    Args:
        data: The data.
        owner_name: Description of the data in the error message, such as "for client 3".

    Raises:
        TypeError: If the data have no length or no indexed items. Also if the data are an array, a tuple, a string or a
            dict, which are not datasets.
    """
    check_lightning_namespace(data)
    whole = isinstance(data, Sized) and not isinstance(data, str | bytes | Mapping | tuple | IterableDataset)
    if is_frame(data):
        remedy = (
            "Pass the columns to `FederatedStream.from_arrays(frame[features], frame[target])`. For several clients, "
            "concatenate the tables with `pandas.concat`, and pass the client of each row as `client_ids`."
        )
    elif hasattr(data, "__array__") or isinstance(data, tuple):
        remedy = "Pass arrays to `FederatedStream.from_arrays(x, y)`, or wrap them in `torch.utils.data.TensorDataset`."
    elif not whole or not hasattr(data, "__getitem__"):
        remedy = "Pass a map-style dataset. For a list `x`, use `torch.utils.data.Subset(x, range(len(x)))`."
    else:
        return data if isinstance(data, Dataset) else SizedItems(data)
    is_client = owner_name.startswith("for client") and not is_frame(data)
    clients = " A list or dict must contain one dataset per client." if is_client else ""
    raise InvalidTypeError(
        f"Expected a map-style dataset {owner_name}, but got an object of type {type(data).__name__}.",
        hint=f"{remedy}{clients}",
        argument="data",
        value=type(data).__name__,
    )


def samples_from_arrays(
    x: Any,
    y: Any = None,
    client: Any = None,
    group: Any = None,
    classes: Sequence[str] | None = None,
    collate_fn: Collate = default_collate,
    sample_name: SampleName = default_name,
) -> Samples:
    """Return the samples of arrays, tensors or a map-style dataset, after checks. See `FederatedStream.from_arrays`."""
    in_memory = not isinstance(x, Dataset) and (hasattr(x, "__array__") or isinstance(x, list))
    x = frame_values(x) if is_frame(x) else x
    content: Tensor | Dataset[Any] = _tensor(x) if in_memory else to_dataset(x, "for `x`")
    size = len(content)  # type: ignore[arg-type]  # a map-style data set
    # `ArrayDataset` checks floating-point samples, labels, owners and domains. Samples of other types are not checked.
    checked = np.zeros((size, 0), np.float32)
    if isinstance(content, Tensor) and content.is_floating_point():
        checked = content.float().numpy()
    if isinstance(content, Tensor) and y is None:
        content = TensorDataset(content.float() if content.dtype == torch.float64 else content)
    targets: NDArray[Any] = np.empty(0)
    names: tuple[str, ...] = ()
    if y is not None:
        targets, names = index_targets(y, classes if classes is None else tuple(classes), sample_name)
    elif isinstance(content, Dataset) and (classes is None or len(classes)):
        item_targets = read_targets(content)
        parts = content.datasets if isinstance(content, ConcatDataset) else [content]
        # Hugging Face datasets define the names of their classes.
        class_lists = {part.classes if isinstance(part, SizedItems) else None for part in parts}
        common_classes = class_lists.pop() if len(class_lists) == 1 else None
        targets, names = index_targets(item_targets, common_classes if classes is None else tuple(classes), sample_name)
        content = index_labels(content, item_targets, targets) if names else content
    if len(targets) != size and not (isinstance(content, Dataset) and not len(targets)):
        raise InvalidValueError(
            f"Expected `y` to contain one target per sample ({size}), but got {len(targets)}.",
            hint="Pass one target for each sample.",
            argument="y",
            value=len(targets),
        )
    owner, domain = _column("client_ids", client), _column("group", group)
    ArrayDataset(checked, targets if names else np.zeros(size, dtype=np.int64), owner, names or ("",), None, domain)
    return Samples(content, targets, names, owner, domain, collate_fn=collate_fn)


def _tensor(x: Any) -> Tensor:
    """Return samples in memory as a contiguous tensor. Samples of half precision or bfloat16 become float32."""
    try:
        values = plain_tensor(x).cpu() if isinstance(x, Tensor) else np.ascontiguousarray(x)
    except ValueError as error:
        raise InvalidValueError(
            f"Expected `x` to have samples of one shape, but got: {str(error).rstrip('.')}.",
            hint="Convert the samples to one shape.",
            argument="x",
        ) from error
    if isinstance(values, np.ndarray) and (values.dtype.kind not in "biufc" or values.dtype.char in LONG):
        raise InvalidTypeError(
            f"Expected `x` to contain numbers of a type that torch supports, but got type {values.dtype} and shape "
            f"{values.shape}.",
            hint="Convert `x`, for example with `x.astype(np.float32)`.",
            argument="x",
            value=values.dtype,
        )
    tensor = torch.as_tensor(values).contiguous()
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _column(name: str, values: Any) -> NDArray[Any] | None:
    """Return the owners or domains of all samples as an array of integers or strings, or None if there are none.

    Strings from pandas have the NumPy type object. These strings are converted to a string type.
    """
    if values is None:
        return None
    column = to_array(values)
    if column.dtype.kind != "O":
        return column
    kinds = {type(value) for value in column.ravel().tolist()}
    if kinds not in ({str}, {int}):
        type_names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise InvalidValueError(
            f"Expected `{name}` to contain only integers or only strings, but got {type_names}.",
            hint=f"Pass an integer for every sample in `{name}`, or a string for every sample.",
            argument=name,
            value=type_names,
        )
    return np.array(column.tolist())


def to_samples(
    data: object,
    classes: Sequence[str] | None = None,
    seed: int = 0,
    left_open: Collection[str] = (),
    collate_fn: Collate | None = None,
    y: Any = None,
) -> Samples:
    """Return the samples of any data that a `FederatedStream` accepts.

    Args:
        data: The data. See `FederatedStream`.
        classes: Names of the classes.
        seed: Seed of the random draws of data modules.
        left_open: Names of arguments that the user did not pass to the stream. If the clients have data modules, the
            modules must have the same values for these arguments.
        collate_fn: The `collate_fn` that the user passed to the stream, or None.
        y: Targets in the structure of the data. See `FederatedStream`. If None, the items must contain their targets.
    """
    if is_client_mapping(data):
        return _join_clients(data, classes, seed, left_open, collate_fn, y)
    if isinstance(data, L.LightningDataModule) or _names_splits(data, "`data`"):
        parts = _parts_in(data, "for `data`", seed)
        client_targets = None if y is None else {"": targets_in(y, parts, "`data`")}
        return check_seen(_samples_from_splits({"": parts}, classes, (), client_targets))
    if not isinstance(data, str | DatasetSpec | ArrayDataset | Samples):
        return samples_from_arrays(to_dataset(data, "for `data`"), y, classes=classes)
    if y is not None:
        raise InvalidValueError(
            f"Expected no `y` for {data_name(data)}, which has its own targets.", hint="Remove `y`.", argument="y"
        )
    if classes is not None:
        raise InvalidValueError(
            f"Expected no `classes` for {data_name(data)}, which defines its class names, but got {list(classes)}.",
            hint="Remove `classes`.",
            argument="classes",
        )
    return data if isinstance(data, Samples) else load_public(data)


def samples_in(
    module: L.LightningDataModule, split_names: Sequence[str], seed: int, classes: Sequence[str] | None = None
) -> Samples:
    """Return the samples of the given splits of a data module. `to_samples` returns the samples of all splits.

    Args:
        module: The data module.
        split_names: Names of the splits. The data module must have the first split.
        seed: Seed of the random draws of the data module.
        classes: Names of the classes.
    """
    parts = extract_splits(module, seed, split_names[0])
    return _samples_from_splits({"": {part: own for part, own in parts.items() if part in split_names}}, classes, ())


def is_client_mapping(data: object) -> TypeGuard[Mapping[Any, object] | Sequence[object]]:
    """Return whether the data are a dict or list with one entry per client, instead of a dict of splits."""
    return is_module_per_client(data) and not _names_splits(data, "`data`")


def _join_clients(
    data: Mapping[Any, object] | Sequence[object],
    classes: Sequence[str] | None,
    seed: int,
    left_open: Collection[str],
    collate_fn: Collate | None,
    y: Any,
) -> Samples:
    """Return the samples of all clients, concatenated in the order of the clients.

    The data of each client are a dataset, a dict of splits, or a data module.
    """
    data_by_client = dict(data) if isinstance(data, Mapping) else dict(enumerate(data))
    if not data_by_client:
        raise MissingValueError("Expected `data` to contain a dataset for each client, but got none.", argument="data")
    parts = {client: _parts_in(own, f"for client {client}", seed) for client, own in data_by_client.items()}
    check_columns(parts)
    check_sizes(parts)
    loading = next((loading for own in parts.values() for _, loading in own.values()), None)
    check_shapes(parts, collate_fn or (loading.collate_fn if loading else default_collate))
    samples = check_seen(
        _samples_from_splits(parts, classes, left_open, None if y is None else targets_of_clients(y, parts))
    )
    numbers = all(isinstance(client, int) for client in parts)
    names = [client if numbers else str(client) for client in parts]
    sizes = [len(Joined(part for part, _ in own.values())) for own in parts.values()]
    return replace(samples, client_ids=np.repeat(names, sizes))


def _names_splits(data: object, owner_name: str) -> TypeGuard[Mapping[str, object]]:
    """Return whether the data are a dict of splits, such as a `DatasetDict` of Hugging Face.

    A dict of splits has the key ``train``. If the dict has other keys, at least one of them is the name of a split. Any
    other dict has one entry per client.

    Raises:
        ValueError: If some keys are not names of splits, or if two keys name the same split.
    """
    other_splits = SPLITS.keys() - {"train"}
    if not isinstance(data, Mapping) or "train" not in data or not (len(data) == 1 or other_splits & data.keys()):
        return False
    parts = [SPLITS.get(name) for name in data]
    if None in parts or len(set(parts)) < len(parts):
        raise InvalidValueError(
            f"Expected the dict {owner_name} to have only the keys train, validation and test, each at most once, but "
            f"got {', '.join(map(str, data))}.",
            hint="Remove splits with other names, or merge them into `train`, `validation` or `test`.",
            argument="data",
            value=list(data),
        )
    return True


def _parts_in(data: object, owner_name: str, seed: int) -> SplitDatasets:
    """Return the splits of a data module or of a dict of splits. A single dataset is the training split."""
    if isinstance(data, L.LightningDataModule):
        return extract_splits(data, seed)
    if _names_splits(data, owner_name):
        return {SPLITS[name]: (to_dataset(part, f"for {name}"), None) for name, part in data.items()}
    return {"train": (to_dataset(data, owner_name), None)}


def _samples_from_splits(
    clients: Mapping[Any, SplitDatasets],
    classes: Sequence[str] | None,
    left_open: Collection[str],
    y: Mapping[Any, Mapping[str, NDArray[Any]]] | None = None,
) -> Samples:
    """Return a single `Samples` object with all splits of all clients."""
    pieces = [(part, data) for parts in clients.values() for part, (data, _) in parts.items()]
    owners = [client for client, parts in clients.items() for _ in parts]
    loader_pieces = ((part, data, loading) for parts in clients.values() for part, (data, loading) in parts.items())
    loaders = with_worker_init(common_loader_config(clients, left_open), loader_pieces)
    collate_fn = loaders["train"].collate_fn if loaders else default_collate
    targets = None if y is None else np.concatenate([y[c][part] for c, parts in clients.items() for part in parts])
    joined_data = Joined([data for _, data in pieces])

    def sample_name(number: int) -> str:
        piece, position = joined_data.place_of(number)
        return f"{pieces[piece][0]} sample {position}" + (f" of client {owners[piece]}" if len(clients) > 1 else "")

    whole = samples_from_arrays(joined_data, targets, classes=classes, collate_fn=collate_fn, sample_name=sample_name)
    sample_splits = np.repeat([part for part, _ in pieces], [len(data) for _, data in pieces])  # type: ignore[arg-type]
    validation, test = (
        sample_splits == part if (sample_splits == part).any() else None for part in ("validation", "test")
    )
    return replace(whole, validation=validation, test=test, loader_configs=loaders, has_client_splits=True)


def check_seen(samples: Samples) -> Samples:
    """Return the samples unchanged, or raise ValueError if a class in validation or test has no training samples."""
    train = np.ones(len(samples), dtype=np.bool_)
    for split_mask in (samples.validation, samples.test):
        train &= True if split_mask is None else ~split_mask
    train_labels = set(samples.labels[train].tolist())
    unseen = sorted(set(samples.labels[~train].tolist()) - train_labels)
    if unseen:
        raise InvalidValueError(
            "Expected every class of the validation and test samples to have training samples, but got no training "
            f"samples of {', '.join(samples.classes[label] for label in unseen)}.",
            hint="Remove the validation and test samples of these classes, or add training samples of each class.",
            argument="y",
            value=unseen,
        )
    return samples


Benchmark: TypeAlias = "CLScenario | Sequence[AvalancheDataset]"


class _Pairs(ItemsOf):
    """The samples and labels of an Avalanche dataset. Task labels are left out."""

    def __init__(self, data: AvalancheDataset) -> None:
        self.data = data
        self.targets = [int(label) for label in data.targets]

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.data[index][0], self.targets[index]

    def __len__(self) -> int:
        return len(self.targets)


def samples_from_benchmark(benchmark: Benchmark, scenario: Scenario | str | None) -> tuple[Samples, Scenario]:
    """Return the samples of an Avalanche benchmark, and a scenario.

    The ``group`` of a sample is the index of its experience. The default scenario keeps the order of the benchmark's
    experiences. If no class is in two experiences, the default scenario is `ClassIncremental` with the classes of each
    experience. Otherwise, the default scenario is `DomainIncremental`.
    """
    if isinstance(benchmark, Sequence):
        train, test = [_Pairs(data) for data in benchmark], []
    else:
        train, test = (
            [_Pairs(experience.dataset) for experience in stream]
            for stream in (benchmark.train_stream, benchmark.test_stream)
        )
    if not train:
        raise MissingValueError("Expected at least one experience, but got none.", argument="train", value=train)
    parts: SplitDatasets = {name: (Joined(data), None) for name, data in (("train", train), ("test", test)) if data}
    group = np.concatenate([np.full(len(data), n) for part in (train, test) for n, data in enumerate(part)])
    samples = replace(_samples_from_splits({"": parts}, None, ()), group=group)
    ends = np.cumsum([len(data) for data in train])
    classes = [sorted(set(part.tolist())) for part in np.split(samples.labels[: ends[-1]], ends[:-1])]
    order = [label for labels in classes for label in labels]
    is_disjoint = len({*order}) == len(order)
    default: Scenario = ClassIncremental() if is_disjoint else DomainIncremental()
    scenario = default if scenario is None else from_name("scenario", scenario, Scenario.__subclasses__())
    if isinstance(scenario, ClassIncremental) and is_disjoint:
        scenario = replace(scenario, num_experiences=[len(labels) for labels in classes], class_order=order)
    return samples, scenario


def check_unused_arguments(scenario: Scenario, **arguments: object) -> None:
    """Raise ValueError if ``partition``, ``client_ids`` or ``split`` is passed but the scenario ignores it."""
    for argument, value in arguments.items():
        dealt, subject = (
            (scenario.provides_split, "test samples")
            if argument == "split"
            else (scenario.provides_clients, "client samples")
        )
        if dealt and value is not None:
            raise InvalidValueError(
                f"Expected no `{argument}` for `{scenario}`, which selects {subject} itself, but got {value}.",
                hint="Remove this argument.",
                argument=argument,
                value=value,
            )
