"""Origins of samples: samples that are one sample of a dataset, and checks that no test sample is trained on."""

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

from lightning_fcl.data.scenarios import IntArray
from lightning_fcl.data.targets import ItemsOf, as_array

log = logging.getLogger(__name__)

_ROW, _ITEM = -1, -2  # second column of keys that are addresses of arrays, and of objects


def origins_of(data: Dataset[Any]) -> IntArray | None:
    """Return a number for each sample, equal for samples of one origin, shape (n,); None if all origins differ.

    The origin of a sample is the place it is read from: an item of a dataset below all subsets, joined datasets and
    datasets that wrap one other dataset, a row of an array that `TensorDataset` objects share, or an object in a list.
    """
    return _numbered(_keys(data, _origins))


def check_apart(origin: IntArray, parts: Mapping[str, IntArray], owner: NDArray[Any] | None, remedy: str) -> None:
    """Raise ValueError if two parts of a plan share samples. All validation samples may be all test samples.

    Args:
        origin: A number of the origin of each sample, shape (n,). See `origins_of`.
        parts: Numbers of the samples for ``"training"``, ``"validation"`` and ``"test"``.
        owner: Client of each sample, shape (n,), or None.
        remedy: Last sentence of the message.
    """
    for (one, first), (other, second) in combinations(parts.items(), 2):
        shared = np.intersect1d(origin[first], origin[second])
        if not len(shared) or (
            one != "training" and np.array_equal(shared, np.unique(origin[np.union1d(first, second)]))
        ):
            continue
        of = ""
        if owner is not None:
            names = [owner[rows[origin[rows] == shared[0]][0]] for rows in (first, second)]
            of = f", such as one of client {names[0]} for {one} and of client {names[1]} for {other}"
        raise ValueError(
            f"Expected no sample in both the {one} and the {other} data, but got {len(shared)} in both{of}. {remedy}"
        )


def warn_of_equal(data: Tensor | Dataset[Any], targets: NDArray[Any], trained: IntArray, tested: IntArray) -> None:
    """Warn if test samples in memory have the same content as training samples: equal inputs and equal targets.

    Args:
        data: Samples, shape (n, ...), or a dataset, of which the parts that are a `TensorDataset` are compared.
        targets: Targets of samples that are no dataset, shape (n, ...).
        trained: Numbers of the samples that are trained on.
        tested: Numbers of the test samples.
    """
    number = _numbered(_hashes([data, targets]) if isinstance(data, Tensor) else _keys(data, _contents))
    if number is not None and (equal := int(np.isin(number[tested], number[trained]).sum())):
        rank_zero_only(log.warning)(
            "%d of %d test samples have the inputs and targets of a training sample. Remove them if they are copies.",
            equal,
            len(tested),
        )


def _numbered(keys: NDArray[np.int64]) -> IntArray | None:
    """Number the different keys, shape (n, 2), from 0; None if all differ."""
    first, second = (np.unique(column, return_inverse=True) for column in keys.T)
    number = np.unique(first[1] * len(second[0]) + second[1], return_inverse=True)
    return None if len(number[0]) == len(keys) else number[1].astype(np.int64)


def _keys(data: Any, leaf: Callable[[Any], NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return a key for each item of data, shape (n, 2), which a function gives for data that wraps no other."""
    if isinstance(data, Subset):
        return _keys(data.dataset, leaf)[np.asarray(data.indices, dtype=np.int64)]
    if isinstance(data, ConcatDataset):
        return np.concatenate([_keys(part, leaf) for part in data.datasets])
    inner = _wrapped(data)
    return leaf(data) if inner is None else _keys(inner, leaf)


def _wrapped(data: Any) -> Any:
    """Return the data whose item i the item i of a dataset is made of; None if it is of no other, or unknown."""
    if isinstance(data, ItemsOf):
        return data.data
    if isinstance(data, StackDataset):
        return next(iter(data.datasets.values())) if isinstance(data.datasets, dict) else data.datasets[0]
    own = [value for value in getattr(data, "__dict__", {}).values() if isinstance(value, Dataset)]
    if len(own) != 1 or not hasattr(own[0], "__len__") or len(own[0]) != len(data):
        return None
    # Two datasets that refer to each other wrap none.
    return None if any(value is data for value in getattr(own[0], "__dict__", {}).values()) else own[0]


def _origins(data: Any) -> NDArray[np.int64]:
    """Return the address of each row of the array that a `TensorDataset` has, or of each item of a list."""
    if isinstance(data, TensorDataset):
        plain = [one for one in data.tensors if one.layout == torch.strided and one[:1].numel()]
        rows = [one for one in plain if one.stride(0)]  # an expanded tensor repeats one row
        if rows:
            step = rows[0].stride(0) * rows[0].element_size()
            return _pairs(rows[0].data_ptr() + step * np.arange(len(rows[0])), _ROW)
    elif type(data) is list and not any(isinstance(item, str | bytes | int | float | None) for item in data):
        return _pairs([_address(item) or id(item) for item in data], _ITEM)
    return np.stack([np.full(len(data), id(data)), np.arange(len(data))], axis=1)


def _address(item: Any) -> int:
    """Return a number of the places in memory of the arrays that an item consists of; 0 if it has none."""
    parts = item.values() if isinstance(item, Mapping) else item if isinstance(item, Sequence) else [item]
    places = [one.data_ptr() for one in parts if isinstance(one, Tensor) and one.numel()]
    places += [one.__array_interface__["data"][0] for one in parts if isinstance(one, np.ndarray) and one.size]
    return hash(tuple(places)) if places else 0


def _contents(data: Any) -> NDArray[np.int64]:
    dense = isinstance(data, TensorDataset) and all(one.layout == torch.strided for one in data.tensors)
    return _hashes(data.tensors) if dense else _origins(data)


def _hashes(arrays: Sequence[Any]) -> NDArray[np.int64]:
    """Return a key of the content of each row of some arrays, shape (n, 2)."""
    columns = [np.ascontiguousarray(as_array(one)) for one in arrays]
    return _pairs([hash(tuple(one[row].tobytes() for one in columns)) for row in range(len(arrays[0]))], _ROW)


def _pairs(first: Any, second: int) -> NDArray[np.int64]:
    keys = np.asarray(first, dtype=np.int64)
    return np.stack([keys, np.full(len(keys), second)], axis=1)
