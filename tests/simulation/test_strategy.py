import contextlib
import copy
from collections import OrderedDict
from functools import partial

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from raising import raises
from torch import nn

from lightning_fcl import FederatedStrategy, FederatedStream, client_model
from lightning_fcl.callbacks import APFL, ContinualMetrics, Ditto, FedProx, FedViT, Method
from lightning_fcl.data.batching import BatchPlan, order_keys, plan_batches
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidValueError, UnknownNameError
from lightning_fcl.federation.synchronization import Participation


def close(left, right, tolerance=1e-6):
    return all(torch.allclose(left[name].double(), right[name].double(), atol=tolerance, rtol=0) for name in left)


def equal(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)


def snapshot(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def local_training(task, stream, client, round_idx, epochs, seed=0):
    """Train a client in plain PyTorch. Return the trained state and the number of samples."""
    x, y = stream.get_samples(stream.plan.train[round_idx][client])
    optimizer = task.configure_optimizers()
    task.train()
    for indices in plan_batches(
        len(y), epochs, BatchPlan(stream.batch_size, stream.shuffle), order_keys(seed, [client], round_idx)
    ):
        optimizer.zero_grad()
        nn.functional.cross_entropy(task.model(x[indices]), y[indices]).backward()
        optimizer.step()
    return snapshot(task), len(y)


def fedavg(task, stream, epochs, rounds, weight=lambda client, n: n, choose=None, seed=0):
    """Return the server state after FedAvg in plain PyTorch."""
    server = snapshot(task)
    for round_idx in range(rounds):
        total, sums = 0.0, None
        for client in choose(round_idx) if choose else stream.plan.train[round_idx]:
            local = copy.deepcopy(task)
            local.load_state_dict(server)
            state, n = local_training(local, stream, client, round_idx, epochs, seed)
            w = weight(client, n)
            sums = {name: (sums[name] if sums else 0) + w * value.double() for name, value in state.items()}
            total += w
        server = {name: (sums[name] / total).to(value.dtype) for name, value in server.items()}
    return server


class Records(Callback):
    """Stores the record of each round."""

    def __init__(self):
        self.rounds = []

    def on_round_end(self, trainer, pl_module):
        self.rounds.append(trainer.strategy.server.record)


@pytest.mark.parametrize("shuffle", [True, False])
def test_strategy_equals_fedavg_in_plain_pytorch(fit, make_stream, make_task, shuffle):
    stream, task = make_stream(rounds_per_experience=2, shuffle=shuffle), make_task()
    start = copy.deepcopy(task)
    fit(task, stream, local_epochs=2, max_vectorized_clients=1, seed=0)
    assert equal(task.state_dict(), fedavg(start, stream, epochs=2, rounds=4))


def test_strategy_one_client_equals_plain_trainer(fit, make_stream, make_task):
    federated, plain = make_task(), make_task()
    fit(federated, make_stream(num_clients=1, rounds_per_experience=3), max_vectorized_clients=1, seed=0)
    fit(plain, make_stream(num_clients=1, rounds_per_experience=3), strategy="auto", max_epochs=6)
    # The plain Trainer keeps its optimizer between epochs, but SGD without momentum has no state.
    assert equal(federated.state_dict(), plain.state_dict())


def test_keep_optimizer_state_keeps_momentum_between_rounds(fit, make_stream, make_task):
    def momentum(params):
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    kept, plain, fresh = make_task(momentum), make_task(momentum), make_task(momentum)
    options = {"num_clients": 1, "rounds_per_experience": 2}
    fit(kept, make_stream(**options), keep_optimizer_state=True, seed=0)
    fit(fresh, make_stream(**options), seed=0, max_vectorized_clients=1)
    fit(plain, make_stream(**options), strategy="auto", max_epochs=4)
    assert equal(kept.state_dict(), plain.state_dict())
    assert not close(fresh.state_dict(), plain.state_dict(), 1e-3)


def test_participation_averages_only_sampled_clients(fit, make_stream, make_task):
    stream, task = make_stream(num_clients=6), make_task()
    start = copy.deepcopy(task)
    fit(task, stream, participation=0.5, max_vectorized_clients=1, seed=7)
    chosen = partial(Participation(0.5, 7).sample_clients, stream.plan)
    assert equal(task.state_dict(), fedavg(start, stream, 1, 2, choose=lambda round_idx: chosen(round_idx)[0], seed=7))


@pytest.mark.parametrize(
    ("weights", "weight"),
    [("uniform", lambda c, n: 1), ({"0": 1, "1": 4, "2": 0.5}, lambda c, n: {"0": 1, "1": 4, "2": 0.5}[c])],
)
def test_client_weights_equal_weighted_fedavg(fit, make_stream, make_task, weights, weight):
    stream, task = make_stream(partition="dirichlet"), make_task()
    start = copy.deepcopy(task)
    fit(task, stream, client_weights=weights, max_vectorized_clients=1, seed=0)
    assert close(task.state_dict(), fedavg(start, stream, 1, 2, weight), 1e-7)


def test_clients_without_data_are_skipped_and_recorded(fit, make_stream, make_task):
    owners = np.array(["a", "a", "b", "c"])[np.arange(240) % 4]  # The owner depends on the label.
    records = Records()
    fit(make_task(), make_stream(client_ids=owners, class_order=[0, 1, 2, 3]), [records])
    assert [record.no_data for record in records.rounds] == [["b", "c"], ["a"]]
    assert [list(record.upload_bytes) for record in records.rounds] == [["a"], ["b", "c"]]


@pytest.mark.argument("callbacks", "Supported. In hooks before and after a round, the module has the server's state.")
@pytest.mark.callback("Callback", "Supported. In hooks before and after a round, the module has the server's state.")
@pytest.mark.parametrize("validation", [0.0, 0.2])
def test_server_state_is_in_module_before_validation_and_epoch_end(fit, make_stream, make_task, validation):
    places = []

    class Watch(Callback):
        def check(self, trainer, pl_module):
            strategy = trainer.strategy
            places.append(equal(pl_module.state_dict(), strategy.server.state))

        def on_validation_start(self, trainer, pl_module):
            if not trainer.sanity_checking:
                self.check(trainer, pl_module)

        on_train_epoch_end = check

    task = make_task()
    before = snapshot(task)
    fit(task, make_stream(validation=validation), [Watch()])
    assert len(places) == (4 if validation else 2)
    assert all(places)
    assert not equal(before, task.state_dict())


@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
def test_all_parameters_client_local_equals_training_alone(fit, make_stream, make_task, max_vectorized_clients):
    task, stream, servers = make_task(), make_stream(rounds_per_experience=2), []
    start = copy.deepcopy(task)

    class Watch(Callback):
        def on_round_end(self, trainer, pl_module):
            servers.append(snapshot(pl_module))

    trainer = fit(
        task, stream, [Watch()], reductions={"*": "local"}, max_vectorized_clients=max_vectorized_clients, seed=0
    )
    assert len(servers) == 4 and all(equal(server, start.state_dict()) for server in servers)
    for client in stream.plan.clients:
        alone = copy.deepcopy(start)
        for round_idx in range(4):
            local_training(alone, stream, client, round_idx, 1)
        kept = trainer.strategy.server.client_store[client]["model"]
        assert kept.keys() == alone.state_dict().keys()
        assert close(kept, alone.state_dict(), 0 if max_vectorized_clients == 1 else 1e-5)
        assert not close(kept, start.state_dict(), 1e-2)


def with_head():
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(body=nn.Linear(6, 5), activation=nn.Tanh(), head=nn.Linear(5, 4)))


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("methods", "rules"),
    [
        (lambda: [], {"model.head.*": "local"}),
        (lambda: [APFL(0.7)], {}),
        (lambda: [Ditto(0.3)], {}),
        (lambda: [FedViT(integrate_last=True)], {"model.head.*": "local"}),
    ],
)
def test_client_model_predicts_as_recorded_by_metrics(fit, make_stream, make_task, caplog, methods, rules):
    task, metrics = make_task(model=with_head()), ContinualMetrics(when="aggregated")
    stream = make_stream(num_clients=4, rounds_per_experience=2, partition="dirichlet")
    trainer = fit(task, stream, [*methods(), metrics], reductions=rules, participation=3, seed=1)
    correct, server = metrics.record["rounds"][-1]["correct"], snapshot(task)

    def accuracy():
        return trainer.test(task, datamodule=stream, verbose=False)[0]["test/accuracy"]

    assert accuracy() == pytest.approx(sum(correct["server"]) / len(stream.plan.test))
    assert ("The module is the server's model" in caplog.text) == bool(rules)
    caplog.clear()
    loaded = []
    # Client models start from the server's model, so the results do not depend on the order of the clients.
    for client in "01230":
        state = trainer.strategy.client_state_dict(client)
        assert equal(task.state_dict(), server)
        with client_model(trainer, client):
            loaded.append(snapshot(task))
            assert equal(loaded[-1], state) and equal(state, trainer.strategy.client_state_dict(client, server))
            assert accuracy() == pytest.approx(sum(correct[client]) / len(stream.plan.test))
    assert equal(task.state_dict(), server)
    assert equal(loaded[0], loaded[4]) and not equal(loaded[0], loaded[1])
    assert "The module is the server's model" not in caplog.text
    assert len({tuple(correct[client]) for client in "0123"}) > 2


def test_client_model_unknown_client_raises(fit, make_stream, make_task):
    with raises(InvalidValueError, "client", value="0"):
        FederatedStrategy().client_state_dict("0")
    task = make_task()
    trainer = fit(task, make_stream(), reductions={"model.3.*": "local"})
    before = snapshot(task)
    with raises(InvalidValueError, "client", value="seven"):
        trainer.strategy.client_state_dict("seven")
    with raises(InvalidValueError, "client", value="seven"), client_model(trainer, "seven"):
        pass
    with client_model(trainer, "1"), raises(InvalidValueError, "client", value="2"):
        client_model(trainer, "2").__enter__()
    with pytest.raises(RuntimeError, match="enough"), client_model(trainer, "1"):
        assert not equal(task.state_dict(), before)
        raise RuntimeError("enough")
    assert equal(task.state_dict(), before)


@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
@pytest.mark.parametrize(("reduction", "down"), [("download_only", 4 * (35 + 24)), ("constant", 4 * 35)])
def test_parameters_that_are_not_uploaded_keep_the_server_value(
    fit, make_stream, make_task, reduction, down, max_vectorized_clients
):
    task, stream, records = make_task(), make_stream(), Records()
    start, server = copy.deepcopy(task), snapshot(task)
    fit(
        task,
        stream,
        [records],
        reductions={"model.3.*": reduction},
        max_vectorized_clients=max_vectorized_clients,
        seed=0,
    )
    for round_idx in range(2):  # Each client also trains the head, starting from the server's head.
        states = []
        for client in stream.plan.train[round_idx]:
            local = copy.deepcopy(start)
            local.load_state_dict(server)
            states.append(local_training(local, stream, client, round_idx, 1))
        total = sum(n for _, n in states)
        means = {name: sum(n * s[name].double() for s, n in states) / total for name in server}
        server |= {name: value.float() for name, value in means.items() if not name.startswith("model.3.")}
    assert close(task.state_dict(), server)
    assert torch.equal(task.model[3].weight, start.model[3].weight)
    for record in records.rounds:
        assert set(record.upload_bytes.values()) == {4 * 35} and set(record.download_bytes.values()) == {down}


@pytest.mark.parametrize("reduction", ["download_only", "constant"])
def test_non_finite_buffer_that_is_not_uploaded_is_allowed(fit, make_stream, make_task, reduction):
    task = make_task()
    task.register_buffer("unknown", torch.full((3,), float("nan")))
    trainer = fit(task, make_stream(), reductions={"unknown": reduction})
    assert not trainer.strategy.server.record.dropped and torch.isnan(task.unknown).all()


def test_non_finite_upload_is_dropped_logged_and_recorded(fit, make_stream, make_task, caplog):
    class Poison(Records):
        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            if trainer.strategy.current_client_round.client_id == "1":
                pl_module.model[1].weight.data[0, 0] = float("nan")

    task, stream, poison = make_task(), make_stream(), Poison()
    start = copy.deepcopy(task)
    fit(task, stream, [poison], max_vectorized_clients=1, seed=0)
    expected = fedavg(
        start, stream, 1, 2, choose=lambda round_idx: [c for c in stream.plan.train[round_idx] if c != "1"]
    )
    assert equal(task.state_dict(), expected)
    assert all(set(record.dropped) == {"1"} and "1" not in record.upload_bytes for record in poison.rounds)
    assert "non-finite: model.1.weight" in poison.rounds[0].dropped["1"]
    assert "dropped the upload of client 1" in caplog.text
    assert "Lower the learning rate, or a method's strength, or clip gradients" in caplog.text


class Overflowing(Method):
    """A method whose penalty overflows, but has a finite gradient."""

    def penalty(self, client, step):
        return (1e30 * next(iter(step.params.values())).detach().abs().sum() + 1e30).square()


@pytest.mark.parametrize("max_vectorized_clients", [1, 3])
def test_non_finite_loss_with_finite_upload_warns(fit, make_stream, make_task, caplog, max_vectorized_clients):
    task, records = make_task(), Records()
    fit(task, make_stream(), [Overflowing(clients=["1"]), records], max_vectorized_clients=max_vectorized_clients)
    assert all(record.diverged == ["1"] and not record.dropped for record in records.rounds)
    assert all(p.isfinite().all() for p in task.parameters())
    message = "Round 0: the loss of client 1 was non-finite, but its upload is finite. Lower the learning rate"
    assert message in caplog.text and "client 2 was non-finite" not in caplog.text


def test_non_finite_loss_in_plain_trainer_warns(make_task, samples, train, caplog):
    train(make_task(), [Overflowing()], samples())
    assert "Epoch 1: the loss with the methods' terms was non-finite. Lower the learning rate" in caplog.text


def test_non_finite_server_state_raises(fit, make_stream, make_task):
    class Diverging(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.data *= 1e30 / p.data.abs().clamp(min=1e-20)  # The next line exceeds single precision.
                p.data *= p.data

    with raises(InvalidValueError, "model.1.weight"):
        fit(make_task(), make_stream(), server_optimizer=Diverging)
    task = make_task()
    task.model[1].weight.data[0, 0] = float("nan")
    with raises(InvalidValueError, "model.1.weight"):
        fit(task, make_stream())


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"local_epochs": 0}, "local_epochs"),
        ({"max_vectorized_clients": 0}, "max_vectorized_clients"),
        ({"client_weights": "size"}, "client_weights"),
    ],
)
def test_strategy_invalid_arguments_raise(arguments, argument):
    with raises(InvalidValueError, argument):
        FederatedStrategy(**arguments)


def test_unknown_or_missing_clients_in_arguments_raise(fit, make_stream, make_task):
    with raises(UnknownNameError, "names"):
        fit(make_task(), make_stream(), [FedProx(clients=["seven"])])
    with raises(UnknownNameError, "names"):
        fit(make_task(), make_stream(), client_weights={"0": 1, "1": 1, "2": 1, "x": 1})
    with raises(InvalidValueError, "client_weights"):
        fit(make_task(), make_stream(), client_weights={"0": 1, "1": 1})


def test_data_loader_instead_of_stream_raises(make_task):
    data = torch.utils.data.TensorDataset(torch.zeros(8, 6), torch.zeros(8, dtype=torch.long))
    trainer = L.Trainer(strategy="federated", max_epochs=1, logger=False, enable_checkpointing=False)
    with raises(InvalidValueError, "datamodule"):
        trainer.fit(make_task(), torch.utils.data.DataLoader(data))


@pytest.mark.argument("strategy", 'Supported. `FederatedStrategy(...)` or "federated".')
def test_strategy_name_federated_creates_strategy():
    assert isinstance(L.Trainer(strategy="federated", logger=False, barebones=True).strategy, FederatedStrategy)


@pytest.mark.may("Extra state (`get_extra_state`)", "Not supported. Extra state cannot be averaged.")
def test_extra_state_raises(fit, make_stream, make_task):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

        def set_extra_state(self, state):
            pass

    with raises(InvalidValueError, "model._extra_state"):
        fit(make_task(model=Extra(6, 4)), make_stream())


def test_server_optimizer_does_not_change_frozen_parameters(fit, make_stream, make_task):
    task = make_task()
    task.model[1].weight.requires_grad_(False)
    before = task.model[1].weight.clone()
    fit(task, make_stream(), server_optimizer=lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.5))
    assert torch.equal(task.model[1].weight, before)


def test_client_numbers_equal_client_names(fit, make_stream, make_task):
    task, named = make_task(), make_task()
    fit(task, make_stream(), [FedProx(0.5, clients=[0])], client_weights={0: 1, 1: 2, 2: 3})
    fit(named, make_stream(), [FedProx(0.5, clients=["0"])], client_weights={"0": 1, "1": 2, "2": 3})
    assert equal(task.state_dict(), named.state_dict())


def test_stream_reserved_name_or_contradiction_raises(make_stream):
    with raises(InvalidValueError, "client"):
        make_stream(client_ids=np.array(["server", "b"])[np.arange(240) % 2]).setup("fit")
    with pytest.raises(InvalidValueError, check=lambda error: error.argument == "class_order"):
        make_stream(class_order=[0, 1, 2, 3], order_per_client=True)


@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
def test_batch_normalization_last_batch_of_one_sample_trains(
    fit, make_task, assert_same, max_vectorized_clients, running
):
    def stream(drop_last):
        x = torch.randn(45, 6, generator=torch.Generator().manual_seed(0))
        # With batches of 7, the last batch of client a has one sample, and the last batch of client b has two samples.
        owner = np.repeat(["a", "b"], [22, 23])
        return FederatedStream.from_arrays(
            x, torch.arange(45) % 4, owner, scenario=ClassIncremental(1), split=Split(test=0.0), seed=0, batch_size=7,
            drop_last=drop_last,
        )  # fmt: skip

    def task():
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(5, track_running_stats=running)
        return make_task(model=nn.Sequential(nn.Linear(6, 5), norm, nn.Linear(5, 4)))

    for drop_last in (False, True):
        trained, alone = task(), task()
        trainer = fit(trained, stream(drop_last), max_vectorized_clients=max_vectorized_clients, seed=0)
        fit(alone, stream(drop_last), max_vectorized_clients=1, seed=0)
        assert (trainer.strategy.num_vectorized_clients > 1) == (max_vectorized_clients == "auto")
        assert_same(trained, alone, 1e-6)
        assert not trainer.strategy.server.record.dropped


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("fails", [False, True])
def test_denormals_are_flushed_only_during_a_fit(fit, make_stream, make_task, fails, threads):
    within, usual = [], torch.get_num_threads()

    def vanish():
        return float(torch.tensor(torch.finfo(torch.float32).tiny) / 2) == 0

    class Notes(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            within.append(vanish())
            if fails:
                raise KeyError("enough")

    # The return value is true if the CPU supports this setting. PyTorch supports it on x86 and Arm.
    able = torch.set_flush_denormal(True)
    torch.set_num_threads(threads)
    try:
        for before in (able, False):
            torch.set_flush_denormal(before)
            with pytest.raises(KeyError) if fails else contextlib.nullcontext():
                fit(make_task(), make_stream(), [Notes()], max_epochs=1)
            assert vanish() == before
    finally:
        torch.set_num_threads(usual)
        torch.set_flush_denormal(False)
    assert within[0] == able and within[-1] == (able and threads == 1)
