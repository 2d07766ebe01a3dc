"""What a method sees of a client, and of the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.federation.protocol import RunsFederation
from lightning_fcl.randomness import seed_of


class Client:
    """A client, as the functions of one method see it.

    Args:
        memory: What it remembers for the method: `Method.on_download` and `Method.end_round` give what it is then.
            What is changed in its tensors in place lasts.
        server: The state that it has received at the start of the round, with what the server keeps for methods.
        part: Its part in the round: its name, experience and labels.
        module: The module that the Trainer trains. Where clients train one at a time, the client's state is in it.
        federation: The federation; None in a plain Trainer.
        active: Whether it uses the method.
        section: The name of the method's section in what client and server keep.
        generator: Draws whatever is random when its round ends; None: one of client, round and section.

    Attributes:
        batch: The batch at hand.
        local_epoch: The local epoch of it, from 0.
        steps: Optimizer steps that it has taken in the round, known when its round ends.
        missed: Whether the server has not heard of the round, known then, too.

    Example:
        >>> client = Client(part=ClientRound("site-a", round=2))
        >>> client.part.round, client.memory
        (2, {})
    """

    def __init__(
        self,
        memory: Memory | None = None,
        server: State | None = None,
        part: ClientRound | None = None,
        module: L.LightningModule | None = None,
        federation: RunsFederation | None = None,
        active: bool = True,
        section: str = "",
        generator: torch.Generator | None = None,
    ) -> None:
        self.memory = {} if memory is None else memory
        self.server = {} if server is None else server
        self.federation = federation
        self.active = active
        self.batch: Any = None
        self.local_epoch, self.steps, self.missed = 0, 0, False
        self._part, self._module, self._section, self._generator = part, module, section, generator

    @property
    def part(self) -> ClientRound:
        """Its part in the round.

        Raises:
            RuntimeError: Where several clients train side by side, and this stands for all of them.
        """
        if self._part is None:
            raise RuntimeError(
                "Expected one client for `client.part` but several train side by side. Keep what a step needs of it in "
                "the memory that `on_download` returns, or set `vectorizable = False`."
            )
        return self._part

    @property
    def module(self) -> L.LightningModule:
        """The module that the Trainer trains."""
        if self._module is None:
            raise RuntimeError("Expected a client of a Trainer for `client.module` but got one of none.")
        return self._module

    @property
    def shared(self) -> State:
        """What it has received of the method's `Method.server_state`, by name."""
        return section(self.server, self._section)

    @property
    def enters_experience(self) -> bool:
        """Whether the ``experience`` in its memory, if there is any, is an earlier one."""
        return self.part.experience > int(self.memory.get("experience", -1))

    @property
    def generator(self) -> torch.Generator:
        """Draws whatever is random when its round ends."""
        if self._generator is None:
            part, federation = self.part, self.federation
            seed = (
                part.round if federation is None else seed_of(federation.seed, part.client, part.round, self._section)
            )
            self._generator = torch.Generator().manual_seed(seed)
        return self._generator


@dataclass(frozen=True)
class Server:
    """The server when a round's uploads have come together, as `Method.server_turn` of one method sees it.

    Args:
        begun: Its state when the round began, with what it kept for methods.
        state: Its state now, as reductions, its optimizer and the turns of methods before this one have made it.
        kept: What it keeps for the method, by name: what is put there it keeps from then on.
        share: Share of the stream's clients whose uploads were taken, above 0.
        module: The module that the Trainer trains.
        generator: Draws whatever is random, by the round and the method's section.

    Example:
        >>> begun, state = {"w": torch.zeros(1)}, {"w": torch.ones(1)}
        >>> server = Server(begun, state, {}, 0.5, L.LightningModule(), torch.Generator())
        >>> {name: (value + server.begun[name]) / 2 for name, value in server.state.items()}  # half the way
        {'w': tensor([0.5000])}
    """

    begun: State
    state: State
    kept: State
    share: float
    module: L.LightningModule
    generator: torch.Generator


def section(memory: Mapping[str, Tensor], prefix: str) -> State:
    """The entries of a memory below ``prefix``, without it.

    Example:
        >>> section({"own.w": torch.ones(1), "seen": torch.zeros(2)}, "own")
        {'w': tensor([1.])}
    """
    return {name[len(prefix) + 1 :]: value for name, value in memory.items() if name.startswith(f"{prefix}.")}


def zeros(state: Mapping[str, Tensor]) -> State:
    """Zeros in place of a state's numbers.

    Example:
        >>> zeros({"w": torch.ones(1)})
        {'w': tensor([0.])}
    """
    return {name: torch.zeros_like(value) for name, value in state.items()}


def remember(state: Mapping[str, Tensor], prefix: str) -> Memory:
    """A copy of a state as entries of a memory below ``prefix``.

    Example:
        >>> remember({"w": torch.ones(1)}, "own")
        {'own.w': tensor([1.])}
    """
    return {f"{prefix}.{name}": value.detach().clone() for name, value in state.items()}
