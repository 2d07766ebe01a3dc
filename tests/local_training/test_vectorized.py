"""Tests of vectorized training: results equal sequential training for methods, optimizers, dropout and clipping."""

import copy
import re
from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from raising import raises
from torch import nn

from lightning_fcl import Classifier
from lightning_fcl.callbacks import (
    AGEM,
    CCVR,
    EWC,
    FOT,
    GEM,
    GLFC,
    MAS,
    MOON,
    SCAFFOLD,
    ContinualMetrics,
    DERpp,
    FedCBDR,
    FedDyn,
    FedNova,
    FedNTD,
    FedProto,
    FedProx,
    FLwF,
    FLwF2T,
    ICaRL,
    LwF,
    MeanOutputLoss,
    ReFed,
    RegMean,
    Replay,
)
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.obstacles import Obstacle, Reason
from lightning_fcl.local_training.vectorized import VectorizedTrainer
from lightning_fcl.local_training.vmap_check import find_padding_obstacle
from lightning_fcl.local_training.vmap_training_step import StepTrainer
from lightning_fcl.models import MLP
from lightning_fcl.simulation.trainer_choice import choose_group_size

pytestmark = pytest.mark.rounding

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True),
    # With a smaller eps, these optimizers would amplify rounding differences to whole steps.
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-3),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.5, eps=1e-3),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, eps=1e-3),
}

METHODS = {
    "none": list,
    "LwF": lambda: [LwF(2.0)],
    "FLwF": lambda: [FLwF(0.3)],
    "FLwF-2T": lambda: [FLwF2T(0.3, 0.3)],
    "FLwF-2T/FT": lambda: [FLwF2T(0.3, 0.3, clients=["0", "3"])],
    "FLwF-2T, live": lambda: [FLwF2T(0.3, 0.3, reduction="mean", teacher="live")],
    "FedProx": lambda: [FedProx(0.5)],
    "EWC": lambda: [EWC(5.0)],
    "MAS": lambda: [MAS(0.5, clients=["0", "3"])],
    "MeanOutputLoss": lambda: [MeanOutputLoss(2.0)],
    "MeanOutputLoss, logits of seen classes": lambda: [
        MeanOutputLoss(2.0, "logits", "absolute", "seen", clients=["0", "3"]),
    ],
    "MeanOutputLoss, with replay": lambda: [Replay(9, "class-balanced", "round"), MeanOutputLoss(2.0)],
    "Replay": lambda: [Replay(9, "class-balanced", "round")],
    "DER++": lambda: [DERpp(9, 0.5, 0.5, batch_size=4)],
    "DER++, some clients": lambda: [DERpp(9, 0.5, 0.5, batch_size=4, clients=["0", "3"])],
    "FedProto": lambda: [FedProto(0.5)],
    "FedProto, some clients, with FLwF-2T": lambda: [FedProto(0.5, "head", clients=["0", "3"]), FLwF2T(0.3, 0.3)],
    "iCaRL": lambda: [ICaRL(9)],
    "FedNTD": lambda: [FedNTD(2.0)],
    "MOON, some clients": lambda: [MOON(2.0, clients=["0", "3"])],
    "SCAFFOLD": lambda: [SCAFFOLD()],
    "FedDyn": lambda: [FedDyn(0.1)],
    "FedNova": lambda: [FedNova()],
    "FOT": lambda: [FOT(0.8)],
    "RegMean": lambda: [RegMean(0.5)],
    "CCVR": lambda: [CCVR(num_samples=20)],
    "FedCBDR": lambda: [FedCBDR(30)],
    "FedCBDR, temperatures and weights": lambda: [FedCBDR(30, 0.9, 1.1, 1.1, 0.9)],
    "Re-Fed": lambda: [ReFed(9)],
    "GLFC, with replay": lambda: [GLFC(0.5), Replay(9, "class-balanced", "round")],
    "several methods": lambda: [Replay(9, "refresh", "round"), FLwF2T(0.3, 0.3), FedProx(0.5, clients=["1"])],
}


def difference(left, right):
    return max(float((left[name].double() - right[name].double()).abs().max()) for name in left)


def both(fit, make_stream, make_task, methods=(), optimizer="sgd", sizes=(1, "auto"), **options):
    """Return (state, record) of one fit for each of `sizes`. The clients have very different numbers of samples."""
    stream = {"partition": "dirichlet", "num_clients": 7, "rounds_per_experience": 2}
    results = []
    for size in sizes:
        # Use 16 hidden units, so that each sample has a nonzero feature. Zero features are equally far from all means.
        torch.manual_seed(0)
        task, metrics = make_task(OPTIMIZERS[optimizer], MLP([6, 16, 4])), ContinualMetrics()
        callbacks = [*METHODS[methods or "none"](), metrics]
        options = {"local_epochs": 2, **options}
        trainer = fit(task, make_stream(**stream), callbacks, max_vectorized_clients=size, seed=0, **options)
        assert (trainer.strategy.federation.local_trainer.num_vectorized_clients > 1) == (size != 1)
        loss = float(trainer.callback_metrics["train/loss"])
        results.append((task.state_dict(), {**metrics.record, "loss": loss}))
    return results


@pytest.mark.seconds
@pytest.mark.parametrize("methods", METHODS)
def test_methods_vectorized_equal_sequential(fit, make_stream, make_task, methods):
    uniform = {"client_weights": "uniform"} if methods in ("SCAFFOLD", "FedDyn") else {}
    (one, record), (many, other) = both(fit, make_stream, make_task, methods, **uniform)
    assert difference(one, many) < 1e-5
    for left, right in zip(record["rounds"], other["rounds"], strict=True):
        assert left["correct"] == right["correct"]
        assert left["upload_bytes"] == right["upload_bytes"]
    assert record["loss"] == pytest.approx(other["loss"], abs=1e-5)


@pytest.mark.seconds
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_vectorized_equal_sequential(fit, make_stream, make_task, optimizer):
    (one, _), (many, _) = both(fit, make_stream, make_task, optimizer=optimizer)
    assert difference(one, many) < 1e-5


@pytest.mark.seconds
@pytest.mark.parametrize("size", [2, 3, 100])
def test_any_max_vectorized_clients_equals_sequential(fit, make_stream, make_task, size):
    (one, _), (many, _) = both(fit, make_stream, make_task, "FLwF-2T", sizes=(1, size))
    assert difference(one, many) < 1e-5


def test_vectorized_step_excludes_finished_clients(fit, make_stream, make_task, monkeypatch):
    seen = []

    def losses(self, x, y, weight, keys, randomness="different"):
        found = given(self, x, y, weight, keys, randomness)
        seen.append((len(x), len(weight), *map(len, found), bool((weight[:, 0] > 0).all())))
        return found

    given = VectorizedTrainer.losses
    monkeypatch.setattr(VectorizedTrainer, "losses", losses)
    stream = make_stream(partition="dirichlet", num_clients=7, num_experiences=1)
    fit(make_task(), stream, [FedProx(0.1)], max_vectorized_clients=7, max_epochs=1)
    (rows,) = stream.plan.train
    steps = sorted((-(-len(own) // stream.batch_size) for own in rows.values()), reverse=True)
    assert len({*steps}) > 1
    expected = [sum(number > step for number in steps) for step in range(steps[0])]
    # Ignore the first calls, which are from the trial before training.
    assert seen[-len(expected) :] == [(active,) * 4 + (True,) for active in expected]


@pytest.mark.seconds
def test_local_heads_and_client_sampling_vectorized_equal_sequential(fit, make_stream, make_task):
    options = {"reductions": {"model.3.*": "local"}, "participation": 0.6}
    (one, record), (many, other) = both(fit, make_stream, make_task, "FLwF-2T", **options)
    assert difference(one, many) < 1e-5
    assert [r["correct"] for r in record["rounds"]] == [r["correct"] for r in other["rounds"]]


def test_non_finite_client_in_vectorized_step_is_dropped_alone(fit, make_stream, make_task):
    stream = make_stream()
    stream.setup("fit")
    poisoned = stream.plan.train[0]["1"]
    stream.samples.x[torch.from_numpy(poisoned)] = float("nan")
    task, metrics = make_task(), ContinualMetrics()
    fit(task, stream, [metrics], max_vectorized_clients=3, max_epochs=1)
    assert set(metrics.record["rounds"][0]["dropped"]) == {"1"}
    assert all(torch.isfinite(value).all() for value in task.state_dict().values())


def clients_per_step(fit, stream, task, **options):
    return fit(task, stream, max_epochs=1, **options).strategy.federation.local_trainer.num_vectorized_clients


def test_auto_vectorized_clients_depend_on_parameters(fit, make_stream, make_task):
    assert clients_per_step(fit, make_stream(), make_task()) > 1
    assert clients_per_step(fit, make_stream(), make_task(model=dropping())) > 1
    assert choose_group_size(make_task(model=nn.Linear(1000, 1000))) == 1
    assert choose_group_size(make_task(model=nn.Linear(999, 100))) == 40  # 40 x 100,000 parameters = 4 million
    assert choose_group_size(make_task()) == 1024


# With the batch size 1000, a batch has all 80 samples of a client.
@pytest.mark.parametrize(("batch_size", "expected"), [(8, 20), (32, 5), (1000, 2)])
def test_auto_vectorized_clients_depend_on_batch_size(fit, make_stream, make_task, monkeypatch, batch_size, expected):
    monkeypatch.setattr("lightning_fcl.simulation.trainer_choice._NUMBERS", 1000)
    task = make_task(model=nn.Linear(6, 4))  # 28 parameters
    assert clients_per_step(fit, make_stream(batch_size=batch_size), task) == expected


class Centred(nn.Linear):
    def forward(self, x):
        output = super().forward(x)
        return output - output.mean(dim=0)


class Caching(nn.Linear):
    def forward(self, x):
        self.last = super().forward(x)
        return self.last


class Drifting(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls = self.calls + 1
        return super().forward(x) * self.calls


class NumPyNoise(nn.Linear):
    def forward(self, x):
        return super().forward(x) * float(np.random.rand())


class Own(Classifier):
    def training_step(self, batch, batch_idx):
        return 2 * super().training_step(batch, batch_idx)


def test_max_vectorized_clients_unsupported_raises_with_reason(fit, make_stream, make_task):
    obstacle = Obstacle(Reason.STATE, ("`model.last`",))
    with pytest.raises(
        ValueError, match=re.escape(f'Expected `max_vectorized_clients` to be 1 or "auto", but got 4: {obstacle}')
    ):
        fit(make_task(model=Caching(6, 4)), make_stream(), max_vectorized_clients=4)
    with pytest.raises(ValueError, match=str(Obstacle(Reason.KEEP_OPTIMIZER))):
        fit(make_task(), make_stream(), max_vectorized_clients=4, keep_optimizer_state=True)


def test_gradient_projection_methods_train_sequentially(fit, make_stream, make_task):
    for method in (GEM, AGEM):
        assert clients_per_step(fit, make_stream(), make_task(), callbacks=[method()]) == 1
        with raises(InvalidValueError, "max_vectorized_clients", value=3):
            fit(make_task(), make_stream(), [method()], max_vectorized_clients=3)


def in_two_ways(fit, make_stream, task):
    """Return the states after sequential training and after vectorized training with the task's own training step."""
    tasks = [copy.deepcopy(task), copy.deepcopy(task)]
    # Drop the last batch, because batch normalization cannot train on a batch of one sample.
    trainers = [
        fit(own, make_stream(drop_last=True), max_vectorized_clients=size, seed=0)
        for own, size in zip(tasks, (1, "auto"), strict=True)
    ]
    assert type(trainers[1].strategy.federation.local_trainer) is StepTrainer
    losses = [float(trainer.callback_metrics["train/loss"]) for trainer in trainers]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    return [own.state_dict() for own in tasks]


def test_custom_training_step_is_used_in_vectorized_training(fit, make_stream):
    torch.manual_seed(0)
    own, plain = Own(nn.Linear(6, 4), 4), Classifier(nn.Linear(6, 4), 4)
    one, many = in_two_ways(fit, make_stream, own)
    assert difference(one, many) < 1e-5
    plain.load_state_dict(Own(nn.Linear(6, 4), 4).state_dict())
    fit(plain, make_stream(drop_last=True), seed=0)
    assert difference(many, plain.state_dict()) > 1e-3


@pytest.mark.parametrize("running", [True, False])
def test_batch_dependent_network_is_vectorized_without_padding(fit, make_stream, make_task, running):
    norm = nn.BatchNorm1d(5, track_running_stats=running)
    one, many = in_two_ways(fit, make_stream, make_task(model=nn.Sequential(nn.Linear(6, 5), norm, Centred(5, 4))))
    assert difference(one, many) < 1e-5
    assert not running or int(many["model.1.num_batches_tracked"]) > 0


def test_callback_on_after_backward_trains_sequentially(fit, make_stream, make_task):
    class Watch(Callback):
        def __init__(self):
            self.norms = []

        def on_after_backward(self, trainer, pl_module):
            self.norms.append(float(pl_module.model[1].weight.grad.norm()))

    watch = Watch()
    trainer = fit(make_task(), make_stream(), [watch])
    assert trainer.strategy.federation.local_trainer.num_vectorized_clients == 1
    assert len(watch.norms) == trainer.global_step
    assert all(norm > 0 for norm in watch.norms)
    with raises(InvalidValueError, "max_vectorized_clients"):
        fit(make_task(), make_stream(), [Watch()], max_vectorized_clients=3)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 6), nn.Linear(6, 6)
        self.decode.weight = self.encode.weight

    def forward(self, x):
        return self.decode(torch.relu(self.encode(x)))[:, :4]


class Noisy(nn.Linear):
    def forward(self, x):
        output = super().forward(x)
        return output + torch.randn(output.shape) if self.training else output


class Recurrent(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


class Counting(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return super().forward(x)


@pytest.mark.may(
    "Random numbers of NumPy, cached tensors or branches on values in `forward`", "Clients train sequentially."
)
@pytest.mark.parametrize(
    "model",
    [Noisy(6, 4), Recurrent(6, 4), Counting(6, 4), Caching(6, 4), Drifting(6, 4), NumPyNoise(6, 4)],
    ids=lambda model: type(model).__name__,
)
def test_unsupported_forward_trains_sequentially(fit, make_stream, make_task, model):
    auto, one = make_task(model=copy.deepcopy(model)), make_task(model=copy.deepcopy(model))
    assert clients_per_step(fit, make_stream(), auto, seed=0) == 1
    fit(one, make_stream(), max_vectorized_clients=1, max_epochs=1, seed=0)
    assert difference(auto.state_dict(), one.state_dict()) == 0


class Products(nn.Module):
    """A network of matrix products instead of linear layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(6, 5) / 2), nn.Parameter(torch.randn(4, 5) / 2)

    def forward(self, x):
        return torch.relu(x @ self.first) @ self.second.T


CONVOLUTIONS = nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(20, 4))


@pytest.mark.seconds
@pytest.mark.parametrize("model", [MLP([6, 16, 8, 4]), Products(), CONVOLUTIONS], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("kind", [torch.optim.SGD, partial(torch.optim.Adam, eps=1e-3)])
def test_fused_optimizers_vectorized_equal_sequential(fit, make_stream, make_task, model, kind):
    states = []
    for size, fused in ((1, False), (3, False), (3, True)):
        task = make_task(lambda params, fused=fused: kind(params, lr=0.05, fused=fused), copy.deepcopy(model))
        fit(task, make_stream(num_clients=3), max_vectorized_clients=size, max_epochs=2, seed=0)
        states.append(task.state_dict())
    assert max(difference(states[0], other) for other in states[1:]) < 1e-5


def test_linear_weights_and_gradients_have_column_major_layout(fit, make_stream, make_task, monkeypatch):
    """vmap returns column-major gradients. A step on weights with another layout takes three times as long."""
    strides = []

    def step(self, closure):
        loss = closure()
        strides[:] = [(p.stride(), p.grad.stride()) for group in self.param_groups for p in group["params"]]
        return loss

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    task = make_task(lambda params: torch.optim.SGD(params, lr=0.1), MLP([6, 16, 4]))
    fit(task, make_stream(num_clients=3), max_vectorized_clients=3, max_epochs=1)
    assert strides == [(own, own) for own in ((96, 1, 16), (16, 1), (64, 1, 4), (4, 1))]


def test_tied_weights_are_uploaded_once(fit, make_stream, make_task):
    states, sent, model = [], [], Tied()
    for size in (1, 3):
        task, metrics = make_task(model=copy.deepcopy(model)), ContinualMetrics()
        fit(task, make_stream(), [FLwF2T(0.3, 0.3), metrics], max_vectorized_clients=size, seed=0)
        assert task.model.decode.weight is task.model.encode.weight
        states.append(task.state_dict())
        sent.append(metrics.record["rounds"][0]["upload_bytes"]["0"])
    assert difference(*states) < 1e-5
    assert sent == [4 * (36 + 6 + 6)] * 2


def dropping():
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8), nn.AlphaDropout(0.2), nn.Linear(8, 4)
    )


@pytest.mark.seconds
@pytest.mark.parametrize("methods", ["none", "FLwF-2T", "DER++", "Replay", "MAS", "FedProto"])
def test_dropout_vectorized_equals_sequential(fit, make_stream, make_task, methods):
    states = []
    for size in (1, 3, "auto"):
        torch.manual_seed(1)
        model = nn.Sequential(dropping()) if methods != "FedProto" else WithFeatures()
        task = make_task(model=model)
        stream = make_stream(partition="dirichlet", num_clients=7)
        trainer = fit(task, stream, METHODS[methods](), max_vectorized_clients=size, seed=0)
        assert (trainer.strategy.federation.local_trainer.num_vectorized_clients > 1) == (size != 1)
        states.append(task.state_dict())
    assert difference(states[0], states[1]) < 1e-5 and difference(states[0], states[2]) < 1e-5


@pytest.mark.argument(
    "gradient_clip_val", "Supported. The gradient of each client is clipped separately, also in vectorized training."
)
@pytest.mark.argument(
    "gradient_clip_algorithm",
    "Supported. The gradient of each client is clipped separately, also in vectorized training.",
)
@pytest.mark.may("Gradient clipping", "The gradient of each client is clipped separately, also in vectorized training.")
@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("clip", [0.02, 0.3])
def test_gradient_clipping_is_per_client(fit, make_stream, make_task, algorithm, clip):
    states = []
    for size, value in ((1, clip), (3, clip), ("auto", clip), (1, None)):
        task = make_task()
        options = {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm}
        fit(task, make_stream(partition="dirichlet"), max_vectorized_clients=size, seed=0, trainer_args=options)
        states.append(task.state_dict())
    assert difference(states[0], states[1]) < 1e-5 and difference(states[0], states[2]) < 1e-5
    assert difference(states[0], states[3]) > 1e-4


class WithFeatures(nn.Module):
    """A network with dropout before and after the feature layer."""

    features = 8

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 8), nn.Dropout(0.2)), nn.Linear(8, 4)

    def embed(self, x):
        return self.body(x)

    def forward(self, x):
        return self.head(self.embed(x))


def test_dropout_masks_differ_by_client_round_and_step(fit, make_stream, make_task):
    masks = []

    class Look(nn.Dropout):
        def forward(self, x):
            output = super().forward(x)
            if self.training:
                masks.append(tuple((output == 0).flatten().tolist()))
            return output

    model = nn.Sequential(nn.Linear(6, 32), Look(0.5), nn.Linear(32, 4))
    fit(make_task(model=model), make_stream(samples_per_round=8), max_vectorized_clients=1, local_epochs=2, seed=0)
    assert len(set(masks)) == len(masks) > 10


def test_random_layers_in_vectorized_training_log_warning(fit, make_stream, make_task, caplog):
    fit(make_task(model=Noisy(6, 4)), make_stream(), max_vectorized_clients=3, max_epochs=1)
    assert "Random layers draw different numbers in vectorized training" in caplog.text


class Contrasting(Classifier):
    def sample_loss(self, output, y):
        return super().sample_loss(output, y) + 0.1 * output.mean() ** 2


def test_batch_dependent_loss_is_vectorized_without_padding(fit, make_stream):
    torch.manual_seed(0)
    one, many = in_two_ways(fit, make_stream, Contrasting(nn.Linear(6, 4), 4))
    assert difference(one, many) < 1e-5


def test_vmap_trial_leaves_module_and_generators_unchanged(fit, make_stream, make_task):
    task, stream = make_task(model=dropping()), make_stream()
    trainer = fit(task, stream, max_epochs=1)
    before, states = copy.deepcopy(task.state_dict()), [torch.get_rng_state(), np.random.get_state()[1]]
    assert find_padding_obstacle(task, [FLwF2T(0.3, 0.3)], trainer.strategy.federation.optimizers[0], stream) is None
    assert difference(before, task.state_dict()) == 0
    assert torch.equal(torch.get_rng_state(), states[0]) and np.array_equal(np.random.get_state()[1], states[1])


def test_tensor_cached_by_forward_before_fit_is_allowed(fit, make_stream, make_task):
    task = make_task(model=Caching(6, 4))
    task(torch.ones(2, 6))  # stores a non-leaf tensor, which cannot be deep-copied
    assert clients_per_step(fit, make_stream(), task) == 1


def test_second_fit_chooses_vectorization_again(fit, make_stream, make_task):
    task = make_task()
    trainer = fit(task, make_stream(), [FedProx(0.5)], max_vectorized_clients=3)
    trainer.fit_loop.max_epochs = trainer.current_epoch
    trainer.fit(task, datamodule=make_stream())
    assert trainer.strategy.federation.local_trainer.num_vectorized_clients == 3
