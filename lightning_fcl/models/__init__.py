"""Networks of the papers, each a plain ``nn.Module``, imported when its name is asked for.

What never belongs here: losses, training and anything of Lightning (that is a task), or how states travel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_fcl.door import lazy_names

if TYPE_CHECKING:
    from lightning_fcl.models.backbone import frozen_backbone as frozen_backbone
    from lightning_fcl.models.continual import LVT as LVT
    from lightning_fcl.models.continual import DyTox as DyTox
    from lightning_fcl.models.continual import LVTBody as LVTBody
    from lightning_fcl.models.decomposed import Decomposed as Decomposed
    from lightning_fcl.models.decomposed import LoRA as LoRA
    from lightning_fcl.models.decomposed import decomposed_vit as decomposed_vit
    from lightning_fcl.models.esn import EchoStateNetwork as EchoStateNetwork
    from lightning_fcl.models.generator import Generator as Generator
    from lightning_fcl.models.hierarchical import CvTBody as CvTBody
    from lightning_fcl.models.hierarchical import T2TBody as T2TBody
    from lightning_fcl.models.quantization import frozen as frozen
    from lightning_fcl.models.readout import FeatureReadout as FeatureReadout
    from lightning_fcl.models.readout import RandomFeatures as RandomFeatures
    from lightning_fcl.models.readout import ReservoirReadout as ReservoirReadout
    from lightning_fcl.models.ridge import RidgeReadout as RidgeReadout
    from lightning_fcl.models.small import HARCNN as HARCNN
    from lightning_fcl.models.small import MLP as MLP
    from lightning_fcl.models.small import DSICNet as DSICNet
    from lightning_fcl.models.vit import SplitViT as SplitViT
    from lightning_fcl.models.vit import ViT as ViT
    from lightning_fcl.models.vit import fcl_vit as fcl_vit
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
