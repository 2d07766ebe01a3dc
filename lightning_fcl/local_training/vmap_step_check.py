"""Trial of a module's own training step for two clients. Vectorized and sequential steps must have equal results."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn

import lightning.pytorch as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from lightning_fcl.data.batching import Batch
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.collation import ShapeGroup, group_by_shape, stack_nested
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.federation.aggregation import load_state_tensors, state_tensors
from lightning_fcl.federation.obstacles import Obstacle, ObstacleError, Reason, obstacle_of
from lightning_fcl.federation.server_optimizer import group_values, set_group_values, with_parameters
from lightning_fcl.local_training.drawn import trial_rows
from lightning_fcl.local_training.log_recorder import LogEntry, LogRecorder, MetricUpdate
from lightning_fcl.local_training.loop_counts import counting
from lightning_fcl.local_training.method_trial import method_obstacle
from lightning_fcl.local_training.module_snapshot import ModuleSnapshot
from lightning_fcl.local_training.outside import Outside
from lightning_fcl.local_training.search import Search
from lightning_fcl.local_training.sequential import client_round_keys, step_keys
from lightning_fcl.local_training.vectorized import StackedPrecision
from lightning_fcl.local_training.vmap_check import copy_module, generators, metric_update_counts
from lightning_fcl.local_training.vmap_training_step import StepTrainer
from lightning_fcl.methods.base import MethodBase
from lightning_fcl.methods.context import is_labelled
from lightning_fcl.methods.dry_run import prepare_batch
from lightning_fcl.methods.functional import trainable_parameters
from lightning_fcl.methods.keyed_dropout import KeyedRandomness
from lightning_fcl.validation import format_code_names

_STEPS = 3
"""Number of steps in the trial. With several steps, the trial detects behavior that differs between steps."""
_CLIENTS = [ClientRound("a", 0), ClientRound("b", 0)]
# A user override of one of these hooks expects the gradients of a single model, or a single optimizer.
_HOOKS = ("backward", "optimizer_zero_grad")


def find_step_obstacle(
    module: L.LightningModule, methods: Sequence[MethodBase], optimizer: Optimizer, stream: FederatedStream
) -> Obstacle | None:
    """Return the obstacle to vectorizing a module's own training step, or None.

    There is no obstacle if a trial succeeds. In the trial, two clients take a few steps, vectorized and sequentially.
    Loss, gradients, buffers and logs must be equal up to rounding, and the step must not change other state. Each
    method must have the same penalty in both cases.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        return Obstacle(Reason.MANUAL, (name,))
    for hook in _HOOKS:
        if is_overridden(hook, module, L.LightningModule):
            return Obstacle(Reason.OVERRIDES, (f"`{name}` overrides `{hook}`",))
    if not isinstance(module.trainer.precision_plugin, StackedPrecision):
        return Obstacle(Reason.PRECISION, (f"set by `{type(module.trainer.precision_plugin).__name__}`",))
    if hooked := _hooked(module):
        return Obstacle(Reason.HOOKED, (hooked[0], name))
    with isolate_rng(), torch.enable_grad(), _apart(module, optimizer):
        torch.manual_seed(0)
        try:
            batches = _batches(module, stream)
            return _unfit(methods, batches) or _Trial(module, optimizer, batches).find_obstacle(methods)
        except Exception as error:  # User code may raise any exception. Such a module cannot be vectorized.
            return obstacle_of(error)


_UNLIKE = {"loss": Reason.STEP_LOSS, "gradients": Reason.STEP_GRADIENTS, "logs": Reason.STEP_LOGS}


class _StepOutcome(NamedTuple):
    """Result of one client's step: logged lines without values, and the loss, flat gradient and logged values."""

    lines: Sequence[LogEntry | MetricUpdate]
    loss: Tensor
    gradient: Tensor
    values: Tensor

    def unlike(self, other: _StepOutcome, tolerance: float) -> str | None:
        """Return the part that differs from another outcome ("loss", "gradients" or "logs"), or None."""
        if self.lines != other.lines:
            return "logs"
        parts = {"loss": (self.loss, other.loss), "gradients": (self.gradient, other.gradient)}
        for part_name, (value, other_value) in {**parts, "logs": (self.values, other.values)}.items():
            if not (value - other_value).nan_to_num().norm() <= tolerance * other_value.nan_to_num().norm():
                return part_name
        return None


class _Trial:
    """A trial in which two clients take a few steps, sequentially and vectorized, with a copy of a module.

    Args:
        module: The module.
        optimizer: Optimizer of the module.
        batches: One batch per client, of the same shape.
    """

    def __init__(self, module: L.LightningModule, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        self._module = copy_module(module)
        self._real, self._batches = optimizer, batches
        twins = dict(zip(map(id, module.parameters()), self._module.parameters(), strict=True))
        self._optimizer = with_parameters(optimizer, twins)
        self._state = {name: value.detach().clone() for name, value in state_tensors(self._module).items()}
        self._numbered = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

    def find_obstacle(self, methods: Sequence[MethodBase]) -> Obstacle | None:
        """Return the obstacle to vectorizing the step or a method, or None."""
        outside_search = Outside(self._module).search()
        try:
            if obstacle := self._step_obstacle(outside_search):
                return obstacle
            load_state_tensors(self._module, self._state)
            return method_obstacle(self._module, methods, self._optimizer, self._batches[0], padded=False)
        finally:
            outside_search.restore()

    def _step_obstacle(self, outside_search: Search) -> Obstacle | None:
        loose, groups, counts = (
            ModuleSnapshot(self._module),
            group_values(self._real),
            metric_update_counts(self._module),
        )
        generator_states, torch_state = generators(), torch.get_rng_state()
        expected_outcomes, buffers = zip(*[self._alone(row) for row in range(len(_CLIENTS))], strict=True)
        if metric_update_counts(self._module) != counts:
            return Obstacle(Reason.METRIC)
        if groups != group_values(self._real):
            return Obstacle(Reason.CHANGES_OPTIMIZER)
        if not torch.equal(torch.get_rng_state(), torch_state):
            return Obstacle(Reason.RANDOM)
        if generators() != generator_states:
            return Obstacle(Reason.OTHER_RANDOM)
        if obstacle := self._left_behind(loose, outside_search):
            return obstacle
        repeated_outcomes, _ = self._alone(0, batches=7)
        if any(one.unlike(other, 0.0) for one, other in zip(repeated_outcomes, expected_outcomes[0], strict=True)):
            return Obstacle(Reason.NOT_REPEATABLE)
        if changed_names := [
            n for n in trainable_parameters(self._module) if not torch.equal(buffers[0][n], self._state[n])
        ]:
            return Obstacle(Reason.WRITES_PARAMETER, (format_code_names(changed_names),))
        for side_by_side in (True, False):
            vectorized_outcomes, entries_after = self._beside(side_by_side)
            if obstacle := self._left_behind(loose, outside_search):
                return obstacle
            for row in range(len(_CLIENTS)):
                for name, value in buffers[row].items():
                    if not torch.allclose(entries_after[name][row], value, 1e-5, 1e-6, equal_nan=True):
                        return Obstacle(Reason.NEW_BUFFER, (name,))
                for outcome, expected_outcome in zip(vectorized_outcomes[row], expected_outcomes[row], strict=True):
                    if part_name := outcome.unlike(expected_outcome, 1e-5):
                        return Obstacle(_UNLIKE[part_name])
        return None

    def _left_behind(self, loose: ModuleSnapshot, outside_search: Search) -> Obstacle | None:
        """Return an obstacle if a step has changed state that would affect the next client, otherwise None."""
        if changed_names := loose.changes() or _hooked(self._module):
            return Obstacle(Reason.STATE, (format_code_names(changed_names),))
        outside_names = sorted({change.name for change in outside_search.changes()})
        return Obstacle(Reason.OUTSIDE, (format_code_names(outside_names),)) if outside_names else None

    def _alone(self, row: int, batches: int = _STEPS) -> tuple[list[_StepOutcome], dict[str, Tensor]]:
        """Return the outcomes of a client's sequential steps, and the client's state after the steps."""
        load_state_tensors(self._module, self._state)
        keys, recorder, outcomes = client_round_keys(0, [_CLIENTS[row]], "layers"), LogRecorder(self._module), []
        params = [p for p in self._module.parameters() if p.requires_grad]
        for step in range(_STEPS):
            key, batch = step_keys(keys, step)[0].to(self._module.device), copy.deepcopy(self._batches[row])
            step_counting = counting(self._module.trainer, step, batches)
            with step_counting, recorder.recording(batch), KeyedRandomness(key).recomputable():
                arguments = (batch, step) if self._numbered else (batch,)
                result = self._module.training_step(*arguments)
                loss = result.get("loss") if isinstance(result, dict) else result
                if not isinstance(loss, Tensor):
                    raise ObstacleError(Reason.NO_LOSS)
                gradients = torch.autograd.grad(loss.reshape(()), params, materialize_grads=True)
            outcomes.append(_step_outcome(recorder.lines, loss, gradients, recorder.values))
        return outcomes, {name: value.detach().clone() for name, value in state_tensors(self._module).items()}

    def _beside(self, side_by_side: bool) -> tuple[list[list[_StepOutcome]], dict[str, Tensor]]:
        """Return the outcomes of both clients' vectorized steps, and the stacked states after the steps.

        If ``side_by_side`` is False, each client forms a separate group, and the groups run sequentially.
        """
        load_state_tensors(self._module, self._state)
        number, device = len(_CLIENTS), self._module.device
        trainer = StepTrainer(self._module, [], self._optimizer, number, 0, "error")
        trainer.start(_CLIENTS, [self._state] * number, [[]] * number, [{}] * number)
        outcomes_by_client: list[list[_StepOutcome]] = [[] for _ in _CLIENTS]
        groups = group_by_shape(self._batches)
        if not side_by_side:
            groups = [ShapeGroup(torch.tensor([row]), stack_nested([own])) for row, own in enumerate(self._batches)]
        for step in range(_STEPS):
            step_groups = [ShapeGroup(rows.to(device), copy.deepcopy(batch)) for rows, batch in groups]
            with counting(self._module.trainer, step, _STEPS):
                total = trainer.group_losses(step_groups, step if self._numbered else None)
            if total is None:
                raise ObstacleError(Reason.NO_LOSS)
            gradients = trainer.param_gradients(total)
            logged = [
                (lines, tree_map(itemgetter(row), values))
                for (rows, _), (lines, values) in zip(step_groups, trainer.logged, strict=True)
                for row in range(len(rows))
            ]
            for row, client_outcomes in enumerate(outcomes_by_client):
                client_gradients = [torch.zeros_like(p[row]) if g is None else g[row] for p, g in gradients]
                client_outcomes.append(
                    _step_outcome(logged[row][0], trainer.losses[row], client_gradients, logged[row][1])
                )
        return outcomes_by_client, dict(trainer.finish().uploads)


def _step_outcome(
    lines: Sequence[LogEntry | MetricUpdate], loss: Tensor, gradients: Sequence[Tensor], values: Sequence[Any]
) -> _StepOutcome:
    flat = torch.cat([gradient.detach().flatten() for gradient in gradients])
    numbers = torch.cat([flat.new_zeros(0), *(value.detach().to(flat).flatten() for value in tree_leaves(values))])
    return _StepOutcome(lines, loss.detach().reshape(()), flat, numbers)


class _NoLogger(DummyLogger):
    """A logger that raises ObstacleError. With a real logger, a vectorized step would log several clients at once."""

    @property
    def experiment(self) -> NoReturn:
        _refuse_logger()

    def log_metrics(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse_logger()

    def __getattr__(self, name: str) -> NoReturn:
        _refuse_logger()


def _refuse_logger() -> NoReturn:
    raise ObstacleError(Reason.LOGGER)


@contextmanager
def _apart(module: L.LightningModule, optimizer: Optimizer) -> Iterator[None]:
    """Temporarily use loggers that raise ObstacleError. Afterwards, also restore the optimizer's groups."""
    trainer, groups = module.trainer, copy.deepcopy(group_values(optimizer))
    loggers = trainer.loggers
    trainer.loggers = [_NoLogger() for _ in loggers]
    try:
        yield
    finally:
        trainer.loggers = loggers
        set_group_values(optimizer, groups)


def _batches(module: L.LightningModule, stream: FederatedStream) -> list[Batch]:
    """Return two batches of the same shape, one for each client.

    Raises:
        ObstacleError: If there are no samples, a batch contains a value that is not a tensor, or the shapes differ.
    """
    if (rows := trial_rows(stream)) is None:
        raise ObstacleError(Reason.NO_SAMPLES)
    for second_rows in (rows[::-1].copy(), rows):
        batches = [prepare_batch(module, stream.get_samples(chosen)) for chosen in (rows, second_rows)]
        for leaf in tree_leaves(batches):
            if not isinstance(leaf, Tensor):
                raise ObstacleError(Reason.BATCH_CONTENT, type(leaf).__name__)
        if len(group_by_shape(batches)) == 1:
            return batches
    raise ObstacleError(Reason.SHAPES)


def _unfit(methods: Sequence[MethodBase], batches: Sequence[Batch]) -> Obstacle | None:
    """Return an obstacle for the first method that needs pairs of inputs and targets if batches are not such pairs."""
    for method in methods:
        if (method.needs.labels or method.needs.logits) and not is_labelled(batches[0]):
            return Obstacle(Reason.METHOD_PAIRS, (type(method).__name__,))
    return None


def _hooked(module: nn.Module) -> list[str]:
    """Return the names of submodules and parameters that have hooks."""
    parts = module.named_modules()
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    names = [name or type(module).__name__ for name, part in parts if any(vars(part)[kind] for kind in kinds)]
    learning = module.named_parameters()
    return names + [name for name, p in learning if p._backward_hooks or p._post_accumulate_grad_hooks]
