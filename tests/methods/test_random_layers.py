"""Tests of random layers that draw numbers from a key: same distribution as torch's layers, but other numbers."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import vmap

from lightning_fcl.methods.keyed_dropout import KeyedRandomness, preserve_rng_state, uniform

KEY = torch.tensor(-(2**40) + 7)


def drawn(layer, x, key=KEY):
    with KeyedRandomness(key):
        return layer(x)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("layer", [nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Dropout1d, nn.Dropout2d])
def test_dropout_layers_have_moments_of_torch(layer, p):
    """Means and standard deviations equal those of torch's layers within five standard errors plus 0.001."""
    torch.manual_seed(0)
    shape = (400, 100, 3) if layer in (nn.Dropout1d, nn.FeatureAlphaDropout) else (400, 100, 3, 2)
    x = (
        torch.randn(shape[:2])[(..., *[None] * (len(shape) - 2))].expand(shape)
        if layer is not nn.Dropout
        else torch.ones(shape)
    )
    ours, theirs = drawn(layer(p), x), layer(p)(x)
    draws = 40000 if layer not in (nn.Dropout, nn.AlphaDropout) else x.numel()
    for of in (torch.mean, torch.std):
        error = 5 * float(theirs.square().std()) / math.sqrt(draws) + 1e-3
        assert abs(float(of(ours) - of(theirs))) < error
    assert abs(float((ours == 0).float().mean()) - float((theirs == 0).float().mean())) < 5 / math.sqrt(draws)


def test_dropout2d_drops_whole_channels():
    x = torch.ones(7, 5, 3, 3)
    output = drawn(nn.Dropout2d(0.5), x)
    assert torch.equal(output, output[:, :, :1, :1].expand_as(output)) and set(output.unique().tolist()) == {0.0, 2.0}


def test_dropout_in_evaluation_mode_changes_nothing():
    x = torch.randn(3, 4)
    with KeyedRandomness(KEY):
        assert torch.equal(nn.Dropout(0.5).eval()(x), x) and torch.equal(F.alpha_dropout(x, 0.5), x)
        assert torch.equal(nn.Dropout(0.0)(x), x) and not nn.Dropout(1.0)(x).any()


@pytest.mark.parametrize("size", [1, 3, 8])
def test_dropout_padding_does_not_change_other_samples(size):
    x = torch.randn(8, 5)
    assert torch.equal(drawn(nn.Dropout(0.5), x)[:size], drawn(nn.Dropout(0.5), x[:size]))


def test_dropout_vmap_equals_sequential():
    x, keys = torch.randn(4, 6, 5), torch.tensor([3, -9, 2**62, 0])
    net = nn.Sequential(nn.Dropout(0.3), nn.Linear(5, 5), nn.AlphaDropout(0.4), nn.Dropout1d(0.5))
    together = vmap(lambda key, x: drawn(net, x, key), randomness="error")(keys, x)
    for key, own, expected in zip(keys, x, together, strict=True):
        torch.testing.assert_close(drawn(net, own, key), expected)
    assert len({tuple((row == 0).flatten().tolist()) for row in together}) == 4


def test_keyed_randomness_keeps_global_generator_state():
    before = torch.get_rng_state()
    drawn(nn.Sequential(nn.Dropout(0.5), nn.AlphaDropout(0.5)), torch.randn(3, 4, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_dropout_equals_masked_weights(causal):
    q, k, v = (torch.randn(2, 3, 6, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    with KeyedRandomness(KEY):
        output = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4, is_causal=causal)
    scores = q @ k.transpose(-2, -1) / 2
    if causal:
        scores = scores + torch.full((6, 6), -torch.inf).triu(1)
    kept = uniform(KEY, 1, (2, 3, 6, 6)) >= 0.4
    torch.testing.assert_close(output, (scores.softmax(dim=-1) * kept / 0.6) @ v)
    with KeyedRandomness(KEY):
        torch.testing.assert_close(
            F.scaled_dot_product_attention(q, k, v, is_causal=causal),
            F.scaled_dot_product_attention(q, k, v, is_causal=causal),
        )


def test_bernoulli_and_rand_like_use_key():
    """The in-place `bernoulli_` is tested too, because timm's stochastic depth calls this function."""
    with KeyedRandomness(KEY):
        mask = torch.empty(2000)
        assert mask.bernoulli_(0.25) is mask and set(mask.unique().tolist()) == {0.0, 1.0}
        assert abs(float(mask.mean()) - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 2000)
        other = torch.bernoulli(torch.full((2000,), 0.25))
        assert not torch.equal(mask, other) and abs(float(other.mean()) - 0.25) < 0.05
        numbers = torch.rand_like(torch.zeros(2000, dtype=torch.float64))
        assert numbers.dtype == torch.float64 and float(numbers.min()) >= 0 and float(numbers.max()) < 1


def test_preserve_rng_state_repeats_next_draw():
    x = torch.ones(50)
    with KeyedRandomness(KEY):
        with preserve_rng_state():
            aside = F.dropout(x)
        assert torch.equal(F.dropout(x), aside) and not torch.equal(F.dropout(x), aside)
