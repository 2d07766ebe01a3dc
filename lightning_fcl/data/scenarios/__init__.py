"""Scenarios: which client sees which samples in which round. Each is an object that makes a `Plan` of a `Pool`."""

from lightning_fcl.data.scenarios.boundaries import Blurry as Blurry
from lightning_fcl.data.scenarios.boundaries import GrowingClasses as GrowingClasses
from lightning_fcl.data.scenarios.boundaries import Online as Online
from lightning_fcl.data.scenarios.boundaries import Staggered as Staggered
from lightning_fcl.data.scenarios.incremental import ClassIncremental as ClassIncremental
from lightning_fcl.data.scenarios.incremental import DomainIncremental as DomainIncremental
from lightning_fcl.data.scenarios.incremental import Stationary as Stationary
from lightning_fcl.data.scenarios.papers import FedViTScenario as FedViTScenario
from lightning_fcl.data.scenarios.papers import FLwFScenario as FLwFScenario
from lightning_fcl.data.scenarios.papers import ODFCLScenario as ODFCLScenario
from lightning_fcl.data.scenarios.scenario import EMPTY as EMPTY
from lightning_fcl.data.scenarios.scenario import History as History
from lightning_fcl.data.scenarios.scenario import IntArray as IntArray
from lightning_fcl.data.scenarios.scenario import Plan as Plan
from lightning_fcl.data.scenarios.scenario import Pool as Pool
from lightning_fcl.data.scenarios.scenario import Scenario as Scenario
from lightning_fcl.data.scenarios.scenario import named as named
from lightning_fcl.data.scenarios.scenario import split as split
from lightning_fcl.data.scenarios.scenario import views as views
from lightning_fcl.data.scenarios.scenario import with_history as with_history
