"""Tests of FedDyn: equality with the paper's algorithm, and convergence to the minimum of the mean loss."""

import copy

import pytest
import torch
import torch.nn.functional as F
from raising import raises

from lightning_fcl.callbacks import CCVR, FOT, ContinualMetrics, Fed3R, FedDyn, FedNova, RegMean
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.client_speeds import ClientSpeeds
from lightning_fcl.federation.fedbuff import FedBuff
from lightning_fcl.federation.swarm import Swarm

from .quadratics import clients, minimum, quadratic, value

UNIFORM = {"client_weights": "uniform", "seed": 0}


def by_hand(task, stream, drawn, alpha):
    """Run Algorithm 1 of the paper. Each experience resets g of each client and h of the server."""
    names, everyone = [name for name, _ in task.named_parameters()], stream.plan.clients
    experiences = stream.plan.experiences[everyone[0]]
    for round_idx in range(stream.plan.num_rounds):
        if round_idx == 0 or experiences[round_idx] != experiences[round_idx - 1]:
            h, g = dict.fromkeys(names, 0.0), {client: dict.fromkeys(names, 0.0) for client in everyone}
        start = {name: p.detach().clone() for name, p in task.named_parameters()}
        ended = []
        for client in drawn(round_idx):
            x, y = stream.get_samples(stream.plan.train[round_idx][client])
            model = copy.deepcopy(task)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for rows in [*torch.arange(len(y)).split(8)] * 2:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x[rows]), y[rows])
                for n, p in model.named_parameters():
                    loss = loss - (g[client][n] * p).sum() + alpha / 2 * (p - start[n]).square().sum()
                loss.backward()
                optimizer.step()
            end = {name: p.detach() for name, p in model.named_parameters()}
            g[client] = {n: g[client][n] - alpha * (end[n] - start[n]) for n in names}
            ended.append(end)
        h = {n: h[n] - alpha / len(everyone) * sum(end[n] - start[n] for end in ended) for n in names}
        task.load_state_dict({n: sum(end[n] for end in ended) / len(ended) - h[n] / alpha for n in names})


@pytest.mark.parametrize(("participation", "size"), [(1.0, 1), (1.0, 3), (2, 1)])
def test_feddyn_equals_hand_written_algorithm(fit, make_stream, make_task, assert_same, participation, size):
    task, stream = make_task(), make_stream(rounds_per_experience=2, shuffle=False)
    hand = copy.deepcopy(task)
    options = {"participation": participation, "max_vectorized_clients": size, "local_epochs": 2, **UNIFORM}
    trainer = fit(task, stream, [FedDyn(0.2)], **options)
    by_hand(
        hand,
        stream,
        lambda round_idx: trainer.strategy.federation.participation.expected_clients(stream.plan, round_idx),
        0.2,
    )
    assert_same(task, hand, 1e-5)


@pytest.mark.seconds
@pytest.mark.parametrize(("participation", "rounds"), [(1.0, 20), (2, 50)])
def test_feddyn_fixed_point_is_minimum_unlike_fedavg(fit, participation, rounds):
    ends = []
    for methods in ([FedDyn(1.0)], []):
        task = quadratic(lr=0.3)
        fit(task, clients(rounds), methods, local_epochs=8, participation=participation, **UNIFORM)
        ends.append(value(task))
    assert ends[0] == pytest.approx(minimum(), abs=2e-3)
    assert abs(ends[1] - minimum()) > 0.2


def test_feddyn_transmits_as_fedavg_and_skips_local_parameters(fit, make_stream, make_task):
    records = []
    for methods in ([FedDyn(0.1)], []):
        metrics = ContinualMetrics()
        options = {"reductions": {"model.3.*": "local"}, **UNIFORM}
        trainer = fit(make_task(), make_stream(), [*methods, metrics], **options)
        records.append([(entry["upload_bytes"], entry["download_bytes"]) for entry in metrics.record["rounds"]])
        if methods:
            kept = {"way.model.1.weight", "way.model.1.bias", "experience"}
            assert trainer.strategy.server.client_store["0"]["FedDyn"].keys() == kept
    assert records[0] == records[1]


def test_feddyn_with_incompatible_settings_raises(fit, make_stream, make_task):
    for options, argument in (
        ({}, "client_weights"),
        ({**UNIFORM, "server_optimizer": lambda params: torch.optim.SGD(params, lr=1.0)}, "FedDyn"),
        ({**UNIFORM, "swarm": Swarm(missed_rounds={"1": [0]})}, "FedDyn"),
        ({**UNIFORM, "synchronization": FedBuff(ClientSpeeds(0.01), 2)}, "FedDyn"),
    ):
        with raises(InvalidValueError, argument):
            fit(make_task(), make_stream(), [FedDyn()], **options)
    for other in (FedNova(), FOT(), RegMean()):
        with raises(InvalidValueError, type(other).__name__, value="`FedDyn` earlier in the callbacks"):
            fit(make_task(), make_stream(), [FedDyn(), other], **UNIFORM)
    for head in (CCVR(), Fed3R()):
        with raises(InvalidValueError, "FedDyn"):
            fit(make_task(), make_stream(), [head, FedDyn()], **UNIFORM)
    with raises(InvalidValueError, "FedDyn"):
        fit(make_task(), make_stream(), [FedDyn(clients=["1"])], **UNIFORM)
