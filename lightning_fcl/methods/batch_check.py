"""Checks that methods can train on batches and store samples of the batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import lightning.pytorch as L
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_fcl.data.batching import Batch
from lightning_fcl.data.reading_check import restored_reading
from lightning_fcl.data.trainer_access import find_stream
from lightning_fcl.errors import InvalidTypeError
from lightning_fcl.methods.base import MethodBase, overrides_hook
from lightning_fcl.methods.context import is_labelled
from lightning_fcl.methods.dry_run import first_indices

# Number of samples that `check_samples` reads before a fit.
_SAMPLES = 2


def check_batch(method: MethodBase, batch: Batch, stored: bool = True) -> None:
    """Raise TypeError if a method cannot use a batch.

    Args:
        method: The method.
        batch: The batch.
        stored: Whether to also check that the method can store samples of the batch. Use False with a
            `FederatedStream`: methods then store samples as the dataset returns them, before transfer hooks.
    """
    accepts = is_labelled(batch) or (method.needs.dict_batches and isinstance(batch, dict))
    if method.needs.labels and not accepts:
        raise InvalidTypeError(
            f"Expected batches `[x, y]` with a tensor `y` for `{type(method).__name__}`, but got {_described(batch)}.",
            hint="Return a pair from your dataset. The second value must be a number or a tensor.",
            argument="batch",
        )
    if stored:
        check_stored(method, batch)


def check_samples(method: MethodBase, trainer: L.Trainer) -> None:
    """Raise TypeError if a method that stores samples cannot use or store the samples of the stream.

    The check reads at most two samples. Afterwards, the random number generators and the state of the dataset are
    restored.
    """
    stream = find_stream(trainer)
    stores = method.needs.tensors or overrides_hook(method, "replay_samples")
    if not stores or stream is None or not stream.samples.is_random or (rows := first_indices(stream)) is None:
        return
    samples, rows = stream.samples, rows[:_SAMPLES]
    with isolate_rng(), restored_reading(samples, rows, "train"):
        try:
            batch = samples.get(rows, "train", stream.seed)
        # `collate_fn` may fail because it gets only two samples. An error with another cause is raised in training.
        except Exception:
            return
    if method.needs.tensors:
        check_batch(method, batch)
    else:
        check_stored(method, batch)


def check_stored(method: MethodBase, batch: Batch) -> None:
    """Raise TypeError if a method stores samples but the samples of a batch cannot be stored.

    Samples can be stored if every value that the method stores is a tensor with one row for each sample.
    """
    name, needs = type(method).__name__, method.needs
    values: dict[str, object]
    if needs.tensors:
        values = _named(batch)
    elif overrides_hook(method, "replay_samples"):
        values = dict(_leaves("", batch))
    else:
        return
    tensors = [value for value in values.values() if isinstance(value, Tensor) and value.dim()]
    sizes = {len(value) for value in tensors}
    size = len(batch[1]) if is_labelled(batch) and batch[1].dim() else min(sizes, default=0)
    for tensor_name, value in values.items():
        if not (isinstance(value, Tensor) and value.dim() and len(value) == size):
            raise InvalidTypeError(
                f"Expected each value of a batch to be a tensor with one row per sample for `{name}`, which works on "
                f"single samples, but the value at `{tensor_name}` is {_described(value)}.",
                hint="Return tensors of one shape from the dataset or `collate_fn`. Pad sequences and encode text, or "
                f"remove `{name}`.",
                argument=tensor_name,
            )


def _named(batch: Batch) -> dict[str, object]:
    """Return the values of a batch by name.

    The first two values of a list or tuple are named ``x`` and ``y``, and all other values are left out. A mapping
    keeps its names. A batch of any other type is one value with the name ``batch``.
    """
    return {str(name): value for name, value in (batch if isinstance(batch, Mapping) else _pair(batch)).items()}


def _pair(batch: Batch) -> dict[str, object]:
    return dict(zip(("x", "y"), batch, strict=False)) if isinstance(batch, list | tuple) else {"batch": batch}


def _leaves(name: str, batch: Batch) -> Iterator[tuple[str, object]]:
    """Yield the path and the value of each leaf in nested dicts, lists and tuples."""
    if isinstance(batch, Mapping):
        parts: list[tuple[object, object]] = [*batch.items()]
    elif type(batch) in (list, tuple) and len(batch):
        parts = [*enumerate(batch)]
    else:
        yield name or "batch", batch
        return
    for key, value in parts:
        yield from _leaves(f"{name}.{key}" if name else str(key), value)


def _described(value: object) -> str:
    """Return a description of a value's type, with the shape of a tensor or the item types of a list or tuple."""
    if isinstance(value, Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    inner = {type(item).__name__ for item in value} if type(value) in (list, tuple) else set()  # type: ignore[attr-defined]
    items = f" with items of type {' or '.join(sorted(inner))}" if inner else ""
    return f"{_kind_of(value)}{items}"


def _kind_of(value: object) -> str:
    """Return a type name with an article, such as "a dict". For a list or tuple, also return its length."""
    name = type(value).__name__
    length = f" of length {len(value)}" if isinstance(value, list | tuple) else ""
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}{length}"
