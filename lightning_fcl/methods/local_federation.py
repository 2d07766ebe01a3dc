"""State of the one-client federation in which a plain Trainer trains with methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_fcl.data.loader_stream import CLIENT
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.client_store import PROGRESS, ClientStore, StateSection
from lightning_fcl.federation.server import FederatedServer


class LocalFederation:
    """State that methods keep between epochs and fits of a plain Trainer: the state of one client and one server.

    The server contains only the state of the methods. The model stays in the module, and is not aggregated.

    Attributes:
        server: The server. Its client store contains the state of the client.
        client: Name of the client.
        fits: Number of fits that have ended.

    Example:
        >>> local = LocalFederation()
        >>> local.memory("EWC"), local.fits
        ({}, 0)
    """

    def __init__(self) -> None:
        self.server = FederatedServer(ClientStore(), client_weights="uniform")
        self.client = CLIENT
        self.fits = 0
        # Whether the latest fit has ended and no other fit has started since.
        self._has_ended = False

    def memory(self, section: str) -> StateSection:
        """Return the client state of a method by the name of its section."""
        return self.server.client_store.get_section(self.client, section)

    def entries(self, section: str) -> State:
        """Return the server state of a method by the name of its section."""
        return self.server.get_section(section)

    def adopt(self, other: LocalFederation, section: str) -> None:
        """Copy the state of a method from ``other``, the state of another Trainer that has trained with the method."""
        if memory := other.memory(section):
            self.server.client_store.set_section(self.client, section, dict(memory))
        self.server.extra_tensors |= {f"{section}.{name}": value for name, value in other.entries(section).items()}
        self.fits = max(self.fits, other.fits)
        self._has_ended = self._has_ended or other._has_ended

    def enter_round(self, client: str, round_idx: int) -> bool:
        """Start a round of a client. Return whether the round is the first of a fit that follows an ended fit."""
        store = self.server.client_store
        if client != self.client:
            store[client] = store[self.client]
            store.delete(self.client)
            self.client = client
        enters = round_idx == 0 and self._has_ended
        if enters:
            sections = {name: memory for name, memory in store[client].items() if "/" not in name and name != PROGRESS}
            store[client] = {
                section: {name: value for name, value in memory.items() if name != "experience"}
                for section, memory in sections.items()
            }
            self.server.accepted.clear()
        self._has_ended = False
        return enters

    def end_fit(self) -> None:
        """Record that a fit has ended."""
        self.fits += 1
        self._has_ended = True

    def state_dict(self) -> dict[str, Any]:
        return {"server": self.server.state_dict(), "client": self.client, "fits": self.fits, "ended": self._has_ended}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.server.load_state_dict(state["server"])
        self.client, self.fits, self._has_ended = str(state["client"]), int(state["fits"]), bool(state["ended"])
