"""What a search file of `lightning-fcl tune` says, and how settings become a recipe.

Settings are named by their path in the recipe, as in ``model.init_args.optimizer.init_args.lr``. Callbacks stand in a
list, where such paths do not reach: ``trainer.callbacks.Replay.memory_size`` is the argument ``memory_size`` of the
recipe's one callback of the class ``Replay``.
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

from lightning_fcl.errors import InvalidValueError, LightningFCLError, MissingValueError
from lightning_fcl.evaluation.metrics import find_metric
from lightning_fcl.io.reading import as_file_error, open_file
from lightning_fcl.io.safe_yaml import parse_dataclass, read_yaml
from lightning_fcl.library_errors import one_line
from lightning_fcl.runs.merging import SECTIONS, merge
from lightning_fcl.runs.paper_rows import paper_rows
from lightning_fcl.runs.recipe import Recipe
from lightning_fcl.validation import at_least, one_of


@dataclass(frozen=True)
class Search:
    """What a search file says, of one of its cases and perhaps for a row.

    Args:
        space: For each path in the recipe a list of choices, or ``{low, high}`` with ``step`` or ``log``.
        variants: Settings that stay as they are in a search of their own, for each case by its name.
        direction: Direction of the better values. Default: that of the metric.
        scale: The scale of the row of ``rows.yaml`` whose settings are searched for, if it is one.
        recipe: The recipe that is searched: that of a row, and the files of ``configs``.
        points: The grid, where it is not that of the space.
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
                "Expected `space` to have a line for each setting but got none.",
                hint="Write a line for each setting to search for, as in `space: {data.batch_size: [16, 32]}`.",
                argument="space",
            )
        one_of(self.variants or (None,), case=self.case)
        if self.direction is None:
            object.__setattr__(self, "direction", self._metric_direction())
        if twice := sorted({*self.case_overrides} & {*self.space}):
            raise InvalidValueError(
                f"Expected settings in `space` or in `variants` but got {twice[0]} in both.",
                hint=f"Remove {twice[0]} from one of them.",
            )
        _ = self.distributions  # refuses a line that is not understood

    def _metric_direction(self) -> str:
        metric = find_metric(self.objective)
        if metric is None:
            raise MissingValueError(
                f"Expected `direction` of the objective {self.objective}, which is no metric of "
                "`lightning-fcl ls metrics`, but got none.",
                hint="Set `direction: maximize`, or `direction: minimize`.",
                argument="direction",
            )
        return metric.direction

    @classmethod
    def read(cls, path: Path, trials: int | None = None, case: str | None = None, row: str | None = None) -> Search:
        """Read a search file, perhaps with another number of trials.

        A row of the ``rows.yaml`` beside it comes before ``configs``, but for settings that are searched for.
        """
        content = read_yaml(path)
        if not isinstance(content, dict):
            raise InvalidValueError(f"Expected {path} to hold values by name but got {content}.")
        if {*SECTIONS} & {*content}:
            raise InvalidValueError(
                f"Expected {path} to be a search file but got a recipe.",
                hint=f"Write a search file with `configs: [{path.name}]`, `objective` and `space`, as in "
                "`lightning-fcl tune --help`.",
                value=path,
            )
        space, variants = (content.pop(name, {}) for name in ("space", "variants"))
        variants = (
            {str(name): fixed for name, fixed in variants.items()} if isinstance(variants, dict) else {"": variants}
        )
        if not all(isinstance(one, dict) for one in (space, *variants.values())):
            raise InvalidValueError(
                f"Expected `space`, and each of `variants`, in {path} to hold settings by name.", argument="space"
            )
        if isinstance(content.get("configs"), str):
            content["configs"] = [content["configs"]]
        content |= {} if trials is None else {"trials": trials}
        none_yet: dict[str, object] = {"recipe": Recipe(), "points": ()}
        search = parse_dataclass(cls, content, path, space=space, variants=variants, case=case, **none_yet)
        recipes = tuple(path.parent / name for name in search.configs)
        if missing := [str(recipe) for recipe in recipes if not recipe.is_file()]:
            raise MissingValueError(
                f"Expected the recipes of `configs` beside {path} but there is no {', '.join(missing)}.",
                hint="Write their paths relative to the folder of the search file.",
            )
        if row is None:
            return replace(search, recipe=Recipe(recipes))
        paper_row, set_here = paper_rows(path.parent, [row], search.scale)[row], {*search.space, *search.case_overrides}
        settings = [setting for setting in paper_row.settings if setting.name not in set_here]
        return replace(search, recipe=Recipe((*paper_row.configs, *recipes, *settings)))

    def load_trials(self, file: Path) -> Search:
        """The same search with the best settings of another one over the same space, by its ``trials.csv``."""
        expected = f"to be the trials.csv of a search for {self.objective} over the same space"
        with as_file_error(file, expected, "Pass another file with `--trials-from`."):
            trials = pd.read_csv(open_file(file), dtype=str, keep_default_na=False)
            if missing := [name for name in (self.objective, *self.space) if name not in trials]:
                raise ValueError(f"it has no column {missing[0]}")
            values = pd.to_numeric(trials[self.objective]).dropna()
            order = values.sort_values(ascending=self.direction == "minimize", kind="stable").index
            points = tuple(
                {key: _value(trials[key][row], what) for key, what in self.distributions.items()} for row in order
            )
        if not points:
            raise MissingValueError(
                f"Expected trials that have succeeded in {file} but there are none.",
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
        """Every point of the space, the last setting varying fastest, or the points of another search."""
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
                    f"Expected choices or a `step` for `{key}` but the grid sampler cannot go through {distribution}.",
                    hint="Add a `step`, or use `sampler: random`.",
                )
            number = round((distribution.high - distribution.low) / distribution.step) + 1
            points.append([round(distribution.low + index * distribution.step, 12) for index in range(number)])
        return (dict(zip(self.space, point, strict=True)) for point in itertools.product(*points))

    def to_settings(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """What Optuna's parameters stand for in the recipe, and the settings of the case."""
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
            problem, hint = f" ({one_line(error)})", "Choose `low` below `high`, and a `step` above 0 or `log: true`."
    raise InvalidValueError(
        f"Expected the space of `{key}` to be a list of choices, or {{low: ..., high: ...}} with `step: ...` or `log: "
        f"true`, but got {parameter_space}{problem}.",
        hint=hint,
    )


def _value(text: str, distribution: BaseDistribution) -> Any:
    """A setting as `trials.csv` has it."""
    if isinstance(distribution, CategoricalDistribution):
        choices_by_text = {str(choice): choice for choice in distribution.choices}
        if text not in choices_by_text:
            raise ValueError(f"{text} is none of {', '.join(choices_by_text)}")
        return choices_by_text[text]
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    value = int(text) if isinstance(distribution, IntDistribution) else float(text)
    if not distribution.low <= value <= distribution.high:
        raise ValueError(f"{text} is not from {distribution.low} to {distribution.high}")
    return value


def trial_recipe(settings: Mapping[str, Any], callbacks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the recipe that sets the settings of a trial.

    Args:
        settings: Values by their dotted names.
        callbacks: The callbacks of the recipe before it, which are repeated if a setting changes one of them.
    """
    recipe: dict[str, Any] = {}
    for name, value in settings.items():
        if name.startswith("trainer.callbacks.") and "callbacks" not in recipe.get("trainer", {}):
            merge(recipe, {"trainer.callbacks": list(callbacks)})
        merge(recipe, {name: value})
    return recipe


def validate_space(search: Search) -> list[dict[str, Any]]:
    """Try whether ``fit`` knows the paths and takes their first values; gives the recipe's callbacks."""
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

    # All together first, which is quick. What clashes only together is for the trials to find out.
    for key, value in first.items() if problem(first) else ():
        if error := problem({key: value}):
            raise InvalidValueError(
                f"Expected `fit` to take {value} for {key} but {one_line(error)}.", argument=key, value=value
            ) from error
    return callbacks


def _label(choice: Any) -> Any:
    """A choice as Optuna can keep it: lists and mappings as text."""
    return json.dumps(choice) if isinstance(choice, list | dict) else choice
