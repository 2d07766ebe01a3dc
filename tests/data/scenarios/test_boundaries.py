"""Tests of scenarios with blurry or growing classes, with samples that occur once, and with delayed clients."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from raising import raises

from lightning_fcl import Classifier, FederatedStream
from lightning_fcl.callbacks import ContinualMetrics
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import (
    Blurry,
    ClassIncremental,
    Delayed,
    FedViTScenario,
    GrowingClasses,
    Online,
    SamplePool,
)
from lightning_fcl.errors import InvalidTypeError, InvalidValueError, UnknownNameError
from lightning_fcl.models import MLP

Y = np.random.default_rng(0).integers(10, size=3000)
NAMES = tuple("abcdefghij")
POOL = SamplePool(Y, clients={str(n): np.arange(n, 3000, 3) for n in range(3)}, classes=NAMES)
TEN_ROUNDS = ClassIncremental(5, rounds_per_experience=10)


def rounds_with(plan, label):
    """Return the rounds in which any client has samples of a class."""
    return [n for n, current in enumerate(plan.train) if (Y[np.concatenate(list(current.values()))] == label).any()]


def samples_of(plan, client):
    return np.concatenate([current[client] for current in plan.train if client in current])


@pytest.mark.parametrize("seed", range(5))
def test_blurry_disjoint_classes_occur_in_one_experience(seed):
    plan = Blurry(4, disjoint_ratio=0.3, blurry_ratio=0.2).plan(POOL, seed)
    times = [len(rounds_with(plan, label)) for label in range(10)]
    assert times.count(1) == 3 and times.count(4) == 7
    for client, rows in POOL.clients.items():
        assert np.array_equal(np.sort(samples_of(plan, client)), rows), "each sample occurs once, at its owner"


@pytest.mark.parametrize("seed", range(3))
def test_blurry_ratio_moves_share_of_samples(seed):
    """With `blurry_ratio=0.2`, a fifth of the samples is assigned to random experiences.

    With four experiences, a quarter of these samples stays in the same experience. So 15 % of all samples move.
    """
    plan = Blurry(4, disjoint_ratio=0, blurry_ratio=0.2).plan(POOL, seed)
    own = [max(sum(Y[rows] == label) for rows in joint(plan)) for label in range(10)]
    assert sum(own) / len(Y) == pytest.approx(0.85, abs=0.02)


def joint(plan):
    return [np.concatenate(list(current.values())) for current in plan.train]


def test_blurry_ratio_zero_is_class_incremental():
    sizes = set()
    for seed in range(10):
        plan = Blurry(4, blurry_ratio=0).plan(POOL, seed)
        assert all(len(rounds_with(plan, label)) == 1 for label in range(10))
        assert [set(Y[rows]) for rows in joint(plan)] == [set(task) for task in plan.tasks["0"]]
        sizes.add(tuple(map(len, plan.tasks["0"])))
    assert len(sizes) > 5 and all(sum(one) == 10 and min(one) >= 1 for one in sizes)


def test_blurry_experiences_are_tested_on_their_classes():
    plan = Blurry(4, rounds_per_experience=2).plan(POOL)
    assert plan.num_rounds == 8 and plan.experiences["0"] == (0, 0, 1, 1, 2, 2, 3, 3)
    for current, experience in zip(plan.train, plan.experiences["0"], strict=True):
        assert set(Y[np.concatenate(list(current.values()))]) == set(plan.tasks["0"][experience])


@pytest.mark.parametrize(("classes", "experiences"), [(10, 4), (10, 7), (10, 10), (100, 10), (7, 1), (33, 5)])
def test_growing_classes_sizes_are_ascending(classes, experiences):
    pool = SamplePool(np.arange(classes), clients={"a": np.arange(classes)}, classes=tuple(map(str, range(classes))))
    sizes = [len(task) for task in GrowingClasses(experiences).plan(pool).tasks["a"]]
    assert sum(sizes) == classes and len(sizes) == experiences and min(sizes) >= 1 and sizes == sorted(sizes)


def test_growing_classes_follow_class_order():
    plan = GrowingClasses(4, class_order=NAMES[::-1]).plan(POOL)
    assert plan.tasks["0"] == ((9,), (7, 8), (4, 5, 6), (0, 1, 2, 3))


@pytest.mark.parametrize("of", [TEN_ROUNDS, Blurry(5, rounds_per_experience=10), Delayed(TEN_ROUNDS)])
def test_online_uses_every_sample_once(of):
    whole, plan = of.plan(POOL), Online(of).plan(POOL)
    assert plan.experiences == whole.experiences and plan.tasks == whole.tasks
    for client, rows in POOL.clients.items():
        assert np.array_equal(np.sort(samples_of(plan, client)), rows)
        for current, before in zip(plan.train, whole.train, strict=True):
            assert set(current.get(client, ())) <= set(before.get(client, ()))
        for task in range(5):
            numbers = zip(plan.train, plan.experiences[client], strict=True)
            sizes = [len(current[client]) for current, number in numbers if number == task and client in current]
            assert max(sizes) - min(sizes) <= 1 and len(sizes) >= 10


def test_online_with_history_raises():
    with raises(InvalidValueError, "history"):
        Online(ClassIncremental(5, history="seen")).plan(POOL)


@pytest.mark.parametrize("seed", range(5))
def test_delayed_tasks_are_late_but_complete(seed):
    whole, plan = TEN_ROUNDS.plan(POOL, seed), Delayed(TEN_ROUNDS, max_delay=6).plan(POOL, seed)
    arrivals = {}
    for client, numbers in plan.experiences.items():
        assert list(numbers) == sorted(numbers) and set(numbers) == set(range(5))
        rounds = [n for n, current in enumerate(plan.train) if client in current]
        first = [next(n for n in rounds if numbers[n] == task) for task in range(5)]
        late = np.array(first) - np.arange(0, 50, 10)
        arrivals[client] = tuple(late)
        assert (np.diff(late) >= 0).all() and late[-1] <= 6
        assert rounds == list(range(first[0], plan.num_rounds)), "from its first task on, a client always has samples"
        for n in rounds:
            assert np.array_equal(plan.train[n][client], whole.train[10 * numbers[n]][client])
    assert len(set(arrivals.values())) > 1


def test_delayed_without_delay_equals_scenario():
    whole, plan = TEN_ROUNDS.plan(POOL), Delayed(TEN_ROUNDS, max_delay=0).plan(POOL)
    assert plan.fingerprint == whole.fingerprint and plan.experiences == whole.experiences


def test_delayed_with_samples_per_round_never_reuses_samples():
    of = ClassIncremental(5, rounds_per_experience=2, samples_per_round=20)
    plan = Delayed(of, max_delay=4).plan(POOL, seed=1)
    assert all(plan.train), "rounds in which no client has samples are removed"
    for client in POOL.clients:
        rows = samples_of(plan, client)
        assert len(rows) == len(set(rows)) == 200


@pytest.mark.parametrize("scenario", [Blurry(), GrowingClasses(), Online(), Delayed(), Online(Delayed(Blurry()))])
def test_scenario_plan_depends_on_seed(scenario):
    assert (
        scenario.plan(POOL, 3).fingerprint == scenario.plan(POOL, 3).fingerprint != scenario.plan(POOL, 4).fingerprint
    )


@pytest.mark.parametrize("kind", [Online, Delayed])
def test_wrapper_scenario_provides_what_inner_scenario_provides(kind):
    assert (
        kind(FedViTScenario()).provides_clients
        and not kind(FedViTScenario()).provides_split
        and not kind().provides_clients
    )
    with raises(InvalidValueError, "partition"):
        FederatedStream("digits", kind(FedViTScenario(2, 3)), IID(3))
    assert dataclasses.asdict(kind())["scenario"] is None


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Blurry(11).plan(POOL), (InvalidValueError, "num_experiences")),
        (lambda: GrowingClasses(11).plan(POOL), (InvalidValueError, "num_experiences")),
        (lambda: Blurry(disjoint_ratio=1.5), (InvalidValueError, "disjoint_ratio")),
        (lambda: Blurry(blurry_ratio=-0.1), (InvalidValueError, "blurry_ratio")),
        (lambda: Delayed(max_delay=-1), (InvalidValueError, "max_delay")),
        (lambda: Online("Blury"), (UnknownNameError, "scenario")),
        (lambda: Online({}), (InvalidTypeError, "scenario")),
    ],
)
def test_scenario_invalid_argument_raises(make, expected):
    with raises(*expected):
        make()


@pytest.mark.seconds
@pytest.mark.parametrize("scenario", [Online("Blurry"), Delayed(GrowingClasses(4, 2), 2)])
def test_scenario_fit_reduces_loss(scenario, fit):
    losses = [0.0, 0.0]
    for seed in range(2):
        torch.manual_seed(seed)
        metrics, stream = ContinualMetrics(), FederatedStream("digits", scenario, IID(3), seed=seed)
        before = Classifier(MLP([64, 10]), 10, lambda params: torch.optim.SGD(params, lr=0.01))
        task = copy.deepcopy(before)
        fit(task, stream, [metrics])
        assert len(metrics.record["rounds"]) == stream.plan.num_rounds
        x, y = stream.get_samples(stream.plan.test)
        for i, trained in enumerate((task, before)):
            losses[i] += float(F.cross_entropy(trained(x), y))
    # The measured differences were 0.09 and 0.19 for the two scenarios.
    assert losses[0] < losses[1] - 0.04, losses
