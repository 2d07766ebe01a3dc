"""Tests of FedPer, LG-FedAvg and FedBN as `reductions` rules, compared with hand-written loops."""

import copy
import json
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_fcl.data.batching import BatchPlan, order_keys, plan_batches

# Rules from the table of methods in docs/migration.md, and the entries that each rule keeps client-local.
LINES = {
    "FedPer": ({"model.head.*": "local"}, ["model.head.weight", "model.head.bias"]),
    "LG-FedAvg": ({"model.body.*": "local"}, ["model.body.weight", "model.body.bias"]),
    "FedBN": (
        {"model.norm*": "local"},
        [f"model.norm1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")],
    ),
}


def network():
    torch.manual_seed(0)
    layers = {"body": nn.Linear(6, 5), "norm1": nn.BatchNorm1d(5), "activation": nn.Tanh(), "head": nn.Linear(5, 4)}
    return nn.Sequential(OrderedDict(layers))


def by_hand(task, stream, own):
    """Train FedAvg with client-local entries by hand. Return the server's state and the clients' local entries."""
    server, kept = copy.deepcopy(task.state_dict()), {}
    for round_idx, current in enumerate(stream.plan.train):
        sums, total = {}, 0
        for client, rows in current.items():
            model, (x, y) = copy.deepcopy(task).train(), stream.get_samples(rows)
            model.load_state_dict({**server, **kept.get(client, {})})
            optimizer, batching = model.configure_optimizers(), BatchPlan(8, True, drop_last=True)
            for indices in plan_batches(len(y), 1, batching, order_keys(0, [client], round_idx)):
                optimizer.zero_grad()
                cross_entropy(model(x[indices]), y[indices]).backward()
                optimizer.step()
            kept[client] = {name: model.state_dict()[name].clone() for name in own}
            total += len(y)
            for name, value in model.state_dict().items():
                sums[name] = sums.get(name, 0) + len(y) * value
        shared = {name: value for name, value in sums.items() if name not in own}
        means = {name: value / total for name, value in shared.items()}
        server.update({n: mean if server[n].is_floating_point() else mean.round().long() for n, mean in means.items()})
    return server, kept


@pytest.mark.parametrize("method", LINES)
def test_reductions_rule_equals_method_by_hand(fit, make_stream, make_task, method):
    rules, own = LINES[method]
    table = (Path(__file__).parents[2] / "docs" / "migration.md").read_text(encoding="utf-8")
    assert f"| {method}: `reductions={json.dumps(rules)}` |" in table
    task, stream = make_task(model=network()), make_stream(rounds_per_experience=2, drop_last=True)
    stream.setup("fit")
    server, kept = by_hand(task, stream, own)
    trainer = fit(task, stream, reductions=rules, seed=0)
    torch.testing.assert_close(dict(task.state_dict()), dict(server), rtol=0, atol=1e-5)
    for client, expected in kept.items():
        mine = trainer.strategy.server.client_store[client]["model"]
        assert sorted(mine) == sorted(own)
        torch.testing.assert_close(dict(mine), expected, rtol=0, atol=1e-5)
