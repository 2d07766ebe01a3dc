"""Several runs of a recipe: several seeds (`lightning-fcl fit --seeds`) and a grid of settings (`--sweep`)."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from yaml import YAMLError

from lightning_fcl.cli.fast_imports import fast_imports
from lightning_fcl.cli.jobs import (
    Failure,
    Job,
    check_at_least_one,
    is_finished,
    print_resume_hint_on_stop,
    run_parallel,
    try_job,
)
from lightning_fcl.errors import InvalidStateError, InvalidValueError
from lightning_fcl.evaluation.results import CONFIG, find_run_folder
from lightning_fcl.io.atomic import write_atomic
from lightning_fcl.io.safe_yaml import load_yaml
from lightning_fcl.runs.recipe import Recipe, short_names

_LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True)
class Point:
    """A point of a grid: one value for each searched option.

    Args:
        settings: Text of each value, by the name of the option.
        name: Name of the point's folder, such as ``lr=0.1``. Empty if no option is searched.
    """

    settings: Mapping[str, str]
    name: str = ""

    @property
    def values(self) -> dict[str, Any]:
        """Values of the options. A text that is a number, a truth value or a list in YAML is converted."""
        return {option: _parsed(text) for option, text in self.settings.items()}

    def recipe(self, recipe: Recipe) -> Recipe:
        """Return a recipe with the settings of this point."""
        if not self.settings:
            return recipe
        return recipe.with_values({**self.settings, "recipe.searched": json.dumps(self.values)})


def parse_seeds(text: str) -> list[int]:
    """Return the seeds of ``--seeds``: a count N for the seeds 0 to N - 1, or a list of seeds with a comma.

    Raises:
        InvalidValueError: If the text is neither, or if a seed is repeated or is not between 0 and 4294967295.

    Example:
        >>> parse_seeds("3"), parse_seeds("3,7"), parse_seeds("3,")
        ([0, 1, 2], [3, 7], [3])
    """
    parts = [part.strip() for part in text.split(",")]
    parts = parts[:-1] if len(parts) > 1 and not parts[-1] else parts
    numbers = [int(part) for part in parts if re.fullmatch(r"[0-9]{1,10}", part)]
    is_count = "," not in text
    is_valid = len(numbers) == len(parts) == len(set(numbers)) and max(numbers) <= _LARGEST_SEED
    if not is_valid or (is_count and numbers[0] < 1):
        raise InvalidValueError(
            f"Expected `--seeds` to be a number of seeds, or a list of different seeds, but got {text!r}.",
            hint="Use `--seeds 5` for the seeds 0 to 4, or `--seeds 3,7` for these seeds. A comma makes a list of one "
            "seed, as in `--seeds 3,`.",
            argument="--seeds",
            value=text,
        )
    return list(range(numbers[0])) if is_count else numbers


def parse_grid(texts: Sequence[str]) -> list[Point]:
    """Return the points of the grid that the values of ``--sweep`` define, the last option varying fastest.

    Args:
        texts: ``OPTION=VALUE,VALUE`` for each searched option. A comma within brackets, braces or quotation marks
            belongs to a value. Without options, the grid has one point without settings.

    Raises:
        InvalidValueError: If a text has no option or no value, if an option or a value is repeated, if the option is
            the seed, or if a value is not valid YAML.

    Example:
        >>> [point.name for point in parse_grid(["data.batch_size=16,32", "model.init_args.optimizer.lr=.1"])]
        ['batch_size=16+lr=.1', 'batch_size=32+lr=.1']
    """
    values_by_option: dict[str, list[str]] = {}
    for text in texts:
        option, _, values = text.removeprefix("--").partition("=")
        parts = _split(values)
        mistakes = {
            "an option without values": not option or not all(parts),
            "an option twice": option in values_by_option,
            "a value twice": len(set(parts)) < len(parts),
            "the seed": option == "seed_everything",
            "a value that is not valid YAML": not all(map(_is_yaml, parts)),
        }
        for mistake in (what for what, is_made in mistakes.items() if is_made):
            raise InvalidValueError(
                f"Expected each `--sweep` to be a new option with different values, but got {mistake}: {text!r}.",
                hint="Write an option of the recipe and its values, as in `--sweep data.batch_size=16,32`. Set the "
                "seeds with `--seeds`.",
                argument="--sweep",
                value=text,
            )
        values_by_option[option] = parts
    short = short_names([*values_by_option])
    points = []
    for combination in itertools.product(*values_by_option.values()):
        settings = dict(zip(values_by_option, combination, strict=True))
        name = "+".join(f"{short[option]}={value}" for option, value in settings.items())
        points.append(Point(settings, re.sub(r"[^A-Za-z0-9._=+-]+", "_", name)[:100]))
    names = [point.name for point in points]
    return [
        replace(point, name=f"{number}-{point.name}") if names.count(point.name) > 1 else point
        for number, point in enumerate(points)
    ]


def _split(text: str) -> list[str]:
    """Return the parts of a text between commas that are not within brackets, braces or quotation marks."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _is_yaml(text: str) -> bool:
    try:
        _parsed(text)
    except YAMLError:
        return False
    return True


def _parsed(text: str) -> Any:
    """Return the value of a text in YAML. ``1e-4``, which is a text in YAML 1.1, is a number."""
    try:
        return float(text) if re.fullmatch(r"[-+]?[0-9.]+[eE][-+]?[0-9]+", text) else load_yaml(text)
    except ValueError:
        return text


def sweep_jobs(recipe: Recipe, points: Sequence[Point], seeds: Sequence[int], out: Path) -> list[Job]:
    """Return the runs of all points and seeds. Each run has the folder ``out/POINT/seed-N``.

    Args:
        recipe: Recipe without the settings of the points.
        points: Points of the grid.
        seeds: Seeds of each point.
        out: Folder of all runs.
    """
    return [
        Job(f"{point.name}, seed {seed}" if point.name else f"seed {seed}", whole, seed, folder / f"seed-{seed}")
        for point in points
        for whole, folder in [(point.recipe(recipe), out / point.name)]
        for seed in seeds
    ]


def find_sweep_folder(folder: Path, recipe: Recipe, points: Sequence[Point]) -> Path:
    """Return the folder of a sweep: ``folder``, or the folder with the first number that has no other runs.

    A folder has other runs if it is the folder of a run, or if the run of a seed belongs to another recipe or version.
    """
    for number in itertools.count(1):
        candidate = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        names = {
            (point.name, int(path.name[5:]))
            for point in points
            for path in (candidate / point.name).glob("seed-*")
            if path.name[5:].isdecimal()
        }
        existing_runs = [
            job
            for point in points
            for job in sweep_jobs(recipe, [point], [seed for name, seed in names if name == point.name], candidate)
        ]
        has_other_runs = any(
            job.is_foreign_folder or (find_run_folder(job.out / CONFIG) and not job.has_written(job.out))
            for job in existing_runs
        )
        if not has_other_runs and find_run_folder(candidate / CONFIG) is None:
            break
    if candidate != folder:
        print(f"{folder} contains runs of another recipe or version. The new runs are written to {candidate}.")
    return candidate


def run_sweep(
    recipe: Recipe, seeds: str | None, sweep: Sequence[str], workers: int | None, folder: Path, command: Sequence[str]
) -> None:
    """Train a recipe with several seeds and settings, and print the table that compares the settings.

    Finished runs are skipped, and interrupted runs are resumed. A failed run does not stop the other runs. All runs use
    one thread, so that results do not depend on ``workers``. The command writes ``report.html`` and ``table.csv``.

    Args:
        recipe: The recipe.
        seeds: Value of ``--seeds``. None for the seed of the recipe, or 0.
        sweep: Values of ``--sweep``.
        workers: Number of processes. None for one process per CPU core.
        folder: Folder of the runs. If the folder contains runs of another recipe, a number is appended to its name.
        command: Words of the command line, for messages.

    Raises:
        InvalidStateError: If a run failed. It is raised after all other runs.
        InvalidValueError: If an argument is invalid.
        MissingValueError: If the recipe has no model.
    """
    check_at_least_one(workers=workers)
    content = recipe.content()
    points = parse_grid(sweep)
    numbers = parse_seeds(str(content.get("seed_everything") or 0) + "," if seeds is None else seeds)
    if content.get("ckpt_path"):
        raise InvalidValueError(
            f"Expected no `ckpt_path` with several runs, but got {content['ckpt_path']}.",
            hint="Remove `ckpt_path`.",
            argument="ckpt_path",
            value=content["ckpt_path"],
        )
    with fast_imports():
        from lightning_fcl.runs.diagnosis import require_model
        from lightning_fcl.runs.fit import resolve_recipe
    require_model(content)
    for point in points:  # An invalid setting raises an error before the first run.
        resolve_recipe(point.recipe(recipe))
    out = find_sweep_folder(folder, recipe, points)
    jobs = sweep_jobs(recipe, points, numbers, out)
    failures = _run(jobs, workers)
    _write_comparison(jobs, out)
    for job, failure in failures.items():
        print(f"Failed: {job.label}: {failure.message}")
    if failures:
        raise InvalidStateError(
            f"Expected all runs to finish, but {len(failures)} of {len(jobs)} failed.",
            hint=f"Correct the cause, then run the same command again: {shlex.join(['lightning-fcl', *command])}",
        )


def _run(jobs: Sequence[Job], workers: int | None) -> dict[Job, Failure]:
    """Run the jobs that are not finished, and return the failures."""
    from tqdm import tqdm

    todo, failures = [job for job in jobs if not is_finished(job)], dict[Job, Failure]()
    num_finished = len(jobs) - len(todo)

    def so_far() -> str:
        return f"Finished: {num_finished} of {len(jobs)} runs. Run the same command again to resume."

    with print_resume_hint_on_stop(so_far), tqdm(total=len(jobs), initial=num_finished, unit="run") as bar:
        for job, failure in run_parallel(try_job, todo, workers):
            if failure is None:
                num_finished += 1
            else:
                failures[job] = failure
            bar.set_description_str(f"{'failed' if failure else 'finished'}: {job.label}")
            bar.update()
    return failures


def _write_comparison(jobs: Sequence[Job], out: Path) -> None:
    """Write the report and the table of the finished runs, and print the table."""
    from lightning_fcl.evaluation.comparison import compare_page, runs_by_name
    from lightning_fcl.evaluation.run_table import RunTable, headline_metrics

    folders = [job.out for job in jobs if is_finished(job)]
    if not folders:
        return
    groups = runs_by_name(folders)
    page = write_atomic(out / "report.html", compare_page(groups))
    table = write_atomic(out / "table.csv", RunTable.from_runs(groups).render("csv"))
    print(f"\n{RunTable.from_runs(groups, headline_metrics(groups)).render('markdown')}")
    print(f"Runs: {len(folders)} of {len(jobs)} finished, in {out}\nTable: {table}\nReport: {page}")
