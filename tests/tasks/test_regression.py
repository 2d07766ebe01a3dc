"""Tests of federated regression, compared with hand-written loops and metrics."""

import copy
import csv
import re

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from raising import raises
from torch import nn
from torchmetrics import MeanAbsoluteError

from lightning_fcl import FederatedStream, ReservoirRegressor
from lightning_fcl.callbacks import EWC, GEM, ContinualMetrics, FedProx, Replay
from lightning_fcl.callbacks.evaluator import Evaluator
from lightning_fcl.data.batching import BatchPlan, order_keys, plan_batches
from lightning_fcl.data.scenarios import DomainIncremental
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.evaluation.comparison import compare_page
from lightning_fcl.evaluation.curves import curves, matrices, stream_accuracies
from lightning_fcl.evaluation.metrics import summarize
from lightning_fcl.evaluation.record import get_quantity
from lightning_fcl.evaluation.report import render_report
from lightning_fcl.evaluation.results import write_csv, write_results
from lightning_fcl.models import MLP, EchoStateNetwork
from lightning_fcl.tasks.classification import Regressor


def arrays(samples=240, outputs=2, domains=3, seed=0):
    """Return inputs, targets, client numbers and domains. The targets are linear with different slopes per domain."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, 6)).astype(np.float32)
    domain = rng.integers(domains, size=samples)
    slopes = rng.normal(size=(domains, 6, outputs))
    y = np.einsum("ni,nio->no", x, slopes[domain]) + 0.1 * rng.normal(size=(samples, outputs))
    return x, (y if outputs > 1 else y[:, 0]).astype(np.float32), rng.integers(4, size=samples), domain


def make(outputs=2, domains=3, rounds=2, **kwargs):
    x, y, client, domain = arrays(outputs=outputs, domains=domains)
    scenario = DomainIncremental(rounds_per_experience=rounds)
    words = {"batch_size": 8, "seed": 0, "split": Split(test=0.25), **kwargs}
    stream = FederatedStream.from_arrays(x, y, client, domain, scenario=scenario, **words)
    stream.setup("fit")
    return stream


def regressor(outputs=2, kind=Regressor, lr=0.05):
    torch.manual_seed(0)
    return kind(MLP([6, 8, outputs]), outputs, lambda params: torch.optim.SGD(params, lr=lr))


def fedavg(task, stream):
    server = copy.deepcopy(task.state_dict())
    for round_idx in range(stream.plan.num_rounds):
        sums, total = {}, 0
        for client, rows in stream.plan.train[round_idx].items():
            local = copy.deepcopy(task)
            local.load_state_dict(server)
            optimizer = local.configure_optimizers()
            x, y = stream.get_samples(rows)
            y = y[:, None] if y.dim() == 1 else y
            keys = order_keys(0, [client], round_idx)
            for chosen in plan_batches(len(y), 1, BatchPlan(stream.batch_size, stream.shuffle), keys):
                optimizer.zero_grad()
                ((local.model(x[chosen]) - y[chosen]) ** 2).mean().backward()
                optimizer.step()
            for name, value in local.state_dict().items():
                sums[name] = sums.get(name, 0) + len(y) * value.double()
            total += len(y)
        server = {name: (value / total).float() for name, value in sums.items()}
    return server


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
def test_regressor_equals_hand_written_fedavg(fit, outputs, max_vectorized_clients):
    stream, task = make(outputs), regressor(outputs)
    start = copy.deepcopy(task)
    trainer = fit(task, stream, max_vectorized_clients=max_vectorized_clients, seed=0)
    assert (trainer.strategy.federation.local_trainer.num_vectorized_clients > 1) == (max_vectorized_clients == "auto")
    torch.testing.assert_close(dict(task.state_dict()), fedavg(start, stream), rtol=0, atol=1e-6)


def by_hand(module, stream, groups):
    """Return MSE and R2 on the test samples of some groups, in NumPy."""
    rows = stream.plan.test[np.isin(stream.plan.groups[stream.plan.test], groups)]
    x, y = (part.numpy() for part in stream.get_samples(rows))
    with torch.no_grad():
        error = module(torch.from_numpy(x)).numpy().astype(np.float64) - y.reshape(len(y), -1)
    spread = ((y - y.mean(axis=0)) ** 2).reshape(len(y), -1)
    return float((error**2).mean()), float((1 - (error**2).sum(axis=0) / spread.sum(axis=0)).mean())


class ByHand(ContinualMetrics):
    """A `ContinualMetrics` callback that also computes the metrics by hand after each round."""

    def on_round_end(self, trainer, pl_module):
        super().on_round_end(trainer, pl_module)
        stream, model = trainer.datamodule, copy.deepcopy(pl_module).eval()
        parts = [[0], [1], [2], [0, 1], [0, 1, 2]]
        self.found = [*getattr(self, "found", []), [by_hand(model, stream, part) for part in parts]]


@pytest.mark.parametrize("outputs", [1, 2])
def test_regressor_continual_metrics_equal_numpy(fit, outputs):
    stream, metrics = make(outputs), ByHand()
    trainer = fit(regressor(outputs), stream, [metrics], seed=0)
    # `found` has shape (rounds, parts, measures).
    record, found = metrics.record, np.array(metrics.found)
    assert [one["name"] for one in record["measures"]] == ["MSE", "R2"] and get_quantity(record).name == "MSE"
    for number, name in enumerate(("MSE", "R2")):
        rows = [entry["values"]["server"][name] for entry in record["rounds"]]
        values = [[row[part] for part in ("0", "1", "2", "0+1", "0+1+2")] for row in rows]
        np.testing.assert_allclose(values, found[..., number], rtol=2e-5, atol=2e-6)
    summary = summarize(record)
    # `last` contains the values after the last round of each task.
    last = found[1::2]
    assert summary["final_MSE/server"] == pytest.approx(found[-1, 4, 0], rel=1e-4)
    assert summary["final_R2/server"] == pytest.approx(found[-1, 4, 1], rel=1e-4)
    assert summary["general_MSE/server"] == pytest.approx(found[:, 4, 0].mean(), rel=1e-4)
    assert summary["average_R2/server"] == pytest.approx(last[2, :3, 1].mean(), rel=1e-4)
    assert summary["stream_MSE_1/server"] == pytest.approx(last[1, 3, 0], rel=1e-4)
    # Forgetting is above 0 for both measures, although a lower error and a higher R2 are better.
    lost = {
        "MSE": np.mean([last[2, d, 0] - last[d:2, d, 0].min() for d in (0, 1)]),
        "R2": np.mean([last[d:2, d, 1].max() - last[2, d, 1] for d in (0, 1)]),
    }
    assert min(lost.values()) > 0.01
    for name, value in lost.items():
        assert summary[f"forgetting_{name}/server"] == pytest.approx(value, rel=1e-4)
    gained = np.mean([last[d, d, 0] - last[2, d, 0] for d in (0, 1)])
    assert summary["backward_transfer_MSE/server"] == pytest.approx(gained, rel=1e-4)
    np.testing.assert_allclose(matrices(record, "last")["server"], last[:, :3, 0], rtol=1e-4)
    np.testing.assert_allclose(curves(record)["server"].overall, found[:, 4, 0], rtol=1e-4)
    assert stream_accuracies(record)[-1] == pytest.approx(last[2, 4, 0], rel=1e-4)
    assert trainer.callback_metrics["server/MSE"].item() == pytest.approx(found[-1, 4, 0], rel=1e-4)
    assert not [name for name in summary if "accuracy" in name or name.startswith(("A_", "F_"))]


def test_regressor_subclass_with_other_measures(fit):
    class Absolute(Regressor):
        def configure_metrics(self):
            return {"MAE": MeanAbsoluteError()}

        def sample_loss(self, output, y):
            return (output - y).abs().mean(dim=1)

    metrics, stream, task = ContinualMetrics(evaluate_on_train=True), make(), regressor(kind=Absolute)
    fit(task, stream, [metrics])
    summary = summarize(metrics.record)
    for rows, name in ((stream.plan.test, "final_MAE/server"), (None, "train_MAE/server")):
        if rows is None:
            rows = np.unique(np.concatenate([r for current in stream.plan.train for r in current.values()]))
        x, y = stream.get_samples(rows)
        with torch.no_grad():
            assert summary[name] == pytest.approx(float((task(x) - y).abs().mean()), rel=1e-5)


def test_regressor_client_local_head_is_evaluated_on_learned_groups(fit):
    metrics = ContinualMetrics(when="aggregated")
    fit(regressor(), make(), [metrics], reductions={"model.3.*": "local"})
    first, *_, last = [entry["values"] for entry in metrics.record["rounds"] if entry["values"]]
    assert set(first["0"]["MSE"]) == {"0"} and set(last["0"]["MSE"]) == {"0", "1", "2", "0+1", "0+1+2"}
    assert last["0"]["MSE"]["0+1+2"] != last["server"]["MSE"]["0+1+2"]
    assert "personal_MSE/0" in summarize(metrics.record)


@pytest.mark.seconds
def test_regressor_works_with_methods_without_classes(fit):
    states = {}
    for size, methods in ((1, [GEM(9)]), (1, ()), (1, [Replay(9, "reservoir"), EWC(5.0), FedProx(0.5)]),
                          ("auto", [Replay(9, "reservoir"), EWC(5.0), FedProx(0.5)])):  # fmt: skip
        task = regressor()
        fit(task, make(), [copy.deepcopy(method) for method in methods], max_vectorized_clients=size, seed=0)
        states[(size, len(methods))] = dict(task.state_dict())
    torch.testing.assert_close(states[(1, 3)], states[("auto", 3)], rtol=0, atol=1e-5)
    for key in ((1, 1), (1, 3)):
        assert not torch.allclose(states[key]["model.1.weight"], states[(1, 0)]["model.1.weight"], atol=1e-4)


@pytest.mark.seconds
def test_regressor_resumed_fit_has_same_record(fit, tmp_path):
    whole, parts = regressor(), regressor()
    saver, metrics, again = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1), ContinualMetrics(), ContinualMetrics()
    fit(whole, make(), [metrics, saver], trainer_args={"enable_checkpointing": True})
    fit(parts, make(), [again], ckpt_path=tmp_path / "epoch=2.ckpt")
    values = [[entry["values"] for entry in one.record["rounds"]] for one in (metrics, again)]
    assert values[0] == values[1] and len(values[0]) == 6


@pytest.mark.seconds
@pytest.mark.parametrize("domains", [3, 12])
def test_regressor_report_and_csv_name_the_measures(fit, tmp_path, domains):
    metrics = ContinualMetrics()
    fit(regressor(), make(domains=domains, rounds=1), [metrics])
    record = metrics.record
    results = {"recipe": None, "seed": 0, "metrics": summarize(record), "record": record, "expected": {}}
    results |= {"finished": True, "versions": {}, "machine": "", "seconds": 1.0, "command": "a run"}
    write_results(tmp_path, results)
    page, comparison = render_report(results), compare_page({"a run": [results]})
    assert "<dt>final_R2</dt><dd>R2 on the whole test set after the last round; higher is better</dd>" in page
    assert "<dt>forgetting_MSE</dt><dd>worsening of MSE on earlier tasks since the best value" in page
    for text in (page, comparison):
        said = re.sub("<script>.*?</script>", "", text, flags=re.DOTALL)
        assert "MSE" in said and "accuracy" not in said.lower()
    write_csv(tmp_path / "metrics.csv", record)
    lines = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    last = [line for line in lines if line["model"] == "server"][-1]
    assert float(last["R2"]) == pytest.approx(summarize(record)["final_R2/server"])
    assert float(last["MSE 1"]) == record["rounds"][-1]["values"]["server"]["MSE"]["1"]


def test_evaluator_single_sample_has_mse_but_no_r2(fit):
    task, stream = regressor(), make()
    # The fit connects the task to a Trainer, whose precision setting the evaluator uses.
    fit(task, stream, max_epochs=1)
    x, y = torch.randn(3, 6), torch.randn(3, 2)
    tester = Evaluator(stream, np.arange(3), torch.tensor([0, 1, 1]), 3, "test", (x, y))
    values = tester.evaluate(task, [(0,), (1,), (2,), (0, 1)], ["MSE", "R2"])
    assert values["R2"]["0"] is None and values["R2"]["1"] is not None and values["MSE"]["2"] is None
    with torch.no_grad():
        assert values["MSE"]["0"] == pytest.approx(float(((task(x[:1]) - y[:1]) ** 2).mean()), rel=1e-5)


def test_regressor_test_logs_measures(fit):
    task, stream = regressor(), make()
    trainer = fit(task, stream)
    logged = trainer.test(task, datamodule=stream, verbose=False)[0]
    mse, r2 = by_hand(task.eval(), stream, [0, 1, 2])
    assert logged["test/MSE"] == pytest.approx(mse, rel=1e-4) and logged["test/R2"] == pytest.approx(r2, rel=1e-4)
    assert logged["test/loss"] == pytest.approx(mse, rel=1e-4)


def test_reservoir_regressor_continual_metrics_equal_numpy(fit):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 7, 3)).astype(np.float32)
    y, domain = x.sum(axis=(1, 2))[:, None].astype(np.float32), np.arange(80) % 2
    scenario = DomainIncremental()
    stream = FederatedStream.from_arrays(x, y, rng.integers(3, size=80), domain, scenario=scenario, seed=0)
    task, metrics = ReservoirRegressor(EchoStateNetwork(3, units=30, seed=0), 1, readout="last"), ContinualMetrics()
    fit(task, stream, [metrics])
    mse, r2 = by_hand(task.eval(), stream, [0, 1])
    summary = summarize(metrics.record)
    assert summary["final_MSE/server"] == pytest.approx(mse, rel=1e-4)
    assert summary["final_R2/server"] == pytest.approx(r2, rel=1e-4) and r2 > 0.3


def test_regressor_wrong_num_outputs_raises(fit):
    with pytest.raises(InvalidValueError, check=lambda error: error.argument == "num_outputs"):
        Regressor(nn.Linear(1, 1), num_outputs=0)
    with raises(InvalidValueError, "num_outputs"):
        fit(Regressor(MLP([6, 8, 2]), 1), make(), max_vectorized_clients=1)
