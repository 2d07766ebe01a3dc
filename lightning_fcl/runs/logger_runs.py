"""Runs of W&B and MLflow that belong to a run folder: their names, and their ids, which a resumed fit continues."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

import lightning.pytorch as L
from lightning.pytorch.loggers import Logger, WandbLogger

from lightning_fcl.callbacks.run_tracking import get_tracking_loggers, name_runs, resume_runs
from lightning_fcl.errors import DamagedFileError
from lightning_fcl.evaluation.results import LOGGER_RUNS
from lightning_fcl.io.atomic import write_atomic
from lightning_fcl.io.reading import read_text


def prepare_logger_runs(trainer: L.Trainer, folder: Path, group: str, is_resumed: bool) -> None:
    """Set the names and groups of the runs that the loggers of a Trainer start, or continue the runs of the folder.

    Args:
        trainer: The Trainer, before its fit.
        folder: Folder of the run.
        group: Name of the recipe.
        is_resumed: Whether the fit continues an interrupted fit.

    Raises:
        DamagedFileError: If the file with the ids of the runs is damaged.
    """
    loggers = get_tracking_loggers(trainer)
    if loggers and is_resumed and (folder / LOGGER_RUNS).is_file():
        resume_runs(loggers, _read_run_ids(folder / LOGGER_RUNS))
    name_runs(loggers, run_name(folder), group)


@contextmanager
def finish_wandb_runs(trainer: L.Trainer) -> Iterator[None]:
    """At the end of a block, finish the W&B runs that started within the block.

    Lightning does not finish these runs. The next fit in the same process would then log to the run of this fit.
    """
    loggers = [logger for logger in get_tracking_loggers(trainer) if isinstance(logger, WandbLogger)]
    is_new = bool(loggers) and import_module("wandb").run is None
    exit_code = 1
    try:
        yield
        exit_code = 0
    finally:
        for logger in loggers if is_new else ():
            if logger._experiment is not None:
                logger._experiment.finish(exit_code=exit_code)


def write_logger_runs(folder: Path, loggers: Sequence[Logger]) -> None:
    """Write the ids of the runs in W&B and MLflow to a run folder."""
    content = {"run_ids": [logger.version for logger in loggers]}
    write_atomic(folder / LOGGER_RUNS, json.dumps(content) + "\n")


def _read_run_ids(path: Path) -> list[str]:
    content: object = None
    with suppress(ValueError):
        content = json.loads(read_text(path))
    run_ids = content.get("run_ids") if isinstance(content, dict) else None
    if not (isinstance(run_ids, list) and all(isinstance(run_id, str) for run_id in run_ids)):
        raise DamagedFileError(
            f"Expected {path} to contain the ids of runs in W&B and MLflow as `run_ids`, but the file is damaged.",
            hint="To start new runs in the loggers, delete the file.",
            value=path,
        )
    return run_ids


def run_name(folder: Path) -> str:
    """Return the name of a run: the name of its folder. The folder of a seed also has the name of the folder above.

    Example:
        >>> run_name(Path("runs/quickstart")), run_name(Path("runs/quickstart/seed-0"))
        ('quickstart', 'quickstart/seed-0')
    """
    parts = folder.resolve().parts
    return "/".join(parts[-2:] if folder.name.startswith("seed-") else parts[-1:])
