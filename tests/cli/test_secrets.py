"""Tests that no file of a run, no error file and no message contains the secrets of loggers."""

import json
import os
from pathlib import Path

import pytest
import yaml

from lightning_fcl.cli.jobs import Job
from lightning_fcl.cli.main import main
from lightning_fcl.errors import MissingValueError
from lightning_fcl.runs.recipe import Recipe, Setting
from lightning_fcl.runs.secret_values import (
    secrets_of,
    text_without_secrets,
    with_variables,
    without_secrets,
    words_without_secrets,
)

LOGGER = """
from lightning.pytorch.loggers import CSVLogger

class Tracker(CSVLogger):
    seen = []

    def __init__(self, save_dir: str, api_key: str, settings: dict | None = None, url: str = "", pad_token: str = ""):
        if api_key == "wrong-key":
            raise RuntimeError(f"the host rejects {api_key}")
        super().__init__(save_dir)
        self.seen.append((api_key, settings, url, pad_token))
"""
SECRETS = ["k3y-abcdef", "p4ss-ghijkl", "https://me:t0ken@host.org/x"]
KEY, NESTED, URL = (f"LIGHTNING_FCL_TRAINER_LOGGER_{name}" for name in ("API_KEY", "SETTINGS_PASSWORD", "URL"))


@pytest.fixture
def project(tmp_path, tiny, monkeypatch):
    """Change to a new working directory, and return the arguments of a recipe whose logger has secrets."""
    arguments = {
        "save_dir": "logs",
        "api_key": SECRETS[0],
        "settings": {"Password": SECRETS[1], "project": "mine"},
        "url": SECRETS[2],
        "pad_token": "<pad>",
    }
    logger = {"class_path": "tracker_of_tests.Tracker", "init_args": arguments}
    (tmp_path / "tracker_of_tests.py").write_text(LOGGER)
    (tmp_path / "secret.yaml").write_text(yaml.safe_dump({"trainer": {"logger": logger}}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in (KEY, NESTED, URL):
        monkeypatch.delenv(name, raising=False)
    return [*tiny, "--config", "secret.yaml"]


def texts_of(folder):
    return b"".join(path.read_bytes() for path in Path(folder).rglob("*") if path.is_file())


@pytest.mark.slow
def test_fit_writes_variable_names_that_next_fit_reads(project, reports, monkeypatch, error_of, capsys):
    main(["fit", *project, "--out", "run", "--trainer.max_epochs", "1"])
    from tracker_of_tests import Tracker

    logger = yaml.safe_load(Path("run/config.yaml").read_text())["trainer"]["logger"]["init_args"]
    assert logger["api_key"] == f"${{{KEY}}}" and logger["url"] == f"${{{URL}}}"
    assert logger["settings"] == {"Password": f"${{{NESTED}}}", "project": "mine"}
    assert logger["pad_token"] == "<pad>"
    assert b"<h" in Path("run/report.html").read_bytes() and KEY.encode() in Path("run/report.html").read_bytes()
    for secret in SECRETS:
        assert secret.encode() not in texts_of("run")
        assert secret not in capsys.readouterr().out

    message = error_of(["fit", "run", "--trainer.max_epochs", "2"])
    assert f"environment variable {KEY}" in message and f"export {KEY}=" in message
    for name, value in zip((KEY, NESTED, URL), SECRETS, strict=True):
        monkeypatch.setenv(name, value)
    main(["fit", "run", "--trainer.max_epochs", "2"])
    assert Tracker.seen[0] == Tracker.seen[-1] == (
        SECRETS[0], {"Password": SECRETS[1], "project": "mine"}, SECRETS[2], "<pad>"
    )  # fmt: skip
    assert len(json.loads(Path("run/results.json").read_text())["record"]["rounds"]) == 2
    assert yaml.safe_load(Path("run/config.yaml").read_text())["trainer"]["logger"]["init_args"] == logger


@pytest.mark.seconds
def test_error_file_and_message_contain_no_secret(project, capsys, tmp_path, monkeypatch):
    recipe = yaml.safe_load(Path("secret.yaml").read_text())
    recipe["trainer"]["logger"]["init_args"]["api_key"] = "wrong-key"
    Path("secret.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(SystemExit):
        main(["fit", *project, "--out", "run", "--trainer.logger.init_args.url", SECRETS[2]])
    said = capsys.readouterr().err
    place = said.partition("traceback is in ")[2].partition(". If")[0]
    text = Path(place).read_text()
    assert "the host rejects ${LIGHTNING_FCL_TRAINER_LOGGER_API_KEY}" in text
    for secret in ("wrong-key", *SECRETS[1:]):
        assert secret not in said and secret not in text
    os.unlink(place)


@pytest.mark.parametrize(
    "word",
    [
        ["--trainer.logger.init_args.api_key", "s3cret"],
        ["--trainer.logger.API_KEY=s3cret"],
        ["--trainer.logger", '{"class_path": "W", "init_args": {"token": "s3cret", "project": "p"}}'],
        ['--trainer.logger+={"class_path": "W", "init_args": {"opts": {"secret_key": "s3cret"}}}'],
        ["--data.url", "postgres://me:s3cret@host/db"],
    ],
)
def test_words_without_secrets_keeps_all_but_secrets(word):
    words = ["fit", "mine.yaml", *word, "--trainer.max_epochs", "3"]
    safe, found = words_without_secrets(words)
    assert "s3cret" not in " ".join(safe) and len(found) == 1
    assert text_without_secrets(" ".join(words), found) == " ".join(safe)
    assert safe[:2] == words[:2] and safe[-2:] == words[-2:]


@pytest.mark.parametrize(
    "content",
    [
        {"pad_token": "<pad>"},
        {"tokens": "8"},
        {"key": "a"},
        {"api_key": None},
        {"token": "${MINE}"},
        {"url": "http://a"},
    ],
)
def test_secrets_of_ordinary_values_is_empty(content):
    assert not [*secrets_of({"trainer": {"logger": content}})]
    assert without_secrets(content) == content


def test_with_variables_of_an_unset_variable_raises(monkeypatch):
    monkeypatch.delenv("UNSET_KEY", raising=False)
    with pytest.raises(MissingValueError, match=r"UNSET_KEY.*`W.api_key`.*Set the variable: export UNSET_KEY="):
        with_variables({"api_key": "${UNSET_KEY}"}, ("W",))
    monkeypatch.setenv("UNSET_KEY", "value")
    assert with_variables({"a": ["${UNSET_KEY}", "x${UNSET_KEY}", 3]}) == {"a": ["value", "x${UNSET_KEY}", 3]}


def test_fingerprint_of_a_job_ignores_secrets(tmp_path):
    def fingerprint(key, lr="0.1"):
        path = tmp_path / "a.yaml"
        path.write_text(yaml.safe_dump({"trainer": {"logger": {"init_args": {"api_key": key}}}}))
        recipe = Recipe((path, Setting("trainer.logger.password", key + "-2"), Setting("model.lr", lr)))
        return Job("a", recipe, 0, tmp_path).fingerprint

    assert fingerprint("first") == fingerprint("another")
    assert fingerprint("first") != fingerprint("first", lr="0.2")
