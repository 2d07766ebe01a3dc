"""Tests that the record of `ContinualMetrics` equals evaluations in hand-written code."""

import copy

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from raising import raises
from torch import nn

from lightning_fcl import FederatedStream
from lightning_fcl.callbacks import EWC, GEM, ContinualMetrics, ICaRL, Replay
from lightning_fcl.callbacks.evaluator import to_predictions
from lightning_fcl.data.scenarios import ClassIncremental, ODFCLScenario
from lightning_fcl.errors import InvalidValueError, MissingValueError, UnknownNameError
from lightning_fcl.evaluation.metrics import summarize
from lightning_fcl.evaluation.sample_bits import decode_bits
from lightning_fcl.federation.swarm import Swarm
from lightning_fcl.methods.method import Method


def counts(task, stream, groups, classes=None):
    """Return the number of correct predictions, among some classes, on the test samples of each group."""
    x, y = stream.get_samples(stream.plan.test)
    with torch.no_grad():
        outputs = task(x)
    classes = list(range(outputs.shape[1])) if classes is None else sorted(classes)
    correct = (torch.tensor(classes)[outputs[:, classes].argmax(1)] == y).numpy()
    return [int(correct[stream.plan.groups[stream.plan.test] == g].sum()) for g in range(groups)]


class ByHand(Callback):
    """Evaluates the current model at the end of each client's training, and at the end of each round."""

    def __init__(self, stream, groups=4, classes="seen"):
        self.stream, self.groups, self.classes, self.current, self.rounds = stream, groups, classes, {}, []

    def evaluate(self, pl_module):
        plan, round_idx, classes = self.stream.plan, pl_module.trainer.current_epoch, None
        if self.classes == "seen" and plan.groups_are_classes:
            classes = {
                label
                for client, numbers in plan.experiences.items()
                for task in plan.tasks[client][: numbers[round_idx] + 1]
                for label in task
            }
        return counts(copy.deepcopy(pl_module).eval(), self.stream, self.groups, classes)

    def on_client_end(self, trainer, pl_module, client_round):
        self.current[client_round.client_id] = self.evaluate(pl_module)

    def on_round_end(self, trainer, pl_module):
        self.rounds.append({**self.current, "server": self.evaluate(pl_module)})
        self.current = {}


@pytest.mark.parametrize("classes", ["seen", "all"])
@pytest.mark.parametrize("max_vectorized_clients", [1, 2])
def test_record_counts_equal_evaluation_of_each_model(fit, make_stream, make_task, max_vectorized_clients, classes):
    stream, metrics, task = make_stream(rounds_per_experience=2), ContinualMetrics(classes=classes), make_task()
    by_hand = ByHand(stream, classes=classes)
    trainer = fit(task, stream, [metrics, by_hand], max_vectorized_clients=max_vectorized_clients)
    rounds = metrics.record["rounds"]
    assert [entry["correct"] for entry in rounds] == by_hand.rounds
    assert rounds[-1]["correct"]["server"] == counts(task.eval(), stream, 4)
    assert len({tuple(entry["correct"]["0"]) for entry in rounds}) > 1
    assert [entry["round"] for entry in rounds] == [0, 1, 2, 3]
    accuracy = sum(rounds[-1]["correct"]["server"]) / len(stream.plan.test)
    assert trainer.callback_metrics["server/accuracy"].item() == pytest.approx(accuracy)


def test_record_counts_use_evaluation_mode(fit, make_stream, make_task):
    stream, metrics = make_stream(), ContinualMetrics()
    task, by_hand = make_task(model=nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.8))), ByHand(stream)
    fit(task, stream, [metrics, by_hand])
    assert [entry["correct"] for entry in metrics.record["rounds"]] == by_hand.rounds


def test_record_describes_stream(fit, make_stream, make_task):
    stream, metrics, task = make_stream(class_order=[2, 0, 1, 3]), ContinualMetrics(), make_task()
    fit(task, stream, [metrics])
    record = metrics.record
    assert record["groups"] == ["0", "1", "2", "3"]
    assert record["totals"] == np.bincount(stream.y[stream.plan.test]).tolist()
    assert record["tasks"] == {name: [[0, 2], [1, 3]] for name in ("0", "1", "2", "server")}
    assert [entry["experience"] for entry in record["rounds"]] == [
        dict.fromkeys(["0", "1", "2", "server"], experience) for experience in (0, 1)
    ]
    size = sum(value.nbytes for value in task.state_dict().values())
    for entry in record["rounds"]:
        assert entry["upload_bytes"] == entry["download_bytes"] == dict.fromkeys("012", size)
        assert entry["dropped"] == {} and entry["no_data"] == [] and entry["seconds"] > 0


def test_record_domain_incremental_counts_by_domain(fit, make_stream, make_task):
    group = np.arange(240) // 80
    stream, metrics = make_stream(scenario="domain-incremental", group=group), ContinualMetrics()
    by_hand = ByHand(stream, groups=3)
    fit(make_task(), stream, [metrics, by_hand])
    assert [entry["correct"] for entry in metrics.record["rounds"]] == by_hand.rounds
    assert metrics.record["totals"] == np.bincount(group[stream.plan.test]).tolist()


@pytest.mark.parametrize(("readout", "washout", "steps"), [("steps", 0, 9), ("steps", 4, 5), ("last", 0, 1)])
def test_record_outputs_per_step_count_each_step(
    fit, make_series_stream, make_reservoir, make_reservoir_task, readout, washout, steps
):
    stream, metrics = make_series_stream(3, 2), ContinualMetrics(evaluate_on_train=True)
    task = make_reservoir_task(make_reservoir(washout=washout), readout=readout)
    by_hand = []

    class Count(Callback):
        def on_round_end(self, trainer, pl_module):
            x, y = stream.get_samples(stream.plan.test)
            groups, right = stream.plan.groups[stream.plan.test], [0, 0]
            for i in range(len(y)):
                for output in pl_module(x[i : i + 1]).reshape(-1, 4):
                    right[groups[i]] += int(output.argmax() == y[i])
            by_hand.append({"server": right})

    trainer = fit(task, stream, [metrics, Count()])
    record = metrics.record
    assert [entry["correct"] for entry in record["rounds"]] == by_hand
    assert record["totals"] == (np.bincount(stream.plan.groups[stream.plan.test]) * steps).tolist()
    accuracy = sum(by_hand[-1]["server"]) / (steps * len(stream.plan.test))
    assert trainer.callback_metrics["server/accuracy"].item() == pytest.approx(accuracy)
    x, y = stream.get_samples(np.concatenate([rows for current in stream.plan.train for rows in current.values()]))
    right = (task(x).reshape(len(y), -1, 4).argmax(-1) == y[:, None]).sum()
    assert record["training"] == {"correct": int(right), "total": len(y) * steps}


@pytest.mark.parametrize("rounds_per_experience", [1, 3])
def test_evaluate_on_train_counts_each_sample_once(fit, make_stream, make_task, rounds_per_experience):
    stream, metrics, task = make_stream(rounds_per_experience=rounds_per_experience), ContinualMetrics(), make_task()
    fit(task, stream, [metrics])
    assert "training" not in metrics.record and "train_accuracy/server" not in summarize(metrics.record)
    metrics = ContinualMetrics(evaluate_on_train=True)
    fit(task, stream, [metrics])
    rows = sorted({int(i) for current in stream.plan.train for rows in current.values() for i in rows})
    assert len(rows) == 240 - len(stream.plan.test)
    x, y = stream.get_samples(np.array(rows))
    right = int((task.eval()(x).argmax(1) == y).sum())
    assert metrics.record["training"] == {"correct": right, "total": len(rows)}
    assert summarize(metrics.record)["train_accuracy/server"] == right / len(rows)


@pytest.mark.parametrize(
    ("clients", "tested"), [("all", {"n", "one", "x"}), ("none", set()), (["n", "x"], {"n", "x"}), ([], set())]
)
def test_clients_argument_selects_tested_models(fit, make_stream, make_task, clients, tested):
    metrics = ContinualMetrics(clients)
    fit(make_task(), make_stream(np.array(["n", "one", "x"])[np.arange(240) // 4 % 3]), [metrics])
    assert [set(entry["correct"]) for entry in metrics.record["rounds"]] == [{*tested, "server"}] * 2


def test_record_second_fit_starts_new_record(fit, make_stream, make_task):
    metrics = ContinualMetrics()
    fit(make_task(), make_stream(), [metrics])
    first = copy.deepcopy(metrics.record)
    fit(make_task(), make_stream(), [metrics])
    assert [entry["correct"] for entry in metrics.record["rounds"]] == [entry["correct"] for entry in first["rounds"]]


def test_record_counts_sum_over_batches(fit, make_stream, make_task):
    stream, metrics, task = make_stream(samples=2800, test=0.4), ContinualMetrics(clients="none"), make_task()
    fit(task, stream, [metrics], max_epochs=1)
    assert len(stream.plan.test) > 2 * 512
    assert metrics.record["rounds"][-1]["correct"]["server"] == counts(task.eval(), stream, 4)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"clients": "some"}, (InvalidValueError, "clients")),
        ({"clients": ["seven"]}, (UnknownNameError, "clients")),
        ({"split": "train"}, (UnknownNameError, "split")),
        ({"split": "validation"}, (MissingValueError, "split")),
        ({"when": "never"}, (UnknownNameError, "when")),
    ],
)
def test_continual_metrics_invalid_arguments_raise(fit, make_stream, make_task, words, expected):
    with raises(*expected):
        fit(make_task(), make_stream(), [ContinualMetrics(**words)])


def test_continual_metrics_without_stream_raises(make_task, samples, train):
    with raises(InvalidValueError, "datamodule"):
        train(make_task(), [ContinualMetrics()], samples())


@pytest.mark.parametrize("when", ["trained", "aggregated"])
def test_plain_trainer_record_equals_single_client_federation(fit, make_stream, make_task, when):
    records, words = [], {"num_clients": 1, "rounds_per_experience": 2}
    for strategy in (None, "auto"):
        metrics = ContinualMetrics(clients="none", when=when, evaluate_before_fit=True, evaluate_on_train=True)
        trainer = fit(make_task(), make_stream(**words), [metrics], strategy=strategy, max_epochs=4)
        counts = metrics.record["rounds"][-1]["correct"]["server"]
        assert trainer.callback_metrics["server/accuracy"].item() == pytest.approx(sum(counts) / 48)
        records.append(metrics.record)
    federated, plain = records
    assert [entry["correct"] for entry in federated["rounds"]] == [entry["correct"] for entry in plain["rounds"]]
    for name in ("groups", "totals", "tasks", "start", "training"):
        assert federated[name] == plain[name]
    federation_only = ("bytes", "seconds", "train_samples")
    left, right = (
        {k: v for k, v in summarize(r).items() if not any(word in k for word in federation_only)} for r in records
    )
    assert left == right and "forgetting/server" in left
    assert plain["rounds"][-1]["upload_bytes"] == {}


@pytest.mark.parametrize("epoch", [1, 3])
@pytest.mark.parametrize("make", [lambda: [Replay(12), EWC(2.0)], lambda: [GEM(12)], lambda: [ICaRL(12)], list])
def test_plain_trainer_resumed_fit_continues_record(fit, make_stream, make_task, tmp_path, make, epoch):
    words, options = {"num_clients": 1, "rounds_per_experience": 2}, {"strategy": "auto", "max_epochs": 4}
    whole, parts = make_task(), make_task(seed=9)
    records = [ContinualMetrics(evaluate_on_train=True), ContinualMetrics(evaluate_on_train=True)]
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    saving = {"enable_checkpointing": True}
    fit(whole, make_stream(**words), [*make(), records[0], saver], trainer_args=saving, **options)
    path = tmp_path / f"epoch={epoch}.ckpt"
    fit(parts, make_stream(**words), [*make(), records[1]], ckpt_path=path, **options)
    assert all(torch.equal(value, parts.state_dict()[name]) for name, value in whole.state_dict().items())
    left, right = ([entry["correct"] for entry in metrics.record["rounds"]] for metrics in records)
    assert left == right and len(left) == 4
    assert records[0].record["training"] == records[1].record["training"]


def test_plain_trainer_metrics_before_predicting_method_raises(fit, make_stream, make_task):
    words = {"strategy": "auto", "max_epochs": 1}
    with raises(InvalidValueError, "callbacks", value="ICaRL"):
        fit(make_task(), make_stream(num_clients=1), [ContinualMetrics(), ICaRL(12)], **words)
    fit(make_task(), make_stream(num_clients=1), [ICaRL(12), ContinualMetrics()], **words)


def test_split_validation_counts_validation_samples(fit, make_stream, make_task):
    stream, metrics, task = make_stream(validation=0.5), ContinualMetrics(split="validation"), make_task()
    fit(task, stream, [metrics])
    x, y = stream.get_samples(stream.plan.validation)
    with torch.no_grad():
        right = y[task.eval()(x).argmax(1) == y]
    assert metrics.record["rounds"][-1]["correct"]["server"] == torch.bincount(right, minlength=4).tolist()
    assert metrics.record["totals"] == torch.bincount(y, minlength=4).tolist()
    assert metrics.record["totals"] != torch.bincount(stream.get_samples(stream.plan.test)[1], minlength=4).tolist()


class Start(Callback):
    """Evaluates the model before the first round."""

    def __init__(self, stream):
        self.stream = stream

    def on_train_start(self, trainer, pl_module):
        self.counts = counts(
            copy.deepcopy(pl_module).eval(), self.stream, 4, self.stream.plan.tasks[self.stream.plan.clients[0]][0]
        )


def test_evaluate_before_fit_counts_initial_model(fit, make_stream, make_task, tmp_path):
    stream, metrics, plain, task = (
        make_stream(),
        ContinualMetrics(evaluate_before_fit=True),
        ContinualMetrics(),
        make_task(),
    )
    start, by_hand = Start(stream), ByHand(stream)
    trainer = fit(task, stream, [metrics, start, by_hand], max_epochs=1)
    trainer.save_checkpoint(tmp_path / "round.ckpt")
    assert metrics.record["start"] == start.counts != metrics.record["rounds"][0]["correct"]["server"]
    assert [entry["correct"] for entry in metrics.record["rounds"]] == by_hand.rounds
    first_task = stream.plan.tasks["0"][0]
    assert start.counts == counts(make_task().eval(), stream, 4, first_task)
    continued = ContinualMetrics(evaluate_before_fit=True)
    fit(make_task(seed=1), make_stream(), [continued], ckpt_path=tmp_path / "round.ckpt")
    assert continued.record["start"] == start.counts and len(continued.record["rounds"]) == 2
    fit(make_task(seed=1), stream, [metrics, start])
    assert metrics.record["start"] == start.counts == counts(make_task(seed=1).eval(), stream, 4, first_task)
    fit(make_task(), stream, [plain])
    assert "start" not in plain.record


def test_evaluate_before_fit_base_session_is_experience_0(fit, make_task):
    """Before the first round, the accuracy covers the classes of the base session.

    After each later session, the accuracy covers all classes of the sessions so far.
    """
    arguments = {
        "num_people": 4, "num_base_people": 2, "num_sessions": 2, "num_nodes": 2,
        "train_per_class": 20, "test_per_class": 10,
        "rounds_per_session": 2,
    }  # fmt: skip
    rng = np.random.default_rng(0)
    y = np.arange(240) % 5
    x = (rng.normal(size=(240, 6)) + 2 * np.eye(5, 6)[y]).astype(np.float32)
    stream = FederatedStream.from_arrays(x, y, scenario=ODFCLScenario(**arguments), batch_size=4, seed=0)
    metrics, start, by_hand = ContinualMetrics("none", evaluate_before_fit=True), Start(stream), ByHand(stream)
    fit(make_task(), stream, [metrics, start, by_hand])
    summary, ends = summarize(metrics.record), [start.counts, by_hand.rounds[1]["server"], by_hand.rounds[3]["server"]]
    assert metrics.record["totals"] == [10] * 4
    assert metrics.record["tasks"]["server"] == [[0, 1], [2], [3]]
    assert [entry["experience"]["server"] for entry in metrics.record["rounds"]] == [1, 1, 2, 2]
    for experience, right in enumerate(ends):
        seen = 2 + experience
        assert summary[f"stream_accuracy_{experience}/server"] == pytest.approx(sum(right[:seen]) / (10 * seen))
    assert summary["stream_accuracy/server"] == summary["final_accuracy/server"] == sum(ends[-1]) / 40


class Doubles(Method):
    """A method that doubles the weights of the head in predictions of client 1, after the client has trained."""

    def personalize(self, client, state):
        return {**state, "model.2.weight": 2 * state["model.2.weight"]} if client.method_state else state

    def update_client_state(self, client, trained_state, data):
        return {"there": torch.ones(1)} if client.client_round.client_id == "1" else client.method_state


@pytest.mark.seconds
def test_when_aggregated_unreachable_node_uses_own_weights(fit, make_stream, make_task):
    stream, metrics, task = make_stream(rounds_per_experience=2), ContinualMetrics(when="aggregated"), make_task()
    by_hand = ByHand(stream)
    fit(
        task,
        stream,
        [metrics, by_hand],
        swarm=Swarm(missed_rounds={"1": [2, 3]}),
        max_vectorized_clients=1,
        local_epochs=3,
    )
    correct = metrics.record["rounds"][-1]["correct"]
    assert correct["1"] == by_hand.rounds[-1]["1"] != correct["server"]
    assert correct["0"] == correct["2"] == correct["server"] == by_hand.rounds[-1]["server"]
    assert correct["0"] != by_hand.rounds[-1]["0"]


def test_when_aggregated_tests_personalized_models(fit, make_stream, make_task):
    stream, metrics = make_stream(rounds_per_experience=2), ContinualMetrics(when="aggregated")
    task = make_task(model=nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)))
    trainer = fit(task, stream, [metrics, Doubles()], reductions={"model.2.bias": "local"}, participation=2)
    rounds, store = metrics.record["rounds"], trainer.strategy.server.client_store
    assert [set(entry["correct"]) for entry in rounds] == [set(), {"server", "0", "1", "2"}] * 2
    seen = sorted(stream.plan.tasks["0"][0])
    first = rounds[1]["correct"]["0"]
    assert [first[g] is None for g in range(4)] == [g not in seen for g in range(4)]
    assert "final_accuracy/0" not in summarize({**metrics.record, "rounds": rounds[:2]})
    assert {"average_accuracy/0", "forgetting/clients"} <= set(summarize(metrics.record))
    for client in "012":
        own, state = store[client].get("model", {}), task.state_dict()
        by_hand = copy.deepcopy(task)
        by_hand.load_state_dict({**state, **own})
        if "Doubles" in store[client]:
            by_hand.model[2].weight.data *= 2
        assert rounds[-1]["correct"][client] == counts(by_hand.eval(), stream, 4)
    assert rounds[-1]["correct"]["server"] == counts(task.eval(), stream, 4)
    assert any(rounds[-1]["correct"][client] != rounds[-1]["correct"]["server"] for client in "012")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))


class LastModels(Callback):
    """Stores each client's model after its latest training in each experience, and the round of this training."""

    def __init__(self):
        self.models = {}

    def on_client_end(self, trainer, pl_module, client_round):
        own = copy.deepcopy(pl_module.model).eval()
        # `Doubles` doubles these weights.
        if client_round.client_id == "1":
            own[2].weight.data *= 2
        self.models[client_round.client_id, client_round.experience_idx] = client_round.round_idx, own


@pytest.mark.seconds
@pytest.mark.parametrize("max_vectorized_clients", [1, 3])
def test_when_both_tests_local_models_after_last_training(fit, make_stream, make_task, max_vectorized_clients):
    stream, last = make_stream(rounds_per_experience=4), LastModels()
    both = ContinualMetrics(when="both", classes="all")
    options = {
        "reductions": {"model.2.bias": "local"},
        "participation": 2,
        "max_vectorized_clients": max_vectorized_clients,
    }

    def run(*callbacks):
        task = make_task(model=net())
        return fit(task, stream, [Doubles(), *callbacks], **options), task.state_dict()

    _, state = run(both, last)
    plain = ContinualMetrics(when="aggregated", classes="all")
    _, as_before = run(plain)
    # The evaluation of the clients' models does not change the training.
    torch.testing.assert_close(state, as_before, rtol=0, atol=0)
    assert [e["correct"] for e in both.record["rounds"]] == [e["correct"] for e in plain.record["rounds"]]
    found = {
        (c, entry["experience"][c]): (entry["round"], n)
        for entry in both.record["rounds"]
        for c, n in entry["local"].items()
    }
    assert found.keys() == last.models.keys() and {r % 4 for r, _ in found.values()} > {3}
    x, y = stream.get_samples(stream.plan.test)
    for (client, experience), (round_idx, counts) in found.items():
        expected, model = last.models[client, experience]
        right = (model(x).argmax(1) == y).numpy()
        seen = {g for groups in stream.plan.tasks[client][: experience + 1] for g in groups}
        by_hand = [int(right[y.numpy() == g].sum()) if g in seen else None for g in range(4)]
        assert (round_idx, counts) == (expected, by_hand)
    summary, totals = summarize(both.record), both.record["totals"]
    for client in "012":
        rows = [found[client, e][1] for e in (0, 1)]
        on = [
            [sum(row[g] for g in groups) / sum(totals[g] for g in groups) if row[groups[0]] is not None else 0.0
             for groups in stream.plan.tasks[client]]
            for row in rows
        ]  # fmt: skip
        assert summary[f"average_accuracy_local/{client}"] == pytest.approx(sum(on[1]) / 2)
        assert summary[f"forgetting_local/{client}"] == pytest.approx(on[0][0] - on[1][0])
        assert summary[f"learning_accuracy_local/{client}"] == pytest.approx((on[0][0] + on[1][1]) / 2)
    own = [summary[f"average_accuracy_local/{c}"] for c in "012"]
    assert (
        summary["average_accuracy_local/clients"] == pytest.approx(sum(own) / 3) != summary["average_accuracy/clients"]
    )
    assert not {"average_accuracy_local/server", "personal_accuracy_local/0", "A_2_local/0"} & set(summary)
    assert {k: v for k, v in summary.items() if "_local" not in k} == summarize(plain.record)


def test_when_both_left_dropped_and_unsampled_clients(fit, make_stream, make_task):
    class Diverges(Method):
        def transform_upload(self, client, trained_state):
            wrong = (
                client.federation.current_round.client_round.client_id == "1"
                and client.federation.current_round.round_idx == 3
            )
            return {name: value * (float("nan") if wrong else 1) for name, value in trained_state.items()}

    metrics = ContinualMetrics(when="both")
    swarm = Swarm(leaves_at={"2": 2}, missed_rounds={"0": [3]})
    # Round 3 is empty, because the upload of the only remaining client is dropped.
    options = {"swarm": swarm, "max_vectorized_clients": 1, "on_empty_round": "warn"}
    fit(make_task(), make_stream(rounds_per_experience=4), [metrics, Diverges()], **options)
    rounds = metrics.record["rounds"]
    assert "1" in rounds[3]["dropped"]
    assert [set(entry["local"]) for entry in rounds] == [set(), {"2"}, set(), {"0"}, *[set()] * 3, {"0", "1"}]
    summary = summarize(metrics.record)
    # Client 2 leaves during the first experience, so it has no values for the second experience.
    assert "average_accuracy_local/1" in summary and "average_accuracy_local/2" not in summary
    metrics = ContinualMetrics(["0"], when="both")
    fit(make_task(), make_stream(rounds_per_experience=2), [metrics], participation=1)
    drawn = [[c for c in "012" if c in entry["upload_bytes"]] for entry in metrics.record["rounds"]]
    expected = [{"0"} & {*now} - ({*drawn[r + 1]} if r % 2 == 0 else set()) for r, now in enumerate(drawn)]
    assert [set(entry["local"]) for entry in metrics.record["rounds"]] == expected


@pytest.mark.seconds
@pytest.mark.parametrize("cut", [1, 2, 3, 5])
def test_when_both_resumed_fit_gives_same_record(fit, make_stream, make_task, tmp_path, cut):
    records, options = [], {"participation": 2, "reductions": {"model.2.bias": "local"}}
    for path in (None, tmp_path / "round.ckpt"):
        metrics, words = ContinualMetrics(when="both"), {"rounds_per_experience": 3}
        task = make_task(model=net())
        if path is not None:
            first = [ContinualMetrics(when="both"), Replay(12)]
            fit(task, make_stream(**words), first, max_epochs=cut, **options).save_checkpoint(path)
        fit(task, make_stream(**words), [metrics, Replay(12)], ckpt_path=path, **options)
        records.append(metrics.record)
    left, right = ([(e["local"], e["correct"]) for e in record["rounds"]] for record in records)
    assert left == right and any(own for own, _ in left)
    assert records[0]["client_state_bytes"] == records[1]["client_state_bytes"]


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_client_state_bytes_counted_at_end_of_fit(fit, make_stream, make_task, store):
    metrics, stream = ContinualMetrics(clients="none"), make_stream(rounds_per_experience=1)
    options = {"reductions": {"model.2.bias": "local"}, "client_store": store}
    task = make_task(model=net())
    trainer = fit(task, stream, [metrics, Replay(12)], **options)
    kept = {client: trainer.strategy.server.client_store[client] for client in "012"}
    assert {"model", "Replay", "progress"} == set(kept["0"])
    expected = {c: sum(v.nbytes for memory in of.values() for v in memory.values()) for c, of in kept.items()}
    assert metrics.record["client_state_bytes"] == expected and expected["0"] >= 4 * 4 + 12 * (6 * 4 + 8)
    assert summarize(metrics.record)["client_state_bytes/clients"] == pytest.approx(sum(expected.values()) / 3)
    fit(make_task(), stream, [metrics])
    assert summarize(metrics.record)["client_state_bytes/clients"] == 0
    fit(make_task(), make_stream(num_clients=1), [metrics], strategy="auto", max_epochs=2)
    assert "client_state_bytes" not in metrics.record and "client_state_bytes/clients" not in summarize(metrics.record)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_to_predictions_ties_and_nan_equal_torch_argmax(dtype):
    outputs = torch.randint(5, (40, 3, 9), generator=torch.Generator().manual_seed(0)).to(dtype)
    outputs[0, 0, 4] = outputs[0, 1, 3:] = torch.nan
    outputs[1, 0, 2] = outputs[1, 0, 5] = torch.inf
    outputs[1, 1] = -torch.inf
    assert torch.equal(to_predictions(outputs), outputs.argmax(dim=-1))


class Unseen(nn.Module):
    """A network that predicts class 3 for every sample, and the right class second."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        outputs = x[:, :4] * self.weight
        return outputs + torch.tensor([0.0, 0.0, 0.0, 1e6])


def test_classes_seen_ignores_outputs_of_later_classes(fit, make_stream, make_task):
    """Without the class that has not appeared, all predictions of the first experience are right.

    With all classes, the accuracy of the first experience is 0, and a class appears to be forgotten less than it is.
    """
    values = {}
    for classes in ("seen", "all"):
        metrics, y = ContinualMetrics(classes=classes), np.arange(240) % 4
        scenario = ClassIncremental(num_experiences=2)
        stream = FederatedStream.from_arrays(np.eye(6, dtype=np.float32)[y], y, scenario=scenario, seed=0)
        fit(make_task(model=Unseen()), stream, [metrics])
        values[classes] = summarize(metrics.record)
    assert values["seen"]["stream_accuracy_0/server"] == 1.0 and values["all"]["stream_accuracy_0/server"] == 0.0
    assert values["seen"]["final_accuracy/server"] == values["all"]["final_accuracy/server"]
    assert values["seen"]["forgetting/server"] > values["all"]["forgetting/server"]


@pytest.mark.parametrize("when", ["aggregated", "both"])
def test_server_each_round_adds_tests_of_the_server_only(fit, make_stream, make_task, when):
    records = []
    for each_round in (False, True):
        metrics = ContinualMetrics(when=when, server_each_round=each_round)
        fit(make_task(), make_stream(rounds_per_experience=3), [metrics])
        records.append(metrics.record["rounds"])
    less, more = records
    assert [[*entry["correct"]] for entry in less if entry["correct"]] == [["server", "0", "1", "2"]] * 2
    assert [[*entry["correct"]] for entry in more] == ([["server"]] * 2 + [["server", "0", "1", "2"]]) * 2
    assert all(a["correct"] == b["correct"] for a, b in zip(less, more, strict=True) if a["correct"])


@pytest.mark.parametrize("max_vectorized_clients", [1, 3])
def test_train_samples_and_processor_time_of_rounds(fit, make_stream, make_task, max_vectorized_clients):
    stream, metrics = make_stream(partition="dirichlet"), ContinualMetrics()
    options = {"local_epochs": 3, "max_vectorized_clients": max_vectorized_clients}
    fit(make_task(), stream, [metrics], **options)
    for entry, current in zip(metrics.record["rounds"], stream.plan.train, strict=True):
        assert entry["train_samples"] == {client: 3 * len(rows) for client, rows in sorted(current.items())}
        assert entry["processor_seconds"] > 0
    total = sum(3 * len(rows) for current in stream.plan.train for rows in current.values())
    assert summarize(metrics.record)["train_samples/total"] == total


def test_correct_samples_are_those_of_the_last_test_in_an_experience(fit, make_stream, make_task):
    stream, metrics, task = make_stream(rounds_per_experience=2), ContinualMetrics(), make_task()
    fit(task, stream, [metrics])
    x, y = stream.get_samples(stream.plan.test)
    with torch.no_grad():
        expected = (task.eval()(x).argmax(1) == y).numpy()
    texts = [entry.get("correct_samples", {}).get("server") for entry in metrics.record["rounds"]]
    assert texts[0] is None and texts[2] is None and None not in (texts[1], texts[3])
    found = decode_bits(texts[3], sum(metrics.record["totals"]))
    assert found.tolist() == expected.tolist() and 0 < found.sum() < len(found)
