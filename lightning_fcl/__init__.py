"""Federated continual learning for PyTorch Lightning.

Importing the package loads neither torch nor Lightning. The module of a public name is imported when the name is used.
``Trainer(strategy="federated")`` works after any import of the package, before or after Lightning is imported.
"""

import lazy_loader

from lightning_fcl.registration import register_strategy

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

register_strategy(
    "federated", lambda: __getattr__("FederatedStrategy")(), description="Rounds of many clients in one Trainer"
)
