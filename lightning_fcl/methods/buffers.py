"""Avalanche's replay buffers on plain tensors: which samples a client keeps."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_fcl.errors import require
from lightning_fcl.federation.client_store import Memory

if TYPE_CHECKING:
    from avalanche.training.storage_policy import ExemplarsBuffer

# Those whose whole state is which samples they hold, in which order, with a priority or a group each.
KINDS = ("ReservoirSamplingBuffer", "ClassBalancedBuffer", "ExperienceBalancedBuffer", "ParametricBuffer")


class Items:
    """A data set for Avalanche: samples, their labels, and where they are."""

    def __init__(self, sample: Callable[[int], Any], indices: Tensor, labels: Tensor) -> None:
        self.sample = sample
        self.indices = indices.tolist()
        self.targets = [int(label) for label in labels[indices]]

    def __getitem__(self, item: int) -> tuple[Any, int, int]:
        return self.sample(self.indices[item]), self.targets[item], self.indices[item]

    def __len__(self) -> int:
        return len(self.targets)


class Agent(SimpleNamespace):
    """What a selection strategy may ask of Avalanche's training loop: here there is none."""

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


def make_buffer(policy: str) -> ExemplarsBuffer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        require("avalanche", "has the buffers of `Replay`")
        from avalanche.training import ClassBalancedBuffer, ReservoirSamplingBuffer

    return ReservoirSamplingBuffer(1) if policy == "reservoir" else ClassBalancedBuffer(1)


def check_buffer(buffer: ExemplarsBuffer) -> None:
    """Refuse a buffer whose state is more than samples."""
    if type(buffer).__name__ not in KINDS:
        raise TypeError(
            f"Expected `buffer` to be one of Avalanche's {', '.join(KINDS)} but got `{type(buffer).__name__}`, which "
            "wants Avalanche's own training loop. Use one of these."
        )


def select(
    buffer: ExemplarsBuffer,
    size: int,
    sample: Callable[[int], Any],
    labels: Tensor,
    tasks: Tensor,
    memory: Memory,
    agent: Agent,
    generator: torch.Generator,
) -> tuple[Tensor, Memory]:
    """Which of ``n`` samples, remembered ones first, a buffer keeps: their indices, and what belongs to them next time.

    ``labels`` and ``tasks`` are the class and experience of each, shape (n,); ``memory`` is what this function gave
    last for the remembered ones: ``priority`` or ``group``, shape (kept,).
    """
    old = len(next(iter(memory.values()))) if memory else 0
    remembered, new = torch.arange(old), torch.arange(old, len(labels))
    buffer = _fresh(buffer, size)
    with isolate_rng(include_cuda=False):
        seed = int(torch.randint(2**62, (1,), generator=generator))
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        whole = _Whole(sample, labels, tasks)
        if type(buffer).__name__ in ("ReservoirSamplingBuffer", "ClassBalancedBuffer"):
            groups = _reservoirs(buffer, whole, remembered, new, memory.get("priority", torch.empty(0)))
            return whole.places(groups), {"priority": torch.cat([group._buffer_weights for group in groups])}
        numbers = _grouped(buffer, whole, new, memory.get("group", torch.empty(0)), agent)
        return whole.places(list(buffer.buffer_groups.values())), {"group": numbers}


class _Whole:
    """All samples, remembered and new, of which Avalanche gets parts."""

    def __init__(self, sample: Callable[[int], Any], labels: Tensor, tasks: Tensor) -> None:
        self.sample, self.labels, self.tasks = sample, labels, tasks

    def part(self, indices: Tensor) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from avalanche.benchmarks.utils import DataAttribute, TaskAwareSupervisedClassificationDataset

        data = Items(self.sample, indices, self.labels)
        labels = DataAttribute(data.targets, "targets")
        tasks = DataAttribute([int(task) for task in self.tasks[indices]], "targets_task_labels")
        return TaskAwareSupervisedClassificationDataset([data], data_attributes=[labels, tasks])

    def places(self, groups: Sequence[Any]) -> Tensor:
        return torch.tensor([item[2] for group in groups for item in group.buffer], dtype=torch.long)


def _fresh(buffer: Any, size: int) -> Any:
    empty = copy.copy(buffer)
    empty.max_size = size
    for name, value in (("buffer_groups", {}), ("seen_classes", set()), ("seen_groups", set()), ("_num_exps", 0)):
        if name in vars(empty):
            setattr(empty, name, value)
    return empty


def _reservoirs(buffer: Any, whole: _Whole, old: Tensor, new: Tensor, priority: Tensor) -> list[Any]:
    """The reservoirs of a buffer, the only one or those of classes, after the new samples have come in."""
    from avalanche.training import ReservoirSamplingBuffer

    def reservoir(indices: Tensor) -> Any:
        one = ReservoirSamplingBuffer(buffer.max_size)
        order = priority[indices].argsort(descending=True)
        one.buffer = whole.part(indices[order])
        one._buffer_weights = priority[indices[order]]  # Avalanche has no way to restore a buffer
        return one

    if isinstance(buffer, ReservoirSamplingBuffer):
        groups = [reservoir(old)]
        groups[0].update_from_dataset(whole.part(new))
        return groups
    buffer.seen_classes = set(whole.labels[old].tolist())
    buffer.buffer_groups = {c: reservoir(old[whole.labels[old] == c]) for c in buffer.seen_classes}
    buffer.update_from_dataset(whole.part(new))
    return list(buffer.buffer_groups.values())


def _grouped(buffer: Any, whole: _Whole, new: Tensor, group: Tensor, agent: Agent) -> Tensor:
    """Let the new samples into a buffer of ordered groups; the group of each sample that is kept."""
    from avalanche.training.storage_policy import ParametricBuffer, ReservoirSamplingBuffer, _ParametricSingleBuffer

    for number in dict.fromkeys(group.tolist()):
        held = whole.part(torch.nonzero(group == number).flatten())
        if isinstance(buffer, ParametricBuffer):
            one: Any = _ParametricSingleBuffer(buffer.max_size, buffer.selection_strategy)
        else:
            one = ReservoirSamplingBuffer(buffer.max_size)
            one._buffer_weights = torch.zeros(len(held))  # they are in order, and nothing new comes in
        one.buffer = held
        buffer.buffer_groups[number] = one
    if isinstance(buffer, ParametricBuffer):
        buffer.seen_groups = set(buffer.buffer_groups)
    else:
        buffer._num_exps = len(buffer.buffer_groups)
    buffer.post_adapt(agent, SimpleNamespace(dataset=whole.part(new)))
    return torch.tensor([number for number, one in buffer.buffer_groups.items() for _ in range(len(one.buffer))])
