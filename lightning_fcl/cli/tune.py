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
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import optuna
import yaml
from optuna.trial import FrozenTrial, TrialState
from tqdm import tqdm

from lightning_fcl.cli.jobs import Failure, Job, check_at_least_one, print_resume_hint_on_stop
from lightning_fcl.cli.main import Command
from lightning_fcl.cli.pruning import PrunerName
from lightning_fcl.cli.search import Search, trial_recipe, validate_space
from lightning_fcl.cli.study import SearchStudy, failure_of
from lightning_fcl.cli.trials import TrialOutcome, TrialTask, make_tasks, mean_objective, run_trials
from lightning_fcl.cli.tune_output import write_trials
from lightning_fcl.errors import InvalidValueError, MissingValueError
from lightning_fcl.evaluation.results import read_results
from lightning_fcl.io.atomic import write_atomic
from lightning_fcl.io.reading import read_text
from lightning_fcl.runs.paper_rows import slug
from lightning_fcl.runs.recipe import Recipe

# Number of trials that TPE proposes at once, and that a pruner judges by the earlier trials. It is fixed, so that
# `--workers` does not change the search.
_BATCH = 8
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
      pruner: median                       # or percentile, successive_halving, hyperband, none (default)
      pruner_args: {n_warmup_steps: 3}     # arguments of the pruner of Optuna
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
        add("--pruner", choices=get_args(PrunerName), help="stop bad trials early (default: from the file, or none)")
        add("--storage", metavar="URL", help="share the trials in this Optuna storage")
        add("--study-name", metavar="NAME", help="set the name in the storage (default: tune-SEARCH-CASE-ROW)")
        add("--workers", type=int, metavar="N", help="set the number of processes (default: CPU cores)")
        add("--seed", type=int, default=0, help="set the seed of the sampler (default: 0)")
        add("--restart", action="store_true", help="delete existing trials, and start again")

    def run(self, options: Namespace) -> None:
        check_at_least_one(trials=options.trials, seeds=options.seeds, workers=options.workers)
        search = read_search(options)
        if options.study_name is not None and options.storage is None:
            raise MissingValueError(
                f"Expected `--storage` with `--study-name {options.study_name}`, but got none.",
                hint="Pass the storage of the study, as in `--storage sqlite:///study.db`.",
                argument="--storage",
            )
        grid = list(itertools.islice(search.grid(), search.trials)) if search.sampler == "grid" else []
        names = [slug(name) for name in (search.case, options.row) if name is not None]
        name = options.study_name or "-".join(["tune", options.file.stem, *names])
        out = options.out or Path("runs") / name
        callbacks = validate_space(search)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        number = len(grid) or search.trials or 0
        study = SearchStudy(search, number, options.seed, grid, name, options.storage)
        if options.restart:
            study.delete()
        study.check_search()
        out.mkdir(parents=True, exist_ok=True)
        for folder in out.glob("trial-[0-9]*") if options.restart else ():
            shutil.rmtree(folder)

        def so_far() -> str:
            num_ended = len(study.ended_trials)
            return f"Finished: {num_ended} of {number} trials. Run the same command again to resume."

        with (
            print_resume_hint_on_stop(so_far),
            study.running(),
            tqdm(total=number, initial=len(study.ended_trials), unit="trial") as bar,
        ):
            for trial, jobs, outcome in iter_ended_trials(study, callbacks, out, options.workers):
                record_trial(study, trial, jobs, outcome)
                best = study.best_trial
                bar.set_postfix_str(
                    f"best {best.value:.4f} (trial {best.number})" if best else "no trial has succeeded yet"
                )
                bar.update(len(study.ended_trials) - bar.n)  # Other processes can also end trials.
        search_options = {"--row": options.row, "--case": search.case, "--seeds": options.seeds}
        search_options |= {"--trials-from": options.trials_from}
        command_words = [
            str(word) for option, value in search_options.items() if value is not None for word in (option, value)
        ]
        write_trials(study, callbacks, shlex.join([str(options.file), *command_words]), out)


def read_search(options: Namespace) -> Search:
    """Return the search of a search file, with the values that the options override."""
    search = Search.read(options.file, options.trials, options.case, options.row)
    if options.seeds is not None:
        search = replace(search, seeds=options.seeds)
    if options.pruner not in (None, search.pruner):
        search = replace(search, pruner=options.pruner, pruner_args={})
    return search if options.trials_from is None else search.load_trials(options.trials_from)


def iter_ended_trials(
    study: SearchStudy, callbacks: Sequence[Mapping[str, Any]], out: Path, workers: int | None
) -> Iterator[tuple[optuna.Trial, list[Job], TrialOutcome]]:
    """Run the trials of a study, and yield each trial, its runs and its outcome when the trial has ended.

    Without a storage, the settings and the pruning of a trial depend on earlier batches only, so that the results do
    not depend on ``workers``. With a storage, a trial is claimed when a worker is free.
    """
    started: dict[int, tuple[optuna.Trial, list[Job]]] = {}
    earlier_trials: list[FrozenTrial] = []

    def iter_tasks(trials: Iterable[optuna.Trial]) -> Iterator[TrialTask]:
        for trial in trials:
            recipe = trial_recipe(study.search.to_settings(trial.params), callbacks)
            jobs = trial_jobs(study.search, trial, recipe, out)
            started[trial.number] = trial, jobs
            yield from make_tasks(trial.number, jobs, study.pruning(trial, earlier_trials))

    claimed_trials = iter(study.claim, None)
    if study.storage_text is not None:
        for number, outcome in run_trials(iter_tasks(claimed_trials), workers):
            yield *started[number], outcome
        return
    has_batches = study.search.sampler == "tpe" or study.search.pruner != "none"
    while batch := list(itertools.islice(claimed_trials, _BATCH if has_batches else study.number)):
        for number, outcome in run_trials([*iter_tasks(batch)], workers):
            yield *started[number], outcome
        earlier_trials = study.study.get_trials(deepcopy=False)


def trial_jobs(search: Search, trial: optuna.Trial, recipe: Mapping[str, Any], out: Path) -> list[Job]:
    """Write the recipe of a trial to the trial's folder, and return the runs of the trial, one for each seed.

    Raises:
        InvalidValueError: If the folder contains a run of another search.
    """
    folder = out / trial.user_attrs["folder"]
    folder.mkdir(exist_ok=True)
    file, content = folder / "trial.yaml", yaml.safe_dump(dict(recipe), sort_keys=False)
    previous_content = read_text(file) if file.exists() else content
    write_atomic(file, content)
    overrides = {"recipe.eval_split": search.eval_split, "trainer.enable_progress_bar": False}
    whole = Recipe((*search.recipe.files, file, *search.recipe.settings)).with_values(overrides)
    jobs = [
        Job(f"trial {trial.number}, seed {seed}", whole, seed, folder / f"seed-{seed}")
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


def record_trial(study: SearchStudy, trial: optuna.Trial, jobs: Sequence[Job], outcome: TrialOutcome) -> None:
    """Store the outcome of a trial in the study.

    Raises:
        InvalidValueError: If no trial has succeeded, and the first trials all failed with errors of the same class and
            code. Also if no trial has succeeded yet, and the results of this trial do not contain the objective, or
            contain it for one round only although the search has a pruner.
    """
    failure, objective = outcome.failure, study.search.objective
    if outcome.is_pruned and outcome.reported is not None:
        steps = outcome.reported.intermediate_values
        study.tell(trial, TrialState.PRUNED, steps[max(steps)], outcome.reported)
        return
    if failure is None:
        names = read_results(jobs[0].out)["metrics"]
        if objective not in names and study.best_trial is None:
            raise InvalidValueError(
                f"Expected `objective` to be one of {', '.join(names)}, but got {objective}.",
                argument="objective",
                value=objective,
            )
        value = mean_objective(jobs, objective)
        if math.isfinite(value):
            _check_is_prunable(study, outcome)
            study.tell(trial, TrialState.COMPLETE, value, outcome.reported)
            return
        failure = Failure(f"{objective} is {value}", code="non-finite-objective")
    study.tell_failure(trial, failure)
    failures = [other for one in study.trials(TrialState.FAIL) if (other := failure_of(one))]
    is_same_failure = all(failure.is_like(other) for other in failures)
    if len(failures) >= _PATIENCE and is_same_failure and study.best_trial is None:
        raise InvalidValueError(
            f"Expected a trial to succeed, but the first {len(failures)} finished trials all failed: "
            f"{failure.message.rstrip('.')}.",
            hint="Correct the cause, then run the command with `--restart`.",
        )


def _check_is_prunable(study: SearchStudy, outcome: TrialOutcome) -> None:
    """Raise InvalidValueError if no completed trial has measured the objective in several rounds."""
    if outcome.reported is None or study.best_trial is not None or len(outcome.reported.intermediate_values) > 1:
        return
    number = len(outcome.reported.intermediate_values)
    raise InvalidValueError(
        f"Expected {study.search.objective} to be measured in several rounds for the pruner {study.search.pruner}, but "
        f"a trial has measured it in {number} round{'' if number == 1 else 's'}.",
        hint="Use `--pruner none`, or an objective that is measured in each round, such as final_accuracy/server.",
        argument="pruner",
        value=study.search.pruner,
    )
