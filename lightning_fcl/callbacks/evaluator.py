"""Evaluation of a model on test samples: correct predictions of each group of samples, or metrics of the module."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import lightning.pytorch as L
import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from numpy.typing import NDArray
from torch import Tensor

from lightning_fcl.callbacks.metric_values import compute_metric
from lightning_fcl.data.batching import BatchRequest
from lightning_fcl.data.scenarios import IntArray
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.data.trainer_access import move_batch
from lightning_fcl.errors import InvalidTypeError, MissingValueError
from lightning_fcl.evaluation.confusion import Confusion, add_confusions, count_confusion
from lightning_fcl.evaluation.continual import Tasks, group_name
from lightning_fcl.federation.protocols import HasMetrics
from lightning_fcl.federation.ranks import SINGLE_RANK, Ranks
from lightning_fcl.methods.compose import prediction_override
from lightning_fcl.methods.functional import evaluation_mode
from lightning_fcl.tasks.classification import Classifier

log = logging.getLogger(__name__)

BoolArray: TypeAlias = NDArray[np.bool_]
Counts: TypeAlias = list[int | None]
"""Number of correct predictions of each group. None for a group that was not tested."""
Values: TypeAlias = dict[str, dict[str, float | None]]
"""Values by the name of a metric, then by `group_name`. None: the metric is undefined for the samples of the groups."""


@dataclass(frozen=True)
class ModelCounts:
    """Numbers of predictions of a model.

    Args:
        correct: Number of correct predictions of each group.
        steps: Number of predictions for each sample.
        confusion: Confusion matrix. None if it was not requested.
        hits: Whether each prediction is correct, in the order of the samples, shape (samples * steps,). None if it was
            not requested.
    """

    correct: Counts
    steps: int
    confusion: Confusion | None = None
    hits: BoolArray | None = None


# A batch: inputs or outputs, the targets, and the group of each sample.
_Batch: TypeAlias = tuple[Any, Tensor, Tensor]

_BATCH = 512
# Maximum size in bytes of the inputs that are cached. A larger test set is read again for each evaluation.
_HELD_BYTES = 2**30


def place_samples(stream: FederatedStream, samples: IntArray, is_stackable: bool) -> tuple[str, IntArray, int]:
    """Return the name of the split of some samples, the group of each sample, and the number of groups."""
    split_name = "validation" if samples is stream.plan.validation else "test"
    if is_stackable:
        return split_name, np.zeros(len(samples), dtype=np.int64), 1
    return split_name, stream.plan.groups[samples], len(stream.plan.group_names(stream.classes))


@dataclass(frozen=True)
class Evaluator:
    """Evaluator that compares a model's outputs with the targets of test samples.

    Args:
        stream: The stream.
        rows: Indices of the samples in the stream's data, shape (n,).
        group: Group of each sample, shape (n,).
        num_groups: Number of groups.
        split_name: ``"test"`` or ``"validation"``.
        cached_samples: Inputs and targets in memory. None: the samples are read in each evaluation.
        classes: Classes that a model can predict. None: all classes. A task-incremental `Classifier` always predicts
            one of the classes of the sample's task.
    """

    stream: FederatedStream
    rows: IntArray
    group: Tensor
    num_groups: int
    split_name: str
    cached_samples: tuple[Tensor, Tensor] | None = None
    classes: tuple[int, ...] | None = None

    @classmethod
    def from_stream(
        cls, stream: FederatedStream, samples: IntArray, device: torch.device, is_stackable: bool = False
    ) -> Evaluator:
        """Create an evaluator for some samples of a stream.

        Samples that the stream stores in memory are cached on the device. Samples that are read from a dataset are
        cached if their inputs are tensors of one shape and at most 1 GiB in total. With ``is_stackable``, all samples
        are in one group.
        """
        split_name, group, groups = place_samples(stream, samples, is_stackable)
        tester = cls(stream, samples, torch.from_numpy(group).to(device), groups, split_name)
        if not stream.samples.is_random:
            x, y = (values.to(device) for values in stream.samples.get_stored(samples))
            return replace(tester, cached_samples=(x, y))
        batches, free = list[_Batch](), _HELD_BYTES
        for batch in tester._batches():
            # Batches such as lists of images or texts cannot be concatenated.
            if not isinstance(batch[0], Tensor):
                return tester
            batches.append(batch)
            free -= batch[0].nbytes
            if free < 0 or any(one.shape[1:] != other.shape[1:] for one, other in zip(batch, batches[0], strict=True)):
                return tester
        x, y, _ = (torch.cat(column) for column in zip(*batches, strict=True))
        return replace(tester, cached_samples=(x, y))

    def subset(self, groups: Iterable[int]) -> Evaluator:
        """Return an evaluator of the samples of some groups."""
        rows = torch.isin(self.group, torch.tensor(sorted(groups), device=self.group.device))
        cached_samples = (
            None if self.cached_samples is None else (self.cached_samples[0][rows], self.cached_samples[1][rows])
        )
        return replace(self, rows=self.rows[rows.cpu().numpy()], group=self.group[rows], cached_samples=cached_samples)

    def among_seen_classes(self, round_idx: int | None) -> Evaluator:
        """Return an evaluator of models that predict only classes that a client has had so far.

        If the groups are domains, the models predict all classes.

        Args:
            round_idx: Round of the test. The experiences up to this round count. None: a test before the first round,
                of a model that has learned the base session. Without a base session, the classes of the first round
                count.
        """
        new, old = self.stream.plan.class_split(round_idx or 0)
        classes = {*new, *old} if round_idx is not None else {*old} or {*new}
        return replace(self, classes=tuple(sorted(classes)) or None)

    def count_samples(self, steps: int = 1) -> list[int]:
        """Return the number of predictions for each group. The model makes ``steps`` predictions for each sample."""
        sizes: list[int] = (torch.bincount(self.group, minlength=self.num_groups) * steps).tolist()
        return sizes

    def _batches(self, first: int = 0, stride: int = 1) -> Iterator[_Batch]:
        """Yield every ``stride``-th batch from batch ``first``. Random transforms give the same samples each time."""
        size = self.stream.loader_config(self.split_name).batch_size if self.stream.samples.is_random else _BATCH
        if self.cached_samples is not None:
            parts = (torch.split(values, size) for values in (*self.cached_samples, self.group))
            yield from itertools.islice(zip(*parts, strict=True), first, None, stride)
            return
        places = np.split(np.arange(len(self.rows)), range(size, len(self.rows), size))[first::stride]
        seed, key = self.stream.seed, ("server", self.split_name)
        requests = (BatchRequest(self.rows[place], seed, (*key, int(place[0]))) for place in places)
        for positions, batch in zip(places, self.stream.read_batches(requests, self.split_name), strict=True):
            if not (isinstance(batch, list) and len(batch) > 1 and isinstance(batch[1], Tensor)):
                description = f"a {type(batch).__name__}"
                if isinstance(batch, list):
                    description += f" of length {len(batch)}"
                    description += f" whose item 1 has the type {type(batch[1]).__name__}" if batch[1:] else ""
                raise InvalidTypeError(
                    "Expected each batch to be a list of inputs and a tensor of targets for `ContinualMetrics`, "
                    f"but got {description}.",
                    hint="Return pairs from the dataset, or use a module whose `forward` does not return logits, and "
                    "log metrics in its `test_step`.",
                )
            x, y = move_data_to_device(batch[:2], self.group.device)
            yield x, y, self.group[positions]

    @torch.no_grad()
    def outputs(self, module: L.LightningModule, stride: int = 1, first: int = 0) -> Iterator[_Batch]:
        """Yield outputs, targets and groups of every ``stride``-th batch from batch ``first``."""
        precision = module.trainer.precision_plugin
        with evaluation_mode(module), precision.forward_context(), prediction_override(module):
            for inputs, label, groups in self._batches(first, stride):
                inputs = precision.convert_input(self.stream.samples.normalize(inputs))
                inputs, label = move_batch(module.trainer, [inputs, label])[:2]
                if isinstance(module, Classifier):
                    logits = module.mask_logits(module.outputs_by_task(inputs, label), label)
                    yield logits if module.task_incremental else keep_classes(logits, self.classes), label, groups
                else:
                    yield keep_classes(module(inputs), self.classes), label, groups

    def count(
        self,
        module: L.LightningModule,
        ranks: Ranks = SINGLE_RANK,
        with_confusion: bool = False,
        with_hits: bool = False,
    ) -> ModelCounts:
        """Return the number of correct predictions of each group and, if requested, the confusion matrix and the hits.

        The predictions of all ranks are counted. If the model makes several predictions for a sample, each of them is
        counted.
        """
        counts, steps = torch.zeros(self.num_groups, dtype=torch.long, device=module.device), 1
        targets, predictions = list[Tensor](), list[Tensor]()
        # Whether each prediction is correct, by the index of the batch.
        hits = dict[int, BoolArray]()
        for index, (output, label, groups) in enumerate(self.outputs(module, ranks.num_ranks, ranks.rank)):
            prediction = to_predictions(output)
            if prediction.dim() > 1:
                steps = prediction.shape[1]
                label, groups = (values[:, None].expand_as(prediction).flatten() for values in (label, groups))
            prediction = prediction.flatten()
            hit = prediction == label
            counts += torch.bincount(groups[hit], minlength=self.num_groups)
            if with_hits:
                hits[ranks.rank + index * ranks.num_ranks] = hit.cpu().numpy()
            if with_confusion:
                targets.append(label)
                predictions.append(prediction)
        # A rank has no batch if there are more ranks than batches.
        confusion = count_confusion(*map(_concatenated, (targets, predictions)))
        parts = ranks.all_gather_object((counts.tolist(), steps, confusion, hits))
        correct: Counts = [sum(column) for column in zip(*(part[0] for part in parts), strict=True)]
        whole = add_confusions([part[2] for part in parts]) if with_confusion else None
        hits_by_batch = {index: hit for part in parts for index, hit in part[3].items()}
        all_hits = np.concatenate([hits_by_batch[index] for index in sorted(hits_by_batch)]) if with_hits else None
        return ModelCounts(correct, max(part[1] for part in parts), whole, all_hits)

    def describe_metrics(
        self, module: L.LightningModule, lower_is_better: Sequence[str] | None
    ) -> list[dict[str, Any]]:
        """Return the ``name`` and ``higher_is_better`` of each metric. The list is empty if the measure is accuracy."""
        metrics = module.configure_metrics() if isinstance(module, HasMetrics) else {}
        return [{"name": name, "higher_is_better": bool(metric.higher_is_better)} for name, metric in metrics.items()]

    def evaluate(self, module: L.LightningModule, group_sets: Iterable[Sequence[int]], names: Sequence[str]) -> Values:
        """Return the value of each metric on each set of groups, by the metric's name, then by `group_name`.

        All samples of a set are evaluated together.
        """
        # Metrics of other modules may need finite outputs.
        is_classifier = isinstance(module, Classifier)
        assert isinstance(module, HasMetrics)
        test = self if is_classifier else replace(self, classes=None)
        batches = [(output.cpu(), label.cpu(), where.cpu()) for output, label, where in test.outputs(module)]
        outputs, targets, group = (torch.cat(column) for column in zip(*batches, strict=True))
        values: Values = {name: {} for name in names}
        has_classes = bool(self.stream.num_classes)
        for group_set in group_sets:
            rows = torch.isin(group, torch.tensor(sorted(group_set)))
            for name, metric in module.configure_metrics().items():
                values[name][group_name(group_set)] = (
                    compute_metric(metric, outputs[rows], targets[rows], has_classes) if rows.any() else None
                )
        return values


def _concatenated(batches: Sequence[Tensor]) -> IntArray:
    """Return the values of batches as one array, shape (n,)."""
    return torch.cat([*batches]).long().cpu().numpy() if batches else np.empty(0, dtype=np.int64)


def keep_classes(outputs: Tensor, classes: Sequence[int] | None) -> Tensor:
    """Return the outputs of a model, with -inf for all classes except some.

    Args:
        outputs: Outputs, shape (..., classes).
        classes: Classes whose outputs are kept. None: all classes.

    Example:
        >>> keep_classes(torch.tensor([[0.1, 0.2, 0.7]]), [0, 1])
        tensor([[0.1000, 0.2000,   -inf]])
    """
    if classes is None:
        return outputs
    is_other = torch.ones(outputs.shape[-1], dtype=torch.bool, device=outputs.device)
    is_other[[number for number in classes if number < outputs.shape[-1]]] = False
    return outputs.masked_fill(is_other, -torch.inf)


def to_predictions(outputs: Tensor) -> Tensor:
    """Return the class with the largest output for each sample.

    On a CPU, NumPy's `argmax` is 10 times as fast as PyTorch's `argmax`.
    """
    if outputs.dtype is torch.float32 and outputs.device.type == "cpu":
        return torch.from_numpy(outputs.numpy().argmax(axis=-1))
    return outputs.argmax(dim=-1)


def evaluation_groups(tasks: Tasks, groups: int) -> list[tuple[int, ...]]:
    """Return the sets of groups to evaluate together.

    The sets are each single group, all groups, each task, and for each task all groups up to this task.
    """
    learnt: set[int] = set()
    parts = [(group,) for group in range(groups)] + [tuple(range(groups))]
    for task in tasks:
        learnt.update(task)
        parts += [tuple(sorted(set(task))), tuple(sorted(learnt))]
    return list(dict.fromkeys(parts))


def samples_of_split(stream: FederatedStream, split: Literal["test", "validation"], owner: str) -> IntArray:
    """Return the indices of the samples of a split. Raise MissingValueError, which names ``owner``, if it is empty."""
    samples = stream.plan.test if split == "test" else stream.plan.validation
    if not len(samples):
        raise MissingValueError(
            f"Expected the stream to have {split} samples for `{owner}`, but it has none.",
            hint=f"Set `split=Split({split}={0.2 if split == 'test' else 0.1})` of the stream.",
            argument="split",
            value=split,
        )
    return samples
