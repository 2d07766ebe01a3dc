"""Tests of FedProto: prototypes, the penalty on the distance to prototypes, and prediction by the nearest prototype."""

import pytest
import torch
from kept import entries_of
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from raising import raises
from torch import nn

from lightning_fcl import Classifier
from lightning_fcl.callbacks import ContinualMetrics, FedProto, FLwF2T
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.methods.context import Client, Step
from lightning_fcl.methods.functional import embeddings
from lightning_fcl.methods.prototypes import ClassSums, class_means


class States(Callback):
    """Records the state of each client after its training, and the client's samples."""

    def __init__(self):
        self.kept = {}

    def on_client_end(self, trainer, pl_module, client_round):
        data = trainer.datamodule.client_samples(client_round.client_id, client_round.round_idx, trainer.strategy.seed)
        state = {name: value.clone() for name, value in pl_module.state_dict().items()}
        self.kept[client_round.round_idx, client_round.client_id] = state, data


def sums_of(trainer):
    return trainer.strategy.server.get_section("FedProto")["sums"]


@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize("max_vectorized_clients", [1, 3])
def test_fedproto_prototypes_are_pooled_class_means(fit, make_stream, make_task, max_vectorized_clients, weights):
    states, task, stream = States(), make_task(), make_stream(partition="dirichlet", num_experiences=1)
    trainer = fit(
        task, stream, [FedProto(), states], max_vectorized_clients=max_vectorized_clients, client_weights=weights
    )
    features = torch.cat([embeddings(task, state, x) for state, (x, _) in states.kept.values()])
    labels = torch.cat([y for _, (_, y) in states.kept.values()])
    means, known = class_means(sums_of(trainer))
    assert known.all() and len(states.kept) == 3
    for label in range(4):
        torch.testing.assert_close(means[label], features[labels == label].mean(dim=0))


def test_fedproto_class_without_samples_keeps_prototype(fit, make_stream, make_task):
    seen = []

    class Watch(Callback):
        def on_round_end(self, trainer, pl_module):
            seen.append((sums_of(trainer).clone(), set(trainer.strategy.server.record.accepted)))

    fit(make_task(), make_stream(), [FedProto(clients=["0", "1"]), Watch()])
    (first, _), (second, _) = seen
    assert (first[:, 0] > 0).tolist() == [True, True, False, False]
    assert torch.equal(second[:2], first[:2]) and (second[:, 0] > 0).all()
    stream = make_stream()
    stream.setup("fit")
    assert first[:, 0].sum() == sum(len(stream.plan.train[0][client]) for client in "01")


def test_fedproto_sums_cover_one_round_only(fit, make_stream, make_task):
    trainer = fit(make_task(), make_stream(num_experiences=1, rounds_per_experience=3), [FedProto()])
    assert sums_of(trainer)[:, 0].sum() == sum(map(len, trainer.datamodule.plan.train[2].values()))


def test_fedproto_zero_strength_with_head_equals_fedavg(fit, make_stream, make_task, assert_same):
    tasks, records = [make_task(), make_task()], [ContinualMetrics(), ContinualMetrics()]
    fit(tasks[0], make_stream(), [FedProto(0.0, "head"), records[0]], max_vectorized_clients=1)
    fit(tasks[1], make_stream(), [records[1]], max_vectorized_clients=1)
    assert_same(*tasks, 0)
    left, right = ([entry["correct"] for entry in metrics.record["rounds"]] for metrics in records)
    assert left == right


def test_fedproto_penalty_gradient_equals_hand_written(make_task, samples):
    task, method, (x, y) = make_task(), FedProto(0.7), samples()
    sums = torch.randn(4, 6)
    sums[:, 0] = torch.tensor([2.0, 3.0, 0.0, 5.0])
    weight = torch.rand(20).softmax(dim=0)
    step = Step({}, {}, x, task(x), lambda *_: x, embed_fn=task.embed, sample_weight=weight, y=y)
    expected = torch.zeros(())
    for i in range(20):
        # Class 2 has no prototype.
        if y[i] != 2:
            prototype = sums[y[i], 1:] / sums[y[i], 0]
            expected = expected + 0.7 * weight[i] * ((task.embed(x[i : i + 1])[0] - prototype) ** 2).sum() / 5
    body = task.model[1].weight
    (gradient,) = torch.autograd.grad(
        method.penalty(Client({}, {"FedProto.sums": sums}, section_name="FedProto"), step), [body]
    )
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, [body])[0])


@pytest.mark.parametrize("strategy", [None, "auto"])
def test_fedproto_evaluation_predicts_nearest_prototype(fit, make_stream, make_task, strategy, quiet):
    stream, method, task = (
        make_stream(num_clients=1, num_experiences=1, rounds_per_experience=2),
        FedProto(),
        make_task(),
    )
    trainer = fit(task, stream, [method], strategy=strategy)
    server = entries_of(method)["sums"] if strategy else sums_of(trainer)
    means, _ = class_means(server)
    x, y = stream.get_samples(stream.plan.test)
    distances = (task.embed(x)[:, None] - means).norm(dim=2)
    (measured,) = trainer.test(task, datamodule=stream, verbose=False)
    assert measured["test/accuracy"] == pytest.approx(float((distances.argmin(dim=1) == y).float().mean()))
    # After the test, the module predicts with its own output again.
    assert torch.equal(task(x).argmax(dim=1), task.model(x).argmax(dim=1))


def test_fedproto_checkpoint_restores_prototypes_for_test(fit, make_stream, make_task, tmp_path, quiet):
    saving, task = ModelCheckpoint(tmp_path, "last"), make_task()
    trainer = fit(task, make_stream(), [FedProto(), saving], trainer_args={"enable_checkpointing": True})
    (expected,) = trainer.test(task, datamodule=make_stream(), verbose=False)
    other = fit(make_task(seed=3), make_stream(), [FedProto()], max_epochs=0)
    (measured,) = other.test(
        make_task(seed=3), datamodule=make_stream(), verbose=False, ckpt_path=tmp_path / "last.ckpt"
    )
    assert measured["test/accuracy"] == expected["test/accuracy"]


def test_fedproto_with_local_model_uploads_prototypes_only(fit, make_stream, make_task):
    task, metrics = make_task(), ContinualMetrics()
    before = {name: value.clone() for name, value in task.state_dict().items()}
    fit(task, make_stream(), [FedProto(), metrics], reductions={"*": "local"})
    assert all(torch.equal(value, before[name]) for name, value in task.state_dict().items())
    sent = metrics.record["rounds"][0]["upload_bytes"]["0"]
    assert sent <= ClassSums().upload_nbytes(torch.cat([torch.ones(2, 6), torch.zeros(2, 6)])) < 4 * 4 * 6


def test_fedproto_with_flwf2t_trains(fit, make_stream, make_task):
    fit(make_task(), make_stream(), [FLwF2T(0.3, 0.3), FedProto()], max_vectorized_clients=1)
    fit(make_task(), make_stream(), [FLwF2T(0.3, 0.3), FedProto()], max_vectorized_clients=3)


def test_fedproto_module_without_features_raises(fit, make_stream):
    with raises(InvalidValueError, "model"):
        fit(Classifier(nn.Linear(6, 4), 4), make_stream(), [FedProto()])
