"""Randomness that depends on nothing but its key: the same on every machine, in every order of clients."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def seed_of(seed: int, *parts: str | int) -> int:
    """A seed that depends on nothing but its arguments: the same on every machine, in every order of clients.

    Example:
        >>> seed_of(0, "client1", 3) == seed_of(0, "client1", 3) != seed_of(0, "client1", 4)
        True
    """
    digest = hashlib.sha256("\x1f".join(map(str, (seed, *parts))).encode()).digest()
    return int.from_bytes(digest[:7], "little")


def start_randomness(seed: int, *parts: str | int) -> None:
    """Make all random numbers from here on depend on the arguments alone: torch's, numpy's and Python's."""
    value = seed_of(seed, *parts)
    # Not `torch.manual_seed`: where a GPU is not in use, it records a stack trace for each kind, a millisecond in all.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(value)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(value)
    np.random.seed(value % 2**32)
    random.seed(value)
