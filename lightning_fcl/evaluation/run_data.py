"""Results of runs as pandas DataFrames: `read_run` reads one run, and `read_runs` one line for each run in a folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_fcl.errors import DamagedFileError, InvalidValueError
from lightning_fcl.evaluation.confusion import class_names, confusions
from lightning_fcl.evaluation.curves import curves
from lightning_fcl.evaluation.metrics import overall_metrics, summarize
from lightning_fcl.evaluation.record import Evaluation, get_quantities, get_quantity
from lightning_fcl.evaluation.results import CONFIG, RECORD, make_missing_run_error, parse_record, read_results
from lightning_fcl.evaluation.statistics import seed_statistics
from lightning_fcl.evaluation.summary import DIRECTIONS
from lightning_fcl.io.reading import open_file
from lightning_fcl.io.safe_yaml import read_yaml
from lightning_fcl.validation import require_package

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Run", "read_run", "read_runs"]


@dataclass(frozen=True)
class Run:
    """The results of a run as pandas DataFrames. `read_run` creates it.

    Rounds, experiences and tasks are numbered from 0, as in ``results.json``. A model is ``"server"`` or a client's id.
    A quantity is ``accuracy`` (a share from 0 to 1), or a measure of the module such as ``MSE``; its columns have the
    name of the quantity. A value that was not measured is NaN.

    Args:
        folder: Folder of the run.
        method: Row of the recipe, otherwise the methods of the run, separated by commas.
        seed: Random seed.
        finished: Whether the run has trained all its rounds.
        metrics: Final metrics, as ``METRIC/MODEL``. `lightning-fcl ls metrics` lists them.
        searched: Value of each option of a sweep, by the name of the option.
        record: The record of the run, as in ``results.json``.
        config: The recipe of the run with all defaults. Empty if the folder has no ``config.yaml``.
    """

    folder: Path
    method: str
    seed: int
    finished: bool
    metrics: Mapping[str, float] = field(repr=False)
    searched: Mapping[str, Any] = field(repr=False)
    record: Mapping[str, Any] = field(repr=False)
    config: Mapping[str, Any] = field(repr=False)

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """Test results of each tested model in each round.

        Columns: ``round``, ``model``, ``experience`` of the model, and two columns for each quantity: ``QUANTITY`` on
        the whole test set, and ``QUANTITY_seen`` on all classes or domains that the model has learned so far.
        """
        columns, values = ["round", "model", "experience"], dict[tuple[int, str, int], list[float]]()
        for quantity in get_quantities(self.record):
            columns += [quantity.name, f"{quantity.name}_seen"]
            for model, curve in curves(self.record, quantity).items():
                points = zip(curve.rounds, curve.experience, curve.overall, curve.seen_classes, strict=True)
                for round_idx, experience, overall, personal in points:
                    key = (int(round_idx), model, int(experience))
                    values.setdefault(key, []).extend([float(overall), float(personal)])
        lines = [(*key, *cells) for key, cells in sorted(values.items(), key=lambda item: item[0][0])]
        return make_frame(lines, columns)

    @cached_property
    def accuracy_matrix(self) -> pd.DataFrame:
        """Value on each task after the last round of each task, of models with at least two tasks.

        Columns: ``model``, ``after_task``, ``test_task``, and ``accuracy`` or the name of the first quantity. The
        metrics ``forgetting`` and ``backward_transfer`` are computed from these values.
        """
        quantity = get_quantity(self.record)
        lines = [
            (history.model, after, test, float(history.last_matrix[after, test]))
            for history in Evaluation(self.record, quantity).models
            if len(history.tasks) > 1
            for after in range(len(history.tasks))
            for test in range(len(history.tasks))
        ]
        return make_frame(lines, ["model", "after_task", "test_task", quantity.name])

    @cached_property
    def confusion(self) -> pd.DataFrame:
        """Confusion matrices of the server's model and of tested clients after each of their experiences.

        The matrix of an experience is that of the model's last test in the experience. A matrix counts the samples on
        which the model was tested, and a pair of classes without predictions has no line. If many clients are tested,
        only the first clients have matrices, see `lightning_fcl.callbacks.ContinualMetrics`. If the module is not
        measured by accuracy, the table is empty.

        Columns: ``model``, ``after_experience``, ``target`` and ``prediction`` (names of classes), and ``count``.

        Example:
            >>> run = read_run("runs/quickstart")  # doctest: +SKIP
            >>> last = run.confusion[run.confusion["after_experience"] == 4]  # doctest: +SKIP
            >>> last[last["model"] == "server"].pivot(  # doctest: +SKIP
            ...     index="target", columns="prediction", values="count"
            ... ).fillna(0)
        """
        matrices = confusions(self.record)
        largest = max((max(entry[:2]) for matrix in matrices.values() for entry in matrix), default=-1)
        names = class_names(self.record, largest + 1)
        lines = [
            (model, experience, names[target], names[prediction], count)
            for (model, experience), matrix in matrices.items()
            for target, prediction, count in matrix
        ]
        return make_frame(lines, ["model", "after_experience", "target", "prediction", "count"])

    @cached_property
    def communication(self) -> pd.DataFrame:
        """Bytes that each client has uploaded and downloaded in each round in which it was sampled.

        Columns: ``round``, ``client``, ``upload_bytes`` and ``download_bytes``.
        """
        lines = [
            (entry["round"], client, *(entry[direction].get(client, 0) for direction in DIRECTIONS))
            for entry in self.record["rounds"]
            for client in dict.fromkeys(client for direction in DIRECTIONS for client in entry[direction])
        ]
        return make_frame(lines, ["round", "client", *DIRECTIONS])

    @cached_property
    def timings(self) -> pd.DataFrame:
        """Time of each round in seconds.

        Columns: ``round``, ``seconds`` (wall-clock time with the tests of the round), ``processor_seconds`` (processor
        time without the tests, NaN in older runs), and ``simulated_seconds`` (NaN without a simulated clock).
        """
        optional_columns = ["processor_seconds", "simulated_seconds"]
        lines = [
            (entry["round"], entry["seconds"], *(entry.get(name, np.nan) for name in optional_columns))
            for entry in self.record["rounds"]
        ]
        return make_frame(lines, ["round", "seconds", *optional_columns])

    @cached_property
    def clients(self) -> pd.DataFrame:
        """Personalized results of each tested client.

        A personalized result is measured with the model that the client predicts with, on all classes or domains that
        the client has learned. ``run.clients.describe()`` returns the spread over the clients.

        Columns: ``client``, ``QUANTITY`` in the last test of the client, ``QUANTITY_mean`` and ``QUANTITY_std`` over
        the tests of the client (sample standard deviation, NaN for a single test), ``tests`` (number of tests), and
        ``state_bytes`` (size of the client's state between rounds, NaN if the run has not ended).
        """
        quantity = get_quantity(self.record)
        state_bytes = self.record.get("client_state_bytes", {})
        name, lines = quantity.name, []
        for model, curve in curves(self.record, quantity).items():
            if model != "server":
                values = curve.seen_classes[np.isfinite(curve.seen_classes)]
                statistics = seed_statistics(values) if len(values) else None
                mean, std = (statistics.mean, statistics.std) if statistics else (np.nan, np.nan)
                size = float(state_bytes.get(model, np.nan))
                std = np.nan if std is None else std
                lines.append((model, float(curve.seen_classes[-1]), mean, std, len(curve.rounds), size))
        return make_frame(lines, ["client", name, f"{name}_mean", f"{name}_std", "tests", "state_bytes"])

    @cached_property
    def settings(self) -> pd.DataFrame:
        """Recipe of the run with all defaults, one line for each value.

        Columns: ``name`` (dotted name, as in ``--NAME VALUE``; entries of lists have a number) and ``value``.
        """
        return make_frame(_flatten(self.config), ["name", "value"])


def read_run(folder: str | Path) -> Run:
    """Return the results of a run.

    A run that was interrupted, or that is still training, contains the rounds that have ended so far.

    Args:
        folder: Folder of the run, as ``--out`` of `lightning-fcl fit`.

    Raises:
        DamagedFileError: If a file of the run is damaged.
        MissingFileError: If the folder contains neither results nor the record of a run.

    Example:
        >>> run = read_run("runs/quickstart")  # doctest: +SKIP
        >>> run.rounds[run.rounds["model"] == "server"].plot(x="round", y="accuracy")  # doctest: +SKIP
    """
    folder = Path(folder)
    config = read_yaml(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    with suppress(FileNotFoundError):
        results = read_results(folder)
        row = (results["recipe"] or {}).get("row") or results.get("parts", {}).get("methods", "")
        metrics, searched = results["metrics"], results.get("searched", {})
        return Run(folder, row, results["seed"], results["finished"], metrics, searched, results["record"], config)
    path = folder / RECORD
    if not path.is_file():
        raise make_missing_run_error(folder)
    with open_file(path) as file:
        data = file.read()
    try:
        record = parse_record(data)
    except ValueError as error:
        raise DamagedFileError(
            f"Expected {path} to be the record of a run, but reading it failed: {error}.",
            hint="Repeat the run in another folder.",
            value=path,
        ) from error
    if not record.get("rounds"):
        raise InvalidValueError(
            f"Expected {path} to contain at least one round, but no round has ended yet.",
            hint="Wait for the end of the first round.",
            value=path,
        )
    recipe = config.get("recipe") or {}
    method = recipe.get("row") or ", ".join(_callback_names(config)) or "none (fine-tuning)"
    seed = int(config.get("seed_everything") or 0)
    return Run(folder, method, seed, False, summarize(record), recipe.get("searched") or {}, record, config)


def read_runs(folder: str | Path) -> pd.DataFrame:
    """Return the final metrics of all runs in a folder and its subfolders, one line for each run.

    Args:
        folder: Folder that contains run folders at any depth.

    Returns:
        A DataFrame with the columns ``run`` (path relative to ``folder``), ``method``, ``seed``, ``finished``,
        ``rounds`` (number of rounds so far), one column for each searched option, and one column for each metric of the
        server, of the mean over clients (``/clients``) and of the whole federation (``/total``).

    Raises:
        MissingFileError: If the folder contains no run.
    """
    folder = Path(folder)
    run_folders = sorted({path.parent for name in ("results.json", RECORD) for path in folder.rglob(name)})
    if not run_folders:
        raise make_missing_run_error(folder)
    lines = []
    for run_folder in run_folders:
        run = read_run(run_folder)
        line: dict[str, Any] = {
            "run": run_folder.relative_to(folder).as_posix(),
            "method": run.method,
            "seed": run.seed,
        }
        line |= {"finished": run.finished, "rounds": len(run.record["rounds"]), **run.searched}
        metrics = {name: run.metrics[name] for name in overall_metrics(run.metrics)}
        lines.append((line, metrics))
    options = dict.fromkeys(name for line, _ in lines for name in line)
    metric_names = dict.fromkeys(name for _, metrics in lines for name in metrics)
    names = [*options, *metric_names]
    return make_frame([[{**line, **metrics}.get(name, np.nan) for name in names] for line, metrics in lines], names)


def make_frame(lines: Iterable[Sequence[Any]], columns: Sequence[str]) -> pd.DataFrame:
    """Return a DataFrame of some lines. pandas is imported here, because its import takes half a second."""
    frame: pd.DataFrame = require_package("pandas", "makes tables of runs").DataFrame(list(lines), columns=columns)
    return frame


def _callback_names(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the class names of the callbacks in a recipe."""
    for entry in (config.get("trainer") or {}).get("callbacks") or []:
        if isinstance(entry, Mapping) and "class_path" in entry:
            yield str(entry["class_path"]).rpartition(".")[2]


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each plain value in nested mappings and lists."""
    if isinstance(value, Mapping) and value:
        entries: Sequence[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, list) and any(isinstance(entry, Mapping | list) for entry in value):
        entries = list(enumerate(value))
    else:
        yield name, json.dumps(value) if isinstance(value, list | Mapping) else value
        return
    for key, inner in entries:
        yield from _flatten(inner, f"{name}.{key}" if name else str(key))
