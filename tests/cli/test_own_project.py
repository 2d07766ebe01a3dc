"""A project's own command line, as its page has it."""

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
    """Runs the page's script with some words, as `python` does, but here: starting takes longer than the runs do."""
    (tmp_path / "project.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)

    def run(words):
        monkeypatch.setattr(sys, "argv", words)
        runpy.run_path(words[0], run_name="__main__")

    return run


@pytest.mark.slow
def test_the_commands_of_the_page(project, tmp_path, capsys):
    quiet = "--trainer.enable_progress_bar false --trainer.accelerator cpu"
    for command in COMMANDS:
        project(shlex.split(f"{command} {quiet}"))
    assert "test/accuracy" in capsys.readouterr().out
    results = json.loads((tmp_path / "runs/fit/results.json").read_text())
    assert results["command"] == "python project.py fit --config runs/fit/config.yaml" and results["finished"]
    config = yaml.safe_load((tmp_path / "runs/fit/config.yaml").read_text())
    assert config["model"]["width"] == 16  # the second command went on from the first one's recipe
    assert config["trainer"]["strategy"]["init_args"]["local_epochs"] == 3
    assert len(COMMANDS) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model.widht 3", "Expected an argument of `model`, but got `model.widht`."),
        ("--trainer.max_epochs 9", "at most 5, the number of rounds of the stream, but got 9. Set `max_epochs=5`"),
    ],
)
def test_mistakes_on_the_page_s_command_line(project, capsys, words, message):
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
def test_mistakes_beside_arguments_of_one_s_own(project, capsys, words, message, tmp_path):
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


def test_variables_of_the_environment_are_read(monkeypatch):
    monkeypatch.setenv("PL_TRAINER__MAX_EPOCHS", "7")
    monkeypatch.setenv("PL_DATA__BATCH_SIZE", "5")
    words = "--model.model=lightning_fcl.models.MLP --model.model.sizes=[64,10] --model.num_classes=10"
    words = [*words.split(), "--trainer.barebones=true"]
    own = {"run": False, "parser_kwargs": {"default_env": True}}
    cli = FederatedCLI(lightning_fcl.Classifier, args=words, **own)
    assert (cli.trainer.max_epochs, cli.datamodule.batch_size) == (7, 5)


def test_parts_without_a_command():
    words = "--model.model=lightning_fcl.models.MLP --model.model.sizes=[64,10] --model.num_classes=10"
    cli = FederatedCLI(lightning_fcl.Classifier, args=[*words.split(), "--trainer.barebones=true"], run=False)
    assert isinstance(cli.trainer.strategy, lightning_fcl.FederatedStrategy)
    assert isinstance(cli.datamodule, FederatedStream) and cli.model.num_classes == 10


def test_own_errors_keep_their_traceback():
    class Broken(lightning_fcl.Classifier):
        def __init__(self):
            raise ValueError("a mistake of the project's own")

    with pytest.raises(ValueError, match="own"):
        FederatedCLI(Broken, args=[], run=False)


def test_the_page_s_errors(capsys):
    exec(ERRORS, {})
    assert capsys.readouterr().out == "Use 0 or more.\n"
    listed = re.findall(r"^\| `(\w+)` \| `\w+` \| `([\w-]+)` \|$", PAGE, re.MULTILINE)
    assert {name: vars(errors)[name].code for name, _ in listed} == dict(listed)
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert len(listed) + 1 == sum(issubclass(kind, errors.LightningFCLError) for kind in kinds)


def test_the_page_s_histograms(fit, make_stream, make_task, tmp_path):
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    names = {}
    exec(f"import torch\n{HISTOGRAMS}", names)
    logger = TensorBoardLogger(tmp_path, None, "")
    fit(make_task(), make_stream(), [names["Histograms"]()], trainer_args={"logger": logger})
    events = EventAccumulator(str(tmp_path), {"histograms": 0}).Reload()
    assert sorted(events.Tags()["histograms"]) == ["client 0", "client 1", "client 2"]
    assert [one.step for one in events.Histograms("client 1")] == [0, 1]
