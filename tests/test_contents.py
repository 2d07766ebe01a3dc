"""Snapshots of what a module holds beside its state."""

import random

import pytest
from torch import nn

from lightning_fcl.local.loose_state import LooseState


@pytest.mark.parametrize(("draws", "changes"), [(random.Random(0), ["draws"]), (random.SystemRandom(), [])])
def test_a_generator_without_a_state_has_no_changes(draws, changes):
    """The system's generator has no state that could be read."""
    module = nn.Linear(1, 1)
    module.draws = draws
    loose = LooseState(module)
    draws.random()
    assert loose.changes() == changes
    loose.put_back()
    assert loose.changes() == []
