"""A client's optimizer: its state as a flat dict of tensors, and the same optimizer for other parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_fcl.federation.client_store import Memory


def optimizer_memory(optimizer: Optimizer) -> Memory:
    """An optimizer's state as a flat dict of tensors: ``"<parameter number>.<name>"``."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"{i}.{name}": torch.as_tensor(value).detach().clone()
        for i, p in enumerate(parameters)
        for name, value in optimizer.state.get(p, {}).items()
    }


def restore_optimizer(optimizer: Optimizer, memory: Memory) -> None:
    """Give an optimizer the state that `optimizer_memory` took."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for key, value in memory.items():
        number, name = key.split(".", 1)
        optimizer.state[parameters[int(number)]][name] = value.clone()


def with_parameters(optimizer: Optimizer, twins: Mapping[int, nn.Parameter]) -> Optimizer:
    """The same optimizer for other parameters: ``twins`` by the `id` of those that they stand for."""
    groups = [
        {**group, "params": [twins[id(p)] for p in group["params"] if id(p) in twins]}
        for group in optimizer.param_groups
    ]
    return type(optimizer)(groups)  # type: ignore[call-arg]
