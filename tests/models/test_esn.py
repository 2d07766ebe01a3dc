"""Tests that reservoirs equal the recurrence in a plain NumPy loop."""

import numpy as np
import pytest
import torch
from raising import raises

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.models import esn
from lightning_fcl.models.esn import EchoStateNetwork

pytestmark = pytest.mark.rounding


def inputs(batch=4, steps=11, features=3, seed=0):
    return torch.randn(batch, steps, features, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def adapted(reservoir, seed=1):
    """Return a reservoir with gains that differ from 1 and biases that differ from 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        reservoir.gain.copy_(0.5 + torch.rand(reservoir.features, generator=generator))
        reservoir.bias.copy_(torch.randn(reservoir.features, generator=generator) / 4)
    return reservoir


VARIANTS = [
    {},
    {"leaking_rate": 1.0},
    {"num_layers": 3, "units": 7},
    {"washout": 4},
    {"bias_scaling": 0.7},
    {"num_layers": 2, "washout": 3, "bias_scaling": 0.2, "input_scaling": 2.5, "spectral_radius": 1.3},
    {"input_connectivity": 2, "recurrent_connectivity": 0.5},
]


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("plastic", [False, True])
def test_states_equal_a_plain_loop(make_reservoir, by_numpy, options, plastic):
    reservoir, x = make_reservoir(**options), inputs()
    if plastic:
        adapted(reservoir)
    expected = by_numpy.run(reservoir, x)[2][:, reservoir.washout :]
    states = reservoir(x)
    assert states.shape == (4, 11 - reservoir.washout, reservoir.num_layers * reservoir.units)
    np.testing.assert_allclose(states.numpy(), expected, rtol=0, atol=1e-12)
    assert np.abs(expected).max() > 0.1


def test_single_precision_states_equal_up_to_rounding(make_reservoir, by_numpy):
    reservoir, x = make_reservoir().float(), inputs()
    states = reservoir(x)
    assert states.dtype == torch.float32
    np.testing.assert_allclose(states.numpy(), by_numpy.run(reservoir, x.float())[2], rtol=0, atol=1e-5)


@pytest.mark.parametrize("block", [1, 3, 4, 11, 100])
@pytest.mark.parametrize("washout", [0, 4, 10])
def test_states_do_not_depend_on_the_size_of_blocks(make_reservoir, monkeypatch, block, washout):
    reservoir, x = adapted(make_reservoir(num_layers=2, units=6, washout=washout)), inputs()
    states, directions = reservoir(x), reservoir.plasticity_gradients(x, 0.1, 0.3)
    monkeypatch.setattr(esn, "BLOCK", block)
    blocks = list(reservoir.iter_states(x))
    assert max(map(len, blocks)) <= block and all(map(len, blocks))
    torch.testing.assert_close(torch.cat(blocks).transpose(0, 1), states, rtol=0, atol=1e-14)
    torch.testing.assert_close(reservoir.plasticity_gradients(x, 0.1, 0.3), directions, rtol=1e-12, atol=1e-12)


def test_iter_states_does_not_overwrite_blocks(make_reservoir, monkeypatch):
    monkeypatch.setattr(esn, "BLOCK", 2)
    reservoir, x, copies = make_reservoir(), inputs(), []
    blocks = [(copies.append(block.clone()), block)[1] for block in reservoir.iter_states(x)]
    assert all(torch.equal(block, copy) for block, copy in zip(blocks, copies, strict=True))


@pytest.mark.parametrize("radius", [0.3, 0.9, 1.5])
@pytest.mark.parametrize("connectivity", [1.0, 0.2, 3])
def test_spectral_radius_is_exact(radius, connectivity):
    reservoir = EchoStateNetwork(2, 20, 2, spectral_radius=radius, recurrent_connectivity=connectivity, seed=3)
    for layer in range(2):
        weight = reservoir.weights(layer)[1].double().numpy()
        assert np.abs(np.linalg.eigvals(weight)).max() == pytest.approx(radius, rel=1e-5)


@pytest.mark.parametrize(
    ("connectivity", "of_inputs", "of_units"), [(1.0, 5, 20), (0.4, 2, 8), (3, 3, 3), (1, 1, 1), (0.01, 1, 1)]
)
def test_connectivity_sets_the_number_of_weights_in_each_row(connectivity, of_inputs, of_units):
    # With one connection per unit, the graph may have no cycle. With this seed, the graph has a cycle.
    reservoir = EchoStateNetwork(5, 20, 2, input_connectivity=connectivity, recurrent_connectivity=connectivity, seed=1)
    # The inputs of the second layer are the units of the first layer.
    for layer, seen in ((0, of_inputs), (1, of_units)):
        drive, recurrent = reservoir.weights(layer)
        assert (drive != 0).sum(dim=1).tolist() == [seen] * 20
        assert (recurrent != 0).sum(dim=1).tolist() == [of_units] * 20


def test_connectivity_integer_1_differs_from_float_1():
    options = {"units": 20, "seed": 1}
    assert (EchoStateNetwork(5, input_connectivity=1, **options).weights(0)[0] != 0).sum() == 20
    assert (EchoStateNetwork(5, input_connectivity=1.0, **options).weights(0)[0] != 0).sum() == 100


def test_input_connectivity_differs_between_units():
    seen = EchoStateNetwork(10, 40, input_connectivity=2, seed=0).weights(0)[0] != 0
    assert len({tuple(row.tolist()) for row in seen}) > 10
    assert seen.any(dim=0).all()


def test_input_and_bias_scaling_bound_the_weights():
    reservoir = EchoStateNetwork(4, 300, input_scaling=0.5, bias_scaling=0.2, seed=0)
    for values, scale in ((reservoir.weights(0)[0], 0.5), (reservoir.recurrent_bias, 0.2)):
        assert scale * 0.98 < values.abs().max() <= scale
        assert abs(float(values.mean())) < 0.1 * scale
    assert EchoStateNetwork(4, 30, seed=0).recurrent_bias.abs().max() == 0


def test_seed_fixes_weights_without_the_global_generator():
    before = torch.get_rng_state()
    one, two, other = (EchoStateNetwork(3, 10, 2, recurrent_connectivity=0.5, seed=seed) for seed in (4, 4, 5))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one.state_dict()[name], two.state_dict()[name]) for name in one.state_dict())
    assert not torch.equal(one.weights(0)[1], other.weights(0)[1])
    assert not torch.equal(one.weights(0)[1], one.weights(1)[1])


def test_no_seed_uses_the_global_generator():
    torch.manual_seed(1)
    one = EchoStateNetwork(3, 10)
    two = EchoStateNetwork(3, 10)
    torch.manual_seed(1)
    again = EchoStateNetwork(3, 10)
    assert one.weights_hash() == again.weights_hash() != two.weights_hash()


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "washout": 2, "bias_scaling": 0.4}, {"leaking_rate": 1.0}])
def test_fold_plasticity_keeps_the_states(make_reservoir, options):
    reservoir, x = adapted(make_reservoir(**options)), inputs()
    baked = reservoir.fold_plasticity()
    assert torch.equal(baked.gain, torch.ones_like(baked.gain)) and not baked.bias.any()
    torch.testing.assert_close(baked(x), reservoir(x), rtol=0, atol=1e-12)
    assert baked(x).dtype == torch.float64


def test_weights_hash_identifies_the_reservoir(make_reservoir):
    reservoir = make_reservoir()
    tag = reservoir.weights_hash()
    assert 0 <= tag < 2**63  # the tag is stored in a tensor of int64
    reservoir(inputs())
    reservoir.plasticity_gradients(inputs(), 0.0, 0.1)
    assert reservoir.weights_hash() == tag == make_reservoir().weights_hash()
    for name in ("gain", "bias", "recurrent_bias", "input_weight_0", "recurrent_weight_0"):
        changed = make_reservoir()
        with torch.no_grad():
            changed.state_dict()[name].view(-1)[-1] += 1e-12
        assert changed.weights_hash() != tag, name
    for option in ({"leaking_rate": 0.5}, {"washout": 1}, {"seed": 1}):
        assert make_reservoir(**option).weights_hash() != tag
    with torch.no_grad():
        reservoir.gain[0] += 1
        assert reservoir.weights_hash() != tag
        reservoir.reset_plasticity()
    assert reservoir.weights_hash() == tag


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_hash_low_precision_changes_with_the_gain(make_reservoir, dtype):
    reservoir = make_reservoir().to(dtype)
    tag = reservoir.weights_hash()
    with torch.no_grad():
        reservoir.gain[0] += 0.5
    assert reservoir.weights_hash() != tag


@pytest.mark.parametrize("mu", [0.0, 0.3])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "units": 6}, {"washout": 5}, {"bias_scaling": 0.5, "leaking_rate": 1.0}]
)
@pytest.mark.parametrize("own", [False, True])
def test_plasticity_gradients_equal_autograd_of_the_divergence(make_reservoir, by_numpy, mu, options, own):
    """The expected values are negative gradients of -log|dh/dnet| + (h - mu)^2 / (2 sigma^2), summed over time.

    Here, h is the activation and net is the net input. The gradients treat the net input as constant.
    """
    reservoir, x, sigma = adapted(make_reservoir(**options)), inputs(), 0.4
    gain, bias = (value.detach().expand(4, -1).clone() for value in (reservoir.gain, reservoir.bias))
    if own:
        gain, bias = gain + torch.rand_like(gain), bias - torch.rand_like(bias)
    net = torch.from_numpy(by_numpy.run(reservoir, x, gain, bias)[0])[:, reservoir.washout :]
    g, b = gain.clone().requires_grad_(), bias.clone().requires_grad_()
    h = torch.tanh(g[:, None] * net + b[:, None])
    slope = g[:, None] * (1 - h**2)
    (-slope.abs().log() + (h - mu) ** 2 / (2 * sigma**2)).sum().backward()
    dg, db = reservoir.plasticity_gradients(x, mu, sigma, *((gain, bias) if own else ()))
    torch.testing.assert_close(dg, -g.grad, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(db, -b.grad, rtol=1e-9, atol=1e-9)


def test_reservoir_builds_no_graph(make_reservoir):
    reservoir = make_reservoir()
    assert not reservoir(inputs()).requires_grad
    assert not any(direction.requires_grad for direction in reservoir.plasticity_gradients(inputs(), 0.0, 0.1))


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"in_features": 0}, "in_features"),
        ({"units": 0}, "units"),
        ({"num_layers": 0}, "num_layers"),
        ({"washout": -1}, "washout"),
        ({"leaking_rate": 0.0}, "leaking_rate"),
        ({"leaking_rate": 1.1}, "leaking_rate"),
        ({"spectral_radius": 0.0}, "spectral_radius"),
        (
            {"input_scaling": float("nan")},
            "input_scaling",
        ),
        ({"bias_scaling": -0.1}, "bias_scaling"),
        (
            {"input_connectivity": 4},
            "input_connectivity",
        ),
        (
            {"recurrent_connectivity": 1.5},
            "recurrent_connectivity",
        ),
        (
            {"recurrent_connectivity": 0},
            "recurrent_connectivity",
        ),
    ],
)
def test_reservoir_invalid_arguments_raise(options, argument):
    with raises(InvalidValueError, argument):
        EchoStateNetwork(**{"in_features": 3, "units": 5, **options})


@pytest.mark.parametrize("call", [lambda r, x: r(x), lambda r, x: r.plasticity_gradients(x, 0.0, 0.1)])
def test_reservoir_inputs_of_another_shape_raise(make_reservoir, call):
    reservoir = make_reservoir(washout=4)
    for shape in ((2, 9, 5), (9, 3)):
        with raises(InvalidValueError, "in_features"):
            call(reservoir, torch.zeros(shape))
    with raises(InvalidValueError, "washout"):
        call(reservoir, torch.zeros(2, 4, 3))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_reservoir_non_finite_inputs_raise(make_reservoir, value):
    x = inputs()
    x[1, 3, 0] = x[3, 0, 2] = value
    with raises(InvalidValueError, "x"):
        make_reservoir()(x)


def test_reservoir_accepts_finite_inputs_with_overflowing_sum(make_reservoir):
    reservoir = make_reservoir().float()
    x = torch.full((4, 11, 3), 1e38)
    assert torch.isinf(x.sum())
    assert torch.isfinite(reservoir(x)).all()
