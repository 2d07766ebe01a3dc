"""Imports of Lightning and of what a fit needs, without garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def fast_imports() -> Iterator[None]:
    """Temporarily switch garbage collection off, for the import of thousands of modules.

    Importing allocates many objects that stay. The collector traverses them again and again and frees next to nothing.
    `lightning_fcl.runs.federated_cli` takes 9.4 s of processor time without collection and 11.9 s with it (median of
    4 runs each, Python 3.11).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
