"""Partitions use every sample at most once, follow their generator, and refuse the impossible."""

import re

import numpy as np
import pytest

from lightning_fcl.data.partition import IID, ClassSubsets, Dirichlet, Natural, Shards

Y = np.random.default_rng(5).integers(0, 6, size=600)


def by_client(client):
    return Natural().divide(np.zeros(len(client), int), client, None)


def iid(n, clients, rng):
    return IID(clients).divide(np.zeros(n, int), None, rng)


def dirichlet(y, clients, alpha, rng, **kwargs):
    return Dirichlet(clients, alpha, **kwargs).divide(y, None, rng)


def shards(y, clients, shards_per_client, rng):
    return Shards(clients, shards_per_client).divide(y, None, rng)


def class_subsets(y, clients, classes_per_client, rng, fraction=1.0):
    return ClassSubsets(clients, classes_per_client, fraction).divide(y, None, rng)


SEEDED = {
    "iid": lambda rng: iid(len(Y), 7, rng),
    "dirichlet": lambda rng: dirichlet(Y, 7, 0.3, rng),
    "shards": lambda rng: shards(Y, 7, 3, rng),
    "class_subsets": lambda rng: class_subsets(Y, 7, 2, rng, 0.2),
}
USES_ALL = ["iid", "dirichlet", "shards"]


@pytest.mark.parametrize("name", SEEDED)
def test_indices_are_sorted_disjoint_and_in_range(name):
    parts = SEEDED[name](np.random.default_rng(0))
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
def test_the_generator_decides(name):
    def draw(seed):
        return [index.tolist() for index in SEEDED[name](np.random.default_rng(seed)).values()]

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)


@pytest.mark.parametrize("name", SEEDED)
def test_the_global_generator_is_left_alone(name):
    np.random.seed(3)
    before = np.random.get_state()[1].copy()
    SEEDED[name](np.random.default_rng(0))
    np.testing.assert_array_equal(np.random.get_state()[1], before)


def test_by_client_gives_each_owner_all_of_its_samples():
    client = np.array([10, 2, 10, 30, 2])
    parts = by_client(client)
    assert {name: index.tolist() for name, index in parts.items()} == {"2": [1, 4], "10": [0, 2], "30": [3]}
    assert list(parts) == ["2", "10", "30"]
    named = by_client(np.array(["S3", "S2", "S3"]))
    assert {name: index.tolist() for name, index in named.items()} == {"S2": [1], "S3": [0, 2]}


def test_iid_sizes_differ_by_one_at_most():
    sizes = sorted(len(index) for index in iid(23, 5, np.random.default_rng(0)).values())
    assert sizes == [4, 4, 5, 5, 5]
    assert iid(3, 1, np.random.default_rng(0))["0"].tolist() == [0, 1, 2]


def counts(parts, y=Y):
    return np.array([np.bincount(y[index], minlength=6) for index in parts.values()])


def test_dirichlet_follows_the_proportions_of_its_generator():
    parts = dirichlet(Y, 4, 0.7, np.random.default_rng(9), min_size=0)
    # The same draws by hand: for each class one permutation of its members, then one Dirichlet vector.
    rng = np.random.default_rng(9)
    for label in range(6):
        members = np.flatnonzero(np.equal(Y, label))
        rng.permutation(members)
        shares = rng.dirichlet([0.7] * 4)
        assert np.abs(counts(parts)[:, label] - shares * len(members)).max() <= 1


def test_dirichlet_becomes_even_with_large_alpha_and_skewed_with_small():
    totals = np.bincount(Y)
    even = counts(dirichlet(Y, 4, 1e6, np.random.default_rng(0)))
    assert np.abs(even - totals / 4).max() <= 2
    skewed = counts(dirichlet(Y, 4, 1e-3, np.random.default_rng(0), min_size=0))
    assert (skewed.max(axis=0) == totals).all()


def test_dirichlet_draws_again_until_everybody_has_enough():
    once = dirichlet(Y, 6, 0.3, np.random.default_rng(1), min_size=0)
    again = dirichlet(Y, 6, 0.3, np.random.default_rng(1), min_size=40)
    assert min(len(index) for index in once.values()) < 40 <= min(len(index) for index in again.values())
    assert sum(len(index) for index in again.values()) == len(Y)


def test_just_enough_is_enough():
    parts = dirichlet([0] * 10, 2, 1e6, np.random.default_rng(0), min_size=5)
    assert [len(index) for index in parts.values()] == [5, 5]


def test_a_client_s_part_of_a_class_is_drawn():
    y = np.zeros(100, dtype=np.int64)
    drawn = {tuple(class_subsets(y, 1, 1, np.random.default_rng(seed), 0.1)["0"]) for seed in range(3)}
    assert len(drawn) == 3 and tuple(range(10)) not in drawn


def test_shards_are_whole_pieces_of_the_sorted_labels():
    y = np.repeat(np.arange(10), 60)[np.random.default_rng(0).permutation(600)]
    parts = shards(y, clients=10, shards_per_client=2, rng=np.random.default_rng(1))
    in_order = [[i for i in range(600) if y[i] == label] for label in range(10)]
    pieces = {tuple(members[start : start + 30]) for members in in_order for start in (0, 30)}
    for index in parts.values():
        whole = [piece for piece in pieces if set(piece) <= set(index.tolist())]
        assert len(whole) == 2
        assert sorted(sum(whole, ())) == index.tolist()


def test_class_subsets_with_a_fraction_that_fits():
    y = np.repeat(np.arange(10), 100)
    parts = class_subsets(y, 5, 3, np.random.default_rng(0), fraction=0.1)
    for index in parts.values():
        assert np.unique(y[index], return_counts=True)[1].tolist() == [10, 10, 10]
    assert len({tuple(np.unique(y[index])) for index in parts.values()}) > 1


def test_class_subsets_share_a_class_equally_when_it_is_asked_for_too_often():
    y = np.repeat([3, 8], [90, 30])
    parts = class_subsets(y, 6, 2, np.random.default_rng(0))
    assert [np.unique(y[index], return_counts=True)[1].tolist() for index in parts.values()] == [[15, 5]] * 6
    assert sum(len(index) for index in parts.values()) == 120
    alone = class_subsets(y, 1, 1, np.random.default_rng(0))["0"]
    assert alone.tolist() in (list(range(90)), list(range(90, 120)))


@pytest.mark.parametrize(("clients", "each"), [(7, 2), (3, 2), (6, 1), (4, (1, 3))])
def test_class_subsets_leave_no_class_out_where_there_is_room(clients, each):
    y, lost = np.repeat(np.arange(6), 40), 0
    for seed in range(40):
        parts, old = class_subsets(y, clients, each, np.random.default_rng(seed)), np.random.default_rng(seed)
        drawn = []  # as the partition draws them
        for _ in range(clients):
            size = old.integers(*(each if isinstance(each, tuple) else (each, each)), endpoint=True)
            drawn.append(set(old.choice(6, size=size, replace=False).tolist()))
            old.uniform(1.0, 1.0)
        found = [set(y[rows].tolist()) for rows in parts.values()]
        assert [len(own) for own in found] == [len(own) for own in drawn]
        room = sum(map(len, drawn)) >= 6
        everything = set.union(*drawn) == set(range(6))
        if everything or not room:
            assert found == drawn  # nothing is left out, or there is no room: as drawn
        else:
            lost += 1
            assert set.union(*found) == set(range(6))
    assert lost  # so that the test has seen some


def test_class_subsets_take_ranges():
    y = np.repeat(np.arange(10), 400)
    parts = class_subsets(y, 20, (2, 5), np.random.default_rng(0), fraction=(0.05, 0.1))
    numbers, shares = [], []
    for index in parts.values():
        held = np.unique(y[index], return_counts=True)[1]
        numbers.append(len(held))
        shares.append(held / 400)
    assert set(numbers) == {2, 3, 4, 5}
    flat = np.concatenate(shares)
    assert flat.min() >= 0.05 - 1 / 400 and flat.max() <= 0.1 + 1 / 400
    # One share for each client, another for the next.
    assert all(np.ptp(own) <= 1 / 400 + 1e-12 for own in shares)
    assert np.ptp([own.mean() for own in shares]) > 0.02


def test_class_subsets_give_one_sample_to_whoever_asks_for_one():
    y = np.repeat(np.arange(3), 10)
    for seed in range(20):
        parts = class_subsets(y, 8, (1, 3), np.random.default_rng(seed), fraction=0.1)
        assert all(set(np.unique(y[index], return_counts=True)[1].tolist()) == {1} for index in parts.values())


def rng():
    return np.random.default_rng(0)


ERRORS = {
    "no clients": (lambda: iid(5, 0, rng()), "Expected `clients` to be between 1 and 5 but got 0."),
    "more clients than samples": (lambda: iid(5, 6, rng()), "Expected `clients` to be between 1 and 5"),
    "alpha 0": (lambda: dirichlet(Y, 5, 0.0, rng()), "Expected `alpha` to be between 1e-09 and 1000000.0 but got 0.0."),
    "alpha NaN": (lambda: dirichlet(Y, 5, float("nan"), rng()), "but got nan."),
    "min_size too large": (
        lambda: dirichlet(Y, 7, 1.0, rng(), min_size=86),
        "Expected a division with `min_size`=86 samples per client but 1000 draws with `alpha`=1.0 and 7 clients",
    ),
    "min_size never reached": (
        lambda: dirichlet([0, 0, 0, 0], 2, 1e-4, rng(), min_size=2),
        "Expected a division with `min_size`=2 samples per client but 1000 draws with `alpha`=0.0001 and 2 clients",
    ),
    "no shards": (lambda: shards(Y, 7, 0, rng()), "Expected `shards_per_client` to be between 1 and 85 but got 0."),
    "too many shards": (lambda: shards(Y, 7, 86, rng()), "between 1 and 85 but got 86."),
    "too many classes": (
        lambda: class_subsets(Y, 5, 7, rng()),
        "Expected `classes_per_client` to be between 1 and 6 but got 7.",
    ),
    "classes the wrong way round": (
        lambda: class_subsets(Y, 5, (4, 2), rng()),
        "Expected `classes_per_client` to be between 4 and 6 but got 2.",
    ),
    "fraction 0": (
        lambda: class_subsets(Y, 5, 2, rng(), 0.0),
        "Expected `fraction` to be above 0 and at most 1 but got 0.0.",
    ),
    "fraction 1.7": (lambda: class_subsets(Y, 5, 2, rng(), 1.7), "at most 1 but got 1.7."),
    "fraction too small": (
        lambda: class_subsets(np.repeat([0, 1], 20), 3, 2, rng(), 0.01),
        "Expected at least one sample of class 0 for client '0' but 3 clients hold the class, which has 20 samples, "
        "and the `fraction` of this one is 0.01. Raise `fraction`, or lower",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_impossible_arguments(case):
    call, message = ERRORS[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
