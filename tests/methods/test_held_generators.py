"""Generators that a callable holds: which are found, and their states afterwards."""

import random
from functools import partial

import numpy as np
import pytest
import torch

from lightning_fcl.methods.held_generators import held_generators, seeded

MODULE = np.random.default_rng(0)


def of_module(x):
    return by_helper(x)


def by_helper(x):
    return x + MODULE.normal()


def closure(generator):
    return lambda x: x + generator.normal()


class Holder:
    def __init__(self, held):
        self.held, self.itself = held, self  # a cycle

    def __call__(self, x):
        return x

    def method(self, x):
        return x


def holders(generator):
    module = torch.nn.Sequential(torch.nn.Identity())
    module[0].rng = generator
    return {
        "attribute": Holder(generator),
        "containers": Holder([{"a": (generator,)}]),
        "objects": Holder(Holder(generator)),
        "closure": closure(generator),
        "default": eval("lambda x, rng=generator: x", {"generator": generator}),
        "partial": partial(Holder, held=generator),
        "method": Holder(generator).method,
        "module": module,
        "itself": generator,
    }


@pytest.mark.parametrize("name", holders(None))
@pytest.mark.parametrize(
    "make",
    [
        lambda: np.random.default_rng(1),
        lambda: np.random.Generator(np.random.Philox(1)),
        lambda: np.random.RandomState(1),
        lambda: random.Random(1),
        lambda: torch.Generator().manual_seed(1),
    ],
)
def test_generators_are_found_wherever_they_are_held(name, make):
    generator = make()
    found = held_generators(holders(generator)[name])
    assert len(found) == 1 and found[0] is generator


def test_globals_that_a_function_uses_are_found():
    assert held_generators(of_module) == [MODULE]


def test_nothing_is_found_where_nothing_is_held():
    assert held_generators(Holder([1, "a", torch.zeros(3), np.zeros(3), torch, None, torch.default_generator])) == []
    assert held_generators(torch.nn.Dropout()) == []


def test_a_cached_normal_number_is_restored():
    """`RandomState` and `random.Random` make normal numbers in pairs, and keep the second."""
    state, python = np.random.RandomState(1), random.Random(1)
    one, other = np.random.RandomState(1), random.Random(1)
    assert (state.randn(), python.gauss(0, 1)) == (one.randn(), other.gauss(0, 1))
    with seeded([state, python], 3):
        state.randn(), python.gauss(0, 1), python.gauss(0, 1)
    assert (state.randn(), python.gauss(0, 1)) == (one.randn(), other.gauss(0, 1))


def test_states_are_restored_after_an_error():
    generator = np.random.default_rng(1)
    before = generator.bit_generator.state
    with pytest.raises(ZeroDivisionError), seeded(Holder(generator), 3):
        generator.normal(), 1 / 0
    assert generator.bit_generator.state == before


def test_each_generator_draws_other_numbers():
    pair = [np.random.default_rng(1), np.random.default_rng(1)]
    with seeded(pair, 3, "a"):
        first = [generator.normal() for generator in pair]
    with seeded(pair, 3, "b"):
        second = [generator.normal() for generator in pair]
    assert len({*first, *second}) == 4
