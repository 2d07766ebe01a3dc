"""Local training of many clients at once: their parameters stacked, or one reservoir for all."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.federation.aggregation import State, entries
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.methods.functional import teacher_of
from lightning_fcl.methods.method import Method, Step, methods_of
from lightning_fcl.models.ridge import solve, square
from lightning_fcl.tasks.classification import Classifier
from lightning_fcl.tasks.reservoir import ReservoirTask

# Optimizers whose update of one number depends on that number's history alone: they do the same on stacks.
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
)
RANDOM = "its layers draw random numbers"
# Whoever overrides one of these looks at the gradients or the step of one model at a time.
STEP_HOOKS = (
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "configure_gradient_clipping",
    "optimizer_step",
)
# Whoever overrides one of these sees the batch of one client at a time.
BATCH_HOOKS = ("on_train_batch_start", "on_train_batch_end")
TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def why_not_vectorized(module: L.LightningModule, optimizer: Optimizer, stream: FederatedStream) -> str | None:
    """The reason why a module's clients must train one at a time, or None.

    A module can be vectorised if it is a `Classifier` that does not override `training_step`, its optimizer is one of
    `ELEMENTWISE`, nobody looks at one model's batches or gradients, and a trial on a few samples succeeds.
    """
    trainer = module.trainer
    alone = next((method for method in methods_of(trainer) if method.alone), None)
    if alone is not None:
        what = "changes the gradient of" if alone.projects else "trains"
        return f"`{type(alone).__name__}` {what} one client at a time"
    if not isinstance(module, Classifier):
        return f"`{type(module).__name__}` is no `Classifier`, which states its loss apart"
    if type(module).training_step is not Classifier.training_step:
        return f"`{type(module).__name__}` overrides `training_step`"
    if not module.automatic_optimization:
        return f"`{type(module).__name__}` optimises by hand"
    if type(optimizer) not in ELEMENTWISE:
        return f"`{type(optimizer).__name__}` does not update each number on its own"
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm != "value":
        return "gradient clipping by norm would clip all clients together"
    if trainer.precision != "32-true":
        return f'the precision is "{trainer.precision}"'
    return _watching(module, stream) or _trial(module, optimizer, stream)


def _watching(module: L.LightningModule, stream: FederatedStream) -> str | None:
    """Who overrides a hook that shows one client at a time."""
    callbacks: list[Callback] = module.trainer.callbacks  # type: ignore[attr-defined]
    own = [c for c in callbacks if not type(c).__module__.startswith(("lightning.", "lightning_fcl."))]
    watchers: list[tuple[object, type, tuple[str, ...]]] = [
        (module, L.LightningModule, STEP_HOOKS + BATCH_HOOKS + TRANSFER_HOOKS),
        (stream, L.LightningDataModule, TRANSFER_HOOKS),
        *((callback, Callback, STEP_HOOKS + BATCH_HOOKS) for callback in own),
    ]
    for watcher, plain, hooks in watchers:
        for hook in hooks:
            if getattr(type(watcher), hook, None) is not getattr(plain, hook, None):
                return f"`{type(watcher).__name__}` overrides `{hook}`"
    return None


def _trial(module: Classifier, optimizer: Optimizer, stream: FederatedStream) -> str | None:
    """What goes wrong when two clients train on two samples each, vectorised, if anything."""
    indices = next(rows for current in stream.plan.train for rows in current.values())[:2]
    data = stream.take(indices)
    if not (isinstance(data, list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)):
        return "its batches are not pairs of tensors"
    x, y = (part.to(module.device) for part in data)
    copied = copy.deepcopy(module).train()
    state = {name: value.detach().clone() for name, value in entries(module).items()}
    weight = torch.full((2, len(y)), 1 / len(y), device=module.device)
    with isolate_rng(), torch.enable_grad():
        try:
            twins = dict(zip(map(id, module.parameters()), copied.parameters(), strict=True))
            cohort = Cohort(copied, [state, state], with_parameters(optimizer, twins), [], [[], []], [[], []])
            cohort.loss(x.expand(2, *x.shape), y.expand(2, *y.shape), weight, randomness="error")
        except Exception as error:  # whatever it is, this module cannot be vectorised
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            return RANDOM if "randomness" in text else f"vectorising it fails ({text})"
        copied(x)
    if any(not torch.equal(value, state[name]) for name, value in entries(copied).items()):
        return "its forward changes buffers"
    return None


def with_parameters(optimizer: Optimizer, twins: Mapping[int, nn.Parameter]) -> Optimizer:
    """The same optimizer for other parameters: ``twins`` by the `id` of those that they stand for."""
    groups = [
        {**group, "params": [twins[id(p)] for p in group["params"] if id(p) in twins]}
        for group in optimizer.param_groups
    ]
    return type(optimizer)(groups)  # type: ignore[call-arg]


def automatic_size(module: L.LightningModule) -> int:
    """Clients per vectorised step: small models gain most, those above 200,000 parameters nothing (see benchmarks)."""
    parameters = sum(p.numel() for p in module.parameters())
    return 1 if parameters > 200_000 else max(2, min(256, 20_000_000 // max(parameters, 1)))


class Cohort:
    """Several clients' copies of one module, stacked, and the step that trains them all.

    Args:
        module: The module; its own parameters are not touched.
        received: The state that each client starts from.
        optimizer: The module's optimizer: its class and options are those of the stacked one.
        methods: The methods of the Trainer.
        memories: For each client, the memory of each method.
        active: For each client, whether it uses each method.
    """

    def __init__(
        self,
        module: Classifier,
        received: Sequence[State],
        optimizer: Optimizer,
        methods: Sequence[Method],
        memories: Sequence[Sequence[Memory]],
        active: Sequence[Sequence[bool]],
    ) -> None:
        self.module = module
        trainable = {name for name, p in module.named_parameters() if p.requires_grad}
        self.received = _stack(received)
        self.params = {name: nn.Parameter(v.clone()) for name, v in self.received.items() if name in trainable}
        self.rest = {name: v.clone() for name, v in self.received.items() if name not in trainable}
        stacks = {id(p): self.params[name] for name, p in module.named_parameters() if name in self.params}
        self.optimizer = with_parameters(optimizer, stacks)
        used = [i for i, method in enumerate(methods) if method.shapes_loss and any(row[i] for row in active)]
        self.methods = [methods[i] for i in used]
        self.memories = [_stack([row[i] for row in memories]) for i in used]
        device = next(iter(self.params.values())).device
        self.active = [torch.tensor([float(row[i]) for row in active], device=device) for i in used]
        self.weight = torch.empty(0, device=device)  # of the batch at hand: see `BatchContext`

    def training_step(self, batch: Any) -> Tensor:
        """The clients' losses, added up."""
        x, y = batch
        losses, task_losses = self.loss(x, y, self.weight)
        samples = (self.weight > 0).sum(dim=1)
        self.module.count_loss((task_losses.detach() * samples).sum(), int(samples.sum()))
        return losses.sum()

    def loss(self, x: Tensor, y: Tensor, weight: Tensor, randomness: str = "different") -> tuple[Tensor, Tensor]:
        """Every client's loss on its own batch, and its task loss alone, both of shape (clients,)."""
        module: Any = self.module
        step = vmap(self._client_output, randomness=randomness)
        with sdpa_kernel(SDPBackend.MATH):  # vmap runs the fused kernels client by client
            outputs, extra = step(dict(self.params), self.rest, self.received, self.memories, self.active, x, y, weight)
        # Outside of vmap, on the samples of all clients in a row, the loss is a single call.
        samples: Tensor = module.sample_loss(outputs.flatten(0, 1), y.flatten(0, 1)).view_as(weight)
        task = (samples * weight).sum(dim=1)
        scale: Tensor | float = 1.0
        for method, applies in zip(self.methods, self.active, strict=True):
            scale = scale * (1 + applies * (method.task_weight() - 1))
        return scale * task + extra, task

    def _client_output(
        self,
        params: Mapping[str, Tensor],
        rest: State,
        received: State,
        memories: list[Memory],
        active: list[Tensor],
        x: Tensor,
        y: Tensor,
        weight: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """One client's output, and what its methods add to its loss."""
        output: Tensor = functional_call(self.module, {**params, **rest}, (x,))
        step = Step(params, received, x, output, teacher_of(self.module), weight, y)
        extra = torch.zeros((), device=weight.device)
        for method, memory, applies in zip(self.methods, memories, active, strict=True):
            extra = extra + applies * method.penalty(memory, step)
        return output, extra

    def freeze(self, active: int) -> State:
        """A copy of the parameters of the clients that are done, to be given to `thaw` after the step."""
        return {name: p.detach()[active:].clone() for name, p in self.params.items()}

    def thaw(self, frozen: Mapping[str, Tensor], active: int) -> None:
        """Undo the last step for the clients that were done before it."""
        for name, value in frozen.items():
            self.params[name].data[active:] = value

    def states(self) -> State:
        """The clients' states, every entry of shape (clients, ...)."""
        return {name: {**self.params, **self.rest}[name].detach() for name in self.received}


class ReservoirCohort:
    """Several clients in one run through the reservoir: they share its weights, and each has its own gain and bias.

    Args:
        module: The task.
        received: The state that each client starts from.
        client_rounds: The clients' parts in the round.
    """

    def __init__(self, module: ReservoirTask, received: Sequence[State], client_rounds: Sequence[ClientRound]) -> None:
        self.module = module
        self.received = received
        self.client_rounds = client_rounds
        self.weight = torch.empty(0)  # of the batch at hand: see `BatchContext`
        self.clients = len(received)
        if module.adapting:
            self.gain, self.bias = (
                torch.stack([state[f"reservoir.{name}"] for state in received]) for name in ("gain", "bias")
            )
        else:
            self.a, self.b = (self._own(name, received[0][f"readout.{name}"]) for name in ("A", "B"))
            self.n = [self._earlier(state) for state in received]

    def _own(self, name: str, server: Tensor) -> Tensor:
        """Where each client's statistics are added up: from nothing, or from its own earlier ones."""
        started = torch.zeros(len(self.received), *server.shape, dtype=server.dtype, device=server.device)
        for row, state in enumerate(self.received):
            if self._earlier(state):
                started[row] = state[f"readout.{name}"]
        return started

    def _earlier(self, state: State) -> int:
        """Samples of a client's own earlier statistics, where these stay with the client and fit the reservoir."""
        same = self.module.share == "weights" and torch.equal(state["readout.tag"], self.module.readout.tag)
        return int(state["readout.n"]) if same else 0

    def training_step(self, batch: Any) -> None:
        """Add a batch of every client, x of shape (clients, batch, time, features), without what is padding."""
        if not self.module.adapting:
            x, y = batch
            real = self.weight > 0
            added = self.module.add(self.a, self.b, x[real], y[real], real.sum(dim=1).tolist())
            self.n = [before + new for before, new in zip(self.n, added, strict=True)]
        self.module.count_step()

    def states(self) -> State:
        """The clients' states, every entry of shape (clients, ...)."""
        module = self.module
        stacked = {name: value.expand(self.clients, *value.shape) for name, value in entries(module).items()}
        if module.adapting:
            return {**stacked, "reservoir.gain": self.gain, "reservoir.bias": self.bias}
        for client_round, n in zip(self.client_rounds, self.n, strict=True):
            if module.share == "statistics":
                module.warn_of_few(client_round.client, n)
        stacked |= {"readout.A": self.a, "readout.B": self.b, "readout.n": torch.tensor(self.n, device=self.a.device)}
        if module.share == "weights":
            solved = [solve(a, square(b, a.shape[1]), module.readout.beta) for a, b in zip(self.a, self.b, strict=True)]
            stacked["readout.weight"] = torch.stack(solved)
        return stacked


def _stack(rows: Sequence[Mapping[str, Tensor]]) -> State:
    if all(row is rows[0] for row in rows):
        return {name: value.expand(len(rows), *value.shape) for name, value in rows[0].items()}
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
