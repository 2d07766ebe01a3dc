"""Tests of clipping and noise: the norm of everything that leaves a client, and the distribution of the noise."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises
from scipy.stats import kstest
from torch import nn

from lightning_fcl import AdaptiveClip, DifferentialPrivacy, Quantize, TopK
from lightning_fcl.data.client_round import ClientRound, ClientRounds
from lightning_fcl.errors import InvalidValueError, MissingValueError, UnknownNameError
from lightning_fcl.federation.client_store import ClientStore
from lightning_fcl.federation.server import FederatedServer
from lightning_fcl.federation.uploads import Uploads
from lightning_fcl.privacy.differential_privacy import PrivacyAccount
from lightning_fcl.privacy.transforms import CLIP, UNCLIPPED, AddNoise, ClipUpdates, clip_uploads


def make_uploads(updates, messages=()):
    clients = ClientRounds.from_rounds([ClientRound(str(n), 0) for n in range(len(next(iter(updates.values()))))])
    origins = {name: torch.zeros_like(value[0]) for name, value in updates.items()}
    uploads = Uploads(clients, [1.0] * len(clients), {}, dict(updates), origins, are_updates=True)
    if messages:
        uploads.messages["M"] = list(messages)
    return uploads


def joint_norms(uploads):
    """Return the norm of all numbers of each client, with NumPy."""
    squares = np.zeros(len(uploads))
    for value in uploads.values.values():
        squares += (value.double().numpy().reshape(len(uploads), -1) ** 2).sum(axis=1)
    for messages in uploads.messages.values():
        squares += [sum((value.double().numpy() ** 2).sum() for value in message.values()) for message in messages]
    return np.sqrt(squares)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([(3,), (2, 4), (), (1,), (50,)]), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    st.floats(1e-3, 1e3),
    st.floats(1e-2, 10),
    st.booleans(),
    st.integers(0, 100),
)
def test_joint_norm_is_never_above_clip(shapes, dtype, scale, clip, has_messages, seed):
    generator = torch.Generator().manual_seed(seed)
    updates = {
        str(n): (scale * torch.randn(3, *shape, generator=generator)).to(dtype) for n, shape in enumerate(shapes)
    }
    updates["0"][2] = 0
    messages = [{"m": torch.full((2,), scale)} for _ in range(3)] if has_messages else []
    uploads = make_uploads(updates, messages)
    before = joint_norms(uploads)
    original = {name: value.clone() for name, value in uploads.values.items()}
    is_unclipped = clip_uploads(uploads, clip)
    after = joint_norms(uploads)
    assert (after <= clip).all()
    assert (is_unclipped.numpy() == (before <= clip)).all()
    for row in np.flatnonzero(before <= clip):
        assert all(torch.equal(uploads.values[name][row], original[name][row]) for name in original)
    if dtype in (torch.float32, torch.float64):  # The direction is kept, and no more is removed than rounding needs.
        np.testing.assert_allclose(after, np.minimum(before, clip), rtol=1e-5)


def test_clipping_each_entry_alone_would_exceed_the_joint_norm():
    updates = {"a": torch.full((1, 4), 5.0), "b": torch.full((1, 4), 5.0)}
    each = {name: value / value.norm() for name, value in updates.items()}
    assert joint_norms(make_uploads(each))[0] > 1
    uploads = make_uploads(updates)
    clip_uploads(uploads, 1.0)
    assert joint_norms(uploads)[0] <= 1


def make_server(settings, num_clients=4, prob=1.0, num_rounds=10, module=None, compression=None, seed=0):
    """Return a started server with differential privacy, and its account."""
    account = PrivacyAccount(settings)
    transforms = [*([compression] if compression else []), ClipUpdates(account), AddNoise(account)]
    server = FederatedServer(ClientStore(), "uniform", transforms=transforms)
    server.seed, server.client_index = seed, {str(n): n for n in range(num_clients)}
    account.start(num_clients, prob, num_rounds)
    account.open_ledger("hash")
    module = nn.Linear(3, 2) if module is None else module
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    server.start_fit(module)
    return server, account


def upload(server, updates, round_idx=0):
    """Upload the state of each client: the server's state plus an update."""
    rounds = [ClientRound(str(n), round_idx, num_samples=n + 1) for n in range(len(next(iter(updates.values()))))]
    own = {name: value for name, value in server.state.items() if name in updates}
    server.upload(rounds, {name: own[name] + updates[name] for name in own})


def private(**changes):
    return DifferentialPrivacy(**{"unit": "client", "delta": 1e-3, "clip": 1.0, "noise_multiplier": 0.0, **changes})


@pytest.mark.parametrize("compression", [None, TopK(0.5), Quantize(4)])
@pytest.mark.parametrize("prob", [1.0, 0.5])
def test_sum_of_clipped_updates_is_divided_by_expected_number(prob, compression):
    server, _ = make_server(private(), num_clients=8, prob=prob, compression=compression)
    generator = torch.Generator().manual_seed(0)
    updates = {"weight": 3 * torch.randn(3, 2, 3, generator=generator), "bias": torch.randn(3, 2, generator=generator)}
    upload(server, updates)
    aggregate = server.aggregate()
    if compression is None:
        flat = torch.cat([value.flatten(1) for value in updates.values()], dim=1).double().numpy()
        factors = np.minimum(1, 1 / np.linalg.norm(flat, axis=1))
        for name, value in updates.items():
            expected = np.tensordot(factors, value.double().numpy(), axes=1) / (prob * 8)
            np.testing.assert_allclose(aggregate[name].numpy(), expected, rtol=2e-6, atol=1e-7)
    # Three clients have uploaded: the norm of the aggregate is at most 3 * clip / (q N).
    total = sum(float(value.double().square().sum()) for value in aggregate.values()) ** 0.5
    assert total <= 3 / (prob * 8) * (1 + 1e-6)


@pytest.mark.parametrize("noise", ["server", "client"])
def test_noise_has_the_declared_standard_deviation_and_distribution(noise):
    module = nn.Linear(400, 100, bias=False)
    settings = private(noise_multiplier=2.5, clip=0.4, noise=noise)
    server, account = make_server(settings, num_clients=4, module=module)
    number = 3
    upload(server, {"weight": torch.zeros(number, 100, 400)})
    noised = server.aggregate()["weight"].double().numpy().flatten() * 4
    deviation = 2.5 * 0.4 * (1 if noise == "server" else number**0.5)
    assert noised.std() == pytest.approx(deviation, rel=0.01)
    assert kstest(noised / deviation, "norm").pvalue > 1e-4
    assert account.epsilon() > 0


def test_round_without_clients_releases_noise():
    server, _ = make_server(private(noise_multiplier=1.0), num_clients=4, prob=0.5)
    aggregate = server.aggregate()
    assert all(bool((value != 0).all()) for value in aggregate.values())


def test_noise_differs_by_seed_round_entry_and_client_and_is_repeatable():
    def draw(seed, round_idx, name, client):
        server, _ = make_server(private(noise_multiplier=1.0), seed=seed)
        add = next(one for one in server.pipeline.transforms if isinstance(one, AddNoise))
        server.start_round(nn.Linear(3, 2), round_idx=round_idx)
        return tuple(add._noise(torch.zeros(4), name, client).tolist())

    keys = [*itertools.product((0, 1), (0, 1), ("weight", "bias"), ("", "0"))]
    assert len({draw(*key) for key in keys}) == len(keys)
    assert draw(*keys[3]) == draw(*keys[3])


def test_dropped_upload_keeps_the_denominator():
    server, _ = make_server(private(), num_clients=4)
    updates = {"weight": torch.full((2, 2, 3), 0.1), "bias": torch.zeros(2, 2)}
    updates["weight"][1, 0, 0] = torch.nan
    upload(server, updates)
    assert server.record.accepted == ["0"]
    torch.testing.assert_close(server.aggregate()["weight"], torch.full((2, 3), 0.1 / 4))


def test_adaptive_clip_follows_formulas_of_its_paper():
    clip = AdaptiveClip(quantile=0.3, start=0.5, learning_rate=0.2)
    server, _ = make_server(private(clip=clip), num_clients=4)
    updates = {"weight": torch.zeros(4, 2, 3), "bias": torch.zeros(4, 2)}
    updates["bias"][:, 0] = torch.tensor([0.1, 0.4, 0.6, 2.0])
    upload(server, updates)
    aggregate = server.aggregate()
    # Two of four updates are not clipped. The others have norm 0.5.
    assert float(aggregate[CLIP]) == pytest.approx(0.5 * np.exp(-0.2 * (0.5 - 0.3)))
    assert float(aggregate[UNCLIPPED]) == 0
    assert float(aggregate["bias"][0]) == pytest.approx((0.1 + 0.4 + 0.5 + 0.5) / 4, rel=1e-5)


@pytest.mark.parametrize(("given_noise", "num_clients"), [(None, 4), (None, 1000), (5.0, 4)])
def test_adaptive_clip_splits_the_noise_of_the_release(given_noise, num_clients):
    clip = AdaptiveClip(indicator_noise=given_noise)
    _, account = make_server(private(clip=clip, noise_multiplier=2.0, delta=1e-5), num_clients=num_clients)
    expected = given_noise or max(num_clients / 20, 2.0)
    assert account.indicator_noise == expected
    # Two Gaussian releases with multipliers a and b are one release with (a^-2 + b^-2)^(-1/2). An indicator of 1/2 or
    # -1/2 has norm 1/2, so its multiplier is 2 s.
    a, b = account.update_noise_multiplier, 2 * expected
    assert (a**-2 + b**-2) ** -0.5 == pytest.approx(2.0)


def test_indicator_noise_that_is_too_small_raises():
    with raises(InvalidValueError, "indicator_noise"):
        make_server(private(clip=AdaptiveClip(indicator_noise=1.0), noise_multiplier=2.0))


def test_compressed_updates_with_client_noise_raise():
    server, _ = make_server(
        private(noise_multiplier=1.0, noise="client"), compression=TopK(0.1), module=nn.Linear(9, 9)
    )
    with raises(InvalidValueError, "compression"):
        upload(server, {"weight": torch.ones(2, 9, 9), "bias": torch.ones(2, 9)})


@pytest.mark.parametrize(
    ("changes", "argument", "kind"),
    [
        ({"noise_multiplier": None}, "epsilon", MissingValueError),
        ({"clip": 0.0}, "clip", InvalidValueError),
        ({"clip": float("inf"), "noise_multiplier": 1.0}, "clip", InvalidValueError),
        ({"delta": 0.0}, "delta", InvalidValueError),
        ({"epsilon": -1.0}, "epsilon", InvalidValueError),
        ({"noise_multiplier": -1.0}, "noise_multiplier", InvalidValueError),
        ({"unit": "person"}, "unit", UnknownNameError),
        ({"unit": "sample"}, "clip", InvalidValueError),
        ({"clip": None}, "clip", MissingValueError),
        ({"noise": "both"}, "noise", UnknownNameError),
        ({"accountant": "moments"}, "accountant", UnknownNameError),
    ],
)
def test_settings_out_of_range_raise(changes, argument, kind):
    with raises(kind, argument):
        private(**changes)
