"""Tests that interrupted and resumed fits are bitwise identical to uninterrupted fits."""

import os
import signal
import subprocess
import sys
import time
from typing import ClassVar

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from raising import raises

from lightning_fcl import Classifier, FederatedStrategy, FederatedStream
from lightning_fcl.callbacks import (
    ContinualMetrics,
    FederatedProgressBar,
    FedProx,
    FLwF2T,
    Replay,
)
from lightning_fcl.cli.main import main
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split
from lightning_fcl.errors import DamagedFileError, InvalidValueError
from lightning_fcl.io.checkpoint import read_checkpoint
from lightning_fcl.models import MLP


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def callbacks(folder=None, **kwargs):
    saving = [ModelCheckpoint(folder, "round-{epoch}", save_top_k=-1, **kwargs)] if folder else []
    return [FLwF2T(0.3, 0.3), Replay(9, "class-balanced", "round"), FedProx(0.1), ContinualMetrics(), *saving]


OPTIONS = {
    "reductions": {"model.3.bias": "local"},
    "participation": 0.7,
    "server_optimizer": lambda params: torch.optim.Adam(params, lr=0.05, eps=1e-3),
    "seed": 5,
}


@pytest.mark.seconds
@pytest.mark.parametrize(
    # For any two arguments, the cases contain each pair of their values.
    ("store", "max_vectorized_clients", "validation", "at_epoch_end"),
    [
        ("memory", 1, 0.0, True),
        ("memory", "auto", 0.2, None),
        ("disk", 1, 0.2, None),
        ("disk", "auto", 0.0, None),
        ("disk", "auto", 0.2, True),
    ],
)
def test_resumed_fit_equals_uninterrupted_fit(
    fit, make_stream, make_task, tmp_path, store, max_vectorized_clients, validation, at_epoch_end
):
    stream = {"rounds_per_experience": 3, "validation": validation, "num_clients": 5}
    options = {**OPTIONS, "client_store": store, "max_vectorized_clients": max_vectorized_clients}
    saving = {"enable_checkpointing": True}
    whole, parts = make_task(), callbacks(tmp_path, save_on_train_epoch_end=at_epoch_end)
    fit(whole, make_stream(**stream), parts, trainer_args=saving, **options)
    for epoch in (0, 2, 4):
        again, metrics = make_task(seed=99), callbacks()
        path = tmp_path / f"round-epoch={epoch}.ckpt"
        trainer = fit(again, make_stream(**stream), metrics, ckpt_path=path, **options)
        assert equal(whole.state_dict(), again.state_dict()), epoch
        records = [[r["correct"] for r in c[3].record["rounds"]] for c in (parts, metrics)]
        assert records[0] == records[1]
        assert trainer.current_epoch == 6


@pytest.mark.parametrize(
    ("change", "argument", "difference"),
    [
        ({"seed": 6}, "seed", "different settings: seed was 5, is 6."),
        ({"local_epochs": 2}, "local_epochs", "different settings: local_epochs was 1, is 2."),
        ({"stream": {"num_clients": 4}}, "data", "hash of the training data was "),
    ],
)
def test_resume_with_other_settings_raises(fit, make_stream, make_task, tmp_path, change, argument, difference):
    fit(make_task(), make_stream(), callbacks(tmp_path), trainer_args={"enable_checkpointing": True}, **OPTIONS)
    options = {**OPTIONS, **{k: v for k, v in change.items() if k != "stream"}}
    with raises(InvalidValueError, argument, code="other-recipe") as raised:
        fit(make_task(), make_stream(**change.get("stream", {})), callbacks(),
            ckpt_path=tmp_path / "round-epoch=0.ckpt", **options)  # fmt: skip
    assert difference in str(raised.value)


@pytest.mark.parametrize(
    ("optimizer", "schedule", "argument"),
    [
        ({"lr": 0.2}, {"step_size": 2}, "optimizer"),
        ({"lr": 0.1}, {"step_size": 3}, "schedule"),
        ({"lr": 0.1}, None, "schedule"),
    ],
)
def test_resume_with_other_optimizer_or_schedule_raises(
    fit, make_stream, make_task, tmp_path, optimizer, schedule, argument
):
    class Scheduled(Classifier):
        settings: ClassVar = ({"lr": 0.1}, {"step_size": 2})

        def configure_optimizers(self):
            made = torch.optim.SGD(self.parameters(), **self.settings[0])
            return {"optimizer": made} | (
                {"lr_scheduler": torch.optim.lr_scheduler.StepLR(made, **self.settings[1])} if self.settings[1] else {}
            )

    saving = {"enable_checkpointing": True}
    fit(Scheduled(MLP([6, 8, 4]), 4), make_stream(), callbacks(tmp_path), trainer_args=saving, max_epochs=2, seed=5)
    Scheduled.settings = (optimizer, schedule)
    with raises(InvalidValueError, argument, code="other-recipe"):
        fit(Scheduled(MLP([6, 8, 4]), 4), make_stream(), callbacks(), ckpt_path=tmp_path / "round-epoch=1.ckpt", seed=5)


def test_resume_from_plain_or_damaged_checkpoint_raises(fit, make_stream, make_task, tmp_path):
    saving = {"enable_checkpointing": True}
    one = make_stream(num_clients=1)
    fit(make_task(), one, [ModelCheckpoint(tmp_path, "plain")], strategy="auto", max_epochs=1, trainer_args=saving)
    with raises(InvalidValueError, "ckpt_path", code="other-strategy"):
        fit(make_task(), make_stream(), callbacks(), ckpt_path=tmp_path / "plain.ckpt")
    fit(make_task(), make_stream(), callbacks(tmp_path), trainer_args=saving, **OPTIONS)
    whole = (tmp_path / "round-epoch=1.ckpt").read_bytes()
    (tmp_path / "half.ckpt").write_bytes(whole[: len(whole) // 2])
    with raises(DamagedFileError, value=tmp_path / "half.ckpt"):
        fit(make_task(), make_stream(), callbacks(), ckpt_path=tmp_path / "half.ckpt", **OPTIONS)


def test_checkpoint_with_changed_byte_raises(fit, make_stream, make_task, tmp_path):
    saving = {"enable_checkpointing": True}
    fit(make_task(), make_stream(), callbacks(tmp_path), trainer_args=saving, **OPTIONS)
    whole = (tmp_path / "round-epoch=1.ckpt").read_bytes()
    expected = torch.load(tmp_path / "round-epoch=1.ckpt", weights_only=True)["state_dict"]
    generator, refused = torch.Generator().manual_seed(0), 0
    for place in torch.randint(len(whole), (60,), generator=generator).tolist():
        (tmp_path / "changed.ckpt").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            found = read_checkpoint(lambda path: torch.load(path, weights_only=True), tmp_path / "changed.ckpt")
        except ValueError as error:
            refused += "Expected an undamaged checkpoint of tensors and plain values at" in str(error)
            continue
        assert all(torch.equal(found["state_dict"][name], value) for name, value in expected.items())
    assert refused > 30  # The other bytes are padding between entries.


def test_resume_from_older_version_of_draws_raises(fit, make_stream, make_task, tmp_path):
    saving = {"enable_checkpointing": True}
    fit(make_task(), make_stream(), callbacks(tmp_path), trainer_args=saving, **OPTIONS)
    checkpoint = torch.load(tmp_path / "round-epoch=1.ckpt", weights_only=True)
    kept = next(state for state in checkpoint["callbacks"].values() if "fingerprint" in state)
    # Version 0.1 wrote no such entry.
    del kept["fingerprint"]["version of draws"]
    torch.save(checkpoint, tmp_path / "older.ckpt")
    with raises(InvalidValueError, "version of draws", value=1, code="other-recipe"):
        fit(make_task(), make_stream(), callbacks(), ckpt_path=tmp_path / "older.ckpt", **OPTIONS)


@pytest.mark.slow
@pytest.mark.long
def test_killed_process_resumes_to_equal_state(tmp_path):
    recipe = "recipes/quickstart.yaml"

    def words(out, *more):
        return ["fit", "--config", recipe, "--out", str(out), "--trainer.enable_progress_bar", "false", *more]

    def newest(out):
        (path,) = (out / "checkpoints").glob("*.ckpt")  # Temporary files of a killed process are removed.
        return path

    def rounds_of(out):
        record = out / "record.jsonl"
        return record.read_text().count('"round"') if record.exists() else 0

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    main(words(whole))
    kills = 0
    for after in (1, 8):
        more = ["--ckpt_path", str(newest(killed))] if kills else []
        command = [sys.executable, "-c", f"from lightning_fcl.cli.main import main; main({words(killed, *more)!r})"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
        while process.poll() is None:
            if rounds_of(killed) >= after + 2:  # The checkpoint of the last round may still be incomplete.
                process.send_signal(signal.SIGKILL)
                kills += 1
            time.sleep(0.002)
        process.wait()
        assert process.returncode == -signal.SIGKILL
    main(words(killed, "--ckpt_path", str(newest(killed))))
    states = [torch.load(newest(out), weights_only=True) for out in (whole, killed)]
    assert equal(states[0]["state_dict"], states[1]["state_dict"])
    assert states[0]["epoch"] == states[1]["epoch"] == 14


class AtTheEnd(Callback):
    """Records the start and the end of training."""

    def __init__(self):
        self.calls = []

    def on_train_start(self, trainer, pl_module):
        self.calls.append("start")

    def on_train_end(self, trainer, pl_module):
        self.calls.append("end")


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
def test_resume_after_last_round_runs_on_train_end(
    fit, make_stream, make_task, tmp_path, epoch, max_vectorized_clients
):
    # The checkpoint of epoch 1 is from the last round, so a fit that resumes from this checkpoint trains no round.
    options = {"max_vectorized_clients": max_vectorized_clients, "participation": 0.7, "seed": 5}
    saver, task = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1), make_task()
    whole, continued = ([ContinualMetrics(evaluate_on_train=True), AtTheEnd()] for _ in range(2))
    fit(task, make_stream(), [*whole, saver], trainer_args={"enable_checkpointing": True}, **options)
    shown = [*continued, FederatedProgressBar()]
    path, again = tmp_path / f"epoch={epoch}.ckpt", make_task(seed=9)
    trainer = fit(again, make_stream(), shown, ckpt_path=path, trainer_args={"enable_progress_bar": True}, **options)
    assert equal(task.state_dict(), again.state_dict()) and trainer.current_epoch == 2
    training = [metrics.record["training"] for metrics in (whole[0], continued[0])]
    assert training[0] == training[1] and training[0]["total"] > 100
    assert continued[1].calls == ["start", "end"]
    assert [len(metrics.record["rounds"]) for metrics in (whole[0], continued[0])] == [2, 2]


def test_resume_error_in_on_fit_start_skips_train_hooks(fit, make_stream, make_task, tmp_path):
    class Fails(AtTheEnd):
        def on_fit_start(self, trainer, pl_module):
            raise RuntimeError("no room")

    saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    fit(make_task(), make_stream(), [saver], trainer_args={"enable_checkpointing": True})
    fails = Fails()
    with pytest.raises(RuntimeError, match="no room"):
        fit(make_task(), make_stream(), [fails], ckpt_path=tmp_path / "epoch=1.ckpt")
    assert fails.calls == []


@pytest.mark.seconds
def test_second_fit_of_the_same_trainer_continues(fit, make_stream, make_task):
    whole, parts = make_task(), make_task()
    fit(whole, make_stream(rounds_per_experience=2), callbacks(), **OPTIONS)
    stream = make_stream(rounds_per_experience=2)
    trainer = fit(parts, stream, callbacks(), max_epochs=2, **OPTIONS)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(parts, datamodule=stream)
    assert equal(whole.state_dict(), parts.state_dict())


def test_resume_from_checkpoint_of_a_second_fit(fit, make_stream, make_task, tmp_path):
    task, stream = make_task(), make_stream(rounds_per_experience=2)
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    trainer = fit(task, stream, [FedProx(0.1), saver], max_epochs=1, trainer_args={"enable_checkpointing": True})
    trainer.fit_loop.max_epochs = 4
    trainer.fit(task, datamodule=stream)
    again = make_task(seed=9)
    fit(again, make_stream(rounds_per_experience=2), [FedProx(0.1)], ckpt_path=tmp_path / "epoch=2.ckpt")
    assert equal(task.state_dict(), again.state_dict())


@pytest.mark.seconds
def test_resume_from_checkpoint_saved_in_batch_hook_raises(fit, make_stream, make_task, tmp_path):
    class Saves(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    fit(make_task(), make_stream(), [Saves()], max_vectorized_clients=1)
    for path in tmp_path.glob("*.ckpt"):
        with raises(InvalidValueError, "ckpt_path", code="within-round"):
            fit(make_task(), make_stream(), max_vectorized_clients=1, ckpt_path=path)


def test_resume_from_weights_only_checkpoint_raises(fit, make_stream, make_task, tmp_path):
    saver = ModelCheckpoint(tmp_path, "weights", save_weights_only=True)
    fit(make_task(), make_stream(), [saver], trainer_args={"enable_checkpointing": True})
    with raises(InvalidValueError, "ckpt_path", code="weights-only"):
        fit(make_task(), make_stream(), ckpt_path=tmp_path / "weights.ckpt")


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_checkpoint_with_weights_only_false_raises_before_reading(quiet, make_stream, make_task, tmp_path, stage):
    """Each stage rejects `weights_only=False`, also for a file that does not exist. None and True are equal."""
    path, stream = tmp_path / "last.ckpt", make_stream(split=Split(validation=0.2, test=0.2))

    def trainer():
        return L.Trainer(strategy=FederatedStrategy(), max_epochs=1, **quiet)

    first = trainer()
    first.fit(make_task(), datamodule=stream)
    first.save_checkpoint(path)
    states = []
    for weights_only in (None, True):
        module, again = make_task(seed=3), trainer()
        getattr(again, stage)(module, datamodule=stream, ckpt_path=path, weights_only=weights_only)
        states.append(module.state_dict())
    torch.testing.assert_close(*states, rtol=0, atol=0)
    torch.testing.assert_close(states[0], first.lightning_module.state_dict(), rtol=0, atol=0)
    for file in (path, tmp_path / "missing.ckpt"):
        with raises(InvalidValueError, "weights_only", value=False) as caught:
            getattr(trainer(), stage)(make_task(), datamodule=stream, ckpt_path=file, weights_only=False)
        assert "not needed" in str(caught.value) and caught.value.hint == "Remove `weights_only`."


def test_resume_with_random_samples_is_equal(fit, make_task, tmp_path):
    class Noisy(torch.utils.data.Dataset):
        def __init__(self):
            self.targets = [i % 4 for i in range(120)]

        def __getitem__(self, i):
            return torch.eye(4, 6)[i % 4] + torch.randn(6), i % 4

        def __len__(self):
            return 120

    def stream():
        return FederatedStream.from_arrays(
            Noisy(), scenario=ClassIncremental(2), partition=IID(3), batch_size=8, seed=0
        )

    whole, parts = make_task(), make_task()
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    fit(whole, stream(), [saver], trainer_args={"enable_checkpointing": True})
    fit(parts, stream(), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert equal(whole.state_dict(), parts.state_dict())


class Scaler:
    """A user-defined object."""


@pytest.mark.may(
    "Hyperparameters that are objects", "Checkpoints omit these hyperparameters with a log message, and can be loaded."
)
def test_checkpoint_omits_hyperparameters_that_are_objects(fit, make_stream, tmp_path, caplog):
    class Scaled(Classifier):
        def __init__(self, scaler, width, mean):
            torch.manual_seed(0)
            super().__init__(MLP([6, width, 4]), 4)
            self.save_hyperparameters()

    def make():
        return Scaled(Scaler(), 5, torch.ones(2))

    whole, again, saving = make(), make(), ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    kept = {"enable_checkpointing": True}
    fit(whole, make_stream(rounds_per_experience=2), [saving], trainer_args=kept)
    assert caplog.text.count("Checkpoints do not contain the hyperparameters `scaler`") == 1
    checkpoint = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)
    assert checkpoint["hyper_parameters"].keys() == {"width", "mean"} and isinstance(whole.hparams.scaler, Scaler)
    fit(again, make_stream(rounds_per_experience=2), ckpt_path=tmp_path / "epoch=1.ckpt")
    assert equal(whole.state_dict(), again.state_dict())
