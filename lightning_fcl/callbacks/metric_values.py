"""Values of torchmetrics metrics on the outputs of a module."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import BinaryAUROC, MulticlassAUROC


def compute_metric(metric: Metric, outputs: Tensor, targets: Tensor, has_classes: bool) -> float | None:
    """Return the value of a metric on predictions. None if the value is undefined, such as R2 of a single sample.

    torchmetrics computes an AUROC of 0 for a class without samples. Such a value is undefined here, too.

    Args:
        metric: A new metric.
        outputs: Outputs of the module, shape (samples, ..., outputs).
        targets: Targets of the samples. They may have one value per sample, for a single output or for all time steps.
        has_classes: Whether the targets are class numbers. The metric then gets integers, otherwise numbers of the type
            of the outputs.
    """
    outputs, targets = (_with_labels if has_classes else _with_numbers)(outputs, targets)
    if has_classes and not _has_every_class(metric, targets):
        return None
    try:
        metric.update(outputs, targets)
        value = float(metric.compute())
    except ValueError:
        if len(outputs) > 1:
            raise
        return None
    return value if np.isfinite(value) else None


def _with_labels(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits of shape (predictions, classes) and labels of shape (predictions,), with one for each time step.

    A single logit per prediction has no dimension of classes.
    """
    logits = outputs.flatten(0, -2)
    labels = labels.view(*labels.shape, *[1] * (outputs.dim() - 1 - labels.dim())).expand(outputs.shape[:-1]).flatten()
    return (logits[:, 0] if logits.shape[-1] == 1 else logits), labels


def _with_numbers(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and targets of the same shape, (predictions, outputs)."""
    targets = targets.to(outputs.dtype)
    while targets.dim() < outputs.dim():
        targets = targets[..., None] if outputs.shape[-1] == 1 and targets.dim() == 1 else targets[:, None]
    targets = targets.expand_as(outputs)
    return (outputs.flatten(0, -2), targets.flatten(0, -2)) if outputs.dim() > 2 else (outputs, targets)


def _has_every_class(metric: Metric, labels: Tensor) -> bool:
    """Return whether the labels contain each class that the metric needs."""
    if isinstance(metric, BinaryAUROC):
        return len(torch.unique(labels)) > 1
    if isinstance(metric, MulticlassAUROC):
        return len(torch.unique(labels)) == metric.num_classes
    return True
