"""Plain ``nn.Module`` networks of the papers, one file each."""

from lightning_fcl.models.cvt import CvTBody
from lightning_fcl.models.decomposed import Decomposed
from lightning_fcl.models.dsicnet import DSICNet
from lightning_fcl.models.dytox import DyTox
from lightning_fcl.models.esn import EchoStateNetwork
from lightning_fcl.models.har_cnn import HARCNN
from lightning_fcl.models.lvt import LVT, LVTBody
from lightning_fcl.models.mlp import MLP
from lightning_fcl.models.ridge import RidgeReadout, RidgeStatistics
from lightning_fcl.models.t2t import T2TBody
from lightning_fcl.models.vit import SplitViT, ViT, fcl_vit

__all__ = [
    "HARCNN",
    "LVT",
    "MLP",
    "CvTBody",
    "DSICNet",
    "Decomposed",
    "DyTox",
    "EchoStateNetwork",
    "LVTBody",
    "RidgeReadout",
    "RidgeStatistics",
    "SplitViT",
    "T2TBody",
    "ViT",
    "fcl_vit",
]
