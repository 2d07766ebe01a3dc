"""Tests of `fit --seeds` and `fit --sweep`: folders, seeds, failures, resuming and errors."""

import json

import pytest
import yaml
from raising import raises

from lightning_fcl.cli import sweep
from lightning_fcl.cli.jobs import Failure, Job
from lightning_fcl.cli.main import main
from lightning_fcl.cli.sweep import parse_grid, parse_seeds
from lightning_fcl.errors import InvalidStateError, InvalidValueError
from lightning_fcl.evaluation.results import read_results
from lightning_fcl.io.safe_yaml import read_yaml
from lightning_fcl.runs.recipe import Recipe, Setting

MODULE = """
import lightning_fcl

class Failing(lightning_fcl.Classifier):
    def on_train_start(self):
        if {fails} and self.trainer.datamodule.seed == 1:
            raise RuntimeError("this seed fails")
"""


@pytest.mark.parametrize(
    ("text", "seeds"), [("1", [0]), ("4", [0, 1, 2, 3]), ("3,7", [3, 7]), ("12,", [12]), (" 5 , 0 ", [5, 0])]
)
def test_parse_seeds_count_or_list(text, seeds):
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "1,x", "3,3", ",", "1.5", "4294967296,", "1,,2"])
def test_parse_seeds_invalid_raises(text):
    with raises(InvalidValueError, "--seeds", value=text):
        parse_seeds(text)


def test_parse_grid_last_option_varies_fastest():
    points = parse_grid(["a.lr=.1,1e-4", "data.sizes=[4, 2],[8, 1]"])
    assert [point.values for point in points] == [
        {"a.lr": 0.1, "data.sizes": [4, 2]},
        {"a.lr": 0.1, "data.sizes": [8, 1]},
        {"a.lr": 1e-4, "data.sizes": [4, 2]},
        {"a.lr": 1e-4, "data.sizes": [8, 1]},
    ]
    names = [point.name for point in points]
    assert len({*names}) == 4 and names[0].startswith("lr=.1+sizes=") and not any(set("/ []") & {*n} for n in names)
    assert [point.name for point in parse_grid([])] == [""]


def test_parse_grid_equal_folder_names_are_numbered():
    names = [point.name for point in parse_grid(["data.path=a/b,a:b"])]
    assert names == ["0-path=a_b", "1-path=a_b"]


@pytest.mark.parametrize(
    ("texts", "mistake"),
    [
        (["lr"], "an option without values"),
        (["lr="], "an option without values"),
        (["=1"], "an option without values"),
        (["lr=1,,2"], "an option without values"),
        (["lr=1,1"], "a value twice"),
        (["lr=1", "lr=2"], "an option twice"),
        (["seed_everything=1,2"], "the seed"),
        (["alpha=[.1,.2"], "a value that is not valid YAML"),
    ],
)
def test_parse_grid_invalid_raises(texts, mistake):
    with raises(InvalidValueError, "--sweep", value=texts[-1]) as error_info:
        parse_grid(texts)
    assert f"but got {mistake}: " in str(error_info.value)


def test_parse_grid_accepts_the_form_in_the_hint():
    assert len(parse_grid(["data.batch_size=16,32"])) == 2


def test_fit_seeds_without_a_model_raises_before_first_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        main(["fit", "--seeds", "2"])
    assert exit_info.value.code == 2 and "Expected a recipe with a `model`" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
    main(["validate", "quickstart"])  # The hint names this recipe.


@pytest.mark.parametrize("command", [["report", "--table", "csv"], ["report"], ["appendix"]])
def test_out_that_is_a_folder_or_a_file_of_a_run_raises(tiny, tmp_path, capsys, command):
    run = tmp_path / "run"
    main(["fit", *tiny, "--out", str(run)])
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for out in (run, run / "results.json", run / "config.yaml"):
        with pytest.raises(SystemExit) as exit_info:
            main([*command, str(run), "--out", str(out)])
        assert exit_info.value.code == 2 and "Expected `--out` to be a new file" in capsys.readouterr().err
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files
    main([*command, str(run), "--out", str(tmp_path / "table.txt")])
    assert (tmp_path / "table.txt").is_file()


def get_record(folder):
    """Return the record of a run without measured times."""
    record = read_results(folder)["record"]
    return {**record, "rounds": [{**entry, "seconds": 0, "processor_seconds": 0} for entry in record["rounds"]]}


@pytest.mark.seconds
def test_fit_seeds_equal_single_runs_and_finished_runs_are_skipped(tiny, tmp_path, capsys):
    out, single = tmp_path / "several", tmp_path / "single"
    main(["fit", *tiny, "--out", str(out), "--seeds", "0,3", "--workers", "1"])
    main(["fit", *tiny, "--out", str(single), "--seed_everything", "3"])
    assert get_record(out / "seed-3") == get_record(single) != get_record(out / "seed-0")
    values = [read_results(out / f"seed-{seed}")["metrics"]["final_accuracy/server"] for seed in (0, 3)]
    printed = capsys.readouterr().out
    assert f"{sum(values) / 2:.3f} ± " in printed and "2 of 2 finished" in printed
    before = {path: path.stat().st_mtime_ns for path in out.glob("seed-*/*")}
    main(["fit", *tiny, "--out", str(out), "--seeds", "0,3", "--workers", "1"])
    assert {path: path.stat().st_mtime_ns for path in out.glob("seed-*/*")} == before


@pytest.mark.slow
def test_fit_seeds_does_not_depend_on_workers(tiny, tmp_path):
    for workers in ("1", "2"):
        main(["fit", *tiny, "--out", str(tmp_path / workers), "--seeds", "3", "--workers", workers])
    for seed in range(3):
        assert get_record(tmp_path / "1" / f"seed-{seed}") == get_record(tmp_path / "2" / f"seed-{seed}")


@pytest.mark.seconds
def test_fit_sweep_records_searched_options(tiny, tmp_path, capsys):
    sweep = ["--sweep", "model.init_args.optimizer.lr=.2,.05", "--sweep", "data.batch_size=16"]
    main(["fit", *tiny, "--out", str(tmp_path / "grid"), *sweep, "--workers", "1"])
    for lr in (0.2, 0.05):
        folder = tmp_path / "grid" / f"lr={lr:g}+batch_size=16".replace("=0.", "=.") / "seed-0"
        assert read_results(folder)["searched"] == {"model.init_args.optimizer.lr": lr, "data.batch_size": 16}
        config = read_yaml(folder / "config.yaml")
        assert config["data"]["batch_size"] == 16
        assert config["model"]["init_args"]["optimizer"]["init_args"]["lr"] == lr
    printed = capsys.readouterr().out
    head = next(line for line in printed.splitlines() if line.startswith("| "))
    assert [cell.strip() for cell in head.split("|")][2:5] == ["lr", "batch_size", "seeds"]
    assert (tmp_path / "grid" / "table.csv").read_text().startswith("row,model.init_args.optimizer.lr,data.batch_size")


@pytest.mark.seconds
def test_fit_failed_seed_does_not_stop_others(tmp_path, tiny, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "failing_seed.py").write_text(MODULE.format(fails=True))
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"model": {"class_path": "failing_seed.Failing"}}))
    words = ["fit", *tiny, "--config", "own.yaml", "--out", "several", "--seeds", "3", "--workers", "1"]
    with pytest.raises(SystemExit) as exit_info:
        main(words)
    captured = capsys.readouterr()
    assert exit_info.value.code == 2 and "1 of 3 failed" in captured.err
    assert "Failed: seed 1: RuntimeError: this seed fails" in captured.out and "Runs: 2 of 3 finished" in captured.out
    assert "Correct the cause, then run the same command again: lightning-fcl fit" in captured.err
    monkeypatch.setattr("failing_seed.Failing.on_train_start", lambda self: None)
    main(words)
    assert "Runs: 3 of 3 finished" in capsys.readouterr().out
    assert not (tmp_path / "several" / "seed-1" / "failure.txt").exists()


@pytest.mark.seconds
def test_fit_seeds_changed_recipe_uses_new_folder(tiny, tmp_path, capsys):
    words = ["fit", *tiny, "--out", str(tmp_path / "runs"), "--workers", "1", "--seeds"]
    main([*words, "1"])
    before = (tmp_path / "runs" / "seed-0" / "results.json").read_bytes()
    main([*words, "2", "--data.batch_size", "32"])
    assert (tmp_path / "runs" / "seed-0" / "results.json").read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "runs-2").glob("seed-*")) == ["seed-0", "seed-1"]
    assert not (tmp_path / "runs" / "seed-1").exists()
    assert f"written to {tmp_path / 'runs-2'}" in capsys.readouterr().out
    # A folder of a single run is not used either.
    main(["fit", *tiny, "--out", str(tmp_path / "one")])
    main(["fit", *tiny, "--out", str(tmp_path / "one"), "--workers", "1", "--seeds", "1"])
    assert (tmp_path / "one-2" / "seed-0" / "results.json").is_file()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--seeds", "2", "--ckpt_path", "x.ckpt"], "Expected no `--ckpt_path` with `--seeds`"),
        (["--seeds", "2", "--seed_everything", "1"], "Expected no `--seed_everything` with `--seeds`"),
        (["--seeds", "2", "--print_config"], "Expected no `--print_config` with `--seeds`"),
        (["--seeds", "two"], "Expected `--seeds` to be a number of seeds"),
        (["--seeds", "2", "--workers", "0"], "Expected `workers` to be at least 1"),
        (["--workers", "2"], "Expected `--seeds` or `--sweep` with `--workers`"),
        (["--sweep", "data.batch_size"], "Expected each `--sweep` to be a new option"),
        (["--sweep", "data.batch_size=16,many"], "Expected `batch_size` to be a whole number"),
        (["--sweep", "data.batchsize=16"], "Did you mean"),
    ],
)
def test_fit_several_runs_invalid_arguments_exit_before_first_run(tiny, tmp_path, capsys, words, part):
    with pytest.raises(SystemExit) as exit_info:
        main(["fit", *tiny, "--out", str(tmp_path / "none"), *words])
    assert exit_info.value.code == 2 and part in capsys.readouterr().err and not (tmp_path / "none").exists()


@pytest.mark.seconds
def test_report_table_formats(tiny, tmp_path, capsys):
    for name, size in (("small", "16"), ("large", "64")):
        main(["fit", *tiny, "--out", str(tmp_path / "all" / name), "--data.batch_size", size])
    folder = str(tmp_path / "all")
    capsys.readouterr()
    main(["report", folder, "--table", "markdown", "--metrics", "final_accuracy/server"])
    lines = capsys.readouterr().out.splitlines()
    values = {
        name: read_results(tmp_path / "all" / name)["metrics"]["final_accuracy/server"] for name in ("large", "small")
    }
    assert [[cell.strip() for cell in line.split("|")[1:4]] for line in lines[2:4]] == [
        [name, "1", f"{value:.3f}"] for name, value in values.items()
    ]
    main(["report", folder, "--table", "csv", "--out", str(tmp_path / "deep" / "t.csv")])
    rows = (tmp_path / "deep" / "t.csv").read_text().splitlines()
    assert f"small,final_accuracy/server,1,{values['small']}" in "\n".join(rows)
    main(["report", folder, "--table", "latex"])
    assert "\\toprule" in capsys.readouterr().out
    for words, part in (
        (["--metrics", "x"], "Expected `--table` with `--metrics`"),
        (["--table", "csv", "--metrics", "final_acc/server"], "Did you mean"),
        (["--table", "csv", "--reference", "smal"], "reference"),
    ):
        with pytest.raises(SystemExit):
            main(["report", folder, *words])
        assert part in capsys.readouterr().err


def test_fit_all_failed_runs_raise(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "try_job", lambda job: Failure("no"))
    recipe = Recipe.from_words(tiny)
    with pytest.raises(InvalidStateError, match="2 of 2 failed"):
        sweep.run_sweep(recipe, "2", [], 1, tmp_path / "out", ["fit"])
    assert json.dumps([path.name for path in tmp_path.glob("out*")]) == "[]"


def test_job_file_after_setting_overrides_it_and_changes_fingerprint(tmp_path):
    (tmp_path / "b.yaml").write_text("data: {batch_size: 8}\n")
    file, setting = tmp_path / "b.yaml", Setting("data.batch_size", 16)
    jobs = [Job("", Recipe(layers), 0, tmp_path / "out") for layers in ((file, setting), (setting, file))]
    assert [job.whole_recipe.content()["data"]["batch_size"] for job in jobs] == [16, 8]
    assert jobs[0].fingerprint != jobs[1].fingerprint
