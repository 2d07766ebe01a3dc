"""Functions for run folders: write and read ``record.jsonl`` and ``results.json``, and make the other files of a run.

The checksum list ``files.txt`` is written last. A run is complete if all listed files match the list.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import isnan, nan
from pathlib import Path
from typing import Any

from lightning_fcl.errors import InvalidValueError, MissingFileError
from lightning_fcl.evaluation.curves import curves
from lightning_fcl.evaluation.metrics import overall_metrics
from lightning_fcl.evaluation.record import ACCURACY, get_quantities, tested_models
from lightning_fcl.evaluation.summary import DIRECTIONS, simulated_times
from lightning_fcl.io.atomic import append, write_atomic
from lightning_fcl.io.checksums import read_checksums, sha256, write_checksums
from lightning_fcl.io.paths import safe_join
from lightning_fcl.io.reading import open_file, read_json, read_text
from lightning_fcl.validation import require_package

__all__ = ["RecordFile", "read_results", "write_csv", "write_files", "write_metrics", "write_page", "write_results"]

FORMAT = 1
"""Version of the format of ``results.json``."""

CONFIG, LAST = "config.yaml", Path("checkpoints", "last.ckpt")
"""Paths of the recipe and of the last checkpoint, relative to a run folder."""

RECORD = "record.jsonl"
"""Name of the file with the rounds of a run that have ended so far."""

ENVIRONMENT = "environment.json"
"""Name of the file with the versions, the machine, the git commit and the checksums of a run."""

LOGGER_RUNS = "loggers.json"
"""Name of the file with the ids of the run in W&B and MLflow, which a resumed fit continues."""

PREDICTIONS = "predictions.csv"
"""Name of the file with the predictions of the final model of a run."""

_SEAL = "files.txt"
_WRITTEN = (
    LAST,
    RECORD,
    _SEAL,
    ENVIRONMENT,
    "results.json",
    "metrics.json",
    "metrics.csv",
    "report.html",
    LOGGER_RUNS,
    PREDICTIONS,
)


class RecordFile:
    """The file ``record.jsonl`` of a run folder, which contains the record of the run.

    A line contains one round. If other entries of the record change, a further line contains all entries except the
    rounds. A checkpoint contains the size of the file in bytes and a SHA-256 of the lines instead of the record. Lines
    after this size belong to rounds that a resumed fit trains again.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / RECORD
        self._begin()

    def _begin(self) -> None:
        # Entries of the record in the file, except the rounds.
        self._rest: dict[str, Any] = {}
        # Number of rounds in the file, and the last round.
        self._number, self._last = 0, dict[str, Any]()
        self._size, self._digest = 0, ""

    def extend(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Append the new entries of a record. Return the size and the SHA-256 that a checkpoint stores."""
        rest, rounds = {name: value for name, value in record.items() if name != "rounds"}, record["rounds"]
        if self._number and (len(rounds) < self._number or rounds[self._number - 1] != self._last):
            # The file contains the rounds of another fit, so it is written again from the start.
            self._begin()
        lines = [] if rest == self._rest else [{"rest": rest}]
        for entry in rounds[self._number :]:
            # The experiences of many clients are long. They are left out if they are unchanged since the last round.
            is_same_experience = entry["experience"] is self._last.get("experience")
            lines.append(
                {name: value for name, value in entry.items() if not (is_same_experience and name == "experience")}
            )
            self._last = entry
        data = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
        append(self.path, self._size, data)
        self._take(data)
        self._rest, self._number = rest, len(rounds)
        return {"bytes": self._size, "sha256": self._digest}

    def _take(self, data: bytes) -> None:
        """Update the size and the digest of the file for appended lines.

        The digest of each line includes the digest of the lines before it. No hash object is stored, because hash
        objects cannot be deep-copied.
        """
        self._size += len(data)
        for line in data.splitlines():
            self._digest = hashlib.sha256(self._digest.encode() + line).hexdigest()

    def read(self, checkpoint_record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the record that the file contained at the time of a checkpoint.

        Args:
            checkpoint_record: Values that the checkpoint stores in place of the record: ``bytes`` and ``sha256``.

        Raises:
            ValueError: If the file is missing, is shorter than at the time of the checkpoint, or has other lines.
        """
        self._begin()
        size = self.path.stat().st_size if self.path.is_file() else 0
        if size >= checkpoint_record["bytes"]:
            with open_file(self.path) as file:
                data = file.read(checkpoint_record["bytes"])
            self._take(data)
        if size < checkpoint_record["bytes"] or self._digest != checkpoint_record["sha256"]:
            raise ValueError(
                f"{self.path}, which contains the measurements until this checkpoint, is missing or belongs to another "
                "run. Copy it from the folder of the checkpoint's run"
            )
        record = parse_record(data)
        rounds: list[dict[str, Any]] = record["rounds"]
        self._rest = {name: value for name, value in record.items() if name != "rounds"}
        self._number, self._last = len(rounds), rounds[-1] if rounds else {}
        return record


def make_missing_run_error(folder: Path) -> MissingFileError:
    """Return the error for a folder that contains neither the results nor the record of a run."""
    return MissingFileError(
        f"Expected {folder} to contain a run, but found no results in it.",
        hint="Pass a folder that `lightning-fcl fit` has written.",
        value=folder,
    )


def parse_record(data: bytes) -> dict[str, Any]:
    """Return the record in the lines of ``record.jsonl``. An incomplete last line is ignored.

    Raises:
        ValueError: If another line is not valid.
    """
    rest, rounds = dict[str, Any](), list[dict[str, Any]]()
    for line in map(json.loads, data[: data.rfind(b"\n") + 1].splitlines()):
        if "rest" in line:
            rest = line["rest"]
        else:
            # A line without experiences has those of the previous round.
            previous = rounds[-1]["experience"] if rounds else None
            rounds.append({"experience": previous, **line})
    return {**rest, "rounds": rounds}


def last_recorded_round(folder: Path) -> int:
    """Return the number of the last round in ``record.jsonl`` of a run folder, or -1 if there is no round.

    Numbers start at 0. An incomplete last line does not count.
    """
    last = -1
    with suppress(FileNotFoundError, json.JSONDecodeError), open_file(folder / RECORD) as file:
        for line in map(json.loads, file):
            last = int(line.get("round", last))
    return last


def write_results(folder: str | Path, results: Mapping[str, Any]) -> Path:
    """Write ``results.json`` of a run folder, with the format version and a checksum. Return the path of the file.

    Each line contains one entry.
    """
    content = {"format": FORMAT, **results}
    checksum = _checksum(json.loads(json.dumps(content)))
    # An indented file of a run with confusion matrices would have three times the size.
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in {**content, "checksum": checksum}.items()]
    return write_atomic(Path(folder) / "results.json", "{\n" + ",\n".join(lines) + "\n}\n")


def read_results(folder: str | Path) -> dict[str, Any]:
    """Return the content of ``results.json`` of a run folder, after verifying the checksum in the file.

    Raises:
        FileNotFoundError: If there is no ``results.json``.
        ValueError: If the file is damaged or has another format.
    """
    path = Path(folder) / "results.json"
    results = read_json(path, "the run's results in ", FORMAT, "Pass the folder of a finished run, or repeat the run.")
    checksum = results.pop("checksum", None)
    if checksum != _checksum(results):
        raise InvalidValueError(
            f"Expected {path} to be unchanged, but its checksum differs.", hint="Repeat the run.", value=path
        )
    return results


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def mark_complete(folder: Path, files: Iterable[Path]) -> Path:
    """Write the checksum list that marks a run as finished, and return the path of the list."""
    return write_checksums(folder / _SEAL, {path.relative_to(folder).as_posix(): sha256(path) for path in files})


def is_complete(folder: Path) -> bool:
    """Return whether a run is finished: its checksum list is valid, contains results.json, and matches all files."""
    try:
        digests = read_checksums(folder / _SEAL)
        is_unchanged = all(sha256(safe_join(folder, name)) == digest for name, digest in digests.items())
    except (OSError, ValueError):
        return False
    return is_unchanged and "results.json" in digests


def find_run_folder(config: Path) -> Path | None:
    """Return the folder of a file if the file is the recipe of a run that has started, otherwise None."""
    folder = config.parent
    has_started = (folder / "results.json").is_file() or any(folder.glob("checkpoints/*.ckpt"))
    return folder if config.name == CONFIG and has_started else None


def clear_run(folder: Path) -> None:
    """Remove the results and the last checkpoint of an earlier run from a folder."""
    for name in _WRITTEN:
        (folder / name).unlink(missing_ok=True)


def check_output_file(path: Path) -> None:
    """Check that ``path``, the value of ``--out``, can be the file of a result.

    Raises:
        InvalidValueError: If the path is a folder, or a file that a fit has written.
    """
    is_run_file = path.name in {CONFIG, *map(str, _WRITTEN)} - {"report.html"} and (path.parent / CONFIG).is_file()
    if path.is_dir() or is_run_file:
        raise InvalidValueError(
            f"Expected `--out` to be a new file, but {path} is {'a file of a run' if is_run_file else 'a folder'}.",
            hint="Use another name of a file, such as `--out table.txt`.",
            argument="--out",
            value=path,
        )


def write_files(folder: str | Path) -> Path:
    """Write ``metrics.json``, ``metrics.csv``, ``report.html`` and ``files.txt`` from ``results.json`` of a run folder.

    A run that was stopped before its end gets no ``files.txt``.

    Returns:
        Path of ``report.html``.

    Raises:
        FileNotFoundError: If there is no ``results.json``.
        ValueError: If ``results.json`` is damaged or has another format.
    """
    folder = Path(folder)
    results = read_results(folder)
    metrics = write_metrics(folder / "metrics.json", results["metrics"])
    table, page = write_csv(folder / "metrics.csv", results["record"]), write_page(folder, results)
    if results["finished"]:
        mark_complete(folder, [folder / "results.json", metrics, table, page])
    return page


def write_metrics(path: Path, metrics: Mapping[str, float]) -> Path:
    """Write the final metrics of the server, of the mean over clients and of the federation as flat JSON.

    Programs such as `dvc metrics show` read this file. The keys are those of ``metrics`` in ``results.json``.
    """
    whole = {name: metrics[name] for name in overall_metrics(metrics)}
    return write_atomic(path, json.dumps(whole, indent=1) + "\n")


def write_page(folder: Path, results: Mapping[str, Any]) -> Path:
    """Write ``report.html`` of a run, and return the path of the file."""
    for package in ("altair", "jinja2", "vl_convert"):
        require_package(package, "draws reports")
    # The import of Altair takes a second.
    from lightning_fcl.evaluation.report import render_report

    path = folder / CONFIG
    recipe = read_text(path) if path.is_file() else ""
    return write_atomic(folder / "report.html", render_report(results, recipe))


def write_csv(path: Path, record: Mapping[str, Any]) -> Path:
    """Write a CSV file with a line for each model and round (from 0), and return its path.

    A line contains the accuracy, the accuracy on each group, upload bytes and download bytes. If the record has
    measures, the line contains each measure in place of the accuracy. A value that was not measured is empty. If the
    run has a simulated clock, the last column contains the simulated seconds from the run's start to the round's end.
    """
    quantities, groups = get_quantities(record), record["groups"]
    columns: list[str] = []
    for quantity in quantities:
        names = groups if quantity == ACCURACY else [f"{quantity.name} {group}" for group in groups]
        columns += [quantity.name, *names]
    tested: dict[tuple[int, str], list[float]] = {}
    for quantity in quantities:
        for model, curve in curves(record, quantity).items():
            for number, whole, values in zip(curve.rounds, curve.overall, curve.accuracy.tolist(), strict=True):
                tested.setdefault((int(number), model), []).extend([float(whole), *values])
    times = simulated_times(record).tolist()
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["round", "model", *columns, *DIRECTIONS, *(["simulated_time"] if times else [])])
    for number, entry in enumerate(record["rounds"]):
        for model in dict.fromkeys([*tested_models(entry), *entry[DIRECTIONS[0]], *entry[DIRECTIONS[1]]]):
            cells = tested.get((entry["round"], model), [nan] * len(columns))
            plain = ["" if isnan(cell) else cell for cell in cells]
            sizes = [entry[way].get(model, "") for way in DIRECTIONS]
            writer.writerow([entry["round"], model, *plain, *sizes, *times[number : number + 1]])
    return write_atomic(path, text.getvalue())
