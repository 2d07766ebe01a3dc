"""Search files of `lightning-fcl tune`, and conversion of hyperparameters into a recipe.

Hyperparameters are named by their path in the recipe, such as ``model.init_args.optimizer.init_args.lr``. The path of
an argument of a callback contains the name of the class: ``trainer.callbacks.Replay.memory_size`` is the argument
``memory_size`` of the callback ``Replay``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from lightning_fcl.cli.pruning import PrunerName, make_pruner
from lightning_fcl.errors import InvalidValueError, LightningFCLError, MissingValueError
from lightning_fcl.evaluation.metrics import find_metric
from lightning_fcl.io.reading import as_file_error, open_file
from lightning_fcl.io.safe_yaml import parse_dataclass, read_yaml
from lightning_fcl.library_errors import one_line
from lightning_fcl.runs.merging import SECTIONS, merge
from lightning_fcl.runs.paper_rows import paper_rows
from lightning_fcl.runs.recipe import Recipe
from lightning_fcl.validation import at_least, one_of

_PRIVACY = "trainer.strategy.init_args.privacy"
"""Start of the names of the settings of differential privacy."""


@dataclass(frozen=True)
class Search:
    """The settings of a search file, with the selected case and row.

    Args:
        configs: Recipe files, relative to the search file. Later files override earlier files.
        objective: Name of the metric to optimize, as in ``results.json``.
        space: For each path in the recipe, a list of choices, or ``{low, high}``, optionally with ``step`` or ``log``.
        trials: Number of trials. The grid sampler runs the whole grid by default.
        sampler: Sampler of the hyperparameters.
        seeds: Number of seeds per trial. The objective is the mean over the seeds.
        direction: Whether larger (``maximize``) or smaller values are better. By default, the direction of the metric.
        eval_split: Samples on which the objective is measured.
        variants: Fixed settings of each case, by the name of the case. Each case is a separate search.
        first_seed: First seed of each trial.
        scale: Scale of the row in ``rows.yaml``, if a row is searched.
        recipe: The recipe whose hyperparameters are searched: the recipe of the row, and the files of ``configs``.
        case: Name of the selected case of ``variants``.
        points: Points from another search, for the grid sampler. By default, the grid has all points of ``space``.
        pruner: Optuna's pruner, which stops unpromising trials.
        pruner_args: Arguments of the pruner, such as ``n_startup_trials``.
        limits: Smallest and largest valid value of hyperparameters. `further_points` does not leave this range.
    """

    configs: list[str]
    objective: str
    space: dict[str, Any]
    trials: int | None = None
    sampler: Literal["random", "grid", "tpe"] = "random"
    seeds: int = 1
    direction: Literal["maximize", "minimize"] | None = None
    eval_split: Literal["validation", "test"] = "validation"
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    first_seed: int = 0
    scale: str = "paper"
    recipe: Recipe = field(default_factory=Recipe)
    case: str | None = None
    points: tuple[dict[str, Any], ...] = ()
    pruner: PrunerName = "none"
    pruner_args: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        at_least(1, trials=1 if self.trials is None else self.trials, seeds=self.seeds)
        at_least(0, first_seed=self.first_seed)
        if self.trials is None and self.sampler != "grid":
            raise MissingValueError(
                f"Expected `trials`, the number of trials of the {self.sampler} sampler, but got none.",
                hint="Set `trials`, or pass `--trials`.",
                argument="trials",
            )
        if not self.space:
            raise MissingValueError(
                "Expected `space` to contain at least one hyperparameter, but got none.",
                hint="Write a line for each hyperparameter, as in `space: {data.batch_size: [16, 32]}`.",
                argument="space",
            )
        one_of(self.variants or (None,), case=self.case)
        if self.direction is None:
            object.__setattr__(self, "direction", self._metric_direction())
        if twice := sorted({*self.case_overrides} & {*self.space}):
            raise InvalidValueError(
                f"Expected each setting in only one of `space` and `variants`, but got {twice[0]} in both.",
                hint=f"Remove {twice[0]} from one of them.",
            )
        _ = self.distributions  # Raises an error for an invalid line of `space`.
        make_pruner(self.pruner, self.pruner_args)  # Raises an error for an invalid argument.
        self._check_privacy()

    def _check_privacy(self) -> None:
        """Raise InvalidValueError if the recipe has differential privacy."""
        trainer = self.recipe.content().get("trainer") or {}
        strategy = trainer.get("strategy") if isinstance(trainer, dict) else None
        arguments = strategy.get("init_args") if isinstance(strategy, dict) else None
        is_private = isinstance(arguments, dict) and arguments.get("privacy") is not None
        if is_private or any(name.startswith(_PRIVACY) for name in (*self.space, *self.case_overrides)):
            raise InvalidValueError(
                "Expected a search without `privacy`, because the choice among the trials uses the data of clients "
                "without noise, and the budget does not count it.",
                hint="Search with public data and without `privacy`, and use the best settings for the private fit.",
                argument="privacy",
            )

    def _metric_direction(self) -> str:
        metric = find_metric(self.objective)
        if metric is None:
            raise MissingValueError(
                f"Expected `direction` for the objective {self.objective}, which `lightning-fcl ls metrics` does not "
                "list, but got none.",
                hint="Set `direction: maximize`, or `direction: minimize`.",
                argument="direction",
            )
        return metric.direction

    @classmethod
    def read(cls, path: Path, trials: int | None = None, case: str | None = None, row: str | None = None) -> Search:
        """Read a search file.

        Args:
            path: The search file.
            trials: Number of trials, which overrides the number in the file.
            case: Case of ``variants``.
            row: Row of the ``rows.yaml`` in the same folder. The files of ``configs`` override the recipe of the row.
                Settings of the row that are searched or fixed by the case are ignored.

        Raises:
            InvalidValueError: If the file is a recipe, or if the file, `space` or a case is not a mapping.
            MissingValueError: If a recipe of ``configs`` does not exist.
        """
        content = read_yaml(path)
        if not isinstance(content, dict):
            raise InvalidValueError(f"Expected {path} to contain a mapping (`name: value`), but got {content}.")
        if {*SECTIONS} & {*content}:
            raise InvalidValueError(
                f"Expected {path} to be a search file, but got a recipe.",
                hint=f"Write a search file with `configs: [{path.name}]`, `objective` and `space`, as in "
                "`lightning-fcl tune --help`.",
                value=path,
            )
        space, variants = (content.pop(name, {}) for name in ("space", "variants"))
        variants = (
            {str(name): fixed for name, fixed in variants.items()} if isinstance(variants, dict) else {"": variants}
        )
        if wrong := [one for one in (space, *variants.values()) if not isinstance(one, dict)]:
            raise InvalidValueError(
                f"Expected `space` and each entry of `variants` in {path} to be mappings of settings, but got "
                f"{wrong[0]}.",
                argument="space",
            )
        if isinstance(content.get("configs"), str):
            content["configs"] = [content["configs"]]
        content |= {} if trials is None else {"trials": trials}
        none_yet: dict[str, object] = {"recipe": Recipe(), "points": ()}
        search = parse_dataclass(cls, content, path, space=space, variants=variants, case=case, **none_yet)
        recipes = tuple(path.parent / name for name in search.configs)
        if missing := [str(recipe) for recipe in recipes if not recipe.is_file()]:
            raise MissingValueError(
                f"Expected the recipes of `configs` to exist, but could not find {', '.join(missing)}.",
                hint="Write their paths relative to the folder of the search file.",
            )
        if row is None:
            return replace(search, recipe=Recipe(recipes))
        paper_row, set_here = paper_rows(path.parent, [row], search.scale)[row], {*search.space, *search.case_overrides}
        settings = [setting for setting in paper_row.settings if setting.name not in set_here]
        return replace(search, recipe=Recipe((*paper_row.configs, *recipes, *settings)))

    def load_trials(self, file: Path) -> Search:
        """Return this search with the points of another search over the same space, read from a ``trials.csv``.

        The points are tried in the order of their objective, the best first.
        """
        expected = f"to be the trials.csv of a search for {self.objective} over the same space"
        with as_file_error(file, expected, "Pass another file with `--trials-from`."):
            trials = pd.read_csv(open_file(file), dtype=str, keep_default_na=False)
            if missing := [name for name in (self.objective, *self.space) if name not in trials]:
                raise ValueError(f"a table without the column {missing[0]}")
            completed = trials[trials["state"] == "complete"] if "state" in trials else trials
            values = pd.to_numeric(completed[self.objective]).dropna()
            order = values.sort_values(ascending=self.direction == "minimize", kind="stable").index
            points = tuple(
                {key: _value(key, trials[key][row], what) for key, what in self.distributions.items()} for row in order
            )
        if not points:
            raise MissingValueError(
                f"Expected completed trials in {file}, but there are none.",
                hint="Pass another file with `--trials-from`.",
            )
        return replace(self, sampler="grid", points=points)

    @property
    def case_overrides(self) -> dict[str, Any]:
        return self.variants[self.case] if self.case is not None else {}

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        return {key: _distribution(key, what) for key, what in self.space.items()}

    def grid(self) -> Iterator[dict[str, Any]]:
        """Return the points of the grid: all points of the space, or the points of another search.

        In the space, the last setting varies fastest.
        """
        if self.points:
            return iter(self.points)
        points: list[Sequence[Any]] = []
        for key, distribution in self.distributions.items():
            if isinstance(distribution, CategoricalDistribution):
                points.append(distribution.choices)
                continue
            assert isinstance(distribution, IntDistribution | FloatDistribution)
            if distribution.step is None:
                raise InvalidValueError(
                    f"Expected choices or a `step` for `{key}` with the grid sampler, but got `low` and `high` without "
                    "`step`.",
                    hint="Add a `step` without `log: true`, or use `sampler: random`.",
                )
            number = round((distribution.high - distribution.low) / distribution.step) + 1
            points.append([round(distribution.low + index * distribution.step, 12) for index in range(number)])
        return (dict(zip(self.space, point, strict=True)) for point in itertools.product(*points))

    def to_settings(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a trial: the settings of the case, and the values of Optuna's parameters."""
        return self.case_overrides | {
            key: what[[_label(choice) for choice in what].index(params[key])] if isinstance(what, list) else params[key]
            for key, what in self.space.items()
        }


def _distribution(key: str, parameter_space: Any) -> BaseDistribution:
    problem, hint = "", "Write a list, as in [16, 32], or {low: 0.0, high: 1.0}."
    if isinstance(parameter_space, list) and parameter_space:
        labels = [_label(choice) for choice in parameter_space]
        if len(set(labels)) == len(labels):
            return CategoricalDistribution(labels)
        problem, hint = " with equal choices", "List each choice once."
    elif isinstance(parameter_space, dict) and {"low", "high"} <= set(parameter_space) <= {
        "low",
        "high",
        "step",
        "log",
    }:
        whole = all(type(parameter_space.get(name, 1)) is int for name in ("low", "high", "step"))
        try:
            return IntDistribution(**parameter_space) if whole else FloatDistribution(**parameter_space)
        except (ValueError, TypeError) as error:
            problem, hint = (
                f" ({one_line(error)})",
                "Choose `low` below `high`, and either `log: true` with `low` above 0, or a `step` above 0.",
            )
    raise InvalidValueError(
        f"Expected the space of `{key}` to be a list of choices, or {{low: ..., high: ...}}, optionally with `step: "
        f"...` or `log: true`, but got {parameter_space}{problem}.",
        hint=hint,
    )


def _value(name: str, text: str, distribution: BaseDistribution) -> Any:
    """Return the value of the setting ``name`` from its text in `trials.csv`."""
    if isinstance(distribution, CategoricalDistribution):
        choices_by_text = {str(choice): choice for choice in distribution.choices}
        if text not in choices_by_text:
            raise ValueError(f"the value {text} of `{name}`, which is not one of {', '.join(choices_by_text)}")
        return choices_by_text[text]
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    value = int(text) if isinstance(distribution, IntDistribution) else float(text)
    if not distribution.low <= value <= distribution.high:
        raise ValueError(
            f"the value {text} of `{name}`, which is not between {distribution.low} and {distribution.high}"
        )
    return value


def trial_recipe(settings: Mapping[str, Any], callbacks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a recipe that sets the hyperparameters of a trial.

    Args:
        settings: Values by their dotted names.
        callbacks: The callbacks of the recipe. The result contains all callbacks if a setting changes a callback.
    """
    recipe: dict[str, Any] = {}
    for name, value in settings.items():
        if name.startswith("trainer.callbacks.") and "callbacks" not in recipe.get("trainer", {}):
            merge(recipe, {"trainer.callbacks": list(callbacks)})
        merge(recipe, {name: value})
    return recipe


def validate_space(search: Search) -> list[dict[str, Any]]:
    """Check that ``fit`` accepts the first choice or lowest value of each setting, and return the recipe's callbacks.

    Raises:
        InvalidValueError: If ``fit`` rejects all settings together, and also rejects one of the settings alone.
    """
    from lightning_fcl.runs.federated_cli import as_list
    from lightning_fcl.runs.fit import resolve_recipe

    callbacks: list[dict[str, Any]] = as_list(resolve_recipe(search.recipe)["trainer"]["callbacks"])
    lowest = {key: what[0] if isinstance(what, list) else what["low"] for key, what in search.space.items()}
    first = search.case_overrides | lowest

    def problem(settings: Mapping[str, Any]) -> LightningFCLError | None:
        try:
            resolve_recipe(search.recipe.with_values(trial_recipe(settings, callbacks)))
        except LightningFCLError as error:
            return error
        return None

    # All settings are checked together first, which is quick. If this fails, each setting is checked alone, to find the
    # invalid setting. If only a combination of settings is invalid, its trials fail.
    for key, value in first.items() if problem(first) else ():
        if error := problem({key: value}):
            raise InvalidValueError(
                f"Expected `fit` to accept {value} for {key}, but got: {one_line(error)}.", argument=key, value=value
            ) from error
    return callbacks


def _label(choice: Any) -> Any:
    """Return a choice as a value that Optuna can store. Lists and mappings become text."""
    return json.dumps(choice) if isinstance(choice, list | dict) else choice
