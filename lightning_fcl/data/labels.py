"""Targets of samples: functions that read targets from a dataset's items, and convert labels to class numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_fcl.data.batching import fetch
from lightning_fcl.data.generators import Generators
from lightning_fcl.data.scenarios import IntArray
from lightning_fcl.errors import InvalidTypeError, InvalidValueError, UnknownNameError
from lightning_fcl.validation import did_you_mean, format_names

# Keys of the target in datasets whose items are dicts.
_TARGETS = ("labels", "label", "targets", "target", "y")

# Number of items that are read at once if the dataset supports it.
_FETCHED = 64
# Maximum number of evenly spaced items whose targets are compared with the declared targets. One item of each label is
# also compared.
_COMPARED = 100

LONG = "gG"
"""NumPy's character codes of extended-precision types. Torch does not support these types."""

SampleName = Callable[[int], str]
"""Function that returns the name of a sample for messages. Its argument is the index of the sample."""


def default_name(number: int) -> str:
    return f"sample {number}"


def index_targets(
    y: Any, classes: Sequence[str] | None, sample_name: SampleName = default_name
) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Return the targets as an array, and the names of the classes, in this order.

    If the targets are labels, the array contains class numbers. Otherwise, the names are empty.

    Args:
        y: Target of each sample, shape (n, ...).
        classes: Names of the classes. If empty, the targets are not labels. If None, targets of shape (n,) that are not
            floats are labels, and the sorted labels are the names.
        sample_name: Function that returns the name of a sample for messages.

    Raises:
        TypeError: If the type of the targets is not supported.
        ValueError: If a target is missing or non-finite, if a label of type text is not in ``classes``, or if labels
            have shape (n, 1).
    """
    targets = to_array(y)
    if targets.dtype.char in LONG:
        raise InvalidTypeError(
            f"Expected `y` to be labels or numbers of at most 64 bits, but got {targets.dtype}.",
            hint="Convert `y`, for example with `y.astype(np.float32)`.",
            argument="y",
            value=targets.dtype,
        )
    check_targets(targets, sample_name)
    if targets.shape[1:] == (1,) and classes != () and (classes or targets.dtype.kind != "f"):
        raise InvalidValueError(
            f"Expected `y` to be labels of shape ({len(targets)},), but got shape ({len(targets)}, 1).",
            hint="Remove the last axis with `y.squeeze(-1)`, or pass `classes=()` for targets that are not classes.",
            argument="y",
        )
    numeric, floating = targets.dtype.kind in "biuf", targets.dtype.kind == "f"
    whole = not floating or (bool(classes) and bool((targets == np.floor(targets)).all()))
    if targets.ndim == 1 and targets.size and whole and (classes is None or len(classes)):
        if numeric and classes is not None:
            return targets.astype(np.int64), tuple(classes)
        names = np.unique(targets.astype(np.int64 if numeric else np.str_)) if classes is None else np.array(classes)
        # With the string type of `names`, NumPy would cut each label to the length of the longest name.
        labels = targets.astype(np.str_ if names.dtype.kind == "U" else names.dtype)
        return label_indices(labels, names, "every label of `y`"), tuple(map(str, names))
    if classes or not numeric:
        expected_form = (
            "labels, one whole number or name for each sample" if classes != () else "numbers, because `classes=()`"
        )
        raise InvalidTypeError(
            f"Expected `y` to be {expected_form}, but got {targets.dtype} of shape {targets.shape}.",
            hint="Remove `classes` if you passed it, and pass labels of shape (n,) or numbers.",
            argument="y",
            value=targets.dtype,
        )
    return targets.astype(np.float32) if targets.dtype == np.float16 else targets, ()


def check_names(names: Sequence[str], argument: str = "classes") -> None:
    """Raise ValueError if a name is repeated or cannot be encoded in UTF-8.

    Args:
        names: The names.
        argument: Name of the argument that contains the names.
    """
    twice = next((name for name, number in Counter(names).items() if number > 1), None)
    if twice is not None:
        raise InvalidValueError(
            f"Expected the names in `{argument}` to be unique, but got {twice!r} more than once.",
            hint="Rename or remove the duplicates.",
            argument=argument,
        )
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise InvalidValueError(
                f"Expected `{argument}` to contain names in Unicode, but got {name!a}, which UTF-8 cannot encode.",
                hint=f"Rename this entry in `{argument}`.",
                argument=argument,
            ) from error


def check_targets(targets: NDArray[Any], sample_name: SampleName = default_name) -> None:
    """Raise ValueError if a sample has no target or a non-finite target.

    Args:
        targets: Target of each sample, shape (n, ...).
        sample_name: Function that returns the name of a sample for messages.
    """
    if targets.dtype.kind == "O":
        wrong = np.array([not isinstance(value, str) for value in targets.ravel()], dtype=bool)
    elif targets.dtype.kind == "f":
        wrong = ~np.isfinite(targets).ravel()
    else:
        return
    if wrong.any():
        unless = " If the values are not targets, pass `classes=()` without `y`." if targets.dtype.kind == "O" else ""
        first, number = int(wrong.argmax()), int(wrong.reshape(len(targets), -1).any(axis=1).sum())
        raise InvalidValueError(
            f"Expected `y` to have a finite target for each sample, but got {targets.ravel().tolist()[first]!r} for "
            f"{sample_name(first // (targets.size // len(targets)))} ({number} of {len(targets)} samples have such "
            "values).",
            hint=f"Correct or remove these samples, or pass other targets as `y`.{unless}",
            argument="y",
        )


def to_array(values: Any) -> NDArray[Any]:
    """Return values as an array. Tensors may require gradients. Tensors of type bfloat16 are converted to float32."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype == torch.bfloat16 else values
    return np.asarray(values)


def label_indices(labels: NDArray[Any], names: NDArray[Any] | Sequence[str], owner_name: str) -> IntArray:
    """Return the index of each label in the list of class names. Raise ValueError for unknown labels."""
    class_names = np.asarray(names)
    if len(unknown := np.setdiff1d(labels, class_names)):
        hint = did_you_mean(unknown[0], map(str, names))
        raise UnknownNameError(
            f"Expected {owner_name} to be among {', '.join(map(str, names))}, but got {format_names(unknown)}.",
            hint=f"{hint} Remove the samples with unknown labels, or name every class.",
            argument="y",
            value=unknown.tolist(),
        )
    order = np.argsort(class_names)
    return order[np.searchsorted(class_names, labels, sorter=order)].astype(np.int64)


class ItemsOf(Dataset[Any]):
    """A dataset that wraps other data. Item i of the dataset is derived from item i of the wrapped data.

    Attributes:
        data: The wrapped data.
    """

    data: Any


class IndexedTargets(ItemsOf):
    """A dataset that wraps another dataset and replaces the label in each item by its class number."""

    def __init__(self, data: Dataset[Any], numbers: Mapping[int | str, int]) -> None:
        self.data = data
        self.numbers = numbers

    def __getitem__(self, index: int) -> Any:
        return self._numbered(self.data[index], index)

    def __getitems__(self, rows: Sequence[int]) -> list[Any]:
        return [self._numbered(item, row) for row, item in zip(rows, _items(self.data, rows), strict=True)]

    def _numbered(self, item: Any, index: int) -> Any:
        position = target_position(item)
        label: Any = None if position is None else np.asarray(item[position]).item()
        if label not in self.numbers:
            raise InvalidValueError(
                f"Expected item {index} to contain one of the labels {', '.join(map(str, self.numbers))}, but got "
                f"{label}.",
                hint="Return the same label in each read, as the second item of a pair or in a dict.",
                argument="y",
                value=label,
            )
        if isinstance(item, Mapping):
            return {**item, position: self.numbers[label]}
        return (item[0], self.numbers[label], *item[2:])

    def __len__(self) -> int:
        return len(self.data)


def _items(data: Any, rows: Sequence[int]) -> Sequence[Any]:
    """Return the items at the given indices. Read single items if ``__getitems__`` does not return a list of items."""
    items = fetch(data, rows)
    return items if isinstance(items, list | tuple) and len(items) == len(rows) else [data[row] for row in rows]


def index_labels(data: Dataset[Any], labels: Any, numbers: IntArray) -> Dataset[Any]:
    """Return a dataset with class numbers in place of labels. If integer labels equal the numbers, return ``data``."""
    label_array = np.asarray(labels)
    if label_array.dtype.kind != "f" and np.array_equal(label_array, numbers):
        return data
    names, first = np.unique(
        label_array if label_array.dtype.kind != "O" else label_array.astype(np.str_), return_index=True
    )
    return IndexedTargets(data, dict(zip(names.tolist(), numbers[first].tolist(), strict=True)))


def target_position(item: Any) -> Any:
    """Return the index or key of the target in an item, or None if the item has no target."""
    if isinstance(item, Mapping):
        return next((name for name in _TARGETS if name in item), None)
    return 1 if isinstance(item, Sequence) and len(item) > 1 else None


def read_targets(dataset: Dataset[Any]) -> Any:
    """Return the targets of a dataset's items.

    If items have no targets, return the dataset's attribute ``targets``, or an empty list if the attribute does not
    have one target per item. If the items and the attribute have targets, the targets of some items are compared with
    the attribute. If they are equal, the attribute is returned. Otherwise the targets of all items are read.
    """
    if isinstance(dataset, ConcatDataset):
        parts = [np.asarray(read_targets(part)) for part in dataset.datasets]
        return np.concatenate(parts) if all(map(len, parts)) else []
    rows, declared_targets = range(len(dataset)), _declared_targets(dataset)  # type: ignore[arg-type]  # map-style
    if declared_targets is None or declared_targets.shape[:1] != (len(rows),):
        return _read_targets(dataset, rows)
    checked_rows = np.linspace(0, len(rows) - 1, min(len(rows), _COMPARED)).astype(np.int64)
    if declared_targets.ndim == 1 and declared_targets.dtype.kind != "O":
        checked_rows = np.union1d(checked_rows, np.unique(declared_targets, return_index=True)[1])
    item_targets = _read_targets(dataset, checked_rows.tolist())
    return (
        declared_targets
        if not item_targets or np.array_equal(np.asarray(item_targets), declared_targets[checked_rows])
        else _read_targets(dataset, rows)
    )


def _declared_targets(dataset: Dataset[Any]) -> NDArray[Any] | None:
    """Return the attribute ``targets`` of a dataset as an array, or None. The items may contain different targets."""
    targets = getattr(dataset, "targets", None)
    if targets is None and isinstance(dataset, Subset):
        whole = _declared_targets(dataset.dataset)
        return None if whole is None else whole[np.asarray(dataset.indices, dtype=np.int64)]
    if targets is None and isinstance(dataset, ConcatDataset):
        parts = [_declared_targets(part) for part in dataset.datasets]
        declared_parts = [part for part in parts if part is not None]
        return np.concatenate(declared_parts) if len(declared_parts) == len(parts) else None
    try:
        return None if targets is None else np.asarray(targets)
    except ValueError:
        # The targets have different shapes.
        return None


def _read_targets(dataset: Dataset[Any], rows: Iterable[int]) -> list[Any]:
    """Return the targets of the given items.

    The result is an empty list if an item has no target, if a target is nested, if the shapes of the targets differ, or
    if NumPy stores all targets as objects.
    """
    targets, whole = [], list(rows)
    size = _FETCHED if getattr(dataset, "__getitems__", None) else 1
    with isolate_rng(include_cuda=False), Generators().seeded({"": dataset}, seed=0):
        for start in range(0, len(whole), size):
            for item in _items(dataset, whole[start : start + size]):
                position = target_position(item)
                if position is None:
                    return []
                try:
                    targets.append(to_array(item[position]))
                except ValueError:
                    # The entry is nested: it contains the target and further values for the loss.
                    return []
    # Entries such as boxes or None are not numbers, so NumPy stores them as objects.
    structured = [target.dtype.kind == "O" for target in targets]
    if len({target.shape for target in targets}) > 1 or all(structured):
        return []
    return [target.tolist() for target in targets] if any(structured) else targets
