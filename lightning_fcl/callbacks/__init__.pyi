from lightning_fcl.methods import *  # noqa: F403

from .activation_density import ActivationDensity as ActivationDensity
from .continual_metrics import ContinualMetrics as ContinualMetrics
from .prediction_writer import PredictionWriter as PredictionWriter
from .pretrain import BaseSession as BaseSession
from .pretrain import Pretrain as Pretrain
from .progress import FederatedProgressBar as FederatedProgressBar
from .weight_averaging import ServerWeightAveraging as ServerWeightAveraging
