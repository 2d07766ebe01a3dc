"""Conversion of subclasses of `torch.Tensor` to plain tensors. This module does not import Lightning."""

from __future__ import annotations

from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


def plain_tensor(value: Tensor) -> Tensor:
    """Return a tensor as a plain `torch.Tensor` that has no gradient and no extra attributes. Values are not copied.

    A subclass that wraps other tensors, such as `DTensor`, is returned unchanged, because it has no values itself.

    Example:
        >>> import torch
        >>> plain_tensor(torch.nn.Parameter(torch.ones(1)))
        tensor([1.])
    """
    if hasattr(type(value), "__tensor_flatten__"):
        return value
    if type(value) is Tensor and not value.requires_grad and not vars(value):
        return value
    # `detach` alone would return the subclass.
    return value.as_subclass(Tensor).detach()


def plain_samples(samples: Any) -> Any:
    """Return nested samples with each tensor replaced by a plain `torch.Tensor`. See `plain_tensor`."""
    return apply_to_collection(samples, Tensor, plain_tensor, allow_frozen=True)
