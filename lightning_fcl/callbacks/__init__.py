"""Callbacks: the methods, and what watches a federation."""

from lightning_fcl.callbacks.base_session import BaseSession
from lightning_fcl.callbacks.continual_metrics import ContinualMetrics
from lightning_fcl.callbacks.density import ActivationDensity
from lightning_fcl.callbacks.pretrain import Pretrain
from lightning_fcl.callbacks.progress import FederatedProgressBar
from lightning_fcl.methods.apfl import APFL
from lightning_fcl.methods.bcn import BCN
from lightning_fcl.methods.distillation import FLwF, FLwF2T, LwF
from lightning_fcl.methods.dytox import DyToxTraining
from lightning_fcl.methods.fedknow import FedKNOW
from lightning_fcl.methods.fedprox import FedProx
from lightning_fcl.methods.fedrep import FedRep
from lightning_fcl.methods.fedvit import FedViT, LowestLoss
from lightning_fcl.methods.fedweit import FedWEIT
from lightning_fcl.methods.gem import AGEM, GEM
from lightning_fcl.methods.importance import EWC, MAS
from lightning_fcl.methods.lvt import LVTMethod
from lightning_fcl.methods.mean_output import MeanOutputLoss
from lightning_fcl.methods.method import Method, Step
from lightning_fcl.methods.plasticity import IntrinsicPlasticity
from lightning_fcl.methods.replay import Replay
from lightning_fcl.methods.unlearning import Unlearning

__all__ = [
    "AGEM",
    "APFL",
    "BCN",
    "EWC",
    "GEM",
    "MAS",
    "ActivationDensity",
    "BaseSession",
    "ContinualMetrics",
    "DyToxTraining",
    "FLwF",
    "FLwF2T",
    "FedKNOW",
    "FedProx",
    "FedRep",
    "FedViT",
    "FedWEIT",
    "FederatedProgressBar",
    "IntrinsicPlasticity",
    "LVTMethod",
    "LowestLoss",
    "LwF",
    "MeanOutputLoss",
    "Method",
    "Pretrain",
    "Replay",
    "Step",
    "Unlearning",
]
