"""Tests of gradient inversion: a sample can be reconstructed from its gradient."""

import pytest
import torch
from torch import nn

from lightning_fcl.data.datasets import load_dataset
from lightning_fcl.federation.aggregation import Aggregator
from lightning_fcl.methods.glfc import ConcatNonzeroRows, input_gradient, invert, make_encoder

pytestmark = pytest.mark.rounding


@pytest.mark.parametrize("seed", range(3))
def test_invert_linear_layer_equals_quotient_of_gradients(seed):
    """Let g be the gradient of a loss for the outputs W x + b. Then the gradients are ``g x^T`` for W, and g for b."""
    torch.manual_seed(seed)
    encoder, x = make_encoder((6,), 4, seed), torch.randn(1, 6)
    sent = input_gradient(encoder, x, 2)
    of_weight, of_bias = sent[:24].view(4, 6), sent[24:]
    wanted = of_weight[2] / of_bias[2]
    torch.testing.assert_close(wanted[None], x, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(invert(encoder, sent, 2, torch.randn(1, 6)), wanted[None], rtol=1e-2, atol=1e-2)


def test_make_encoder_same_seed_gives_same_network():
    one, same, other = (
        nn.utils.parameters_to_vector(make_encoder((3, 8, 8), 5, seed).parameters()) for seed in (1, 1, 2)
    )
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert one.abs().max() <= 0.5


@pytest.mark.seconds
def test_invert_lenet_gradient_reconstructs_images():
    digits, encoder = load_dataset("digits"), make_encoder((1, 8, 8), 10, seed=0)
    alike = []
    for i in range(5):
        x, label = torch.from_numpy(digits.x[i : i + 1]), int(digits.y[i])
        found = invert(encoder, input_gradient(encoder, x, label), label, torch.randn(1, 1, 8, 8))
        alike.append(float(torch.corrcoef(torch.stack([found.flatten(), x.flatten()]))[0, 1]))
    assert sorted(alike)[2] > 0.9, alike


def test_concat_nonzero_rows_aggregates_rows_of_all_clients():
    server, rows = {"r": torch.zeros(3, 2)}, ConcatNonzeroRows()
    sent = torch.zeros(2, 3, 2)
    sent[0, 1], sent[1, 0], sent[1, 2] = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    aggregator = Aggregator({"r": rows})
    aggregator.accumulate({"r": sent}, weights=[1.0, 1.0], client_indices=[0, 1])
    assert aggregator.compute(server)["r"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert [rows.upload_nbytes(each) for each in sent] == [8, 16]
    assert rows.initial_value(torch.ones(3, 2)).tolist() == [[0, 0]] * 3
