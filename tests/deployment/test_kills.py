"""SuperNodes, executors and the SuperLink that are killed or stopped, and started again, at random moments."""

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
BEAT = 5  # seconds; who has not been heard of for twice as long is gone


@pytest.fixture(scope="module")
def started(connect):
    return connect(RECIPE, BEAT)


@pytest.fixture
def connected(started):
    """A SuperLink with its SuperNodes, which all tests here have together."""
    one, _, _ = started
    one.anew()
    return started


def kept_by(one, client):
    return ClientStore("disk", one.memory(client) / "now")[client]


@pytest.fixture
def moments(capsys):
    """Random numbers whose seed is printed: set `LIGHTNING_FCL_SEED` to have them again."""
    seed = int(os.environ.get("LIGHTNING_FCL_SEED") or random.SystemRandom().randrange(10**6))
    with capsys.disabled():
        print(f"\nLIGHTNING_FCL_SEED={seed}")
    return random.Random(seed)


@pytest.mark.flower
def test_whoever_is_killed_at_random_moments_and_started_again_the_bits_are_those_of_the_simulation(connected, moments):
    one, simulated, at = connected
    settings = {**one.settings(), "min_clients": 3, "round_timeout": 20.0, "join_timeout": 400.0}

    def supernode(client):
        at.kill(client)
        at.supernode(client, one.config(client))

    def rest(client):
        """Let a client's process rest while it sends nothing: a SuperNode with a part of an answer waits for good."""
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
def test_who_is_killed_and_at_once_started_again_comes_back_while_the_others_go_on(connected, moments):
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
    claimed = [
        round_idx["duplicate_claims"] for round_idx in rounds if "duplicate_claims" in round_idx
    ]  # none where it took so long to start
    assert all(claims.keys() == {lost} and len(claims[lost]) == 2 for claims in claimed)
    assert one.begun(lost) == ROUNDS - 1 and kept_by(one, lost)["Replay"]


@pytest.mark.long
def test_a_supernode_that_stalls_does_not_stop_the_round(connected):
    """The others go on, in the round at hand and in those after it: also once Flower takes it for gone."""
    one, _, at = connected
    at.run(one.app(), **one.settings(), min_clients=2, round_timeout=20.0)
    at.wait_for(lambda: one.begun("2") >= 0)
    at.signal("2", signal.SIGSTOP)
    at.wait_for(one.ended)
    rounds = one.rounds()
    assert len(rounds) == ROUNDS and set(rounds[-1]["upload_bytes"]) == {"0", "1"}
    assert all(len(round_idx["upload_bytes"]) >= 2 for round_idx in rounds)
