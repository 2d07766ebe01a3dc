"""A federation with quadratic losses and known fixed points.

Client k has the loss a_k (w - b_k)^2 / 2, with the curvature a_k and the target b_k.
"""

import numpy as np
import torch
from torch import nn

from lightning_fcl import FederatedStream
from lightning_fcl.data.scenarios import DomainIncremental
from lightning_fcl.data.split import Split
from lightning_fcl.tasks.classification import Regressor

CURVATURES = np.array([0.5, 1.0, 2.0, 4.0])
TARGETS = np.array([-3.0, 5.0, 1.0, -1.0])


class Halved(Regressor):
    def sample_loss(self, output, y):
        return super().sample_loss(output, y) / 2


def quadratic(lr=0.1, **options):
    """Return a task with one parameter w, which starts at 2."""
    task = Halved(nn.Linear(1, 1, bias=False), 1, lambda params: torch.optim.SGD(params, lr=lr, **options))
    nn.init.constant_(task.model.weight, 2.0)
    return task


class Slope(Regressor):
    """A task with the loss <x, w>, whose gradient is the sample x for any parameters w."""

    def sample_loss(self, output, y):
        return output[:, 0]


def slope(lr=0.1, **options):
    """Return a task with three parameters in double precision and the loss <x, w>."""
    return Slope(nn.Linear(3, 1, bias=False), 1, lambda params: torch.optim.SGD(params, lr=lr, **options)).double()


def slope_clients(gradients, samples, rounds):
    """Return a stream of clients with the loss <g_k, w>. Client k has ``samples[k]`` samples, in batches of 4."""
    owner = np.repeat(np.arange(len(samples)), samples)
    scenario = DomainIncremental(rounds_per_experience=rounds)
    words = {"scenario": scenario, "batch_size": 4, "split": Split(test=0.0), "seed": 0}
    return FederatedStream.from_arrays(
        gradients[owner], np.zeros((len(owner), 1)), owner, np.zeros(len(owner), int), **words
    )


def clients(rounds, samples=(4, 4, 4, 4), batch_size=4, curvatures=CURVATURES):
    """Return a stream with one experience. All samples of a client are identical."""
    owner = np.repeat(np.arange(len(samples)), samples)
    x = np.sqrt(curvatures)[owner, None].astype(np.float32)
    y = (np.sqrt(curvatures) * TARGETS)[owner, None].astype(np.float32)
    scenario = DomainIncremental(rounds_per_experience=rounds)
    words = {"scenario": scenario, "batch_size": batch_size, "split": Split(test=0.0), "seed": 0}
    return FederatedStream.from_arrays(x, y, owner, np.zeros(len(owner), int), **words)


def minimum(weights=(1, 1, 1, 1)):
    """Return the w that minimizes the weighted sum of the clients' losses."""
    return float((weights * CURVATURES * TARGETS).sum() / (weights * CURVATURES).sum())


def value(task):
    return float(task.model.weight)
