"""Tests of batch plans: batches of client groups as arrays, and the values on which random orders depend."""

import numpy as np
import pytest
import torch

from lightning_fcl.data import batching
from lightning_fcl.data.batching import BatchPlan, keyed_permutations, order_keys, plan_batches, plan_group_batches
from lightning_fcl.rng import make_client_keys, random_uint64


def by_hand(samples, epochs, batch_plan, generator, remembered=0):
    """Return the batches of one client, shuffled by a torch generator. This reference has one loop over the epochs."""
    plan = []
    for _ in range(epochs):
        parts = torch.randperm(samples, generator=generator).split(batch_plan.batch_size)
        if batch_plan.drop_last and len(parts) > 1 and len(parts[-1]) < batch_plan.batch_size:
            parts = parts[:-1]
        if remembered:
            extra = samples + torch.randperm(remembered, generator=generator)
            parts = [torch.cat(pair) for pair in zip(parts, extra.tensor_split(len(parts)), strict=True)]
        plan.extend(parts)
    return [part.tolist() for part in plan]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("remembered", [0, 1, 5, 23])
@pytest.mark.parametrize(("samples", "size", "epochs"), [(1, 4, 1), (8, 4, 2), (11, 4, 3), (3, 8, 2)])
def test_plan_batches_with_torch_orders_equals_reference(monkeypatch, samples, size, epochs, remembered, drop_last):
    generator = torch.Generator().manual_seed(0)
    monkeypatch.setattr(
        batching,
        "keyed_permutations",
        lambda keys, sizes, stream: torch.randperm(int(sizes[0]), generator=generator)[None].numpy(),
    )
    batch_plan = BatchPlan(size, drop_last=drop_last)
    plan = plan_batches(samples, epochs, batch_plan, order_keys(0, ["a"], 0), remembered)
    expected = by_hand(samples, epochs, batch_plan, torch.Generator().manual_seed(0), remembered)
    assert [rows.tolist() for rows in plan] == expected


@pytest.mark.parametrize("seed", range(20))
def test_batch_plan_does_not_depend_on_other_clients(seed):
    rng = np.random.default_rng(seed)
    clients = int(rng.integers(1, 7))
    sizes, epochs, extra = rng.integers(1, 20, clients), rng.integers(1, 4, clients), rng.integers(0, 15, clients)
    batching = BatchPlan(int(rng.integers(1, 8)), drop_last=bool(seed % 2))
    keys = order_keys(seed, [str(client) for client in range(clients)], round_idx=3)
    index, lengths = plan_group_batches(sizes, epochs, batching, keys, extra)
    for i in range(clients):
        alone = plan_batches(int(sizes[i]), int(epochs[i]), batching, order_keys(seed, [str(i)], 3), int(extra[i]))
        together = [row[:length] for row, length in zip(index[i], lengths[i], strict=True) if length]
        assert [rows.tolist() for rows in alone] == [rows.tolist() for rows in together]
        for epoch in np.array_split(np.arange(len(alone)), epochs[i]):
            seen = np.concatenate([alone[step] for step in epoch]).tolist()
            assert len(set(seen)) == len(seen) and set(range(sizes[i], sizes[i] + extra[i])) <= set(seen)
            assert batching.drop_last or len(seen) == sizes[i] + extra[i]


def test_keyed_permutations_depend_on_seed_client_round_and_stream():
    draw = {
        (seed, client, round_idx, stream): tuple(
            keyed_permutations(order_keys(seed, [client], round_idx), np.array([30]), stream)[0].tolist()
        )
        for seed in (0, 1)
        for client in ("a", "b")
        for round_idx in (0, 1)
        for stream in (0, 1)
    }
    assert len(set(draw.values())) == len(draw) == 16
    assert all(sorted(order) == list(range(30)) for order in draw.values())


def test_keyed_permutations_are_uniform():
    """Each sample is at each position equally often. Samples 0 and 1 occur in both orders equally often."""
    keys = make_client_keys(0, [str(client) for client in range(20000)])
    drawn = keyed_permutations(keys, np.full(len(keys), 5), stream=0)
    for place in range(5):
        counts = np.bincount(drawn[:, place], minlength=5)
        # Five standard deviations of a binomial distribution.
        assert (abs(counts - 4000) < 5 * 57).all()
    before = (drawn.argsort(axis=1)[:, 0] < drawn.argsort(axis=1)[:, 1]).sum()
    assert abs(before - 10000) < 5 * 71


def test_random_uint64_equals_splitmix64():
    """The expected values are the first numbers for seed 0 of the published reference implementation."""
    drawn = random_uint64(np.array([0], dtype=np.uint64), 3)[0].tolist()
    assert drawn == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_plan_group_batches_unequal_clients_are_padded():
    plan, lengths = plan_group_batches(
        np.array([5, 2]), np.array([1, 2]), BatchPlan(2, shuffle=False), make_client_keys(0, ["a", "b"])
    )
    assert plan.tolist() == [[[0, 1], [2, 3], [4, 0]], [[0, 1], [0, 1], [0, 0]]]
    assert lengths.tolist() == [[2, 2, 1], [2, 2, 0]]
