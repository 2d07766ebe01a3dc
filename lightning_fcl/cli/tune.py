"""`lightning-fcl tune`: a search for the settings of a recipe, by Optuna, over processes; cut off, it continues.

Each trial is a small recipe, ``trial.yaml``, behind the search's others, and a run of `fit` for each seed. Its settings
follow from its number and the trials before it: what is there already is what its runs have left in their folders.
"""

from __future__ import annotations

import itertools
import logging
import math
import shlex
import shutil
import statistics
import textwrap
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
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

from lightning_fcl.cli.jobs import FAILURE, Job, at_least_one, finished, run_job, saying_how_to_go_on, side_by_side
from lightning_fcl.cli.main import Command
from lightning_fcl.cli.search import Search, trial_recipe, try_settings
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.evaluation import charts
from lightning_fcl.evaluation.results import read_results
from lightning_fcl.io.atomic import write_whole
from lightning_fcl.io.reading import read_text
from lightning_fcl.running.recipe import Recipe
from lightning_fcl.running.rows import slug

_BATCH = 8  # trials that TPE proposes at once: fixed, so that the search does not depend on the number of processes
STATES = {TrialState.COMPLETE: "complete", TrialState.FAIL: "failed"}
_PATIENCE = 10  # after so many failures for one and the same reason, and no success, the search is at fault


class Tune(Command):
    """Search for the settings of a recipe.

    A search file:
      configs: [base.yaml, more.yaml]      # recipes, relative to this file, later ones over earlier ones
      objective: final_accuracy/server     # one of the metrics in results.json
      direction: maximize                  # or minimize
      measure_on: validation               # samples of the objective; data.split.validation must be above 0
      sampler: random                      # or grid, or tpe
      trials: 100                          # for grid: all of it by default
      seeds: 1                             # seeds per trial; their mean counts
      first_seed: 0                        # the first of them
      scale: small                         # with --row: the scale of that row
      space:                               # what `fit` would take as --PATH VALUE
        data.batch_size: [16, 32]
        model.init_args.optimizer.init_args.lr: {low: 1e-4, high: 1e-1, log: true}   # or step: 0.01
        trainer.callbacks.FLwF2T.alpha: {low: 0.0, high: 1.0}    # an argument of the recipe's callback of that class
      cases:                               # searches of their own, one with each --case: settings that stay as they are
        25 %: {data.split.train_clients: [a, b]}
    A search that was cut off continues. Results: best.yaml, trials.csv, trials.png, and a folder per trial and seed.
    """

    def arguments(self, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("file", type=Path, metavar="SEARCH.yaml", help="what to search for, and where")
        add("--case", help="which of the search file's cases, if it has some")
        add("--row", help="search for a row of the rows.yaml beside the file: its recipe comes before the configs")
        add("--out", type=Path, help="folder of the results (default: runs/tune-SEARCH, with case and row behind)")
        add("--trials", type=int, metavar="N", help="number of trials (default: that of the search file)")
        add("--among", type=Path, metavar="TRIALS.csv", help="try the best settings of another search, not new ones")
        add("--workers", type=int, metavar="N", help="processes (default: one per core)")
        add("--seed", type=int, default=0, help="seed of the settings drawn (default: 0)")
        add("--restart", action="store_true", help="delete the trials that are there and begin anew")

    def run(self, options: Namespace) -> None:
        at_least_one(trials=options.trials, workers=options.workers)
        search = Search.read(options.file, options.trials, options.case, options.row)
        search = search if options.among is None else search.with_trials_of(options.among)
        grid = list(itertools.islice(search.grid(), search.trials)) if search.sampler == "grid" else []
        names = [slug(name) for name in (search.case, options.row) if name is not None]
        out = options.out or Path("runs") / "-".join(["tune", options.file.stem, *names])
        callbacks = try_settings(search)
        out.mkdir(parents=True, exist_ok=True)
        for folder in out.glob("trial-[0-9]*") if options.restart else ():
            shutil.rmtree(folder)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study, failures = optuna.create_study(direction=search.direction), dict[int, str]()
        number = len(grid) or search.trials or 0
        size = _BATCH if search.sampler == "tpe" else number

        def so_far() -> str:
            return (
                f"{len(_trials(study, *STATES))} of {number} trials are done; the same command goes on with the others."
            )

        with saying_how_to_go_on(so_far), tqdm(total=number, unit="trial") as bar:
            for start in range(0, number, size):
                jobs: dict[int, list[Job]] = {}
                for index in range(start, min(start + size, number)):
                    trial = propose(study, search, options.seed, index, grid)
                    jobs[index] = trial_jobs(search, index, trial_recipe(search.settings(trial.params), callbacks), out)
                for index, problem in outcomes(jobs, options.workers):
                    settle(study, search, index, jobs[index], problem, failures)
                    best = study.best_trial if _trials(study, TrialState.COMPLETE) else None
                    bar.set_postfix_str(
                        f"best {best.value:.4f} (trial {best.number})" if best else "none succeeded yet"
                    )
                    bar.update()
        chosen = {"--row": options.row, "--case": search.case, "--among": options.among}
        named = [str(word) for option, value in chosen.items() if value is not None for word in (option, value)]
        write_trials(study, search, failures, shlex.join([str(options.file), *named]), out)


def propose(
    study: optuna.Study, search: Search, seed: int, number: int, grid: Sequence[Mapping[str, Any]]
) -> optuna.Trial:
    """The trial of a number, which depends on no more than its seed and number; TPE also looks at those before it."""
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
    """The runs of a trial, where its folder has none of another search's."""
    folder = out / f"trial-{number:04}"
    folder.mkdir(exist_ok=True)
    file, content = folder / "trial.yaml", yaml.safe_dump(dict(recipe), sort_keys=False)
    before = read_text(file) if file.exists() else content
    write_whole(file, content)
    more = {"recipe.measure_on": search.measure_on, "trainer.enable_progress_bar": False}
    whole = Recipe((*search.recipe.files, file, *search.recipe.settings)).with_values(more)
    jobs = [
        Job(f"trial {number}, seed {seed}", whole, seed, folder / f"seed-{seed}")
        for seed in range(search.first_seed, search.first_seed + search.seeds)
    ]
    if any(job.is_displaced for job in jobs):
        write_whole(file, before)
        raise InvalidValueError(
            f"Expected the search of which {out} has trials but the search file, a recipe of it, the seed or the "
            "version is another.",
            hint="Take back the change, choose another --out, or begin anew with --restart, which deletes them.",
        )
    return jobs


def outcomes(jobs: Mapping[int, Sequence[Job]], workers: int | None) -> Iterator[tuple[int, str]]:
    """The trials whose runs have all come to an end, as they do, with what the first that has failed failed of."""
    numbers, problems = {job: number for number, runs in jobs.items() for job in runs}, dict[Job, str]()
    known = {job: problem for job in numbers if (problem := problem_of(job)) is not None}
    with closing(side_by_side(attempt, [job for job in numbers if job not in known], workers)) as done:
        for job, problem in itertools.chain(known.items(), done):
            problems[job] = problem
            runs = jobs[numbers[job]]
            if all(run in problems for run in runs):
                yield numbers[job], next((problems[run] for run in runs if problems[run]), "")


def problem_of(job: Job) -> str | None:
    """What a run has failed of, nothing if it is finished; None: it is still to come to its end."""
    if finished(job):
        return ""
    failure = job.out / FAILURE
    return read_text(failure) if job.wrote(job.out) and failure.is_file() else None


def attempt(job: Job) -> str:
    """Run a job, and say what it failed of, if it did, also in its folder.

    What the operating system refuses, a full disk or a missing file, is not the trial's fault and stops the search.
    """
    import torch

    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)  # the bar is not to be torn by lines about seeds
    torch.set_num_threads(1)  # as in the other processes: the number of threads changes the last digits
    try:
        run_job(job)
    except OSError:
        raise
    except Exception as error:
        problem = textwrap.shorten(f"{type(error).__name__}: {error}", 400, placeholder=" ...")
        write_whole(job.out / FAILURE, problem)
        return problem
    return ""


def settle(
    study: optuna.Study, search: Search, number: int, jobs: Sequence[Job], problem: str, failures: dict[int, str]
) -> None:
    """Enter a trial's objective, or among the ``failures`` why it failed."""
    value = math.nan
    if not problem:
        results = [read_results(job.out)["metrics"] for job in jobs]
        if search.objective not in results[0] and not _trials(study, TrialState.COMPLETE):
            known = ", ".join(results[0])
            raise InvalidValueError(
                f"Expected `objective` to be one of {known} but got {search.objective}.",
                argument="objective",
                value=search.objective,
            )
        values = [result.get(search.objective) for result in results]
        value = statistics.fmean(math.nan if one is None else one for one in values)
        problem = "" if math.isfinite(value) else f"{search.objective} is {value}"
    if not problem:
        study.tell(number, value)
        return
    failures[number] = problem
    study.tell(number, state=TrialState.FAIL)
    if len(failures) >= _PATIENCE and len({*failures.values()}) == 1 and not _trials(study, TrialState.COMPLETE):
        raise InvalidValueError(
            f"The first {len(failures)} trials all failed: {problem.rstrip('.')}.",
            hint="Correct the cause, then use --restart.",
        )


def write_trials(study: optuna.Study, search: Search, failures: Mapping[int, str], named: str, out: Path) -> None:
    """Write ``trials.csv``, ``trials.png`` and ``best.yaml``, and print the ten best trials."""
    trials = [
        {"trial": trial.number, "state": STATES[trial.state], search.objective: trial.value, **trial.params}
        for trial in _trials(study, *STATES)
    ]
    frame = pd.DataFrame(trials, columns=["trial", "state", search.objective, *search.space])
    frame["failure"] = [failures.get(number, "") for number in frame["trial"]]
    table = write_whole(out / "trials.csv", frame.to_csv(index=False))
    done = frame[frame["state"] == STATES[TrialState.COMPLETE]]
    if done.empty:
        reason = next(iter(failures.values()))
        raise InvalidValueError(
            f"All {len(failures)} trials failed, the first so: {reason.rstrip('.')}.",
            hint="Correct the cause, then use --restart.",
        )
    plot = charts.write_png(out / "trials.png", trials_figure(study, search))
    recipe = write_best(study.best_trial, len(frame), search, named, out)
    shown = done.sort_values(search.objective, ascending=search.direction == "minimize", kind="stable")[:10]
    columns = {search.objective: search.objective, "trial": "trial"} | _short(list(search.space))
    exactly = {search.objective: "{:.4f}".format}
    print(
        shown[[*columns]].to_string(
            index=False, header=[*columns.values()], float_format="{:.4g}".format, formatters=exactly
        )
    )
    print(f"\n{len(done)} trials, and {len(failures)} that failed. Best: {recipe}; all: {table} and {plot}")


def trials_figure(study: optuna.Study, search: Search) -> dict[str, Any]:
    """The objective of a search's trials against each setting, a panel per setting, later trials darker."""
    order = alt.Color("trial:Q", scale=alt.Scale(range=["#b9d4e8", "#08306b"]), legend=None)
    base = charts.chart_of("rows").mark_point(filled=True, size=60, opacity=0.9)
    base = base.encode(y=alt.Y("value:Q", title=search.objective, scale=alt.Scale(zero=False, padding=8)), color=order)
    panels = []
    for path, name in _short(list(search.space)).items():
        what, field = search.distributions[path], path.replace(".", " ")  # a dot would lead into it
        if isinstance(what, FloatDistribution | IntDistribution):
            scale = alt.Scale(type="log" if what.log else "linear", zero=False, padding=8)
            x = alt.X(f"{field}:Q", title=name, scale=scale)
        else:
            x = alt.X(f"{field}:N", title=name)
        panels.append(base.encode(x=x).properties(width=220, height=220))
    rows = []
    for trial in _trials(study, TrialState.COMPLETE):
        settings = {path.replace(".", " "): value for path, value in trial.params.items()}
        rows.append({"trial": trial.number, "value": trial.value, **settings})
    return charts.spec(alt.concat(*panels, columns=4), rows=rows)


def write_best(trial: FrozenTrial, number: int, search: Search, named: str, out: Path) -> Path:
    """Write the best trial's recipe, and above it how to use it and how to see its objective again."""
    path = out / "best.yaml"
    configs = shlex.join(Recipe((*search.recipe.files, path, *search.recipe.settings)).words)
    first, last = search.first_seed, search.first_seed + search.seeds - 1
    seeds = f"seed {first}" if search.seeds == 1 else f"mean of the seeds {first} to {last}"
    again = f" --recipe.measure_on {search.measure_on} --seed_everything {first}"
    head = (
        f"# The best of {number} trials of {named}, trial {trial.number}.\n# lightning-fcl fit {configs}\n"
        f"# {search.objective} on the {search.measure_on} samples: {trial.value:.6g} ({seeds}), to see again with\n"
        f"# lightning-fcl fit {configs}{again}\n"
    )
    return write_whole(path, head + read_text(out / f"trial-{trial.number:04}" / "trial.yaml"))


def _trials(study: optuna.Study, *states: TrialState) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=states)


def _short(paths: Sequence[str]) -> dict[str, str]:
    """For each path its last word, or all of it if two have the same."""
    last = [path.rpartition(".")[2] for path in paths]
    return {path: word if last.count(word) == 1 else path for word, path in zip(last, paths, strict=True)}
