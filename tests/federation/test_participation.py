"""Tests of client sampling: the results do not depend on the order of calls."""

import pytest

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.record import RoundRecord
from lightning_fcl.federation.swarm import Swarm
from lightning_fcl.federation.synchronization import Participation


@pytest.fixture
def plan(make_stream):
    stream = make_stream(num_clients=10, rounds_per_experience=3)
    stream.setup("fit")
    return stream.plan


@pytest.mark.parametrize(("clients", "number"), [(1.0, 10), (0.25, 3), (0.01, 1), (1, 1), (4, 4), (99, 10)])
def test_participation_samples_fraction_or_number_each_round(plan, clients, number):
    draws = [
        Participation(clients, seed=3).sample_on_time_clients(plan, round_idx) for round_idx in range(plan.num_rounds)
    ]
    backwards = Participation(clients, seed=3)
    assert draws[::-1] == [
        backwards.sample_on_time_clients(plan, round_idx) for round_idx in reversed(range(plan.num_rounds))
    ]
    assert all(len(training) == number and skipped == [] for training, skipped in draws)
    assert all(training == [c for c in plan.clients if c in training] for training, _ in draws)
    assert (number == 10) == (len({tuple(training) for training, _ in draws}) == 1)
    other = [
        Participation(clients, seed=4).sample_on_time_clients(plan, round_idx) for round_idx in range(plan.num_rounds)
    ]
    assert (number == 10) == (other == draws)


def test_participation_clients_without_data_are_skipped(plan):
    drawn = Participation(4, seed=0).sample_on_time_clients(plan, 0)[0]
    plan.train[0].pop(drawn[1])
    assert Participation(4, seed=0).sample_on_time_clients(plan, 0) == ([drawn[0], *drawn[2:]], [drawn[1]])
    for client in drawn:
        plan.train[0].pop(client, None)
    training, skipped = Participation(4, seed=0).sample_on_time_clients(plan, 0)
    assert len(training) == 1 and training[0] in plan.train[0] and skipped == drawn


def test_participation_unavailable_clients_keep_sampling_of_others(plan):
    everybody = Participation(6, seed=1)
    participation = Participation(6, seed=1, swarm=Swarm(leaves_at={"2": 4}))
    participation.withdraw("5")
    for round_idx in range(plan.num_rounds):
        gone = {"5"} | ({"2"} if round_idx >= 4 else set())
        assert participation.unavailable(round_idx) == gone and everybody.unavailable(round_idx) == set()
        drawn = [client for client in everybody.sample_on_time_clients(plan, round_idx)[0] if client not in gone]
        assert participation.sample_on_time_clients(plan, round_idx) == (drawn, [])


def test_misses_sync_only_in_swarm():
    swarm, asked = (
        Swarm(missed_sync_prob=0.3, missed_rounds={"4": [7]}),
        [(str(i), round_idx) for i in range(10) for round_idx in range(20)],
    )
    missed = [one for one in asked if Participation(seed=5, swarm=swarm).misses_sync(*one)]
    assert missed == [one for one in asked if swarm.misses_sync(*one, 5)] and ("4", 7) in missed
    assert not any(Participation(seed=5).misses_sync(*one) for one in asked)
    assert [Participation(swarm=s).may_miss_sync for s in (None, Swarm(), Swarm(leaves_at={"1": 2}), swarm)] == [
        False, False, False, True,
    ]  # fmt: skip
    assert Participation(swarm=Swarm(missed_rounds={"4": [7]}, leaves_at={"1": 2})).explicit_clients == ["4", "1"]
    assert Participation().explicit_clients == []


def test_elect_master_first_uploading_client_has_zero_bytes(caplog):
    participation, masters = Participation(swarm=Swarm()), []
    for sends in ("bac", "bc", "", "cb", "abc"):
        record = RoundRecord()
        for client in sends:
            record.add_upload_bytes(client, 8)
            record.add_download_bytes(client, 4)
        participation.elect_master(record, ["a", "b", "c"])
        masters.append(record.master)
        assert record.upload_bytes == {c: 0 if c == record.master else 8 for c in sends}
        assert record.download_bytes == {c: 0 if c == record.master else 4 for c in sends}
    assert masters == ["a", "b", None, "b", "a"]
    messages = ["The swarm's master a uploaded nothing in this round. The new master is b."]
    assert [r.message for r in caplog.records] == messages


@pytest.mark.parametrize("clients", [0, 0.0, -1, 1.5, float("nan")])
def test_participation_invalid_fraction_or_number_raises(clients):
    with pytest.raises(InvalidValueError, check=lambda error: error.argument == "participation"):
        Participation(clients)
