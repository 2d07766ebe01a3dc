from .data.stream import FederatedStream as FederatedStream
from .federation.client_speeds import ClientSpeeds as ClientSpeeds
from .federation.compression import Quantize as Quantize
from .federation.compression import TopK as TopK
from .federation.fedbuff import FedBuff as FedBuff
from .federation.swarm import Swarm as Swarm
from .federation.synchronization import Deadline as Deadline
from .federation.synchronization import Poisson as Poisson
from .federation.uploads import Stage as Stage
from .federation.uploads import UploadTransform as UploadTransform
from .local_training.gradient_accumulation import count_client_batches as count_client_batches
from .privacy.differential_privacy import AdaptiveClip as AdaptiveClip
from .privacy.differential_privacy import DifferentialPrivacy as DifferentialPrivacy
from .runs.federated_cli import FederatedCLI as FederatedCLI
from .simulation.federation import client_model as client_model
from .simulation.strategy import FederatedStrategy as FederatedStrategy
from .tasks.classification import Classifier as Classifier
from .tasks.classification import HARClassifier as HARClassifier
from .tasks.classification import MajorityClassifier as MajorityClassifier
from .tasks.classification import RandomClassifier as RandomClassifier
from .tasks.classification import Regressor as Regressor
from .tasks.reservoir import ReservoirClassifier as ReservoirClassifier
from .tasks.reservoir import ReservoirRegressor as ReservoirRegressor
from .tasks.ridge import RidgeClassifier as RidgeClassifier
from .zoo.loading import create_model as create_model

__version__: str
