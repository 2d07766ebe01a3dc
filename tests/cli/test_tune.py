import csv
import json
import shutil
import signal

import pytest
import yaml

from lightning_fcl.cli import jobs as jobs_module
from lightning_fcl.cli import tune as module
from lightning_fcl.cli import tune_output
from lightning_fcl.cli.main import main
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.evaluation.results import mark_complete, write_results
from lightning_fcl.runs.fit import resolve_recipe
from lightning_fcl.runs.paper_rows import recipes_folder
from lightning_fcl.runs.signals import Stopped

LR = "model.init_args.optimizer.init_args.lr"
ALPHA = "trainer.callbacks.FLwF2T.alpha"
SIZES = "model.init_args.model.init_args.sizes"
SEARCH = {
    "configs": ["quickstart.yaml", "tiny.yaml"],
    "objective": "final_accuracy/server",
    "trials": 4,
    "space": {
        LR: {"low": 0.01, "high": 1.0, "log": True},
        ALPHA: {"low": 0.1, "high": 0.9},
        SIZES: [[64, 8, 10], [64, 16, 10]],
        "data.batch_size": {"low": 8, "high": 32, "step": 8},
    },
}


@pytest.fixture
def recipe(small_recipe):
    """Return overrides of the quickstart recipe: one round, two clients, and validation samples."""
    return small_recipe(rounds=1, clients=2, split={"validation": 0.3})


@pytest.fixture
def search(tmp_path, recipe):
    """Return a function that writes a changed search file, and returns the arguments that run the search."""
    (tmp_path / "quickstart.yaml").write_text((recipes_folder() / "quickstart.yaml").read_text())
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))

    def write(out="out", workers="1", **changes):
        content = {key: value for key, value in {**SEARCH, **changes}.items() if value is not None}
        (tmp_path / "search.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        return ["tune", str(tmp_path / "search.yaml"), "--out", str(tmp_path / out), "--workers", workers]

    return write


@pytest.fixture
def pretend(monkeypatch):
    """Return a function that replaces the training of runs and the drawing of charts by fakes.

    By default, the objective of a fake run is its learning rate. If a function is given, it computes the objective
    from the recipe.
    """
    seen = []

    def use(objective=lambda recipe: recipe["model"]["init_args"]["optimizer"]["init_args"]["lr"]):
        def run_job(job, should_stop=None):
            seen.append(job.label)
            value = objective(yaml.safe_load(job.recipe.files[-1].read_text()))
            job.out.mkdir(parents=True)
            write_results(job.out, {"metrics": {"final_accuracy/server": value}})
            mark_complete(job.out, [job.out / "results.json"])
            (job.out / "fingerprint").write_text(job.fingerprint)

        monkeypatch.setattr(jobs_module, "run_job", run_job)
        monkeypatch.setattr(tune_output, "trials_figure", lambda search, trials: {"mark": "point"})
        return seen

    return use


def rows(folder):
    with (folder / "trials.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.seconds
def test_tune_end_to_end_writes_best_recipe(search, tmp_path, capsys):
    main(search(seeds=2, trials=2))
    printed = capsys.readouterr().out
    trials = rows(tmp_path / "out")
    assert [trial["state"] for trial in trials] == ["complete"] * 2
    best = max(trials, key=lambda trial: float(trial[SEARCH["objective"]]))
    assert printed.splitlines()[1].split()[:2] == [f"{float(best['final_accuracy/server']):.4f}", best["trial"]]
    assert (tmp_path / "out" / "trials.png").read_bytes().startswith(b"\x89PNG")
    # `fit` with the recipe of the best settings has the same objective as the best trial.
    recipe = tmp_path / "out" / "best.yaml"
    assert f"--config {recipe}\n" in recipe.read_text()
    words = ["fit", *(w for name in SEARCH["configs"] for w in ("--config", str(tmp_path / name)))]
    words += ["--config", str(recipe), "--recipe.eval_split", "validation"]
    values = []
    for seed in "01":
        main([*words, "--seed_everything", seed, "--out", str(tmp_path / f"fit-{seed}")])
        results = json.loads((tmp_path / f"fit-{seed}" / "results.json").read_text())
        values.append(results["metrics"]["final_accuracy/server"])
    assert float(best["final_accuracy/server"]) == pytest.approx(sum(values) / 2, abs=1e-12)
    # The objective was measured on the validation samples. 80 % of the 1797 samples are training samples, and 30 % of
    # the training samples are used for validation.
    folder = tmp_path / "out" / f"trial-{int(best['trial']):04}" / "seed-0"
    results = json.loads((folder / "results.json").read_text())
    assert results["measured_on"] == "validation"
    assert sum(results["record"]["totals"]) == pytest.approx(0.3 * 0.8 * 1797, abs=10)
    # The trial has the searched values. All other settings are those of the recipe.
    config, settings = yaml.safe_load((folder / "config.yaml").read_text()), yaml.safe_load(recipe.read_text())
    callbacks = config["trainer"]["callbacks"]
    assert [callback["class_path"].split(".")[-1] for callback in callbacks] == ["FLwF2T", "Replay"]
    assert callbacks[0]["init_args"]["alpha"] == float(best[ALPHA])
    assert callbacks[0]["init_args"]["beta"] == 0.2 and callbacks[1]["init_args"]["memory_size"] == 50
    assert config["model"]["init_args"]["optimizer"]["init_args"]["momentum"] == 0.5
    assert config["model"]["init_args"]["model"]["init_args"]["sizes"] == json.loads(best[SIZES])
    assert config["data"]["batch_size"] == settings["data"]["batch_size"] == int(best["data.batch_size"])
    # best.yaml does not set `recipe.eval_split`, so a fit of best.yaml is evaluated on the test samples.
    assert "recipe" not in settings


@pytest.mark.seconds
def test_tune_seeds_option_overrides_search_file(search, tmp_path, pretend):
    pretend()
    main([*search(seeds=1, trials=1), "--seeds", "3"])
    assert sorted(path.name for path in (tmp_path / "out" / "trial-0000").glob("seed-*")) == [
        f"seed-{seed}" for seed in range(3)
    ]
    assert "--seeds 3" in (tmp_path / "out" / "best.yaml").read_text()


@pytest.mark.seconds
def test_tune_row_uses_files_and_overrides_of_row(search, tmp_path, recipe, monkeypatch, pretend):
    """The row is merged before the files and the settings of the search. The first seed is `first_seed`."""
    pretend()
    jobs, run_job = [], jobs_module.run_job
    monkeypatch.setattr(jobs_module, "run_job", lambda job, *_: jobs.append(job) or run_job(job))
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    given = {
        "configs": ["tiny.yaml"],
        "overrides": {"data.batch_size": 7, "trainer.strategy.init_args.local_epochs": 3},
    }
    given["scale_overrides"] = {"small": {LR: 0.5}}
    (tmp_path / "rows.yaml").write_text(yaml.safe_dump({"base": "quickstart.yaml", "rows": {"One row": given}}))
    (tmp_path / "more.yaml").write_text("trainer: {max_epochs: 1}")
    main([*search(configs=["more.yaml"], scale="small", seeds=2, first_seed=40, trials=1), "--row", "One row"])
    names = ["quickstart.yaml", "tiny.yaml", "more.yaml", "trial.yaml"]
    assert [[path.name for path in job.recipe.files] for job in jobs] == [names] * 2
    assert [job.seed for job in jobs] == [40, 41]
    kept = {"trainer.strategy.init_args.local_epochs"} | ({"data.batch_size"} - set(SEARCH["space"]))
    assert {setting.name for setting in jobs[0].recipe.settings} >= kept
    assert LR not in {setting.name for setting in jobs[0].recipe.settings}
    config = resolve_recipe(jobs[0].whole_recipe)
    assert config["trainer"]["strategy"]["init_args"]["local_epochs"] == 3
    (trial,) = rows(tmp_path / "out")
    assert config["model"]["init_args"]["optimizer"]["init_args"]["lr"] == float(trial[LR]) != 0.5
    best = (tmp_path / "out" / "best.yaml").read_text()
    assert "mean of the seeds 40 to 41" in best and "--seed_everything 40" in best
    assert "--trainer.strategy.init_args.local_epochs 3" in best


@pytest.mark.seconds
@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_tune_interrupted_search_resumes(search, tmp_path, capsys, monkeypatch, pretend, sampler):
    seen = pretend()
    main(search("whole", sampler=sampler, trials=20))
    whole, run_job = seen.copy(), jobs_module.run_job
    seen.clear()

    def cut_off(job, *_):
        if len(seen) in (5, 13):
            seen.append("cut off")
            raise Stopped(signal.SIGINT, "")
        run_job(job)

    monkeypatch.setattr(jobs_module, "run_job", cut_off)
    for _ in range(2):
        with pytest.raises(SystemExit, match="130"):
            main(search(sampler=sampler, trials=20))
        assert "trials. Run the same command again" in capsys.readouterr().err
    main(search(sampler=sampler, trials=20))
    assert [label for label in seen if label != "cut off"] == whole
    assert rows(tmp_path / "out") == rows(tmp_path / "whole")
    values = [trial[LR] for trial in rows(tmp_path / "out")]
    assert len(set(values)) == 20


@pytest.mark.seconds
def test_tune_damaged_trial_is_repaired_or_reported(search, tmp_path, error_of, pretend):
    seen = pretend()
    main(search(trials=3))
    out = tmp_path / "out"
    whole, best = rows(out), (out / "best.yaml").read_text()
    seen.clear()
    for trial in range(3):
        (out / f"trial-{trial:04}" / "trial.yaml").write_text("model: {}")
    shutil.rmtree(out / "trial-0001" / "seed-0")
    main(search(trials=3))
    assert seen == ["trial 1, seed 0"] and rows(out) == whole and (out / "best.yaml").read_text() == best
    (out / "trial-0001" / "seed-0" / "fingerprint").write_text("damaged")
    assert f"Expected the trials in {out} to belong to this search, but" in error_of(search(trials=3))


@pytest.mark.seconds
@pytest.mark.long
def test_tune_resume_with_more_trials_but_no_other_change(search, tmp_path, error_of, pretend, recipe):
    seen = pretend()
    main(search(trials=2))
    main([*search(), "--trials", "5"])
    assert seen == [f"trial {number}, seed 0" for number in range(5)]
    longer = rows(tmp_path / "out")
    main(search("at-once", trials=5))
    assert rows(tmp_path / "at-once") == longer
    assert "delete these trials with `--restart`" in error_of(search(eval_split="test"))
    assert "delete these trials with `--restart`" in error_of([*search(), "--seed", "1"])
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**recipe, "seed_everything": 3}))
    assert "a recipe, the seed or the version has changed" in error_of(search())
    main([*search(), "--restart"])
    assert len(rows(tmp_path / "out")) == 4
    assert len(list((tmp_path / "out").glob("trial-*"))) == 4
    main([*search("seeded"), "--seed", "1"])
    assert {trial[LR] for trial in rows(tmp_path / "seeded")}.isdisjoint(trial[LR] for trial in longer)


@pytest.mark.seconds
def test_tune_tpe_improves_over_trials(search, tmp_path, pretend):
    pretend()
    main(search(sampler="tpe", trials=40, space={LR: {"low": 0.0, "high": 1.0}}))
    values = [float(trial[LR]) for trial in rows(tmp_path / "out")]
    assert sum(values[24:]) / 16 > 0.1 + sum(values[:8]) / 8


@pytest.mark.seconds
def test_tune_trials_from_tries_best_settings_first(search, tmp_path, pretend):
    pretend(lambda recipe: recipe["model"]["init_args"]["optimizer"]["init_args"]["lr"] if not ending(recipe) else None)
    main(search(trials=8))
    others = sorted(rows(tmp_path / "out"), key=lambda row: -float(row["final_accuracy/server"] or "-inf"))
    table = str(tmp_path / "out" / "trials.csv")
    pretend()
    for trials in (2, 3):  # A finished search can be continued with a larger number of trials.
        main([*search(out="among", trials=8), "--trials-from", table, "--trials", str(trials)])
        tried = rows(tmp_path / "among")
        assert [[row[key] for key in SEARCH["space"]] for row in tried] == [
            [row[key] for key in SEARCH["space"]] for row in others[:trials]
        ]
    main([*search(out="all", trials=8), "--trials-from", table])
    assert len(rows(tmp_path / "all")) == sum(row["state"] == "complete" for row in others) < 8
    assert f"search.yaml --trials-from {table}, trial" in (tmp_path / "all" / "best.yaml").read_text()


def ending(recipe):
    """Return whether a run with these settings fails."""
    return recipe["model"]["init_args"]["model"]["init_args"]["sizes"] == [64, 8, 10]


@pytest.mark.seconds
def test_tune_trials_from_other_space_raises(search, tmp_path, pretend, capsys):
    pretend()
    main(search())
    table = tmp_path / "out" / "trials.csv"
    head, space = table.read_text().splitlines()[0], SEARCH["space"]
    others = tmp_path / "none.csv"

    def refused(file, message, **changes):
        with pytest.raises(SystemExit):
            main([*search(out="other", **changes), "--trials-from", str(file)])
        assert message in capsys.readouterr().err

    refused(table, "a table without the column data.shuffle", space={**space, "data.shuffle": [True, False]})
    refused(table, "is not between 2.0 and 3.0", space={**space, ALPHA: {"low": 2.0, "high": 3.0}})
    refused(table, "is not one of [64, 10]", space={**space, SIZES: [[64, 10]]})
    refused(table, "a table without the column forgetting/server", objective="forgetting/server")
    refused(others, f"Expected the file {others} but it is missing")
    others.write_bytes(bytes(range(256)))
    refused(others, f"Expected {others} to be the trials.csv of a search for final_accuracy/server over the same space")
    table.write_text(head + "\n")
    refused(table, "Expected completed trials")
    assert not (tmp_path / "other").exists()


@pytest.mark.seconds
def test_tune_grid_covers_each_point_once(search, tmp_path, pretend):
    pretend()
    space = {
        LR: {"low": 0.1, "high": 0.3, "step": 0.1},
        "data.partition.init_args.num_clients": {"low": 2, "high": 3},
        "data.shuffle": [True, False],
    }
    main(search(sampler="grid", trials=None, space=space))
    points = [
        (float(t[LR]), int(t["data.partition.init_args.num_clients"]), t["data.shuffle"])
        for t in rows(tmp_path / "out")
    ]
    assert points == [(lr, clients, s) for lr in (0.1, 0.2, 0.3) for clients in (2, 3) for s in ("True", "False")]


@pytest.mark.seconds
def test_tune_cases_are_separate_searches(search, tmp_path, pretend, error_of):
    sizes = []

    def objective(recipe):
        sizes.append(recipe["data"]["batch_size"])
        return recipe["model"]["init_args"]["optimizer"]["init_args"]["lr"]

    pretend(objective)
    space, cases = {LR: [0.1, 0.2]}, {"8 at once": {"data.batch_size": 8}, 16: {"data.batch_size": 16}}
    words = search(sampler="grid", trials=None, space=space, variants=cases)
    main([*words, "--case", "8 at once"])
    assert sizes == [8, 8]
    best = yaml.safe_load((tmp_path / "out" / "best.yaml").read_text())
    assert best["data"]["batch_size"] == 8 and best["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 0.2
    assert "search.yaml --case '8 at once', trial 1" in (tmp_path / "out" / "best.yaml").read_text()
    search(sampler="grid", trials=None, space=space, variants={**cases, 32: {"data.batch_size": 32}})
    main([*words, "--case", "8 at once"])  # Another case in the file does not change this search.
    assert len(sizes) == 2
    assert "to belong to this search, but" in error_of([*words, "--case", "16"])
    main([*words[:2], "--out", str(tmp_path / "other"), "--workers", "1", "--case", "16"])
    assert sizes[2:] == [16, 16]


@pytest.mark.seconds
def test_tune_default_folder_contains_case(search, tmp_path, pretend, monkeypatch):
    pretend()
    monkeypatch.chdir(tmp_path)
    words = search(sampler="grid", trials=None, space={LR: [0.1]}, variants={"25 %": {"data.batch_size": 8}})
    main([*words[:2], "--case", "25 %"])
    assert (tmp_path / "runs" / "tune-search-25" / "best.yaml").is_file()


@pytest.mark.seconds
def test_tune_minimize_selects_smallest_objective(search, tmp_path, pretend):
    pretend()
    main(search(direction="minimize"))
    smallest = min(float(trial[LR]) for trial in rows(tmp_path / "out"))
    recipe = yaml.safe_load((tmp_path / "out" / "best.yaml").read_text())
    assert recipe["model"]["init_args"]["optimizer"]["init_args"]["lr"] == smallest


@pytest.mark.seconds
def test_tune_choices_accept_any_recipe_value(search, tmp_path):
    adam = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}}
    space = {
        "model.init_args.optimizer": [adam],
        "data.scenario.init_args.samples_per_round": [None],
        "data.scenario.init_args.history": ["round"],
    }
    main(search(sampler="grid", trials=None, space=space))
    config = yaml.safe_load((tmp_path / "out" / "trial-0000" / "seed-0" / "config.yaml").read_text())
    assert config["model"]["init_args"]["optimizer"]["class_path"] == "torch.optim.Adam"


@pytest.mark.seconds
def test_tune_failed_trial_is_recorded_and_search_continues(search, tmp_path, capsys, monkeypatch):
    words = search(sampler="grid", trials=None, space={"data.scenario.init_args.num_experiences": [2, 3], ALPHA: [0.5]})
    main(words)
    assert "Trials: 1 completed, 1 failed" in capsys.readouterr().out
    good, bad = rows(tmp_path / "out")
    assert (good["state"], bad["state"], bad["final_accuracy/server"]) == ("complete", "failed", "")
    assert "a list of positive numbers with this sum, but got 3" in bad["failure"]
    monkeypatch.setattr(jobs_module, "run_job", pytest.fail)  # The second search must not run a trial again.
    main(words)
    assert rows(tmp_path / "out") == [good, bad]


@pytest.mark.seconds
def test_tune_all_trials_failed_raises(search, tmp_path, error_of, pretend, recipe):
    (tmp_path / "tiny.yaml").write_text(
        yaml.safe_dump({**recipe, "data": {"partition": {"class_path": "IID", "init_args": {"num_clients": 2}}}})
    )
    error = error_of(search(trials=2))
    assert "all trials failed (2 of 2)" in error and "Expected the stream to have validation samples" in error
    seen = pretend(lambda recipe: float("nan"))
    error = error_of([*search("out2", trials=30)])
    assert "the first 10 finished trials all failed: final_accuracy/server is nan." in error
    assert len(seen) == 10


def failing(search, tmp_path, monkeypatch, error, **changes):
    """Run a search whose trials raise an error, and return the numbers of the trials that ran."""
    tried = []

    def run_job(job, *_):
        tried.append(int(job.label.split()[1].rstrip(",")))
        job.out.mkdir(parents=True)
        job.write_fingerprint(job.out)
        raise error(tried[-1])

    monkeypatch.setattr(jobs_module, "run_job", run_job)
    with pytest.raises(SystemExit):
        main(search(trials=12, **changes))
    return tried


@pytest.mark.seconds
def test_tune_stops_after_first_trials_fail_alike(search, tmp_path, error_of, monkeypatch):
    def numbered(trial):
        return InvalidValueError(f"Expected another number than {trial}.", code="odd" if trial == 3 else "")

    assert failing(search, tmp_path, monkeypatch, lambda trial: KeyError(trial)) == [*range(10)]
    file = tmp_path / "out" / "trial-0002" / "seed-0" / "failure.txt"
    assert file.read_text() == "message: 'KeyError: 2'\nerror: builtins.KeyError\ncode: ''\n"
    # The second search reads the failures from the files.
    assert "the first 10 finished trials all failed: KeyError: 9." in error_of(search(trials=12))
    file.write_text("KeyError: 2")  # The file has the format of an earlier version.
    assert "all trials failed (12 of 12). First failure: KeyError: 0." in error_of(search(trials=12))
    assert failing(search, tmp_path, monkeypatch, numbered, out="codes") == [*range(12)]
    assert failing(search, tmp_path, monkeypatch, lambda trial: InvalidValueError(f"{trial}."), out="texts") == [
        *range(10)
    ]


@pytest.mark.seconds
def test_tune_oserror_stops_search_without_failed_trial(search, tmp_path, error_of, monkeypatch, pretend):
    pretend()
    run_job = jobs_module.run_job

    def full(job, *_):
        raise OSError("No space left on device")

    monkeypatch.setattr(jobs_module, "run_job", full)
    assert "No space left on device" in error_of(search())
    monkeypatch.setattr(jobs_module, "run_job", run_job)
    main(search())
    assert [trial["state"] for trial in rows(tmp_path / "out")] == ["complete"] * 4


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"objective": None},
            "search.yaml to have valid values but got: the following arguments are required: objective",
        ),
        ({"configs": ["nowhere.yaml"]}, "nowhere.yaml"),
        ({"trials": 0}, "`trials` to be at least 1 but got 0"),
        ({"trials": None}, "Expected `trials`, the number of trials of the random sampler"),
        ({"seeds": 0}, "`seeds` to be at least 1"),
        ({"sampler": "gird"}, "\"sampler\": Expected a typing.Literal['random', 'grid', 'tpe']. Got value: gird"),
        ({"space": {}}, "`space` to contain at least one hyperparameter"),
        ({"variants": [1]}, "Expected `space` and each entry of `variants` in"),
        ({"space": [1]}, "Expected `space` and each entry of `variants` in"),
        ({"variants": {"a": {LR: 0.1}}}, 'Expected `case` to be "a" but got None'),
        ({"space": {LR: 0.1}}, f"the space of `{LR}` to be a list of choices, or {{low: ..., high: ...}}"),
        ({"space": {LR: []}}, "to be a list of choices"),
        ({"space": {LR: [1, 1]}}, "List each choice once."),
        ({"space": {LR: {"low": 2.0, "high": 1.0}}}, "`low <= high` must hold"),
        ({"space": {LR: {"low": 0.0, "high": 1.0, "log": True}}}, "`low > 0` must hold"),
        ({"space": {LR: {"low": "a", "high": 1.0}}}, "to be a list of choices, or"),
        ({"space": {LR: {"low": 0.0, "hihg": 1.0}}}, "to be a list of choices, or"),
        ({"sampler": "grid", "space": {LR: {"low": 0.0, "high": 1.0}}}, f"choices or a `step` for `{LR}`"),
        ({"space": {"data.batch_sise": [8]}}, "but got `data.batch_sise`. Did you mean data.batch_size?"),
        ({"space": {"data.batch_size": ["many"]}}, "Expected `fit` to accept many for data.batch_size, but"),
        (
            {"space": {"trainer.callbacks.Repaly.max_size": [5]}},
            "the list contains FLwF2T, Replay. Did you mean Replay?",
        ),
        ({"space": {"trainer.callbacks.Replay.memory_sise": [5]}}, "but got `memory_sise`. Did you mean memory_size?"),
        ({"objective": "accuracy", "direction": "maximize"}, "`objective` to be one of general_accuracy/server"),
    ],
)
def test_tune_invalid_search_file_prints_one_message(search, tmp_path, error_of, changes, message):
    error = error_of(search(**changes))
    assert message in error
    assert "Traceback" not in error
    assert not list(tmp_path.glob("out/trials.csv"))


@pytest.mark.seconds
def test_tune_after_wrong_objective_runs(search, tmp_path, pretend):
    pretend()
    with pytest.raises(SystemExit):
        main(search(objective="accuracy", direction="maximize"))
    main(search())
    assert len(rows(tmp_path / "out")) == 4


@pytest.mark.parametrize(
    ("objective", "direction", "expected"),
    [
        ("final_accuracy/server", None, "maximize"),
        ("F_3/clients", None, "minimize"),
        ("upload_bytes/total", None, "minimize"),
        ("upload_bytes/total", "maximize", "maximize"),
        ("final_MSE/server", "minimize", "minimize"),
    ],
)
def test_search_direction_defaults_to_direction_of_metric(tmp_path, search, objective, direction, expected):
    search(objective=objective, direction=direction)
    assert module.Search.read(tmp_path / "search.yaml").direction == expected


def test_tune_invalid_words_print_message(search, tmp_path, error_of):
    assert "at least 1 but got 0" in error_of([*search(), "--trials", "0"])
    assert "`workers` to be at least 1 but got 0" in error_of(search(workers="0"))
    (tmp_path / "search.yaml").write_text("a: [")
    assert "to be YAML" in error_of(["tune", str(tmp_path / "search.yaml")])
    (tmp_path / "search.yaml").write_text("- a")
    assert "search.yaml to contain a mapping" in error_of(["tune", str(tmp_path / "search.yaml")])


def test_search_file_reads_numbers_like_recipes(tmp_path, search):
    search()
    text = "configs: tiny.yaml\nobjective: late_uploads/total\ntrials: 1\n"
    text += "space: {a: {low: 1e-3, high: 1E2, log: true}, b: [1e-3, 1e-2]}"
    (tmp_path / "search.yaml").write_text(text)
    space = module.Search.read(tmp_path / "search.yaml").space
    assert space == {"a": {"low": 0.001, "high": 100.0, "log": True}, "b": [0.001, 0.01]}


@pytest.mark.seconds
def test_tune_uses_metrics_callback_of_recipe(search, tmp_path, recipe):
    metrics = {"class_path": "lightning_fcl.callbacks.ContinualMetrics", "init_args": {"clients": "none"}}
    (tmp_path / "tiny.yaml").write_text(
        yaml.safe_dump({**recipe, "trainer": {**recipe["trainer"], "callbacks+": [metrics]}})
    )
    main(search(trials=1))
    results = json.loads((tmp_path / "out" / "trial-0000" / "seed-0" / "results.json").read_text())
    assert results["measured_on"] == "validation"
    assert list(results["record"]["rounds"][0]["correct"]) == ["server"]
