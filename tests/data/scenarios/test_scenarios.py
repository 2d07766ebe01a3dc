"""Tests of the samples that scenarios assign to each client and round."""

from functools import partial

import numpy as np
import pytest
from raising import raises

from lightning_fcl.data.scenarios import (
    ClassIncremental,
    DomainIncremental,
    FLwFScenario,
    ODFCLScenario,
    SamplePool,
    stratified_split,
    with_history,
)
from lightning_fcl.errors import InvalidValueError, MissingValueError, UnknownNameError


def flwf(y, seed=0, **kwargs):
    return FLwFScenario(**kwargs).plan(SamplePool(y), seed)


def odfcl(y, seed=0, **kwargs):
    return ODFCLScenario(**kwargs).plan(SamplePool(y), seed)


def rng(seed=0):
    return np.random.default_rng(seed)


def counts(y, indices):
    """Return the number of samples among ``indices`` for each class."""
    return {int(c): int(n) for c, n in zip(*np.unique(y[indices], return_counts=True), strict=True)}


def test_stratified_split_is_stratified_and_complete():
    y = rng().permutation(np.repeat([0, 1, 5], [40, 20, 10]))
    rest, part = stratified_split(y, 0.3, rng())
    assert counts(y, part) == {0: 12, 1: 6, 5: 3}
    assert sorted([*rest, *part]) == list(range(70))
    assert not np.array_equal(part, stratified_split(y, 0.3, rng(1))[1])
    assert np.array_equal(part, stratified_split(y, 0.3, rng())[1])
    assert [rows.tolist() for rows in stratified_split(np.array([1, 0]), 0.0, rng())] == [[0, 1], []]


def class_experiences(indices, y, experiences, order, seed):
    """Return the samples and the classes of each experience of one client."""
    pool = SamplePool(y, clients={"a": indices}, classes=tuple(map(str, range(y.max() + 1))))
    plan = ClassIncremental(experiences, class_order=order).plan(pool, seed)
    return [current["a"] for current in plan.train], list(plan.tasks["a"])


@pytest.mark.parametrize("labels", [[0, 1, 2, 3, 4, 5], [2, 3, 5, 7, 11, 13]])
def test_class_incremental_divides_samples_by_class(labels):
    y = rng().permutation(np.repeat(labels, 7))
    indices = np.sort(rng(1).permutation(len(y))[:30])
    samples, groups = class_experiences(indices, y, 3, None, seed=4)
    assert [len(group) for group in groups] == [2, 2, 2]
    assert sorted(c for group in groups for c in group) == labels
    assert sorted(np.concatenate(samples)) == indices.tolist()
    for members, group in zip(samples, groups, strict=True):
        assert members.tolist() == [i for i in indices if y[i] in group]


def test_class_incremental_follows_class_order():
    y = np.repeat([2, 3, 5, 7], 3)
    _, groups = class_experiences(np.arange(12), y, 2, [7, 2, 6, 3, 5], seed=0)
    assert groups == [(2, 7), (3, 5)]
    _, groups = class_experiences(np.arange(12), y, 4, [7, 2, 3, 5], seed=0)
    assert groups == [(7,), (2,), (3,), (5,)]


def test_class_incremental_order_depends_on_seed():
    y = np.repeat(np.arange(10), 2)
    orders = [class_experiences(np.arange(20), y, 10, None, seed)[1] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def domain_experiences(indices, group, order):
    """Return the samples and the domain of each experience of one client."""
    pool = SamplePool(np.zeros_like(group), clients={"a": indices}, group=group)
    plan = DomainIncremental(domain_order=order).plan(pool)
    return [current.get("a", indices[:0]) for current in plan.train], list(plan.tasks["a"])


def test_domain_incremental_follows_domain_order():
    group = np.array([3, 1, 3, 2, 1, 3])
    indices = np.array([0, 1, 2, 4, 5])
    samples, groups = domain_experiences(indices, group, None)
    assert [s.tolist() for s in samples] == [[1, 4], [], [0, 2, 5]] and groups == [(1,), (2,), (3,)]
    samples, groups = domain_experiences(indices, group, [3, 2, 1])
    assert [s.tolist() for s in samples] == [[0, 2, 5], [], [1, 4]] and groups == [(3,), (2,), (1,)]


# Samples of each client in the first and in the second experience.
PARTS = {"a": [np.arange(10), np.arange(10, 20)], "b": [np.arange(20, 26), np.arange(26, 26)]}


def rounds_of(rounds_per_experience, samples_per_round, history):
    pool = SamplePool(
        np.zeros(26, int),
        clients={client: np.concatenate(parts) for client, parts in PARTS.items()},
        group=np.repeat([0, 1, 0], [10, 10, 6]),
    )
    return DomainIncremental(rounds_per_experience, samples_per_round, history=history).plan(pool).train


def test_rounds_have_all_samples_of_their_experience():
    rounds = rounds_of(2, None, "round")
    assert [sorted(current) for current in rounds] == [["a", "b"], ["a", "b"], ["a"], ["a"]]
    for r, current in enumerate(rounds):
        for client, indices in current.items():
            assert indices.tolist() == PARTS[client][r // 2].tolist()


def test_samples_per_round_never_reuses_samples():
    rounds = rounds_of(2, 3, "round")
    used = [i for current in rounds for indices in current.values() for i in indices]
    assert [{c: len(i) for c, i in current.items()} for current in rounds] == [{"a": 3, "b": 3}] * 2 + [{"a": 3}] * 2
    assert len(used) == len(set(used)) == 18
    for r, current in enumerate(rounds):
        assert all(set(indices) <= set(PARTS[client][r // 2]) for client, indices in current.items())


def test_history_adds_samples_of_other_rounds():
    single = rounds_of(2, 3, "round")
    seen, everything = (rounds_of(2, 3, history) for history in ("seen", "all"))
    for r in range(4):
        assert seen[r].keys() == everything[r].keys() == single[r].keys()
        for client in single[r]:
            past, ever = ([i for c in part for i in c.get(client, [])] for part in (single[: r + 1], single))
            assert seen[r][client].tolist() == sorted(past)
            assert everything[r][client].tolist() == sorted(ever)


def stream(scenario, y, group=None):
    owners = {"a": np.arange(0, len(y), 2), "b": np.arange(1, len(y), 2)}
    pool = SamplePool(y, clients=owners, group=group, classes=tuple("abcdefgh"), domains=("north", "east", "south"))
    return owners, scenario.plan(pool)


def test_class_order_is_shared_by_clients():
    y = rng().permutation(np.repeat(np.arange(4), 10))
    owners, plan = stream(ClassIncremental(2, 2, class_order=[3, 0, 1, 2]), y)
    assert plan.tasks == {"a": ((0, 3), (1, 2)), "b": ((0, 3), (1, 2))}
    assert plan.experiences == {"a": (0, 0, 1, 1), "b": (0, 0, 1, 1)}
    for r, current in enumerate(plan.train):
        for client, indices in current.items():
            assert indices.tolist() == [i for i in owners[client] if y[i] in plan.tasks[client][r // 2]]


def test_order_per_client_differs_between_clients():
    y = rng().permutation(np.repeat(np.arange(8), 20))
    owners, plan = stream(ClassIncremental(8, 2, order_per_client=True), y)
    assert plan.tasks["a"] != plan.tasks["b"]
    assert sorted(plan.tasks["a"]) == sorted(plan.tasks["b"]) == [(c,) for c in range(8)]
    for client in "ab":
        seen = np.concatenate([current[client] for current in plan.train])
        # Each experience has two rounds.
        assert counts(y, seen) == {c: 2 * n for c, n in counts(y, owners[client]).items()}


def test_class_incremental_unequal_sizes_and_order_by_name():
    y = rng().permutation(np.repeat(np.arange(8), 5))
    order = ["h", 0, "c", "b", 3, "e", "f", "g"]
    owners, plan = stream(ClassIncremental([4, 3, 1], class_order=order), y)
    assert plan.tasks["b"] == ((0, 1, 2, 7), (3, 4, 5), (6,)) and plan.num_rounds == 3
    for r, current in enumerate(plan.train):
        assert current["a"].tolist() == [i for i in owners["a"] if y[i] in plan.tasks["a"][r]]
    drawn = [stream(ClassIncremental([4, 3, 1]), y)[1].tasks["a"] for _ in range(2)]
    assert drawn[0] == drawn[1] and [len(classes) for classes in drawn[0]] == [4, 3, 1]


def test_class_order_per_client():
    y = np.tile(np.arange(4), 10)
    owners = {"a": np.arange(20), "b": np.arange(20, 40)}
    orders = {"a": ["d", "c", "b", "a"], "b": [0, 1, 2, 3]}
    pool = SamplePool(y, clients=owners, classes=tuple("abcd"))
    plan = ClassIncremental([1, 3], class_order=orders).plan(pool)
    assert plan.tasks == {"a": ((3,), (0, 1, 2)), "b": ((0,), (1, 2, 3))}
    with raises(MissingValueError, "class_order"):
        ClassIncremental(2, class_order={"a": [0, 1, 2, 3]}).plan(pool)
    domains = DomainIncremental(domain_order={"a": ["south", "north"], "b": ["north", "south"]})
    plan = domains.plan(SamplePool(y, clients=owners, group=y % 2, domains=("north", "south")))
    assert plan.tasks == {"a": ((1,), (0,)), "b": ((0,), (1,))}


def test_class_incremental_one_experience_needs_no_classes():
    pool = SamplePool(np.zeros(6, dtype=np.int64), clients={"a": np.arange(4), "b": np.arange(4, 6)})
    plan = ClassIncremental(1, 2).plan(pool)
    assert [current["a"].tolist() for current in plan.train] == [[0, 1, 2, 3]] * 2 and plan.class_split(1) == ((), ())


def test_domain_incremental_groups_are_domains():
    y, group = np.zeros(12, dtype=np.int64), np.repeat([0, 1, 2], 4)
    _, plan = stream(DomainIncremental(2, domain_order=[2, "north", 1]), y, group)
    assert plan.tasks["a"] == ((2,), (0,), (1,)) and plan.groups is group
    assert [np.unique(group[current["b"]]).tolist() for current in plan.train] == [[2], [2], [0], [0], [1], [1]]
    # The number of domains can equal the number of classes.
    assert plan.group_names(["cat", "dog", "bird"]) == ["0", "1", "2"]


def of_classes(number, experiences, order=None):
    return lambda: class_experiences(np.arange(number), np.arange(number), experiences, order, 0)


def of_domains(order):
    return lambda: domain_experiences(np.arange(2), np.array([1, 3]), order)


@pytest.mark.parametrize(
    ("call", "kind", "argument"),
    [
        *((of_classes(6, number), InvalidValueError, "num_experiences") for number in (0, -1, 4, 7)),
        (of_classes(8, [8, 0]), InvalidValueError, "num_experiences"),
        *((of_classes(3, 3, order), InvalidValueError, "class_order") for order in ([0, 1], [0, 1, 1], [0, 1, 2, 2])),
        (
            of_classes(3, 3, ["0", "x"]),
            UnknownNameError,
            "class_order",
        ),
        *((of_domains(order), InvalidValueError, "domain_order") for order in ([1], [1, 3, 3], [10, 30])),
        (
            lambda: stream(DomainIncremental(), np.zeros(4, dtype=np.int64)),
            InvalidValueError,
            "group",
        ),
        (
            lambda: rounds_of(3, 3, "round"),
            InvalidValueError,
            "samples_per_round",
        ),
        *(
            (
                partial(ClassIncremental, samples_per_round=number),
                InvalidValueError,
                "samples_per_round",
            )
            for number in (0, -2)
        ),
        (
            lambda: with_history([], "future"),
            InvalidValueError,
            "history",
        ),
        *(
            (
                partial(stratified_split, np.array([0, 1]), fraction, rng()),
                InvalidValueError,
                "fraction",
            )
            for fraction in (-0.1, 1.0, 1.5)
        ),
    ],
)
def test_scenario_invalid_argument_raises(call, kind, argument):
    with raises(kind, argument):
        call()


# The classes have the same numbers of samples as in UCI HAR.
Y = rng().permutation(np.repeat(np.arange(6), [1722, 1544, 1406, 1777, 1906, 1944]))


def test_flwf_plan_equals_paper():
    plan = flwf(Y)
    assert plan.num_rounds == 8 and plan.clients == ("client1", "generalized")
    assert plan.experiences == {"client1": (0, 0, 0, 0, 1, 1, 1, 1), "generalized": (0,) * 8}
    assert plan.tasks == {"client1": ((1,), (2,)), "generalized": ((0, 1, 2, 3, 4, 5),)}
    for r, current in enumerate(plan.train):
        assert counts(Y, current["client1"]) == {1 if r < 4 else 2: 120}
        assert counts(Y, current["generalized"]) == dict.fromkeys(range(6), 20)
    assert counts(Y, plan.test) == dict.fromkeys(range(6), 100)
    assert counts(Y, plan.pretrain) == dict.fromkeys(range(6), 10)
    assert plan.groups.tolist() == Y.tolist() and len(plan.validation) == 0


def test_flwf_uses_every_sample_once():
    plan = flwf(Y)
    used = [*plan.test, *plan.pretrain, *(i for current in plan.train for part in current.values() for i in part)]
    assert len(used) == len(set(used)) == 600 + 60 + 8 * 2 * 120


def test_flwf_custom_tasks():
    plan = flwf(Y, num_rounds=6, samples_per_round=12, tasks={"x": [[0, 3], [1], [5, 2, 4]]}, history="seen")
    assert plan.experiences == {"x": (0, 0, 1, 1, 2, 2)}
    assert counts(Y, plan.train[5]["x"]) == {0: 12, 3: 12, 1: 24, 5: 8, 2: 8, 4: 8}


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        (
            {"test_per_class": 500, "samples_per_round": 240},
            "num_rounds",
        ),
        (
            {"tasks": {"a": [[9]]}},
            "num_rounds",
        ),
        ({"num_rounds": 7}, "num_rounds"),
        ({"samples_per_round": 100}, "samples_per_round"),
    ],
)
def test_flwf_invalid_argument_raises(options, argument):
    with raises(InvalidValueError, argument):
        flwf(Y, **options)


# Twelve people have at least 35 images, two have 34, and two have few.
PEOPLE = rng(3).permutation(np.repeat(np.arange(16), [40] * 10 + [35] * 2 + [34] * 2 + [5, 1]))


def held(plan, session, rounds=20):
    """Return the training samples of each node in a session. Check that all rounds of the session are equal."""
    for current in plan.train[session * rounds : (session + 1) * rounds]:
        assert {node: part.tolist() for node, part in current.items()} == {
            node: part.tolist() for node, part in plan.train[session * rounds].items()
        }
    return plan.train[session * rounds]


def test_odfcl_plan_equals_paper():
    plan = odfcl(PEOPLE)
    numbers = np.argsort(plan.class_order)[PEOPLE]
    assert plan.num_rounds == 40 and plan.clients == ("node1", "node2", "node3") and plan.num_outputs == 10
    assert sorted(plan.class_order) == list(range(16)) and set(plan.class_order[:10]) <= set(range(12))
    assert counts(numbers, plan.base_samples) == dict.fromkeys(range(4), 28)
    assert counts(numbers, plan.test) == dict.fromkeys(range(10), 7)
    assert len(plan.validation) == 0
    sizes = np.bincount(PEOPLE)[plan.class_order]
    assert counts(numbers, plan.pretrain) == {c: sizes[c] for c in range(10, 16)}
    for session in (0, 1):
        for n, (node, part) in enumerate(held(plan, session).items()):
            assert node == f"node{n + 1}"
            assert counts(numbers, part) == {4 + 3 * session + n: 28}
            assert plan.tasks[node][session + 1] == (4 + 3 * session + n,)
    assert plan.experiences == dict.fromkeys(plan.clients, (1,) * 20 + (2,) * 20)
    assert {tasks[0] for tasks in plan.tasks.values()} == {(0, 1, 2, 3)}
    assert plan.class_split(0) == plan.class_split(19) == ((4, 5, 6), (0, 1, 2, 3))
    assert plan.class_split(20) == plan.class_split(39) == ((7, 8, 9), (0, 1, 2, 3, 4, 5, 6))
    assert plan.groups[plan.test].tolist() == numbers[plan.test].tolist()


@pytest.mark.parametrize("validation", [0, 3])
@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 10])
def test_odfcl_uses_every_sample_once(nodes, validation):
    plan = odfcl(PEOPLE, num_nodes=nodes, validation_per_class=validation)
    sessions = [np.concatenate(list(held(plan, session).values())) for session in (0, 1)]
    numbers = np.argsort(plan.class_order)[PEOPLE]
    for session, samples in enumerate(sessions):
        assert counts(numbers, samples) == dict.fromkeys(range(4 + 3 * session, 7 + 3 * session), 28 - validation)
    parts = [*sessions, plan.base_samples, plan.test, plan.validation, plan.pretrain]
    used = np.concatenate(parts)
    assert len(used) == len(set(used.tolist())) == 10 * 35 + int((numbers >= 10).sum())
    assert counts(numbers, plan.validation) == ({c: validation for c in range(10)} if validation else {})
    for node in plan.clients:
        for session in (0, 1):
            assert set(numbers[plan.train[20 * session][node]]) == set(plan.tasks[node][session + 1])
    assert plan.class_split(25) == ((7, 8, 9), (0, 1, 2, 3, 4, 5, 6))


@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
def test_odfcl_history_adds_seen_samples_and_base_share(nodes):
    """With `history="seen"`, a node trains on the samples of its rounds so far and on its share of the base session.

    With `history="all"`, the node trains on the samples of all its rounds and on this share from the first round on.
    """
    plain, seen, everything = (odfcl(PEOPLE, num_nodes=nodes, history=h) for h in ("round", "seen", "all"))
    shares = [np.concatenate(list(plan.train[0].values())) for plan in (seen, everything)]
    assert sorted(shares[0]) == sorted([*plain.base_samples, *np.concatenate(list(plain.train[0].values()))])
    for node in plain.clients:
        first, second = plain.train[0][node].tolist(), plain.train[20][node].tolist()
        base = set(seen.train[0][node]) - set(first)
        assert base <= set(plain.base_samples)
        assert set(seen.train[20][node]) == {*base, *first, *second} == set(everything.train[0][node])
    assert len(shares[1]) == len(set(shares[1])) == 280
    assert seen.class_split(25) == plain.class_split(25)


@pytest.mark.parametrize("plan", [partial(flwf, Y), partial(odfcl, PEOPLE, validation_per_class=5)])
def test_paper_plans_depend_on_seed(plan):
    def parts(seed):
        drawn = plan(seed=seed)
        found = [
            drawn.test,
            drawn.validation,
            drawn.base_samples,
            drawn.pretrain,
            drawn.class_order,
            *drawn.train[0].values(),
        ]
        return [rows.tolist() for rows in found if rows is not None and len(rows)]

    assert parts(0) == parts(0)
    assert all(left != right for left, right in zip(parts(0), parts(1), strict=True))


def test_odfcl_custom_sizes():
    plan = odfcl(
        PEOPLE, num_people=8, num_base_people=2, num_sessions=3, num_nodes=2, train_per_class=6, test_per_class=2,
        pretrain_per_class=3,
        rounds_per_session=4,
    )  # fmt: skip
    numbers = np.argsort(plan.class_order)[PEOPLE]
    assert plan.num_rounds == 12 and plan.num_outputs == 8
    assert plan.tasks == {"node1": ((0, 1), (2,), (4,), (6,)), "node2": ((0, 1), (3,), (5,), (7,))}
    assert counts(numbers, plan.pretrain) == {c: min(3, n) for c, n in counts(numbers, np.arange(422)).items() if c > 7}
    assert plan.class_split(11) == ((6, 7), (0, 1, 2, 3, 4, 5))
    assert len(odfcl(PEOPLE, pretrain_per_class=0).pretrain) == 0


def test_odfcl_accepts_labels_with_gaps():
    # No person has label 4 or 5.
    y = np.where(PEOPLE > 3, PEOPLE + 2, PEOPLE)
    plan = odfcl(y)
    numbers = np.argsort(plan.class_order)[y]
    assert counts(numbers, plan.base_samples) == dict.fromkeys(range(4), 28)
    assert counts(numbers, plan.test) == dict.fromkeys(range(10), 7)
    assert set(numbers[plan.pretrain]) == {c for c in range(10, 18) if (y == plan.class_order[c]).any()}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_base_people": 0}, (InvalidValueError, "num_base_people")),
        ({"num_sessions": 0}, (InvalidValueError, "num_sessions")),
        ({"num_nodes": 0}, (InvalidValueError, "num_nodes")),
        ({"rounds_per_session": 0}, (InvalidValueError, "rounds_per_session")),
        ({"pretrain_per_class": -1}, (InvalidValueError, "pretrain_per_class")),
        (
            {"num_people": 9},
            (InvalidValueError, "num_people"),
        ),
        (
            {"num_people": 4},
            (InvalidValueError, "num_people"),
        ),
        (
            {"num_people": 14},
            (InvalidValueError, "num_people"),
        ),
        ({"validation_per_class": 28}, (InvalidValueError, "validation_per_class")),
        ({"validation_per_class": -1}, (InvalidValueError, "validation_per_class")),
        ({"test_per_class": 0}, (InvalidValueError, "test_per_class")),
        ({"history": "none"}, (UnknownNameError, "history")),
    ],
)
def test_odfcl_invalid_argument_raises(options, expected):
    with raises(*expected):
        odfcl(PEOPLE, **options)


def test_class_split_new_classes_are_new_to_all_clients():
    """A class counts as new if no client has trained on it before. Clients can be in different experiences."""
    plan = flwf(Y, tasks={"a": [[0], [1]], "b": [[1, 2], [0, 3]]}, samples_per_round=12)
    assert plan.class_split(0) == ((0, 1, 2), ()) and plan.class_split(7) == ((3,), (0, 1, 2))
    assert flwf(Y).class_split(7) == ((0, 2, 3, 4, 5), (1,))
