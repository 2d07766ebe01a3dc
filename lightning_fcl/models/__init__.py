"""Plain ``nn.Module`` networks of the papers, one file each."""

from lightning_fcl.models.har_cnn import HARCNN
from lightning_fcl.models.mlp import MLP

__all__ = ["HARCNN", "MLP"]
