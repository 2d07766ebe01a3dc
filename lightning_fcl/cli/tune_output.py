"""Results of a search: ``trials.csv``, ``trials.png``, ``best.yaml``, and the printed table."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd
import yaml
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from lightning_fcl.cli.search import Search, trial_recipe
from lightning_fcl.cli.study import RESULTS, SearchStudy, failure_of
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.evaluation import charts
from lightning_fcl.io.atomic import write_atomic
from lightning_fcl.runs.recipe import Recipe, short_names

# Number of letters of all labels of a panel up to which the labels are horizontal.
_MAX_HORIZONTAL_LETTERS = 28
# Maximum width of a label in pixels.
_LABEL_WIDTH = 140
STATES = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}


def write_trials(study: SearchStudy, callbacks: Sequence[Mapping[str, Any]], best_name: str, out: Path) -> None:
    """Write ``trials.csv``, ``trials.png`` and ``best.yaml``, and print the ten best trials.

    Args:
        study: Study of the search, with the trials of all processes.
        callbacks: The callbacks of the recipe.
        best_name: Description of the search for ``best.yaml``.
        out: Output folder.

    Raises:
        InvalidValueError: If trials have ended, but no trial is complete.
    """
    search, trials = study.search, study.ended_trials
    frame = trials_table(search, trials)
    table = write_atomic(out / "trials.csv", frame.to_csv(index=False))
    counts = {state: sum(trial.state is state for trial in trials) for state in STATES}
    num_running = len(study.trials(TrialState.RUNNING))
    summary = ", ".join(
        f"{number} {name}"
        for name, number in [
            ("completed", counts[TrialState.COMPLETE]),
            *([("pruned", counts[TrialState.PRUNED])] if search.pruner != "none" else []),
            ("failed", counts[TrialState.FAIL]),
            *([("running in other processes", num_running)] if num_running else []),
        ]
    )
    best = study.best_trial
    if best is None:
        failures = [failure for trial in trials if (failure := failure_of(trial))]
        if num_running or not failures:
            print(f"Trials: {summary}\nAll: {table}")
            return
        raise InvalidValueError(
            f"Expected a trial to succeed, but all trials failed ({len(failures)} of {len(trials)}). "
            f"First failure: {failures[0].message.rstrip('.')}.",
            hint="Correct the cause, then run the command with `--restart`.",
        )
    plot = charts.write_png(out / "trials.png", trials_figure(search, trials))
    recipe = write_best(best, len(trials), search, callbacks, best_name, out)
    best_trials = frame[frame["state"] == STATES[TrialState.COMPLETE]].sort_values(
        search.objective, ascending=search.direction == "minimize", kind="stable"
    )[:10]
    columns = {search.objective: search.objective, "trial": "trial"} | short_names(list(search.space))
    exactly = {search.objective: "{:.4f}".format}
    print(
        best_trials[[*columns]].to_string(
            index=False, header=[*columns.values()], float_format="{:.4g}".format, formatters=exactly
        )
    )
    print(f"\nTrials: {summary}\nBest: {recipe}\nAll: {table} and {plot}")


def trials_table(search: Search, trials: Sequence[FrozenTrial]) -> pd.DataFrame:
    """Return a table with one line per ended trial.

    The objective of a pruned trial is its last reported value. If the search has a pruner, the column ``rounds`` is the
    number of rounds after which the trial reported its last value.
    """
    rows = []
    for trial in trials:
        row = {"trial": trial.number, "state": STATES[trial.state], search.objective: trial.value, **trial.params}
        failure = failure_of(trial)
        rows.append(row | {"failure": failure.message if failure else "", "rounds": trial.last_step})
    columns = ["trial", "state", search.objective, *search.space]
    frame = pd.DataFrame(rows, columns=[*columns, *(["rounds"] if search.pruner != "none" else []), "failure"])
    if "rounds" in frame:
        frame["rounds"] = frame["rounds"].astype("Int64")
    return frame


def trials_figure(search: Search, trials: Sequence[FrozenTrial]) -> charts.Spec:
    """Return a chart of the objective against each setting, with one panel per setting. Later trials are darker.

    Settings with one value in all trials have no panel, unless all settings have one value. Pruned trials are crosses
    at their last reported value. Failed trials have no value.
    """
    with_value = [trial for trial in trials if trial.state in RESULTS and trial.value is not None]
    names = short_names(list(search.space))
    varying = [path for path in names if len({repr(trial.params[path]) for trial in with_value}) > 1]
    has_pruned = any(trial.state is TrialState.PRUNED for trial in with_value)
    states = alt.Scale(domain=["complete", "pruned"], range=["circle", "cross"])
    value_format = alt.Axis(format=".4~g")
    base = charts.get_chart("rows").mark_point(filled=True, size=60, opacity=0.9)
    base = base.encode(
        y=alt.Y("value:Q", title=search.objective, scale=alt.Scale(zero=False, padding=8), axis=value_format),
        color=alt.Color("trial:Q", scale=alt.Scale(range=["#b9d4e8", "#08306b"]), legend=None),
        shape=alt.Shape("state:N", scale=states, legend=alt.Legend(title=None) if has_pruned else None),
    )
    rows = [{"trial": trial.number, "value": trial.value, "state": STATES[trial.state]} for trial in with_value]
    panels = []
    for path in varying or names:
        # A dot in a field name would select a nested field.
        distribution, field = search.distributions[path], path.replace(".", " ")
        values: list[Any] = [trial.params[path] for trial in with_value]
        if isinstance(distribution, FloatDistribution | IntDistribution):
            domain = [distribution.low, distribution.high]
            scale = alt.Scale(type="log" if distribution.log else "linear", domain=domain, nice=False, padding=8)
            axis = alt.Axis(format=".4~g", labelOverlap=True, tickCount=4)
            x = alt.X(f"{field}:Q", title=names[path], scale=scale, axis=axis)
        else:
            assert isinstance(distribution, CategoricalDistribution)
            labels = _choice_labels(distribution.choices)
            values = [labels[repr(value)] for value in values]
            tried_labels = [label for label in labels.values() if label in values]
            angle = 0 if sum(map(len, tried_labels)) <= _MAX_HORIZONTAL_LETTERS else -30
            axis = alt.Axis(labelAngle=angle, labelLimit=_LABEL_WIDTH)
            x = alt.X(f"{field}:N", title=names[path], sort=tried_labels, axis=axis)
        rows = [row | {field: value} for row, value in zip(rows, values, strict=True)]
        panels.append(base.encode(x=x).properties(width=220, height=220))
    return charts.spec(alt.concat(*panels, columns=4), rows=rows)


def _choice_labels(choices: Sequence[Any]) -> dict[str, str]:
    """Return a label for each choice, by the `repr` of the choice.

    The label of a class with arguments is the name of the class, if the names of all choices differ.
    """
    texts = [str(choice) for choice in choices]
    short = []
    for text in texts:
        content = json.loads(text) if text.startswith("{") else {}
        short.append(str(content["class_path"]).rpartition(".")[2] if "class_path" in content else text)
    return dict(zip(map(repr, choices), short if len({*short}) == len(short) else texts, strict=True))


def write_best(
    trial: FrozenTrial,
    number: int,
    search: Search,
    callbacks: Sequence[Mapping[str, Any]],
    best_name: str,
    out: Path,
) -> Path:
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
    content = trial_recipe(search.to_settings(trial.params), callbacks)
    return write_atomic(path, head + yaml.safe_dump(content, sort_keys=False))
