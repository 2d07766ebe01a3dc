"""Whatever goes into ``Trainer(callbacks=...)``: what prepares or watches a federation, and every method by its name.

What never belongs here: what changes a client's training (that is a method), or the rounds themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_fcl.door import lazy_names

if TYPE_CHECKING:
    from lightning_fcl.callbacks.continual_metrics import ContinualMetrics as ContinualMetrics
    from lightning_fcl.callbacks.density import ActivationDensity as ActivationDensity
    from lightning_fcl.callbacks.pretrain import BaseSession as BaseSession
    from lightning_fcl.callbacks.pretrain import Pretrain as Pretrain
    from lightning_fcl.callbacks.progress import FederatedProgressBar as FederatedProgressBar
    from lightning_fcl.methods import *  # noqa: F403
else:
    __all__, __getattr__, __dir__ = lazy_names(
        __name__, but=("Client", "Needs", "Server", "flatten", "remember", "section")
    )
