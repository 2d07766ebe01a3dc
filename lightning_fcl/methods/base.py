"""What a federated or continual method declares: functions of a client, and what it needs around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

import lightning.pytorch as L
from torch import Tensor

from lightning_fcl.data.batching import Batch
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.errors import InvalidStateError
from lightning_fcl.federation.aggregation import ReductionRules, State
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.federation.protocols import find_federation
from lightning_fcl.methods.context import Client, Server, Step
from lightning_fcl.methods.functional import GradientFn
from lightning_fcl.methods.local_federation import LocalFederation
from lightning_fcl.methods.needs import Needs
from lightning_fcl.validation import validate_fields

Clients = Literal["all", "unbalanced"] | Sequence[str]

Pattern = str | tuple[str, ...]
"""Some of a module's entries: shell-style patterns. One that begins with "!" is all entries but those of the rest."""

ReplaySamples = tuple[Tensor, Tensor] | Mapping[str, Tensor]
"""Replay samples of a client: inputs and targets, or tensors by name, each of shape (n, ...)."""

ReplayTransform = Callable[[Any], Any]
"""A function from one replay sample to another."""


@dataclass(eq=False, init=False)
class MethodBase:
    """A method as functions of a client: its state at the start of a round, and changes of a step or of an upload.

    Subclass `Method`, which Lightning takes for a callback. The functions run in a federation one client at a time,
    vectorized over clients, and in a plain Trainer, which is a federation of one client: a round is an epoch.
    `start_client` resets what the training of one client leaves in the method itself.

    A subclass is a dataclass whose fields are its arguments, checked as `lightning_fcl.validation.validated` declares
    them, or has a constructor of its own.

    Args:
        clients: Who uses the method: ``"all"``, a list of client ids, or ``"unbalanced"``: only a client whose data of
            the round is not balanced over all classes (the ``/FT`` rows of Usmanova et al. 2021: the others fine-tune).
    """

    needs: ClassVar[Needs] = Needs()
    """What it cannot work without. Samples always where it overrides `replay_samples` or `project_gradient`."""

    vectorizable: ClassVar[bool] = True
    """Whether clients that use it can train side by side.

    Never where it projects, trains parts or overrides `begin_step`; where it uploads, only if the class says so.
    """

    accumulates: ClassVar[bool] = False
    """Whether `end_experience` adds samples to the result of the experience's earlier rounds.

    If the rounds of an experience have different samples, such a method gets each of them once. Other methods get the
    samples of the last round that the client trained in.
    """

    clients: Clients = field(default="all", kw_only=True)

    reductions: ClassVar[ReductionRules] = {}
    """How the entries of `init_server_state` come together: by name or shell-style pattern; others by their mean."""

    of_experience: ClassVar[tuple[str, ...]] = ()
    """Patterns of entries that last for one experience, see `lightning_fcl.methods.experience`; all others last."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        projects, needs = overrides_hook(cls, "project_gradient"), cls.needs
        parts = overrides_hook(cls, "trainable_patterns") or overrides_hook(cls, "begin_step")
        samples = needs.round_samples or projects or overrides_hook(cls, "replay_samples")
        cls.needs = replace(
            needs, round_samples=samples, labels=needs.labels or samples, sample_loss=needs.sample_loss or projects
        )
        uploads = overrides_hook(cls, "transform_upload") and "vectorizable" not in vars(cls)
        cls.vectorizable = cls.vectorizable and not (projects or parts or uploads)

    def __init__(self, clients: Clients = "all") -> None:
        self.clients = clients
        MethodBase.__post_init__(self)

    def __post_init__(self) -> None:
        """Check the arguments."""
        validate_fields(self)
        if not isinstance(self.clients, str):
            self.clients = [str(client) for client in self.clients]
        self.local: LocalFederation | None = None  # the state that the method has in a plain Trainer
        self._client: Client | None = None

    # A client's round: download, local training, end.

    def prepare_client_state(self, client: Client) -> StateSection:
        """What the client remembers at the start of a round, when it has received ``client.received_state``."""
        return client.method_state

    def enters_alone(self, client: Client) -> StateSection:
        """What a client adds to its memory when it enters an experience, if others enter it in other rounds.

        A method whose `init_server_state` has entries `of_experience` is rejected then unless it overrides this
        function.
        """
        return {}

    def start_client(self, client: Client) -> None:
        """The client trains now, its state in the module: forget what the last one has left in the method."""

    def task_weight(self, client: Client) -> float:
        """Factor of the task loss."""
        return 1.0

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        """What is added to the weighted task loss, a scalar."""
        return 0.0

    def project_gradient(self, client: Client, gradient: Tensor, gradient_fn: GradientFn) -> Tensor:
        """What becomes of the gradient of a step, before it is clipped; ``gradient`` itself for no change.

        Args:
            client: The client.
            gradient: The gradient of the methods' loss on the batches of the step, of all trainable parameters that
                have one, as one vector.
            gradient_fn: ``gradient_fn(x, y)`` is the gradient of the mean task loss on other samples, see `GradientFn`,
                in the module's present mode: in training dropout drops, and batch normalisation takes the statistics of
                ``x``, as in the code of GEM's authors. It changes no gradient, buffer or random number generator.
        """
        return gradient

    def replay_samples(self, client: Client) -> ReplaySamples | None:
        """Return the client's replay samples: a pair ``(x, y)``, or a dict of tensors by name. None or {}: no samples.

        `replay_batch_size` says how they reach a step, `replay_transform` what changes them there.
        """
        return None

    @property
    def replay_batch_size(self) -> int | None:
        """Number of replay samples that are drawn with replacement for each step, as `Step.replay_samples`.

        None: replay samples join the batches instead. Every sample joins one batch of each local epoch. Without
        a `FederatedStream` epochs are not planned: a batch gets as many replay samples as it has samples.
        """
        return None

    @property
    def replay_transform(self) -> ReplayTransform | None:
        """Callable that changes each replay sample when it reaches a step. None: samples stay as they are.

        The callable gets the input ``x`` of one sample of a pair, or the dict of one sample, without the batch
        dimension. It returns the same shape and dtype.
        """
        return None

    def update_client_state(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        """Return the client's method state after local training.

        Args:
            client: The client.
            trained_state: The client's state after local training.
            data: The client's samples of the round, stacked; None if the method does not need them.
                ``client.new_samples(data)`` are those that come for the first time.
        """
        return client.method_state

    def end_experience(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        """Return the client's method state for later experiences.

        The client continues with this state when it enters a later experience. Nobody knows in which round a client
        trains last in an experience, so that the result is computed after each round, from the state that
        `update_client_state` returned, and replaced if the client trains in the experience again. A client that does
        not train in an experience keeps its state.

        Args:
            client: The client; ``client.method_state`` is what `update_client_state` has returned.
            trained_state: The client's state after local training.
            data: The client's samples, stacked: those of the round, without samples of earlier experiences in a method
                that `accumulates`, or, if ``client.result`` is there, those that are to be added to it.
        """
        return client.method_state

    # What is rare.

    def local_epochs(self, client: Client) -> int | None:
        """Passes over the client's data in this round; None: as many as the strategy says."""
        return None

    def trainable_patterns(self, client: Client) -> Pattern | None:
        """The entries that learn in ``client.local_epoch``; None: all.

        The rest is frozen to the bit: its parameters get no gradient, its layers keep their statistics.
        """
        return None

    def begin_step(self, client: Client) -> None:
        """Prepare for a step with ``client.batch``, which may be changed in place. Clients then train sequentially."""

    def transform_upload(self, client: Client, trained_state: State) -> State:
        """What a client uploads in place of the ``trained_state`` of its local training, which it keeps.

        Where clients train one at a time, as they do unless the class says ``vectorizable = True``, the client's state
        is in the module.
        """
        return trained_state

    def personalize(self, client: Client, state: State) -> State:
        """The state that a client predicts with; ``state``, what it would begin a round with, for no change."""
        return state

    def rescore(self, server: State, module: L.LightningModule, x: Tensor, output: Tensor) -> Tensor:
        """Scores of classes, shape (batch, classes), by a rule of the method's own; ``output`` itself for no rule.

        The module is in evaluation mode, with the state that predicts; ``output`` is what it makes of ``x``, ``server``
        what the server keeps for the method.
        """
        return output

    def restore_module(self, module: L.LightningModule) -> None:
        """The fit has ended, or failed: undo what the method has changed in the module."""

    # What the method keeps on the server.

    def init_server_state(self, module: L.LightningModule) -> State:
        """What the server keeps for the method before the first round, by name; see `reductions`.

        Clients receive it as ``client.server_state``.
        """
        return {}

    def upload_statistics(self, client: Client, trained_state: State, data: Batch) -> State:
        """What a client uploads to the entries of `init_server_state`: by name, each of an entry's shape."""
        return {}

    def contribute_experience(self, client: Client, trained_state: State, data: Batch) -> State:
        """Return what a client adds to entries of `init_server_state` for an experience, each of an entry's shape.

        The reduction of these entries is a sum. If a client trains in several rounds of an experience, it uploads the
        change since its last contribution, and the server has the sum of all clients' latest contributions when the
        experience ends: see `Server.ends`. With full participation a client uploads once, in the last round.

        Args:
            client: The client.
            trained_state: The client's state after local training.
            data: The client's samples, stacked, each of which counts once in an experience.
        """
        return {}

    def message(self, client: Client, trained_state: State) -> State:
        """Return what a client sends to the server at the end of a round beside the entries of `init_server_state`.

        Messages are not aggregated: ``on_round_end`` finds those of the round's accepted uploads in
        ``federation.server.messages[self.section_name]``, by client.

        Args:
            client: The client. ``client.may_end`` tells whether its experience may end with the round.
            trained_state: The client's state after local training.
        """
        return {}

    def reply(self, client: Client) -> State:
        """Return what the server sends a client at the start of a round beside the download of the state.

        `prepare_client_state` finds it in ``client.reply``.
        """
        return {}

    def process_aggregate(self, server: Server) -> State:
        """What the server's model becomes, by name, when the uploads of a round have come together; {} for no change.

        It is there before anybody tests the model, in a simulation as in a deployment.
        """
        return {}

    # Who uses it.

    def applies_to(self, client_round: ClientRound) -> bool:
        """Whether the client uses the method in this round."""
        if self.clients == "unbalanced":
            return not client_round.is_balanced
        return self.clients == "all" or client_round.client_id in self.clients

    # What it is, and where it runs.

    @property
    def section_name(self) -> str:
        """The name of the method's section in a client's state."""
        return type(self).__name__

    def fingerprint(self) -> dict[str, Any]:
        """The method's arguments, by name."""
        plain = (bool, int, float, str, list)
        arguments = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {name: value for name, value in arguments.items() if isinstance(value, plain)}

    @property
    def client(self) -> Client:
        """The client that trains now, for Lightning's hooks."""
        if self._client is None:
            name = type(self).__name__
            raise InvalidStateError(
                f"Expected a client that trains with `{name}` but none does.",
                hint="Use `client` while a Trainer fits with this method, in a hook of a batch.",
                argument="client",
            )
        return self._client

    @client.setter
    def client(self, client: Client | None) -> None:
        self._client = client


def make_client(
    method: MethodBase,
    module: L.LightningModule,
    method_state: StateSection,
    received_state: State | None = None,
    client_round: ClientRound | None = None,
) -> Client:
    """A client as a method sees it, while a Trainer trains the module."""
    active = client_round is None or method.applies_to(client_round)
    return Client(
        method_state, received_state, client_round, module, find_federation(module.trainer), active, method.section_name
    )


def overrides_hook(method: MethodBase | type[MethodBase], hook: str) -> bool:
    """Whether a method has a function of its own."""
    kind = method if isinstance(method, type) else type(method)
    implementation: object = getattr(kind, hook)
    return implementation is not getattr(MethodBase, hook)


def methods_overriding(methods: Iterable[MethodBase], function: str) -> list[MethodBase]:
    """The methods that have a function of their own."""
    return [method for method in methods if overrides_hook(method, function)]


def tracks_rounds(method: MethodBase) -> bool:
    """Return whether a method needs to know in which rounds a client has trained."""
    of_experience = overrides_hook(method, "end_experience") or overrides_hook(method, "contribute_experience")
    return of_experience or method.needs.round_samples or method.needs.numbers


def keeps_client_state(method: MethodBase, client_round: ClientRound) -> bool:
    """Whether a client keeps a memory for a method: who never uses it has none."""
    return isinstance(method.clients, str) or client_round.client_id in method.clients


def changes_loss(method: MethodBase, client: Client) -> bool:
    """Whether a method changes the loss at all."""
    return overrides_hook(method, "penalty") or method.task_weight(client) != 1


def matches(name: str, pattern: Pattern) -> bool:
    """Whether an entry is one of a pattern's.

    Example:
        >>> [matches(name, "!model.head.*") for name in ("model.body.weight", "model.head.weight")]
        [True, False]
    """
    if isinstance(pattern, tuple):
        return any(matches(name, one) for one in pattern)
    return not fnmatchcase(name, pattern[1:]) if pattern.startswith("!") else fnmatchcase(name, pattern)
