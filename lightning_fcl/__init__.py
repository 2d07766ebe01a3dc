"""Federated continual learning for PyTorch Lightning.

Importing the package loads neither torch nor Lightning: a name's module is imported when the name is asked for.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from lightning_fcl.door import lazy_names, register_strategy

__version__ = "0.2.0"

if TYPE_CHECKING:
    from lightning_fcl.data.stream import FederatedStream as FederatedStream
    from lightning_fcl.federation.fedbuff import FedBuff as FedBuff
    from lightning_fcl.federation.schedule import Deadline as Deadline
    from lightning_fcl.federation.speeds import Speeds as Speeds
    from lightning_fcl.federation.swarm import Swarm as Swarm
    from lightning_fcl.federation.wire import Quantize as Quantize
    from lightning_fcl.federation.wire import TopK as TopK
    from lightning_fcl.local.local_steps import client_steps as client_steps
    from lightning_fcl.running.federated_cli import FederatedCLI as FederatedCLI
    from lightning_fcl.simulation.federation import client_model as client_model
    from lightning_fcl.simulation.strategy import FederatedStrategy as FederatedStrategy
    from lightning_fcl.tasks.classification import Classifier as Classifier
    from lightning_fcl.tasks.classification import HARClassifier as HARClassifier
    from lightning_fcl.tasks.classification import MajorityClassifier as MajorityClassifier
    from lightning_fcl.tasks.classification import RandomClassifier as RandomClassifier
    from lightning_fcl.tasks.classification import Regressor as Regressor
    from lightning_fcl.tasks.reservoir import ReservoirClassifier as ReservoirClassifier
    from lightning_fcl.tasks.reservoir import ReservoirRegressor as ReservoirRegressor
    from lightning_fcl.tasks.ridge import RidgeClassifier as RidgeClassifier
    from lightning_fcl.zoo.loading import create_model as create_model
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)

if "lightning.pytorch" in sys.modules:
    register_strategy()
