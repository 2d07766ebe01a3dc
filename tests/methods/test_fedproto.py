"""FedProto: prototypes, the pull towards them, and prediction by the nearest."""

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
    """Each client's state after its training, and its samples."""

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
def test_prototypes_are_the_means_of_all_clients_samples(fit, make_stream, make_task, max_vectorized_clients, weights):
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


def test_a_class_that_no_client_of_the_round_has_keeps_its_prototype(fit, make_stream, make_task):
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


def test_sums_are_those_of_a_round(fit, make_stream, make_task):
    trainer = fit(make_task(), make_stream(num_experiences=1, rounds_per_experience=3), [FedProto()])
    assert sums_of(trainer)[:, 0].sum() == sum(map(len, trainer.datamodule.plan.train[2].values()))


def test_without_strength_and_with_the_head_it_is_fedavg(fit, make_stream, make_task, assert_same):
    tasks, records = [make_task(), make_task()], [ContinualMetrics(), ContinualMetrics()]
    fit(tasks[0], make_stream(), [FedProto(0.0, "head"), records[0]], max_vectorized_clients=1)
    fit(tasks[1], make_stream(), [records[1]], max_vectorized_clients=1)
    assert_same(*tasks, 0)
    left, right = ([entry["correct"] for entry in metrics.record["rounds"]] for metrics in records)
    assert left == right


def test_the_pull_by_hand(make_task, samples):
    task, method, (x, y) = make_task(), FedProto(0.7), samples()
    sums = torch.randn(4, 6)
    sums[:, 0] = torch.tensor([2.0, 3.0, 0.0, 5.0])
    weight = torch.rand(20).softmax(dim=0)
    step = Step({}, {}, x, task(x), lambda *_: x, embed_fn=task.embed, sample_weight=weight, y=y)
    expected = torch.zeros(())
    for i in range(20):
        if y[i] != 2:  # which has no prototype
            prototype = sums[y[i], 1:] / sums[y[i], 0]
            expected = expected + 0.7 * weight[i] * ((task.embed(x[i : i + 1])[0] - prototype) ** 2).sum() / 5
    body = task.model[1].weight
    (gradient,) = torch.autograd.grad(
        method.penalty(Client({}, {"FedProto.sums": sums}, section_name="FedProto"), step), [body]
    )
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, [body])[0])


@pytest.mark.parametrize("strategy", [None, "auto"])
def test_the_nearest_prototype_predicts(fit, make_stream, make_task, strategy, quiet):
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
    assert torch.equal(task(x).argmax(dim=1), task.model(x).argmax(dim=1))  # the rule is gone afterwards


def test_a_checkpoint_is_tested_with_its_prototypes(fit, make_stream, make_task, tmp_path, quiet):
    saving, task = ModelCheckpoint(tmp_path, "last"), make_task()
    trainer = fit(task, make_stream(), [FedProto(), saving], trainer_args={"enable_checkpointing": True})
    (expected,) = trainer.test(task, datamodule=make_stream(), verbose=False)
    other = fit(make_task(seed=3), make_stream(), [FedProto()], max_epochs=0)
    (measured,) = other.test(
        make_task(seed=3), datamodule=make_stream(), verbose=False, ckpt_path=tmp_path / "last.ckpt"
    )
    assert measured["test/accuracy"] == expected["test/accuracy"]


def test_only_prototypes_travel_as_in_the_paper(fit, make_stream, make_task):
    task, metrics = make_task(), ContinualMetrics()
    before = {name: value.clone() for name, value in task.state_dict().items()}
    fit(task, make_stream(), [FedProto(), metrics], reductions={"*": "local"})
    assert all(torch.equal(value, before[name]) for name, value in task.state_dict().items())
    sent = metrics.record["rounds"][0]["upload_bytes"]["0"]
    assert sent <= ClassSums().upload_nbytes(torch.cat([torch.ones(2, 6), torch.zeros(2, 6)])) < 4 * 4 * 6


def test_beside_a_teacher(fit, make_stream, make_task):
    fit(make_task(), make_stream(), [FLwF2T(0.3, 0.3), FedProto()], max_vectorized_clients=1)
    fit(make_task(), make_stream(), [FLwF2T(0.3, 0.3), FedProto()], max_vectorized_clients=3)


def test_a_module_without_features(fit, make_stream):
    with raises(InvalidValueError, "model"):
        fit(Classifier(nn.Linear(6, 4), 4), make_stream(), [FedProto()])
