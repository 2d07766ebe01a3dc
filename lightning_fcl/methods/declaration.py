"""What a federated or continual method declares: functions of their arguments, and what it needs around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_fcl.data.batches import Batch
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.orders import window
from lightning_fcl.errors import check_fields
from lightning_fcl.federation.aggregation import Rules, State
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.methods.functional import GradientOf
from lightning_fcl.methods.step import Part, Running, Step, is_labelled
from lightning_fcl.randomness import Keys

if TYPE_CHECKING:
    from lightning_fcl.simulation.federation import Federation

Clients = Literal["all", "unbalanced"] | Sequence[str]


@dataclass(eq=False, init=False)
class Declaration:
    """A method as pure functions: they get what a client remembers, and give what it remembers or does then.

    Subclass `Method`, which Lightning takes for a callback. The functions run in a plain Trainer (a round is an epoch,
    the server's model is the model at its start), in a federation one client at a time, and vectorised over a cohort of
    clients. What the functions leave in the method itself, `attach` forgets.

    A subclass is a dataclass whose fields are its arguments, checked as `lightning_fcl.errors.argument` declares them,
    or has a constructor of its own.

    Args:
        clients: Who uses the method: ``"all"``, a list of client ids, or ``"unbalanced"``: only a client whose data of
            the round is not balanced over all classes (the ``/FT`` rows of Usmanova et al. 2021: the others fine-tune).
    """

    vectorizable: ClassVar[bool] = True
    """Whether clients that use the method can train side by side; never where it overrides `project` or `upload`."""

    needs_sample_loss: ClassVar[bool] = False
    """Whether the module must state the loss of samples apart from its training step."""

    needs_samples: ClassVar[bool] = False
    """Whether `end_round` looks at the round's samples; always where it overrides `rehearse`, `recall` or `project`."""

    needs_labels: ClassVar[bool] = False
    """Whether batches must be pairs ``[x, y]``; always where it needs samples."""

    needs_logits: ClassVar[bool] = False
    """Whether the module's output must be logits of classes."""

    takes_dicts: ClassVar[bool] = False
    """Whether batches may also be dicts of tensors, in a federation."""

    ends_undrawn: ClassVar[bool] = False
    """Whether `end_round` also runs for clients that were not drawn for the last round of their experience."""

    clients: Clients = field(default="all", kw_only=True)

    recall_size: int = field(default=0, init=False, repr=False)
    """Remembered samples that are drawn for each step, with replacement. See `recall`."""

    reductions: ClassVar[Rules] = {}
    """How the entries of `server_state` come together."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        projects = overrides(cls, "project")
        cls.vectorizable = cls.vectorizable and not (projects or overrides(cls, "upload"))
        cls.needs_sample_loss = cls.needs_sample_loss or projects
        cls.needs_samples = cls.needs_samples or projects or overrides(cls, "rehearse") or overrides(cls, "recall")
        cls.needs_labels = cls.needs_labels or cls.needs_samples

    def __init__(self, clients: Clients = "all") -> None:
        self.clients = clients
        Declaration.__post_init__(self)

    def __post_init__(self) -> None:
        """Check the arguments, and begin with no memory."""
        check_fields(self)
        if not isinstance(self.clients, str):
            self.clients = [str(client) for client in self.clients]
        elif self.clients not in ("all", "unbalanced"):
            raise ValueError(f'Expected `clients` to be "all", "unbalanced" or a list of ids but got `{self.clients}`.')
        self.memory: Memory = {}  # of the client that trains now
        self.fits = 0  # experiences of a plain Trainer
        self.server_entries: State = {}  # what the server keeps for the method, in a plain Trainer
        self.running: Running | None = None

    # A client's round: download, local training, end.

    def on_download(self, memory: Memory, server: State, client_round: ClientRound) -> Memory:
        """The client's memory at the start of a round, after the download of ``server``."""
        return memory

    def attach(self, memory: Memory, server: State, active: bool = True) -> None:
        """Another client trains now, its state in the module: forget what the last one has left in the method.

        What is changed in ``memory`` in place lasts; ``active`` tells whether the client uses the method.
        """

    def local_epochs(self, memory: Memory, client_round: ClientRound) -> int | None:
        """Passes over the client's data in this round; None: as many as the strategy says."""
        return None

    def trains(self, memory: Memory, local_epoch: int) -> Part | None:
        """The part of the module that learns in a local epoch, from 0; None: all of it.

        The rest is frozen to the bit: its parameters get no gradient, its layers keep their statistics. In a federation
        only.
        """
        return None

    def task_weight(self, memory: Memory) -> float:
        """Factor of the task loss."""
        return 1.0

    def penalty(self, memory: Memory, step: Step) -> Tensor | float:
        """What is added to the weighted task loss, a scalar."""
        return 0.0

    def project(self, memory: Memory, gradient: Tensor, gradient_of: GradientOf) -> Tensor:
        """What becomes of the gradient of a step, before it is clipped; ``gradient`` itself for no change.

        Args:
            memory: The client's memory.
            gradient: The gradient of the methods' loss on the batches of the step, of all trainable parameters that
                have one, as one vector.
            gradient_of: ``gradient_of(x, y)`` is the gradient of the mean task loss on other samples, see `GradientOf`,
                in the module's present mode: in training dropout drops, and batch normalisation takes the statistics of
                ``x``, as in the code of GEM's authors. It changes no gradient, buffer or random number generator.
        """
        return gradient

    def rehearse(self, memory: Memory) -> tuple[Tensor, Tensor] | dict[str, Tensor] | None:
        """Remembered samples ``(x, y)``, or dicts as batches are, to train on together with the round's data."""
        return None

    def mix(self, memory: Memory, batch: Batch, batch_idx: int, key: Keys) -> None:
        """Join remembered samples to a batch ``[x, y]``, in place, in a plain Trainer, whose epochs are not planned.

        As many as the batch has, at random: each is there once before any is there again. See `window`.
        """
        if not (isinstance(batch, list) and is_labelled(batch)):
            raise TypeError(
                f"Expected a batch `[x, y]`, as the default collate function makes it, for `{type(self).__name__}` but "
                f"got {type(batch).__name__}. Return a pair from your dataset."
            )
        remembered = self.rehearse(memory)
        if not isinstance(remembered, tuple):
            return
        number = len(remembered[1])
        size = min(number, len(batch[1]))
        picked = torch.from_numpy(window(key, number, size, batch_idx * size))
        for position, value in enumerate(remembered):
            batch[position] = torch.cat([batch[position], value[picked].to(batch[position].device)])

    def recall(self, memory: Memory) -> Mapping[str, Tensor]:
        """Remembered samples by name, each of shape (n, ...), of which `recall_size` are drawn for every step.

        The step's `Step.recalled` has them. Empty where nothing is remembered yet.
        """
        return {}

    def end_round(
        self, memory: Memory, own: State, data: Batch, client_round: ClientRound, generator: torch.Generator
    ) -> Memory:
        """The client's memory after its local training.

        With `ends_undrawn` also that of a client whose experience ends with a round that it was not drawn for:
        ``client_round.drawn`` tells.

        Args:
            memory: The client's memory.
            own: The state that its training has left; of a client that was not drawn, the server's after the round,
                with the client's own entries.
            data: The client's samples of the round, stacked; None where the method does not need them.
            client_round: The client's part in the round.
            generator: Draws whatever is random.
        """
        return memory

    def upload(self, memory: Memory, own: State) -> State:
        """What a client uploads in place of the state ``own`` that its local training ended with, which it keeps.

        The client's state is in the module. A method that overrides it trains one client at a time.
        """
        return own

    def personalize(self, memory: Memory, state: State) -> State:
        """The state that a client predicts with; ``state``, what it would begin a round with, for no change."""
        return state

    # What the method keeps on the server.

    def server_state(self, module: L.LightningModule) -> State:
        """What the server keeps for the method before the first round, by name; `reductions` has a rule for each.

        Clients receive these entries as ``server["<class name>.<name>"]``.
        """
        return {}

    def contribute(self, memory: Memory, own: State, data: Batch, client_round: ClientRound) -> State:
        """What a client uploads to the entries of `server_state`: by name, each of an entry's shape."""
        return {}

    def predict(self, server: State, module: L.LightningModule, x: Tensor, output: Tensor) -> Tensor:
        """Scores of classes by a rule of the method's own, shape (batch, classes); ``output`` itself for no rule.

        The module is in evaluation mode, with the state that predicts; ``output`` is what it makes of ``x``.
        """
        return output

    # Who uses it.

    def applies_to(self, client_round: ClientRound) -> bool:
        """Whether the client uses the method in this round."""
        if self.clients == "unbalanced":
            return not client_round.balanced
        return self.clients == "all" or client_round.client in self.clients

    def remembers(self, client_round: ClientRound) -> bool:
        """Whether the client keeps a memory for the method: who never uses it has none."""
        return isinstance(self.clients, str) or client_round.client in self.clients

    # What it is, and where it runs.

    @property
    def section(self) -> str:
        """The name of the method's section in a client's state."""
        return type(self).__name__

    def hparams(self) -> dict[str, Any]:
        """The method's arguments, by name."""
        plain, counted = (bool, int, float, str, list), "fits"
        given = {name: value for name, value in vars(self).items() if not name.startswith("_") and name != counted}
        return {name: value for name, value in given.items() if isinstance(value, plain)}

    @property
    def module(self) -> L.LightningModule:
        """The module that the Trainer trains, for functions that take losses or gradients of it."""
        return self._now.module

    @property
    def federation(self) -> Federation | None:
        """The federation that the method runs in; None in a plain Trainer."""
        return self._now.federation

    @property
    def active(self) -> bool:
        """Whether the client that trains now uses the method."""
        return self._now.active

    @property
    def batch(self) -> Any:
        """The batch at hand."""
        return self._now.batch

    @property
    def _now(self) -> Running:
        if self.running is None:
            name = type(self).__name__
            raise RuntimeError(f"Expected a Trainer to have set up `{name}` but none has. Give it to one, and fit.")
        return self.running


def overrides(method: Declaration | type[Declaration], function: str) -> bool:
    """Whether a method has a function of its own."""
    kind = method if isinstance(method, type) else type(method)
    own: object = getattr(kind, function)
    return own is not getattr(Declaration, function)


def shapes_loss(method: Declaration, memory: Memory) -> bool:
    """Whether a method changes the loss at all."""
    return overrides(method, "penalty") or method.task_weight(memory) != 1
