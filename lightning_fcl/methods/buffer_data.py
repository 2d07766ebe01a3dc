"""Samples and a model as the buffers of Avalanche read them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from avalanche.training.storage_policy import ExemplarsBuffer


class Items:
    """A dataset for Avalanche: samples, their labels, and their positions."""

    def __init__(self, sample: Callable[[int], Any], indices: Tensor, labels: Tensor) -> None:
        self.sample = sample
        self.indices = indices.tolist()
        self.targets = [int(label) for label in labels[indices]]

    def __getitem__(self, item: int) -> tuple[Any, int, int]:
        return self.sample(self.indices[item]), self.targets[item], self.indices[item]

    def __len__(self) -> int:
        return len(self.targets)


class Agent(SimpleNamespace):
    """The attributes of Avalanche's training loop that a selection strategy may read."""

    def __init__(self, buffer: ExemplarsBuffer | None, model: torch.nn.Module | None, experience: int) -> None:
        device = next(model.parameters()).device if model is not None else torch.device("cpu")
        clock = SimpleNamespace(train_exp_counter=experience - 1)  # Avalanche adds one
        asks = type(vars(buffer).get("selection_strategy", buffer)).__name__ if buffer is not None else ""
        super().__init__(asks=asks, model=model, device=device, eval_mb_size=256, clock=clock)

    def __getattr__(self, name: str) -> Any:
        raise TypeError(
            f"Expected a selection strategy that asks for the model and its device but `{self.asks}` asks for "
            f"`{name}`, which only Avalanche's own training loop has. Use another."
        )
