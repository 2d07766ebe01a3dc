"""Evaluation of a module by the metrics that its own test or validation step logs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.model_helpers import is_overridden
from torchmetrics import Metric, MetricCollection

from lightning_fcl.callbacks.evaluator import Values, place_samples
from lightning_fcl.callbacks.round_log import EpochLog
from lightning_fcl.data.scenarios import IntArray
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.errors import InvalidValueError, UnknownNameError
from lightning_fcl.evaluation.continual import group_name
from lightning_fcl.federation.protocols import HasMetrics
from lightning_fcl.methods.base import methods_overriding
from lightning_fcl.methods.compose import get_methods
from lightning_fcl.methods.dry_run import few_samples, find_logits_obstacle, isolated_evaluation, prepare_batch
from lightning_fcl.rng import derive_seed
from lightning_fcl.tasks.base import Task
from lightning_fcl.validation import did_you_mean, format_names

log = logging.getLogger(__name__)

# A lower value is better if the name of a metric contains one of these words.
_LOWER = ("loss", "error")
_LOG = "Call `self.log(name, value)` in that step."


def _stage_of(module: L.LightningModule) -> str | None:
    """Return "test" if a user defines `test_step`, otherwise "validation" if a user defines `validation_step`.

    Return None if a user defines neither of them.
    """
    for stage in ("test", "validation"):
        step = getattr(type(module), f"{stage}_step")
        if is_overridden(f"{stage}_step", module) and not step.__module__.startswith("lightning_fcl."):
            return stage
    return None


def _callbacks_within(module: L.LightningModule) -> list[Callback]:
    """Return the Trainer's callbacks that are submodules of a module, such as the pre-processor of anomalib models."""
    parts = {id(part) for part in module.modules()}
    return [callback for callback in module.trainer.callbacks if id(callback) in parts]  # type: ignore[attr-defined]


@dataclass(frozen=True)
class StepEvaluator:
    """Evaluator of a module on test samples by the metrics that the module's own test or validation step logs.

    The evaluator also runs the hooks of the module, and the hooks of callbacks that are submodules of the module.
    """

    stream: FederatedStream
    rows: IntArray
    group: IntArray
    num_groups: int
    split_name: str
    # Sets of groups for which the warning about missing metrics was already logged.
    warned_metrics: set[str] = field(default_factory=set)

    @classmethod
    def from_stream(
        cls, stream: FederatedStream, samples: IntArray, device: torch.device, is_stackable: bool = False
    ) -> StepEvaluator:
        """Create an evaluator of some samples of a stream. ``is_stackable`` puts all samples in one group."""
        split_name, group, groups = place_samples(stream, samples, is_stackable)
        return cls(stream, samples, group, groups, split_name)

    def count_samples(self) -> list[int]:
        sizes: list[int] = np.bincount(self.group, minlength=self.num_groups).tolist()
        return sizes

    def evaluate(self, module: L.LightningModule, group_sets: Iterable[Sequence[int]], names: Sequence[str]) -> Values:
        """Return the values that the step logs under ``names``, for each set of groups. Each set is one evaluation."""
        values: Values = {name: {} for name in names}
        for group_set in group_sets:
            rows, metric_values = self.rows[np.isin(self.group, group_set)], dict[str, float | None]()
            if len(rows):
                try:
                    metric_values = self._run(module, rows)[0]
                # A metric such as R2 or AUROC is undefined for few samples, or for a single class.
                except ValueError as error:
                    if group_name(group_set) not in self.warned_metrics:
                        log.warning(
                            "Could not compute metrics on the samples of group %s: %s",
                            group_name(group_set),
                            error,
                        )
                        self.warned_metrics.add(group_name(group_set))
            for name in names:
                values[name][group_name(group_set)] = metric_values.get(name)
        return values

    def _run(self, module: L.LightningModule, rows: IntArray) -> tuple[dict[str, float | None], EpochLog]:
        stage, caught, callbacks = _stage_of(module), EpochLog(), _callbacks_within(module)

        def call(hook: str, *args: Any) -> Any:
            for callback in callbacks if hook.startswith("on_") else ():
                getattr(callback, hook)(module.trainer, module, *args)
            return getattr(module, hook)(*args)

        with isolated_evaluation(
            module, self.stream, RunningStage.TESTING if stage == "test" else RunningStage.VALIDATING
        ):
            for submodule in reversed(list(module.modules())):
                if isinstance(submodule, Metric | MetricCollection):
                    submodule.reset()
            module.log = caught  # type: ignore[method-assign]
            for callback in callbacks:
                callback.log = caught  # type: ignore[attr-defined]
            call(f"on_{stage}_start")
            call(f"on_{stage}_epoch_start")
            loading = self.stream.samples.loader_configs.get(self.split_name)
            size = self.stream.batch_size if loading is None else loading.batch_size
            for index, start in enumerate(range(0, len(rows), size)):
                seed = derive_seed(self.stream.seed, "server", self.split_name, start)
                batch = prepare_batch(
                    module, self.stream.samples.get(rows[start : start + size], self.split_name, seed)
                )
                caught.batch = batch
                call(f"on_{stage}_batch_start", batch, index)
                output = call(f"{stage}_step", batch, index)
                call(f"on_{stage}_batch_end", output, batch, index)
            caught.batch = None
            call(f"on_{stage}_epoch_end")
            call(f"on_{stage}_end")
            return {name: caught.value(name) for name in caught.metrics}, caught

    def describe_metrics(
        self, module: L.LightningModule, lower_is_better: Sequence[str] | None
    ) -> list[dict[str, Any]]:
        """Run the step on a few samples. Return the ``name`` and ``higher_is_better`` of each logged metric."""
        step = f"`{type(module).__name__}.{_stage_of(module)}_step`"
        metrics = self._run(module, few_samples(self.rows))[1].metrics
        if not metrics:
            raise InvalidValueError(
                f"Expected {step} to log a metric for `ContinualMetrics`, but the step logs no value for the epoch.",
                hint=_LOG,
                argument=step.strip("`"),
            )
        if unknown := [name for name in lower_is_better or () if name not in metrics]:
            raise UnknownNameError(
                f"Expected `lower_is_better` to contain names that {step} logs ({format_names(metrics)}), but got "
                f"{unknown[0]}.",
                hint=did_you_mean(unknown[0], metrics),
                argument="lower_is_better",
                value=unknown[0],
            )
        higher = {
            name: name not in lower_is_better
            if lower_is_better is not None
            else not any(part in name.lower() for part in _LOWER)
            for name in metrics
        }
        higher |= {
            name: metric.higher_is_better
            for name, metric in metrics.items()
            if metric is not None and metric.higher_is_better is not None
        }
        return [{"name": name, "higher_is_better": value} for name, value in higher.items()]


def is_evaluated_by_step(module: L.LightningModule, stream: FederatedStream, samples: IntArray) -> bool:
    """Return whether a module is evaluated by its own step instead of `configure_metrics` or accuracy of its logits.

    Raises:
        ValueError: If neither the module's logits nor its step can be used.
    """
    if isinstance(module, HasMetrics):
        return False
    name, has_step = type(module).__name__, _stage_of(module) is not None
    ruling = [type(method).__name__ for method in methods_overriding(get_methods(module.trainer), "rescore")]
    obstacle = find_logits_obstacle(
        module, stream, samples, exact=has_step and not ruling and not isinstance(module, Task)
    )
    if obstacle is None or (has_step and not ruling):
        return obstacle is not None
    mend = f"Return logits, or define `test_step(self, batch, batch_idx)` to measure other values. {_LOG}"
    if has_step:
        mend = f"Remove `{ruling[0]}`, because the step of `{name}` does not use the predictions of `{ruling[0]}`."
    raise InvalidValueError(
        f"Expected `{name}` to return logits of shape (batch, {stream.num_classes or 'classes'}) to measure accuracy, "
        f"but {obstacle}.",
        hint=mend,
        argument=name,
    )
