"""Random generators that a dataset's code uses: found once, seeded for each read, and restored afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_fcl.data.reachable import reachable
from lightning_fcl.rng import derive_seed
from lightning_fcl.snapshot_values import ValueKind, find_kind

# The global generators. `BatchRequest.load` seeds and restores them.
_GLOBAL: tuple[object, ...] = (np.random.get_state.__self__, random.random.__self__, torch.default_generator)  # type: ignore[attr-defined]


class _Found(NamedTuple):
    path: str
    generator: Any
    kind: ValueKind


class Generators:
    """The random generators in datasets and in `collate_fn`: found once, and seeded for each read.

    Generators of NumPy, Python and torch are found in attributes, containers, closures, class attributes and globals
    that the code uses. A pickled copy of this object repeats the search.

    Example:
        >>> transform = {"noise": np.random.default_rng(7)}
        >>> generators = Generators()
        >>> with generators.seeded({"": transform}, seed=0):
        ...     drawn = transform["noise"].integers(1000)
        >>> with generators.seeded({"": transform}, seed=0):
        ...     bool(transform["noise"].integers(1000) == drawn)
        True
        >>> bool(transform["noise"].integers(1000) == np.random.default_rng(7).integers(1000))
        True
    """

    def __init__(self) -> None:
        # The key is the id of an object. The object is kept so that no other object gets the same id.
        self._found: dict[int, tuple[object, list[_Found]]] = {}

    def __reduce__(self) -> tuple[type[Generators], tuple[()]]:
        return Generators, ()

    def of(self, root: object) -> list[_Found]:
        """Return the generators that code can reach from an object, without the global generators."""
        if id(root) not in self._found:
            self._found[id(root)] = root, list(_generators_in(root))
        return self._found[id(root)][1]

    def seeded(self, roots: Mapping[str, object], seed: int) -> AbstractContextManager[None]:
        """Temporarily seed each generator that the given objects can reach, except the global generators.

        The seed of a generator depends on ``seed``, on the key of the object and on the path to the generator.

        Args:
            roots: The objects by name.
            seed: Seed from which the seeds of the generators are derived.
        """
        generators: dict[int, tuple[str, _Found]] = {}
        for name, root in roots.items():
            for entry in self.of(root):
                generators.setdefault(id(entry.generator), (name, entry))
        return _seeded([*generators.values()], seed) if generators else nullcontext()

    def forget(self) -> None:
        """Discard the found generators, so that the next read searches for them again."""
        self._found.clear()


@contextmanager
def _seeded(generators: Sequence[tuple[str, _Found]], seed: int) -> Iterator[None]:
    previous_states = [(found, found.kind.read(found.generator)) for _, found in generators]
    try:
        for name, entry in generators:
            assert entry.kind.seed is not None
            entry.kind.seed(entry.generator, derive_seed(seed, name, entry.path))
        yield
    finally:
        for entry, state in previous_states:
            entry.kind.write(entry.generator, state)


def _generators_in(root: object) -> Iterator[_Found]:
    for path, value, _ in reachable({"": root}):
        kind = find_kind(value)
        if kind is None or kind.seed is None or not kind.can_change(value):
            continue
        if all(value is not generator for generator in _GLOBAL):
            yield _Found(path, value, kind)
