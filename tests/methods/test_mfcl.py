"""Tests of MFCL: replay and distillation on samples of a generator that the server trains."""

import math

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from raising import raises
from torch import nn
from torch.distributions import Normal, kl_divergence

from lightning_fcl import Classifier, FederatedStream
from lightning_fcl.callbacks import MFCL, ContinualMetrics, MeanOutputLoss
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.datasets import load_dataset
from lightning_fcl.data.partition import Dirichlet
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.methods.context import Client, Step, strip_prefix, with_prefix
from lightning_fcl.methods.mfcl import class_entropy_loss, smoothness_loss
from lightning_fcl.models import MLP, Generator


class Net(nn.Module):
    """A network of two convolutions with batch normalization, and a linear head."""

    def __init__(self, width=4, classes=10):
        super().__init__()
        blocks = [(nn.Conv2d(i, o, 3, 2, 1), nn.BatchNorm2d(o), nn.ReLU()) for i, o in ((1, width), (width, 2 * width))]
        body = [layer for block in blocks for layer in block]
        self.body = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.features = 2 * width
        self.head = nn.Linear(self.features, classes)

    def embed(self, x):
        return self.body(x.to(self.head.weight.dtype))

    def forward(self, x):
        return self.head(self.embed(x))


def digits(experiences=2, rounds=1, clients=3, seed=0, flat=False):
    arrays = load_dataset("digits")
    x = arrays.x[:200].reshape(200, 64) if flat else arrays.x[:200]
    return FederatedStream.from_arrays(
        x, arrays.y[:200], scenario=ClassIncremental(experiences, rounds), partition=Dirichlet(clients, 0.5),
        batch_size=16, seed=seed,
    )  # fmt: skip


def classifier(network=None, seed=0):
    torch.manual_seed(seed)
    return Classifier(network or Net(), 10, lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9))


def small(kind=MFCL, **kwargs):
    return kind(**{"num_samples": 24, "batch_size": 8, "num_steps": 3, "noise_dim": 12, "width": 2, **kwargs})


class Kept(Callback):
    """Records the server state of the method and the model's state after each round."""

    def __init__(self, name="MFCL"):
        self.name, self.kept, self.states = name, [], []

    def on_round_end(self, trainer, pl_module):
        self.kept.append({n: v.clone() for n, v in trainer.strategy.server.get_section(self.name).items()})
        self.states.append({n: v.clone() for n, v in pl_module.state_dict().items()})


class Steps(Callback):
    """Records the batches of the second experience."""

    def __init__(self):
        self.batches = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch == 1:
            self.batches.append([part.clone() for part in batch])


@pytest.mark.rounding
def test_mfcl_first_experience_equals_fedavg_with_loss_of_new_classes(fit, assert_same):
    for experiences, rounds, same in ((1, 2, True), (2, 1, False)):
        tasks = [classifier() for _ in range(2)]
        for task, method in zip(tasks, (small(), MeanOutputLoss(0.0)), strict=True):
            fit(task, digits(experiences, rounds), [method], max_vectorized_clients=1)
        if same:
            assert_same(*tasks, 1e-6)
        else:
            with pytest.raises(AssertionError):
                assert_same(*tasks, 1e-4)


@pytest.mark.rounding
def test_mfcl_without_weights_equals_loss_of_new_classes(fit, assert_same):
    tasks = [classifier() for _ in range(2)]
    methods = [small(finetune_weight=0.0, distillation_weight=0.0), MeanOutputLoss(0.0)]
    for task, method in zip(tasks, methods, strict=True):
        trainer = fit(task, digits(), [method], max_vectorized_clients=1)
        assert not trainer.strategy.server.get_section("MFCL")
    assert_same(*tasks, 1e-6)


def log_softmax(row):
    return [value - math.log(sum(math.exp(other) for other in row)) for value in row]


def hand_step(weights, finetune_weight=0.7, distillation_weight=0.3):
    """Return the penalty of a client, and the same loss from loops over samples and classes, in double precision.

    The network is a linear layer without batch normalization. Old classes are 0, 2 and 3, and new classes 1 and 4.
    Real samples with a weight of 0 are padding.
    """
    torch.manual_seed(1)
    body, own, teacher = (nn.Linear(5, 6).double(), nn.Linear(6, 5).double(), nn.Linear(6, 5).double())
    old_body = nn.Linear(5, 6).double()
    old, new, y, batch = [0, 2, 3], [1, 4], torch.tensor([1, 4, 4, 2]), torch.randn(4, 5).double()
    images = torch.randn(3, 5).double()
    method = MFCL(finetune_weight=finetune_weight, distillation_weight=distillation_weight)
    method._head = ("head.weight", "head.bias")
    masks = {name: torch.tensor([c in classes for c in range(5)]) for name, classes in (("old", old), ("new", new))}
    state = {"head.weight": teacher.weight.detach(), "head.bias": teacher.bias.detach()}
    client = Client(
        {**masks, **with_prefix(state, "teacher")},
        client_round=ClientRound("0", 1, 1, num_classes=5, new_classes=(1, 4), old_classes=(0, 2, 3)),
    )
    params = {"head.weight": own.weight, "head.bias": own.bias}
    logits = teacher(old_body(images)).detach()
    step = Step(
        params, {}, batch, own(body(batch)), lambda state, x: teacher(old_body(x)).detach(), embed_fn=body, y=y,
        sample_weight=weights, replay_samples={"images": images, "logits": logits}, replay_weight=1.0,
    )  # fmt: skip
    loss = method.penalty(client, step)

    real = [i for i in range(4) if weights is None or weights[i] > 0]
    x = [batch[i] for i in real] + [*images]
    labels = [int(y[i]) for i in real] + [max(old, key=lambda c, row=row: float(row[c])) for row in logits]
    new_losses, head_losses, differences = [], [], []
    for number, (sample, label) in enumerate(zip(x, labels, strict=True)):
        scores = [float(score) for score in own(body(sample))]
        if number < len(real) and label in new:
            new_losses.append(-log_softmax([scores[c] for c in new])[new.index(label)])
        head_losses.append(-log_softmax(scores)[label])
        gaps = [float(teacher(body(sample))[c] - teacher(old_body(sample))[c]) ** 2 for c in old]
        differences.append(sum(gaps) / len(old))
    wanted = sum(new_losses) / len(new_losses)
    wanted += finetune_weight * sum(head_losses) / len(x) + distillation_weight * sum(differences) / len(x)
    return loss, wanted, body, own


@pytest.mark.rounding
@pytest.mark.parametrize("weights", [None, [0.5, 0.0, 0.0, 0.5], [1 / 3, 0.0, 1 / 3, 1 / 3]])
def test_mfcl_penalty_equals_loops_over_samples(weights):
    loss, wanted, *_ = hand_step(None if weights is None else torch.tensor(weights, dtype=torch.float64))
    assert float(loss) == pytest.approx(wanted, rel=1e-10)


def test_mfcl_finetuning_changes_only_the_head():
    gradients = []
    for weight in (0.0, 0.7):
        loss, _, body, own = hand_step(None, finetune_weight=weight)
        gradients.append(torch.autograd.grad(loss, [*body.parameters(), *own.parameters()]))
    (*body_without, _, _), (*body_with, _, _) = gradients
    for without, with_finetuning in zip(body_without, body_with, strict=True):
        torch.testing.assert_close(with_finetuning, without, rtol=0, atol=1e-14)
        assert without.abs().max() > 0
    assert (gradients[0][-1] - gradients[1][-1]).abs().max() > 1e-3


@pytest.mark.rounding
def test_mfcl_generator_loss_equals_explicit_computation():
    torch.manual_seed(0)
    net, generator, classes = Net(), Generator((1, 8, 8), noise_dim=6, width=2), (1, 4, 7)
    for _ in range(5):
        net(torch.randn(20, 1, 8, 8) + 1)
    net.eval().double(), generator.double()
    noise = torch.randn(9, 6).double()
    method = MFCL(statistics_weight=5.0, entropy_weight=2.0, smoothness_weight=0.3)
    loss = method.generator_loss(net, generator, noise, classes)

    with torch.no_grad():
        images = generator(noise)
        share = net(images)[:, list(classes)].softmax(1)
        entropy = sum(share[i][max(range(3), key=lambda c, i=i: noise[i, c])].log() for i in range(9)) / -9
        mean = [float(share[:, c].mean()) for c in range(3)]
        spread = 1 + sum(p * math.log(p) for p in mean) / math.log(3)
        statistics = 0.0
        for rows, norm in ((net.body[0](images), net.body[1]), (net.body[:4](images), net.body[4])):
            batch = Normal(rows.mean((0, 2, 3)), rows.var((0, 2, 3), correction=0).sqrt())
            statistics += kl_divergence(Normal(norm.running_mean, norm.running_var.sqrt()), batch).mean() / 2
        smooth = torch.zeros_like(images)
        padded = F.pad(images, (2, 2, 2, 2), mode="reflect")
        total = sum(math.exp(-(i * i + j * j) / 4) for i in range(-2, 3) for j in range(-2, 3))
        for i in range(-2, 3):
            for j in range(-2, 3):
                smooth += math.exp(-(i * i + j * j) / 4) / total * padded[:, :, 2 + i : 10 + i, 2 + j : 10 + j]
        wanted = entropy + 2 * spread + 5 * statistics + 0.3 * (images - smooth).square().mean()
    assert float(loss) == pytest.approx(float(wanted), rel=1e-6)


def test_mfcl_terms_of_one_class_or_of_vectors_are_zero():
    assert class_entropy_loss(torch.randn(4, 1)) == 0 and smoothness_loss(torch.randn(4, 7)) == 0
    assert class_entropy_loss(torch.tensor([[80.0, 0.0], [90.0, 0.0]])) == pytest.approx(1)


@pytest.mark.seconds
def test_mfcl_generator_steps_decrease_the_loss(fit):
    losses = {}
    for steps in (1, 60):
        task, kept, method = classifier(), Kept(), small(num_steps=steps, batch_size=32, lr=0.01)
        stream = digits()
        fit(task, stream, [method, kept], max_vectorized_clients=1)
        generator = Generator((1, 8, 8), noise_dim=12, width=2)
        generator.load_state_dict(strip_prefix(kept.kept[0], "generator.1"), strict=False)
        task.load_state_dict(kept.states[0])
        classes = tuple(sorted(stream.plan.tasks["0"][0]))
        with torch.no_grad():
            noise = torch.randn(64, 12, generator=torch.Generator().manual_seed(0))
            losses[steps] = float(method.generator_loss(task.eval(), generator, noise, classes))
    assert losses[60] < 0.5 * losses[1], losses


@pytest.mark.rounding
@pytest.mark.seconds
def test_mfcl_training_equals_hand_written_loop(fit):
    """The federation has one client. The loop starts from the server's model at the end of the first experience."""
    drawn, steps, kept, stream = [], Steps(), Kept("Watched"), digits(clients=1)

    class Watched(MFCL):
        def penalty(self, client, step):
            if step.replay_samples:
                drawn.append({name: value.clone() for name, value in step.replay_samples.items()})
            return super().penalty(client, step)

    made = small(Watched, distillation_weight=2.0, finetune_weight=0.5)
    fit(classifier(), stream, [made, kept, steps], max_vectorized_clients=1)
    old, new = (torch.tensor(sorted(group)) for group in stream.plan.tasks["0"])
    assert len(drawn) == len(steps.batches) > 3
    start = {name.removeprefix("model."): value for name, value in kept.states[0].items()}
    teacher = classifier().model.eval()
    teacher.load_state_dict(start)
    for kd, equal in ((2.0, True), (0.0, False)):
        net = classifier().model
        net.load_state_dict(start)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        for (x, y), samples in zip(steps.batches, drawn, strict=True):
            images = samples["images"]
            with torch.no_grad():
                torch.testing.assert_close(teacher(images), samples["logits"])
                y_all = torch.cat([y, old[teacher(images)[:, old].argmax(1)]])
                features_before = teacher.body(torch.cat([x, images]))
            net(x)
            buffers = {name: value.clone() for name, value in net.named_buffers()}
            features = net.body(torch.cat([x, images]))
            loss = F.cross_entropy(net.head(features[: len(x)])[:, new], torch.searchsorted(new, y))
            loss = loss + 0.5 * F.cross_entropy(net.head(features.detach()), y_all)
            weight = teacher.head.weight.detach()[old]
            loss = loss + kd * ((features - features_before) @ weight.T).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            # Only the batch of real samples changes the running statistics.
            for name, value in net.named_buffers():
                value.copy_(buffers[name])
        final = {name.removeprefix("model."): value for name, value in kept.states[1].items()}
        apart = [float((final[n] - v).abs().max()) for n, v in net.state_dict().items()]
        assert max(apart) < 1e-4 if equal else max(apart) > 1e-3


@pytest.mark.rounding
@pytest.mark.seconds
def test_mfcl_vectorized_equals_sequential(fit, assert_same):
    tasks = [classifier().double() for _ in range(2)]
    for task, size in zip(tasks, (1, 3), strict=True):
        fit(task, digits(), [small()], max_vectorized_clients=size)
    assert_same(*tasks, 1e-7)


@pytest.mark.seconds
def test_mfcl_resumed_fit_equals_uninterrupted_fit(assert_resumes):
    assert_resumes(lambda seed=0: classifier(seed=seed), small, lambda: digits(rounds=2), max_vectorized_clients=1)


def test_mfcl_generator_is_sent_once_per_experience(fit):
    """With partial participation, a client receives the generator once, and the teacher once if it was absent."""
    records, kept = [], Kept()
    for methods in ([small(), kept], []):
        metrics = ContinualMetrics()
        fit(classifier(), digits(rounds=4, clients=4), [*methods, metrics], participation=2, seed=0)
        records.append(metrics.record)
    generator = Generator((1, 8, 8), noise_dim=12, width=2)
    # The counters of batches are not sent.
    size = sum(value.nbytes for value in generator.state_dict().values() if value.is_floating_point())
    more: dict[str, list[int]] = {}
    for number, (mine, plain) in enumerate(zip(*(record["rounds"] for record in records), strict=True)):
        assert mine["upload_bytes"] == plain["upload_bytes"]
        for client, count in mine["download_bytes"].items():
            added = count - plain["download_bytes"][client]
            if number < 4 or client in more:
                assert added == 0
            else:
                more[client] = [number, added]
    assert sum(number == 4 for number, _ in more.values()) == 2 < len(more)
    for number, added in more.values():
        # The teacher is the model that clients download in round 4. Tensors that have not changed are not sent again.
        model, teacher = kept.states[number - 1], kept.states[3]
        changed = [value.nbytes for name, value in teacher.items() if not torch.equal(value, model[name])]
        assert added == size + sum(changed) and (number == 4) == (not changed)
    names = {name for name in kept.kept[7] if name.startswith("generator.")}
    assert names and all(name.startswith("generator.1.") for name in names)


def test_mfcl_generates_feature_vectors(fit):
    network, kept = MLP([64, 12, 10], batch_norm=True), Kept()
    fit(classifier(network), digits(5, flat=True), [small(), kept], max_vectorized_clients=1)
    generators = [strip_prefix(state, f"generator.{i + 1}") for i, state in enumerate(kept.kept[:2])]
    generator = Generator((64,), noise_dim=12, width=2)
    for weights in generators:
        assert weights.keys() == {name for name in generator.state_dict() if "num_batches" not in name}
    assert not torch.equal(generators[0]["net.3.weight"], generators[1]["net.3.weight"])


def test_mfcl_unsupported_network_or_samples_raise(fit, make_task):
    stream = FederatedStream.from_arrays(
        torch.randn(48, 2, 3), torch.arange(48) % 4, scenario=ClassIncremental(2, 1), partition=Dirichlet(3, 0.5)
    )
    with raises(InvalidValueError, "x"):
        fit(make_task(), stream, [MFCL()])
    with raises(InvalidValueError, "network"):
        fit(make_task(model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10))), digits(), [MFCL()])
    no_head = Net()
    no_head.head = nn.Linear(8, 10, bias=False)
    with raises(InvalidValueError, "module"):
        fit(classifier(no_head), digits(), [MFCL()])
    with raises(InvalidValueError, "noise_dim", value=9):
        fit(classifier(), digits(), [MFCL(noise_dim=9)])
