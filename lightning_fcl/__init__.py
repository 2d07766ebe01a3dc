"""Federated continual learning for PyTorch Lightning."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lightning_fcl.data.stream import FederatedStream
    from lightning_fcl.simulation.strategy import FederatedStrategy
    from lightning_fcl.tasks.classification import Classifier, HARClassifier
    from lightning_fcl.tasks.reservoir import ReservoirClassifier, ReservoirRegressor
    from lightning_fcl.tasks.ridge import RidgeClassifier

_HOMES = {
    "FederatedStrategy": "lightning_fcl.simulation.strategy",
    "FederatedStream": "lightning_fcl.data.stream",
    "Classifier": "lightning_fcl.tasks.classification",
    "HARClassifier": "lightning_fcl.tasks.classification",
    "ReservoirClassifier": "lightning_fcl.tasks.reservoir",
    "ReservoirRegressor": "lightning_fcl.tasks.reservoir",
    "RidgeClassifier": "lightning_fcl.tasks.ridge",
}

__all__ = [
    "Classifier",
    "FederatedStrategy",
    "FederatedStream",
    "HARClassifier",
    "ReservoirClassifier",
    "ReservoirRegressor",
    "RidgeClassifier",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
    return getattr(import_module(_HOMES[name]), name)


# Importing the package registers the strategy "federated". Only the command waits: its `--help` must not load torch.
if Path(sys.argv[0] if sys.argv else "").stem != "lightning-fcl":
    import_module("lightning_fcl.simulation.strategy")
