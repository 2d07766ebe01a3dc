"""Local training of many clients at once: their parameters stacked, one vectorised step for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.optim import Optimizer

from lightning_fcl.aggregation import State
from lightning_fcl.callbacks.method import Method, Step, teacher_of
from lightning_fcl.clients import Memory

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
RANDOM = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU)
# Whoever overrides one of these looks at the gradients or the step of one model at a time.
STEP_HOOKS = (
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "configure_gradient_clipping",
    "optimizer_step",
)
NORMALISING = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@runtime_checkable
class Vectorizable(Protocol):
    """A LightningModule that states its forward and its loss apart, so that a cohort can train it in one step."""

    def sample_loss(self, output: Tensor, y: Tensor) -> Tensor:
        """The loss of every sample, shape (batch,); the training loss is its mean."""
        ...


def why_not_vectorized(module: L.LightningModule, optimizer: Optimizer, trainer: L.Trainer) -> str | None:
    """The reason why a module's clients must train one at a time, or None."""
    if not isinstance(module, Vectorizable):
        return f"`{type(module).__name__}` does not state its loss apart (`sample_loss(output, y)`)"
    owner = next(c for c in type(module).__mro__ if "sample_loss" in vars(c))
    if next(c for c in type(module).__mro__ if "training_step" in vars(c)) not in owner.__mro__:
        return f"`{type(module).__name__}` overrides `training_step`"
    if not module.automatic_optimization:
        return f"`{type(module).__name__}` optimises by hand"
    if type(optimizer) not in ELEMENTWISE:
        return f"`{type(optimizer).__name__}` does not update each number on its own"
    if any(isinstance(submodule, NORMALISING) for submodule in module.modules()):
        return "batch normalisation would count padded samples"
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for part, plain in [(module, L.LightningModule), *((c, Callback) for c in callbacks if not isinstance(c, Method))]:
        for hook in STEP_HOOKS:
            if getattr(type(part), hook, None) is not getattr(plain, hook, None):
                return f"`{type(part).__name__}` overrides `{hook}`"
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm != "value":
        return "gradient clipping by norm would clip all clients together"
    if trainer.precision != "32-true":
        return f'the precision is "{trainer.precision}"'
    return None


def is_random(module: nn.Module) -> bool:
    """Whether training draws random numbers inside the module."""
    return any(isinstance(submodule, RANDOM) and getattr(submodule, "p", 1) > 0 for submodule in module.modules())


def automatic_size(module: L.LightningModule) -> int:
    """Clients per vectorised step: small models gain most, those above 200,000 parameters nothing (see benchmarks)."""
    parameters = sum(p.numel() for p in module.parameters())
    return 1 if parameters > 200_000 else max(2, min(256, 20_000_000 // max(parameters, 1)))


class Cohort:
    """Several clients' copies of one module, stacked, and the step that trains them all.

    Args:
        module: A `Vectorizable` LightningModule; its own parameters are not touched.
        received: The state that each client starts from.
        optimizer: The module's optimizer: its class and options are those of the stacked one.
        methods: The methods of the Trainer.
        memories: For each client, the memory of each method.
        active: For each client, whether it uses each method.
    """

    def __init__(
        self,
        module: L.LightningModule,
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
        self.optimizer = self._stacked(optimizer)
        used = [i for i, method in enumerate(methods) if method.shapes_loss and any(row[i] for row in active)]
        self.methods = [methods[i] for i in used]
        self.memories = [_stack([row[i] for row in memories]) for i in used]
        device = next(iter(self.params.values())).device
        self.active = [torch.tensor([float(row[i]) for row in active], device=device) for i in used]

    def _stacked(self, optimizer: Optimizer) -> Optimizer:
        names = {id(p): name for name, p in self.module.named_parameters()}
        groups = [
            {**group, "params": [self.params[names[id(p)]] for p in group["params"] if names[id(p)] in self.params]}
            for group in optimizer.param_groups
        ]
        return type(optimizer)(groups)  # type: ignore[call-arg]

    def loss(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Every client's loss on its own batch, shape (clients,)."""
        in_dims = ({name: 0 for name in self.params}, 0, 0, 0, 0, 0, 0, 0)
        args = (self.rest, self.received, self.memories, self.active, x, y, weight)
        losses: Tensor = vmap(self._client_loss, in_dims=in_dims, randomness="different")(dict(self.params), *args)
        return losses

    def _client_loss(
        self,
        params: Mapping[str, Tensor],
        rest: State,
        received: State,
        memories: list[Memory],
        active: list[Tensor],
        x: Tensor,
        y: Tensor,
        weight: Tensor,
    ) -> Tensor:
        module: Any = self.module
        output: Tensor = functional_call(module, {**params, **rest}, (x,))
        step = Step(params, received, x, output, teacher_of(module), weight)
        task = step.mean(module.sample_loss(output, y))
        scale: Tensor | float = 1.0
        extra: Tensor | float = 0.0
        for method, memory, applies in zip(self.methods, memories, active, strict=True):
            scale = scale * (1 + applies * (method.task_weight() - 1))
            extra = extra + applies * method.penalty(memory, step)
        return scale * task + extra

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


def _stack(rows: Sequence[Mapping[str, Tensor]]) -> State:
    if all(row is rows[0] for row in rows):
        return {name: value.expand(len(rows), *value.shape) for name, value in rows[0].items()}
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
