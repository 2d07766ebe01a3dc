"""Tests of the placement of clients on ranks: balanced loads, and clients that stay on the rank of their states."""

import numpy as np
import pytest
import torch

from lightning_fcl.federation.client_store import ClientStore
from lightning_fcl.federation.placement import Placement


class Several:
    """A fake `Ranks` object with several ranks. The test provides the values of the other ranks."""

    def __init__(self, number, rank, said=()):
        self.num_ranks, self.rank, self._said = number, rank, list(said)

    def all_gather_object(self, value):
        others = self._said.pop(0) if self._said else [type(value)()] * (self.num_ranks - 1)
        return [*others[: self.rank], value, *others[self.rank :]]


def places(number, samples, store=None):
    """Return for each rank the indices of the client groups that the rank trains. Each group has one client."""
    clients = list(samples)
    ranks = [Placement(Several(number, rank), clients, store or ClientStore()) for rank in range(number)]
    return [placement.assign([[client] for client in clients], samples) for placement in ranks]


@pytest.mark.parametrize("number", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_placement_uneven_clients_balances_loads(number, seed):
    """Clients have 10 to 100 samples. The load of each rank is at most 1.18 times the mean load."""
    draw = np.random.default_rng(seed)
    samples = {str(client): int(size) for client, size in enumerate(draw.integers(10, 101, size=20))}
    mine = places(number, samples)
    assert sorted(cohort for cohorts in mine for cohort in cohorts) == list(range(20))
    loads = [sum(samples[str(cohort)] for cohort in cohorts) for cohorts in mine]
    assert max(loads) * 0.85 <= sum(loads) / number


def test_placement_measured_times_override_samples():
    """If the samples of client a take ten times as long, the rank of client a trains no other client."""
    samples = dict.fromkeys("abcd", 10)
    first = Placement(Several(2, 0, [[{}], [{}]]), list(samples), ClientStore("disk"))
    first.assign([[c] for c in samples], samples)
    first._pace = {"a": 1.0, "b": 0.1, "c": 0.1, "d": 0.1}
    assert first.assign([[c] for c in samples], samples) == [0]
    assert first.hosts("a") and not any(map(first.hosts, "bcd"))


def test_placement_clients_return_to_their_states():
    """Clients stay on the rank that stores their states if the loads stay balanced. Otherwise, the states move."""
    samples = dict.fromkeys("abcd", 10)
    kept = {client: {"model": {"head": torch.tensor([float(number)])}} for number, client in enumerate(samples)}
    store = ClientStore()
    for client, state in kept.items():
        store[client] = state
    placement = Placement(Several(2, 0), list(samples), store)
    # This rank stores the states of a and c. The other rank stores the states of b and d.
    assert sorted(store) == ["a", "c"]
    placement._pace = dict.fromkeys(samples, 1.0)
    # This rank trains c and a, whose states it stores, although d is first in the list.
    assert placement.assign([["d"], ["c"], ["b"], ["a"]], samples) == [1, 3]

    placement._pace = {"a": 9.0, "b": 1.0, "c": 1.0, "d": 1.0}
    placement.assign([["a"], ["b"], ["c"], ["d"]], samples)
    # The state of c has moved to the other rank.
    assert sorted(store) == ["a"]
    assert placement.hosts("a") and not placement.hosts("c")


def test_placement_moves_state_with_client():
    arriving = {"b": {"model": {"head": torch.ones(1)}}}
    store = ClientStore()
    placement = Placement(Several(2, 0, [[arriving]]), ["a", "b"], store)
    assert placement.assign([["b"], ["a"]], {"a": 1, "b": 9}) == [0]
    assert store["b"]["model"]["head"] == 1
