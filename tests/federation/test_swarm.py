"""Tests of swarms: the master of each round, and the weights of nodes that miss a synchronization."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from raising import raises
from torch import nn

from lightning_fcl import Classifier, FederatedStrategy, FederatedStream
from lightning_fcl.callbacks import ContinualMetrics, FedProx, Replay
from lightning_fcl.data.batching import BatchPlan, order_keys, plan_batches
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidValueError, UnknownNameError
from lightning_fcl.federation.swarm import Swarm


def snapshot(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def same(left, right, tolerance=0.0):
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


def local_training(task, state, stream, client, round_idx, seed=0):
    """Train a client by hand. Return the trained state and the client's number of samples."""
    local = copy.deepcopy(task)
    local.load_state_dict(state)
    x, y = stream.get_samples(stream.plan.train[round_idx][client])
    optimizer = local.configure_optimizers()
    for indices in plan_batches(
        len(y), 1, BatchPlan(stream.batch_size, stream.shuffle), order_keys(seed, [client], round_idx)
    ):
        optimizer.zero_grad()
        nn.functional.cross_entropy(local.model(x[indices]), y[indices]).backward()
        optimizer.step()
    return snapshot(local), len(y)


def by_hand(task, stream, missing, leaves=()):
    """Train a swarm by hand and return the state after each round.

    ``missing`` maps a client to the rounds whose synchronization the client misses. ``leaves`` maps a client to the
    first round without the client.
    """
    server, own, states = snapshot(task), {}, []
    for round_idx, current in enumerate(stream.plan.train):
        uploads = []
        for client in current:
            if round_idx >= dict(leaves).get(client, round_idx + 1):
                continue
            state, n = local_training(task, own.pop(client, server), stream, client, round_idx)
            if round_idx in missing.get(client, ()):
                own[client] = state
            else:
                uploads.append((n, state))
        if uploads:
            total = sum(n for n, _ in uploads)
            server = {
                name: (sum(n * state[name].double() for n, state in uploads) / total).to(value.dtype)
                for name, value in server.items()
            }
        states.append(server)
    return states


class States(Callback):
    """Records the server's state after each round."""

    def __init__(self):
        self.after = []

    def on_round_end(self, trainer, pl_module):
        self.after.append(snapshot(pl_module))


STREAM = {"partition": "dirichlet", "rounds_per_experience": 3, "num_clients": 4}


@pytest.mark.seconds
@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
@pytest.mark.parametrize(
    "missing",
    [{"1": [1]}, {"0": [0, 1], "3": [1, 4]}, {"2": [5]}, {client: [2] for client in "0123"}, {}],
)
def test_swarm_nodes_that_miss_sync_continue_from_own_weights(
    fit, make_stream, make_task, max_vectorized_clients, missing
):
    stream, task, states = make_stream(**STREAM), make_task(), States()
    expected = by_hand(copy.deepcopy(task), (stream.setup("fit"), stream)[1], missing)
    fit(
        task,
        stream,
        [states],
        swarm=Swarm(missed_rounds=missing),
        max_vectorized_clients=max_vectorized_clients,
        client_store="disk",
        seed=0,
    )
    for ours, theirs in zip(states.after, expected, strict=True):
        same(ours, theirs, 0.0 if max_vectorized_clients == 1 else 1e-5)
    if missing:
        plain = by_hand(make_task(), stream, {})[-1]
        assert any(not torch.equal(value, plain[name]) for name, value in expected[-1].items())


@pytest.mark.seconds
def test_swarm_records_master_uploads_and_downloads(fit, make_stream, make_task):
    stream, task, metrics = make_stream(**STREAM), make_task(), ContinualMetrics()
    swarm = Swarm(missed_rounds={"0": [1], "2": [2, 3], "1": [5]})
    fit(task, stream, [metrics], swarm=swarm, seed=0)
    size = sum(value.nbytes for value in task.state_dict().values())
    everybody = {"0", "1", "2", "3"}
    # A client that misses a synchronization uploads nothing, and downloads nothing in the next round. The master
    # transmits no bytes.
    expected = [
        ("0", everybody, everybody),
        ("1", everybody - {"0"}, everybody),
        ("0", everybody - {"2"}, everybody - {"0"}),
        ("0", everybody - {"2"}, everybody - {"2"}),
        ("0", everybody, everybody - {"2"}),
        ("0", everybody - {"1"}, everybody),
    ]
    for entry, (master, up, down) in zip(metrics.record["rounds"], expected, strict=True):
        assert entry["master"] == master
        assert set(entry["missed_sync"]) == everybody - up
        assert entry["upload_bytes"] == {c: 0 if c == master else size for c in up}
        assert {c: n for c, n in entry["download_bytes"].items() if n} == {c: size for c in down if c != master}


def test_swarm_all_nodes_miss_sync_keeps_server_state(fit, make_stream, make_task, caplog):
    stream, task, states, metrics = make_stream(**STREAM), make_task(), States(), ContinualMetrics()
    everybody = {client: [0, 1] for client in "0123"}
    start = snapshot(task)
    fit(
        task,
        stream,
        [states, metrics],
        swarm=Swarm(missed_rounds=everybody),
        max_vectorized_clients=1,
        seed=0,
        max_epochs=3,
    )
    same(states.after[0], start)
    # In the third round, each client uploads its state after three rounds of local training.
    same(states.after, by_hand(make_task(), stream, everybody)[:3])
    assert [entry["master"] for entry in metrics.record["rounds"]] == [None, None, "0"]
    assert [entry["upload_bytes"] for entry in metrics.record["rounds"][:2]] == [{}, {}]
    assert "the server state did not change" in caplog.text


@pytest.mark.seconds
@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
def test_swarm_without_missed_sync_equals_federation(fit, make_stream, make_task, max_vectorized_clients):
    results = []
    for swarm in (None, Swarm()):
        task, metrics = make_task(), ContinualMetrics()
        methods = [Replay(9, "class-balanced", "round"), FedProx(0.1), metrics]
        options = {"swarm": swarm, "max_vectorized_clients": max_vectorized_clients, "seed": 3, "participation": 0.7}
        fit(task, make_stream(**STREAM), methods, reductions={"model.3.bias": "local"}, **options)
        results.append((snapshot(task), metrics.record["rounds"]))
    same(results[0][0], results[1][0])
    for plain, swarm in zip(results[0][1], results[1][1], strict=True):
        assert plain["correct"] == swarm["correct"]
        assert plain["master"] is None and plain["missed_sync"] == swarm["missed_sync"] == []
        first = min(plain["upload_bytes"])
        assert swarm["master"] == first
        for way in ("upload_bytes", "download_bytes"):
            assert swarm[way] == {**plain[way], first: 0} and plain[way][first] > 0


def test_swarm_master_leaves_and_next_node_becomes_master(fit, make_stream, make_task, caplog):
    owner = np.array(["node1", "node2", "node3"])[np.arange(240) // 4 % 3]
    task, metrics, states = make_task(), ContinualMetrics(), States()
    stream = make_stream(owner, rounds_per_experience=2)
    fit(task, stream, [metrics, states], swarm=Swarm(leaves_at={"node1": 2}), max_vectorized_clients=1, seed=0)
    assert [entry["master"] for entry in metrics.record["rounds"]] == ["node1", "node1", "node2", "node2"]
    assert [set(entry["download_bytes"]) for entry in metrics.record["rounds"]][2:] == [{"node2", "node3"}] * 2
    assert [entry["missed_sync"] for entry in metrics.record["rounds"]] == [[]] * 4
    warnings = [r.message for r in caplog.records if "master" in r.message]
    assert warnings == ["The swarm's master node1 uploaded nothing in this round. The new master is node2."]
    same(states.after, by_hand(make_task(), stream, {}, leaves={"node1": 2}))


def test_misses_sync_depends_only_on_node_round_and_seed(fit, make_stream, make_task):
    swarm = Swarm(missed_sync_prob=0.3)
    misses = [[swarm.misses_sync(node, round_idx, seed=0) for round_idx in range(500)] for node in "ab"]
    assert misses == [[Swarm(0.3).misses_sync(node, round_idx, seed=0) for round_idx in range(500)] for node in "ab"]
    assert misses[0] != misses[1] != [swarm.misses_sync("b", round_idx, seed=1) for round_idx in range(500)]
    assert all(0.24 < np.mean(row) < 0.36 for row in misses)
    assert not any(Swarm().misses_sync("a", round_idx, seed=0) for round_idx in range(100))
    metrics, stream = ContinualMetrics(), make_stream(**STREAM)
    fit(make_task(), stream, [metrics], swarm=swarm, seed=5)
    missed = [[c for c in stream.plan.clients if swarm.misses_sync(c, round_idx, 5)] for round_idx in range(6)]
    assert [sorted(entry["missed_sync"]) for entry in metrics.record["rounds"]] == missed
    assert any(missed) and not all(missed)


@pytest.mark.seconds
@pytest.mark.parametrize(("store", "max_vectorized_clients"), [("memory", 1), ("disk", "auto")])
def test_swarm_resumed_equals_uninterrupted_fit(fit, make_stream, make_task, tmp_path, store, max_vectorized_clients):
    options = {
        "swarm": Swarm(missed_sync_prob=0.4, missed_rounds={"1": [2, 3]}, leaves_at={"3": 5}),
        "client_store": store,
        "seed": 2,
        "max_vectorized_clients": max_vectorized_clients, "reductions": {"model.3.bias": "local"},
    }  # fmt: skip

    def callbacks():
        return [Replay(9, "class-balanced", "round"), FedProx(0.1), ContinualMetrics()]

    def rounds(metrics):
        return [{k: v for k, v in entry.items() if not k.endswith("seconds")} for entry in metrics.record["rounds"]]

    task, whole = make_task(), callbacks()
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    fit(task, make_stream(**STREAM), [*whole, saver], trainer_args={"enable_checkpointing": True}, **options)
    assert any(entry["missed_sync"] for entry in whole[2].record["rounds"])
    for epoch in range(5):
        again, parts = make_task(seed=9), callbacks()
        fit(again, make_stream(**STREAM), parts, ckpt_path=tmp_path / f"epoch={epoch}.ckpt", **options)
        same(snapshot(again), snapshot(task))
        assert rounds(parts[2]) == rounds(whole[2])
    with raises(InvalidValueError, "swarm", code="other-recipe"):
        fit(make_task(), make_stream(**STREAM), callbacks(), ckpt_path=tmp_path / "epoch=0.ckpt",
            **{**options, "swarm": Swarm(missed_sync_prob=0.3)})  # fmt: skip


def test_swarm_node_that_diverges_restarts_from_server_weights(fit, make_stream, make_task):
    """The node's late upload is dropped. In the next round, the node starts from the server's weights."""
    stream = make_stream(rounds_per_experience=3)
    stream.setup("fit")
    poisoned, poison = stream.plan.train[0]["1"], ContinualMetrics()
    first, *later = stream.plan.train
    rounds = first, *({**samples, "1": poisoned[:-1]} for samples in later)
    stream.plan = replace(stream.plan, train=rounds)
    # The sample with NaN is part of the first round only.
    stream.samples.x[torch.from_numpy(poisoned[-1:])] = float("nan")
    task = make_task()
    fit(task, stream, [poison], swarm=Swarm(missed_rounds={"1": [0]}), seed=0, max_vectorized_clients=1, max_epochs=3)
    rounds = poison.record["rounds"]
    assert [set(entry["dropped"]) for entry in rounds] == [set(), {"1"}, set()]
    assert [("1" in entry["download_bytes"], "1" in entry["upload_bytes"]) for entry in rounds] == [
        (True, False), (False, False), (True, True),
    ]  # fmt: skip
    assert all(value.isfinite().all() for value in task.state_dict().values())


def test_swarm_after_last_node_left_raises(fit, make_stream, make_task):
    with raises(InvalidValueError, "max_epochs"):
        fit(make_task(), make_stream(), swarm=Swarm(leaves_at={"0": 1, "1": 0, "2": 1}))


def test_swarm_unknown_node_raises(fit, make_stream, make_task):
    for swarm in (Swarm(missed_rounds={"1": [0], "nine": [1]}), Swarm(leaves_at={"nine": 1})):
        with raises(UnknownNameError, "names"):
            fit(make_task(), make_stream(), swarm=swarm)


@pytest.mark.parametrize(("argument", "rounds"), [("missed_rounds", [0, 2]), ("leaves_at", 2)])
def test_swarm_round_beyond_stream_raises(fit, make_stream, make_task, argument, rounds):
    with raises(InvalidValueError, argument, value=2):
        fit(make_task(), make_stream(), swarm=Swarm(**{argument: {"1": rounds}}))


@pytest.mark.parametrize("options", [{"missed_sync_prob": 0.1}, {"missed_rounds": {"1": [0]}}])
def test_swarm_reservoir_with_missed_sync_raises(fit, make_series_stream, make_reservoir_task, options):
    with raises(InvalidValueError, "swarm"):
        fit(make_reservoir_task(), make_series_stream(), swarm=Swarm(**options))
    task, plain = make_reservoir_task(), make_reservoir_task()
    fit(task, make_series_stream(increments=2), swarm=Swarm(leaves_at={"2": 1}))
    stream = make_series_stream(increments=2)
    stream.plan.train[1].pop("2")
    fit(plain, stream)
    same(snapshot(task), snapshot(plain))


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"missed_sync_prob": 1.0}, "missed_sync_prob"),
        ({"missed_sync_prob": -0.1}, "missed_sync_prob"),
        ({"missed_rounds": {"a": [0, -1]}}, "missed_rounds"),
        ({"leaves_at": {"a": -2}}, "leaves_at"),
    ],
)
def test_swarm_invalid_arguments_raise(arguments, argument):
    with raises(InvalidValueError, argument):
        Swarm(**arguments)


def test_swarm_accepts_integers_as_node_names(fit, make_task):
    x = np.random.default_rng(0).normal(size=(48, 6)).astype(np.float32)
    stream = FederatedStream.from_arrays(
        x, np.arange(48) % 4, scenario=ClassIncremental(2), split=Split(test=0.25), client_ids=np.arange(48) // 16
    )
    metrics = ContinualMetrics()
    fit(
        make_task(),
        stream,
        [metrics],
        strategy=FederatedStrategy(swarm=Swarm(missed_rounds={1: [0]}, leaves_at={2: 1})),
    )
    assert [entry["missed_sync"] for entry in metrics.record["rounds"]] == [["1"], []]
    assert set(metrics.record["rounds"][1]["upload_bytes"]) == {"0", "1"}


def test_swarm_missed_sync_keeps_buffers_of_node(fit, make_stream):
    """A node that misses a synchronization continues with the node's own running statistics of batch normalization."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))
    task = Classifier(model, 4, lambda params: torch.optim.SGD(params, lr=0.1))
    start, stream = copy.deepcopy(task), make_stream(batch_size=64)
    stream.setup("fit")
    fit(task, stream, swarm=Swarm(missed_rounds={"1": [0]}), seed=0, max_vectorized_clients=1)
    same(snapshot(task), by_hand(start, stream, {"1": [0]})[-1])
    plain = by_hand(start, stream, {})[-1]
    assert not torch.equal(task.model[1].running_mean, plain["model.1.running_mean"])
