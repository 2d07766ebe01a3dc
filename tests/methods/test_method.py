"""Tests of behavior that all methods share, mostly in a plain Trainer."""

import copy
from collections import OrderedDict

import lightning.pytorch as L
import pytest
import torch
from kept import memory_of
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from raising import raises
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_fcl import Classifier, FederatedStream
from lightning_fcl import callbacks as library
from lightning_fcl.callbacks import AGEM, APFL, BCN, EWC, GEM, FedKNOW, FedProx, FedViT, FLwF2T, LVTMethod, LwF, Replay
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.errors import InvalidTypeError
from lightning_fcl.methods.method import Method
from lightning_fcl.models import MLP

from .test_lvt import Net

METHODS = {
    "FLwF2T": lambda: [FLwF2T(0.4, 0.3)],
    "LwF": lambda: [LwF(2.0)],
    "EWC": lambda: [EWC(5.0)],
    "MAS": lambda: [library.MAS(0.5)],
    "SI": lambda: [library.SI(0.5)],
    "MOON": lambda: [library.MOON(2.0)],
    "FedNTD": lambda: [library.FedNTD(2.0)],
    "GLFC": lambda: [library.GLFC(0.5)],
    "Re-Fed": lambda: [library.ReFed(6)],
    "Replay": lambda: [Replay(6, "class-balanced", "round")],
    "GEM": lambda: [GEM(6)],
    "DER++": lambda: [library.DERpp(6, batch_size=4)],
    "FedProto": lambda: [library.FedProto(0.5)],
    "iCaRL": lambda: [library.ICaRL(6)],
    "A-GEM": lambda: [AGEM(0.3)],
    "MOL": lambda: [library.MeanOutputLoss(1.5)],
    "all": lambda: [FLwF2T(0.4, 0.3), LwF(2.0), FedProx(0.1), Replay(6, "reservoir", "round"), GEM(0.3)],
}


@pytest.mark.parametrize("methods", METHODS)
def test_resume_plain_trainer_equals_uninterrupted_fit(make_task, samples, train, assert_same, tmp_path, methods):
    first, second = samples([0, 2]), samples([1, 3], seed=1)
    whole, again, callbacks = make_task(), make_task(seed=9), METHODS[methods]()
    train(whole, callbacks, first)
    saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    train(whole, [*callbacks, saving], second, epochs=4, enable_checkpointing=True)
    resumed = METHODS[methods]()
    train(again, resumed, second, epochs=4, ckpt_path=tmp_path / "epoch=1.ckpt")
    assert_same(again, whole, 0)
    # Training on the first data again starts a third experience.
    train(whole, callbacks, first)
    train(again, resumed, first)
    assert_same(again, whole, 0)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("name", "arguments", "options"),
    [
        ("AGEM", {"memory_size": 5, "batch_size": 3}, {"client_store": "disk"}),
        ("BCN", {"memory_size": 0.3}, {"client_store": "disk"}),
        ("CCVR", {"num_samples": 20}, {}),
        ("CCVR", {"num_samples": 20, "logit_norm": 0.1}, {}),
        ("Fed3R", {}, {}),
        ("FedCBDR", {"memory_size": 20, "old_temperature": 0.9, "new_weight": 0.9}, {"client_store": "disk"}),
        ("FedDyn", {"alpha": 0.1}, {"client_weights": "uniform"}),
        ("FedNova", {}, {}),
        ("FOT", {"eps": 0.8}, {"participation": 0.6}),
        ("GEM", {"memory_size": 0.3}, {"client_store": "disk"}),
        ("GLFC", {}, {}),
        ("GLFC", {"proxy_server": True, "num_iterations": 20}, {"max_vectorized_clients": 1}),
        ("LVTMethod", {}, {"client_store": "disk"}),
        ("MOON", {"mu": 3.0}, {}),
        ("ReFed", {"memory_size": 20}, {"client_store": "disk"}),
        ("RegMean", {"alpha": 0.5}, {}),
        ("SCAFFOLD", {}, {"client_weights": "uniform"}),
        ("SI", {"strength": 5.0}, {}),
    ],
)
def test_resume_federation_equals_uninterrupted_fit(assert_resumes, make_task, name, arguments, options):
    kind = getattr(library, name)

    def make(seed=0):
        torch.manual_seed(seed)
        return make_task(model=with_head(kind) if kind is LVTMethod else None, seed=seed)

    assert_resumes(make, lambda: kind(**arguments), **options)


# Methods that store samples of a client's tasks, with arguments that use all stored samples in each step.
TASKS = {
    "GEM": lambda: GEM(1.0),
    "A-GEM": lambda: AGEM(1.0),
    "BCN": lambda: BCN(1.0, inner_lr=0.1),
    "LVT": lambda: LVTMethod(rho=0.5, batch_size=99),
}


@pytest.mark.seconds
@pytest.mark.parametrize("name", TASKS)
def test_one_client_federation_equals_plain_trainer(fit, make_stream, make_task, assert_same, monkeypatch, name):
    # The replacement takes all samples in their order, so BCN uses each stored sample once per step.
    monkeypatch.setattr(torch, "randint", lambda high, size: torch.arange(high))
    tasks = [make_task(model=copy.deepcopy(model)) for model in [with_head(type(TASKS[name]()))] * 3]
    for task, methods, strategy in zip(
        tasks, ([TASKS[name]()], [TASKS[name]()], []), ("auto", None, None), strict=True
    ):
        stream = make_stream(num_clients=1, num_experiences=4, rounds_per_experience=3, batch_size=240, samples=80)
        fit(task, stream, methods, strategy=strategy)
    assert_same(*tasks[:2], 1e-5)
    with pytest.raises(AssertionError):
        assert_same(*tasks[1:], 1e-3)


WITHOUT_WEIGHT = {
    "DER++": lambda: library.DERpp(9, alpha=0, beta=0, batch_size=4),
    "FedDyn": lambda: library.FedDyn(0.0),
    "LVT": lambda: LVTMethod(0.0, 0.0, 0.0),
    "MOL": lambda: library.MeanOutputLoss(0.0, cross_entropy="all"),
    "MOON": lambda: library.MOON(0.0),
}


@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
@pytest.mark.parametrize("name", WITHOUT_WEIGHT)
def test_method_with_weight_zero_equals_fedavg(fit, make_stream, make_task, assert_same, name, max_vectorized_clients):
    tasks, options = (
        [make_task(), make_task()],
        {"max_vectorized_clients": max_vectorized_clients, "client_weights": "uniform", "seed": 0},
    )
    fit(tasks[0], make_stream(rounds_per_experience=2), **options)
    trainer = fit(tasks[1], make_stream(rounds_per_experience=2), [WITHOUT_WEIGHT[name]()], **options)
    assert_same(*tasks, 0 if max_vectorized_clients == 1 else 1e-6)
    if name in ("FedDyn", "LVT", "MOON"):
        kept = {name for name, memory in trainer.strategy.server.client_store["0"].items() if memory}
        assert kept <= {"progress"} and not trainer.strategy.server.extra_tensors


@pytest.mark.parametrize("name", TASKS)
def test_first_task_equals_fine_tuning(make_task, samples, train, assert_same, name):
    model = with_head(type(TASKS[name]()))
    tuned, fine = make_task(model=copy.deepcopy(model)), make_task(model=model)
    train(tuned, [TASKS[name]()], samples(), epochs=3)
    train(fine, [], samples(), epochs=3)
    assert_same(tuned, fine, 0)


def test_checkpoint_loads_with_weights_only(make_task, samples, train, tmp_path):
    callbacks = METHODS["all"]()
    train(make_task(), [*callbacks, ModelCheckpoint(tmp_path, "{epoch}")], samples(), enable_checkpointing=True)
    kept = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)["callbacks"]
    assert torch.equal(kept["MethodDriver"]["server"]["clients"]["local"]["Replay"]["x"], memory_of(callbacks[3])["x"])


@pytest.mark.parametrize("stop", ["steps", "loss"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: EWC(5.0),
        lambda: library.MAS(0.5),
        lambda: library.SI(0.5),
        lambda: LVTMethod(gamma=0.0),
        lambda: Replay(6, "reservoir", "experience"),
        lambda: Replay(6, "reservoir", "round"),
        lambda: GEM(6),
    ],
)
def test_fit_stopped_early_ends_experience(make_task, samples, train, assert_same, make, stop):
    tasks, methods = [make_task(), make_task()], [make(), make()]
    if stop == "steps":
        cut, options = [], {"max_steps": 6}
    else:
        cut, options = [EarlyStopping("train/loss", 1e9, patience=0, check_on_train_epoch_end=True)], {}
    train(tasks[0], [methods[0], *cut], samples([0, 2]), epochs=10, **options)
    train(tasks[1], [methods[1]], samples([0, 2]))
    assert len(memory_of(methods[0])) > 1
    torch.testing.assert_close(memory_of(methods[0]), memory_of(methods[1]), rtol=0, atol=0)
    for task, method in zip(tasks, methods, strict=True):
        torch.manual_seed(1)
        train(task, [method], samples([1, 3], seed=1))
    assert_same(*tasks, 0)
    torch.testing.assert_close(memory_of(methods[0]), memory_of(methods[1]), rtol=0, atol=0)


class Parts(Dataset):
    """A dataset whose samples have three parts, or are dicts."""

    def __init__(self, kind):
        self.kind, self.x, self.y = kind, torch.randn(96, 6), torch.arange(96) % 4

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return (self.x[i], self.y[i], i) if self.kind is list else {"x": self.x[i], "y": self.y[i]}


class NoStep(Classifier):
    def training_step(self, batch, batch_idx):
        raise AssertionError("a step")


@pytest.mark.parametrize(("kind", "parts"), [(list, "a list of length 3"), (dict, "a dict")])
@pytest.mark.parametrize("make", [EWC, GEM, LwF, APFL])
def test_batches_not_pairs_raise_before_first_step(fit, quiet, make, kind, parts):
    data, _message = Parts(kind), f"Expected batches `[x, y]` with a tensor `y` for `{make.__name__}`, but got {parts}."
    stream = FederatedStream.from_arrays(
        data, data.y, scenario=ClassIncremental(2), partition=IID(2), batch_size=8, seed=0
    )
    with raises(InvalidTypeError, "batch"):
        fit(NoStep(MLP([6, 5, 4]), 4), stream, [make()])
    # `APFL` needs a federation.
    if make is not APFL:
        with raises(InvalidTypeError, "batch"):
            trainer = L.Trainer(max_epochs=1, callbacks=[make()], **quiet)
            trainer.fit(NoStep(MLP([6, 5, 4]), 4), DataLoader(data, batch_size=8))


def with_head(method):
    """Return a network with a head, or for LVT's method a network with keys."""
    if method is LVTMethod:
        return Net()
    return nn.Sequential(OrderedDict(body=nn.Linear(6, 5), activation=nn.Tanh(), head=nn.Linear(5, 4)))


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("poisoned", [(0, 1, 2), (1, 2), (2,)])
@pytest.mark.parametrize("participation", [1.0, 2])
@pytest.mark.parametrize("method", [GEM, FedViT, FedKNOW, LVTMethod])
def test_client_with_non_finite_samples_participates_again(
    fit, make_stream, make_task, method, participation, poisoned, share
):
    class Log(Callback):
        def on_round_end(self, trainer, pl_module):
            log = trainer.strategy.server.record
            rounds.append((set(log.accepted), set(log.dropped)))

    stream, rounds = make_stream(rounds_per_experience=3, samples_per_round=8), []
    stream.setup("fit")
    for round_idx in poisoned:
        rows = stream.plan.train[round_idx]["1"]
        stream.samples.x[torch.from_numpy(rows[: int(share * len(rows))])] = float("nan")
    method = method(**({"integrate_last": True} if issubclass(method, FedViT) else {}))
    options = {"reductions": {"model.head.*": "local"}, "participation": participation, "seed": 1}
    trainer = fit(make_task(model=with_head(type(method))), stream, [method, Log()], **options)
    assert ("1" in rounds[2][1]) == (participation == 1.0)
    assert all("1" in rounds[round_idx][round_idx in poisoned] for round_idx in (0, 1))
    assert sum("1" in trained for trained, _ in rounds[3:]) >= 2 and not any(dropped for _, dropped in rounds[3:])
    memory = trainer.strategy.server.client_store["1"][type(method).__name__]
    assert all(value.isfinite().all() for value in memory.values())


def test_plain_trainer_epoch_of_stream_is_round(fit, make_stream, make_task):
    class Turns(Method):
        def prepare_client_state(self, client):
            client_rounds.append(
                (
                    "begin",
                    client.client_round.round_idx,
                    client.client_round.experience_idx,
                    client.client_round.is_last_round,
                )
            )
            return client.method_state

        def update_client_state(self, client, trained_state, data):
            client_rounds.append(
                (
                    "end",
                    client.client_round.round_idx,
                    client.client_round.experience_idx,
                    client.client_round.is_last_round,
                )
            )
            return client.method_state

    expected = [(r, r // 2, r % 2 == 1) for r in range(4)]
    for strategy in (None, "auto"):
        client_rounds = []
        fit(make_task(), make_stream(num_clients=1, rounds_per_experience=2), [Turns()], strategy=strategy)
        assert client_rounds == [(when, *client_round) for client_round in expected for when in ("begin", "end")]


def test_gradient_fn_other_state_and_loss(make_task, samples, train):
    class Look(Method):
        def project_gradient(self, client, gradient, gradient_fn):
            before = {name: value.clone() for name, value in task.state_dict().items()}
            seen.append(gradient_fn(x, y, state))
            expected.append(by_hand(state, torch.nn.functional.cross_entropy))
            seen.append(gradient_fn(x, target, loss=lambda output, y: (output - y).square().sum(dim=1)))
            expected.append(by_hand(before, lambda output, y: (output - target).square().sum(dim=1).mean()))
            torch.testing.assert_close(dict(task.state_dict()), before, rtol=0, atol=0)
            return gradient

    def by_hand(values, loss):
        other = make_task()
        other.load_state_dict(values)
        names = [p for _, p in other.named_parameters()]
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss(other(x), y), names)])

    seen, expected, (x, y), target = [], [], samples(seed=7), torch.randn(20, 4)
    task, state = make_task(), {name: torch.randn_like(value) for name, value in make_task().state_dict().items()}
    train(task, [Look()], samples())
    assert len(seen) == 12 and not torch.allclose(seen[0], seen[1])
    for left, right in zip(seen, expected, strict=True):
        torch.testing.assert_close(left, right)


def test_loss_fn_is_part_of_autograd_graph(make_task, samples, train, by_hand, assert_same):
    class Rehearsal(Method):
        def penalty(self, client, step):
            return 0.5 * step.loss_fn(x, y) + 0.1 * step.loss_fn(x, y, {n: 2 * p for n, p in step.params.items()})

    def loss(output, inputs, targets):
        doubled = torch.func.functional_call(task, {n: 2 * p for n, p in task.named_parameters()}, (x,))
        cross_entropy = torch.nn.functional.cross_entropy
        return cross_entropy(output, targets) + 0.5 * cross_entropy(task(x), y) + 0.1 * cross_entropy(doubled, y)

    (x, y), task = samples(seed=7), make_task()
    rehearsed = copy.deepcopy(task)
    train(rehearsed, [Rehearsal()], samples())
    by_hand(task, samples(), loss)
    assert_same(task, rehearsed)
