"""Tests of TARGET: distillation of the old model on generated samples."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from raising import raises
from torch import nn
from torch.func import functional_call

from lightning_fcl import Classifier, FederatedStream
from lightning_fcl.callbacks import TARGET, ContinualMetrics, MeanOutputLoss
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.datasets import load_dataset
from lightning_fcl.data.partition import Dirichlet
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.methods.context import Client, Step
from lightning_fcl.models import MLP
from lightning_fcl.models.generator import with_statistics_distance


class Net(nn.Module):
    """A network of three convolutions with batch normalization."""

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
    return TARGET(**{"num_images": 24, "batch_size": 8, "num_steps": 3, "width": 4, **kwargs})


class Kept(Callback):
    """Records the server state of the method and the model's state after each round."""

    def __init__(self):
        self.kept, self.states = [], []

    def on_round_end(self, trainer, pl_module):
        self.kept.append({n: v.clone() for n, v in trainer.strategy.server.get_section("TARGET").items()})
        self.states.append({n: v.clone() for n, v in pl_module.state_dict().items()})


@pytest.mark.rounding
def test_target_first_experience_equals_fedavg(fit, assert_same):
    for experiences, same in ((1, True), (2, False)):
        tasks = [classifier() for _ in range(2)]
        for task, methods in zip(tasks, ([small()], []), strict=True):
            fit(task, digits(experiences), methods, max_vectorized_clients=1)
        if same:
            assert_same(*tasks, 0)
        else:
            with pytest.raises(AssertionError):
                assert_same(*tasks, 1e-4)


def test_target_generates_images_and_logits_at_end_of_experience(fit):
    task, kept, metrics = classifier(), Kept(), ContinualMetrics()
    fit(task, digits(rounds=2), [small(), kept, metrics], max_vectorized_clients=1)
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
@pytest.mark.long
def test_target_statistics_weight_reduces_statistics_distance(fit):
    """The statistics distance, summed over three models, is over a sixth smaller with a weight of 10 than with 0."""
    apart = {10.0: 0.0, 0.0: 0.0}
    for seed, weight in product(range(3), apart):
        task, kept = classifier(seed=seed), Kept()
        made = small(num_images=32, batch_size=32, num_steps=150, statistics_weight=weight)
        fit(task, digits(1, seed=seed), [made, kept], max_vectorized_clients=1)
        apart[weight] += float(with_statistics_distance(task.eval(), kept.kept[0]["images"])[1])
    # Measured: the sum is 17.2 without the statistics and 11.9 with the statistics.
    assert 1.2 * apart[10.0] < apart[0.0], apart


@pytest.mark.rounding
def test_target_penalty_distills_only_old_classes():
    """The penalty of a client equals a hand computation in which only the old classes are distilled."""
    torch.manual_seed(0)
    own, said, old = torch.randn(5, 4), torch.randn(5, 4), [0, 2]
    shared = {"images": torch.randn(5, 1, 8, 8), "logits": said}
    client = Client(client_round=ClientRound("0", 1, 1, num_classes=4, new_classes=(3,), old_classes=(0, 2)))
    method = TARGET(distillation_weight=3.0)
    client.method_state = method.prepare_client_state(client)
    step = Step(
        {}, {}, None, own, lambda state, x: x, forward_fn=lambda x: own, replay_samples=shared, replay_weight=1.0
    )
    wanted = -3 * (F.softmax(said[:, old] / 2, 1) * F.log_softmax(own[:, old] / 2, 1)).sum(1).mean()
    torch.testing.assert_close(method.penalty(client, step), wanted)


@pytest.mark.rounding
@pytest.mark.seconds
def test_target_vectorized_equals_sequential(fit, assert_same):
    tasks = [classifier() for _ in range(2)]
    for task, size in zip(tasks, (1, 3), strict=True):
        fit(task, digits(), [small()], max_vectorized_clients=size)
    assert_same(*tasks, 1e-4)


class Steps(Callback):
    """Records the batches of the second experience."""

    def __init__(self):
        self.batches = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch == 1:
            self.batches.append([part.clone() for part in batch])


@pytest.mark.rounding
@pytest.mark.seconds
def test_target_training_equals_hand_written_loop(fit):
    """The federation has one client. The loop starts from the server's model at the end of the first experience."""
    drawn, steps, kept, stream = [], Steps(), Kept(), digits(clients=1)

    class Watched(TARGET):
        def penalty(self, client, step):
            if step.replay_samples:
                drawn.append({name: value.clone() for name, value in step.replay_samples.items()})
            return super().penalty(client, step)

    made = Watched(distillation_weight=3.0, num_images=24, batch_size=8, num_steps=3, width=4)
    fit(classifier(), stream, [made, MeanOutputLoss(0.0), kept, steps], max_vectorized_clients=1)
    old, new = (torch.tensor(sorted(group)) for group in stream.plan.tasks["0"])
    assert len(drawn) == len(steps.batches) > 3
    for kd, equal in ((3.0, True), (0.0, False)):
        net = classifier().model
        net.load_state_dict({name.removeprefix("model."): value for name, value in kept.states[0].items()})
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        for (x, y), images in zip(steps.batches, drawn, strict=True):
            loss = F.cross_entropy(net(x)[:, new], torch.searchsorted(new, y))
            # The forward pass on the images must not change the buffers.
            buffers = {name: value.clone() for name, value in net.named_buffers()}
            own = F.log_softmax(functional_call(net, buffers, (images["images"],))[:, old] / 2, 1)
            loss = loss - kd * (F.softmax(images["logits"][:, old] / 2, 1) * own).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        apart = [float((kept.states[1][f"model.{n}"] - v).abs().max()) for n, v in net.named_parameters()]
        assert max(apart) < 1e-4 if equal else max(apart) > 1e-2


@pytest.mark.seconds
def test_target_resumed_fit_equals_uninterrupted_fit(assert_resumes):
    def make(seed=0):
        return classifier(seed=seed)

    assert_resumes(make, small, lambda: digits(rounds=2), max_vectorized_clients=1)


def test_target_generates_feature_vectors(fit):
    torch.manual_seed(0)
    task = Classifier(MLP([64, 12, 10], batch_norm=True), 10, lambda params: torch.optim.SGD(params, lr=0.05))
    kept, arrays = Kept(), load_dataset("digits")
    vectors = FederatedStream.from_arrays(
        arrays.x[:200].reshape(200, 64),
        arrays.y[:200],
        scenario=ClassIncremental(2, 1),
        partition=Dirichlet(3, 0.5),
        seed=0,
    )
    fit(task, vectors, [small(), MeanOutputLoss(0.0), kept], max_vectorized_clients=1)
    images, logits = kept.kept[0]["images"], kept.kept[0]["logits"]
    assert images.shape == (24, 64) and logits.shape == (24, 10)
    task.load_state_dict(kept.states[0])
    with torch.no_grad():
        torch.testing.assert_close(task.eval()(images), logits)


def test_target_sequences_integers_or_no_batchnorm_raise(fit, make_task):
    y = torch.arange(48) % 4
    for x in (torch.randn(48, 2, 3), torch.ones(48, 6, dtype=torch.long)):
        stream = FederatedStream.from_arrays(x, y, scenario=ClassIncremental(2, 1), partition=Dirichlet(3, 0.5))
        with raises(InvalidValueError, "x"):
            fit(make_task(), stream, [TARGET()])
    with raises(InvalidValueError, "network"):
        plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        fit(make_task(model=plain), digits(), [TARGET()])
