"""The classes `Client`, `Step` and `Server`, which are arguments of a method's hooks."""

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
    """A client and its state for one method. The hooks of the method receive this object.

    Args:
        method_state: The client's state for the method, from `Method.prepare_client_state` or
            `Method.update_client_state`. In-place changes of its tensors are kept.
        received_state: The state from which the client starts the round: the server's state, with the client's
            client-local entries. It includes the tensors that the server keeps for methods.
        client_round: The client's `ClientRound`: its id, experience and labels. None in a vectorized step of several
            clients.
        module: The module that the Trainer trains. In sequential training, it has the client's state.
        federation: The federation. None in a plain Trainer.
        is_active: Whether the client uses the method.
        section_name: Name of the method's section in the state of clients and server.
        generator: Random number generator for the hooks at the end of a round. Default: a generator whose seed depends
            on the client, the round and the section.

    Attributes:
        batch: The current batch in sequential training. None in vectorized training.
        local_epoch: Index of the current local epoch in sequential training, from 0.
        num_steps: Number of the client's optimizer steps in the round. The number is complete at the end of the round.
        missed_sync: Whether the server did not receive the client's upload of the round. Set at the end of the round.
        result: The state that `Method.end_experience` returned after earlier rounds of the experience. The hook adds
            ``data`` to this state. {} if ``data`` has all samples of the experience so far, or if the method does not
            accumulate samples.
        reply: Tensors that the server sent for `Method.prepare_client_state` at the start of the round, see
            `Method.reply`.
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
        """The client's `ClientRound`: its id, round, experience and labels.

        Raises:
            RuntimeError: If the client has no `ClientRound`, as in a vectorized step of several clients.
        """
        if self._part is None:
            raise InvalidStateError(
                "Expected a client with a `ClientRound` for `client.client_round`, but this client has none, as in a "
                "vectorized step of several clients.",
                hint="Store the values for the step in the state that `prepare_client_state` returns, or set "
                "`vectorizable = False`.",
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
                "Expected `client.module` to be read while a Trainer is fitting, but the client has no module.",
                argument="module",
            )
        return self._module

    @property
    def server_state(self) -> State:
        """Tensors of `Method.init_server_state` that the client received, by name."""
        return strip_prefix(self.received_state, self._section)

    @property
    def history(self) -> SampleHistory | None:
        """Sample numbers of the current round and of the client's earlier rounds, or None.

        None in a plain Trainer without a `FederatedStream`, where samples have no numbers. Also None in the hooks of
        local training. Also None for a method without `Needs.numbers` and `Needs.round_samples` that overrides neither
        `Method.end_experience` nor `Method.contribute_experience`.
        """
        if self._make_history is not None:
            self._history, self._make_history = self._make_history(), None
        return self._history

    def set_history(self, make: Callable[[], SampleHistory | None]) -> None:
        """Set the function that computes `history` when `history` is first read."""
        self._make_history = make

    @property
    def is_new_experience(self) -> bool:
        """Whether the current experience is later than the entry ``experience`` of the method state.

        True if the method state has no such entry.
        """
        return self.client_round.experience_idx > int(self.method_state.get("experience", -1))

    def new_samples(self, data: Batch) -> Batch:
        """Return the samples of the round that were in no earlier round in which the client trained.

        In a plain Trainer without a `FederatedStream`, samples have no numbers, and all samples of an epoch are
        returned.
        """
        return data if self.history is None else self.select_samples(data, self.history.new)

    def select_samples(self, data: Batch, mask: Tensor) -> Batch:
        """Return the round's samples where ``mask``, shape (n,), is True.

        The labels of all other samples are removed from `client_round`.
        """
        if bool(mask.all()):
            return data
        if self._part is not None and len(self._part.labels) == len(mask):
            self._part = replace(self._part, labels=self._part.labels[mask])
        return index_nested(data, mask.nonzero()[:, 0])

    @property
    def seed(self) -> int:
        """Seed for the random numbers of methods.

        The seed of the federation. In a plain Trainer, the seed of the stream, or the global seed without a stream.
        """
        if self.federation is not None:
            return self.federation.seed
        attached = self._module is not None and self._module._trainer is not None
        stream = find_stream(self.module.trainer) if attached else None
        return global_seed() if stream is None else stream.seed

    @property
    def generator(self) -> torch.Generator:
        """Random number generator for the hooks at the end of the round."""
        if self._generator is None:
            seed = derive_seed(self.seed, self.client_round.client_id, self.client_round.round_idx, self._section)
            self._generator = torch.Generator().manual_seed(seed)
        return self._generator


def _elsewhere(x: Any, *args: object, **kwargs: object) -> Tensor:
    raise InvalidStateError(
        "Expected a step with a module to compute outputs for other samples, but this step was created without a "
        "module. Pass `forward_fn`, `embed_fn` or `loss_fn` to `Step`."
    )


@dataclass
class Step:
    """One optimizer step of one client. The hooks of a method receive this object.

    Args:
        params: The trainable parameters by name, as part of the autograd graph. The module that trains is called the
            student.
        received_state: The state from which the client starts the round, see `Client`.
        x: Inputs of the batch, shape (batch, ...).
        output: The student's output for ``x``. For a classifier, class logits of shape (batch, classes).
        teacher_forward: ``teacher_forward(state, x)`` returns the output of a teacher. The teacher is the module with
            another state, in evaluation mode and without gradient.
        forward_fn: ``forward_fn(x)`` returns the student's output for other samples, as part of the autograd graph.
        embed_fn: ``embed_fn(x)`` returns the student's features, the result of ``embed``, as part of the autograd
            graph.
        loss_fn: ``loss_fn(x, y)`` returns the mean task loss on other samples, in the module's current mode.
        sample_weight: Weight of each sample when averaging over the batch, shape (batch,), with sum 1. None: equal
            weights.
        y: Targets of the batch, shape (batch, ...). None if the batch is not a pair.
        replay_samples: Replay samples drawn for this step, by name, each of shape (replay_batch_size, ...). See
            `Method.replay_batch_size`. Empty or zeros if the client has no replay samples yet. None or empty if the
            method draws no replay samples.
        replay_weight: 1 if the client has replay samples, 0 otherwise.
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
    # The error message if `x` or `output` is read from a step without a batch.
    _why: str = field(default="", repr=False)

    def without_batch(self, reason: str) -> Step:
        """Return the step without ``x`` and ``output``. Reading them raises RuntimeError with ``reason``."""
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
        """Return the mean of per-sample ``values``, shape (batch,), over the batch. Padding samples are left out."""
        return values.mean() if self.sample_weight is None else (values * self.sample_weight).sum()


@dataclass(frozen=True)
class Server:
    """The server after a round's aggregation. The hook `Method.process_aggregate` receives this object.

    Args:
        previous_state: The server's state at the start of the round, including tensors that it keeps for methods.
        state: The current state: after aggregation, the server optimizer's step, and the changes by earlier methods in
            the Trainer's list of callbacks.
        server_state: Tensors that the server keeps for the method, by name. Changes of this dict are kept.
        participation_rate: Share of the stream's clients whose uploads were accepted, above 0.
        ends: Whether the experience of any client ends with the round.
        module: The module that the Trainer trains.
        generator: Random number generator, seeded by the round and the method's section.

    Example:
        >>> begun, state = {"w": torch.zeros(1)}, {"w": torch.ones(1)}
        >>> server = Server(begun, state, {}, 0.5, L.LightningModule(), torch.Generator())
        >>> {name: (value + server.previous_state[name]) / 2 for name, value in server.state.items()}  # their mean
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
    """Return the tensors whose names start with ``prefix`` and a dot, without the prefix in their names.

    Example:
        >>> strip_prefix({"own.w": torch.ones(1), "seen": torch.zeros(2)}, "own")
        {'w': tensor([1.])}
    """
    return {name[len(prefix) + 1 :]: value for name, value in tensors.items() if name.startswith(f"{prefix}.")}


def zeros_like_state(state: Mapping[str, Tensor]) -> State:
    """Return zeros for all tensors of a state.

    Example:
        >>> zeros_like_state({"w": torch.ones(1)})
        {'w': tensor([0.])}
    """
    return {name: torch.zeros_like(value) for name, value in state.items()}


def with_prefix(state: Mapping[str, Tensor], prefix: str) -> StateSection:
    """Return a detached copy of a state with ``prefix`` and a dot before each name.

    Example:
        >>> with_prefix({"w": torch.ones(1)}, "own")
        {'own.w': tensor([1.])}
    """
    return {f"{prefix}.{name}": value.detach().clone() for name, value in state.items()}


def without_call(module: nn.Module) -> str:
    """Return the error message for a ``training_step`` without ``self(x)``.

    The message contains the placeholder ``%s`` for the method's name.
    """
    return (
        f"Expected `{type(module).__name__}.training_step` to call `self(x)`, because `%s` needs the output, but "
        "`training_step` did not call `self(x)`."
    )


def is_labelled(batch: Batch) -> bool:
    """Return whether a batch is a pair of inputs and a tensor of targets."""
    return isinstance(batch, list | tuple) and len(batch) == 2 and isinstance(batch[1], Tensor)
