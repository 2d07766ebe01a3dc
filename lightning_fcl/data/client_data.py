"""Checks of the clients' datasets before they are concatenated: sizes, shapes of samples, and the users' targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch.utilities.seed import isolate_rng
from numpy.typing import NDArray
from torch.utils.data import Dataset, Subset, default_collate

from lightning_fcl.data.batching import Collate
from lightning_fcl.data.datamodule_adapter import SplitDatasets
from lightning_fcl.data.generators import Generators
from lightning_fcl.data.labels import ItemsOf, to_array
from lightning_fcl.data.tables import Table
from lightning_fcl.errors import InvalidValueError, MissingValueError
from lightning_fcl.validation import format_names

# Split names in the data of users and of Hugging Face datasets, and the corresponding names in this package.
SPLITS = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation", "test": "test"}


def check_sizes(clients: Mapping[Any, SplitDatasets]) -> None:
    """Raise ValueError if a client has no samples."""
    for client, parts in clients.items():
        if not any(len(data) for data, _ in parts.values()):  # type: ignore[arg-type]  # map-style
            raise MissingValueError(
                f"Expected `data` to contain samples of every client, but client {client} has none.",
                hint=f"Remove client {client} from `data`.",
                argument="data",
            )


def check_columns(clients: Mapping[Any, SplitDatasets]) -> None:
    """Raise ValueError if the tables of two clients have the same feature or target columns in different orders.

    The shapes of their samples are equal, but the values at one position have different meanings. Columns with
    different names can have the same meaning.
    """
    datasets = ((client, data) for client, parts in clients.items() for data, _ in parts.values())
    tables = [(client, table) for client, data in datasets if (table := _table_in(data)) is not None]
    for client, table in tables[1:]:
        first_client, first = tables[0]
        for argument, columns, first_columns in (
            ("features", table.features, first.features),
            ("target", table.target, first.target),
        ):
            misplaced_names = [
                name
                for number, name in enumerate(columns)
                if name in first_columns and name not in first_columns[number : number + 1]
            ]
            if misplaced_names:
                name = misplaced_names[0]
                raise InvalidValueError(
                    f"Expected `{argument}` of all tables to be in the same order, but `{name}` is number "
                    f"{columns.index(name) + 1} for client {client} and number {first_columns.index(name) + 1} for "
                    f"client {first_client}.",
                    hint=f"Pass `{argument}` in the same order to each `Table`. The order of the columns in the files "
                    "may differ, because columns are found by name.",
                    argument=argument,
                    value=columns,
                )


def _table_in(data: Any) -> Table | None:
    """Return the table inside subsets and wrappers, or None if the innermost dataset is not a table."""
    while isinstance(data, Subset | ItemsOf):
        data = data.dataset if isinstance(data, Subset) else data.data
    return data if isinstance(data, Table) else None


def check_shapes(clients: Mapping[Any, SplitDatasets], collate_fn: Collate) -> None:
    """Raise ValueError if the samples of the clients differ in shape and torch's `default_collate` combines them.

    Only the first sample of each dataset is compared. Datasets with a method ``__getitems__`` are skipped, because the
    method may pad the samples of a batch.
    """
    if collate_fn is not default_collate or len(clients) < 2:
        return
    first: tuple[Any, dict[str, Any]] | None = None
    for client, parts in clients.items():
        for data, _ in parts.values():
            if not len(data) or _reads_batches(data):  # type: ignore[arg-type]  # map-style
                continue
            shapes = dict(_shapes_in(_first_of(data)))
            if first is None:
                first = client, shapes
            for path in first[1].keys() & shapes.keys():
                if first[1][path] != shapes[path]:
                    raise InvalidValueError(
                        f"Expected the samples of `data` to have one shape, but {path} has shape {shapes[path]} for "
                        f"client {client} and shape {first[1][path]} for client {first[0]}.",
                        hint="Convert the samples to one shape, or pass a `collate_fn` that accepts several shapes.",
                        argument="data",
                        value=path,
                    )


def targets_of_clients(y: Any, clients: Mapping[Any, SplitDatasets]) -> dict[Any, dict[str, NDArray[Any]]]:
    """Return the targets by client, then by split. Raise ValueError if ``y`` and the data have different clients."""
    client_targets = y if isinstance(y, Mapping) else dict(enumerate(y)) if isinstance(y, list | tuple) else None
    if client_targets is None or client_targets.keys() != clients.keys():
        description = (
            f"a value of type {type(y).__name__}"
            if client_targets is None
            else f"targets of {format_names(client_targets) or 'no client'}"
        )
        raise InvalidValueError(
            f"Expected `y` to contain the targets of each client ({format_names(clients)}), but got {description}.",
            hint="Pass a dict with the keys of `data`. If `data` is a list, pass a list of the same length.",
            argument="y",
            value=description,
        )
    return {client: targets_in(client_targets[client], parts, f"client {client}") for client, parts in clients.items()}


def targets_in(y: Any, parts: SplitDatasets, owner_name: str) -> dict[str, NDArray[Any]]:
    """Return an array of targets for each split, by split.

    Args:
        y: A dict of targets by split. If there is only a training split, ``y`` can be its targets.
        parts: The splits.
        owner_name: Description of the data for error messages.

    Raises:
        ValueError: If ``y`` and the data have different splits, or different numbers of targets and samples.
    """
    targets_by_part = (
        {SPLITS.get(name, name): own for name, own in y.items()} if isinstance(y, Mapping) else {"train": y}
    )
    if targets_by_part.keys() != parts.keys():
        raise InvalidValueError(
            f"Expected `y` to contain targets for the splits {format_names(parts)} of {owner_name}, but got targets "
            f"for {format_names(targets_by_part) or 'no split'}.",
            hint="Pass a dict with one array for each split.",
            argument="y",
        )
    arrays = {}
    for name, (data, _) in parts.items():
        arrays[name], size = to_array(targets_by_part[name]), len(data)  # type: ignore[arg-type]  # map-style
        if arrays[name].shape[:1] != (size,):
            actual_size = len(arrays[name]) if arrays[name].ndim else "a single value"
            raise InvalidValueError(
                f"Expected `y` to contain one target per {name} sample of {owner_name} (samples: {size}), but got "
                f"{actual_size}.",
                hint="Pass one target for each sample, in the order of the samples.",
                argument="y",
                value=actual_size,
            )
    return arrays


def _reads_batches(data: Any) -> bool:
    """Return whether the innermost dataset, inside subsets and wrappers, can read several items at once."""
    while isinstance(data, Subset | ItemsOf):
        data = data.dataset if isinstance(data, Subset) else data.data
    return callable(getattr(data, "__getitems__", None))


def _first_of(data: Dataset[Any]) -> Any:
    with isolate_rng(include_cuda=False), Generators().seeded({"": data}, seed=0):
        return data[0]


def _shapes_in(item: Any, path: str = "") -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the path and the shape of each array in a sample."""
    if isinstance(item, Mapping):
        for name, element in item.items():
            yield from _shapes_in(element, f"{path}[{name!r}]")
    elif isinstance(item, tuple | list):
        for number, element in enumerate(item):
            yield from _shapes_in(element, f"{path}[{number}]")
    elif isinstance(item, int | float):
        yield f"`sample{path}`", ()
    elif hasattr(item, "shape"):
        yield f"`sample{path}`", tuple(item.shape)
