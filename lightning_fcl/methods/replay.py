"""Replay: training on remembered samples, in Avalanche's buffers."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.scenarios import Indices
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.methods.declaration import Clients
from lightning_fcl.methods.episodic import checked_size
from lightning_fcl.methods.method import Method
from lightning_fcl.randomness import seed_of

Policy = Literal["reservoir", "class-balanced", "refresh"]


class Replay(Method):
    """Every batch: joins remembered samples, so that each is seen once per local epoch.

    After a client's local training its buffer takes in the round's data. The buffers are Avalanche's; what
    a client remembers never travels.

    Args:
        max_size: Samples kept: an int is their number, a float a share of the client's samples in the whole stream (of
            a `FederatedStream`). For ``"refresh"``, of each task (experience).
        policy: ``"reservoir"`` (reservoir sampling over all that passed), ``"class-balanced"`` (equal shares of each
            class seen), or ``"refresh"`` (a random choice of the task's new data replaces its earlier one, as in
            Usmanova et al. 2021, section 5.3).
        update: Take in new data after every ``"round"``, or in the last round of an ``"experience"``; the latter keeps
            samples from coming in repeatedly where the rounds of an experience share their data.
        repeat: Whether the remembered samples are repeated until they are as many as all those that the buffer has been
            offered: the past then weighs what it would weigh if nothing had been dropped. For ``"reservoir"`` only,
            whose samples stand for all alike.
        base: Whether every client's buffer begins with the samples of the stream's base session, as far as they fit:
            they were learnt in one place, before the clients, which get them along with the model.
        clients: Who uses it. See `Method`.

    Raises:
        ValueError: If an argument is out of range, or there is no base session to begin with.

    Example:
        >>> Replay(max_size=10, policy="refresh", update="round").max_size
        10
    """

    def __init__(
        self,
        max_size: int | float = 200,  # jsonargparse takes the first type that fits: 20 is a number, 0.05 a share
        policy: Policy = "class-balanced",
        update: Literal["round", "experience"] = "experience",
        repeat: bool = False,
        base: bool = False,
        clients: Clients = "all",
    ) -> None:
        super().__init__(clients)
        if policy not in ("reservoir", "class-balanced", "refresh"):
            raise ValueError(f'Expected `policy` to be "reservoir", "class-balanced" or "refresh" but got "{policy}".')
        if update not in ("round", "experience"):
            raise ValueError(f'Expected `update` to be "round" or "experience" but got "{update}".')
        if repeat and policy != "reservoir":
            raise ValueError(f'Expected `policy="reservoir"` to `repeat` remembered samples but got "{policy}".')
        self.max_size = checked_size(max_size)
        self.repeat = repeat
        self.policy = policy
        self.update = update
        self.base = base

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """In a federation, fill the buffers with the base session's samples, if they begin with these."""
        if not self.base or trainer.ckpt_path is not None:
            return
        stream: Any = trainer.datamodule  # type: ignore[attr-defined]
        federation = self.federation
        if federation is None or not len(stream.plan.base):
            raise ValueError(
                'Expected a federation whose stream has a base session, as `scenario="odfcl"` has, for `base=True` but '
                f"got {stream}. Leave `base` out."
            )
        data = stream.take(stream.plan.base)
        for client in stream.plan.clients:
            generator = torch.Generator().manual_seed(seed_of(federation.seed, client, "base session"))
            client_round = ClientRound(client, round=0, stream_samples=stream.plan.samples[client])
            if not federation.memory(client, self.section):  # else of an earlier fit, which this one goes on from
                federation.remember(client, self.section, self.end_round({}, {}, data, client_round, generator))

    def rehearse(self, memory: Memory) -> tuple[Tensor, Tensor] | None:
        """All remembered samples, perhaps repeated."""
        if not memory:
            return None
        if not self.repeat:
            return memory["x"], memory["y"]
        times = torch.arange(int(memory["seen"]), device=memory["y"].device) % len(memory["y"])
        return memory["x"][times], memory["y"][times]

    def _size(self, client_round: ClientRound) -> int:
        if isinstance(self.max_size, int):
            return self.max_size
        if not client_round.stream_samples:
            raise ValueError(
                f"Expected `max_size` to be a number of samples but got the share {self.max_size}: only a "
                "`FederatedStream` tells how many samples there will be."
            )
        return max(1, round(self.max_size * client_round.stream_samples))

    def end_round(
        self, memory: Memory, own: State, data: Any, client_round: ClientRound, generator: torch.Generator
    ) -> Memory:
        """Take in the round's data, if it is time."""
        if self.update == "experience" and not client_round.last_round:
            return memory
        if len(data) != 2:
            raise TypeError(f"Expected samples `[x, y]` for `Replay` but got {len(data)} parts. Return pairs instead.")
        x, y = data
        size = self._size(client_round)
        memory = {name: value.to(x.device) for name, value in memory.items()}
        tasks = torch.full_like(y, client_round.experience)
        if self.policy == "refresh":
            chosen = torch.randperm(len(y), generator=generator)[:size]
            kept = memory["task"] != client_round.experience if memory else None
            new = {"x": x[chosen], "y": y[chosen], "task": tasks[chosen]}
            return {n: torch.cat([memory[n][kept], v]) for n, v in new.items()} if kept is not None else new
        seen = len(y) + (int(memory["seen"]) if memory else 0)
        if memory:
            x, y, tasks = (torch.cat([memory[n], v]) for n, v in (("x", x), ("y", y), ("task", tasks)))
        old = memory.get("priority", torch.empty(0))
        chosen, priority = _select(y.cpu(), old.cpu(), self.policy, size, generator)
        return {"x": x[chosen], "y": y[chosen], "task": tasks[chosen], "priority": priority, "seen": torch.tensor(seen)}


def _select(
    y: Tensor, priority: Tensor, policy: Policy, max_size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Which of the remembered (first) and new samples Avalanche's buffer keeps, and their reservoir priorities.

    Avalanche moves indices only: what is a sample stays with the caller.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from avalanche.benchmarks.utils import DataAttribute, TaskAwareSupervisedClassificationDataset
        from avalanche.training import ClassBalancedBuffer, ReservoirSamplingBuffer

    def dataset(indices: Tensor) -> Any:
        data = Indices(indices.numpy(), y.numpy())
        labels = DataAttribute(data.targets, "targets")
        tasks = DataAttribute([0] * len(data), "targets_task_labels")
        return TaskAwareSupervisedClassificationDataset([data], data_attributes=[labels, tasks])

    def reservoir(indices: Tensor, size: int) -> Any:
        buffer = ReservoirSamplingBuffer(size)
        order = priority[indices].argsort(descending=True)
        buffer.buffer = dataset(indices[order])
        buffer._buffer_weights = priority[indices[order]]  # Avalanche has no way to restore a buffer
        return buffer

    old, new = torch.arange(len(priority)), torch.arange(len(priority), len(y))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
        if policy == "reservoir":
            groups = [reservoir(old, max_size)]
            groups[0].update_from_dataset(dataset(new))
        else:
            buffer = ClassBalancedBuffer(max_size)
            buffer.seen_classes = set(y[old].tolist())
            buffer.buffer_groups = {c: reservoir(old[y[old] == c], max_size) for c in buffer.seen_classes}
            buffer.update_from_dataset(dataset(new))
            groups = list(buffer.buffer_groups.values())
    kept = [int(index) for group in groups for index, *_ in group.buffer]
    return torch.tensor(kept, dtype=torch.long), torch.cat([group._buffer_weights for group in groups])
