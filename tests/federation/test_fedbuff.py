"""Tests of the schedule of FedBuff: downloads, arrivals and staleness do not depend on the order of calls."""

import numpy as np
import pytest
from raising import raises

from lightning_fcl.data.scenarios import Plan
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.client_speeds import ClientSpeeds
from lightning_fcl.federation.fedbuff import FedBuff
from lightning_fcl.federation.reductions import Constant, Local, Mean, Reduction, Sum
from lightning_fcl.federation.robust import Krum
from lightning_fcl.federation.synchronization import Participation, TimingContext
from lightning_fcl.rng import make_client_keys


def plan_of(clients=8, rounds=40, absent=None):
    """Return a plan of clients with different numbers of samples. ``absent`` maps clients to rounds without data."""
    names = [f"c{i}" for i in range(clients)]
    gone = absent or {}
    return Plan(
        train=tuple(
            {name: np.arange(2 + i) for i, name in enumerate(names) if round_idx not in gone.get(name, ())}
            for round_idx in range(rounds)
        ),
        experiences={name: (0,) * rounds for name in names},
        tasks={name: ((0,),) for name in names},
        groups=np.zeros(clients + 2, dtype=np.int64),
        test=np.arange(0),
    )


def begun(schedule, plan, participation=1.0, seed=3, round_idx=0, **deployment):
    drawn = Participation(participation, seed, synchronization=schedule)
    schedule.start(TimingContext(plan, drawn, **deployment), round_idx)
    return drawn


def by_hand(plan, speeds, buffer_size, concurrency, seed, rounds):
    """Simulate the schedule of FedBuff step by step, without a heap.

    Returns a list with one tuple per round: the buffer as pairs (client, version), the skipped clients, and the end of
    the round.
    """
    # `training` maps each client to (arrival, version).
    training, now, told = {}, 0, []
    for round_idx in range(rounds):
        lots = make_client_keys(seed, plan.clients, round_idx, "participation")
        waiting = [plan.clients[i] for i in np.argsort(lots, kind="stable")]
        waiting = [client for client in waiting if client in plan.train[round_idx] and client not in training]
        buffer, skipped = [], []
        while len(buffer) < buffer_size:
            arrived = [client for client in plan.clients if client in training and training[client][0] <= now]
            if arrived:
                _, version = training.pop(arrived[0])
                if arrived[0] in plan.train[round_idx]:
                    buffer.append((arrived[0], version))
                else:
                    skipped.append(arrived[0])
                continue
            while len(training) < concurrency and waiting:
                client = waiting.pop(0)
                seconds = speeds.seconds(client, round_idx, seed, len(plan.train[round_idx][client]), 0, 0)
                training[client] = now + round_to(seconds), round_idx
            if not training:
                break
            now = max(now, min(arrival for arrival, _ in training.values()))
        told.append((sorted(buffer, key=lambda one: plan.clients.index(one[0])), sorted(skipped), now))
    return told


def round_to(seconds):
    return int(np.rint(seconds * 1e9))


@pytest.mark.parametrize("absent", [None, {"c1": range(2, 9), "c4": range(0, 40, 3)}])
@pytest.mark.parametrize(("buffer_size", "concurrency"), [(1, 1), (1, 8), (2, 4), (3, 8), (8, 8), (5, 2), (8, 3)])
@pytest.mark.parametrize(
    "speeds",
    [
        ClientSpeeds(0.1, spread=0.9, variation=0.5),
        ClientSpeeds(1.0),
        ClientSpeeds(0.0, latency=1.0),
        ClientSpeeds(0.0),
    ],
    ids=["random", "by samples", "equal", "zero"],
)
def test_fedbuff_schedule_equals_simulation_by_hand(speeds, buffer_size, concurrency, absent):
    plan = plan_of(absent=absent)
    schedule = FedBuff(speeds, buffer_size)
    begun(schedule, plan, concurrency)
    told = by_hand(plan, speeds, buffer_size, concurrency, 3, plan.num_rounds)
    before = 0
    for round_idx, (buffer, skipped, end) in enumerate(told):
        timed = schedule.round_timing(round_idx)
        assert timed.clients == [client for client, _ in buffer]
        assert timed.staleness == {client: round_idx - version for client, version in buffer if version < round_idx}
        assert timed.no_data == skipped and timed.late_clients == []
        assert round_to(timed.duration_s) == end - before
        before = end
        assert len(schedule.clock_at(round_idx + 1).flights) <= concurrency
    if buffer_size < concurrency and speeds.spread:
        assert any(schedule.round_timing(round_idx).staleness for round_idx in range(plan.num_rounds))


def test_fedbuff_schedule_is_independent_of_call_order():
    plan, speeds = plan_of(), ClientSpeeds(0.1, spread=0.9, variation=0.5)

    def timed(rounds, seed=3):
        schedule = FedBuff(speeds, 3)
        begun(schedule, plan, 5, seed)
        return {round_idx: schedule.round_timing(round_idx) for round_idx in rounds}

    assert timed(range(20)) == timed(reversed(range(20)))
    assert timed(range(20)) != timed(range(20), seed=4)


@pytest.mark.parametrize("at", [1, 7, 19])
def test_fedbuff_clock_resumes_from_state_dict(at):
    plan, speeds = plan_of(), ClientSpeeds(0.1, spread=0.9, variation=0.5)
    whole, rest = FedBuff(speeds, 2), FedBuff(speeds, 2)
    begun(whole, plan, 5)
    for round_idx in range(at):
        whole.start_round(round_idx)
    kept = whole.state_dict(at)
    rest.load_state_dict(kept)
    begun(rest, plan, 5, round_idx=at)
    assert [rest.round_timing(round_idx) for round_idx in range(at, 30)] == [
        whole.round_timing(round_idx) for round_idx in range(at, 30)
    ]
    with raises(InvalidValueError, "round_idx", value=0):
        rest.round_timing(0)
    # Without `round_idx`, the fit starts from the beginning, and its clock starts at 0 seconds.
    begun(rest, plan, 5)
    fresh = FedBuff(speeds, 2)
    begun(fresh, plan, 5)
    assert rest.round_timing(3) == fresh.round_timing(3)


def test_fedbuff_withdrawn_client_only_finishes_current_round():
    plan = plan_of()
    schedule = FedBuff(ClientSpeeds(0.1, spread=0.9), 3)
    drawn = begun(schedule, plan, 5)
    ahead = [schedule.round_timing(round_idx) for round_idx in range(10)]
    schedule.start_round(4)
    gone = ahead[4].clients[0]
    drawn.withdraw(gone)
    assert schedule.round_timing(4) == ahead[4]
    later = [schedule.round_timing(round_idx) for round_idx in range(5, 30)]
    assert not any(gone in timed.clients for timed in later)
    for client in plan.clients:
        drawn.withdraw(client)
    with raises(InvalidValueError, "max_epochs"):
        schedule.round_timing(5)


def test_staleness_weight_decreases_with_staleness():
    schedule = FedBuff(ClientSpeeds(1.0), 1)
    # The weight is 1 / sqrt(1 + staleness).
    assert [schedule.staleness_weight(age) for age in (0, 3, 8)] == [1, 1 / 2, 1 / 3]
    assert FedBuff(ClientSpeeds(1.0), 1, staleness_exponent=0).staleness_weight(9) == 1


class Mine(Mean):
    name = "mine"


@pytest.mark.parametrize("reduction", [Sum(), Krum(1)])
def test_fedbuff_reduction_other_than_mean_raises_with_name(reduction: Reduction):
    with pytest.raises(ValueError, match=f"Expected the reduction `mean` for all .* but `w` has `{reduction}`"):
        begun(FedBuff(ClientSpeeds(1.0), 2), plan_of(), reductions={"v": Mean(), "w": reduction})
    begun(FedBuff(ClientSpeeds(1.0), 2), plan_of(), reductions={"v": Mean(), "head": Local(), "reservoir": Constant()})
    begun(FedBuff(ClientSpeeds(1.0), 2), plan_of(), reductions={"w": Mine()})
