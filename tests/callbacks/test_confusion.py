"""Tests that recorded confusion matrices equal matrices that scikit-learn computes from independent predictions."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import toy_arrays
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from sklearn.metrics import confusion_matrix

from lightning_fcl import Classifier, FederatedStream, Regressor
from lightning_fcl.callbacks import (
    APFL,
    EWC,
    ContinualMetrics,
    Ditto,
    FedProto,
    ICaRL,
    LogitAdjustment,
    Replay,
    ServerWeightAveraging,
)
from lightning_fcl.data.scenarios import FedViTScenario, Stationary
from lightning_fcl.data.split import Split
from lightning_fcl.evaluation.confusion import confusions
from lightning_fcl.evaluation.record import truncate_record
from lightning_fcl.models import MLP

CLASSES = 4


def to_array(matrix):
    """Return a confusion matrix as an array of shape (classes, classes)."""
    counts = np.zeros((CLASSES, CLASSES), dtype=int)
    for target, prediction, count in matrix:
        assert count > 0 and counts[target, prediction] == 0
        counts[target, prediction] = count
    return counts


def arrays(record):
    return {key: to_array(matrix).tolist() for key, matrix in confusions(record).items()}


class ByHand(Callback):
    """Computes the confusion matrix of each model with scikit-learn, and keeps the last one of each experience."""

    def __init__(self, stream):
        self.stream, self.matrices = stream, {}

    def keep(self, pl_module, model, experience):
        x, y = self.stream.get_samples(self.stream.plan.test)
        with torch.no_grad():
            outputs = copy.deepcopy(pl_module).eval()(x)
        plan = self.stream.plan
        # After the fit of a plain Trainer, the current epoch is the number of rounds.
        new, old = plan.class_split(min(pl_module.trainer.current_epoch, plan.num_rounds - 1))
        classes = sorted({*new, *old} or range(CLASSES))
        predictions = np.array(classes)[outputs[:, classes].argmax(1)]
        self.matrices[model, experience] = confusion_matrix(y, predictions, labels=range(CLASSES)).tolist()

    def on_client_end(self, trainer, pl_module, client_round):
        self.keep(pl_module, client_round.client_id, client_round.experience_idx)

    def on_round_end(self, trainer, pl_module):
        experiences = self.stream.plan.experiences.values()
        self.keep(pl_module, "server", max(numbers[trainer.current_epoch] for numbers in experiences))


DOMAINS = {"scenario": "domain-incremental", "group": np.arange(240) // 80}
STREAMS = [{}, DOMAINS, {"class_order": [2, 0, 1, 3], "partition": "dirichlet"}]


@pytest.mark.parametrize("stream_args", STREAMS)
@pytest.mark.parametrize(("participation", "max_vectorized_clients"), [(1.0, 1), (0.4, 1), (0.4, 2)])
def test_confusion_equals_sklearn_matrix_of_last_test_in_experience(
    fit, make_stream, make_task, stream_args, participation, max_vectorized_clients
):
    stream = make_stream(rounds_per_experience=4, num_clients=4, **({"seed": 1} | stream_args))
    metrics, by_hand = ContinualMetrics(), ByHand(stream)
    options = {"participation": participation, "max_vectorized_clients": max_vectorized_clients}
    fit(make_task(), stream, [metrics, by_hand], **options)
    assert arrays(metrics.record) == by_hand.matrices
    assert len({str(matrix) for matrix in by_hand.matrices.values()}) > 4
    # The record contains one matrix for each model and experience, in the last round of the experience.
    number_by_round = [len(entry.get("confusion", {})) for entry in metrics.record["rounds"]]
    assert sum(number_by_round) == len(by_hand.matrices)
    assert not any(number for round_idx, number in enumerate(number_by_round) if round_idx % 4 != 3)
    assert all(len({*map(tuple, matrix)}) == len(matrix) for matrix in confusions(metrics.record).values())


@pytest.mark.parametrize("when", ["trained", "aggregated", "both"])
@pytest.mark.parametrize("stream_args", STREAMS[:2])
@pytest.mark.parametrize(
    "make_methods",
    [list, lambda: [Replay(12), EWC(2.0)], lambda: [APFL()], lambda: [Ditto(0.5)], lambda: [ICaRL(12)],
     lambda: [FedProto(1.0)], lambda: [LogitAdjustment()], lambda: [ServerWeightAveraging(0.5)]],
)  # fmt: skip
def test_confusion_rows_and_trace_equal_recorded_counts(fit, make_stream, make_task, make_methods, stream_args, when):
    stream, metrics = make_stream(rounds_per_experience=2, **stream_args), ContinualMetrics(when=when)
    fit(make_task(), stream, [*make_methods(), metrics], participation=1.0 if when == "trained" else 0.7)
    record, test = metrics.record, stream.plan.test
    last = {
        (model, entry["experience"][model]): correct
        for entry in record["rounds"]
        for model, correct in entry["correct"].items()
    }
    matrices = confusions(record)
    assert matrices.keys() == last.keys() and ("server", 1) in last
    for key, correct in last.items():
        matrix, tested = to_array(matrices[key]), [group for group, count in enumerate(correct) if count is not None]
        labels = stream.y[test][np.isin(stream.plan.groups[test], tested)]
        assert matrix.sum(axis=1).tolist() == np.bincount(labels, minlength=CLASSES).tolist()
        assert np.trace(matrix) == sum(count for count in correct if count is not None)
        if "group" not in stream_args:
            assert [matrix[group, group] for group in tested] == [correct[group] for group in tested]
    if when != "trained" and stream_args == {} and isinstance(next(iter(make_methods()), None), APFL):
        # The clients' models differ, and clients are tested on the classes that they have learned.
        assert len({str(matrices[client, 1]) for client in "012"}) > 1


@pytest.mark.parametrize("when", ["trained", "aggregated"])
def test_confusion_task_incremental_predicts_classes_of_task(fit, when):
    torch.manual_seed(0)
    task = Classifier(MLP([6, 5, 4]), 4, lambda params: torch.optim.SGD(params, lr=0.1), task_incremental=True)
    x, y = toy_arrays()
    scenario = FedViTScenario(
        num_tasks=2, num_clients=2, classes_per_client=(2, 2), sample_fraction=(0.4, 0.5), rounds_per_task=2
    )
    split = Split(test=0.25)
    stream = FederatedStream.from_arrays(x, y, scenario=scenario, split=split, batch_size=8, seed=0)
    metrics = ContinualMetrics(when=when)
    fit(task, stream, [metrics])
    matrices = confusions(metrics.record)
    matrix = to_array(matrices["server", max(experience for model, experience in matrices if model == "server")])
    x, y = stream.get_samples(stream.plan.test)
    with torch.no_grad():
        logits = task.eval()(x)
    for classes in {*stream.plan.task_classes["0"]}:
        rows = torch.isin(y, torch.tensor(classes))
        predictions = np.array(classes)[logits[rows][:, list(classes)].argmax(1)]
        expected = confusion_matrix(y[rows], predictions, labels=range(CLASSES))
        assert matrix[list(classes)].tolist() == expected[list(classes)].tolist()


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_confusion_clients_in_different_experiences_have_own_matrices(fit, make_stream, make_task, participation):
    stream, metrics = make_stream(rounds_per_experience=2), ContinualMetrics()
    stream.setup("fit")
    # The experience of client 1 ends a round earlier, and that of client 2 a round later.
    experiences = {"0": (0, 0, 1, 1), "1": (0, 1, 1, 1), "2": (0, 0, 0, 1)}
    stream.plan = replace(stream.plan, experiences=experiences)
    by_hand = ByHand(stream)
    fit(make_task(), stream, [metrics, by_hand], participation=participation)
    assert arrays(metrics.record) == by_hand.matrices
    assert ("server", 1) in by_hand.matrices


@pytest.mark.parametrize("when", ["trained", "aggregated"])
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_confusion_resumed_fit_gives_same_record(fit, make_stream, make_task, tmp_path, cut, when):
    words = {"rounds_per_experience": 2, "num_clients": 4}
    whole, part, resumed = (ContinualMetrics(when=when) for _ in range(3))
    options = {"participation": 0.5}
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    fit(make_task(), make_stream(**words), [APFL(), whole], **options)
    saving = {"enable_checkpointing": True}
    fit(make_task(), make_stream(**words), [APFL(), part, saver], max_epochs=cut + 1, trainer_args=saving, **options)
    path = tmp_path / f"epoch={cut}.ckpt"
    fit(make_task(seed=5), make_stream(**words), [APFL(), resumed], ckpt_path=path, **options)
    for entry in [*whole.record["rounds"], *resumed.record["rounds"]]:
        entry |= {"seconds": 0, "processor_seconds": 0}
    assert resumed.record == whole.record and "confusion" not in whole.record
    # A fit that ends within an experience has the matrices of this experience, and of the experiences before.
    tested = {(model, entry["experience"][model]) for entry in part.record["rounds"] for model in entry["correct"]}
    assert confusions(part.record).keys() == tested
    # Resuming after the last round gives the same matrices.
    again = ContinualMetrics(when=when)
    fit(make_task(), make_stream(**words), [APFL(), again], max_epochs=cut + 1, ckpt_path=path, **options)
    assert confusions(again.record) == confusions(part.record)


def test_confusion_truncated_record_has_matrices_of_first_tasks(fit, make_stream, make_task):
    metrics, stopped = ContinualMetrics(), ContinualMetrics()
    stream = make_stream(rounds_per_experience=2)
    fit(make_task(), stream, [metrics], max_epochs=3)
    fit(make_task(), stream, [stopped], max_epochs=2)
    assert {experience for _, experience in confusions(metrics.record)} == {0, 1}
    assert confusions(truncate_record(metrics.record, 1)) == confusions(stopped.record)


@pytest.mark.parametrize("clients", ["none", ["2", "0"]])
def test_confusion_clients_argument_selects_models(fit, make_stream, make_task, clients):
    metrics = ContinualMetrics(clients)
    fit(make_task(), make_stream(), [metrics])
    assert {model for model, _ in confusions(metrics.record)} == {"server", *(clients if clients != "none" else ())}


def test_confusion_regressor_has_none(fit, make_stream):
    x = np.random.default_rng(0).normal(size=(60, 6)).astype(np.float32)
    stream = FederatedStream.from_arrays(x, x[:, :2], np.arange(60) % 3, scenario=Stationary(), batch_size=8, seed=0)
    metrics = ContinualMetrics()
    fit(Regressor(MLP([6, 5, 2]), 2, lambda params: torch.optim.SGD(params, lr=0.01)), stream, [metrics])
    assert confusions(metrics.record) == {} and "measures" in metrics.record


def test_confusion_plain_trainer_equals_sklearn_matrix(fit, make_stream, make_task):
    stream, metrics, task = make_stream(num_clients=1, rounds_per_experience=2), ContinualMetrics(), make_task()
    fit(task, stream, [metrics], strategy="auto", max_epochs=4)
    by_hand = ByHand(stream)
    by_hand.keep(task, "server", 1)
    matrices = arrays(metrics.record)
    assert [*matrices] == [("server", 0), ("server", 1)]
    assert matrices["server", 1] == by_hand.matrices["server", 1]


def test_confusion_outputs_per_step_count_each_step(fit, make_series_stream, make_reservoir, make_reservoir_task):
    stream, metrics = make_series_stream(3, 2), ContinualMetrics()
    task = make_reservoir_task(make_reservoir(washout=4), readout="steps")
    fit(task, stream, [metrics])
    x, y = stream.get_samples(stream.plan.test)
    with torch.no_grad():
        predictions = task(x).argmax(-1)
    targets = y[:, None].expand_as(predictions)
    expected = confusion_matrix(targets.flatten(), predictions.flatten(), labels=range(CLASSES))
    matrices = confusions(metrics.record)
    assert to_array(matrices["server", max(experience for _, experience in matrices)]).tolist() == expected.tolist()
