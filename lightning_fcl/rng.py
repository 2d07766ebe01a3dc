"""Randomness that depends on nothing but its key: the same on every machine, in every order of clients."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
"""Keys of a counter-based generator: what `numbers` draws depends on its key and counter alone."""

_STEP = np.uint64(0x9E3779B97F4A7C15)


def global_seed() -> int:
    """The seed of `lightning.seed_everything`; 0 where it was not called."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def derive_seed(seed: int, *key_parts: str | int) -> int:
    """A seed that depends on nothing but its arguments: the same on every machine, in every order of clients."""
    digest = hashlib.sha256("\x1f".join(map(str, (seed, *key_parts))).encode()).digest()
    return int.from_bytes(digest[:7], "little")


def seed_all(seed: int, *key_parts: str | int) -> None:
    """Make all random numbers from here on depend on the arguments alone: torch's, numpy's and Python's."""
    value = derive_seed(seed, *key_parts)
    # Not `torch.manual_seed`: where a GPU is not in use, it records a stack trace for each kind, a millisecond in all.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(value)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(value)
    np.random.seed(value % 2**32)
    random.seed(value)


def make_client_keys(seed: int, clients: Sequence[str], *key_parts: str | int) -> Keys:
    """A key for each client that depends on the arguments and on the client's own name alone, shape (clients,)."""
    return derive_keys(np.fromiter(map(_remembered, clients), dtype=np.uint64, count=len(clients)), seed, *key_parts)


def hash_names(clients: Sequence[str]) -> Keys:
    """A number of each client's name, shape (clients,): what `make_client_keys` adds to its other arguments."""
    return np.fromiter(map(_name_key, clients), dtype=np.uint64, count=len(clients))


def derive_keys(names: Keys, seed: int, *key_parts: str | int) -> Keys:
    """`make_client_keys` for clients whose `hash_names` are known."""
    return _mixed(names + np.uint64(derive_seed(seed, *key_parts)))


def random_uint64(keys: Keys, num_values: int, start: int = 0) -> Keys:
    """The numbers ``start``, ... of each key's generator, 64 random bits each (SplitMix64), shape (keys, count)."""
    counter = np.arange(start + 1, start + num_values + 1, dtype=np.uint64) * _STEP
    return _mixed(keys[:, None] + counter)


def _name_key(client: str) -> int:
    return int.from_bytes(hashlib.sha256(client.encode()).digest()[:8], "little")


_remembered = lru_cache(maxsize=2**20)(_name_key)


def _mixed(value: Keys) -> Keys:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014): every bit of the result depends on every bit."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
