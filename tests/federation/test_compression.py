"""Tests of compressed uploads: codes, residuals and bytes, also with vectorized clients and in resumed fits."""

import math

import numpy as np
import pytest
import torch
from raising import raises
from torch import nn

from lightning_fcl import FederatedStrategy
from lightning_fcl.callbacks import ContinualMetrics, FedProx
from lightning_fcl.data.client_round import ClientRound, ClientRounds
from lightning_fcl.errors import InvalidTypeError, InvalidValueError
from lightning_fcl.federation.client_store import ClientStore
from lightning_fcl.federation.compression import RESIDUAL, Quantize, TopK
from lightning_fcl.federation.reductions import Mean
from lightning_fcl.federation.server import FederatedServer
from lightning_fcl.federation.swarm import Swarm
from lightning_fcl.federation.uploads import Setting, Uploads

CODES = {
    "topk": TopK(0.2),
    "quantize": Quantize(8),
    "quantize to 3 bits": Quantize(3),
    "both": TopK(0.3, bits=4),
}


def decoded(code, updates):
    """Return updates of shape (clients, n) after compression and decompression."""
    return code.decompress(code.compress(updates), updates[0])


def transmit(code, server, states, residuals):
    """Encode and decode uploads. Return the states that the server decodes, and the new residual of each client."""
    reductions = dict.fromkeys(server, Mean())
    code.setup(Setting(server, reductions, [*server], seed=0, round_idx=0, clients=[]))
    parts = ClientRounds.from_rounds([ClientRound(str(row), 0, num_samples=1) for row in range(len(residuals))])
    uploads = Uploads(parts, [1.0] * len(residuals), reductions, dict(states), server)
    uploads.kept = [{RESIDUAL: residual} for residual in residuals]
    code.encode(uploads)
    code.decode(uploads)
    return uploads.values, uploads.memories[RESIDUAL]


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def largest(row, k):
    """Return a row in which only the k elements with the largest absolute values are not zero, computed in NumPy."""
    kept = np.argsort(-np.abs(row), kind="stable")[:k]
    return np.where(np.isin(np.arange(len(row)), kept), row, 0)


def multiples(row, bits):
    levels = 2 ** (bits - 1) - 1
    scale = np.abs(row).max() / levels
    return np.round(row / scale) * scale


def test_codes_equal_numpy():
    update = torch.randn(3, 50, dtype=torch.float64)
    found = [decoded(code, update).numpy() for code in (TopK(0.13), Quantize(8), TopK(0.13, 5))]
    for row, top, whole, both in zip(update.numpy(), *found, strict=True):
        np.testing.assert_array_equal(top, largest(row, 7))
        np.testing.assert_allclose(whole, multiples(row, 8), rtol=0, atol=1e-15)
        np.testing.assert_allclose(both, multiples(largest(row, 7), 5), rtol=0, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("code", CODES)
def test_codes_error_is_at_most_half_a_step_and_zeros_stay(code, dtype):
    update = torch.cat([torch.randn(4, 30), torch.zeros(1, 30), 1e-40 * torch.ones(1, 30)]).to(dtype)
    sent = decoded(CODES[code], update)
    assert sent.dtype == dtype and sent.shape == update.shape and torch.isfinite(sent).all()
    assert not sent[4].any()
    bits = CODES[code].bits
    if isinstance(CODES[code], Quantize):
        step = update.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
        assert bool(((sent - update).abs() <= 0.5 * step * (1.01 if dtype != torch.bfloat16 else 1.6) + 1e-39).all())


@pytest.mark.parametrize("code", CODES)
def test_decoded_update_plus_residual_equals_update(code):
    server = {"w": torch.zeros(10, 7), "b": torch.zeros(5)}
    states = {name: torch.randn(3, *value.shape) for name, value in server.items()}
    left = [{name: torch.zeros_like(value) for name, value in server.items()} for _ in range(3)]
    for _ in range(5):
        update = {name: states[name] + torch.stack([one[name] for one in left]) for name in states}
        received, left = transmit(CODES[code], server, states, left)
        for name in server:
            residual = torch.stack([one[name] for one in left])
            assert torch.equal(received[name] + residual, update[name])
            assert residual.any()


@pytest.mark.parametrize("code", CODES)
def test_error_feedback_mean_over_rounds_approaches_update(code):
    server, update = {"w": torch.zeros(40)}, torch.randn(2, 40) + 0.3
    without = (decoded(CODES[code], update) - update).abs().max()
    total, left, off = torch.zeros(2, 40), [{}, {}], {}
    for round_idx in range(1, 401):
        received, left = transmit(CODES[code], server, {"w": update}, left)
        total += received["w"]
        off[round_idx] = float((total / round_idx - update).abs().max())
    assert off[400] < 12 / 400 and off[400] < 0.2 * off[40] + 1e-5 and off[400] < 0.1 * without


@pytest.mark.parametrize(
    ("code", "n", "itemsize", "expected"),
    [
        # Positions are sent as one bit per element.
        (TopK(0.1), 1000, 4, 100 * 4 + 125),
        # Positions are sent as 4 bytes each.
        (TopK(0.01), 1000, 4, 10 * 4 + 10 * 4),
        (TopK(0.07), 100, 4, 7 * 4 + 13),
        (TopK(0.1), 1001, 8, 101 * 8 + 126),
        (TopK(1.0), 1000, 4, 4000),
        (TopK(0.001), 10, 4, 4 + 2),
        (Quantize(8), 1000, 4, 1004),
        (Quantize(3), 1001, 4, math.ceil(3003 / 8) + 4),
        (TopK(0.1, bits=8), 1000, 4, 100 + 4 + 125),
        (TopK(0.01, bits=4), 1000, 4, 5 + 4 + 40),
    ],
)
def test_code_nbytes_equals_expected_bytes(code, n, itemsize, expected):
    assert code.nbytes(n, itemsize) == expected


def make_federation(code, store="memory", **kwargs):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(9, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    module[1].weight.requires_grad_(False)
    federation = FederatedServer(ClientStore(store), transforms=[code], **kwargs)
    federation.start_fit(module, kwargs.pop("rules", None))
    return federation, module


def uploads(federation, clients, round_idx):
    generator = torch.Generator().manual_seed(round_idx)
    changed = {}
    for name, value in federation.state.items():
        noise = torch.randn(clients, *value.shape, generator=generator)
        changed[name] = value + (noise if value.is_floating_point() else (10 * noise).long().abs())
    return changed


@pytest.mark.parametrize("store", ["memory", "disk"])
@pytest.mark.parametrize("code", CODES)
def test_server_aggregates_decoded_updates(code, store):
    federation, module = make_federation(CODES[code], store)
    learnt = {name for name, p in module.named_parameters() if p.requires_grad}
    sizes, left = [3, 1, 2], [{} for _ in range(3)]
    for round_idx in range(3):
        federation.start_round(module)
        server, states = federation.state, uploads(federation, 3, round_idx)
        federation.upload([ClientRound(c, round_idx, num_samples=n) for c, n in zip("abc", sizes, strict=True)], states)
        for row, client in enumerate("abc"):
            federation.save_client_state(client, {name: value[row] for name, value in states.items()}, {})
        result = federation.aggregate()
        nbytes = 0
        for name, value in server.items():
            coded = name in learnt and CODES[code].nbytes(value.numel(), 4) < value.nbytes
            nbytes += CODES[code].nbytes(value.numel(), 4) if coded else value.nbytes
            received = []
            for row in range(3):
                update = states[name][row] - value + left[row].get(name, 0)
                sent = decoded(CODES[code], update.reshape(1, -1)).view_as(update) if coded else update
                if coded:
                    left[row][name] = update - sent
                received.append(value + sent)
            mean = sum(n * one.double() for n, one in zip(sizes, received, strict=True)) / 6
            expected = mean.to(value.dtype) if value.is_floating_point() else mean.round().to(value.dtype)
            torch.testing.assert_close(result[name], expected, rtol=0, atol=1e-6)
        assert federation.record.upload_bytes == dict.fromkeys("abc", nbytes)
        for row, client in enumerate("abc"):
            assert equal(federation.client_store[client]["residual"], left[row])
        module.load_state_dict(result)
    # The bias with a single element, the buffers and the frozen parameter are sent uncompressed.
    assert set(left[0]) < set(federation.state)


@pytest.mark.parametrize("code", CODES)
def test_compression_any_client_groups_give_equal_results(code):
    results = []
    for groups in ([[0, 1, 2]], [[2], [0, 1]], [[0], [1], [2]]):
        federation, module = make_federation(CODES[code])
        for round_idx in range(3):
            federation.start_round(module)
            states = uploads(federation, 3, round_idx)
            for rows in groups:
                part = {name: value[rows] for name, value in states.items()}
                federation.upload([ClientRound("abc"[row], round_idx, num_samples=2) for row in rows], part)
                for row in rows:
                    federation.save_client_state("abc"[row], {name: value[row] for name, value in states.items()}, {})
            module.load_state_dict(federation.aggregate())
        results.append((federation.state, [federation.client_store[client]["residual"] for client in "abc"]))
    for state, left in results[1:]:
        torch.testing.assert_close(state, results[0][0], rtol=0, atol=1e-6)
        torch.testing.assert_close(left, results[0][1], rtol=0, atol=1e-6)


def test_residual_is_unchanged_if_upload_is_dropped():
    federation, module = make_federation(TopK(0.2))
    for round_idx in range(2):
        federation.start_round(module)
        states = uploads(federation, 2, round_idx)
        if round_idx:
            states["0.weight"][0, 0, 0] = float("nan")
        client_rounds = [ClientRound(client, round_idx, num_samples=1) for client in "ab"]
        taken = federation.upload(client_rounds, states)
        for row, client in enumerate("ab"):
            if taken[row]:
                federation.save_client_state(client, {name: value[row] for name, value in states.items()}, {})
        if not round_idx:
            kept = federation.client_store["a"]["residual"], federation.client_store["b"]["residual"]
    assert taken == [False, True] and "a" in federation.record.dropped
    assert equal(federation.client_store["a"]["residual"], kept[0]) and not equal(
        federation.client_store["b"]["residual"], kept[1]
    )


def run(fit, make_stream, make_task, compression, **options):
    task, metrics = make_task(), ContinualMetrics()
    stream = make_stream(rounds_per_experience=2, num_clients=4, partition="dirichlet")
    trainer = fit(task, stream, [metrics], compression=compression, seed=0, **options)
    return task.state_dict(), metrics.record["rounds"], trainer.strategy.server.client_store


@pytest.mark.seconds
@pytest.mark.parametrize("code", [TopK(1.0), TopK(0.999)])
@pytest.mark.parametrize("max_vectorized_clients", [1, 4])
def test_top_k_all_elements_equals_no_compression_bitwise(fit, make_stream, make_task, code, max_vectorized_clients):
    # The encoded updates would not be shorter than the values, so uploads are not compressed.
    plain, code = (
        run(fit, make_stream, make_task, one, max_vectorized_clients=max_vectorized_clients) for one in (None, code)
    )
    assert equal(plain[0], code[0])
    assert [entry["upload_bytes"] for entry in plain[1]] == [entry["upload_bytes"] for entry in code[1]]


@pytest.mark.seconds
@pytest.mark.parametrize(("store", "max_vectorized_clients"), [("memory", 1), ("disk", 4)])
def test_resume_with_compression_equals_uninterrupted_fit(
    fit, make_stream, make_task, assert_resumes, tmp_path, store, max_vectorized_clients
):
    options = {"client_store": store, "max_vectorized_clients": max_vectorized_clients, "participation": 2}
    assert_resumes(make_task, lambda: FedProx(0.1), compression=TopK(0.1, 6), **options)
    stream, path = make_stream(num_clients=4, rounds_per_experience=2), tmp_path / "epoch=1.ckpt"
    for other in (None, TopK(0.2, 6), Quantize(6)):
        with raises(InvalidValueError, "compression", code="other-recipe"):
            fit(make_task(), stream, [FedProx(0.1)], ckpt_path=path, compression=other, seed=5, **options)


def test_compression_applies_to_median_but_not_to_local_entries(fit, make_stream, make_task):
    rules = {"model.1.weight": "median", "model.1.bias": "local", "model.3.bias": "local"}
    plain, coded = (run(fit, make_stream, make_task, one, reductions=rules, max_epochs=1) for one in (None, TopK(0.2)))
    differ = {name for name in plain[0] if not torch.equal(plain[0][name], coded[0][name])}
    assert differ == {"model.1.weight", "model.3.weight"} == set(coded[2]["0"]["residual"])
    assert set(coded[2]["0"]["model"]) == {"model.1.bias", "model.3.bias"}
    assert plain[1][0]["download_bytes"] == coded[1][0]["download_bytes"]


def test_residual_is_kept_while_entry_is_not_uploaded():
    federation, module = make_federation(TopK(0.2))
    for rules in ({}, {"0.weight": "constant"}, {}):
        federation.start_round(module, rules)
        states = {name: value[None] for name, value in federation.state.items()}
        states["0.weight"] = states["0.weight"] + torch.arange(72.0).view(1, 8, 9)
        federation.upload([ClientRound("a", round_idx=0, num_samples=1)], states)
        federation.save_client_state("a", {name: value[0] for name, value in states.items()}, {})
        module.load_state_dict(federation.aggregate())
    # Rounds 1 and 3 send the 15 largest of 72 elements. Round 3 compresses the sum of its update and the residual of
    # round 1.
    update = torch.arange(72.0)
    left = torch.where(update >= 57, 0, update) + update
    expected = left - decoded(TopK(0.2), left[None])[0]
    torch.testing.assert_close(
        federation.client_store["a"]["residual"]["0.weight"].flatten(), expected, rtol=0, atol=1e-5
    )


@pytest.mark.seconds
def test_residual_is_kept_without_callbacks(fit, make_stream, make_task):
    states = []
    for callbacks in ([], [ContinualMetrics()]):
        task = make_task()
        fit(
            task,
            make_stream(rounds_per_experience=2),
            callbacks,
            compression=TopK(0.1),
            seed=0,
            max_vectorized_clients=1,
        )
        states.append(task.state_dict())
    assert equal(*states)


@pytest.mark.parametrize("code", [Quantize(8), TopK(0.1, bits=4)])
def test_codes_single_element_is_exact_and_sent_uncompressed(code):
    update = torch.tensor([[0.3], [-2.5]], dtype=torch.float64)
    torch.testing.assert_close(decoded(code, update), update, rtol=1e-12, atol=0)
    assert not code.should_compress(update[0])


def test_compression_in_swarm_with_missed_sync_raises(fit, make_stream, make_task):
    server, swarm = (
        run(fit, make_stream, make_task, TopK(0.2), swarm=swarm) for swarm in (None, Swarm(leaves_at={"3": 3}))
    )
    assert [entry["correct"]["server"] for entry in server[1][:3]] == [e["correct"]["server"] for e in swarm[1][:3]]
    for settings in ({"missed_sync_prob": 0.1}, {"missed_rounds": {"1": [0]}}):
        with raises(InvalidValueError, "swarm"):
            FederatedStrategy(swarm=Swarm(**settings), compression=TopK())


def test_compression_invalid_arguments_raise():
    for fraction in (0, 1.1):
        with raises(InvalidValueError, "fraction", value=fraction):
            TopK(fraction)
    for make in (Quantize, lambda bits: TopK(0.1, bits)):
        with raises(InvalidValueError, "bits", value=1):
            make(1)
    for what in ("topk", TopK):
        with raises(InvalidTypeError, "compression", value=what):
            FederatedStrategy(compression=what)
