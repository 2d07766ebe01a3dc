"""Tests of merging the changes that several clients make to lists and counters."""

from collections import Counter, defaultdict

import numpy as np
import pytest
import torch

from lightning_fcl.simulation.growth import apply, change, is_merged, joined, snapshot


def grow(value, steps):
    """Return a snapshot of a value before the steps, and a list of the steps' changes without None."""
    start, found = snapshot(value, copies=True), []
    for step in steps:
        before = snapshot(value, copies=True)
        step(value)
        found.append(change(before, value))
    return start, [part for part in found if part is not None]


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (lambda: [1], [lambda v: v.append(2), lambda v: v.extend([3, 4])]),
        (lambda: {"n": 1}, [lambda v: v.update(n=v["n"] + 1), lambda v: v.update(n=v["n"] + 5)]),
        (lambda: {"a": []}, [lambda v: v["a"].append(1), lambda v: v.update(b=[2])]),
        (Counter, [lambda v: v.update("ab"), lambda v: v.update("bc")]),
        (lambda: defaultdict(list), [lambda v: v[1].append(0), lambda v: v[1].append(1), lambda v: v[2].append(2)]),
        (lambda: {"a": {}}, [lambda v: v["a"].update(x={"y": 1}), lambda v: v["a"]["x"].update(y=3)]),
        (dict, [lambda v: v.update(one=0.5), lambda v: v.update(two=0.25)]),
    ],
)
def test_growth_applied_to_a_snapshot_gives_the_value(make, steps):
    value, whole = make(), make()
    start, found = grow(value, steps)
    for step in steps:
        step(whole)
    assert apply(start, joined(found), list.extend) is value
    assert value == whole and list(value) == list(whole)


@pytest.mark.parametrize(
    ("make", "step"),
    [
        (lambda: [1, 2], lambda v: v.clear()),
        (lambda: [1, 2], lambda v: v.__setitem__(0, 3)),
        (lambda: {"n": 2}, lambda v: v.update(n=1)),
        (lambda: {"x": 0.5}, lambda v: v.update(x=1.5)),
        (lambda: {"x": 0.5}, lambda v: v.clear()),
        (lambda: np.zeros(2), lambda v: v.__iadd__(1)),
        (lambda: torch.zeros(2), lambda v: v.add_(1)),
        (set, lambda v: v.add(1)),
    ],
)
def test_change_without_growth_is_not_merged(make, step):
    _, (found,) = grow(make(), [step])
    assert not is_merged(found)


def test_change_of_unchanged_value_is_none():
    for value in ([1], {"a": [1]}, 3, 0.5, "a", None, np.ones(2), torch.ones(2)):
        assert change(snapshot(value, copies=True), value) is None


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (lambda: [1], [lambda v: v.append(2), lambda v: v.extend([3, 4])]),
        (lambda: {"n": 1, "a": []}, [lambda v: v.update(n=3), lambda v: v["a"].append(1)]),
        (Counter, [lambda v: v.update("ab"), lambda v: v.update("bc")]),
        (lambda: defaultdict(list), [lambda v: v[1].append(0), lambda v: [v[2].append(2), v[1].append(1)]]),
    ],
)
def test_growth_merged_on_two_processes_equals_one_process(make, steps):
    """Each process has trained one client. On both processes, keys and items have the order of the clients."""
    whole = make()
    for step in steps:
        step(whole)
    values = [make() for _ in steps]
    processes = [grow(value, [step]) for value, step in zip(values, steps, strict=True)]
    every = [found[0] for _, found in processes]
    for value, (start, _) in zip(values, processes, strict=True):
        assert apply(start, joined(every), list.extend) is value
        assert value == whole and list(value) == list(whole)


def test_growth_same_new_key_by_two_clients_is_not_merged():
    """The values of the new key could be sums, so the values cannot be merged."""
    every = [grow({}, [lambda v: v.update(x=1.5)])[1][0] for _ in range(2)]
    assert is_merged(every[0]) and not is_merged(joined(every))
