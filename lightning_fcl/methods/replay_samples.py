"""Replay samples: added to a client's batches, or drawn for each step. A transform can change each sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_fcl.data.batching import index_nested, shuffled_window
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.collation import concat_nested, count_nested_samples
from lightning_fcl.data.generators import Generators
from lightning_fcl.data.plain_tensors import plain_samples, plain_tensor
from lightning_fcl.errors import InvalidTypeError, InvalidValueError
from lightning_fcl.methods.base import MethodBase, ReplaySamples, ReplayTransform, overrides_hook
from lightning_fcl.methods.context import Client, Step, is_labelled
from lightning_fcl.rng import Keys, derive_seed, make_client_keys, random_uint64, seed_all

ClientOf = Callable[[MethodBase, ClientRound], Client]
"""A function that returns the `Client` of a method before the client trains in a round."""


def joins_batches(method: MethodBase) -> bool:
    """Return whether a method's replay samples are added to the batches of its clients."""
    return overrides_hook(method, "replay_samples") and method.replay_batch_size is None


@dataclass(frozen=True)
class JoiningSamples:
    """Replay samples of one client that are added to the client's batches.

    Args:
        samples: The samples of all methods, concatenated in the order of the methods, in the structure of the batches.
        parts: For each method, the name of its section, its number of samples and its transform.
    """

    samples: Any = ()
    parts: tuple[tuple[str, int, ReplayTransform | None], ...] = ()

    def __len__(self) -> int:
        return count_nested_samples(self.samples)

    @property
    def is_transformed(self) -> bool:
        """Whether any samples have a transform."""
        return any(transform is not None for _, _, transform in self.parts)

    def take(self, rows: Tensor, seed: int, *key: str | int) -> Any:
        """Return selected samples after their transforms.

        The random numbers of a transform depend only on ``seed``, ``key`` and the name of the method's section.

        Args:
            rows: Indices of the samples, shape (n,).
            seed: Seed of the transforms.
            key: Additional parts of the seed.
        """
        samples, first = index_nested(self.samples, rows), 0
        for section, number, transform in self.parts:
            positions = torch.nonzero((rows >= first) & (rows < first + number)).flatten()
            first += number
            if transform is not None and len(positions):
                write_samples(
                    samples, positions, transformed(transform, index_nested(samples, positions), seed, section, *key)
                )
        return samples


def joining_samples(
    methods: Sequence[MethodBase], client_of: ClientOf
) -> Callable[[ClientRound], JoiningSamples] | None:
    """Return a function that returns the replay samples to add to a client's batches in a round.

    Returns None if no method adds replay samples to batches.
    """
    joining = [method for method in methods if joins_batches(method)]

    def samples_of(client_round: ClientRound) -> JoiningSamples:
        method_samples = [
            (method, samples)
            for method in joining
            if method.applies_to(client_round) and (samples := method.replay_samples(client_of(method, client_round)))
        ]
        if not method_samples:
            return JoiningSamples()
        parts = tuple(
            (method.section_name, count_nested_samples(samples), method.replay_transform)
            for method, samples in method_samples
        )
        return JoiningSamples(concat_nested([samples for _, samples in method_samples]), parts)

    return samples_of if joining else None


def join_batch(method: MethodBase, client: Client, batch_idx: int) -> None:
    """Add a method's replay samples to ``client.batch``, for a data loader that is not a `FederatedStream`.

    Each batch of n samples gets n replay samples, or all replay samples if there are fewer than n. No replay sample is
    repeated before all replay samples have been added once.
    """
    batch, trainer = client.batch, client.module.trainer
    if not (isinstance(batch, list) and is_labelled(batch)):
        raise InvalidTypeError(
            f"Expected a batch `[x, y]`, as from the default collate function, for `{type(method).__name__}`, but got "
            f"{type(batch).__name__}.",
            hint="Return a pair from your dataset, and use the default collate function.",
            argument="batch",
        )
    batch[:] = plain_samples(batch)
    samples = method.replay_samples(client)
    if not isinstance(samples, tuple):
        return
    number, epoch_key = count_nested_samples(samples), (client.client_round.experience_idx, trainer.current_epoch)
    size, seed = min(number, len(batch[1])), client.seed
    # The word "rehearse" is part of the seed of existing runs, so it must not change.
    key = make_client_keys(seed, ["local"], *epoch_key, method.section_name, "rehearse")
    rows = torch.from_numpy(shuffled_window(key, number, size, batch_idx * size))
    pool = JoiningSamples(samples, ((method.section_name, number, method.replay_transform),))
    for position, value in enumerate(pool.take(rows, seed, "local", *epoch_key, batch_idx)):
        batch[position] = torch.cat([batch[position], value.to(batch[position].device)])


class DrawnSamples:
    """Replay samples drawn with replacement for each step, for all methods with a `replay_batch_size`.

    Sequential and vectorized training use the same samples.

    Args:
        methods: The methods.
        clients: For each client, its `Client` for each method.
        keys: A function that returns the clients' random keys for the name of a method's section.
    """

    def __init__(
        self, methods: Sequence[MethodBase], clients: Sequence[Sequence[Client]], keys: Callable[[str], Keys]
    ) -> None:
        self.pools: dict[str, list[Mapping[str, Tensor]]] = {}
        self._keys: dict[str, Keys] = {}
        self._sizes: dict[str, int] = {}
        self._transforms: dict[str, ReplayTransform | None] = {}
        self._drawn: Counter[str] = Counter()
        for i, method in enumerate(methods):
            size, name = method.replay_batch_size, method.section_name
            if size is None or not overrides_hook(method, "replay_samples"):
                continue
            samples = [method.replay_samples(each[i]) for each in clients]
            self.pools[name] = [_named(one or {}) for one in samples]
            self._keys[name], self._sizes[name] = keys(name), size
            transform, are_pairs = method.replay_transform, any(isinstance(one, tuple) for one in samples)
            self._transforms[name] = (
                _make_input_transform(transform) if transform is not None and are_pairs else transform
            )

    def draw(self, section: str) -> list[dict[str, Tensor]]:
        """Return the replay samples of each client for its next step, by name. A client without samples gets {}."""
        pools, size, keys, step = self.pools[section], self._sizes[section], self._keys[section], self._drawn[section]
        counts = np.array([min((len(values) for values in pool.values()), default=0) for pool in pools])
        random_numbers = random_uint64(keys, size, start=step * size)
        self._drawn[section] += 1
        rows = torch.from_numpy((random_numbers % np.maximum(counts, 1).astype(np.uint64)[:, None]).astype(np.int64))
        client_samples = [
            {name: values[row.to(values.device)] for name, values in pool.items()} if count else {}
            for pool, row, count in zip(pools, rows, counts, strict=True)
        ]
        if (transform := self._transforms[section]) is None:
            return client_samples
        return [
            transformed(transform, one, int(key), section, step) if one else one
            for one, key in zip(client_samples, keys, strict=True)
        ]

    def step(self, method: MethodBase, step: Step) -> Step:
        """Return the step with the samples drawn for a method. Only for a `DrawnSamples` of exactly one client.

        The step does not change if the method draws no samples.
        """
        if method.section_name not in self.pools:
            return step
        (samples,) = self.draw(method.section_name)
        return replace(step, replay_samples=samples, replay_weight=float(bool(samples)))


def transformed(transform: ReplayTransform, samples: Any, seed: int, *key: str | int) -> Any:
    """Return replay samples after a transform of each sample. Random numbers depend only on ``seed`` and ``key``.

    The transform gets the input ``x`` of one sample of a pair, or the dict of one sample, without the batch dimension.

    Raises:
        ValueError: If the transform changes the shape, the dtype or the names of a sample.
    """
    if not isinstance(samples, Mapping):
        x, *rest = samples
        return [_transformed(transform, _make_input_transform(transform), {"x": x}, seed, *key)["x"], *rest]
    return _transformed(transform, transform, samples, seed, *key)


def _transformed(
    transform: ReplayTransform, of_dicts: ReplayTransform, samples: Mapping[str, Tensor], seed: int, *key: str | int
) -> dict[str, Tensor]:
    """Return samples by name after a transform, with the transform's own random generators seeded.

    ``of_dicts`` is the function that applies the transform to the dict of one sample.
    """
    rows = range(count_nested_samples(samples))
    with _seeded(transform, seed, "replay transform", *key), torch.no_grad():
        transformed_rows = [_checked(of_dicts, {name: value[row] for name, value in samples.items()}) for row in rows]
    return {name: torch.stack([plain_tensor(one[name]) for one in transformed_rows]) for name in samples}


def check_transform(transform: ReplayTransform, sample: Any) -> None:
    """Raise ValueError if a transform rejects a sample, or changes the sample's shape or dtype.

    Args:
        transform: The transform.
        sample: A batch of one sample: a pair or a dict.
    """
    try:
        transformed(transform, sample, 0)
    except _ChangedSampleError:
        raise
    except Exception as error:
        is_dict = isinstance(sample, Mapping)
        kind = f"a dict of {', '.join(sample)}" if is_dict else f"a tensor of shape {tuple(sample[0].shape[1:])}"
        raise InvalidValueError(
            f"Expected `transform` to accept a replay sample, which is {kind}, but it raised {type(error).__name__}: "
            f"{error}.",
            hint="Use a transform that accepts samples as the dataset returns them.",
            argument="transform",
        ) from error


class _ChangedSampleError(InvalidValueError):
    """Raised if the transform changes the shape, the dtype or the names of a sample."""


def _checked(transform: ReplayTransform, sample: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return a sample after a transform. Raise ValueError if the names, shapes or dtypes change."""
    expected = {name: (tuple(value.shape), value.dtype) for name, value in sample.items()}
    transformed_sample = transform(dict(sample))
    if not isinstance(transformed_sample, Mapping):
        raise _ChangedSampleError(
            f"Expected `transform` to return a dict, but got {type(transformed_sample).__name__}. "
            "Return the dict of the sample."
        )
    for name, (shape, dtype) in expected.items():
        value = transformed_sample.get(name)
        if isinstance(value, Tensor) and (tuple(value.shape), value.dtype) == (shape, dtype):
            continue
        kind_text = type(value).__name__ if name in transformed_sample else "a dict without this name"
        description = f"{tuple(value.shape)} and {value.dtype}" if isinstance(value, Tensor) else kind_text
        raise _ChangedSampleError(
            f"Expected `transform` to keep the shape and dtype of `{name}` in a replay sample, {shape} and {dtype}, "
            f"but got {description}. Move changes of shape or dtype into the dataset.",
            argument="transform",
            value=name,
        )
    return transformed_sample


def _make_input_transform(transform: ReplayTransform) -> ReplayTransform:
    """Return a function that applies a transform to the entry ``x`` of a dict, and keeps all other entries."""
    return lambda sample: {**sample, "x": transform(sample["x"])}


def _named(samples: ReplaySamples) -> Mapping[str, Tensor]:
    """Return samples by name. The names of a pair are ``x`` and ``y``."""
    return samples if isinstance(samples, Mapping) else dict(zip(("x", "y"), samples, strict=True))


def write_samples(batch: Any, positions: Tensor, samples: Any) -> None:
    """Overwrite the samples at some positions of a batch.

    Args:
        batch: The batch, changed in place.
        positions: Positions in the batch, shape (n,).
        samples: The n new samples, with the same nested structure as the batch.
    """
    if isinstance(batch, Mapping):
        for name, value in batch.items():
            write_samples(value, positions, samples[name])
    elif isinstance(batch, Tensor):
        batch[positions.to(batch.device)] = samples
    else:
        for value, new in zip(batch, samples, strict=True):
            write_samples(value, positions, new)


@contextmanager
def _seeded(transform: ReplayTransform, seed: int, *parts: str | int) -> Iterator[None]:
    """Temporarily seed the global random generators and the generators inside a transform."""
    with isolate_rng(include_cuda=torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        seed_all(seed, *parts)
        with Generators().seeded({"": transform}, derive_seed(seed, *parts)):
            yield
