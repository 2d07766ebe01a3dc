"""Precision of clients that train side by side, and of numbers near 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_fcl.federation.local_training import LocalTrainer
from lightning_fcl.local.stacked import StackedTrainer


class StackedPrecision(Precision):
    """Full precision, in which the gradients of clients that train side by side are taken, and clipped by norm.

    Args:
        trainer: Tells who trains the clients.
    """

    def __init__(self, trainer: Callable[[], LocalTrainer]) -> None:
        super().__init__()
        self._trainer = trainer

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Take the gradients: of a single client as always, of several as their trainer tells them."""
        trainer = self._trainer()
        if not isinstance(trainer, StackedTrainer):
            super().backward(tensor, model, optimizer, *args, **kwargs)
            return
        for parameter, gradient in zip(self.main_params(optimizer), trainer.gradients(tensor), strict=True):
            parameter.grad = gradient

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip each client's gradient by its own norm."""
        trainer = self._trainer()
        if not isinstance(trainer, StackedTrainer):
            super().clip_grad_by_norm(optimizer, clip_val)
            return
        gradients = [p.grad for p in self.main_params(optimizer) if p.grad is not None]
        norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
        factors = (clip_val / (norms + 1e-6)).clamp(max=1.0)  # as `torch.nn.utils.clip_grad_norm_` has it
        for gradient in gradients:
            gradient.mul_(factors.view(-1, *[1] * (gradient.dim() - 1)))


def flush_denormals() -> bool:
    """Take numbers below the normal range as 0, if PyTorch has one thread; whether it did not do so before.

    Gradients of unlikely classes are such numbers, with which a CPU multiplies many times as slowly. Undone by
    ``torch.set_flush_denormal(False)``. Of several threads those that are there already would stay as they are, so that
    results would depend on when these began.
    """
    smallest = torch.tensor(torch.finfo(torch.float32).tiny, device="cpu")
    return torch.get_num_threads() == 1 and bool(smallest / 2 != 0) and torch.set_flush_denormal(True)
