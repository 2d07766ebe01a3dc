"""Tests of Re-Fed: the importance compared with a hand computation, and the samples that clients keep."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_fcl.callbacks import ContinualMetrics, ReFed
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.methods.context import Client
from lightning_fcl.methods.selective_replay import sample_importance
from lightning_fcl.models import MLP

pytestmark = pytest.mark.rounding


def by_hand(w, v, x, y, iterations, rate, strength):
    """Return the importance of each sample, and the updated personal layer ``v`` with weight and bias.

    The gradients of a sample's loss are ``(p - e_y) x^T`` for the weight and ``p - e_y`` for the bias. Here, p contains
    the predicted probabilities, and e_y is the one-hot label.
    """
    importance, v = torch.zeros(len(y)), [p.clone() for p in v]
    for s in range(1, iterations + 1):
        error = (x @ v[0].T + v[1]).softmax(dim=1) - torch.eye(len(v[1]))[y]
        importance += error.square().sum(dim=1) * (x.square().sum(dim=1) + 1) / s
        gradients = error.T @ x / len(y), error.mean(dim=0)
        v = [p - rate * (g + strength * (p - q)) for p, g, q in zip(v, gradients, w, strict=True)]
    return importance, v


def layer_of(task, state=None):
    """Return the weight and the bias of a task with one layer, or of a given state of the task."""
    state = task.state_dict() if state is None else state
    return [next(value for name, value in state.items() if name.endswith(end)) for end in ("weight", "bias")]


@pytest.fixture
def linear(make_task):
    """Return a function that makes classifiers of one layer."""
    return lambda optimizer=lambda params: torch.optim.SGD(params, lr=0.1): make_task(optimizer, MLP([6, 4]))


# 300 samples need more than one chunk.
@pytest.mark.parametrize("number", [1, 7, 300])
@pytest.mark.parametrize("strength", [0.0, 0.5])
def test_sample_importance_one_layer_equals_hand_computation(linear, samples, number, strength):
    task = linear()
    w = task.state_dict()
    for seed in range(3):
        torch.manual_seed(seed)
        x, y = samples(number=number, seed=seed)
        personal = {name: torch.randn_like(value) for name, value in w.items()}
        found, v = sample_importance(task, w, personal, x, y, 4, 0.3, strength)
        wanted, end = by_hand(layer_of(task), layer_of(task, personal), x, y, 4, 0.3, strength)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(layer_of(task, v), end, rtol=1e-4, atol=1e-5)


def test_sample_importance_tiny_lr_equals_shared_model_gradients(make_task, samples):
    task, (x, y) = make_task(), samples()
    found, v = sample_importance(task, task.state_dict(), {}, x, y, 3, 1e-12, 0.5)
    for value, row, label in zip(found, x, y, strict=True):
        task.zero_grad()
        torch.nn.functional.cross_entropy(task(row[None]), label[None]).backward()
        squares = sum(float(p.grad.square().sum()) for p in task.parameters())
        assert float(value) == pytest.approx((1 + 1 / 2 + 1 / 3) * squares, rel=1e-4)
    torch.testing.assert_close(v, dict(task.state_dict()))


class Memories(Callback):
    """Records for each round: the server's model, the client states, and each client's number of replay samples."""

    def __init__(self):
        self.models, self.kept, self.rehearsed = [], [], []

    def on_client_end(self, trainer, pl_module, client_round):
        self.rehearsed.append((client_round.round_idx, client_round.num_replay_samples))

    def on_round_end(self, trainer, pl_module):
        self.models.append({name: value.clone() for name, value in pl_module.state_dict().items()})
        store = trainer.strategy.server.client_store
        self.kept.append({client: dict(store.get_section(client, "ReFed")) for client in store})


def test_refed_keeps_samples_with_largest_importance(fit, make_stream, linear):
    task, memories, metrics = linear(), Memories(), ContinualMetrics()
    stream = make_stream(rounds_per_experience=2)
    fit(task, stream, [ReFed(15, 3, 0.2, 0.7), memories, metrics], max_vectorized_clients=1)
    assert all(not memory for memory in memories.kept[0].values())
    assert {(number, rehearsed) for number, rehearsed in memories.rehearsed} == {(0, 0), (1, 0), (2, 15), (3, 15)}
    for number, before in ((1, {}), (3, memories.kept[1])):
        w = memories.models[number - 1]
        for client, rows in stream.plan.train[number].items():
            x, y = stream.get_samples(rows)
            memory, old = memories.kept[number][client], before.get(client)
            v = layer_of(task, w)
            if old is not None:
                x, y, v = torch.cat([old["x"], x]), torch.cat([old["y"], y]), layer_of(task, old)
            importance, end = by_hand(layer_of(task, w), v, x, y, 3, 0.2, 0.7)
            chosen = importance.topk(15).indices.sort().values
            assert torch.equal(memory["x"], x[chosen]) and torch.equal(memory["y"], y[chosen])
            torch.testing.assert_close(layer_of(task, memory), end, rtol=1e-4, atol=1e-5)
    sent = {entry["upload_bytes"]["0"] for entry in metrics.record["rounds"]}
    # Client 0 uploads the same number of bytes in all rounds.
    assert len(sent) == 1


def test_refed_drops_non_finite_samples(make_task, samples):
    task, (x, y) = make_task(), samples()
    w = dict(task.state_dict())
    x[3], method = float("nan"), ReFed(100)
    memory = method.end_experience(Client(received_state=w, client_round=ClientRound("a", 0), module=task), w, (x, y))
    assert len(memory["y"]) == len(y) - 1 and all(torch.isfinite(value).all() for value in memory.values())
    for nothing in ((x[3:4], y[3:4]), (x[:0], y[:0])):
        assert (
            method.end_experience(Client(received_state=w, client_round=ClientRound("a", 0), module=task), w, nothing)
            == {}
        )
    again = method.end_experience(Client(memory, w, ClientRound("a", 1), task), w, (x[3:4], y[3:4]))
    assert torch.equal(again["x"], memory["x"]) and torch.equal(again["y"], memory["y"])


def test_refed_diverging_personal_model_raises(fit, make_stream, make_task):
    with pytest.raises(InvalidValueError, check=lambda error: error.argument == "lr"):
        fit(make_task(), make_stream(), [ReFed(5, 200, 1e6, 1.0)], max_epochs=1)
