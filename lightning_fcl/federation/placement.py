"""Placement: the assignment of client groups and client states to ranks. Results do not depend on the placement."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from lightning_fcl.data.client_round import ClientRounds
from lightning_fcl.federation.client_store import ClientState, ClientStore
from lightning_fcl.federation.ranks import Ranks, gather_by_client
from lightning_fcl.federation.server import FederatedServer

# Maximum relative difference from the median time per sample at which a client's time is replaced by the median.
_NOISE = 0.3
# Extra work of a rank above which a client group moves to another rank, as a fraction of the mean work per rank.
_SLACK = 0.05


class Placement:
    """An assignment of whole client groups to ranks. The group with the longest time is assigned first.

    Each group is assigned to the rank with the least work so far. In the first round, the time of a group is estimated
    from the number of samples, and later from the times of earlier rounds. If client states are in memory, a group of a
    later round stays on the rank that has most of the group's client states, unless another rank has clearly less work.

    Example:
        >>> from lightning_fcl.federation.ranks import SingleRank
        >>> placement = Placement(SingleRank(), ["a", "b"], ClientStore())
        >>> placement.assign([["a"], ["b"]], {"a": 3, "b": 5}), placement.hosts("b")
        ([0, 1], True)
    """

    def __init__(self, ranks: Ranks, clients: Sequence[str], store: ClientStore) -> None:
        self.ranks = ranks
        # Index of the client group of each client in the current round.
        self.order: dict[str, int] = {}
        self._clients = clients
        self._store = store
        self._rank_of = {client: number % ranks.num_ranks for number, client in enumerate(clients)}
        # Seconds per sample of each client: in the current round, and in the latest round of the client.
        self._seconds: dict[str, float] = {}
        self._pace: dict[str, float] = {}
        # Time at which the current client group started.
        self._began = 0.0
        self._complete = ranks.num_ranks == 1 or not store.is_in_memory
        if not self._complete:
            for client in [client for client in store if not self.hosts(client)]:
                store.delete(client)

    def hosts(self, client: str) -> bool:
        """Return whether this rank hosts a client: the rank stores the client's state and tests the client's model."""
        return self._rank_of.get(client, 0) == self.ranks.rank

    def assign(self, client_groups: Sequence[Sequence[str]], samples: Mapping[str, int]) -> list[int]:
        """Assign the client groups of a round to ranks, move the client states, and return the groups of this rank.

        Args:
            client_groups: The clients of each group.
            samples: Number of samples of each client.

        Returns:
            Indices of the client groups that this rank trains.
        """
        self.order = {client: number for number, names in enumerate(client_groups) for client in names}
        ranks = self._ranks_for(client_groups, [self._expected(names, samples) for names in client_groups])
        self._move({client: ranks[number] for client, number in self.order.items()})
        return [number for number, rank in enumerate(ranks) if rank == self.ranks.rank]

    def _expected(self, names: Sequence[str], samples: Mapping[str, int]) -> float:
        """Return the estimated training time of a client group in s, or the number of samples if no time is known."""
        usual = float(np.median(list(self._pace.values()))) if self._pace else 1.0
        paces = [self._pace.get(client, usual) for client in names]
        # Measured times also depend on the load of the machine. Only clear differences from the median count.
        clear = [pace if abs(pace / usual - 1) > _NOISE else usual for pace in paces]
        return sum(samples[client] * pace for client, pace in zip(names, clear, strict=True))

    def _ranks_for(self, client_groups: Sequence[Sequence[str]], costs: Sequence[float]) -> list[int]:
        load, ranks = np.zeros(self.ranks.num_ranks), [0] * len(client_groups)
        slack = _SLACK * sum(costs) / self.ranks.num_ranks
        for number in np.argsort([-cost for cost in costs], kind="stable").tolist():
            least_loaded_rank, previous_ranks = (
                int(load.argmin()),
                [self._rank_of[client] for client in client_groups[number]],
            )
            usual = int(np.bincount(previous_ranks, minlength=len(load)).argmax())
            stays = self._store.is_in_memory and bool(self._pace) and load[usual] <= load[least_loaded_rank] + slack
            ranks[number] = usual if stays else least_loaded_rank
            load[ranks[number]] += costs[number]
        return ranks

    def _move(self, rank_by_client: Mapping[str, int]) -> None:
        """Move client states to the ranks on which the clients train now."""
        leaving = {client for client, rank in rank_by_client.items() if self._rank_of[client] != rank}
        if self._store.is_in_memory and leaving:
            leaving_states = {client: self._store[client] for client in leaving if self.hosts(client)}
            arriving = gather_by_client(
                self.ranks, {client: to_cpu(own) for client, own in leaving_states.items()}, self._clients
            )
            for client in leaving_states:
                self._store.delete(client)
            for client, client_state in arriving.items():
                if rank_by_client[client] == self.ranks.rank and client_state:
                    self._store[client] = client_state
        self._rank_of |= rank_by_client
        self._complete = not self._store.is_in_memory

    def start_timer(self) -> None:
        """Start the timer of a client group's local training."""
        self._began = time.monotonic()

    def record_time(self, clients: ClientRounds) -> None:
        """Record the duration of a client group's local training. With a single rank, record nothing."""
        if self.ranks.num_ranks > 1:
            seconds = (time.monotonic() - self._began) / max(1, int(clients.num_samples.sum()))
            self._seconds |= dict.fromkeys(clients.client_ids, seconds)

    def sync(self, server: FederatedServer) -> None:
        """Merge the uploads and the training times of all ranks, after all clients have trained."""
        if self.ranks.num_ranks > 1:
            server.sync(self.ranks, self.order)
            for rank_seconds in self.ranks.all_gather_object(self._seconds):
                self._pace |= rank_seconds
            self._seconds = {}

    def gather_all(self) -> dict[str, ClientState]:
        """Return the states of all clients on every rank.

        All ranks must call this function together, except between `sync_all` and the next round.
        """
        if self._complete:
            return {client: self._store[client] for client in self._store}
        return gather_by_client(
            self.ranks, {c: to_cpu(self._store[c]) for c in self._store if self.hosts(c)}, self._clients
        )

    def sync_all(self) -> None:
        """Copy the states of all clients to every rank, so that every rank can read them after the fit."""
        for client, client_state in self.gather_all().items() if not self._complete else ():
            self._store[client] = client_state
        self._complete = True


def to_cpu(client_state: ClientState) -> ClientState:
    """Return a client's state on the CPU, so that other processes can receive it."""
    return {section: {name: value.cpu() for name, value in memory.items()} for section, memory in client_state.items()}
