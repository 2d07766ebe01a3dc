"""Tests of projections of gradients, compared with brute force, SciPy and closed forms."""

import sys
import warnings
from itertools import combinations

import numpy as np
import pytest
import quadprog
import torch
from raising import raises
from scipy.optimize import lsq_linear
from scipy.spatial.distance import cosine
from scipy.stats import wasserstein_distance

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.methods.projection import agem, flatten, gradient_distance, most_dissimilar, project, unflatten

pytestmark = pytest.mark.rounding


def problem(seed, k=None, p=None, spread=False, dtype=torch.float64):
    """Return a random gradient and constraints. With ``spread``, the scales of the vectors range from 1e-6 to 1e3."""
    rng = np.random.default_rng(seed)
    k, p = k or int(rng.integers(1, 6)), p or int(rng.integers(2, 12))
    scales = 10 ** rng.uniform(-6, 3, (k + 1, 1)) if spread else np.ones((k + 1, 1))
    rows = torch.from_numpy(rng.normal(size=(k + 1, p)) * scales).to(dtype)
    return rows[0], rows[1:]


def nearest(gradient, constraints):
    """Return the projection by brute force: the nearest feasible point over all subsets of active constraints."""
    g, rows = gradient.double().numpy(), constraints.double().numpy()
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    best = np.zeros_like(g)
    for size in range(len(rows) + 1):
        for chosen in combinations(range(len(rows)), size):
            active = rows[list(chosen)]
            candidate = g - np.linalg.pinv(active) @ (active @ g) if size else g
            near = np.linalg.norm(candidate - g) < np.linalg.norm(best - g)
            if near and (rows @ candidate).min() >= -1e-12 * np.linalg.norm(g):
                best = candidate
    return best


def cosines(result, gradient, constraints):
    """Return c @ result / (|c| max(|gradient|, |result|)) for each nonzero constraint c."""
    lengths = constraints.double().norm(dim=1)
    products = constraints.double() @ result.double()
    return products[lengths > 0] / lengths[lengths > 0] / max(gradient.double().norm(), result.double().norm())


def assert_close(result, expected, gradient, tolerance=1e-7):
    assert np.abs(result.double().numpy() - np.asarray(expected)).max() <= tolerance * float(gradient.norm())


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("spread", [False, True])
def test_project_equals_brute_force(spread):
    violated = 0
    for seed in range(150):
        gradient, constraints = problem(seed, spread=spread)
        result, expected = project(gradient, constraints), nearest(gradient, constraints)
        assert_close(result, expected, gradient)
        violated += bool((constraints @ gradient < 0).any())
        assert (result is gradient) == bool((constraints @ gradient >= 0).all())
    assert 50 < violated < 150


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 1e-7)])
def test_project_any_scale_satisfies_constraints_and_does_not_grow(dtype, tolerance):
    for seed in range(200):
        gradient, constraints = problem(seed, k=1 + seed % 12, p=6 + seed % 40, spread=True, dtype=dtype)
        result = project(gradient, constraints)
        assert result.dtype == dtype
        assert cosines(result, gradient, constraints).min() >= -tolerance
        assert result.norm() <= gradient.norm() * (1 + torch.finfo(dtype).eps)


def test_project_scaled_gradients_gives_scaled_result():
    gradient, constraints = problem(0, k=4, p=9)
    expected = project(gradient, constraints)
    scaled = project(1e-6 * gradient, constraints * torch.tensor([[1e-6], [1e3], [1.0], [1e-3]]))
    assert_close(1e6 * scaled, expected, gradient, 1e-9)


def test_project_projected_gradient_is_unchanged():
    for seed in range(50):
        gradient, constraints = problem(seed, k=5, p=20)
        once = project(gradient, constraints)
        assert project(once, constraints) is once


def test_project_opposite_constraints_gives_zero():
    gradient, _ = problem(0, p=7)
    assert_close(project(gradient, -torch.stack([gradient, 3 * gradient])), np.zeros(7), gradient, 1e-12)


def test_project_no_constraint_or_zero_gradient_is_unchanged():
    gradient, constraints = problem(0, k=3, p=7)
    assert project(gradient, constraints[:0]) is gradient
    nothing = torch.zeros(7)
    assert project(nothing, constraints.float()) is nothing
    assert project(gradient, torch.zeros_like(constraints)) is gradient


def test_project_redundant_constraints_change_nothing():
    for seed in range(100):
        gradient, c = problem(seed, k=3, p=8)
        expected = nearest(gradient, c)
        copies = torch.cat([c, 5 * c, c[:1].expand(20, -1)])
        dependent = torch.cat([c, c[:1] + 2 * c[1:2], c.sum(dim=0, keepdim=True)])
        for more in (copies, dependent, torch.cat([torch.zeros_like(c), c])):
            assert_close(project(gradient, more), expected, gradient)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("apart", [1e-3, 1e-5, 1e-7, 1e-9, 1e-12, 1e-15])
def test_project_nearly_parallel_or_opposite_constraints_hold(sign, apart):
    for seed in range(30):
        gradient, c = problem(seed, k=4, p=12)
        c[1] = sign * c[0] + apart * c[3]
        result = project(gradient, c)
        assert cosines(result, gradient, c).min() >= -1e-8
        assert result.norm() <= gradient.norm()
        if apart >= 1e-3:
            assert_close(result, nearest(gradient, c), gradient, 1e-4)


def test_project_margin_is_minimum_dual_variable():
    changed = 0
    for seed in range(100):
        gradient, constraints = problem(seed)
        result = project(gradient, constraints, margin=0.5)
        if (constraints @ gradient >= 0).all():
            assert result is gradient
            continue
        weights = lsq_linear(constraints.T.numpy(), -gradient.numpy(), (0.5, np.inf), "bvls").x
        assert_close(result, gradient.numpy() + weights @ constraints.numpy(), gradient, 1e-6)
        assert cosines(result, gradient, constraints).min() >= -1e-8
        changed += 1
    assert changed > 30


@pytest.mark.parametrize("p", [3 * 16384 + 5, 100_001])
@pytest.mark.parametrize("opposite", [False, True])
def test_project_long_gradient_equals_scipy(p, opposite):
    gradient, constraints = problem(0, k=4, p=p, dtype=torch.float32)
    constraints -= 0.02 * gradient
    # Constraints in nearly opposite directions have large weights, whose terms cancel each other.
    if opposite:
        constraints[1] = -constraints[0] - 1e-3 * gradient
        constraints = constraints[[0, 1, 3]]
    wide = constraints.double().numpy()
    weights = lsq_linear(wide.T, -gradient.double().numpy(), (0, np.inf), "bvls").x
    result = project(gradient, constraints)
    assert_close(result, gradient.double().numpy() + weights @ wide, gradient, 1e-7)
    assert cosines(result, gradient, constraints).min() >= -1e-8
    assert (weights > 0).sum() >= 2
    assert (weights.max() > 10) == opposite


@pytest.mark.parametrize("violated", [1, 2, 4])
def test_project_long_gradient_some_violated_equals_scipy(violated):
    gradient, constraints = problem(1, k=4, p=2**18 + 100_000, dtype=torch.float32)
    constraints += 0.1 * torch.where(torch.arange(4) < violated, -1.0, 1.0)[:, None] * gradient
    wide = constraints.double().numpy()
    weights = lsq_linear(wide.T, -gradient.double().numpy(), (0, np.inf), "bvls").x
    expected = gradient.double().numpy() + weights @ wide
    assert (weights > 1e-9).sum() == violated
    for rows in (constraints, constraints.T.contiguous().T):
        before = gradient.clone()
        result = project(gradient, rows)
        assert torch.equal(gradient, before)
        assert_close(result, expected, gradient, 1e-8)
        assert cosines(result, gradient, rows).min() >= -1e-8


def test_project_strided_tensors_gives_same_result():
    gradient, constraints = problem(0, k=3, p=9)
    constraints[0] -= gradient
    strided = torch.stack([gradient, gradient], dim=1)[:, 0]
    assert torch.equal(project(strided, constraints.T.contiguous().T), project(gradient, constraints))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_project_non_finite_gradient_is_named_in_error(value):
    def poisoned(rows):
        gradient, constraints = problem(0, k=4, p=6)
        for row in rows:
            (gradient if row < 0 else constraints[row])[3] = value
        return gradient, constraints

    for rows, names in (
        ([-1], ["the gradient"]),
        ([2], ["reference gradient 2"]),
        ([-1, 0, 3], ["the gradient", "reference gradient 0", "reference gradient 3"]),
    ):
        for function in (project, gradient_distance, lambda g, others: gradient_distance(g, others, "cosine")):
            with raises(InvalidValueError, "gradient", value=names):
                function(*poisoned(rows))
    with raises(InvalidValueError, "gradient"):
        agem(torch.ones(2), torch.tensor([1.0, value]))


@pytest.mark.parametrize(("k", "p"), [(2, 50), (5, 50), (20, 30), (10, 6), (50, 200)])
def test_project_without_quadprog_gives_same_result(monkeypatch, k, p):
    for seed in range(20):
        gradient, constraints = problem(seed, k=k, p=p)
        monkeypatch.setattr("lightning_fcl.methods.projection._FIRST", 0)
        ours = project(gradient, constraints)
        monkeypatch.setattr("lightning_fcl.methods.projection._FIRST", 1)
        monkeypatch.setitem(sys.modules, "quadprog", None)
        assert_close(project(gradient, constraints), ours, gradient, 1e-8)
        monkeypatch.undo()


def test_project_quadprog_fails_uses_other_solver(monkeypatch):
    def fail(*args):
        raise ValueError("matrix G is not positive definite")

    monkeypatch.setattr(quadprog, "solve_qp", fail)
    for seed in range(50):
        gradient, constraints = problem(seed, k=2 + seed % 4, spread=True)
        if (constraints @ gradient >= 0).all():
            continue
        with pytest.warns(UserWarning, match="`quadprog` found no projection"):
            result = project(gradient, constraints)
        assert_close(result, nearest(gradient, constraints), gradient)


def test_project_quadprog_returns_nan_uses_other_solver(monkeypatch):
    monkeypatch.setattr(quadprog, "solve_qp", lambda matrix, slope, *rest: [np.full(len(slope), np.nan)])
    gradient, constraints = problem(3, k=4)
    assert (constraints @ gradient < 0).any()
    with pytest.warns(UserWarning, match="`quadprog` found no projection"):
        result = project(gradient, constraints)
    assert_close(result, nearest(gradient, constraints), gradient)


def test_project_all_solvers_fail_gives_zero_with_warnings(monkeypatch):
    for solver in ("_by_quadprog", "_by_active_sets"):
        monkeypatch.setattr(
            f"lightning_fcl.methods.projection.{solver}", lambda matrix, slope: np.full_like(slope, np.nan)
        )
    gradient, constraints = problem(3, k=4)
    with pytest.warns(UserWarning, match="found no projection") as warned:
        assert torch.equal(project(gradient, constraints), torch.zeros_like(gradient))
    assert len(warned) == 2


def test_agem_equals_projection_with_one_constraint():
    for seed in range(50):
        gradient, constraints = problem(seed, k=1, p=6, spread=True)
        result = agem(gradient, constraints[0])
        assert_close(result, nearest(gradient, constraints), gradient, 1e-12)
        assert_close(result, project(gradient, constraints), gradient, 1e-12)
        assert (result is gradient) == bool(gradient @ constraints[0] >= 0)
    assert agem(gradient, torch.zeros_like(gradient)) is gradient


def test_gradient_distance_equals_scipy():
    gradient, others = problem(0, k=5, p=40)
    expected = [wasserstein_distance(gradient, other) for other in others]
    np.testing.assert_allclose(gradient_distance(gradient, others), expected, rtol=1e-12)
    np.testing.assert_allclose(gradient_distance(gradient.float(), others.float()), expected, rtol=1e-6)
    expected = [cosine(gradient, other) for other in others]
    np.testing.assert_allclose(gradient_distance(gradient, others, "cosine"), expected, rtol=1e-12)


def test_gradient_distance_wasserstein_ignores_order_of_coordinates():
    gradient, others = problem(0, k=1, p=40)
    permuted = gradient[torch.randperm(40)]
    assert (
        gradient_distance(gradient, permuted[None]) == 0 < 0.1 < gradient_distance(gradient, permuted[None], "cosine")
    )
    assert gradient_distance(gradient, torch.zeros(1, 40), "cosine") == 1
    assert gradient_distance(gradient, others[:0]).shape == (0,)


@pytest.mark.parametrize("kind", ["wasserstein", "cosine"])
def test_most_dissimilar_returns_farthest_first(kind):
    gradient, others = problem(1, k=6, p=30)
    values = gradient_distance(gradient, others, kind)
    chosen = most_dissimilar(gradient, others, 3, kind)
    assert chosen.tolist() == sorted(range(6), key=lambda i: -values[i])[:3]
    assert sorted(most_dissimilar(gradient, others, 10, kind).tolist()) == list(range(6))


def test_unflatten_inverts_flatten():
    named = {"a": torch.randn(2, 3), "b": torch.randn(()), "c": torch.randn(4, 1).T, "d": torch.randn(0)}
    flat = flatten(named)
    assert flat.tolist() == [value for tensor in named.values() for value in tensor.flatten().tolist()]
    back = unflatten(flat, named)
    assert back.keys() == named.keys()
    assert all(torch.equal(back[name], value) and back[name].shape == value.shape for name, value in named.items())
