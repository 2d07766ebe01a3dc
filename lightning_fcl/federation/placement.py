"""Which rank trains which client group of a round, and keeps its clients' states: nothing that a result depends on."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from lightning_fcl.data.client_round import ClientRounds
from lightning_fcl.federation.client_store import ClientState, ClientStore
from lightning_fcl.federation.ranks import Ranks, gather_by_client
from lightning_fcl.federation.server import FederatedServer

_NOISE = 0.3  # of a usual pace
_SLACK = 0.05  # of a rank's fair share of a round: so much more it may have to do before a client moves elsewhere


class Placement:
    """Shares out whole client groups among ranks: the longest first, each to the rank that has least to do by then.

    How long a client group takes is known from its clients' earlier rounds, and before from their samples. Clients
    whose states are in memory come back to the rank that has them, as long as the ranks have about as much to do.

    Example:
        >>> from lightning_fcl.federation.ranks import SingleRank
        >>> placement = Placement(SingleRank(), ["a", "b"], ClientStore())
        >>> placement.assign([["a"], ["b"]], {"a": 3, "b": 5}), placement.hosts("b")
        ([0, 1], True)
    """

    def __init__(self, ranks: Ranks, clients: Sequence[str], store: ClientStore) -> None:
        self.ranks = ranks
        self.order: dict[str, int] = {}  # of the round's clients: the numbers of their client groups
        self._clients = clients
        self._store = store
        self._rank_of = {client: number % ranks.num_ranks for number, client in enumerate(clients)}
        self._seconds: dict[str, float] = {}  # of the round, for a sample of each client
        self._pace: dict[str, float] = {}  # of all rounds
        self._began = 0.0  # when the client group at hand has
        self._complete = ranks.num_ranks == 1 or not store.is_in_memory
        if not self._complete:
            for client in [client for client in store if not self.hosts(client)]:
                store.delete(client)

    def hosts(self, client: str) -> bool:
        """Whether this rank looks after a client: it has the client's state, and tests the client's model."""
        return self._rank_of.get(client, 0) == self.ranks.rank

    def assign(self, client_groups: Sequence[Sequence[str]], samples: Mapping[str, int]) -> list[int]:
        """Share out a round's client groups of clients, who have so many samples; the numbers of this rank's.

        What their clients keep comes along.
        """
        self.order = {client: number for number, names in enumerate(client_groups) for client in names}
        ranks = self._ranks_for(client_groups, [self._expected(names, samples) for names in client_groups])
        self._move({client: ranks[number] for client, number in self.order.items()})
        return [number for number, rank in enumerate(ranks) if rank == self.ranks.rank]

    def _expected(self, names: Sequence[str], samples: Mapping[str, int]) -> float:
        """The seconds that a client group takes, or so."""
        usual = float(np.median(list(self._pace.values()))) if self._pace else 1.0
        paces = [self._pace.get(client, usual) for client in names]
        # Clocks differ by what else a machine does: only who is clearly slower, or faster, counts as such.
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
        """Bring what clients keep to the ranks that they train on now."""
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
        """A client group begins to train."""
        self._began = time.monotonic()

    def record_time(self, clients: ClientRounds) -> None:
        """Note how long a client group's local training took."""
        if self.ranks.num_ranks > 1:
            seconds = (time.monotonic() - self._began) / max(1, int(clients.num_samples.sum()))
            self._seconds |= dict.fromkeys(clients.client_ids, seconds)

    def sync(self, server: FederatedServer) -> None:
        """When the clients of all ranks have trained: bring together what they sent, and how long it took."""
        if self.ranks.num_ranks > 1:
            server.sync(self.ranks, self.order)
            for rank_seconds in self.ranks.all_gather_object(self._seconds):
                self._pace |= rank_seconds
            self._seconds = {}

    def gather_all(self) -> dict[str, ClientState]:
        """What all clients keep, on every rank; all ranks ask, but where `sync_all` was called and no round since."""
        if self._complete:
            return {client: self._store[client] for client in self._store}
        return gather_by_client(
            self.ranks, {c: to_cpu(self._store[c]) for c in self._store if self.hosts(c)}, self._clients
        )

    def sync_all(self) -> None:
        """Bring what all clients keep to every rank: when a fit has ended, any of them may be asked."""
        for client, client_state in self.gather_all().items() if not self._complete else ():
            self._store[client] = client_state
        self._complete = True


def to_cpu(client_state: ClientState) -> ClientState:
    """What a client keeps, where other processes can take it."""
    return {section: {name: value.cpu() for name, value in memory.items()} for section, memory in client_state.items()}
