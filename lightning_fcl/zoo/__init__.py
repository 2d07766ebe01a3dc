"""Whole trained things: networks that others have trained, checked, ready to predict and to go on learning.

What never belongs here: how anything is trained. Nothing here needs Lightning before `continue_from`, or to publish.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_fcl.door import lazy_names

if TYPE_CHECKING:
    from lightning_fcl.zoo.continued import Continuation as Continuation
    from lightning_fcl.zoo.continued import continue_from as continue_from
    from lightning_fcl.zoo.entry import Entry as Entry
    from lightning_fcl.zoo.loading import create_model as create_model
    from lightning_fcl.zoo.loading import load as load
    from lightning_fcl.zoo.loading import pretrained_reservoir as pretrained_reservoir
    from lightning_fcl.zoo.pretrained import Prediction as Prediction
    from lightning_fcl.zoo.pretrained import Pretrained as Pretrained
    from lightning_fcl.zoo.publishing import publish as publish
    from lightning_fcl.zoo.registry import list_models as list_models
    from lightning_fcl.zoo.verifying import Verdict as Verdict
    from lightning_fcl.zoo.verifying import verify as verify
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
