"""Federated continual learning for PyTorch Lightning.

``import lightning_fcl`` imports neither torch nor Lightning. The module that defines a public name is imported on first
use of the name. ``Trainer(strategy="federated")`` works if the package is imported before or after Lightning.
"""

import lazy_loader

from lightning_fcl.registration import register_strategy

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

register_strategy(
    "federated", lambda: __getattr__("FederatedStrategy")(), description="Rounds of many clients in one Trainer"
)
