"""Vectorized local training on padded batches. Clients have stacked parameters and share each step."""

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
"""Number of steps with equal shapes before the step is traced. Tracing takes as long as several hundred steps.

The first trace of a process takes about 1 s more.
"""

_KNOWN = ("torch.nn.modules.", "torchmetrics.", "lightning_fcl.")

Step = Callable[[list[Tensor], list[Tensor], list[Tensor]], list[Any]]
"""A function ``step(params, rest, batch)``. ``rest`` contains the tensors of the state that are not trained.

The function returns a list of tensors. A missing gradient is None.
"""


class TracedStep:
    """A step that is traced after a number of calls. The trace replaces the step if both results are exactly equal.

    The step may depend only on its tensors and their shapes. All other values are fixed when the step is traced. See
    `is_traceable`.

    Args:
        step: The step. It must have no effect other than its result.
        warmup_steps: Number of steps with equal shapes before the step is traced. Default: `AFTER`.

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
        """Number of combinations of shapes for which a trace replaces the step."""
        return len(self._graphs)

    def __call__(self, params: list[Tensor], rest: list[Tensor], batch: list[Tensor]) -> list[Any]:
        """Return the step's result."""
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
        except Exception as error:  # Tracing may raise any exception. In this case, the step itself runs.
            log.debug("Did not trace a step: %s", error)
            return
        if is_equal:
            self._graphs[kind] = graph


def is_traceable(module: nn.Module) -> bool:
    """Return whether a step can be traced: all submodules are from `torch.nn`, torchmetrics or this library.

    Example:
        >>> is_traceable(nn.Sequential(nn.Linear(1, 1), nn.Dropout()))
        True
    """
    return all(type(part).__module__.startswith(_KNOWN) for part in module.modules())


class VectorizedTrainer(StackedTrainer):
    """A trainer of copies of one module, one per client. It computes `sample_loss` on padded and stacked batches.

    Batches of unequal size are padded. Clients that have no batch left are not computed and do not change. The results
    equal those of sequential training, up to the rounding of batched matrix products. Random layers that use no key
    (see `KeyedRandomness`) are an exception, because they draw different numbers.

    Args:
        module: The module, which has a `sample_loss`.
        methods: See `StackedTrainer` for this argument and the following arguments.
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
        assert isinstance(module, Vectorizable)  # otherwise, another trainer is used
        self._loss: Vectorizable = module
        self._traceable = is_traceable(module)
        # One traced step for each set of trainable parameters.
        self._traced: dict[tuple[str, ...], TracedStep] = {}
        # Gradients that the step has returned. None: the step has returned no gradients.
        self._known: Sequence[Tensor | None] | None = None

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
        self.step_losses.append(task_losses.detach())
        samples = (weight > 0).sum(dim=1)
        self._loss.update_train_loss((task_losses.detach() * samples).sum(), int(samples.sum()))
        return losses.sum()

    def gradients(self, loss: Tensor) -> Sequence[Tensor | None]:
        step_gradients = self._known
        if step_gradients is None:
            # `loss.backward()` would copy each gradient whose memory order differs from that of its parameter.
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
        """Compute a step without methods. Return each client's loss twice (total and task loss), then the gradients."""
        keys, x, y, weight = batch
        state = _first(len(weight), dict(zip((*learning, *untrained_names), (*params, *rest), strict=True)))
        losses = self._task_losses(self._outputs(state, keys, x, "different"), y, weight)
        gradients = torch.autograd.grad(losses.sum(), params, allow_unused=True)
        return [losses.detach(), losses.detach(), *gradients]

    def _outputs(self, state: State, keys: Tensor, x: Tensor, randomness: str) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # under vmap, fused kernels run in a loop over clients
            outputs: Tensor = vmap(self._output, randomness=randomness)(state, keys, x)
        return outputs

    def _task_losses(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return each client's task loss. One call outside of vmap computes the losses of all clients' samples."""
        samples = self._loss.sample_loss(outputs.flatten(0, 1), y.flatten(0, 1)).view_as(weight)
        return (samples * weight).sum(dim=1)

    def losses(
        self, x: Tensor, y: Tensor, weight: Tensor, keys: Tensor, randomness: str = "different"
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the task loss of each client that has a batch. Both have shape (clients,).

        Args:
            x: Inputs, shape (clients, batch, ...).
            y: Targets, shape (clients, batch, ...).
            weight: Weight of each sample in its client's mean, shape (clients, batch).
            keys: Keys of the clients' random layers, shape (clients,).
            randomness: Behavior of random layers that use no key. See `torch.func.vmap`.
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
        """Return one client's output."""
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
        """Return one client's output, the factor of its task loss, and the penalty of its methods."""
        with KeyedRandomness(key):
            output: Tensor = functional_call(self._module, {**params, **rest}, (x,))
            scale, extra = self.compose_in_vmap(params, rest, method_inputs, x, output, y, weight)
        return output, scale, extra


def _first(clients: int, values: Any) -> Any:
    """Return the rows of the first ``clients`` clients from stacked tensors in nested lists and dicts."""
    return tree_map(lambda value: value if len(value) == clients else value[:clients], values)


class StackedPrecision(Precision):
    """Full precision (``32-true``) in which gradients of stacked clients are computed and clipped per client.

    Args:
        trainer: Function that returns the current local trainer.
    """

    def __init__(self, trainer: Callable[[], LocalTrainer]) -> None:
        super().__init__()
        self._trainer = trainer

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Compute gradients with the stacked trainer in a vectorized step. Otherwise compute them as Lightning does."""
        trainer = self._trainer()
        if not isinstance(trainer, StackedTrainer):
            super().backward(tensor, model, optimizer, *args, **kwargs)
            return
        for parameter, gradient in zip(self.main_params(optimizer), trainer.gradients(tensor), strict=True):
            parameter.grad = gradient

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """In a vectorized step, clip the gradient of each client separately. Otherwise clip as Lightning does."""
        trainer = self._trainer()
        if not isinstance(trainer, StackedTrainer):
            super().clip_grad_by_norm(optimizer, clip_val)
            return
        gradients = [p.grad for p in self.main_params(optimizer) if p.grad is not None]
        norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
        factors = (clip_val / (norms + 1e-6)).clamp(max=1.0)  # same formula as `torch.nn.utils.clip_grad_norm_`
        for gradient in gradients:
            gradient.mul_(factors.view(-1, *[1] * (gradient.dim() - 1)))


def flush_denormals() -> bool:
    """Treat subnormal numbers as 0 if PyTorch uses one thread. Return True if this call has changed the setting.

    Gradients of unlikely classes can be subnormal numbers, and CPU operations on subnormal numbers are many times
    slower. Undo the setting with ``torch.set_flush_denormal(False)``. With several threads, existing threads would keep
    their setting, and results would depend on the time at which threads start.
    """
    smallest = torch.tensor(torch.finfo(torch.float32).tiny, device="cpu")
    return torch.get_num_threads() == 1 and bool(smallest / 2 != 0) and torch.set_flush_denormal(True)
