"""Base class of federated and continual learning methods: the hooks that a method can override."""

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
"""A shell-style pattern of tensor names, or a tuple of patterns.

A leading "!" negates a pattern. A tuple matches a name if any of its patterns matches.
"""

ReplaySamples = tuple[Tensor, Tensor] | Mapping[str, Tensor]
"""Replay samples of a client: a pair of inputs and targets, or tensors by name. Each tensor has shape (n, ...)."""

ReplayTransform = Callable[[Any], Any]
"""A function that changes one replay sample. See `MethodBase.replay_transform`."""


@dataclass(eq=False, init=False)
class MethodBase:
    """Base class of methods, with hooks for client state, optimizer steps, uploads and the server's model.

    Subclass `Method`, which is also a Lightning callback. In a federation, the hooks run in sequential training. If
    `vectorizable` is True, most hooks also run in vectorized training. Most hooks also run in a plain Trainer, which is
    a federation of one client with one round per epoch. If the training of a client changes attributes of the method,
    `start_client` must reset these attributes.

    A subclass with arguments is a dataclass or defines a constructor. The fields of a dataclass are the arguments of
    the method. Declare a field with `lightning_fcl.validation.validated` to check its value.

    Args:
        clients: The clients that use the method: ``"all"``, a list of client ids, or ``"unbalanced"``. With
            ``"unbalanced"``, a client uses the method only if its data of the round is not balanced, see
            `ClientRound.is_balanced`. This is the ``/FT`` variant of Usmanova et al. 2021, where balanced clients
            fine-tune.
    """

    needs: ClassVar[Needs] = Needs()
    """Requirements of the method.

    `Needs.labels` and `Needs.round_samples` are always True if the class overrides `replay_samples` or
    `project_gradient`. `Needs.labels` is also True if `Needs.round_samples` is True. `Needs.sample_loss` is always True
    if the class overrides `project_gradient`.
    """

    vectorizable: ClassVar[bool] = True
    """Whether clients that use the method can train in one vectorized step.

    Always False if the class overrides `project_gradient`, `trainable_patterns` or `begin_step`. If the class overrides
    `transform_upload`, the default is False, and the class can set ``vectorizable = True``.
    """

    accumulates: ClassVar[bool] = False
    """Whether `end_experience` adds new samples to the state that it returned earlier in the experience.

    If True, ``data`` contains only samples that `end_experience` must add to ``client.result``, see `end_experience`.
    If False, ``data`` contains all samples of the round.
    """

    clients: Clients = field(default="all", kw_only=True)

    reductions: ClassVar[ReductionRules] = {}
    """Reductions of the tensors of `init_server_state`, by name or shell-style pattern.

    A tensor that matches no pattern is averaged.
    """

    private_entries: ClassVar[tuple[str, ...]] = ()
    """Name patterns of tensors of `init_server_state` that clients may upload with differential privacy.

    Their updates are clipped together with the update of the module, and noise is added to their sums. The method must
    give useful results with noised tensors. Tensors that clients upload and that match no pattern are rejected.
    """

    citations: ClassVar[tuple[str, ...]] = ()
    """Papers of the method, for `lightning-fcl appendix`: BibTeX entries, or keys of ``evaluation/citations.bib``.

    Subclasses do not inherit this attribute.
    """

    of_experience: ClassVar[tuple[str, ...]] = ()
    """Name patterns of the method's tensors that belong to one experience and are reset in the next experience.

    See `lightning_fcl.methods.experience`.
    """

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
        # In a plain Trainer, `MethodDriver` sets this to the state of the one-client federation.
        self.local: LocalFederation | None = None
        self._client: Client | None = None

    # Hooks of a client's round.

    def prepare_client_state(self, client: Client) -> StateSection:
        """Return the client's method state at the start of a round, after the download.

        ``client.received_state`` is the state from which the client starts the round.
        """
        return client.method_state

    def enters_alone(self, client: Client) -> StateSection:
        """Return tensors to add to the client's method state when the client enters an experience.

        This hook is called only if clients enter the experiences of a stream in different rounds and `of_experience`
        is not empty. In such a stream, a method must override the hook if tensors of `init_server_state` match
        `of_experience`. Otherwise, setup raises ValueError.
        """
        return {}

    def start_client(self, client: Client) -> None:
        """Prepare for a client's local training, after the client's state has been loaded into the module.

        Reset attributes of the method that the training of the previous client changed. Vectorized training does not
        call this hook.
        """

    def task_weight(self, client: Client) -> float:
        """Return the factor by which the task loss is multiplied."""
        return 1.0

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        """Return a scalar to add to the weighted task loss."""
        return 0.0

    def project_gradient(self, client: Client, gradient: Tensor, gradient_fn: GradientFn) -> Tensor:
        """Return the gradient for a step, before gradient clipping. Return ``gradient`` for no change.

        Args:
            client: The client.
            gradient: Gradient of the training loss, including the methods' terms, on the batches of the step. The
                gradient is one vector over all trainable parameters of the optimizer that have a gradient.
            gradient_fn: ``gradient_fn(x, y)`` returns the gradient of the mean task loss on the samples ``x`` and
                ``y``, see `GradientFn`. The module stays in its current mode. In training mode dropout is active, and
                batch normalization uses the statistics of ``x``, as in the code of GEM's authors. The call changes no
                gradient, buffer or random number generator.
        """
        return gradient

    def replay_samples(self, client: Client) -> ReplaySamples | None:
        """Return the client's replay samples: a pair ``(x, y)``, or a dict of tensors by name. None or {}: no samples.

        `replay_batch_size` defines how the samples are used in a step. `replay_transform` can change each sample
        before the step uses it.
        """
        return None

    @property
    def replay_batch_size(self) -> int | None:
        """Number of replay samples drawn with replacement for each step, see `Step.replay_samples`.

        If None, replay samples are added to the batches instead. With a `FederatedStream`, each replay sample is added
        to one batch of each local epoch. Without a stream, each batch of n samples gets n replay samples, or all replay
        samples if there are fewer than n.
        """
        return None

    @property
    def replay_transform(self) -> ReplayTransform | None:
        """Callable that changes each replay sample before a step uses it. None: samples are not changed.

        For a pair ``(x, y)``, the callable gets the input ``x`` of one sample. For a dict, it gets the dict of one
        sample. The values have no batch dimension. The callable must return values of the same shapes and dtypes.
        """
        return None

    def update_client_state(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        """Return the client's method state after local training.

        Args:
            client: The client.
            trained_state: The client's state after local training.
            data: The client's samples of the round, stacked into one batch. None if `Needs.round_samples` is False.
                ``client.new_samples(data)`` returns the samples that the client has not trained on in earlier rounds.
        """
        return client.method_state

    def end_experience(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        """Return the client's method state for later experiences.

        The client uses this state when it enters a later experience. In general, the last round of a client in an
        experience is not known in advance. Therefore, the hook is called after each round that may be this last round.
        If the client trains in the experience again, the new result replaces the earlier result. A client that does not
        train in an experience keeps its state.

        Args:
            client: The client. ``client.method_state`` is the state that `update_client_state` returned.
            trained_state: The client's state after local training.
            data: The client's samples of the round, stacked into one batch. None if `Needs.round_samples` is False. For
                a method with `accumulates`, samples of earlier experiences are left out. If ``client.result`` is not
                empty, ``data`` contains only the samples that the hook must add to ``client.result``.
        """
        return client.method_state

    # Hooks that few methods override.

    def local_epochs(self, client: Client) -> int | None:
        """Return the client's number of local epochs in this round. None: the number that the strategy defines."""
        return None

    def trainable_patterns(self, client: Client) -> Pattern | None:
        """Return patterns of the tensors that are trained in the epoch ``client.local_epoch``. None: all tensors.

        All other parts are frozen and do not change: their parameters get no gradient, and their layers keep their
        statistics.
        """
        return None

    def begin_step(self, client: Client) -> None:
        """Prepare for a step with the batch ``client.batch``. The hook may change this batch in place.

        Clients train sequentially if a method overrides this hook.
        """

    def transform_upload(self, client: Client, trained_state: State) -> State:
        """Return the state that a client uploads.

        ``trained_state`` is the client's state after local training, with the changes by earlier methods in the
        Trainer's list of callbacks. In a federation, the hook changes only the upload. Clients train sequentially
        unless the class sets ``vectorizable = True``. In sequential training, the module contains the client's state.
        """
        return trained_state

    def personalize(self, client: Client, state: State) -> State:
        """Return the state that the client predicts with. Return ``state`` for no change.

        ``state`` is the state from which the client would start a round.
        """
        return state

    def rescore(self, server: State, module: L.LightningModule, x: Tensor, output: Tensor) -> Tensor:
        """Return class scores, shape (batch, classes). Return ``output`` if the method has no prediction rule.

        Args:
            server: Tensors that the server keeps for the method.
            module: The module in evaluation mode, with the state that is used for the prediction.
            x: Inputs.
            output: Output of the module for ``x``.
        """
        return output

    def restore_module(self, module: L.LightningModule) -> None:
        """Undo the method's changes of the module, after a fit has ended or failed."""

    # Hooks for the server.

    def init_server_state(self, module: L.LightningModule) -> State:
        """Return the tensors that the server keeps for the method, by name. `reductions` defines their aggregation.

        The hook is called in each round. The server uses the returned value only for tensors that the server does not
        have yet. Clients receive the tensors as ``client.server_state``.
        """
        return {}

    def upload_statistics(self, client: Client, trained_state: State, data: Batch) -> State:
        """Return a client's upload for tensors of `init_server_state`, by name, with the shapes of these tensors."""
        return {}

    def contribute_experience(self, client: Client, trained_state: State, data: Batch) -> State:
        """Return a client's contribution in an experience to tensors of `init_server_state`, by name.

        Each value has the shape of its tensor. The reduction of these tensors must be a sum. If a client trains in
        several rounds of an experience, the client uploads the change since its last contribution. When the experience
        ends, the server has the sum of the latest contributions of all clients, see `Server.ends`. With full
        participation and the same samples in all rounds of an experience, a client uploads once, in the last round.

        Args:
            client: The client.
            trained_state: The client's state after local training.
            data: The samples of the round that the contribution must count, stacked into one batch. Samples of earlier
                experiences are left out. In the server's sum, each sample of an experience counts once. None if
                `Needs.round_samples` is False.
        """
        return {}

    def message(self, client: Client, trained_state: State) -> State:
        """Return tensors that a client sends to the server at the end of a round, in addition to all other uploads.

        Messages are not aggregated. In ``on_round_end``, ``federation.server.messages[self.section_name]`` contains the
        messages of the round's accepted uploads, by client.

        Args:
            client: The client. ``client.may_end`` is whether the client's experience may end with the round.
            trained_state: The client's state after local training.
        """
        return {}

    def reply(self, client: Client) -> State:
        """Return tensors that the server sends to a client at the start of a round, in addition to the download.

        `prepare_client_state` gets them as ``client.reply``.
        """
        return {}

    def process_aggregate(self, server: Server) -> State:
        """Return changed tensors of the server's model by name, after aggregation. Return {} for no change.

        The changes are applied before any evaluation of the model, both in simulations and in deployments.
        """
        return {}

    # Clients that use the method.

    def applies_to(self, client_round: ClientRound) -> bool:
        """Return whether the client uses the method in this round."""
        if self.clients == "unbalanced":
            return not client_round.is_balanced
        return self.clients == "all" or client_round.client_id in self.clients

    # Names, arguments and the current client.

    @property
    def section_name(self) -> str:
        """Name of the method's section in the state of clients and server."""
        return type(self).__name__

    def fingerprint(self) -> dict[str, Any]:
        """Return the arguments and other public attributes by name, if they are bools, numbers, strings or lists."""
        plain = (bool, int, float, str, list)
        arguments = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {name: value for name, value in arguments.items() if isinstance(value, plain)}

    @property
    def client(self) -> Client:
        """The client that currently trains, for use in Lightning's hooks."""
        if self._client is None:
            name = type(self).__name__
            raise InvalidStateError(
                f"Expected one client that currently trains with `{name}`, but the method has no current client.",
                hint="Read `client` only in batch hooks of sequential training, such as `on_train_batch_start`.",
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
    """Return a client for the hooks of a method, while a Trainer trains the module."""
    active = client_round is None or method.applies_to(client_round)
    return Client(
        method_state, received_state, client_round, module, find_federation(module.trainer), active, method.section_name
    )


def overrides_hook(method: MethodBase | type[MethodBase], hook: str) -> bool:
    """Return whether a method overrides a hook of `MethodBase`."""
    kind = method if isinstance(method, type) else type(method)
    implementation: object = getattr(kind, hook)
    return implementation is not getattr(MethodBase, hook)


def methods_overriding(methods: Iterable[MethodBase], function: str) -> list[MethodBase]:
    """Return the methods that override a hook."""
    return [method for method in methods if overrides_hook(method, function)]


def tracks_rounds(method: MethodBase) -> bool:
    """Return whether a method needs the list of rounds in which a client has trained."""
    of_experience = overrides_hook(method, "end_experience") or overrides_hook(method, "contribute_experience")
    return of_experience or method.needs.round_samples or method.needs.numbers


def keeps_client_state(method: MethodBase, client_round: ClientRound) -> bool:
    """Return whether a client keeps state for a method. False if the client is not in the method's list of clients."""
    return isinstance(method.clients, str) or client_round.client_id in method.clients


def changes_loss(method: MethodBase, client: Client) -> bool:
    """Return whether a method may change the loss of a client."""
    return overrides_hook(method, "penalty") or method.task_weight(client) != 1


def matches(name: str, pattern: Pattern) -> bool:
    """Return whether a tensor name matches a pattern, or one of several patterns.

    Example:
        >>> [matches(name, "!model.head.*") for name in ("model.body.weight", "model.head.weight")]
        [True, False]
    """
    if isinstance(pattern, tuple):
        return any(matches(name, one) for one in pattern)
    return not fnmatchcase(name, pattern[1:]) if pattern.startswith("!") else fnmatchcase(name, pattern)
