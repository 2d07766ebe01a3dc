"""Tests of built-in reductions, compared with independent computations in NumPy."""

import numpy as np
import pytest
import torch
from raising import raises

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import BUILT_IN_REDUCTIONS, Aggregator, assign_reductions, get_reduction
from lightning_fcl.federation.robust import Krum, TrimmedMean, krum, median, trimmed_mean

pytestmark = pytest.mark.rounding

REDUCTIONS = ("mean", "sparse_mean", "sum", "local", "download_only", "constant", "median", "trimmed_mean", "krum")


def random_uploads(clients, shape=(3, 4), seed=0):
    return list(torch.randn(clients, *shape, generator=torch.Generator().manual_seed(seed)))


def aggregator_of(**names):
    return Aggregator({entry: get_reduction(entry, name) for entry, name in names.items()})


def add(aggregator, upload, weight, number=None):
    number = aggregator.num_uploads if number is None else number
    aggregator.accumulate({name: value[None] for name, value in upload.items()}, [weight], [number])


def aggregate(reduction, uploads, weights=None, server=None):
    """Return the aggregated value of a state entry. Each upload is one client's value of the entry."""
    aggregator = Aggregator({"w": get_reduction("w", reduction)})
    for upload, weight in zip(uploads, weights or [1.0] * len(uploads), strict=True):
        add(aggregator, {"w": upload}, weight)
    return aggregator.compute({"w": torch.zeros_like(uploads[0]) if server is None else server})["w"]


def test_mean_equals_numpy_weighted_average():
    uploads, weights = random_uploads(7), [1.0, 2.5, 300.0, 0.1, 7.0, 11.0, 0.003]
    expected = np.average(np.stack([u.double().numpy() for u in uploads]), axis=0, weights=weights)
    result = aggregate("mean", uploads, weights)
    assert result.dtype == torch.float32
    np.testing.assert_array_equal(result.numpy(), expected.astype(np.float32))


@pytest.mark.parametrize("weights", [[1, 1, 1], [0.1, 0.2, 0.7], [1 / 3, 1e-7, 12345.678], [7, 0.3, 1e6]])
def test_mean_identical_uploads_is_bitwise_identical(weights):
    upload = torch.randn(1000) * torch.logspace(-20, 20, 1000)
    assert torch.equal(aggregate("mean", [upload] * 3, weights), upload)


def test_mean_half_precision_is_computed_in_double_precision():
    uploads = [torch.tensor([v], dtype=torch.bfloat16) for v in (256.0, 1.0, 1.0, 1.0, 1.0)]
    result = aggregate("mean", uploads)
    assert result.dtype == torch.bfloat16 and result.item() == 52.0


def test_sum_adds_uploads_to_server_value():
    x, server = torch.randn(60, 5, dtype=torch.float64), torch.eye(5, dtype=torch.float64)
    uploads = [part.T @ part for part in x.split([10, 20, 30])]
    result = aggregate("sum", uploads, weights=[1.0, 50.0, 0.1], server=server)
    torch.testing.assert_close(result, server + x.T @ x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(aggregate("sum", uploads, server=result), server + 2 * x.T @ x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduction", ["local", "download_only", "constant"])
def test_aggregate_entries_not_uploaded_are_unchanged(reduction):
    aggregator = aggregator_of(head=reduction, w="mean")
    add(aggregator, {"w": torch.ones(1)}, weight=1)
    server = {"head": torch.tensor([5.0]), "w": torch.zeros(1)}
    assert aggregator.compute(server) == {"head": server["head"], "w": torch.ones(1)}


@pytest.mark.parametrize("reduction", ["mean", "median", TrimmedMean(0.0)])
def test_aggregate_integers_rounds_to_nearest(reduction):
    uploads = [torch.tensor(v) for v in (1, 2, 2)]
    assert aggregate(reduction, uploads).item() == 2
    # The mean and the median of 2 and 5 are 3.5, which is rounded to the even integer 4.
    two = [torch.tensor(v) for v in (2, 5)]
    result = aggregate(reduction, two)
    assert result.dtype == torch.int64 and result.item() == 4


def test_aggregate_booleans_mean_is_majority_and_sum_is_any():
    uploads = [torch.tensor([True, True]), torch.tensor([True, False]), torch.tensor([False, False])]
    assert aggregate("mean", uploads).tolist() == [True, False]
    assert aggregate("sum", uploads).tolist() == [True, True]


@pytest.mark.parametrize("clients", [1, 2, 5, 6])
def test_median_equals_numpy_median(clients):
    uploads = random_uploads(clients)
    expected = np.median(np.stack([u.double().numpy() for u in uploads]), axis=0).astype(np.float32)
    np.testing.assert_allclose(aggregate("median", uploads).numpy(), expected, rtol=1e-7)


@pytest.mark.parametrize(("clients", "trim", "cut"), [(10, 0.1, 1), (10, 0.25, 2), (5, 0.4, 2), (4, 0.2, 0)])
def test_trimmed_mean_equals_mean_of_remaining_sorted_values(clients, trim, cut):
    uploads = random_uploads(clients)
    rest = np.sort(np.stack([u.double().numpy() for u in uploads]), axis=0)[cut : clients - cut]
    np.testing.assert_allclose(aggregate(TrimmedMean(trim), uploads).numpy(), rest.mean(axis=0), rtol=1e-6)


def krum_by_hand(uploads, byzantine):
    rows = np.stack([u.flatten().double().numpy() for u in uploads])
    scores = []
    for i, row in enumerate(rows):
        distances = sorted(((row - other) ** 2).sum() for j, other in enumerate(rows) if j != i)
        scores.append(sum(distances[: len(rows) - byzantine - 2]))
    return int(np.argmin(scores))


@pytest.mark.parametrize("seed", range(5))
def test_krum_equals_score_by_hand(seed):
    uploads = random_uploads(8, seed=seed)
    chosen = krum_by_hand(uploads, 2)
    assert krum(torch.stack(uploads).flatten(1), num_malicious_clients=2) == chosen
    assert torch.equal(aggregate(Krum(2), uploads), uploads[chosen])


def test_krum_several_entries_selects_one_client():
    uploads = [
        {"a": a, "b": b} for a, b in zip(random_uploads(6, seed=1), random_uploads(6, (2,), seed=2), strict=True)
    ]
    aggregator = Aggregator(dict.fromkeys("ab", Krum(num_malicious_clients=1)))
    for upload in uploads:
        add(aggregator, upload, 1.0)
    chosen = krum_by_hand([torch.cat([u["a"].flatten(), u["b"]]) for u in uploads], 1)
    result = aggregator.compute(uploads[0])
    assert torch.equal(result["a"], uploads[chosen]["a"]) and torch.equal(result["b"], uploads[chosen]["b"])


@pytest.mark.parametrize(("reduction", "bound"), [("median", 0.3), ("trimmed_mean", 0.3), (Krum(1), 1.0)])
def test_robust_reductions_one_malicious_upload_changes_little(reduction, bound):
    honest = [1.0 + 0.1 * u for u in random_uploads(9)]
    uploads = [*honest, torch.full((3, 4), -1e6)]
    result = aggregate(reduction, uploads)
    assert (result - 1).abs().max() < bound
    assert aggregate("mean", uploads).max() < -1e4
    if isinstance(reduction, Krum):
        assert any(torch.equal(result, upload) for upload in honest)


def test_aggregate_without_uploads_keeps_server_state():
    server = {reduction: torch.randn(2) for reduction in REDUCTIONS}
    result = Aggregator(BUILT_IN_REDUCTIONS).compute(server)
    assert result.keys() == server.keys() and all(result[name] is server[name] for name in server)


@pytest.mark.parametrize(("reduction", "held"), [("mean", 1), ("sum", 1), ("median", 50)])
def test_accumulator_memory_of_mean_and_sum_is_constant(reduction, held):
    aggregator = aggregator_of(w=reduction)
    for upload in random_uploads(50):
        add(aggregator, {"w": upload}, 1.0)
    ((_, accumulator),) = aggregator._groups
    if reduction == "median":
        assert len(accumulator._rows["w"]) == held
    else:
        # Numbers of usual sizes need one 64-bit integer per element.
        (piece,) = accumulator._sums.sums["w"]._pieces
        assert len(piece._limbs) == held and not piece._digits


def test_accumulate_copies_uploads():
    aggregator, shared = aggregator_of(w="median", v="mean"), {"w": torch.zeros(1), "v": torch.zeros(1)}
    # In sequential training, all clients train in one module, so their uploads share tensors.
    for value in (1.0, 2.0, 9.0):
        shared["w"].fill_(value)
        shared["v"].fill_(value)
        add(aggregator, shared, 1.0)
    result = aggregator.compute(shared)
    assert result["w"].item() == 2.0 and result["v"].item() == 4.0


def test_reductions_initial_values_and_transmitted_entries():
    value, known = torch.ones(3), BUILT_IN_REDUCTIONS
    assert tuple(known) == REDUCTIONS == tuple(map(repr, known.values()))
    down, up = ([name for name in REDUCTIONS if getattr(known[name], way)] for way in ("is_downloaded", "is_uploaded"))
    robust = ["median", "trimmed_mean", "krum"]
    assert down == ["mean", "sparse_mean", "download_only", *robust]
    assert up == ["mean", "sparse_mean", "sum", *robust]
    assert [name for name in REDUCTIONS if known[name].is_local] == ["local"]
    for name in REDUCTIONS:
        expected = {"sum": [0, 0, 0]}.get(name, [1, 1, 1])
        assert known[name].initial_value(value).tolist() == expected
        assert (known[name].initial_value(value) is value) == (name != "sum")


def test_assign_reductions_later_rule_overrides():
    state = dict.fromkeys(("body.a", "body.b", "head.a"), torch.zeros(1))
    own = {"*": "median", "head.*": "sum"}
    reductions = assign_reductions(state, own, {"*.b": "local", "body.b": "sum"})
    assert {entry: reduction.name for entry, reduction in reductions.items()} == {
        "body.a": "median",
        "body.b": "sum",
        "head.a": "sum",
    }
    assert assign_reductions(state) == dict.fromkeys(state, BUILT_IN_REDUCTIONS["mean"])


def test_assign_reductions_unknown_name_raises():
    with raises(InvalidValueError, "reductions"):
        assign_reductions({"w": torch.zeros(1)}, {"w": "average"})


def test_assign_reductions_pattern_without_match_raises():
    with raises(InvalidValueError, "reductions"):
        assign_reductions(dict.fromkeys(("body.w", "head.w"), torch.zeros(1)), {"had.*": "local"})


@pytest.mark.parametrize("reduction", ["mean", "sum", "median", "trimmed_mean", "krum"])
def test_aggregate_different_shapes_raises(reduction):
    with raises(InvalidValueError, "w"):
        aggregate(reduction, [torch.zeros(2, 3), torch.zeros(3, 2)])


@pytest.mark.parametrize("trim", [-0.1, 0.5, 1])
def test_trimmed_mean_invalid_trim_raises(trim):
    with raises(InvalidValueError, "trim"):
        trimmed_mean(torch.zeros(4, 1), trim)


def test_aggregate_single_upload_returns_upload():
    upload = torch.randn(3)
    for reduction in ("mean", "sum", "median", "trimmed_mean", "krum"):
        assert torch.equal(aggregate(reduction, [upload], weights=[0.3]), upload), reduction
    assert torch.equal(median(upload[None]), upload)


def test_sparse_mean_averages_nonzero_uploads():
    uploads = torch.tensor([[1.0, 0.0, 0.0, 2.0], [4.0, 6.0, 0.0, 0.0]])
    for together in (True, False):
        aggregator = aggregator_of(w="sparse_mean")
        if together:
            aggregator.accumulate({"w": uploads}, [1.0, 2.0], [0, 1])
        else:
            for upload, weight in zip(uploads, (1.0, 2.0), strict=True):
                add(aggregator, {"w": upload}, weight)
        result = aggregator.compute({"w": torch.tensor([9.0, 9.0, 9.0, 9.0])})
        assert result["w"].tolist() == [3.0, 6.0, 9.0, 2.0]


def test_sparse_mean_without_zeros_equals_mean():
    uploads, weights = torch.randn(5, 100), [1.0, 3.0, 2.0, 7.0, 0.1]
    results = []
    for reduction in ("mean", "sparse_mean"):
        aggregator = aggregator_of(w=reduction)
        aggregator.accumulate({"w": uploads}, weights, range(len(weights)))
        results.append(aggregator.compute({"w": torch.zeros(100)})["w"])
    assert torch.equal(*results)


def test_upload_nbytes_of_mean_and_sparse_mean():
    mean, sparse = (BUILT_IN_REDUCTIONS[name].upload_nbytes for name in ("mean", "sparse_mean"))
    value = torch.zeros(100)
    value[:7] = 1.0
    assert sparse(value) == 7 * 4 + 13 and mean(value) == 400
    # A tensor without zeros is sent unpacked, because the packed tensor would be longer.
    assert sparse(torch.ones(100)) == 400
    assert sparse(value.double()) == 7 * 8 + 13
