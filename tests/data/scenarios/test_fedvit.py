"""Tests of `FedViTScenario`: each client has few samples of each block of classes, in a client-specific order."""

import numpy as np
import pytest
from raising import raises

from lightning_fcl import FederatedStream
from lightning_fcl.data.datasets import ArrayDataset
from lightning_fcl.data.scenarios import FedViTScenario, SamplePool
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidValueError

# 100 classes of 80 to 179 samples, in random order. A fifth of each class is for testing.
SIZES = np.arange(80, 180)
Y = np.random.default_rng(0).permutation(np.repeat(np.arange(100), SIZES))
TEST = np.sort(np.concatenate([np.flatnonzero(c == Y)[::5] for c in range(100)]))
TRAIN = np.setdiff1d(np.arange(len(Y)), TEST)
OF_CLASS = np.bincount(Y[TRAIN])


def fedvit(y, train=None, test=TEST[:0], validation=TEST[:0], seed=0, **kwargs):
    pool = SamplePool(y, np.arange(len(y)) if train is None else train, test, validation)
    return FedViTScenario(**kwargs).plan(pool, seed)


def draw(**kwargs):
    return fedvit(Y, **{"train": TRAIN, "test": TEST, "seed": 3, **kwargs})


def rows(plan):
    """Return the samples of each client in the first round of each task."""
    step = plan.num_rounds // len(plan.tasks[plan.clients[0]])
    return {client: [current[client] for current in plan.train[::step]] for client in plan.clients}


def text(plan):
    return str(
        [{c: i.tolist() for c, i in current.items()} for current in plan.train] + [plan.tasks, plan.task_classes]
    )


def copies(plan):
    """Return the number of clients that have each sample."""
    return np.bincount(np.concatenate([part for own in rows(plan).values() for part in own]), minlength=len(Y))


@pytest.fixture(scope="module")
def plan():
    return draw()


def test_fedvit_plan_equals_paper(plan):
    assert plan.num_rounds == 100 and plan.clients == tuple(str(client) for client in range(20))
    assert plan.test is TEST and len(plan.validation) == len(plan.pretrain) == len(plan.base_samples) == 0
    assert plan.groups.tolist() == Y.tolist() and plan.groups_are_classes and plan.class_order is None
    for client in plan.clients:
        assert plan.experiences[client] == tuple(r // 10 for r in range(100))
        assert all(np.array_equal(plan.train[r][client], plan.train[r // 10 * 10][client]) for r in range(100))


def test_fedvit_clients_have_all_blocks_in_different_orders(plan):
    blocks = sorted(plan.task_classes["0"])
    assert sorted(c for block in blocks for c in block) == list(range(100)) and {len(b) for b in blocks} == {10}
    assert blocks != [tuple(range(first, first + 10)) for first in range(0, 100, 10)]
    assert all(sorted(plan.task_classes[client]) == blocks for client in plan.clients)
    assert len(set(plan.task_classes.values())) == 20
    assert plan.classes_of_task("7", 4) == plan.task_classes["7"][4]


def test_fedvit_classes_and_shares_are_in_range(plan):
    numbers, shares = [], []
    for client, parts in rows(plan).items():
        for e, part in enumerate(parts):
            own = plan.tasks[client][e]
            assert tuple(np.unique(Y[part])) == own and set(own) <= set(plan.classes_of_task(client, e))
            numbers.append(len(own))
            for label in own:
                count, whole = (Y[part] == label).sum(), OF_CLASS[label]
                assert 0.05 * whole - 0.5 <= count <= 0.1 * whole + 0.5
                shares.append(count / whole)
    # The values are uniformly distributed: 200 numbers of classes from 2 to 5, and about 700 shares of samples.
    assert np.bincount(numbers, minlength=6)[2:].min() > 30 and np.bincount(numbers)[:2].sum() == 0
    assert np.mean(shares) == pytest.approx(0.075, abs=0.002) and np.std(shares) == pytest.approx(0.0144, abs=0.002)


def test_fedvit_sufficient_samples_are_not_shared(plan):
    number = copies(plan)
    assert not number[TEST].any() and number.max() == 1
    for parts in rows(plan).values():
        everything = np.concatenate(parts)
        assert len(everything) == len(set(everything.tolist()))


def test_fedvit_insufficient_samples_are_shared_evenly():
    plan = draw(num_clients=100, rounds_per_task=1)
    number = copies(plan)
    assert not number[TEST].any()
    several = 0
    for label in range(100):
        own = number[TRAIN[Y[TRAIN] == label]]
        assert own.max() - own.min() <= 1
        several += own.max() > 1
    assert several > 90
    for parts in rows(plan).values():
        assert all(len(part) == len(np.unique(part)) for part in parts)


def test_fedvit_sample_fraction_one_gives_all_samples():
    plan = fedvit(
        np.repeat([0, 1], [10, 15]), num_tasks=1, num_clients=4, classes_per_client=[2, 2], sample_fraction=[1, 1.0]
    )
    assert all(part.tolist() == list(range(25)) for own in rows(plan).values() for part in own)


def test_fedvit_plan_depends_on_seed(plan):
    assert text(draw()) == text(plan)
    other = draw(seed=4)
    assert sorted(other.task_classes["0"]) != sorted(plan.task_classes["0"]) and text(other) != text(plan)


def test_fedvit_first_clients_do_not_depend_on_num_clients(plan):
    few = draw(num_clients=6)
    for r in range(100):
        assert all(np.array_equal(few.train[r][client], plan.train[r][client]) for client in few.clients)
    assert few.tasks == {client: plan.tasks[client] for client in few.clients}
    assert few.task_classes == {client: plan.task_classes[client] for client in few.clients}


def test_fedvit_common_order_keeps_samples_of_clients(plan):
    shared = draw(order_per_client=False)
    assert len(set(shared.task_classes.values())) == 1
    assert sorted(shared.task_classes["0"]) == sorted(plan.task_classes["0"])
    for client in plan.clients:
        one, other = (np.sort(np.concatenate(rows(p)[client])) for p in (shared, plan))
        assert np.array_equal(one, other)


def test_fedvit_class_order_defines_blocks():
    plan = draw(class_order="ascending", order_per_client=False, num_tasks=25, classes_per_client=(2, 4))
    assert plan.task_classes["3"] == tuple(tuple(range(first, first + 4)) for first in range(0, 100, 4))
    order = list(range(99, -1, -1))
    plan = draw(class_order=order, order_per_client=False)
    assert plan.task_classes["3"][0] == tuple(range(90, 100)) and plan.task_classes["3"][9] == tuple(range(10))


def test_fedvit_blocks_of_one_class():
    plan = draw(num_tasks=100, classes_per_client=(1, 1), num_clients=2, rounds_per_task=1)
    assert plan.tasks == plan.task_classes and {len(block) for block in plan.task_classes["1"]} == {1}


def test_fedvit_labels_with_gaps():
    y = np.repeat([2, 5, 7, 30], 40)
    plan = fedvit(y, num_tasks=2, num_clients=3, classes_per_client=(2, 2))
    assert sorted(c for block in plan.task_classes["0"] for c in block) == [2, 5, 7, 30]
    assert plan.class_split(0)[1] == () and set(plan.class_split(19)[0] + plan.class_split(19)[1]) == {2, 5, 7, 30}


REFUSED = [
    ({"num_tasks": 0}, "num_tasks", 0),
    ({"num_clients": 0}, "num_clients", 0),
    ({"rounds_per_task": 0}, "rounds_per_task", 0),
    ({"num_tasks": 7}, "num_tasks", 7),
    ({"classes_per_client": (1, 5)}, "classes_per_client", 1),
    ({"classes_per_client": (2, 11)}, "classes_per_client", 11),
    ({"classes_per_client": (5, 2)}, "classes_per_client", 2),
    ({"num_tasks": 25}, "classes_per_client", 5),
    ({"num_tasks": 100}, "classes_per_client", 2),
    ({"sample_fraction": (-0.1, 0.1)}, "sample_fraction", -0.1),
    ({"sample_fraction": (0.1, 0.05)}, "sample_fraction", 0.05),
    ({"sample_fraction": (0.5, 1.1)}, "sample_fraction", 1.1),
    ({"sample_fraction": (float("inf"), 0.1)}, "sample_fraction", float("inf")),
    ({"sample_fraction": (0.005, 0.1)}, "sample_fraction", 0.005),
    ({"class_order": "sorted"}, "class_order", "sorted"),
    ({"class_order": [0, 1]}, "class_order", [0, 1]),
]


@pytest.mark.parametrize(("options", "argument", "value"), REFUSED)
def test_fedvit_invalid_argument_raises(options, argument, value):
    with raises(InvalidValueError, argument, value=value):
        draw(**options)


def prepared(validation=0.0, **kwargs):
    y = Y.astype(np.int64)
    x = np.arange(len(y), dtype=np.float32)[:, None]
    arrays = ArrayDataset(x, y, None, tuple(map(str, range(100))), np.isin(np.arange(len(y)), TEST))
    stream = FederatedStream(arrays, FedViTScenario(**kwargs), split=Split("official", validation), seed=3)
    stream.setup("fit")
    return stream


def test_fedvit_stream_passes_splits_and_seed(plan):
    stream = prepared()
    assert text(stream.plan) == text(plan) and stream.plan.test.tolist() == TEST.tolist()
    stream = prepared(validation=0.25, num_clients=2, sample_fraction=[0.1, 0.2])
    assert stream.plan.clients == ("0", "1") and len(stream.plan.validation) == pytest.approx(len(TRAIN) / 4, rel=0.02)
    used = np.concatenate([part for own in rows(stream.plan).values() for part in own])
    assert not np.isin(used, np.concatenate([stream.plan.validation, TEST])).any()


def test_fedvit_client_round_contains_task_classes(plan):
    stream = prepared()
    for client, round_idx in (("0", 0), ("0", 10), ("13", 99)):
        client_round = stream.client_round(client, round_idx)
        assert client_round.experience_idx == round_idx // 10 and client_round.is_last_round == (round_idx % 10 == 9)
        assert client_round.task_classes == plan.task_classes[client][round_idx // 10]
        assert (
            set(client_round.labels.tolist())
            == set(plan.tasks[client][round_idx // 10])
            <= set(client_round.task_classes)
        )


def test_other_scenarios_have_no_task_classes():
    stream = FederatedStream("digits", seed=0)
    stream.setup("fit")
    assert stream.client_round("0", 0).task_classes == () and stream.plan.classes_of_task("0", 3) == ()
