"""Trial evaluation of a module on a few samples, after which the module's attributes and buffers are restored."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from lightning_fcl.data.batching import Batch
from lightning_fcl.data.scenarios import IntArray
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.data.trainer_access import move_batch
from lightning_fcl.methods.context import is_labelled
from lightning_fcl.methods.functional import evaluation_mode
from lightning_fcl.rng import seed_all
from lightning_fcl.tasks.base import Task

# Maximum number of samples in a trial evaluation.
_FEW = 8


@contextmanager
def isolated_evaluation(module: L.LightningModule, stream: FederatedStream, stage: RunningStage) -> Iterator[None]:
    """Temporarily prepare a module and its Trainer for an evaluation outside of the Trainer's loops.

    The random state, the Trainer's stage and loggers, and the module are restored afterwards.
    """
    trainer, precision = module.trainer, module.trainer.precision_plugin
    previous_stage, loggers = trainer.state.stage, trainer.loggers
    with isolate_rng(), _untouched(module), evaluation_mode(module), torch.no_grad(), precision.forward_context():
        seed_all(stream.seed, "test")
        trainer.state.stage = stage
        trainer.loggers = [DummyLogger()] if loggers else []
        try:
            yield
        finally:
            trainer.state.stage, trainer.loggers = previous_stage, loggers


@contextmanager
def _untouched(module: nn.Module) -> Iterator[None]:
    """At the end of the context, restore a module's attributes, its buffers and the contents of its containers."""
    attributes = [(vars(part), dict(vars(part))) for part in module.modules()]
    growing = [v for _, values in attributes for v in values.values() if isinstance(v, list | dict | set | deque)]
    contents = [(value, copy.copy(value)) for value in growing]
    buffers = [(value, value.clone()) for value in module.buffers()]
    try:
        yield
    finally:
        for container, previous_content in [*attributes, *contents]:
            container.clear()
            container.extend(previous_content) if isinstance(container, list | deque) else container.update(
                previous_content
            )
        for value, previous_value in buffers:
            value.copy_(previous_value)


def prepare_batch(module: L.LightningModule, batch: Batch) -> Batch:
    """Return a batch as a Trainer passes it to the module: in the Trainer's precision and on the module's device."""
    return move_batch(module.trainer, module.trainer.precision_plugin.convert_input(batch))


def first_indices(stream: FederatedStream) -> IntArray | None:
    """Return the sample indices of one client in the earliest round in which any client has training samples.

    Return None if no client has samples, as on a deployment's server.
    """
    return next((rows for current in stream.plan.train for rows in current.values() if len(rows)), None)


def few_samples(samples: IntArray) -> IntArray:
    sample_subset: IntArray = samples[np.unique(np.linspace(0, len(samples) - 1, _FEW).astype(np.int64))]
    return sample_subset


def find_logits_obstacle(
    module: L.LightningModule, stream: FederatedStream, samples: IntArray, exact: bool = False
) -> str | None:
    """Return the reason why a module's output cannot be class logits. Return None if it may be logits.

    Args:
        module: The module.
        stream: The stream.
        samples: Indices of samples. At most 8 of them are used.
        exact: Whether the output must have as many classes as the stream.
    """
    with isolated_evaluation(module, stream, RunningStage.TESTING):
        split = "validation" if samples is stream.plan.validation else "test"
        batch = prepare_batch(module, stream.samples.get(few_samples(samples), split))
        if not is_labelled(batch):
            return f"a batch is a {type(batch).__name__} and not a pair of samples and labels"
        if not stream.num_classes or batch[1].dim() != 1:
            return "the targets are not class labels"
        try:
            output = module(batch[0])
        # The code of a user may raise any exception.
        except Exception as error:
            # A `Task` of this package may not be able to predict before its training.
            return None if isinstance(module, Task) else f"`forward` fails with `{type(error).__name__}: {error}`"
    reason = describe_non_logits(output, len(batch[1]))
    if reason is None and exact and output.shape[-1] != stream.num_classes:
        return f"the output has the shape {tuple(output.shape)}"
    return reason


def describe_non_logits(output: object, samples: int | None = None) -> str | None:
    """Return the reason why an output cannot be class logits. Return None if it may be logits.

    Logits have 2 or 3 dimensions, shape (samples, classes) or (samples, ..., classes), and at least 2 classes.
    """
    if not isinstance(output, Tensor):
        return f"the output is a {type(output).__name__}"
    fits = output.dim() in (2, 3) and output.shape[-1] > 1 and len(output) == (samples or len(output))
    return None if fits else f"the output has the shape {tuple(output.shape)}"
