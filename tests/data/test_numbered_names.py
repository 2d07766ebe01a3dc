"""Tests of class and domain names that are numbers as text. Integers in an order must be clearly names or positions."""

import itertools
import re

import numpy as np
import pytest
from raising import raises

from lightning_fcl import FederatedStream
from lightning_fcl.data.labels import index_targets
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import (
    ClassIncremental,
    DomainIncremental,
    FedViTScenario,
    FLwFScenario,
    GrowingClasses,
)
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.validation import check_clients, did_you_mean, one_of

TWELVE = [str(number) for number in range(12)]
SORTED = sorted(TWELVE)  # 0, 1, 10, 11, 2, ...


def stream_of(names, scenario, per_class=2, domains=False, partition=None):
    """Return a stream with the given names or numbers as labels, or as domains if `domains` is true."""
    column = np.repeat(names, per_class)
    x = np.random.default_rng(0).normal(size=(len(column), 2)).astype(np.float32)
    y, group = (np.arange(len(column)) % 2, column) if domains else (column, None)
    stream = FederatedStream.from_arrays(x, y, group=group, scenario=scenario, partition=partition, split=None)
    stream.setup("fit")
    return stream


def order_of(names, order):
    """Return the names of the classes in the order of the experiences, with one class per experience."""
    stream = stream_of(names, ClassIncremental(len(names), class_order=order), 9, partition=IID(1))
    return [stream.classes[label] for (label,) in stream.plan.tasks["0"]]


REJECTED = {
    "ClassIncremental": (ClassIncremental(12, class_order=range(12)), "class_order", {}),
    "GrowingClasses": (GrowingClasses(2, class_order=range(12)), "class_order", {}),
    "FedViTScenario": (FedViTScenario(2, 2, (2, 3), (0.5, 0.6), class_order=range(12)), "class_order", {}),
    "DomainIncremental": (DomainIncremental(domain_order=range(12)), "domain_order", {"domains": True}),
    "FLwFScenario": (FLwFScenario(2, 2, 1, 1, tasks={"a": [[2], [3]]}), "tasks", {}),
    "orders of clients": (ClassIncremental(12, class_order={"0": [*range(12)]}), "class_order", {"partition": IID(1)}),
}


@pytest.mark.parametrize("name", REJECTED)
def test_integers_that_can_be_names_or_positions_are_rejected(name):
    scenario, argument, options = REJECTED[name]
    with raises(InvalidValueError, argument):
        stream_of(TWELVE, scenario, 9, **options)


@pytest.mark.parametrize(
    ("names", "order", "expected"),
    [
        # The error message suggests this fix: pass the names as text.
        (TWELVE, TWELVE[::-1], TWELVE[::-1]),
        # Each name equals its position, because names that are integers are sorted as numbers.
        (range(12), range(12), TWELVE),
        (TWELVE[:10], range(9, -1, -1), TWELVE[9::-1]),
        # These integers can only be names.
        ([10, 20, 30], [30, 10, 20], ["30", "10", "20"]),
        (range(1, 7), [6, 5, 4, 3, 2, 1], TWELVE[6:0:-1]),
        # These integers can only be positions.
        (range(1, 7), [5, 4, 3, 2, 1, 0], TWELVE[6:0:-1]),
        (["1", "3", "7"], [0, 1, "7"], ["1", "3", "7"]),
        (["a", "b", "c"], [2, "a", 1], ["c", "a", "b"]),
    ],
)
def test_integers_with_one_reading_are_names_or_positions(names, order, expected):
    assert order_of([*names], [*order]) == expected


def test_class_order_of_integers_has_one_meaning_or_raises():
    for names in (["1", "2", "3"], ["0", "2", "1"], ["0", "1", "2"], ["2", "5", "a"]):
        for order in itertools.permutations(range(4), 3):
            by_position = [names[place] for place in order] if max(order) < 3 else None
            by_name = [str(entry) for entry in order] if {*map(str, order)} == {*names} else None
            readings = [reading for reading in (by_position, by_name) if reading is not None]
            scenario = ClassIncremental(3, class_order=order)
            pool = FederatedStream.from_arrays(np.zeros((30, 1), np.float32), np.arange(30) % 3, classes=names)
            pool.scenario, pool.partition = scenario, IID(1)
            if len({*map(tuple, readings)}) == 1:
                pool.setup("fit")
                assert [pool.classes[label] for (label,) in pool.plan.tasks["0"]] == readings[0]
            else:
                with pytest.raises(ValueError, match=r"^Expected `class_order` to (have one|contain)"):
                    pool.setup("fit")


def test_integer_equal_to_a_name_raises_with_text_hint():
    with pytest.raises(ValueError, match=r"but got 7\. Write \"7\", as text\.$"):
        order_of(["1", "3", "7"], [0, 1, 7])
    with pytest.raises(ValueError, match=r"but got 1\. Write \"1\", as text\.$"):
        check_clients("`clients` to be", {1: 0.5, "0": 1.0}, ["0", "1", "2"])
    with pytest.raises(ValueError, match=r"but got 2\. Write \"2\", as text\.$"):
        one_of(["1", "2"], number=2)


@pytest.mark.parametrize("name", [7, 7.0, True, None, np.int64(7), np.float64(0.5), "7", np.str_("7")])
def test_did_you_mean_never_suggests_identical_text(name):
    assert "Did you mean" not in did_you_mean(name, [str(name), "other"])
    assert isinstance(name, str) or did_you_mean(name, [str(name)]) == f' Write "{name}", as text.'


def test_index_targets_label_with_class_prefix_raises():
    with pytest.raises(ValueError, match=re.escape("among sit, run, but got sitting")):
        index_targets(["sitting", "run"], ("sit", "run"))
    assert index_targets(["sit", "run"], ("sit", "run"))[0].tolist() == [0, 1]
