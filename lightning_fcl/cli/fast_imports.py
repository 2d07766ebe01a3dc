"""Faster imports of Lightning and other large packages, without garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def fast_imports() -> Iterator[None]:
    """Temporarily disable garbage collection, for the import of thousands of modules.

    Imports allocate many objects that are never freed, and the garbage collector traverses them repeatedly. Importing
    `lightning_fcl.runs.federated_cli` takes 9.4 s of processor time without garbage collection and 11.9 s with garbage
    collection (median of 4 runs each, Python 3.11).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
