"""What each client keeps between rounds, in memory or on disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote

from safetensors.torch import load_file, save_file
from torch import Tensor

Memory = dict[str, Tensor]
"""What one method (or the model, or the optimizer) keeps for one client: a flat dict of tensors."""

ClientState = dict[str, Memory]
"""All that one client keeps between rounds: one `Memory` per section (``model``, ``optimizer``, each method)."""

_SUFFIX = ".safetensors"


class ClientStore:
    """Keeps every client's state between rounds, in memory or in one safetensors file per client.

    Args:
        kind: ``"memory"`` or ``"disk"``.
        folder: Where ``"disk"`` writes; a temporary folder, removed at the end, where none is given.

    Example:
        >>> import torch
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
