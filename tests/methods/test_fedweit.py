"""Tests of FedWEIT: the loss, the uploads and downloads of each client, and the independence of tasks and clients."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from raising import raises

from lightning_fcl import Classifier, FederatedStream
from lightning_fcl.callbacks import ContinualMetrics, FedProx, FedWEIT
from lightning_fcl.data.scenarios import FedViTScenario
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import load_state_tensors, state_tensors
from lightning_fcl.federation.packing import unpack_nonzero
from lightning_fcl.federation.swarm import Swarm
from lightning_fcl.methods.context import Client
from lightning_fcl.methods.fedweit import get_decomposed, kept_mask_units
from lightning_fcl.methods.functional import evaluation_mode
from lightning_fcl.models import FedWEITNet, ViT

OWN = {"model.tasks.*": "local", "model.net.head.*": "local", "model.net.body.*weight": "sparse_mean"}


def make_vit():
    torch.manual_seed(0)
    return ViT(num_classes=6, image_size=8, patch_size=4, width=8, depth=1, num_heads=2)


def make_task(net=None, optimizer=torch.optim.AdamW, lr=5e-3, tasks=3):
    net = FedWEITNet(make_vit(), tasks) if net is None else net
    return Classifier(net, 6, lambda params: optimizer(params, lr=lr), task_incremental=True)


def make_stream(num_clients=3, num_rounds=2, num_tasks=3, **kwargs):
    """Return a stream of small images of six classes. Each task of a client has two classes."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(240) % 6
    x = 0.5 * torch.randn(240, 3, 8, 8, generator=generator) + torch.randn(6, 3, 8, 8, generator=generator)[y]
    arguments = {
        "num_tasks": num_tasks,
        "num_clients": num_clients,
        "classes_per_client": [2, 2],
        "sample_fraction": [0.2, 0.2],
    }
    return FederatedStream.from_arrays(
        x,
        y,
        scenario=FedViTScenario(**{**arguments, "rounds_per_task": num_rounds}),
        split=Split(test=0.25),
        batch_size=8,
        seed=0,
    )


class Watch(Callback):
    """Stores for each round: the record, the states of server and clients, and the previous round's knowledge base."""

    def __init__(self, method=None):
        self.method, self.rounds, self.known = method, [], {}

    def on_round_end(self, trainer, module):
        federation = trainer.strategy.server
        clients = {client: copy.deepcopy(federation.client_store[client]) for client in federation.client_store}
        server = {name: value.detach().clone() for name, value in state_tensors(module).items()}
        self.rounds.append(SimpleNamespace(log=copy.deepcopy(federation.record), known=self.known, clients=clients))
        self.rounds[-1].server = server
        self.known = copy.deepcopy(self.method.knowledge) if self.method else {}


def predict(task, watched, client, x):
    """Return the logits of a client's model: the server's model after a round, combined with client-local tensors."""
    task = copy.deepcopy(task)
    load_state_tensors(task, {**watched.server, **watched.clients[client]["model"]})
    with torch.no_grad(), evaluation_mode(task):
        return task(x)


# Tests of FedWEIT's functions and loss terms.


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.9])
def test_kept_mask_units_drops_share_of_smallest_masks(sparsity):
    mask = torch.randn(24)
    kept = kept_mask_units(mask, sparsity)
    assert int((~kept).sum()) == math.floor(sparsity * 24)
    if sparsity:
        assert mask[~kept].abs().max() < mask[kept].abs().min()


def prepared(**kwargs):
    """Prepare FedWEIT for a client's third task. Return the method, the network and the client."""
    model = FedWEITNet(make_vit(), 3)
    for task in range(3):
        model.start_task(torch.tensor([2 * task, 2 * task + 1]))
    method = FedWEIT(**kwargs)
    with torch.no_grad():
        for task in model.tasks:
            task.adaptive.add_(0.02 * torch.randn(model.size))
        held = {
            f"target.{i}": model.base_vector() * model.mask_vector(model.tasks[i].mask) + model.tasks[i].adaptive
            for i in (0, 1)
        }
    memory = {**held, "tasks": torch.tensor(3), "experience": torch.tensor(2)}
    client = Client(memory, module=Classifier(model, 10, task_incremental=True))
    method.start_client(client)
    return method, model, client


def test_fedweit_drift_penalty_is_squared_drift():
    method, model, client = prepared(l1=0.0, l2=7.0, weight_decay=0.0)
    assert method.penalty(client, None).item() < 1e-9
    change = {name: 0.1 * torch.randn_like(p) for name, p in model.net.named_parameters() if name in model.names}
    gone = 0.2 * torch.randn(model.size)
    with torch.no_grad():
        for name, value in change.items():
            model.net.get_parameter(name).add_(value)
        model.tasks[1].adaptive.add_(gone)
    expected, place, unit = 0.0, 0, 0
    for value in change.values():
        for row in value:
            for task, other in ((0, torch.zeros(row.numel())), (1, gone[place : place + row.numel()])):
                gate = torch.sigmoid(model.tasks[task].mask[unit])
                expected += 7.0 * float((gate * row.flatten() + other).square().sum())
            place, unit = place + row.numel(), unit + 1
    assert method.penalty(client, None).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("retroactive", [True, False])
def test_fedweit_l1_and_weight_decay_apply_to_expected_tensors(retroactive):
    method, model, client = prepared(l1=0.1, l2=0.0, mask_l1=0.3, weight_decay=0.5, retroactive=retroactive)
    own, past = model.tasks[2], model.tasks[:2] if retroactive else []
    expected = 0.1 * sum(task.adaptive.abs().sum() for task in [*past, own]) + 0.3 * own.mask.abs().sum()
    expected += 0.25 * (own.adaptive.square().sum() + own.mask.square().sum())
    torch.testing.assert_close(method.penalty(client, None), expected)
    method.penalty(client, None).backward()
    assert [task.adaptive.grad is not None for task in model.tasks] == [retroactive, retroactive, True]
    assert [task.mask.grad is not None for task in model.tasks] == [False, False, True]


def test_fedweit_base_weight_decay_in_first_task_only():
    model, method = FedWEITNet(make_vit(), 2), FedWEIT(l1=0.0, l2=1.0, weight_decay=0.5)
    memory = {"tasks": torch.tensor(1), "classes": torch.tensor([0])}
    client = Client(memory, module=Classifier(model, 10, task_incremental=True))
    method.start_client(client)
    expected = 0.25 * sum(v.square().sum() for v in (model.tasks[0].adaptive, model.tasks[0].mask, model.base_vector()))
    torch.testing.assert_close(method.penalty(client, None), expected)


# Tests that train FedWEIT in a federation.


class Still(FedWEIT):
    """FedWEIT with untrained parts: all masks are 1 and all adaptive weights are 0."""

    def start_client(self, client):
        super().start_client(client)
        task = get_decomposed(client.module).tasks[int(client.method_state["tasks"]) - 1]
        with torch.no_grad():
            task.adaptive.zero_()
            task.mask.fill_(100.0)
        for parameter in (task.adaptive, task.mask):
            parameter.requires_grad_(False)


@pytest.mark.seconds
def test_fedweit_without_masks_and_adaptives_equals_fedavg_local_heads(fit):
    plain, task = make_task(make_vit(), torch.optim.SGD), make_task(optimizer=torch.optim.SGD)
    left = fit(plain, make_stream(), reductions={"model.head.*": "local"}, max_vectorized_clients=1, participation=2)
    method = Still(l1=0.0, l2=0.0, weight_decay=0.0, sparsity=0.0, kb_size=0)
    right = fit(task, make_stream(), [method], reductions=OWN, participation=2)
    torch.testing.assert_close(dict(task.model.net.state_dict()), dict(plain.model.state_dict()), rtol=0, atol=1e-6)
    for client in "012":
        heads = [trainer.strategy.server.client_store[client]["model"] for trainer in (left, right)]
        for name in ("head.weight", "head.bias"):
            torch.testing.assert_close(heads[1][f"model.net.{name}"], heads[0][f"model.{name}"], rtol=0, atol=1e-6)


@pytest.mark.seconds
def test_fedweit_upload_and_download_bytes_are_as_computed(fit):
    method, task = FedWEIT(), make_task()
    watch = Watch(method)
    fit(task, make_stream(), [watch, method], reductions=OWN, local_epochs=2)
    model = task.model
    rest = sum(v.nbytes for n, v in model.net.state_dict().items() if n not in model.names and not n.startswith("head"))
    sent = sum(
        (len(p) - math.floor(0.3 * len(p))) * p[0].numel() * 4 + math.ceil(p.numel() / 8)
        for name, p in model.net.named_parameters()
        if name in model.names
    )
    whole = rest + sum(p.nbytes for name, p in model.net.named_parameters() if name in model.names)
    for number, now in enumerate(watch.rounds):
        first, last = number % 2 == 0, number % 2 == 1
        for client in "012":
            adaptive = now.clients[client]["model"][f"model.tasks.{number // 2}.adaptive"]
            message = int((adaptive.abs() > 1e-3).sum()) * 4 + math.ceil(model.size / 8)
            assert now.log.upload_bytes[client] == rest + sent + last * min(message, model.size * 4)
            others = [other for name, other in now.known.items() if name != client]
            packed = sum(other.nbytes for other in others)
            assert now.log.download_bytes[client] == whole + first * packed
            assert len(others) == (2 if number > 1 else 0)
    assert sent < 0.8 * (whole - rest)


@pytest.mark.seconds
def test_fedweit_kb_size_limits_download_bytes(fit):
    down = []
    for size in (0, 1, None):
        metrics = ContinualMetrics(clients="none")
        fit(make_task(), make_stream(num_rounds=1, num_tasks=2), [metrics, FedWEIT(kb_size=size)], reductions=OWN)
        down.append(metrics.record["rounds"][1]["download_bytes"]["0"])
    assert down[0] < down[1] < down[2]


@pytest.mark.seconds
def test_fedweit_l1_makes_adaptives_sparse(fit):
    shares = []
    for l1 in (0.0, 0.1):
        method, task = FedWEIT(l1=l1), make_task(lr=5e-4)
        fit(task, make_stream(num_rounds=1), [method], reductions=OWN, local_epochs=16, max_epochs=1)
        like = torch.zeros(task.model.size)
        sent = [int(unpack_nonzero(packed, like).count_nonzero()) for packed in method.knowledge.values()]
        shares.append(max(sent) / task.model.size)
    assert shares[1] < 0.35 < 0.8 < shares[0]


@pytest.mark.seconds
@pytest.mark.parametrize("frozen", [True, False])
def test_fedweit_frozen_base_keeps_past_task_predictions(fit, frozen):
    task, watch = make_task(), Watch()
    for name in task.model.names if frozen else []:
        task.model.net.get_parameter(name).requires_grad_(False)
    fit(task, make_stream(), [FedWEIT(retroactive=False), watch], reductions=OWN)
    stream = make_stream()
    stream.setup("fit")
    x = stream.get_samples(stream.plan.test)[0]
    for client in "012":
        block = list(stream.plan.classes_of_task(client, 0))
        before, after = (predict(task, watch.rounds[number], client, x)[:, block] for number in (3, 5))
        assert torch.equal(before, after) == frozen
        # Training on the second task changes the predictions for its classes.
        now = list(stream.plan.classes_of_task(client, 1))
        assert not torch.equal(*(predict(task, watch.rounds[number], client, x)[:, now] for number in (1, 3)))


@pytest.mark.seconds
def test_fedweit_retroactive_trains_past_adaptives(fit):
    gone = {}
    for retroactive, l2 in ((True, 100.0), (False, 100.0), (True, 0.0)):
        task, watch = make_task(optimizer=torch.optim.Adam), Watch()
        fit(task, make_stream(), [FedWEIT(l1=0.0, l2=l2, retroactive=retroactive), watch], reductions=OWN)
        before, after = (watch.rounds[n].clients["0"]["model"]["model.tasks.0.adaptive"] for n in (1, 5))
        gone[retroactive, l2] = not torch.equal(before, after)
    assert gone == {(True, 100.0): True, (False, 100.0): False, (True, 0.0): False}


@pytest.mark.seconds
def test_fedweit_attention_learns_from_other_clients(fit):
    tasks = []
    for size in (None, 0):
        task, watch = make_task(), Watch()
        fit(task, make_stream(), [FedWEIT(kb_size=size), watch], reductions=OWN)
        tasks.append(watch.rounds)
    attentions = [tasks[0][n].clients["0"]["model"]["model.tasks.1.attention"] for n in (2, 3)]
    assert attentions[0].shape == (5, 2) and not torch.equal(*attentions)
    own, size = tasks[0][3].clients["0"], task.model.size
    others = [unpack_nonzero(own["FedWEIT"][f"kb.{j}"], torch.zeros(size)) for j in (0, 1)]
    mixed, sizes = own["model"]["model.tasks.1.knowledge"], task.model.sizes
    for layer, parts in enumerate(zip(mixed.split(sizes), *(other.split(sizes) for other in others), strict=True)):
        expected = sum(alpha * part for alpha, part in zip(attentions[1][layer], parts[1:], strict=True))
        torch.testing.assert_close(parts[0], expected)
    assert tasks[1][3].clients["0"]["model"]["model.tasks.1.knowledge"].numel() == 0


@pytest.mark.seconds
def test_fedweit_partial_participation_publishes_sampled_clients(fit):
    method, task = FedWEIT(), make_task()
    watch = Watch(method)
    fit(task, make_stream(4, num_rounds=3), [watch, method], reductions=OWN, participation=1, seed=1)
    drawn = [set(now.log.accepted) for now in watch.rounds]
    for end in (2, 5, 8):
        # Any of these rounds may be the last round of the task for a client. Therefore, the sampled clients upload in
        # each round.
        for round_idx in range(end - 2, end + 1):
            assert set(watch.rounds[round_idx].log.upload_bytes) == drawn[round_idx]
    for number, now in enumerate(watch.rounds[3:], 3):
        assert set(now.known) == set().union(*drawn[: number // 3 * 3])
    for client, kept in watch.rounds[-1].clients.items():
        begun = sum(1 for name, v in kept.get("model", {}).items() if name.endswith("adaptive") and v.numel())
        assert begun == sum(any(client in d for d in drawn[start : start + 3]) for start in (0, 3, 6))


@pytest.mark.seconds
def test_fedweit_client_missing_last_sync_was_published_before(fit):
    method = FedWEIT()
    watch = Watch(method)
    fit(make_task(), make_stream(), [watch, method], reductions=OWN, swarm=Swarm(missed_rounds={"1": [1]}))
    assert watch.rounds[1].log.missed_sync == ["1"] and set(watch.rounds[1].log.upload_bytes) == {"0", "2"}
    assert [set(now.known) for now in watch.rounds[1:5]] == [set(), {"0", "1", "2"}, {"0", "1", "2"}, {"0", "1", "2"}]


@pytest.mark.seconds
def test_fedweit_departed_client_publishes_nothing(fit):
    method = FedWEIT()
    watch = Watch(method)
    fit(make_task(), make_stream(), [watch, method], reductions=OWN, swarm=Swarm(leaves_at={"1": 3}))
    assert [set(now.log.upload_bytes) for now in watch.rounds[2:]] == [{"0", "1", "2"}, *[{"0", "2"}] * 3]
    torch.testing.assert_close(watch.rounds[4].known["1"], watch.rounds[2].known["1"], rtol=0, atol=0)
    assert len(watch.rounds[4].known["0"]) != len(watch.rounds[2].known["0"])


@pytest.mark.seconds
@pytest.mark.parametrize("per_task", [True, False])
def test_fedweit_resumed_fit_equals_uninterrupted_fit(assert_resumes, per_task):
    def make(seed=0):
        return make_task(tasks=3 if per_task else 1)

    options = {"reductions": OWN, "participation": 2, "client_store": "disk"}
    assert_resumes(make, lambda: FedWEIT(per_task=per_task), make_stream, **options)


@pytest.mark.seconds
def test_fedweit_clients_without_method_train_plain_network(fit):
    plain, task, watch = make_task(make_vit()), make_task(), Watch()
    fit(plain, make_stream(), reductions={"model.head.*": "local"}, max_vectorized_clients=1)
    fit(task, make_stream(), [FedWEIT(clients=[]), watch], reductions=OWN)
    torch.testing.assert_close(dict(task.model.net.state_dict()), dict(plain.model.state_dict()), rtol=0, atol=1e-6)


def test_fedweit_drops_diverging_client_only(fit):
    stream, task, watch = make_stream(), make_task(), Watch()
    stream.setup("fit")
    stream.samples.x[torch.from_numpy(stream.plan.train[0]["1"])] = float("nan")
    fit(task, stream, [FedWEIT(), watch], reductions=OWN, max_epochs=1)
    assert set(watch.rounds[0].log.dropped) == {"1"} and set(watch.rounds[0].clients) == {"0", "2"}


@pytest.mark.seconds
def test_fedweit_evaluation_uses_client_masks_and_weights(fit):
    metrics, task = ContinualMetrics(when="aggregated"), make_task()
    watch = Watch()
    fit(task, make_stream(), [metrics, FedWEIT(), watch], reductions=OWN, local_epochs=4)
    stream = make_stream()
    stream.setup("fit")
    x, y = stream.get_samples(stream.plan.test)
    for client in "012":
        logits = predict(task, watch.rounds[-1], client, x)
        blocks = stream.plan.task_classes[client]
        block = torch.tensor([next(b for b in blocks if label in b) for label in y.tolist()])
        correct = block[torch.arange(len(y)), logits.gather(1, block).argmax(1)] == y
        assert sum(metrics.record["rounds"][-1]["correct"][client]) == int(correct.sum())
        other = predict(task, watch.rounds[-1], str((int(client) + 1) % 3), x)
        # The other client has different masks and weights, so its logits differ.
        assert not torch.allclose(logits, other, atol=1e-2)


# Tests of errors.


def test_fedweit_invalid_settings_raise(fit, make_stream, make_task):
    own_stream, own_task = globals()["make_stream"], globals()["make_task"]
    with raises(InvalidValueError, "callbacks"):
        fit(own_task(), own_stream(), [FedProx(0.1), FedWEIT()])
    with raises(InvalidValueError, "model", value="MLP"):
        fit(make_task(), make_stream(), [FedWEIT()])
    task = own_task()
    task.task_incremental = False
    with raises(InvalidValueError, "task_incremental"):
        fit(task, own_stream(), [FedWEIT()])
    with raises(InvalidValueError, "num_tasks", value=2):
        fit(own_task(tasks=2), own_stream(), [FedWEIT()], reductions=OWN)
    with raises(InvalidValueError, "reductions"):
        fit(own_task(), own_stream(), [FedWEIT()])
    with raises(InvalidValueError, "reductions", value="model.net.body.patch_embed.proj.weight"):
        fit(own_task(), own_stream(), [FedWEIT()], reductions={"model.tasks.*": "local"})


# Tests of one mask and one vector of adaptive weights for all tasks (`per_task=False`).


def one_for_all(**kwargs):
    """Prepare FedWEIT with `per_task=False` for a client's third task. Return method, network and client."""
    model = FedWEITNet(make_vit(), 1)
    model.start_task(torch.tensor([0, 1]))
    method = FedWEIT(per_task=False, **kwargs)
    targets = {f"target.{i}": torch.randn(model.size) for i in range(2)}
    memory = {**targets, "tasks": torch.tensor(3), "experience": torch.tensor(2), "base": model.base_vector().detach()}
    client = Client(memory, module=Classifier(model, 10, task_incremental=True))
    method.start_client(client)
    return method, model, client


def test_fedweit_one_mask_penalty_equals_hand_written():
    method, model, client = one_for_all(l1=0.1, mask_l1=0.3, l2=7.0, weight_decay=0.5)
    own = model.tasks[0]
    base, weights = model.base_vector(), model.base_vector() * model.mask_vector(own.mask) + own.adaptive
    expected = 0.1 * own.adaptive.abs().sum() + 0.3 * own.mask.abs().sum()
    expected = expected + 0.25 * (own.adaptive.square().sum() + own.mask.square().sum())
    expected = expected + 7.0 * sum((weights - client.method_state[f"target.{i}"]).square().sum() for i in (0, 1))
    penalty = method.penalty(client, None)
    torch.testing.assert_close(penalty, expected)
    trained = [own.adaptive, own.mask, *(model.net.get_parameter(name) for name in model.names)]
    gradients, by_hand = (torch.autograd.grad(value, trained, retain_graph=True) for value in (penalty, expected))
    torch.testing.assert_close(gradients, by_hand)
    assert base.requires_grad and not torch.equal(base, weights)
    method.l2 = 0.0
    without = expected - 7.0 * sum((weights - client.method_state[f"target.{i}"]).square().sum() for i in (0, 1))
    torch.testing.assert_close(method.penalty(client, None), without, rtol=1e-3, atol=1e-4)


@pytest.mark.seconds
@pytest.mark.parametrize("kb_size", [0, None])
def test_fedweit_one_mask_continues_across_tasks(fit, kb_size):
    """The mask is trained across tasks, and a drift target is stored for each task except the last one.

    Predictions for past tasks use the current weights.
    """
    begun = []

    class Look(FedWEIT):
        def start_client(self, client):
            super().start_client(client)
            own, first = get_decomposed(client.module).tasks[0], "base" not in client.method_state
            begun.append(
                (
                    client.federation.current_round.client_round.client_id,
                    client.federation.current_round.round_idx,
                    first,
                    own.mask.detach().clone(),
                )
            )

    method = Look(sparsity=0.0, mask_l1=0.0, kb_size=kb_size, per_task=False)
    watch, task = Watch(method), make_task(tasks=1)
    fit(task, make_stream(), [method, watch], reductions={**OWN, "model.net.body.*weight": "mean"})
    stream = make_stream()
    stream.setup("fit")
    for client, round_idx, first, mask in begun:
        assert first == (round_idx % 2 == 0)
        if round_idx:
            before = watch.rounds[round_idx - 1].clients[client]["model"]["model.tasks.0.mask"]
            # The mask is not reset between tasks.
            assert torch.equal(mask, before)
    model = task.model
    for client in "012":
        rounds = [one.clients[client] for one in watch.rounds]
        memory, own = rounds[-1]["Look"], rounds[-1]["model"]
        learnt = [c for task_classes in stream.plan.task_classes[client] for c in task_classes]
        assert own["model.tasks.0.classes"].tolist() == learnt
        assert {n for n in memory if n.startswith("target.")} == {"target.0", "target.1"}
        # Each task has two rounds. The drift target of a task comes from its second round.
        for i in (0, 1):
            end = rounds[2 * i + 1]
            mask, adaptive = (end["model"][f"model.tasks.0.{name}"] for name in ("mask", "adaptive"))
            expected = end["Look"]["base"] * model.mask_vector(mask) + adaptive
            torch.testing.assert_close(memory[f"target.{i}"], expected)
        others = sum(1 for name in memory if name.startswith("kb."))
        assert own["model.tasks.0.attention"].shape[1] == others == (0 if kb_size == 0 else 2)
    x = torch.randn(5, 3, 8, 8)
    load_state_tensors(task, {**watch.rounds[-1].server, **own})
    logits = predict(task, watch.rounds[-1], "2", x)
    weights = own["model.tasks.0.adaptive"] * (own["model.tasks.0.adaptive"].abs() > model.threshold)
    weights = weights + (own["model.tasks.0.knowledge"] if kb_size is None else 0)
    base = torch.cat([watch.rounds[-1].server[f"model.net.{name}"].flatten() for name in model.names])
    weights = weights + base * model.mask_vector(own["model.tasks.0.mask"])
    plain = copy.deepcopy(model.net)
    for name, piece in zip(model.names, weights.detach().split(model.sizes), strict=True):
        plain.get_parameter(name).data = piece.view_as(plain.get_parameter(name))
    # A plain network with the combined weights has the same logits.
    torch.testing.assert_close(logits, plain.eval()(x))
