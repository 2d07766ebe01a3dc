"""Tests of the Gram matrix of vectors against NumPy's matrix product in double precision."""

import numpy as np
import pytest
import torch

from lightning_fcl.methods import projection as module
from lightning_fcl.methods.projection import gram_matrix

pytestmark = pytest.mark.rounding


def vectors(k, p, dtype=torch.float32):
    generator = torch.Generator().manual_seed(k * 31 + p)
    return torch.randn(k, p, generator=generator).to(dtype), torch.randn(p, generator=generator).to(dtype)


def expected(rows, last):
    wide = torch.cat([rows, last[None]]).double().numpy()
    return wide @ wide.T


@pytest.mark.parametrize("function", ["_by_dots", "_by_matrix_products"])
@pytest.mark.parametrize("k", [0, 1, 2, 3, 4, 10, 21])
@pytest.mark.parametrize("p", [1, 5, 2047, 2048, 2049, 3 * 2048, 40_001])
def test_gram_matrix_any_shape_equals_numpy(monkeypatch, function, k, p):
    # With these limits, long vectors need several chunks, and the last chunk can be smaller.
    monkeypatch.setattr(module, "_CONVERTED", 2**16)
    monkeypatch.setattr(module, "_MATRIX_PIECE", 2**12)
    rows, last = vectors(k, p)
    result, correct = getattr(module, function)(rows, last), expected(rows, last)
    lengths = np.sqrt(correct.diagonal())
    assert result.shape == (k + 1, k + 1)
    assert np.abs(result - correct).max() <= 1e-13 * lengths.max() ** 2
    assert function == "_by_matrix_products" or np.array_equal(result, result.T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_gram_matrix_any_dtype_uses_double_precision(dtype):
    rows, last = vectors(3, 50_000, dtype)
    np.testing.assert_allclose(gram_matrix(rows, last), expected(rows, last), rtol=1e-11, atol=1e-9)


def test_gram_matrix_different_scales_keep_precision():
    rows, last = vectors(4, 5000)
    scales = torch.tensor([1e-6, 1e3, 1.0, 1e-3])
    ratio = gram_matrix(rows * scales[:, None], last) / expected(rows, last)
    factors = np.append(scales.double().numpy(), 1.0)
    # The scaled values are rounded to single precision.
    np.testing.assert_allclose(ratio, np.outer(factors, factors), rtol=1e-5)


def test_gram_matrix_non_contiguous_vectors_same_result():
    rows, last = vectors(5, 5000)
    strided = torch.stack([last, last], dim=1)[:, 0]
    assert np.array_equal(gram_matrix(rows.T.contiguous().T, strided), gram_matrix(rows, last))


def test_gram_matrix_non_finite_vectors_stay_non_finite():
    rows, last = vectors(3, 3000)
    rows[1, 2999] = torch.inf
    rows[2, 0] = torch.nan
    assert np.isfinite(gram_matrix(rows, last).diagonal()).tolist() == [True, False, False, True]
