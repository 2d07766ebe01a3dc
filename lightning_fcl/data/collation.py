"""Functions that concatenate, stack, and group nested batches."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from lightning_fcl.errors import InvalidValueError


def return_unchanged(batch: Any) -> Any:
    """Return a batch unchanged. Used as the `collate_fn` of a dataset whose items are batches."""
    return batch


def count_nested_samples(samples: Any) -> int:
    """Return the number of samples in nested lists and dicts of tensors. Return 0 for None and for an empty nesting."""
    if isinstance(samples, Mapping):
        samples = list(samples.values())
    if samples is None or isinstance(samples, list | tuple):
        return count_nested_samples(samples[0]) if samples else 0
    return len(samples)


def concat_nested(batches: Sequence[Any]) -> Any:
    """Concatenate batches along the sample dimension.

    The result has the same nesting of lists, dicts and named tuples as the first batch. Plain tuples become lists.

    Raises:
        ValueError: If the samples have different shapes.
    """
    first = batches[0]
    if isinstance(first, Mapping):
        return {name: concat_nested([part[name] for part in batches]) for name in first}
    if isinstance(first, list | tuple):
        columns = [concat_nested(column) for column in zip(*batches, strict=True)]
        return type(first)(*columns) if isinstance(first, tuple) and type(first) is not tuple else columns
    if any(part.shape[1:] != first.shape[1:] for part in batches):
        shapes = " and ".join(str(tuple(part.shape[1:])) for part in batches)
        raise InvalidValueError(
            f"Expected samples of the same shape, but got the shapes {shapes}.",
            hint="Pad the samples to one shape in `collate_fn`.",
            argument="x",
            value=shapes,
        )
    return torch.cat(list(batches))


class ShapeGroup(NamedTuple):
    """Stacked batches of several clients. The batches have the same shapes and dtypes.

    Attributes:
        rows: Indices of the clients.
        batch: The stacked batch. Each tensor has shape (clients, ...).
    """

    rows: Tensor
    batch: Any


def group_by_shape(samples: Sequence[Any]) -> list[ShapeGroup]:
    """Group the batches of several clients by nesting, shape and dtype, and stack the batches of each group.

    Args:
        samples: Batch of each client, in any nesting of tensors.

    Raises:
        ValueError: If a batch contains a value that is not a tensor.
    """
    rows: dict[Hashable, list[int]] = {}
    for row, batch in enumerate(samples):
        leaves, nest = tree_flatten(batch)
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                kind = type(leaf).__name__
                raise ValueError(f"the batches contain a `{kind}`, and only tensors can be stacked")
        rows.setdefault((nest, *((leaf.shape, leaf.dtype) for leaf in leaves)), []).append(row)
    return [ShapeGroup(torch.tensor(own), stack_nested([samples[row] for row in own])) for own in rows.values()]


def stack_nested(batches: Sequence[Any]) -> Any:
    """Stack batches of equal shapes. The result has the same nesting as the first batch."""
    return tree_map(lambda *leaves: torch.stack(leaves), *batches)
