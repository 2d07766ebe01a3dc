"""Tests of FedCBDR: leverage scores over the samples of all clients, and the samples that clients store."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback

from lightning_fcl import FederatedStream
from lightning_fcl.callbacks import ContinualMetrics, FedCBDR
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.methods.context import Client, Step
from lightning_fcl.methods.selective_replay import leverage, pseudoinverse
from lightning_fcl.models import MLP

from .test_ccvr import still

pytestmark = pytest.mark.rounding


def wide(make_task, optimizer=still, seed=0):
    torch.manual_seed(seed)
    return make_task(optimizer, MLP([6, 16, 4]))


def orthogonal(size, generator):
    return torch.linalg.qr(torch.randn(size, size, generator=generator).double())[0]


@pytest.mark.parametrize("rank", [2, 5])
def test_leverage_of_rotated_clients_equals_pooled_leverage(rank):
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        clients = [torch.randn(n, rank, generator=generator).double() for n in (3, 8, 20)]
        root = torch.randn(rank, 5, generator=generator).double()
        clients = [rows @ root for rows in clients]
        left, values, _ = torch.linalg.svd(torch.cat(clients), full_matrices=False)
        # The scores of the paper, from the SVD of the pooled features.
        wanted = left[:, values > 1e-9].square().sum(dim=1)
        found = torch.cat(
            [leverage(rows, torch.linalg.pinv(sum(r.T @ r for r in clients), hermitian=True)) for rows in clients]
        )
        torch.testing.assert_close(found, wanted)
        assert float(found.sum()) == pytest.approx(rank)
        q = orthogonal(5, generator)
        turned = [orthogonal(len(rows), generator) @ rows @ q for rows in clients]
        gram = sum(rows.T @ rows for rows in turned)
        torch.testing.assert_close(
            torch.cat([leverage(rows @ q, torch.linalg.pinv(gram, hermitian=True)) for rows in clients]), wanted
        )


class Memories(Callback):
    """Records the samples that each client stores after each round."""

    def __init__(self):
        self.kept = []

    def on_round_end(self, trainer, pl_module):
        server = trainer.strategy.server
        self.kept.append(
            {client: dict(server.client_store.get_section(client, "FedCBDR")) for client in server.client_store}
        )
        self.gram = server.get_section("FedCBDR")["gram"].clone()


@pytest.mark.parametrize(("samples", "rank"), [(40, 12), (7, 7), (0, 0)])
def test_pseudoinverse_equals_numpy_pseudoinverse(samples, rank):
    x = np.random.default_rng(0).normal(size=(samples, 12))
    inverse, found_rank = pseudoinverse(torch.from_numpy(x.T @ x))
    np.testing.assert_allclose(inverse.numpy(), np.linalg.pinv(x) @ np.linalg.pinv(x).T, rtol=1e-10, atol=1e-12)
    assert found_rank == rank


def test_fedcbdr_clients_store_samples_by_leverage_share(fit, make_stream, make_task):
    task, memories = wide(make_task), Memories()
    stream = make_stream(partition="dirichlet", rounds_per_experience=2)
    fit(task, stream, [FedCBDR(memory_size=30), memories])
    assert not any("x" in memory for memory in memories.kept[0].values())
    for number, before in ((1, {}), (3, memories.kept[1])):
        own = {client: stream.get_samples(rows) for client, rows in stream.plan.train[number].items() if len(rows)}
        with torch.no_grad():
            features = {client: task.embed(x).double() for client, (x, _) in own.items()}
        stack = torch.cat([*features.values()])
        gram = stack.T @ stack
        rank = int(torch.linalg.matrix_rank(gram, hermitian=True))
        total = 0
        for client, (x, y) in own.items():
            memory, old = memories.kept[number][client], before.get(client, {})
            size = len(old.get("y", ()))
            assert set(memory) == {"x", "y"} and torch.equal(memory["x"][:size], old.get("x", x[:0]))
            new_x, new_y = memory["x"][size:], memory["y"][size:]
            share = min(
                round(30 * float(leverage(features[client], torch.linalg.pinv(gram, hermitian=True)).sum()) / rank),
                len(y),
            )
            assert len(new_x) == share
            places = (new_x[:, None] == x).all(dim=2).byte().argmax(dim=1)
            assert torch.equal(x[places], new_x) and torch.equal(y[places], new_y)
            assert len({*places.tolist()}) == len(places)
            total += share
        assert 25 <= total <= 33
    # The server has reset its Gram matrix at the end of the experience.
    assert not memories.gram.any()


@pytest.mark.seconds
def test_fedcbdr_rare_class_is_stored_more_often(fit, make_stream, make_task):
    """On average, the share of a rare class in the stored samples is over 1.5 times its share of the data."""
    ratios = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        y = torch.cat([torch.arange(180) % 3, torch.full((9,), 3)])
        x = 0.3 * torch.randn(len(y), 6, generator=generator) + 2 * torch.eye(6)[y]
        stream = FederatedStream.from_arrays(
            x, y, scenario=ClassIncremental(1), partition=IID(3), batch_size=8, seed=seed
        )
        memories = Memories()
        fit(wide(make_task, seed=seed), stream, [FedCBDR(memory_size=30), memories])
        kept = torch.cat([memory["y"] for memory in memories.kept[-1].values()])
        data = torch.cat([stream.get_samples(part)[1] for part in stream.plan.train[0].values()])
        ratios.append(float((kept == 3).float().mean()) / float((data == 3).float().mean()))
    assert sum(ratios) / len(ratios) > 1.5, ratios


def test_fedcbdr_replays_stored_samples_and_transmits_sums_only(fit, make_stream, make_task):
    counts, metrics = [], ContinualMetrics()

    class Counts(Callback):
        def on_client_end(self, trainer, pl_module, client_round):
            counts.append((client_round.round_idx, client_round.num_replay_samples))

    task = wide(make_task)
    fit(
        task,
        make_stream(rounds_per_experience=2),
        [FedCBDR(memory_size=30), Counts(), metrics],
        max_vectorized_clients=1,
    )
    assert all(rehearsed == 0 for number, rehearsed in counts if number < 2)
    assert 25 <= sum(rehearsed for number, rehearsed in counts if number == 2) <= 33
    rounds = metrics.record["rounds"]
    for kind in ("upload_bytes", "download_bytes"):
        first, second = (rounds[number][kind]["0"] for number in (0, 1))
        assert second - first == 8 * 16 * 16


def test_fedcbdr_loss_uses_temperatures_and_weights_by_class():
    generator, y = torch.Generator().manual_seed(0), torch.tensor([0, 3, 1, 2])
    z, w = torch.randn(4, 4, generator=generator).double(), torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    method = FedCBDR(20, old_temperature=0.5, new_temperature=2.0, old_weight=3.0, new_weight=0.25)
    client = Client(client_round=ClientRound("a", round_idx=2, num_classes=4, new_classes=(2, 3), old_classes=(0, 1)))
    client.method_state = method.prepare_client_state(client)
    step = Step({}, {}, z, z, lambda state, x: x, sample_weight=w, y=y)
    scaled = z * torch.tensor([2.0, 2.0, 0.5, 0.5])
    log_p = (scaled - scaled.logsumexp(dim=1, keepdim=True))[torch.arange(4), y]
    wanted = -(w * torch.tensor([3.0, 0.25, 3.0, 0.25]) * log_p).sum()
    torch.testing.assert_close(
        (w * F.cross_entropy(z, y, reduction="none")).sum() + method.penalty(client, step), wanted
    )
    assert FedCBDR(20).penalty(client, step) == 0.0


@pytest.mark.parametrize("max_vectorized_clients", [1, 3])
def test_fedcbdr_equal_weights_scale_learning_rate(fit, make_stream, make_task, assert_same, max_vectorized_clients):
    tasks = [wide(make_task, partial(torch.optim.SGD, lr=rate)) for rate in (0.1, 0.05)]
    for task, weight in zip(tasks, (1.0, 2.0), strict=True):
        method = FedCBDR(20, old_weight=weight, new_weight=weight)
        fit(task, make_stream(rounds_per_experience=2), [method], max_vectorized_clients=max_vectorized_clients)
    assert_same(*tasks, 1e-5)
