"""Entries that clients download only once, see `lightning_fcl.federation.reductions.Reduction.once`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.record import RoundRecord
from lightning_fcl.federation.reductions import Reduction


class SentOnce:
    """The entries that each client downloads only once, and the clients that have received them.

    Example:
        >>> import torch
        >>> once = SentOnce()
        >>> once.sizes = {"before": 8}
        >>> once.note(RoundRecord(download_bytes={"a": 8}))
        >>> once.missing_bytes("a"), once.missing_bytes("b"), once.kept_bytes("a")
        (0, 8, 8)
    """

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.received: dict[str, tuple[str, ...]] = {}
        self.derived: set[str] = set()

    def begin_round(
        self, extra: Mapping[str, tuple[Tensor, object]], state: State, reductions: Mapping[str, Reduction]
    ) -> None:
        """Find the extra entries that clients download only once and that still have the initial value.

        These entries are not sent, because clients compute the initial values from the downloaded model.
        """
        constant_names = [name for name in extra if reductions[name].once]
        self.derived = {name for name in constant_names if torch.equal(extra[name][0], state[name])}

    def offer(self, download_state: State, reductions: Mapping[str, Reduction]) -> State:
        """Store the sizes of the entries that each client downloads only once. Return the other entries."""
        self.sizes = {name: value.nbytes for name, value in download_state.items() if reductions[name].once}
        return {name: value for name, value in download_state.items() if name not in self.sizes}

    def received_names(self, client: str) -> list[str]:
        """Return the names of the entries that a client has received and keeps."""
        return [name for name in self.received.get(client, ()) if name in self.sizes]

    def missing(self, client: str) -> list[str]:
        """Return the names of the entries that still have to be sent to a client."""
        return [name for name in self.sizes.keys() - self.derived if name not in self.received.get(client, ())]

    def missing_bytes(self, client: str) -> int:
        """Return the size in bytes of the entries that still have to be sent to a client."""
        return sum(self.sizes[name] for name in self.missing(client))

    def kept_bytes(self, client: str) -> int:
        """Return the size in bytes of the entries that a client has received and keeps."""
        return sum(self.sizes[name] for name in self.received_names(client))

    def note(self, record: RoundRecord) -> None:
        """Record that each client with a download in a round has the entries, except clients with dropped uploads."""
        if self.sizes:
            recipients = record.download_bytes.keys() - record.dropped.keys()
            self.received = {**self.received, **dict.fromkeys(recipients, tuple(self.sizes))}

    def forget(self, client: str) -> None:
        """Record that a client has none of the entries, because its answer did not arrive.

        The client receives the entries again in its next round.
        """
        self.received.pop(client, None)


def kept_once(client_tensors: Mapping[str, Tensor], reductions: Mapping[str, Reduction]) -> State:
    """Return the tensors of a client that have a reduction with ``once``. The client keeps these tensors."""
    return {name: value for name, value in client_tensors.items() if name in reductions and reductions[name].once}
