"""What a module's own `test_step` logs on test samples, which is what it is measured by."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as L
import numpy as np
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.model_helpers import is_overridden
from torchmetrics import Metric, MetricCollection

from lightning_fcl.callbacks.epoch_log import EpochLog
from lightning_fcl.callbacks.tester import Values
from lightning_fcl.data.scenarios import IntArray
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.errors import did_you_mean, listed
from lightning_fcl.evaluation.continual import part_name
from lightning_fcl.federation.protocol import MeasuresPredictions
from lightning_fcl.methods.compose import methods_of
from lightning_fcl.methods.declaration import Predicts
from lightning_fcl.methods.trial import a_few, as_handed, aside, why_no_logits
from lightning_fcl.tasks.task import Task

log = logging.getLogger(__name__)

_LOWER = ("loss", "error")  # in the names of what is better when lower
_LOG = "Call `self.log(name, value)` there."


def _stage_of(module: L.LightningModule) -> str | None:
    """The step of a module's own that measures it, ``"test"``, else ``"validation"``; None: it has none but ours."""
    for stage in ("test", "validation"):
        step = getattr(type(module), f"{stage}_step")
        if is_overridden(f"{stage}_step", module) and not step.__module__.startswith("lightning_fcl."):
            return stage
    return None


@dataclass(frozen=True)
class StepTester:
    """Test samples, and what a module's own step logs of them; ``told``: groups of no value, as a warning has said."""

    stream: FederatedStream
    rows: IntArray
    group: IntArray
    groups: int
    part: str
    told: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, stream: FederatedStream, samples: IntArray, alike: bool = False) -> StepTester:
        """Some samples of a stream; ``alike``: all in one group."""
        group = np.zeros(len(samples), dtype=np.int64) if alike else stream.plan.groups[samples]
        part = "validation" if samples is stream.plan.validation else "test"
        return cls(stream, samples, group, 1 if alike else len(stream.plan.group_names(stream.classes)), part)

    def sizes(self) -> list[int]:
        sizes: list[int] = np.bincount(self.group, minlength=self.groups).tolist()
        return sizes

    def measured(self, module: L.LightningModule, parts: Iterable[Sequence[int]], names: Sequence[str]) -> Values:
        """What the step logs by some names of the samples of some groups together, for each of these."""
        values: Values = {name: {} for name in names}
        for part in parts:
            rows, found = self.rows[np.isin(self.group, part)], dict[str, float | None]()
            if len(rows):
                try:
                    found = self._run(module, rows)[0]
                except ValueError as error:  # as few samples, or a single class, have no R2 or AUROC
                    if part_name(part) not in self.told:
                        log.warning("Test samples of group %s alone have no value: %s", part_name(part), error)
                        self.told.add(part_name(part))
            for name in names:
                values[name][part_name(part)] = found.get(name)
        return values

    def _run(self, module: L.LightningModule, rows: IntArray) -> tuple[dict[str, float | None], EpochLog]:
        stage, caught = _stage_of(module), EpochLog()

        def call(hook: str, *args: Any) -> Any:
            return getattr(module, hook)(*args)

        with aside(module, self.stream, RunningStage.TESTING if stage == "test" else RunningStage.VALIDATING):
            for part in reversed(list(module.modules())):
                if isinstance(part, Metric | MetricCollection):
                    part.reset()
            module.log = caught  # type: ignore[method-assign]
            call(f"on_{stage}_start")
            call(f"on_{stage}_epoch_start")
            loading = self.stream.samples.loaders.get(self.part)
            size = self.stream.batch_size if loading is None else loading.batch_size
            for index, start in enumerate(range(0, len(rows), size)):
                batch = as_handed(module, self.stream.samples.take(rows[start : start + size], self.part))
                caught.batch = batch
                call(f"on_{stage}_batch_start", batch, index)
                output = call(f"{stage}_step", batch, index)
                call(f"on_{stage}_batch_end", output, batch, index)
            caught.batch = None
            call(f"on_{stage}_epoch_end")
            call(f"on_{stage}_end")
            return {name: caught.value(name) for name in caught.metrics}, caught

    def measures(self, module: L.LightningModule, lower_is_better: Sequence[str] | None) -> list[dict[str, Any]]:
        """What the step logs of a few samples, and which way is better, as a record has it."""
        step = f"`{type(module).__name__}.{_stage_of(module)}_step`"
        found = self._run(module, a_few(self.rows))[1].metrics
        if not found:
            raise ValueError(f"Expected {step} to log what the module is measured by but it logs nothing. {_LOG}")
        if unknown := [name for name in lower_is_better or () if name not in found]:
            raise ValueError(
                f"Expected `lower_is_better` to name what {step} logs ({listed(found)}) but got {unknown[0]}."
                f"{did_you_mean(unknown[0], found)}"
            )
        return [{"name": n, "higher_is_better": _is_higher(n, m, lower_is_better)} for n, m in found.items()]


def _is_higher(name: str, metric: Metric | None, lower: Sequence[str] | None) -> bool:
    if metric is not None and metric.higher_is_better is not None:
        return metric.higher_is_better
    return name not in lower if lower is not None else not any(part in name.lower() for part in _LOWER)


def is_measured_by_step(module: L.LightningModule, stream: FederatedStream, samples: IntArray) -> bool:
    """Whether a module is measured by its own step; otherwise by its `measures`, or the accuracy of its logits."""
    if isinstance(module, MeasuresPredictions):
        return False
    name, has_step = type(module).__name__, _stage_of(module) is not None
    ruling = [type(method).__name__ for method in methods_of(module.trainer) if isinstance(method, Predicts)]
    why = why_no_logits(module, stream, samples, exact=has_step and not ruling and not isinstance(module, Task))
    if why is None or (has_step and not ruling):
        return why is not None
    mend = f"Define `test_step(self, batch, batch_idx)` for what else it is measured by. {_LOG}"
    if has_step:
        mend = f"Leave `{ruling[0]}` out: it predicts by a rule of its own, which the step of `{name}` would pass by."
    raise ValueError(
        f"Expected `{name}` to give logits of shape (batch, {stream.num_classes or 'classes'}), whose accuracy is "
        f"measured, but {why}. {mend}"
    )
