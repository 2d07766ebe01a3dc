"""Tests of streams with many clients: the stream stores shared data once, and client sampling is unchanged."""

import hashlib

import numpy as np
import pytest
import torch

from lightning_fcl import FederatedStream
from lightning_fcl.data.partition import ByClientId
from lightning_fcl.data.scenarios import ClassIncremental, SamplePool
from lightning_fcl.data.split import Split
from lightning_fcl.federation.synchronization import Participation
from lightning_fcl.rng import make_client_keys


@pytest.fixture
def plan():
    """Return a plan with 1,000 samples of random owners. Some owners have one sample."""
    owner = np.random.default_rng(0).integers(0, 300, size=1000)
    stream = FederatedStream.from_arrays(
        torch.zeros(1000, 1),
        torch.arange(1000) % 4,
        owner,
        scenario=ClassIncremental(2, rounds_per_experience=3),
        split=Split(test=0.0),
    )
    stream.setup("fit")
    return stream.plan


def test_rounds_of_an_experience_share_memory(plan):
    first, second = plan.train[:3], plan.train[3:]
    assert all(current is first[0] for current in first) and all(current is second[0] for current in second)
    samples = [rows for current in (first[0], second[0]) for rows in current.values()]
    assert samples[0].base is not None and all(rows.base is samples[0].base for rows in samples)
    assert len({id(tasks) for tasks in plan.tasks.values()}) == len({id(n) for n in plan.experiences.values()}) == 1


def test_joint_assignment_equals_assignment_per_client():
    rng = np.random.default_rng(1)
    y = rng.integers(0, 6, size=500)
    owner = rng.integers(0, 40, size=500)
    clients = ByClientId().partition(y, owner, rng)
    assert {name: rows.tolist() for name, rows in clients.items()} == {
        str(name): np.flatnonzero(owner == name).tolist() for name in np.unique(owner)
    }
    # A user-defined partition may return samples in any order.
    mixed = {client: rng.permutation(rows) for client, rows in clients.items()}
    plan = ClassIncremental([1, 2, 3], class_order=range(6)).plan(SamplePool(y, clients=mixed, classes=tuple("abcdef")))
    for current, group in zip(plan.train, ([0], [1, 2], [3, 4, 5]), strict=True):
        expected = {client: rows[np.isin(y[rows], group)].tolist() for client, rows in clients.items()}
        assert {client: rows.tolist() for client, rows in current.items()} == {c: r for c, r in expected.items() if r}


@pytest.mark.parametrize("number", [1, 7, 299, 5000])
def test_participation_samples_clients_with_lowest_keys(plan, number):
    for round_idx in range(plan.num_rounds):
        lots = make_client_keys(5, plan.clients, round_idx, "participation")
        drawn = {plan.clients[i] for i in np.argsort(lots, kind="stable")[:number]}
        training, skipped = Participation(number, seed=5).sample_clients(plan, round_idx)
        assert set(training) | set(skipped) == drawn
        assert set(training) == drawn & plan.train[round_idx].keys()


def test_plan_fingerprint_does_not_depend_on_shared_rounds(plan):
    digest = hashlib.sha256()
    for current in plan.train:
        for client, indices in current.items():
            digest.update(client.encode())
            digest.update(indices.astype("<i8").tobytes())
    assert plan.fingerprint == digest.hexdigest()[:16]


def test_num_client_samples_counts_repeated_samples_once(plan):
    for client in plan.clients:
        everything = np.concatenate([current[client] for current in plan.train if client in current])
        assert plan.num_client_samples(client) == len(np.unique(everything))
    assert sum(map(plan.num_client_samples, plan.clients)) == 1000
