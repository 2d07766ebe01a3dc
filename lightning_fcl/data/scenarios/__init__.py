"""Scenarios: which client sees which samples in which round. Pure functions from labels and owners to a `Plan`."""

from lightning_fcl.data.scenarios.fedvit import fedvit
from lightning_fcl.data.scenarios.flwf import flwf
from lightning_fcl.data.scenarios.incremental import (
    Indices,
    class_experiences,
    domain_experiences,
    incremental,
    rounds_of,
)
from lightning_fcl.data.scenarios.odfcl import odfcl
from lightning_fcl.data.scenarios.plan import EMPTY, History, IntArray, Plan, split, with_history

__all__ = [
    "EMPTY",
    "History",
    "Indices",
    "IntArray",
    "Plan",
    "class_experiences",
    "domain_experiences",
    "fedvit",
    "flwf",
    "incremental",
    "odfcl",
    "rounds_of",
    "split",
    "with_history",
]
