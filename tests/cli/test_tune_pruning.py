"""Tests of the pruners of `lightning-fcl tune`."""

import csv
import json
import statistics

import optuna
import pytest
import yaml
from optuna.trial import TrialState

from lightning_fcl.cli import jobs as jobs_module
from lightning_fcl.cli.main import main
from lightning_fcl.cli.pruning import PrunerName, Pruning, TrialReporter, make_pruner, measured_value
from lightning_fcl.cli.search import Search
from lightning_fcl.cli.storage import open_storage
from lightning_fcl.cli.tune_output import trials_figure, trials_table
from lightning_fcl.errors import InvalidValueError, UnknownNameError
from lightning_fcl.evaluation.metrics import summarize
from lightning_fcl.evaluation.record import truncate_record
from lightning_fcl.evaluation.results import mark_complete, write_results
from lightning_fcl.runs.paper_rows import recipes_folder

LR = "model.init_args.optimizer.init_args.lr"
OBJECTIVE = "final_accuracy/server"


def make_record(accuracies, num_experiences=1):
    """Return a record with these accuracies of the server, in percent, with equally many rounds per experience."""
    rounds = [
        {
            "round": number,
            "experience": {"server": number * num_experiences // len(accuracies)},
            "correct": {"server": [value] * num_experiences},
            "upload_bytes": {},
            "download_bytes": {},
        }
        for number, value in enumerate(accuracies)
    ]
    tasks = {"server": [[number] for number in range(num_experiences)]}
    groups = [str(number) for number in range(num_experiences)]
    return {"groups": groups, "totals": [100] * num_experiences, "tasks": tasks, "rounds": rounds}


@pytest.fixture
def search(tmp_path, small_recipe):
    (tmp_path / "quickstart.yaml").write_text((recipes_folder() / "quickstart.yaml").read_text())
    tiny = small_recipe(rounds=4, clients=2, rounds_per_experience=2, split={"validation": 0.3})
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny))

    def write(out="out", workers="1", **changes):
        content = {
            "configs": ["quickstart.yaml", "tiny.yaml"],
            "objective": OBJECTIVE,
            "trials": 24,
            "space": {LR: {"low": 0.0, "high": 1.0}},
            "pruner": "median",
            **changes,
        }
        (tmp_path / "search.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        return ["tune", str(tmp_path / "search.yaml"), "--out", str(tmp_path / out), "--workers", workers]

    return write


@pytest.fixture
def pretend(monkeypatch):
    """Replace the training by a record whose accuracy is the learning rate, growing over 4 rounds. Return the runs."""
    trained = []

    def run_job(job, should_stop=None):
        rate = yaml.safe_load(job.recipe.files[-1].read_text())["model"]["init_args"]["optimizer"]["init_args"]["lr"]
        accuracies, stopped = [], False
        while len(accuracies) < 4 and not stopped:
            accuracies.append(rate * 20 * (len(accuracies) + 1))
            stopped = should_stop is not None and should_stop(make_record(accuracies))
        trained.append((job.label, len(accuracies)))
        record = make_record(accuracies)
        job.out.mkdir(parents=True, exist_ok=True)
        job.write_fingerprint(job.out)
        is_finished = len(accuracies) == 4
        write_results(job.out, {"record": record, "metrics": summarize(record), "finished": is_finished})
        if is_finished:
            mark_complete(job.out, [job.out / "results.json"])

    monkeypatch.setattr(jobs_module, "run_job", run_job)
    return trained


def rows(folder):
    with (folder / "trials.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", [name for name in PrunerName.__args__ if name != "none"])
@pytest.mark.seconds
def test_tune_pruner_decides_like_optuna_on_earlier_batches(search, tmp_path, pretend, name):
    """The pruned trials are those that Optuna prunes if each batch of 8 trials sees only the earlier batches."""
    main(search(pruner=name, trials=32))
    trials = rows(tmp_path / "out")
    earlier = []
    for start in range(0, 32, 8):
        ended = []
        for trial in trials[start : start + 8]:
            study = optuna.create_study(study_name="tune-search", direction="maximize", pruner=make_pruner(name, {}))
            study.add_trials([*earlier, *(optuna.trial.create_trial(state=TrialState.FAIL) for _ in ended)])
            asked, rate, is_pruned = study.ask(), float(trial[LR]), False
            asked.suggest_float(LR, 0.0, 1.0)
            for step in range(1, 5):
                asked.report(rate * 0.2 * step, step)
                is_pruned = asked.should_prune()
                if is_pruned:
                    break
            assert (trial["state"], int(trial["rounds"])) == ("pruned" if is_pruned else "complete", step)
            assert float(trial[OBJECTIVE]) == pytest.approx(rate * 0.2 * step)
            study.tell(asked, None if is_pruned else rate * 0.8, TrialState.PRUNED if is_pruned else None)
            ended.append(study.trials[-1])
        earlier += ended
    states = [trial["state"] for trial in trials]
    assert states.count("complete") > 5 and (name == "hyperband" or "pruned" in states)


@pytest.mark.seconds
def test_tune_pruned_search_resumes_without_training(search, tmp_path, pretend):
    main(search())
    first, trained = rows(tmp_path / "out"), len(pretend)
    assert {row["state"] for row in first} == {"complete", "pruned"} and not list(tmp_path.glob("out/*/*/failure.txt"))
    main(search())
    assert rows(tmp_path / "out") == first and len(pretend) == trained
    main(search("longer", trials=8))
    main(search("longer"))
    assert rows(tmp_path / "longer") == first
    # Without a pruner, the pruned runs continue, and all trials are completed.
    main([*search(), "--pruner", "none"])
    assert {row["state"] for row in rows(tmp_path / "out")} == {"complete"}
    assert "rounds" not in rows(tmp_path / "out")[0]


@pytest.mark.seconds
@pytest.mark.long
def test_tune_pruning_of_real_runs_does_not_depend_on_workers(search, tmp_path, capsys):
    sizes = [[64, units, 10] for units in range(8, 17)]
    changes = {
        "sampler": "grid",
        "objective": "upload_bytes/total",
        "space": {"model.init_args.model.init_args.sizes": sizes},
        "trials": 9,
    }
    main(search("one", **changes))
    main(search("two", workers="2", **changes))
    assert rows(tmp_path / "one") == rows(tmp_path / "two")
    # The last trial has the largest network, and is the only trial after the first batch.
    assert [row["state"] for row in rows(tmp_path / "one")] == ["complete"] * 8 + ["pruned"]
    for row in rows(tmp_path / "one"):
        results = json.loads(
            (tmp_path / "one" / f"trial-{int(row['trial']):04}" / "seed-0" / "results.json").read_text()
        )
        # The value is the metric of the recorded rounds, which were measured anyway.
        assert len(results["record"]["rounds"]) == int(row["rounds"])
        assert results["finished"] == (row["state"] == "complete")
        assert float(row["upload_bytes/total"]) == results["metrics"]["upload_bytes/total"]
    assert (tmp_path / "one" / "trials.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.seconds
def test_tune_prunes_on_the_mean_of_seeds(search, tmp_path, pretend):
    """The seeds of a trial run sequentially. Each further seed continues the steps of the trial."""
    storage = f"sqlite:///{tmp_path}/study.db"
    main([*search(seeds=2, trials=12, pruner_args={"n_startup_trials": 1}), "--storage", storage])
    trials = optuna.load_study(study_name="tune-search", storage=open_storage(storage)).trials
    complete = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    assert complete and all([*trial.intermediate_values] == [*range(1, 9)] for trial in complete)
    for trial in complete:
        values = [*trial.intermediate_values.values()]
        # Both seeds have the same accuracy, so that the mean over the seeds repeats the values of the first seed.
        assert values[:4] == pytest.approx(values[4:]) and trial.value == pytest.approx(values[-1])
    pruned = [trial for trial in trials if trial.state is TrialState.PRUNED]
    assert pruned and all(trial.value == trial.intermediate_values[trial.last_step] for trial in pruned)
    labels = [label for label, _ in pretend]
    assert all(f"trial {trial.number}, seed 1" not in labels for trial in pruned if trial.last_step < 4)


def test_reporter_value_is_mean_over_seeds_at_the_same_round():
    pruning = Pruning(OBJECTIVE, "maximize", "median", {}, 0, (), None, "study", 0)
    reporter = TrialReporter(pruning)
    seeds = [[10, 20, 30], [30, 40, 80], [50, 60, 10]]
    for seed in seeds:
        for number in range(1, 4):
            assert not reporter.should_stop(
                make_record(seed)["rounds"] and make_record(seed) | {"rounds": make_record(seed)["rounds"][:number]}
            )
        reporter.end_seed()
    expected = [
        statistics.fmean(seed[number] / 100 for seed in seeds[: index + 1]) for index in range(3) for number in range(3)
    ]
    assert [*reporter.trial.intermediate_values.values()] == pytest.approx(expected)
    assert [*reporter.trial.intermediate_values] == [*range(1, 10)]


@pytest.mark.parametrize(
    "objective", ["final_accuracy/server", "average_accuracy/server", "forgetting/server", "upload_bytes/total"]
)
def test_measured_value_equals_metric_of_run_that_ends_then(objective):
    record = make_record([10, 30, 20, 40, 60, 50], num_experiences=3)
    for number in range(1, 7):
        part = truncate_record({**record, "rounds": record["rounds"][:number]}, (number + 1) // 2)
        assert measured_value(record, objective, number) == summarize(part).get(objective)


def test_measured_value_without_test_in_the_round_is_none():
    record = make_record([10, 30])
    record["rounds"][1]["correct"] = {}
    assert measured_value(record, OBJECTIVE, 1) == 0.1 and measured_value(record, OBJECTIVE, 2) is None
    at_end = {**record, "client_state_bytes": {"a": 4}}
    assert measured_value(at_end, "client_state_bytes/clients", 1) is None


@pytest.mark.seconds
def test_tune_objective_measured_once_raises(search, tmp_path, monkeypatch, error_of, small_recipe):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(small_recipe(rounds=1, clients=2, split={"validation": 0.3})))
    error = error_of(search(trials=9))
    assert f"Expected {OBJECTIVE} to be measured in several rounds for the pruner median, but" in error
    main([*search(trials=1), "--pruner", "none"])
    assert [row["state"] for row in rows(tmp_path / "out")] == ["complete"]


@pytest.mark.parametrize(
    ("name", "arguments", "error", "message"),
    [
        ("median", {"n_warmup_stps": 1}, UnknownNameError, "Did you mean n_warmup_steps?"),
        ("none", {"x": 1}, UnknownNameError, "among no arguments, but got x. Remove x."),
        ("median", {"n_warmup_steps": -1}, InvalidValueError, "cannot be negative"),
        ("hyperband", {"max_resource": "a"}, InvalidValueError, "use the defaults of Optuna's HyperbandPruner"),
        ("percentile", {"percentile": 200.0}, InvalidValueError, "Percentile must be between 0 and 100"),
    ],
)
def test_make_pruner_invalid_arguments_raise(name, arguments, error, message):
    with pytest.raises(error) as raised:
        make_pruner(name, arguments)
    assert message in str(raised.value)


def test_make_pruner_suggested_argument_works():
    with pytest.raises(UnknownNameError) as raised:
        make_pruner("median", {"n_warmup_stps": 1})
    assert raised.value.hint == "Did you mean n_warmup_steps?"
    make_pruner("median", {"n_warmup_steps": 1})


def figure_search(space):
    return Search(configs=[], objective=OBJECTIVE, space=space, trials=3)


def make_trial(search, number, params, state, value=None):
    trial = optuna.trial.create_trial(state=state, value=value, params=params, distributions=search.distributions)
    trial.number = number
    return trial


def test_trials_figure_has_one_panel_per_varying_setting_with_all_points():
    adam = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}}
    space = {LR: {"low": 0.1, "high": 1.0, "log": True}, "a.sizes": [[1], [2]], "b.fixed": [3], "c.none": [None, "x"]}
    search = figure_search(space | {"d.optimizer": [adam, {**adam, "class_path": "torch.optim.SGD"}]})
    choices = {name: what.choices for name, what in search.distributions.items() if name != LR}
    states = [TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL]
    trials = [
        make_trial(
            search,
            number,
            {LR: 0.1 * (number + 1)} | {name: of[number % len(of)] for name, of in choices.items()},
            state,
            None if state is TrialState.FAIL else 0.1 * number,
        )
        for number, state in enumerate(states)
    ]
    figure = trials_figure(search, trials)
    panels = [panel["encoding"]["x"]["title"] for panel in figure["concat"]]
    assert panels == ["lr", "sizes", "none", "optimizer"]  # The setting with one value has no panel.
    points = figure["datasets"]["rows"]
    assert [(point["trial"], point["state"]) for point in points] == [(0, "complete"), (1, "pruned")]
    assert all(point[panel["encoding"]["x"]["field"]] is not None for point in points for panel in figure["concat"])
    assert [point["d optimizer"] for point in points] == ["Adam", "SGD"]
    assert [point["c none"] for point in points] == ["None", "x"]
    # One trial: no setting varies, so that all settings have a panel.
    assert len(trials_figure(search, trials[:1])["concat"]) == 5
    assert list(trials_table(search, trials)["state"]) == ["complete", "pruned", "failed"]
