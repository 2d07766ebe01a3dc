"""Algorithms against forgetting and for unlike clients: what each adds to a loss, a gradient, a batch or an upload.

What never belongs here: who trains when and how, Trainers and strategies; a method is functions of their arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_fcl.door import lazy_names

if TYPE_CHECKING:
    from lightning_fcl.methods.averaging import SCAFFOLD as SCAFFOLD
    from lightning_fcl.methods.averaging import FedDyn as FedDyn
    from lightning_fcl.methods.averaging import FedNova as FedNova
    from lightning_fcl.methods.averaging import FedProx as FedProx
    from lightning_fcl.methods.class_losses import LogitAdjustment as LogitAdjustment
    from lightning_fcl.methods.class_losses import MeanOutputLoss as MeanOutputLoss
    from lightning_fcl.methods.client import Client as Client
    from lightning_fcl.methods.client import Server as Server
    from lightning_fcl.methods.client import Step as Step
    from lightning_fcl.methods.client import remember as remember
    from lightning_fcl.methods.client import section as section
    from lightning_fcl.methods.distillation import MOON as MOON
    from lightning_fcl.methods.distillation import FedNTD as FedNTD
    from lightning_fcl.methods.distillation import FLwF as FLwF
    from lightning_fcl.methods.distillation import FLwF2T as FLwF2T
    from lightning_fcl.methods.distillation import LwF as LwF
    from lightning_fcl.methods.dytox import DyToxTraining as DyToxTraining
    from lightning_fcl.methods.episodic import AGEM as AGEM
    from lightning_fcl.methods.episodic import BCN as BCN
    from lightning_fcl.methods.episodic import GEM as GEM
    from lightning_fcl.methods.fedknow import FedKNOW as FedKNOW
    from lightning_fcl.methods.fedvit import FedRep as FedRep
    from lightning_fcl.methods.fedvit import FedViT as FedViT
    from lightning_fcl.methods.fedvit import LowestLoss as LowestLoss
    from lightning_fcl.methods.fedweit import FedWEIT as FedWEIT
    from lightning_fcl.methods.fot import FOT as FOT
    from lightning_fcl.methods.glfc import GLFC as GLFC
    from lightning_fcl.methods.heads import CCVR as CCVR
    from lightning_fcl.methods.heads import Fed3R as Fed3R
    from lightning_fcl.methods.importance import EWC as EWC
    from lightning_fcl.methods.importance import MAS as MAS
    from lightning_fcl.methods.importance import SI as SI
    from lightning_fcl.methods.lvt import LVTMethod as LVTMethod
    from lightning_fcl.methods.method import Method as Method
    from lightning_fcl.methods.needs import Needs as Needs
    from lightning_fcl.methods.personal import APFL as APFL
    from lightning_fcl.methods.personal import Ditto as Ditto
    from lightning_fcl.methods.plasticity import IntrinsicPlasticity as IntrinsicPlasticity
    from lightning_fcl.methods.projection import flatten as flatten
    from lightning_fcl.methods.prototypes import FedProto as FedProto
    from lightning_fcl.methods.prototypes import ICaRL as ICaRL
    from lightning_fcl.methods.regmean import LoRM as LoRM
    from lightning_fcl.methods.regmean import RegMean as RegMean
    from lightning_fcl.methods.rehearsal import DERpp as DERpp
    from lightning_fcl.methods.rehearsal import FedCBDR as FedCBDR
    from lightning_fcl.methods.rehearsal import ReFed as ReFed
    from lightning_fcl.methods.replay import Replay as Replay
    from lightning_fcl.methods.target import TARGET as TARGET
    from lightning_fcl.methods.unlearning import Unlearning as Unlearning
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
