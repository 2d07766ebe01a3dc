"""Tests of the folder of a run: resuming, locks, checkpoints and copies."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import yaml

from lightning_fcl.cli.main import main
from lightning_fcl.evaluation.results import read_results
from lightning_fcl.io.atomic import run_lock
from lightning_fcl.io.checkpoint import newest_checkpoint
from lightning_fcl.runs.paper_rows import recipes_folder


@pytest.fixture
def words(tmp_path, small_recipe):
    """Return the arguments of a recipe with four rounds."""
    content = small_recipe(rounds=4, clients=3, rounds_per_experience=2)
    content["trainer"]["logger"] = False
    path = tmp_path / "four.yaml"
    path.write_text(yaml.safe_dump(content))
    return ["--config", str(recipes_folder() / "quickstart.yaml"), "--config", str(path)]


@pytest.fixture
def begun(words, tmp_path):
    """Train two rounds of a run, and return its folder."""
    out = tmp_path / "begun"
    main(["fit", *words, "--out", str(out), "--trainer.max_epochs", "2"])
    return out


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def get_record(folder):
    """Return the record of a run. Measured times are set to 0."""
    record = read_results(folder)["record"]
    return {**record, "rounds": [{**entry, "seconds": 0, "processor_seconds": 0} for entry in record["rounds"]]}


def state(folder):
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def changed(path, change):
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


@pytest.mark.seconds
def test_fit_copied_run_resumes_in_copy(words, begun, tmp_path, monkeypatch):
    before = contents(begun)
    assert before.keys() == {"checkpoints/last.ckpt", "config.yaml", "environment.json", "files.txt", "metrics.csv",
                             "metrics.json", "record.jsonl", "report.html", "results.json"}  # fmt: skip
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(begun, copy)
    monkeypatch.chdir(copy.parent)
    main(["fit", "copy", "--trainer.max_epochs", "4"])
    main(["fit", *words, "--out", "whole"])
    assert contents(begun) == before and not (copy.parent / "runs").exists()
    assert get_record(copy) == get_record(copy.parent / "whole") and len(get_record(copy)["rounds"]) == 4
    left, right = state(copy), state(copy.parent / "whole")
    assert all(torch.equal(left[name], right[name]) for name in left | right)
    # Given only the config and a checkpoint of a run, `fit` writes to the folder of this run.
    more = ["--config", str(begun / "config.yaml"), "--ckpt_path", str(begun / "checkpoints" / "last.ckpt")]
    main(["fit", *more, "--trainer.max_epochs", "3"])
    assert len(get_record(begun)["rounds"]) == 3


@pytest.mark.seconds
def test_fit_existing_out_writes_to_numbered_folder(words, begun, tmp_path, capsys):
    (begun / "results.json").unlink()  # A run that was killed during training has no results.json.
    before = contents(begun)
    main(["fit", *words, "--out", str(begun), "--trainer.max_epochs", "1"])
    assert contents(begun) == before and len(get_record(tmp_path / "begun-2")["rounds"]) == 1
    assert f"{begun} already contains a run" in capsys.readouterr().out


@pytest.mark.seconds
def test_newest_checkpoint_ignores_file_times(words, begun, capsys):
    folder = begun / "checkpoints"
    shutil.copy(folder / "last.ckpt", folder / "before.ckpt")
    main(["fit", str(begun), "--trainer.max_epochs", "4"])
    # Make the copy newer, because `cp -r` also changes the times of files.
    os.utime(folder / "before.ckpt", (2e9, 2e9))
    assert newest_checkpoint(folder) == folder / "last.ckpt"
    main(["fit", str(begun), "--ckpt_path", str(folder / "before.ckpt"), "--trainer.max_epochs", "3"])
    assert len(get_record(begun)["rounds"]) == 3  # `--ckpt_path` can select an older checkpoint.


@pytest.mark.seconds
def test_fit_in_locked_folder_raises_with_process_id(words, begun, error_of):
    hold = (
        "import sys; from pathlib import Path; from lightning_fcl.io.atomic import run_lock\n"
        "with run_lock(Path(sys.argv[1])): print('has it', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", hold, str(begun)], **pipes)
    assert process.stdout.readline() == "has it\n"
    before = contents(begun)
    for command in (["fit", str(begun)], ["fit", *words, "--out", str(begun), "--ckpt_path",
                                          str(begun / "checkpoints" / "last.ckpt")]):  # fmt: skip
        assert f"but process {process.pid} on " in error_of(command)
    assert contents(begun) == before
    process.kill()  # Killing the process releases the lock, although the lock file remains.
    process.communicate()
    main(["fit", str(begun), "--trainer.max_epochs", "3"])
    assert not (begun / ".lock").exists()
    with run_lock(begun), run_lock(begun):  # One process can acquire the same lock twice.
        assert (begun / ".lock").exists()
    assert not (begun / ".lock").exists()


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model.optimizer.lr", "0.03"], "lr of the optimizer was [0.1], is [0.03]"),
        (["--model.optimizer.momentum", "0.25"], "momentum of the optimizer was [0.5], is [0.25]"),
        (["--model.optimizer", "torch.optim.Adam"], "class of the optimizer was SGD, is Adam"),
        (["--trainer.strategy.server_optimizer", "torch.optim.SGD", "--trainer.strategy.server_optimizer.lr", "0.5"],
         "server_optimizer was None, is"),
    ],
)  # fmt: skip
def test_resume_with_other_optimizer_raises_with_difference(begun, error_of, change, message):
    before = contents(begun)
    error = error_of(["fit", str(begun), "--trainer.max_epochs", "4", *change])
    assert "Expected a checkpoint with the settings of this run, but" in error and message in error
    assert contents(begun) == before


@pytest.mark.seconds
def test_checkpoint_outside_of_run_contains_whole_record(words, begun, tmp_path, error_of):
    last, kept = begun / "checkpoints" / "last.ckpt", tmp_path / "kept.ckpt"
    outside = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
               "init_args": {"dirpath": str(tmp_path / "outside"), "save_top_k": -1}}  # fmt: skip
    more = tmp_path / "more.yaml"
    more.write_text(yaml.safe_dump({"trainer": {"callbacks+": [outside]}}))
    main(["fit", *words, "--config", str(more), "--out", str(tmp_path / "run"), "--trainer.max_epochs", "2"])
    (whole, _) = sorted((tmp_path / "outside").glob("*.ckpt"))
    assert len(torch.load(whole, weights_only=True)["callbacks"]["ContinualMetrics"]["record"]["rounds"]) == 1
    # A checkpoint outside of its run contains the whole record. A fit in any folder can resume from this checkpoint.
    main(["fit", *words, "--ckpt_path", str(whole), "--out", str(tmp_path / "on")])
    assert torch.load(last, weights_only=True)["callbacks"]["ContinualMetrics"]["record"].keys() == {"bytes", "sha256"}
    shutil.copy(last, kept)
    error = error_of(["fit", *words, "--ckpt_path", str(kept), "--out", str(tmp_path / "alone")])
    assert "which contains the measurements until this checkpoint, is missing or belongs to another run" in error
    # A fit that resumes a run in another folder copies the record of the run.
    main(["fit", *words, "--ckpt_path", str(last), "--out", str(tmp_path / "moved")])
    assert (
        get_record(tmp_path / "moved") == get_record(tmp_path / "on")
        and len(get_record(tmp_path / "moved")["rounds"]) == 4
    )
    # Record lines after the checkpoint belong to an interrupted round.
    with (begun / "record.jsonl").open("a") as file:
        file.write('{"round": 2, "exper')
    main(["fit", str(begun), "--trainer.max_epochs", "4"])
    assert get_record(begun) == get_record(tmp_path / "on")
    lines = (begun / "record.jsonl").read_text().splitlines()
    assert [json.loads(line).get("round") for line in lines] == [None, 0, 1, 2, 3]
    record = (begun / "record.jsonl").read_bytes()
    (begun / "record.jsonl").write_bytes(record.replace(b'"round": 1', b'"round": 7'))
    assert "is missing or belongs to another run" in error_of(["fit", str(begun)])


@pytest.mark.seconds
def test_checkpoint_size_is_independent_of_rounds(words, tmp_path):
    sizes = []
    # Within an experience, a checkpoint also contains confusion matrices.
    for rounds in ("2", "4"):
        more = ["--trainer.callbacks", "[]", "--out", str(tmp_path / rounds), "--trainer.max_epochs", rounds]
        main(["fit", *words, *more])
        sizes.append((tmp_path / rounds / "checkpoints" / "last.ckpt").stat().st_size)
    assert abs(sizes[1] - sizes[0]) < 200  # The files differ by a few bytes, because larger counts have more digits.


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": -1}, "Expected `epoch` of the checkpoint"),
        ({"epoch": 10**9}, "Expected `epoch` of the checkpoint"),
        ({"pytorch-lightning_version": "0.1"}, "Expected `pytorch-lightning_version` of the checkpoint"),
        ({"pytorch-lightning_version": None}, "Expected `pytorch-lightning_version` of the checkpoint"),
    ],
)
def test_resume_invalid_epoch_or_version_raises(begun, error_of, change, message):
    path = begun / "checkpoints" / "last.ckpt"
    changed(path, lambda content: content.update(change))
    assert message in error_of(["fit", str(begun), "--trainer.max_epochs", "4"])
    if "epoch" in change:

        def everywhere(content):
            progress = content["loops"]["fit_loop"]["epoch_progress"]
            for counts in progress.values():
                counts.update(dict.fromkeys(counts, change["epoch"]))

        changed(path, everywhere)
        assert message in error_of(["fit", str(begun), "--trainer.max_epochs", "4"])
    else:
        assert message in error_of(["test", str(begun)])


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--trainer.devices", "1000000"], "on this machine, because each device is a process, but got 1000000"),
        (["--trainer.num_nodes", "5"], "Expected MASTER_ADDR, MASTER_PORT and NODE_RANK in the environment"),
        (["--data.scenario.rounds_per_experience", "1000000000"],
         "Expected `rounds_per_experience` to be between 1 and 1000000 but got 1000000000"),
    ],
)  # fmt: skip
def test_fit_impossible_settings_raise_before_training(words, tmp_path, error_of, more, message):
    assert message in error_of(["fit", *words, "--out", str(tmp_path / "out"), *more])


@pytest.mark.argument(
    "num_nodes", "Supported. Number of machines, each with `devices` processes: [how to start them](scale.md)"
)
@pytest.mark.slow
@pytest.mark.long
def test_fit_waiting_for_machines_prints_and_stops_on_signal(words, tmp_path):
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "NODE_RANK": "1"}
    fit = [sys.executable, "-m", "lightning_fcl", "fit", *words]
    command = [*fit, "--out", str(tmp_path / "out"), "--trainer.num_nodes", "2"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if "Waiting for the 2 processes of 2 machines at 127.0.0.1:29517" in line:
            break
    process.terminate()
    said = process.communicate(timeout=900)[1]
    assert process.returncode == 143 and "stopped." in said
