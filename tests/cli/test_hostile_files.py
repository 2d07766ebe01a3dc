"""Tests that damaged and malicious files end a command with one message. The command runs no code from the files."""

import json

import pytest
import torch
import yaml

from lightning_fcl.cli.main import main


@pytest.mark.parametrize("command", ["fit", "test", "tune", "edge-report"])
def test_command_recursive_yaml_prints_error(tmp_path, error_of, command):
    path = tmp_path / "evil.yaml"
    path.write_text("trainer: &t {max_epochs: 1, callbacks: *t}")
    words = [command, "--config", str(path)] if command in ("fit", "test") else [command, str(path)]
    assert "a value contains itself" in error_of(words)


@pytest.mark.slow
def test_fit_changed_checkpoint_prints_one_message(tiny, tmp_path, capsys):
    out, again = tmp_path / "out", tmp_path / "again"
    main(["fit", *tiny, "--out", str(out)])
    (path,) = (out / "checkpoints").glob("*.ckpt")
    whole = torch.load(path, weights_only=True)
    states = whole["callbacks"]
    federation = next(key for key, state in states.items() if "fingerprint" in state)
    wrong = (None, 3, {"x": 3})
    changes = [{key: value for key, value in whole.items() if key != name} for name in whole]
    changes += [{**whole, name: value} for name in whole for value in wrong]
    changes += [{**whole, "callbacks": {**states, key: value}} for key in states for value in (*wrong, {})]
    for key in states[federation]:
        changes += [{**whole, "callbacks": {**states, federation: {**states[federation], key: v}}} for v in wrong]
    refused, metrics = 0, json.loads((out / "results.json").read_text())["metrics"]
    for change in changes:
        torch.save(change, tmp_path / "changed.ckpt")
        try:
            main(["fit", *tiny, "--out", str(again), "--ckpt_path", str(tmp_path / "changed.ckpt")])
            assert json.loads((again / "results.json").read_text())["metrics"] == metrics
        except SystemExit:
            message = capsys.readouterr().err
            assert "Traceback" not in message and ("Expected" in message or "Invalid version" in message)
            refused += 1
    assert refused > len(changes) / 2


@pytest.mark.parametrize("named", ["os.system", "os.popen", "no.such.thing"])
@pytest.mark.parametrize("command", ["fit", "edge-report"])
@pytest.mark.parametrize("part", ["an optimizer", "a callback", "data"])
def test_recipe_with_command_as_class_is_rejected(tiny, tmp_path, error_of, named, command, part):
    path, marker = tmp_path / "evil.yaml", tmp_path / "marker"
    evil = {"class_path": named, "init_args": {"command": f"touch {marker}"}}
    parts = {"an optimizer": {"model": {"init_args": {"optimizer": evil}}}, "data": {"data": {"data": evil}}}
    path.write_text(yaml.safe_dump(parts.get(part, {"trainer": {"callbacks": [evil]}})))
    words = [*tiny, "--config", str(path)]
    error = error_of([command, *(words if command == "fit" else words[1::2])])
    assert named in error and not marker.exists()


@pytest.mark.seconds
def test_checkpoint_weights_only_false_is_rejected(tiny, tmp_path, error_of):
    words = [*tiny, "--ckpt_path", str(tmp_path / "x.ckpt"), "--weights_only", "false"]
    assert "Expected `weights_only` to be True, but got False. False is not needed" in error_of(["fit", *words])
    words = [*tiny, "--ckpt_path", "http://127.0.0.1:1/x.ckpt"]
    assert "Expected the URL of a checkpoint to end in its SHA-256" in error_of(["test", *words])
