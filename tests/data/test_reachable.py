"""Tests of the objects that a dataset's code can reach, and of the random generators among them."""

import functools
import random
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from lightning_fcl.data.generators import Generators
from lightning_fcl.data.reachable import reachable


class Transform:
    shared = np.random.RandomState(1)

    def __init__(self, draws=None):
        self.draws = draws

    def __call__(self, x):
        return x


class Slots:
    __slots__ = ("draws",)

    def __init__(self, draws):
        self.draws = draws


class Named(list):
    """A list with an attribute."""


def found(root):
    return [path for path, *_ in Generators().of(root)]


def draws_of(generator):
    """Return three numbers of a generator of any kind."""
    if isinstance(generator, torch.Generator):
        return torch.rand(3, generator=generator).tolist()
    return [float(generator.random()) for _ in range(3)]


KINDS = {
    "Generator": lambda: np.random.default_rng(5),
    "Philox": lambda: np.random.Generator(np.random.Philox(5)),
    "RandomState": lambda: np.random.RandomState(5),
    "RandomState of PCG64": lambda: np.random.RandomState(np.random.PCG64(5)),
    "Random": lambda: random.Random(5),
    "torch": lambda: torch.Generator().manual_seed(5),
}


@pytest.mark.parametrize("kind", KINDS)
def test_generators_seeded_then_restored(kind):
    generator, untouched, generators = KINDS[kind](), KINDS[kind](), Generators()
    draws_of(generator), draws_of(untouched)
    drawn = []
    for seed, name in ((1, ""), (1, ""), (2, ""), (1, "other")):
        with generators.seeded({name: [generator]}, seed):
            drawn.append(draws_of(generator))
    assert drawn[0] == drawn[1] and drawn[0] not in drawn[2:] and drawn[2] != drawn[3]
    assert draws_of(generator) == draws_of(untouched)


def test_generators_restored_after_error():
    generator = np.random.default_rng(5)
    with pytest.raises(KeyError), Generators().seeded({"": [generator]}, 0):
        generator.random()
        raise KeyError
    assert generator.random() == np.random.default_rng(5).random()


def test_generators_are_found_with_attribute_path():
    draws = np.random.default_rng(0)
    named = Named([1])
    named.draws = draws

    def closed_over(x):
        return draws.random()

    assert found(Transform(draws)) == ["draws", "Transform.shared"]
    assert found({"a": [0, (draws,)]}) == ["['a'][1][0]"]
    assert found(OrderedDict(a=Slots(draws))) == ["['a'].draws"]
    assert found([named]) == ["[0].draws"]
    assert found([functools.partial(print, draws)]) == ["[0].args[0]"]
    assert found([closed_over]) == ["[0].draws"]
    assert found([Transform(draws).__call__]) == ["[0].__self__.draws", "Transform.shared"]
    assert found(nn.Sequential(nn.ReLU(), nn.Identity())) == []
    assert found(Subset(TensorDataset(torch.zeros(3)), [0, 1])) == []


def test_generator_with_two_names_is_found_once():
    draws = np.random.default_rng(0)
    assert found([draws, {"again": draws}]) == ["[0]"]


def test_global_generators_are_not_found():
    assert found([np.random.mtrand._rand, random._inst, torch.default_generator]) == []


def test_reachable_skips_containers_of_plain_values():
    root = {"items": [(f"{index}.png", index, {"size": (1, 2)}) for index in range(1000)]}
    assert len(list(reachable({"": root}))) == 2
    root["items"].append((Transform(np.random.default_rng(0)),))
    assert found(root) == ["['items'][1000][0].draws", "Transform.shared"]
