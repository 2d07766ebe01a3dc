"""Tests of the runs that MLflow gets from fits and commands: names, tags, parameters, metrics and tables."""

import json
from pathlib import Path

import pandas as pd
import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger

from lightning_fcl.callbacks import EWC, ContinualMetrics
from lightning_fcl.callbacks.run_tracking import log_settings, name_runs
from lightning_fcl.cli.main import main
from lightning_fcl.evaluation.metrics import overall_metrics, summarize
from lightning_fcl.runs.paper_rows import recipes_folder


@pytest.fixture
def new_logger(tmp_path):
    """Return a function that makes a logger with a database in the test's folder."""

    def make(**arguments):
        uri = f"sqlite:///{tmp_path}/runs.db"
        return MLFlowLogger("digits", tracking_uri=uri, artifact_location=str(tmp_path / "artifacts"), **arguments)

    return make


def run_of(logger):
    return logger.experiment.get_run(logger.run_id)


def steps_of(logger, name):
    return [(one.step, one.value) for one in logger.experiment.get_metric_history(logger.run_id, name)]


def test_mlflow_gets_method_seed_tables_and_final_metrics(fit, make_stream, make_task, new_logger, tmp_path, capfd):
    logger, metrics = new_logger(), ContinualMetrics()
    others = [CSVLogger(tmp_path, "", ""), TensorBoardLogger(tmp_path, "", "")]
    stream = make_stream(rounds_per_experience=2)
    fit(make_task(), stream, [EWC(1.0), metrics], trainer_args={"logger": [logger, *others]}, seed=3)
    captured = capfd.readouterr()
    assert "Downloading" not in captured.out + captured.err
    data, final = run_of(logger).data, summarize(metrics.record)
    assert data.params["method"] == "EWC" and data.params["seed"] == "3" and data.params["num_classes"] == "4"
    for name in overall_metrics(final):
        assert data.metrics[name] == pytest.approx(final[name]) and steps_of(logger, name)[-1][0] == 3
    assert [step for step, _ in steps_of(logger, "server/accuracy")] == [0, 1, 2, 3]
    assert not any(name.split("/")[0] in "012" for name in data.metrics)
    for experience in range(2):
        path = logger.experiment.download_artifacts(logger.run_id, f"clients/experience-{experience}.json")
        table = pd.read_json(path, orient="split")
        assert [*table.columns] == ["round", "client", "accuracy", "train_loss"] and len(table) == 6
        for entry in metrics.record["rounds"][2 * experience : 2 * experience + 2]:
            own = table[table["round"] == entry["round"]]
            assert [*own["client"]] == ["client 0", "client 1", "client 2"]
            expected = [sum(entry["correct"][client]) / sum(metrics.record["totals"]) for client in "012"]
            assert [*own["accuracy"]] == pytest.approx(expected)


def test_mlflow_name_and_tags_of_the_user_are_kept(new_logger):
    for arguments, name, recipe in (
        ({}, "run", "quickstart"),
        ({"run_name": "mine"}, "mine", "quickstart"),
        ({"tags": {"recipe": "ours", "mlflow.runName": "mine"}}, "mine", "ours"),
    ):
        logger = new_logger(**arguments)
        name_runs([logger], "run", "quickstart")
        run = run_of(logger)
        assert (run.info.run_name, run.data.tags["recipe"]) == (name, recipe)
    again = new_logger(run_id=logger.run_id)
    name_runs([again], "other", "other")
    assert run_of(again).info.run_name == "mine"


def test_mlflow_parameters_of_a_run_are_not_changed(new_logger):
    logger = new_logger()
    log_settings([logger], {"trainer": {"max_epochs": 2}, "reductions": {"head.*": "local"}})
    log_settings([logger], {"trainer": {"max_epochs": 3, "devices": 1}})
    params = {"trainer.max_epochs": "2", "reductions.head._": "local", "trainer.devices": "1"}
    assert run_of(logger).data.params == params


def test_mlflow_resumed_command_continues_its_run(small_recipe, tmp_path, monkeypatch, without_pages):
    # Other libraries in this environment can install an older version, with which commands do not work.
    pytest.importorskip("jsonargparse", minversion="4.49")
    monkeypatch.chdir(tmp_path)
    arguments = {"experiment_name": "digits", "tracking_uri": "sqlite:///runs.db", "artifact_location": "artifacts"}
    logger = {"class_path": "lightning.pytorch.loggers.MLFlowLogger", "init_args": arguments}
    content = small_recipe(rounds=2, clients=3)
    content["trainer"] = {**content.get("trainer", {}), "logger": logger}
    Path("tracked.yaml").write_text(yaml.safe_dump(content))
    words = ["--config", str(recipes_folder() / "quickstart.yaml"), "--config", "tracked.yaml"]
    with without_pages():
        main(["fit", *words, "--trainer.max_epochs", "1", "--out", "runs/mine"])
        main(["fit", "runs/mine", "--trainer.max_epochs", "2"])
        main(["fit", *words, "--trainer.max_epochs", "1", "--out", "runs/other"])
    (run_id,) = json.loads(Path("runs/mine/loggers.json").read_text())["run_ids"]
    logger = MLFlowLogger("digits", tracking_uri="sqlite:///runs.db", run_id=run_id)
    run = run_of(logger)
    assert (run.info.run_name, run.data.tags["recipe"], run.info.status) == ("mine", "quickstart", "FINISHED")
    assert [step for step, _ in steps_of(logger, "server/accuracy")] == [0, 1]
    metrics = json.loads(Path("runs/mine/metrics.json").read_text())
    assert {name: run.data.metrics[name] for name in metrics} == pytest.approx(metrics)
    assert run.data.params["trainer.callbacks.Replay.memory_size"] == "50"
    assert len(logger.experiment.search_runs([logger.experiment_id])) == 2
