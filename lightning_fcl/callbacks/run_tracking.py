"""Names, settings and final metrics of a run in W&B and MLflow.

Lightning's classes for these loggers can be imported without the packages wandb and mlflow.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger

from lightning_fcl.data.trainer_access import get_callbacks, require_stream
from lightning_fcl.evaluation.metrics import overall_metrics, summarize
from lightning_fcl.federation.protocols import find_federation
from lightning_fcl.methods.method import describe_methods

_MLFLOW_INVALID = re.compile(r"[^\w./ :-]", re.ASCII)
"""Characters that names of parameters in MLflow must not contain."""


def name_runs(loggers: Sequence[Logger], name: str, group: str) -> None:
    """Set the name and the group of runs that the loggers have not started yet.

    In MLflow, the group is the tag ``recipe``. Names, groups and tags that the user has set are not changed. If the
    user has chosen a run, such as with `WandbLogger(id=...)`, the run is not changed.

    Args:
        loggers: Loggers of a Trainer.
        name: Name of the run.
        group: Group of the run, such as the name of the recipe.
    """
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            settings = logger._wandb_init
            if _has_chosen_run(logger):
                continue
            for key, value, variable in (("name", name, "WANDB_NAME"), ("group", group, "WANDB_RUN_GROUP")):
                if not (settings.get(key) or os.environ.get(variable)):
                    settings[key] = value
        elif isinstance(logger, MLFlowLogger) and logger._run_id is None:
            # The logger replaces this tag by the argument `run_name`, and warns if the tag is set.
            name_tag = {} if logger._run_name else {"mlflow.runName": name}
            logger.tags = {**name_tag, "recipe": group, **(logger.tags or {})}


def get_tracking_loggers(trainer: L.Trainer) -> list[Logger]:
    """Return the W&B and MLflow loggers of a Trainer. Only the first process of a fit writes to them."""
    if not trainer.is_global_zero:
        return []
    return [logger for logger in trainer.loggers if isinstance(logger, WandbLogger | MLFlowLogger)]


def resume_runs(loggers: Sequence[Logger], run_ids: Sequence[str]) -> None:
    """Let loggers continue the runs of an interrupted fit. Runs that the user has chosen are not changed.

    An offline run of W&B is not continued: a second offline run with the same id would replace the first run when both
    are uploaded with `wandb sync`. The resumed fit then starts a new run with the same name.

    Args:
        loggers: W&B and MLflow loggers that have not started their runs yet.
        run_ids: Id of each logger's run in the interrupted fit. If the number of loggers has changed, new runs start.
    """
    for logger, run_id in zip(loggers, run_ids, strict=True) if len(loggers) == len(run_ids) else ():
        if isinstance(logger, WandbLogger):
            mode = logger._wandb_init.get("mode") or os.environ.get("WANDB_MODE", "online")
            is_offline = logger._offline or mode in ("offline", "dryrun")
            if not (is_offline or _has_chosen_run(logger)):
                logger._wandb_init["id"] = logger._id = run_id
        elif isinstance(logger, MLFlowLogger) and logger._run_id is None:
            logger._run_id = run_id


def _has_chosen_run(logger: WandbLogger) -> bool:
    """Return whether the run of a W&B logger has started, or has an id."""
    has_id = bool(logger._wandb_init.get("id") or os.environ.get("WANDB_RUN_ID"))
    return has_id or logger._experiment is not None


def log_settings(loggers: Sequence[Logger], settings: Mapping[str, Any]) -> None:
    """Write settings to the configuration of runs in W&B, and to the parameters of runs in MLflow.

    MLflow does not permit changes of parameters. Therefore, a parameter that the run already has is not changed.

    Args:
        loggers: Loggers of a Trainer.
        settings: Nested settings by name. Settings that are None are left out. `name_classes` describes the names of
            settings in a list of classes.
    """
    named_settings = name_classes(settings)
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.log_hyperparams(named_settings)
        elif isinstance(logger, MLFlowLogger):
            existing = logger.experiment.get_run(logger.run_id).data.params
            params = {_MLFLOW_INVALID.sub("_", name): value for name, value in flatten_settings(named_settings)}
            logger.log_hyperparams({name: value for name, value in params.items() if name not in existing})


def log_method(trainer: L.Trainer) -> None:
    """Write the methods and the seed of a fit to the configuration of the runs in W&B and MLflow."""
    if loggers := get_tracking_loggers(trainer):
        federation = find_federation(trainer)
        seed = require_stream(trainer).seed if federation is None else federation.seed
        log_settings(loggers, {"method": describe_methods(get_callbacks(trainer)), "seed": seed})


def log_final_metrics(trainer: L.Trainer, record: Mapping[str, Any]) -> None:
    """Write the final metrics of a fit to the summary of the run in W&B, and to the metrics of the run in MLflow.

    The names and values are those of ``metrics.json``.
    """
    loggers = get_tracking_loggers(trainer)
    if not loggers:
        return
    metrics = summarize(record)
    values = {name: metrics[name] for name in overall_metrics(metrics)}
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.summary.update(values)
        else:
            logger.log_metrics(values, step=record["rounds"][-1]["round"])


def name_classes(value: Any) -> Any:
    """Return nested settings in which each list of classes is a mapping from the class name to the arguments.

    The names of the settings are then those of the command line, such as ``trainer.callbacks.Replay.memory_size``.
    Settings that are None are left out.

    Example:
        >>> name_classes({"callbacks": [{"class_path": "lightning_fcl.callbacks.EWC", "init_args": {"strength": 2.0}}]})
        {'callbacks': {'EWC': {'strength': 2.0}}}
    """
    if isinstance(value, Mapping):
        return {str(name): name_classes(inner) for name, inner in value.items() if inner is not None}
    if (
        isinstance(value, list)
        and value
        and all(isinstance(entry, Mapping) and "class_path" in entry for entry in value)
    ):
        by_name: dict[str, Any] = {}
        for entry in value:
            short = str(entry["class_path"]).rpartition(".")[2]
            number = sum(name.partition("-")[0] == short for name in by_name)
            arguments = {**(entry.get("init_args") or {}), **(entry.get("dict_kwargs") or {})}
            by_name[f"{short}-{number + 1}" if number else short] = name_classes(arguments)
        return by_name
    return value


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each setting in nested mappings.

    Example:
        >>> dict(flatten_settings({"trainer": {"max_epochs": 3, "callbacks": {"FedAvg": {}}}}))
        {'trainer.max_epochs': 3, 'trainer.callbacks.FedAvg': {}}
    """
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flatten_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
