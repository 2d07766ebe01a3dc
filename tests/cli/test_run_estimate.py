"""Tests of the estimate that `lightning-fcl fit` prints after the first round."""

import re
import shutil
from collections import namedtuple

import lightning.pytorch as L
import pytest
from lightning.pytorch.callbacks import Callback, LambdaCallback

from lightning_fcl import Classifier, ClientSpeeds, Deadline, FedBuff, FederatedStrategy, FederatedStream, Swarm
from lightning_fcl.callbacks import ContinualMetrics, FederatedProgressBar, ICaRL
from lightning_fcl.cli.main import main
from lightning_fcl.data.partition import Dirichlet
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.models import MLP
from lightning_fcl.runs.run_estimate import PrintEstimate

LINE = (
    r"Estimate: about ([\d.]+ \w+) left, in total "
    r"(?:([\d.]+ \w+) of communication(?: if all rounds are like the first)?, )?([\d.]+ \w+) on disk"
)
SIZES = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
SECONDS = {"s": 1, "min": 60, "h": 3600}


def to_number(text, units):
    number, unit = text.split()
    return float(number) * units[unit]


def estimates(text):
    """Return the groups of each estimate in a text."""
    return [re.fullmatch(LINE, line).groups() for line in text.splitlines() if line.startswith("Estimate")]


class Clock(Callback):
    """A clock that a round advances by 2 seconds for each training sample of the clients that train."""

    # Callbacks of other packages can change the parameters.
    __module__ = "lightning_fcl.tests"

    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds

    def on_train_epoch_end(self, trainer, pl_module):
        plan, record = trainer.datamodule.plan, trainer.strategy.federation.server.record
        self.seconds += 2 * sum(len(plan.train[trainer.current_epoch][client]) for client in record.upload_bytes)


def fit(folder, quiet, callbacks, max_epochs=None, **settings):
    folder.mkdir(exist_ok=True)
    stream = FederatedStream("digits", ClassIncremental([1, 6, 3], 2), Dirichlet(6, alpha=0.2), seed=0)
    strategy = FederatedStrategy(local_epochs=1, **settings)
    trainer = L.Trainer(
        strategy=strategy,
        callbacks=[*callbacks, FederatedProgressBar()],
        max_epochs=max_epochs or 6,
        **{**quiet, "enable_progress_bar": True},
    )
    trainer.fit(Classifier(MLP([64, 10]), 10), datamodule=stream)
    return stream.plan


@pytest.mark.parametrize("participation", [1.0, 2])
@pytest.mark.parametrize("max_epochs", [3, 6])
def test_print_estimate_time_equals_time_of_the_planned_samples(tmp_path, quiet, capfd, participation, max_epochs):
    clock, metrics = Clock(), ContinualMetrics(clients="none")
    at_end = []

    class FirstRound(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            at_end.append(clock.seconds)

    callbacks = [clock, PrintEstimate(tmp_path / "run", clock), metrics, FirstRound()]
    fit(tmp_path / "run", quiet, callbacks, max_epochs, participation=participation)
    ((seconds, transmitted, _),) = estimates(capfd.readouterr().err)
    remaining = clock.seconds - at_end[1]
    assert to_number(seconds, SECONDS) == pytest.approx(remaining, rel=0.05, abs=0.5)
    # The rounds differ in their numbers of samples, so that equal times of all rounds would be a wrong estimate.
    assert remaining != pytest.approx((at_end[1] - 100) * (max_epochs - 1), rel=0.2)
    record = metrics.record["rounds"]
    total = sum(sum(entry[way].values()) for entry in record for way in ("upload_bytes", "download_bytes"))
    assert to_number(transmitted, SIZES) == pytest.approx(total, rel=0.01)


def test_print_estimate_draws_clients_of_a_limited_number_of_rounds(tmp_path, quiet, capfd, monkeypatch):
    monkeypatch.setattr("lightning_fcl.callbacks.remaining_time._SAMPLED_ROUNDS", 3)
    clock, times = Clock(), []

    class FirstRound(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            times.append(clock.seconds)

    estimate = PrintEstimate(tmp_path / "run", clock)
    fit(tmp_path / "run", quiet, [clock, estimate, FirstRound()])
    assert len(estimate._samples) == 3
    # The rounds 0, 2 and 4 are one of the two equal rounds of each experience.
    ((seconds, *_),) = estimates(capfd.readouterr().err)
    assert to_number(seconds, SECONDS) == pytest.approx(clock.seconds - times[1], rel=0.05, abs=0.5)


@pytest.mark.parametrize(
    ("methods", "settings", "is_conditional"),
    [
        ([], {}, False),
        ([], {"participation": 0.5}, False),
        ([ICaRL()], {}, True),
        ([LambdaCallback()], {}, True),
        ([], {"swarm": Swarm(0.1)}, True),
        ([], {"synchronization": Deadline(ClientSpeeds(0.01))}, True),
    ],
)
def test_print_estimate_of_varying_sizes_has_condition(tmp_path, quiet, capfd, methods, settings, is_conditional):
    fit(tmp_path / "run", quiet, [*methods, PrintEstimate(tmp_path / "run")], **settings)
    (line,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("Estimate"))
    assert (" of communication if all rounds are like the first," in line) == is_conditional


def test_print_estimate_on_a_simulated_clock_is_printed(tmp_path, quiet, capfd):
    synchronization = FedBuff(ClientSpeeds(0.01), 2)
    fit(tmp_path / "run", quiet, [PrintEstimate(tmp_path / "run")], synchronization=synchronization)
    assert len(estimates(capfd.readouterr().err)) == 1


def test_print_estimate_full_disk_warns_once(tmp_path, quiet, capfd, caplog, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 0, 10))
    fit(tmp_path / "run", quiet, [PrintEstimate(tmp_path / "run")])
    warnings = [one.getMessage() for one in caplog.records if "disk" in one.getMessage()]
    assert len(warnings) == 1 and warnings[0].endswith("only 10 B is free. Free disk space, or save fewer checkpoints.")
    assert "more disk space in" in warnings[0] and str(tmp_path / "run") in warnings[0]


def test_print_estimate_enough_space_does_not_warn(tmp_path, quiet, caplog):
    fit(tmp_path / "run", quiet, [PrintEstimate(tmp_path / "run")])
    assert not [one for one in caplog.records if "disk" in one.getMessage()]


@pytest.mark.seconds
def test_fit_with_full_disk_raises_before_training_and_other_folder_works(tmp_path, monkeypatch, error_of):
    monkeypatch.chdir(tmp_path)
    disk_usage = shutil.disk_usage
    monkeypatch.setattr(
        shutil,
        "disk_usage",
        lambda path: disk_usage(path)._replace(free=100 if "small-disk" in str(path) else 10**12),
    )
    (tmp_path / "small-disk").mkdir()
    command = ["fit", "quickstart", "--trainer.max_epochs", "1", "--out"]
    error = error_of([*command, "small-disk/run"])
    assert "19.2 kB of free disk space for a checkpoint in small-disk/run, but 100 B are free" in error
    assert "Free disk space, or use a folder on another disk with `--out`." in error
    assert not (tmp_path / "small-disk" / "run" / "checkpoints").exists()
    assert not main([*command, "other/run"])
    assert (tmp_path / "other" / "run" / "checkpoints" / "last.ckpt").exists()
    # Without checkpoints, the fit needs nearly no space.
    assert not main([*command, "small-disk/run", "--trainer.enable_checkpointing", "false"])


QUICK = ["--trainer.strategy.local_epochs", "1", "--data.partition.num_clients", "4"]


def run(out, capfd, *words):
    main(["fit", "quickstart", *QUICK, "--out", str(out), *words])
    return estimates(capfd.readouterr().err)


@pytest.mark.seconds
@pytest.mark.parametrize(
    "words",
    [
        ["--trainer.max_epochs", "12"],
        ["--trainer.max_epochs", "12", "--trainer.strategy.participation", "1"],
        ["--trainer.max_epochs", "12", "--trainer.enable_checkpointing", "false"],
        [
            "--trainer.max_epochs",
            "4",
            "--trainer.callbacks+",
            "ModelCheckpoint",
            "--trainer.callbacks.save_top_k",
            "-1",
        ],
    ],
    ids=["one", "sampled", "none", "all"],
)
def test_fit_estimate_of_disk_space_is_near_the_space_of_the_run(tmp_path, capfd, words):
    ((*_, disk),) = run(tmp_path / "run", capfd, *words)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    used = sum(path.stat().st_size for path in files if path.name != "report.html")
    # The estimate includes the scripts of charts, which the empty reports of these tests do not contain, and a second
    # file for the checkpoint that is being replaced.
    assert 0.5 * used <= to_number(disk, SIZES) - 1_000_000 <= 2.5 * used


@pytest.mark.seconds
def test_fit_resumed_prints_an_estimate_without_communication(tmp_path, capfd):
    run(tmp_path / "run", capfd, "--trainer.max_epochs", "2")
    main(["fit", str(tmp_path / "run"), "--trainer.max_epochs", "5"])
    ((_, transmitted, _),) = estimates(capfd.readouterr().err)
    assert transmitted is None


@pytest.mark.seconds
@pytest.mark.parametrize(
    "words",
    [
        ["--trainer.max_epochs", "3", "--trainer.enable_progress_bar", "false"],
        ["--trainer.max_epochs", "1"],
        ["--trainer.max_epochs", "2", "--seeds", "2", "--workers", "1"],
    ],
    ids=["quiet", "one round", "seeds"],
)
def test_fit_without_progress_prints_no_estimate(tmp_path, capfd, words):
    assert run(tmp_path / "run", capfd, *words) == []
