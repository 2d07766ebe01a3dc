"""What every federated or continual method is: a callback made of pure functions on tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_fcl.data.client_round import ClientRound, current_round
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.federation.aggregation import State, entries
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.federation.server import own_entries
from lightning_fcl.methods.functional import GradientOf, LossOf, gradient_of, loss_of, teacher_of
from lightning_fcl.methods.projection import flatten, unflatten
from lightning_fcl.randomness import seed_of, start_randomness


@dataclass
class Step:
    """One optimisation step of one client, as a method sees it.

    Args:
        params: The student's trainable parameters by name, part of the graph.
        server: The state that the client received at the start of the round.
        x: The batch's inputs, shape (batch, ...).
        output: The student's output on ``x``, shape (batch, classes).
        predict: ``predict(state, x)`` is the output of the same module with another state, in evaluation mode and
            without gradient: a teacher.
        weight: Share of every sample in the batch's mean, shape (batch,), adding up to 1; None means equal shares.
        y: The batch's targets, shape (batch, ...); None where the batch is no pair.
        loss_of: ``loss_of(x, y)`` is the mean task loss on other samples, in the module's present mode; it changes no
            buffer or state of a random number generator. None in a cohort.
    """

    params: Mapping[str, Tensor]
    server: Mapping[str, Tensor]
    x: Any
    output: Tensor
    predict: Callable[[Mapping[str, Tensor], Any], Tensor]
    weight: Tensor | None = None
    y: Tensor | None = None
    loss_of: LossOf | None = None

    def mean(self, values: Tensor) -> Tensor:
        """Mean of per-sample ``values``, shape (batch,), over the batch's real samples."""
        return values.mean() if self.weight is None else (values * self.weight).sum()


class Method(Callback):
    """A federated or continual learning method: what it adds to the loss, does to the gradient, mixes in and remembers.

    Subclasses override some of `begin`, `task_weight`, `penalty`, `project`, `rehearse`, `finish`, `conclude`, `send`
    and `personal`, functions of their arguments: what a client's turn leaves in the method itself, `start` forgets, and
    what belongs to the server is in `state_dict`. They run in a plain Trainer (a round is an epoch, the server model is
    the model at its start), in a federation, and vectorised over a cohort of clients; a method that overrides `project`
    or `send`, one client at a time.

    Args:
        clients: Who uses the method: ``"all"``, a list of client ids, or ``"unbalanced"``: only a client whose data of
            the round is not balanced over all classes (the ``/FT`` rows of Usmanova et al. 2021: the others fine-tune).

    Raises:
        ValueError: If ``clients`` is none of these.
    """

    def __init__(self, clients: Literal["all", "unbalanced"] | Sequence[str] = "all") -> None:
        if isinstance(clients, str) and clients not in ("all", "unbalanced"):
            raise ValueError(f'Expected `clients` to be "all", "unbalanced" or a list of ids but got `{clients}`.')
        self.clients = clients if isinstance(clients, str) else [str(client) for client in clients]
        self.memory: Memory = {}
        self.server: State = {}
        self._module: L.LightningModule | None = None
        self._active = True
        self._federated = False
        self._fits = 0
        self._unfinished: tuple[Memory, ClientRound] | None = (
            None  # of a plain Trainer's epoch that may have been the last
        )
        self._seen: list[tuple[Any, Tensor]] = []
        self._hook: RemovableHandle | None = None
        self._call: tuple[Any, Tensor] | None = None
        self._batch: Any = None

    # The method: pure functions, to be overridden.

    def begin(self, memory: Memory, server: State, client_round: ClientRound) -> Memory:
        """The client's memory at the start of a round, after the download of ``server``."""
        return memory

    def task_weight(self) -> float:
        """Factor of the task loss."""
        return 1.0

    def penalty(self, memory: Memory, step: Step) -> Tensor | float:
        """What is added to the weighted task loss, a scalar."""
        return 0.0

    def project(self, memory: Memory, gradient: Tensor, gradient_of: GradientOf) -> Tensor:
        """What becomes of the gradient of a step, before it is clipped.

        Args:
            memory: The client's memory.
            gradient: The gradient of the methods' loss on the batch (with ``accumulate_grad_batches``, on the batches
                of the step), of all trainable parameters that have one, as one vector.
            gradient_of: ``gradient_of(x, y)`` is the gradient of the mean task loss on other samples, at the present
                parameters (at those of ``state``, or of another ``loss``, if they are given: `GradientOf`) and in the
                module's present mode, which in training is training mode, as in the code of GEM's authors: dropout
                drops, and batch normalisation takes the statistics of ``x``. It changes no gradient, buffer or state of
                a random number generator.

        Returns:
            Of the same shape; ``gradient`` itself for no change.
        """
        return gradient

    def rehearse(self, memory: Memory) -> tuple[Tensor, Tensor] | None:
        """Remembered samples ``(x, y)`` to train on together with the round's data."""
        return None

    def finish(
        self, memory: Memory, own: State, data: Any, client_round: ClientRound, generator: torch.Generator
    ) -> Memory:
        """The client's memory after its local training, which left the model in state ``own``."""
        return memory

    def conclude(
        self, memory: Memory, own: State, data: Any, client_round: ClientRound, generator: torch.Generator
    ) -> Memory:
        """The memory of a client whose experience ends with a round that it was not drawn for.

        Args:
            memory: The client's memory.
            own: The server state after the round, and the client's own entries.
            data: The client's data of the round.
            client_round: The client's part in the round, had it been drawn.
            generator: Draws whatever is random.
        """
        return memory

    def send(self, memory: Memory, own: State) -> State:
        """What a client uploads in place of the state ``own`` that its local training ended with, which it keeps.

        The client's state is in the module. A method that overrides it trains one client at a time.
        """
        return own

    def personal(self, memory: Memory, state: State) -> State:
        """The state that a client predicts with.

        Args:
            memory: The client's memory.
            state: What it would begin a round with: the server's state and the client's own entries.

        Returns:
            ``state`` itself for no change.
        """
        return state

    def applies_to(self, client_round: ClientRound) -> bool:
        """Whether the client uses the method in this round."""
        if self.clients == "unbalanced":
            return not client_round.balanced
        return self.clients == "all" or client_round.client in self.clients

    def remembers(self, client_round: ClientRound) -> bool:
        """Whether the client keeps a memory for the method: who never uses it has none."""
        return isinstance(self.clients, str) or client_round.client in self.clients

    def local_epochs(self, client_round: ClientRound) -> int | None:
        """Passes over the client's data in this round; None: as many as the strategy says."""
        return None

    def settings(self) -> dict[str, Any]:
        """The method's arguments, by name."""
        plain = (bool, int, float, str, list)
        return {n: value for n, value in vars(self).items() if not n.startswith("_") and isinstance(value, plain)}

    @property
    def shapes_loss(self) -> bool:
        """Whether the method changes the loss at all."""
        return type(self).penalty is not Method.penalty or self.task_weight() != 1

    @property
    def rehearses(self) -> bool:
        """Whether the method remembers samples to train on."""
        return type(self).rehearse is not Method.rehearse

    @property
    def projects(self) -> bool:
        """Whether the method changes the gradient."""
        return type(self).project is not Method.project

    @property
    def alone(self) -> bool:
        """Whether clients that use the method train one at a time."""
        return self.projects or type(self).send is not Method.send

    @property
    def needs_sample_loss(self) -> bool:
        """Whether the module must state the loss of samples apart from its training step."""
        return self.projects

    @property
    def needs_samples(self) -> bool:
        """Whether `finish` looks at the round's samples."""
        return self.rehearses or self.projects

    @property
    def needs_labels(self) -> bool:
        """Whether batches must be pairs ``[x, y]``."""
        return self.needs_samples

    # The drop-in: the same functions behind Lightning's hooks, for one client at a time.

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Remember the module; before fitting, check that methods go together and the precision allows them."""
        self._module = pl_module
        if stage != "fit":
            return
        from lightning_fcl.simulation.strategy import FederatedStrategy

        self._federated = isinstance(trainer.strategy, FederatedStrategy)
        if str(trainer.precision).startswith("16") and trainer.scaler is not None:
            raise ValueError(
                f"Expected a Trainer without loss scaling for `{type(self).__name__}` but got "
                f'`precision="{trainer.precision}"`. Use "bf16-mixed" or "32-true".'
            )
        if self.needs_sample_loss and not callable(getattr(pl_module, "sample_loss", None)):
            raise ValueError(
                f"Expected a module that states its loss apart for `{type(self).__name__}`, as `Classifier` does in "
                f"`sample_loss(output, y)`, but got a `{type(pl_module).__name__}`. Use a `Classifier`, or define it."
            )
        check_compatible(methods_of(trainer))

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Forget the module and the batch."""
        self._module = self._batch = None

    @property
    def _live(self) -> Any:
        """The module that the Trainer trains, for functions that take losses or gradients of it."""
        if self._module is None:
            name = type(self).__name__
            raise RuntimeError(f"Expected a Trainer to have set up `{name}` but none has. Give it to one, and fit.")
        return self._module

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin a round in a plain Trainer."""
        if not self._federated:
            self._seen = []
            server = {name: value.detach().clone() for name, value in entries(pl_module).items()}
            self.start(self.begin(self.memory, server, self._turn(trainer)), server)

    def start(self, memory: Memory, server: State, active: bool = True) -> None:
        """Make ``memory`` and ``server`` those of the client that trains now."""
        self.memory, self.server, self._active = memory, server, active

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Before a batch: mix in remembered samples (plain Trainer), and watch what goes through the model."""
        if self.needs_labels and not is_labelled(batch):
            length = f" of {len(batch)}" if isinstance(batch, list | tuple) else ""
            raise TypeError(
                f"Expected batches `[x, y]` for `{type(self).__name__}` but got a {type(batch).__name__}{length}. "
                "Return a pair from your dataset."
            )
        if not self._federated:
            if is_labelled(batch):
                # Only some methods look at the samples again.
                self._seen.append((batch[0] if self.needs_samples else None, batch[1]))
            if methods_of(trainer)[-1] is self:  # all have seen the batch as it came
                for method in methods_of(trainer):
                    method._mix(batch, batch_idx)
        self._batch = batch
        if self._hook is None and methods_of(trainer)[0] is self:
            self._hook = pl_module.register_forward_hook(self._watch)
        self._call = None

    def _mix(self, batch: Any, batch_idx: int) -> None:
        if not self.rehearses:
            return
        if not (isinstance(batch, list) and is_labelled(batch)):
            raise TypeError(
                f"Expected a batch `[x, y]`, as the default collate function makes it, for `{type(self).__name__}` but "
                f"got {type(batch).__name__}. Return a pair from your dataset."
            )
        remembered = self.rehearse(self.memory)
        if remembered is None:
            return
        picked = self.pick(len(remembered[1]), len(batch[1]), batch_idx)
        for position, value in enumerate(remembered):
            batch[position] = torch.cat([batch[position], value[picked].to(batch[position].device)])

    def pick(self, remembered: int, batch_size: int, batch_idx: int) -> Tensor:
        """Which remembered samples join a batch in a plain Trainer, whose epochs are not planned.

        As many as the batch has, one window after the next.
        """
        size = min(remembered, batch_size)
        return (torch.arange(size) + batch_idx * size) % remembered

    def _watch(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module.training and torch.is_grad_enabled() and args:
            self._call = (args[0], output)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        """Turn the task loss into the methods' loss, in place."""
        methods = methods_of(trainer)
        if methods[0] is not self or getattr(trainer.strategy, "cohort", None) is not None:
            return
        active = [method for method in methods if method._active]
        if not any(method.shapes_loss for method in active):
            return
        if self._call is None:
            raise RuntimeError(
                f"Expected `{type(pl_module).__name__}.training_step` to call `self(x)`, whose output "
                f"`{type(active[0]).__name__}` needs, but it did not."
            )
        x, output = self._call
        self._call = None
        trainable = {name: p for name, p in pl_module.named_parameters() if p.requires_grad}
        targets = self._batch[1] if is_labelled(self._batch) else None
        step = Step(trainable, self.server, x, output, teacher_of(pl_module), y=targets, loss_of=loss_of(pl_module))
        weight, extra = 1.0, torch.zeros((), device=loss.device)
        for method in active:
            weight *= method.task_weight()
            extra = extra + method.penalty(method.memory, step)
        loss.add_((weight - 1.0) * loss.clone() + extra / trainer.accumulate_grad_batches)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Turn the step's gradient into the method's, in place: after the backward pass, before any clipping."""
        if not (self.projects and self._active):
            return
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        params = {
            name: p
            for name, p in pl_module.named_parameters()
            if p.requires_grad and p.grad is not None and id(p) in stepped
        }
        gradients = {name: p.grad for name, p in params.items() if p.grad is not None}
        if not params:
            return
        gradient = flatten(gradients)
        if not torch.isfinite(gradient.sum()):
            return  # a client that diverges is the federation's to refuse
        projected = self.project(self.memory, gradient, gradient_of(pl_module, params))
        if projected is not gradient:
            for name, value in unflatten(projected, gradients).items():
                gradients[name].copy_(value)

    def on_round_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """In a federation, conclude the experiences that end with a round for clients that were not drawn for it."""
        if type(self).conclude is Method.conclude:
            return
        strategy: Any = trainer.strategy
        stream, federation, name, round = (
            strategy.stream,
            strategy.server,
            type(self).__name__,
            current_round(trainer),
        )
        log = federation.record
        done = {*log.trained, *log.missed, *log.dropped, *strategy.gone(round)}
        for client in stream.plan.train[round]:
            if client in done:
                continue
            client_round = stream.client_round(client, round)
            if not (client_round.last_round and self.remembers(client_round)):
                continue
            data = data_of(trainer, client, round) if self.needs_samples else None
            kept = federation.store[client]
            own = {**entries(pl_module), **own_entries(kept, pl_module.device)}
            generator = torch.Generator().manual_seed(seed_of(strategy.seed, client, round, name))
            memory = self.conclude(kept.get(name, {}), own, data, client_round, generator)
            federation.store[client] = {**kept, name: memory}

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End a round in a plain Trainer."""
        if not self._federated:
            memory, client_round = self.memory, self._turn(trainer)
            self.memory = self._finished(trainer, pl_module, memory, client_round)
            ended = client_round.last_round or isinstance(trainer.datamodule, FederatedStream)  # type: ignore[attr-defined]
            self._unfinished = None if ended else (memory, client_round)

    def _finished(
        self, trainer: L.Trainer, module: L.LightningModule, memory: Memory, client_round: ClientRound
    ) -> Memory:
        """The memory of a plain Trainer's client after an epoch."""
        generator = torch.Generator().manual_seed(client_round.round)
        data = [torch.cat(column) for column in zip(*self._seen, strict=True)] if self.needs_samples else None
        return self.finish(memory, entries(module), data, client_round, generator)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """In a plain Trainer that has stopped before ``max_epochs``, the experience ends with the last epoch."""
        if self._unfinished is not None:
            memory, client_round = self._unfinished
            self.memory = self._finished(trainer, pl_module, memory, replace(client_round, last_round=True))
        self._unfinished = None

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count the experiences of a plain Trainer (one `fit` each) and stop watching the model."""
        self._fits += 1
        self._unhook()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Stop watching the model."""
        self._unhook()

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _turn(self, trainer: L.Trainer) -> ClientRound:
        """The only client of a plain Trainer."""
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(datamodule, FederatedStream):
            return datamodule.client_round(datamodule.plan.clients[0], trainer.current_epoch)
        labels = torch.cat([y for _, y in self._seen]).cpu() if self._seen else torch.empty(0, dtype=torch.long)
        last = trainer.current_epoch + 1 == trainer.max_epochs
        return ClientRound("local", trainer.current_epoch, self._fits, labels, last_round=last, samples=len(labels))

    def state_dict(self) -> dict[str, Any]:
        """What a plain Trainer's checkpoint keeps; a federation keeps the memories of all clients itself."""
        return {} if self._federated else {"memory": self.memory, "fits": self._fits}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a checkpoint's memory."""
        self.memory = state_dict.get("memory", {})
        self._fits = state_dict.get("fits", 0)


def methods_of(trainer: L.Trainer) -> list[Method]:
    """The methods among a Trainer's callbacks, in order."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, Method)]


def data_of(trainer: L.Trainer, client: str, round: int) -> Any:
    """A client's data of a round, the same whenever it is asked for."""
    strategy: Any = trainer.strategy
    with isolate_rng():
        start_randomness(strategy.seed, client, round, "data")
        return strategy.stream.take(strategy.stream.plan.train[round][client])


def check_compatible(methods: Sequence[Method]) -> None:
    """Refuse methods that cannot work together.

    Raises:
        ValueError: If two methods weigh the task loss or change the gradient, or one method is there twice.
    """
    weighing = [type(method).__name__ for method in methods if type(method).task_weight is not Method.task_weight]
    if len(weighing) > 1:
        raise ValueError(
            f"Expected at most one method that weighs the task loss but got {' and '.join(weighing)}. Remove one."
        )
    projecting = [type(method).__name__ for method in methods if method.projects]
    if len(set(projecting)) > 1:
        raise ValueError(
            f"Expected at most one method that changes the gradient but got {' and '.join(projecting)}. Remove one."
        )
    names = [type(method).__name__ for method in methods]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"Expected each method once but got `{name}` {names.count(name)} times. Remove the others."
            )


def section(memory: Mapping[str, Tensor], prefix: str) -> State:
    """The entries of a memory below ``prefix``, without it.

    Example:
        >>> section({"own.w": torch.zeros(1), "count": torch.ones(1)}, "own")
        {'w': tensor([0.])}
    """
    return {name[len(prefix) + 1 :]: value for name, value in memory.items() if name.startswith(f"{prefix}.")}


def remember(state: Mapping[str, Tensor], prefix: str) -> Memory:
    """A copy of a state as entries of a memory below ``prefix``."""
    return {f"{prefix}.{name}": value.detach().clone() for name, value in state.items()}


def with_classes(seen: Tensor, labels: Tensor) -> Tensor:
    """A mask of classes, shape (classes,), with those of some labels; longer where they ask for it.

    Example:
        >>> with_classes(torch.tensor([True, False]), torch.tensor([2]))
        tensor([ True, False,  True])
    """
    size = max(len(seen), int(labels.max()) + 1 if len(labels) else 0)
    more = F.pad(seen, (0, size - len(seen))).clone()
    more[labels] = True
    return more


def is_labelled(batch: Any) -> bool:
    """Whether a batch is a pair of inputs and a tensor of targets."""
    return isinstance(batch, list | tuple) and len(batch) == 2 and isinstance(batch[1], Tensor)
