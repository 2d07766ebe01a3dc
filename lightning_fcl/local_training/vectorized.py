"""Local training of many clients at once: parameters are stacked, a step is one for all, traced once and replayed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_fcl.data.batching import Batch
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.local_trainer import LocalTrainer
from lightning_fcl.federation.protocols import Vectorizable
from lightning_fcl.local_training.stacked_trainer import StackedTrainer
from lightning_fcl.methods.base import MethodBase
from lightning_fcl.methods.keyed_dropout import KeyedRandomness

log = logging.getLogger(__name__)

AFTER = 1000
"""Steps of one shape before it is traced, which takes as long as some hundreds; the first time a second more."""

_KNOWN = ("torch.nn.modules.", "torchmetrics.", "lightning_fcl.")

Step = Callable[[list[Tensor], list[Tensor], list[Tensor]], list[Any]]
"""``step(params, rest, batch)``: a list of tensors, in which None stands for a gradient that is not there."""


class TracedStep:
    """Replays a step from its `AFTER`-th on, where that gives the step's own bits; all others run as they are.

    What depends on anything but shapes and the tensors that it gets would be frozen as it was when it was traced. See
    `is_traceable`.

    Args:
        step: The step. It has no other effect than its result.
        warmup_steps: Steps of one shape before it is traced; None: `AFTER`.

    Example:
        >>> double = TracedStep(lambda params, rest, batch: [2 * params[0]], warmup_steps=1)
        >>> double([torch.ones(2)], [], []), double([3 * torch.ones(2)], [], [])
        ([tensor([2., 2.])], [tensor([6., 6.])])
        >>> double.traced
        1
    """

    def __init__(self, step: Step, warmup_steps: int | None = None) -> None:
        self._step = step
        self._after = AFTER if warmup_steps is None else warmup_steps
        self._seen: Counter[object] = Counter()
        self._graphs: dict[object, Callable[..., list[Any]]] = {}

    @property
    def traced(self) -> int:
        """How many shapes are replayed."""
        return len(self._graphs)

    def __call__(self, params: list[Tensor], rest: list[Tensor], batch: list[Tensor]) -> list[Any]:
        """The step's result."""
        kind = tuple((value.shape, value.dtype, value.device) for part in (params, rest, batch) for value in part)
        if kind in self._graphs:
            with torch.no_grad():
                return self._graphs[kind](params, rest, batch)
        result = self._step(params, rest, batch)
        self._seen[kind] += 1
        if self._seen[kind] == self._after:
            self._trace(kind, (params, rest, batch), result)
        return result

    def _trace(self, kind: object, arguments: tuple[list[Tensor], ...], expected: Sequence[Any]) -> None:
        from torch.fx.experimental.proxy_tensor import make_fx

        try:
            graph = make_fx(self._step)(*arguments)
            with torch.no_grad():
                is_equal = all(map(torch.equal, graph(*arguments), expected))
        except Exception as error:  # whatever it is, this step cannot be traced
            log.debug("A step is not traced: %s", error)
            return
        if is_equal:
            self._graphs[kind] = graph


def is_traceable(module: nn.Module) -> bool:
    """Whether a module's step depends on its tensors alone: all its parts are torch's layers, or this library's.

    Example:
        >>> is_traceable(nn.Sequential(nn.Linear(1, 1), nn.Dropout()))
        True
    """
    return all(type(part).__module__.startswith(_KNOWN) for part in module.modules())


class VectorizedTrainer(StackedTrainer):
    """Trains several clients' copies of one module, stacked.

    The clients' batches are padded where they are unequal, and nothing is computed for those that are done, which stay
    as they are. It is the same training as that of one client after the other, up to the rounding of batched products.

    Args:
        module: The module, which states its loss apart.
        methods: As for `StackedTrainer`, and so are the others.
    """

    def __init__(
        self,
        module: L.LightningModule,
        methods: Sequence[MethodBase],
        optimizer: Optimizer,
        num_vectorized_clients: int,
        seed: int,
    ) -> None:
        super().__init__(module, methods, optimizer, num_vectorized_clients, seed)
        assert isinstance(module, Vectorizable)  # else it would train otherwise
        self._loss: Vectorizable = module
        self._traceable = is_traceable(module)
        self._traced: dict[tuple[str, ...], TracedStep] = {}  # of the parameters that learn
        self._known: Sequence[Tensor | None] | None = None  # the gradients of the step

    def training_step(self, batch: Batch, batch_idx: int | None, weight: Tensor | None) -> Tensor:
        assert weight is not None  # batches are stacked
        x, y = batch
        keys = _first(len(weight), self.next_keys(x.device))
        self._known = None
        if self.methods or not self._traceable:
            losses, task_losses = self.losses(x, y, weight, keys)
        else:
            learning = tuple(self.params)
            plain = partial(self._plain_step, learning, tuple(self.untrained_state))
            step = self._traced.setdefault(learning, TracedStep(plain))
            results = step(list(self.params.values()), list(self.untrained_state.values()), [keys, x, y, weight])
            losses, task_losses, *self._known = results
        self.update_finite(losses)
        samples = (weight > 0).sum(dim=1)
        self._loss.update_train_loss((task_losses.detach() * samples).sum(), int(samples.sum()))
        return losses.sum()

    def gradients(self, loss: Tensor) -> Sequence[Tensor | None]:
        step_gradients = self._known
        if step_gradients is None:
            # Not `loss.backward()`, which copies each gradient that does not lie in memory as its parameter does.
            step_gradients = torch.autograd.grad(loss, list(self.params.values()), allow_unused=True)
        return self.reorder_gradients(step_gradients)

    def _plain_step(
        self,
        learning: Sequence[str],
        untrained_names: Sequence[str],
        params: list[Tensor],
        rest: list[Tensor],
        batch: list[Tensor],
    ) -> list[Tensor | None]:
        """Every client's loss, once more as its task loss, and the gradients: a step without methods."""
        keys, x, y, weight = batch
        state = _first(len(weight), dict(zip((*learning, *untrained_names), (*params, *rest), strict=True)))
        losses = self._task_losses(self._outputs(state, keys, x, "different"), y, weight)
        gradients = torch.autograd.grad(losses.sum(), params, allow_unused=True)
        return [losses.detach(), losses.detach(), *gradients]

    def _outputs(self, state: State, keys: Tensor, x: Tensor, randomness: str) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # vmap runs the fused kernels client by client
            outputs: Tensor = vmap(self._output, randomness=randomness)(state, keys, x)
        return outputs

    def _task_losses(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Outside of vmap, on the samples of all clients in a row, the loss is a single call."""
        samples = self._loss.sample_loss(outputs.flatten(0, 1), y.flatten(0, 1)).view_as(weight)
        return (samples * weight).sum(dim=1)

    def losses(
        self, x: Tensor, y: Tensor, weight: Tensor, keys: Tensor, randomness: str = "different"
    ) -> tuple[Tensor, Tensor]:
        """Each client's loss on its own batch, and its task loss alone, of those that have one, shape (clients,).

        Args:
            x: Inputs, shape (clients, batch, ...).
            y: Targets, shape (clients, batch, ...).
            weight: Share of each sample in its client's mean, shape (clients, batch).
            keys: What each client's random layers draw by, shape (clients,).
            randomness: What other random layers do: see `torch.func.vmap`.
        """
        params, rest = _first(len(weight), dict(self.params)), _first(len(weight), self.untrained_state)
        if not self.methods:
            task = self._task_losses(self._outputs({**params, **rest}, keys, x, randomness), y, weight)
            return task, task
        method_inputs = _first(len(weight), self.method_inputs(weight.device))
        with sdpa_kernel(SDPBackend.MATH):
            outputs, scale, extra = vmap(self._client_output, randomness=randomness)(
                params, rest, method_inputs, keys, x, y, weight
            )
        task = self._task_losses(outputs, y, weight)
        return scale * task + extra, task

    def _output(self, state: State, key: Tensor, x: Tensor) -> Tensor:
        """One client's output."""
        with KeyedRandomness(key):
            output: Tensor = functional_call(self._module, state, (x,))
        return output

    def _client_output(
        self,
        params: Mapping[str, Tensor],
        rest: State,
        method_inputs: Mapping[str, Any],
        key: Tensor,
        x: Tensor,
        y: Tensor,
        weight: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One client's output, the factor of its task loss, and what its methods add."""
        with KeyedRandomness(key):
            output: Tensor = functional_call(self._module, {**params, **rest}, (x,))
            scale, extra = self.compose_in_vmap(params, rest, method_inputs, x, output, y, weight)
        return output, scale, extra


def _first(clients: int, values: Any) -> Any:
    """Of the first so many clients what is stacked in any nest of lists and dicts."""
    return tree_map(lambda value: value if len(value) == clients else value[:clients], values)


class StackedPrecision(Precision):
    """Full precision, in which the gradients of clients that train side by side are taken, and clipped by norm.

    Args:
        trainer: Tells who trains the clients.
    """

    def __init__(self, trainer: Callable[[], LocalTrainer]) -> None:
        super().__init__()
        self._trainer = trainer

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Take the gradients: of a single client as always, of several as their trainer tells them."""
        trainer = self._trainer()
        if not isinstance(trainer, StackedTrainer):
            super().backward(tensor, model, optimizer, *args, **kwargs)
            return
        for parameter, gradient in zip(self.main_params(optimizer), trainer.gradients(tensor), strict=True):
            parameter.grad = gradient

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip each client's gradient by its own norm."""
        trainer = self._trainer()
        if not isinstance(trainer, StackedTrainer):
            super().clip_grad_by_norm(optimizer, clip_val)
            return
        gradients = [p.grad for p in self.main_params(optimizer) if p.grad is not None]
        norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
        factors = (clip_val / (norms + 1e-6)).clamp(max=1.0)  # as `torch.nn.utils.clip_grad_norm_` has it
        for gradient in gradients:
            gradient.mul_(factors.view(-1, *[1] * (gradient.dim() - 1)))


def flush_denormals() -> bool:
    """Take numbers below the normal range as 0, if PyTorch has one thread; whether it did not do so before.

    Gradients of unlikely classes are such numbers, with which a CPU multiplies many times as slowly. Undone by
    ``torch.set_flush_denormal(False)``. Of several threads those that are there already would stay as they are, so that
    results would depend on when these began.
    """
    smallest = torch.tensor(torch.finfo(torch.float32).tiny, device="cpu")
    return torch.get_num_threads() == 1 and bool(smallest / 2 != 0) and torch.set_flush_denormal(True)
