"""What the federation knows about its clients: whose turn it is, and what each keeps between rounds."""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Memory = dict[str, Tensor]
"""What one method (or the model, or the optimizer) keeps for one client: a flat dict of tensors."""

ClientState = dict[str, Memory]
"""All that one client keeps between rounds: one `Memory` per section (``model``, ``optimizer``, each method)."""

_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Turn:
    """One client's part in one round: what a method may know about it.

    Args:
        client: The client's id.
        round: Round, from 0.
        experience: The client's experience in this round, from 0.
        labels: Labels of the client's samples in this round, shape (n,); empty where labels are unknown.
        num_classes: Number of classes of the whole stream; 0 where unknown.
        last_round: Whether this is the last round of the client's experience.
        samples: Number of samples of this round.
        stream_samples: Number of the client's samples in the whole stream; 0 where unknown.
        rehearsed: Number of remembered samples that join them.
        new_classes: Classes that any client of the federation learns in this round and none has learnt before.
        old_classes: Classes of all clients' earlier experiences. Both are empty where the stream is not of classes.
        block: All classes of the client's current task, ascending, to which a task-incremental method slices the
            logits; empty where all classes compete.
    """

    client: str
    round: int
    experience: int = 0
    labels: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    num_classes: int = 0
    last_round: bool = True
    samples: int = 0
    stream_samples: int = 0
    rehearsed: int = 0
    new_classes: tuple[int, ...] = ()
    old_classes: tuple[int, ...] = ()
    block: tuple[int, ...] = ()

    @property
    def balanced(self) -> bool:
        """Whether all classes are there, the rarest at least half as often as the most frequent."""
        if not self.num_classes or not len(self.labels):
            return False
        counts = torch.bincount(self.labels, minlength=self.num_classes)
        return bool(2 * counts.min() >= counts.max())


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


class ClientStore:
    """Keeps every client's state between rounds, in memory or in one safetensors file per client.

    Args:
        kind: ``"memory"`` or ``"disk"``.
        folder: Where ``"disk"`` writes; a temporary folder, removed at the end, where none is given.

    Example:
        >>> store = ClientStore()
        >>> store["client1"] = {"model": {"head.weight": torch.zeros(2)}}
        >>> store["client1"]["model"]["head.weight"]
        tensor([0., 0.])
        >>> store["never seen"]
        {}
    """

    def __init__(self, kind: Literal["memory", "disk"] = "memory", folder: str | Path | None = None) -> None:
        if kind not in ("memory", "disk"):
            raise ValueError(f'Expected `client_store` to be "memory" or "disk" but got `{kind}`.')
        self._states: dict[str, ClientState] = {}
        self._folder: Path | None = None
        if kind == "disk":
            if folder is None:
                self._temporary = tempfile.TemporaryDirectory(prefix="lightning-fcl-")
                folder = self._temporary.name
            self._folder = Path(folder)
            self._folder.mkdir(parents=True, exist_ok=True)

    def __getitem__(self, client: str) -> ClientState:
        if self._folder is None:
            return self._states.get(client, {})
        path = self._path(client)
        state: ClientState = {}
        for key, tensor in (load_file(path) if path.exists() else {}).items():
            section, name = key.split("\x1f")
            # A copy lies in memory as any tensor does: from where a file is mapped, products may round otherwise, and
            # empty tensors of several types share an address, which `torch.save` refuses.
            state.setdefault(section, {})[name] = tensor.clone()
        return state

    def __setitem__(self, client: str, state: ClientState) -> None:
        if self._folder is None:
            self._states[client] = state
            return
        flat = {f"{s}\x1f{name}": t.detach().contiguous() for s, memory in state.items() for name, t in memory.items()}
        path = self._path(client)
        temporary = path.with_suffix(".part")
        save_file({key: tensor.clone() for key, tensor in flat.items()}, temporary)
        os.replace(temporary, path)

    def __iter__(self) -> Iterator[str]:
        if self._folder is None:
            yield from self._states
        else:
            yield from (
                unquote(name.removesuffix(_SUFFIX)) for name in sorted(p.name for p in self._folder.glob(f"*{_SUFFIX}"))
            )

    def clear(self) -> None:
        """Forget every client."""
        self._states.clear()
        for path in self._folder.glob(f"*{_SUFFIX}") if self._folder is not None else ():
            path.unlink()

    def _path(self, client: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{quote(client, safe='')}{_SUFFIX}"
