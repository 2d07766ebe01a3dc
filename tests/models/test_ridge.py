"""Tests of the readout: its statistics and solutions equal NumPy's results or exact arithmetic."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from raising import raises

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.models import RidgeReadout, ridge
from lightning_fcl.models.ridge import accumulate, leading_rows, solve, unpack_upper

pytestmark = pytest.mark.rounding


def samples(n=200, features=8, outputs=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(n, features, generator=generator).tanh()
    return states, torch.randn(n, outputs, generator=generator)


def fitted(*parts, beta=1e-2, symmetric=False, tag=0, features=8, outputs=3):
    readout = RidgeReadout(features, outputs, beta, symmetric)
    readout.reset(tag)
    for states, targets in parts:
        readout.partial_fit(states, targets)
    return readout


def same(left, right, tolerance=1e-12):
    torch.testing.assert_close(dict(left.state_dict()), dict(right.state_dict()), rtol=0, atol=tolerance)


@pytest.mark.parametrize("symmetric", [False, True])
def test_statistics_of_more_features_than_a_stripe(symmetric):
    states, targets = samples(n=60, features=300)
    readout = fitted((states[:35], targets[:35]), (states[35:], targets[35:]), symmetric=symmetric, features=300)
    wide = states.double()
    torch.testing.assert_close(readout.A, targets.double().T @ wide, rtol=0, atol=1e-12)
    torch.testing.assert_close(unpack_upper(readout.B, 300), wide.T @ wide, rtol=0, atol=1e-12)


def by_numpy(states, targets, beta):
    states, targets = states.double().numpy(), targets.double().numpy()
    return np.linalg.solve(states.T @ states + beta * np.eye(states.shape[1]), states.T @ targets).T


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("beta", [0.0, 1e-3, 10.0])
def test_solve_equals_numpy(symmetric, beta):
    data = samples()
    readout = fitted(data, beta=beta, symmetric=symmetric)
    readout.solve()
    assert readout.weight.dtype == torch.float64
    np.testing.assert_allclose(readout.weight.numpy(), by_numpy(*data, beta), rtol=0, atol=1e-12)
    outputs = readout(data[0])
    assert outputs.dtype == torch.float64
    np.testing.assert_allclose(outputs.numpy(), data[0].double().numpy() @ by_numpy(*data, beta).T, rtol=0, atol=1e-11)


@pytest.mark.parametrize("symmetric", [False, True])
def test_partial_fit_in_parts_equals_one_fit(monkeypatch, symmetric):
    states, targets = samples()
    whole = fitted((states, targets), symmetric=symmetric)
    monkeypatch.setattr(ridge, "CHUNK_SIZE", 7)
    parts = zip(states.split([1, 50, 0, 149]), targets.split([1, 50, 0, 149]), strict=True)
    same(fitted(*parts, symmetric=symmetric), whole)
    assert int(whole.n) == 200


def test_statistics_are_summed_in_double_precision():
    """Sums of single-precision products would have an error that is a thousand times larger."""
    states, targets = samples(20000, 4)
    readout = fitted((states, targets), features=4)
    wide = states.double().numpy()
    np.testing.assert_allclose(readout.B.numpy(), wide.T @ wide, rtol=1e-12)
    np.testing.assert_allclose(readout.A.numpy(), targets.double().numpy().T @ wide, rtol=1e-9)


@pytest.mark.parametrize("symmetric", [False, True])
def test_merge_in_any_order_equals_pooled_fit(symmetric):
    data = samples()
    parts = list(zip(*(part.split([20, 100, 80]) for part in data), strict=True))
    pooled = fitted(data, symmetric=symmetric, tag=5)
    pooled.solve()
    for order in ([0, 1, 2], [2, 0, 1]):
        merged = fitted(symmetric=symmetric, tag=5)
        for i in order:
            merged.merge(fitted(parts[i], symmetric=symmetric, tag=5))
        merged.solve()
        same(merged, pooled, 1e-11)


@pytest.mark.parametrize("symmetric", [False, True])
def test_unlearn_equals_fit_without_the_samples(symmetric):
    data = samples()
    kept, left = zip(*(part.split([150, 50]) for part in data), strict=True)
    readout, never = fitted(kept, symmetric=symmetric), fitted(kept, symmetric=symmetric)
    readout.partial_fit(*left)
    readout.solve()
    never.solve()
    assert (readout.weight - never.weight).abs().max() > 1e-2
    readout.unlearn(fitted(left, symmetric=symmetric))
    readout.solve()
    same(readout, never, 1e-9)


def test_merge_of_another_reservoir_or_shape_raises():
    readout = fitted(samples(), tag=0xABC)
    before = {name: value.clone() for name, value in readout.state_dict().items()}
    for change in (readout.merge, readout.unlearn):
        with raises(InvalidValueError, "tag"):
            change(fitted(samples(), tag=0xDEF))
    with raises(InvalidValueError, "A"):
        readout.unlearn(fitted(samples(), tag=0xABC, symmetric=True))
    with raises(InvalidValueError, "A"):
        readout.unlearn(fitted(samples(outputs=2), tag=0xABC, outputs=2))
    assert all(torch.equal(value, before[name]) for name, value in readout.state_dict().items())


def test_unlearn_more_samples_than_added_raises():
    with raises(InvalidValueError, "n"):
        fitted(samples(100)).unlearn(fitted(samples()))
    (readout := fitted(samples())).unlearn(fitted(samples()))
    assert readout.n == 0 and not readout.A.any()


@pytest.mark.parametrize("rank", [3, 8])
def test_low_rank_merge_keeps_the_leading_directions(rank):
    states, targets = samples()
    merged = RidgeReadout(8, 3, 0.1, rank=rank)
    for rows, wanted in zip(states.split(100), targets.split(100), strict=True):
        (part := RidgeReadout(8, 3, 0.1, rank=rank)).partial_fit(rows, wanted)
        merged.merge(part)
    cut = [reduce_rank(rows.double().numpy(), rank) for rows in states.split(100)]
    _, sizes, vectors = np.linalg.svd(reduce_rank(np.vstack(cut), rank), full_matrices=False)
    square, space = sizes[:rank] ** 2, vectors[:rank].T
    np.testing.assert_allclose((merged.B.T @ merged.B).numpy(), space * square @ space.T, rtol=0, atol=1e-9)
    merged.solve()
    a = targets.double().numpy().T @ states.double().numpy()
    np.testing.assert_allclose(merged.weight.numpy(), a @ space / (square + 0.1) @ space.T, rtol=0, atol=1e-9)
    if rank == 8:
        np.testing.assert_allclose(merged.weight.numpy(), by_numpy(states, targets, 0.1), rtol=0, atol=1e-9)
    with raises(InvalidValueError, "rank"):
        merged.unlearn(part)


def reduce_rank(rows, rank):
    _, sizes, vectors = np.linalg.svd(rows, full_matrices=False)
    return sizes[:rank, None] * vectors[:rank]


def test_reset_clears_statistics_and_keeps_the_solution():
    readout = fitted(samples())
    readout.solve()
    weight = readout.weight.clone()
    readout.reset(9)
    assert not readout.A.any() and not readout.B.any() and int(readout.n) == 0 and int(readout.tag) == 9
    assert torch.equal(readout.weight, weight) and weight.any()


@pytest.mark.parametrize("symmetric", [False, True])
def test_solve_path_equals_single_solutions(symmetric):
    betas = [1e-5, 1e-2, 1.0, 30.0]
    readout = fitted(samples(), symmetric=symmetric)
    together = readout.solve_path(betas)
    assert together.shape == (4, 3, 8)
    for beta, weight in zip(betas, together, strict=True):
        np.testing.assert_allclose(weight.numpy(), by_numpy(*samples(), beta), rtol=0, atol=1e-12)


def exact_solution(a, b, beta):
    """Return the ridge solution for A and B by Gauss-Jordan elimination in fractions. Only the result is rounded."""
    size, beta = len(b), Fraction(float(beta))
    rows = [
        [Fraction(float(b[i, j])) + (beta if i == j else 0) for j in range(size)]
        + [Fraction(float(v)) for v in a[:, i]]
        for i in range(size)
    ]
    for pivot in range(size):
        best = max(range(pivot, size), key=lambda i: abs(rows[i][pivot]))
        rows[pivot], rows[best] = rows[best], rows[pivot]
        rows[pivot] = [value / rows[pivot][pivot] for value in rows[pivot]]
        for i in range(size):
            if i != pivot and rows[i][pivot]:
                factor = rows[i][pivot]
                rows[i] = [left - factor * right for left, right in zip(rows[i], rows[pivot], strict=True)]
    return np.array([[float(value) for value in row[size:]] for row in rows]).T


def with_spectrum(values, seed=0):
    """Return A and B of a readout. B has the given eigenvalues."""
    rng = np.random.default_rng(seed)
    vectors = np.linalg.qr(rng.normal(size=(len(values), len(values))))[0]
    b = (vectors * values) @ vectors.T
    b = (b + b.T) / 2
    return rng.normal(size=(2, len(values))) @ b, b


@pytest.mark.parametrize(
    ("values", "beta"),
    [
        # The condition number is 1e9.
        (np.logspace(0, 9, 10), 0.0),
        (np.logspace(-3, 6, 10), 1e-4),
        # The rank is 6 of 10, so the matrix is invertible only with beta.
        (np.r_[np.zeros(4), np.logspace(0, 4, 6)], 1e-5),
    ],
)
def test_solve_ill_conditioned_equals_exact_solution(values, beta):
    a, b = with_spectrum(values)
    exact = exact_solution(a, b, beta)
    condition = (values.max() + beta) / (values.min() + beta)
    tolerance = 100 * condition * np.finfo(np.float64).eps * np.abs(exact).max()
    weights = [solve(torch.from_numpy(a), torch.from_numpy(b), beta)]
    readout = RidgeReadout(10, 2)
    readout.A.copy_(torch.from_numpy(a))
    readout.B.copy_(torch.from_numpy(b))
    weights.append(readout.solve_path([beta])[0])
    for weight in weights:
        assert np.abs(weight.numpy() - exact).max() < tolerance < 1e-2 * np.abs(exact).max()
    # A solution in single precision has a larger error.
    narrow = np.linalg.solve(b.astype(np.float32) + np.float32(beta) * np.eye(10, dtype=np.float32), a.T).T
    assert np.abs(narrow - exact).max() > tolerance


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("rank", [1, 6, 9])
def test_solve_singular_without_beta_returns_least_norm(seed, rank, caplog):
    """Rounding determines whether a singular B is positive definite. In both cases, the solution has the least norm."""
    rng = np.random.default_rng(seed)
    states = rng.normal(size=(50, rank)) @ rng.normal(size=(rank, 10))
    targets = rng.normal(size=(50, 2))
    expected = (np.linalg.pinv(states, rcond=1e-8) @ targets).T
    readout = RidgeReadout(10, 2, beta=0.0)
    readout.partial_fit(torch.from_numpy(states), torch.from_numpy(targets))
    readout.solve()
    np.testing.assert_allclose(readout.weight.numpy(), expected, rtol=0, atol=1e-8)
    np.testing.assert_allclose(readout.solve_path([0.0])[0].numpy(), expected, rtol=0, atol=1e-8)
    assert "B + beta I of the ridge regression may not be positive definite (beta = 0)" in caplog.text


def test_solve_singular_matrix_logs_a_warning(caplog):
    a, b = torch.tensor([[1.0, 2.0, 0.0]]), torch.diag(torch.tensor([2.0, 4.0, 0.0]))
    assert solve(a, b, 0.0).tolist() == [[0.5, 0.5, 0.0]]
    assert caplog.messages == [
        "The matrix B + beta I of the ridge regression may not be positive definite (beta = 0). The solution ignores "
        "eigenvalues of B that may be rounding errors. Increase `beta` for a unique solution."
    ]


def test_solve_well_conditioned_matrix_logs_no_warning(caplog):
    solve(torch.ones(1, 3), torch.eye(3), 0.0)
    solve(torch.ones(1, 3), torch.zeros(3, 3), 1e-3)
    assert not caplog.messages


@pytest.mark.parametrize("rank", [3, 12])
@pytest.mark.parametrize("smallest", [0.5, 1e-2, 1e-5, 0.0], ids=lambda value: f"smallest{value}")
@pytest.mark.parametrize("shape", [(8, 20), (30, 12), (12, 12)], ids=str)
def test_leading_rows_equal_truncated_svd(shape, smallest, rank):
    """The products of the rows are compared, because the signs of singular vectors are arbitrary."""
    rng = np.random.default_rng(0)
    size = min(shape)
    left, right = (np.linalg.qr(rng.normal(size=(length, size)))[0] for length in shape)
    sizes = 100 * np.linspace(1, smallest, size)
    rows = (left * sizes) @ right.T
    found = leading_rows(torch.from_numpy(np.vstack([rows, np.zeros((2, shape[1]))])), rank).numpy()
    expected = (right[:, :rank] * sizes[:rank] ** 2) @ right[:, :rank].T
    assert found.shape == (rank, shape[1])
    np.testing.assert_allclose(found.T @ found, expected, rtol=0, atol=1e-10 * sizes[0] ** 2)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1)[:size], sizes[:rank], rtol=1e-10, atol=1e-10 * sizes[0])
    products = found @ found.T
    np.testing.assert_allclose(products, np.diag(np.diag(products)), rtol=0, atol=1e-12 * sizes[0] ** 2)


@pytest.mark.parametrize("is_orthogonal", [True, False])
def test_solve_path_with_rank_equals_ridge_regression(is_orthogonal):
    """The solution of orthogonal rows needs no decomposition. It equals the solution of ``B^T B``."""
    rng = np.random.default_rng(1)
    rows, a = rng.normal(size=(6, 9)), rng.normal(size=(2, 6))
    if is_orthogonal:
        _, sizes, vectors = np.linalg.svd(rows, full_matrices=False)
        rows = sizes[:, None] * vectors
    readout = RidgeReadout(9, 2, rank=6)
    readout.A.copy_(torch.from_numpy(a @ rows))
    readout.B.copy_(torch.from_numpy(rows))
    for beta, weight in zip([0.1, 10.0], readout.solve_path([0.1, 10.0]), strict=True):
        expected = np.linalg.solve(rows.T @ rows + beta * np.eye(9), (a @ rows).T).T
        np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["A", "B"])
def test_solve_non_finite_statistics_raise(value, where):
    readout = fitted(samples())
    getattr(readout, where)[0, 0] = value
    for call in (readout.solve, lambda: readout.solve_path([1.0])):
        with raises(InvalidValueError, "A"):
            call()


@pytest.mark.parametrize(
    "move", [lambda m: m.float(), lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.to("cpu").float()]
)
def test_statistics_stay_bitwise_identical_after_conversion(move):
    readout = fitted(samples(), tag=2**53 + 1)
    readout.solve()
    before = {name: value.clone() for name, value in readout.state_dict().items()}
    module = torch.nn.ModuleDict({"readout": readout, "other": torch.nn.Linear(1, 1)})
    assert move(module)["other"].weight.dtype != torch.float64
    for name, value in before.items():
        assert torch.equal(readout.state_dict()[name], value) and readout.state_dict()[name].dtype == value.dtype


@pytest.mark.parametrize("packed", [False, True])
def test_accumulate_adds_to_existing_values(packed):
    states, targets = samples(30)
    a, full = torch.ones(3, 8, dtype=torch.float64), torch.eye(8, dtype=torch.float64)
    b = full[tuple(torch.triu_indices(8, 8))] if packed else full.clone()
    accumulate(a, b, states, targets)
    torch.testing.assert_close(unpack_upper(b, 8), full + states.double().T @ states.double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(a, 1 + targets.double().T @ states.double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("beta", [-1e-3, float("inf")])
def test_ridge_readout_invalid_beta_raises(beta):
    with raises(InvalidValueError, "beta"):
        RidgeReadout(2, 1, beta=beta)
