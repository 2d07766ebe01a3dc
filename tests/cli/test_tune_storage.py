"""Tests of `lightning-fcl tune` with a storage that processes share."""

import csv
import json
import signal
import subprocess
import sys
import time

import optuna
import pytest
import yaml
from optuna.trial import TrialState
from sqlalchemy.exc import OperationalError

from lightning_fcl.cli import jobs as jobs_module
from lightning_fcl.cli import study as study_module
from lightning_fcl.cli.main import main
from lightning_fcl.cli.search import Search
from lightning_fcl.cli.storage import open_storage, storage_errors, without_password
from lightning_fcl.cli.study import SearchStudy
from lightning_fcl.errors import (
    ConnectionFailedError,
    InvalidStateError,
    InvalidValueError,
    MissingFileError,
    MissingPackageError,
)
from lightning_fcl.runs.paper_rows import recipes_folder

LR = "model.init_args.optimizer.init_args.lr"


@pytest.fixture
def folder(tmp_path, small_recipe):
    """Write a search of three values with two seeds in the working directory, and return this folder."""
    (tmp_path / "quickstart.yaml").write_text((recipes_folder() / "quickstart.yaml").read_text())
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(small_recipe(rounds=1, clients=2, split={"validation": 0.3})))
    write_search(tmp_path)
    return tmp_path


def write_search(folder, **changes):
    content = {
        "configs": ["quickstart.yaml", "tiny.yaml"],
        "objective": "final_accuracy/server",
        "sampler": "grid",
        "space": {LR: [0.1, 0.2, 0.3], "data.batch_size": [16, 32]},
    }
    (folder / "search.yaml").write_text(yaml.safe_dump(content | changes, sort_keys=False))


@pytest.fixture(params=["sqlite:///{}/study.db", "{}/study.log"], ids=["sqlite", "journal"])
def storage(request, folder):
    return request.param.format(folder)


def words(folder, storage, out, *more):
    return [
        "tune", str(folder / "search.yaml"), "--out", str(folder / out), "--storage", storage, "--workers", "1", *more
    ]  # fmt: skip


def trials_of(storage, name="tune-search"):
    return optuna.load_study(study_name=name, storage=open_storage(storage)).trials


def rows(folder):
    with (folder / "trials.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture
def pretend(monkeypatch):
    """Replace the training of runs by results whose objective is the learning rate. Return the trained folders."""
    trained = []

    def run_job(job, should_stop=None):
        from lightning_fcl.evaluation.results import mark_complete, write_results

        trained.append(job.out)
        value = yaml.safe_load(job.recipe.files[-1].read_text())["model"]["init_args"]["optimizer"]["init_args"]["lr"]
        job.out.mkdir(parents=True)
        write_results(job.out, {"metrics": {"final_accuracy/server": value}})
        mark_complete(job.out, [job.out / "results.json"])
        job.write_fingerprint(job.out)

    monkeypatch.setattr(jobs_module, "run_job", run_job)
    monkeypatch.setattr("lightning_fcl.cli.tune_output.trials_figure", lambda search, trials: {"mark": "point"})
    return trained


@pytest.mark.seconds
@pytest.mark.long
def test_tune_two_processes_share_the_trials_of_a_study(folder, storage):
    """Two processes train each point of the grid once, and both results are in the study and in the table."""
    command = [sys.executable, "-m", "lightning_fcl"]
    processes = [subprocess.Popen([*command, *words(folder, storage, out)]) for out in ("one", "two")]
    assert [process.wait(timeout=900) for process in processes] == [0, 0]
    completed = [trial for trial in trials_of(storage) if trial.state is TrialState.COMPLETE]
    points = sorted((trial.params[LR], trial.params["data.batch_size"]) for trial in completed)
    assert points == [(lr, size) for lr in (0.1, 0.2, 0.3) for size in (16, 32)]
    folders = [trial.user_attrs["folder"] for trial in completed]
    assert sorted(folders) == [f"trial-{slot:04}" for slot in range(6)]
    for trial in completed:
        (results,) = folder.glob(f"*/{trial.user_attrs['folder']}/seed-0/results.json")
        metrics = json.loads(results.read_text())["metrics"]
        assert trial.value == metrics["final_accuracy/server"] and trial.user_attrs["seeds"] == [0]
    # The same command trains nothing, and writes the results of both processes.
    main(words(folder, storage, "one"))
    assert {row["trial"] for row in rows(folder / "one")} == {str(trial.number) for trial in completed}
    best = max(completed, key=lambda trial: trial.value)
    assert f"trial {best.number}." in (folder / "one" / "best.yaml").read_text()


@pytest.mark.seconds
def test_tune_same_command_adds_up_to_the_number_of_trials(folder, storage, pretend):
    main(words(folder, storage, "out", "--trials", "2"))
    main(words(folder, storage, "out", "--trials", "2"))
    assert len(pretend) == 2
    main(words(folder, storage, "elsewhere", "--trials", "5"))
    assert len(pretend) == 5 and len(rows(folder / "elsewhere")) == 5
    main(words(folder, storage, "out"))
    assert len(pretend) == 6 and len(rows(folder / "out")) == 6
    assert [trial.user_attrs["slot"] for trial in trials_of(storage)] == [*range(6)]


@pytest.mark.seconds
@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_tune_storage_gives_the_settings_of_random_search_without_storage(folder, storage, pretend, sampler):
    space = {LR: {"low": 0.01, "high": 1.0, "log": True}, "data.batch_size": [8, 16]}
    write_search(folder, sampler=sampler, space=space, trials=6)
    main(words(folder, storage, "shared"))
    main(["tune", str(folder / "search.yaml"), "--out", str(folder / "alone"), "--workers", "1"])
    shared, alone = rows(folder / "shared"), rows(folder / "alone")
    assert len({row[LR] for row in shared}) == len(shared) == 6
    # TPE also samples at random as long as there are few trials.
    assert shared == alone


@pytest.mark.seconds
def test_tune_study_of_another_search_is_rejected_before_any_trial(folder, storage, pretend, error_of):
    main(words(folder, storage, "out"))
    number = len(pretend)
    changes = {
        "space": {"space": {LR: [0.1]}},
        "objective": {"objective": "forgetting/server"},
        "seeds": {"seeds": 2},
        "sampler": {"sampler": "random", "trials": 6},
    }
    for name, change in changes.items():
        write_search(folder, **change)
        error = error_of(words(folder, storage, "other"))
        assert f"but the study has another {name}" in error.replace("recipe, ", "").replace("direction, ", "")
        assert not (folder / "other").exists()
    write_search(folder)
    (folder / "tiny.yaml").write_text((folder / "tiny.yaml").read_text() + "\nseed_everything: 3\n")
    assert "but the study has another recipe. Use another name with" in error_of(words(folder, storage, "other"))
    assert len(pretend) == number and len(trials_of(storage)) == 6
    # Both suggested fixes work.
    main(words(folder, storage, "other", "--study-name", "second"))
    assert len(trials_of(storage, "second")) == 6
    main(words(folder, storage, "out", "--restart"))
    assert len(trials_of(storage)) == 6 and len(pretend) == number + 12


def test_study_of_another_program_is_rejected(folder, storage, error_of):
    study = optuna.create_study(study_name="tune-search", storage=open_storage(storage))
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    assert "but the study was not made by this command." in error_of(words(folder, storage, "out"))


@pytest.mark.seconds
def test_tune_stopped_process_frees_its_trials(folder, storage, pretend, monkeypatch, capsys):
    """Ctrl-C and an error of the operating system free the trials at once. The trial is run again in its folder."""
    from lightning_fcl.runs.signals import Stopped

    run_job = jobs_module.run_job
    for error in (Stopped(signal.SIGINT, ""), OSError("No space left on device")):

        def cut_off(job, should_stop=None, error=error):
            raise error

        monkeypatch.setattr(jobs_module, "run_job", cut_off)
        with pytest.raises(SystemExit):
            main(words(folder, storage, "out"))
    monkeypatch.setattr(jobs_module, "run_job", run_job)
    main(words(folder, storage, "out"))
    states = [trial.state for trial in trials_of(storage)]
    assert states == [TrialState.FAIL] * 2 + [TrialState.COMPLETE] * 6
    assert [row["state"] for row in rows(folder / "out")] == ["complete"] * 6
    assert [path.parent.name for path in pretend] == [f"trial-{slot:04}" for slot in range(6)]


@pytest.mark.seconds
def test_tune_killed_process_frees_its_trial_after_grace_period(folder, storage, pretend, monkeypatch, capsys):
    search = Search.read(folder / "search.yaml")
    lost = SearchStudy(search, 6, 0, [*search.grid()], "tune-search", storage)
    lost.check_search()
    trial = lost.claim()  # The process of this trial sends no further heartbeat.
    main(words(folder, storage, "out"))
    assert len(pretend) == 5 and "1 running in other processes" in capsys.readouterr().out
    now = time.time()
    monkeypatch.setattr(study_module.time, "time", lambda: now + study_module._GRACE_SECONDS + 1)
    main(words(folder, storage, "out"))
    assert len(pretend) == 6 and pretend[-1].parent.name == trial.user_attrs["folder"]
    assert "running" not in capsys.readouterr().out
    assert trials_of(storage)[trial.number].state is TrialState.FAIL
    # A late result of the lost process is ignored.
    lost.tell(trial, TrialState.COMPLETE, 1.0)
    assert trials_of(storage)[trial.number].state is TrialState.FAIL


def test_claim_of_replaced_trial_keeps_its_settings(folder, storage):
    write_search(folder, sampler="random", trials=3, space={LR: {"low": 0.0, "high": 1.0}})
    search = Search.read(folder / "search.yaml")
    first = SearchStudy(search, 3, 0, [], "tune-search", storage)
    first.check_search()
    claimed = first.claim()
    with pytest.raises(KeyboardInterrupt), first.running():
        raise KeyboardInterrupt
    other_seed = SearchStudy(search, 3, 9, [], "tune-search", storage)
    again = other_seed.claim()
    assert again.params == claimed.params and again.user_attrs["folder"] == claimed.user_attrs["folder"]
    assert other_seed.claim().params != claimed.params


CLAIM_ALL = """
import json, sys
from pathlib import Path
from optuna.trial import TrialState
from lightning_fcl.cli.search import Search
from lightning_fcl.cli.study import SearchStudy
study = SearchStudy(Search.read(Path("search.yaml")), 12, 0, [], "tune-search", sys.argv[1])
study.check_search()
print("ready", flush=True)
sys.stdin.readline()
while (trial := study.claim()) is not None:
    print(json.dumps([trial.user_attrs["slot"], trial.params[sys.argv[2]]]))
    study.tell(trial, TrialState.COMPLETE, 0.5)
"""


@pytest.mark.seconds
def test_claim_in_parallel_gives_each_slot_once(folder, storage):
    """Three processes claim trials as fast as they can."""
    write_search(folder, sampler="random", trials=12, space={LR: {"low": 0.0, "high": 1.0}})
    command, pipes = (
        [sys.executable, "-c", CLAIM_ALL, storage, LR],
        {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE},
    )
    processes = [subprocess.Popen(command, cwd=folder, text=True, **pipes) for _ in range(3)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 3
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    claimed = [tuple(json.loads(line)) for output in outputs for line in output.splitlines()]
    assert sorted(slot for slot, _ in claimed) == [*range(12)]
    alone = SearchStudy(Search.read(folder / "search.yaml"), 12, 0, [], "alone", None)
    assert dict(claimed) == {slot: alone.claim().params[LR] for slot in range(12)}
    assert sum(trial.state is TrialState.COMPLETE for trial in trials_of(storage)) == 12


@pytest.mark.seconds
def test_tune_failed_trials_of_other_processes_are_in_the_table(folder, storage, pretend, monkeypatch):
    run_job = jobs_module.run_job

    def fail_once(job, should_stop=None):
        if "trial-0001" in str(job.out):
            job.out.mkdir(parents=True)
            job.write_fingerprint(job.out)
            raise KeyError("broken")
        run_job(job)

    monkeypatch.setattr(jobs_module, "run_job", fail_once)
    main(words(folder, storage, "one"))
    main(words(folder, storage, "two"))
    failed = [row for row in rows(folder / "two") if row["state"] == "failed"]
    assert [row["failure"] for row in failed] == ["KeyError: 'broken'"] and len(rows(folder / "two")) == 6
    assert not list((folder / "two").glob("trial-*"))


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("nosuch://me:secret@host/db", InvalidValueError, "but got nosuch://me:***@host/db: Can't load plugin"),
        ("://", InvalidValueError, "Use a URL such as `sqlite:///study.db`"),
        ("sqlite://", InvalidValueError, "is in memory. Use a file, as in `--storage sqlite:///study.db`."),
        ("sqlite:///:memory:", InvalidValueError, "is in memory."),
        ("study.db", InvalidValueError, "use `--storage sqlite:///study.db`."),
        ("no/such/study.log", MissingFileError, "to be a file in an existing folder"),
        (".", MissingFileError, "to be a file in an existing folder"),
        ("sqlite:////no/such/folder/study.db", ConnectionFailedError, "unable to open database file"),
    ],
)
def test_open_storage_invalid_text_raises(tmp_path, monkeypatch, text, error, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error) as raised:
        open_storage(text)
    assert message in str(raised.value) and "secret" not in str(raised.value)
    assert raised.value.argument == "--storage"


@pytest.mark.parametrize(
    ("wrong", "right", "hint"),
    [
        ("sqlite://", "sqlite:///study.db", "Use a file, as in `--storage sqlite:///study.db`."),
        ("a.db", "sqlite:///a.db", "For an SQLite database, use `--storage sqlite:///a.db`."),
        ("no/study.log", "study.log", "Use a URL such as `sqlite:///study.db`, or a file such as `study.log`"),
        ("nosuch://x", "sqlite:///study.db", "Use a URL such as `sqlite:///study.db`, or a file such as `study.log`"),
        ("notes.txt", "study.log", "Use a URL such as `sqlite:///study.db`, or a file such as `study.log`"),
        ("sqlite:///no/a.db", "sqlite:///a.db", "and the folder of an SQLite file must exist. Then run the same"),
    ],
)
def test_open_storage_hint_is_a_fix_that_works(tmp_path, monkeypatch, wrong, right, hint):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("hello\n")
    with pytest.raises((InvalidValueError, MissingFileError, ConnectionFailedError)) as raised:
        open_storage(wrong)
    assert hint in raised.value.hint
    study = optuna.create_study(storage=open_storage(right))
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)


def test_open_storage_missing_driver_raises(monkeypatch):
    def create_engine(url, **arguments):
        raise ModuleNotFoundError("No module named 'psycopg'")

    monkeypatch.setattr("sqlalchemy.engine.create_engine", create_engine)
    with pytest.raises(MissingPackageError) as raised:
        open_storage("postgresql+psycopg://me:secret@host/db")
    assert "No module named 'psycopg'. Install the package of the SQLAlchemy driver postgresql+psycopg" in str(
        raised.value
    )
    assert "secret" not in str(raised.value)


def test_open_storage_other_file_raises_and_keeps_the_file(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("hello\n")
    with pytest.raises(InvalidValueError, match="to be a file of Optuna's JournalStorage"):
        open_storage(str(file))
    assert file.read_text() == "hello\n"


def test_storage_errors_names_database_without_password():
    with pytest.raises(ConnectionFailedError) as raised, storage_errors("mysql://me:secret@host/db"):
        driver_error = OperationalError("SELECT secret", {}, Exception("Lost connection."))
        raise optuna.exceptions.StorageInternalError("An exception is raised during the commit.") from driver_error
    assert "mysql://me:***@host/db, but got: Lost connection. Check" in str(raised.value)
    assert "secret" not in str(raised.value) and without_password("study.log") == "study.log"


@pytest.mark.seconds
def test_tune_study_name_without_storage_raises(folder, error_of, pretend):
    error = error_of(["tune", str(folder / "search.yaml"), "--study-name", "a"])
    assert "Expected `--storage` with `--study-name a`" in error
    assert "Pass the storage of the study, as in `--storage sqlite:///study.db`." in error
    main(words(folder, f"sqlite:///{folder}/study.db", "out", "--study-name", "a"))
    assert len(trials_of(f"sqlite:///{folder}/study.db", "a")) == 6


def test_study_of_another_search_error_is_an_invalid_state(folder, storage):
    search = Search.read(folder / "search.yaml")
    SearchStudy(search, 6, 0, [], "tune-search", storage).check_search()
    write_search(folder, space={LR: [0.1]})
    with pytest.raises(InvalidStateError, match="has another space"):
        SearchStudy(Search.read(folder / "search.yaml"), 1, 0, [], "tune-search", storage).check_search()
