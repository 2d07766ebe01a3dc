"""Tests of the analytic methods of `RidgeClassifier`: the server's solution equals the paper's solution in NumPy."""

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from raising import raises

from lightning_fcl import FederatedStream, RidgeClassifier
from lightning_fcl.callbacks import Unlearning
from lightning_fcl.data.partition import IID, Dirichlet, Shards
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.swarm import Swarm
from lightning_fcl.models import MLP
from lightning_fcl.models.ridge import GroupMoments, accumulate_groups

pytestmark = pytest.mark.rounding

FEATURES, CLASSES = 6, 20


def arrays(samples=1200, classes=CLASSES, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(samples) % classes)
    return (rng.normal(size=(samples, FEATURES)) + rng.normal(size=(classes, FEATURES))[y]).astype(np.float32), y


def streamed(data, clients=5, experiences=1, **options):
    options = {"partition": IID(clients), "split": Split(test=0.0), "batch_size": 16, "seed": 0, **options}
    scenario = ClassIncremental(experiences, rounds_per_experience=options.pop("rounds", 1))
    return FederatedStream.from_arrays(*data, scenario=scenario, **options)


def ridge(classes=CLASSES, **options):
    """Return a task whose network returns its inputs as features."""
    torch.manual_seed(0)
    return RidgeClassifier(MLP([FEATURES, classes]), classes, **{"beta": 0.5, "min_samples": 0, **options})


def seen(task, x):
    """Return the inputs of the readout, in NumPy."""
    x = np.asarray(x, dtype=np.float64)
    if task.random_features is not None:
        x = np.maximum(x @ task.random_features.weight.numpy(), 0)
    return np.hstack([x, np.ones((len(x), 1))]) if task.bias else x


def solution(task, x, y, beta=0.5, b=None):
    """Return the ridge solution for the readout inputs S of the samples, in NumPy. If given, ``b`` replaces S^T S."""
    states, targets = seen(task, x), np.eye(task.num_classes)[np.asarray(y)]
    b = states.T @ states if b is None else b
    return np.linalg.solve(b + beta * np.eye(len(b)), states.T @ targets).T


def assert_near(found, expected, tolerance=1e-9):
    expected = np.asarray(expected)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=tolerance * np.abs(expected).max())


KINDS = {
    "AFL": {"gamma": 1.0},
    "RanPAC": {"random_features": 15, "seed": 3},
    "bias": {"bias": True},
    "all": {"gamma": 2.0, "random_features": 15, "bias": True},
    "square": {"gamma": 2.0, "random_features": 15, "bias": True, "symmetric": False},
}
FULL_RANK = {"rank": 16, "random_features": 15, "bias": True}


@pytest.mark.parametrize("kind", [*KINDS, "full rank"])
@pytest.mark.parametrize(
    ("partition", "experiences"), [(IID(1), 1), (IID(50), 1), (Dirichlet(50, 0.1), 10), (Shards(5, 2), 2)]
)
def test_ridge_any_partition_equals_pooled_solution(fit, kind, partition, experiences):
    data, task = arrays(), ridge(**KINDS.get(kind, FULL_RANK))
    fit(task, streamed(data, experiences=experiences, partition=partition))
    assert_near(task.readout.weight, solution(task, *data))
    assert int(task.readout.n) == len(data[1])
    with torch.no_grad():
        assert_near(task(torch.from_numpy(data[0])), seen(task, data[0]) @ solution(task, *data).T, 1e-5)
        assert_near(task.to_network()(torch.from_numpy(data[0])), seen(task, data[0]) @ solution(task, *data).T)


def law(first, second):
    """Return weights W and matrix C, combined from two clients by the absolute aggregation law of He et al. (2025)."""
    (w, c), (v, d) = first, second
    r, q = np.linalg.inv(c), np.linalg.inv(d)
    joint, one = np.linalg.inv(c + d), np.eye(len(c))
    return (one - r @ d + r @ d @ joint @ d) @ w + (one - q @ c + q @ c @ joint @ c) @ v, c + d


class Weights(L.Callback):
    """Records the readout's weights after each round."""

    def __init__(self):
        self.after = []

    def on_round_end(self, trainer, module):
        self.after.append(module.readout.weight.clone())


class Watched(L.Callback):
    """Records a tensor of each client's state after the client's latest training."""

    def __init__(self, entry):
        self.entry, self.own = entry, {}

    def on_client_end(self, trainer, module, part):
        self.own[part.client_id] = module.state_dict()[self.entry].clone()


@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
@pytest.mark.parametrize("seed", range(3))
def test_afl_equals_aggregation_law_without_regularization(fit, seed, max_vectorized_clients):
    data, task, watched = arrays(seed=seed), ridge(gamma=0.3, beta=0.5), Watched("readout.weight")
    stream = streamed(data, clients=50)
    fit(task, stream, [watched], max_vectorized_clients=max_vectorized_clients)
    uploads = []
    for client, rows in stream.plan.train[0].items():
        x, y = stream.get_samples(rows)
        own = solution(task, x, y, beta=0.3)
        assert_near(watched.own[client], own)
        uploads.append((own.T, x.double().numpy().T @ x.double().numpy() + 0.3 * np.eye(FEATURES)))
    order = np.random.default_rng(seed).permutation(50)
    together = uploads[order[0]]
    for number in order[1:]:
        together = law(together, uploads[number])
    w, c = together
    clean = np.linalg.solve(c - 50 * 0.3 * np.eye(FEATURES) + 0.5 * np.eye(FEATURES), c @ w)
    assert_near(task.readout.weight, clean.T)
    # The solution is different if the regularization stays in C.
    kept = np.linalg.solve(c + 0.5 * np.eye(FEATURES), c @ w)
    assert np.abs(kept - clean).max() > 1e-3 * np.abs(clean).max()


def test_random_features_depend_on_seed_only():
    one, same, other = (ridge(random_features=500, seed=seed).random_features.weight for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert one.shape == (FEATURES, 500) and abs(float(one.mean())) < 0.1 and abs(float(one.std()) - 1) < 0.1
    task = ridge(random_features=500).to(torch.bfloat16)
    assert torch.equal(task.random_features.weight, ridge(random_features=500).random_features.weight)


@pytest.mark.parametrize("options", [{}, {"rank": 12}])
def test_ridge_several_betas_selects_best_on_validation(fit, options):
    betas = [1e-6, 1e-2, 1.0, 1e2, 1e6]
    task = ridge(beta=betas, random_features=30, **options)
    stream = streamed(arrays(), split=Split(test=0.0, validation=0.2))
    fit(task, stream)
    states, y = (torch.cat(part) for part in zip(*stream.val_dataloader(), strict=True))
    states = torch.from_numpy(seen(task, states))
    right = [int((((states @ w.T).argmax(dim=1)) == y).sum()) for w in task.readout.solve_path(betas)]
    assert task.readout.beta == betas[int(np.argmax(right))] and len({*right}) > 1
    torch.testing.assert_close(task.readout.weight, task.readout.solve_path([task.readout.beta])[0], rtol=0, atol=1e-9)


# Tests of `rank`.


def leading_vectors(rows, rank):
    """Return the leading right singular vectors and the squares of their singular values."""
    _, sizes, vectors = np.linalg.svd(rows, full_matrices=False)
    return vectors[:rank].T, sizes[:rank] ** 2


@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
@pytest.mark.parametrize("batch_size", [4, 100])
def test_low_rank_solution_is_in_space_of_leading_vectors(fit, max_vectorized_clients, batch_size):
    """Each client has eight samples, so a rank of 9 truncates no row. The rows of a client's B are orthogonal."""
    data, task, watched = arrays(samples=40, classes=4), ridge(4, rank=9, random_features=20), Watched("readout.B")
    fit(
        task, streamed(data, clients=5, batch_size=batch_size), [watched], max_vectorized_clients=max_vectorized_clients
    )
    for rows in watched.own.values():
        products = (rows @ rows.T).numpy()
        assert_near(products, np.diag(products.diagonal()))
    states, targets = seen(task, data[0]), np.eye(4)[data[1]]
    vectors, squares = leading_vectors(states, 9)
    assert_near(task.readout.weight, (vectors / (squares + 0.5) @ vectors.T @ (states.T @ targets)).T)
    assert_near(task.readout.A, targets.T @ states)
    # This solution is not projected to the space of the leading vectors.
    whole = (np.linalg.inv(vectors * squares @ vectors.T + 0.5 * np.eye(20)) @ states.T @ targets).T
    assert np.abs(whole - task.readout.weight.numpy()).max() > 0.1 * np.abs(whole).max()


def test_low_rank_uploads_less_and_loses_truncated_rows(fit):
    data, task = arrays(samples=200, classes=4), ridge(4, rank=9, random_features=20)
    stream = streamed(data, clients=2)
    trainer = fit(task, stream)
    cut = []
    for rows in stream.plan.train[0].values():
        vectors, squares = leading_vectors(seen(task, stream.get_samples(rows)[0]), 9)
        cut.append(np.sqrt(squares)[:, None] * vectors.T)
    vectors, squares = leading_vectors(np.vstack(cut), 9)
    b = task.readout.B.numpy()
    assert_near(b.T @ b, vectors * squares @ vectors.T)
    assert {*trainer.strategy.server.record.upload_bytes.values()} == {8 * (9 * 20 + 4 * 20 + 1)}


# Tests of moments.


def test_moments_groups_of_one_sample_equal_pooled_solution(fit):
    data, task = arrays(samples=60, classes=4), ridge(4, upload="moments", groups=12, random_features=20, bias=True)
    fit(task, streamed(data, clients=5, experiences=2))
    assert_near(task.readout.weight, solution(task, *data))
    assert int(task.readout.n) == 60 and not task.moments.sums.any()


@pytest.mark.parametrize("symmetric", [True, False])
def test_moments_equal_estimate_of_the_paper(fit, symmetric):
    """The expected value is the formula of the paper, over the groups that have samples of a class."""
    data, task = arrays(samples=300, classes=4), ridge(4, upload="moments", groups=3, symmetric=symmetric)
    stream, sent = streamed(data, clients=4, experiences=2, batch_size=7), []

    class Moments(L.Callback):
        def on_client_end(self, trainer, module, part):
            sent.append((part.round_idx, module.moments.sums.numpy().copy(), module.moments.counts.numpy().copy()))

    trainer = fit(task, stream, [Moments()])
    b = np.zeros((FEATURES, FEATURES))
    for round_idx in range(2):
        sums = np.concatenate([s for number, s, _ in sent if number == round_idx])
        counts = np.concatenate([n for number, _, n in sent if number == round_idx])
        assert counts.sum() == sum(map(len, stream.plan.train[round_idx].values()))
        for c in range(4):
            n, k = counts[:, c].sum(), (counts[:, c] > 0).sum()
            if n == 0:
                continue
            a, less = (n - 1) / (k - 1), (n - k) / ((k - 1) * n)
            for s, number in zip(sums[:, c], counts[:, c], strict=True):
                b += a * np.outer(s, s) / number if number else 0
            b -= less * np.outer(sums[:, c].sum(axis=0), sums[:, c].sum(axis=0))
    assert_near(task.readout.weight, solution(task, *data, b=b))
    states = seen(task, data[0])
    assert_near(task.readout.A, np.eye(4)[data[1]].T @ states)
    exact = states.T @ states
    assert 1e-3 < np.linalg.norm(b - exact) / np.linalg.norm(exact) < 0.3
    dense = 8 * 3 * 4 * (FEATURES + 1) + 8 * 4 * FEATURES
    # Classes of the other task have no samples. Each element of these classes is 0 and takes one bit.
    assert max(trainer.strategy.server.record.upload_bytes.values()) < dense


def test_moments_estimate_is_unbiased():
    """The mean of the estimates over random groupings is correct, also if a group has no sample of a class."""
    rng = np.random.default_rng(0)
    states = torch.from_numpy(rng.normal(size=(40, 5)) + 1)
    classes = torch.tensor([0] * 33 + [1] * 7)
    targets, estimates = torch.nn.functional.one_hot(classes), []
    for _ in range(1000):
        moments, order = GroupMoments(8, 2, 5), rng.permutation(40)
        accumulate_groups(moments.sums, moments.counts, states[order], targets[order])
        estimates.append(moments.second_moments())
    found = torch.stack(estimates)
    error = found.std(dim=0) / 1000**0.5
    assert ((found.mean(dim=0) - states.T @ states).abs() < 5 * error).all()
    assert (found[0] - states.T @ states).abs().max() > 1


# Tests of clients and classes that are missing in some rounds.


@pytest.mark.parametrize("kind", [*KINDS, "full rank"])
def test_ridge_weights_of_unseen_classes_are_zero(fit, kind):
    task, weights, stream = ridge(**KINDS.get(kind, FULL_RANK)), Weights(), streamed(arrays(), experiences=4)
    fit(task, stream, [weights])
    done = []
    for number, weight in enumerate(weights.after):
        done += [rows for rows in stream.plan.train[number].values()]
        x, y = stream.get_samples(np.concatenate(done))
        unseen = np.setdiff1d(np.arange(CLASSES), y)
        assert len(unseen) == 15 - 5 * number and not weight[unseen].any()
        assert_near(weight, solution(task, x, y))


class Absent(L.Callback):
    """Removes the data of clients in some rounds."""

    def __init__(self, rounds):
        self.rounds = rounds

    def on_fit_start(self, trainer, pl_module):
        for client, rounds in self.rounds.items():
            for round_idx in rounds:
                trainer.datamodule.plan.train[round_idx].pop(client, None)


@pytest.mark.seconds
@pytest.mark.parametrize("kind", KINDS)
def test_unlearning_of_one_client_equals_fit_without_it(fit, kind):
    data, tasks, weights = arrays(samples=2000), [ridge(**KINDS[kind]), ridge(**KINDS[kind])], [Weights(), Weights()]
    methods = Unlearning({"7": 6}), Absent({"7": range(10)})
    for task, method, watch in zip(tasks, methods, weights, strict=True):
        fit(task, streamed(data, clients=50, experiences=10), [method, watch])
    for round_idx, (forgotten, never) in enumerate(zip(*(watch.after for watch in weights), strict=True)):
        same = bool((forgotten - never).abs().max() < 1e-9 * never.abs().max())
        assert same == (round_idx >= 6), round_idx
    assert int(tasks[0].readout.n) == int(tasks[1].readout.n) < 2000


@pytest.mark.parametrize("kind", [*KINDS, "full rank", "one sample a group"])
def test_ridge_late_and_missing_clients_count_once(fit, kind):
    """Clients 1 and 2 miss rounds and upload their data later. Client 3 has no data at first, and client 4 leaves."""
    options = {**KINDS, "one sample a group": {"upload": "moments", "groups": 1200}}.get(kind, FULL_RANK)
    data, task = arrays(), ridge(**options)
    stream = streamed(data, experiences=5)
    swarm = Swarm(missed_rounds={"1": [0, 1, 3], "2": [1]}, leaves_at={"4": 3})
    absent = Absent({"3": [0, 1], "4": [3, 4]})
    fit(task, stream, [absent], swarm=swarm)
    used = [rows for current in stream.plan.train for rows in current.values()]
    assert_near(task.readout.weight, solution(task, *stream.get_samples(np.concatenate(used))))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", [1, 2, 3])
def test_unlearning_after_missed_sync_removes_pending_upload(fit, kind, after):
    """Data that client 1 has not uploaded after the missed synchronization are removed with client 1."""
    weights = []
    for method in (Unlearning({"1": after}), Absent({"1": range(4)})):
        task = ridge(**KINDS[kind])
        swarm = Swarm(missed_rounds={"1": [1]} if isinstance(method, Unlearning) else {})
        fit(task, streamed(arrays(), experiences=4), [method], swarm=swarm)
        weights.append(task.readout.weight)
    assert_near(*weights)


@pytest.mark.parametrize(
    "options",
    [
        {"upload": "weights"},
        {"upload": "moments"},
        {"rank": 3},
    ],
)
def test_unlearning_unsupported_upload_raises(fit, options):
    with raises(InvalidValueError, "module", value="RidgeClassifier"):
        fit(ridge(**options), streamed(arrays()), [Unlearning({"1": 0})])


@pytest.mark.parametrize("options", [*KINDS.values(), FULL_RANK, {"rank": 3}, {"upload": "moments"}])
def test_ridge_resumed_fit_is_bitwise_identical(fit, options, tmp_path):
    data, whole, cut, again = arrays(), *(ridge(**options) for _ in range(3))
    fit(whole, streamed(data, experiences=4))
    fit(cut, streamed(data, experiences=4), max_epochs=2).save_checkpoint(tmp_path / "two.ckpt")
    fit(again, streamed(data, experiences=4), ckpt_path=tmp_path / "two.ckpt")
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in again.state_dict().items())
    loaded = RidgeClassifier.load_from_checkpoint(tmp_path / "two.ckpt")
    assert all(torch.equal(value, cut.state_dict()[name]) for name, value in loaded.state_dict().items())


@pytest.mark.parametrize("options", [*KINDS.values(), FULL_RANK])
def test_ridge_in_plain_trainer_equals_solution(quiet, options):
    (x, y), task = arrays(), ridge(**options)
    data = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    L.Trainer(max_epochs=2, **quiet).fit(task, torch.utils.data.DataLoader(data, batch_size=100))
    assert_near(task.readout.weight, solution(task, x, y))


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"upload": "sums"}, "upload"),
        ({"rank": 3, "gamma": 1.0}, "rank"),
        ({"rank": 3, "upload": "moments"}, "rank"),
        ({"gamma": 1.0, "upload": "weights"}, "rank"),
        ({"rank": 7}, "rank"),
        ({"gamma": -1.0}, "gamma"),
        ({"random_features": 0}, "out_features"),
        ({"upload": "moments", "groups": 0}, "groups"),
    ],
)  # fmt: skip
def test_ridge_invalid_arguments_raise(options, argument):
    with raises(InvalidValueError, argument):
        ridge(**options)


@pytest.mark.parametrize(
    "options", [*KINDS.values(), FULL_RANK, {"rank": 3}, {"upload": "moments"}, {"upload": "weights"}]
)
def test_ridge_client_with_non_finite_features_is_dropped(fit, options):
    class Overflows(torch.nn.Module):
        features = FEATURES

        def embed(self, x):
            return x.where(x.abs() < 100, torch.nan)

    (x, y), owner, weights = arrays(), np.arange(1200) % 5, []
    x[owner == 0] *= 1000
    for first in (0, 1):
        task, rows = RidgeClassifier(Overflows(), CLASSES, **{"beta": 0.5, **options}), owner >= first
        stream = streamed((x[rows], y[rows]), client_ids=owner[rows], partition=None)
        dropped = fit(task, stream).strategy.server.record.dropped
        assert list(dropped) == ["0"] * (first == 0)
        weights.append(task.readout.weight)
    assert_near(*weights)
