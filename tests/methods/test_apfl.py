"""APFL: the shared model trains as without it; the personal one and its weight follow the paper's formulas."""

import copy

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_fcl import Classifier, FederatedStream
from lightning_fcl.callbacks import APFL, ContinualMetrics
from lightning_fcl.data.batches import Batching, order_keys, plan_batches
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.scenarios import FedViTScenario
from lightning_fcl.data.split import Split
from lightning_fcl.methods.client import Client
from lightning_fcl.methods.personal import mix
from lightning_fcl.models import ViT

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.5),
}


class Rounds(Callback):
    """The server's state after each round."""

    def __init__(self):
        self.states = []

    def on_round_end(self, trainer, module):
        self.states.append({name: value.detach().clone() for name, value in module.state_dict().items()})


def memory_of(trainer, client):
    return trainer.strategy.server.store[client]["APFL"]


def personal_model(memory):
    return {name[2:]: value for name, value in memory.items() if name.startswith("v.")}


def noisy(seed=0):
    """A network that draws random numbers and has statistics."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4))


@pytest.mark.seconds
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("alpha0", [0.0, 0.5])
def test_the_shared_model_is_that_of_fedavg_to_the_bit(fit, make_stream, optimizer, alpha0):
    options = {"cohort_size": 1, "participation": 2, "reductions": {"model.4.bias": "none"}, "local_epochs": 2}
    runs = []
    for methods in ([], [APFL(alpha0)]):
        task, rounds, metrics = Classifier(noisy(), 4, OPTIMIZERS[optimizer]), Rounds(), ContinualMetrics()
        stream = make_stream(rounds_per_experience=2, drop_last=True)
        trainer = fit(task, stream, [*methods, rounds, metrics], seed=0, **options)
        heads = {client: trainer.strategy.server.store[client]["model"] for client in "012"}
        sent = [entry["upload_bytes"] for entry in metrics.record["rounds"]]
        runs.append([*rounds.states, *heads.values(), sent])
    for left, right in zip(*runs, strict=True):
        assert left == right if isinstance(left, list) else all(torch.equal(left[n], right[n]) for n in left)


def by_hand(task, stream, alpha0, alpha_lr, keep=False):
    """Algorithm 1 of the paper, with the task's optimizer for w and for v."""
    w = copy.deepcopy(task)
    v, alpha = {c: copy.deepcopy(task) for c in stream.plan.clients}, dict.fromkeys(stream.plan.clients, alpha0)
    kept = {client: v[client].configure_optimizers() for client in v}
    for round, current in enumerate(stream.plan.train):
        uploads = []
        for client, rows in current.items():
            local, own = copy.deepcopy(w), v[client]
            optimizer = local.configure_optimizers()
            personal = kept[client] if keep else own.configure_optimizers()
            x, y = stream.take(rows)
            for indices in plan_batches(
                len(y), 1, Batching(stream.batch_size, stream.shuffle), order_keys(0, [client], round)
            ):
                a, mixed = alpha[client], copy.deepcopy(local)
                for p, q, r in zip(mixed.parameters(), own.parameters(), local.parameters(), strict=True):
                    p.data = a * q.data + (1 - a) * r.data
                gradients = torch.autograd.grad(cross_entropy(mixed(x[indices]), y[indices]), list(mixed.parameters()))
                pairs = zip(own.parameters(), local.parameters(), strict=True)
                slope = sum(float(((q - p).detach() * g).sum()) for (q, p), g in zip(pairs, gradients, strict=True))
                alpha[client] = min(max(a - alpha_lr * slope, 0.0), 1.0)
                for q, g in zip(own.parameters(), gradients, strict=True):
                    q.grad = a * g
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
def test_equals_the_papers_algorithm_by_hand(fit, make_stream, make_task, optimizer, alpha_lr):
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
def test_the_personal_optimizer_lasts_only_if_the_strategys_does(fit, make_stream, make_task):
    stream, task = make_stream(rounds_per_experience=2), make_task(OPTIMIZERS["momentum"])
    stream.setup("fit")
    fresh, kept = (by_hand(task, stream, 1.0, 0.0, keep)[1]["0"].state_dict() for keep in (False, True))
    for keep, expected in ((False, fresh), (True, kept)):
        trainer = fit(copy.deepcopy(task), make_stream(rounds_per_experience=2), [APFL(1.0, 0.0)],
                      seed=0, keep_optimizer=keep)  # fmt: skip
        torch.testing.assert_close(personal_model(memory_of(trainer, "0")), dict(expected), rtol=0, atol=1e-5)
    assert not torch.allclose(fresh["model.1.weight"], kept["model.1.weight"], atol=1e-3)


@pytest.mark.seconds
def test_alpha_0_predicts_as_the_server_and_alpha_1_as_the_personal_model(fit, make_stream, make_task):
    x = torch.randn(50, 6)
    for alpha in (0.0, 1.0):
        task, method = make_task(), APFL(alpha, alpha_lr=0)
        trainer = fit(task, make_stream(rounds_per_experience=2), [method])
        memory, shared = memory_of(trainer, "1"), dict(task.state_dict())
        predicts, expected = copy.deepcopy(task), copy.deepcopy(task)
        predicts.load_state_dict(method.personalize(Client(memory), shared))
        expected.load_state_dict(personal_model(memory) if alpha else shared)
        assert torch.equal(predicts(x), expected(x)) and float(memory["alpha"]) == alpha
        if alpha:
            assert not torch.allclose(predicts(x), task(x), atol=1e-2)


def test_alpha_1_with_the_first_state_is_local_training(fit, make_stream, make_task):
    stream = make_stream()
    trainer = fit(make_task(), stream, [APFL(1.0, 0.0)], seed=0)
    for client in "012":
        alone = make_task()
        optimizer = alone.configure_optimizers()
        for round in range(2):
            x, y = stream.take(stream.plan.train[round][client])
            for indices in plan_batches(len(y), 1, Batching(8), order_keys(0, [client], round)):
                optimizer.zero_grad()
                cross_entropy(alone(x[indices]), y[indices]).backward()
                optimizer.step()
        personal = personal_model(memory_of(trainer, client))
        torch.testing.assert_close(personal, dict(alone.state_dict()), rtol=0, atol=1e-5)


def test_every_client_is_tested_with_its_mixture(fit, make_stream, make_task):
    task, metrics, method = make_task(), ContinualMetrics(when="aggregated"), APFL(0.7)
    stream = make_stream(clients=6, rounds_per_experience=2)
    trainer = fit(task, stream, [metrics, method], participation=1, seed=3)
    store = trainer.strategy.server.store
    drawn = [client for client in stream.plan.clients if "APFL" in store[client]]
    correct = metrics.record["rounds"][-1]["correct"]
    x, y = stream.take(stream.plan.test)
    for client in stream.plan.clients:
        model = copy.deepcopy(task)
        if client in drawn:
            memory = memory_of(trainer, client)
            own, alpha = personal_model(memory), memory["alpha"]
            model.load_state_dict({n: alpha * own[n] + (1 - alpha) * w for n, w in task.state_dict().items()})
        assert sum(correct[client]) == int((model(x).argmax(1) == y).sum())
    assert 0 < len(drawn) < 6  # who was never drawn predicts as the server
    assert any(correct[client] != correct["server"] for client in drawn)


def test_alpha_stays_between_0_and_1(fit, make_stream, make_task):
    trainer = fit(make_task(), make_stream(rounds_per_experience=2), [APFL(0.5, alpha_lr=1e4)])
    assert {float(memory_of(trainer, client)["alpha"]) for client in "012"} <= {0.0, 1.0}


def test_some_clients_and_clipping(fit, make_stream, make_task):
    task = make_task()
    trainer = fit(task, make_stream(), [APFL(0.5, clients=["1"])], max_epochs=1,
                  trainer_args={"gradient_clip_val": 0.0, "gradient_clip_algorithm": "value"})  # fmt: skip
    assert not trainer.strategy.server.store["0"].get("APFL")
    start, far = make_task().state_dict(), personal_model(memory_of(trainer, "1"))
    trainer = fit(make_task(), make_stream(), [APFL(0.5)], max_epochs=1, trainer_args={"gradient_clip_val": 1e-4})
    near = personal_model(memory_of(trainer, "1"))
    steps = -(-len(trainer.strategy.federation.stream.plan.train[0]["1"]) // 8)
    moved = [sum(float((v[n] - start[n]).square().sum()) for n in v) ** 0.5 for v in (near, far)]
    assert 0 < moved[0] <= 1.01 * steps * 0.1 * 1e-4 < moved[1]


@pytest.mark.seconds
@pytest.mark.parametrize("keep", [False, True])
def test_resumed_is_uninterrupted(fit, make_stream, make_task, tmp_path, keep):
    options = {"client_store": "disk", "keep_optimizer": keep, "participation": 2, "seed": 5}
    runs = []
    for path in (None, tmp_path / "round-epoch=1.ckpt"):
        task, metrics = (
            make_task(OPTIMIZERS["adamw"], seed=0 if path is None else 9),
            ContinualMetrics(when="aggregated"),
        )
        saver = ModelCheckpoint(tmp_path, "round-{epoch}", save_top_k=-1)
        trainer = fit(task, make_stream(rounds_per_experience=2), [APFL(0.3, 0.2), metrics, saver], ckpt_path=path,
                      trainer_args={"enable_checkpointing": True}, **options)  # fmt: skip
        states = [task.state_dict(), *(trainer.strategy.server.store[client]["APFL"] for client in "012")]
        runs.append((states, [entry["correct"] for entry in metrics.record["rounds"]]))
    for left, right in zip(runs[0][0], runs[1][0], strict=True):
        assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
    assert runs[0][1] == runs[1][1]
    assert any(name.startswith("optimizer.") for name in runs[0][0][1]) == keep


@pytest.mark.seconds
def test_a_vision_transformer_with_tasks(fit):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(200, 3, 32, 32)).astype("float32"), np.arange(200) % 10
    stream = FederatedStream.from_arrays(
        x,
        y,
        scenario=FedViTScenario(tasks=2, rounds_per_task=2, share=[0.3, 0.5], clients=3),
        split=Split(test=0.2),
        batch_size=8,
    )
    model = ViT(10, patch_size=16, width=24, depth=2, heads=3)
    task = Classifier(model, 10, OPTIMIZERS["adamw"], task_incremental=True)
    metrics = ContinualMetrics(when="aggregated")
    trainer = fit(task, stream, [APFL(), metrics], reductions={"model.head.*": "none"}, seed=0)
    assert set(personal_model(memory_of(trainer, "0"))) == {name for name, _ in task.named_parameters()}
    assert set(metrics.record["rounds"][-1]["correct"]) == {"server", "0", "1", "2"}


def test_what_a_client_keeps_does_not_change_before_its_round_is_done(make_task):
    method, server = APFL(0.5), {"w": torch.zeros(2)}
    method._trainable = ["w"]
    kept = method.on_download(Client({}, server, ClientRound("a", round=0)))
    begun = method.on_download(Client(kept, {"w": torch.ones(2)}, ClientRound("a", round=1)))
    assert torch.equal(begun["v.w"], torch.zeros(2))  # its own, not what it has received
    for value in begun.values():
        value.add_(1)
    assert torch.equal(kept["v.w"], torch.zeros(2)) and float(kept["alpha"]) == 0.5 and not server["w"].any()


def test_mix():
    v, w = {"a": torch.tensor([3.0, 0.1])}, {"a": torch.tensor([1.0, 0.7]), "b": torch.zeros(1)}
    assert torch.equal(mix(v, w, torch.tensor(0.0))["a"], w["a"]) and torch.equal(
        mix(v, w, torch.tensor(1.0))["a"], v["a"]
    )
    torch.testing.assert_close(mix(v, w, torch.tensor(0.3)), {"a": torch.tensor([1.6, 0.52])})


def test_refusals(fit, make_stream, make_task, quiet):
    with pytest.raises(ValueError, match="for `APFL` but got a plain one: with a single client"):
        L.Trainer(max_epochs=1, callbacks=[APFL()], **quiet).fit(make_task(), datamodule=make_stream(clients=1))
    with pytest.raises(ValueError, match="`APFL` trains one client at a time"):
        fit(make_task(), make_stream(), [APFL()], cohort_size=2)

    class Plain(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = nn.Linear(6, 4)

        def training_step(self, batch, batch_idx):
            return self.model(batch[0]).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(ValueError, match="a module that states its loss apart for `APFL`"):
        fit(Plain(), make_stream(), [APFL()])
