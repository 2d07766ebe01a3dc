"""Tests of APFL: the shared model equals FedAvg's model. The personal model and its weight follow the paper."""

import copy

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_fcl import Classifier
from lightning_fcl.callbacks import APFL, ContinualMetrics, Ditto
from lightning_fcl.data.batching import BatchPlan, order_keys, plan_batches
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.methods.context import Client
from lightning_fcl.methods.personalization import interpolate

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.5),
}


class Rounds(Callback):
    """Records the server's state after each round."""

    def __init__(self):
        self.states = []

    def on_round_end(self, trainer, module):
        self.states.append({name: value.detach().clone() for name, value in module.state_dict().items()})


def memory_of(trainer, client):
    return trainer.strategy.server.client_store[client]["APFL"]


def personal_model(memory):
    return {name[2:]: value for name, value in memory.items() if name.startswith("v.")}


def noisy(seed=0):
    """Return a network with dropout and batch normalization."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4))


@pytest.mark.seconds
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", [lambda: APFL(0.0), lambda: APFL(0.5), lambda: Ditto(0.5)])
def test_apfl_and_ditto_shared_model_bitwise_equals_fedavg(fit, make_stream, optimizer, method):
    options = {
        "max_vectorized_clients": 1,
        "participation": 2,
        "reductions": {"model.4.bias": "local"},
        "local_epochs": 2,
    }
    runs = []
    for methods in ([], [method()]):
        task, rounds, metrics = Classifier(noisy(), 4, OPTIMIZERS[optimizer]), Rounds(), ContinualMetrics()
        stream = make_stream(rounds_per_experience=2, drop_last=True)
        trainer = fit(task, stream, [*methods, rounds, metrics], seed=0, **options)
        heads = {client: trainer.strategy.server.client_store[client]["model"] for client in "012"}
        sent = [entry["upload_bytes"] for entry in metrics.record["rounds"]]
        runs.append([*rounds.states, *heads.values(), sent])
    for left, right in zip(*runs, strict=True):
        assert left == right if isinstance(left, list) else all(torch.equal(left[n], right[n]) for n in left)


def by_hand(task, stream, alpha0, alpha_lr, keep=False, strength=0.0):
    """Train the shared model w and personal models v by the paper's Algorithm 1.

    With ``alpha0=1``, ``alpha_lr=0`` and a ``strength`` above 0, the personal models are those of Ditto.
    Return w, the dict of v by client, and the dict of the weights alpha by client.
    """
    w = copy.deepcopy(task)
    v, alpha = {c: copy.deepcopy(task) for c in stream.plan.clients}, dict.fromkeys(stream.plan.clients, alpha0)
    kept = {client: v[client].configure_optimizers() for client in v}
    for round_idx, current in enumerate(stream.plan.train):
        uploads = []
        for client, rows in current.items():
            local, own = copy.deepcopy(w), v[client]
            optimizer = local.configure_optimizers()
            personal = kept[client] if keep else own.configure_optimizers()
            x, y = stream.get_samples(rows)
            for indices in plan_batches(
                len(y), 1, BatchPlan(stream.batch_size, stream.shuffle), order_keys(0, [client], round_idx)
            ):
                a, mixed = alpha[client], copy.deepcopy(local)
                for p, q, r in zip(mixed.parameters(), own.parameters(), local.parameters(), strict=True):
                    p.data = a * q.data + (1 - a) * r.data
                gradients = torch.autograd.grad(cross_entropy(mixed(x[indices]), y[indices]), list(mixed.parameters()))
                pairs = zip(own.parameters(), local.parameters(), strict=True)
                slope = sum(float(((q - p).detach() * g).sum()) for (q, p), g in zip(pairs, gradients, strict=True))
                alpha[client] = min(max(a - alpha_lr * slope, 0.0), 1.0)
                for q, g, start in zip(own.parameters(), gradients, w.parameters(), strict=True):
                    q.grad = a * g + strength * (q - start).detach()
                personal.step()
                optimizer.zero_grad()
                cross_entropy(local(x[indices]), y[indices]).backward()
                optimizer.step()
            uploads.append((len(y), local.state_dict()))
        total = sum(n for n, _ in uploads)
        w.load_state_dict({name: sum(n * state[name] for n, state in uploads) / total for name in w.state_dict()})
    return w, v, alpha


@pytest.mark.seconds
@pytest.mark.parametrize(("optimizer", "alpha_lr"), [("sgd", None), ("sgd", 0.7), ("momentum", 0.3), ("adamw", 0.5)])
def test_apfl_equals_hand_written_algorithm(fit, make_stream, make_task, optimizer, alpha_lr):
    stream, task = make_stream(rounds_per_experience=2), make_task(OPTIMIZERS[optimizer])
    stream.setup("fit")
    w, v, alpha = by_hand(task, stream, 0.4, 0.1 if alpha_lr is None else alpha_lr)
    trainer = fit(task, stream, [APFL(0.4, alpha_lr)], seed=0)
    torch.testing.assert_close(dict(task.state_dict()), dict(w.state_dict()), rtol=0, atol=1e-5)
    for client, own in v.items():
        ours = memory_of(trainer, client)
        torch.testing.assert_close(personal_model(ours), dict(own.state_dict()), rtol=0, atol=2e-5)
        assert float(ours["alpha"]) == pytest.approx(alpha[client], abs=1e-5)
        assert abs(alpha[client] - 0.4) > 1e-3


@pytest.mark.seconds
def test_apfl_personal_optimizer_state_follows_keep_optimizer_state(fit, make_stream, make_task):
    stream, task = make_stream(rounds_per_experience=2), make_task(OPTIMIZERS["momentum"])
    stream.setup("fit")
    fresh, kept = (by_hand(task, stream, 1.0, 0.0, keep)[1]["0"].state_dict() for keep in (False, True))
    for keep, expected in ((False, fresh), (True, kept)):
        trainer = fit(copy.deepcopy(task), make_stream(rounds_per_experience=2), [APFL(1.0, 0.0)],
                      seed=0, keep_optimizer_state=keep)  # fmt: skip
        torch.testing.assert_close(personal_model(memory_of(trainer, "0")), dict(expected), rtol=0, atol=1e-5)
    assert not torch.allclose(fresh["model.1.weight"], kept["model.1.weight"], atol=1e-3)


def test_apfl_evaluation_uses_client_mixture(fit, make_stream, make_task):
    task, metrics, method = make_task(), ContinualMetrics(when="aggregated"), APFL(0.7)
    stream = make_stream(num_clients=6, rounds_per_experience=2)
    trainer = fit(task, stream, [metrics, method], participation=1, seed=3)
    store = trainer.strategy.server.client_store
    drawn = [client for client in stream.plan.clients if "APFL" in store[client]]
    correct = metrics.record["rounds"][-1]["correct"]
    x, y = stream.get_samples(stream.plan.test)
    for client in stream.plan.clients:
        model = copy.deepcopy(task)
        if client in drawn:
            memory = memory_of(trainer, client)
            own, alpha = personal_model(memory), memory["alpha"]
            model.load_state_dict({n: alpha * own[n] + (1 - alpha) * w for n, w in task.state_dict().items()})
        assert sum(correct[client]) == int((model(x).argmax(1) == y).sum())
    # Some clients were never sampled and predict with the server's model. At least one sampled client predicts
    # differently.
    assert 0 < len(drawn) < 6
    assert any(correct[client] != correct["server"] for client in drawn)


def test_apfl_large_alpha_lr_keeps_alpha_between_0_and_1(fit, make_stream, make_task):
    trainer = fit(make_task(), make_stream(rounds_per_experience=2), [APFL(0.5, alpha_lr=1e4)])
    assert {float(memory_of(trainer, client)["alpha"]) for client in "012"} <= {0.0, 1.0}


def test_apfl_client_list_and_gradient_clipping_are_applied(fit, make_stream, make_task):
    task = make_task()
    trainer = fit(task, make_stream(), [APFL(0.5, clients=["1"])], max_epochs=1,
                  trainer_args={"gradient_clip_val": 0.0, "gradient_clip_algorithm": "value"})  # fmt: skip
    assert not trainer.strategy.server.client_store["0"].get("APFL")
    start, far = make_task().state_dict(), personal_model(memory_of(trainer, "1"))
    trainer = fit(make_task(), make_stream(), [APFL(0.5)], max_epochs=1, trainer_args={"gradient_clip_val": 1e-4})
    near = personal_model(memory_of(trainer, "1"))
    steps = -(-len(trainer.strategy.federation.stream.plan.train[0]["1"]) // 8)
    moved = [sum(float((v[n] - start[n]).square().sum()) for n in v) ** 0.5 for v in (near, far)]
    assert 0 < moved[0] <= 1.01 * steps * 0.1 * 1e-4 < moved[1]


def test_apfl_stored_state_unchanged_until_round_ends(make_task):
    method, server = APFL(0.5), {"w": torch.zeros(2)}
    method._trainable = ["w"]
    kept = method.prepare_client_state(Client({}, server, ClientRound("a", round_idx=0)))
    begun = method.prepare_client_state(Client(kept, {"w": torch.ones(2)}, ClientRound("a", round_idx=1)))
    # The client starts from its stored personal model, not from the received state.
    assert torch.equal(begun["v.w"], torch.zeros(2))
    for value in begun.values():
        value.add_(1)
    assert torch.equal(kept["v.w"], torch.zeros(2)) and float(kept["alpha"]) == 0.5 and not server["w"].any()


def test_interpolate_mixes_states_by_alpha():
    v, w = {"a": torch.tensor([3.0, 0.1])}, {"a": torch.tensor([1.0, 0.7]), "b": torch.zeros(1)}
    assert torch.equal(interpolate(v, w, torch.tensor(0.0))["a"], w["a"]) and torch.equal(
        interpolate(v, w, torch.tensor(1.0))["a"], v["a"]
    )
    torch.testing.assert_close(interpolate(v, w, torch.tensor(0.3)), {"a": torch.tensor([1.6, 0.52])})


@pytest.mark.seconds
@pytest.mark.parametrize("keep", [False, True])
def test_apfl_resumed_fit_equals_uninterrupted_fit(assert_resumes, make_task, keep):
    def make(seed=0):
        return make_task(OPTIMIZERS["adamw"], seed=seed)

    options = {"client_store": "disk", "keep_optimizer_state": keep, "participation": 2}
    assert_resumes(make, lambda: APFL(0.3, 0.2), **options)
