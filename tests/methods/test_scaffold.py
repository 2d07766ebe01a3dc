"""Tests of SCAFFOLD: control variates and the server's model, compared with the paper's formulas."""

import copy
import itertools

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from raising import raises

from lightning_fcl.callbacks import SCAFFOLD, ContinualMetrics
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.swarm import Swarm
from lightning_fcl.methods.context import strip_prefix
from lightning_fcl.methods.drift_correction import initial_velocity_weight, local_gradient_weight

from .quadratics import clients, minimum, quadratic, slope, slope_clients, value

UNIFORM = {"client_weights": "uniform", "seed": 0}
ROUNDS = {"num_experiences": 1, "rounds_per_experience": 3, "shuffle": False}


class Variates(Callback):
    """Records after each round: the control variates of the server and all clients, and the participating clients."""

    def __init__(self):
        self.rounds = []

    def on_round_end(self, trainer, module):
        server = trainer.strategy.server
        own = {
            client: dict(server.client_store[client].get("SCAFFOLD", {})) for client in trainer.datamodule.plan.clients
        }
        self.rounds.append((dict(server.get_section("SCAFFOLD")), own, {*server.record.accepted}))


def by_hand(task, stream, drawn, every=1, momentum=0.0):
    """Train in a loop by Algorithm 1 (option II) of the SCAFFOLD paper. The variates are reset every three rounds.

    Return the variates of the server, and a dict of the variates of each client.
    """
    names = [name for name, _ in task.named_parameters()]
    everyone = stream.plan.clients
    for round_idx in range(stream.plan.num_rounds):
        if round_idx % 3 == 0:
            c, own = dict.fromkeys(names, 0.0), {client: dict.fromkeys(names, 0.0) for client in everyone}
        start = {name: p.detach().clone() for name, p in task.named_parameters()}
        ended, change = [], dict.fromkeys(names, 0.0)
        for client in drawn(round_idx):
            x, y = stream.get_samples(stream.plan.train[round_idx][client])
            model = copy.deepcopy(task)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
            batches = [rows for _ in range(2) for rows in torch.arange(len(y)).split(8)]
            groups = [batches[i : i + every] for i in range(0, len(batches), every)]
            for group in groups:
                optimizer.zero_grad()
                for rows in group:
                    (torch.nn.functional.cross_entropy(model(x[rows]), y[rows]) / every).backward()
                for name, p in model.named_parameters():
                    p.grad += (c[name] - own[client][name]) * len(group) / every
                optimizer.step()
            end = {name: p.detach() for name, p in model.named_parameters()}
            weight = sum((1 - momentum**k) / (1 - momentum) for k in range(1, len(groups) + 1))
            for n in names:
                new = own[client][n] - c[n] + (start[n] - end[n]) / (weight * 0.1)
                change[n] = change[n] + (new - own[client][n]) / len(everyone)
                own[client][n] = new
            ended.append(end)
        c = {n: c[n] + change[n] for n in names}
        task.load_state_dict({n: sum(each[n] for each in ended) / len(ended) for n in names})
    return c, own


@pytest.mark.parametrize(
    ("participation", "size", "momentum", "every"),
    [(1.0, 1, 0.0, 1), (1.0, 3, 0.0, 1), (2, 1, 0.0, 1), (2, 2, 0.6, 1), (1.0, 1, 0.0, 2)],
)
def test_scaffold_equals_algorithm_of_paper(
    fit, make_stream, make_task, assert_same, participation, size, momentum, every
):
    task = make_task(lambda params: torch.optim.SGD(params, lr=0.1, momentum=momentum))
    hand, stream = copy.deepcopy(task), make_stream(partition="dirichlet", num_clients=3, **ROUNDS)
    options = {"participation": participation, "max_vectorized_clients": size, "local_epochs": 2, **UNIFORM}
    trainer = fit(task, stream, [SCAFFOLD()], trainer_args={"accumulate_grad_batches": every}, **options)
    plan, who = stream.plan, trainer.strategy.federation.participation
    c, own = by_hand(hand, stream, lambda round_idx: who.expected_clients(plan, round_idx), every, momentum)
    assert_same(task, hand, 1e-5)
    kept, store = trainer.strategy.server.get_section("SCAFFOLD"), trainer.strategy.server.client_store
    for name, expected in c.items():
        torch.testing.assert_close(kept[f"c.{name}"], expected, rtol=0, atol=1e-4)
        for client in plan.clients:
            mine = store[client].get("SCAFFOLD", {}).get(f"c.{name}", torch.zeros(()))
            torch.testing.assert_close(mine.expand_as(expected), own[client][name] + 0 * expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", [1, 3])
def test_scaffold_resets_variates_in_each_experience(fit, make_stream, make_task, assert_same, size):
    task, stream = make_task(), make_stream(partition="dirichlet", num_clients=6, **{**ROUNDS, "num_experiences": 4})
    hand = copy.deepcopy(task)
    trainer = fit(task, stream, [SCAFFOLD()], max_vectorized_clients=size, local_epochs=2, **UNIFORM)
    trained = [[client for client, rows in each.items() if len(rows)] for each in stream.plan.train]
    # In at least one round, a client has no samples.
    assert len({*itertools.chain(*trained)}) > min(map(len, trained))
    by_hand(hand, stream, lambda round_idx: trained[round_idx])
    assert_same(task, hand, 1e-5)
    variates = strip_prefix(trainer.strategy.server.get_section("SCAFFOLD"), "c")
    assert max(float(c.norm()) for c in variates.values()) > 1e-3


@pytest.mark.parametrize("options", [{"participation": 2}, {"swarm": Swarm(missed_rounds={"1": [0, 2]})}])
def test_scaffold_server_variate_is_mean_of_client_variates(fit, make_stream, make_task, options):
    watch = Variates()
    fit(make_task(), make_stream(num_clients=4, **ROUNDS), [SCAFFOLD(), watch], **options, **UNIFORM)
    before = {client: {} for client in "0123"}
    for kept, own, trained in watch.rounds:
        for client in {*"0123"} - trained:
            assert all(torch.equal(value, before[client].get(n, value * 0)) for n, value in own[client].items())
        for name in kept.keys() - {"clients"}:
            rows = [each.get(name, torch.zeros_like(kept[name])) for each in own.values()]
            torch.testing.assert_close(torch.stack(rows).mean(dim=0), kept[name], rtol=0, atol=1e-5)
        before = own
    assert (
        any(len(trained) < 4 for *_, trained in watch.rounds)
        and max(float(value.abs().max()) for value in kept.values()) > 1e-3
    )


def test_scaffold_heterogeneous_quadratics_reaches_minimum(fit):
    ends = []
    for methods in ([SCAFFOLD()], []):
        task = quadratic()
        fit(task, clients(rounds=60), methods, local_epochs=5, **UNIFORM)
        ends.append(value(task))
    assert ends[0] == pytest.approx(minimum(), abs=1e-3) and abs(ends[1] - minimum()) > 0.1


@pytest.mark.parametrize("options", [{}, {"momentum": 0.7}, {"momentum": 0.9, "nesterov": True}])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("more", [{}, {"participation": 2}, {"swarm": Swarm(missed_rounds={"1": [1, 3]})}])
def test_scaffold_linear_losses_client_variates_equal_gradients(fit, options, keeps, more):
    """The gradient of the loss <g_k, w> is g_k everywhere, so c_k is g_k after each upload, and c is their mean."""
    gradients, watch = np.random.default_rng(0).integers(-9, 10, (3, 3)) / 8, Variates()
    stream = slope_clients(gradients, (4, 8, 20), rounds=6)
    fit(slope(**options), stream, [SCAFFOLD(), watch], keep_optimizer_state=keeps, **UNIFORM, **more,
        trainer_args={"precision": "64-true"})  # fmt: skip
    uploaded = set()
    for kept, own, accepted in watch.rounds:
        uploaded |= accepted
        for client in uploaded:
            expected = torch.from_numpy(gradients[[int(client)]])
            torch.testing.assert_close(own[client]["c.model.weight"], expected, rtol=0, atol=1e-12)
        expected_mean = torch.from_numpy(gradients[sorted(map(int, uploaded))].sum(axis=0, keepdims=True) / 3)
        torch.testing.assert_close(kept["c.model.weight"], expected_mean, rtol=0, atol=1e-12)
    assert len(uploaded) == 3


@pytest.mark.seconds
def test_scaffold_with_kept_momentum_resumed_fit_equals_uninterrupted_fit(assert_resumes, make_task):
    def momentum(seed=0):
        return make_task(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))

    assert_resumes(momentum, SCAFFOLD, keep_optimizer_state=True, client_weights="uniform")


def test_scaffold_local_parameters_have_no_variates(fit, make_stream, make_task):
    stream, bytes_of = {**ROUNDS, "num_clients": 3}, []
    for methods in ([SCAFFOLD()], []):
        metrics = ContinualMetrics()
        trainer = fit(make_task(), make_stream(**stream), [*methods, metrics], reductions={"model.3.*": "local"},
                      **UNIFORM)  # fmt: skip
        bytes_of.append(metrics.record["rounds"][-1])
        if methods:
            assert trainer.strategy.server.get_section("SCAFFOLD").keys() == {
                "clients",
                "c.model.1.weight",
                "c.model.1.bias",
            }
    for client in "012":
        assert bytes_of[0]["upload_bytes"][client] == 2 * bytes_of[1]["upload_bytes"][client]
        assert bytes_of[0]["download_bytes"][client] == 2 * bytes_of[1]["download_bytes"][client] + 4


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"momentum": 0.7, "nesterov": True}, {}])
def test_initial_velocity_weight_equals_distance_of_sgd(options):
    p = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([p], lr=1.0, **options)
    optimizer.state[p]["momentum_buffer"] = -torch.ones(1)
    for _ in range(5):
        p.grad = torch.zeros(1)
        optimizer.step()
    assert initial_velocity_weight(optimizer.param_groups[0], 5) == pytest.approx(float(p), rel=1e-6)


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"momentum": 0.7, "nesterov": True}, {}])
def test_local_gradient_weight_equals_distance_of_sgd(options):
    p = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([p], lr=1.0, **options)
    for _ in range(5):
        p.grad = -torch.ones(1)
        optimizer.step()
    assert local_gradient_weight(optimizer.param_groups[0], 5) == pytest.approx(float(p), rel=1e-6)


def split(params):
    first, *others = params
    return torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": others, "lr": 0.2}])


def scheduled(task):
    def configure_optimizers():
        optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
        schedule = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    task.configure_optimizers = configure_optimizers
    return task


def test_scaffold_unsupported_settings_raise(fit, make_stream, make_task):
    with raises(InvalidValueError, "client_weights", value="samples"):
        fit(make_task(), make_stream(), [SCAFFOLD()])
    fit(make_task(), make_stream(num_clients=1), [SCAFFOLD()], max_epochs=1)
    adam, damped = torch.optim.Adam, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.1)
    for task in (
        make_task(lambda params: adam(params)),
        make_task(damped),
        make_task(split),
        scheduled(make_task()),
    ):
        with raises(InvalidValueError, "optimizer"):
            fit(task, make_stream(), [SCAFFOLD()], **UNIFORM)
    text = r"but got SGD with lr=\[0.1\], momentum=\[0.9\], nesterov=\[False\], dampening=\[0.1\] \(one value per"
    with pytest.raises(InvalidValueError, match=text):
        fit(make_task(damped), make_stream(), [SCAFFOLD()], **UNIFORM)
