"""The record of a round: accepted uploads, missing uploads with their reasons, transmitted bytes, and times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_fcl.federation.ranks import Ranks


@dataclass(frozen=True)
class ClientLoss:
    """The training loss of a client in one round: the mean over the samples of the client's batches.

    The loss is the value that the training step returns, without the terms that methods add. Replay samples in a batch
    count as samples of the batch.

    Args:
        mean: Mean over all local epochs.
        epochs: Mean for each local epoch. NaN for an epoch without a loss.
    """

    mean: float
    epochs: tuple[float, ...]


@dataclass
class RoundRecord:
    """The record of one round: bytes and losses of each client, and the clients whose uploads are missing.

    Args:
        accepted: Clients with an accepted upload.
        upload_bytes: Bytes that each client uploaded.
        download_bytes: Bytes that each client downloaded.
        dropped: Reason for each client with a dropped upload.
        no_data: Sampled clients that have no data, or too few samples to train on.
        missed_sync: Clients that trained but missed the synchronization.
        train_losses: Training loss of each client that trained with a loss. Empty on the server of a deployment,
            because losses stay on the nodes.
        train_samples: Number of samples in the training batches of each client, over all local epochs. Samples that a
            replay buffer adds to the client's data are counted. Further batches that a method draws for its loss are
            not counted. Empty on the server of a deployment.
        diverged: Clients that had a non-finite loss in a step, although their upload is finite.
        master: In a swarm, the client that aggregated the uploads.
        late_clients: Clients whose uploads would arrive too late on the simulated clock. They did not train.
        staleness: For each client, the number of rounds since the client's download on the simulated clock. Clients
            with 0 are left out.
        duplicate_claims: In a deployment, each client name that several nodes use, with the names of these nodes. The
            first of these nodes is admitted.
        upload_limits: In a deployment, the maximum number of samples and the maximum update norm of an upload.
        simulated_seconds: Duration of the round on the simulated clock in seconds. None: there is no simulated clock.
    """

    accepted: list[str] = field(default_factory=list)
    upload_bytes: dict[str, int] = field(default_factory=dict)
    download_bytes: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    no_data: list[str] = field(default_factory=list)
    missed_sync: list[str] = field(default_factory=list)
    train_losses: dict[str, ClientLoss] = field(default_factory=dict)
    train_samples: dict[str, int] = field(default_factory=dict)
    diverged: list[str] = field(default_factory=list)
    master: str | None = None
    late_clients: list[str] = field(default_factory=list)
    staleness: dict[str, int] = field(default_factory=dict)
    duplicate_claims: dict[str, list[str]] = field(default_factory=dict)
    upload_limits: dict[str, float] = field(default_factory=dict)
    simulated_seconds: float | None = None

    def add_upload_bytes(self, client: str, number: int) -> None:
        """Add bytes to the number of bytes that a client uploaded in a state or in a message of a method."""
        self.upload_bytes[client] = self.upload_bytes.get(client, 0) + number

    def add_download_bytes(self, client: str, number: int) -> None:
        """Add bytes to the number of bytes that a client downloaded."""
        self.download_bytes[client] = self.download_bytes.get(client, 0) + number

    def sync(self, ranks: Ranks, order: Mapping[str, int]) -> None:
        """Merge the lists and dictionaries of all ranks' records. Sort the clients by their position in ``order``."""
        parts = [vars(record) for record in ranks.all_gather_object(self)]
        for name, value in vars(self).items():
            if isinstance(value, dict):
                entries = [item for part in parts for item in part[name].items()]
                value.clear()
                value.update(sorted(entries, key=lambda item: order.get(item[0], -1)))
            elif isinstance(value, list):
                value[:] = sorted((client for part in parts for client in part[name]), key=lambda c: order.get(c, -1))
