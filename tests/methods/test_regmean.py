"""Tests of RegMean and LoRM: layers merged by least squares on the outputs of the clients' layers."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from lightning_fcl.callbacks import ContinualMetrics, LoRM, RegMean
from lightning_fcl.methods.context import Server
from lightning_fcl.methods.layer_inputs import averaged_layers, layer_inputs, weight_matrix
from lightning_fcl.methods.regmean import gram_product, merge_regression, pack_gram
from lightning_fcl.models import MLP, LoRA

pytestmark = pytest.mark.rounding


class Uploads(Callback):
    """Records each client's layers and layer inputs after training, and the server's layers after each round."""

    def __init__(self):
        self.clients, self.server = [], []

    def on_train_epoch_start(self, trainer, pl_module):
        self.names = averaged_layers(pl_module)

    def on_client_end(self, trainer, pl_module, client_round):
        x, _ = trainer.datamodule.client_samples(client_round.client_id, client_round.round_idx, trainer.strategy.seed)
        state = {name: value.clone() for name, value in pl_module.state_dict().items()}
        rows = {name: [] for name in self.names}
        for name, part in layer_inputs(pl_module, self.names, state, x):
            rows[name].append(part)
        own = {name: (torch.cat(rows[name]), weight_matrix(state, name)) for name in self.names}
        self.clients.append((client_round.round_idx, own))

    def on_round_end(self, trainer, pl_module):
        self.server.append({name: value.clone() for name, value in pl_module.state_dict().items()})


def least_squares(parts):
    """Return the weight that best reproduces the outputs of several layers. Each layer has separate inputs."""
    rows = np.concatenate([rows.numpy() for rows, _ in parts])
    wanted = np.concatenate([(rows @ weight.T).numpy() for rows, weight in parts])
    return torch.from_numpy(np.linalg.lstsq(rows, wanted, rcond=None)[0].T)


def small_cnn():
    return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(6, 4))


def smooth():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))


@pytest.mark.parametrize("network", [smooth, small_cnn])
@pytest.mark.parametrize("max_vectorized_clients", [1, 3])
def test_regmean_layers_equal_least_squares(fit, make_stream, make_task, network, max_vectorized_clients):
    torch.manual_seed(0)
    task, uploads = make_task(model=network()), Uploads()
    stream = make_stream(partition="dirichlet", num_experiences=1, rounds_per_experience=2)
    fit(task, stream, [RegMean(), uploads], max_vectorized_clients=max_vectorized_clients, local_epochs=3)
    for number in (0, 1):
        for name in uploads.names:
            parts = [own[name] for at, own in uploads.clients if at == number]
            found = weight_matrix(uploads.server[number], name)
            torch.testing.assert_close(found, least_squares(parts), rtol=1e-4, atol=1e-5)
            plain = sum(len(rows) * weight for rows, weight in parts) / sum(len(rows) for rows, _ in parts)
            assert (found - plain).abs().max() > 1e-4


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("samples", [240, 8])
def test_regmean_one_client_equals_fedavg(fit, make_stream, make_task, assert_same, alpha, samples):
    """RegMean and FedAvg give equal weights up to rounding, even for a client with fewer samples than layer inputs."""
    tasks = [make_task(), make_task()]
    for task, methods in zip(tasks, ([RegMean(alpha)], []), strict=True):
        fit(task, make_stream(num_clients=1, samples=samples, num_experiences=1, batch_size=2), methods)
    assert_same(*tasks, 1e-6)


@pytest.mark.parametrize("diagonal", [False, True])
def test_merge_regression_equal_grams_is_mean_otherwise_least_squares(diagonal):
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        x = [torch.randn(30, 6, generator=generator).double() for _ in range(3)]
        weights = [torch.randn(4, 6, generator=generator).double() for _ in range(3)]
        grams = [rows.square().sum(0) if diagonal else rows.T @ rows for rows in x]
        mean = sum(weights) / 3
        same = merge_regression(mean, sum(gram_product(weight, grams[0]) for weight in weights), 3 * grams[0])
        torch.testing.assert_close(same, mean)
        found = merge_regression(mean, sum(map(gram_product, weights, grams)), sum(grams))
        wanted = (
            sum(map(gram_product, weights, grams)) / sum(grams)
            if diagonal
            else least_squares([*zip(x, weights, strict=True)])
        )
        torch.testing.assert_close(found, wanted)


def test_merge_regression_directions_without_inputs_keep_mean():
    generator = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(6, 6, generator=generator).double())
    x = [torch.randn(30, 2, generator=generator).double() @ basis[:, :2].T for _ in range(2)]
    weights = [torch.randn(4, 6, generator=generator).double() for _ in range(2)]
    mean = sum(weights) / 2
    found = merge_regression(mean, sum(w @ r.T @ r for w, r in zip(weights, x, strict=True)), sum(r.T @ r for r in x))
    torch.testing.assert_close(found @ basis[:, 2:], mean @ basis[:, 2:])
    wanted = least_squares([*zip(x, weights, strict=True)])
    torch.testing.assert_close(found @ basis[:, :2], wanted @ basis[:, :2])


def test_regmean_alpha_zero_uploads_only_diagonal(fit, make_stream, make_task):
    sent = []
    for methods in ([], [RegMean(0.0)], [RegMean(1.0)]):
        metrics = ContinualMetrics()
        fit(make_task(), make_stream(num_experiences=1), [*methods, metrics])
        sent.append(metrics.record["rounds"][0]["upload_bytes"]["0"])
    layers = [(5, 7), (4, 6)]
    assert sent[1] - sent[0] == 8 * sum(outputs * size + size for outputs, size in layers)
    assert sent[2] - sent[0] == 8 * sum(outputs * size + size * (size + 1) // 2 for outputs, size in layers)


def lora(make_task, seed=0, rank=2):
    torch.manual_seed(0)
    return make_task(model=LoRA(MLP([6, 16, 4]), rank=rank, head="3.*"))


def scaled_gram(rows, alpha):
    """Return X^T X with its off-diagonal values multiplied by alpha."""
    gram = rows.T @ rows
    return alpha * gram + (1 - alpha) * torch.diag(gram.diagonal())


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("rank", [1, 4])
def test_lorm_factors_alternate_and_equal_closed_form(fit, make_stream, make_task, alpha, rank):
    task, uploads = lora(make_task, rank=rank), Uploads()
    initial_a = task.model.net[1].a.weight.detach().double().clone()
    stream = make_stream(partition="dirichlet", num_experiences=1, rounds_per_experience=3)
    fit(task, stream, [LoRM(alpha), uploads], local_epochs=3)
    a, b = "model.net.1.a", "model.net.1.b"
    first, second = ([own for at, own in uploads.clients if at == number] for number in (0, 1))
    grams = [scaled_gram(own[a][0], alpha) for own in first]
    weighted = sum(own[b][1] @ initial_a @ gram @ initial_a.T for own, gram in zip(first, grams, strict=True))
    expected_b = weighted @ torch.linalg.inv(initial_a @ sum(grams) @ initial_a.T)
    after = uploads.server[0]
    torch.testing.assert_close(after[f"{b}.weight"].double(), expected_b, rtol=1e-4, atol=1e-5)
    assert torch.equal(after[f"{a}.weight"].double(), initial_a)
    grams = [scaled_gram(own[a][0], alpha) for own in second]
    weighted = sum(own[a][1] @ gram for own, gram in zip(second, grams, strict=True))
    expected_a = weighted @ torch.linalg.inv(sum(grams))
    torch.testing.assert_close(uploads.server[1][f"{a}.weight"].double(), expected_a, rtol=1e-4, atol=1e-5)
    assert torch.equal(uploads.server[1][f"{b}.weight"], after[f"{b}.weight"])
    assert not torch.equal(uploads.server[1][f"{a}.weight"].double(), initial_a)


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("rank", [1, 4])
def test_lorm_factor_b_satisfies_normal_equations_in_any_basis(make_task, alpha, rank):
    """The sum of ``(B - B_k) A G_k A^T`` is 0, and B A does not depend on the basis of the factors' inner dimension.

    Three clients have different numbers of samples, and the inputs are correlated.
    """
    draws = torch.Generator().manual_seed(rank)
    task, method = lora(make_task, rank=rank).double(), LoRM(alpha)
    mixing = torch.randn(6, 6, generator=draws).double()
    samples = [torch.randn(count, 6, generator=draws).double() @ mixing for count in (7, 20, 60)]
    a = torch.randn(rank, 6, generator=draws).double()
    factors = [torch.randn(16, rank, generator=draws).double() for _ in samples]
    basis = torch.randn(rank, rank, generator=draws).double() + 2 * torch.eye(rank).double()

    def merge(a, factors):
        state, name = dict(task.state_dict()), "model.net.1"
        grams, products = [], []
        for x, factor in zip(samples, factors, strict=True):
            state |= {f"{name}.a.weight": a, f"{name}.b.weight": factor}
            grams.append(method._grams(task, [f"{name}.b"], state, x)[f"{name}.b"])
            products.append(gram_product(factor, grams[-1]))
        return merge_regression(sum(factors) / len(factors), sum(products), sum(grams))

    b = merge(a, factors)
    rest = sum((b - factor) @ a @ scaled_gram(x, alpha) @ a.T for x, factor in zip(samples, factors, strict=True))
    torch.testing.assert_close(
        rest, torch.zeros_like(rest), rtol=0, atol=1e-8 * float(scaled_gram(samples[2], 1).norm())
    )
    other = merge(basis @ a, [factor @ torch.linalg.inv(basis) for factor in factors])
    torch.testing.assert_close(other @ basis @ a, b @ a, rtol=1e-8, atol=1e-8)


def test_lorm_factor_b_uploads_triangle_of_rank(fit, make_stream, make_task):
    """In a round of factor B, a layer's Gram matrix has ``rank * (rank + 1) / 2`` numbers, for any ``alpha``."""
    sent = []
    for alpha in (0.0, 1.0):
        metrics = ContinualMetrics()
        fit(lora(make_task, rank=4), make_stream(num_experiences=1, rounds_per_experience=3), [LoRM(alpha), metrics])
        sent.append([entry["upload_bytes"]["0"] for entry in metrics.record["rounds"]])
    head = 17 * 18 // 2 - 17
    # The rounds of B differ only in the statistics of the head. The round of A also has the layer's d x d matrix, as
    # has the last round of the task, for the merge with earlier tasks.
    assert [full - diagonal for diagonal, full in zip(*sent, strict=True)] == [
        8 * head,
        8 * (head + 15),
        8 * (head + 15),
    ]


def whole(state, scale=1 / 2):
    """Return a layer's weight plus the scaled product of the adapter's matrices."""
    body, a, b = (state[f"model.net.1.{part}.weight"].double() for part in ("layer", "a", "b"))
    return body + scale * b @ a


class Merging(LoRM):
    """LoRM that records the server's layer, with the adapter, before the layer is merged with earlier layers."""

    def process_aggregate(self, server):
        alone = RegMean.process_aggregate(self, dataclasses.replace(server, server_state=dict(server.server_state)))
        self.layers = [*vars(self).get("layers", []), whole({**server.state, **alone})]
        return super().process_aggregate(server)


@pytest.mark.parametrize("rounds", [1, 2])
def test_lorm_experiences_are_merged_by_least_squares(fit, make_stream, make_task, rounds):
    task, uploads, method = lora(make_task), Uploads(), Merging(1.0)
    stream = make_stream(partition="dirichlet", num_experiences=2, rounds_per_experience=rounds)
    fit(task, stream, [method, uploads], local_epochs=3)
    ends, parts = [rounds - 1, 2 * rounds - 1], []
    for number in ends:
        rows = torch.cat([own["model.net.1.a"][0] for at, own in uploads.clients if at == number])
        parts.append((rows, method.layers[number]))
        state = uploads.server[number]
        found = state["model.net.1.layer.weight"].double()
        torch.testing.assert_close(found, least_squares(parts), rtol=1e-4, atol=1e-5)
        assert not state["model.net.1.b.weight"].any()
    torch.testing.assert_close(uploads.server[ends[0]]["model.net.1.layer.weight"].double(), parts[0][1])
    # The merged layer differs from the layer of the second experience.
    assert (found - parts[1][1]).abs().max() > 1e-3


@pytest.mark.parametrize("alpha", [1.0, 0.0])
def test_lorm_equal_grams_gives_mean_of_layers(make_task, alpha):
    task, method, draws = lora(make_task), LoRM(alpha), torch.Generator().manual_seed(0)
    state, name = {n: v.clone() for n, v in task.state_dict().items()}, "model.net.1"
    rows = torch.randn(30, 6, generator=draws).double()
    gram = pack_gram(scaled_gram(rows, alpha) if alpha else rows.square().sum(dim=0))
    kept = {f"tasks.gram.{name}": 0 * gram, f"tasks.answers.{name}": torch.zeros(16, 6).double(), "turn": torch.ones(1)}
    layers = []
    for _ in range(3):
        for part in ("a", "b"):
            state[f"{name}.{part}.weight"].normal_(generator=draws)
        layers.append(whole(state))
        kept[f"task.{name}"] = gram
        state |= method.process_aggregate(Server({}, state, kept, 1.0, task, draws))
        torch.testing.assert_close(state[f"{name}.layer.weight"].double(), sum(layers) / len(layers))
        assert not state[f"{name}.b.weight"].any() and not kept[f"task.{name}"].any() and kept["turn"] == 0


def test_lorm_every_experience_starts_with_factor_b(fit, make_stream, make_task):
    task, uploads = lora(make_task), Uploads()
    fit(task, make_stream(rounds_per_experience=3), [LoRM(0.0), uploads])
    states = [state["model.net.1.a.weight"] for state in uploads.server]
    assert [torch.equal(*pair) for pair in itertools.pairwise(states)] == [False, True, True, False, True]


@pytest.mark.seconds
def test_lorm_resumed_fit_equals_uninterrupted_fit(assert_resumes, make_task):
    assert_resumes(lambda seed=0: lora(make_task), lambda: LoRM(0.5))


def test_merge_regression_single_precision_ignores_rounding_errors():
    """In directions without inputs, merging gives the mean weight, even if the Gram matrix has rounding errors."""
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        inputs = [torch.randn(8, 100, generator=generator) for _ in range(3)]
        weights = [torch.randn(4, 100, generator=generator) for _ in range(3)]
        grams, mean = [x.T @ x for x in inputs], sum(weights) / 3
        found = merge_regression(mean, sum(map(gram_product, weights, grams)), sum(grams))
        _, _, directions = torch.linalg.svd(torch.cat(inputs))
        nowhere = directions[24:].T
        torch.testing.assert_close(found @ nowhere, mean @ nowhere, rtol=0, atol=1e-3)
