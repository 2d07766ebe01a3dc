"""Tests of a head that grows from round to round in `on_train_epoch_start`."""

import copy

import numpy as np
import pytest
import torch
from raising import raises
from torch import nn

from lightning_fcl import Classifier, FederatedStream
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidValueError

LABELS = torch.arange(48) // 2 % 4


class Grows(Classifier):
    """A classifier that adds two classes to the head in every round except the first."""

    def __init__(self, how):
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 4), 4, torch.optim.SGD)
        self.how, self.begun = how, []

    def on_train_epoch_start(self):
        if self.current_epoch:
            old, self.model = self.model, nn.Linear(6, self.model.out_features + 2)
            self.num_classes = self.model.out_features
            with torch.no_grad():
                self.model.weight[: old.out_features], self.model.bias[: old.out_features] = old.weight, old.bias
            if self.how == "set up again":
                self.trainer.strategy.setup_optimizers(self.trainer)
            elif self.how == "replaced":
                self.trainer.optimizers = [torch.optim.SGD(self.parameters(), lr=0.1)]
            else:
                self.optimizers().param_groups[0]["params"] = [*self.parameters()]
        self.begun.append(copy.deepcopy(self.model))


@pytest.fixture
def stream():
    """Return a stream of three rounds with two clients."""
    x = np.random.default_rng(0).normal(size=(48, 6)).astype(np.float32)
    scenario = ClassIncremental(1, rounds_per_experience=3)
    return FederatedStream.from_arrays(
        x, LABELS.numpy(), np.arange(48) % 2, scenario=scenario, split=Split(test=0.0), batch_size=24, seed=0
    )


@pytest.mark.may(
    "A module that grows between rounds",
    "New parameters are trained if you add them to the optimizer. A new optimizer raises an error.",
)
@pytest.mark.parametrize("max_vectorized_clients", [1, 2])
def test_growing_head_in_existing_optimizer_is_trained(fit, stream, max_vectorized_clients):
    module = Grows("kept")
    fit(module, stream, max_vectorized_clients=max_vectorized_clients)
    assert [head.out_features for head in module.begun] == [4, 6, 8] and module.model.weight.shape == (8, 6)
    # Each client has a single batch, so the mean of the clients' steps is one step with the mean gradient.
    last = module.begun[-1]
    assert len(stream.samples.x) == len(LABELS)
    (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(last(stream.samples.x), LABELS), [last.weight])
    assert torch.allclose(module.model.weight, last.weight - 0.001 * gradient, atol=1e-7) and gradient[4:].any()


@pytest.mark.parametrize("how", ["set up again", "replaced"])
def test_growing_head_with_new_optimizer_raises(fit, stream, how):
    with raises(InvalidValueError, "optimizers"):
        fit(Grows(how), stream)
