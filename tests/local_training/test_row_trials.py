"""Tests of losses, modules and methods that mix the samples of a batch: vectorized equals sequential training."""

import copy
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_fcl import Classifier, FederatedStream, HARClassifier, Regressor
from lightning_fcl import methods as library
from lightning_fcl.callbacks import EWC, GLFC, FLwF2T, LwF, MeanOutputLoss, Replay
from lightning_fcl.data.partition import IID, Dirichlet
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.federation.obstacles import Reason
from lightning_fcl.local_training.drawn import Drawer
from lightning_fcl.local_training.sequential import SequentialTrainer
from lightning_fcl.local_training.vectorized import VectorizedTrainer
from lightning_fcl.local_training.vmap_training_step import StepTrainer
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.needs import Needs
from lightning_fcl.models import MLP
from lightning_fcl.simulation import fit as fits
from lightning_fcl.simulation.trainer_choice import choose_trainer

CLASSES = 6
SEEDS = 6


def stream_of(seed=0, shape=(6,), classes=CLASSES, partition=None):
    """Return a stream of clients with different sizes. Each of the two experiences has half of the classes."""
    rng, number = np.random.default_rng(0), 240
    y = np.arange(number) % classes
    x = rng.normal(size=(number, *shape)).astype(np.float32)
    x.reshape(number, -1)[:, :classes] += 2 * np.eye(classes, dtype=np.float32)[y]
    partition = Dirichlet(5, 0.5) if partition is None else partition
    return FederatedStream.from_arrays(x, y, scenario=ClassIncremental(2), partition=partition, batch_size=8, seed=seed)


class Weighted(Classifier):
    """A classifier that weights each sample's loss by the class of the sample, normalized over the batch."""

    def sample_loss(self, output, y):
        weight = 1 + (y == CLASSES - 1).to(output) + 0.5 * (y == 0).to(output)
        return super().sample_loss(output, y) * weight / weight.mean()


class Hard(Classifier):
    """A classifier that doubles the losses that are at least the batch's median, and drops the other losses."""

    def sample_loss(self, output, y):
        losses = super().sample_loss(output, y)
        return 2 * losses * (losses >= losses.detach().median())


class Share(Classifier):
    """A classifier that weights each sample's loss by the inverse frequency of the label in the batch."""

    def sample_loss(self, output, y):
        counts = (y[:, None] == y).sum(dim=1)
        return super().sample_loss(output, y) * len(y) / (CLASSES * counts)


class Contrast(Classifier):
    def sample_loss(self, output, y):
        return super().sample_loss(output, y) + 0.1 * output.mean() ** 2


class Place(Classifier):
    """A classifier that weights each sample's loss by the position of the sample in the batch."""

    def sample_loss(self, output, y):
        return super().sample_loss(output, y) * torch.linspace(0.5, 1.5, len(y), device=output.device)


class Summed(Classifier):
    """A classifier that scales losses by the batch size, so a batch's loss is proportional to the sum over samples."""

    def sample_loss(self, output, y):
        return super().sample_loss(output, y) * len(y) / 8


class Seen(Classifier):
    """A classifier that masks the logits of classes that are not in the batch, so these classes have probability 0."""

    def mask_logits(self, output, y):
        present = (torch.arange(self.num_classes, device=y.device) == y[:, None]).any(dim=0)
        return output.masked_fill(~present, -1e4)


class Centered(nn.Linear):
    def forward(self, x):
        output = super().forward(x)
        return output - output.mean(dim=0)


class Rare(Classifier):
    """A classifier that gives samples of the last class a larger weight, normalized over the batch."""

    def sample_loss(self, output, y):
        weight = 1 + 4 * (y == CLASSES - 1).to(output)
        return super().sample_loss(output, y) * weight / weight.mean()


class Focal(Classifier):
    """A classifier that weights each sample's loss only by the loss and the label of the same sample."""

    def sample_loss(self, output, y):
        losses = super().sample_loss(output, y)
        return losses * (1 - (-losses).exp()) ** 2 * (1 + y / CLASSES)


def centered():
    return nn.Sequential(nn.Linear(6, 5), Centered(5, CLASSES))


MIXING = {"weighted": Weighted, "hard": Hard, "share": Share, "contrast": Contrast, "place": Place, "summed": Summed}
MIXING |= {"seen": Seen, "rare": Rare}
INDEPENDENT = {"plain": Classifier, "focal": Focal}


def mlp():
    return MLP([6, 8, CLASSES])


def classifier(kind=Classifier, make=mlp):
    torch.manual_seed(0)
    return kind(make(), CLASSES, lambda params: torch.optim.SGD(params, lr=0.2))


class MeanOutput(Method):
    """A method that penalizes the mean output over all rows of the batch, without weights."""

    def penalty(self, client, step):
        return step.output.mean(dim=0).square().sum()


class WeightedMean(Method):
    """A method that penalizes the weighted mean output. Padding rows have weight 0."""

    def penalty(self, client, step):
        weight = (
            step.sample_weight
            if step.sample_weight is not None
            else torch.full_like(step.output[:, 0], 1 / len(step.output))
        )
        return (weight[:, None] * step.output).sum(dim=0).square().sum()


class Entropy(Method):
    def penalty(self, client, step):
        return 0.3 * step.mean(-(step.output.softmax(dim=-1) * step.output.log_softmax(dim=-1)).sum(dim=-1))


class Spread(Method):
    """A method that penalizes the spread of the outputs around the mean output of the batch."""

    def penalty(self, client, step):
        return 0.3 * step.mean((step.output - step.output.detach().mean(dim=0)).square().sum(dim=1))


class FeatureMean(Method):
    """A method that penalizes the mean features of the batch."""

    def penalty(self, client, step):
        return 0.3 * step.embed_fn(step.x).mean(dim=0).square().sum()


class Decorrelated(Method):
    """A method that penalizes the batch's standard deviation of outputs that `forward_fn` computes."""

    def penalty(self, client, step):
        return 0.1 * step.forward_fn(step.x).std(dim=0).sum()


class ClassWeights(Method):
    """A method that adds a cross-entropy. The weight of a sample is the inverse frequency of its label in the batch."""

    def penalty(self, client, step):
        share = (step.y[:, None] == step.y).to(step.output).mean(dim=1)
        return step.mean(F.cross_entropy(step.output, step.y, reduction="none") / share)


class ModulesParameters(Method):
    """A method whose penalty reads the module's parameters instead of the step's parameters."""

    def penalty(self, client, step):
        return 0.1 * sum(value.square().sum() for value in client.module.parameters())


class Decay(Method):
    def penalty(self, client, step):
        return 0.1 * sum(value.square().sum() for value in step.params.values())


class Masked(Method):
    """A method that penalizes a batch statistic over the classes of earlier experiences."""

    def prepare_client_state(self, client):
        return {
            "old": torch.arange(client.client_round.num_classes) < CLASSES // 2 * client.client_round.experience_idx
        }

    def penalty(self, client, step):
        return (step.output.mean(dim=0) * client.method_state["old"]).square().sum()


class LaterMean(Method):
    """A method that penalizes the batch's mean output after a client's first training round."""

    def update_client_state(self, client, trained_state, data):
        return {"trained": torch.ones(())}

    def penalty(self, client, step):
        return step.output.mean(dim=0).square().sum() if client.method_state else 0.0


class LaterSpread(Method):
    """A method that penalizes a batch statistic after the client's first completed experience."""

    needs = Needs(round_samples=True)

    def end_experience(self, client, trained_state, data):
        return {"mean": F.one_hot(data[1], CLASSES).float().mean(dim=0)}

    def penalty(self, client, step):
        if not client.method_state:
            return 0.0
        return (step.output.mean(dim=0) - client.method_state["mean"]).square().sum()


class Draws(Method):
    def penalty(self, client, step):
        return 0.1 * step.mean((step.output * torch.randn(step.output.shape)).sum(dim=1))


class Counts(Method):
    """A method that counts steps in an attribute, which all clients of a vectorized step share."""

    def start_client(self, client):
        self.steps = 0

    def penalty(self, client, step):
        self.steps = getattr(self, "steps", 0) + 1
        return 0.1 * self.steps * step.mean(step.output.square().sum(dim=1))


class Values(Method):
    def penalty(self, client, step):
        return 0.1 * float(step.output.detach().norm()) * step.mean(step.output.square().sum(dim=1))


class RoundWeight(Method):
    def task_weight(self, client):
        return 1 / (1 + client.client_round.round_idx)


class BatchWeight(Method):
    def task_weight(self, client):
        return 1 / len(client.batch[1])


PADDED, STEP, SEQUENTIAL = VectorizedTrainer, StepTrainer, SequentialTrainer
METHODS = {
    MeanOutput: (STEP, None),
    WeightedMean: (PADDED, None),
    Entropy: (PADDED, None),
    Spread: (STEP, None),
    FeatureMean: (STEP, None),
    Decorrelated: (STEP, None),
    ClassWeights: (STEP, None),
    Masked: (STEP, None),
    LaterMean: (STEP, None),
    LaterSpread: (STEP, None),
    Decay: (PADDED, None),
    ModulesParameters: (SEQUENTIAL, Reason.METHOD_DIFFERS),
    Draws: (SEQUENTIAL, Reason.RANDOM),
    Counts: (SEQUENTIAL, Reason.METHOD_STATE),
    Values: (SEQUENTIAL, Reason.READS_VALUE),
    RoundWeight: (SEQUENTIAL, Reason.METHOD_FAILS),
    BatchWeight: (SEQUENTIAL, Reason.METHOD_FAILS),
}


def in_two_ways(fit, make, methods=list, **options):
    """Return the largest difference between the states after sequential and after automatically chosen training.

    Also return the type of the chosen trainer, and the reason for sequential training or None.
    """
    states = []
    for size in (1, "auto"):
        task = make()
        strategy = fit(
            task, stream_of(), methods(), max_vectorized_clients=size, seed=0, local_epochs=2, **options
        ).strategy
        states.append(task.state_dict())
    distance = max(float((states[0][name] - states[1][name]).abs().max()) for name in states[0])
    return distance, type(strategy.federation.local_trainer), strategy.sequential_reason


@pytest.mark.seconds
@pytest.mark.parametrize("name", [*MIXING, *INDEPENDENT, "forward"])
def test_loss_of_any_kind_vectorized_equals_sequential(fit, name):
    kind = (MIXING | INDEPENDENT).get(name, Classifier)
    distance, trainer, obstacle = in_two_ways(fit, lambda: classifier(kind, centered if name == "forward" else mlp))
    assert distance < 1e-5 and obstacle is None
    assert trainer is (PADDED if name in INDEPENDENT else STEP)


@pytest.mark.seconds
@pytest.mark.parametrize("kind", METHODS)
def test_penalty_of_any_kind_vectorized_equals_sequential(fit, kind):
    distance, trainer, obstacle = in_two_ways(fit, classifier, lambda: [kind()])
    assert distance < 1e-5
    assert (trainer, obstacle and obstacle.reason) == METHODS[kind]


@pytest.mark.seconds
@pytest.mark.parametrize("kind", [Entropy, LaterMean, LaterSpread, MeanOutput, Masked, WeightedMean])
def test_penalty_of_any_kind_changes_training(fit, kind):
    """Each penalty changes training. Otherwise, comparing sequential and vectorized training would test nothing."""
    states = []
    for methods in ([], [kind()]):
        task = classifier()
        fit(task, stream_of(), methods, seed=0)
        states.append(task.state_dict())
    assert max(float((states[0][name] - states[1][name]).abs().max()) for name in states[0]) > 1e-3


class ChosenError(Exception):
    """Raised to end a fit after the choice of the local trainer."""


def choice(fit, monkeypatch, task, stream, methods=(), **options):
    """Return the chosen trainer's type, the reason for sequential training or None, and the choice's CPU time in s."""
    found = []

    def choose(*args):
        start = time.process_time()
        trainer, obstacle = choose_trainer(*args)
        found[:] = type(trainer), obstacle and obstacle.reason, time.process_time() - start
        raise ChosenError

    monkeypatch.setattr(fits, "choose_trainer", choose)
    with pytest.raises(ChosenError):
        fit(task, stream, methods, **options)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MIXING, *INDEPENDENT])
def test_choice_for_a_loss_is_the_same_with_any_stream_seed(fit, monkeypatch, name):
    kind = (MIXING | INDEPENDENT)[name]
    chosen = {choice(fit, monkeypatch, classifier(kind), stream_of(seed))[0] for seed in range(SEEDS)}
    assert chosen == {PADDED if name in INDEPENDENT else STEP}


@pytest.mark.slow
@pytest.mark.parametrize("kind", METHODS)
def test_choice_for_a_method_is_the_same_with_any_stream_seed(fit, monkeypatch, kind):
    chosen = {tuple(choice(fit, monkeypatch, classifier(), stream_of(seed), [kind()])[:2]) for seed in range(SEEDS)}
    assert chosen == {METHODS[kind]}


def test_choice_takes_less_than_half_a_second_for_the_quickstart(fit, monkeypatch):
    """The limit is at least twice the measured time, because some processors are slower."""
    methods = [FLwF2T(0.5, 0.2), Replay(50)]
    task = Classifier(MLP([64, 64, 10]), 10, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5))
    stream = FederatedStream("digits", ClassIncremental(5, 3), IID(10), batch_size=16, seed=0)
    trainer, _, seconds = choice(fit, monkeypatch, task, stream, methods)
    assert trainer is PADDED and seconds < 0.5


def test_has_independent_rows_agrees_with_single_rows():
    """The trial finds the same result as a comparison of a batch's loss with the losses of its single rows."""
    output, y = torch.randn(16, CLASSES), torch.arange(16) % CLASSES
    for kind, independent in [(Classifier, True), (Focal, True), (Weighted, False), (Share, False), (Contrast, False)]:
        task = classifier(kind)
        whole = task.sample_loss(output, y)
        alone = torch.cat([task.sample_loss(output[i : i + 1], y[i : i + 1]) for i in range(16)])
        assert torch.allclose(whole, alone, atol=1e-6) == independent
        assert Drawer(y, output, CLASSES).has_independent_rows(task.sample_loss) == independent


@pytest.mark.parametrize("activation", [nn.Sigmoid(), nn.Softplus()])
def test_loss_for_limited_output_range_is_padded(fit, monkeypatch, activation):
    class Probabilities(Classifier):
        def sample_loss(self, output, y):
            target = F.one_hot(y, CLASSES).to(output)
            if isinstance(activation, nn.Sigmoid):
                return F.binary_cross_entropy(output, target, reduction="none").mean(dim=1)
            return F.poisson_nll_loss(output, target, log_input=False, reduction="none").mean(dim=1)

    task = classifier(Probabilities, lambda: nn.Sequential(nn.Linear(6, CLASSES), activation))
    assert choice(fit, monkeypatch, task, stream_of())[0] is PADDED


def test_penalty_that_fails_raises_its_own_error(fit):
    class Fails(Method):
        def penalty(self, client, step):
            raise ValueError("an error raised by the method")

    with pytest.raises(ValueError, match=r"^an error raised by the method"):
        fit(classifier(), stream_of(), [Fails()])


def test_method_trial_leaves_no_changes(fit, monkeypatch):
    class Keeps(Method):
        def __init__(self):
            super().__init__()
            self.seen, self.last = [], 0

        def penalty(self, client, step):
            self.seen.append(len(step.output))
            self.last += 1
            return 0.0

    method, task, stream = Keeps(), classifier(), stream_of()
    before, generator = copy.deepcopy(task.state_dict()), torch.get_rng_state()
    assert choice(fit, monkeypatch, task, stream, [method])[1] is Reason.METHOD_STATE
    assert method.seen == [] and method.last == 0 and method.clients == "all"
    assert all(torch.equal(before[name], value) for name, value in task.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)


# Tests of the library's methods and tasks.

KINDS = [kind for kind in (getattr(library, name) for name in library.__all__) if isinstance(kind, type)]
KINDS = {kind.__name__: kind for kind in KINDS if issubclass(kind, Method) and kind is not Method}
OF_OTHER_TASKS = {"DyToxMethod", "FedWEIT", "IntrinsicPlasticity", "LVTMethod", "LoRM", "MFCL", "TARGET", "Unlearning"}
"""Methods that need a special network, task or data. Other files test these methods."""


@pytest.mark.parametrize("name", sorted(KINDS.keys() - OF_OTHER_TASKS))
def test_shipped_method_is_vectorized_if_vectorizable(fit, monkeypatch, name):
    kind, options = KINDS[name], {"client_weights": "uniform"}
    if kind.needs.local_head:
        options["reductions"] = {"model.3.*": "local"}
    method = kind(head_pattern="model.3.*") if kind.needs.local_head else kind()
    trainer, reason, _ = choice(fit, monkeypatch, classifier(), stream_of(), [method], **options)
    sequential = {Reason.METHOD_PROJECTS, Reason.METHOD_TRAINS}
    assert trainer is PADDED if method.vectorizable else (trainer is SEQUENTIAL and reason in sequential)


@pytest.mark.parametrize(
    ("methods", "label"),
    [
        (lambda: [GLFC(0.5), Replay(9, "class-balanced", "round")], "GLFC"),
        (lambda: [MeanOutputLoss(2.0, "logits", "absolute", "seen")], "MeanOutputLoss"),
        (lambda: [FLwF2T(0.3, 0.3, reduction="mean", teacher="live"), EWC(5.0)], "FLwF2T"),
        (lambda: [LwF(2.0, teacher="server", clients=["0", "3"])], "LwF"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_shipped_methods_with_batch_statistics_are_padded(fit, monkeypatch, methods, label):
    """Batch statistics weighted by `step.sample_weight` exclude padding."""
    assert choice(fit, monkeypatch, classifier(), stream_of(), methods())[0] is PADDED


@pytest.mark.parametrize("name", ["mlp", "dropout", "layer norm", "convolution", "har", "regressor", "batch norm"])
def test_shipped_tasks_and_common_layers_are_vectorized(fit, monkeypatch, name):
    networks = {
        "mlp": MLP([6, 5, CLASSES]),
        "dropout": nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, CLASSES)),
        "layer norm": nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, CLASSES)),
        "batch norm": nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)),
        "convolution": nn.Sequential(
            nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(20, CLASSES)
        ),
    }
    stream = stream_of()
    if name == "har":
        task, stream = HARClassifier("8-8C_4M_16D"), stream_of(shape=(6, 128))
    elif name == "regressor":
        task, y = Regressor(nn.Linear(6, 1)), np.random.default_rng(0).normal(size=(90, 1)).astype(np.float32)
        x = np.repeat(y, 6, axis=1)
        stream = FederatedStream.from_arrays(x, y, np.arange(90) % 3, scenario=ClassIncremental(1), seed=0)
    else:
        task = classifier(make=lambda: networks[name])
    assert choice(fit, monkeypatch, task, stream)[0] is (STEP if name == "batch norm" else PADDED)
