"""Plain tensors in place of subclasses of `torch.Tensor`, without Lightning."""

from __future__ import annotations

from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


def plain_tensor(value: Tensor) -> Tensor:
    """Return a tensor as a `torch.Tensor`, without a subclass, attributes and gradient. Its numbers are not copied.

    A subclass that wraps other tensors, such as `DTensor`, has no numbers of its own and is returned unchanged.

    Example:
        >>> import torch
        >>> plain_tensor(torch.nn.Parameter(torch.ones(1)))
        tensor([1.])
    """
    if hasattr(type(value), "__tensor_flatten__"):
        return value
    if type(value) is Tensor and not value.requires_grad and not vars(value):
        return value
    return value.as_subclass(Tensor).detach()  # `detach` alone returns the subclass


def plain_samples(samples: Any) -> Any:
    """Return samples, in any nest, with a plain `torch.Tensor` for each tensor: see `plain_tensor`."""
    return apply_to_collection(samples, Tensor, plain_tensor, allow_frozen=True)
