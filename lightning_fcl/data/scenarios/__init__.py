"""Scenarios: which client sees which samples in which round. Each is an object that makes a `Plan` of a `Pool`."""

from lightning_fcl.data.scenarios.fedvit import FedViTScenario
from lightning_fcl.data.scenarios.flwf import FLwFScenario
from lightning_fcl.data.scenarios.incremental import (
    ClassIncremental,
    DomainIncremental,
    Indices,
    class_experiences,
    domain_experiences,
    rounds_of,
)
from lightning_fcl.data.scenarios.odfcl import ODFCLScenario
from lightning_fcl.data.scenarios.plan import EMPTY, History, IntArray, Plan, split, with_history
from lightning_fcl.data.scenarios.scenario import Pool, Scenario

__all__ = [
    "EMPTY",
    "ClassIncremental",
    "DomainIncremental",
    "FLwFScenario",
    "FedViTScenario",
    "History",
    "Indices",
    "IntArray",
    "ODFCLScenario",
    "Plan",
    "Pool",
    "Scenario",
    "class_experiences",
    "domain_experiences",
    "rounds_of",
    "split",
    "with_history",
]
