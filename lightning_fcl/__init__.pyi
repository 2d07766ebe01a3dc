from .data.stream import FederatedStream as FederatedStream
from .federation.fedbuff import FedBuff as FedBuff
from .federation.schedule import Deadline as Deadline
from .federation.speeds import Speeds as Speeds
from .federation.swarm import Swarm as Swarm
from .federation.uploads import Stage as Stage
from .federation.uploads import UploadTransform as UploadTransform
from .federation.wire import Quantize as Quantize
from .federation.wire import TopK as TopK
from .local.local_steps import client_steps as client_steps
from .running.federated_cli import FederatedCLI as FederatedCLI
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
