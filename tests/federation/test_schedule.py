"""Tests of deadlines: the clients whose uploads arrive in time on the simulated clock."""

import numpy as np
import pytest
from raising import raises

from lightning_fcl.data.scenarios import Plan
from lightning_fcl.errors import InvalidTypeError, InvalidValueError
from lightning_fcl.federation.client_speeds import ClientSpeeds
from lightning_fcl.federation.fedbuff import FedBuff
from lightning_fcl.federation.swarm import Swarm
from lightning_fcl.federation.synchronization import Deadline, Participation, TimingContext


@pytest.fixture
def plan(make_stream):
    stream = make_stream(num_clients=6, samples=600, rounds_per_experience=3)
    stream.setup("fit")
    return stream.plan


def begun(schedule, plan, participation=1.0, seed=3, **deployment):
    drawn = Participation(participation, seed, synchronization=schedule)
    schedule.start(TimingContext(plan, drawn, **deployment))
    return drawn


def speeds_of(*seconds, **more):
    return ClientSpeeds(0.0, per_client={str(i): {"latency": value} for i, value in enumerate(seconds)}, **more)


def test_deadline_slower_clients_are_late(plan):
    schedule = Deadline(speeds_of(1, 5, 2, 9, 5.000001, 3), timeout=5)
    drawn = begun(schedule, plan)
    timed = schedule.round_timing(0)
    assert (timed.clients, timed.late_clients, timed.duration_s) == (["0", "1", "2", "5"], ["3", "4"], 5.0)
    assert drawn.sample_on_time_clients(plan, 0) == (timed.clients, [])
    # The sampled clients do not depend on the deadline.
    assert drawn.sample_clients(plan, 0)[0] == list(plan.clients)


@pytest.mark.parametrize(
    ("goal", "seconds", "clients", "end"),
    [
        # The target is reached before other uploads arrive.
        (2, None, ["0", "2"], 2.0),
        # The deadline comes before the target is reached.
        (2, 1.5, ["0"], 1.5),
        # The target is reached before the deadline.
        (3, 30.0, ["0", "2", "5"], 3.0),
        # All uploads arrive.
        (9, None, ["0", "1", "2", "3", "4", "5"], 9.0),
        # All uploads arrive, so the round does not wait until the deadline.
        (None, 30.0, ["0", "1", "2", "3", "4", "5"], 9.0),
        # No upload arrives before the deadline, so the round waits for the first upload.
        (None, 0.5, ["0"], 1.0),
        # Two uploads arrive at the same time. Only the client that is first in the plan counts.
        (4, 5.0, ["0", "1", "2", "5"], 5.0),
    ],
)
def test_deadline_round_ends_at_target_or_timeout(plan, goal, seconds, clients, end):
    schedule = Deadline(speeds_of(1, 5, 2, 9, 5, 3), seconds, goal)
    begun(schedule, plan)
    timed = schedule.round_timing(1)
    assert (timed.clients, timed.duration_s) == (clients, end)
    assert timed.late_clients == [client for client in plan.clients if client not in clients]


def test_deadline_timing_is_independent_of_call_order(plan):
    def timed(rounds):
        schedule = Deadline(ClientSpeeds(0.01, spread=0.8, variation=0.5), timeout=0.2, target_uploads=3)
        begun(schedule, plan, participation=0.7)
        return {round_idx: schedule.round_timing(round_idx) for round_idx in rounds}

    rounds = range(plan.num_rounds)
    assert timed(rounds) == timed(reversed(rounds))
    assert len({tuple(one.clients) for one in timed(rounds).values()}) > 1


def test_deadline_clients_without_data_are_skipped(plan):
    plan.train[0].pop("2")
    schedule = Deadline(speeds_of(1, 5, 2, 9, 5, 3), timeout=4)
    begun(schedule, plan)
    timed = schedule.round_timing(0)
    assert (timed.clients, timed.no_data, timed.late_clients) == (["0", "5"], ["2"], ["1", "3", "4"])


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Deadline(ClientSpeeds(1.0), timeout=0), (InvalidValueError, "timeout")),
        (lambda: Deadline(ClientSpeeds(1.0), target_uploads=0), (InvalidValueError, "target_uploads")),
        (lambda: Deadline({"a": 1}), (InvalidTypeError, "speeds")),
        (lambda: FedBuff(0.1, 3), (InvalidTypeError, "speeds")),
        (lambda: FedBuff(ClientSpeeds(1.0), 0), (InvalidValueError, "buffer_size")),
        (lambda: FedBuff(ClientSpeeds(1.0), 3, -1), (InvalidValueError, "staleness_exponent")),
        (
            lambda: Participation(swarm=Swarm(), synchronization=Deadline(ClientSpeeds(1.0))),
            (InvalidValueError, "swarm"),
        ),
    ],
)
def test_synchronization_invalid_arguments_raise_with_name(make, expected):
    with raises(*expected):
        make()


def test_deadline_reads_speeds_of_sampled_clients_once():
    asked = []

    class Asked(ClientSpeeds):
        def seconds(self, client, *args):
            asked.append(client)
            return super().seconds(client, *args)

    names = [str(client) for client in range(10_000)]
    plan = Plan(
        train=[{name: np.arange(3) for name in names}],
        experiences={name: (0,) for name in names},
        tasks={name: ((0,),) for name in names},
        groups=np.zeros(3, dtype=np.int64),
        test=np.arange(0),
    )
    schedule = Deadline(Asked(0.01, spread=1.0, variation=1.0), target_uploads=10)
    drawn = begun(schedule, plan, participation=13)
    assert len(drawn.sample_on_time_clients(plan, 0)[0]) == 10 and len(schedule.round_timing(0).late_clients) == 3
    assert sorted(asked) == sorted(drawn.sample_clients(plan, 0)[0]) and len(asked) == 13
