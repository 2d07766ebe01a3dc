"""Trial of methods: the penalty and its gradient must be equal in a vectorized step and for a single client."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from lightning_fcl.data.batching import Batch
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.collation import stack_nested
from lightning_fcl.data.trainer_access import find_stream
from lightning_fcl.federation.aggregation import State, load_state_tensors, state_tensors
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.federation.obstacles import Obstacle, Reason, obstacle_of
from lightning_fcl.local_training.drawn import Composition, Drawer, is_close
from lightning_fcl.local_training.module_snapshot import ModuleSnapshot
from lightning_fcl.local_training.sequential import client_round_keys, step_keys
from lightning_fcl.local_training.stacked_trainer import StackedTrainer, stack
from lightning_fcl.local_training.vectorized import VectorizedTrainer
from lightning_fcl.local_training.vmap_training_step import StepTrainer
from lightning_fcl.methods.base import MethodBase, make_client, overrides_hook
from lightning_fcl.methods.compose import compose
from lightning_fcl.methods.context import is_labelled, without_call
from lightning_fcl.methods.driver import step_of
from lightning_fcl.methods.functional import trainable_parameters
from lightning_fcl.methods.keyed_dropout import KeyedRandomness
from lightning_fcl.methods.replay_samples import DrawnSamples
from lightning_fcl.validation import format_code_names

_SEED = 5923
_NAMES = ("a", "b")  # clients of the vectorized step in the trial
_NEW = object()
_PADDING = 5
_SCALE = 3.0  # standard deviation of random outputs
_COMPOSITIONS = (Composition.EACH, Composition.UNEQUAL)


class _Shaped(NamedTuple):
    """The result of a method for one client: the factor of the task loss, the penalty, and the penalty's gradients."""

    factor: Tensor
    penalty: Tensor
    of_params: Tensor
    of_output: Tensor


@dataclass(frozen=True)
class _Inputs:
    """Inputs of a vectorized step with two clients.

    Args:
        parts: The `ClientRound` of each client.
        states: The clients' states.
        memories: The clients' method states.
        server: The state that the clients have downloaded, including the method's entries on the server.
        batches: The clients' batches.
        outputs: The module's outputs for the batches.
        weight: Weight of each row in the mean of its client, shape (clients, rows). None: equal weights.
    """

    parts: Sequence[ClientRound]
    states: Sequence[State]
    memories: Sequence[StateSection]
    server: State
    batches: Sequence[Batch]
    outputs: Sequence[Tensor]
    weight: Tensor | None = None


def method_obstacle(
    module: L.LightningModule, methods: Sequence[MethodBase], optimizer: Optimizer, batch: Batch, padded: bool
) -> Obstacle | None:
    """Return an obstacle for the first method that cannot be vectorized, or None.

    The trial runs each method that changes the loss twice: in a vectorized step, and for one client alone. The factor
    of the task loss, the penalty and the gradient of the penalty must be equal. If batches are padded, the gradient of
    padding must be 0, and padding must not change the gradients of other rows.

    Args:
        module: A copy of the module, with its Trainer.
        methods: The methods of the Trainer.
        optimizer: The optimizer of the module.
        batch: A batch of training samples.
        padded: Whether batches are padded.
    """
    trial = None
    with _first_round(module.trainer):
        for method in methods:
            if overrides_hook(method, "penalty") or overrides_hook(method, "task_weight"):
                trial = trial or _MethodTrial(module, optimizer, batch, padded)
                if obstacle := trial.find_obstacle(method):
                    return obstacle
    return None


@contextmanager
def _first_round(trainer: L.Trainer) -> Iterator[None]:
    """Temporarily set the Trainer to its first round, so that the trial has the same result in a resumed fit."""
    progress: Any = trainer.fit_loop.epoch_progress.current
    processed, progress.processed = progress.processed, 0
    try:
        yield
    finally:
        progress.processed = processed


class _MethodTrial:
    """A trial of methods on a copy of a module. See `method_obstacle`."""

    def __init__(self, module: L.LightningModule, optimizer: Optimizer, batch: Batch, padded: bool) -> None:
        self._module, self._optimizer, self._batch, self._padded = module, optimizer, batch, padded
        self._device = module.device
        self._generator = torch.Generator().manual_seed(_SEED)
        keys = client_round_keys(_SEED, [ClientRound(name, 0) for name in _NAMES], "layers")
        self._keys = step_keys(keys, 0).to(self._device)
        stream = find_stream(module.trainer)
        self._num_classes = 0 if stream is None else stream.num_classes
        self._begun = {name: value.detach().clone() for name, value in state_tensors(module).items()}
        self._output = self._forward()
        self._why = without_call(module) if self._output is None else None

    def _forward(self) -> Tensor | None:
        """Return the module's output for the batch, or None if the output is not a tensor with one row per sample."""
        if not is_labelled(self._batch):
            return None
        try:
            with KeyedRandomness(self._keys[0]).recomputable():
                output = self._module(self._batch[0])
        except Exception:  # The module may not define `forward`, and its training step may not need it.
            return None
        finally:
            load_state_tensors(self._module, self._begun)
        return output if isinstance(output, Tensor) and output.shape[:1] == self._batch[1].shape[:1] else None

    def find_obstacle(self, method: MethodBase) -> Obstacle | None:
        """Return the obstacle to vectorizing a method, or None if there is no obstacle."""
        contents = _contents(method)
        try:
            for inputs in self._inputs(method):
                try:
                    expected, changed_names = self._alone(_copied(method), inputs)
                except Exception:  # If the method itself has an error, the error occurs again in training.
                    return None
                if changed_names:
                    return Obstacle(Reason.METHOD_STATE, (type(method).__name__, format_code_names(changed_names)))
                if obstacle := self._compared(method, inputs, expected):
                    return obstacle
            return None
        finally:
            contents.restore()

    def _compared(self, method: MethodBase, inputs: _Inputs, expected: _Shaped) -> Obstacle | None:
        """Return an obstacle if the vectorized result differs from the result of the client alone, otherwise None."""
        name = type(method).__name__
        for padding in (0, _PADDING) if self._padded else (0,):
            trial_inputs = self._with_padding(inputs, padding) if padding else inputs
            try:
                actual = self._vectorized(_copied(method), trial_inputs)
            except Exception as error:  # User code may raise any exception. Such a method cannot be vectorized.
                obstacle = obstacle_of(error)
                return Obstacle(Reason.METHOD_FAILS, (name, *obstacle.details)) if obstacle.details else obstacle
            # The gradient of padding must be 0.
            num_padding_rows = len(actual.of_output) - len(expected.of_output)
            if not all(
                map(is_close, actual, expected._replace(of_output=F.pad(expected.of_output, (0, num_padding_rows))))
            ):
                return Obstacle(Reason.METHOD_PADDING if padding else Reason.METHOD_DIFFERS, (name,))
        return None

    # The input of the trial.

    def _inputs(self, method: MethodBase) -> Iterator[_Inputs]:
        """Yield inputs with random targets. The method states are from a first round, from a later round, or random."""
        for composition in _COMPOSITIONS:
            batches, outputs = self._batches(composition)
            parts = [self._part(name, batch) for name, batch in zip(_NAMES, batches, strict=True)]
            server_entries = {
                f"{method.section_name}.{n}": v for n, v in _copied(method).init_server_state(self._module).items()
            }
            server: State = {**self._begun, **server_entries}
            clients = [make_client(method, self._module, {}, server, part) for part in parts]
            memories: Sequence[StateSection]
            try:
                memories = [_copied(method).prepare_client_state(client) for client in clients]
            except Exception:  # The method may need client data that the trial does not have.
                memories = [{} for _ in clients]
            learning = {name: self._begun[name] for name in trainable_parameters(self._module)}
            states = [{**self._begun, **self._drawn(learning)} for _ in _NAMES]
            inputs = _Inputs(parts, states, memories, server, batches, outputs)
            yield inputs
            if (later_inputs := self._later(method, inputs)) is not None:
                yield later_inputs
                memories = later_inputs.memories
            random_memories = [self._drawn(memory) for memory in memories]
            yield replace(inputs, memories=random_memories, server={**server, **self._drawn(server_entries)})

    def _later(self, method: MethodBase, inputs: _Inputs) -> _Inputs | None:
        """Return the inputs in a later experience, or None if the method updates no state or an update fails."""
        if not (overrides_hook(method, "update_client_state") or overrides_hook(method, "end_experience")):
            return None
        parts = [
            replace(part, round_idx=part.round_idx + 1, experience_idx=part.experience_idx + 1) for part in inputs.parts
        ]
        memories: list[StateSection] = []
        try:
            with isolate_rng():
                for row, (client_round, later_round) in enumerate(zip(inputs.parts, parts, strict=True)):
                    data, client_state = inputs.batches[row] if method.needs.round_samples else None, inputs.states[row]
                    load_state_tensors(self._module, client_state)
                    client = make_client(method, self._module, dict(inputs.memories[row]), inputs.server, client_round)
                    client.method_state = _copied(method).update_client_state(client, client_state, data)
                    client.method_state = _copied(method).end_experience(client, client_state, data)
                    client = make_client(method, self._module, client.method_state, inputs.server, later_round)
                    memories.append(_copied(method).prepare_client_state(client))
        except Exception:  # The method may need client data that the trial does not have.
            return None
        finally:
            load_state_tensors(self._module, self._begun)
        return replace(inputs, parts=parts, memories=memories)

    def _batches(self, composition: Composition) -> tuple[list[Batch], list[Tensor]]:
        """Return a batch with random targets for each client, and random outputs for each batch.

        A batch without targets is returned unchanged. If the module has no output for the batch, each output is 0.
        """
        if not is_labelled(self._batch):
            return [self._batch] * len(_NAMES), [torch.zeros((), device=self._device)] * len(_NAMES)
        x, y = self._batch
        drawer = Drawer(y, y.new_zeros(len(y), 1) if self._output is None else self._output, self._num_classes)
        batches = [[x, drawer.targets(composition, len(y))] for _ in _NAMES]
        if self._output is None:
            return batches, [torch.zeros((), device=self._device)] * len(_NAMES)
        return batches, [drawer.outputs(_SCALE, len(y)) for _ in _NAMES]

    def _part(self, client: str, batch: Batch) -> ClientRound:
        """Return a `ClientRound` of the second experience. The upper half of the classes is new."""
        half, classes, samples = self._num_classes // 2, range(self._num_classes), 0
        labels = torch.empty(0, dtype=torch.long)
        if is_labelled(batch):
            samples = len(batch[1])
            if classes and batch[1].dim() == 1 and not batch[1].is_floating_point():
                labels = batch[1].cpu().long()
        new, old = tuple(classes[half:]), tuple(classes[:half])
        return ClientRound(client, 1, 1, labels, len(classes), False, samples, new_classes=new, old_classes=old)

    def _drawn(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a state with noise added to floats. Boolean tensors become random, with about half True."""
        random_values = {}
        for name, value in state.items():
            numbers = torch.rand(value.shape, generator=self._generator).to(value.device)
            is_mask = value.dtype == torch.bool and value.numel() > 0
            random_values[name] = numbers <= numbers.median() if is_mask else value
            if value.is_floating_point():
                random_values[name] = value + 0.2 * numbers.to(value.dtype)
        return random_values

    def _with_padding(self, inputs: _Inputs, padding: int) -> _Inputs:
        """Return the inputs with added rows. The rows are padding for the first client and samples for the second."""
        batches = [[torch.cat([part, part[:padding]]) for part in batch] for batch in inputs.batches]
        outputs = []
        for output in inputs.outputs:
            padding_rows = torch.randn((padding, *output.shape[1:]), generator=self._generator).to(output)
            outputs.append(torch.cat([output, 2 * _SCALE * padding_rows]))
        rows, num_samples = len(outputs[0]), len(inputs.outputs[0])
        weight = torch.full((len(_NAMES), rows), 1 / rows, device=self._device)
        weight[0] = (torch.arange(rows, device=self._device) < num_samples) / num_samples
        return replace(inputs, batches=batches, outputs=outputs, weight=weight)

    # The result of a method.

    def _alone(self, method: MethodBase, inputs: _Inputs) -> tuple[_Shaped, list[str]]:
        """Return the first client's result in sequential training, and the names of the changed method attributes."""
        module, client_round, batch = self._module, inputs.parts[0], inputs.batches[0]
        load_state_tensors(module, inputs.states[0])
        client = make_client(method, module, inputs.memories[0], inputs.server, client_round)
        client.batch, method.client = batch, client
        method.start_client(client)
        attributes, contents = dict(vars(method)), _contents(method)
        output = inputs.outputs[0].clone().requires_grad_()
        step = step_of(module, inputs.server, batch[0] if is_labelled(batch) else None, output)
        step.y = batch[1] if is_labelled(batch) else None
        step = DrawnSamples([method], [[client]], partial(client_round_keys, _SEED, [client_round], "recall")).step(
            method, step
        )
        if self._why is not None:
            step = step.without_batch(self._why % type(method).__name__)
        with KeyedRandomness(self._keys[0]).recomputable():
            factor, penalty = compose([method], [client], [step], torch.zeros((), device=self._device))
        new = [name for name, value in vars(method).items() if attributes.get(name, _NEW) is not value]
        shaped = _shaped(torch.as_tensor(factor, device=self._device), penalty, trainable_parameters(module), output)
        return shaped, sorted({*new, *contents.changes()})

    def _vectorized(self, method: MethodBase, inputs: _Inputs) -> _Shaped:
        """Return the first client's result in a vectorized step."""
        module, number = self._module, len(_NAMES)
        load_state_tensors(module, self._begun)
        kind = VectorizedTrainer if self._padded else StepTrainer
        trainer: StackedTrainer = kind(module, [method], self._optimizer, number, _SEED)
        trainer.start(inputs.parts, [inputs.server] * number, [[memory] for memory in inputs.memories], [{}] * number)
        with torch.no_grad():
            for name, value in stack(inputs.states).items():
                if name in trainer.params:
                    trainer.params[name].copy_(value)
        output = torch.stack(list(inputs.outputs)).requires_grad_()

        def composed(
            params: State,
            rest: State,
            method_inputs: Mapping[str, Any],
            key: Tensor,
            batch: Batch,
            output: Tensor,
            weight: Any,
        ) -> tuple[Tensor, Tensor]:
            x, y = batch if is_labelled(batch) else (None, None)
            with KeyedRandomness(key):
                return trainer.compose_in_vmap(params, rest, method_inputs, x, output, y, weight, self._why)

        axes = (0, 0, 0, 0, 0, 0, None if inputs.weight is None else 0)
        with sdpa_kernel(SDPBackend.MATH):
            factor, penalty = vmap(composed, in_dims=axes, randomness="error")(
                dict(trainer.params),
                trainer.untrained_state,
                trainer.method_inputs(self._device),
                self._keys,
                stack_nested(inputs.batches),
                output,
                inputs.weight,
            )
        return _shaped(factor[0], penalty[0], trainer.params, output, first=True)


def _shaped(
    factor: Tensor, penalty: Tensor, params: Mapping[str, Tensor], output: Tensor, first: bool = False
) -> _Shaped:
    """Return a method's result with the gradients of the penalty. If ``first`` is True, use only the first client."""
    leaves = [*params.values(), output]
    gradients: Sequence[Tensor] = [torch.zeros_like(leaf) for leaf in leaves]
    if penalty.requires_grad:
        gradients = torch.autograd.grad(penalty, leaves, materialize_grads=True)
    flat = [(gradient[0] if first else gradient).flatten() for gradient in gradients]
    return _Shaped(factor.detach(), penalty.detach(), torch.cat(flat[:-1]), flat[-1])


def _copied(method: MethodBase) -> MethodBase:
    """Return a copy of a method. The copy applies to all clients."""
    method = copy.copy(method)
    method.clients = "all"
    return method


def _contents(method: MethodBase) -> ModuleSnapshot:
    """Return a snapshot of a method's attributes and their contents."""
    holder = nn.Module()
    vars(holder).update(vars(method))
    return ModuleSnapshot(holder)
