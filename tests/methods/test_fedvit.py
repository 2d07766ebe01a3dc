"""Tests of FedViT: stages, stored samples, task selection and integration, compared with a hand-written loop."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from raising import raises
from torch import nn
from torch.utils.data import TensorDataset

from lightning_fcl import Classifier, FederatedStream
from lightning_fcl.callbacks import ContinualMetrics, FedKNOW, FedViT
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.scenarios import FedViTScenario
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.swarm import Swarm
from lightning_fcl.methods import fedvit as module
from lightning_fcl.methods.context import Client
from lightning_fcl.methods.fedvit import LowestLoss, lowest_loss

from .test_fedrep import Stages
from .test_icarl import Trained

OWN = {"model.head.*": "local"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
        self.head = nn.Linear(5, 8)

    def forward(self, x):
        return self.head(self.body(x))


def make_task(optimizer=torch.optim.SGD, lr=0.2, dropout=0.0):
    torch.manual_seed(0)
    net = Net()
    if dropout:
        net.body.append(nn.Dropout(dropout))
    return Classifier(net, 8, lambda params: optimizer(params, lr=lr), task_incremental=True)


def make_stream(num_clients=2, num_tasks=2, num_rounds=2, seed=0, classes=(2, 2), **kwargs):
    """Return a stream with noisy samples of 8 classes. The noise makes the gradients of tasks conflict."""
    rng = np.random.default_rng(seed)
    y = np.arange(480) % 8
    x = (rng.normal(size=(480, 6)) + 0.7 * np.eye(8, 6)[y]).astype(np.float32)
    arguments = {
        "num_tasks": num_tasks,
        "num_clients": num_clients,
        "classes_per_client": classes,
        "sample_fraction": (0.3, 0.4),
    }
    arguments["rounds_per_task"] = num_rounds
    options = {"batch_size": 400, "shuffle": False, "seed": 0, "scenario": FedViTScenario(**arguments), **kwargs}
    return FederatedStream.from_arrays(x, y.astype(np.int64), **options)


def parts(net):
    return list(net.body.parameters()), list(net.head.parameters())


def flat_gradient(net, params, x, y, block):
    loss = F.cross_entropy(net(x)[:, block], torch.searchsorted(torch.tensor(block), y))
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, params)])


def step(params, gradient, lr=0.2):
    with torch.no_grad():
        for p, g in zip(params, gradient.split([p.numel() for p in params]), strict=True):
            p -= lr * g.view(p.shape)


def rotated(gradient, past, margin):
    """Return the gradient projected on one constraint: the closed-form solution of the quadratic program."""
    if gradient @ past >= 0:
        return gradient
    return gradient + max(float(-(gradient @ past) / (past @ past)), margin) * past


def by_hand(stream, rho, heads, bodies, integration, margin=0.0):
    """Run all rounds with full batches. Return the server's model, client states and number of changed gradients."""
    server, plan = make_task().model, stream.plan
    own = {c: {"head": copy.deepcopy(server.head), "body": None, "memory": None} for c in plan.clients}
    changed = 0
    for round_idx, current in enumerate(plan.train):
        trained, sizes = [], []
        for client, rows in current.items():
            (x, y), client_round, state = stream.get_samples(rows), stream.client_round(client, round_idx), own[client]
            net = copy.deepcopy(server)
            net.head = copy.deepcopy(state["head"])
            body, head = parts(net)
            if state["body"] is not None:
                before = copy.deepcopy(net)
                before.body = state["body"]
                for _ in range(integration):
                    g_a, g_b = (
                        flat_gradient(net, body, x, y, client_round.task_classes),
                        flat_gradient(before, parts(before)[0], x, y, client_round.task_classes),
                    )
                    changed += bool(g_a @ g_b < 0)
                    step(body, rotated(g_b, g_a, margin))
            for _ in range(heads):
                step(head, flat_gradient(net, head, x, y, client_round.task_classes))
            for _ in range(bodies):
                gradient = flat_gradient(net, body, x, y, client_round.task_classes)
                if state["memory"] is not None:
                    past = flat_gradient(net, body, *state["memory"])
                    changed += bool(past @ gradient < 0)
                    gradient = rotated(gradient, past, margin)
                step(body, gradient)
            state["head"], state["body"] = copy.deepcopy(net.head), copy.deepcopy(net.body)
            if client_round.is_last_round:
                logits = net(x)[:, client_round.task_classes]
                loss = F.cross_entropy(
                    logits, torch.searchsorted(torch.tensor(client_round.task_classes), y), reduction="none"
                )
                kept = [r for c in y.unique() for r in best(loss, y, c, rho)]
                kept = sorted(kept)
                state["body"], state["memory"] = None, (x[kept], y[kept], client_round.task_classes)
            trained.append(net)
            sizes.append(len(y))
        with torch.no_grad():
            for position, p in enumerate(server.body.parameters()):
                values = [list(net.body.parameters())[position] for net in trained]
                p.copy_(sum(n * v for n, v in zip(sizes, values, strict=True)) / sum(sizes))
    return server, own, changed


def best(loss, y, c, rho):
    rows = [r for r in loss.argsort().tolist() if y[r] == c]
    return rows[: max(1, round(rho * len(rows)))]


@pytest.mark.seconds
@pytest.mark.parametrize("margin", [0.0, 0.5])
def test_fedvit_equals_hand_written_loop(fit, margin):
    stream, task = make_stream(num_rounds=4), make_task()
    method = FedViT(rho=0.2, head_epochs=2, body_epochs=3, integration_epochs=2, margin=margin)
    trainer = fit(task, stream, [method], reductions=OWN)
    server, own, changed = by_hand(stream, 0.2, heads=2, bodies=3, integration=2, margin=margin)
    assert changed > 3
    torch.testing.assert_close(task.model.body.state_dict(), server.body.state_dict())
    store = trainer.strategy.server.client_store
    for client, state in own.items():
        kept = store[client]["model"]
        torch.testing.assert_close(kept["model.head.weight"], state["head"].weight.detach())
        memory = store[client]["FedViT"]
        assert set(memory) == {"x", "y", "task"}
        torch.testing.assert_close(memory["x"][memory["task"] == 1], state["memory"][0])


@pytest.mark.seconds
@pytest.mark.parametrize(("clip", "margin"), [(None, 0.0), (0.05, 0.0), (None, 0.5)])
def test_fedvit_integrate_last_changes_predicting_body_only(fit, clip, margin):
    stream, task = make_stream(num_clients=3, num_rounds=3), make_task()
    words = {"integration_epochs": 2, "margin": margin}
    method, metrics = FedViT(rho=0.2, integrate_last=True, **words), ContinualMetrics(when="aggregated")
    local = Trained()
    options = {"reductions": OWN, "participation": 2, "max_epochs": 6, "trainer_args": {"gradient_clip_val": clip}}
    trainer = fit(task, stream, [method, metrics, local], **options)
    plain, seen = make_task(), []
    fit(plain, stream, [FedViT(rho=0.2, **words)], **options)
    # The option `integrate_last` does not change the weights of the server.
    torch.testing.assert_close(task.state_dict(), plain.state_dict(), rtol=0, atol=0)
    for client in stream.plan.clients:
        kept = trainer.strategy.server.client_store[client]
        last = {n: v for n, v in kept["FedViT"].items() if n.startswith("last.")}
        # A client has an integrated state only if it has trained on its second task, which starts in round 3.
        assert bool(last) == (local.rounds[client] >= 3)
        if not last:
            continue
        net, trained = copy.deepcopy(task.model), make_task()
        trained.load_state_dict(local.states[client])
        before = trained.model
        net.head.load_state_dict({n.split(".")[-1]: v for n, v in kept["model"].items()})
        before.head = net.head
        (x, y), block = stream.get_samples(stream.plan.train[5][client]), stream.plan.classes_of_task(client, 1)
        for _ in range(2):
            g_a, g_b = (flat_gradient(m, parts(m)[0], x, y, block) for m in (net, before))
            seen.append(bool(g_a @ g_b < 0))
            gradient = rotated(g_b, g_a, margin)
            step(parts(net)[0], gradient if clip is None else gradient * min(1.0, clip / float(gradient.norm() + 1e-6)))
        for name, value in net.body.state_dict().items():
            torch.testing.assert_close(last[f"last.model.body.{name}"], value)
        tested, labels = stream.get_samples(stream.plan.test)
        right = (task.mask_logits(net(tested), labels).argmax(1) == labels).numpy()
        counts = metrics.record["rounds"][-1]["correct"][client]
        groups = stream.plan.groups[stream.plan.test]
        assert all(c is None or c == right[groups == g].sum() for g, c in enumerate(counts))
    assert len(seen) >= 4


def test_fedvit_first_task_projects_no_gradient(fit, monkeypatch):
    def refuse(*args):
        raise AssertionError("a projection")

    monkeypatch.setattr(module, "project", refuse)
    fit(make_task(), make_stream(num_rounds=2), [FedViT(integration_epochs=0)], max_epochs=2, reductions=OWN)
    with pytest.raises(AssertionError, match="a projection"):
        fit(make_task(), make_stream(num_rounds=2), [FedViT(integration_epochs=0)], max_epochs=3, reductions=OWN)


@pytest.mark.seconds
def test_fedvit_stages_keep_frozen_part_bitwise_unchanged(fit):
    stages = Stages()
    task = make_task(torch.optim.AdamW, lr=0.01)
    method = FedViT(head_epochs=2, body_epochs=3, integration_epochs=1)
    fit(task, make_stream(batch_size=16), [method, stages], reductions=OWN)
    # The second round of a task starts with integration.
    for first, epochs in ((0, 5), (1, 6)):
        assert {epoch for part, epoch, _ in stages.steps if part.round_idx % 2 == first} == {*range(epochs)}
    for part, epoch, moved in stages.steps:
        first = part.round_idx % 2
        assert moved == ({"head"} if first <= epoch < first + 2 else {"body"})
    assert all(p.requires_grad for p in task.parameters())


def test_lowest_loss_selects_share_of_each_class():
    generator = torch.Generator().manual_seed(0)
    y = torch.tensor([0] * 40 + [1] * 20 + [2] * 3)[torch.randperm(63, generator=generator)]
    loss = torch.rand(63, generator=generator)
    kept = lowest_loss(loss, y, 0.1)
    assert kept.tolist() == sorted(kept.tolist())
    # The function selects 10 % of the samples of each class, but at least 1 sample.
    assert [(y[kept] == c).sum().item() for c in range(3)] == [4, 2, 1]
    for c in range(3):
        out = torch.tensor([r for r in range(63) if y[r] == c and r not in kept])
        assert loss[kept][y[kept] == c].max() <= loss[out].min()
    assert lowest_loss(loss, y, 1.0).tolist() == [*range(63)]


def test_lowest_loss_works_in_avalanche_buffer(samples):
    from avalanche.benchmarks.utils import DataAttribute, TaskAwareSupervisedClassificationDataset
    from avalanche.training.storage_policy import ParametricBuffer

    (x, y), task = samples(number=40), make_task()
    labels = DataAttribute(y.tolist(), "targets")
    tasks = DataAttribute([0] * len(y), "targets_task_labels", use_in_getitem=True)
    pairs = TensorDataset(x, y)
    data = TaskAwareSupervisedClassificationDataset([pairs], data_attributes=[labels, tasks])
    experience = SimpleNamespace(dataset=data)
    buffer = ParametricBuffer(8, groupby="class", selection_strategy=LowestLoss())
    buffer.post_adapt(SimpleNamespace(model=task), experience)
    with torch.no_grad():
        kept = lowest_loss(F.cross_entropy(task(x), y, reduction="none"), y, 0.2)
    expected = {tuple(row.tolist()) for row in x[kept]}
    assert {tuple(sample[0].tolist()) for sample in buffer.buffer} == expected and len(expected) == 8


def test_fedvit_selects_tasks_every_select_every_steps(monkeypatch):
    gradients = {0: torch.tensor([9.0, -9.0]), 1: torch.tensor([1.0, 1.1]), 2: torch.tensor([-5.0, 0.0])}
    taken, projected = [], []
    method = FedViT(k=2, select_every=3)
    monkeypatch.setattr(FedViT, "past_gradient", lambda self, client, task, of: taken.append(task) or gradients[task])
    monkeypatch.setattr(module, "project", lambda g, rows, margin: projected.append(rows.clone()) or g)
    client = Client({"task": torch.tensor([0, 1, 2, 3])}, client_round=ClientRound("a", 3, experience_idx=3))
    # Local epoch 2 belongs to the stage that trains the body.
    client.local_epoch = 2
    method.start_client(client)
    for _ in range(4):
        method.project_gradient(client, torch.tensor([1.0, 1.0]), None)
    assert taken == [0, 1, 2, 0, 2, 0, 2, 0, 1, 2]
    for rows in projected:
        assert torch.equal(rows, torch.stack([gradients[0], gradients[2]]))
    taken.clear()
    # With k above the number of past tasks, all past tasks are used.
    method = FedViT(k=5)
    method.start_client(client)
    method.project_gradient(client, torch.tensor([1.0, 1.0]), None)
    assert taken == [0, 1, 2] and len(projected[-1]) == 3
    client.method_state = {}
    # Without stored samples the gradient does not change.
    assert method.project_gradient(client, gradients[0], None) is gradients[0]


@pytest.mark.seconds
def test_fedvit_resumed_fit_equals_uninterrupted_fit(assert_resumes):
    def stream():
        return make_stream(num_clients=3, batch_size=16, shuffle=True)

    options = {"reductions": OWN, "participation": 2, "client_store": "disk"}
    assert_resumes(lambda seed=0: make_task(torch.optim.AdamW, lr=0.01), FedViT, stream, **options)


@pytest.mark.seconds
@pytest.mark.parametrize("integrate_last", [True, False])
def test_fedvit_task_choice_does_not_depend_on_other_clients(fit, tmp_path, integrate_last):
    """Neither the order of clients nor an interruption of the fit changes the selected tasks."""

    def run(order=sorted, epochs=8, **kwargs):
        task, stream = make_task(torch.optim.Adam, 0.01, dropout=0.3), make_stream(num_tasks=4)
        stream.setup("fit")
        for current in (*stream.plan.train, stream.plan.experiences):
            for client in order(current):
                current[client] = current.pop(client)
        method = FedViT(k=1, select_every=3, integration_epochs=2, integrate_last=integrate_last)
        options = {"reductions": OWN, "max_epochs": epochs, "participation": 1.0, **kwargs}
        trainer = fit(task, stream, [method, *options.pop("more", [])], **options)
        store = trainer.strategy.server.client_store
        return task.state_dict(), {client: store[client] for client in sorted(store)}

    keep = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    whole = run(more=[keep], trainer_args={"enable_checkpointing": True})
    torch.testing.assert_close(run(ckpt_path=tmp_path / "epoch=6.ckpt"), whole, rtol=0, atol=0)
    torch.testing.assert_close(run(lambda clients: sorted(clients, reverse=True)), whole, rtol=0, atol=1e-5)


def test_fedvit_integrate_last_uses_new_dropout_in_each_step(fit):
    masks, task = [], make_task(dropout=0.5)

    class Look(FedViT):
        def on_round_end(self, trainer, pl_module):
            hook = pl_module.model.body[2].register_forward_hook(lambda layer, args, out: masks.append(out == 0))
            super().on_round_end(trainer, pl_module)
            hook.remove()

    fit(
        task,
        make_stream(num_clients=1),
        [Look(integration_epochs=3, integrate_last=True)],
        reductions=OWN,
        max_epochs=2,
    )
    before, now = masks[::2], masks[1::2]
    assert len(masks) == 6 and all(torch.equal(*pair) for pair in zip(before, now, strict=True))
    assert not torch.equal(now[0], now[1]) and not torch.equal(now[1], now[2])


@pytest.mark.seconds
def test_fedvit_integrate_last_skips_unused_and_departed_clients(fit):
    def kept(method, epochs, **kwargs):
        store = fit(make_task(), make_stream(num_rounds=3), [method], max_epochs=epochs, reductions=OWN, **kwargs)
        return store.strategy.server.client_store

    assert set(kept(FedViT(clients=["0"], integrate_last=True), 3)["1"]) == {"model", "progress"}
    before, after = (kept(FedViT(integrate_last=True), epochs, swarm=Swarm(leaves_at={"1": 4})) for epochs in (4, 6))
    # The client left before the end of its task.
    assert "at" in before["1"]["FedViT"]
    torch.testing.assert_close(after["1"], before["1"], rtol=0, atol=0)


@pytest.mark.seconds
@pytest.mark.parametrize("method", [FedViT, FedKNOW])
@pytest.mark.parametrize(("precision", "tolerance"), [("64-true", 1e-4), ("bf16-true", 0.1)])
def test_fedvit_and_fedknow_precision_close_to_float32(fit, precision, tolerance, method):
    tasks = []
    for one in ("32-true", precision):
        tasks.append(make_task())
        options = {"reductions": OWN, "participation": 2, "trainer_args": {"precision": one}}
        trainer = fit(tasks[-1], make_stream(num_clients=3), [method(rho=0.2, integrate_last=True)], **options)
    dtype = {"64-true": torch.float64, "bf16-true": torch.bfloat16}[precision]
    assert {p.dtype for p in tasks[1].parameters()} == {dtype}
    torch.testing.assert_close(tasks[1].float().state_dict(), tasks[0].state_dict(), rtol=0, atol=tolerance)
    memory = trainer.strategy.server.client_store["0"][method.__name__]
    assert memory["last.model.body.0.weight"].dtype == dtype


def test_fedvit_invalid_settings_raise(fit):
    with raises(InvalidValueError, "reductions"):
        fit(make_task(), make_stream(), [FedViT()])
    with raises(InvalidValueError, "num_tasks"):
        fit(make_task(), make_stream(num_tasks=8, classes=(1, 1)), [FedViT()], reductions=OWN, max_epochs=1)
