"""Tests of the command line of a user's project, as in `docs/custom-cli.md`."""

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import yaml

import lightning_fcl
from lightning_fcl import FederatedCLI, FederatedStream, errors

PAGE = (Path(__file__).parents[2] / "docs" / "custom-cli.md").read_text()
SCRIPT, HISTOGRAMS, ERRORS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^python (project.py .*)$", PAGE, re.MULTILINE)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Return a function that runs the script of the page in this process, because starting a process takes longer."""
    (tmp_path / "project.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)

    def run(words):
        monkeypatch.setattr(sys, "argv", words)
        runpy.run_path(words[0], run_name="__main__")

    return run


@pytest.mark.slow
def test_page_commands_train_and_test(project, tmp_path, capsys):
    quiet = "--trainer.enable_progress_bar false --trainer.accelerator cpu"
    for command in COMMANDS:
        project(shlex.split(f"{command} {quiet}"))
    assert "test/accuracy" in capsys.readouterr().out
    results = json.loads((tmp_path / "runs/fit/results.json").read_text())
    assert results["command"] == "python project.py fit --config runs/fit/config.yaml" and results["finished"]
    config = yaml.safe_load((tmp_path / "runs/fit/config.yaml").read_text())
    assert config["model"]["width"] == 16  # The second command used the recipe that the first command wrote.
    assert config["trainer"]["strategy"]["init_args"]["local_epochs"] == 3
    assert len(COMMANDS) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model.widht 3", "Expected an argument of `model`, but got `model.widht`."),
        ("--trainer.max_epochs 9", "at most 5, the number of rounds of the stream, but got 9. Set `max_epochs=5`"),
    ],
)
def test_page_command_line_mistakes_print_message(project, capsys, words, message):
    with pytest.raises(SystemExit) as stop:
        project(["project.py", "fit", "--data.partition", "IID", *words.split()])
    assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ft", "but got ft. Did you mean fit?"),
        ("", "Expected one of the commands fit, validate, test, predict, but got none."),
        ("fit --quick --model.widht 3", "Did you mean model.width?"),
        ("fit --quick --nte x", "but got `nte`. Did you mean note?"),
        ("fit --model.width", "Expected a value after `--model.width`, but got none."),
    ],
)
def test_own_arguments_mistakes_print_message(project, capsys, words, message, tmp_path):
    more = "\n".join([
        "class Own(FederatedCLI):",
        "    def add_arguments_to_parser(self, parser):",
        "        super().add_arguments_to_parser(parser)",
        "        parser.add_argument('--quick', action='store_true')",
        "        parser.add_argument('--note', type=str)",
        "if __name__ == '__main__':",
        "    Own(MyNet)",
    ])  # fmt: skip
    (tmp_path / "own.py").write_text(f"{SCRIPT.partition('if __name__')[0]}\n{more}\n")
    with pytest.raises(SystemExit) as stop:
        project(["own.py", *words.split()])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_default_env_reads_environment_variables(monkeypatch):
    monkeypatch.setenv("PL_TRAINER__MAX_EPOCHS", "7")
    monkeypatch.setenv("PL_DATA__BATCH_SIZE", "5")
    words = "--model.model=lightning_fcl.models.MLP --model.model.sizes=[64,10] --model.num_classes=10"
    words = [*words.split(), "--trainer.barebones=true"]
    own = {"run": False, "parser_kwargs": {"default_env": True}}
    cli = FederatedCLI(lightning_fcl.Classifier, args=words, **own)
    assert (cli.trainer.max_epochs, cli.datamodule.batch_size) == (7, 5)


def test_federated_cli_run_false_creates_objects():
    words = "--model.model=lightning_fcl.models.MLP --model.model.sizes=[64,10] --model.num_classes=10"
    cli = FederatedCLI(lightning_fcl.Classifier, args=[*words.split(), "--trainer.barebones=true"], run=False)
    assert isinstance(cli.trainer.strategy, lightning_fcl.FederatedStrategy)
    assert isinstance(cli.datamodule, FederatedStream) and cli.model.num_classes == 10


def test_federated_cli_own_error_is_raised_unchanged():
    class Broken(lightning_fcl.Classifier):
        def __init__(self):
            raise ValueError("an error in the user's own class")

    with pytest.raises(ValueError, match="own"):
        FederatedCLI(Broken, args=[], run=False)


def test_page_error_table_lists_all_errors(capsys):
    exec(ERRORS, {})
    assert capsys.readouterr().out == "Use 0 or more.\n"
    listed = re.findall(r"^\| `(\w+)` \| `\w+` \| `([\w-]+)` \|$", PAGE, re.MULTILINE)
    assert {name: vars(errors)[name].code for name, _ in listed} == dict(listed)
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert len(listed) + 1 == sum(issubclass(kind, errors.LightningFCLError) for kind in kinds)


def test_page_histograms_callback_logs_each_client(fit, make_stream, make_task, tmp_path):
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    names = {}
    exec(f"import torch\n{HISTOGRAMS}", names)
    logger = TensorBoardLogger(tmp_path, None, "")
    fit(make_task(), make_stream(), [names["Histograms"]()], trainer_args={"logger": logger})
    events = EventAccumulator(str(tmp_path), {"histograms": 0}).Reload()
    assert sorted(events.Tags()["histograms"]) == ["client 0", "client 1", "client 2"]
    assert [one.step for one in events.Histograms("client 1")] == [0, 1]
