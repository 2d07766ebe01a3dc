"""Whether clients can train side by side by a module's own training step: a trial on a few samples of two of them."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from lightning_fcl.data.batches import Alike, Batch, alike, stacked
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.errors import quoted
from lightning_fcl.federation.aggregation import entries, load_entries
from lightning_fcl.federation.optimizers import group_values, set_group_values, with_parameters
from lightning_fcl.local.loop_counts import counting
from lightning_fcl.local.loose_state import LooseState
from lightning_fcl.local.own_step import StepTrainer
from lightning_fcl.local.recorded import METRIC, Line, Measured, Recorder
from lightning_fcl.local.sequential import client_keys, step_keys
from lightning_fcl.local.trial import RANDOM, copy_of, generators, samples_of_two, updates
from lightning_fcl.local.vectorized import StackedPrecision
from lightning_fcl.methods.client import is_labelled
from lightning_fcl.methods.declaration import Declaration
from lightning_fcl.methods.functional import trainable
from lightning_fcl.methods.random_layers import KeyedRandomness
from lightning_fcl.methods.trial import as_handed

_STEPS = 3
"""Steps that the trial takes: what a step does every other time is seen."""
_SAMPLES = 4
_CLIENTS = [ClientRound("a", 0), ClientRound("b", 0)]
# Whoever overrides one of these sees the gradients of one model, or one optimizer, at a time.
_HOOKS = ("backward", "optimizer_zero_grad")


def why_not_by_step(
    module: L.LightningModule, methods: Sequence[Declaration], optimizer: Optimizer, stream: FederatedStream
) -> str | None:
    """The reason why a module's own training step cannot run for several clients at once, or None.

    It can if a trial succeeds in which two clients take a few steps, side by side and one at a time, to the same loss,
    gradients, buffers and logs, and the step leaves nothing else behind.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        return f"`{name}` optimises by hand; where it leaves its steps to Lightning, they can be taken side by side"
    for hook in _HOOKS:
        if is_overridden(hook, module, L.LightningModule):
            return f"`{name}` overrides `{hook}`"
    if not isinstance(module.trainer.precision_plugin, StackedPrecision):
        return f"the precision is a `{type(module.trainer.precision_plugin).__name__}`"
    if hooked := _hooked(module):
        return f"`{hooked[0]}` of `{name}` has hooks, which would see several clients' values at once"
    with isolate_rng(), torch.enable_grad(), _apart(module, optimizer):
        try:
            batches = _batches(module, stream)
            return _unfit(methods, batches) or _Trial(module, optimizer, batches).why_not()
        except Exception as error:  # whatever it is, this module cannot be vectorised
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            if text.startswith("its "):
                return text
            return next((why for part, why in _KNOWN.items() if part in text), f"vectorising it fails ({text})")


_KNOWN = {
    "randomness": RANDOM,
    ".item()": "its step looks at a value (`.item()`, `float()`); as a tensor it can be logged and computed with",
    "data-dependent control flow": "its step decides by a value; `torch.where` would do so for each client",
}
_UNLIKE = {"loss": "has another loss", "gradients": "has other gradients", "logs": "logs something else"}


class _StepOutcome(NamedTuple):
    """A client's step: what it logs, and its loss, gradients and the values that it logs as numbers in a row."""

    lines: Sequence[Line | Measured]
    loss: Tensor
    gradient: Tensor
    values: Tensor

    def unlike(self, other: _StepOutcome, tolerance: float) -> str | None:
        """What is unlike another's, in words; None: nothing."""
        if self.lines != other.lines:
            return "logs"
        parts = {"loss": (self.loss, other.loss), "gradients": (self.gradient, other.gradient)}
        for what, (own, theirs) in {**parts, "logs": (self.values, other.values)}.items():
            if not (own - theirs).nan_to_num().norm() <= tolerance * theirs.nan_to_num().norm():
                return what
        return None


class _Trial:
    """Two clients take a few steps, one at a time and side by side, in a copy of a module.

    Args:
        module: The module.
        optimizer: Its optimizer.
        batches: A batch of each, of one shape.
    """

    def __init__(self, module: L.LightningModule, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        self._module = copy_of(module)
        self._module.trainer = module.trainer  # which no copy has
        self._real, self._batches = optimizer, batches
        twins = dict(zip(map(id, module.parameters()), self._module.parameters(), strict=True))
        self._optimizer = with_parameters(optimizer, twins)
        self._state = {name: value.detach().clone() for name, value in entries(self._module).items()}
        self._numbered = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

    def why_not(self) -> str | None:
        """What goes wrong, or None."""
        around = LooseState(_around(self._module))
        try:
            return self._why_not(around)
        finally:
            around.put_back()

    def _why_not(self, around: LooseState) -> str | None:
        loose, groups, counts = LooseState(self._module), group_values(self._real), updates(self._module)
        drawn, torch_drawn = generators(), torch.get_rng_state()
        alone, buffers = zip(*[self._alone(row) for row in range(len(_CLIENTS))], strict=True)
        if updates(self._module) != counts:
            return METRIC
        if groups != group_values(self._real):
            return "its step changes the optimizer; a schedule, or a hook of the epoch, would do so for all clients"
        if not torch.equal(torch.get_rng_state(), torch_drawn):
            return RANDOM
        if generators() != drawn:
            return "its step draws by NumPy or Python; what draws by torch's dropout draws for each client"
        if changed := loose.changes() or around.changes() or _hooked(self._module):
            return _leaves(changed)
        again, _ = self._alone(0, batches=7)
        if any(one.unlike(other, 0.0) for one, other in zip(again, alone[0], strict=True)):
            return "its step gives something else each time, or depends on the number of the client's batches"
        if moved := [n for n in trainable(self._module) if not torch.equal(buffers[0][n], self._state[n])]:
            return f"its step writes {quoted(moved)}, which learns; the optimizer, or a hook of the epoch, can do so"
        for side_by_side in (True, False):
            beside, entries_after = self._beside(side_by_side)
            if changed := loose.changes() or around.changes() or _hooked(self._module):
                return _leaves(changed)
            for row in range(len(_CLIENTS)):
                for name, value in buffers[row].items():
                    if not torch.allclose(entries_after[name][row], value, 1e-5, 1e-6, equal_nan=True):
                        return f"its step makes `{name}` anew; where it writes it in place, it is each client's own"
                for one, other in zip(beside[row], alone[row], strict=True):
                    if what := one.unlike(other, 1e-5):
                        return f"its step {_UNLIKE[what]} side by side"
        return None

    def _alone(self, row: int, batches: int = _STEPS) -> tuple[list[_StepOutcome], dict[str, Tensor]]:
        """Return a client's steps, as they are, and its entries afterwards."""
        load_entries(self._module, self._state)
        keys, recorder, taken = client_keys(0, [_CLIENTS[row]], "layers"), Recorder(self._module), []
        params = [p for p in self._module.parameters() if p.requires_grad]
        for step in range(_STEPS):
            key, batch = step_keys(keys, step)[0].to(self._module.device), copy.deepcopy(self._batches[row])
            counted = counting(self._module.trainer, step, batches)
            with counted, recorder.recording(batch), KeyedRandomness(key).drawing():
                given = (batch, step) if self._numbered else (batch,)
                result = self._module.training_step(*given)
                loss = result.get("loss") if isinstance(result, dict) else result
                if not isinstance(loss, Tensor):
                    raise ValueError("its step returns no loss for some batches; a loss of zero would do")
                gradients = torch.autograd.grad(loss.reshape(()), params, materialize_grads=True)
            taken.append(_step_outcome(recorder.lines, loss, gradients, recorder.values))
        return taken, {name: value.detach().clone() for name, value in entries(self._module).items()}

    def _beside(self, side_by_side: bool) -> tuple[list[list[_StepOutcome]], dict[str, Tensor]]:
        """The same of both side by side: as of one shape, or each on its own."""
        load_entries(self._module, self._state)
        number, device = len(_CLIENTS), self._module.device
        trainer = StepTrainer(self._module, [], self._optimizer, number, 0, "error")
        trainer.begin(_CLIENTS, [self._state] * number, [[]] * number, [{}] * number)
        taken: list[list[_StepOutcome]] = [[] for _ in _CLIENTS]
        groups = alike(self._batches)
        if not side_by_side:
            groups = [Alike(torch.tensor([row]), stacked([own])) for row, own in enumerate(self._batches)]
        for step in range(_STEPS):
            given = [Alike(rows.to(device), copy.deepcopy(batch)) for rows, batch in groups]
            with counting(self._module.trainer, step, _STEPS):
                total = trainer.losses_of(given, step if self._numbered else None)
            if total is None:
                raise ValueError("its step returns no loss for some batches; a loss of zero would do")
            gradients = trainer.of_params(total)
            logged = [
                (lines, tree_map(itemgetter(row), values))
                for (rows, _), (lines, values) in zip(given, trainer.logged, strict=True)
                for row in range(len(rows))
            ]
            for row, own in enumerate(taken):
                each = [torch.zeros_like(p[row]) if g is None else g[row] for p, g in gradients]
                own.append(_step_outcome(logged[row][0], trainer.losses[row], each, logged[row][1]))
        return taken, dict(trainer.finish().uploads)


def _step_outcome(
    lines: Sequence[Line | Measured], loss: Tensor, gradients: Sequence[Tensor], values: Sequence[Any]
) -> _StepOutcome:
    flat = torch.cat([gradient.detach().flatten() for gradient in gradients])
    numbers = torch.cat([flat.new_zeros(0), *(value.detach().to(flat).flatten() for value in tree_leaves(values))])
    return _StepOutcome(lines, loss.detach().reshape(()), flat, numbers)


def _around(module: L.LightningModule) -> nn.Module:
    """What a module's own functions know beside it, and can change: lists and the like, of classes and of files."""
    found = nn.Module()
    for kind in type(module).__mro__:
        if kind.__module__.startswith(("lightning.", "torch.", "builtins", "lightning_fcl.")):
            continue
        known: list[Mapping[str, Any]] = [vars(kind)]
        for function in filter(inspect.isfunction, vars(kind).values()):
            variables = inspect.getclosurevars(function)
            known += [variables.nonlocals, variables.globals]
        for name, value in itertools.chain.from_iterable(one.items() for one in known):
            if isinstance(value, list | dict | set | deque) and not name.startswith("__"):
                vars(found)[name] = value
    return found


class _NoLogger(DummyLogger):
    """Refuses to log: what a step gives a logger itself would be of several clients at once."""

    @property
    def experiment(self) -> NoReturn:
        _refuse_logger()

    def log_metrics(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse_logger()

    def __getattr__(self, name: str) -> NoReturn:
        _refuse_logger()


def _refuse_logger() -> NoReturn:
    raise ValueError("its step speaks to the logger itself; `self.log` does so for all clients")


@contextmanager
def _apart(module: L.LightningModule, optimizer: Optimizer) -> Iterator[None]:
    """What a step does to loggers and the optimizer is refused or undone."""
    trainer, groups = module.trainer, copy.deepcopy(group_values(optimizer))
    loggers = trainer.loggers
    trainer.loggers = [_NoLogger() for _ in loggers]
    try:
        yield
    finally:
        trainer.loggers = loggers
        set_group_values(optimizer, groups)


def _batches(module: L.LightningModule, stream: FederatedStream) -> list[Batch]:
    """A batch of each of two clients, of one shape."""
    if (chosen := samples_of_two(stream, _SAMPLES)) is None:
        raise ValueError("its clients have no samples")
    own, last = chosen
    for others in (np.resize(last, len(own)), own[::-1], own):
        found = [as_handed(module, stream.take(rows)) for rows in (own, others)]
        if len(alike(found)) == 1:
            return found
    raise ValueError("its batches have another shape each time")


def _unfit(methods: Sequence[Declaration], batches: Sequence[Batch]) -> str | None:
    """Which method works on pairs alone, where batches are none."""
    for method in methods:
        if (method.needs.labels or method.needs.logits) and not is_labelled(batches[0]):
            return f"`{type(method).__name__}` looks at samples and targets, and its batches are no pairs"
    return None


def _hooked(module: nn.Module) -> list[str]:
    """The parts, and parameters, with hooks."""
    parts = module.named_modules()
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    found = [name or type(module).__name__ for name, part in parts if any(vars(part)[kind] for kind in kinds)]
    learning = module.named_parameters()
    return found + [name for name, p in learning if p._backward_hooks or p._post_accumulate_grad_hooks]


def _leaves(changed: Sequence[str]) -> str:
    return (
        f"its step leaves {quoted(changed)} on the module, where the next client would find it; a "
        "registered buffer that is written in place is each client's own"
    )
