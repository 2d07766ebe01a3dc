"""Tests of logit adjustment: the loss against a loop in NumPy, and no effect with a balanced prior."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback

from lightning_fcl.callbacks import LogitAdjustment
from lightning_fcl.methods.class_losses import logit_adjusted_loss


def in_numpy(logits, target, counts, tau):
    """Return each sample's loss by equation 10 of Menon et al., in a loop over the classes that have samples."""
    priors = counts / counts.sum()
    result = []
    for row, label in zip(logits, target, strict=True):
        total = sum(priors[c] ** tau * np.exp(row[c]) for c in range(len(row)) if priors[c] > 0)
        result.append(-np.log(priors[label] ** tau * np.exp(row[label]) / total))
    return result


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0])
def test_logit_adjusted_loss_equals_numpy(tau):
    logits, target = torch.randn(20, 5, dtype=torch.float64), torch.arange(20) % 4
    counts = torch.tensor([8.0, 1.0, 30.0, 4.0, 0.0], dtype=torch.float64)
    found = logit_adjusted_loss(logits, target, counts, tau)
    np.testing.assert_allclose(found, in_numpy(logits.numpy(), target.numpy(), counts.numpy(), tau), rtol=1e-9)


@pytest.mark.parametrize(("counts", "tau"), [([7.0] * 5, 1.3), ([0.0] * 5, 1.0), ([1.0, 9.0, 0.0, 2.0, 5.0], 0.0)])
def test_logit_adjusted_loss_balanced_prior_is_cross_entropy(counts, tau):
    logits, target = torch.randn(20, 5), torch.arange(20) % 5
    found = logit_adjusted_loss(logits, target, torch.tensor(counts), tau)
    torch.testing.assert_close(found, F.cross_entropy(logits, target, reduction="none"))


def test_logit_adjusted_loss_class_without_samples_is_finite():
    logits, counts = torch.randn(2, 3, requires_grad=True), torch.tensor([4.0, 2.0, 0.0])
    loss = logit_adjusted_loss(logits, torch.tensor([0, 2]), counts)
    loss[0].backward(retain_graph=True)
    assert logits.grad[0, 2] == 0 and (logits.grad[0, :2] != 0).all()
    assert loss[1] < 100


class Counts(Callback):
    """A callback that records the server's counts of samples per class after each round."""

    def __init__(self):
        self.kept = []

    def on_round_end(self, trainer, pl_module):
        self.kept.append(trainer.strategy.server.get_section("LogitAdjustment")["counts"].tolist())


@pytest.mark.parametrize("max_vectorized_clients", [1, 3])
def test_federation_prior_counts_each_sample_once_per_experience(fit, make_stream, make_task, max_vectorized_clients):
    stream, counts = make_stream(rounds_per_experience=3), Counts()
    fit(
        make_task(),
        stream,
        [LogitAdjustment(prior="federation"), counts],
        max_vectorized_clients=max_vectorized_clients,
    )
    plan, rounds = stream.plan, len(counts.kept)
    assert rounds == 6 and counts.kept[0] == counts.kept[2] != counts.kept[3] == counts.kept[5]
    seen = np.concatenate([own for e in (0, 3) for own in plan.train[e].values()])
    assert counts.kept[-1] == np.bincount(stream.y[seen], minlength=4).tolist()


@pytest.mark.parametrize("prior", ["client", "federation"])
def test_vectorized_training_equals_sequential_training(fit, make_stream, make_task, assert_same, prior):
    tasks = [make_task(), make_task()]
    for task, max_vectorized_clients in zip(tasks, (1, 3), strict=True):
        fit(
            task,
            make_stream(partition="dirichlet"),
            [LogitAdjustment(prior=prior)],
            max_vectorized_clients=max_vectorized_clients,
        )
    assert_same(*tasks, 1e-5)


def test_plain_trainer_prior_is_from_previous_epoch(make_task, samples, train, assert_same):
    one, other = make_task(), make_task()
    train(one, [LogitAdjustment()], samples([0, 2]), epochs=1)
    train(other, [], samples([0, 2]), epochs=1)
    assert_same(one, other, 0)
    train(one, [LogitAdjustment()], samples([0, 2]), epochs=2)
    train(other, [], samples([0, 2]), epochs=2)
    with pytest.raises(AssertionError):
        assert_same(one, other, 0)
