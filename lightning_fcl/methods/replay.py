"""Replay: training on remembered samples, in Avalanche's buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_fcl.data.batches import Batch
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.errors import argument, one_of
from lightning_fcl.federation.aggregation import State, entries, load_entries
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.federation.protocol import federation_of
from lightning_fcl.methods.buffers import Agent, check_buffer, make_buffer, select
from lightning_fcl.methods.client import Client
from lightning_fcl.methods.declaration import Needs
from lightning_fcl.methods.episodic import memory_size
from lightning_fcl.methods.method import Method
from lightning_fcl.randomness import seed_of

if TYPE_CHECKING:
    from avalanche.training.storage_policy import ExemplarsBuffer

Policy = Literal["reservoir", "class-balanced", "refresh"]

# What entries of a memory begin with that are those of samples that are dicts.
_SAMPLE = "sample."


@dataclass(eq=False)
class Replay(Method):
    """Every batch: joins remembered samples, so that each is seen once per local epoch.

    After a client's local training its buffer, one of Avalanche's, takes in the round's data; what a client remembers
    never travels. Samples are pairs ``[x, y]``, or dicts of tensors in a federation.

    Args:
        max_size: Samples kept: an int is their number, a float a share of the client's samples in the whole stream (of
            a `FederatedStream`). For ``"refresh"``, of each task (experience).
        policy: ``"reservoir"`` (reservoir sampling over all that passed), ``"class-balanced"`` (equal shares of each
            class seen), or ``"refresh"`` (a random choice of the task's new data replaces its earlier one, as in
            Usmanova et al. 2021, section 5.3).
        update: Take in new data after every ``"round"``, or in the last round of an ``"experience"``, so that none
            comes in repeatedly where the rounds of an experience share their data.
        repeat: Whether the remembered samples are repeated until they are as many as the buffer has been offered: the
            past weighs as if nothing had been dropped. For ``"reservoir"`` only.
        base: Whether every client's buffer begins with the samples of the stream's base session.
        buffer: A buffer of Avalanche's in place of ``max_size`` and ``policy``: ``ReservoirSamplingBuffer``,
            ``ClassBalancedBuffer``, ``ExperienceBalancedBuffer`` (what is taken in at once is an experience) or
            ``ParametricBuffer``, whose strategy gets the module, with the client's state, as ``strategy.model``.

    Raises:
        TypeError: If ``buffer`` wants Avalanche's own training loop.
        ValueError: If an argument is out of range, or there is no base session to begin with.

    Example:
        >>> Replay(max_size=10, policy="refresh", update="round").max_size
        10
    """

    needs: ClassVar[Needs] = Needs(dicts=True)

    max_size: int | float = argument(200, memory_size)  # jsonargparse takes the first type that fits
    policy: Policy = argument("class-balanced", one_of, get_args(Policy))
    update: Literal["round", "experience"] = argument("experience", one_of, ("round", "experience"))
    repeat: bool = False
    base: bool = False
    buffer: ExemplarsBuffer | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.buffer is not None:
            check_buffer(self.buffer)
            if self.repeat:
                raise ValueError("Expected no `repeat` beside `buffer` but got both. Use `policy` and `max_size`.")
            self.max_size = self.buffer.max_size
        if self.repeat and self.policy != "reservoir":
            raise ValueError(f'Expected `policy="reservoir"` to `repeat` remembered samples but got "{self.policy}".')

    def hparams(self) -> dict[str, Any]:
        return super().hparams() | ({"policy": type(self.buffer).__name__} if self.buffer is not None else {})

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self.base or trainer.ckpt_path is not None:
            return
        stream: Any = trainer.datamodule  # type: ignore[attr-defined]
        federation = federation_of(trainer)
        if federation is None or not len(stream.plan.base):
            raise ValueError(
                'Expected a federation whose stream has a base session, as `scenario="odfcl"` has, for `base=True` but '
                f"got {stream}. Leave `base` out."
            )
        data = stream.take(stream.plan.base)
        for name in stream.plan.clients:
            known = not federation.hosts(name) or federation.server.store.memory(name, self.section)
            if not known:  # else of an earlier fit, which this one goes on from
                part = ClientRound(name, round=0, stream_samples=stream.plan.samples_of(name))
                generator = torch.Generator().manual_seed(seed_of(federation.seed, name, "base session"))
                client = Client(part=part, module=pl_module, federation=federation, generator=generator)
                federation.server.store.remember(name, self.section, self.end_round(client, entries(pl_module), data))

    def rehearse(self, client: Client) -> tuple[Tensor, Tensor] | dict[str, Tensor] | None:
        memory = client.memory
        if not memory:
            return None
        names = [name for name in memory if name.startswith(_SAMPLE)]
        chosen = {name: memory[name] for name in names or ("x", "y")}
        if self.repeat:
            first = next(iter(chosen.values()))
            times = torch.arange(int(memory["seen"]), device=first.device) % len(first)
            chosen = {name: value[times] for name, value in chosen.items()}
        if not names:
            return chosen["x"], chosen["y"]
        return {name.removeprefix(_SAMPLE): value for name, value in chosen.items()}

    def _size(self, part: ClientRound) -> int:
        if isinstance(self.max_size, int):
            return self.max_size
        if not part.stream_samples:
            raise ValueError(
                f"Expected `max_size` to be a number of samples but got the share {self.max_size}: only a "
                "`FederatedStream` tells how many samples there will be."
            )
        return max(1, round(self.max_size * part.stream_samples))

    def end_round(self, client: Client, own: State, data: Batch) -> Memory:
        part = client.part
        if self.update == "experience" and not part.last_round:
            return client.memory
        samples = _entries(data)
        first = next(iter(samples.values()))
        device, size = first.device, self._size(part)
        memory = {name: value.to(device) for name, value in client.memory.items()}
        new = {**samples, "task": torch.full((len(first),), part.experience, device=device)}
        labels = part.labels if len(part.labels) == len(first) else samples.get("y", first)
        if not _are_classes(samples.get("y")):
            new["class"] = labels.to(device) if _are_classes(labels) else torch.zeros(len(first), dtype=torch.long)
        if self.buffer is None and self.policy == "refresh":
            chosen = torch.randperm(len(first), generator=client.generator)[:size]
            kept = memory["task"] != part.experience if memory else None
            picked = {name: value[chosen] for name, value in new.items()}
            return {n: torch.cat([memory[n][kept], v]) for n, v in picked.items()} if kept is not None else picked
        seen = len(first) + (int(memory["seen"]) if memory else 0)
        if memory:
            new = {name: torch.cat([memory[name], value]) for name, value in new.items()}
        places: Memory = {name: memory[name].cpu() for name in ("priority", "group") if name in memory}
        labels = new["class"] if "class" in new else new["y"]
        with self._holding(client, own) as model:
            chosen, order = select(
                self.buffer or make_buffer(self.policy),
                size,
                lambda index: _nested(new, index),
                labels.cpu(),
                new["task"].cpu(),
                places,
                Agent(self.buffer, model, part.experience),
                client.generator,
            )
        return {**{name: value[chosen] for name, value in new.items()}, **order, "seen": torch.tensor(seen)}

    @contextmanager
    def _holding(self, client: Client, own: State) -> Iterator[L.LightningModule | None]:
        """The module with the client's state, if a selection strategy may look at it; afterwards it is as before."""
        if self.buffer is None:
            yield None
            return
        module = client.module
        before = {name: value.detach().clone() for name, value in entries(module).items()}
        modes = {part: part.training for part in module.modules()}
        load_entries(module, own)
        try:
            yield module
        finally:
            load_entries(module, before)
            for part, training in modes.items():
                part.training = training


def _entries(data: Batch) -> Memory:
    if isinstance(data, Mapping):
        return {f"{_SAMPLE}{name}": value for name, value in data.items()}
    if len(data) != 2:
        raise TypeError(f"Expected samples `[x, y]` for `Replay` but got {len(data)} parts. Return pairs instead.")
    return {"x": data[0], "y": data[1]}


def _nested(entries: Memory, index: int) -> Any:
    names = [name for name in entries if name.startswith(_SAMPLE)]
    return {name.removeprefix(_SAMPLE): entries[name][index] for name in names} if names else entries["x"][index]


def _are_classes(y: Tensor | None) -> bool:
    return y is not None and y.dim() == 1 and not y.is_floating_point()
