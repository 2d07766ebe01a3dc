"""Origins of samples: which samples are the same item of a dataset, and checks that no test sample is trained on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from lightning_fcl.data.labels import ItemsOf, to_array
from lightning_fcl.data.scenarios import IntArray
from lightning_fcl.errors import InvalidValueError

log = logging.getLogger(__name__)

# Values of the second column of a key. The first column is an address or a hash of a row of an array (`_ROW`), or of an
# item of a list (`_ITEM`).
_ROW, _ITEM = -1, -2


def origins_of(data: Dataset[Any]) -> IntArray | None:
    """Return an integer for the origin of each sample, shape (n,), or None if no two samples have the same origin.

    Samples of the same origin have equal integers. The origin of a sample is the place from which it is read:

    - an item of the innermost dataset, inside subsets, concatenated datasets and wrappers of one dataset,
    - a row of an array that several `TensorDataset` objects share, or
    - an object in a list.
    """
    return _numbered(_keys(data, _origins))


def check_apart(origin: IntArray, parts: Mapping[str, IntArray], owner: NDArray[Any] | None, remedy: str) -> None:
    """Raise ValueError if two parts of a plan share samples. Validation and test data may be the same set of samples.

    Args:
        origin: Origin of each sample, shape (n,). See `origins_of`.
        parts: Indices of the samples for ``"training"``, ``"validation"`` and ``"test"``.
        owner: Client of each sample, shape (n,), or None.
        remedy: Hint on how to fix the error.
    """
    for pair in combinations(parts, 2):
        rows = [parts[part] for part in pair]
        shared = np.intersect1d(origin[rows[0]], origin[rows[1]])
        are_equal = len(shared) == len(np.unique(origin[np.concatenate(rows)]))
        if not len(shared) or ("training" not in pair and are_equal):
            continue
        example = ""
        if owner is not None:
            clients = [owner[numbers[origin[numbers] == shared[0]][0]] for numbers in rows]
            example = f", such as a sample of client {clients[0]} for {pair[0]} and client {clients[1]} for {pair[1]}"
        raise InvalidValueError(
            f"Expected no sample in both the {pair[0]} and the {pair[1]} data, but got {len(shared)} in both{example}.",
            hint=remedy,
            argument="data",
            value=pair,
        )


def warn_of_equal(data: Tensor | Dataset[Any], targets: NDArray[Any], trained: IntArray, tested: IntArray) -> None:
    """Warn if test samples in memory have the same inputs and targets as training samples.

    Args:
        data: Samples, shape (n, ...), or a dataset. In a dataset, only samples of `TensorDataset` objects are compared.
        targets: Targets of the samples if ``data`` is a tensor, shape (n, ...).
        trained: Indices of the training samples.
        tested: Indices of the test samples.
    """
    if not len(tested):
        return
    number = _numbered(_hashes([data, targets]) if isinstance(data, Tensor) else _keys(data, _contents))
    if number is not None and (equal := int(np.isin(number[tested], number[trained]).sum())):
        rank_zero_only(log.warning)(
            "%d of %d test samples have the inputs and targets of a training sample. If these test samples are copies, "
            "remove them.",
            equal,
            len(tested),
        )


def _numbered(keys: NDArray[np.int64]) -> IntArray | None:
    """Return an integer for each key, shape (n,). Equal keys have equal integers. Return None if all keys differ."""
    first, second = (np.unique(column, return_inverse=True) for column in keys.T)
    number = np.unique(first[1] * len(second[0]) + second[1], return_inverse=True)
    return None if len(number[0]) == len(keys) else number[1].astype(np.int64)


def _keys(data: Any, leaf: Callable[[Any], NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return a key for each item of the data, shape (n, 2). ``leaf`` computes the keys for the innermost data."""
    if isinstance(data, Subset):
        return _keys(data.dataset, leaf)[np.asarray(data.indices, dtype=np.int64)]
    if isinstance(data, ConcatDataset):
        return np.concatenate([_keys(part, leaf) for part in data.datasets])
    inner = _wrapped(data)
    return leaf(data) if inner is None else _keys(inner, leaf)


def _wrapped(data: Any) -> Any:
    """Return the data that a dataset wraps item by item, or None if the wrapped data are unknown."""
    if isinstance(data, ItemsOf):
        return data.data
    if isinstance(data, StackDataset):
        return next(iter(data.datasets.values())) if isinstance(data.datasets, dict) else data.datasets[0]
    datasets: list[Any] = [value for value in getattr(data, "__dict__", {}).values() if isinstance(value, Dataset)]
    if len(datasets) != 1 or not hasattr(datasets[0], "__len__") or len(datasets[0]) != len(data):
        return None
    # If two datasets refer to each other, neither wraps the other.
    return None if any(value is data for value in getattr(datasets[0], "__dict__", {}).values()) else datasets[0]


def _origins(data: Any) -> NDArray[np.int64]:
    """Return a key for the origin of each item, shape (n, 2).

    The origin is a row of a `TensorDataset` or an object in a list. Otherwise, it is the dataset and the item's index.
    """
    if isinstance(data, TensorDataset):
        dense = [tensor for tensor in data.tensors if tensor.layout == torch.strided and tensor[:1].numel()]
        # An expanded tensor has stride 0 and repeats one row.
        tensor = next((tensor for tensor in dense if tensor.stride(0)), None)
        if tensor is not None:
            step = tensor.stride(0) * tensor.element_size()
            return _pairs(tensor.data_ptr() + step * np.arange(len(tensor)), _ROW)
    elif type(data) is list and not any(isinstance(item, str | bytes | int | float | None) for item in data):
        return _pairs([_address(item) or id(item) for item in data], _ITEM)
    return np.stack([np.full(len(data), id(data)), np.arange(len(data))], axis=1)


def _address(item: Any) -> int:
    """Return a hash of the memory addresses of the arrays in an item, or 0 if the item has no arrays."""
    parts = item.values() if isinstance(item, Mapping) else item if isinstance(item, Sequence) else [item]
    places = [part.data_ptr() for part in parts if isinstance(part, Tensor) and part.numel()]
    places += [part.__array_interface__["data"][0] for part in parts if isinstance(part, np.ndarray) and part.size]
    return hash(tuple(places)) if places else 0


def _contents(data: Any) -> NDArray[np.int64]:
    dense = isinstance(data, TensorDataset) and all(one.layout == torch.strided for one in data.tensors)
    return _hashes(data.tensors) if dense else _origins(data)


def _hashes(arrays: Sequence[Any]) -> NDArray[np.int64]:
    """Return a key for each row of the arrays, shape (n, 2). Rows with equal content have equal keys."""
    columns = [np.ascontiguousarray(to_array(one)) for one in arrays]
    return _pairs([hash(tuple(one[row].tobytes() for one in columns)) for row in range(len(arrays[0]))], _ROW)


def _pairs(first: Any, second: int) -> NDArray[np.int64]:
    keys = np.asarray(first, dtype=np.int64)
    return np.stack([keys, np.full(len(keys), second)], axis=1)
