"""pfl's simulation: `FederatedAveraging` of a `PyTorchModel`, with users weighted by their number of samples."""

import copy
import functools

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

NAME = "pfl 0.6"
REQUIREMENTS = ["pfl[pytorch]==0.6.*"]


def refuses(workload):
    """Return the reason why the engine does not support the workload, or None if the engine supports it."""
    if not workload.by_gradients:
        return "supports only gradient-based training"
    return "does not support client sampling" if workload.drawn else None


def run(workload, rounds, marks, out, device="cpu"):
    """Train with pfl's federated averaging, mark each round, and write the server's last state."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    if device != "cpu":
        # pfl selects the GPU itself. Only the samples and the model must be moved.
        workload.to(device)

    class Clock(TrainingProcessCallback):
        def on_train_begin(self, *, model):
            marks.begin()
            return Metrics()

        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            marks.round()
            return False, Metrics()

    model = copy.deepcopy(workload.model).train()
    model.loss = lambda x, y: F.cross_entropy(model(x), y)
    model.metrics = lambda x, y: {}
    users = iter(range(workload.clients * rounds))
    data = FederatedDataset(
        lambda user: Dataset(raw_data=list(workload.samples(user)), user_id=str(user)),
        # The sampler returns all users in order, and then starts again.
        functools.partial(lambda n: next(users) % n, workload.clients),
    )
    wrapped = PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=workload.clients,
            val_cohort_size=0,
        ),
        SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()]),
        wrapped,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=workload.rate, local_batch_size=workload.batch_size),
        callbacks=[Clock()],
    )
    save_file({name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}, out)
