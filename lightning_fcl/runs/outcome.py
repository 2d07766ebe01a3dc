"""Results of a fit, in the format of ``results.json``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, NoReturn

import lightning.pytorch as L

from lightning_fcl import __version__
from lightning_fcl.callbacks import ActivationDensity, ContinualMetrics
from lightning_fcl.data.samples import data_name
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.evaluation.metrics import summarize
from lightning_fcl.methods.method import describe_methods
from lightning_fcl.runs.environment import describe_machine


def make_results(
    trainer: L.Trainer, stream: FederatedStream, config: Mapping[str, Any], command: str
) -> dict[str, Any]:
    """Return the content of ``results.json`` for a fit.

    Raises:
        InvalidValueError: If the fit ended before the end of its first round.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    metrics = next(one for one in callbacks if isinstance(one, ContinualMetrics))
    if not metrics.record.get("rounds"):
        raise_no_round(trainer)
    recipe, module = config["recipe"], trainer.lightning_module
    inner = [type(child).__name__ for child in module.children()][:1]
    shared = [type(one).__name__ for one in (stream.scenario, stream.partition) if one is not None]
    record = metrics.final_record
    results = {
        "recipe": {"paper": recipe["paper"], "row": recipe["row"]} if recipe["row"] else None,
        "parts": {
            "model": " in ".join([*inner, type(module).__name__]),
            "data": ", ".join([data_name(stream.data), *shared]),
            "methods": describe_methods(callbacks),
        },
        "seed": config["seed_everything"],
        "measured_on": metrics.split,
        "metrics": summarize(record),
        "record": record,
        "expected": dict(recipe["expected_metrics"]),
        # `__version__` is used because the metadata of an editable installation may contain an old version.
        "versions": {"lightning-fcl": __version__}
        | {name: version(name) for name in ("lightning", "torch", "avalanche-lib")},
        "machine": describe_machine(),
        # This sum includes the rounds from before a fit was resumed, because the record includes them.
        "seconds": round(sum(one["seconds"] for one in record["rounds"]), 1),
        "command": command,
        "finished": trainer.current_epoch >= (trainer.max_epochs or 0),
    }
    if recipe["searched"]:
        results["searched"] = dict(recipe["searched"])
    if recipe["first_tasks"]:
        results["tasks"] = recipe["first_tasks"]
    for callback in callbacks:
        if isinstance(callback, ActivationDensity):
            results["densities"] = callback.record
    return results


def raise_no_round(trainer: L.Trainer) -> NoReturn:
    """Raise an error for a fit that ended before the end of its first round."""
    raise InvalidValueError(
        f"Expected the fit to train for at least one round, but `max_epochs={trainer.max_epochs}`, `max_steps`, "
        "`max_time` or `limit_train_batches` ended the fit before the end of the first round.",
        hint="Increase this limit, or remove it to train all rounds of the stream.",
    )
