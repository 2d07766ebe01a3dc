"""The network of FedWEIT: weights that all tasks share, and masks and adaptive weights for each task of a client."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.models.serialization import Serializable, serializable
from lightning_fcl.models.vit import ViT
from lightning_fcl.validation import at_least

State = dict[str, Tensor]

_WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class FedWEITNet(Serializable):
    """The weight decomposition of FedWEIT (Yoon et al., 2021).

    The weights of a task are ``theta = B * sigmoid(m) + A + sum_j alpha_j A_j`` (equation 1). The base B is the
    network's own weights. Each task that the client has started has:

    - a mask m with one number for each output unit of each weight,
    - adaptive weights A (an "adaptive") with the shape of the weights,
    - an attention alpha with one number for each pair of a layer and an adaptive A_j of the knowledge base, as in the
      authors' code. The knowledge base contains adaptives of other clients.

    Only the linear and convolutional weights that match ``layers`` are decomposed. All other tensors (biases,
    normalization, tokens, the head) are trained as usual. They are copied after each local training in a task, see
    `update_buffers_`. Therefore, the output for a past task depends only on B and on the client's ``tasks``.

    In training mode, the output is computed with the weights of the current task. In evaluation mode, the logit of a
    class is computed with the weights of the client's task that contains the class. If no task contains the class, the
    weights of the current task are used. Evaluation takes one forward pass per task. If the labels specify the task,
    `outputs_by_task` takes one pass per sample. Before the first task starts, the output is the output of ``net``.

    Args:
        net: Any network, such as a `SplitViT`.
        num_tasks: Maximum number of tasks of a client.
        layers: Shell-style pattern of the weights to decompose, by their names in ``net``.
        threshold: Entries of adaptives with at most this magnitude count as zero in evaluation and in uploads, as in
            the authors' code.

    Raises:
        ValueError: If a number is out of range, or if ``layers`` matches no linear or convolutional weights.

    Example:
        >>> from lightning_fcl.models import ViT
        >>> model = FedWEITNet(ViT(num_classes=10), num_tasks=5)
        >>> model.size, model(torch.zeros(2, 3, 32, 32)).shape
        (2663424, torch.Size([2, 10]))
        >>> model.start_task(classes=torch.tensor([3, 4]))
        >>> model.num_started_tasks, model.outputs_by_task(torch.zeros(2, 3, 32, 32), torch.tensor([3, 4])).shape
        (1, torch.Size([2, 10]))
    """

    citations: ClassVar[tuple[str, ...]] = ("yoon2021fedweit",)

    lightning_fcl_protocols: ClassVar[bool] = True

    def __init__(self, net: nn.Module, num_tasks: int, layers: str = "body.*", threshold: float = 1e-3) -> None:
        super().__init__()
        if num_tasks < 1:
            raise InvalidValueError(
                f"Expected `num_tasks` to be at least 1 but got {num_tasks}.",
                hint="Pass the number of experiences of the stream.",
                argument="num_tasks",
                value=num_tasks,
            )
        at_least(0, threshold=threshold)
        names = [f"{place}.weight" for place, layer in net.named_modules() if isinstance(layer, _WEIGHTED)]
        params = dict(net.named_parameters())
        self.names = tuple(name for name in names if fnmatchcase(name, layers) and name in params)
        if not self.names:
            raise InvalidValueError(
                f"Expected `layers` to match weights of linear or convolutional layers, but got `{layers}`, which "
                f"matches none. First such weights of the network: {', '.join(names[:3]) or 'none'}.",
                hint=f'Use a pattern of layers, such as `layers="{names[0]}"`.'
                if names
                else "Use a network with linear or convolutional layers.",
                argument="layers",
            )
        self.net = net
        self.threshold = threshold
        self.shapes = [params[name].shape for name in self.names]
        self.sizes = [shape.numel() for shape in self.shapes]
        self.units = [shape[0] for shape in self.shapes]
        self.size = sum(self.sizes)
        self.tasks = nn.ModuleList(_Task() for _ in range(num_tasks))
        # Downloaded adaptives of other clients: a tensor (adaptives, weights) for each layer. Not part of `state_dict`.
        self._base_of_others: list[Tensor] = []

    @property
    def num_started_tasks(self) -> int:
        """Number of tasks that the client has started."""
        return sum(1 for task in self.tasks if attrgetter("adaptive")(task).numel())

    def forward(self, x: Tensor) -> Tensor:
        """Return logits. Training uses the current task's weights, evaluation uses the weights of each class's task."""
        num_started_tasks = self.num_started_tasks
        if not num_started_tasks:
            plain: Tensor = self.net(x)
            return plain
        logits = self._run(num_started_tasks - 1, x, num_started_tasks)
        for number in range(0 if self.training else num_started_tasks - 1):
            classes = self._task(number).classes
            logits = logits.index_copy(1, classes, self._run(number, x, num_started_tasks)[:, classes])
        return logits

    def outputs_by_task(self, x: Tensor, y: Tensor) -> Tensor:
        """Return logits of samples. In evaluation mode, a sample's label selects the task whose weights are used.

        Compare only the logits of classes of the same task. In training mode, return the result of `forward`.
        """
        num_started_tasks = self.num_started_tasks
        if self.training or num_started_tasks < 2:
            return self.forward(x)
        owner = torch.full_like(y, num_started_tasks - 1)
        for number in range(num_started_tasks - 1):
            owner[torch.isin(y, self._task(number).classes)] = number
        parts = [
            (rows := owner == number, self._run(number, x[rows], num_started_tasks))
            for number in torch.unique(owner).tolist()
        ]
        logits = parts[0][1].new_empty(len(x), parts[0][1].shape[1])
        for rows, task_logits in parts:
            logits[rows] = task_logits
        return logits

    def _run(self, number: int, x: Tensor, num_started_tasks: int) -> Tensor:
        """Return the output with the weights of a task. For a past task, also use its copies of all other tensors."""
        state = self._weights(number)
        if number < num_started_tasks - 1:
            state |= self._rest(self._task(number).rest)
        logits: Tensor = functional_call(self.net, state, (x,))
        return logits

    def _weights(self, number: int) -> State:
        task = self._task(number)
        adaptive = task.adaptive if self.training else prune(task.adaptive, self.threshold)
        live = self.training and bool(self._base_of_others)
        if not live and task.knowledge.numel():
            adaptive = adaptive + task.knowledge
        gates, pieces = torch.split(torch.sigmoid(task.mask), self.units), torch.split(adaptive, self.sizes)
        weights: State = {}
        for layer, (name, gate, piece) in enumerate(zip(self.names, gates, pieces, strict=True)):
            base = attrgetter(name)(self.net)
            if live:
                piece = piece + task.attention[layer] @ self._base_of_others[layer]
            weights[name] = torch.addcmul(piece.view_as(base), base, gate.view(-1, *[1] * (base.dim() - 1)))
        return weights

    def _task(self, number: int) -> _Task:
        task = self.tasks[number]
        assert isinstance(task, _Task)
        return task

    # Methods that read or change the state of a client.

    def base_vector(self) -> Tensor:
        """Return B as one vector that is part of the autograd graph."""
        return torch.cat([attrgetter(name)(self.net).flatten() for name in self.names])

    def mask_vector(self, mask: Tensor) -> Tensor:
        """Return ``sigmoid(m)`` as one vector. A unit's number in the mask is repeated for each weight of the unit."""
        counts = [size // units for size, units in zip(self.sizes, self.units, strict=True)]
        parts = zip(torch.split(torch.sigmoid(mask), self.units), counts, strict=True)
        return torch.cat([part.repeat_interleave(count) for part, count in parts])

    @torch.no_grad()
    def start_task(self, classes: Tensor, adaptives: int = 0) -> None:
        """Start the client's next task.

        A starts at a third of the current B. In the authors' code, A starts at a third of the first B. Each layer's
        part of the mask is drawn from a normal distribution with mean 0 and variance 1 / units. The attention is drawn
        with mean 0 and variance 1 / adaptives.

        Args:
            classes: Classes of the task.
            adaptives: Number of adaptives in the knowledge base that is passed to `set_adaptives`.

        Raises:
            ValueError: If ``num_tasks`` tasks have been started already.
        """
        num_started_tasks = self.num_started_tasks
        if num_started_tasks == len(self.tasks):
            raise InvalidValueError(
                f"Expected the number of tasks to be at most `num_tasks`={num_started_tasks}, but another task starts.",
                hint="Pass a larger `num_tasks` to `FedWEITNet`.",
                argument="num_tasks",
                value=num_started_tasks,
            )
        task, base = self._task(num_started_tasks), self.base_vector()
        task.adaptive.data = base / 3
        task.mask.data = torch.cat([torch.randn(units) / units**0.5 for units in self.units]).to(base)
        task.classes, task.rest = classes.to(base.device, copy=True), self._flat()
        self._attend(task, adaptives)

    @torch.no_grad()
    def resume_task(self, classes: Tensor, adaptives: int = 0) -> None:
        """Add classes to the client's last task. Keep the task's mask and A, and initialize the attention again."""
        task = self._task(self.num_started_tasks - 1)
        task.classes = torch.cat([task.classes, classes.to(task.classes.device)])
        self._attend(task, adaptives)

    def _attend(self, task: _Task, adaptives: int) -> None:
        task.attention.data = (torch.randn(len(self.units), adaptives) / max(adaptives, 1) ** 0.5).to(task.mask)
        task.knowledge = task.mask.new_zeros(self.size if adaptives else 0)

    def set_adaptives(self, adaptives: Sequence[Tensor]) -> None:
        """Set the adaptives of other clients for the current task's training. They are not part of `state_dict`."""
        layers = zip(*(torch.split(adaptive, self.sizes) for adaptive in adaptives), strict=True) if adaptives else []
        self._base_of_others = [torch.stack(parts) for parts in layers]

    @torch.no_grad()
    def update_buffers_(self) -> None:
        """Update the current task's buffers after training: ``sum_j alpha_j A_j`` and copies of all other tensors."""
        task = self._task(self.num_started_tasks - 1)
        if self._base_of_others:
            mixed = zip(task.attention, self._base_of_others, strict=True)
            task.knowledge.copy_(torch.cat([attention @ others for attention, others in mixed]))
        task.rest.copy_(self._flat())

    def _others(self) -> State:
        state = self.net.state_dict().items()
        return {name: v for name, v in state if name not in self.names and v.is_floating_point()}

    def _flat(self) -> Tensor:
        return torch.cat([value.flatten() for value in self._others().values()])

    def _rest(self, rest: Tensor) -> State:
        other_entries = self._others()
        parts = torch.split(rest, [value.numel() for value in other_entries.values()])
        return {name: part.view_as(v) for part, (name, v) in zip(parts, other_entries.items(), strict=True)}


class _Task(nn.Module):
    """State of one task of a client. All tensors are empty until the task starts."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.empty(0))
        self.adaptive = nn.Parameter(torch.empty(0))
        self.attention = nn.Parameter(torch.empty(0, 0))
        self.knowledge: Tensor
        self.rest: Tensor
        self.classes: Tensor
        self.register_buffer("knowledge", torch.empty(0))
        self.register_buffer("rest", torch.empty(0))
        self.register_buffer("classes", torch.empty(0, dtype=torch.long))


@serializable
def fedweit_vit(
    num_tasks: int = 10,
    num_classes: int = 100,
    image_size: int = 32,
    patch_size: int = 4,
    width: int = 192,
    depth: int = 6,
    num_heads: int = 12,
    mlp_ratio: float = 4.0,
    channels: int = 3,
    threshold: float = 1e-3,
) -> FedWEITNet:
    """Return a `FedWEITNet` that decomposes the body of a `ViT`. The arguments are those of `ViT` and `FedWEITNet`.

    Example:
        >>> fedweit_vit(num_tasks=2, num_classes=10, patch_size=16, width=24, depth=1, num_heads=2).net.head
        Linear(in_features=24, out_features=10, bias=True)
    """
    net = ViT(num_classes, image_size, patch_size, width, depth, num_heads, mlp_ratio, channels)
    return FedWEITNet(net, num_tasks, threshold=threshold)


def prune(adaptive: Tensor, threshold: float) -> Tensor:
    """Return an adaptive in which all numbers with a magnitude up to ``threshold`` are set to zero."""
    return adaptive * (adaptive.abs() > threshold)
