"""Tests that partitions use every sample at most once, use only their generator, and reject invalid arguments."""

import numpy as np
import pytest
from raising import raises

from lightning_fcl import FederatedStream
from lightning_fcl.data.partition import IID, ByClientId, ClassSubsets, Dirichlet, Shards
from lightning_fcl.data.scenarios import (
    Blurry,
    ClassIncremental,
    Delayed,
    DomainIncremental,
    FedViTScenario,
    FLwFScenario,
    GrowingClasses,
    ODFCLScenario,
    Online,
    Stationary,
)
from lightning_fcl.errors import InvalidValueError

Y = np.random.default_rng(5).integers(0, 6, size=600)


def divide(partition, y=Y, owner=None, seed=0):
    return partition.partition(np.asarray(y), owner, np.random.default_rng(seed))


SEEDED = {
    "iid": IID(7), "dirichlet": Dirichlet(7, 0.3), "shards": Shards(7, 3), "class_subsets": ClassSubsets(7, 2, 0.2)
}  # fmt: skip
USES_ALL = ["iid", "dirichlet", "shards"]


@pytest.mark.parametrize("name", SEEDED)
def test_partition_indices_are_sorted_disjoint_and_in_range(name):
    parts = divide(SEEDED[name])
    assert list(parts) == [str(client) for client in range(7)]
    joined = np.concatenate(list(parts.values()))
    assert len(np.unique(joined)) == len(joined)
    assert joined.min() >= 0 and joined.max() < len(Y)
    for index in parts.values():
        assert index.dtype == np.int64
        assert (np.diff(index) > 0).all()
    if name in USES_ALL:
        assert len(joined) == len(Y)


@pytest.mark.parametrize("name", SEEDED)
def test_partition_depends_on_its_generator(name):
    def draw(seed):
        return [index.tolist() for index in divide(SEEDED[name], seed=seed).values()]

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)


@pytest.mark.parametrize("name", SEEDED)
def test_partition_does_not_use_global_generator(name):
    np.random.seed(3)
    before = np.random.get_state()[1].copy()
    divide(SEEDED[name])
    np.testing.assert_array_equal(np.random.get_state()[1], before)


def test_by_client_id_assigns_all_samples_to_their_owner():
    parts = divide(ByClientId(), np.zeros(5, int), np.array([10, 2, 10, 30, 2]))
    assert {name: index.tolist() for name, index in parts.items()} == {"2": [1, 4], "10": [0, 2], "30": [3]}
    assert list(parts) == ["2", "10", "30"]
    named = divide(ByClientId(), np.zeros(3, int), np.array(["S3", "S2", "S3"]))
    assert {name: index.tolist() for name, index in named.items()} == {"S2": [1], "S3": [0, 2]}


def test_iid_sizes_differ_by_at_most_one():
    sizes = sorted(len(index) for index in divide(IID(5), np.zeros(23, int)).values())
    assert sizes == [4, 4, 5, 5, 5]
    assert divide(IID(1), np.zeros(3, int))["0"].tolist() == [0, 1, 2]


def counts(parts, y=Y):
    return np.array([np.bincount(y[index], minlength=6) for index in parts.values()])


def test_dirichlet_follows_the_proportions_of_its_generator():
    parts = divide(Dirichlet(4, 0.7, min_partition_size=0), seed=9)
    # Repeat the draws of the partition: for each class, one permutation of its members and one Dirichlet vector.
    rng = np.random.default_rng(9)
    for label in range(6):
        members = np.flatnonzero(np.equal(Y, label))
        rng.permutation(members)
        shares = rng.dirichlet([0.7] * 4)
        assert np.abs(counts(parts)[:, label] - shares * len(members)).max() <= 1


def test_dirichlet_large_alpha_is_even_and_small_alpha_is_skewed():
    totals = np.bincount(Y)
    even = counts(divide(Dirichlet(4, 1e6)))
    assert np.abs(even - totals / 4).max() <= 2
    skewed = counts(divide(Dirichlet(4, 1e-3, min_partition_size=0)))
    assert (skewed.max(axis=0) == totals).all()


def test_dirichlet_redraws_until_min_partition_size():
    once = divide(Dirichlet(6, 0.3, min_partition_size=0), seed=1)
    again = divide(Dirichlet(6, 0.3, min_partition_size=40), seed=1)
    assert min(len(index) for index in once.values()) < 40 <= min(len(index) for index in again.values())
    assert sum(len(index) for index in again.values()) == len(Y)


def test_dirichlet_exactly_min_partition_size_is_accepted():
    parts = divide(Dirichlet(2, 1e6, min_partition_size=5), [0] * 10)
    assert [len(index) for index in parts.values()] == [5, 5]


def test_class_subsets_samples_of_a_class_are_random():
    y = np.zeros(100, dtype=np.int64)
    drawn = {tuple(divide(ClassSubsets(1, 1, fraction=0.1), y, seed=seed)["0"]) for seed in range(3)}
    assert len(drawn) == 3 and tuple(range(10)) not in drawn


def test_shards_are_contiguous_in_sorted_labels():
    y = np.repeat(np.arange(10), 60)[np.random.default_rng(0).permutation(600)]
    parts = divide(Shards(10, 2), y, seed=1)
    in_order = [[i for i in range(600) if y[i] == label] for label in range(10)]
    pieces = {tuple(members[start : start + 30]) for members in in_order for start in (0, 30)}
    for index in parts.values():
        whole = [piece for piece in pieces if set(piece) <= set(index.tolist())]
        assert len(whole) == 2
        assert sorted(sum(whole, ())) == index.tolist()


def test_class_subsets_fraction_of_each_class():
    y = np.repeat(np.arange(10), 100)
    parts = divide(ClassSubsets(5, 3, fraction=0.1), y)
    for index in parts.values():
        assert np.unique(y[index], return_counts=True)[1].tolist() == [10, 10, 10]
    assert len({tuple(np.unique(y[index])) for index in parts.values()}) > 1


def test_class_subsets_divide_overrequested_class_equally():
    y = np.repeat([3, 8], [90, 30])
    parts = divide(ClassSubsets(6, 2), y)
    assert [np.unique(y[index], return_counts=True)[1].tolist() for index in parts.values()] == [[15, 5]] * 6
    assert sum(len(index) for index in parts.values()) == 120
    alone = divide(ClassSubsets(1, 1), y)["0"]
    assert alone.tolist() in (list(range(90)), list(range(90, 120)))


@pytest.mark.parametrize(("clients", "each"), [(7, 2), (3, 2), (6, 1), (4, (1, 3))])
def test_class_subsets_use_all_classes_if_places_suffice(clients, each):
    y, lost = np.repeat(np.arange(6), 40), 0
    for seed in range(40):
        parts, old = divide(ClassSubsets(clients, each), y, seed=seed), np.random.default_rng(seed)
        # Draw the classes of each client in the same way as the partition.
        drawn = []
        for _ in range(clients):
            size = old.integers(*(each if isinstance(each, tuple) else (each, each)), endpoint=True)
            drawn.append(set(old.choice(6, size=size, replace=False).tolist()))
            old.uniform(1.0, 1.0)
        found = [set(y[rows].tolist()) for rows in parts.values()]
        assert [len(own) for own in found] == [len(own) for own in drawn]
        room = sum(map(len, drawn)) >= 6
        everything = set.union(*drawn) == set(range(6))
        if everything or not room:
            # All classes are drawn, or there are too few places for all classes. In both cases, the partition does
            # not change the draws.
            assert found == drawn
        else:
            lost += 1
            assert set.union(*found) == set(range(6))
    # At least one draw must leave out a class. Otherwise, the test does not check the change of the draws.
    assert lost


def test_class_subsets_accept_ranges():
    y = np.repeat(np.arange(10), 400)
    parts = divide(ClassSubsets(20, (2, 5), fraction=(0.05, 0.1)), y)
    numbers, shares = [], []
    for index in parts.values():
        held = np.unique(y[index], return_counts=True)[1]
        numbers.append(len(held))
        shares.append(held / 400)
    assert set(numbers) == {2, 3, 4, 5}
    flat = np.concatenate(shares)
    assert flat.min() >= 0.05 - 1 / 400 and flat.max() <= 0.1 + 1 / 400
    # Each client has about the same share of all classes, and the shares of clients differ.
    assert all(np.ptp(own) <= 1 / 400 + 1e-12 for own in shares)
    assert np.ptp([own.mean() for own in shares]) > 0.02


def test_class_subsets_small_request_gets_one_sample():
    y = np.repeat(np.arange(3), 10)
    for seed in range(20):
        parts = divide(ClassSubsets(8, (1, 3), fraction=0.1), y, seed=seed)
        assert all(set(np.unique(y[index], return_counts=True)[1].tolist()) == {1} for index in parts.values())


ERRORS = {
    "no clients": (IID(0), [0] * 5, "num_clients"),
    "more clients than samples": (IID(6), [0] * 5, "num_clients"),
    "min_size too large": (Dirichlet(7, 1.0, min_partition_size=86), Y, "min_partition_size"),
    "min_size never reached": (Dirichlet(2, 1e-4, min_partition_size=2), [0] * 4, "min_partition_size"),
    "no shards": (Shards(7, 0), Y, "shards_per_client"),
    "too many shards": (Shards(7, 86), Y, "shards_per_client"),
    "too many classes": (ClassSubsets(5, 7), Y, "classes_per_client"),
    "classes the wrong way round": (ClassSubsets(5, (4, 2)), Y, "classes_per_client"),
    "fraction too small": (
        ClassSubsets(3, 2, 0.01),
        np.repeat([0, 1], 20),
        "fraction",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_partition_impossible_division_raises(case):
    partition, y, argument = ERRORS[case]
    with raises(InvalidValueError, argument):
        divide(partition, y)


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: Dirichlet(5, 0.0), "alpha"),
        (lambda: Dirichlet(5, float("nan")), "alpha"),
        (lambda: ClassSubsets(5, 2, 0.0), "fraction"),
        (lambda: ClassSubsets(5, 2, 1.7), "fraction"),
    ],
)
def test_partition_invalid_argument_raises(make, argument):
    with raises(InvalidValueError, argument):
        make()


@pytest.mark.parametrize("name", [*SEEDED, "by-client-id"])
def test_partition_needs_classes_equals_dependence_on_labels(name):
    partition = SEEDED.get(name, ByClientId())
    parts = [divide(partition, y, np.arange(600) % 7) for y in (Y, Y[::-1])]
    differs = any(not np.array_equal(one, other) for one, other in zip(*(p.values() for p in parts), strict=True))
    assert partition.needs_classes == differs


REGRESSION = {
    "Dirichlet": (Stationary(), Dirichlet(3)),
    "Shards": (Stationary(), Shards(3)),
    "ClassSubsets": (DomainIncremental(), ClassSubsets(3, 1)),
    "ClassIncremental": (ClassIncremental(2), None),
    "Blurry": (Blurry(1), None),
    "GrowingClasses": (GrowingClasses(1), None),
    "FLwFScenario": (FLwFScenario(), None),
    "ODFCLScenario": (ODFCLScenario(), None),
    "FedViTScenario": (FedViTScenario(), None),
    "Online of Blurry": (Online(Blurry(1)), None),
    "Delayed of GrowingClasses": (Delayed(GrowingClasses(1)), None),
}
ANY_TARGETS = [
    (Stationary(), IID(3)),
    (ClassIncremental(1), IID(3)),
    (DomainIncremental(), IID(3)),
    (Online(Stationary()), IID(3)),
    (Delayed(DomainIncremental()), IID(3)),
    (Stationary(), ByClientId()),
]


def regression(scenario, partition, **kwargs):
    """Return a prepared stream of floating-point targets."""
    x, number = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32), np.arange(60)
    owners = {"client_ids": number % 3} if isinstance(partition, ByClientId) else {}
    stream = FederatedStream.from_arrays(
        x, x[:, 0], group=number % 2, scenario=scenario, partition=partition, **owners, **kwargs
    )
    stream.setup("fit")
    return stream


@pytest.mark.parametrize("name", REGRESSION)
def test_floating_targets_with_component_that_needs_classes_raise(name):
    scenario, partition = REGRESSION[name]
    with raises(InvalidValueError, "y"):
        regression(scenario, partition)
    remedy = {"scenario": Stationary()} if partition is None else {"partition": IID()}
    assert regression(**{"scenario": scenario, "partition": partition, **remedy}).plan.num_rounds


@pytest.mark.parametrize(("scenario", "partition"), ANY_TARGETS)
def test_floating_targets_with_other_components_work(scenario, partition):
    assert len(regression(scenario, partition).plan.clients) == 3
