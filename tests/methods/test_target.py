"""TARGET: of the images that it makes it holds what the old model said."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn

from lightning_fcl import Classifier, FederatedStream
from lightning_fcl.callbacks import TARGET, ContinualMetrics, MeanOutputLoss
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.datasets import load_dataset
from lightning_fcl.data.partition import Dirichlet
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.methods.client import Client, Step
from lightning_fcl.models.generator import with_statistics_distance

pytestmark = pytest.mark.rounding


class Net(nn.Module):
    """Three convolutions with batch normalisation."""

    def __init__(self, width=4, classes=10):
        super().__init__()
        widths = [(1, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)]
        blocks = [(nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU()) for i, o, s in widths]
        body = [layer for block in blocks for layer in block]
        self.body = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x):
        return self.head(self.body(x))


def digits(experiences=2, rounds=1, number=200, clients=3, seed=0, **kwargs):
    arrays = load_dataset("digits")
    return FederatedStream.from_arrays(
        arrays.x[:number], arrays.y[:number], scenario=ClassIncremental(experiences, rounds),
        partition=Dirichlet(clients, 0.5), batch_size=16, seed=seed, **kwargs,
    )  # fmt: skip


def classifier(width=4, seed=0):
    torch.manual_seed(seed)
    return Classifier(Net(width), 10, lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9))


def small(**kwargs):
    return TARGET(**{"images": 24, "batch_size": 8, "steps": 3, "width": 4, **kwargs})


class Kept(Callback):
    """What the server keeps after each round, and its model's state."""

    def __init__(self):
        self.kept, self.states = [], []

    def on_round_end(self, trainer, pl_module):
        self.kept.append({n: v.clone() for n, v in trainer.strategy.server.kept_for("TARGET").items()})
        self.states.append({n: v.clone() for n, v in pl_module.state_dict().items()})


def test_in_the_first_experience_it_is_fedavg_and_then_not(fit, assert_same):
    for experiences, same in ((1, True), (2, False)):
        tasks = [classifier() for _ in range(2)]
        for task, methods in zip(tasks, ([small()], []), strict=True):
            fit(task, digits(experiences), methods, cohort_size=1)
        if same:
            assert_same(*tasks, 0)
        else:
            with pytest.raises(AssertionError):
                assert_same(*tasks, 1e-4)


def test_images_and_what_the_model_says_of_them_come_when_an_experience_ends(fit):
    task, kept, metrics = classifier(), Kept(), ContinualMetrics()
    fit(task, digits(rounds=2), [small(), kept, metrics], cohort_size=1)
    assert not kept.kept[0]["images"].numel()
    images, logits = kept.kept[1]["images"], kept.kept[1]["logits"]
    assert images.shape == (24, 1, 8, 8) and torch.equal(kept.kept[2]["images"], images)
    assert not torch.equal(kept.kept[3]["images"], images)
    task.load_state_dict(kept.states[1])
    task.eval()
    with torch.no_grad():
        torch.testing.assert_close(task(images), logits)
    received = [entry["download_bytes"]["0"] for entry in metrics.record["rounds"]]
    assert received[2] - received[0] == 24 * (64 + 10) * 4


@pytest.mark.seconds
def test_images_made_to_match_statistics_are_nearer_to_those_of_the_model(fit):
    """Than those made without, which are further by a fifth at least, on each of three models."""
    for seed in range(3):
        apart = []
        for weight in (10.0, 0.0):
            task, kept = classifier(seed=seed), Kept()
            made = small(images=32, batch_size=32, steps=150, statistics=weight)
            fit(task, digits(1, seed=seed), [made, kept], cohort_size=1)
            apart.append(float(with_statistics_distance(task.eval(), kept.kept[0]["images"])[1]))
        assert 1.2 * apart[0] < apart[1], apart


def test_old_classes_alone_are_distilled_softened():
    """A client's penalty, by hand."""
    torch.manual_seed(0)
    own, said, old = torch.randn(5, 4), torch.randn(5, 4), [0, 2]
    shared = {"images": torch.randn(5, 1, 8, 8), "logits": said}
    client = Client(part=ClientRound("0", 1, 1, num_classes=4, new_classes=(3,), old_classes=(0, 2)))
    method = TARGET(kd=3.0)
    client.memory = method.on_download(client)
    step = Step({}, {}, None, own, lambda state, x: x, outputs=lambda x: own, replay_samples=shared, replay_weight=1.0)
    wanted = -3 * (F.softmax(said[:, old] / 2, 1) * F.log_softmax(own[:, old] / 2, 1)).sum(1).mean()
    torch.testing.assert_close(method.penalty(client, step), wanted)


@pytest.mark.seconds
def test_side_by_side_it_is_as_one_at_a_time(fit, assert_same):
    tasks = [classifier() for _ in range(2)]
    for task, size in zip(tasks, (1, 3), strict=True):
        fit(task, digits(), [small()], cohort_size=size)
    assert_same(*tasks, 1e-4)


@pytest.mark.slow
def test_it_forgets_less_than_fine_tuning_among_the_same_logits(fit):
    """Digits, five tasks, over three seeds: no single one decides."""
    gains = []
    for seed in range(3):
        found = []
        for methods in ([], [TARGET()]):
            task, stream = classifier(16, seed), digits(5, 4, 1797, 5, seed)
            fit(task, stream, [*methods, MeanOutputLoss(0.0)], local_epochs=2, cohort_size=1)
            x, y = stream.take(stream.plan.test)
            task.eval()
            with torch.no_grad():
                found.append(float((task(x).argmax(dim=1) == y).float().mean()))
        gains.append(found[1] - found[0])
    assert np.mean(gains) > 0.04, gains


@pytest.mark.seconds
def test_resumed_is_uninterrupted(assert_resumes):
    def make(seed=0):
        return classifier(seed=seed)

    assert_resumes(make, small, lambda: digits(rounds=2), cohort_size=1)


def test_refused(fit, make_stream, make_task):
    with pytest.raises(ValueError, match=r"Expected images, shape \(channels, height, width\), for `TARGET`"):
        fit(make_task(), make_stream(), [TARGET()])
    with pytest.raises(ValueError, match="Expected a network with layers of batch normalisation"):
        plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        fit(make_task(model=plain), digits(), [TARGET()])
