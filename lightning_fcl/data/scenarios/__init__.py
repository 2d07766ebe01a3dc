"""Scenarios, which define the samples of each client in each round. A scenario creates a `Plan` from a `SamplePool`."""

from lightning_fcl.data.scenarios.base import EMPTY as EMPTY
from lightning_fcl.data.scenarios.base import History as History
from lightning_fcl.data.scenarios.base import IntArray as IntArray
from lightning_fcl.data.scenarios.base import Plan as Plan
from lightning_fcl.data.scenarios.base import SamplePool as SamplePool
from lightning_fcl.data.scenarios.base import Scenario as Scenario
from lightning_fcl.data.scenarios.base import concat_views as concat_views
from lightning_fcl.data.scenarios.base import from_name as from_name
from lightning_fcl.data.scenarios.base import stratified_split as stratified_split
from lightning_fcl.data.scenarios.base import with_history as with_history
from lightning_fcl.data.scenarios.blurry import Blurry as Blurry
from lightning_fcl.data.scenarios.blurry import Delayed as Delayed
from lightning_fcl.data.scenarios.blurry import GrowingClasses as GrowingClasses
from lightning_fcl.data.scenarios.blurry import Online as Online
from lightning_fcl.data.scenarios.incremental import ClassIncremental as ClassIncremental
from lightning_fcl.data.scenarios.incremental import DomainIncremental as DomainIncremental
from lightning_fcl.data.scenarios.incremental import Stationary as Stationary
from lightning_fcl.data.scenarios.papers import FedViTScenario as FedViTScenario
from lightning_fcl.data.scenarios.papers import FLwFScenario as FLwFScenario
from lightning_fcl.data.scenarios.papers import ODFCLScenario as ODFCLScenario
