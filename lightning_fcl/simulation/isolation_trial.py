"""A trial before the first round. It finds state outside the module that changes the upload of the next client."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_fcl.data.datamodule_adapter import TRANSFER_HOOKS, client_modules
from lightning_fcl.data.trainer_access import get_callbacks
from lightning_fcl.federation.aggregation import State
from lightning_fcl.local_training.outside import Carried, Outside, can_merge
from lightning_fcl.local_training.search import Search
from lightning_fcl.local_training.user_code import (
    STEP_HOOKS,
    can_change_steps,
    functions_in,
    is_users,
    outward,
    reached,
)
from lightning_fcl.methods.base import MethodBase
from lightning_fcl.simulation.federation import Federation
from lightning_fcl.simulation.isolation import Isolation
from lightning_fcl.simulation.trial_steps import TrialSteps
from lightning_fcl.snapshot_values import NamedValues
from lightning_fcl.validation import format_code_names

log = logging.getLogger(__name__)

_MOST = 16
"""Maximum number of changed attributes and metrics that are tested individually. If there are more, all are reset."""
_LATER = 3333
"""Factor for the increase of counters in one of the tests. The counters then have the values of about 10,000 steps."""


def isolation_of(federation: Federation) -> Isolation:
    """Return the state outside the module that must be reset for each client.

    Two clients train for a few steps on a few samples. State is reset for each client if the first client changes the
    state and if this change affects the upload of the second client. All effects of the trial are undone. If the trial
    is not possible, state is reset without a test.
    """
    name = type(federation.module).__name__
    trainer, module = federation.module.trainer, federation.module
    users = [callback for callback in get_callbacks(trainer) if is_users(type(callback))]
    transferring = [
        m for m in client_modules(federation.stream.data) if any(h in functions_in(type(m)) for h in TRANSFER_HOOKS)
    ]
    ignored = map(id, (trainer, trainer.strategy, *trainer.optimizers, *get_callbacks(trainer)))
    outside_state = Outside(module, [*users, *transferring], ignored)
    if not (outside_state.functions or outside_state.names):
        return Isolation(name)
    start = outside_state.search()
    trial_callbacks, untried_prefixes = _sorted_out(outside_state, start, users)
    steps = TrialSteps(federation, trial_callbacks)
    if (reason := steps.why_not()) is None:
        try:
            carried = _Finding(outside_state, start, steps).carried(untried_prefixes)
            return Isolation(name, carried, steps.gathered)
        except Exception as error:  # The user's code may raise any error.
            start.restore()
            reason = f"`{type(error).__name__}: {error}`"
    log.info(
        "State outside `%s` is reset for each client. It could not be tested whether this is necessary: %s.",
        name,
        reason,
    )
    changing = [
        p for p, holder in outside_state.names.items() if isinstance(holder, Callback) and _changes_steps(holder)
    ]
    return Isolation(name, Carried(outside_state, whole=[*changing, *outside_state.shared]))


def _changes_steps(callback: Callback) -> bool:
    return not isinstance(callback, MethodBase) and can_change_steps(type(callback))


def _sorted_out(outside_state: Outside, start: Search, users: Sequence[Callback]) -> tuple[list[Callback], list[str]]:
    """Return the callbacks to test, and the name prefixes of untested callbacks that can change a step."""
    trial_callbacks: list[Callback] = []
    untried_prefixes: list[str] = []
    for prefix, holder in outside_state.names.items():
        if not isinstance(holder, Callback) or holder not in users:
            continue
        class_functions = functions_in(type(holder))
        hooks = (
            [*class_functions.values()]
            if isinstance(holder, MethodBase)
            else [class_functions[n] for n in STEP_HOOKS if n in class_functions]
        )
        if not hooks:
            continue
        unknown_names = [name for name in (*start.unknown, *start.others) if name.startswith(prefix)]
        if unknown_names or outward(reached(hooks, class_functions)):
            untried_prefixes += [prefix] if _changes_steps(holder) else []
        else:
            trial_callbacks.append(holder)
    return trial_callbacks, untried_prefixes


class _Finding:
    """Finds the state that changes the upload of the second client.

    Args:
        outside_state: All state outside the module.
        start: The state before the trial.
        steps: The trial steps, which train the two clients.
    """

    def __init__(self, outside_state: Outside, start: Search, steps: TrialSteps) -> None:
        self._outside, self._start, self._steps = outside_state, start, steps

    def carried(self, untried_prefixes: Sequence[str]) -> Carried | None:
        """Return the state that must be reset for each client. None: no such state."""
        with self._steps.apart():
            try:
                influential_names = self._influential_names()
            finally:
                self._start.restore()
        if not (influential_names or untried_prefixes):
            return None
        metrics = [name for name in influential_names if name in self._metrics]
        for name in metrics:
            if not can_merge(self._metrics[name]):
                log.warning(
                    "The metric `%s` is reset for each client, because training reads it. At the end of a round it has "
                    "only the values of the last client, because torchmetrics cannot merge metrics of type `%s`. Use a "
                    "second metric for the values of the round.",
                    name,
                    type(self._metrics[name]).__name__,
                )
        if influential_names:
            log.info(
                "Training reads %s. This state is reset for each client.",
                format_code_names(sorted(influential_names)),
            )
        return Carried(self._outside, influential_names - {*metrics}, metrics, untried_prefixes)

    def _influential_names(self) -> set[str]:
        steps, start = self._steps, self._start
        steps.train(0)
        changed_names = {change.name for change in start.changes()}
        trained_state, advanced_state = self._outside.search(), self._outside.search()
        self._metrics = {**start.metrics, **trained_state.metrics}
        steps.name_gathered()
        start.restore()
        if not changed_names:
            return set()
        self._advance(advanced_state)
        self._states = [advanced_state, trained_state]
        self._base = self._upload()
        self._noise = _distance(self._base, self._upload())
        if not self._influences(changed_names):
            return set()
        units: dict[str, set[str]] = {}
        for name in changed_names:
            metric = next((m for m in self._metrics if name == m or name.startswith(f"{m}.")), name)
            units.setdefault(metric, set()).add(name)
        if len(units) > _MOST:
            return {*units}
        influential_names = {unit for unit, names in units.items() if self._influences(names)}
        rest = {name for unit, names in units.items() if unit not in influential_names for name in names}
        return {*units} if not influential_names or (rest and self._influences(rest)) else influential_names

    def _advance(self, advanced_state: Search) -> None:
        """Increase the counters of a saved state as if many more steps had been taken."""
        initial_by_prefix: dict[str, dict[str, Any]] = {}
        for record in self._start.parts:
            if isinstance(record, NamedValues):
                initial_by_prefix.setdefault(record.prefix, {}).update(record.saved)
        for record in advanced_state.parts:
            if not isinstance(record, NamedValues) or record.prefix.rstrip(".") in self._metrics:
                continue
            initial_values, advanced_values = initial_by_prefix.get(record.prefix, {}), dict(record.saved)
            for name, value in record.saved.items():
                initial_value = initial_values.get(name)
                if type(value) is int and type(initial_value) is int and value > initial_value:
                    advanced_values[name] = initial_value + _LATER * (value - initial_value)
            record.saved = advanced_values

    def _influences(self, names: Collection[str]) -> bool:
        """Return whether the first client's changes of ``names`` affect the upload of the second client."""
        for state in self._states:
            state.restore(names)
            try:
                if _distance(self._base, self._upload()) > 10 * self._noise:
                    return True
            except Exception:  # An advanced counter may be a wrong index of a list.
                log.debug(
                    "The trial with the first client's values of %s failed.",
                    format_code_names(sorted(names)),
                    exc_info=True,
                )
                self._start.restore()
        return False

    def _upload(self) -> State:
        """Train the second client, restore the state from before the trial, and return the client's upload."""
        state = self._steps.train(1)
        self._start.restore()
        return state


def _distance(first_state: State, second_state: State) -> float:
    """Return the largest difference between tensors of two states. Return infinity if names or shapes differ."""
    if first_state.keys() != second_state.keys() or any(
        first_state[name].shape != second_state[name].shape for name in first_state
    ):
        return float("inf")
    return max((_apart(first_state[name], second_state[name]) for name in first_state), default=0.0)


def _apart(first_tensor: Tensor, second_tensor: Tensor) -> float:
    return (
        float((first_tensor.double() - second_tensor.double()).abs().nan_to_num().max())
        if first_tensor.numel()
        else 0.0
    )
