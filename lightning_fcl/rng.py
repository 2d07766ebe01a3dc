"""Random numbers that depend only on a key. They do not depend on the machine or on the order of clients."""

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
"""Keys of a counter-based generator. A random number depends only on its key and its counter."""

_STEP = np.uint64(0x9E3779B97F4A7C15)


def global_seed() -> int:
    """Return the seed of `lightning.seed_everything`, or 0 if no seed was set."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def derive_seed(seed: int, *key_parts: str | int) -> int:
    """Return a seed that depends only on the arguments, and not on the machine or on the order of clients."""
    digest = hashlib.sha256("\x1f".join(map(str, (seed, *key_parts))).encode()).digest()
    return int.from_bytes(digest[:7], "little")


def seed_all(seed: int, *key_parts: str | int) -> None:
    """Seed the global random generators of torch, NumPy and Python. The seed depends only on the arguments."""
    value = derive_seed(seed, *key_parts)
    # `torch.manual_seed` is slower. For each kind of GPU that is not in use, it records a stack trace. In total, this
    # takes about 1 ms.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(value)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(value)
    np.random.seed(value % 2**32)
    random.seed(value)


def make_client_keys(seed: int, clients: Sequence[str], *key_parts: str | int) -> Keys:
    """Return a key for each client, shape (clients,). A key depends only on the name, ``seed`` and ``key_parts``."""
    return derive_keys(np.fromiter(map(_remembered, clients), dtype=np.uint64, count=len(clients)), seed, *key_parts)


def hash_names(clients: Sequence[str]) -> Keys:
    """Return a hash of each client's name, shape (clients,), for `derive_keys`."""
    return np.fromiter(map(_name_key, clients), dtype=np.uint64, count=len(clients))


def derive_keys(names: Keys, seed: int, *key_parts: str | int) -> Keys:
    """Return the same keys as `make_client_keys`. ``names`` is the result of `hash_names` for the clients."""
    return _mixed(names + np.uint64(derive_seed(seed, *key_parts)))


def random_uint64(keys: Keys, num_values: int, start: int = 0) -> Keys:
    """Return consecutive random 64-bit numbers of a SplitMix64 generator for each key, shape (keys, num_values).

    Args:
        keys: One key per generator.
        num_values: Number of random numbers per key.
        start: Index of the first random number.
    """
    counter = np.arange(start + 1, start + num_values + 1, dtype=np.uint64) * _STEP
    return _mixed(keys[:, None] + counter)


def _name_key(client: str) -> int:
    return int.from_bytes(hashlib.sha256(client.encode()).digest()[:8], "little")


_remembered = lru_cache(maxsize=2**20)(_name_key)


def _mixed(value: Keys) -> Keys:
    """Apply the finalizer of SplitMix64 (Steele, Lea and Flood, 2014): each output bit depends on all input bits."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
