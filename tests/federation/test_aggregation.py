"""Reductions against independent NumPy, and server optimisers against their papers' formulas."""

import copy
import itertools
import re

import numpy as np
import pytest
import torch
from torch import nn

from lightning_fcl.federation.aggregation import (
    Aggregator,
    ServerOptimizer,
    declare,
    krum,
    median,
    neutral,
    travels_down,
    travels_up,
    trimmed_mean,
    wire_bytes,
)

REDUCTIONS = ("mean", "sparse_mean", "sum", "cat", "none", "download", "fixed", "median", "trimmed_mean", "krum")


def random_uploads(clients, shape=(3, 4), seed=0):
    return list(torch.randn(clients, *shape, generator=torch.Generator().manual_seed(seed)))


def aggregate(reduction, uploads, weights=None, server=None, **kwargs):
    """The new value of the only entry of a state."""
    aggregator = Aggregator({"w": reduction}, **kwargs)
    for upload, weight in zip(uploads, weights or [1.0] * len(uploads), strict=True):
        aggregator.add({"w": upload}, weight)
    return aggregator.result({"w": torch.zeros_like(uploads[0]) if server is None else server})["w"]


def test_mean_is_numpys_weighted_average():
    uploads, weights = random_uploads(7), [1.0, 2.5, 300.0, 0.1, 7.0, 11.0, 0.003]
    expected = np.average(np.stack([u.double().numpy() for u in uploads]), axis=0, weights=weights)
    result = aggregate("mean", uploads, weights)
    assert result.dtype == torch.float32
    np.testing.assert_array_equal(result.numpy(), expected.astype(np.float32))


@pytest.mark.parametrize("weights", [[1, 1, 1], [0.1, 0.2, 0.7], [1 / 3, 1e-7, 12345.678], [7, 0.3, 1e6]])
def test_identical_uploads_come_back_to_the_bit(weights):
    upload = torch.randn(1000) * torch.logspace(-20, 20, 1000)
    assert torch.equal(aggregate("mean", [upload] * 3, weights), upload)


def test_mean_of_half_precision_is_computed_in_double():
    uploads = [torch.tensor([v], dtype=torch.bfloat16) for v in (256.0, 1.0, 1.0, 1.0, 1.0)]
    result = aggregate("mean", uploads)
    assert result.dtype == torch.bfloat16 and result.item() == 52.0


def test_sum_adds_the_pooled_uploads_to_the_servers_value():
    x, server = torch.randn(60, 5, dtype=torch.float64), torch.eye(5, dtype=torch.float64)
    uploads = [part.T @ part for part in x.split([10, 20, 30])]
    result = aggregate("sum", uploads, weights=[1.0, 50.0, 0.1], server=server)
    torch.testing.assert_close(result, server + x.T @ x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(aggregate("sum", uploads, server=result), server + 2 * x.T @ x, rtol=1e-12, atol=1e-12)


def test_cat_appends_in_the_order_of_uploads():
    uploads = [torch.full((n, 2), float(n)) for n in (2, 1, 3)]
    server = torch.full((1, 2), 9.0)
    assert aggregate("cat", uploads, server=server)[:, 0].tolist() == [9, 2, 2, 1, 3, 3, 3]


@pytest.mark.parametrize("reduction", ["none", "download", "fixed"])
def test_what_does_not_travel_up_is_neither_read_nor_changed(reduction):
    aggregator = Aggregator({"head": reduction, "w": "mean"})
    aggregator.add({"w": torch.ones(1)}, weight=1)
    server = {"head": torch.tensor([5.0]), "w": torch.zeros(1)}
    assert aggregator.result(server) == {"head": server["head"], "w": torch.ones(1)}


@pytest.mark.parametrize("reduction", ["mean", "median", "trimmed_mean"])
def test_counters_take_the_nearest_integer(reduction):
    uploads = [torch.tensor(v) for v in (1, 2, 2)]
    assert aggregate(reduction, uploads, trim=0.0).item() == 2
    two = [torch.tensor(v) for v in (2, 5)]  # 3.5 is even-rounded
    result = aggregate(reduction, two, trim=0.0)
    assert result.dtype == torch.int64 and result.item() == 4


def test_bool_entries_take_the_majority_or_any():
    uploads = [torch.tensor([True, True]), torch.tensor([True, False]), torch.tensor([False, False])]
    assert aggregate("mean", uploads).tolist() == [True, False]
    assert aggregate("sum", uploads).tolist() == [True, True]


def test_buffers_of_a_real_batch_norm():
    layers, inputs = [nn.BatchNorm1d(3) for _ in range(3)], random_uploads(3, (8, 3))
    for steps, layer, x in zip((1, 2, 5), layers, inputs, strict=True):
        for _ in range(steps):
            layer(x)
    server = nn.BatchNorm1d(3).state_dict()
    aggregator = Aggregator(declare(server))
    for layer, weight in zip(layers, (1, 1, 2), strict=True):
        aggregator.add(layer.state_dict(), weight)
    result = aggregator.result(server)
    for name in ("running_mean", "running_var"):
        values = np.stack([getattr(layer, name).double().numpy() for layer in layers])
        np.testing.assert_allclose(result[name].numpy(), np.average(values, axis=0, weights=[1, 1, 2]), rtol=1e-6)
    assert result["num_batches_tracked"].dtype == torch.int64
    assert result["num_batches_tracked"].item() == 3  # (1 + 2 + 2 * 5) / 4 = 3.25
    nn.BatchNorm1d(3).load_state_dict(result)


@pytest.mark.parametrize("clients", [1, 2, 5, 6])
def test_median_is_numpys(clients):
    uploads = random_uploads(clients)
    expected = np.median(np.stack([u.double().numpy() for u in uploads]), axis=0).astype(np.float32)
    np.testing.assert_allclose(aggregate("median", uploads).numpy(), expected, rtol=1e-7)


@pytest.mark.parametrize(("clients", "trim", "cut"), [(10, 0.1, 1), (10, 0.25, 2), (5, 0.4, 2), (4, 0.2, 0)])
def test_trimmed_mean_is_that_of_the_sorted_rest(clients, trim, cut):
    uploads = random_uploads(clients)
    rest = np.sort(np.stack([u.double().numpy() for u in uploads]), axis=0)[cut : clients - cut]
    np.testing.assert_allclose(aggregate("trimmed_mean", uploads, trim=trim).numpy(), rest.mean(axis=0), rtol=1e-6)


def krum_by_hand(uploads, byzantine):
    rows = np.stack([u.flatten().double().numpy() for u in uploads])
    scores = []
    for i, row in enumerate(rows):
        distances = sorted(((row - other) ** 2).sum() for j, other in enumerate(rows) if j != i)
        scores.append(sum(distances[: len(rows) - byzantine - 2]))
    return int(np.argmin(scores))


@pytest.mark.parametrize("seed", range(5))
def test_krum_is_the_papers_score(seed):
    uploads = random_uploads(8, seed=seed)
    chosen = krum_by_hand(uploads, 2)
    assert krum(torch.stack(uploads).flatten(1), byzantine=2) == chosen
    assert torch.equal(aggregate("krum", uploads, byzantine=2), uploads[chosen])


def test_krum_takes_all_its_entries_from_one_client():
    uploads = [
        {"a": a, "b": b} for a, b in zip(random_uploads(6, seed=1), random_uploads(6, (2,), seed=2), strict=True)
    ]
    aggregator = Aggregator({"a": "krum", "b": "krum"}, byzantine=1)
    for upload in uploads:
        aggregator.add(upload, 1.0)
    chosen = krum_by_hand([torch.cat([u["a"].flatten(), u["b"]]) for u in uploads], 1)
    result = aggregator.result(uploads[0])
    assert torch.equal(result["a"], uploads[chosen]["a"]) and torch.equal(result["b"], uploads[chosen]["b"])


@pytest.mark.parametrize(("reduction", "bound"), [("median", 0.3), ("trimmed_mean", 0.3), ("krum", 1.0)])
def test_one_malicious_upload_moves_robust_rules_little(reduction, bound):
    honest = [1.0 + 0.1 * u for u in random_uploads(9)]
    uploads = [*honest, torch.full((3, 4), -1e6)]
    options = {"trim": 0.1, "byzantine": 1}
    result = aggregate(reduction, uploads, **options)
    assert (result - 1).abs().max() < bound
    assert aggregate("mean", uploads).max() < -1e4
    if reduction == "krum":
        assert any(torch.equal(result, upload) for upload in honest)


@pytest.mark.parametrize("reduction", ["mean", "sum", "median", "trimmed_mean", "krum"])
def test_order_of_clients_is_irrelevant(reduction):
    uploads, weights = [u.double() for u in random_uploads(5)], [1.0, 5.0, 0.2, 3.0, 70.0]
    expected = aggregate(reduction, uploads, weights, trim=0.2, byzantine=1)
    for order in itertools.islice(itertools.permutations(range(5)), 0, 120, 7):
        result = aggregate(reduction, [uploads[i] for i in order], [weights[i] for i in order], trim=0.2, byzantine=1)
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def test_without_uploads_the_server_stays():
    server = {reduction: torch.randn(2) for reduction in REDUCTIONS}
    result = Aggregator({reduction: reduction for reduction in REDUCTIONS}).result(server)
    assert result.keys() == server.keys() and all(result[name] is server[name] for name in server)


@pytest.mark.parametrize(("reduction", "held"), [("mean", 1), ("sum", 1), ("median", 50)])
def test_memory_does_not_grow_with_clients_for_means_and_sums(reduction, held):
    aggregator = Aggregator({"w": reduction})
    for upload in random_uploads(50):
        aggregator.add({"w": upload}, 1.0)
    tensors = [*aggregator._sums.values(), *itertools.chain.from_iterable(aggregator._lists.values())]
    assert len(tensors) == held


def test_uploads_are_copied():
    aggregator, shared = Aggregator({"w": "median", "v": "mean"}), {"w": torch.zeros(1), "v": torch.zeros(1)}
    for value in (1.0, 2.0, 9.0):  # as a strategy does, which trains all clients in one module
        shared["w"].fill_(value)
        shared["v"].fill_(value)
        aggregator.add(shared, 1.0)
    result = aggregator.result(shared)
    assert result["w"].item() == 2.0 and result["v"].item() == 4.0


def test_where_clients_start():
    value = torch.ones(3)
    assert [r for r in REDUCTIONS if travels_down(r)] == [
        "mean",
        "sparse_mean",
        "download",
        "median",
        "trimmed_mean",
        "krum",
    ]
    assert [r for r in REDUCTIONS if travels_up(r)] == [
        "mean",
        "sparse_mean",
        "sum",
        "cat",
        "median",
        "trimmed_mean",
        "krum",
    ]
    assert neutral(value, "sum").tolist() == [0, 0, 0] and neutral(value, "cat").tolist() == []
    assert neutral(value, "none") is value and neutral(value, "mean") is value
    assert neutral(value, "download") is value and neutral(value, "fixed") is value


def test_later_rules_win():
    state = dict.fromkeys(("body.a", "body.b", "head.a"), torch.zeros(1))
    own = {"*": "median", "head.*": "sum"}
    assert declare(state, own, {"*.b": "none", "body.b": "cat"}) == {
        "body.a": "median",
        "body.b": "cat",
        "head.a": "sum",
    }
    assert declare(state) == dict.fromkeys(state, "mean")


def test_unknown_reduction():
    message = (
        "Expected the reduction of `w` to be one of mean, sparse_mean, sum, cat, none, download, fixed, median, "
        "trimmed_mean, krum but got `average`."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        declare({"w": torch.zeros(1)}, {"w": "average"})


def test_pattern_without_a_match():
    message = (
        "Expected the pattern `had.*` in `reductions` to match an entry of the module's state but it matches none. "
        "The entries are: body.w, head.w."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        declare(dict.fromkeys(("body.w", "head.w"), torch.zeros(1)), {"had.*": "none"})


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf")])
def test_wrong_weight(weight):
    message = f"Expected `weight` to be a positive number but got {weight}."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Aggregator({"w": "mean"}).add({"w": torch.zeros(1)}, weight)


@pytest.mark.parametrize("reduction", ["mean", "sum", "median", "trimmed_mean", "krum"])
def test_wrong_shape(reduction):
    message = "Expected `w` of shape (2, 3), as the other clients sent it, but got (3, 2)."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        aggregate(reduction, [torch.zeros(2, 3), torch.zeros(3, 2)])


@pytest.mark.parametrize("trim", [-0.1, 0.5, 1])
def test_wrong_trim(trim):
    message = f"Expected `trim` to be at least 0 and below 0.5 but got {trim}."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        trimmed_mean(torch.zeros(4, 1), trim)


def test_one_upload_is_the_result_of_every_rule():
    upload = torch.randn(3)
    for reduction in ("mean", "sum", "median", "trimmed_mean", "krum"):
        assert torch.equal(aggregate(reduction, [upload], weights=[0.3]), upload), reduction
    assert torch.equal(median(upload[None]), upload)


def rounds(optimizer, aggregates, server):
    """The server's parameter after each round."""
    states = []
    for value in aggregates:
        server = optimizer.step({"w": server}, {"w": value})["w"]
        states.append(server)
    return states


def test_sgd_with_rate_one_is_fedavg():
    server, aggregates = torch.randn(4), random_uploads(3, (4,))
    optimizer = ServerOptimizer(lambda p: torch.optim.SGD(p, lr=1.0), ["w"])
    for result, expected in zip(rounds(optimizer, aggregates, server), aggregates, strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)


def test_momentum_is_fedavgm():
    server, aggregates = torch.randn(4, dtype=torch.float64), [u.double() for u in random_uploads(3, (4,))]
    optimizer = ServerOptimizer(lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9), ["w"])
    w, v = server.clone(), torch.zeros(4, dtype=torch.float64)
    for result, value in zip(rounds(optimizer, aggregates, server), aggregates, strict=True):
        v = 0.9 * v + (w - value)  # Hsu et al. 2019
        w = w - 0.7 * v
        torch.testing.assert_close(result, w, rtol=0, atol=1e-12)


def test_adam_is_fedadam():
    server, aggregates = torch.randn(4, dtype=torch.float64), [u.double() for u in random_uploads(3, (4,))]
    optimizer = ServerOptimizer(lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, 0.99), eps=1e-3), ["w"])
    w, m, v = server.clone(), 0.0, 0.0
    for t, (result, value) in enumerate(zip(rounds(optimizer, aggregates, server), aggregates, strict=True), start=1):
        m = 0.9 * m + 0.1 * (w - value)
        v = 0.99 * v + 0.01 * (w - value) ** 2
        w = w - 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-3)
        torch.testing.assert_close(result, w, rtol=0, atol=1e-12)


def test_server_optimizer_continues_to_the_bit():
    def make():
        return ServerOptimizer(lambda p: torch.optim.Adam(p, lr=0.1), ["w"])

    server, aggregates = torch.randn(4), random_uploads(4, (4,))
    whole, first = make(), make()
    expected = rounds(whole, aggregates, server)
    middle = rounds(first, aggregates[:2], server)[-1]
    second = make()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert (
        second.state_dict()["state"].keys() == first.state_dict()["state"].keys()
    )  # a checkpoint before the next step
    assert torch.equal(rounds(second, aggregates[2:], middle)[-1], expected[-1])
    assert not torch.equal(rounds(make(), aggregates[2:], middle)[-1], expected[-1])


def test_buffers_take_the_aggregate():
    server = {"w": torch.zeros(2), "running": torch.zeros(2), "count": torch.tensor(3)}
    target = {"w": torch.ones(2), "running": torch.full((2,), 5.0), "count": torch.tensor(8)}
    result = ServerOptimizer(lambda p: torch.optim.SGD(p, lr=0.5), ["w"]).step(server, target)
    assert result["w"].tolist() == [0.5, 0.5]
    assert result["running"].tolist() == [5, 5] and result["count"].item() == 8
    assert server["w"].tolist() == [0, 0] and target["w"].tolist() == [1, 1]


def test_sparse_mean_is_that_of_those_who_send():
    uploads = torch.tensor([[1.0, 0.0, 0.0, 2.0], [4.0, 6.0, 0.0, 0.0]])
    for together in (True, False):
        aggregator = Aggregator({"w": "sparse_mean"})
        if together:
            aggregator.add_all({"w": uploads}, [1.0, 2.0])
        else:
            for upload, weight in zip(uploads, (1.0, 2.0), strict=True):
                aggregator.add({"w": upload}, weight)
        result = aggregator.result({"w": torch.tensor([9.0, 9.0, 9.0, 9.0])})
        assert result["w"].tolist() == [3.0, 6.0, 9.0, 2.0]


def test_sparse_mean_of_whole_uploads_is_the_mean():
    uploads, weights = torch.randn(5, 100), [1.0, 3.0, 2.0, 7.0, 0.1]
    results = []
    for reduction in ("mean", "sparse_mean"):
        aggregator = Aggregator({"w": reduction})
        aggregator.add_all({"w": uploads}, weights)
        results.append(aggregator.result({"w": torch.zeros(100)})["w"])
    assert torch.equal(*results)


def test_bytes_on_the_wire():
    value = torch.zeros(100)
    value[:7] = 1.0
    assert wire_bytes(value, "sparse_mean") == 7 * 4 + 13 and wire_bytes(value, "mean") == 400
    assert wire_bytes(torch.ones(100), "sparse_mean") == 400  # as it is, where the bits would make it more
    assert wire_bytes(value.double(), "sparse_mean") == 7 * 8 + 13
