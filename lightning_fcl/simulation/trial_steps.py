"""Trial training steps of two clients before the first round. All effects are undone."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from lightning_fcl.data.batching import Batch
from lightning_fcl.data.client_round import ClientRounds
from lightning_fcl.data.reading_check import restored_reading
from lightning_fcl.data.scenarios import IntArray
from lightning_fcl.data.trainer_access import move_batch
from lightning_fcl.federation.aggregation import State, load_state_tensors, state_tensors
from lightning_fcl.federation.protocols import ClientEndListener
from lightning_fcl.local_training.loop_counts import silent
from lightning_fcl.local_training.module_snapshot import ModuleSnapshot
from lightning_fcl.local_training.sequential import SequentialTrainer
from lightning_fcl.local_training.user_code import functions_in, outward, reached
from lightning_fcl.methods.base import MethodBase, make_client
from lightning_fcl.methods.driver import MethodDriver
from lightning_fcl.rng import seed_all
from lightning_fcl.simulation.client_group import ClientGroup
from lightning_fcl.simulation.federation import Federation
from lightning_fcl.simulation.hook_calls import enter, leave

log = logging.getLogger(__name__)

_STEPS = 3
_SAMPLES = 4
_STEP_HOOKS = (
    *("training_step", "forward", "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "backward"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"),
    *("optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "on_before_batch_transfer"),
    *("on_after_batch_transfer", "transfer_batch_to_device"),
)
_END_HOOKS = ("on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end", "on_train_epoch_end")


class TrialSteps:
    """Trains two clients for a few steps on a few of their samples, as Lightning and the strategy train a client.

    The trial trains the module itself, because there may be too little memory for a copy of a large module. Methods of
    this library do not run in the trial.

    Args:
        federation: The federation, at the start of a round.
        callbacks: The users' callbacks whose hooks run.
    """

    def __init__(self, federation: Federation, callbacks: Sequence[Callback]) -> None:
        self._federation, self._progress = federation, federation.current_round
        self._module, self._trainer = federation.module, federation.module.trainer
        self._methods = [callback for callback in callbacks if isinstance(callback, MethodBase)]
        self._driver = [MethodDriver(self._methods)] if self._methods else []
        self._callbacks = [*callbacks, *self._driver]
        self._state = self._federation.server.state
        self._clients = self._chosen()
        self.gathered: list[str] = []

    def _chosen(self) -> list[tuple[str, IntArray, str]]:
        """Return two tuples of a client, its sample indices and their split. Empty if there are no samples."""
        plan = self._federation.stream.plan
        rows = {client: own for client, own in plan.train[self._progress.round_idx].items() if len(own)}
        largest_clients = sorted(rows, key=lambda client: -len(rows[client]))[:2]
        trial_clients = [(client, rows[client], "train") for client in largest_clients]
        if not trial_clients and len(plan.test):  # The server of a deployment has only test samples.
            trial_clients = [(client, plan.test, "test") for client in plan.clients[:2]]
        # If there is a single client, it is used twice, with its samples in reverse order the second time.
        return [*trial_clients[:1], *((client, own[::-1], part) for client, own, part in trial_clients[-1:])]

    def why_not(self) -> str | None:
        """Return the reason why the module cannot train in a trial, or None if it can train."""
        if not self._clients:
            return "no client has samples"
        for kind in {type(part): None for part in self._module.modules()}:
            class_functions = functions_in(kind)
            if name := outward(
                reached([class_functions[hook] for hook in _STEP_HOOKS if hook in class_functions], class_functions)
            ):
                return f"`{kind.__name__}` uses `{name}` in training"
        return None

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Temporarily isolate training from logs, counters and random numbers, and restore the module at the end."""
        federation, plugin = self._federation, self._trainer.precision_plugin
        self._batches = self._read()
        with isolate_rng(), torch.enable_grad(), silent([self._module, *self._callbacks]):
            restore_counts, scaling = self._note_counts(), plugin.state_dict()
            states = [dict(optimizer.state) for optimizer in federation.optimizers]
            self._loose = self._loose_state()
            try:
                with self._in_trial():
                    yield
            finally:
                if scaling:
                    plugin.load_state_dict(scaling)
                federation.local_steps.end_round(federation.optimizers, whole=False)
                for optimizer, state in zip(federation.optimizers, states, strict=True):
                    optimizer.state.clear()
                    optimizer.state.update(state)
                self._loose.restore()
                load_state_tensors(self._module, self._state)
                restore_counts()

    @contextmanager
    def _in_trial(self) -> Iterator[None]:
        """Temporarily replace components of the Trainer and of the federation by the components of the trial."""
        trainer: Any = self._trainer
        federation, progress = self._federation, self._progress
        assert isinstance(federation.local_trainer, SequentialTrainer)
        previous_settings = trainer.callbacks, trainer.loggers, trainer.profiler, trainer.accumulate_grad_batches
        local, client_group, client_groups = federation.local_trainer, progress.client_group, progress.client_groups
        trainer.callbacks, trainer.profiler = self._callbacks, PassThroughProfiler()
        trainer.loggers = [DummyLogger() for _ in trainer.loggers]
        federation.local_trainer = local.with_methods(self._methods)
        try:
            for driver in self._driver:
                driver.setup(trainer, self._module, "fit")
            yield
        finally:
            for driver in self._driver:
                driver.release(self._module)
            for method in self._methods:
                method.client = None
            trainer.callbacks, trainer.loggers, trainer.profiler, trainer.accumulate_grad_batches = previous_settings
            federation.local_trainer, progress.client_group, progress.client_groups = local, client_group, client_groups

    def _read(self) -> list[list[Batch]]:
        """Return the batches that each client trains on in the trial."""
        samples, size = self._federation.stream.samples, min(_SAMPLES, self._federation.stream.batch_size)
        with isolate_rng():
            rows = [(np.resize(own, (_STEPS, size)), part) for _, own, part in self._clients]
            if not samples.is_random:
                return [[samples.get(batch, part) for batch in own] for own, part in rows]
            client_batches = []
            for sample_indices, data_split in rows:
                with restored_reading(samples, sample_indices.flatten(), data_split):
                    client_batches.append([samples.get(batch, data_split) for batch in sample_indices])
            return client_batches

    def _note_counts(self) -> Callable[[], None]:
        """Save Lightning's counters of steps. Return a function that restores them."""
        loop = self._trainer.fit_loop.epoch_loop
        optimizer = loop.automatic_optimization.optim_progress.optimizer
        counters = (optimizer.step, optimizer.zero_grad, loop.manual_optimization.optim_step_progress)
        counts = [vars(part) for counter in counters for part in (counter.current, counter.total)]
        count_copies = [dict(count) for count in counts]

        def restore() -> None:
            for count, previous_count in zip(counts, count_copies, strict=True):
                count.update(previous_count)

        return restore

    def train(self, row: int) -> State:
        """Train the client with number ``row`` as the first client of a round, and return the module's state."""
        federation, module, number = self._federation, self._module, self._progress.round_idx
        restore = self._note_counts()
        name = self._clients[row][0]
        round_client = federation.stream.client_round(name, number)
        clients = ClientRounds.from_rounds([round_client])
        index = np.arange(_STEPS * _SAMPLES).reshape(1, _STEPS, _SAMPLES)
        lengths = np.full((1, _STEPS), _SAMPLES)
        local, epochs = (
            (federation.local_trainer, federation.local_steps.accumulate_grad_batches),
            np.ones(1, dtype=np.int64),
        )
        client_group = ClientGroup(federation, *local, clients, None, epochs, np.full(1, _STEPS), index, lengths)
        seed_all(federation.seed, name, number)
        memories = [
            m.prepare_client_state(make_client(m, module, {}, self._state, round_client)) for m in self._methods
        ]
        federation.local_steps.start(federation.optimizers)
        self._loose.restore()
        client_group.received = [self._state]
        self._progress.client_group, self._progress.client_groups = client_group, deque([client_group])
        federation.local_trainer.start(clients, [self._state], [memories], [{}])
        counters = federation.counters
        counters.begin(self._trainer, client_group, federation.local_steps, federation.optimizers)
        enter(self._trainer, counters)
        try:
            for client_group.step, batch in enumerate(self._batches[row]):
                self._step(batch, client_group.step)
            for listener in self._callbacks:
                if isinstance(listener, ClientEndListener):
                    with counters.client():
                        listener.on_client_end(self._trainer, module, round_client)
        finally:
            counters.end()
            leave(self._trainer)
            restore()
        return {name: value.detach().clone() for name, value in state_tensors(module).items()}

    def _step(self, samples: Batch, number: int) -> None:
        """Take one training step and call its hooks, as Lightning does."""
        trainer, module, loop = self._trainer, self._module, self._trainer.fit_loop.epoch_loop
        batch = trainer.precision_plugin.convert_input(copy.deepcopy(samples))
        batch = move_batch(trainer, batch, RunningStage.TRAINING)
        trainer.accumulate_grad_batches = 1
        if not self._federation.local_steps.is_first_batch:
            trainer.accumulate_grad_batches = number + 1
        self._call("on_train_batch_start", batch, number)
        step_arguments = {"batch": batch}
        if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2):
            step_arguments["batch_idx"] = number
        if module.automatic_optimization:
            output = loop.automatic_optimization.run(trainer.optimizers[0], number, step_arguments)  # type: ignore[arg-type]
        else:
            output = loop.manual_optimization.run(step_arguments)  # type: ignore[arg-type]
        self._call("on_train_batch_end", output, batch, number)

    def _call(self, hook: str, *args: Any) -> None:
        with self._federation.counters.client():
            for callback in self._callbacks:
                getattr(callback, hook)(self._trainer, self._module, *args)
            getattr(self._module, hook)(*args)

    # Attributes that the server's model depends on.

    def name_gathered(self) -> None:
        """Set `gathered` to the attributes that training fills and from which hooks compute the module's state.

        These hooks run at the end of a round.
        """
        self.gathered = self._gathered()

    def _gathered(self) -> list[str]:
        of_class = functions_in(type(self._module))
        hooks = [name for name in _END_HOOKS if name in of_class]
        changed_names = [change.name for change in self._loose.search.changes()]
        if not (hooks and changed_names) or outward(reached([of_class[name] for name in hooks], of_class)):
            return []
        first = self._loose_state().search
        self.train(1)
        second = self._loose_state().search

        def ended(names: Collection[str] | None) -> State | None:
            """Return the module's state after the hooks. None: a hook failed.

            The attributes ``names`` have the first client's values, and other attributes have the second client's
            values. ``names`` of None stands for all attributes.
            """
            second.restore()
            first.restore(names)
            return self._ended(hooks)

        own_state, other_state = ended(()), ended(None)
        gathered_names = []
        if own_state is not None and other_state is not None and not _same(own_state, other_state):
            states_by_name = [(name, ended([name])) for name in dict.fromkeys(changed_names)]
            gathered_names = [
                name for name, state in states_by_name if state is None or not _same(own_state, state)
            ] or changed_names
        self._loose.restore()
        return gathered_names

    def _loose_state(self) -> ModuleSnapshot:
        schedulers = [config.scheduler for config in self._trainer.lr_scheduler_configs]
        return ModuleSnapshot(self._module, self._federation.optimizers, schedulers)

    def _ended(self, hooks: Sequence[str]) -> State | None:
        """Return the module's state after hooks at the end of a round, then restore the module. None: a hook failed."""
        places = [values for part in self._module.modules() for values in _tensors_of(part)]
        previous_dicts = [dict(values) for values in places]
        load_state_tensors(self._module, self._state)
        try:
            for hook in hooks:
                getattr(self._module, hook)()
            return {name: value.detach().clone() for name, value in state_tensors(self._module).items()}
        except Exception:  # The user's code may raise any error.
            return None
        finally:
            for values, previous_values in zip(places, previous_dicts, strict=True):
                values.clear()
                values.update(previous_values)
            load_state_tensors(self._module, self._state)


def _tensors_of(module: nn.Module) -> list[dict[str, Any]]:
    return [vars(module)["_buffers"], vars(module)["_parameters"]]


def _same(first_state: State, second_state: State) -> bool:
    """Return whether the second state contains all tensors of the first state with equal values."""
    return all(name in second_state and torch.equal(value, second_state[name]) for name, value in first_state.items())
