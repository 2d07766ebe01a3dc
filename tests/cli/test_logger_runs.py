"""Tests of the runs that W&B gets from commands: name, group, settings, final metrics, and their end."""

import json
import os
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.loggers import WandbLogger

from lightning_fcl.cli.main import main
from lightning_fcl.errors import DamagedFileError
from lightning_fcl.runs.logger_runs import run_name
from lightning_fcl.runs.paper_rows import find_recipes, recipe_name
from lightning_fcl.runs.recipe import Recipe, Setting


@pytest.fixture
def project(tmp_path, tiny, monkeypatch):
    """Change to a new working directory, and return the arguments of a recipe with an offline W&B logger."""
    # With a relative folder, W&B writes to the working directory of the first test that uses W&B.
    arguments = {"project": "digits", "offline": True, "save_dir": str(tmp_path)}
    logger = {"class_path": "lightning.pytorch.loggers.WandbLogger", "init_args": arguments}
    (tmp_path / "tracked.yaml").write_text(yaml.safe_dump({"trainer": {"logger": [logger]}}))
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_NAME", "WANDB_RUN_GROUP", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    return [*tiny, "--config", "tracked.yaml"]


@pytest.fixture
def runs(monkeypatch):
    """The W&B runs that start in a test, each with a copy of its configuration and its summary at its end."""
    import wandb

    started, init = [], wandb.init

    def start(**arguments):
        run = init(**arguments)
        finish, found = run.finish, {"name": run.name, "group": run.group, "id": run.id}

        def end(exit_code=None):
            found.update(config=dict(run.config), summary=dict(run.summary), exit_code=exit_code)
            finish(exit_code=exit_code)

        run.finish = end
        started.append(found)
        return run

    monkeypatch.setattr(wandb, "init", start)
    yield started
    assert wandb.run is None  # Each command has finished its runs.


@pytest.mark.slow
def test_fit_several_seeds_starts_one_named_run_per_seed(project, runs):
    main(["fit", *project, "--seeds", "2", "--workers", "1", "--out", "runs/mine"])
    assert [run["name"] for run in runs] == ["mine/seed-0", "mine/seed-1"]
    assert len({run["id"] for run in runs}) == 2
    for number, run in enumerate(runs):
        folder = Path(f"runs/mine/seed-{number}")
        assert run["group"] == "quickstart" and run["exit_code"] == 0
        assert run["config"]["seed"] == run["config"]["seed_everything"] == number
        assert run["config"]["method"] == "FLwF2T, Replay"
        assert run["config"]["trainer"]["callbacks"]["Replay"]["memory_size"] == 50
        assert run["config"]["recipe"]["name"] == "quickstart"
        metrics = json.loads((folder / "metrics.json").read_text())
        assert {name: run["summary"][name] for name in metrics} == pytest.approx(metrics)
        assert json.loads((folder / "loggers.json").read_text()) == {"run_ids": [run["id"]]}


@pytest.mark.slow
def test_fit_resumed_keeps_name_and_group_and_failed_fit_finishes_its_run(project, runs, monkeypatch):
    main(["fit", *project, "--trainer.max_epochs", "1", "--recipe.name", "study", "--out", "runs/a"])
    main(["fit", "runs/a", "--trainer.max_epochs", "2"])
    assert [(run["name"], run["group"]) for run in runs] == [("a", "study")] * 2
    assert runs[0]["id"] != runs[1]["id"]  # Offline runs are not continued.
    monkeypatch.setattr(WandbLogger, "log_metrics", lambda *_, **__: 1 / 0)
    with pytest.raises(SystemExit):
        main(["fit", *project, "--trainer.max_epochs", "1", "--out", "runs/b"])
    assert runs[2]["exit_code"] == 1


@pytest.mark.slow
def test_fit_first_tasks_logs_the_metrics_of_its_results(project, runs):
    main(["fit", *project, "--recipe.first_tasks", "1", "--out", "runs/a"])
    metrics = json.loads(Path("runs/a/metrics.json").read_text())
    assert metrics and {name: runs[0]["summary"][name] for name in metrics} == pytest.approx(metrics)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"run_ids": "a"}', '{"run_ids": [3]}'])
def test_damaged_file_of_logger_runs_raises_until_deleted(project, monkeypatch, content):
    from lightning_fcl.runs.federated_cli import FederatedCLI
    from lightning_fcl.runs.fit import run_cli

    monkeypatch.setattr(FederatedCLI, "fit", lambda *_, **__: 1 / 0)
    Path("out").mkdir()
    Path("out/loggers.json").write_text(content)
    Path("old.ckpt").touch()
    recipe = Recipe.from_words([*project, "--out", "out", "--ckpt_path", "old.ckpt"])
    with pytest.raises(DamagedFileError, match="delete the file") as error:
        run_cli("fit", recipe, FederatedCLI)
    assert os.fspath(Path("out/loggers.json")) in str(error.value)
    Path("out/loggers.json").unlink()
    with pytest.raises(ZeroDivisionError):
        run_cli("fit", recipe, FederatedCLI)


def test_run_name_has_the_folder_of_a_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_name(Path("runs/rates/lr=.1/seed-3")) == "lr=.1/seed-3"
    assert run_name(tmp_path / "runs" / "mine-2") == "mine-2"
    assert run_name(Path()) == tmp_path.name


def test_recipe_name_is_that_of_the_paper_or_of_the_first_file(tmp_path):
    for name in ("quickstart", "flwf/flwf-2t"):
        assert recipe_name(find_recipes([name])) == name
    path = tmp_path / "my-study.yaml"
    path.write_text("trainer: {max_epochs: 1}")
    assert recipe_name(Recipe((path, Setting("data.batch_size", 3)))) == "my-study"
    assert recipe_name(Recipe((Setting("data.batch_size", 3),))) == ""
