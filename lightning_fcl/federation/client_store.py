"""Client states between rounds, in memory or on disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lightning_fcl.data.plain_tensors import plain_tensor
from lightning_fcl.errors import DamagedFileError, DiskFullError, InvalidValueError
from lightning_fcl.federation.ranks import Ranks
from lightning_fcl.io.atomic import TemporaryFolder, disk_error_context, sync_files, write_atomic
from lightning_fcl.io.paths import safe_join
from lightning_fcl.io.reading import check, regular_file

StateSection = dict[str, Tensor]
"""One part of a client's state, such as the state of one method, of the model or of the optimizer: tensors by name."""

ClientState = dict[str, StateSection]
"""State of one client between rounds: a `StateSection` by section name (``model``, ``optimizer``, a method, ...)."""

RESIDUAL_SECTION = "unsent"
"""Section with the entries that a client could not send, because it missed a synchronization."""

PROGRESS = "progress"
"""Section with the rounds in which a client has trained, and with the experience of its latest round."""

WITHIN, SENT, SENDING = "/within", "/sent", "/sending"
"""Suffixes of section names. These sections contain a method's state during the current experience.

If a method computes a result for an experience, section ``NAME`` contains this result. ``NAME/within`` contains the
state before the result, from which the client continues in further rounds of the same experience.

``SENT``: the contribution of the client's accepted uploads to the sums of the experience. ``SENDING``: this
contribution including the latest upload. ``SENDING`` replaces ``SENT`` if the server accepted the latest upload.
"""

RESULT = "result."
"""Prefix of entry names in ``PROGRESS``. ``result.NAME`` marks that section ``NAME`` contains a method's result."""

_SUFFIX = ".safetensors"
# Suffix of entry names. It marks images that are stored as uint8 pixels.
_MARK = "|uint8"


@dataclass(frozen=True)
class PixelEncoding:
    """A conversion of normalized images to uint8 pixels and back to identical numbers.

    Pixels need a quarter of the memory of single-precision numbers. Tensors of a different shape or dtype are stored
    unchanged. Images are also stored unchanged if the conversion back would not return identical numbers.

    Args:
        mean: Mean of the pixels (from 0 to 255), used for normalization.
        std: Standard deviation of the pixels (from 0 to 255), used for normalization.
        shape: Shape of one image.
    """

    mean: Tensor
    std: Tensor
    shape: tuple[int, ...]

    def pack(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        packed = {}
        for name, value in values.items():
            images = bool(self.shape) and tuple(value.shape[1:]) == self.shape and len(value) > 0
            if images and value.dtype == self.mean.dtype:
                levels = (value * self.std.to(value.device) + self.mean.to(value.device)).round().clamp(0, 255)
                stored = levels.nan_to_num().to(torch.uint8)
                if torch.equal(self._normalised(stored), value):
                    name, value = name + _MARK, stored
            packed[name] = value
        return packed

    def unpack(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name.removesuffix(_MARK): self._normalised(value) if name.endswith(_MARK) else value
            for name, value in values.items()
        }

    def _normalised(self, stored: Tensor) -> Tensor:
        return (stored - self.mean.to(stored.device)) / self.std.to(stored.device)


class ClientStore:
    """A store of every client's state between rounds, in memory or in one safetensors file per client.

    Each file is written atomically and has a checksum. A file whose checksum does not match its content is rejected.
    Tensors of a subclass of `torch.Tensor` are stored as plain tensors, without their attributes.

    Args:
        kind: ``"memory"``, or ``"disk"`` for files.
        folder: Folder of the files. `sync` and `commit_round` flush the files to the disk, which protects them from a
            power failure. Default: a temporary folder, which is never flushed. The folder is deleted when the store is
            deleted or the process ends.
    """

    def __init__(self, kind: Literal["memory", "disk"] = "memory", folder: str | Path | None = None) -> None:
        if kind not in ("memory", "disk"):
            raise InvalidValueError(
                f'Expected `client_store` to be "memory" or "disk", but got `{kind}`.', argument="client_store"
            )
        self._states: dict[str, ClientState] = {}
        self._pixels: PixelEncoding | None = None
        self._first = True
        # For each client whose state the current round has changed: the state before the round, or None if there was no
        # state. For a store on disk, {} means that a backup file contains this state. Outside a round, the whole
        # attribute is None.
        self._before: dict[str, ClientState | None] | None = None
        self._folder: Path | None = None
        self._lasting, self._written = folder is not None, set[Path]()
        if kind == "disk":
            if folder is None:
                self._temporary = TemporaryFolder("clients")
                folder = self._temporary.path
            self._folder = Path(folder)
            with disk_error_context(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)

    def store_as_uint8(self, scale: tuple[Tensor, Tensor, tuple[int, ...]] | None) -> None:
        """Store images in client states as uint8 pixels (see `PixelEncoding`). Stored states are converted too.

        Args:
            scale: Mean and standard deviation of the pixels, and shape of one image. None: store images unchanged.
        """
        states = {client: self[client] for client in self} if self._first and (scale or self._pixels) else {}
        self._pixels = PixelEncoding(*scale) if scale else None
        for client, state in states.items():
            self[client] = state

    def __getitem__(self, client: str) -> ClientState:
        state, pixels = self._read(client), self._pixels
        return state if pixels is None else {section: pixels.unpack(memory) for section, memory in state.items()}

    def __setitem__(self, client: str, state: ClientState) -> None:
        pixels = self._pixels
        state = {
            section: {name: plain_tensor(value) for name, value in memory.items()} for section, memory in state.items()
        }
        packed = state if pixels is None else {section: pixels.pack(memory) for section, memory in state.items()}
        self._set_aside(client)
        if self._folder is None:
            self._states[client] = packed
            return
        flat = {
            f"{section}\x1f{name}": tensor.detach().cpu().contiguous().clone()
            for section, memory in packed.items()
            for name, tensor in memory.items()
        }
        content = save(flat, {"checksum": _checksum(client, flat)})
        try:
            self._written.add(write_atomic(self._path(client), content, sync=False))
        except DiskFullError as error:
            # Only temporary folders depend on TMPDIR and can be replaced by a store in memory.
            if self._lasting:
                raise
            raise DiskFullError(
                f"{error} Alternatively, set the environment variable TMPDIR to a folder on a larger disk, or keep "
                'client states in memory: client_store="memory".'
            ) from error

    def _read(self, client: str) -> ClientState:
        if self._folder is None:
            return self._states.get(client, {})
        path, state = self._path(client), ClientState()
        if not path.exists():
            return state
        try:
            with safe_open(regular_file(path), "pt") as file:
                metadata: Mapping[str, str] = file.metadata() or {}
                # Copy the tensors. With memory-mapped tensors, products may round differently, and empty tensors of
                # several types share an address, which `torch.save` rejects.
                flat = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            check(metadata.get("checksum") == _checksum(client, flat), "its checksum does not match")
        except (SafetensorError, OSError, ValueError) as error:
            raise DamagedFileError(
                f"Expected the unchanged state of client {client} in {path}, but reading it failed: {error}.",
                hint="Resume from the newest checkpoint, which contains the states of all clients.",
                value=path,
            ) from error
        for key, tensor in flat.items():
            section, name = key.split("\x1f")
            state.setdefault(section, {})[name] = tensor
        return state

    def start_round(self) -> None:
        """Start a round. Until the round ends, `roll_back_round` can undo changes of client states."""
        self.commit_round()
        self._before = {}

    def sync(self) -> None:
        """Flush the files that were written since the last call to the disk, for protection from a power failure.

        Files in a temporary folder are not flushed.
        """
        if self._lasting:
            sync_files(self._written)
        self._written.clear()

    def commit_round(self) -> None:
        """End the round and keep its client states. The round cannot be rolled back anymore."""
        self.sync()
        for client, previous_state in (self._before or {}).items():
            if previous_state is not None and self._folder is not None:
                self._backup_path(client).unlink(missing_ok=True)
        self._before = None

    def roll_back_round(self) -> None:
        """Restore the client states from before the round."""
        previous_states, self._before = self._before or {}, None
        for client, previous_state in previous_states.items():
            if previous_state is None:
                self.delete(client)
            elif self._folder is None:
                self._states[client] = previous_state
            else:
                os.replace(self._backup_path(client), self._path(client))

    def _set_aside(self, client: str) -> None:
        """Back up a client's state before it changes for the first time in a round."""
        if self._before is None or client in self._before:
            return
        if self._folder is None:
            self._before[client] = self._states.get(client)
            return
        has_file = self._path(client).exists()
        if has_file:
            os.replace(self._path(client), self._backup_path(client))
        self._before[client] = {} if has_file else None

    def _backup_path(self, client: str) -> Path:
        return self._path(client).with_suffix(".before")

    def get_section(self, client: str, section: str) -> StateSection:
        """Return a section of a client's state, or {} if it is missing. A method's section is named like its class."""
        return self[client].get(section, {})

    def set_section(self, client: str, section: str, values: StateSection) -> None:
        self[client] = {**self[client], section: values}

    def __iter__(self) -> Iterator[str]:
        if self._folder is None:
            yield from self._states
        else:
            names = sorted(path.name for path in self._folder.glob(f"*{_SUFFIX}"))
            yield from (unquote(name.removesuffix(_SUFFIX)) for name in names)

    def nbytes(self, client: str) -> int:
        """Return the number of bytes of a client's state in the store."""
        return sum(value.nbytes for memory in self._read(client).values() for value in memory.values())

    @property
    def is_in_memory(self) -> bool:
        """Whether the states are in memory, where other processes cannot read them."""
        return self._folder is None

    def share_folder(self, ranks: Ranks) -> None:
        """Make the stores of all ranks use the folder of rank 0. A store in memory does not change.

        Afterwards, only rank 0 changes files in `replace_all` and `store_as_uint8`, because all ranks share the files.
        """
        self._folder = ranks.all_gather_object(self._folder)[0]
        self._first = self.is_in_memory or ranks.rank == 0

    def delete(self, client: str) -> None:
        self._states.pop(client, None)
        if self._folder is not None:
            self._path(client).unlink(missing_ok=True)

    def replace_all(self, states: Mapping[str, ClientState]) -> None:
        """Replace the states of all clients. If ranks share a folder, only rank 0 writes the files."""
        if not isinstance(states, Mapping) or not all(
            isinstance(own, Mapping) and all(isinstance(section, Mapping) for section in own.values())
            for own in states.values()
        ):
            raise InvalidValueError(
                "Expected `clients` of the checkpoint to map each client to sections of tensors, but got "
                f"{states!r:.200}.",
                hint="Resume from another checkpoint.",
                argument="clients",
                value=states,
            )
        if self._first:
            for client in list(self):
                self.delete(client)
            for client, state in states.items():
                self[client] = state

    def _path(self, client: str) -> Path:
        assert self._folder is not None
        return safe_join(self._folder, f"{quote(client, safe='')}{_SUFFIX}")


def trained_rounds(client_state: ClientState) -> list[int]:
    """Return the rounds in which a client has trained, ascending. Return [] if the state contains no rounds."""
    return client_state[PROGRESS]["rounds"].tolist() if PROGRESS in client_state else []


def with_progress(client_state: ClientState, round_idx: int, experience: int) -> StateSection:
    """Return a client's progress section with one more round and with the experience of this round."""
    rounds = torch.tensor([round_idx])
    if PROGRESS in client_state:
        rounds = torch.cat([client_state[PROGRESS]["rounds"], rounds])
    return {"rounds": rounds, "experience": torch.tensor(experience)}


def has_result(client_state: ClientState, section: str) -> bool:
    """Return whether a method's section contains the method's result for the client's latest experience."""
    return RESULT + section in client_state.get(PROGRESS, {})


def enter_round(client_state: ClientState, experience: int, accepted: int) -> ClientState:
    """Return a client's state at the start of a round.

    A method can have two states: the result for an experience (section ``NAME``), and the state before the result was
    computed (section ``NAME/within``). In another round of the same experience, section ``NAME`` is set to the state
    before the result. In a new experience, section ``NAME`` keeps the result, and ``NAME/within`` is removed. In
    another round of the same experience, ``NAME/sent`` is set to ``NAME/sending`` if the server accepted the latest
    upload.

    Args:
        client_state: The client's stored state.
        experience: The client's experience in the round.
        accepted: The latest round in which the server accepted an upload of the client. -1 if no upload was accepted.

    Example:
        >>> progress = {**with_progress({}, round_idx=3, experience=1), "result.EWC": torch.tensor(True)}
        >>> kept = {"EWC": {"importance": torch.ones(1)}, "progress": progress}
        >>> enter_round(kept, experience=1, accepted=3)["EWC"], enter_round(kept, experience=2, accepted=3)["EWC"]
        ({}, {'importance': tensor([1.])})
    """
    if PROGRESS not in client_state:
        return client_state
    plain = {section: memory for section, memory in client_state.items() if "/" not in section}
    if int(client_state[PROGRESS]["experience"]) != experience:
        return plain
    # A store need not keep empty sections, so a section with an empty result can be missing.
    before_result = {
        section.removesuffix(WITHIN): memory for section, memory in client_state.items() if section.endswith(WITHIN)
    }
    state = {s: {} if has_result(client_state, s) else memory for s, memory in plain.items()} | before_result
    arrived = int(client_state[PROGRESS]["rounds"][-1]) == accepted
    for section in (section for section in client_state if section.endswith((SENT, SENDING))):
        name = section.split("/")[0]
        latest = client_state.get(name + SENDING) if arrived else None
        if (memory := latest if latest is not None else client_state.get(name + SENT)) is not None:
            state[name + SENT] = memory
    return state


def local_tensors(client_state: ClientState, device: torch.device) -> StateSection:
    """Return the tensors that a client uses in place of the server's tensors.

    These tensors are the client-local entries, and the entries that the client could not upload.

    Example:
        >>> local_tensors({"model": {"head": torch.ones(1)}}, torch.device("cpu"))
        {'head': tensor([1.])}
    """
    return {
        name: value.to(device)
        for part in ("model", RESIDUAL_SECTION)
        for name, value in client_state.get(part, {}).items()
    }


def _checksum(client: str, tensors: Mapping[str, Tensor]) -> str:
    """Return a checksum of a client's name and of the names, dtypes, shapes and values of the client's tensors."""
    digest = hashlib.sha256(client.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\x1e{name}\x1f{tensor.dtype}\x1f{tuple(tensor.shape)}\x1f".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
