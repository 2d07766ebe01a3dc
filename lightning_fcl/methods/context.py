"""What a method sees of a client, of its steps, and of the server."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from lightning_fcl.data.batching import Batch, index_nested
from lightning_fcl.data.client_round import ClientRound, SampleHistory
from lightning_fcl.data.trainer_access import find_stream
from lightning_fcl.errors import InvalidStateError
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.federation.protocols import FederationProtocol
from lightning_fcl.methods.functional import LossFn, OutputFn
from lightning_fcl.rng import derive_seed, global_seed


class Client:
    """A client, as the functions of one method see it.

    Args:
        method_state: What it remembers for the method: `Method.prepare_client_state` and `Method.update_client_state`
            give what it is then. What is changed in its tensors in place lasts.
        received_state: The state that it has received at the start of the round, with what the server keeps for
            methods.
        client_round: Its part in the round: its name, experience and labels.
        module: The module that the Trainer trains. Where clients train one at a time, the client's state is in it.
        federation: The federation; None in a plain Trainer.
        is_active: Whether it uses the method.
        section_name: The name of the method's section in what client and server keep.
        generator: Draws whatever is random when its round ends; None: one of client, round and section.

    Attributes:
        batch: The batch at hand.
        local_epoch: The local epoch of it, from 0.
        num_steps: Optimizer steps that it has taken in the round, known when its round ends.
        missed_sync: Whether the server has not heard of the round, known then, too.
        result: In `Method.end_experience` of a method that accumulates samples, the result of the experience's earlier
            rounds that ``data`` adds to; {} if ``data`` has all samples of the experience so far.
        reply: What the server has sent for `Method.prepare_client_state` at the start of the round, see `Method.reply`.
        may_end: Whether the client's experience may end with the round.

    Example:
        >>> client = Client(client_round=ClientRound("site-a", round_idx=2))
        >>> client.client_round.round_idx, client.method_state
        (2, {})
    """

    def __init__(
        self,
        method_state: StateSection | None = None,
        received_state: State | None = None,
        client_round: ClientRound | None = None,
        module: L.LightningModule | None = None,
        federation: FederationProtocol | None = None,
        is_active: bool = True,
        section_name: str = "",
        generator: torch.Generator | None = None,
    ) -> None:
        self.method_state = {} if method_state is None else method_state
        self.received_state = {} if received_state is None else received_state
        self.federation = federation
        self.is_active = is_active
        self.batch: Any = None
        self.local_epoch, self.num_steps, self.missed_sync = 0, 0, False
        self.result: StateSection = {}
        self.reply: State = {}
        self.may_end = True
        self._part, self._module, self._section, self._generator = client_round, module, section_name, generator
        self._history: SampleHistory | None = None
        self._make_history: Callable[[], SampleHistory | None] | None = None

    @property
    def client_round(self) -> ClientRound:
        """Its part in the round.

        Raises:
            RuntimeError: Where several clients train side by side, and this stands for all of them.
        """
        if self._part is None:
            raise InvalidStateError(
                "Expected one client for `client.client_round` but several train side by side.",
                hint="Store the values for the step in the memory that `prepare_client_state` returns, or set "
                "`vectorizable = "
                "False`.",
            )
        return self._part

    @client_round.setter
    def client_round(self, client_round: ClientRound) -> None:
        self._part = client_round

    @property
    def module(self) -> L.LightningModule:
        """The module that the Trainer trains."""
        if self._module is None:
            raise InvalidStateError(
                "Expected a client of a Trainer for `client.module` but got one of none.", argument="module"
            )
        return self._module

    @property
    def server_state(self) -> State:
        """What it has received of the method's `Method.init_server_state`, by name."""
        return strip_prefix(self.received_state, self._section)

    @property
    def history(self) -> SampleHistory | None:
        """The numbers of the round's samples and of earlier ones.

        None in a plain Trainer without a `FederatedStream`, where samples have no numbers.
        """
        if self._make_history is not None:
            self._history, self._make_history = self._make_history(), None
        return self._history

    def set_history(self, make: Callable[[], SampleHistory | None]) -> None:
        """Let `history` be the result of ``make``, which is called when the history is first read."""
        self._make_history = make

    @property
    def is_new_experience(self) -> bool:
        """Whether the ``experience`` in its memory, if there is any, is an earlier one."""
        return self.client_round.experience_idx > int(self.method_state.get("experience", -1))

    def new_samples(self, data: Batch) -> Batch:
        """Return those of the round's samples that are in no earlier round that the client trained in.

        In a plain Trainer without a `FederatedStream`, whose samples have no numbers, all samples of an epoch are new.
        """
        return data if self.history is None else self.select_samples(data, self.history.new)

    def select_samples(self, data: Batch, mask: Tensor) -> Batch:
        """Return the round's samples for which ``mask``, shape (n,), is true; ``client_round`` gets their labels."""
        if bool(mask.all()):
            return data
        if self._part is not None and len(self._part.labels) == len(mask):
            self._part = replace(self._part, labels=self._part.labels[mask])
        return index_nested(data, mask.nonzero()[:, 0])

    @property
    def seed(self) -> int:
        """Seed of the draws of methods."""
        if self.federation is not None:
            return self.federation.seed
        attached = self._module is not None and self._module._trainer is not None
        stream = find_stream(self.module.trainer) if attached else None
        return global_seed() if stream is None else stream.seed

    @property
    def generator(self) -> torch.Generator:
        """Draws whatever is random when its round ends."""
        if self._generator is None:
            seed = derive_seed(self.seed, self.client_round.client_id, self.client_round.round_idx, self._section)
            self._generator = torch.Generator().manual_seed(seed)
        return self._generator


def _elsewhere(x: Any, *args: object, **kwargs: object) -> Tensor:
    raise InvalidStateError(
        "Expected a step of a module, which has outputs on other samples, too, but got one of none."
    )


@dataclass
class Step:
    """One optimisation step of one client, as a method sees it.

    Args:
        params: The student's trainable parameters by name, part of the graph.
        received_state: The state that the client received at the start of the round.
        x: The batch's inputs, shape (batch, ...).
        output: The student's output on ``x``, shape (batch, classes).
        teacher_forward: ``teacher_forward(state, x)``: a teacher, the module with another state, in evaluation mode,
            without gradient.
        forward_fn: ``forward_fn(x)``: the student's output on other samples, part of the graph.
        embed_fn: ``embed_fn(x)``: what the module's `embed` makes of them, likewise.
        loss_fn: ``loss_fn(x, y)``: the mean task loss on other samples, in the module's present mode.
        sample_weight: Share of every sample in the batch's mean, shape (batch,), adding up to 1; None means equal
            shares.
        y: The batch's targets, shape (batch, ...); None where the batch is no pair.
        replay_samples: Replay samples drawn for this step, by name, each of shape (replay_batch_size, ...). Empty if
            the client has none yet. See `Method.replay_batch_size`.
        replay_weight: 1 if there are replay samples, 0 otherwise.
    """

    params: Mapping[str, Tensor]
    received_state: Mapping[str, Tensor]
    x: Any
    output: Tensor
    teacher_forward: Callable[[Mapping[str, Tensor], Any], Tensor]
    forward_fn: OutputFn = _elsewhere
    embed_fn: OutputFn = _elsewhere
    loss_fn: LossFn = _elsewhere
    sample_weight: Tensor | None = None
    y: Tensor | None = None
    replay_samples: Mapping[str, Tensor] | None = None
    replay_weight: Tensor | float = 0.0
    _why: str = field(default="", repr=False)  # there is no batch

    def without_batch(self, reason: str) -> Step:
        """The same step without ``x`` and ``output``; who asks for them all the same gets a RuntimeError."""
        other = copy.copy(self)
        del other.x, other.output
        other._why = reason
        return other

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor:
            if name in ("x", "output"):
                raise InvalidStateError(self._why, argument=name)
            raise AttributeError(name)

    def mean(self, values: Tensor) -> Tensor:
        """Mean of per-sample ``values``, shape (batch,), over the batch's real samples."""
        return values.mean() if self.sample_weight is None else (values * self.sample_weight).sum()


@dataclass(frozen=True)
class Server:
    """The server when a round's uploads have come together, as `Method.process_aggregate` of one method sees it.

    Args:
        previous_state: Its state when the round began, with what it kept for methods.
        state: Its state now, as reductions, its optimizer and the turns of methods before this one have made it.
        server_state: What it keeps for the method, by name: what is put there it keeps from then on.
        participation_rate: Share of the stream's clients whose uploads were taken, above 0.
        ends: Whether the experience of some client ends with the round.
        module: The module that the Trainer trains.
        generator: Draws whatever is random, by the round and the method's section.

    Example:
        >>> begun, state = {"w": torch.zeros(1)}, {"w": torch.ones(1)}
        >>> server = Server(begun, state, {}, 0.5, L.LightningModule(), torch.Generator())
        >>> {name: (value + server.previous_state[name]) / 2 for name, value in server.state.items()}  # half the way
        {'w': tensor([0.5000])}
    """

    previous_state: State
    state: State
    server_state: State
    participation_rate: float
    module: L.LightningModule
    generator: torch.Generator
    ends: bool = True


def strip_prefix(tensors: Mapping[str, Tensor], prefix: str) -> State:
    """The entries of a memory below ``prefix``, without it.

    Example:
        >>> strip_prefix({"own.w": torch.ones(1), "seen": torch.zeros(2)}, "own")
        {'w': tensor([1.])}
    """
    return {name[len(prefix) + 1 :]: value for name, value in tensors.items() if name.startswith(f"{prefix}.")}


def zeros_like_state(state: Mapping[str, Tensor]) -> State:
    """Zeros in place of a state's numbers.

    Example:
        >>> zeros_like_state({"w": torch.ones(1)})
        {'w': tensor([0.])}
    """
    return {name: torch.zeros_like(value) for name, value in state.items()}


def with_prefix(state: Mapping[str, Tensor], prefix: str) -> StateSection:
    """A copy of a state as entries of a memory below ``prefix``.

    Example:
        >>> with_prefix({"w": torch.ones(1)}, "own")
        {'own.w': tensor([1.])}
    """
    return {f"{prefix}.{name}": value.detach().clone() for name, value in state.items()}


def without_call(module: nn.Module) -> str:
    """Why a step has no ``x`` and ``output``, with a place for the name of the method that asks for them."""
    return (
        f"Expected `{type(module).__name__}.training_step` to call `self(x)`, whose output `%s` needs, but it did not."
    )


def is_labelled(batch: Batch) -> bool:
    """Whether a batch is a pair of inputs and a tensor of targets."""
    return isinstance(batch, list | tuple) and len(batch) == 2 and isinstance(batch[1], Tensor)
