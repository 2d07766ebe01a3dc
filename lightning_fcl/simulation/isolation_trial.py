"""A trial before the first round: whether state outside the module changes what the next client uploads."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_fcl.data.datamodule_adapter import TRANSFER_HOOKS, client_modules
from lightning_fcl.data.trainer_access import get_callbacks
from lightning_fcl.errors import format_code_names
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

log = logging.getLogger(__name__)

_MOST = 16
"""The number of changed names up to which each is tried alone."""
_LATER = 3333
"""Counters are also tried with so many times their increase: as in the 10,000th step."""


def isolation_of(federation: Federation) -> Isolation:
    """Find the state outside the module that has to start anew with each client.

    Two clients train for a few steps on a few samples. State that the first one changes, and that changes what the
    second one uploads, starts anew. Everything that the trial changes is undone.
    """
    name = type(federation.module).__name__
    trainer, module = federation.module.trainer, federation.module
    users = [callback for callback in get_callbacks(trainer) if is_users(type(callback))]
    transferring = [
        m for m in client_modules(federation.stream.data) if any(h in functions_in(type(m)) for h in TRANSFER_HOOKS)
    ]
    ignored = map(id, (trainer, trainer.strategy, *trainer.optimizers, *get_callbacks(trainer)))
    outside = Outside(module, [*users, *transferring], ignored)
    if not (outside.functions or outside.names):
        return Isolation(name)
    start = outside.search()
    tried, untried = _sorted_out(outside, start, users)
    steps = TrialSteps(federation, tried)
    if (why := steps.why_not()) is None:
        try:
            carried = _Finding(outside, start, steps).carried(untried)
            return Isolation(name, carried, steps.gathered)
        except Exception as error:  # whatever a user's own code has to say
            start.restore()
            why = f"`{type(error).__name__}: {error}`"
    log.info("State outside `%s` starts anew with each client without a trial: %s.", name, why)
    changing = [p for p, holder in outside.names.items() if isinstance(holder, Callback) and _changes_steps(holder)]
    return Isolation(name, Carried(outside, whole=[*changing, *outside.shared]))


def _changes_steps(callback: Callback) -> bool:
    return not isinstance(callback, MethodBase) and can_change_steps(type(callback))


def _sorted_out(outside: Outside, start: Search, users: Sequence[Callback]) -> tuple[list[Callback], list[str]]:
    """Return the callbacks whose hooks can be tried, and the prefixes of others that can change a step."""
    tried: list[Callback] = []
    untried: list[str] = []
    for prefix, holder in outside.names.items():
        if not isinstance(holder, Callback) or holder not in users:
            continue
        own = functions_in(type(holder))
        hooks = [*own.values()] if isinstance(holder, MethodBase) else [own[n] for n in STEP_HOOKS if n in own]
        if not hooks:
            continue
        closed = [name for name in (*start.unknown, *start.others) if name.startswith(prefix)]
        if closed or outward(reached(hooks, own)):
            untried += [prefix] if _changes_steps(holder) else []
        else:
            tried.append(holder)
    return tried, untried


class _Finding:
    """Finds the state that changes what the second client uploads.

    Args:
        outside: All state outside the module.
        start: The state before the trial.
        steps: Trains the two clients.
    """

    def __init__(self, outside: Outside, start: Search, steps: TrialSteps) -> None:
        self._outside, self._start, self._steps = outside, start, steps

    def carried(self, untried: Sequence[str]) -> Carried | None:
        """Return the state that starts anew."""
        with self._steps.apart():
            try:
                found = self._found()
            finally:
                self._start.restore()
        if not (found or untried):
            return None
        metrics = [name for name in found if name in self._metrics]
        for name in metrics:
            if not can_merge(self._metrics[name]):
                log.warning(
                    "The metric `%s` starts anew with each client, because training reads it. At the end of a round it "
                    "has the last client's values only: torchmetrics cannot merge a `%s`. Use a second metric for the "
                    "values of the round.",
                    name,
                    type(self._metrics[name]).__name__,
                )
        if found:
            log.info("Training reads %s, which starts anew with each client.", format_code_names(sorted(found)))
        return Carried(self._outside, found - {*metrics}, metrics, untried)

    def _found(self) -> set[str]:
        steps, start = self._steps, self._start
        steps.train(0)
        changed = {change.name for change in start.changes()}
        left, later = self._outside.search(), self._outside.search()
        self._metrics = {**start.metrics, **left.metrics}
        steps.name_gathered()
        start.restore()
        if not changed:
            return set()
        self._advance(later)
        self._states = [later, left]
        self._base = self._upload()
        self._noise = _distance(self._base, self._upload())
        if not self._influences(changed):
            return set()
        units: dict[str, set[str]] = {}
        for name in changed:
            metric = next((m for m in self._metrics if name == m or name.startswith(f"{m}.")), name)
            units.setdefault(metric, set()).add(name)
        if len(units) > _MOST:
            return {*units}
        found = {unit for unit, names in units.items() if self._influences(names)}
        rest = {name for unit, names in units.items() if unit not in found for name in names}
        return {*units} if not found or (rest and self._influences(rest)) else found

    def _advance(self, left: Search) -> None:
        """Let counters be as after many more steps."""
        before: dict[str, dict[str, Any]] = {}
        for part in self._start.parts:
            if isinstance(part, NamedValues):
                before.setdefault(part.prefix, {}).update(part.saved)
        for part in left.parts:
            if not isinstance(part, NamedValues) or part.prefix.rstrip(".") in self._metrics:
                continue
            known, saved = before.get(part.prefix, {}), dict(part.saved)
            for name, value in part.saved.items():
                then = known.get(name)
                if type(value) is int and type(then) is int and value > then:
                    saved[name] = then + _LATER * (value - then)
            part.saved = saved

    def _influences(self, names: Collection[str]) -> bool:
        """Return whether state as the first client leaves it changes what the second client uploads."""
        for left in self._states:
            left.restore(names)
            try:
                if _distance(self._base, self._upload()) > 10 * self._noise:
                    return True
            except Exception:  # advanced counters may be beyond the end of a list
                log.debug(
                    "The trial with %s of another client failed.", format_code_names(sorted(names)), exc_info=True
                )
                self._start.restore()
        return False

    def _upload(self) -> State:
        """Return what the second client uploads, and restore the state."""
        state = self._steps.train(1)
        self._start.restore()
        return state


def _distance(left: State, right: State) -> float:
    """Return the largest difference of two states; infinite if their names or shapes differ."""
    if left.keys() != right.keys() or any(left[name].shape != right[name].shape for name in left):
        return float("inf")
    return max((_apart(left[name], right[name]) for name in left), default=0.0)


def _apart(left: Tensor, right: Tensor) -> float:
    return float((left.double() - right.double()).abs().nan_to_num().max()) if left.numel() else 0.0
