"""Tests that kill or stop SuperNodes, executors and the SuperLink at random times, and start them again."""

import os
import random
import signal
import time

import pytest
import torch

from lightning_fcl.federation.client_store import ClientStore

from .recipes import REPLAY, classes

pytestmark = [pytest.mark.slow, pytest.mark.processes]

ROUNDS = 8
RECIPE = {**REPLAY, "data": {"scenario": classes(num_experiences=2, rounds_per_experience=ROUNDS // 2)}}
# Seconds between two heartbeats. Flower reports a node as gone after two missed heartbeats.
BEAT = 5


@pytest.fixture(scope="module")
def started(connect):
    return connect(RECIPE, BEAT)


@pytest.fixture
def connected(started):
    """Return the recipe, its simulation, and a SuperLink that all tests share. Delete the results of earlier runs."""
    one, _, _ = started
    one.anew()
    return started


def kept_by(one, client):
    """Return the client state that the node of a client has stored."""
    return ClientStore("disk", one.memory(client) / "now")[client]


@pytest.fixture
def moments(capsys):
    """Return a random generator, and print its seed. Set `LIGHTNING_FCL_SEED` to repeat a test with this seed."""
    seed = int(os.environ.get("LIGHTNING_FCL_SEED") or random.SystemRandom().randrange(10**6))
    with capsys.disabled():
        print(f"\nLIGHTNING_FCL_SEED={seed}")
    return random.Random(seed)


@pytest.mark.flower
def test_killed_and_restarted_processes_equal_simulation(connected, moments):
    one, simulated, at = connected
    settings = {**one.settings(), "min_clients": 3, "round_timeout": 20.0, "join_timeout": 400.0}

    def supernode(client):
        at.kill(client)
        at.supernode(client, one.config(client))

    def rest(client):
        """Stop the executor of a client at a time when its SuperNode sends no answer.

        Otherwise, the SuperNode can receive only a part of an answer, and then waits forever.
        """
        at.signal(f"{client}-stays", signal.SIGSTOP)
        time.sleep(1)
        while at.sends(client):
            at.signal(f"{client}-stays", signal.SIGCONT)
            time.sleep(0.5)
            at.signal(f"{client}-stays", signal.SIGSTOP)
            time.sleep(1)

    def stall(client):
        rest(client)
        at.signal(client, signal.SIGSTOP)
        time.sleep(2 * BEAT + 3)
        for name in (client, f"{client}-stays"):
            at.signal(name, signal.SIGCONT)

    def executor(client):
        rest(client)
        at.kill(f"{client}-stays")
        at.executor(client)

    def link(_):
        at.kill("link")
        at.link()
        at.run(one.app(), **settings)

    kills = [supernode, stall, executor, link]
    moments.shuffle(kills)
    rounds = sorted(moments.sample(range(2, ROUNDS - 1), len(kills)))
    at.run(one.app(), **settings)
    for kill, round_idx in zip(kills, rounds, strict=True):
        client, later = moments.choice(one.clients), moments.random()
        at.wait_for(lambda client=client, round_idx=round_idx: one.begun(client) >= round_idx)
        time.sleep(later)
        kill(client)
    assert not one.ended()
    at.wait_for(one.ended)
    assert one.holds(simulated.model)
    for client in one.clients:
        kept, remembered = kept_by(one, client), simulated.trainer.strategy.server.client_store[client]
        assert kept.keys() == remembered.keys() and kept["Replay"]
        for section, values in remembered.items():
            assert all(torch.equal(value, kept[section][name]) for name, value in values.items())


@pytest.mark.long
def test_restarted_supernode_rejoins_while_others_continue(connected, moments):
    one, _, at = connected
    at.run(one.app(), **one.settings(), min_clients=2, round_timeout=15.0)
    lost = moments.choice(one.clients)
    at.wait_for(lambda: one.begun(lost) >= 1)
    time.sleep(moments.random())
    at.kill(lost)
    at.supernode(lost, one.config(lost))
    at.wait_for(one.ended)
    rounds = one.rounds()
    there = [lost in round_idx["upload_bytes"] for round_idx in rounds]
    assert len(rounds) == ROUNDS and there[0] and not all(there)
    assert any(there[there.index(False) :])
    assert all(len(round_idx["upload_bytes"]) >= 2 for round_idx in rounds)
    # There are no duplicate claims if the new SuperNode needed a long time to start.
    claimed = [round_idx["duplicate_claims"] for round_idx in rounds if "duplicate_claims" in round_idx]
    assert all(claims.keys() == {lost} and len(claims[lost]) == 2 for claims in claimed)
    assert one.begun(lost) == ROUNDS - 1 and kept_by(one, lost)["Replay"]


@pytest.mark.long
def test_stalled_supernode_does_not_stop_rounds(connected):
    """The other clients continue in this round and later rounds, also after Flower reports the node as gone."""
    one, _, at = connected
    at.run(one.app(), **one.settings(), min_clients=2, round_timeout=20.0)
    at.wait_for(lambda: one.begun("2") >= 0)
    at.signal("2", signal.SIGSTOP)
    at.wait_for(one.ended)
    rounds = one.rounds()
    assert len(rounds) == ROUNDS and set(rounds[-1]["upload_bytes"]) == {"0", "1"}
    assert all(len(round_idx["upload_bytes"]) >= 2 for round_idx in rounds)
