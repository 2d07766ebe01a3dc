"""Tests of finding the user code that a training step can reach."""

import torch

from lightning_fcl import Classifier
from lightning_fcl.local_training.outside import Outside
from lightning_fcl.local_training.user_code import functions_in, reached


class Checked(torch.nn.Linear):
    def forward(self, x):
        assert len(x) > 0, "an empty batch"
        return scaled(super().forward(x))


def scaled(x):
    assert x.dtype == torch.float32
    return x * factors["output"]


factors = {"output": 2.0}


def test_assertions_that_pytest_rewrites_do_not_lead_to_pytest():
    """The search for user code does not follow the reference to pytest in a module with rewritten assertions.

    Otherwise, each fit would inspect all tests.
    """
    rewritten = [name for name in scaled.__code__.co_names if "pytest" in name]
    assert rewritten  # pytest's module is a global variable of this module.
    functions = functions_in(Checked)
    assert {function.__module__ for function in reached(functions.values(), functions)} == {__name__}
    outside = Outside(Classifier(Checked(6, 4), 4))
    assert {function.__module__ for function in outside.functions.values()} == {__name__}
    found = outside.search()
    state = [part for part in found.parts if getattr(part, "value", None) is factors]
    assert len(state) == 1 and len(found.parts) < 100
