"""Random number generators that a callable holds: found, seeded for one use, and restored."""

from __future__ import annotations

import inspect
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_fcl.randomness import seed_of, start_randomness

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random

_EMPTY = (type(None), int, float, str, bytes, range, type, types.ModuleType, torch.Tensor, np.ndarray)
"""Types whose values hold no generator."""


@contextmanager
def seeded(held_by: object, seed: int, *parts: str | int) -> Iterator[None]:
    """Temporarily seed the global generators, and those that an object holds, by the arguments alone.

    Example:
        >>> flip = np.random.default_rng(0).random
        >>> drawn = []
        >>> for _ in range(2):
        ...     with seeded(flip, 7, "client-1"):
        ...         drawn.append((flip(), torch.rand(()).item()))
        >>> drawn[0] == drawn[1], flip() == np.random.default_rng(0).random()
        (True, True)
    """
    restores = []
    with isolate_rng(include_cuda=torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        start_randomness(seed, *parts)
        try:
            for number, generator in enumerate(held_generators(held_by)):
                restores.append(_seed(generator, seed_of(seed, *parts, "held generator", number)))
            yield
        finally:
            for restore in restores:
                restore()


def held_generators(value: object) -> list[Generator]:
    """Return the generators that an object holds, in a fixed order.

    The search covers attributes, containers, closures, and the globals that functions use.
    """
    found: list[Generator] = []
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Generator):
            if one is not torch.default_generator:  # seeded with the global ones
                found.append(one)
        else:
            waiting += reversed(_parts(one))
    return found


def _parts(value: object) -> list[object]:
    """Return the objects that a value holds directly and that can hold or be a generator."""
    if isinstance(value, _EMPTY):
        return []
    if isinstance(value, types.FunctionType):
        used = inspect.getclosurevars(value)
        return [
            *used.nonlocals.values(),
            *(value.__defaults__ or ()),
            *filter(partial(_is_near, value), used.globals.values()),
        ]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.BuiltinMethodType):
        return [value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, Mapping):
        return [*value.values()]
    if isinstance(value, Sequence):
        return [*value]
    held = [*vars(value).values()] if hasattr(value, "__dict__") else []
    return [*held, type(value).__call__] if callable(value) else held


def _is_near(function: types.FunctionType, value: object) -> bool:
    """Return whether a global that a function uses is a generator, or a function of the same module."""
    if isinstance(value, types.FunctionType):
        return value.__module__ == function.__module__
    return isinstance(value, Generator)


def _seed(generator: Generator, seed: int) -> Callable[[], object]:
    """Seed a generator, and return a function that restores its state."""
    if isinstance(generator, torch.Generator):
        torch_state = generator.get_state()
        generator.manual_seed(seed)
        return partial(generator.set_state, torch_state)
    if isinstance(generator, random.Random):
        python_state = generator.getstate()
        generator.seed(seed)
        return partial(generator.setstate, python_state)
    if isinstance(generator, np.random.RandomState):
        legacy_state = generator.get_state()
        generator.seed(seed % 2**32)
        return partial(generator.set_state, legacy_state)
    bits = generator.bit_generator
    numpy_state = bits.state
    bits.state = type(bits)(seed).state
    return partial(setattr, bits, "state", numpy_state)
