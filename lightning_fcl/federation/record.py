"""The record of a round: which uploads were accepted, which were not and why, bytes, and times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_fcl.federation.ranks import Ranks


@dataclass
class RoundRecord:
    """What happened in one round: bytes per client on the wire, and who did not make it.

    Args:
        accepted: Clients whose upload was taken.
        upload_bytes: Bytes that each client sent.
        download_bytes: Bytes that each client received.
        dropped: Clients whose upload was refused, and why.
        no_data: Clients that were sampled but had no data, or too few samples to train on.
        missed_sync: Clients that trained but missed the synchronisation.
        diverged: Clients whose loss was not finite in some step, though all that they sent is.
        master: In a swarm, the client that brought the uploads together.
        late_clients: In a rehearsed deployment, clients whose uploads came too late, and were not trained for it.
        staleness: There, how many rounds ago clients had downloaded, where any.
        duplicate_claims: In a deployment, clients that several nodes say they are, and these nodes, first the one that
            is let in.
        upload_limits: In a deployment, what an upload may be at most: the samples that it counts as, and how far it may
            go.
        simulated_seconds: There, how long the round took; None: nobody has looked at a clock.
    """

    accepted: list[str] = field(default_factory=list)
    upload_bytes: dict[str, int] = field(default_factory=dict)
    download_bytes: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    no_data: list[str] = field(default_factory=list)
    missed_sync: list[str] = field(default_factory=list)
    diverged: list[str] = field(default_factory=list)
    master: str | None = None
    late_clients: list[str] = field(default_factory=list)
    staleness: dict[str, int] = field(default_factory=dict)
    duplicate_claims: dict[str, list[str]] = field(default_factory=dict)
    upload_limits: dict[str, float] = field(default_factory=dict)
    simulated_seconds: float | None = None

    def add_upload_bytes(self, client: str, number: int) -> None:
        """Count bytes that a client sends: its state, or what a method sends beside it."""
        self.upload_bytes[client] = self.upload_bytes.get(client, 0) + number

    def add_download_bytes(self, client: str, number: int) -> None:
        """Count bytes that a client receives."""
        self.download_bytes[client] = self.download_bytes.get(client, 0) + number

    def sync(self, ranks: Ranks, order: Mapping[str, int]) -> None:
        """Take in what happened to the other ranks' clients, in the round's order of clients."""
        parts = [vars(record) for record in ranks.all_gather_object(self)]
        for name, value in vars(self).items():
            if isinstance(value, dict):
                entries = [item for part in parts for item in part[name].items()]
                value.clear()
                value.update(sorted(entries, key=lambda item: order.get(item[0], -1)))
            elif isinstance(value, list):
                value[:] = sorted((client for part in parts for client in part[name]), key=lambda c: order.get(c, -1))
