"""`lightning-fcl tune`: a hyperparameter search for a recipe with Optuna, in parallel processes. It can be resumed.

Each trial has a small recipe, ``trial.yaml``, which overrides the recipes of the search. `fit` runs once for each seed.
The settings of a trial depend only on the seed, the number of the trial, and the trials before it. A resumed search
reads the results of finished runs from their folders.
"""

from __future__ import annotations

import itertools
import math
import shlex
import shutil
import statistics
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import optuna
import pandas as pd
import yaml
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState
from tqdm import tqdm

from lightning_fcl.cli.jobs import (
    Failure,
    Job,
    check_at_least_one,
    is_finished,
    print_resume_hint_on_stop,
    run_parallel,
    try_job,
)
from lightning_fcl.cli.main import Command
from lightning_fcl.cli.search import Search, trial_recipe, validate_space
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.evaluation import charts
from lightning_fcl.evaluation.results import read_results
from lightning_fcl.io.atomic import write_atomic
from lightning_fcl.io.reading import read_text
from lightning_fcl.runs.paper_rows import slug
from lightning_fcl.runs.recipe import Recipe, short_names

_BATCH = 8  # Number of trials that TPE proposes at once. It is fixed, so that `--workers` does not change the search.
STATES = {TrialState.COMPLETE: "complete", TrialState.FAIL: "failed"}
# The search stops after this number of failures with the same class and code, if no trial has succeeded.
_PATIENCE = 10


class Tune(Command):
    """Search for the hyperparameters of a recipe.

    A search file:
      configs: [base.yaml, more.yaml]      # recipes, relative to this file; later recipes override earlier ones
      objective: final_accuracy/server     # a metric in results.json
      direction: maximize                  # or minimize (default: the direction of the metric)
      eval_split: validation               # samples for the objective; data.split.validation must be above 0
      sampler: random                      # or grid, or tpe
      trials: 100                          # default for grid: all points
      seeds: 1                             # seeds per trial; the objective is the mean over the seeds
      first_seed: 0                        # first seed of each trial
      scale: small                         # with --row: scale of the row
      space:                               # paths of settings, as in `fit --PATH VALUE`
        data.batch_size: [16, 32]
        model.init_args.optimizer.init_args.lr: {low: 1e-4, high: 1e-1, log: true}   # or step: 0.01
        trainer.callbacks.FLwF2T.alpha: {low: 0.0, high: 1.0}    # an argument of the callback FLwF2T of the recipe
      variants:                            # fixed settings of separate searches, selected with --case
        25 %: {data.split.train_clients: [a, b]}
    The same command resumes an interrupted search. The command writes best.yaml, trials.csv, trials.png, and a folder
    per trial and seed.
    """

    def arguments(self, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("file", type=Path, metavar="SEARCH.yaml", help="read this search file")
        add("--case", help="select a case of the search file")
        add("--row", help="search a row of the rows.yaml in the same folder")
        add("--out", type=Path, help="set the output folder (default: runs/tune-SEARCH-CASE-ROW)")
        add("--trials", type=int, metavar="N", help="set the number of trials (default: from the file)")
        add("--seeds", type=int, metavar="N", help="set the number of seeds per trial (default: from the file)")
        add(
            "--trials-from",
            type=Path,
            metavar="TRIALS.csv",
            help="try the trials of another search, the best first",
        )
        add("--workers", type=int, metavar="N", help="set the number of processes (default: CPU cores)")
        add("--seed", type=int, default=0, help="set the seed of the sampler (default: 0)")
        add("--restart", action="store_true", help="delete existing trials, and start again")

    def run(self, options: Namespace) -> None:
        check_at_least_one(trials=options.trials, seeds=options.seeds, workers=options.workers)
        search = Search.read(options.file, options.trials, options.case, options.row)
        search = search if options.seeds is None else replace(search, seeds=options.seeds)
        search = search if options.trials_from is None else search.load_trials(options.trials_from)
        grid = list(itertools.islice(search.grid(), search.trials)) if search.sampler == "grid" else []
        names = [slug(name) for name in (search.case, options.row) if name is not None]
        out = options.out or Path("runs") / "-".join(["tune", options.file.stem, *names])
        callbacks = validate_space(search)
        out.mkdir(parents=True, exist_ok=True)
        for folder in out.glob("trial-[0-9]*") if options.restart else ():
            shutil.rmtree(folder)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study, failures = optuna.create_study(direction=search.direction), dict[int, Failure]()
        number = len(grid) or search.trials or 0
        size = _BATCH if search.sampler == "tpe" else number

        def so_far() -> str:
            return f"Finished: {len(_trials(study, *STATES))} of {number} trials. Run the same command again to resume."

        with print_resume_hint_on_stop(so_far), tqdm(total=number, unit="trial") as bar:
            for start in range(0, number, size):
                jobs: dict[int, list[Job]] = {}
                for index in range(start, min(start + size, number)):
                    trial = propose(study, search, options.seed, index, grid)
                    jobs[index] = trial_jobs(
                        search, index, trial_recipe(search.to_settings(trial.params), callbacks), out
                    )
                for index, failure in iter_finished_trials(jobs, options.workers):
                    record_trial(study, search, index, jobs[index], failure, failures)
                    best = study.best_trial if _trials(study, TrialState.COMPLETE) else None
                    bar.set_postfix_str(
                        f"best {best.value:.4f} (trial {best.number})" if best else "no trial has succeeded yet"
                    )
                    bar.update()
        search_options = {"--row": options.row, "--case": search.case, "--seeds": options.seeds}
        search_options |= {"--trials-from": options.trials_from}
        command_words = [
            str(word) for option, value in search_options.items() if value is not None for word in (option, value)
        ]
        write_trials(study, search, failures, shlex.join([str(options.file), *command_words]), out)


def propose(
    study: optuna.Study, search: Search, seed: int, number: int, grid: Sequence[Mapping[str, Any]]
) -> optuna.Trial:
    """Add a trial with the number ``number`` to a study, and return the trial.

    With random search, the settings of the trial depend only on the seed and the number. With TPE, they also depend on
    the earlier trials. With a grid, the settings are the point of the grid with this number.
    """
    draw = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    study.sampler = optuna.samplers.RandomSampler(draw)
    if search.sampler == "tpe":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.sampler = optuna.samplers.TPESampler(seed=draw, constant_liar=True)
    if grid:
        study.enqueue_trial(dict(grid[number]))
    return study.ask(search.distributions)


def trial_jobs(search: Search, number: int, recipe: Mapping[str, Any], out: Path) -> list[Job]:
    """Write the recipe of a trial to the trial's folder, and return the runs of the trial, one for each seed.

    Raises:
        InvalidValueError: If the folder contains a run of another search.
    """
    folder = out / f"trial-{number:04}"
    folder.mkdir(exist_ok=True)
    file, content = folder / "trial.yaml", yaml.safe_dump(dict(recipe), sort_keys=False)
    previous_content = read_text(file) if file.exists() else content
    write_atomic(file, content)
    overrides = {"recipe.eval_split": search.eval_split, "trainer.enable_progress_bar": False}
    whole = Recipe((*search.recipe.files, file, *search.recipe.settings)).with_values(overrides)
    jobs = [
        Job(f"trial {number}, seed {seed}", whole, seed, folder / f"seed-{seed}")
        for seed in range(search.first_seed, search.first_seed + search.seeds)
    ]
    if any(job.is_foreign_folder for job in jobs):
        write_atomic(file, previous_content)
        raise InvalidValueError(
            f"Expected the trials in {out} to belong to this search, but the search file, a recipe, the seed or the "
            "version has changed.",
            hint="Undo the change, use another folder with `--out`, or delete these trials with `--restart`.",
        )
    return jobs


def iter_finished_trials(
    jobs: Mapping[int, Sequence[Job]], workers: int | None
) -> Iterator[tuple[int, Failure | None]]:
    """Yield the number of each trial when all runs of the trial have ended, and the failure of a failed run or None."""
    numbers, failures = {job: number for number, runs in jobs.items() for job in runs}, dict[Job, Failure | None]()
    recorded_failures: dict[Job, Failure | None] = {job: None for job in numbers if is_finished(job)}
    recorded_failures |= {
        job: failure for job in numbers if job not in recorded_failures and (failure := Failure.read(job))
    }
    with closing(
        run_parallel(try_job, [job for job in numbers if job not in recorded_failures], workers)
    ) as finished_runs:
        for job, failure in itertools.chain(recorded_failures.items(), finished_runs):
            failures[job] = failure
            runs = jobs[numbers[job]]
            if all(run in failures for run in runs):
                yield numbers[job], next((failures[run] for run in runs if failures[run]), None)


def record_trial(
    study: optuna.Study,
    search: Search,
    number: int,
    jobs: Sequence[Job],
    failure: Failure | None,
    failures: dict[int, Failure],
) -> None:
    """Add the objective of a trial to the study. If the trial failed, add the failure to ``failures``.

    Raises:
        InvalidValueError: If no trial has succeeded, and the first trials all failed with errors of the same class and
            code. Also if no trial has succeeded yet, and the results of this trial do not contain the objective.
    """
    value = math.nan
    if failure is None:
        results = [read_results(job.out)["metrics"] for job in jobs]
        if search.objective not in results[0] and not _trials(study, TrialState.COMPLETE):
            metric_names = ", ".join(results[0])
            raise InvalidValueError(
                f"Expected `objective` to be one of {metric_names}, but got {search.objective}.",
                argument="objective",
                value=search.objective,
            )
        values = [result.get(search.objective) for result in results]
        value = statistics.fmean(math.nan if one is None else one for one in values)
        if math.isfinite(value):
            study.tell(number, value)
            return
        failure = Failure(f"{search.objective} is {value}", code="non-finite-objective")
    failures[number] = failure
    study.tell(number, state=TrialState.FAIL)
    is_same_failure = all(failure.is_like(other) for other in failures.values())
    if len(failures) >= _PATIENCE and is_same_failure and not _trials(study, TrialState.COMPLETE):
        raise InvalidValueError(
            f"Expected a trial to succeed, but the first {len(failures)} finished trials all failed: "
            f"{failure.message.rstrip('.')}.",
            hint="Correct the cause, then run the command with `--restart`.",
        )


def write_trials(
    study: optuna.Study, search: Search, failures: Mapping[int, Failure], best_name: str, out: Path
) -> None:
    """Write ``trials.csv``, ``trials.png`` and ``best.yaml``, and print the ten best trials.

    Raises:
        InvalidValueError: If all trials failed.
    """
    trials = [
        {"trial": trial.number, "state": STATES[trial.state], search.objective: trial.value, **trial.params}
        for trial in _trials(study, *STATES)
    ]
    frame = pd.DataFrame(trials, columns=["trial", "state", search.objective, *search.space])
    frame["failure"] = [failures[one].message if one in failures else "" for one in frame["trial"]]
    table = write_atomic(out / "trials.csv", frame.to_csv(index=False))
    completed_trials = frame[frame["state"] == STATES[TrialState.COMPLETE]]
    if completed_trials.empty:
        reason = next(iter(failures.values())).message
        raise InvalidValueError(
            f"Expected a trial to succeed, but all trials failed ({len(failures)} of {len(failures)}). "
            f"First failure: {reason.rstrip('.')}.",
            hint="Correct the cause, then run the command with `--restart`.",
        )
    plot = charts.write_png(out / "trials.png", trials_figure(study, search))
    recipe = write_best(study.best_trial, len(frame), search, best_name, out)
    best_trials = completed_trials.sort_values(
        search.objective, ascending=search.direction == "minimize", kind="stable"
    )[:10]
    columns = {search.objective: search.objective, "trial": "trial"} | short_names(list(search.space))
    exactly = {search.objective: "{:.4f}".format}
    print(
        best_trials[[*columns]].to_string(
            index=False, header=[*columns.values()], float_format="{:.4g}".format, formatters=exactly
        )
    )
    print(
        f"\nTrials: {len(completed_trials)} completed, {len(failures)} failed\nBest: {recipe}\nAll: {table} and {plot}"
    )


def trials_figure(study: optuna.Study, search: Search) -> dict[str, Any]:
    """Return a chart of the objective against each setting, with one panel per setting. Later trials are darker."""
    order = alt.Color("trial:Q", scale=alt.Scale(range=["#b9d4e8", "#08306b"]), legend=None)
    base = charts.get_chart("rows").mark_point(filled=True, size=60, opacity=0.9)
    base = base.encode(y=alt.Y("value:Q", title=search.objective, scale=alt.Scale(zero=False, padding=8)), color=order)
    panels = []
    for path, name in short_names(list(search.space)).items():
        # A dot in a field name would select a nested field.
        distribution, field = search.distributions[path], path.replace(".", " ")
        if isinstance(distribution, FloatDistribution | IntDistribution):
            scale = alt.Scale(type="log" if distribution.log else "linear", zero=False, padding=8)
            x = alt.X(f"{field}:Q", title=name, scale=scale)
        else:
            x = alt.X(f"{field}:N", title=name)
        panels.append(base.encode(x=x).properties(width=220, height=220))
    rows = []
    for trial in _trials(study, TrialState.COMPLETE):
        settings = {path.replace(".", " "): value for path, value in trial.params.items()}
        rows.append({"trial": trial.number, "value": trial.value, **settings})
    return charts.spec(alt.concat(*panels, columns=4), rows=rows)


def write_best(trial: FrozenTrial, number: int, search: Search, best_name: str, out: Path) -> Path:
    """Write the recipe of the best trial, and return its path.

    Comments in the file contain the commands that train the recipe and measure its objective again.
    """
    path = out / "best.yaml"
    configs = shlex.join(Recipe((*search.recipe.files, path, *search.recipe.settings)).words)
    first, last = search.first_seed, search.first_seed + search.seeds - 1
    seeds = f"seed {first}" if search.seeds == 1 else f"mean of the seeds {first} to {last}"
    rerun_options = f" --recipe.eval_split {search.eval_split} --seed_everything {first}"
    head = (
        f"# The best of {number} trials of {best_name}, trial {trial.number}.\n# lightning-fcl fit {configs}\n"
        f"# {search.objective} on the {search.eval_split} samples: {trial.value:.6g} ({seeds}).\n"
        f"# The run with seed {first}:\n"
        f"# lightning-fcl fit {configs}{rerun_options}\n"
    )
    return write_atomic(path, head + read_text(out / f"trial-{trial.number:04}" / "trial.yaml"))


def _trials(study: optuna.Study, *states: TrialState) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=states)
