"""Tests of names, settings, tables and final metrics that W&B gets. W&B runs offline."""

import json

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, WandbLogger

from lightning_fcl.callbacks import EWC, ContinualMetrics, Replay
from lightning_fcl.callbacks.run_tracking import flatten_settings, name_classes, name_runs, resume_runs
from lightning_fcl.evaluation.metrics import overall_metrics, summarize


@pytest.fixture(autouse=True)
def _environment(monkeypatch, tmp_path):
    for name in ("WANDB_NAME", "WANDB_RUN_GROUP", "WANDB_RUN_ID", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))


def settings_of(logger):
    return tuple(logger._wandb_init.get(name) for name in ("name", "group", "id"))


def test_name_runs_sets_the_name_and_the_group():
    logger = WandbLogger(project="digits")
    name_runs([CSVLogger("."), logger], "quickstart/seed-0", "quickstart")
    assert settings_of(logger) == ("quickstart/seed-0", "quickstart", None)


@pytest.mark.parametrize(
    ("arguments", "variables", "expected"),
    [
        ({"name": "mine"}, {}, ("mine", "recipe", None)),
        ({"group": "ours"}, {}, ("run", "ours", None)),
        ({"id": "abc"}, {}, (None, None, "abc")),
        ({"version": "abc", "group": "ours"}, {}, (None, "ours", "abc")),
        ({}, {"WANDB_NAME": "mine"}, (None, "recipe", None)),
        ({}, {"WANDB_RUN_GROUP": "ours"}, ("run", None, None)),
        ({}, {"WANDB_RUN_ID": "abc"}, (None, None, None)),
    ],
)
def test_name_runs_keeps_values_of_the_user(monkeypatch, arguments, variables, expected):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    logger = WandbLogger(**arguments)
    name_runs([logger], "run", "recipe")
    resume_runs([logger], ["old"])
    has_run = bool(expected[2] or variables.get("WANDB_RUN_ID"))
    assert settings_of(logger) == (*expected[:2], expected[2] if has_run else "old")


def test_resume_runs_continues_online_runs_only(monkeypatch):
    online, offline, other = WandbLogger(), WandbLogger(offline=True), WandbLogger(mode="offline")
    resume_runs([online, offline, other], ["a", "b", "c"])
    assert [logger._wandb_init["id"] for logger in (online, offline, other)] == ["a", None, None]
    assert online.version == "a"
    monkeypatch.setenv("WANDB_MODE", "offline")
    again = WandbLogger()
    resume_runs([again], ["a"])
    assert again._wandb_init["id"] is None
    monkeypatch.delenv("WANDB_MODE")
    resume_runs([again], ["a", "b"])  # The number of loggers has changed.
    assert again._wandb_init["id"] is None


def test_name_classes_names_settings_like_the_command_line():
    callbacks = [
        {"class_path": "lightning_fcl.callbacks.Replay", "init_args": {"memory_size": 5, "transform": None}},
        {"class_path": "mine.Replay", "init_args": {"memory_size": 6}},
        {"class_path": "lightning_fcl.callbacks.CCVR"},
    ]
    content = {"trainer": {"callbacks": callbacks, "logger": None, "plugins": []}, "sizes": [1, 2]}
    assert dict(flatten_settings(name_classes(content))) == {
        "trainer.callbacks.Replay.memory_size": 5,
        "trainer.callbacks.Replay-2.memory_size": 6,
        "trainer.callbacks.CCVR": {},
        "trainer.plugins": [],
        "sizes": [1, 2],
    }


def test_values_of_clients_are_monitored_but_not_logged_as_scalars(fit, make_stream, make_task, tmp_path):
    logger = CSVLogger(tmp_path, "", "")
    callbacks = [ContinualMetrics(), EarlyStopping("2/accuracy"), EarlyStopping("clients/accuracy_min")]
    trainer = fit(make_task(), make_stream(), callbacks, trainer_args={"logger": logger})
    columns = (tmp_path / "metrics.csv").read_text().splitlines()[0].split(",")
    assert "server/accuracy" in columns and not any(name.split("/")[0] in "012" for name in columns)
    values = torch.stack([trainer.callback_metrics[f"{client}/accuracy"] for client in range(3)])
    losses = torch.tensor([loss.mean for loss in trainer.strategy.server.record.train_losses.values()])
    for name, numbers in (("accuracy", values), ("train_loss", losses)):
        expected = {
            "mean": numbers.mean(),
            "min": numbers.min(),
            "max": numbers.max(),
            "std": numbers.std(correction=0),
        }
        for kind, value in expected.items():
            assert float(trainer.callback_metrics[f"clients/{name}_{kind}"]) == pytest.approx(float(value), rel=1e-5)


def test_losses_are_logged_in_rounds_without_tests(fit, make_stream, make_task, tmp_path):
    logger = CSVLogger(tmp_path, "", "")
    stream = make_stream(rounds_per_experience=2)
    fit(make_task(), stream, [ContinualMetrics(when="aggregated")], trainer_args={"logger": logger})
    lines = [line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines()]
    filled = {
        name: sum(bool(line[lines[0].index(name)]) for line in lines[1:])
        for name in ("clients/train_loss_mean", "clients/accuracy_mean", "server/accuracy")
    }
    assert filled == {"clients/train_loss_mean": 4, "clients/accuracy_mean": 2, "server/accuracy": 2}


@pytest.fixture
def wandb_fit(fit, make_stream, make_task, tmp_path):
    """Return a function that fits with an offline W&B logger. It returns the Trainer, the run and the logged values."""
    import wandb

    def run(callbacks=(), loggers=(), **options):
        logger, logged = WandbLogger(project="digits", save_dir=tmp_path, offline=True), []
        log = logger.experiment.log
        logger.experiment.log = lambda values, *args, **kwargs: (logged.append(values), log(values, *args, **kwargs))
        trainer = fit(
            make_task(),
            make_stream(rounds_per_experience=2),
            [*callbacks, ContinualMetrics()],
            trainer_args={"logger": [logger, *loggers], "enable_checkpointing": True},
            **options,
        )
        return trainer, logger.experiment, logged

    yield run
    wandb.finish()


@pytest.mark.slow
def test_wandb_gets_method_seed_tables_and_final_metrics(wandb_fit, tmp_path):
    methods = [Replay(8), EWC(1.0)]
    trainer, run, logged = wandb_fit([*methods, ModelCheckpoint(tmp_path)], [CSVLogger(tmp_path, "", "")], seed=3)
    assert run.config["method"] == "Replay, EWC" and run.config["seed"] == 3
    metrics = next(one for one in trainer.callbacks if isinstance(one, ContinualMetrics))
    final = summarize(metrics.record)
    for name in overall_metrics(final):
        assert run.summary[name] == pytest.approx(final[name]), name
    tables = [values for values in logged if "clients" in values]
    assert [values["trainer/global_step"] for values in tables] == [0, 1, 2, 3]
    for values, entry in zip(tables, metrics.record["rounds"], strict=True):
        table = values["clients"]
        assert table.columns == ["client", "accuracy", "train_loss"]
        accuracies = {client: sum(entry["correct"][client]) / sum(metrics.record["totals"]) for client in "012"}
        assert {row[0]: row[1] for row in table.data} == pytest.approx(accuracies)
        assert all(row[2] > 0 for row in table.data)
    paths = sorted(tmp_path.rglob("*.table.json"))
    assert len(paths) == 4 and all(len(json.loads(path.read_text())["data"]) == 3 for path in paths)
    steps = [values["trainer/global_step"] for values in logged if "server/accuracy" in values]
    assert steps == [0, 1, 2, 3]
    assert not any(name.split("/")[0] in "012" for values in logged for name in values)


@pytest.mark.slow
def test_wandb_plain_trainer_gets_method_and_final_metrics(quiet, make_stream, make_task, tmp_path):
    import wandb

    logger = WandbLogger(project="digits", save_dir=tmp_path, offline=True)
    metrics = ContinualMetrics()
    trainer = L.Trainer(max_epochs=2, callbacks=[EWC(1.0), metrics], **{**quiet, "logger": logger})
    trainer.fit(make_task(), datamodule=make_stream(num_clients=1))
    assert logger.experiment.config["method"] == "EWC" and logger.experiment.config["seed"] == 0
    expected = summarize(metrics.record)["final_accuracy/server"]
    assert logger.experiment.summary["final_accuracy/server"] == pytest.approx(expected)
    wandb.finish()
