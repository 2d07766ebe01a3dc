"""Sample selection by Avalanche's buffers, and the objects that the buffers read."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_fcl.errors import InvalidTypeError
from lightning_fcl.federation.client_store import StateSection

if TYPE_CHECKING:
    from lightning_fcl.data.avalanche import ExemplarsBuffer


class Items:
    """A dataset for Avalanche's buffers. Each item is a tuple of a sample, its label and its position."""

    def __init__(self, sample: Callable[[int], Any], indices: Tensor, labels: Tensor) -> None:
        self.sample = sample
        self.indices = indices.tolist()
        self.targets = [int(label) for label in labels[indices]]

    def __getitem__(self, item: int) -> tuple[Any, int, int]:
        return self.sample(self.indices[item]), self.targets[item], self.indices[item]

    def __len__(self) -> int:
        return len(self.targets)


class Agent(SimpleNamespace):
    """An object with the attributes of Avalanche's training loop that a selection strategy can read."""

    def __init__(self, buffer: ExemplarsBuffer, model: torch.nn.Module, experience: int) -> None:
        device = next(model.parameters()).device
        # Avalanche adds 1 to this counter.
        clock = SimpleNamespace(train_exp_counter=experience - 1)
        asks = type(vars(buffer).get("selection_strategy", buffer)).__name__
        super().__init__(asks=asks, model=model, device=device, eval_mb_size=256, clock=clock)

    def __getattr__(self, name: str) -> Any:
        raise InvalidTypeError(
            f"Expected a selection strategy that reads only the model and its device, but `{self.asks}` reads "
            f"`{name}`, which only Avalanche's own training loop has.",
            hint="Use a strategy that needs only the model, such as `HerdingSelectionStrategy`.",
            argument=self.asks,
            value=name,
        )


def select(
    buffer: ExemplarsBuffer,
    sample: Callable[[int], Any],
    labels: Tensor,
    tasks: Tensor,
    memory: StateSection,
    agent: Agent,
    generator: torch.Generator,
) -> tuple[Tensor, StateSection]:
    """Return the positions of the samples that a buffer of Avalanche selects, and state for the next selection.

    Args:
        buffer: The buffer. It is copied and does not change.
        sample: Function that returns the sample at a position.
        labels: Class of each sample, shape (n,). Samples of an earlier selection come first.
        tasks: Experience of each sample, shape (n,).
        memory: The state that the earlier selection returned: ``priority`` or ``group`` of each sample selected
            there, shape (selected,). {} for the first selection.
        agent: The attributes of Avalanche's training loop.
        generator: Random number generator. It draws one seed for the selection.

    Returns:
        Positions of the selected samples, and the state: the ``priority`` or ``group`` of each selected sample.
    """
    from lightning_fcl.data.avalanche import DataAttribute, TaskAwareSupervisedClassificationDataset
    from lightning_fcl.data.avalanche import storage_policy as policies

    def part(indices: Tensor) -> Any:
        items = Items(sample, indices, labels)
        attributes = [DataAttribute(items.targets, "targets")]
        attributes.append(DataAttribute([int(task) for task in tasks[indices]], "targets_task_labels"))
        return TaskAwareSupervisedClassificationDataset([items], data_attributes=attributes)

    updated_buffer: Any = copy.copy(buffer)
    old = len(next(iter(memory.values()))) if memory else 0
    single, by_class, parametric = (
        isinstance(updated_buffer, getattr(policies, kind))
        for kind in ("ReservoirSamplingBuffer", "ClassBalancedBuffer", "ParametricBuffer")
    )
    priority = memory.get("priority", torch.zeros(old))
    group = labels[:old] if by_class else memory.get("group", torch.zeros(old, dtype=torch.long))

    def restored(number: int) -> Any:
        """Return one group of the buffer, restored from the earlier selection. Avalanche has no function for this."""
        group_buffer: Any = policies.ReservoirSamplingBuffer(updated_buffer.max_size)
        if parametric:
            group_buffer = policies._ParametricSingleBuffer(updated_buffer.max_size, updated_buffer.selection_strategy)
        group_indices = torch.nonzero(group == number).flatten()
        group_indices = group_indices[priority[group_indices].argsort(descending=True, stable=True)]
        group_buffer.buffer, group_buffer._buffer_weights = part(group_indices), priority[group_indices]
        return group_buffer

    group_ids = set(group.tolist()) if by_class else dict.fromkeys(group.tolist())
    if single:
        updated_buffer = restored(0)
    else:
        updated_buffer.buffer_groups = {number: restored(number) for number in group_ids}
        updated_buffer.seen_classes = updated_buffer.seen_groups = group_ids if by_class else set(group_ids)
        updated_buffer._num_exps = len(group_ids)
    with isolate_rng(include_cuda=False):
        seed = int(torch.randint(2**62, (1,), generator=generator))
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        updated_buffer.post_adapt(agent, SimpleNamespace(dataset=part(torch.arange(old, len(labels)))))
    groups = {0: updated_buffer} if single else updated_buffer.buffer_groups
    selected_indices = torch.tensor(
        [item[2] for group_buffer in groups.values() for item in group_buffer.buffer], dtype=torch.long
    )
    if single or by_class:
        return selected_indices, {
            "priority": torch.cat([group_buffer._buffer_weights for group_buffer in groups.values()])
        }
    numbers = [number for number, group_buffer in groups.items() for _ in range(len(group_buffer.buffer))]
    return selected_indices, {"group": torch.tensor(numbers)}
