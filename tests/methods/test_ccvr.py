"""Tests of CCVR: the sums of the clients' moments, and the head that is trained on samples drawn from these moments."""

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from raising import raises

from lightning_fcl.callbacks import CCVR, ContinualMetrics, Fed3R
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.methods.head_calibration import decoupled_logits, draw_gaussian, gaussian, last_layer
from lightning_fcl.models import MLP

pytestmark = pytest.mark.rounding


def still(params):
    return torch.optim.SGD(params, lr=0.0)


def moments_of(trainer, label):
    kept = trainer.strategy.server.get_section("CCVR")
    return gaussian(kept["sums"][label], kept["products"][label])


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
@pytest.mark.parametrize("max_vectorized_clients", [1, 3])
def test_ccvr_client_moments_add_up_to_pooled_moments(
    fit, make_stream, make_task, partition, covariance, max_vectorized_clients
):
    task, stream = make_task(still), make_stream(partition=partition, rounds_per_experience=2)
    trainer = fit(task, stream, [CCVR(covariance)], max_vectorized_clients=max_vectorized_clients)
    rows = np.concatenate([part for number in (1, 3) for part in stream.plan.train[number].values()])
    x, y = stream.get_samples(rows)
    with torch.no_grad():
        features = task.embed(x).double().numpy()
    for label in range(4):
        mean, found = moments_of(trainer, label)
        wanted = np.cov(features[y.numpy() == label], rowvar=False)
        wanted = torch.from_numpy(wanted if covariance == "full" else np.diag(wanted).copy())
        torch.testing.assert_close(mean, torch.from_numpy(features[y.numpy() == label].mean(axis=0)), atol=1e-6, rtol=0)
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)


def test_gaussian_equals_paper_formula_of_means_and_covariances():
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=(n, 3)) + n for n in (2, 5, 9)]
    n = np.array([len(part) for part in parts])
    means = np.stack([part.mean(axis=0) for part in parts])
    mean = (n[:, None] * means).sum(axis=0) / n.sum()
    within = sum((len(part) - 1) * np.cov(part, rowvar=False) for part in parts)
    between = sum(k * np.outer(m, m) for k, m in zip(n, means, strict=True)) - n.sum() * np.outer(mean, mean)
    sums = sum(np.concatenate([[len(part)], part.sum(axis=0)]) for part in parts)
    products = sum((part.T @ part)[np.triu_indices(3)] for part in parts)
    found = gaussian(torch.from_numpy(sums), torch.from_numpy(products))
    torch.testing.assert_close(found[0], torch.from_numpy(mean))
    torch.testing.assert_close(found[1], torch.from_numpy((within + between) / (n.sum() - 1)))


@pytest.mark.parametrize("rank", [1, 3])
def test_draw_gaussian_samples_have_given_moments(rank):
    generator = torch.Generator().manual_seed(0)
    root, mean = torch.randn(3, rank, generator=generator).double(), torch.tensor([5.0, -3.0, 0.0]).double()
    covariance = root @ root.T
    drawn = draw_gaussian(mean, covariance, 20000, generator)
    torch.testing.assert_close(drawn.mean(dim=0), mean, atol=0.1, rtol=0)
    torch.testing.assert_close(torch.cov(drawn.T), covariance, atol=0.2, rtol=0)
    assert int(torch.linalg.matrix_rank(drawn - mean, rtol=1e-6)) == rank
    flat = draw_gaussian(mean, covariance.diagonal(), 20000, generator)
    torch.testing.assert_close(torch.cov(flat.T), covariance.diagonal().diag(), atol=0.2, rtol=0)


def accuracy(task, stream):
    x, y = stream.get_samples(stream.plan.test)
    with torch.no_grad():
        return float((task(x).argmax(dim=1) == y).float().mean())


@pytest.mark.seconds
@pytest.mark.parametrize("options", [{}, {"covariance": "diagonal"}, {"logit_norm": 0.3}])
def test_ccvr_head_learns_all_classes_from_moments(fit, make_stream, make_task, options):
    found = []
    for seed in range(3):
        task, stream = make_task(still, MLP([6, 32, 4]), seed), make_stream(partition="dirichlet")
        before = {name: value.clone() for name, value in task.state_dict().items()}
        trainer = fit(task, stream, [CCVR(lr=0.1, epochs=20, **options)])
        # The server stores the number of the experience in which each class appeared, counted from 1.
        assert trainer.strategy.server.get_section("CCVR")["task"].tolist() == [1, 1, 2, 2]
        found.append(accuracy(task, stream))
        assert all(torch.equal(task.state_dict()[name], value) for name, value in before.items() if "3." not in name)
    # The accuracy at chance level is 0.25.
    assert sum(found) / 3 > 0.7, found


def test_ccvr_calibrates_seen_classes_in_last_round_only(fit, make_stream, make_task):
    heads, metrics = [], ContinualMetrics()

    class Heads(Callback):
        def on_round_end(self, trainer, pl_module):
            heads.append(pl_module.state_dict()[last_layer(pl_module)[0]].clone())

    task = make_task(still)
    begun = task.state_dict()[last_layer(task)[0]].clone()
    fit(task, make_stream(rounds_per_experience=2), [CCVR(), Heads(), metrics])
    assert torch.equal(heads[0], begun) and torch.equal(heads[2], heads[1])
    assert torch.equal(heads[1][2:], begun[2:]) and not torch.equal(heads[1][:2], begun[:2])
    assert not torch.equal(heads[3][2:], begun[2:])
    sent = [entry["upload_bytes"]["0"] for entry in metrics.record["rounds"]]
    assert [sent[1] - sent[0], sent[3] - sent[2]] == [8 * 4 * (6 + 15)] * 2


@pytest.mark.parametrize("kind", [CCVR, Fed3R])
def test_ccvr_and_fed3r_last_layer_without_bias_raises(fit, make_stream, make_task, kind):
    without = MLP([6, 5, 4])
    without[-1] = torch.nn.Linear(5, 4, bias=False)
    with raises(InvalidValueError, "module"):
        fit(make_task(model=without), make_stream(), [kind()])


def test_decoupled_logits_have_equal_mean_norm_over_tasks():
    generator, task = torch.Generator().manual_seed(0), torch.tensor([1, 2, 1, 2, 3])
    logits = torch.randn(7, 5, generator=generator).double()
    found = decoupled_logits(logits, task, 0.1)
    norms = torch.stack([found[:, task == number].norm(dim=1) for number in (1, 2, 3)]).mean(dim=0)
    torch.testing.assert_close(norms, torch.full((7,), 10.0).double())
    # The ratios between the logits of a sample do not change.
    torch.testing.assert_close(found / found[:, :1], logits / logits[:, :1])
    torch.testing.assert_close(decoupled_logits(40 * logits, task, 0.1), found)
    # With all classes in one task, the norm of a sample's logits equals the mean norm of the three tasks above.
    torch.testing.assert_close(decoupled_logits(logits, 0 * task, 0.1).norm(dim=1), norms)
